"""StableLM."""

from gspmd_lm.convert.families.llama import LLAMA
from gspmd_lm.convert.family import LAYERNORM_EPS, NO_HEAD_DIM, llama_fields
from gspmd_lm.convert.fields import Fixed, Flag, Given
from gspmd_lm.convert.rope import Rope

_STABLELM = (
    *llama_fields(32, NO_HEAD_DIM, LAYERNORM_EPS, Rope(part=0.25)),
    Given({"norm.kind": "layernorm", "norm.bias": True}),
    Flag("use_qkv_bias", ("attention.qkv_bias",), False),
    Flag("use_parallel_residual", ("block",), False, "parallel", "sequential"),
    Fixed("qk_layernorm", False, "stores the norm of each head as a tensor of its own, which is not supported"),
)
FAMILIES = (LLAMA.relative("StableLM", "stablelm", "StableLmForCausalLM", _STABLELM),)
