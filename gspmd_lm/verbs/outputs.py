"""What verbs that compile nothing to run write: the files of their flags, lines of progress, and their own command."""

import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console

from gspmd_lm.errors import InputError


def check(names: Iterable[str | None]) -> None:
    """Raises InputError for the file of a flag that cannot be written because its folder does not exist."""
    for path in (Path(name) for name in names if name):
        if not path.parent.is_dir():
            raise InputError(f"{path}: there is no folder {path.parent}\n  fix   make it, or name another")


def command_line(arguments: Sequence[str]) -> str:
    """The command that was given, without the files that it writes, which say nothing of what was found."""
    kept = [one for one in arguments if not one.lstrip("-").startswith(("out=", "json=", "html="))]
    return shlex.join(["python", "main.py", *kept])


def say(line: str) -> None:
    """Prints a line of progress, which is no result, to stderr."""
    Console(stderr=True, highlight=False).print(line, soft_wrap=True, markup=False)
