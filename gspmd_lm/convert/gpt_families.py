"""The families whose tensors have other names than Llama's: GPT-2, and those that came between."""

from gspmd_lm.convert.family import (
    GELU_NEW,
    GPT2_SIZES,
    PLAIN_LAYERNORM,
    SIZES,
    TANH,
    TIED,
    UNTIED,
    Family,
    four_times,
    head_dim,
    heads,
)
from gspmd_lm.convert.fields import (
    MOST_LAYERS,
    Activation,
    Always,
    FalconBlock,
    MultiQuery,
    Only,
    OptNorms,
    RotaryDim,
    Same,
    Switch,
    Unless,
)
from gspmd_lm.convert.layer_kinds import LocalLayers
from gspmd_lm.convert.names import BLOOM, CHATGLM, FALCON, GPT2, GPT_BIGCODE, GPT_NEO, GPTJ, INV_FREQ, MASKS, NEOX, OPT
from gspmd_lm.convert.rope import ChatRope, Rope

GPT_FAMILIES = (
    Family(
        "GPT-2", "gpt2", "GPT2LMHeadModel", "transformer.",
        (
            *GPT2_SIZES, *PLAIN_LAYERNORM, Activation("activation_function", "gelu_new", GELU_NEW),
            Same("layer_norm_epsilon", "norm_eps", 1e-5), Always("positions", "learned"), Always("mlp_bias", True),
            Always("qkv_bias", True), Always("attention_out_bias", True), TIED,
            Only("scale_attn_weights", True, "leaves attention scores as they are, which is not supported"),
            Only("scale_attn_by_inverse_layer_idx", False, "scales attention by layer, which is not supported"),
            Only("add_cross_attention", False, "attends to an encoder, which is not supported"),
        ),
        GPT2, MASKS,
        (
            "n_ctx", "summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels",
            "reorder_and_upcast_attn",
        ),
    ),
    Family(
        "OPT", "opt", "OPTForCausalLM", "model.",
        (
            *SIZES, *PLAIN_LAYERNORM, Same("ffn_dim", "mlp"), Same("max_position_embeddings", "context"),
            Always("kv_heads", heads), Always("head_dim", head_dim), Always("norm_eps", 1e-5),
            Activation("activation_function", "relu", GELU_NEW), Always("positions", "learned"),
            Always("position_offset", 2), Switch("enable_bias", ("qkv_bias", "attention_out_bias", "mlp_bias"), True),
            TIED, Unless("word_embed_proj_dim", "embedding_width", "embed"), OptNorms(),
            Only("layer_norm_elementwise_affine", True, "has norms without scale, which is not supported"),
        ),
        OPT, irrelevant=("learned_embeddings",),  # a field of Galactica; true, as in OPT
    ),
    Family(
        "BLOOM", "bloom", "BloomForCausalLM", "transformer.",
        (
            Same("vocab_size", "vocab"), Same("hidden_size n_embed", "embed"),
            Same("n_layer num_hidden_layers", "layers", most=MOST_LAYERS), Same("n_head num_attention_heads", "heads"),
            Same("seq_length", "context", 2048), *PLAIN_LAYERNORM,
            Always("mlp", four_times), Always("kv_heads", heads), Always("head_dim", head_dim),
            Same("layer_norm_epsilon", "norm_eps", 1e-5), Always("activation", "gelu_tanh"),
            Always("positions", "alibi"), Always("embedding_norm", True), Always("qkv_bias", True),
            Always("attention_out_bias", True), Always("mlp_bias", True), TIED,
            Only("apply_residual_connection_post_layernorm", False, "adds up after the norms, which is not supported"),
        ),
        BLOOM,
        irrelevant=(
            "slow_but_exact", "attention_softmax_in_fp32", "masked_softmax_fusion", "offset_alibi", "skip_bias_add",
            "skip_bias_add_qkv",
        ),
    ),
    Family(
        "Falcon", "falcon", "FalconForCausalLM", "transformer.",
        (
            Same("vocab_size", "vocab"), Same("hidden_size n_embed", "embed"),
            Same("num_hidden_layers n_layer", "layers", most=MOST_LAYERS), Same("num_attention_heads n_head", "heads"),
            Same("max_position_embeddings", "context", 2048), Same("ffn_hidden_size", "mlp", four_times),
            *PLAIN_LAYERNORM, Always("head_dim", head_dim), FalconBlock(), Rope(),
            Same("layer_norm_epsilon", "norm_eps", 1e-5), Activation("activation", "gelu", GELU_NEW),
            Switch("bias", ("qkv_bias", "attention_out_bias", "mlp_bias"), False), TIED,
            Switch("alibi", ("positions",), False, "alibi_bf16", "rope"),
            Only("apply_residual_connection_post_layernorm", False, "adds up after the norms, which is not supported"),
        ),
        FALCON,
        INV_FREQ, ("ff_factor",),
    ),
    Family(
        "GPT-J", "gptj", "GPTJForCausalLM", "transformer.",
        (
            *GPT2_SIZES, *PLAIN_LAYERNORM, Activation("activation_function", "gelu_new", GELU_NEW),
            Same("layer_norm_epsilon", "norm_eps", 1e-5), RotaryDim(), Always("block", "parallel"),
            Always("mlp_bias", True), Always("unembedding_bias", True), UNTIED,
            Only("scale_attn_weights", True, "leaves attention scores as they are, which is not supported"),
        ),
        GPTJ, MASKS,
        ("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels", "rotary"),
    ),
    Family(
        "GPT-NeoX", "gpt_neox", "GPTNeoXForCausalLM", "gpt_neox.",
        (
            *SIZES, *PLAIN_LAYERNORM, Same("intermediate_size", "mlp"), Same("max_position_embeddings", "context"),
            Always("kv_heads", heads), Always("head_dim", head_dim), Same("layer_norm_eps", "norm_eps", 1e-5),
            Activation("hidden_act", "gelu", {"gelu_tanh": "gelu_new"}),
            Rope(theta_name="rotary_emb_base", part=0.25, part_name="rotary_pct"),
            Switch("use_parallel_residual", ("block",), True, "parallel", "sequential"),
            Always("shared_norm", lambda values: values["block"] == "sequential"),
            Switch("attention_bias", ("qkv_bias", "attention_out_bias"), True), Always("mlp_bias", True), UNTIED,
        ),
        NEOX,
        (*INV_FREQ, *MASKS),
    ),
    Family(
        "ChatGLM 3", "chatglm", "ChatGLMModel", "transformer.",
        (
            Same("padded_vocab_size vocab_size", "vocab"), Same("hidden_size", "embed"),
            Same("num_layers num_hidden_layers", "layers", most=MOST_LAYERS), Same("num_attention_heads", "heads"),
            Same("multi_query_group_num", "kv_heads"), Same("kv_channels", "head_dim", 128),
            Same("ffn_hidden_size", "mlp"), Same("seq_length", "context", 2048), ChatRope(), UNTIED,
            Same("layernorm_epsilon", "norm_eps", 1e-5), Switch("add_qkv_bias", ("qkv_bias",), False),
            Only("multi_query_attention", True, "orders queries, keys and values otherwise, which is not supported"),
            Only("interleaved_qkv", False, "orders queries, keys and values otherwise, which is not supported"),
            Only("add_bias_linear", False, "has biases behind attention and in the MLP, which is not supported"),
            Only("apply_residual_connection_post_layernorm", False, "adds up after the norms, which is not supported"),
            Only("rmsnorm", True, "has LayerNorm, which is not supported"),
            Only("post_layer_norm", True, "has no norm after the last layer, which is not supported"),
            Only("original_rope", True, "rotates otherwise, which is not supported"),
            Only("fp32_residual_connection", False, "adds up in float32, which is not supported"),
        ),
        CHATGLM, INV_FREQ, ("apply_query_key_layer_scaling", "attention_softmax_in_fp32", "prefix_projection"),
    ),
    Family(
        "StarCoder", "gpt_bigcode", "GPTBigCodeForCausalLM", "transformer.",
        (
            *(part for part in GPT2_SIZES if part != Always("kv_heads", heads)), *PLAIN_LAYERNORM,
            Activation("activation_function", "gelu_pytorch_tanh", TANH), MultiQuery(),
            Same("layer_norm_epsilon", "norm_eps", 1e-5), Always("positions", "learned"), Always("mlp_bias", True),
            Always("qkv_bias", True), Always("attention_out_bias", True), TIED,
            Only("scale_attn_weights", True, "leaves attention scores as they are, which is not supported"),
            Only("add_cross_attention", False, "attends to an encoder, which is not supported"),
        ),
        GPT_BIGCODE, MASKS,
        (
            "n_ctx", "summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels",
            "attention_softmax_in_fp32", "scale_attention_softmax_in_fp32",
            "num_key_value_heads", "inference_runner", "max_batch_size", "max_sequence_length", "pad_key_length",
            "pre_allocate_kv_cache", "validate_runner_input",
        ),
    ),
    Family(
        "GPT-Neo", "gpt_neo", "GPTNeoForCausalLM", "transformer.",
        (
            Same("vocab_size", "vocab"), Same("hidden_size", "embed"),
            Same("num_layers num_hidden_layers", "layers", most=MOST_LAYERS),
            Same("num_heads num_attention_heads", "heads"), Same("max_position_embeddings", "context"),
            Same("intermediate_size", "mlp", four_times), Always("kv_heads", heads), Always("head_dim", head_dim),
            *PLAIN_LAYERNORM, Same("layer_norm_epsilon", "norm_eps", 1e-5), Always("positions", "learned"),
            Always("query_scale", 1.0), LocalLayers(), Activation("activation_function", "gelu_new", GELU_NEW),
            Always("attention_out_bias", True), Always("mlp_bias", True), TIED,
        ),
        GPT_NEO, MASKS,
        ("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels"),
    ),
)  # fmt: skip
