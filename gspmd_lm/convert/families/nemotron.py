"""Nemotron."""

from gspmd_lm.convert.families.llama import LLAMA
from gspmd_lm.convert.family import ATTENTION_BIAS, MLP_BIAS, PLAIN_LAYERNORM, TANH, llama_fields
from gspmd_lm.convert.fields import Activation, Given, Renamed
from gspmd_lm.convert.rope import Rope

_EPS = Renamed("norm_eps", "norm.eps", 1e-5)
_NEMOTRON = (
    *llama_fields(eps=_EPS, rope=Rope(part=0.5), activation=Activation("hidden_act", "relu2", TANH)),
    *(PLAIN_LAYERNORM, Given({"norm.offset": 1.0}), ATTENTION_BIAS, MLP_BIAS),
)
FAMILIES = (LLAMA.relative("Nemotron", "nemotron", "NemotronForCausalLM", _NEMOTRON),)
