"""GPT-NeoX, and the tensor names that GPT-NeoX, BLOOM and Falcon inherited from Megatron."""

from gspmd_lm.convert.families.gpt2 import QKV
from gspmd_lm.convert.family import (
    CAUSAL_MASKS,
    GELU,
    LAYERNORM_EPS,
    ONE_WIDTH,
    PLAIN_LAYERNORM,
    ROTATED,
    SIZES,
    UNTIED,
    Family,
)
from gspmd_lm.convert.fields import Fixed, Flag, Given, Renamed
from gspmd_lm.convert.layout import Tensor, linear, norm, plain_mlp
from gspmd_lm.convert.rope import Rope


def megatron_tensors(prefix: str, layers: str, attention: str, table: str, last_norm: str, head: str):
    """Tensors with the names that BLOOM, Falcon and GPT-NeoX took from Megatron, without the norms."""
    layer = f"{prefix}.{layers}.{{}}"
    return (
        Tensor(f"{prefix}.{table}.weight", "V D", ("embedding",)),
        *linear(f"{layer}.{attention}.query_key_value", "(R H) D", *QKV, order="grouped"),
        *linear(f"{layer}.{attention}.dense", "D (N H)", "attention.wo"),
        *plain_mlp(f"{layer}.mlp", "dense_h_to_4h", "dense_4h_to_h"),
        *norm(f"{prefix}.{last_norm}", "final_norm", bias=True),
        Tensor(f"{head}.weight", "V D", ("unembedding",)),
    )


NORM_BEFORE = Fixed(
    "apply_residual_connection_post_layernorm", False, "adds up after the norms, which is not supported"
)
_NEOX = (
    *(*SIZES, Renamed("intermediate_size", "mlp"), Renamed("max_position_embeddings", "context"), ONE_WIDTH),
    *(PLAIN_LAYERNORM, LAYERNORM_EPS, GELU, UNTIED, Given({"feed_forward.bias": True})),
    Rope(theta_name="rotary_emb_base", part=0.25, part_name="rotary_pct"),
    Flag("use_parallel_residual", ("block",), True, "parallel", "sequential"),
    Given({"norm.shared": lambda values: values["block"] == "sequential"}),
    Flag("attention_bias", ("attention.qkv_bias", "attention.out_bias"), True),
)
_TENSORS = (
    *megatron_tensors("gpt_neox", "layers", "attention", "embed_in", "final_layer_norm", "embed_out"),
    *norm("gpt_neox.layers.{}.input_layernorm", "attention_norm", bias=True),
    *norm("gpt_neox.layers.{}.post_attention_layernorm", "mlp_norm", bias=True),
)
FAMILIES = (
    Family(
        "GPT-NeoX",
        "gpt_neox",
        "GPTNeoXForCausalLM",
        _NEOX,
        _TENSORS,
        prefix="gpt_neox.",
        no_weights=(*ROTATED, *CAUSAL_MASKS),
    ),
)
