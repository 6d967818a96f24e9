"""Where verbs that compile nothing to run write: the files of their flags, and lines of progress."""

from collections.abc import Iterable
from pathlib import Path

from rich.console import Console

from gspmd_lm.errors import InputError


def check(names: Iterable[str | None]) -> None:
    """Raises InputError for the file of a flag that cannot be written because its folder does not exist."""
    for path in (Path(name) for name in names if name):
        if not path.parent.is_dir():
            raise InputError(f"{path}: there is no folder {path.parent}\n  fix   make it, or name another")


def say(line: str) -> None:
    """Prints a line of progress, which is no result, to stderr."""
    Console(stderr=True, highlight=False).print(line, soft_wrap=True, markup=False)
