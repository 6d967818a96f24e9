"""Values from JSON that somebody else wrote. Whatever stands there, the only error is one that names its place."""

import json
import re
from typing import Any

from gspmd_lm.errors import InputError

DEEPEST = 500  # levels of lists and objects: Python follows a deeper value neither when it writes it nor in templates
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def value(text: str | bytes, place: object, fix: str = "", deepest: int = DEEPEST, **hooks: Any) -> Any:
    """The value of a JSON text, which need not be an object.

    text: bytes are UTF-8. fix: what to do about a text that is none. deepest: how many levels of lists and objects may
    be within each other. hooks: as json.loads has them; they raise ValueError.
    Raises an InputError that begins with `place` and ends with `fix`.
    """
    try:
        text = text.decode() if isinstance(text, bytes) else text
        found = json.loads(text, **hooks)
        if _is_deeper(found, text, deepest):
            raise RecursionError
    except RecursionError as error:
        what = f"lists or objects within each other, over {deepest} levels deep"
        raise InputError(f"{place}: {what}{_fix(fix)}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{place}: not UTF-8 text ({error.reason} at byte {error.start}){_fix(fix)}") from error
    except ValueError as error:
        raise InputError(f"{place}: not valid JSON: {error}{_fix(fix)}") from error
    return found


def mapping(text: str | bytes, place: object, fix: str = "") -> dict[str, Any]:
    """The fields of a JSON text that must be one object. Raises InputError as `value` does."""
    found = value(text, place, fix)
    if not isinstance(found, dict):
        raise InputError(f"{place}: a {type(found).__name__}, not a JSON object{_fix(fix)}")
    return found


def has_halves(text: str, found: Any) -> bool:
    """Whether a text of JSON has half of a character, as \\ud800 is. `found` is its value."""
    if not _SURROGATE.search(text):
        return False
    try:
        json.dumps(found, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False


def _fix(fix: str) -> str:
    return f"\n  fix   {fix}" if fix else ""


def _is_deeper(found: Any, text: str, deepest: int) -> bool:
    if text.count("[") + text.count("{") <= deepest:
        return False
    level = [found]
    for _ in range(deepest):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return False
    return True
