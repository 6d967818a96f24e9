"""What a config predicts, which follows from its model, and what of its data and training does not fit that."""

import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from gspmd_lm.config.data import MOST_OF_SEVERAL

Objective = Literal["causal", "masked", "classes", "seq2seq", "contrastive", "replaced", "masks"]
# A setting of a model -> what the model predicts. Of those that it has, the first one decides.
_FOLLOWS: dict[str, Objective] = {
    "encoder": "seq2seq",
    "vision.queries": "causal",
    "vision": "contrastive",
    "masks": "masks",
    "classes.of: tokens": "replaced",
    "classes": "classes",
    "attention.mask: full": "masked",
    "attention.mask: causal": "causal",
}


class _Records(NamedTuple):
    """The records that a model reads."""

    words: str  # what they are, and which settings of the data name them
    fields: tuple[int, ...] = (0,)  # how many texts or files of a record data.fields may name
    label: bool = False
    conversations: bool = False


_GUESSED = _Records("texts, without data.fields, data.label and data.messages_field")
_PAIRS = _Records("data.fields=[source, text], without data.label", (2,))
_IMAGES = _Records("data.fields=[image] and data.label", (1,), label=True)
_RECORDS: dict[Objective, _Records] = {
    "causal": _Records(
        "texts or conversations, without data.fields and data.label, which belong to model.classes", conversations=True
    ),
    "masked": _GUESSED,
    "replaced": _GUESSED,
    "classes": _Records("data.fields=[text] or [text, text], and data.label", (1, 2), label=True),
    "seq2seq": _PAIRS,
    "contrastive": _PAIRS,
    "masks": _Records("data.fields=[image, mask] or [image, mask, prompt], without data.label", (2, 3)),
}
# data.label_kind -> the least and the greatest model.classes.count, and in words.
_CLASSES = {
    "class": (2, math.inf, "a model.classes.count of 2 or more"),
    "classes": (2, MOST_OF_SEVERAL, f"a model.classes.count from 2 to {MOST_OF_SEVERAL}"),
    "number": (1, 1, "model.classes.count: 1"),
}


def objective_of(model: Any) -> Objective:
    """What a model predicts. `model` is a ModelConfig, or plain values in sections."""
    return _FOLLOWS[_deciding_key(model)]


def _deciding_key(model: Any) -> str:
    return next((key for key in _FOLLOWS if _has(model, key)), "attention.mask: causal")


def _has(model: Any, key: str) -> bool:
    path, _, value = key.partition(": ")
    for name in path.split("."):
        model = model.get(name) if isinstance(model, Mapping) else getattr(model, name, None)
    return model == value if value else model is not None


def problems(config: Any, wanted: Objective | None) -> list[str]:
    """What of a config does not fit what its model predicts, in words. wanted: the objective that its file names."""
    model, data, key = config.model, config.data, _deciding_key(config.model)
    objective = _FOLLOWS[key]
    what = "model.vision.queries" if model.queries_config else f"objective: {objective}"
    needed = " or ".join(f"model.{key}" for key, follows in _FOLLOWS.items() if follows == wanted)
    fewest, most, classes = _CLASSES[data.label_kind]
    found = {
        f"objective: {wanted} needs {needed}. With model.{key}, it is {objective}: leave objective out, or change the "
        "model": wanted not in (None, objective),
        f"data.label_kind: {data.label_kind} goes with {classes}, not {model.num_classes}: set one of them":
            objective == "classes" and not fewest <= model.num_classes <= most,
        f"model.embedding.token_types goes with objective: masked, replaced or classes, not {objective}":
            model.embedding.token_types > 0 and objective not in ("masked", "replaced", "classes"),
        f"{'data.messages_field' if data.conversations else what} needs data.packing: documents, which keeps texts and "
        "padding apart":
            (data.conversations or model.vision or objective != "causal") and data.packing != "documents",
        f"train.samples needs objective: causal, not {objective}, and no images":
            (model.vision or objective != "causal") and config.train.samples,
        "train.keep_best, train.patience and train.samples belong to evaluation, for which data.held_out=0 leaves no "
        "rows: set data.held_out, such as 0.02":
            data.held_out == 0 and (config.train.keeps_best or config.train.samples),
        "model.memory_width belongs to vision.queries, which sets it": model.memory_width,
        "model.frames needs model.encoder, which reads them": model.frames and not model.encoder,
        "data.padded_batch adds rows whose tokens count among the loads of experts, which model.experts.balance: "
        f"{model.experts and model.experts.balance} takes from the whole batch: set data.padded_batch to 0, or balance "
        "to row": model.experts and model.experts.balance in ("batch", "bias", "bias_row") and data.padded_batch,
        f"model.row_multiple={model.row_multiple} needs model.windows, or model.vision and model.encoder":
            model.row_multiple > 1 and not model.windows and not (model.vision and model.encoder),
    }  # fmt: skip
    wrong = [message for message, is_wrong in found.items() if is_wrong]
    records = _PAIRS if model.vision else _RECORDS[objective]
    if model.patches and model.classes:
        what, records = "model.patches", _IMAGES
    return wrong + _wrong_records(data, what, records) + _wrong_lengths(config) + _wrong_images(config, objective)


def _wrong_records(data: Any, what: str, records: _Records) -> list[str]:
    """What of the records of the data does not fit those that a model reads. Data that names none is not asked."""
    given = {
        f"data.fields={list(data.fields)}": data.fields,
        f"data.label={data.label}": data.label,
        "data.messages_field": data.conversations,
    }
    fits = len(data.fields) in records.fields and bool(data.label) == records.label
    if not any(given.values()) or (fits and (records.conversations or not data.conversations)):
        return []
    has = " and ".join(name for name, value in given.items() if value)
    return [f"{what} needs {records.words}: this config has {has}"]


def _wrong_lengths(config: Any) -> list[str]:
    """Where rows are too long for the stack of blocks that reads them, or too short for an image or a sound."""
    model, queries = config.model, config.model.queries_config
    encoder, vision = model.encoder_config, model.vision_config
    seq, source_seq = ("data.seq", config.data.seq), ("data.source_seq", config.source_seq)
    longest: list[tuple[str, int, str, int]] = []  # a key, the rows that it says, the key that limits them, the limit
    least: list[tuple[str, int, str, int]] = []  # what needs rows, how many, the key that says how many there are, them
    if model.patches:
        least.append((f"model.patches gives {model.patches.rows} rows of an image", model.patches.rows, *seq))
    else:
        longest.append((*seq, "model.context", model.context))
    if vision:
        needs = f"model.vision gives {vision.context} rows of an image"
        least.append((needs, vision.context, "data.source_seq", config.image_rows))
    if encoder and model.frames:
        least.append((f"model.frames gives {encoder.context} rows of a sound", encoder.context, *source_seq))
    elif encoder:
        longest.append((*source_seq, "model.encoder.context", encoder.context))
    if queries:
        rows = queries.context
        needs = f"model.vision.queries has {rows} rows, and a token stands behind them"
        text = f"model.vision.queries has {rows} rows, and a text has a token before it"
        least.append((needs, rows + 1, *source_seq) if encoder else (text, rows + 2, *seq))
    too_long = [f"{key}={rows} is longer than {limit}={most}" for key, rows, limit, most in longest if rows > most]
    too_short = [f"{needs}: set {key}={rows} to {most} or more" for needs, most, key, rows in least if rows < most]
    return too_long + too_short


def _wrong_images(config: Any, objective: Objective) -> list[str]:
    """What does not go with images."""
    model, images = config.model, config.data.images
    key, patches = ("model.vision.patches", model.vision.patches) if model.vision else ("model.patches", model.patches)
    relative = model.attention.relative_positions
    if not patches:
        return ["model.attention.relative_positions.side needs model.patches"] if relative and relative.side else []
    found = {
        f"data.images.resize={images.resize} is below {key}.image={patches.image}": 0 < images.resize < patches.image,
        f"data.images: mean and std need 1 number, or {patches.channels}, one for each channel":
            {len(images.mean), len(images.std)} - {1, patches.channels},
        "objective: masks does not go with data.images.resize and keep_ratio, which cut off what may be an object: set "
        "data.images.pad": objective == "masks" and (images.keep_ratio or images.resize > patches.image),
    }  # fmt: skip
    found |= {} if not model.patches else {
        "model.patches needs model.classes or model.masks": objective not in ("classes", "masks"),
        f"model.patches does not go with data.label_kind: {config.data.label_kind}": config.data.label_kind != "class",
        f"model.patches has {patches.side} patches on a side, and one learned row: set "
        "attention.relative_positions.side and patches.distillation":
            relative and not model.windows and (relative.side, patches.first) != (patches.side, 1),
        f"model.patches has no tokens: set vocab={model.vocab} to 0": model.vocab > 0,
        f"model.patches gives {patches.rows} rows of an image: set context={model.context} to {patches.rows}":
            model.context != patches.rows,
        f"model.patches goes with positions: learned or none, not {model.positions}":
            model.positions not in ("learned", "none"),
    }  # fmt: skip
    return [message for message, is_wrong in found.items() if is_wrong]
