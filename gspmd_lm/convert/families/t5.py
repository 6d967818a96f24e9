"""T5, mT5 and UMT5, and what every encoder-decoder says of its encoder."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from gspmd_lm import config
from gspmd_lm.config import value_at
from gspmd_lm.convert.config_reader import LARGEST, ConfigReader
from gspmd_lm.convert.family import TIED, Family, heads
from gspmd_lm.convert.fields import ACTIVATIONS, MOST_LAYERS, Given, Renamed, Values
from gspmd_lm.convert.layout import Tensor, norm


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
            setting: reader.number(names, most=most.get(setting, LARGEST)) for setting, names in self.names.items()
        }
        if "heads" in encoder:
            encoder |= {"kv_heads": encoder["heads"], "head_dim": values["embed"] // encoder["heads"]}
        start = reader.whole("decoder_start_token_id", self.start_token, 0)
        if self.of_language and reader.get("decoder_start_token_id") is None:
            reader.notes.append(
                f"decoder_start_token_id: none: token {start} stands before a text until model.encoder.start_token is "
                "that of its language"
            )
        if reader.get("forced_bos_token_id") is not None:
            encoder |= {"first_tokens": [reader.whole("forced_bos_token_id", 0, 0)]}
        values["encoder"] = encoder | {"start_token": start}

    def write(self, model: config.ModelConfig) -> dict[str, Any]:
        if not (model.encoder and model.encoder_config):
            return {}
        sizes = {names.split()[0]: value_at(model.encoder_config, setting) for setting, names in self.names.items()}
        start, first = model.encoder.start_token, model.encoder.first_tokens
        written = {"forced_bos_token_id": first[0]} if first and not model.frames else {}
        return {"is_encoder_decoder": True, **sizes, "decoder_start_token_id": start, **written}


@dataclasses.dataclass(frozen=True)
class Distances:
    """T5's relative position biases. shared: whether all layers have the same."""

    shared: bool = True

    def read(self, reader: ConfigReader, values: Values) -> None:
        ranges = reader.number("relative_attention_num_buckets", 32)
        distance = reader.number("relative_attention_max_distance", 128)
        values["attention.relative_positions"] = {"ranges": ranges, "distance": distance, "shared": self.shared}

    def write(self, model: config.ModelConfig) -> dict[str, Any]:
        if not (relative := model.attention.relative_positions):
            return {}
        names = ("relative_attention_num_buckets", "relative_attention_max_distance")
        return dict(zip(names, (relative.ranges, relative.distance), strict=True))


@dataclasses.dataclass(frozen=True)
class FeedForward:
    """T5's feed_forward_proj: 'relu', or 'gated-gelu', whose gelu is that of tanh; and the two fields made of it."""

    default: str

    def read(self, reader: ConfigReader, values: Values) -> None:
        word = reader.get("feed_forward_proj", self.default)
        gate, dash, name = word.rpartition("-") if isinstance(word, str) else ("", "", "")
        name = "gelu_new" if word == "gated-gelu" else name
        gated, known = bool(dash), name in ACTIVATIONS and gate in ("", "gated")
        if not known:
            reader.refuse("feed_forward_proj", word, f"is not one of {', '.join(ACTIVATIONS)}, or gated-...")
        for field, wanted in (("dense_act_fn", name), ("is_gated_act", gated)):
            if known and (value := reader.get(field, wanted)) != wanted:
                reader.refuse(field, value, f"contradicts feed_forward_proj: {word}")
        values["feed_forward.kind"] = "gated" if gated else "plain"
        values["feed_forward.activation"] = ACTIVATIONS.get(name, "relu")

    def write(self, model: config.ModelConfig) -> dict[str, Any]:
        gated, name = model.feed_forward.kind == "gated", model.feed_forward.activation
        if gated:
            word = "gated-gelu" if name == "gelu_tanh" else f"gated-{name}"
        else:
            word = "gelu_new" if name == "gelu_tanh" else name
        return {"feed_forward_proj": word, "dense_act_fn": "gelu_new" if name == "gelu_tanh" else name,
                "is_gated_act": gated}  # fmt: skip


class T5Head:
    """T5's logits: with the token table, of hidden states times embed ** -0.5, or with a table of their own.

    transformers 5 writes tie_word_embeddings: true for both, and scale_decoder_outputs, which tells them apart. null is
    false there.
    """

    def read(self, reader: ConfigReader, values: Values) -> None:
        tied = reader.flag("tie_word_embeddings", True)
        scaled = reader.flag("scale_decoder_outputs", tied and "scale_decoder_outputs" not in reader.raw)
        values["embedding.tied"] = tied and scaled
        values["logits.scale"] = values["embed"] ** -0.5 if scaled else 1.0

    def write(self, model: config.ModelConfig) -> dict[str, Any]:
        return {"tie_word_embeddings": model.embedding.tied, "scale_decoder_outputs": model.logits.scale != 1}


_T5_LAYERS = "num_layers num_hidden_layers"
_T5 = (
    Renamed("vocab_size", "vocab"),
    Renamed("d_model hidden_size", "embed"),
    Renamed("d_kv head_dim", "head_dim", 64),
    Renamed("d_ff", "mlp"),
    Renamed("num_heads num_attention_heads", "heads"),
    Renamed(_T5_LAYERS, "layers", most=MOST_LAYERS),
    Renamed("num_decoder_layers", "layers", lambda values: values["layers"], most=MOST_LAYERS),
    Renamed("n_positions", "context", 512),
    Renamed("layer_norm_epsilon", "norm.eps", 1e-6),
    Given({"kv_heads": heads, "positions": "none", "attention.scale": 1.0}),
    EncoderPart({"layers": _T5_LAYERS}, 0),
)


def _t5_attention(prefix: str, number: int, name: str, ours: str) -> tuple[Tensor, ...]:
    layer, spec = f"{prefix}.block.{{}}.layer.{number}", {"q": "(N H) D", "k": "(K H) D", "v": "(K H) D"}
    return (
        *(Tensor(f"{layer}.{name}.{one}.weight", axes, (f"{ours}.w{one}",)) for one, axes in spec.items()),
        Tensor(f"{layer}.{name}.o.weight", "D (N H)", (f"{ours}.wo",)),
        *norm(f"{layer}.layer_norm", f"{ours}_norm"),
    )


def _t5_stack(prefix: str, ours: str, mlp: int, distances: str) -> tuple[Tensor, ...]:
    """The tensors of a stack whose MLP is part number `mlp` of a block. distances: the layer that has the biases."""
    layer = f"{prefix}.block.{{}}.layer.{mlp}"
    feed = f"{layer}.DenseReluDense"
    return (
        *_t5_attention(prefix, 0, "SelfAttention", f"{ours}attention"),
        Tensor(f"{prefix}.block.{distances}.layer.0.SelfAttention.relative_attention_bias.weight", "r N",
               (f"{ours}relative_bias" if distances == "0" else f"{ours}attention.relative_bias",)),
        Tensor(f"{feed}.wi.weight", "F D", (f"{ours}mlp.w_up",),
               exists_in=lambda model: model.feed_forward.kind == "plain"),
        Tensor(f"{feed}.wi_0.weight", "F D", (f"{ours}mlp.w_gate",)),
        Tensor(f"{feed}.wi_1.weight", "F D", (f"{ours}mlp.w_up",),
               exists_in=lambda model: model.feed_forward.kind == "gated"),
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


_UNUSED = (r"^decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight$",)
T5_COPIES = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
T5 = Family(
    "T5",
    "t5",
    "T5ForConditionalGeneration",
    (*_T5, Distances(), FeedForward("relu"), T5Head()),
    _t5("0"),
    prefix="",
    no_weights=_UNUSED,
    copies=T5_COPIES,
)
_MT5 = (*_T5, Distances(), FeedForward("gated-gelu"), TIED)
_UMT5 = (*_T5, Distances(shared=False), FeedForward("gated-gelu"), T5Head())
FAMILIES = (
    T5,
    T5.relative("mT5", "mt5", "MT5ForConditionalGeneration", _MT5),
    T5.relative("UMT5", "umt5", "UMT5ForConditionalGeneration", _UMT5, _t5("{}"), irrelevant=("scalable_attention",)),
)
