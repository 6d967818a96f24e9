"""BERT and ERNIE, encoders that read a text as a whole, each with a head of tokens or of classes.

A model_type has a row for each head. Which one a folder has, its `architectures` says. With --set objective=..., a
folder is read with another head: what its files lack of that head is drawn anew.
"""

from typing import Any

from gspmd_lm import config
from gspmd_lm.convert.config_reader import ConfigReader
from gspmd_lm.convert.family import BIASES, GELU, ONE_WIDTH, PLAIN_LAYERNORM, SIZES, TIED, Family
from gspmd_lm.convert.fields import FieldCodec, Fixed, Given, Renamed, Values
from gspmd_lm.convert.layout import QUERY_KEY_VALUE, Tensor, linear, norm, plain_mlp, separate_qkv

SEVERAL = "multi_label_classification"  # in problem_type: a text has several classes or none


class Classes:
    """The number of classes, which is the length of id2label; 1 is a number to predict."""

    def read(self, reader: ConfigReader, values: Values) -> None:
        names = reader.get("id2label", {})
        if not isinstance(names, dict):
            reader.refuse("id2label", names, "is not an object of numbers and names")
            names = {}
        values["classes.count"] = reader.whole("num_labels", len(names) or 2, 1)
        if names and len(names) != values["classes.count"]:
            reader.refuse("num_labels", values["classes.count"], f"contradicts id2label, which has {len(names)}")
        if (kind := reader.get("problem_type", "")) == SEVERAL and "patches" in values:
            reader.refuse("problem_type", kind, "is not supported for images")
        elif kind == SEVERAL:
            reader.notes.append(f"problem_type: {kind}: training and eval need --set data.label_kind=classes")

    def write(self, model: config.ModelConfig) -> dict[str, Any]:
        names = [f"LABEL_{number}" for number in range(model.num_classes)]
        return {
            "id2label": {str(number): name for number, name in enumerate(names)},
            "label2id": {name: number for number, name in enumerate(names)},
        }


_CAUSAL = "sees only earlier tokens or another text, which is not supported for an encoder"
ENCODER: tuple[FieldCodec, ...] = (
    *(*SIZES, PLAIN_LAYERNORM, Renamed("intermediate_size", "mlp"), ONE_WIDTH, BIASES),
    Given({"attention.mask": "full", "norm.pre": False, "norm.sum": True, "norm.final": False, "embedding.norm": True}),
    Fixed("position_embedding_type", "absolute", "has positions within attention, which are not supported"),
    Fixed("is_decoder", False, _CAUSAL),
    Fixed("is_encoder_decoder", False, _CAUSAL),
)
BERT_CONTEXT = Renamed("max_position_embeddings", "context", 512)
LEARNED = (
    Renamed("layer_norm_eps", "norm.eps", 1e-12),
    Given({"positions": "learned"}),
    Renamed("type_vocab_size", "embedding.token_types", 2),
)
BERT_FIELDS = (*ENCODER, *LEARNED, BERT_CONTEXT, GELU)
GELU_ALONE = Fixed("hidden_act", "gelu", "is not the activation of this family's head")
MASKED = (Given({"logits.transform": True, "logits.bias": True}), TIED)


def embedding_tables(table: str, width: str = "D", **options) -> tuple[Tensor, ...]:
    """The tensors of embeddings and of the norm before the blocks. width: the letter of the token table's width."""
    return (
        Tensor(f"{table}.word_embeddings.weight", f"V {width}", ("embedding",), **options),
        Tensor(f"{table}.position_embeddings.weight", f"p {width}", ("position_embedding",), **options),
        Tensor(f"{table}.token_type_embeddings.weight", f"t {width}", ("type_embedding",), **options),
        *norm(f"{table}.LayerNorm", "embedding_norm", bias=True, axis=width, **options),
    )


def bert_blocks(
    base: str, projections: tuple[str, str, str] = QUERY_KEY_VALUE, qkv: tuple[Tensor, ...] = ()
) -> tuple[Tensor, ...]:
    """The blocks. projections: the names of those of queries, keys and values. qkv: their tensors, if not those."""
    layer = f"{base}encoder.layer.{{}}"
    attention = f"{layer}.attention"
    return (
        *(qkv or separate_qkv(f"{attention}.self", projections)),
        *linear(f"{attention}.output.dense", "D (N H)", "attention.wo"),
        *norm(f"{attention}.output.LayerNorm", "attention_sum_norm", bias=True),
        *plain_mlp(layer, "intermediate.dense", "output.dense"),
        *norm(f"{layer}.output.LayerNorm", "mlp_sum_norm", bias=True),
    )


def encoder_tensors(base: str) -> tuple[Tensor, ...]:
    """The tensors that a family has under every head."""
    return (*embedding_tables(f"{base}embeddings"), *bert_blocks(base))


def token_head(dense: str, layer_norm: str, decoder: str, bias: str, width: str = "D", **options) -> tuple[Tensor, ...]:
    """A head that guesses tokens. width: as in `embedding_tables`."""
    return (
        *linear(dense, "O D" if width == "D" else f"{width} D", "head_transform", biases=("head_transform_bias",),
                **options),
        *norm(layer_norm, "head_norm", bias=True, axis=width, **options),
        Tensor(f"{decoder}.weight", f"V {width}", ("unembedding",), **options),
        Tensor(bias, "V", ("unembedding_bias",), **options),
    )  # fmt: skip


def class_tensors(dense: str, out: str) -> tuple[Tensor, ...]:
    """A head that scores classes."""
    return (
        *linear(dense, "O D", "pooler", biases=("pooler_bias",)),
        *linear(out, "c O", "classifier", biases=("classifier_bias",)),
    )


BERT_SHARED: dict[str, Any] = {
    "no_weights": (r"embeddings\.(position|token_type)_ids$",),  # 0, 1, 2, ..., and zeros
    "older_names": {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"},
    # What stands on the stack of blocks, in files with any head.
    "heads": (r"^cls\.", r"^lm_head\.", r"^([a-z]+\.)?pooler\.", r"^classifier\."),
}
# Fields that change nothing: of a table that use_task_id reads, and of logits that a head of classes does not have.
_NO_TASKS, NO_TOKENS = ("task_type_vocab_size",), ("task_type_vocab_size", "tie_word_embeddings")
BERT_MASKED = token_head(
    "cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm", "cls.predictions.decoder",
    "cls.predictions.bias",
)  # fmt: skip
BERT_TWICE = {"cls.predictions.decoder.bias": "cls.predictions.bias"}


def _rows(name: str, model_type: str, kind: str, *more: FieldCodec) -> tuple[Family, Family]:
    """The rows of a family with BERT's tensors. kind: how the names of its classes begin."""
    base, fields = f"{model_type}.", (*BERT_FIELDS, *more)
    masked = Family(
        name,
        model_type,
        f"{kind}ForMaskedLM",
        (*fields, *MASKED),
        (*encoder_tensors(base), *BERT_MASKED),
        prefix=base,
        irrelevant=_NO_TASKS,
        twice=BERT_TWICE,
        **BERT_SHARED,
    )
    classes = (*encoder_tensors(base), *class_tensors(f"{base}pooler.dense", "classifier"))
    return masked, masked.classifier(f"{kind}ForSequenceClassification", (*fields, Classes()), classes)


FAMILIES = (
    *_rows("BERT", "bert", "Bert"),
    *_rows("ERNIE", "ernie", "Ernie", Fixed("use_task_id", False, "adds embeddings of tasks, which are not supported")),
)
