"""gpt-oss: sinks of attention, and experts whose gate and up take turns."""

from typing import Any

from gspmd_lm.convert.families.llama import LLAMA, ROUTER_TRAINING, llama_tensors
from gspmd_lm.convert.family import llama_fields
from gspmd_lm.convert.fields import Flag, Given, LayerTypes, Renamed, every_second
from gspmd_lm.convert.layout import Tensor, linear
from gspmd_lm.convert.rope import Rope

_YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
_SILU = Given({"feed_forward.activation": "silu"})  # hidden_act says silu, too, and is not read by transformers
_ATTENTION = (
    *llama_fields(8, 64, 1e-5, Rope(150000.0, default=_YARN), activation=_SILU),
    Flag("attention_bias", ("attention.qkv_bias", "attention.out_bias"), True),
    LayerTypes(128, every_second),
)
_EXPERTS = (
    Given(
        {"attention.sinks": True, "feed_forward.bias": True, "experts.router_bias": True, "feed_forward.up_offset": 1.0}
    ),
    Renamed("swiglu_alpha", "feed_forward.slope", 1.702),
    Renamed("swiglu_limit", "feed_forward.limit", 7.0),
    Renamed("num_local_experts num_experts", "experts.count", 128),
    Renamed("num_experts_per_tok experts_per_token", "experts.per_token", 4),
)
_MLP = "model.layers.{}.mlp"
_TURNS: dict[str, Any] = {"mlp": "expert_width", "interleaved_gate": True}
_TENSORS = (
    Tensor("model.layers.{}.self_attn.sinks", "N", ("attention.sinks",)),
    *linear(f"{_MLP}.router", "C D", "mlp.router", biases=("mlp.router_bias",)),
    Tensor(f"{_MLP}.experts.gate_up_proj", "E D J", ("mlp.w_gate", "mlp.w_up"), **_TURNS),
    Tensor(f"{_MLP}.experts.gate_up_proj_bias", "E J", ("mlp.b_gate", "mlp.b_up"), **_TURNS),
    Tensor(f"{_MLP}.experts.down_proj", "E F D", ("mlp.w_down",), mlp="expert_width"),
    Tensor(f"{_MLP}.experts.down_proj_bias", "E D", ("mlp.b_down",), mlp="expert_width"),
)
FAMILIES = (
    LLAMA.relative(
        "gpt-oss",
        "gpt_oss",
        "GptOssForCausalLM",
        (*_ATTENTION, *_EXPERTS),
        llama_tensors(more=_TENSORS),
        # initial_context_length is also in rope_scaling.
        irrelevant=(*ROUTER_TRAINING, "hidden_act", "initial_context_length"),
    ),
)
