"""ELECTRA: a token table that may be narrow, and a head that finds replaced tokens."""

from typing import Any

from gspmd_lm.convert.families.bert import (
    BERT_FIELDS,
    BERT_SHARED,
    GELU_ALONE,
    MASKED,
    Classes,
    bert_blocks,
    class_tensors,
    embedding_tables,
    token_head,
)
from gspmd_lm.convert.family import Family
from gspmd_lm.convert.fields import DefaultsTo, Given
from gspmd_lm.convert.layout import linear

_ELECTRA = (
    *(*BERT_FIELDS, DefaultsTo("embedding_size", "embedding.width", "embed", 128)),
    Given({"embedding.input": lambda values: "sum" if values["embedding.width"] else "tokens"}),
)
_REPLACED = Given({"classes.count": 1, "classes.of": "tokens", "classes.pooler": "gelu"})
# Whether the token table has a width of its own.
_NARROW: dict[str, Any] = {"exists_in": lambda model: model.embedding.width > 0}
_WIDE: dict[str, Any] = {"exists_in": lambda model: model.embedding.width == 0}
_TENSORS = (
    *embedding_tables("electra.embeddings", **_WIDE),
    *embedding_tables("electra.embeddings", "W", **_NARROW),
    *bert_blocks("electra."),
    *linear("electra.embeddings_project", "D W", "embedding_in", biases=("embedding_in_bias",), **_NARROW),
)
_GENERATOR = ("generator_predictions.dense", "generator_predictions.LayerNorm")
_HEAD = (*_GENERATOR, "generator_lm_head", "generator_lm_head.bias")
_DISCRIMINATOR = ("discriminator_predictions.dense", "discriminator_predictions.dense_prediction")
_SHARED: dict[str, Any] = BERT_SHARED | {"heads": (r"^(generator|discriminator)_", r"^classifier\.")}
_MASKED = Family(
    "ELECTRA",
    "electra",
    "ElectraForMaskedLM",
    (*_ELECTRA, *MASKED, GELU_ALONE),
    (*_TENSORS, *token_head(*_HEAD, **_WIDE), *token_head(*_HEAD, "W", **_NARROW)),
    prefix="electra.",
    irrelevant=("summary_type", "summary_use_proj", "summary_activation"),  # of a head for multiple choice
    **_SHARED,
)
FAMILIES = (
    _MASKED,
    _MASKED.classifier(
        "ElectraForPreTraining", (*_ELECTRA, _REPLACED, GELU_ALONE), (*_TENSORS, *class_tensors(*_DISCRIMINATOR))
    ),
    _MASKED.classifier(
        "ElectraForSequenceClassification",
        (*_ELECTRA, Classes(), Given({"classes.pooler": "gelu"})),
        (*_TENSORS, *class_tensors("classifier.dense", "classifier.out_proj")),
    ),
)
