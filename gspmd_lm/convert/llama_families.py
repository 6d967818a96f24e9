"""The families whose tensors have Llama's names, or nearly so."""

import math
from collections.abc import Callable

from gspmd_lm.convert import names
from gspmd_lm.convert.config_reader import ConfigReader
from gspmd_lm.convert.family import (
    ATTENTION_BIAS,
    BIASES,
    CAUSAL,
    EPS,
    EPS_5,
    GELU_NEW,
    GLM_EPS,
    HEAD_128,
    HEAD_DIM,
    LLAMA_SIZES,
    NO_HEAD_DIM,
    PLAIN_LAYERNORM,
    SILU,
    SIZES,
    TANH,
    TIED,
    UNTIED,
    Family,
    KeyHeads,
    llama_sizes,
)
from gspmd_lm.convert.fields import Activation, Cap, Constant, Divisor, Fixed, Flag, MustEqual, QueryScale, Renamed
from gspmd_lm.convert.layer_fields import EachLayer, LayerTypes, NoRopeLayers, SparseActivation, Window, every_second
from gspmd_lm.convert.names import INV_FREQ
from gspmd_lm.convert.rope import BETA, Rope


def _window_layers(reader: ConfigReader) -> Callable[[int], bool]:
    first = reader.whole(["max_window_layers"], 28, 0)
    return lambda i: i >= first


def _all_but_every(
    length: int, name: str = "sliding_window_pattern"
) -> Callable[[ConfigReader], Callable[[int], bool]]:
    def slides(reader: ConfigReader) -> Callable[[int], bool]:
        last = reader.whole([name], length, 1) if name else length
        return lambda i: (i + 1) % last != 0

    return slides


def _first_window_layer(model):
    """max_window_layers, for families in which the layers from that one on have the window."""
    slides = [kind == "sliding" for kind in model.kind_of_each_layer]
    return {"max_window_layers": model.layers - sum(slides)} if slides == sorted(slides) else {}


def _pattern_length(model):
    return {"sliding_window_pattern": len(model.layer_pattern)} if model.layer_pattern else {}


_QWEN_LAYERS = LayerTypes(4096, _window_layers, "use_sliding_window", _first_window_layer)
_GEMMA = (
    Constant("embedding_scale", lambda values: math.sqrt(values["embed"])),
    Renamed("head_dim", "head_dim", 256),
    ATTENTION_BIAS,
    CAUSAL,
    TIED,
)
_GEMMA_CAPS = (
    Constant("norm_offset", 1.0),
    QueryScale(),
    Constant("post_norms", True),
    Activation("hidden_activation hidden_act", "gelu_pytorch_tanh", TANH),
)
_MLP_BIAS = Flag("mlp_bias", ("mlp_bias",), False)
_ALL_BIASES = ("qkv_bias", "attention_out_bias", "mlp_bias")
_COHERE = (
    Constant("norm", "layernorm"), Renamed("layer_norm_eps", "norm_eps", 1e-5), Constant("block", "parallel"), SILU,
    Renamed("logit_scale", "logit_scale", 0.0625), Constant("qk_norm_kind", "per_head"), NO_HEAD_DIM, ATTENTION_BIAS,
    TIED,
    MustEqual("head_dim", "head_dim", "is not hidden_size / num_attention_heads"),
)  # fmt: skip
# OLMo 2: norms behind attention and MLP and none before them, and norms over all heads at once.
_OLMO2 = (
    EPS_5, HEAD_DIM, Constant("pre_norms", False), Constant("post_norms", True),
    Constant("qk_norm", True), Constant("qk_norm_kind", "joint"), SILU, ATTENTION_BIAS, UNTIED,
)  # fmt: skip


LLAMA_FAMILIES = (
    Family(
        "Llama", "llama", "LlamaForCausalLM", "model.",
        (*LLAMA_SIZES, EPS, HEAD_DIM, Rope(), SILU, ATTENTION_BIAS, _MLP_BIAS, UNTIED),
        names.LLAMA, INV_FREQ,
    ),
    Family(
        "Mistral", "mistral", "MistralForCausalLM", "model.",
        (*llama_sizes(8), EPS, HEAD_DIM, Rope(), SILU, Window(4096), UNTIED),
        names.LLAMA, INV_FREQ, ("document_attention",),  # it matters only in training on rows of several documents
    ),
    Family(
        "Qwen2", "qwen2", "Qwen2ForCausalLM", "model.",
        (*llama_sizes(32), EPS, HEAD_DIM, Rope(), SILU, Constant("qkv_bias", True), _QWEN_LAYERS, UNTIED),
        names.LLAMA, INV_FREQ,
    ),
    Family(
        "Qwen3", "qwen3", "Qwen3ForCausalLM", "model.",
        (
            *llama_sizes(32), EPS, HEAD_128, Rope(), SILU, Constant("qk_norm", True), ATTENTION_BIAS, _QWEN_LAYERS,
            UNTIED,
        ),
        names.LLAMA_QK, INV_FREQ,
    ),
    Family(
        "Gemma", "gemma", "GemmaForCausalLM", "model.",
        (
            *llama_sizes(16), EPS, *_GEMMA, Constant("norm_offset", 1.0), Rope(),
            Activation("hidden_act hidden_activation", "gelu_pytorch_tanh", TANH, (("gelu", "gelu_tanh"),)),
        ),
        names.LLAMA, INV_FREQ,
    ),
    Family(
        "Gemma 2", "gemma2", "Gemma2ForCausalLM", "model.",
        (
            *llama_sizes(4), EPS, *_GEMMA, *_GEMMA_CAPS, Rope(), LayerTypes(4096, every_second),
            Cap("attn_logit_softcapping", "attention_softcap", 50.0),
            Cap("final_logit_softcapping", "logit_softcap", 30.0),
        ),
        names.GEMMA2, INV_FREQ, ("sliding_window_size",),
    ),
    Family(
        "Gemma 3", "gemma3_text", "Gemma3ForCausalLM", "model.",
        (
            *llama_sizes(4), EPS, *_GEMMA, *_GEMMA_CAPS,
            Rope(1e6, sliding_theta=1e4, sliding_name="rope_local_base_freq"),
            Constant("qk_norm", True), LayerTypes(4096, _all_but_every(6), older=_pattern_length),
            Fixed("attn_logit_softcapping", False, "caps attention scores, which transformers does not do here"),
            Cap("final_logit_softcapping", "logit_softcap", None),
        ),
        names.GEMMA3, INV_FREQ, ("_sliding_window_pattern",),  # a note by transformers, which also writes layer_types
    ),
    Family(
        "Gemma 3n", "gemma3n_text", "Gemma3nForCausalLM", "model.",
        (
            *SIZES, KeyHeads(2), EachLayer("intermediate_size", "mlp", 16384),
            Renamed("max_position_embeddings", "context", 32768), EPS, *_GEMMA,
            Rope(1e6, sliding_theta=1e4, sliding_name="rope_local_base_freq"), LayerTypes(512, _all_but_every(5, "")),
            Activation("hidden_activation", "gelu_pytorch_tanh", TANH), Constant("post_norms", True),
            Constant("qk_norm", True), Constant("value_norm", True), Constant("query_scale", 1.0),
            Cap("final_logit_softcapping", "logit_softcap", 30.0),
            Renamed("num_kv_shared_layers", "shared_kv_layers", 15, may_be_zero=True), SparseActivation(),
            Renamed("altup_num_inputs", "residual_streams", 4), Renamed("laurel_rank", "laurel_rank", 64),
            Renamed("hidden_size_per_layer_input", "layer_embed", 256),
            Renamed("vocab_size_per_layer_input", "layer_vocab", 262144),
            Fixed("altup_active_idx", 0, "makes another stream than the first one the block's, which is not supported"),
            Fixed("altup_correct_scale", True, "leaves a scale out, which is not supported"),
        ),
        # altup_coef_clip is of training: transformers cuts off coefficients above it, which no published model reaches.
        # transformers does not read the others.
        names.GEMMA3N, INV_FREQ, ("altup_coef_clip", "altup_lr_multiplier", "query_pre_attn_scalar"),
    ),
    Family(
        "Ministral 3", "ministral3", "Ministral3ForCausalLM", "model.",
        (
            *llama_sizes(8), EPS_5, HEAD_128, SILU, Window(None), UNTIED,
            Rope(temperature=True, default={
                "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "beta_fast": 32.0, "beta_slow": 1.0,
                "original_max_position_embeddings": 16384, "mscale": 1.0, "mscale_all_dim": 1.0, BETA: 0.1,
            }),
        ),
        names.LLAMA, INV_FREQ,
    ),
    Family(
        "Phi-3", "phi3", "Phi3ForCausalLM", "model.",
        (
            *LLAMA_SIZES, EPS_5, HEAD_DIM, SILU, Window(None),
            Rope(part=1.0, original=4096, older_kinds=(("su", "longrope"), ("yarn", "longrope"))), UNTIED,
            Fixed("full_attn_mod", 1, "has sparse attention in some layers, which is not supported"),
            Fixed("interpolate_factor", 1, "stretches positions, which is not supported"),
        ),
        names.PHI3, INV_FREQ,
    ),
    Family(
        "GLM-4", "glm", "GlmForCausalLM", "model.",
        (*llama_sizes(2), GLM_EPS, HEAD_128, Rope(part=0.5), SILU, Flag("attention_bias", ("qkv_bias",), True), UNTIED),
        names.GLM, INV_FREQ,
    ),
    Family(
        "GLM-4-0414", "glm4", "Glm4ForCausalLM", "model.",
        (
            *llama_sizes(2), GLM_EPS, HEAD_128, Rope(part=0.5), SILU, Constant("post_norms", True),
            Flag("attention_bias", ("qkv_bias",), True), UNTIED,
        ),
        names.GLM4, INV_FREQ,
    ),
    Family(
        "Granite", "granite", "GraniteForCausalLM", "model.",
        (
            *LLAMA_SIZES, EPS, HEAD_DIM, Rope(), SILU, ATTENTION_BIAS, _MLP_BIAS, UNTIED,
            Renamed("embedding_multiplier", "embedding_scale", 1.0), QueryScale("attention_multiplier", 1, 1.0),
            Renamed("residual_multiplier", "residual_scale", 1.0), Divisor("logits_scaling", "logit_scale"),
        ),
        names.LLAMA, INV_FREQ,
    ),
    Family(
        "Cohere", "cohere", "CohereForCausalLM", "model.",
        (*LLAMA_SIZES, *_COHERE, Rope(5e5), Flag("use_qk_norm", ("qk_norm",), False)),
        names.COHERE, INV_FREQ,
    ),
    Family(
        "Cohere 2", "cohere2", "Cohere2ForCausalLM", "model.",
        (*LLAMA_SIZES, *_COHERE, Rope(), LayerTypes(4096, _all_but_every(4), older=_pattern_length, full="nope")),
        names.COHERE, INV_FREQ,
        # Cohere's own code has them; transformers does not.
        ("layer_switch", "order_of_interleaved_layers", "position_embedding_type", "rotary_pct",
         "use_embedding_sharing", "use_gated_activation", "use_parallel_block", "use_parallel_embedding",
         "_sliding_window_pattern"),
    ),
    Family(
        "OLMo", "olmo", "OlmoForCausalLM", "model.",
        (
            *LLAMA_SIZES, Constant("norm", "layernorm"), Constant("norm_scale", False), Constant("norm_eps", 1e-5),
            HEAD_DIM, Rope(), SILU, ATTENTION_BIAS, UNTIED,
            Fixed("clip_qkv", False, "cuts off large queries, keys and values, which is not supported"),
        ),
        names.LLAMA, INV_FREQ,
    ),
    Family(
        "OLMo 2", "olmo2", "Olmo2ForCausalLM", "model.", (*LLAMA_SIZES, *_OLMO2, Rope()), names.OLMO2, INV_FREQ,
    ),
    Family(
        "OLMo 3", "olmo3", "Olmo3ForCausalLM", "model.",
        (*LLAMA_SIZES, *_OLMO2, Rope(5e5, sliding_theta=5e5), LayerTypes(4096, _all_but_every(4, name=""))),
        names.OLMO2, INV_FREQ,
    ),
    Family(
        "SmolLM3", "smollm3", "SmolLM3ForCausalLM", "model.",
        (
            *llama_sizes(4), EPS, HEAD_DIM, Rope(2e6), SILU, ATTENTION_BIAS, _MLP_BIAS, NoRopeLayers(), TIED,
        ),
        names.LLAMA, INV_FREQ, ("max_window_layers",),
    ),
    Family(
        "StarCoder2", "starcoder2", "Starcoder2ForCausalLM", "model.",
        (
            *llama_sizes(2), *PLAIN_LAYERNORM, Renamed("norm_epsilon", "norm_eps", 1e-5), HEAD_DIM, Rope(),
            Window(None),
            Activation("hidden_act", "gelu_pytorch_tanh", TANH), Flag("use_bias", _ALL_BIASES, True), TIED,
        ),
        names.STARCODER2, INV_FREQ, ("norm_type", "mlp_type"),
    ),
    Family(
        "StableLM", "stablelm", "StableLmForCausalLM", "model.",
        (
            *llama_sizes(32), Constant("norm", "layernorm"), Constant("norm_bias", True), NO_HEAD_DIM, SILU,
            Renamed("layer_norm_eps", "norm_eps", 1e-5), Rope(part=0.25), Flag("use_qkv_bias", ("qkv_bias",), False),
            Flag("use_parallel_residual", ("block",), False, "parallel", "sequential"), UNTIED,
            Fixed("qk_layernorm", False, "stores the norm of each head as a tensor of its own, which is not supported"),
        ),
        names.LLAMA, INV_FREQ,
    ),
    Family(
        "Nemotron", "nemotron", "NemotronForCausalLM", "model.",
        (
            *LLAMA_SIZES, *PLAIN_LAYERNORM, Constant("norm_offset", 1.0), Renamed("norm_eps", "norm_eps", 1e-5),
            HEAD_DIM, Rope(part=0.5), Activation("hidden_act", "relu2", TANH), ATTENTION_BIAS, _MLP_BIAS, UNTIED,
        ),
        names.LLAMA, INV_FREQ,
    ),
    Family(
        "Seed-OSS", "seed_oss", "SeedOssForCausalLM", "model.",
        (
            *llama_sizes(8), EPS, HEAD_128, Rope(), SILU, _MLP_BIAS, UNTIED,
            Flag("attention_bias", ("qkv_bias",), True),
            Flag("attention_out_bias", ("attention_out_bias",), False),
        ),
        names.LLAMA, INV_FREQ,
    ),
    Family(
        "ERNIE 4.5", "ernie4_5", "Ernie4_5ForCausalLM", "model.",
        (
            *llama_sizes(2), EPS_5, HEAD_128, Rope(5e5), SILU,
            Flag("use_bias", _ALL_BIASES, False), TIED,
        ),
        names.ERNIE, INV_FREQ,
    ),
    Family(
        "Arcee", "arcee", "ArceeForCausalLM", "model.",
        (
            *LLAMA_SIZES, EPS_5, Constant("mlp_kind", "plain"), HEAD_DIM, Rope(),
            Activation("hidden_act", "relu2", TANH), ATTENTION_BIAS, _MLP_BIAS, UNTIED,
        ),
        names.LLAMA, INV_FREQ,
    ),
    Family(
        "Phi", "phi", "PhiForCausalLM", "model.",
        (
            *LLAMA_SIZES, *PLAIN_LAYERNORM, Renamed("layer_norm_eps", "norm_eps", 1e-5), HEAD_DIM, Rope(part=0.5),
            Activation("hidden_act", "gelu_new", GELU_NEW), Constant("block", "parallel"), *BIASES,
            Constant("unembedding_bias", True), UNTIED, Flag("qk_layernorm", ("qk_norm",), False),
        ),
        names.PHI, INV_FREQ,
    ),
)  # fmt: skip
