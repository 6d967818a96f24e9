"""config.json of a published model -> the settings of ours, and back, by the table of families."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gspmd_lm import config
from gspmd_lm.config import InputError, did_you_mean
from gspmd_lm.convert.families import FAMILIES, IRRELEVANT, LEFT_OUT, REFUSED, Family
from gspmd_lm.convert.fields import Source, Values

CONFIG = "config.json"
# Settings that no config.json has: how a run computes, and padding, which is undone on export.
OURS_ALONE = (
    "padded_vocab", "padded_heads", "dropout", "z_loss", "init_std", "compute_dtype", "weight_dtype",
    "matmul_precision",
)  # fmt: skip
# Said to be unknown in a config.json that is written anew: some families have defaults, beyond a small vocabulary.
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def load(folder: Path) -> dict[str, Any]:
    """The fields of a folder's config.json. Raises InputError where there is none or it is not a JSON object."""
    path = folder / CONFIG
    if not path.is_file():
        what = "no such folder" if not folder.is_dir() else f"no {CONFIG}"
        raise InputError(f"{folder}: {what}\n  fix   give a folder that transformers' save_pretrained wrote")
    try:
        raw = json.loads(config.read_text(path))
    except ValueError as error:
        raise InputError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(raw, dict):
        raise InputError(f"{path}: not a JSON object but a {type(raw).__name__}")
    return raw


def family(raw: Mapping[str, Any], place: str) -> Family:
    """The row of the table that a config.json belongs to. Raises InputError where there is none."""
    kind = raw.get("model_type")
    classes = raw.get("architectures") or []
    for row in FAMILIES:
        if kind == row.model_type or (kind is None and row.architecture in classes):
            return row
    known = [row.model_type for row in FAMILIES]
    if kind is None:
        message = "no model_type"
    elif reason := LEFT_OUT.get(str(kind)):
        message = f"model_type: {kind!r} is left out: {reason}"
    else:
        message = f"model_type: {kind!r} is not a family that is read here{did_you_mean(str(kind), known)}"
    raise InputError(f"{place}: {message}\n  fix   one of {', '.join(known)}")


def settings(row: Family, raw: Mapping[str, Any], place: str) -> Values:
    """The settings of config.Model that a config.json of a family says.

    Raises InputError that lists every field that cannot be had here, and every one that is not known and is set.
    """
    source = Source(raw)
    values: Values = {}
    for part in row.parts:
        part.read(source, values)
    for name, reason in REFUSED.items():
        if raw.get(name) is not None and name not in source.read:
            source.problems.append(f"{name}: {reason}")
    known = source.read | IRRELEVANT | REFUSED.keys() | set(row.irrelevant)
    for name in sorted(raw.keys() - known):
        if raw[name] not in (None, False, [], {}, ""):
            shown = json.dumps(raw[name])
            shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
            source.problems.append(f"{name}: {shown} is not a field that is known here; it may change what is computed")
    if source.problems:
        count = f"{len(source.problems)} problem{'s' * (len(source.problems) > 1)}"
        raise InputError(f"{place}: {count}\n" + "\n".join(f"  {problem}" for problem in source.problems))
    return values


def fields(row: Family, model: config.Model) -> dict[str, Any]:
    """The fields of config.json for a model of a family."""
    written: dict[str, Any] = {"architectures": [row.architecture], "model_type": row.model_type}
    for part in row.parts:
        written |= part.write(model)
    return written


def differences(row: Family, raw: Mapping[str, Any], model: config.Model) -> list[str]:
    """The settings of `model` that a config.json does not say, each with both values."""
    try:
        values = settings(row, raw, row.name)
        said = config.from_dict(
            {"name": row.name, "model": values, "data": {"seq": 1}, "train": {"steps": 1}}, row.name
        )
    except InputError as error:
        return str(error).splitlines()
    names = [field.name for field in dataclasses.fields(config.Model) if field.name not in OURS_ALONE]
    return [
        f"{name}: {getattr(model, name)!r}, {row.name} would have {getattr(said.model, name)!r}"
        for name in names
        if getattr(model, name) != getattr(said.model, name)
    ]


def describe(model: config.Model, like: Mapping[str, Any] | None) -> tuple[Family, dict[str, Any]]:
    """The family of a model and its config.json.

    like: the config.json that it came with, whose other fields are kept; without it the family is the first of the
    table that can express the model. Raises InputError, naming the settings that stand in the way, where none can.
    """
    if like is not None:
        row = family(like, CONFIG)
        if not differences(row, like, model):
            return row, dict(like)
        newer = ("rope_parameters", "layer_types")  # said again, in the older form or the same
        kept = {name: value for name, value in like.items() if name not in newer}
        written = kept | fields(row, model)
        if differ := differences(row, written, model):
            raise InputError(_inexpressible(row, differ))
        return row, written
    nearest: tuple[Family, list[str]] | None = None
    for row in FAMILIES:
        written = fields(row, model)
        differ = differences(row, written, model)
        if not differ:
            return row, dict.fromkeys(_TOKENS) | written
        if nearest is None or len(differ) < len(nearest[1]):
            nearest = row, differ
    assert nearest
    raise InputError(_inexpressible(*nearest))


def _inexpressible(row: Family, differ: list[str]) -> str:
    lines = "\n".join(f"  model.{line}" for line in differ)
    return f"no family of transformers has this model; the nearest is {row.name}, but for\n{lines}"
