"""Gemma, Gemma 2 and Gemma 3."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from gspmd_lm import config
from gspmd_lm.config import value_at
from gspmd_lm.convert.config_reader import ConfigReader
from gspmd_lm.convert.families.llama import LLAMA, llama_tensors, post_norms, qk_norm
from gspmd_lm.convert.family import ATTENTION_BIAS, TANH, llama_fields
from gspmd_lm.convert.fields import Activation, Fixed, Given, LayerTypes, QueryScale, Values, every_second
from gspmd_lm.convert.rope import Rope


@dataclasses.dataclass(frozen=True)
class Cap:
    """A cap of scores or logits; null means none."""

    name: str
    setting: str
    default: float | None

    def read(self, reader: ConfigReader, values: Values) -> None:
        cap = reader.get(self.name, None if self.name in reader.raw else self.default)
        values[self.setting] = 0.0 if cap is None else reader.positive(self.name, cap)

    def write(self, model: config.ModelConfig) -> dict[str, Any]:
        return {self.name: value_at(model, self.setting) or None}


def all_but_every(length: int, name: str = "") -> Callable[[ConfigReader], Callable[[int], bool]]:
    """Which layers have a window: all but every `length`-th. name: a field that says another length."""

    def find_windows(reader: ConfigReader) -> Callable[[int], bool]:
        last = reader.whole(name, length, 1) if name else length
        return lambda i: (i + 1) % last != 0

    return find_windows


def patterned_layers(length: int, full: str = "full") -> LayerTypes:
    """Layers of which all but every `length`-th have a window, or as sliding_window_pattern says. full: as there."""
    name = "sliding_window_pattern"
    older = lambda model: {name: len(model.layer_pattern)} if model.layer_pattern else {}  # noqa: E731
    return LayerTypes(4096, all_but_every(length, name), older=older, full=full)


CAUSAL = Fixed("use_bidirectional_attention", False, "lets tokens see later ones, which is not supported")
EACH_GEMMA = (ATTENTION_BIAS, CAUSAL, Given({"embedding.scale": lambda values: math.sqrt(values["embed"])}))
_SCORES = (Given({"norm.offset": 1.0, "norm.post": True}), QueryScale())
_OLD_GELU = Activation("hidden_act hidden_activation", "gelu_pytorch_tanh", TANH, (("gelu", "gelu_tanh"),))
_GELU = Activation("hidden_activation hidden_act", "gelu_pytorch_tanh", TANH)
ROPE = Rope(1e6, sliding_theta=1e4, sliding_name="rope_local_base_freq")
_GEMMA = (*llama_fields(16, 256, activation=_OLD_GELU, tied=True), *EACH_GEMMA, Given({"norm.offset": 1.0}))
_GEMMA_2 = (
    *llama_fields(4, 256, activation=_GELU, tied=True),
    *(*EACH_GEMMA, *_SCORES, LayerTypes(4096, every_second)),
    Cap("attn_logit_softcapping", "attention.softcap", 50.0),
    Cap("final_logit_softcapping", "logits.softcap", 30.0),
)
_GEMMA_3 = (
    *llama_fields(4, 256, rope=ROPE, activation=_GELU, tied=True),
    *(*EACH_GEMMA, *_SCORES, Given({"attention.qk_norm": True}), patterned_layers(6)),
    Fixed("attn_logit_softcapping", False, "caps attention scores, which transformers does not do here"),
    Cap("final_logit_softcapping", "logits.softcap", None),
)
POST_NORMS = post_norms("post_attention_layernorm", "post_feedforward_layernorm")
FAMILIES = (
    LLAMA.relative("Gemma", "gemma", "GemmaForCausalLM", _GEMMA),
    LLAMA.relative(
        "Gemma 2",
        "gemma2",
        "Gemma2ForCausalLM",
        _GEMMA_2,
        llama_tensors(mlp_norm="pre_feedforward_layernorm", more=POST_NORMS),
        irrelevant=("sliding_window_size",),
    ),
    LLAMA.relative(
        "Gemma 3",
        "gemma3_text",
        "Gemma3ForCausalLM",
        _GEMMA_3,
        llama_tensors(mlp_norm="pre_feedforward_layernorm", more=(*POST_NORMS, *qk_norm())),
        irrelevant=("_sliding_window_pattern",),  # a note by transformers, which also writes layer_types
    ),
)
