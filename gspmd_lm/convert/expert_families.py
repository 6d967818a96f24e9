"""The families with experts. Their attention is that of families without."""

from gspmd_lm.convert import names
from gspmd_lm.convert.family import (
    ATTENTION_BIAS,
    EPS,
    EPS_5,
    HEAD_DIM,
    LLAMA_SIZES,
    NO_HEAD_DIM,
    SILU,
    SIZES,
    UNTIED,
    Family,
    KeyHeads,
    llama_sizes,
)
from gspmd_lm.convert.fields import Constant, Divisor, Fixed, Flag, QueryScale, Renamed, Temperature
from gspmd_lm.convert.layer_fields import (
    ChunkedLayers,
    DenseLayers,
    GroupLimited,
    LatentSizes,
    LaterTokens,
    LayerTypes,
    LinearLayers,
    MlpTypes,
    SharedExperts,
    SparseLayers,
    Window,
    every_second,
)
from gspmd_lm.convert.names import INV_FREQ
from gspmd_lm.convert.rope import Rope

# How a router is trained: model.balance says it here, and is "none" after an import, as dropout is 0.
_TRAINING = ("output_router_logits", "router_aux_loss_coef", "router_jitter_noise")
_SUM_TO_ONE = Flag("norm_topk_prob", ("normalized_weights",), False)
_GRANITE = (
    *LLAMA_SIZES, EPS, NO_HEAD_DIM, Rope(), SILU, ATTENTION_BIAS, UNTIED,
    Renamed("embedding_multiplier", "embedding_scale", 1.0), QueryScale("attention_multiplier", 1, 1.0),
    Renamed("residual_multiplier", "residual_scale", 1.0), Divisor("logits_scaling", "logit_scale"),
    Renamed("num_local_experts num_experts", "experts", 8), Renamed("num_experts_per_tok", "experts_per_token", 2),
)  # fmt: skip


def _deepseek_router(groups: int, used: int, scale: float):
    """DeepSeek-V3's router, with defaults. The bias on its scores stays as it came until balance_rate is set."""
    return (
        Constant("routing", "sigmoid"), Constant("balance", "bias"), Constant("balance_rate", 0.0),
        Flag("norm_topk_prob", ("normalized_weights",), True, null_is_false=True),
        Renamed("routed_scaling_factor", "expert_scale", scale),
        Renamed("n_group", "expert_groups", groups), Renamed("topk_group", "groups_per_token", used),
    )  # fmt: skip


_LATENT = (
    *LLAMA_SIZES, Rope(turned_name="qk_rope_head_dim"), SILU, UNTIED,
    Fixed("attention_bias", False, "has biases in latent attention, which are not supported"),
    Fixed("rope_interleave", True, "pairs the numbers that are rotated otherwise, which is not supported"),
)  # fmt: skip
_DEEPSEEK = (
    EPS, LatentSizes(), *_LATENT,
    Fixed("moe_layer_freq", 1, "has layers without experts between those with experts, which is not supported"),
)  # fmt: skip
# Settings of parallelism, and of a loss for equal loads: model.balance row is that loss.
_DEEPSEEK_TRAINING = (*_TRAINING, "ep_size", "seq_aux", "aux_loss_alpha")


def _first_every_second(reader):
    first = reader.whole(["max_window_layers"], 28, 0)
    return lambda i: i % 2 == 0 and i < first


EXPERT_FAMILIES = (
    Family(
        "Mixtral", "mixtral", "MixtralForCausalLM", "model.",
        (
            *llama_sizes(8), EPS_5, HEAD_DIM, Rope(1e6), SILU, Window(None), UNTIED,
            Renamed("num_local_experts num_experts", "experts", 8),
            Renamed("num_experts_per_tok", "experts_per_token", 2),
        ),
        names.MIXTRAL, INV_FREQ, _TRAINING,
    ),
    Family(
        "Phi-3.5-MoE", "phimoe", "PhimoeForCausalLM", "model.",
        (
            *llama_sizes(8), EPS_5, HEAD_DIM, Constant("norm", "layernorm"), Constant("norm_bias", True), SILU,
            Window(None), Rope(1e6, mscales=True), ATTENTION_BIAS, Flag("lm_head_bias", ("unembedding_bias",), False),
            UNTIED, Renamed("num_local_experts num_experts", "experts", 16), Constant("experts_per_token", 2),
            Fixed("num_experts_per_tok", 2, "is not the number that sparsemixer chooses"),
            Constant("routing", "sparsemixer"), Constant("normalized_weights", False),
            Renamed("router_jitter_noise", "router_jitter", 0.01, may_be_zero=True),
        ),
        names.MIXTRAL, INV_FREQ, ("output_router_logits", "router_aux_loss_coef", "input_jitter_noise"),
    ),
    Family(
        "Qwen2-MoE", "qwen2_moe", "Qwen2MoeForCausalLM", "model.",
        (
            *llama_sizes(16), EPS, NO_HEAD_DIM, Rope(), SILU, Flag("qkv_bias", ("qkv_bias",), True), UNTIED,
            LayerTypes(4096, _first_every_second, "use_sliding_window"),
            Renamed("num_experts num_local_experts", "experts", 60),
            Renamed("num_experts_per_tok", "experts_per_token", 4),
            Renamed("moe_intermediate_size", "expert_mlp", 1408),
            Renamed("shared_expert_intermediate_size", "shared_mlp", 5632), Constant("shared_gate", True), _SUM_TO_ONE,
            DenseLayers(),
        ),
        names.QWEN2_MOE, INV_FREQ, _TRAINING,
    ),
    Family(
        "Qwen3-MoE", "qwen3_moe", "Qwen3MoeForCausalLM", "model.",
        (
            *llama_sizes(4), EPS, HEAD_DIM, Rope(), SILU, Constant("qk_norm", True), ATTENTION_BIAS, UNTIED,
            Window(4096, "use_sliding_window"), Renamed("num_experts num_local_experts", "experts", 128),
            Renamed("num_experts_per_tok", "experts_per_token", 8), Renamed("moe_intermediate_size", "expert_mlp", 768),
            _SUM_TO_ONE, DenseLayers(),
        ),
        names.QWEN3_MOE, INV_FREQ, (*_TRAINING, "max_window_layers"),
    ),
    Family(
        "GLM-4.5", "glm4_moe", "Glm4MoeForCausalLM", "model.",
        (
            *llama_sizes(8), EPS_5, HEAD_DIM, Rope(part=0.5), SILU, Flag("attention_bias", ("qkv_bias",), False),
            UNTIED, Flag("use_qk_norm", ("qk_norm",), False), *_deepseek_router(1, 1, 1.0),
            Renamed("n_routed_experts num_local_experts", "experts", 128),
            Renamed("num_experts_per_tok", "experts_per_token", 8),
            Renamed("moe_intermediate_size", "expert_mlp", 1408),
            Renamed("first_k_dense_replace", "dense_layers", 1, may_be_zero=True), SharedExperts(), LaterTokens(),
        ),
        names.GLM4_MOE, INV_FREQ, _TRAINING,
    ),
    Family(
        "DeepSeek-V3", "deepseek_v3", "DeepseekV3ForCausalLM", "model.",
        (
            *_DEEPSEEK, *_deepseek_router(8, 4, 2.5), Renamed("n_routed_experts num_local_experts", "experts", 256),
            Fixed("topk_method", "noaux_tc", "is not supported in this family"),
            Fixed("scoring_func", "sigmoid", "is not supported in this family"),
            Renamed("num_experts_per_tok", "experts_per_token", 8),
            Renamed("moe_intermediate_size", "expert_mlp", 2048),
            Renamed("first_k_dense_replace", "dense_layers", 3, may_be_zero=True), SharedExperts(), LaterTokens(),
        ),
        names.DEEPSEEK, INV_FREQ, _DEEPSEEK_TRAINING, ("kimi_k2",),
    ),
    Family(
        "GLM-4.7-Flash", "glm4_moe_lite", "Glm4MoeLiteForCausalLM", "model.",
        (
            EPS_5, LatentSizes(768, 192, 256), *_LATENT, *_deepseek_router(1, 1, 1.8),
            Renamed("n_routed_experts num_local_experts", "experts", 64),
            Renamed("num_experts_per_tok", "experts_per_token", 4),
            Renamed("moe_intermediate_size", "expert_mlp", 1536), MlpTypes(), SharedExperts(), LaterTokens(),
        ),
        names.DEEPSEEK, INV_FREQ, _DEEPSEEK_TRAINING,
    ),
    Family(
        "DeepSeek-V2", "deepseek_v2", "DeepseekV2ForCausalLM", "model.",
        (
            *_DEEPSEEK, GroupLimited(), Renamed("n_routed_experts num_experts", "experts", 64),
            Fixed("scoring_func", "softmax", "is not supported in this family"),
            Fixed("norm_topk_prob", False, "is not supported in this family"), Constant("normalized_weights", False),
            Renamed("routed_scaling_factor", "expert_scale", 1.0),
            Renamed("num_experts_per_tok", "experts_per_token", 6),  # as published: transformers has no default
            Renamed("moe_intermediate_size", "expert_mlp", 1407),
            Renamed("first_k_dense_replace", "dense_layers", 0, may_be_zero=True), SharedExperts(2),
            Fixed("mlp_bias", False, "has biases in the MLP, which are not supported"),
        ),
        names.DEEPSEEK, INV_FREQ, _DEEPSEEK_TRAINING,
    ),
    Family(
        "OLMoE", "olmoe", "OlmoeForCausalLM", "model.",
        (
            *LLAMA_SIZES, EPS_5, NO_HEAD_DIM, Rope(), SILU, ATTENTION_BIAS, UNTIED, Constant("qk_norm", True),
            Constant("qk_norm_kind", "joint"), Renamed("num_experts num_local_experts", "experts", 64),
            Renamed("num_experts_per_tok", "experts_per_token", 8), _SUM_TO_ONE,
            Fixed("clip_qkv", False, "cuts off large queries, keys and values, which is not supported"),
        ),
        names.OLMOE, INV_FREQ, _TRAINING,
    ),
    Family(
        "Granite-MoE", "granitemoe", "GraniteMoeForCausalLM", "model.",
        _GRANITE, names.GRANITE_MOE, INV_FREQ, _TRAINING,
    ),
    Family(
        "Granite-MoE, shared", "granitemoeshared", "GraniteMoeSharedForCausalLM", "model.",
        (*_GRANITE, Renamed("shared_intermediate_size", "shared_mlp", 0)), names.GRANITE_MOE, INV_FREQ, _TRAINING,
    ),
    Family(
        "gpt-oss", "gpt_oss", "GptOssForCausalLM", "model.",
        (
            *llama_sizes(8), EPS_5, Renamed("head_dim", "head_dim", 64), UNTIED,
            Rope(150000.0, default={
                "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
                "original_max_position_embeddings": 4096,
            }),
            Flag("attention_bias", ("qkv_bias", "attention_out_bias"), True), LayerTypes(128, every_second),
            Constant("attention_sinks", True), Constant("mlp_bias", True), Constant("router_bias", True),
            Constant("mlp_up_offset", 1.0), Renamed("swiglu_alpha", "activation_slope", 1.702),
            Renamed("swiglu_limit", "mlp_limit", 7.0), Renamed("num_local_experts num_experts", "experts", 128),
            Renamed("num_experts_per_tok experts_per_token", "experts_per_token", 4),
        ),
        # hidden_act says silu and is not read by transformers; initial_context_length is also in rope_scaling.
        names.GPT_OSS, INV_FREQ, (*_TRAINING, "hidden_act", "initial_context_length"),
    ),
    Family(
        "Qwen3-Next", "qwen3_next", "Qwen3NextForCausalLM", "model.",
        (
            *llama_sizes(2), EPS, Renamed("head_dim", "head_dim", 256), Rope(part=0.25), SILU, UNTIED, LinearLayers(),
            Fixed("attention_bias", False, "has biases in attention with a gate, which are not supported"),
            Constant("norm_offset", 1.0), Constant("qk_norm", True), Constant("attention_gate", True),
            Renamed("num_experts num_local_experts", "experts", 512),
            Renamed("num_experts_per_tok", "experts_per_token", 10),
            Renamed("moe_intermediate_size", "expert_mlp", 512), Flag("norm_topk_prob", ("normalized_weights",), True),
            Renamed("shared_expert_intermediate_size", "shared_mlp", 512), Constant("shared_gate", True), DenseLayers(),
        ),
        # mtp: layers that predict later tokens
        names.QWEN3_NEXT, (*INV_FREQ, r"^mtp\."), (*_TRAINING, "use_sliding_window"),
    ),
    Family(
        "Llama 4", "llama4_text", "Llama4ForCausalLM", "model.",
        (
            *SIZES, KeyHeads(8), Renamed("max_position_embeddings", "context", 131072), EPS_5,
            Renamed("head_dim", "head_dim", 128), Rope(5e5), SILU, ATTENTION_BIAS, UNTIED, ChunkedLayers(),
            Temperature(), Flag("use_qk_norm", ("qk_norm",), True), Constant("qk_norm_kind", "unscaled"),
            Renamed("num_local_experts num_experts", "experts", 16),
            Renamed("num_experts_per_tok", "experts_per_token", 1), Renamed("intermediate_size_mlp", "mlp", 16384),
            Renamed("intermediate_size", "expert_mlp", 8192),
            Constant("shared_mlp", lambda values: values["expert_mlp"]), SparseLayers(), Constant("routing", "sigmoid"),
            Constant("normalized_weights", False), Constant("weighted_input", True),
        ),
        names.LLAMA4, INV_FREQ, (*_TRAINING, "for_llm_compressor"),
    ),
)  # fmt: skip
