"""config.json of published models in the words they were published with, and what is refused."""

import json
import math

import pytest

from gspmd_lm import config
from gspmd_lm.convert import architecture
from gspmd_lm.convert.families import FAMILIES, IRRELEVANT, LEFT_OUT
from gspmd_lm.errors import InputError

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
    "gpt_oss": (1e-5, 1.5e5, False, "silu", 64),
    "gpt2": (1e-5, 1e4, True, "gelu_tanh", 64), "opt": (1e-5, 1e4, True, "relu", 64),
    "bloom": (1e-5, 1e4, True, "gelu_tanh", 64), "falcon": (1e-5, 1e4, True, "gelu", 64),
    "gptj": (1e-5, 1e4, False, "gelu_tanh", 256), "gpt_neox": (1e-5, 1e4, False, "gelu", 64),
    "glm": (1.5625e-7, 1e4, False, "silu", 128), "granite": (1e-6, 1e4, False, "silu", 128),
    "cohere": (1e-5, 5e5, True, "silu", 128), "cohere2": (1e-5, 1e4, True, "silu", 128),
    "olmo": (1e-5, 1e4, False, "silu", 128), "olmo2": (1e-5, 1e4, False, "silu", 128),
    "olmo3": (1e-5, 5e5, False, "silu", 128), "smollm3": (1e-6, 2e6, True, "silu", 128),
    "starcoder2": (1e-5, 1e4, True, "gelu_tanh", 128), "stablelm": (1e-5, 1e4, False, "silu", 64),
    "nemotron": (1e-5, 1e4, False, "relu2", 128), "phi": (1e-5, 1e4, False, "gelu_tanh", 80),
    "gpt_neo": (1e-5, 1e4, True, "gelu_tanh", 128), "gpt_bigcode": (1e-5, 1e4, True, "gelu_tanh", 128),
}  # fmt: skip
SIZES = {
    "model_type", "vocab_size", "hidden_size", "n_embd", "n_embed", "num_hidden_layers", "n_layer",
    "num_attention_heads", "n_head", "num_key_value_heads", "num_kv_heads", "intermediate_size", "ffn_dim",
    "max_position_embeddings", "n_positions", "seq_length", "rotary_dim", "num_layers", "num_heads",
}  # fmt: skip


def sizes_alone(raw):
    """A config.json without what has a default."""
    return {name: value for name, value in raw.items() if name in SIZES}


def model_of(raw):
    row = architecture.family(raw, "config.json")
    values = architecture.settings(row, raw, "config.json")
    return config.from_dict(
        {"name": "x", "model": values, "data": {"seq": 1}, "train": {"steps": 1}}, "config.json"
    ).model


def refused(raw):
    with pytest.raises(InputError) as error:
        model_of(raw)
    return str(error.value)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config(name):
    raw, wanted = PUBLISHED[name]
    model = model_of(raw)
    assert {setting: getattr(model, setting) for setting in wanted} == wanted


def test_what_is_meant_by_fields_that_are_not_there():
    published = {raw["model_type"]: raw for raw, _ in reversed(PUBLISHED.values())}
    models = {kind: model_of(sizes_alone(raw)) for kind, raw in published.items()}
    names = "norm_eps", "rope_theta", "tied_embeddings", "activation", "head_dim"
    assert {kind: tuple(getattr(model, name) for name in names) for kind, model in models.items()} == DEFAULTS


@pytest.mark.parametrize("name", PUBLISHED)
def test_it_is_kept_on_export_and_can_be_written_anew(name):
    raw, _ = PUBLISHED[name]
    model = model_of(raw)
    row, kept = architecture.describe(model, raw)
    assert kept == raw
    found, fields = architecture.describe(model, None)
    # The first of the table that has the model: without a window, a Mistral is a Llama.
    assert found.model_type == {"mistral-nemo": "llama", "phi-3": "mistral", "yarn-llama-2": "llama"}.get(
        name, row.model_type
    )
    assert model_of(fields) == model


def test_the_form_of_transformers_5_says_the_same():
    newer = {
        name: value for name, value in LLAMA31.items() if name not in ("rope_theta", "rope_scaling", "torch_dtype")
    }
    newer |= {"rope_parameters": LLAMA31["rope_scaling"] | {"rope_theta": 500000.0}, "dtype": "bfloat16"}
    assert model_of(newer) == model_of(LLAMA31)
    older, _ = PUBLISHED["gemma-3"]
    gone = ("rope_theta", "rope_local_base_freq", "sliding_window_pattern")
    newer = {name: value for name, value in older.items() if name not in gone} | {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1000000},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000},
        },
        "layer_types": [("full" if i % 6 == 5 else "sliding") + "_attention" for i in range(26)],
    }
    assert model_of(newer) == model_of(older)
    older, _ = PUBLISHED["pythia"]
    newer = {name: value for name, value in older.items() if not name.startswith("rotary")}
    newer["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000, "partial_rotary_factor": 0.25}
    assert model_of(newer) == model_of(older)


def test_a_changed_setting_is_written_into_the_original():
    changed = model_of(LLAMA31 | {"rope_theta": 10.0, "max_position_embeddings": 64})
    _, fields = architecture.describe(changed, LLAMA31)
    assert fields["rope_theta"] == 10.0 and fields["max_position_embeddings"] == 64
    assert fields["eos_token_id"] == 128001 and model_of(fields) == changed


def test_a_model_that_no_family_has():
    model = model_of(LLAMA31)
    odd = config.Model(**{**vars(model), "norm": "layernorm", "qkv_bias": True, "layer_pattern": ()})
    with pytest.raises(InputError) as error:
        architecture.describe(odd, None)
    assert "the nearest is Qwen2" in str(error.value)
    assert "model.norm: 'layernorm', Qwen2 would have 'rmsnorm'" in str(error.value)
    with pytest.raises(InputError, match=r"model.attention_out_bias"):
        architecture.describe(odd, LLAMA31)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (
            {"rope_scaling": {"type": "proportional", "factor": 4.0}},
            "rope_scaling.rope_type: 'proportional' is not supported; use one of default, linear, dynamic, yarn",
        ),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "low_freq_factor": 1.0}}, "are not fields of yarn"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "beta_fast": 1}}, "beta_fast: 1.0 is not above beta_slow: 1"),
        ({"rope_scaling": {"type": "longrope", "long_factor": 2, "short_factor": []}}, "long_factor: 2 is not a list"),
        ({"rope_scaling": {"type": "longrope", "long_factor": [], "short_factor": []}}, "need 64 numbers each"),
        ({"rope_scaling": {"type": "linear"}}, "lacks factor"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "attention_factor": 2.0}}, "are not fields of linear"),
        ({"rope_scaling": None, "rope_parameters": {"rope_type": "longrope"}}, "lacks long_factor, short_factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: 0.5 is not a setting of this family"),
        ({"hidden_act": "quick_gelu"}, "hidden_act: 'quick_gelu' is not known; known are gelu"),
        ({"quantization_config": {"bits": 4}}, "quantization_config: the weights are quantised"),
        ({"sliding_window": 512}, "sliding_window: a window, which this family does not have"),
        ({"bias": True}, "bias: True is an unknown field, which may change"),
        ({"hidden_size": None}, "hidden_size: missing"),
        ({"hidden_size": "4096"}, "hidden_size: '4096' must be a number above zero"),
        ({"hidden_size": 4096.5}, "model.embed: must be a whole number"),
        ({"rope_theta": -1}, "rope_theta: -1 must be a number above zero"),
        ({"num_attention_heads": 0}, "num_attention_heads: 0 must be a number above zero"),
        ({"num_key_value_heads": 5}, "heads=32 is not a multiple of kv_heads=5"),
    ],
)
def test_a_field_that_cannot_be_had(changed, said):
    assert said in refused(LLAMA31 | changed)


@pytest.mark.parametrize(
    ("name", "changed", "said"),
    [
        ("opt", {"word_embed_proj_dim": 0}, "word_embed_proj_dim: 0 must be a number above zero"),
        ("opt", {"do_layer_norm_before": "yes"}, "do_layer_norm_before: 'yes' must be true or false"),
        ("falcon-7b", {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn: 2"),
        ("falcon-40b", {"parallel_attn": False}, "contradicts new_decoder_architecture"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scales attention by layer"),
        ("bloom", {"apply_residual_connection_post_layernorm": True}, "adds up after the norms"),
        ("gemma-3", {"use_bidirectional_attention": True}, "lets tokens see later ones"),
        ("gemma-3", {"layer_types": ["full_attention"] * 3}, "layer_types"),
        ("gpt-j", {"rotary_dim": None}, "rotary_dim"),
        ("qwen3-moe", {"mlp_only_layers": [3]}, "mlp_only_layers: [3] are not the first layers"),
        ("qwen3-moe", {"decoder_sparse_step": 2}, "decoder_sparse_step: 2 alternates layers"),
        ("mixtral", {"num_experts_per_tok": 9}, "experts_per_token=9 must be from 1 to experts=8"),
        ("mistral-0.1", {"layer_types": ["full_attention"] * 32}, "does not fit sliding_window"),
    ],
)
def test_a_field_of_a_family_that_cannot_be_had(name, changed, said):
    assert said in refused(PUBLISHED[name][0] | changed)


def test_all_problems_are_listed_at_once():
    message = refused(LLAMA31 | {"hidden_act": "x", "vocab_size": None, "alibi": True, "num_experts": 8})
    assert "config.json: 4 problems" in message
    for name in ("hidden_act", "vocab_size", "alibi", "num_experts: experts, which this family"):
        assert f"\n  {name}" in message


@pytest.mark.parametrize("kind", LEFT_OUT)
def test_a_family_that_is_left_out(kind):
    assert f"model_type: {kind!r} is not supported: {LEFT_OUT[kind]}" in refused({"model_type": kind})


def test_a_family_that_is_not_known():
    assert "'GPT-NeoX' is not a supported family (did you mean gpt_neox?)" in refused({"model_type": "GPT-NeoX"})
    for other in ("mpt", "mamba", "qwen", "ministral3", "dbrx", "gemma4", "lama"):  # most are families of their own
        assert f"{other!r} is not a supported family\n" in refused({"model_type": other})
    assert "no model_type\n  fix   one of llama, mistral" in refused({})
    assert model_of({**LLAMA31, "model_type": None}) == model_of(LLAMA31)  # by its class


def test_files_without_a_config(tmp_path):
    with pytest.raises(InputError, match=r"no config.json\n  fix   give a folder"):
        architecture.load(tmp_path)
    with pytest.raises(InputError, match="no such folder"):
        architecture.load(tmp_path / "x")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InputError, match=r"config.json: not valid JSON"):
        architecture.load(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(InputError, match="not a JSON object but a list"):
        architecture.load(tmp_path)


def test_no_field_is_both_read_and_called_irrelevant():
    for row in FAMILIES:
        for raw, _ in PUBLISHED.values():
            if raw["model_type"] == row.model_type:
                source = architecture.Source(raw)
                values = {}
                for part in row.parts:
                    part.read(source, values)
                assert not source.read & (IRRELEVANT | set(row.irrelevant)), row.name
                assert json.dumps(sorted(source.read))
