"""The families of encoder-decoders: T5 and its kin, BART and mBART."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gspmd_lm import config
from gspmd_lm.config import paths
from gspmd_lm.convert.config_reader import LARGEST, ConfigReader
from gspmd_lm.convert.family import BIASES, ONE_WIDTH, PLAIN_LAYERNORM, TIED, Family, heads
from gspmd_lm.convert.fields import ACTIVATIONS, MOST_LAYERS, Activation, Constant, Fixed, Flag, Renamed, Values
from gspmd_lm.convert.layout import Tensor
from gspmd_lm.convert.names import linear, norm, separate_qkv
from gspmd_lm.convert.sidecars import GENERATION
from gspmd_lm.convert.strict_json import parse_object
from gspmd_lm.errors import InputError, is_whole_number


@dataclasses.dataclass(frozen=True)
class EncoderPart:
    """What a config.json says of the encoder alone, of the token that stands before a text, and of a text's first."""

    # Setting -> the names of the field that states it, as for Renamed. In all others, the encoder is as the decoder.
    names: Mapping[str, str]
    start_token: int  # of a config.json that says none
    of_language: bool = False  # whether it is then that of a language, which only its user knows (mBART)

    def read(self, reader: ConfigReader, values: Values) -> None:
        most = {"layers": MOST_LAYERS}
        encoder = {
            setting: reader.number(names.split(), most=most.get(setting, LARGEST))
            for setting, names in self.names.items()
        }
        if "heads" in encoder:
            encoder |= {"kv_heads": encoder["heads"], "head_dim": values["embed"] // encoder["heads"]}
        start = reader.whole(["decoder_start_token_id"], self.start_token, 0)
        if self.of_language and reader.get(["decoder_start_token_id"]) is None:
            reader.notes.append(
                f"decoder_start_token_id: none: token {start} stands before a text until model.encoder.start_token is "
                "that of its language"
            )
        if reader.get(["forced_bos_token_id"]) is not None:
            encoder |= {"first_tokens": [reader.whole(["forced_bos_token_id"], 0, 0)]}
        values["encoder"] = encoder | {"start_token": start}

    def write(self, model: config.ModelConfig) -> dict[str, Any]:
        if not (model.encoder and model.of_encoder):
            return {}
        sizes = {names.split()[0]: getattr(model.of_encoder, setting) for setting, names in self.names.items()}
        start, first = model.encoder.start_token, model.encoder.first_tokens
        written = {"forced_bos_token_id": first[0]} if first and not model.frames else {}
        return {"is_encoder_decoder": True, **sizes, "decoder_start_token_id": start, **written}


def generation(folder: Path) -> dict[str, list[int]]:
    """The setting of model.encoder with which texts begin as generation_config.json of a folder forces them to.

    {} if there is no such file, or if it forces nothing. Raises InputError for what is no token.
    """
    path = folder / GENERATION
    forced = parse_object(paths.read_text(path), path).get("forced_bos_token_id") if path.is_file() else None
    if forced is None:
        return {}
    if not is_whole_number(forced, 0):
        raise InputError(f"{path}: forced_bos_token_id={forced}: is not a token\n  fix   correct or remove it")
    return {"first_tokens": [forced]}


@dataclasses.dataclass(frozen=True)
class Distances:
    """T5's biases of attention by ranges of distances. shared: whether all layers have the same."""

    shared: bool = True

    def read(self, reader: ConfigReader, values: Values) -> None:
        ranges = reader.number(["relative_attention_num_buckets"], 32)
        distance = reader.number(["relative_attention_max_distance"], 128)
        values["relative_positions"] = {"ranges": ranges, "distance": distance, "shared": self.shared}

    def write(self, model: config.ModelConfig) -> dict[str, Any]:
        if not (relative := model.relative_positions):
            return {}
        names = ("relative_attention_num_buckets", "relative_attention_max_distance")
        return dict(zip(names, (relative.ranges, relative.distance), strict=True))


@dataclasses.dataclass(frozen=True)
class FeedForward:
    """T5's feed_forward_proj: 'relu', or 'gated-gelu', whose gelu is that of tanh; and the two fields made of it."""

    default: str

    def read(self, reader: ConfigReader, values: Values) -> None:
        word = reader.get(["feed_forward_proj"], self.default)
        gate, dash, name = word.rpartition("-") if isinstance(word, str) else ("", "", "")
        name = "gelu_new" if word == "gated-gelu" else name
        gated, known = bool(dash), name in ACTIVATIONS and gate in ("", "gated")
        if not known:
            reader.refuse("feed_forward_proj", word, f"is not one of {', '.join(ACTIVATIONS)}, or gated-...")
        for field, wanted in (("dense_act_fn", name), ("is_gated_act", gated)):
            if known and (value := reader.get([field], wanted)) != wanted:
                reader.refuse(field, value, f"contradicts feed_forward_proj: {word}")
        values["mlp_kind"] = "gated" if gated else "plain"
        values["activation"] = ACTIVATIONS.get(name, "relu")

    def write(self, model: config.ModelConfig) -> dict[str, Any]:
        gated, name = model.mlp_kind == "gated", model.activation
        if gated:
            word = "gated-gelu" if name == "gelu_tanh" else f"gated-{name}"
        else:
            word = "gelu_new" if name == "gelu_tanh" else name
        return {"feed_forward_proj": word, "dense_act_fn": "gelu_new" if name == "gelu_tanh" else name,
                "is_gated_act": gated}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class T5Head:
    """T5's logits: with the token table, of hidden states times embed ** -0.5, or with a table of their own.

    transformers 5 writes tie_word_embeddings: true for both, and scale_decoder_outputs, which tells them apart. null is
    false there.
    """

    def read(self, reader: ConfigReader, values: Values) -> None:
        tied = reader.flag(["tie_word_embeddings"], True)
        scaled = reader.flag(["scale_decoder_outputs"], tied and "scale_decoder_outputs" not in reader.raw)
        values["tied_embeddings"] = tied and scaled
        values["logit_scale"] = values["embed"] ** -0.5 if scaled else 1.0

    def write(self, model: config.ModelConfig) -> dict[str, Any]:
        return {"tie_word_embeddings": model.tied_embeddings, "scale_decoder_outputs": model.logit_scale != 1}


_T5_LAYERS = "num_layers num_hidden_layers"
_T5 = (
    Renamed("vocab_size", "vocab"), Renamed("d_model hidden_size", "embed"), Renamed("d_kv head_dim", "head_dim", 64),
    Renamed("d_ff", "mlp"), Renamed("num_heads num_attention_heads", "heads"), Constant("kv_heads", heads),
    Renamed(_T5_LAYERS, "layers", most=MOST_LAYERS),
    Renamed("num_decoder_layers", "layers", lambda values: values["layers"], most=MOST_LAYERS),
    Renamed("n_positions", "context", 512), Renamed("layer_norm_epsilon", "norm_eps", 1e-6),
    Constant("positions", "none"), Constant("query_scale", 1.0),
)  # fmt: skip


def _t5_attention(prefix: str, number: int, name: str, ours: str) -> tuple[Tensor, ...]:
    layer, spec = f"{prefix}.block.{{}}.layer.{number}", {"q": "(N H) D", "k": "(K H) D", "v": "(K H) D"}
    return (
        *(Tensor(f"{layer}.{name}.{one}.weight", axes, (f"{ours}.w{one}",)) for one, axes in spec.items()),
        Tensor(f"{layer}.{name}.o.weight", "D (N H)", (f"{ours}.wo",)),
        *norm(f"{layer}.layer_norm", f"{ours}_norm"),
    )


def _t5_stack(prefix: str, ours: str, mlp: int, distances: str) -> tuple[Tensor, ...]:
    """The tensors of a stack whose MLP is the part of a block with that number. distances: the layer that has them."""
    layer = f"{prefix}.block.{{}}.layer.{mlp}"
    feed = f"{layer}.DenseReluDense"
    return (
        *_t5_attention(prefix, 0, "SelfAttention", f"{ours}attention"),
        Tensor(f"{prefix}.block.{distances}.layer.0.SelfAttention.relative_attention_bias.weight", "r N",
               (f"{ours}relative_bias" if distances == "0" else f"{ours}attention.relative_bias",)),
        Tensor(f"{feed}.wi.weight", "F D", (f"{ours}mlp.w_up",), is_of=lambda model: model.mlp_kind == "plain"),
        Tensor(f"{feed}.wi_0.weight", "F D", (f"{ours}mlp.w_gate",)),
        Tensor(f"{feed}.wi_1.weight", "F D", (f"{ours}mlp.w_up",), is_of=lambda model: model.mlp_kind == "gated"),
        Tensor(f"{feed}.wo.weight", "D F", (f"{ours}mlp.w_down",)),
        *norm(f"{layer}.layer_norm", f"{ours}mlp_norm"),
        *norm(f"{prefix}.final_layer_norm", f"{ours}final_norm"),
    )  # fmt: skip


def _t5(distances: str) -> tuple[Tensor, ...]:
    return (
        Tensor("shared.weight", "V D", ("embedding",)),
        *_t5_stack("encoder", "encoder.", 1, distances),
        *_t5_stack("decoder", "", 2, distances),
        *_t5_attention("decoder", 1, "EncDecAttention", "cross"),
        Tensor("lm_head.weight", "V D", ("unembedding",)),
    )


def bart_attention(name: str, ours: str, norms: str) -> tuple[Tensor, ...]:
    return (
        *separate_qkv(name, ours=ours),
        *linear(f"{name}.out_proj", "D (N H)", f"{ours}.wo"),
        *norm(f"{name}_layer_norm", f"{ours}_{norms}", bias=True),
    )


def bart_stack(prefix: str, ours: str, norms: str, positions: str = "position_embedding") -> tuple[Tensor, ...]:
    layer = f"{prefix}.layers.{{}}"
    return (
        Tensor(f"{prefix}.embed_positions.weight", "p D", (f"{ours}{positions}",)),
        *norm(f"{prefix}.layernorm_embedding", f"{ours}embedding_norm", bias=True),
        *bart_attention(f"{layer}.self_attn", f"{ours}attention", norms),
        *linear(f"{layer}.fc1", "F D", f"{ours}mlp.w_up"),
        *linear(f"{layer}.fc2", "D F", f"{ours}mlp.w_down"),
        *norm(f"{layer}.final_layer_norm", f"{ours}mlp_{norms}", bias=True),
        *norm(f"{prefix}.layer_norm", f"{ours}final_norm", bias=True),
    )


def _bart(norms: str) -> tuple[Tensor, ...]:
    """BART's tensors. norms: sum_norm where norms stand after the sums, norm where they stand before sublayers."""
    return (
        Tensor("model.shared.weight", "V D", ("embedding",)),
        *bart_stack("model.encoder", "encoder.", norms),
        *bart_stack("model.decoder", "", norms),
        *bart_attention("model.decoder.layers.{}.encoder_attn", "cross", norms),
        Tensor("final_logits_bias", "1 V", ("unembedding_bias",)),
        Tensor("lm_head.weight", "V D", ("unembedding",)),
    )


# The table of T5's first layer is that of all layers; older files have one of a layer that transformers never had.
_UNUSED = (r"^decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight$",)
_COPIES = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
_BEFORE, _AFTER = "has other norms, which are not supported", "adds an array, which is not supported"
_BART = (
    Renamed("vocab_size", "vocab"), Renamed("d_model hidden_size", "embed"), Renamed("decoder_ffn_dim", "mlp"),
    Renamed("decoder_layers", "layers", most=MOST_LAYERS), Renamed("decoder_attention_heads", "heads"),
    Renamed("max_position_embeddings", "context", 1024), *ONE_WIDTH, *PLAIN_LAYERNORM, Constant("norm_eps", 1e-5),
    Activation("activation_function", "gelu", {"gelu_tanh": "gelu_new"}), Constant("positions", "learned"),
    Constant("position_offset", 2), Constant("embedding_norm", True), Constant("unembedding_bias", True), *BIASES, TIED,
    Flag("scale_embedding", ("embedding_scale",), False, lambda values: values["embed"] ** 0.5, 1.0),
    Fixed("normalize_embedding", True, _BEFORE), Fixed("add_bias_logits", False, _AFTER),
    Fixed("static_position_embeddings", False, "has fixed positions, which are not supported"),
)  # fmt: skip


def _bart_family(name: str, model_type: str, kind: str, pre_norms: bool, of_language: bool = False) -> Family:
    """The row of BART, or of a family that differs in its norms. kind: how the names of its classes begin."""
    norms = (
        Constant("pre_norms", pre_norms), Constant("sum_norms", not pre_norms), Constant("final_norm", pre_norms),
        EncoderPart(
            {"layers": "encoder_layers", "heads": "encoder_attention_heads num_attention_heads",
             "mlp": "encoder_ffn_dim"}, 2, of_language
        ),
        Fixed("normalize_before", pre_norms, _BEFORE), Fixed("add_final_layer_norm", pre_norms, _BEFORE),
    )  # fmt: skip
    return Family(
        name, model_type, f"{kind}ForConditionalGeneration", "model.", (*_BART, *norms),
        _bart("norm" if pre_norms else "sum_norm"), (r"^(model\.)?(en|de)coder\.version$",),
        ("num_hidden_layers", "force_bos_token_to_be_generated", "gradient_checkpointing", "extra_pos_embeddings"),
        copies=tuple(f"model.{copy}" for copy in _COPIES),
    )  # fmt: skip


SEQ2SEQ_FAMILIES = (
    Family(
        "T5", "t5", "T5ForConditionalGeneration", "",
        (*_T5, Distances(), FeedForward("relu"), T5Head(), EncoderPart({"layers": _T5_LAYERS}, 0)),
        _t5("0"), _UNUSED, copies=_COPIES,
    ),
    Family(
        "mT5", "mt5", "MT5ForConditionalGeneration", "",
        (*_T5, Distances(), FeedForward("gated-gelu"), TIED, EncoderPart({"layers": _T5_LAYERS}, 0)),
        _t5("0"), _UNUSED, copies=_COPIES,
    ),
    Family(
        "UMT5", "umt5", "UMT5ForConditionalGeneration", "",
        (*_T5, Distances(shared=False), FeedForward("gated-gelu"), T5Head(), EncoderPart({"layers": _T5_LAYERS}, 0)),
        _t5("{}"), _UNUSED, ("scalable_attention",), copies=_COPIES,
    ),
    _bart_family("BART", "bart", "Bart", pre_norms=False),
    _bart_family("mBART", "mbart", "MBart", pre_norms=True, of_language=True),
)  # fmt: skip
