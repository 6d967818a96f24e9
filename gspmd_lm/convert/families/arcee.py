"""Arcee."""

from gspmd_lm.convert.families.llama import LLAMA
from gspmd_lm.convert.family import ATTENTION_BIAS, MLP_BIAS, TANH, llama_fields
from gspmd_lm.convert.fields import Activation, Given

_ARCEE = (
    *llama_fields(eps=1e-5, activation=Activation("hidden_act", "relu2", TANH)),
    *(ATTENTION_BIAS, MLP_BIAS, Given({"feed_forward.kind": "plain"})),
)
FAMILIES = (LLAMA.relative("Arcee", "arcee", "ArceeForCausalLM", _ARCEE),)
