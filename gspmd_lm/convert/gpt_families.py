"""The families whose tensors have other names than Llama's: GPT-2, and those that came between."""

from gspmd_lm.convert import names
from gspmd_lm.convert.family import (
    BIASES,
    GELU_NEW,
    GPT2_SIZES,
    ONE_WIDTH,
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
    Constant,
    DefaultsTo,
    FalconBlock,
    Fixed,
    Flag,
    OptNorms,
    Renamed,
    RotaryDim,
)
from gspmd_lm.convert.layer_fields import LocalLayers
from gspmd_lm.convert.names import INV_FREQ, MASKS
from gspmd_lm.convert.rope import ChatRope, Rope

_EPS = Renamed("layer_norm_epsilon", "norm_eps", 1e-5)
_SCALED = Fixed("scale_attn_weights", True, "leaves attention scores as they are, which is not supported")
_GPT2 = (*PLAIN_LAYERNORM, _EPS, Constant("positions", "learned"), *BIASES, TIED, _SCALED)
_ALONE = Fixed("add_cross_attention", False, "attends to an encoder, which is not supported")
_NORM_BEFORE = Fixed(
    "apply_residual_connection_post_layernorm", False, "adds up after the norms, which is not supported"
)
_SUMMARY = ("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels")  # of other heads

GPT_FAMILIES = (
    Family(
        "GPT-2", "gpt2", "GPT2LMHeadModel", "transformer.",
        (
            *GPT2_SIZES, Activation("activation_function", "gelu_new", GELU_NEW), *_GPT2,
            Fixed("scale_attn_by_inverse_layer_idx", False, "scales attention by layer, which is not supported"),
            _ALONE,
        ),
        names.GPT2, MASKS, ("n_ctx", *_SUMMARY, "reorder_and_upcast_attn"),
    ),
    Family(
        "OPT", "opt", "OPTForCausalLM", "model.",
        (
            *SIZES, *PLAIN_LAYERNORM, Renamed("ffn_dim", "mlp"), Renamed("max_position_embeddings", "context"),
            *ONE_WIDTH, Constant("norm_eps", 1e-5),
            Activation("activation_function", "relu", GELU_NEW), Constant("positions", "learned"),
            Constant("position_offset", 2), Flag("enable_bias", ("qkv_bias", "attention_out_bias", "mlp_bias"), True),
            TIED, DefaultsTo("word_embed_proj_dim", "embedding_width", "embed"), OptNorms(),
            Fixed("layer_norm_elementwise_affine", True, "has norms without scale, which is not supported"),
        ),
        names.OPT, irrelevant=("learned_embeddings",),  # a field of Galactica; true, as in OPT
    ),
    Family(
        "BLOOM", "bloom", "BloomForCausalLM", "transformer.",
        (
            Renamed("vocab_size", "vocab"), Renamed("hidden_size n_embed", "embed"),
            Renamed("n_layer num_hidden_layers", "layers", most=MOST_LAYERS),
            Renamed("n_head num_attention_heads", "heads"), Renamed("seq_length", "context", 2048), *PLAIN_LAYERNORM,
            Constant("mlp", four_times), *ONE_WIDTH, _EPS, Constant("activation", "gelu_tanh"),
            Constant("positions", "alibi"), Constant("embedding_norm", True), *BIASES, TIED, _NORM_BEFORE,
        ),
        names.BLOOM,
        irrelevant=(
            "slow_but_exact", "attention_softmax_in_fp32", "masked_softmax_fusion", "offset_alibi", "skip_bias_add",
            "skip_bias_add_qkv",
        ),
    ),
    Family(
        "Falcon", "falcon", "FalconForCausalLM", "transformer.",
        (
            Renamed("vocab_size", "vocab"), Renamed("hidden_size n_embed", "embed"),
            Renamed("num_hidden_layers n_layer", "layers", most=MOST_LAYERS),
            Renamed("num_attention_heads n_head", "heads"),
            Renamed("max_position_embeddings", "context", 2048), Renamed("ffn_hidden_size", "mlp", four_times),
            *PLAIN_LAYERNORM, Constant("head_dim", head_dim), FalconBlock(), Rope(), _EPS,
            Activation("activation", "gelu", GELU_NEW),
            Flag("bias", ("qkv_bias", "attention_out_bias", "mlp_bias"), False), TIED,
            Flag("alibi", ("positions",), False, "alibi_bf16", "rope"), _NORM_BEFORE,
        ),
        names.FALCON, INV_FREQ, ("ff_factor",),
    ),
    Family(
        "GPT-J", "gptj", "GPTJForCausalLM", "transformer.",
        (
            *GPT2_SIZES, *PLAIN_LAYERNORM, Activation("activation_function", "gelu_new", GELU_NEW), _EPS, RotaryDim(),
            Constant("block", "parallel"), Constant("mlp_bias", True), Constant("unembedding_bias", True), UNTIED,
            _SCALED,
        ),
        names.GPTJ, MASKS, (*_SUMMARY, "rotary"),
    ),
    Family(
        "GPT-NeoX", "gpt_neox", "GPTNeoXForCausalLM", "gpt_neox.",
        (
            *SIZES, *PLAIN_LAYERNORM, Renamed("intermediate_size", "mlp"),
            Renamed("max_position_embeddings", "context"), *ONE_WIDTH,
            Renamed("layer_norm_eps", "norm_eps", 1e-5), Activation("hidden_act", "gelu", {"gelu_tanh": "gelu_new"}),
            Rope(theta_name="rotary_emb_base", part=0.25, part_name="rotary_pct"),
            Flag("use_parallel_residual", ("block",), True, "parallel", "sequential"),
            Constant("shared_norm", lambda values: values["block"] == "sequential"),
            Flag("attention_bias", ("qkv_bias", "attention_out_bias"), True), Constant("mlp_bias", True), UNTIED,
        ),
        names.NEOX, (*INV_FREQ, *MASKS),
    ),
    Family(
        "ChatGLM 3", "chatglm", "ChatGLMModel", "transformer.",
        (
            Renamed("padded_vocab_size vocab_size", "vocab"), Renamed("hidden_size", "embed"),
            Renamed("num_layers num_hidden_layers", "layers", most=MOST_LAYERS),
            Renamed("num_attention_heads", "heads"),
            Renamed("multi_query_group_num", "kv_heads"), Renamed("kv_channels", "head_dim", 128),
            Renamed("ffn_hidden_size", "mlp"), Renamed("seq_length", "context", 2048), ChatRope(), UNTIED,
            Renamed("layernorm_epsilon", "norm_eps", 1e-5), Flag("add_qkv_bias", ("qkv_bias",), False),
            Fixed("multi_query_attention", True, "orders queries, keys and values otherwise, which is not supported"),
            Fixed("interleaved_qkv", False, "orders queries, keys and values otherwise, which is not supported"),
            Fixed("add_bias_linear", False, "has biases behind attention and in the MLP, which is not supported"),
            _NORM_BEFORE,
            Fixed("rmsnorm", True, "has LayerNorm, which is not supported"),
            Fixed("post_layer_norm", True, "has no norm after the last layer, which is not supported"),
            Fixed("original_rope", True, "rotates otherwise, which is not supported"),
            Fixed("fp32_residual_connection", False, "adds up in float32, which is not supported"),
        ),
        names.CHATGLM, INV_FREQ, ("apply_query_key_layer_scaling", "attention_softmax_in_fp32", "prefix_projection"),
    ),
    Family(
        "StarCoder", "gpt_bigcode", "GPTBigCodeForCausalLM", "transformer.",
        (
            *(codec for codec in GPT2_SIZES if codec != Constant("kv_heads", heads)),
            Activation("activation_function", "gelu_pytorch_tanh", TANH),
            Flag("multi_query", ("kv_heads",), True, on=1, off=heads), *_GPT2, _ALONE,
        ),
        names.GPT_BIGCODE, MASKS,
        (
            "n_ctx", *_SUMMARY, "attention_softmax_in_fp32", "scale_attention_softmax_in_fp32",
            "num_key_value_heads", "inference_runner", "max_batch_size", "max_sequence_length", "pad_key_length",
            "pre_allocate_kv_cache", "validate_runner_input",
        ),
    ),
    Family(
        "GPT-Neo", "gpt_neo", "GPTNeoForCausalLM", "transformer.",
        (
            Renamed("vocab_size", "vocab"), Renamed("hidden_size", "embed"),
            Renamed("num_layers num_hidden_layers", "layers", most=MOST_LAYERS),
            Renamed("num_heads num_attention_heads", "heads"), Renamed("max_position_embeddings", "context"),
            Renamed("intermediate_size", "mlp", four_times), *ONE_WIDTH, *PLAIN_LAYERNORM, _EPS,
            Constant("positions", "learned"),
            Constant("query_scale", 1.0), LocalLayers(), Activation("activation_function", "gelu_new", GELU_NEW),
            Constant("attention_out_bias", True), Constant("mlp_bias", True), TIED,
        ),
        names.GPT_NEO, MASKS, _SUMMARY,
    ),
)  # fmt: skip
