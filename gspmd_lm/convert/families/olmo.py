"""OLMo, OLMo 2, OLMo 3 and OLMoE."""

from gspmd_lm.convert.families.gemma import POST_NORMS, all_but_every
from gspmd_lm.convert.families.llama import LLAMA, ROUTER_TRAINING, llama_tensors, qk_norm, routed_experts
from gspmd_lm.convert.family import ATTENTION_BIAS, NO_CLIP, NO_HEAD_DIM, llama_fields, mixture
from gspmd_lm.convert.fields import Flag, Given, LayerTypes
from gspmd_lm.convert.rope import Rope

_OLMO = (
    *(*llama_fields(eps=Given({"norm.eps": 1e-5})), ATTENTION_BIAS, NO_CLIP),
    Given({"norm.kind": "layernorm", "norm.scale": False}),
)
# OLMo 2: norms behind attention and MLP and none before them, and norms over all heads at once.
_OLMO_2 = (
    ATTENTION_BIAS,
    Given({"norm.pre": False, "norm.post": True, "attention.qk_norm": True, "attention.qk_norm_kind": "joint"}),
)
_ROPE = Rope(5e5, sliding_theta=5e5)
_OLMO_3 = (*llama_fields(eps=1e-5, rope=_ROPE), *_OLMO_2, LayerTypes(4096, all_but_every(4)))
_OLMOE = (
    *(*llama_fields(head_dim=NO_HEAD_DIM, eps=1e-5), ATTENTION_BIAS, NO_CLIP),
    Given({"attention.qk_norm": True, "attention.qk_norm_kind": "joint"}),
    *mixture("num_experts num_local_experts", 64, 8),
    Flag("norm_topk_prob", ("experts.normalized_weights",), False),
)
_JOINT = qk_norm("(N H)", "(K H)")
_TENSORS = llama_tensors(mlp_norm="pre_feedforward_layernorm", more=(*POST_NORMS, *_JOINT))
FAMILIES = (
    LLAMA.relative("OLMo", "olmo", "OlmoForCausalLM", _OLMO),
    LLAMA.relative("OLMo 2", "olmo2", "Olmo2ForCausalLM", (*llama_fields(eps=1e-5), *_OLMO_2), _TENSORS),
    LLAMA.relative("OLMo 3", "olmo3", "Olmo3ForCausalLM", _OLMO_3, _TENSORS),
    LLAMA.relative(
        "OLMoE",
        "olmoe",
        "OlmoeForCausalLM",
        _OLMOE,
        llama_tensors(more=(*_JOINT, *routed_experts("model.layers.{}.mlp"))),
        irrelevant=ROUTER_TRAINING,
    ),
)
