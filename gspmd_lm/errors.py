"""The errors that a user sees with their exit codes, words for their messages, and the check of a whole number."""

import difflib
import re
import signal
from collections.abc import Iterable, Mapping
from numbers import Integral
from typing import Any

# Exit codes. A loop around a run starts it again after any code but 0 and WRONG_INPUT.
FAILED = 1
WRONG_INPUT = 2  # the same command would fail again
STOPPED = 75  # with work left: the same command goes on


class InputError(ValueError):
    """The user's input is wrong. The message names the place and a fix."""


class RunFailed(RuntimeError):
    """A run cannot go on, though its input is right. The message says why and what to do."""


class StoreFailed(RunFailed):
    """A store does not answer. What is asked of it may be right."""


class Stopped(KeyboardInterrupt):
    """A run was stopped at once, by an impatient user."""


def exit_code(error: BaseException) -> int:
    """The code with which a process ends that could not handle an error."""
    if isinstance(error, InputError):
        return WRONG_INPUT
    if isinstance(error, KeyboardInterrupt):
        return STOPPED if isinstance(error, Stopped) else 128 + signal.SIGINT
    return FAILED


def printable(message: str) -> str:
    """A message whose control characters, of which a terminal would make titles and colours, are spelled out."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda found: repr(found[0])[1:-1], message)


def nearest(word: str, known: Iterable[str]) -> str:
    """The known word that a misspelt `word` resembles most; '' if it resembles none."""
    return next(iter(difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)), "")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A hint such as ' (did you mean heads?)' for a misspelt `word`, or ''."""
    near = nearest(word, known)
    return f" (did you mean {near}?)" if near else ""


def either(words: Iterable[Any]) -> str:
    """The words as a choice: '1, 2 or 4'."""
    *others, last = map(str, words)
    return f"{', '.join(others)} or {last}" if others else last


def is_whole_number(value: Any, least: int) -> bool:
    """Whether a value is a whole number of at least `least`: an int of Python or of numpy."""
    return isinstance(value, Integral) and int(value) >= least


def name_kind(value: Any) -> str:
    """What a value of JSON or YAML is, with the article if there is one: null, text, a number, a list or an object."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    kinds = {str: "text", bytes: "bytes", (int, float): "a number", (list, tuple): "a list", Mapping: "an object"}
    return next(
        (name for kind, name in kinds.items() if isinstance(value, kind)), f"of the type {type(value).__name__}"
    )
