"""ALBERT: one layer that is computed several times, and a token table with a width of its own."""

from typing import Any

from gspmd_lm.convert.families.bert import (
    BERT_CONTEXT,
    BERT_SHARED,
    ENCODER,
    LEARNED,
    MASKED,
    Classes,
    class_tensors,
    embedding_tables,
    token_head,
)
from gspmd_lm.convert.family import GELU_NEW, Family
from gspmd_lm.convert.fields import Activation, Fixed, Given, Renamed
from gspmd_lm.convert.layout import QUERY_KEY_VALUE, linear, norm, plain_mlp, separate_qkv

_GROUPS = "has layers with weights of their own beside shared ones, which is not supported"
_ALBERT = (
    *(*ENCODER, *LEARNED, BERT_CONTEXT, Given({"shared_layers": True, "embedding.input": "sum"})),
    Activation("hidden_act", "gelu_new", GELU_NEW),
    Renamed("embedding_size", "embedding.width", 128),
    Fixed("num_hidden_groups", 1, _GROUPS),
    Fixed("inner_group_num", 1, _GROUPS),
)
_LAYER = "albert.encoder.albert_layer_groups.0.albert_layers.0"
_WIDEN = "albert.encoder.embedding_hidden_mapping_in"
_TENSORS = (
    *embedding_tables("albert.embeddings", "W"),
    *linear(_WIDEN, "D W", "embedding_in", biases=("embedding_in_bias",)),
    *separate_qkv(f"{_LAYER}.attention", QUERY_KEY_VALUE),
    *linear(f"{_LAYER}.attention.dense", "D (N H)", "attention.wo"),
    *norm(f"{_LAYER}.attention.LayerNorm", "attention_sum_norm", bias=True),
    *plain_mlp(_LAYER, "ffn", "ffn_output"),
    *norm(f"{_LAYER}.full_layer_layer_norm", "mlp_sum_norm", bias=True),
)
_HEAD = ("predictions.dense", "predictions.LayerNorm", "predictions.decoder", "predictions.bias")
_SHARED: dict[str, Any] = BERT_SHARED | {
    "heads": (r"^predictions\.", r"^sop_classifier\.", r"^(albert\.)?pooler\.", r"^classifier\.")
}
_MASKED = Family(
    "ALBERT",
    "albert",
    "AlbertForMaskedLM",
    (*_ALBERT, *MASKED),
    (*_TENSORS, *token_head(*_HEAD, "W")),
    prefix="albert.",
    # Fields of its authors' own code, which nothing of transformers' reads.
    irrelevant=("down_scale_factor", "gap_size", "net_structure_type", "num_memory_blocks"),
    twice={"predictions.decoder.bias": "predictions.bias"},
    **_SHARED,
)
FAMILIES = (
    _MASKED,
    _MASKED.classifier(
        "AlbertForSequenceClassification",
        (*_ALBERT, Classes()),
        (*_TENSORS, *class_tensors("albert.pooler", "classifier")),
    ),
)
