"""BLIP-2: a decoder of another family that reads an image through learned query tokens."""

import dataclasses
from typing import Any

from gspmd_lm import config
from gspmd_lm.convert.config_reader import ConfigReader
from gspmd_lm.convert.families.clip import IMAGE, TEXT, VISION, tower_blocks, tower_sizes
from gspmd_lm.convert.families.opt import OPT
from gspmd_lm.convert.families.t5 import T5
from gspmd_lm.convert.families.vit import ImagePatches
from gspmd_lm.convert.family import GELU_NEW, Family, Part
from gspmd_lm.convert.fields import Activation, Fixed, Values
from gspmd_lm.convert.layout import Tensor, linear, norm, plain_mlp

_QUERIES = "qformer_config"
_ROWS, _EVERY = "num_query_tokens", f"{_QUERIES}.cross_attention_frequency"
_VISION_STACK = Part(VISION, (
    *tower_sizes(1408, 16, 6144, 39, 1e-6), ImagePatches("none", 14), Activation("hidden_act", "gelu", GELU_NEW),
    Fixed("num_channels", 3, "is another number of colours than 3, which is not supported"),
    Fixed("qkv_bias", True, "has no biases of queries, keys and values, which is not supported"),
))  # fmt: skip
_QUERY_STACK = Part(_QUERIES, (
    *tower_sizes(768, 12, 3072, 12, 1e-12), Activation("hidden_act", "gelu", GELU_NEW),
    Fixed("use_qformer_text_input", False, "also reads a text, which is not supported"),
))  # fmt: skip


@dataclasses.dataclass(frozen=True)
class ReadImages:
    """BLIP-2's stacks before its decoder: the image encoder, and the one whose query tokens attend to its output."""

    start_token: int  # of a config.json that says none

    def read(self, reader: ConfigReader, values: Values) -> None:
        found, queries = Values(), Values()
        _VISION_STACK.read(reader, found)
        _QUERY_STACK.read(reader, queries)
        kept = {name: name for name in ("layers", "embed", "heads", "kv_heads", "head_dim", "mlp")}
        kept |= {"feed_forward.activation": "activation", "norm.eps": "norm_eps"}
        values["vision"] = {"patches": found["patches"]} | {name: found[key] for key, name in kept.items()} | {
            "queries": {name: queries[key] for key, name in kept.items()} | {
                "rows": reader.number(_ROWS, 32), "every": reader.number(_EVERY, 2),
                "token": reader.whole("image_token_index image_token_id", 0, 0),
                "start_token": reader.whole(f"{TEXT}.bos_token_id", self.start_token, 0),
            },
        }  # fmt: skip
        values |= {"frozen": ["vision"], "row_multiple": 8 if "encoder" in values else 1}

    def write(self, model: config.ModelConfig) -> dict[str, Any]:
        if not (model.vision and model.vision_config and model.queries_config and (queries := model.vision.queries)):
            return {}
        written = {_ROWS: queries.rows, _EVERY: queries.every, "image_token_index": queries.token}
        written |= {f"{TEXT}.bos_token_id": queries.start_token}
        written |= _VISION_STACK.write(model.vision_config) | _QUERY_STACK.write(model.queries_config)
        del written[f"{VISION}.num_channels"]  # transformers has no such field: there are three
        return written


def _bert_attention(name: str, ours: str, **of_keys: Any) -> tuple[Tensor, ...]:
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
    Tensor(f"{IMAGE}.class_embedding", "1 1 D", ("vision.class_row",)),
    *linear(f"{IMAGE}.patch_embedding", "D x", "vision.stem", biases=("vision.stem_bias",)),
    Tensor(f"{IMAGE}.position_embedding", "1 p D", ("vision.position_embedding",)),
    *linear(f"{_SEEN}.qkv", "(R H) D", *_OWN),
    *linear(f"{_SEEN}.projection", "D (N H)", "vision.attention.wo"),
    *(one for one in tower_blocks("vision_model", "vision.", "post_layernorm") if ".self_attn." not in one.name),
    Tensor("query_tokens", "1 p D", ("queries.query_rows",)),
    *norm("qformer.layernorm", "queries.embedding_norm", bias=True),
    *_bert_attention(f"{_QFORMER}.attention", "queries.attention"),
    *_bert_attention(f"{_QFORMER}.crossattention", "queries.cross", others=lambda queries: {"D": queries.memory_width}),
    *plain_mlp(_QFORMER, "intermediate_query.dense", "output_query.dense", "queries."),
    *norm(f"{_QFORMER}.output_query.LayerNorm", "queries.mlp_sum_norm", bias=True),
    *linear("language_projection", "D O", "query_projection", biases=("query_projection_bias",),
            others=lambda model: {"O": model.queries_config.embed}),
)  # fmt: skip
_UNREAD = (
    "image_text_hidden_size", "vocab_size", "max_position_embeddings", "encoder_hidden_size", "tie_word_embeddings",
    "use_decoder_only_language_model",
)  # fmt: skip


def _blip2(row: Family, start_token: int) -> Family:
    """BLIP-2 with the decoder of another family."""
    tensors = tuple(dataclasses.replace(one, name=f"language_model.{one.name}") for one in row.tensors)
    return Family(
        "BLIP-2",
        "blip-2",
        "Blip2ForConditionalGeneration",
        (Part(TEXT, row.codecs, row.model_type), ReadImages(start_token)),
        (*tensors, *_READING),
        prefix="",
        no_weights=tuple(pattern.replace("^", r"^language_model\.") for pattern in row.no_weights),
        irrelevant=(*row.irrelevant, *_UNREAD),
        copies=tuple(f"language_model.{name}" for name in row.copies),
        parts=(TEXT, VISION, _QUERIES),
        text_type=row.model_type,
    )


FAMILIES = (_blip2(OPT, 2), _blip2(T5, 1))
