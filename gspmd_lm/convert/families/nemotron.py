"""Nemotron."""

from gspmd_lm.convert.families.llama import LLAMA
from gspmd_lm.convert.family import ATTENTION_BIAS, HEAD_DIM, LLAMA_SIZES, MLP_BIAS, PLAIN_LAYERNORM, TANH, UNTIED
from gspmd_lm.convert.fields import Activation, Given, Renamed
from gspmd_lm.convert.rope import Rope

_NEMOTRON = (
    *(*LLAMA_SIZES, PLAIN_LAYERNORM, HEAD_DIM, Rope(part=0.5), ATTENTION_BIAS, MLP_BIAS, UNTIED),
    Given(norm_offset=1.0),
    Renamed("norm_eps", "norm_eps", 1e-5),
    Activation("hidden_act", "relu2", TANH),
)
FAMILIES = (LLAMA.relative("Nemotron", "nemotron", "NemotronForCausalLM", _NEMOTRON),)
