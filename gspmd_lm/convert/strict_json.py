"""Reads JSON objects strictly: a text that two readers may understand differently is refused."""

import json
import math
import re
from pathlib import Path
from typing import Any

from gspmd_lm.errors import InputError

DEEPEST = 64  # levels of lists and objects; a deeper value could not be written or shown again
_LONGEST_NUMBER = 40  # digits
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def parse(text: str, path: Path) -> dict[str, Any]:
    """The fields of a file that must hold one JSON object.

    Besides invalid JSON, this refuses texts that readers understand in different ways: a key that appears twice,
    NaN and Infinity, numbers that a float or 64 bits do not hold, halves of characters, and very deep nesting.

    Raises:
        InputError: names the file.
    """
    try:
        found = json.loads(
            text, object_pairs_hook=_once_each, parse_constant=_no_number, parse_int=_whole, parse_float=_finite
        )
        if _is_too_deep(found):
            raise RecursionError
        if _SURROGATE.search(text):
            json.dumps(found, ensure_ascii=False).encode()
    except RecursionError as error:
        raise InputError(damaged(path, f"lists or objects within each other, over {DEEPEST} levels deep")) from error
    except UnicodeEncodeError as error:
        raise InputError(damaged(path, "not valid JSON: half of a character, such as \\ud800")) from error
    except ValueError as error:
        raise InputError(damaged(path, f"not valid JSON: {error}")) from error
    if not isinstance(found, dict):
        raise InputError(damaged(path, f"not a JSON object but a {type(found).__name__}"))
    return found


def damaged(path: Path, what: str) -> str:
    """The error for a file that is not what it should be."""
    return f"{path}: {what}\n  fix   the file is damaged or incomplete: fetch it again"


def shown(value: Any) -> str:
    """A value of a file as text for a message, at most 60 characters long."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"the key {shown(name)} appears twice")
        found[name] = value
    return found


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


def _is_too_deep(value: Any) -> bool:
    level = [value]
    for _ in range(DEEPEST):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return False
    return True
