"""The families with a stack that sees images beside texts: CLIP, whose towers are compared, and BLIP-2."""

import dataclasses
from typing import Any, cast

from gspmd_lm import config
from gspmd_lm.convert.config_reader import ConfigReader
from gspmd_lm.convert.family import PLAIN_LAYERNORM, Family, Part, head_dim, heads
from gspmd_lm.convert.fields import MOST_LAYERS, Activation, Constant, FieldCodec, Fixed, Renamed, Values
from gspmd_lm.convert.gpt_families import GPT_FAMILIES
from gspmd_lm.convert.image_families import ImagePatches
from gspmd_lm.convert.layout import Tensor
from gspmd_lm.convert.names import linear, norm, separate_qkv
from gspmd_lm.convert.seq2seq_families import SEQ2SEQ_FAMILIES

_TEXT, _VISION, _QUERIES = "text_config", "vision_config", "qformer_config"
_QUICK_GELU, _SLOPE = "quick_gelu", 1.702  # x * sigmoid(1.702 x)
_GELU_NEW = {"gelu_tanh": "gelu_new"}
# The eos_token_id of old files. To transformers it means that a text is read at the token with the highest number.
_HIGHEST = 2


@dataclasses.dataclass(frozen=True)
class QuickActivation(Activation):
    """The activation, which may be quick_gelu: silu with a slope."""

    def read(self, reader: ConfigReader, values: Values) -> None:
        super().read(reader, values)
        values["activation_slope"] = _SLOPE if reader.get([self.names], self.default) == _QUICK_GELU else 1.0

    def write(self, model: config.ModelConfig) -> dict[str, Any]:
        return {self.names: _QUICK_GELU} if model.activation_slope == _SLOPE else super().write(model)


@dataclasses.dataclass(frozen=True)
class EndOfText:
    """The token at which a text is read. Here it is the last one, whose number only the tokenizer says."""

    name: str = f"{_TEXT}.eos_token_id"

    def read(self, reader: ConfigReader, values: Values) -> None:
        reader.whole([self.name], _HIGHEST, 0)

    def write(self, model: config.ModelConfig) -> dict[str, Any]:
        return {self.name: _HIGHEST}


def _sizes(part: str, embed: int, heads_: int, mlp: int, layers: int, eps: float) -> tuple[FieldCodec, ...]:
    return (
        Renamed(f"{part}.hidden_size", "embed", embed), Renamed(f"{part}.intermediate_size", "mlp", mlp),
        Renamed(f"{part}.num_hidden_layers", "layers", layers, most=MOST_LAYERS),
        Renamed(f"{part}.num_attention_heads", "heads", heads_), Constant("kv_heads", heads),
        Constant("head_dim", head_dim), Renamed(f"{part}.layer_norm_eps", "norm_eps", eps),
    )  # fmt: skip


def _tower(part: str, embed: int, heads_: int, mlp: int) -> tuple[FieldCodec, ...]:
    quick = QuickActivation(f"{part}.hidden_act", _QUICK_GELU, _GELU_NEW, ((_QUICK_GELU, "silu"),))
    return (*_sizes(part, embed, heads_, mlp, 12, 1e-5), quick)


@dataclasses.dataclass(frozen=True)
class VisionPart:
    """The tower of images, and the space in which texts and images are compared."""

    codecs: tuple[FieldCodec, ...] = (*_tower(_VISION, 768, 12, 3072), ImagePatches("none", f"{_VISION}.", 32))

    def read(self, reader: ConfigReader, values: Values) -> None:
        found = Values()
        for codec in self.codecs:
            codec.read(reader, found)
        for setting in ("activation", "activation_slope", "norm_eps"):
            if found[setting] != values[setting]:
                both = f"{found[setting]}, and {values[setting]} by {_TEXT}"
                reader.problems.append(f"{_VISION}: model.{setting} is {both}, which is not supported")
        sizes = ("layers", "embed", "heads", "kv_heads", "head_dim", "mlp")
        values["vision"] = {name: found[name] for name in sizes} | {
            "patches": found["patches"] | {"bias": False},
            "projection": reader.number(["projection_dim"], 512),
            "temperature": float(reader.number(["logit_scale_init_value"], 2.6592)),
        }

    def write(self, model: config.ModelConfig) -> dict[str, Any]:
        if not (model.vision and (vision := model.of_vision)):
            return {}
        written = {"projection_dim": model.vision.projection, "logit_scale_init_value": model.vision.temperature}
        for codec in self.codecs:
            written |= codec.write(vision)
        return written


_CLIP = (
    Renamed(f"{_TEXT}.vocab_size", "vocab", 49408), Renamed(f"{_TEXT}.max_position_embeddings", "context", 77),
    *_tower(_TEXT, 512, 8, 2048), *PLAIN_LAYERNORM, Constant("positions", "learned"), Constant("qkv_bias", True),
    Constant("attention_out_bias", True), Constant("mlp_bias", True), EndOfText(), VisionPart(),
)  # fmt: skip


def _blocks(prefix: str, ours: str, last: str) -> tuple[Tensor, ...]:
    layer = f"{prefix}.encoder.layers.{{}}"
    attention = f"{layer}.self_attn"
    return (
        *separate_qkv(attention, ours=f"{ours}attention"),
        *linear(f"{attention}.out_proj", "D (N H)", f"{ours}attention.wo"),
        *norm(f"{layer}.layer_norm1", f"{ours}attention_norm", bias=True),
        *linear(f"{layer}.mlp.fc1", "F D", f"{ours}mlp.w_up"),
        *linear(f"{layer}.mlp.fc2", "D F", f"{ours}mlp.w_down"),
        *norm(f"{layer}.layer_norm2", f"{ours}mlp_norm", bias=True),
        *norm(f"{prefix}.{last}", f"{ours}final_norm", bias=True),
    )


_IMAGE = "vision_model.embeddings"
_TENSORS = (
    Tensor("text_model.embeddings.token_embedding.weight", "V D", ("embedding",)),
    Tensor("text_model.embeddings.position_embedding.weight", "p D", ("position_embedding",)),
    *_blocks("text_model", "", "final_layer_norm"),
    Tensor("text_projection.weight", "j D", ("projection",)),
    Tensor("logit_scale", "", ("temperature",)),
    Tensor(f"{_IMAGE}.class_embedding", "D", ("vision.class_row",)),
    Tensor(f"{_IMAGE}.patch_embedding.weight", "D x", ("vision.stem",)),
    Tensor(f"{_IMAGE}.position_embedding.weight", "p D", ("vision.position_embedding",)),
    *norm("vision_model.pre_layrnorm", "vision.embedding_norm", bias=True),
    *_blocks("vision_model", "vision.", "post_layernorm"),
    Tensor("visual_projection.weight", "j D", ("vision.projection",)),
)


@dataclasses.dataclass(frozen=True)
class ReadImages:
    """BLIP-2's stacks before its decoder: the one that sees an image, and the one whose learned rows read that."""

    start_token: int  # of a config.json that says none
    seen: tuple[FieldCodec, ...] = (
        *_sizes(_VISION, 1408, 16, 6144, 39, 1e-6), ImagePatches("none", f"{_VISION}.", 14),
        Activation(f"{_VISION}.hidden_act", "gelu", _GELU_NEW),
        Fixed(f"{_VISION}.num_channels", 3, "is another number of colours than 3, which is not supported"),
        Fixed(f"{_VISION}.qkv_bias", True, "has no biases of queries, keys and values, which is not supported"),
    )  # fmt: skip
    reading: tuple[FieldCodec, ...] = (
        *_sizes(_QUERIES, 768, 12, 3072, 12, 1e-12), Renamed("num_query_tokens", "context", 32),
        Activation(f"{_QUERIES}.hidden_act", "gelu", _GELU_NEW),
        Fixed(f"{_QUERIES}.use_qformer_text_input", False, "also reads a text, which is not supported"),
    )  # fmt: skip

    def read(self, reader: ConfigReader, values: Values) -> None:
        found, queries = Values(), Values()
        for codecs, part in ((self.seen, found), (self.reading, queries)):
            for codec in codecs:
                codec.read(reader, part)
        kept = ("layers", "embed", "heads", "kv_heads", "head_dim", "mlp", "activation", "norm_eps")
        values["vision"] = {name: found[name] for name in ("patches", *kept)} | {
            "queries": {name: queries[name] for name in kept} | {
                "rows": queries["context"], "every": reader.number([f"{_QUERIES}.cross_attention_frequency"], 2),
                "token": reader.whole(["image_token_index", "image_token_id"], 0, 0),
                "start_token": reader.whole([f"{_TEXT}.bos_token_id"], self.start_token, 0),
            },
        }  # fmt: skip
        values |= {"frozen": ["vision"], "row_multiple": 8 if "encoder" in values else 1}

    def write(self, model: config.ModelConfig) -> dict[str, Any]:
        if not (model.vision and (queries := model.vision.queries)):
            return {}
        written = {f"{_QUERIES}.cross_attention_frequency": queries.every, "image_token_index": queries.token,
                   f"{_TEXT}.bos_token_id": queries.start_token}  # fmt: skip
        for codecs, part in ((self.seen, model.of_vision), (self.reading, model.of_queries)):
            for codec in codecs:
                written |= codec.write(cast(config.ModelConfig, part))
        del written[f"{_VISION}.num_channels"]  # transformers has no such field: there are three
        return written


def _bert(name: str, ours: str, **of_keys: Any) -> tuple[Tensor, ...]:
    """Attention with BERT's names. of_keys: options of the keys and values."""
    return (
        *linear(f"{name}.attention.query", "(N H) D", f"{ours}.wq"),
        *linear(f"{name}.attention.key", "(K H) D", f"{ours}.wk", **of_keys),
        *linear(f"{name}.attention.value", "(K H) D", f"{ours}.wv", **of_keys),
        *linear(f"{name}.output.dense", "D (N H)", f"{ours}.wo"),
        *norm(f"{name}.output.LayerNorm", f"{ours}_sum_norm", bias=True),
    )


_SEEN, _QFORMER = "vision_model.encoder.layers.{}.self_attn", "qformer.encoder.layer.{}"
_OWN = {f"vision.attention.w{name}": f"vision.attention.b{name}" for name in "qkv"}
_READING = (
    Tensor(f"{_IMAGE}.class_embedding", "1 1 D", ("vision.class_row",)),
    *linear(f"{_IMAGE}.patch_embedding", "D x", "vision.stem", biases=("vision.stem_bias",)),
    Tensor(f"{_IMAGE}.position_embedding", "1 p D", ("vision.position_embedding",)),
    *linear(f"{_SEEN}.qkv", "(R H) D", *_OWN),
    *linear(f"{_SEEN}.projection", "D (N H)", "vision.attention.wo"),
    *(tensor for tensor in _blocks("vision_model", "vision.", "post_layernorm") if ".self_attn." not in tensor.name),
    Tensor("query_tokens", "1 p D", ("queries.query_rows",)),
    *norm("qformer.layernorm", "queries.embedding_norm", bias=True),
    *_bert(f"{_QFORMER}.attention", "queries.attention"),
    *_bert(f"{_QFORMER}.crossattention", "queries.cross", others=lambda queries: {"D": queries.memory_width}),
    *linear(f"{_QFORMER}.intermediate_query.dense", "F D", "queries.mlp.w_up"),
    *linear(f"{_QFORMER}.output_query.dense", "D F", "queries.mlp.w_down"),
    *norm(f"{_QFORMER}.output_query.LayerNorm", "queries.mlp_sum_norm", bias=True),
    *linear("language_projection", "D O", "query_projection", biases=("query_projection_bias",),
            others=lambda model: {"O": model.of_queries.embed}),
)  # fmt: skip


def _blip2(row: Family, start_token: int) -> Family:
    """BLIP-2 with the decoder of another family."""
    tensors = tuple(dataclasses.replace(one, name=f"language_model.{one.name}") for one in row.tensors)
    return Family(
        "BLIP-2", "blip-2", "Blip2ForConditionalGeneration", "",
        (Part(_TEXT, row.model_type, row.codecs), ReadImages(start_token)), (*tensors, *_READING),
        no_weights=tuple(pattern.replace("^", r"^language_model\.") for pattern in row.no_weights),
        irrelevant=(*row.irrelevant, "image_text_hidden_size", "vocab_size", "max_position_embeddings",
                    "encoder_hidden_size", "tie_word_embeddings", "use_decoder_only_language_model"),
        copies=tuple(f"language_model.{name}" for name in row.copies), parts=(_TEXT, _VISION, _QUERIES),
        text_type=row.model_type,
    )  # fmt: skip


_DECODERS = {row.model_type: row for row in (*GPT_FAMILIES, *SEQ2SEQ_FAMILIES)}
TOWER_FAMILIES = (
    Family(
        "CLIP", "clip", "CLIPModel", "", _CLIP, _TENSORS, no_weights=(r"embeddings\.position_ids$",),
        irrelevant=("projection_dim", "tie_word_embeddings"), parts=(_TEXT, _VISION),
    ),
    _blip2(_DECODERS["opt"], 2), _blip2(_DECODERS["t5"], 1),
)  # fmt: skip
