"""Reads JSON objects strictly: a text that two readers may understand differently is refused."""

import math
from pathlib import Path
from typing import Any

from gspmd_lm.config.paths import read_text
from gspmd_lm.errors import InputError, name_kind
from gspmd_lm.files import has_half_characters, json_value

DEEPEST = 64  # levels of lists and objects; a deeper value could not be written or shown again
_LONGEST_NUMBER = 40  # digits
_FIX = "the file is damaged or incomplete: fetch it again"


def parse_object(text: str, path: Path) -> dict[str, Any]:
    """The fields of a file that must hold one JSON object.

    Besides invalid JSON, this refuses texts that readers understand in different ways: a key that appears twice,
    NaN and Infinity, numbers that a float or 64 bits do not hold, halves of characters, and very deep nesting.

    Raises:
        InputError: names the file.
    """
    hooks = {"object_pairs_hook": _once_each, "parse_constant": _no_number, "parse_int": _whole, "parse_float": _finite}
    value = json_value(text, path, _FIX, DEEPEST, **hooks)
    if has_half_characters(text, value):
        raise damage_error(path, "not valid JSON: half of a character, such as \\ud800")
    if not isinstance(value, dict):
        raise damage_error(path, f"not a JSON object but {name_kind(value)}")
    return value


def read_object(path: Path) -> dict[str, Any]:
    """The fields of a file as by `parse_object`. Raises InputError also if the file cannot be read."""
    return parse_object(read_text(path), path)


def damage_error(path: Path, what: str) -> InputError:
    """The error for a file that is not what it should be."""
    return InputError(f"{path}: {what}\n  fix   {_FIX}")


def show_value(value: Any) -> str:
    """A value of a file as text for a message, at most 60 characters long."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = {}
    for name, value in pairs:
        if name in fields:
            raise ValueError(f"the key {show_value(name)} appears twice")
        fields[name] = value
    return fields


def _no_number(word: str) -> None:
    raise ValueError(f"{word} is not a number of JSON")


def _whole(digits: str) -> int:
    if len(digits) > _LONGEST_NUMBER:
        raise ValueError(f"a number of {len(digits)} digits")
    if digits == "-0":
        raise ValueError("-0 is not a whole number")
    return int(digits)


def _finite(digits: str) -> float:
    if not math.isfinite(number := float(digits)):
        raise ValueError(f"{digits[:_LONGEST_NUMBER]} is too large for a float")
    return number
