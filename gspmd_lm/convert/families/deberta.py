"""DeBERTa, its first version and later ones: disentangled attention, with relative position vectors."""

import dataclasses
from typing import Any, get_args

from gspmd_lm import config
from gspmd_lm.convert.config_reader import ConfigReader
from gspmd_lm.convert.families.bert import (
    BERT_CONTEXT,
    BERT_MASKED,
    BERT_SHARED,
    BERT_TWICE,
    ENCODER,
    MASKED,
    Classes,
    bert_blocks,
    class_tensors,
)
from gspmd_lm.convert.families.gpt2 import QKV
from gspmd_lm.convert.family import GELU, Family
from gspmd_lm.convert.fields import FieldCodec, Fixed, Given, MustEqual, Renamed, Values
from gspmd_lm.convert.layout import Tensor, linear, norm

# What a DeBERTa must say of its attention, in the words of config.json. Without these fields it says something else.
_TERMS = {
    "relative_attention": True, "pos_att_type": ["c2p", "p2c"], "share_att_key": True, "norm_rel_ebd": "layer_norm",
    "position_biased_input": False,
}  # fmt: skip
_LATER_TERMS = ("share_att_key", "norm_rel_ebd")  # which the first DeBERTa does not have


@dataclasses.dataclass(frozen=True)
class Disentangled:
    """DeBERTa's terms of scores with relative positions: both, with the projections of tokens, and normed.

    own: those of the first DeBERTa, with projections of their own and no norm.
    """

    own: bool = False

    @property
    def terms(self) -> dict[str, Any]:
        return {name: value for name, value in _TERMS.items() if not self.own or name not in _LATER_TERMS}

    def read(self, reader: ConfigReader, values: Values) -> None:
        for name, wanted in self.terms.items():
            value = reader.get(name)
            found = value.lower().split("|") if name == "pos_att_type" and isinstance(value, str) else value
            if value is None:
                reader.problems.append(f"{name}: missing, and only {wanted} is supported")
            elif (sorted(map(str, found)) if isinstance(found, list) else found) != wanted:
                reader.refuse(name, value, f"is not supported, only {wanted}")
        distance = reader.get("max_relative_positions", -1)
        distance = values["context"] if type(distance) is int and distance < 1 else distance
        distance = reader.positive("max_relative_positions", distance)
        buckets = -1 if self.own else reader.get("position_buckets", -1)
        half = distance if buckets == -1 else reader.positive("position_buckets", buckets)
        if buckets == distance:
            reader.refuse("position_buckets", buckets, "is not supported if it is max_relative_positions, only -1")
        values["attention.relative_vectors"] = {"ranges": 2 * half, "distance": distance, "own_projections": self.own}
        values["attention.scale"] = max(3 * values["head_dim"], 1) ** -0.5

    def write(self, model: config.ModelConfig) -> dict[str, Any]:
        if not (vectors := model.attention.relative_vectors):
            return {}
        written = self.terms | {"max_relative_positions": vectors.distance}
        half = vectors.ranges // 2
        return written if self.own else written | {"position_buckets": -1 if half == vectors.distance else half}


class ConvolutionOfTokens:
    """A convolution beside the first layer, if there is one."""

    def read(self, reader: ConfigReader, values: Values) -> None:
        taps = reader.whole("conv_kernel_size", 0, 0)
        groups, activation = reader.get("conv_groups", 1), reader.get("conv_act", "tanh")
        if not taps:
            return
        if groups != 1:
            reader.refuse("conv_groups", groups, "is not supported, only 1")
        if activation not in (known := get_args(config.Convolution.__annotations__["activation"])):
            reader.refuse("conv_act", activation, f"is not supported, only {' and '.join(known)}")
        values["convolution"] = {"taps": taps, "activation": activation}

    def write(self, model: config.ModelConfig) -> dict[str, Any]:
        if not (convolution := model.convolution):
            return {}
        return {"conv_kernel_size": convolution.taps, "conv_act": convolution.activation}


_WIDTH = "is another width than hidden_size, which is not supported"
_EACH = (
    *(*ENCODER, BERT_CONTEXT, GELU, Given({"positions": "none"})),
    Renamed("layer_norm_eps", "norm.eps", 1e-7),
    Renamed("type_vocab_size", "embedding.token_types", 0, may_be_zero=True),
    MustEqual("embedding_size", "embed", _WIDTH),
)
_NO_TALK = Fixed("talking_head", False, "mixes the scores of heads, which is not supported")
_FIRST = (*_EACH, Given({"attention.key_bias": False}), Disentangled(own=True), _NO_TALK)
_LATER = (*_EACH, Disentangled(), ConvolutionOfTokens())
_LEGACY = Fixed("legacy", True, "has a head of other names")
_CLASSES = (
    *(Classes(), Given({"classes.pooler": "gelu"}), Fixed("pooler_hidden_act", "gelu", "is not supported")),
    MustEqual("pooler_hidden_size", "embed", _WIDTH),
)


_HAS_TYPES: dict[str, Any] = {"exists_in": lambda model: model.embedding.token_types > 0}
_TABLES = (
    Tensor("deberta.embeddings.word_embeddings.weight", "V D", ("embedding",)),
    Tensor("deberta.embeddings.token_type_embeddings.weight", "t D", ("type_embedding",), **_HAS_TYPES),
    *norm("deberta.embeddings.LayerNorm", "embedding_norm", bias=True),
    Tensor("deberta.encoder.rel_embeddings.weight", "r D", ("relative_embedding",)),
)
_CONV, _CONV_BIAS = "deberta.encoder.conv", ("convolution_bias",)
_HAS_CONV: dict[str, Any] = {"exists_in": lambda model: model.convolution is not None}
_LATER_TENSORS = (
    *_TABLES,
    *norm("deberta.encoder.LayerNorm", "relative_norm", bias=True),
    *linear(f"{_CONV}.conv", "D O A", "convolution", biases=_CONV_BIAS, **_HAS_CONV),
    *norm(f"{_CONV}.LayerNorm", "convolution_norm", bias=True, **_HAS_CONV),
    *bert_blocks("deberta.", ("query_proj", "key_proj", "value_proj")),
)
_SELF = "deberta.encoder.layer.{}.attention.self"
_QKV_TENSORS = (
    Tensor(f"{_SELF}.in_proj.weight", "(R H) D", QKV, order="grouped"),
    Tensor(f"{_SELF}.q_bias", "(N H)", ("attention.bq",)),
    Tensor(f"{_SELF}.v_bias", "(K H)", ("attention.bv",)),
    *linear(f"{_SELF}.pos_q_proj", "(N H) D", "attention.wq_relative"),
    *linear(f"{_SELF}.pos_proj", "(N H) D", "attention.wk_relative", bias=False),
)
_FIRST_TENSORS = (*_TABLES, *bert_blocks("deberta.", qkv=_QKV_TENSORS))
_SHARED: dict[str, Any] = BERT_SHARED | {
    # Also of a model without such positions.
    "no_weights": (*BERT_SHARED["no_weights"], r"embeddings\.position_embeddings\."),
    "heads": (r"^(cls|lm_predictions|mask_predictions|pooler|classifier)\.",),
}


def _rows(
    model_type: str, kind: str, fields: tuple[FieldCodec, ...], tensors: tuple[Tensor, ...]
) -> tuple[Family, Family]:
    """The rows of a DeBERTa. kind: how the names of its classes begin."""
    masked = Family(
        "DeBERTa",
        model_type,
        f"{kind}ForMaskedLM",
        (*fields, *MASKED, _LEGACY),
        (*tensors, *BERT_MASKED),
        prefix="deberta.",
        irrelevant=("pooler_hidden_size", "pooler_hidden_act"),
        twice=BERT_TWICE,
        **_SHARED,
    )
    classes = (*tensors, *class_tensors("pooler.dense", "classifier"))
    unread = ("legacy", "tie_word_embeddings")
    return masked, masked.classifier(
        f"{kind}ForSequenceClassification", (*fields, *_CLASSES), classes, irrelevant=unread
    )


FAMILIES = (
    *_rows("deberta", "Deberta", _FIRST, _FIRST_TENSORS),
    *_rows("deberta-v2", "DebertaV2", _LATER, _LATER_TENSORS),
)
