"""Tiny models of each family: what their config.json says. Their golden files are made by references.py."""

from typing import Any

_SMALL = {"vocab_size": 96, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_LLAMA = _SMALL | {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8,
    "max_position_embeddings": 96,
}  # fmt: skip
_WIDTHS = _SMALL | {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 8, "max_position_embeddings": 96,
}  # fmt: skip
_GPT2 = _SMALL | {"n_embd": 32, "n_layer": 2, "n_head": 8, "n_positions": 96}
_NEOX = _LLAMA | {"hidden_size": 64}
_GLM = _LLAMA | {"hidden_size": 64, "num_key_value_heads": 2, "head_dim": 8}
_EXPERTS = _LLAMA | {"num_key_value_heads": 4, "intermediate_size": 48, "num_experts_per_tok": 2}
_LATENT = _EXPERTS | {
    "num_key_value_heads": 8, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6,
    "moe_intermediate_size": 24, "n_shared_experts": 2,
}  # fmt: skip
_MSCALES = {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 12, "beta_fast": 4.0, "beta_slow": 1.0}
_T5 = {
    "vocab_size": 96, "d_model": 32, "d_kv": 6, "d_ff": 64, "num_layers": 3, "num_decoder_layers": 2, "num_heads": 8,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 10, "n_positions": 96,
}  # fmt: skip
_BART = {
    "vocab_size": 96, "d_model": 32, "encoder_layers": 3, "decoder_layers": 2, "encoder_attention_heads": 16,
    "decoder_attention_heads": 8, "encoder_ffn_dim": 48, "decoder_ffn_dim": 64, "max_position_embeddings": 96,
    "scale_embedding": True,
}  # fmt: skip
# What a DeBERTa says that is supported.
DEBERTA = {
    "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "share_att_key": True, "norm_rel_ebd": "layer_norm",
    "position_buckets": 4, "max_relative_positions": 10, "position_biased_input": False,
}  # fmt: skip
DEBERTA_1 = {name: value for name, value in DEBERTA.items() if name not in
             ("share_att_key", "norm_rel_ebd", "position_buckets")}  # fmt: skip
# Name -> model_type and fields. Values are such that every setting matters: windows shorter than the rows, heads that
# are not hidden_size / heads, few key heads, caps that are reached.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _LLAMA),
    "llama3": ("llama", _LLAMA | {
        "num_key_value_heads": 4, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True,
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 5000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
        },
    }),
    "mistral": ("mistral", _LLAMA | {"num_key_value_heads": 4, "head_dim": 8, "sliding_window": 6}),
    "qwen2": ("qwen2", _LLAMA | {
        "num_key_value_heads": 4, "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1,
    }),
    "qwen3": ("qwen3", _LLAMA | {"num_key_value_heads": 8, "head_dim": 8}),
    "gemma": ("gemma", _LLAMA | {"num_key_value_heads": 1, "head_dim": 8}),
    "gemma2": ("gemma2", _LLAMA | {
        "num_key_value_heads": 4, "head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 12,
        "attn_logit_softcapping": 2.0, "final_logit_softcapping": 20.0,
    }),
    "gemma3": ("gemma3_text", _LLAMA | {
        "num_key_value_heads": 4, "head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 12,
        "num_hidden_layers": 7, "sliding_window_pattern": 3,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    }),
    "phi3": ("phi3", _LLAMA | {
        "num_key_value_heads": 4, "hidden_size": 64, "sliding_window": 6, "partial_rotary_factor": 0.75,
    }),
    "glm": ("glm", _GLM),
    "glm4": ("glm4", _GLM),
    "gpt2": ("gpt2", _GPT2 | {"vocab_size": 97}),
    "opt": ("opt", _WIDTHS | {"ffn_dim": 64}),
    "bloom": ("bloom", _SMALL | {"hidden_size": 48, "n_layer": 2, "n_head": 6}),
    "falcon-7b": ("falcon", _WIDTHS),
    "falcon-40b": ("falcon", _WIDTHS | {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}),
    "gptj": ("gptj", _GPT2 | {"n_embd": 64, "rotary_dim": 4}),
    "gptneox": ("gpt_neox", _NEOX | {"rotary_pct": 0.5}),
    "gptneox-sequential": ("gpt_neox", _NEOX | {"use_parallel_residual": False}),
    # From here on, layouts and generation are checked where transformers is installed; see `cases`.
    "granite": ("granite", _LLAMA | {
        "num_key_value_heads": 4, "embedding_multiplier": 6.0, "residual_multiplier": 0.22, "logits_scaling": 0.75,
        "attention_multiplier": 0.4, "tie_word_embeddings": True,
    }),
    "cohere": ("cohere", _LLAMA | {
        "hidden_size": 64, "num_key_value_heads": 4, "logit_scale": 0.7, "use_qk_norm": True,
    }),
    "cohere2": ("cohere2", _LLAMA | {
        "num_key_value_heads": 4, "num_hidden_layers": 3, "sliding_window": 6, "sliding_window_pattern": 2,
        "logit_scale": 1.5,
    }),
    "olmo": ("olmo", _LLAMA | {"num_key_value_heads": 4}),
    "olmo2": ("olmo2", _LLAMA | {"num_key_value_heads": 4}),
    "olmo3": ("olmo3", _LLAMA | {
        "num_key_value_heads": 4, "num_hidden_layers": 3, "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_scaling": {
            "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 12, "beta_fast": 4.0,
            "beta_slow": 1.0,
        },
    }),
    "smollm3": ("smollm3", _LLAMA | {"num_key_value_heads": 4, "num_hidden_layers": 3, "no_rope_layer_interval": 2}),
    "starcoder2": ("starcoder2", _LLAMA | {"num_key_value_heads": 4, "sliding_window": 6}),
    "stablelm": ("stablelm", _LLAMA | {
        "hidden_size": 64, "num_key_value_heads": 4, "use_qkv_bias": True, "partial_rotary_factor": 0.5,
    }),
    "stablelm-parallel": ("stablelm", _NEOX | {"num_key_value_heads": 4, "use_parallel_residual": True}),
    "nemotron": ("nemotron", _LLAMA | {"hidden_size": 64, "num_key_value_heads": 4}),
    "seed-oss": ("seed_oss", _LLAMA | {
        "num_key_value_heads": 4, "head_dim": 8, "attention_bias": False, "attention_out_bias": True,
    }),
    "ernie": ("ernie4_5", _LLAMA | {"num_key_value_heads": 4, "head_dim": 8, "use_bias": True}),
    "arcee": ("arcee", _LLAMA | {"num_key_value_heads": 4}),
    "phi": ("phi", _NEOX | {"num_key_value_heads": 4, "qk_layernorm": True}),
    "chatglm": ("chatglm", _SMALL | {
        "architectures": ["ChatGLMModel"], "padded_vocab_size": 96, "hidden_size": 64, "num_layers": 2,
        "num_attention_heads": 8, "kv_channels": 8, "ffn_hidden_size": 48, "seq_length": 96,
        "multi_query_attention": True, "multi_query_group_num": 2, "add_qkv_bias": True, "add_bias_linear": False,
        "rmsnorm": True, "post_layer_norm": True, "layernorm_epsilon": 1e-5, "original_rope": True, "rope_ratio": 50,
        "apply_query_key_layer_scaling": True, "bias_dropout_fusion": True, "tie_word_embeddings": False,
        "transformers_version": "4.30.2", "dtype": "float32",
    }),
    "starcoder": ("gpt_bigcode", _GPT2),
    "starcoder-all-heads": ("gpt_bigcode", _GPT2 | {"multi_query": False}),
    "gptneo": ("gpt_neo", _SMALL | {
        "hidden_size": 32, "num_layers": 3, "num_heads": 8, "max_position_embeddings": 96, "window_size": 6,
        "attention_types": [[["global", "local", "global"], 1]],
    }),
    "falcon-rw": ("falcon", _WIDTHS | {
        "hidden_size": 64, "num_attention_heads": 16, "alibi": True, "multi_query": False, "parallel_attn": False,
        "bias": True,
    }),
    "yarn": ("llama", _LLAMA | {
        "num_key_value_heads": 4, "hidden_size": 64,
        "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 12},
    }),
    "longrope-long": ("phi3", _LLAMA | {
        "num_key_value_heads": 4, "hidden_size": 64, "partial_rotary_factor": 0.75,
        "original_max_position_embeddings": 4, "tie_word_embeddings": True,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0, 1.1, 1.2], "long_factor": [1.0, 2.5, 4.0]},
    }),
    "longrope-short": ("phi3", _LLAMA | {
        "num_key_value_heads": 4, "hidden_size": 64, "original_max_position_embeddings": 80,
        "rope_scaling": {
            "type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.5, 4.0, 9.0],
        },
    }),
    "dynamic": ("llama", _LLAMA | {
        "num_key_value_heads": 4, "rope_scaling": {"rope_type": "dynamic", "factor": 4.0},
    }),
    "ministral3": ("ministral3", _LLAMA | {
        "num_key_value_heads": 4, "head_dim": 8, "sliding_window": None, "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 5,
            "beta_fast": 4.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3,
        },
    }),
    "mixtral": ("mixtral", _EXPERTS | {"num_local_experts": 4}),
    "phimoe": ("phimoe", _EXPERTS | {
        "num_local_experts": 8, "router_jitter_noise": 0.3, "attention_bias": True, "lm_head_bias": True,
        "hidden_size": 64, "sliding_window": 6, "original_max_position_embeddings": 80,
        "rope_scaling": {
            "type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.5, 4.0, 9.0],
            "short_mscale": 1.2, "long_mscale": 1.2,
        },
    }),
    "qwen2-moe": ("qwen2_moe", _EXPERTS | {
        "num_experts": 8, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40, "num_hidden_layers": 3,
        "mlp_only_layers": [0], "use_sliding_window": True, "sliding_window": 6,
    }),
    "qwen3-moe": ("qwen3_moe", _EXPERTS | {
        "num_experts": 8, "moe_intermediate_size": 24, "head_dim": 8, "norm_topk_prob": True,
    }),
    "glm4-moe": ("glm4_moe", _EXPERTS | {
        "n_routed_experts": 8, "moe_intermediate_size": 24, "num_hidden_layers": 3, "n_shared_experts": 2,
        "routed_scaling_factor": 2.5, "n_group": 2, "topk_group": 1, "use_qk_norm": True, "attention_bias": True,
        "head_dim": 8,
    }),
    # A scale of yarn on scores and none on rotated numbers, as published; values that are narrower than keys; and an
    # eps that is not that of the norms of latent attention.
    "deepseek-v3": ("deepseek_v3", _LATENT | {
        "n_routed_experts": 8, "num_hidden_layers": 3, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2,
        "q_lora_rank": 20, "rope_scaling": _MSCALES | {"mscale": 1.0, "mscale_all_dim": 1.0}, "rms_norm_eps": 1e-3,
    }),
    # Values as wide as keys, and kinds of layers in a list.
    "glm4-moe-lite": ("glm4_moe_lite", _LATENT | {
        "n_routed_experts": 8, "num_hidden_layers": 3, "mlp_layer_types": ["dense", "sparse", "sparse"],
        "v_head_dim": 12, "q_lora_rank": 20, "rms_norm_eps": 1e-3,
    }),
    "deepseek-v2": ("deepseek_v2", _LATENT | {
        "n_routed_experts": 8, "num_hidden_layers": 3, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2,
        "topk_method": "group_limited_greedy", "routed_scaling_factor": 4.0, "q_lora_rank": 20,
        "rope_scaling": _MSCALES | {"mscale": 1.2, "mscale_all_dim": 0.707},
    }),
    "deepseek-v2-lite": ("deepseek_v2", _LATENT | {
        "n_routed_experts": 8, "first_k_dense_replace": 1, "q_lora_rank": None, "n_group": 1, "topk_group": 1,
    }),
    "olmoe": ("olmoe", _EXPERTS | {"num_experts": 8, "num_experts_per_tok": 3}),
    "granite-moe": ("granitemoe", _EXPERTS | {
        "num_local_experts": 8, "embedding_multiplier": 6.0, "residual_multiplier": 0.22, "logits_scaling": 0.75,
        "attention_multiplier": 0.4, "tie_word_embeddings": True,
    }),
    "granite-moe-shared": ("granitemoeshared", _EXPERTS | {"num_local_experts": 8, "shared_intermediate_size": 40}),
    "gpt-oss": ("gpt_oss", _EXPERTS | {
        "num_local_experts": 8, "num_hidden_layers": 3, "head_dim": 8, "sliding_window": 6, "swiglu_limit": 1.5,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 12, "beta_fast": 4.0,
            "beta_slow": 1.0, "truncate": False,
        },
    }),
    # Chunks that are shorter than the rows, dense layers between those with experts, and a last turn that is cut off.
    "llama4": ("llama4_text", _EXPERTS | {
        "num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size": 24, "intermediate_size_mlp": 48,
        "num_hidden_layers": 5, "head_dim": 8, "attention_chunk_size": 6, "floor_scale": 3, "attn_scale": 0.5,
        "interleave_moe_layer_step": 2,
    }),
    "llama4-scout": ("llama4_text", _EXPERTS | {
        "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24, "intermediate_size_mlp": 48,
        "num_hidden_layers": 3, "head_dim": 8, "attention_chunk_size": 10, "floor_scale": 4, "use_qk_norm": False,
        "no_rope_layers": [1, 0, 1], "rope_scaling": {
            "rope_type": "llama3", "rope_theta": 5000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 1.0, "original_max_position_embeddings": 32,
        },
    }),
    # A large eps, or rounding decides what linear attention reads at a first token: the norm of one value.
    # Rows that are longer than a chunk are in tests/model/test_delta.py.
    "qwen3-next": ("qwen3_next", _EXPERTS | {
        "num_experts": 8, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40, "head_dim": 16,
        "num_hidden_layers": 3, "full_attention_interval": 2, "linear_num_key_heads": 4, "linear_num_value_heads": 8,
        "linear_key_head_dim": 6, "linear_value_head_dim": 6, "linear_conv_kernel_dim": 3, "rms_norm_eps": 1e-3,
    }),
    # Sparse layers, layers that share keys with one of each kind before them, and tokens without embeddings for layers.
    # transformers gives the token of padding no gradient.
    "gemma3n": ("gemma3n_text", _LLAMA | {
        "num_key_value_heads": 4, "head_dim": 8, "sliding_window": 6, "num_hidden_layers": 5, "pad_token_id": 1,
        "layer_types": ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"],
        "num_kv_shared_layers": 2, "activation_sparsity_pattern": [0.8] * 2 + [0.0] * 3, "altup_num_inputs": 3,
        "laurel_rank": 6, "hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": 80,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    }),
    "opt-350m": ("opt", _WIDTHS | {"ffn_dim": 64, "word_embed_proj_dim": 24, "do_layer_norm_before": False}),
    "opt-no-last-norm": ("opt", _WIDTHS | {"ffn_dim": 64, "_remove_final_layer_norm": True}),
    "t5": ("t5", _T5),
    "t5-v1.1": ("t5", _T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "mt5": ("mt5", _T5 | {"tie_word_embeddings": False}),
    "umt5": ("umt5", _T5),
    "bart": ("bart", _BART),
    "mbart": ("mbart", _BART | {"decoder_start_token_id": 5, "forced_bos_token_id": 7}),
}  # fmt: skip
