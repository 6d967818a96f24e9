"""Arcee."""

from gspmd_lm.convert.families.llama import LLAMA
from gspmd_lm.convert.family import ATTENTION_BIAS, EPS_5, HEAD_DIM, LLAMA_SIZES, MLP_BIAS, TANH, UNTIED
from gspmd_lm.convert.fields import Activation, Given
from gspmd_lm.convert.rope import Rope

_ARCEE = (
    *(*LLAMA_SIZES, EPS_5, HEAD_DIM, Rope(), ATTENTION_BIAS, MLP_BIAS, UNTIED),
    Given(mlp_kind="plain"),
    Activation("hidden_act", "relu2", TANH),
)
FAMILIES = (LLAMA.relative("Arcee", "arcee", "ArceeForCausalLM", _ARCEE),)
