"""config.json of published models in the words they were published with, and the settings that they must give."""

import math

from gspmd_lm import config

LLAMA31 = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000,
    "eos_token_id": 128001, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 14336, "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama",
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "transformers_version": "4.43.0.dev0", "use_cache": True, "vocab_size": 128256,
}  # fmt: skip
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "aux_loss_alpha": 0.001, "bos_token_id": 0, "eos_token_id": 1, "ep_size": 1, "first_k_dense_replace": 3,
    "hidden_act": "silu", "hidden_size": 7168, "initializer_range": 0.02, "intermediate_size": 18432,
    "kv_lora_rank": 512, "max_position_embeddings": 163840, "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1,
    "norm_topk_prob": True, "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61,
    "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "pretraining_tp": 1, "q_lora_rank": 1536,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
    "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "seq_aux": True,
    "tie_word_embeddings": False, "topk_group": 4, "topk_method": "noaux_tc", "torch_dtype": "bfloat16",
    "use_cache": True, "v_head_dim": 128, "vocab_size": 129280,
}  # fmt: skip
DEEPSEEK_V2 = DEEPSEEK_V3 | {
    "architectures": ["DeepseekV2ForCausalLM"], "bos_token_id": 100000, "eos_token_id": 100001,
    "first_k_dense_replace": 1, "hidden_size": 5120, "intermediate_size": 12288, "model_type": "deepseek_v2",
    "moe_intermediate_size": 1536, "n_routed_experts": 160, "n_shared_experts": 2, "norm_topk_prob": False,
    "num_experts_per_tok": 6, "num_hidden_layers": 60, "num_nextn_predict_layers": 0,
    "rope_scaling": DEEPSEEK_V3["rope_scaling"] | {"mscale": 0.707, "mscale_all_dim": 0.707},
    "routed_scaling_factor": 16.0, "scoring_func": "softmax", "topk_group": 3, "topk_method": "group_limited_greedy",
    "vocab_size": 102400,
}  # fmt: skip


def _latent_scale(factor, weight):
    """What DeepSeek's code multiplies scores with, in its order: the last bit depends on it."""
    strength = 0.1 * weight * math.log(factor) + 1.0
    return 192**-0.5 * strength * strength


# Published forms of config.json -> settings that they must give.
PUBLISHED = {
    "llama-2": (
        {
            "_name_or_path": "meta-llama/Llama-2-7b-hf", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu",
            "hidden_size": 4096, "intermediate_size": 11008, "max_position_embeddings": 4096, "model_type": "llama",
            "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32, "pretraining_tp": 1,
            "rms_norm_eps": 1e-05, "rope_scaling": None, "tie_word_embeddings": False, "torch_dtype": "float16",
            "vocab_size": 32000,
        },
        {"rope_theta": 10000.0, "kv_heads": 32, "head_dim": 128, "context": 4096, "mlp": 11008, "norm_eps": 1e-5},
    ),
    "llama-3.1": (
        LLAMA31,
        {
            "rope_theta": 500000.0, "kv_heads": 8, "vocab": 128256, "tied_embeddings": False,
            "rope_scaling": config.RopeScaling(
                kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=8192
            ),
        },
    ),
    "mistral-0.1": (
        {
            "architectures": ["MistralForCausalLM"], "hidden_act": "silu", "hidden_size": 4096,
            "intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mistral",
            "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
            "rope_theta": 10000.0, "sliding_window": 4096, "vocab_size": 32000,
        },
        {"sliding_window": 4096, "layer_pattern": (), "head_dim": 128},
    ),
    "mistral-nemo": (
        {
            "architectures": ["MistralForCausalLM"], "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120,
            "intermediate_size": 14336, "max_position_embeddings": 131072, "model_type": "mistral",
            "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
            "rope_theta": 1000000.0, "sliding_window": None, "vocab_size": 131072,
        },
        {"sliding_window": 0, "head_dim": 128, "embed": 5120},
    ),
    "qwen2.5": (
        {
            "architectures": ["Qwen2ForCausalLM"], "hidden_act": "silu", "hidden_size": 3584,
            "intermediate_size": 18944, "max_position_embeddings": 131072, "max_window_layers": 28,
            "model_type": "qwen2", "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4,
            "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 131072, "tie_word_embeddings": False,
            "use_mrope": False, "use_sliding_window": False, "vocab_size": 152064,
        },
        {"sliding_window": 0, "qkv_bias": True, "attention_out_bias": False, "qk_norm": False},
    ),
    "qwen2.5-1m": (
        {
            "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "dual_chunk_attention_config": {
                "chunk_size": 262144, "local_size": 8192, "original_max_position_embeddings": 262144,
            },
            "hidden_act": "silu", "hidden_size": 3584, "intermediate_size": 18944, "max_position_embeddings": 1010000,
            "max_window_layers": 28, "model_type": "qwen2", "num_attention_heads": 28, "num_hidden_layers": 28,
            "num_key_value_heads": 4, "rms_norm_eps": 1e-05, "rope_theta": 10000000.0, "sliding_window": 32768,
            "tie_word_embeddings": False, "use_sliding_window": False, "vocab_size": 152064,
        },
        {"context": 262144, "sliding_window": 0, "rope_theta": 1e7},
    ),
    "qwen3": (
        {
            "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "head_dim": 128, "hidden_act": "silu",
            "hidden_size": 1024, "intermediate_size": 3072, "max_position_embeddings": 40960, "max_window_layers": 28,
            "model_type": "qwen3", "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8,
            "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None,
            "tie_word_embeddings": True, "use_sliding_window": False, "vocab_size": 151936,
        },
        {"qk_norm": True, "qkv_bias": False, "head_dim": 128, "tied_embeddings": True},
    ),
    "gemma": (
        {
            "architectures": ["GemmaForCausalLM"], "attention_bias": False, "head_dim": 256, "hidden_act": "gelu",
            "hidden_activation": None, "hidden_size": 2048, "intermediate_size": 16384,
            "max_position_embeddings": 8192, "model_type": "gemma", "num_attention_heads": 8, "num_hidden_layers": 18,
            "num_key_value_heads": 1, "rms_norm_eps": 1e-06, "rope_theta": 10000.0, "vocab_size": 256000,
        },
        {"activation": "gelu_tanh", "embedding_scale": math.sqrt(2048), "norm_offset": 1.0, "tied_embeddings": True},
    ),
    "gemma-2": (
        {
            "architectures": ["Gemma2ForCausalLM"], "attn_logit_softcapping": 50.0, "cache_implementation": "hybrid",
            "final_logit_softcapping": 30.0, "head_dim": 128, "hidden_act": "gelu_pytorch_tanh",
            "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 4608, "intermediate_size": 36864,
            "max_position_embeddings": 8192, "model_type": "gemma2", "num_attention_heads": 32,
            "num_hidden_layers": 46, "num_key_value_heads": 16, "query_pre_attn_scalar": 144, "rms_norm_eps": 1e-06,
            "rope_theta": 10000.0, "sliding_window": 4096, "sliding_window_size": 4096, "vocab_size": 256000,
        },
        {
            "attention_softcap": 50.0, "logit_softcap": 30.0, "query_scale": 144**-0.5, "post_norms": True,
            "layer_pattern": ("sliding", "full"), "sliding_window": 4096,
        },
    ),
    "gemma-3": (
        {
            "architectures": ["Gemma3ForCausalLM"], "attn_logit_softcapping": None, "cache_implementation": "hybrid",
            "final_logit_softcapping": None, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size": 1152, "intermediate_size": 6912, "max_position_embeddings": 32768,
            "model_type": "gemma3_text", "num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1,
            "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000, "rope_scaling": None,
            "rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6, "vocab_size": 262144,
        },
        {
            "layer_pattern": ("sliding",) * 5 + ("full",), "sliding_window": 512, "rope_theta": 1e6,
            "sliding_rope_theta": 1e4, "qk_norm": True, "query_scale": 0.0, "rope_scaling": None,
        },
    ),
    "ministral-3-8b": (
        {
            "attention_dropout": 0.0, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
            "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 262144,
            "model_type": "ministral3", "num_attention_heads": 32, "num_hidden_layers": 34, "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05, "rope_parameters": {
                "beta_fast": 32.0, "beta_slow": 1.0, "factor": 16.0, "llama_4_scaling_beta": 0.1, "mscale": 1.0,
                "mscale_all_dim": 1.0, "original_max_position_embeddings": 16384, "rope_theta": 1000000.0,
                "rope_type": "yarn", "type": "yarn",
            },
            "sliding_window": None, "use_cache": True, "vocab_size": 131072,
        },
        {
            "attention_temperature": config.AttentionTemperature(scale=0.1, every=16384), "rope_theta": 1e6,
            "rope_scaling": config.RopeScaling(
                kind="yarn", factor=16.0, high_freq_factor=32.0, original_context=16384, attention_factor=1.0
            ),
        },
    ),
    "phi-3": (
        {
            "architectures": ["Phi3ForCausalLM"], "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"},
            "embd_pdrop": 0.0, "hidden_act": "silu", "hidden_size": 3072, "intermediate_size": 8192,
            "max_position_embeddings": 4096, "model_type": "phi3", "num_attention_heads": 32, "num_hidden_layers": 32,
            "num_key_value_heads": 32, "original_max_position_embeddings": 4096, "resid_pdrop": 0.0,
            "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000.0, "sliding_window": 2047,
            "tie_word_embeddings": False, "vocab_size": 32064,
        },
        {"sliding_window": 2047, "rope_dim": 0, "head_dim": 96},
    ),
    "gpt2": (
        {
            "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1,
            "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02,
            "layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12,
            "n_layer": 12, "n_positions": 1024, "resid_pdrop": 0.1, "summary_activation": None,
            "summary_first_dropout": 0.1, "summary_proj_to_labels": True, "summary_type": "cls_index",
            "summary_use_proj": True, "task_specific_params": {"text-generation": {"max_length": 50}},
            "vocab_size": 50257,
        },
        {"mlp": 3072, "positions": "learned", "norm": "layernorm", "tied_embeddings": True, "dropout": 0.0},
    ),
    "gpt2-medium": (
        {
            "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1,
            "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02,
            "layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 1024, "n_embd": 1024, "n_head": 16,
            "n_layer": 24, "n_positions": 1024, "n_special": 0, "predict_special_tokens": True, "resid_pdrop": 0.1,
            "summary_activation": None, "summary_first_dropout": 0.1, "summary_proj_to_labels": True,
            "summary_type": "cls_index", "summary_use_proj": True, "vocab_size": 50257,
        },
        {"layers": 24, "vocab": 50257, "head_dim": 64},
    ),
    "opt": (
        {
            "_remove_final_layer_norm": False, "activation_dropout": 0.0, "activation_function": "relu",
            "architectures": ["OPTForCausalLM"], "do_layer_norm_before": True, "dropout": 0.1, "ffn_dim": 3072,
            "hidden_size": 768, "init_std": 0.02, "layerdrop": 0.0, "max_position_embeddings": 2048,
            "model_type": "opt", "num_attention_heads": 12, "num_hidden_layers": 12, "prefix": "</s>",
            "vocab_size": 50272, "word_embed_proj_dim": 768,
        },
        {"position_offset": 2, "activation": "relu", "mlp_bias": True, "qkv_bias": True, "norm_eps": 1e-5},
    ),
    "galactica": (
        {
            "_remove_final_layer_norm": False, "activation_dropout": 0.0, "activation_function": "gelu",
            "architectures": ["OPTForCausalLM"], "attention_dropout": 0.1, "do_layer_norm_before": True,
            "dropout": 0.1, "enable_bias": False, "ffn_dim": 8192, "hidden_size": 2048, "init_std": 0.02,
            "layer_norm_elementwise_affine": True, "layerdrop": 0.0, "learned_embeddings": True,
            "max_position_embeddings": 2048, "model_type": "opt", "num_attention_heads": 32, "num_hidden_layers": 24,
            "scale_embeddings": False, "vocab_size": 50000, "word_embed_proj_dim": 2048,
        },
        {"qkv_bias": False, "mlp_bias": False, "activation": "gelu", "embedding_scale": 1.0},
    ),
    "mixtral": (
        {
            "architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "hidden_act": "silu",
            "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 32768,
            "model_type": "mixtral", "num_attention_heads": 32, "num_experts_per_tok": 2, "num_hidden_layers": 32,
            "num_key_value_heads": 8, "num_local_experts": 8, "output_router_logits": False, "rms_norm_eps": 1e-05,
            "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02, "sliding_window": None,
            "tie_word_embeddings": False, "vocab_size": 32000,
        },
        {"experts": 8, "experts_per_token": 2, "normalized_weights": True, "mlp": 14336, "expert_mlp": 0},
    ),
    "phi-3.5-moe": (
        {
            "architectures": ["PhiMoEForCausalLM"], "attention_bias": True, "attention_dropout": 0.0,
            "auto_map": {"AutoConfig": "configuration_phimoe.PhiMoEConfig"}, "bos_token_id": 1, "eos_token_id": 32000,
            "hidden_act": "silu", "hidden_dropout": 0.0, "hidden_size": 4096, "initializer_range": 0.02,
            "input_jitter_noise": 0.01, "intermediate_size": 6400, "lm_head_bias": True,
            "max_position_embeddings": 131072, "model_type": "phimoe", "num_attention_heads": 32,
            "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 16,
            "original_max_position_embeddings": 4096, "output_router_logits": False, "rms_norm_eps": 1e-05,
            "rope_scaling": {
                "long_factor": [1.0] * 63 + [60.0], "long_mscale": 1.243163121016122,
                "original_max_position_embeddings": 4096, "short_factor": [1.0] * 64,
                "short_mscale": 1.243163121016122, "type": "longrope",
            },
            "rope_theta": 10000.0, "router_aux_loss_coef": 0.0, "router_jitter_noise": 0.01, "sliding_window": 131072,
            "tie_word_embeddings": False, "vocab_size": 32064,
        },
        {
            "norm": "layernorm", "norm_bias": True, "unembedding_bias": True, "attention_out_bias": True,
            "routing": "sparsemixer", "router_jitter": 0.01, "normalized_weights": False, "experts": 16,
            "rope_scaling": config.RopeScaling(
                kind="longrope", factor=32.0, original_context=4096, short_factors=(1.0,) * 64,
                long_factors=(*(1.0,) * 63, 60.0), attention_factor=1.243163121016122,
            ),
        },
    ),
    "qwen3-moe": (
        {
            "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "decoder_sparse_step": 1,
            "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 12288,
            "max_position_embeddings": 40960, "max_window_layers": 94, "mlp_only_layers": [],
            "model_type": "qwen3_moe", "moe_intermediate_size": 1536, "norm_topk_prob": True,
            "num_attention_heads": 64, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 94,
            "num_key_value_heads": 4, "output_router_logits": False, "rms_norm_eps": 1e-06, "rope_scaling": None,
            "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "sliding_window": None,
            "tie_word_embeddings": False, "use_sliding_window": False, "vocab_size": 151936,
        },
        {"experts": 128, "experts_per_token": 8, "expert_mlp": 1536, "qk_norm": True, "sliding_window": 0},
    ),
    "qwen3-coder": (
        {
            "architectures": ["Qwen3MoeForCausalLM"], "attention_dropout": 0.0, "decoder_sparse_step": 1,
            "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 5472,
            "max_position_embeddings": 262144, "max_window_layers": 28, "mlp_only_layers": [],
            "model_type": "qwen3_moe", "moe_intermediate_size": 768, "norm_topk_prob": True,
            "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
            "num_key_value_heads": 4, "output_router_logits": False, "qkv_bias": False, "rms_norm_eps": 1e-06,
            "rope_scaling": None, "rope_theta": 10000000, "router_aux_loss_coef": 0.0,
            "shared_expert_intermediate_size": 0, "sliding_window": None, "tie_word_embeddings": False,
            "use_qk_norm": True, "use_sliding_window": False, "vocab_size": 151936,
        },
        {"qk_norm": True, "shared_mlp": 0, "qkv_bias": False, "head_dim": 128, "expert_mlp": 768},
    ),
    "glm-4.5": (
        {
            "architectures": ["Glm4MoeForCausalLM"], "attention_bias": True, "attention_dropout": 0.0,
            "first_k_dense_replace": 3, "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120,
            "intermediate_size": 12288, "max_position_embeddings": 131072, "model_type": "glm4_moe",
            "moe_intermediate_size": 1536, "n_group": 1, "n_routed_experts": 160, "n_shared_experts": 1,
            "norm_topk_prob": True, "num_attention_heads": 96, "num_experts_per_tok": 8, "num_hidden_layers": 92,
            "num_key_value_heads": 8, "num_nextn_predict_layers": 1, "partial_rotary_factor": 0.5,
            "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 1000000, "routed_scaling_factor": 2.5,
            "tie_word_embeddings": False, "topk_group": 1, "use_qk_norm": True, "vocab_size": 151552,
        },
        {
            "dense_layers": 3, "experts": 160, "shared_mlp": 1536, "routing": "sigmoid", "expert_scale": 2.5,
            "balance": "bias", "balance_rate": 0.0, "qk_norm": True, "qkv_bias": True, "attention_out_bias": False,
            "rope_dim": 64, "normalized_weights": True,
        },
    ),
    "glm-4.5-air": (
        {
            "architectures": ["Glm4MoeForCausalLM"], "attention_bias": True, "attention_dropout": 0.0,
            "first_k_dense_replace": 1, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
            "intermediate_size": 10944, "max_position_embeddings": 131072, "model_type": "glm4_moe",
            "moe_intermediate_size": 1408, "n_group": 1, "n_routed_experts": 128, "n_shared_experts": 1,
            "norm_topk_prob": True, "num_attention_heads": 96, "num_experts_per_tok": 8, "num_hidden_layers": 46,
            "num_key_value_heads": 8, "num_nextn_predict_layers": 1, "partial_rotary_factor": 0.5,
            "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 1000000, "routed_scaling_factor": 1.0,
            "tie_word_embeddings": False, "topk_group": 1, "use_qk_norm": False, "vocab_size": 151552,
        },
        {"dense_layers": 1, "experts": 128, "qk_norm": False, "expert_scale": 1.0, "expert_mlp": 1408},
    ),
    "deepseek-v3": (
        DEEPSEEK_V3,
        {
            "latent_attention": config.LatentAttention(kv_rank=512, q_rank=1536, v_head_dim=128), "head_dim": 192,
            "rope_dim": 64, "kv_heads": 128, "query_scale": _latent_scale(40, 1.0),
            "rope_scaling": config.RopeScaling(
                kind="yarn", factor=40.0, high_freq_factor=32.0, original_context=4096, attention_factor=1.0,
            ),
            "dense_layers": 3, "experts": 256, "expert_groups": 8, "groups_per_token": 4, "routing": "sigmoid",
            "expert_scale": 2.5, "shared_mlp": 2048, "balance": "bias", "balance_rate": 0.0,
        },
    ),
    "kimi-k2": (
        DEEPSEEK_V3 | {
            "bos_token_id": 163584, "eos_token_id": 163585, "first_k_dense_replace": 1,
            "max_position_embeddings": 131072, "model_type": "kimi_k2", "n_group": 1, "n_routed_experts": 384,
            "num_attention_heads": 64, "num_key_value_heads": 64, "num_nextn_predict_layers": 0,
            "rope_scaling": DEEPSEEK_V3["rope_scaling"] | {"beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0},
            "rope_theta": 50000.0, "routed_scaling_factor": 2.827, "topk_group": 1, "vocab_size": 163840,
        },
        {
            "experts": 384, "expert_groups": 1, "heads": 64, "expert_scale": 2.827, "rope_theta": 5e4,
            "query_scale": _latent_scale(32, 1.0),
        },
    ),
    "deepseek-v2": (
        DEEPSEEK_V2,
        {
            "latent_attention": config.LatentAttention(kv_rank=512, q_rank=1536, v_head_dim=128), "routing": "softmax",
            "expert_groups": 8, "groups_per_token": 3, "expert_scale": 16.0, "shared_mlp": 3072,
            "normalized_weights": False, "query_scale": _latent_scale(40, 0.707),
        },
    ),
    "deepseek-v2-lite": (
        DEEPSEEK_V2 | {
            "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408, "n_group": 1,
            "n_routed_experts": 64, "num_attention_heads": 16, "num_hidden_layers": 27, "num_key_value_heads": 16,
            "q_lora_rank": None, "routed_scaling_factor": 1.0, "topk_group": 1, "topk_method": "greedy",
        },
        {
            "latent_attention": config.LatentAttention(kv_rank=512, v_head_dim=128), "expert_groups": 1,
            "expert_scale": 1.0, "dense_layers": 1, "balance": "none",
        },
    ),
    "qwen3-next": (
        {
            "architectures": ["Qwen3NextForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "decoder_sparse_step": 1, "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu",
            "hidden_size": 2048, "intermediate_size": 5120, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
            "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_value_head_dim": 128,
            "max_position_embeddings": 262144, "mlp_only_layers": [], "model_type": "qwen3_next",
            "moe_intermediate_size": 512, "norm_topk_prob": True, "num_attention_heads": 16, "num_experts": 512,
            "num_experts_per_tok": 10, "num_hidden_layers": 48, "num_key_value_heads": 2,
            "output_router_logits": False, "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-06, "rope_scaling": None,
            "rope_theta": 10000000, "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 512,
            "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_sliding_window": False, "vocab_size": 151936,
        },
        {
            "layer_pattern": ("linear", "linear", "linear", "full"), "attention_gate": True, "rope_dim": 64,
            "linear_attention": config.LinearAttention(key_heads=16, value_heads=32, head_dim=128, taps=4),
            "norm_offset": 1.0, "experts": 512, "shared_mlp": 512, "shared_gate": True, "sparse_step": 1,
        },
    ),
    "gemma-3n-e2b": (
        {
            "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 20, "altup_active_idx": 0, "altup_coef_clip": 120.0,
            "altup_correct_scale": True, "altup_lr_multiplier": 1.0, "altup_num_inputs": 4, "attention_bias": False,
            "attention_dropout": 0.0, "final_logit_softcapping": 30.0, "head_dim": 256, "hidden_size": 2048,
            "hidden_activation": "gelu_pytorch_tanh", "hidden_size_per_layer_input": 256, "initializer_range": 0.02,
            "intermediate_size": [8192] * 30, "laurel_rank": 64, "max_position_embeddings": 32768,
            "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 6, "model_type": "gemma3n_text",
            "num_attention_heads": 8, "num_hidden_layers": 30, "num_key_value_heads": 2, "num_kv_shared_layers": 10,
            "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000.0,
            "rope_scaling": None, "rope_theta": 1000000.0, "sliding_window": 512, "use_cache": True,
            "vocab_size": 262400, "vocab_size_per_layer_input": 262144,
        },
        {
            "mlp": 8192, "residual_streams": 4, "laurel_rank": 64, "layer_embed": 256, "layer_vocab": 262144,
            "shared_kv_layers": 10, "activation_sparsity": 0.95, "sparse_layers": 10, "query_scale": 1.0,
            "layer_pattern": ("sliding", "sliding", "sliding", "sliding", "full"), "sliding_rope_theta": 10000.0,
            "value_norm": True, "norm_offset": 0.0, "logit_softcap": 30.0, "sliding_window": 512,
        },
    ),
    "llama-4-maverick": (
        {
            "attention_bias": False, "attention_chunk_size": 8192, "attention_dropout": 0.0, "attn_scale": 0.1,
            "attn_temperature_tuning": True, "floor_scale": 8192, "for_llm_compressor": False, "head_dim": 128,
            "hidden_act": "silu", "hidden_size": 5120, "initializer_range": 0.02, "interleave_moe_layer_step": 2,
            "intermediate_size": 8192, "intermediate_size_mlp": 16384, "max_position_embeddings": 1048576,
            "model_type": "llama4_text", "no_rope_layers": [], "num_attention_heads": 40, "num_experts_per_tok": 1,
            "num_hidden_layers": 48, "num_key_value_heads": 8, "num_local_experts": 128,
            "output_router_logits": False, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 500000.0,
            "router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0, "use_qk_norm": False, "vocab_size": 202048,
        },
        {
            "layer_pattern": ("chunked", "chunked", "chunked", "nope"), "attention_chunk": 8192, "sparse_step": 2,
            "experts": 128, "expert_mlp": 8192, "shared_mlp": 8192, "mlp": 16384, "qk_norm": False,
            "attention_temperature": config.AttentionTemperature(scale=0.1, every=8192, offset=1, layers="nope"),
        },
    ),
    "gpt-oss": (
        {
            "architectures": ["GptOssForCausalLM"], "attention_bias": True, "experts_per_token": 4, "head_dim": 64,
            "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096, "intermediate_size": 2880,
            "layer_types": ["sliding_attention", "full_attention"] * 18, "max_position_embeddings": 131072,
            "model_type": "gpt_oss", "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 36,
            "num_key_value_heads": 8, "num_local_experts": 128, "output_router_logits": False, "rms_norm_eps": 1e-05,
            "rope_scaling": {
                "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
                "rope_type": "yarn", "truncate": False,
            },
            "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0,
            "tie_word_embeddings": False, "vocab_size": 201088,
        },
        {
            "experts": 128, "experts_per_token": 4, "attention_sinks": True, "mlp_limit": 7.0, "mlp_up_offset": 1.0,
            "activation_slope": 1.702, "router_bias": True, "mlp_bias": True, "sliding_window": 128,
            "layer_pattern": ("sliding", "full"),
        },
    ),
    "opt-350m": (
        {
            "_remove_final_layer_norm": False, "activation_function": "relu", "architectures": ["OPTForCausalLM"],
            "do_layer_norm_before": False, "dropout": 0.1, "ffn_dim": 4096, "hidden_size": 1024, "init_std": 0.02,
            "layerdrop": 0.0, "max_position_embeddings": 2048, "model_type": "opt", "num_attention_heads": 16,
            "num_hidden_layers": 24, "prefix": "</s>", "vocab_size": 50272, "word_embed_proj_dim": 512,
        },
        {"embedding_width": 512, "pre_norms": False, "sum_norms": True, "final_norm": False, "embed": 1024},
    ),
    "bloom": (
        {
            "apply_residual_connection_post_layernorm": False, "architectures": ["BloomForCausalLM"],
            "attention_softmax_in_fp32": True, "bias_dropout_fusion": True, "masked_softmax_fusion": True,
            "layer_norm_epsilon": 1e-05, "model_type": "bloom", "n_embed": 1024, "n_inner": None, "n_layer": 24,
            "num_attention_heads": 16, "offset_alibi": 100, "pretraining_tp": 1, "seq_length": 2048,
            "skip_bias_add": True, "skip_bias_add_qkv": False, "slow_but_exact": False, "vocab_size": 250880,
        },
        {"embed": 1024, "heads": 16, "positions": "alibi", "embedding_norm": True, "mlp": 4096, "context": 2048},
    ),
    "falcon-7b": (
        {
            "alibi": False, "apply_residual_connection_post_layernorm": False, "architectures": ["FalconForCausalLM"],
            "bias": False, "hidden_size": 4544, "layer_norm_epsilon": 1e-05, "model_type": "falcon",
            "multi_query": True, "new_decoder_architecture": False, "num_attention_heads": 71,
            "num_hidden_layers": 32, "parallel_attn": True, "vocab_size": 65024,
        },
        {"kv_heads": 1, "block": "parallel", "shared_norm": True, "head_dim": 64, "tied_embeddings": True},
    ),
    "falcon-40b": (
        {
            "alibi": False, "architectures": ["FalconForCausalLM"], "bias": False, "hidden_size": 8192,
            "layer_norm_epsilon": 1e-05, "model_type": "falcon", "new_decoder_architecture": True,
            "num_attention_heads": 128, "num_hidden_layers": 60, "num_kv_heads": 8, "parallel_attn": True,
            "vocab_size": 65024,
        },
        {"kv_heads": 8, "block": "parallel", "shared_norm": False, "mlp": 32768},
    ),
    "falcon-11b": (
        {
            "alibi": False, "architectures": ["FalconForCausalLM"], "bias": False, "ff_factor": 4,
            "ffn_hidden_size": 16384, "hidden_size": 4096, "layer_norm_epsilon": 1e-05,
            "max_position_embeddings": 8192, "model_type": "falcon", "new_decoder_architecture": True,
            "num_attention_heads": 32, "num_hidden_layers": 60, "num_kv_heads": 8, "num_ln_in_parallel_attn": 1,
            "parallel_attn": True, "rope_theta": 500042.0, "tie_word_embeddings": False, "vocab_size": 65024,
        },
        {"kv_heads": 8, "shared_norm": True, "rope_theta": 500042.0, "tied_embeddings": False},
    ),
    "gpt-j": (
        {
            "activation_function": "gelu_new", "architectures": ["GPTJForCausalLM"], "layer_norm_epsilon": 1e-05,
            "model_type": "gptj", "n_embd": 4096, "n_head": 16, "n_inner": None, "n_layer": 28, "n_positions": 2048,
            "rotary": True, "rotary_dim": 64, "scale_attn_weights": True, "tie_word_embeddings": False,
            "vocab_size": 50400,
        },
        {"rope_dim": 64, "head_dim": 256, "unembedding_bias": True, "qkv_bias": False, "block": "parallel"},
    ),
    "pythia": (
        {
            "architectures": ["GPTNeoXForCausalLM"], "hidden_act": "gelu", "hidden_size": 512,
            "intermediate_size": 2048, "layer_norm_eps": 1e-05, "max_position_embeddings": 2048,
            "model_type": "gpt_neox", "num_attention_heads": 8, "num_hidden_layers": 6, "rotary_emb_base": 10000,
            "rotary_pct": 0.25, "tie_word_embeddings": False, "use_parallel_residual": True, "vocab_size": 50304,
        },
        {"rope_dim": 16, "block": "parallel", "shared_norm": False, "activation": "gelu", "attention_out_bias": True},
    ),
    "gpt-neox-20b": (
        {
            "architectures": ["GPTNeoXForCausalLM"], "attention_probs_dropout_prob": 0, "bos_token_id": 0,
            "eos_token_id": 0, "hidden_act": "gelu_fast", "hidden_dropout_prob": 0, "hidden_size": 6144,
            "initializer_range": 0.02, "intermediate_size": 24576, "layer_norm_eps": 1e-05,
            "max_position_embeddings": 2048, "model_type": "gpt_neox", "num_attention_heads": 64,
            "num_hidden_layers": 44, "rotary_emb_base": 10000, "rotary_pct": 0.25, "tie_word_embeddings": False,
            "use_cache": True, "vocab_size": 50432,
        },
        {"block": "parallel", "shared_norm": False, "rope_dim": 24, "head_dim": 96, "activation": "gelu_tanh"},
    ),
    "glm-4": (
        {
            "architectures": ["GlmForCausalLM"], "attention_bias": True, "head_dim": 128, "hidden_act": "silu",
            "hidden_size": 4096, "intermediate_size": 13696, "max_position_embeddings": 131072, "model_type": "glm",
            "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 2,
            "partial_rotary_factor": 0.5, "rms_norm_eps": 1.5625e-07, "rope_theta": 10000.0,
            "tie_word_embeddings": False, "vocab_size": 151552,
        },
        {"rope_dim": 64, "qkv_bias": True, "attention_out_bias": False, "kv_heads": 2, "norm_eps": 1.5625e-07},
    ),
    "granite-3.1": (
        {
            "architectures": ["GraniteForCausalLM"], "attention_bias": False, "attention_multiplier": 0.0078125,
            "embedding_multiplier": 12.0, "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 12800,
            "logits_scaling": 16.0, "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "granite",
            "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 8, "residual_multiplier": 0.22,
            "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000000.0, "tie_word_embeddings": True,
            "vocab_size": 49155,
        },
        {
            "embedding_scale": 12.0, "residual_scale": 0.22, "logit_scale": 1 / 16, "query_scale": 1 / 128,
            "tied_embeddings": True,
        },
    ),
    "command-r": (
        {
            "architectures": ["CohereForCausalLM"], "attention_bias": False, "hidden_act": "silu", "hidden_size": 8192,
            "intermediate_size": 22528, "layer_norm_eps": 1e-05, "logit_scale": 0.0625,
            "max_position_embeddings": 8192, "model_max_length": 131072, "model_type": "cohere",
            "num_attention_heads": 64, "num_hidden_layers": 40, "num_key_value_heads": 64, "pretraining_tp": 1,
            "rope_theta": 8000000.0, "use_qk_norm": False, "vocab_size": 256000,
        },
        {
            "block": "parallel", "shared_norm": True, "norm": "layernorm", "norm_bias": False, "logit_scale": 0.0625,
            "qk_norm": False, "tied_embeddings": True,
        },
    ),
    "command-r7b": (
        {
            "architectures": ["Cohere2ForCausalLM"], "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
            "intermediate_size": 14336, "layer_norm_eps": 1e-05, "layer_switch": 4, "logit_scale": 0.25,
            "max_position_embeddings": 8192, "model_type": "cohere2", "num_attention_heads": 32,
            "num_hidden_layers": 32, "num_key_value_heads": 8, "order_of_interleaved_layers": "local_attn_first",
            "position_embedding_type": "rope_gptj", "rope_scaling": None, "rope_theta": 50000, "rotary_pct": 1.0,
            "sliding_window": 4096, "sliding_window_pattern": 4, "use_embedding_sharing": True,
            "use_gated_activation": True, "use_parallel_block": True, "use_parallel_embedding": True,
            "vocab_size": 256000,
        },
        {"layer_pattern": ("sliding", "sliding", "sliding", "nope"), "sliding_window": 4096, "qkv_bias": False},
    ),
    "olmo-1": (
        {
            "architectures": ["OlmoForCausalLM"], "clip_qkv": None, "hidden_act": "silu", "hidden_size": 2048,
            "intermediate_size": 8192, "max_position_embeddings": 2048, "model_type": "olmo",
            "num_attention_heads": 16, "num_hidden_layers": 16, "num_key_value_heads": 16, "rope_theta": 10000.0,
            "tie_word_embeddings": True, "vocab_size": 50304,
        },
        {"norm": "layernorm", "norm_scale": False, "norm_eps": 1e-5, "tied_embeddings": True},
    ),
    "olmo-2": (
        {
            "architectures": ["Olmo2ForCausalLM"], "hidden_act": "silu", "hidden_size": 4096,
            "intermediate_size": 11008, "max_position_embeddings": 4096, "model_type": "olmo2",
            "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32, "rms_norm_eps": 1e-06,
            "rope_theta": 500000, "tie_word_embeddings": False, "vocab_size": 100352,
        },
        {"pre_norms": False, "post_norms": True, "qk_norm": True, "qk_norm_kind": "joint", "norm_eps": 1e-6},
    ),
    "olmo-3": (
        {
            "architectures": ["Olmo3ForCausalLM"], "hidden_act": "silu", "hidden_size": 4096,
            "intermediate_size": 11008,
            "layer_types": [("full" if i % 4 == 3 else "sliding") + "_attention" for i in range(32)],
            "max_position_embeddings": 65536, "model_type": "olmo3", "num_attention_heads": 32,
            "num_hidden_layers": 32, "num_key_value_heads": 32, "rms_norm_eps": 1e-06,
            "rope_scaling": {
                "attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0, "factor": 8.0,
                "original_max_position_embeddings": 8192, "rope_type": "yarn",
            },
            "rope_theta": 500000, "sliding_window": 4096, "tie_word_embeddings": False, "vocab_size": 100278,
        },
        {
            "layer_pattern": ("sliding", "sliding", "sliding", "full"), "sliding_rope_theta": 5e5,
            "rope_scaling": config.RopeScaling(
                kind="yarn", factor=8.0, high_freq_factor=32.0, attention_factor=1.2079441541679836,
            ),
        },
    ),
    "smollm3": (
        {
            "architectures": ["SmolLM3ForCausalLM"], "attention_bias": False, "hidden_act": "silu",
            "hidden_size": 2048, "intermediate_size": 11008, "layer_types": ["full_attention"] * 36,
            "max_position_embeddings": 65536, "max_window_layers": 28, "mlp_bias": False, "model_type": "smollm3",
            "no_rope_layer_interval": 4, "no_rope_layers": [int(i % 4 != 3) for i in range(36)],
            "num_attention_heads": 16, "num_hidden_layers": 36, "num_key_value_heads": 4, "pretraining_tp": 2,
            "rms_norm_eps": 1e-06, "rope_theta": 5000000.0, "sliding_window": None, "use_sliding_window": False,
            "vocab_size": 128256,
        },
        {"layer_pattern": ("full", "full", "full", "nope"), "tied_embeddings": True, "sliding_window": 0},
    ),
    "phi-4-mini": (
        {
            "architectures": ["Phi3ForCausalLM"], "attention_bias": False, "full_attn_mod": 1, "hidden_act": "silu",
            "hidden_size": 3072, "intermediate_size": 8192, "interpolate_factor": 1, "lm_head_bias": False,
            "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "phi3", "num_attention_heads": 24,
            "num_hidden_layers": 32, "num_key_value_heads": 8, "original_max_position_embeddings": 4096,
            "partial_rotary_factor": 0.75, "rms_norm_eps": 1e-05,
            "rope_scaling": {"long_factor": [1.0] * 47 + [40.0], "short_factor": [1.0] * 48, "type": "longrope"},
            "rope_theta": 10000.0, "sliding_window": 262144, "tie_word_embeddings": True, "vocab_size": 200064,
        },
        {
            "rope_dim": 96, "tied_embeddings": True,
            "rope_scaling": config.RopeScaling(
                kind="longrope", factor=32.0, original_context=4096, short_factors=(1.0,) * 48,
                long_factors=(*(1.0,) * 47, 40.0), attention_factor=math.sqrt(1 + math.log(32) / math.log(4096)),
            ),
        },
    ),
    "yarn-llama-2": (
        {
            "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "hidden_size": 4096,
            "intermediate_size": 11008, "max_position_embeddings": 65536, "model_type": "llama",
            "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32, "rms_norm_eps": 1e-05,
            "rope_scaling": {
                "factor": 16.0, "finetuned": True, "original_max_position_embeddings": 4096, "type": "yarn",
            },
            "rope_theta": 10000.0, "vocab_size": 32000,
        },
        {
            "rope_scaling": config.RopeScaling(
                kind="yarn", factor=16.0, high_freq_factor=32.0, original_context=4096,
                attention_factor=0.1 * math.log(16) + 1,
            ),
        },
    ),
    "starcoder2": (
        {
            "architectures": ["Starcoder2ForCausalLM"], "hidden_act": "gelu_pytorch_tanh", "hidden_size": 4608,
            "intermediate_size": 18432, "max_position_embeddings": 16384, "mlp_type": "default",
            "model_type": "starcoder2", "norm_epsilon": 1e-05, "norm_type": "layer_norm", "num_attention_heads": 36,
            "num_hidden_layers": 32, "num_key_value_heads": 4, "residual_dropout": 0.0, "embedding_dropout": 0.0,
            "rope_theta": 1000000, "sliding_window": 4096, "use_bias": True, "vocab_size": 49152,
        },
        {"mlp_kind": "plain", "mlp_bias": True, "qkv_bias": True, "sliding_window": 4096, "tied_embeddings": True},
    ),
    "stablelm-2": (
        {
            "architectures": ["StableLmForCausalLM"], "hidden_act": "silu", "hidden_size": 2048,
            "intermediate_size": 5632, "layer_norm_eps": 1e-05, "max_position_embeddings": 4096,
            "model_type": "stablelm", "num_attention_heads": 32, "num_hidden_layers": 24, "num_key_value_heads": 32,
            "partial_rotary_factor": 0.25, "qk_layernorm": False, "rope_theta": 10000, "tie_word_embeddings": False,
            "use_parallel_residual": False, "use_qkv_bias": True, "vocab_size": 100352,
        },
        {"rope_dim": 16, "qkv_bias": True, "attention_out_bias": False, "norm_bias": True, "mlp_kind": "gated"},
    ),
    "nemotron": (
        {
            "architectures": ["NemotronForCausalLM"], "attention_bias": False, "head_dim": 128, "hidden_act": "relu2",
            "hidden_size": 3072, "intermediate_size": 9216, "max_position_embeddings": 4096, "mlp_bias": False,
            "model_type": "nemotron", "norm_eps": 1e-05, "num_attention_heads": 24, "num_hidden_layers": 32,
            "num_key_value_heads": 8, "partial_rotary_factor": 0.5, "rope_theta": 10000, "vocab_size": 256000,
        },
        {"activation": "relu2", "norm_offset": 1.0, "rope_dim": 64, "mlp_kind": "plain"},
    ),
    "phi-2": (
        {
            "architectures": ["PhiForCausalLM"], "hidden_act": "gelu_new", "hidden_size": 2560,
            "intermediate_size": 10240, "layer_norm_eps": 1e-05, "max_position_embeddings": 2048, "model_type": "phi",
            "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
            "partial_rotary_factor": 0.4, "qk_layernorm": False, "rope_theta": 10000.0, "vocab_size": 51200,
        },
        {"rope_dim": 32, "block": "parallel", "unembedding_bias": True, "attention_out_bias": True},
    ),
    "gpt-neo": (
        {
            "activation_function": "gelu_new", "architectures": ["GPTNeoForCausalLM"], "attention_dropout": 0,
            "attention_layers": ["global", "local"] * 12, "attention_types": [[["global", "local"], 12]],
            "embed_dropout": 0, "hidden_size": 2048, "intermediate_size": None, "layer_norm_epsilon": 1e-05,
            "max_position_embeddings": 2048, "model_type": "gpt_neo", "num_heads": 16, "num_layers": 24,
            "resid_dropout": 0, "vocab_size": 50257, "window_size": 256,
        },
        {"query_scale": 1.0, "layer_pattern": ("full", "sliding"), "sliding_window": 256, "mlp": 8192},
    ),
    "chatglm3-6b": (
        {
            "_name_or_path": "THUDM/chatglm3-6b", "add_bias_linear": False, "add_qkv_bias": True,
            "apply_query_key_layer_scaling": True, "apply_residual_connection_post_layernorm": False,
            "architectures": ["ChatGLMModel"], "attention_dropout": 0.0, "attention_softmax_in_fp32": True,
            "auto_map": {"AutoConfig": "configuration_chatglm.ChatGLMConfig"}, "bias_dropout_fusion": True,
            "eos_token_id": 2, "ffn_hidden_size": 13696, "fp32_residual_connection": False, "hidden_dropout": 0.0,
            "hidden_size": 4096, "kv_channels": 128, "layernorm_epsilon": 1e-05, "model_type": "chatglm",
            "multi_query_attention": True, "multi_query_group_num": 2, "num_attention_heads": 32, "num_layers": 28,
            "original_rope": True, "pad_token_id": 0, "padded_vocab_size": 65024, "post_layer_norm": True,
            "quantization_bit": 0, "rmsnorm": True, "seq_length": 8192, "tie_word_embeddings": False,
            "use_cache": True, "vocab_size": 65024,
        },
        {"kv_heads": 2, "rope_dim": 64, "rope_theta": 1e4, "qkv_bias": True, "attention_out_bias": False, "mlp": 13696},
    ),
    "starcoder": (
        {
            "activation_function": "gelu_pytorch_tanh", "architectures": ["GPTBigCodeForCausalLM"],
            "attention_softmax_in_fp32": True, "inference_runner": 0, "layer_norm_epsilon": 1e-05,
            "max_batch_size": None, "max_sequence_length": None, "model_type": "gpt_bigcode", "multi_query": True,
            "n_embd": 6144, "n_head": 48, "n_inner": 24576, "n_layer": 40, "n_positions": 8192,
            "pad_key_length": True, "pre_allocate_kv_cache": False, "scale_attention_softmax_in_fp32": True,
            "scale_attn_weights": True, "summary_type": "cls_index", "validate_runner_input": True,
            "vocab_size": 49152,
        },
        {"kv_heads": 1, "positions": "learned", "tied_embeddings": True, "context": 8192},
    ),
}  # fmt: skip


# What a config.json means that gives sizes alone, as transformers 5 has it (test_live.py asks it): the norms' eps,
# rope_theta, tied tables, the activation, the size of a head.
DEFAULTS = {
    "llama": (1e-6, 1e4, False, "silu", 128), "mistral": (1e-6, 1e4, False, "silu", 128),
    "qwen2": (1e-6, 1e4, False, "silu", 128), "qwen3": (1e-6, 1e4, False, "silu", 128),
    "gemma": (1e-6, 1e4, True, "gelu_tanh", 256), "gemma2": (1e-6, 1e4, True, "gelu_tanh", 256),
    "gemma3_text": (1e-6, 1e6, True, "gelu_tanh", 256), "phi3": (1e-5, 1e4, False, "silu", 96),
    "mixtral": (1e-5, 1e6, False, "silu", 128), "qwen3_moe": (1e-6, 1e4, False, "silu", 64),
    "ministral3": (1e-5, 1e6, False, "silu", 128),
    "phimoe": (1e-5, 1e6, False, "silu", 128), "gpt_oss": (1e-5, 1.5e5, False, "silu", 64),
    "deepseek_v2": (1e-6, 1e4, False, "silu", 192), "deepseek_v3": (1e-6, 1e4, False, "silu", 192),
    "kimi_k2": (1e-6, 1e4, False, "silu", 192), "glm4_moe": (1e-5, 1e4, False, "silu", 128),
    "llama4_text": (1e-5, 5e5, False, "silu", 128),
    "qwen3_next": (1e-6, 1e4, False, "silu", 256), "gemma3n_text": (1e-6, 1e6, True, "gelu_tanh", 256),
    "gpt2": (1e-5, 1e4, True, "gelu_tanh", 64), "opt": (1e-5, 1e4, True, "relu", 64),
    "bloom": (1e-5, 1e4, True, "gelu_tanh", 64), "falcon": (1e-5, 1e4, True, "gelu", 64),
    "gptj": (1e-5, 1e4, False, "gelu_tanh", 256), "gpt_neox": (1e-5, 1e4, False, "gelu", 64),
    "glm": (1.5625e-7, 1e4, False, "silu", 128), "granite": (1e-6, 1e4, False, "silu", 128),
    "cohere": (1e-5, 5e5, True, "silu", 128), "cohere2": (1e-5, 1e4, True, "silu", 128),
    "olmo": (1e-5, 1e4, False, "silu", 128), "olmo2": (1e-5, 1e4, False, "silu", 128),
    "olmo3": (1e-5, 5e5, False, "silu", 128), "smollm3": (1e-6, 2e6, True, "silu", 128),
    "starcoder2": (1e-5, 1e4, True, "gelu_tanh", 128), "stablelm": (1e-5, 1e4, False, "silu", 64),
    "nemotron": (1e-5, 1e4, False, "relu2", 128), "phi": (1e-5, 1e4, False, "gelu_tanh", 80),
    "gpt_neo": (1e-5, 1e4, True, "gelu_tanh", 128), "chatglm": (1e-5, 1e4, False, "silu", 128),
    "gpt_bigcode": (1e-5, 1e4, True, "gelu_tanh", 128),
}  # fmt: skip
