"""The families of encoders that read a text as a whole, BERT and its kin, each with a head of tokens or of classes.

A model_type has a row for each head. Which one a folder has, its `architectures` says. With --set objective=..., a
folder is read with another head: what its files lack of that head is drawn anew.
"""

import dataclasses
from typing import Any

from gspmd_lm import config
from gspmd_lm.convert.config_reader import ConfigReader
from gspmd_lm.convert.family import PLAIN_LAYERNORM, SIZES, TIED, Family, head_dim, heads
from gspmd_lm.convert.fields import Activation, Constant, FieldCodec, Fixed, Renamed, Values
from gspmd_lm.convert.layout import Tensor
from gspmd_lm.convert.names import linear, norm


@dataclasses.dataclass(frozen=True)
class Classes:
    """The number of classes, which is the length of id2label; 1 is a number to predict."""

    def read(self, reader: ConfigReader, values: Values) -> None:
        names = reader.get(["id2label"], {})
        if not isinstance(names, dict):
            reader.refuse("id2label", names, "is not an object of numbers and names")
            names = {}
        values["classes"] = reader.whole(["num_labels"], len(names) or 2, 1)
        if names and len(names) != values["classes"]:
            reader.refuse("num_labels", values["classes"], f"contradicts id2label, which has {len(names)}")
        if (kind := reader.get(["problem_type"], "")) == "multi_label_classification":
            reader.refuse("problem_type", kind, "gives a text several classes, which is not supported")

    def write(self, model: config.ModelConfig) -> dict[str, Any]:
        names = [f"LABEL_{number}" for number in range(model.classes)]
        return {
            "id2label": {str(number): name for number, name in enumerate(names)},
            "label2id": {name: number for number, name in enumerate(names)},
        }


@dataclasses.dataclass(frozen=True)
class PositionsAfterPadding:
    """RoBERTa's positions: they begin after the number of the padding token, whose row and those before are unused."""

    def read(self, reader: ConfigReader, values: Values) -> None:
        rows = reader.number(["max_position_embeddings"], 512)
        values["position_offset"] = reader.whole(["pad_token_id"], 1, 0) + 1
        values["context"] = rows - values["position_offset"]
        if values["context"] < 1:
            reader.refuse("max_position_embeddings", rows, f"leaves no position after pad_token_id + 1 = "
                          f"{values['position_offset']}")  # fmt: skip
            values["context"] = 1

    def write(self, model: config.ModelConfig) -> dict[str, Any]:
        return {
            "max_position_embeddings": model.position_offset + model.context,
            "pad_token_id": model.position_offset - 1,
        }


_CAUSAL = "sees only earlier tokens or another text, which is not supported for an encoder"
_ENCODER: tuple[FieldCodec, ...] = (
    *SIZES, *PLAIN_LAYERNORM, Renamed("intermediate_size", "mlp"), Constant("kv_heads", heads),
    Constant("head_dim", head_dim), Renamed("layer_norm_eps", "norm_eps", 1e-12), Constant("mask", "full"),
    Constant("positions", "learned"), Constant("pre_norms", False), Constant("sum_norms", True),
    Constant("final_norm", False), Constant("embedding_norm", True), Constant("qkv_bias", True),
    Constant("attention_out_bias", True), Constant("mlp_bias", True), Renamed("type_vocab_size", "token_types", 2),
    Fixed("position_embedding_type", "absolute", "has positions within attention, which are not supported"),
    Fixed("is_decoder", False, _CAUSAL), Fixed("is_encoder_decoder", False, _CAUSAL),
)  # fmt: skip
_BERT = (
    *_ENCODER, Renamed("max_position_embeddings", "context", 512),
    Activation("hidden_act", "gelu", {"gelu_tanh": "gelu_new"}),
)  # fmt: skip
_ROBERTA = (
    *_ENCODER, PositionsAfterPadding(), Constant("activation", "gelu"),
    Fixed("hidden_act", "gelu", "is not the activation of this family's head"),
)  # fmt: skip
_MASKED = (Constant("head_transform", True), Constant("unembedding_bias", True), TIED)
_ERNIE = (Fixed("use_task_id", False, "adds embeddings of tasks, which are not supported"),)


def _tensors(base: str) -> tuple[Tensor, ...]:
    """What all heads of a family stand on."""
    layer, table = f"{base}encoder.layer.{{}}", f"{base}embeddings"
    attention = f"{layer}.attention"
    return (
        Tensor(f"{table}.word_embeddings.weight", "V D", ("embedding",)),
        Tensor(f"{table}.position_embeddings.weight", "p D", ("position_embedding",)),
        Tensor(f"{table}.token_type_embeddings.weight", "t D", ("type_embedding",)),
        *norm(f"{table}.LayerNorm", "embedding_norm", bias=True),
        *linear(f"{attention}.self.query", "(N H) D", "attention.wq"),
        *linear(f"{attention}.self.key", "(K H) D", "attention.wk"),
        *linear(f"{attention}.self.value", "(K H) D", "attention.wv"),
        *linear(f"{attention}.output.dense", "D (N H)", "attention.wo"),
        *norm(f"{attention}.output.LayerNorm", "attention_sum_norm", bias=True),
        *linear(f"{layer}.intermediate.dense", "F D", "mlp.w_up"),
        *linear(f"{layer}.output.dense", "D F", "mlp.w_down"),
        *norm(f"{layer}.output.LayerNorm", "mlp_sum_norm", bias=True),
    )


def _masked(dense: str, layer_norm: str, decoder: str, bias: str) -> tuple[Tensor, ...]:
    """A head that guesses tokens."""
    return (
        *linear(dense, "O D", "head_transform", biases=("head_transform_bias",)),
        *norm(layer_norm, "head_norm", bias=True),
        Tensor(f"{decoder}.weight", "V D", ("unembedding",)),
        Tensor(bias, "V", ("unembedding_bias",)),
    )


def _classes(dense: str, out: str) -> tuple[Tensor, ...]:
    """A head that scores classes."""
    return (
        *linear(dense, "O D", "pooler", biases=("pooler_bias",)),
        *linear(out, "c O", "classifier", biases=("classifier_bias",)),
    )


_OLD_NORMS = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
# Fields that change nothing: of a table that use_task_id reads, and of logits that a head of classes does not have.
_NO_TASKS, _NO_TOKENS = ("task_type_vocab_size",), ("task_type_vocab_size", "tie_word_embeddings")
_NUMBERS = (r"embeddings\.(position|token_type)_ids$",)  # 0, 1, 2, ..., and zeros
# What stands on the stack of blocks, in files with any head.
_HEADS = (r"^cls\.", r"^lm_head\.", r"^([a-z]+\.)?pooler\.", r"^classifier\.")
_BERT_MASKED = _masked(
    "cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm", "cls.predictions.decoder",
    "cls.predictions.bias",
)  # fmt: skip
_ROBERTA_MASKED = _masked("lm_head.dense", "lm_head.layer_norm", "lm_head.decoder", "lm_head.bias")


def _bert(name: str, model_type: str, kind: str, more: tuple[FieldCodec, ...] = ()) -> tuple[Family, Family]:
    """The rows of a family with BERT's tensors. kind: how the names of its classes begin."""
    shared = {"no_weights": _NUMBERS, "older_names": _OLD_NORMS, "heads": _HEADS}
    base, fields = f"{model_type}.", (*_BERT, *more)
    return (
        Family(
            name, model_type, f"{kind}ForMaskedLM", base, (*fields, *_MASKED), (*_tensors(base), *_BERT_MASKED),
            irrelevant=_NO_TASKS, twice={"cls.predictions.decoder.bias": "cls.predictions.bias"}, **shared,
        ),
        Family(
            name, model_type, f"{kind}ForSequenceClassification", base, (*fields, Classes()),
            (*_tensors(base), *_classes(f"{base}pooler.dense", "classifier")), irrelevant=_NO_TOKENS, **shared,
        ),
    )  # fmt: skip


def _roberta(name: str, model_type: str, kind: str) -> tuple[Family, Family]:
    """The rows of a family with RoBERTa's tensors."""
    shared = {"no_weights": _NUMBERS, "older_names": _OLD_NORMS, "heads": _HEADS}
    base = "roberta."
    return (
        Family(
            name, model_type, f"{kind}ForMaskedLM", base, (*_ROBERTA, *_MASKED), (*_tensors(base), *_ROBERTA_MASKED),
            twice={"lm_head.decoder.bias": "lm_head.bias"}, **shared,
        ),
        Family(
            name, model_type, f"{kind}ForSequenceClassification", base, (*_ROBERTA, Classes()),
            (*_tensors(base), *_classes("classifier.dense", "classifier.out_proj")), irrelevant=_NO_TOKENS, **shared,
        ),
    )  # fmt: skip


ENCODER_FAMILIES: tuple[Family, ...] = (
    *_bert("BERT", "bert", "Bert"),
    *_roberta("RoBERTa", "roberta", "Roberta"),
    *_roberta("XLM-RoBERTa", "xlm-roberta", "XLMRoberta"),
    *_roberta("CamemBERT", "camembert", "Camembert"),
    *_bert("ERNIE", "ernie", "Ernie", _ERNIE),
)
