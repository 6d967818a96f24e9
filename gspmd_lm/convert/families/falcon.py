"""Falcon, in its old form and its new one."""

from typing import Any

from gspmd_lm import config
from gspmd_lm.convert.config_reader import ConfigReader
from gspmd_lm.convert.families.gpt2 import GPT_EPS
from gspmd_lm.convert.families.gpt_neox import NORM_BEFORE, megatron_tensors
from gspmd_lm.convert.family import (
    ALL_BIASES,
    GELU_NEW,
    NO_HEAD_DIM,
    PLAIN_LAYERNORM,
    ROTATED,
    TIED,
    Family,
    four_times,
)
from gspmd_lm.convert.fields import MOST_LAYERS, Activation, Flag, Renamed, Values
from gspmd_lm.convert.layout import norm
from gspmd_lm.convert.rope import Rope


class FalconBlock:
    """Falcon's block: key heads, norms, and whether attention and MLP are parallel, in the old form and the new."""

    def read(self, reader: ConfigReader, values: Values) -> None:
        new = reader.flag("new_decoder_architecture", False)
        heads = reader.number("num_kv_heads n_head_kv", values["heads"])
        one = reader.flag("multi_query", True)
        parallel = reader.flag("parallel_attn", True)
        norms = reader.get("num_ln_in_parallel_attn", 2 if new else 1)
        if norms not in (1, 2) or (norms == 2 and not new):
            reader.refuse("num_ln_in_parallel_attn", norms, "is not 1, nor 2 with new_decoder_architecture")
        if new and not parallel:
            reader.refuse("parallel_attn", parallel, "contradicts new_decoder_architecture")
        values["kv_heads"] = heads if new else 1 if one else values["heads"]
        values["block"] = "parallel" if parallel else "sequential"
        values["norm.shared"] = norms == 1

    def write(self, model: config.ModelConfig) -> dict[str, Any]:
        parallel = model.block == "parallel"
        new = parallel and (not model.norm.shared or model.kv_heads not in (1, model.heads))
        written: dict[str, Any] = {"new_decoder_architecture": new, "parallel_attn": parallel}
        if not new:
            return written | {"multi_query": model.kv_heads == 1}
        return written | {"num_kv_heads": model.kv_heads, "num_ln_in_parallel_attn": 1 if model.norm.shared else 2}


_FALCON = (
    Renamed("vocab_size", "vocab"),
    Renamed("hidden_size n_embed", "embed"),
    Renamed("num_hidden_layers n_layer", "layers", most=MOST_LAYERS),
    Renamed("num_attention_heads n_head", "heads"),
    Renamed("max_position_embeddings", "context", 2048),
    Renamed("ffn_hidden_size", "mlp", four_times),
    *(PLAIN_LAYERNORM, NO_HEAD_DIM, FalconBlock(), Rope(), GPT_EPS, Flag("bias", ALL_BIASES, False), TIED),
    Activation("activation", "gelu", GELU_NEW),
    Flag("alibi", ("positions",), False, "alibi_bf16", "rope"),
    NORM_BEFORE,
)


_ONE_NORM: dict[str, Any] = {"bias": True, "exists_in": lambda model: model.norm.shared}
_TWO_NORMS: dict[str, Any] = {"bias": True, "exists_in": lambda model: not model.norm.shared}
_TENSORS = (
    *megatron_tensors("transformer", "h", "self_attention", "word_embeddings", "ln_f", "lm_head"),
    *norm("transformer.h.{}.input_layernorm", "attention_norm", **_ONE_NORM),
    *norm("transformer.h.{}.post_attention_layernorm", "mlp_norm", **_ONE_NORM),
    *norm("transformer.h.{}.ln_attn", "attention_norm", **_TWO_NORMS),
    *norm("transformer.h.{}.ln_mlp", "mlp_norm", **_TWO_NORMS),
)
FAMILIES = (
    Family(
        "Falcon",
        "falcon",
        "FalconForCausalLM",
        _FALCON,
        _TENSORS,
        prefix="transformer.",
        no_weights=ROTATED,
        irrelevant=("ff_factor",),
    ),
)
