"""Granite, and its mixtures of experts."""

import dataclasses
from typing import Any

from gspmd_lm import config
from gspmd_lm.config import value_at
from gspmd_lm.convert.config_reader import ConfigReader
from gspmd_lm.convert.families.llama import LLAMA, ROUTER_TRAINING, llama_tensors
from gspmd_lm.convert.family import ATTENTION_BIAS, MLP_BIAS, NO_HEAD_DIM, llama_fields, mixture
from gspmd_lm.convert.fields import QueryScale, Renamed, Values, find_root
from gspmd_lm.convert.layout import Tensor


@dataclasses.dataclass(frozen=True)
class Divisor:
    """A field that divides what a setting multiplies."""

    name: str
    setting: str

    def read(self, reader: ConfigReader, values: Values) -> None:
        values[self.setting] = 1 / reader.number(self.name, 1.0)

    def write(self, model: config.ModelConfig) -> dict[str, Any]:
        return {self.name: find_root(value_at(model, self.setting), -1)}


_SPARSE = "model.layers.{}.block_sparse_moe"
_SCALES = (
    Renamed("embedding_multiplier", "embedding.scale", 1.0),
    QueryScale("attention_multiplier", 1, 1.0),
    Renamed("residual_multiplier", "residual.scale", 1.0),
    Divisor("logits_scaling", "logits.scale"),
)
_GRANITE = (*llama_fields(), ATTENTION_BIAS, MLP_BIAS, *_SCALES)
_NUMBERS = mixture("num_local_experts num_experts", 8, 2)
_MOE = (*llama_fields(head_dim=NO_HEAD_DIM), ATTENTION_BIAS, *_SCALES, *_NUMBERS)
_GATE_AND_UP = ("mlp.shared.w_gate", "mlp.shared.w_up")
_EXPERTS = (
    Tensor(f"{_SPARSE}.router.layer.weight", "C D", ("mlp.router",)),
    Tensor(f"{_SPARSE}.input_linear.weight", "E J D", ("mlp.w_gate", "mlp.w_up"), mlp="expert_width"),
    Tensor(f"{_SPARSE}.output_linear.weight", "E D F", ("mlp.w_down",), mlp="expert_width"),
    Tensor("model.layers.{}.shared_mlp.input_linear.weight", "J D", _GATE_AND_UP, mlp="experts.shared_mlp"),
    Tensor("model.layers.{}.shared_mlp.output_linear.weight", "D F", ("mlp.shared.w_down",), mlp="experts.shared_mlp"),
)
GRANITE_MOE = LLAMA.relative(
    "Granite-MoE", "granitemoe", "GraniteMoeForCausalLM", _MOE, llama_tensors(more=_EXPERTS), irrelevant=ROUTER_TRAINING
)
FAMILIES = (
    LLAMA.relative("Granite", "granite", "GraniteForCausalLM", _GRANITE),
    GRANITE_MOE,
    GRANITE_MOE.relative(
        "Granite-MoE, shared",
        "granitemoeshared",
        "GraniteMoeSharedForCausalLM",
        (*_MOE, Renamed("shared_intermediate_size", "experts.shared_mlp", 0)),
    ),
)
