"""RoBERTa, XLM-RoBERTa and CamemBERT."""

from typing import Any

from gspmd_lm import config
from gspmd_lm.convert.config_reader import ConfigReader
from gspmd_lm.convert.families.bert import (
    BERT_SHARED,
    ENCODER,
    GELU_ALONE,
    LEARNED,
    MASKED,
    NO_TOKENS,
    Classes,
    class_tensors,
    encoder_tensors,
    token_head,
)
from gspmd_lm.convert.family import Family
from gspmd_lm.convert.fields import Given, Values


class PositionsAfterPadding:
    """RoBERTa's positions: they begin after the number of the padding token, whose row and those before are unused."""

    def read(self, reader: ConfigReader, values: Values) -> None:
        rows = reader.number("max_position_embeddings", 512)
        values["embedding.position_offset"] = reader.whole("pad_token_id", 1, 0) + 1
        values["context"] = rows - values["embedding.position_offset"]
        if values["context"] < 1:
            reader.refuse("max_position_embeddings", rows, f"leaves no position after pad_token_id + 1 = "
                          f"{values['embedding.position_offset']}")  # fmt: skip
            values["context"] = 1

    def write(self, model: config.ModelConfig) -> dict[str, Any]:
        return {
            "max_position_embeddings": model.embedding.position_offset + model.context,
            "pad_token_id": model.embedding.position_offset - 1,
        }


_FIELDS = (*ENCODER, *LEARNED, PositionsAfterPadding(), Given({"feed_forward.activation": "gelu"}), GELU_ALONE)
_HEAD = token_head("lm_head.dense", "lm_head.layer_norm", "lm_head.decoder", "lm_head.bias")


def _rows(name: str, model_type: str, kind: str) -> tuple[Family, Family]:
    """The rows of a family with RoBERTa's tensors. kind: how the names of its classes begin."""
    tensors = encoder_tensors("roberta.")
    masked = Family(
        name,
        model_type,
        f"{kind}ForMaskedLM",
        (*_FIELDS, *MASKED),
        (*tensors, *_HEAD),
        prefix="roberta.",
        twice={"lm_head.decoder.bias": "lm_head.bias"},
        **BERT_SHARED,
    )
    classes = (*tensors, *class_tensors("classifier.dense", "classifier.out_proj"))
    fields = (*_FIELDS, Classes())
    return masked, masked.classifier(f"{kind}ForSequenceClassification", fields, classes, irrelevant=NO_TOKENS)


FAMILIES = (
    *_rows("RoBERTa", "roberta", "Roberta"),
    *_rows("XLM-RoBERTa", "xlm-roberta", "XLMRoberta"),
    *_rows("CamemBERT", "camembert", "Camembert"),
)
