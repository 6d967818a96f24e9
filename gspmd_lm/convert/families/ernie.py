"""ERNIE 4.5. The encoder ERNIE is in bert.py."""

from gspmd_lm.convert.families.llama import LLAMA, llama_tensors
from gspmd_lm.convert.family import ALL_BIASES, llama_fields
from gspmd_lm.convert.fields import Flag
from gspmd_lm.convert.rope import Rope

_ERNIE = (*llama_fields(2, 128, 1e-5, Rope(5e5), tied=True), Flag("use_bias", ALL_BIASES, False))
_TENSORS = llama_tensors(interleaved_rope=True)
FAMILIES = (LLAMA.relative("ERNIE 4.5", "ernie4_5", "Ernie4_5ForCausalLM", _ERNIE, _TENSORS),)
