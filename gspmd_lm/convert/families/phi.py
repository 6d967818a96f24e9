"""Phi, Phi-3 and Phi-3.5-MoE."""

from gspmd_lm.convert.families.llama import LLAMA, llama_tensors, qk_norm
from gspmd_lm.convert.families.mistral import MIXTRAL
from gspmd_lm.convert.family import ATTENTION_BIAS, BIASES, GELU_NEW, LAYERNORM_EPS, PLAIN_LAYERNORM, llama_fields
from gspmd_lm.convert.fields import Activation, Fixed, Flag, Given, Renamed, Window
from gspmd_lm.convert.rope import Rope

_PHI = (
    *llama_fields(eps=LAYERNORM_EPS, rope=Rope(part=0.5), activation=Activation("hidden_act", "gelu_new", GELU_NEW)),
    *(PLAIN_LAYERNORM, BIASES),
    Given({"block": "parallel", "logits.bias": True}),
    Flag("qk_layernorm", ("attention.qk_norm",), False),
)
_ROPE = Rope(part=1.0, original=4096, older_kinds=(("su", "longrope"), ("yarn", "longrope")))
_PHI_3 = (
    *llama_fields(eps=1e-5, rope=_ROPE),
    Window(None),
    Fixed("full_attn_mod", 1, "has sparse attention in some layers, which is not supported"),
    Fixed("interpolate_factor", 1, "stretches positions, which is not supported"),
)
_PHI_MOE = (
    *llama_fields(8, eps=1e-5, rope=Rope(1e6, mscales=True)),
    *(Window(None), ATTENTION_BIAS),
    Given({"norm.kind": "layernorm", "norm.bias": True}),
    Flag("lm_head_bias", ("logits.bias",), False),
    Renamed("num_local_experts num_experts", "experts.count", 16),
    Fixed("num_experts_per_tok", 2, "is not the number that sparsemixer chooses"),
    Given({"experts.per_token": 2, "experts.routing": "sparsemixer", "experts.normalized_weights": False}),
    Renamed("router_jitter_noise", "experts.jitter", 0.01, may_be_zero=True),
)
_NORMS = qk_norm(name="layernorm")
FAMILIES = (
    LLAMA.relative("Phi-3", "phi3", "Phi3ForCausalLM", _PHI_3, llama_tensors(fused="qkv gate_up")),
    LLAMA.relative(
        "Phi",
        "phi",
        "PhiForCausalLM",
        _PHI,
        llama_tensors(out="dense", up="fc1", down="fc2", last="final_layernorm", more=_NORMS),
    ),
    MIXTRAL.relative(
        "Phi-3.5-MoE",
        "phimoe",
        "PhimoeForCausalLM",
        _PHI_MOE,
        irrelevant=("output_router_logits", "router_aux_loss_coef", "input_jitter_noise"),
    ),
)
