"""Whisper, which hears speech and writes it down."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gspmd_lm import config
from gspmd_lm.convert.config_reader import ConfigReader
from gspmd_lm.convert.families.bart import BART_SIZES, ENCODER_SIZES, bart_attention, bart_stack
from gspmd_lm.convert.families.t5 import EncoderPart
from gspmd_lm.convert.family import Family
from gspmd_lm.convert.fields import Fixed, Given, Renamed, Values
from gspmd_lm.convert.images import PREPROCESSOR
from gspmd_lm.convert.layout import Tensor, linear
from gspmd_lm.convert.sidecars import GENERATION, as_json
from gspmd_lm.convert.strict_json import read_object, show_value
from gspmd_lm.data import sounds
from gspmd_lm.errors import InputError
from gspmd_lm.sharding.axes import SINUSOIDS

_BEGINS, _NOT_FIRST = "begin_suppress_tokens", [220, 50256]  # those of a config.json that says none
_SUPPRESSED = {"suppressed": "suppress_tokens", "suppressed_first": _BEGINS}
_FORCED = "forced_decoder_ids"
_LANGUAGE, _TASK = "<|en|>", "transcribe"  # of a folder that says neither


class Hearing:
    """The numbers of a frame, and the tokens that generation puts first or does not choose."""

    def read(self, reader: ConfigReader, values: Values) -> None:
        values["frames"] = {"bands": reader.number("num_mel_bins", 80)}
        found = {name: reader.get(name) for name in (*_SUPPRESSED.values(), _FORCED)}
        if _BEGINS not in reader.raw and values["vocab"] > max(_NOT_FIRST):
            found[_BEGINS] = _NOT_FIRST
        try:
            values["encoder"] |= _tokens(found)
        except ValueError as error:
            reader.problems.append(str(error))
        if reader.flag("apply_spec_augment", False):
            reader.notes.append("apply_spec_augment: true: training here hides no parts of sounds")

    def write(self, model: config.ModelConfig) -> dict[str, Any]:
        if not (model.frames and model.encoder):
            return {}
        return {"num_mel_bins": model.frames.bands, **_fields(model.encoder)}


def _tokens(found: Mapping[str, Any]) -> dict[str, list[int]]:
    """Settings of model.encoder, from fields about generation. Raises ValueError for one that is not understood."""
    settings = {}
    for setting, name in _SUPPRESSED.items():
        ids = found.get(name) or []
        if not isinstance(ids, list) or not all(type(one) is int and one >= 0 for one in ids):
            raise ValueError(f"{name}: {show_value(ids)} is not a list of tokens")
        settings[setting] = ids
    forced = found.get(_FORCED) or []
    try:
        pairs = [(int(place), one) for place, one in forced]
    except (TypeError, ValueError):
        raise ValueError(f"{_FORCED}: {show_value(forced)} is not a list of places and tokens") from None
    ids = [one for place, one in pairs]
    known = [place for place, _ in pairs] == [*range(1, len(pairs) + 1)] and all(type(one) is int for one in ids)
    if known and ids:
        settings["first_tokens"] = ids
    return settings


def _fields(encoder: config.Encoder) -> dict[str, Any]:
    """The fields that `_tokens` reads as the settings of an encoder."""
    fields = {name: [*getattr(encoder, setting)] or None for setting, name in _SUPPRESSED.items()}
    return fields | {_FORCED: [[place, one] for place, one in enumerate(encoder.first_tokens, 1)] or None}


def read_generation(folder: Path) -> dict[str, list[int]]:
    """Settings of model.encoder, as generation_config.json of a folder says them; {} without such a file.

    If the file leaves the language open, the settings say English, and if it leaves the task open, to write down what
    is said. Raises InputError for a field that is not understood.
    """
    path = folder / GENERATION
    return _start_settings(read_object(path), path) if path.is_file() else {}


def _start_settings(found: Mapping[str, Any], path: Path) -> dict[str, list[int]]:
    try:
        settings = _tokens(found)
    except ValueError as error:
        raise InputError(f"{path}: {error}\n  fix   correct it, or take it out of a copy of the folder") from error
    languages, tasks, no_times = (found.get(name) for name in ("lang_to_id", "task_to_id", "no_timestamps_token_id"))
    usual = [table.get(name) for table, name in ((languages, _LANGUAGE), (tasks, _TASK)) if isinstance(table, dict)]
    usual = [one for one in (*usual, no_times) if type(one) is int]
    if "first_tokens" not in settings and usual:
        settings["first_tokens"] = usual
    return settings


def first_token_notes(model: config.ModelConfig) -> list[str]:
    """Sentences about what generation begins with."""
    if not (model.frames and model.encoder and model.encoder.first_tokens):
        return []
    ids = list(model.encoder.first_tokens)
    return [f"texts begin with the tokens {ids}; for another language or task, --set model.encoder.first_tokens=[...]"]


def check_preprocessing(folder: Path, bands: Any) -> None:
    """Raises InputError if preprocessor_config.json of a folder prepares sounds in another way than data/sounds.py."""
    path = folder / PREPROCESSOR
    if not path.is_file():
        return
    raw = read_object(path)
    wanted = {"sampling_rate": sounds.RATE, "hop_length": sounds.HOP, "n_fft": sounds.FOURIER, "feature_size": bands}
    wrong = [
        f"  {name}: {show_value(raw[name])} is not {one}" for name, one in wanted.items() if raw.get(name, one) != one
    ]
    wrong += [
        f"  {name}: {show_value(raw[name])} is not supported" for name in ("dither", "do_normalize") if raw.get(name)
    ]
    if wrong:
        raise InputError("\n".join([f"{path}: preparations of sounds that are not supported", *wrong,
                         "  fix   take the file out of a copy of the folder"]))  # fmt: skip


def write_sidecars(model: config.ModelConfig, settings: Mapping[str, Any], end: int) -> dict[str, bytes]:
    """The files with which transformers hears and writes as this model does: name -> content.

    settings: the generation_config.json that came with the weights, which stays as it is if it says the same. end: the
    token that ends a text.
    """
    assert model.frames and model.encoder and model.encoder_config
    samples = model.encoder_config.context * sounds.ROW_SAMPLES
    prepared = {
        "feature_extractor_type": "WhisperFeatureExtractor", "feature_size": model.frames.bands,
        "sampling_rate": sounds.RATE, "hop_length": sounds.HOP, "n_fft": sounds.FOURIER, "padding_value": 0.0,
        "chunk_length": samples // sounds.RATE, "n_samples": samples, "nb_max_frames": samples // sounds.HOP,
    }  # fmt: skip
    written = {PREPROCESSOR: as_json(prepared)}
    own = {name: list(getattr(model.encoder, name)) for name in ("first_tokens", *_SUPPRESSED)}
    started = {"decoder_start_token_id": model.encoder.start_token}
    if {
        "first_tokens": [],
        **_start_settings(settings, Path(GENERATION)),
    } != own or not started.items() <= settings.items():
        usual = {"pad_token_id": end, "eos_token_id": end, **settings}
        written[GENERATION] = as_json(usual | started | _fields(model.encoder))
    return written


_ENCODER = "model.encoder"
_TENSORS = (
    *linear(f"{_ENCODER}.conv1", "F b A", "encoder.conv_in", biases=("encoder.conv_in_bias",), mlp="embed"),
    *linear(f"{_ENCODER}.conv2", "D F A", "encoder.conv_out", biases=("encoder.conv_out_bias",), mlp="embed"),
    Tensor("model.decoder.embed_tokens.weight", "V D", ("embedding",)),
    *bart_stack(_ENCODER, "encoder.", "norm", SINUSOIDS),
    *bart_stack("model.decoder", "", "norm"),
    *bart_attention("model.decoder.layers.{}.encoder_attn", "cross", "norm"),
    Tensor("proj_out.weight", "V D", ("unembedding",)),
)
_SOURCES = {"heads": f"{ENCODER_SIZES['heads']} num_key_value_heads", "context": "max_source_positions"}
_WHISPER = (
    *(*BART_SIZES, Renamed("max_target_positions", "context", 448), Given({"attention.key_bias": False})),
    *(EncoderPart(ENCODER_SIZES | _SOURCES, 50257), Hearing()),
    Fixed("scale_embedding", False, "scales the token table, which this family does not do"),
)
# Fields of training in transformers, of another head, and of how it finds times.
_UNREAD = (
    "mask_time_prob", "mask_time_length", "mask_time_min_masks", "mask_feature_prob", "mask_feature_length",
    "mask_feature_min_masks", "use_weighted_layer_sum", "classifier_proj_size", "median_filter_width",
    "num_hidden_layers",
)  # fmt: skip
FAMILIES = (Family("Whisper", "whisper", "WhisperForConditionalGeneration", _WHISPER, _TENSORS, irrelevant=_UNREAD),)
