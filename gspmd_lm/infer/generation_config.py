"""generation_config.json: what of it is obeyed, and sentences about what is not."""

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gspmd_lm.data import chat, special_tokens
from gspmd_lm.data.tokenizer import HuggingFace, Tokenizer
from gspmd_lm.errors import InputError, is_whole_number
from gspmd_lm.infer.processors import Processors
from gspmd_lm.infer.sampling import Sampling

_SAMPLING = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}  # field -> the value that changes nothing
# Values with which a field that is not supported changes nothing. null, false and {} never do.
_NEUTRAL = {
    "num_beams": 1,
    "num_beam_groups": 1,
    "num_return_sequences": 1,
    "guidance_scale": 1,
    "typical_p": 1,
    "encoder_repetition_penalty": 1,
    "encoder_no_repeat_ngram_size": 0,
    "epsilon_cutoff": 0,
    "eta_cutoff": 0,
    "diversity_penalty": 0,
    "top_h": 1,
    "penalty_alpha": 0,
}
# Fields that do not say which token comes next, or that other parts of this package read.
_PASSED_OVER = {
    # ends of a text, its beginning and padding, and its length, which is always asked for
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "decoder_start_token_id",
    "max_length",
    "max_new_tokens",
    # of beams, which num_beams asks for
    "length_penalty",
    "early_stopping",
    # how transformers computes and what it gives back
    "use_cache",
    "cache_implementation",
    "cache_config",
    "max_cache_len",
    "return_dict_in_generate",
    "output_attentions",
    "output_hidden_states",
    "output_scores",
    "output_logits",
    "prefill_chunk_size",
    "compile_config",
    "disable_compile",
    "low_memory",
    "continuous_batching_config",
    "remove_invalid_values",
    "renormalize_logits",
    "transformers_version",
    "_from_model_config",
    "_name_or_path",
    "generation_kwargs",
    # a second model or head that guesses ahead, which changes no text
    "is_assistant",
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "assistant_confidence_threshold",
    "assistant_early_exit",
    "assistant_lookbehind",
    "target_lookbehind",
    "assistant_ensemble_weight",
    "prompt_lookup_num_tokens",
    "max_matching_ngram_size",
    "use_mtp",
    "speculation_type",
}
# Fields that become model.encoder of a model that hears, in convert/families/whisper.py, or that it does not need.
_OF_SOUNDS = {
    "suppress_tokens",
    "begin_suppress_tokens",
    "forced_decoder_ids",
    "lang_to_id",
    "task_to_id",
    "is_multilingual",
    "no_timestamps_token_id",
    "alignment_heads",
    "prev_sot_token_id",
    "max_initial_timestamp_index",
    "language",
    "task",
    "median_filter_width",
}


_OBEYED = (
    "repetition_penalty",
    "no_repeat_ngram_size",
    "sequence_bias",
    "bad_words_ids",
    "suppress_tokens",
    "begin_suppress_tokens",
    "min_length",
    "min_new_tokens",
)


def read(
    tokenizer: Tokenizer | None, hears: bool = False, first_tokens: Sequence[int] = ()
) -> tuple[Processors | None, list[str]]:
    """The processors that the file beside a tokenizer asks for, and sentences about them and what is not supported.

    hears: whether the model hears sounds. first_tokens: what its texts begin with. Raises InputError that lists all
    values that are not valid.
    """
    if not isinstance(tokenizer, HuggingFace):
        return None, []
    path, fields = _fields(tokenizer)
    fields = {name: value for name, value in fields.items() if not hears or name not in _OF_SOUNDS}
    obeyed = {name: fields[name] for name in _OBEYED if name in fields}
    found = _processors(obeyed, path, len(first_tokens), tokenizer) if obeyed else None
    unused = {
        name: value
        for name, value in fields.items()
        if name not in (*_OBEYED, *_SAMPLING, "do_sample") and _matters(name, value, first_tokens)
    }
    notes = [f"{path}: {_list_fields(obeyed)}"] if found else []
    return found, notes + ([f"warning: {path}: not supported, and left out: {_list_fields(unused)}"] if unused else [])


def about_sampling(tokenizer: Tokenizer, asked: Sampling) -> list[str]:
    """A sentence about what the file beside a tokenizer says of sampling, if that is not what is asked for."""
    if not isinstance(tokenizer, HuggingFace):
        return []
    path, fields = _fields(tokenizer)
    if not (asked.temperature or fields.get("do_sample")):
        return []
    if asked.temperature:
        usual = Sampling()
        wanted = {
            name: fields[name] for name in _SAMPLING if name in fields and getattr(asked, name) == getattr(usual, name)
        }
    else:
        wanted = {"temperature": _SAMPLING["temperature"]} | {
            name: fields[name] for name in _SAMPLING if name in fields
        }
    wanted = {name: value for name, value in wanted.items() if name == "temperature" or value != _SAMPLING[name]}
    if not wanted:
        return []
    how = "other tokens are sampled from" if asked.temperature else "the most likely tokens are taken"
    return [f"warning: {path}: asks to sample with {_list_fields(wanted)}; {how}, unless you set these yourself"]


def _fields(tokenizer: HuggingFace) -> tuple[Path, dict[str, Any]]:
    """The path of the file beside a tokenizer, and its fields that are not null."""
    path = tokenizer.path.with_name(special_tokens.GENERATION)
    return path, {name: value for name, value in special_tokens.read_object(path).items() if value is not None}


def _matters(name: str, value: Any, first_tokens: Sequence[int]) -> bool:
    """Whether a field that is not obeyed may change a text."""
    if name in _PASSED_OVER or value in (False, {}, [], _NEUTRAL.get(name)):
        return False
    return name != "forced_bos_token_id" or [value] != [*first_tokens]


def _processors(fields: Mapping[str, Any], path: Path, given: int, tokenizer: HuggingFace) -> Processors | None:
    """The processors that the fields ask for; None if they change nothing. Raises InputError for values not valid."""
    wrong = []

    def get(name: str, usual: Any, is_valid: Callable[[Any], bool], must: str) -> Any:
        value = fields.get(name, usual)
        if is_valid(value):
            return value
        wrong.append(f"{path}: {name}={_show_value(value)}: must be {must}")
        return usual

    penalty = get("repetition_penalty", 1.0, lambda x: _is_number(x) and x > 0, "a number above 0")
    sizes = {
        name: get(name, 0, _is_id, "a whole number from 0")
        for name in ("no_repeat_ngram_size", "min_length", "min_new_tokens")
    }
    never, never_first = (
        tuple(get(name, (), lambda x: _are(x, _is_id), "a list of token ids"))
        for name in ("suppress_tokens", "begin_suppress_tokens")
    )
    bad_words = get("bad_words_ids", (), lambda x: _are(x, _is_sequence), "a list of lists of token ids")
    biases = get("sequence_bias", (), lambda x: _are(x, _is_bias), "a list of [token ids, bias]")
    if wrong:
        raise InputError("\n".join([*wrong, "  fix   correct or remove it"]))
    needs_ends = sizes["min_length"] or sizes["min_new_tokens"] or bad_words
    ends = chat.stop_ids(str(tokenizer.path)) if needs_ends else ()
    found = Processors(
        repetition_penalty=float(penalty),
        biases=(
            *((tuple(tokens), float(bias)) for tokens, bias in biases),
            *((tuple(tokens), -math.inf) for tokens in bad_words if not (len(tokens) == 1 and tokens[0] in ends)),
        ),
        suppressed=never,
        suppressed_first=never_first,
        **sizes,
    )
    if found == Processors():
        return None
    return dataclasses.replace(found, given=given, ends=ends if sizes["min_length"] or sizes["min_new_tokens"] else ())


def _is_id(value: Any) -> bool:
    return is_whole_number(value, 0) and not isinstance(value, bool) and value < 2**31


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _are(value: Any, is_valid: Callable[[Any], bool]) -> bool:
    return isinstance(value, list | tuple) and all(map(is_valid, value))


def _is_sequence(value: Any) -> bool:
    return _are(value, _is_id) and len(value) > 0


def _is_bias(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and _is_sequence(value[0]) and _is_number(value[1])


def _list_fields(fields: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={_show_value(value)}" for name, value in fields.items())


def _show_value(value: Any) -> str:
    """A value as JSON, or how many entries it has if it is long."""
    text = json.dumps(value)
    return f"[{len(value):,} entries]" if len(text) > 60 and isinstance(value, list) else text[:60]
