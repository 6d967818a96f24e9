"""The table of model families, one file each: facts about the config.json and the tensors of each.

A file of this folder is in the table by being there: its FAMILIES are rows of it.
"""

import importlib
import pkgutil
import re

from gspmd_lm.convert.config_reader import ConfigReader
from gspmd_lm.convert.families.qwen import DualChunks
from gspmd_lm.convert.family import Family
from gspmd_lm.convert.fields import FieldCodec, MustAgree, Values

# The first row that can express a model is the one that it is written as. So the files of plain families come first,
# whose models others can express too. The others follow by their names.
_FIRST = ("llama", "mistral", "qwen", "gemma", "phi")


def _files() -> list[str]:
    names = [module.name for module in pkgutil.iter_modules(__path__)]
    return [*_FIRST, *sorted(name for name in names if name not in _FIRST)]


FAMILIES: tuple[Family, ...] = tuple(
    row for name in _files() for row in importlib.import_module(f"{__name__}.{name}").FAMILIES
)
# Rates of dropout, by the words in their names. They belong to training, which has model.dropout.
DROPOUT = re.compile(r"dropout|_pdrop$|layerdrop$")
# Other fields that do not change what is computed: names, token ids (which the tokenizer decides), initialisation,
# settings of transformers' runs and generation, and notes of tools.
IRRELEVANT = frozenset(
    [
        "architectures", "model_type", "transformers_version", "_name_or_path", "name_or_path", "_commit_hash",
        "torch_dtype", "dtype", "auto_map", "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id",
        "sep_token_id", "cls_token_id", "mask_token_id", "decoder_start_token_id", "forced_bos_token_id",
        "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens", "prefix", "tokenizer_class",
        "neftune_noise_alpha", "initializer_range", "init_std", "initializer_factor", "initializer_scale", "use_cache",
        "cache_implementation",
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
    "quantization_bit": "the weights are quantised: load them with their own code, dequantise and save them",
    "pre_seq_len": "a trained prefix, which is not supported",
    "text_config": "a model of several parts, such as one that sees images: only text models are read",
    "attention_chunk_size": "attention within chunks is not supported",
    "per_layer_config": "layers that differ in more than their window are not supported",
    "pruned_heads": "pruned heads are not supported",
    "add_cross_attention": "attention to another model's output is not supported",
    "tie_encoder_decoder": "an encoder is not supported",
    "use_resampler": "a model of several parts, such as one that sees images: only text models are read",
    "use_mrope": "rotation by several positions at once, which this family does not have",
    "rope_interleaved": "rotated neighbours, which this family does not have",
    "num_nextn_predict_layers": "layers that predict later tokens, which this family does not have",
    "scale_embeddings": "a scaled token table, which this family does not have",
    "n_special": "tokens beyond the vocabulary, which are not supported",
}


class IsCausal(FieldCodec):
    """is_causal, which transformers reads in every family: it must say what the family's mask is. null means false."""

    def read(self, reader: ConfigReader, values: Values) -> None:
        reader.names_read.add("is_causal")
        wanted = values.get("attention.mask") != "full"
        value = reader.raw.get("is_causal", wanted)
        if (False if value is None else value) != wanted:
            which = "lets tokens see later ones" if wanted else "hides later tokens from earlier ones"
            reader.refuse("is_causal", value, f"{which}, which is not supported")


_BIASES = ("attention.qkv_bias", "attention.out_bias", "feed_forward.bias")
# Fields that every family may have: one that transformers always reads, one that it never reads, and those that repeat
# what a family is.
EVERY_FAMILY: tuple[FieldCodec, ...] = (
    IsCausal(),
    DualChunks(),
    MustAgree("num_experts", ("experts.count",)),
    MustAgree("num_local_experts", ("experts.count",)),
    MustAgree("n_routed_experts", ("experts.count",)),
    MustAgree("shared_expert_intermediate_size", ("experts.shared_mlp",)),
    MustAgree("sliding_window", ("attention.window",)),
    MustAgree("use_sliding_window", ("attention.window",)),
    MustAgree("head_dim", ("head_dim",)),
    MustAgree("attention_bias", ("attention.qkv_bias", "attention.out_bias")),
    MustAgree("qkv_bias", ("attention.qkv_bias",)),
    MustAgree("mlp_bias", ("feed_forward.bias",)),
    MustAgree("use_bias", _BIASES),
    MustAgree("bias", _BIASES),
    MustAgree("lm_head_bias", ("logits.bias",)),
    MustAgree("qk_layernorm", ("attention.qk_norm",)),
    MustAgree("use_qk_norm", ("attention.qk_norm",)),
)
# model_type of a family that is not supported -> reason.
LEFT_OUT = {
    "RefinedWeb": "it is Falcon's older own code; directories of transformers' format are model_type falcon",
    "RefinedWebModel": "it is Falcon's older own code; directories of transformers' format are model_type falcon",
}
