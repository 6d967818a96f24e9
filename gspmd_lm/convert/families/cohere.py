"""Cohere and Cohere 2."""

from gspmd_lm.convert.families.gemma import patterned_layers
from gspmd_lm.convert.families.llama import LLAMA, llama_tensors, qk_norm
from gspmd_lm.convert.family import ATTENTION_BIAS, LAYERNORM_EPS, LLAMA_SIZES, NO_HEAD_DIM, SILU, TIED
from gspmd_lm.convert.fields import Flag, Given, MustEqual, Renamed
from gspmd_lm.convert.rope import Rope

_COHERE = (
    *(*LLAMA_SIZES, NO_HEAD_DIM, LAYERNORM_EPS, SILU, ATTENTION_BIAS, TIED),
    Given(norm="layernorm", block="parallel", qk_norm_kind="per_head"),
    Renamed("logit_scale", "logit_scale", 0.0625),
    MustEqual("head_dim", "head_dim", "is not hidden_size / num_attention_heads"),
)
_TENSORS = llama_tensors(interleaved_rope=True, more=qk_norm("N H", "K H", interleaved_rope=True))
# Cohere's own code has them; transformers does not.
_UNREAD = (
    "layer_switch", "order_of_interleaved_layers", "position_embedding_type", "rotary_pct", "use_embedding_sharing",
    "use_gated_activation", "use_parallel_block", "use_parallel_embedding", "_sliding_window_pattern",
)  # fmt: skip
FAMILIES = (
    LLAMA.relative(
        "Cohere",
        "cohere",
        "CohereForCausalLM",
        (*_COHERE, Rope(5e5), Flag("use_qk_norm", ("qk_norm",), False)),
        _TENSORS,
    ),
    LLAMA.relative(
        "Cohere 2",
        "cohere2",
        "Cohere2ForCausalLM",
        (*_COHERE, Rope(), patterned_layers(4, full="nope")),
        _TENSORS,
        irrelevant=_UNREAD,
    ),
)
