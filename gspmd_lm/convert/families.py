"""The table of model families: facts about the config.json and the tensors of each, for import and export."""

import dataclasses
import math
import re
from collections.abc import Callable

from gspmd_lm.convert.fields import (
    MOST_LAYERS,
    Activation,
    Always,
    Cap,
    Equal,
    FalconBlock,
    LayerTypes,
    Only,
    Part,
    QueryScale,
    Rope,
    RotaryDim,
    Same,
    Switch,
    Window,
)
from gspmd_lm.convert.layout import Tensor
from gspmd_lm.convert.names import (
    BLOOM,
    FALCON,
    GEMMA2,
    GEMMA3,
    GLM,
    GLM4,
    GPT2,
    GPTJ,
    INV_FREQ,
    LLAMA,
    LLAMA_QK,
    MASKS,
    NEOX,
    OPT,
    PHI3,
)
from gspmd_lm.convert.source import Source


@dataclasses.dataclass(frozen=True)
class Family:
    """One row of the table: the name of a family in config.json, its fields, and its tensors."""

    name: str
    model_type: str
    architecture: str  # the class of transformers that a written config.json names
    prefix: str  # the base model's prefix, which many published tensors lack
    parts: tuple[Part, ...]
    tensors: tuple[Tensor, ...]
    no_weights: tuple[str, ...] = ()  # patterns of names that files may hold although they are not weights
    irrelevant: tuple[str, ...] = ()  # further fields of config.json that change nothing, besides IRRELEVANT

    def is_no_weight(self, name: str) -> bool:
        return any(re.search(pattern, name) for pattern in self.no_weights)


# Fields that do not change what is computed: names, token ids (which the tokenizer decides), dropout (training has
# model.dropout), initialisation, settings of transformers' runs and generation, and notes of tools.
IRRELEVANT = frozenset(
    [
        "architectures", "model_type", "transformers_version", "_name_or_path", "name_or_path", "_commit_hash",
        "torch_dtype", "dtype", "auto_map", "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id",
        "sep_token_id", "cls_token_id", "mask_token_id", "decoder_start_token_id", "forced_bos_token_id",
        "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens", "prefix", "tokenizer_class",
        "attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout",
        "layerdrop", "activation_dropout", "classifier_dropout", "neftune_noise_alpha", "initializer_range",
        "init_std", "initializer_factor", "initializer_scale", "use_cache", "cache_implementation",
        "pretraining_tp", "attn_implementation", "_attn_implementation", "_attn_implementation_autoset",
        "attention_implementation", "_flash_attn_2_enabled", "experts_implementation",
        "_experts_implementation", "gradient_checkpointing", "torchscript", "use_bfloat16",
        "output_hidden_states", "output_attentions", "output_scores", "output_past", "return_dict",
        "return_dict_in_generate", "chunk_size_feed_forward", "is_encoder_decoder", "is_decoder", "problem_type",
        "finetuning_task", "id2label", "label2id", "num_labels", "_num_labels", "task_specific_params",
        "temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff",
        "repetition_penalty", "length_penalty", "diversity_penalty", "num_beams", "num_beam_groups",
        "num_return_sequences", "max_length", "min_length", "max_new_tokens", "min_new_tokens", "do_sample",
        "early_stopping", "bad_words_ids", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size",
        "exponential_decay_length_penalty", "remove_invalid_values", "predict_special_tokens",
        "max_sequence_length", "model_max_length", "_from_model_config", "custom_pipelines", "is_llama_config",
        "transformers.js_config", "unsloth_version", "unsloth_fixed", "language", "pixel_shuffle_factor",
        "perceiver_config",
    ]
)  # fmt: skip
# Fields with a known meaning that no family here supports, with the reason for the message. null, false, 0 and empty
# values mean that a model does without the feature.
REFUSED = {
    "quantization_config": "the weights are quantised: load them with transformers, dequantise and save them",
    "text_config": "a model of several parts, such as one that sees images: only text models are read",
    "num_local_experts": "experts are not supported",
    "num_experts": "experts are not supported",
    "sliding_window": "a window, which this family does not have",
    "head_dim": "heads of a size of their own, which this family does not have",
    "attention_chunk_size": "attention within chunks is not supported",
    "per_layer_config": "layers that differ in more than their window are not supported",
    "pruned_heads": "pruned heads are not supported",
    "add_cross_attention": "attention to another model's output is not supported",
    "tie_encoder_decoder": "an encoder is not supported",
    "use_resampler": "a model of several parts, such as one that sees images: only text models are read",
    "use_mrope": "rotation by several positions at once, which this family does not have",
    "rope_interleaved": "rotated neighbours, which this family does not have",
    "attention_bias": "biases in attention, which this family does not have",
    "mlp_bias": "biases in the MLP, which this family does not have",
    "qkv_bias": "biases in attention, which this family does not have",
    "lm_head_bias": "a bias of the output, which this family does not have",
    "qk_layernorm": "norms of queries and keys, which this family does not have",
    "use_qk_norm": "norms of queries and keys, which this family does not have",
}
# Fields that transformers reads for every family, although no family's config lists them.
EVERY_FAMILY: tuple[Part, ...] = (Only("is_causal", True, "lets tokens see later ones, which is not supported"),)
# model_type of a family that is not supported -> reason.
LEFT_OUT = {
    "chatglm": "it is for ChatGLM's own code; GLM-4 is read in transformers' format (glm, glm4)",
    "gemma3": "it is Gemma 3 with images; text-only directories are model_type gemma3_text",
    "mixtral": "it has experts",
    "qwen2_moe": "it has experts",
    "qwen3_moe": "it has experts",
    "RefinedWeb": "it is Falcon's older own code; directories of transformers' format are model_type falcon",
    "RefinedWebModel": "it is Falcon's older own code; directories of transformers' format are model_type falcon",
}


def _head_dim(values):
    return values["embed"] // values["heads"]


def _heads(values):
    return values["heads"]


def _four_times(values):
    return 4 * values["embed"]


_SIZES = (
    Same("vocab_size", "vocab"),
    Same("hidden_size", "embed"),
    Same("num_hidden_layers", "layers", most=MOST_LAYERS),
    Same("num_attention_heads", "heads"),
)
_GPT2_SIZES = (
    Same("vocab_size", "vocab"),
    Same("n_embd hidden_size", "embed"),
    Same("n_layer num_hidden_layers", "layers", most=MOST_LAYERS),
    Same("n_head num_attention_heads", "heads"),
    Same("n_positions max_position_embeddings", "context"),
    Same("n_inner", "mlp", _four_times),
    Always("kv_heads", _heads),
    Always("head_dim", _head_dim),
)
_LLAMA_SIZES = (
    *_SIZES,
    Same("num_key_value_heads", "kv_heads", _heads),
    Same("intermediate_size", "mlp"),
    Same("max_position_embeddings", "context"),
)
_EPS = Same("rms_norm_eps", "norm_eps", 1e-6)
_HEAD_128 = Same("head_dim", "head_dim", 128)
_GLM_EPS = Same("rms_norm_eps", "norm_eps", 1.5625e-7)
_HEAD_DIM = Same("head_dim", "head_dim", _head_dim)
_TANH = {"gelu_tanh": "gelu_pytorch_tanh"}
_GELU_NEW = {"gelu_tanh": "gelu_new"}
_SILU = Activation("hidden_act", "silu", _TANH)
_LAYERNORM = (Always("norm", "layernorm"), Always("norm_bias", True), Always("mlp_kind", "plain"))
_UNTIED = Switch("tie_word_embeddings", ("tied_embeddings",), False)
_TIED = Switch("tie_word_embeddings", ("tied_embeddings",), True)
_ATTENTION_BIAS = Switch("attention_bias", ("qkv_bias", "attention_out_bias"), False)
_CAUSAL = Only("use_bidirectional_attention", False, "lets tokens see later ones, which is not supported")


def _window_layers(source: Source) -> Callable[[int], bool]:
    first = source.whole(["max_window_layers"], 28, 0)
    return lambda i: i >= first


def _every_second(source: Source) -> Callable[[int], bool]:
    return lambda i: i % 2 == 0


def _five_of_six(source: Source) -> Callable[[int], bool]:
    length = source.whole(["sliding_window_pattern"], 6, 1)
    return lambda i: (i + 1) % length != 0


def _first_window_layer(model):
    """max_window_layers, for families in which the layers from that one on have the window."""
    pattern = model.layer_pattern or ("sliding" if model.sliding_window else "full",)
    slides = [pattern[i % len(pattern)] == "sliding" for i in range(model.layers)]
    return {"max_window_layers": model.layers - sum(slides)} if slides == sorted(slides) else {}


def _pattern_length(model):
    return {"sliding_window_pattern": len(model.layer_pattern)} if model.layer_pattern else {}


_QWEN_LAYERS = LayerTypes(4096, _window_layers, "use_sliding_window", _first_window_layer)
_GEMMA = (
    Always("norm_offset", 1.0),
    Always("embedding_scale", lambda values: math.sqrt(values["embed"])),
    Same("head_dim", "head_dim", 256),
    _ATTENTION_BIAS,
    _CAUSAL,
    _TIED,
)
_GEMMA_CAPS = (
    QueryScale(),
    Always("post_norms", True),
    Activation("hidden_activation hidden_act", "gelu_pytorch_tanh", _TANH),
)


FAMILIES = (
    Family(
        "Llama", "llama", "LlamaForCausalLM", "model.",
        (
            *_LLAMA_SIZES, _EPS, _HEAD_DIM, Rope(), _SILU, _ATTENTION_BIAS, Switch("mlp_bias", ("mlp_bias",), False),
            _UNTIED,
        ),
        LLAMA, INV_FREQ,
    ),
    Family(
        "Mistral", "mistral", "MistralForCausalLM", "model.",
        (*_LLAMA_SIZES, _EPS, _HEAD_DIM, Rope(), _SILU, Window(4096), _UNTIED),
        LLAMA, INV_FREQ, ("document_attention",),  # it matters only in training on rows of several documents
    ),
    Family(
        "Qwen2", "qwen2", "Qwen2ForCausalLM", "model.",
        (*_LLAMA_SIZES, _EPS, _HEAD_DIM, Rope(), _SILU, Always("qkv_bias", True), _QWEN_LAYERS, _UNTIED),
        LLAMA, INV_FREQ,
    ),
    Family(
        "Qwen3", "qwen3", "Qwen3ForCausalLM", "model.",
        (
            *_LLAMA_SIZES, _EPS, _HEAD_128, Rope(), _SILU, Always("qk_norm", True), _ATTENTION_BIAS,
            _QWEN_LAYERS, _UNTIED,
        ),
        LLAMA_QK, INV_FREQ,
    ),
    Family(
        "Gemma", "gemma", "GemmaForCausalLM", "model.",
        (
            *_LLAMA_SIZES, _EPS, *_GEMMA, Rope(),
            Activation("hidden_act hidden_activation", "gelu_pytorch_tanh", _TANH, (("gelu", "gelu_tanh"),)),
        ),
        LLAMA, INV_FREQ,
    ),
    Family(
        "Gemma 2", "gemma2", "Gemma2ForCausalLM", "model.",
        (
            *_LLAMA_SIZES, _EPS, *_GEMMA, *_GEMMA_CAPS, Rope(), LayerTypes(4096, _every_second),
            Cap("attn_logit_softcapping", "attention_softcap", 50.0),
            Cap("final_logit_softcapping", "logit_softcap", 30.0),
        ),
        GEMMA2, INV_FREQ, ("sliding_window_size",),
    ),
    Family(
        "Gemma 3", "gemma3_text", "Gemma3ForCausalLM", "model.",
        (
            *_LLAMA_SIZES, _EPS, *_GEMMA, *_GEMMA_CAPS, Rope(1e6, sliding_theta=1e4), Always("qk_norm", True),
            LayerTypes(4096, _five_of_six, older=_pattern_length),
            Only("attn_logit_softcapping", False, "caps attention scores, which transformers does not do here"),
            Cap("final_logit_softcapping", "logit_softcap", None),
        ),
        GEMMA3, INV_FREQ, ("_sliding_window_pattern",),  # a note by transformers, which also writes layer_types
    ),
    Family(
        "Phi-3", "phi3", "Phi3ForCausalLM", "model.",
        (
            *_LLAMA_SIZES, Same("rms_norm_eps", "norm_eps", 1e-5), _HEAD_DIM, Rope(part=1.0), _SILU, Window(None),
            _UNTIED, Only("full_attn_mod", 1, "has sparse attention in some layers, which is not supported"),
            Only("interpolate_factor", 1, "stretches positions, which is not supported"),
        ),
        PHI3, INV_FREQ, ("original_max_position_embeddings",),
    ),
    Family(
        "GLM-4", "glm", "GlmForCausalLM", "model.",
        (
            *_LLAMA_SIZES, _GLM_EPS, _HEAD_128, Rope(part=0.5), _SILU,
            Switch("attention_bias", ("qkv_bias",), True), _UNTIED,
        ),
        GLM, INV_FREQ,
    ),
    Family(
        "GLM-4-0414", "glm4", "Glm4ForCausalLM", "model.",
        (
            *_LLAMA_SIZES, _GLM_EPS, _HEAD_128, Rope(part=0.5), _SILU, Always("post_norms", True),
            Switch("attention_bias", ("qkv_bias",), True), _UNTIED,
        ),
        GLM4, INV_FREQ,
    ),
    Family(
        "GPT-2", "gpt2", "GPT2LMHeadModel", "transformer.",
        (
            *_GPT2_SIZES, *_LAYERNORM, Activation("activation_function", "gelu_new", _GELU_NEW),
            Same("layer_norm_epsilon", "norm_eps", 1e-5), Always("positions", "learned"), Always("mlp_bias", True),
            Always("qkv_bias", True), Always("attention_out_bias", True), _TIED,
            Only("scale_attn_weights", True, "leaves attention scores as they are, which is not supported"),
            Only("scale_attn_by_inverse_layer_idx", False, "scales attention by layer, which is not supported"),
            Only("add_cross_attention", False, "attends to an encoder, which is not supported"),
        ),
        GPT2, MASKS,
        (
            "n_ctx", "summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels",
            "summary_first_dropout", "reorder_and_upcast_attn",
        ),
    ),
    Family(
        "OPT", "opt", "OPTForCausalLM", "model.",
        (
            *_SIZES, *_LAYERNORM, Same("ffn_dim", "mlp"), Same("max_position_embeddings", "context"),
            Always("kv_heads", _heads), Always("head_dim", _head_dim), Always("norm_eps", 1e-5),
            Activation("activation_function", "relu", _GELU_NEW), Always("positions", "learned"),
            Always("position_offset", 2), Switch("enable_bias", ("qkv_bias", "attention_out_bias", "mlp_bias"), True),
            _TIED, Equal("word_embed_proj_dim", "embed", "is not hidden_size: it asks for a projection"),
            Only("do_layer_norm_before", True, "puts norms after the residual sum, which is not supported"),
            Only("_remove_final_layer_norm", False, "leaves out the last norm, which is not supported"),
            Only("layer_norm_elementwise_affine", True, "has norms without scale, which is not supported"),
        ),
        OPT, irrelevant=("learned_embeddings",),  # a field of Galactica; true, as in OPT
    ),
    Family(
        "BLOOM", "bloom", "BloomForCausalLM", "transformer.",
        (
            Same("vocab_size", "vocab"), Same("hidden_size n_embed", "embed"),
            Same("n_layer num_hidden_layers", "layers", most=MOST_LAYERS), Same("n_head num_attention_heads", "heads"),
            Same("seq_length", "context", 2048), *_LAYERNORM,
            Always("mlp", _four_times), Always("kv_heads", _heads), Always("head_dim", _head_dim),
            Same("layer_norm_epsilon", "norm_eps", 1e-5), Always("activation", "gelu_tanh"),
            Always("positions", "alibi"), Always("embedding_norm", True), Always("qkv_bias", True),
            Always("attention_out_bias", True), Always("mlp_bias", True), _TIED,
            Only("apply_residual_connection_post_layernorm", False, "adds up after the norms, which is not supported"),
        ),
        BLOOM,
        irrelevant=(
            "slow_but_exact", "attention_softmax_in_fp32", "bias_dropout_fusion", "masked_softmax_fusion",
            "offset_alibi", "skip_bias_add", "skip_bias_add_qkv", "hidden_dropout_prob",
        ),
    ),
    Family(
        "Falcon", "falcon", "FalconForCausalLM", "transformer.",
        (
            Same("vocab_size", "vocab"), Same("hidden_size n_embed", "embed"),
            Same("num_hidden_layers n_layer", "layers", most=MOST_LAYERS), Same("num_attention_heads n_head", "heads"),
            Same("max_position_embeddings", "context", 2048), Same("ffn_hidden_size", "mlp", _four_times),
            *_LAYERNORM, Always("head_dim", _head_dim), FalconBlock(), Rope(),
            Same("layer_norm_epsilon", "norm_eps", 1e-5), Activation("activation", "gelu", _GELU_NEW),
            Switch("bias", ("qkv_bias", "attention_out_bias", "mlp_bias"), False), _TIED,
            Only("alibi", False, "has positions rounded to bfloat16 and scaled, which is not supported"),
            Only("apply_residual_connection_post_layernorm", False, "adds up after the norms, which is not supported"),
        ),
        FALCON,
        INV_FREQ, ("ff_factor",),
    ),
    Family(
        "GPT-J", "gptj", "GPTJForCausalLM", "transformer.",
        (
            *_GPT2_SIZES, *_LAYERNORM, Activation("activation_function", "gelu_new", _GELU_NEW),
            Same("layer_norm_epsilon", "norm_eps", 1e-5), RotaryDim(), Always("block", "parallel"),
            Always("mlp_bias", True), Always("unembedding_bias", True), _UNTIED,
            Only("scale_attn_weights", True, "leaves attention scores as they are, which is not supported"),
        ),
        GPTJ, MASKS,
        ("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout",
         "rotary", "gradient_checkpointing"),
    ),
    Family(
        "GPT-NeoX", "gpt_neox", "GPTNeoXForCausalLM", "gpt_neox.",
        (
            *_SIZES, *_LAYERNORM, Same("intermediate_size", "mlp"), Same("max_position_embeddings", "context"),
            Always("kv_heads", _heads), Always("head_dim", _head_dim), Same("layer_norm_eps", "norm_eps", 1e-5),
            Activation("hidden_act", "gelu", {"gelu_tanh": "gelu_new"}),
            Rope(theta_name="rotary_emb_base", part=0.25, part_name="rotary_pct"),
            Switch("use_parallel_residual", ("block",), True, "parallel", "sequential"),
            Always("shared_norm", lambda values: values["block"] == "sequential"),
            Switch("attention_bias", ("qkv_bias", "attention_out_bias"), True), Always("mlp_bias", True), _UNTIED,
        ),
        NEOX,
        (*INV_FREQ, *MASKS),
    ),
)  # fmt: skip
