"""What verbs that compile nothing to run write: the files of their flags, lines of progress, and their own command."""

import os
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console

from gspmd_lm import files
from gspmd_lm.errors import InputError


def check(names: Iterable[str | None]) -> None:
    """Raises InputError for the file of a flag that cannot be written: it is a folder, or not in one to write in."""
    for path in (Path(name) for name in names if name):
        if path.is_dir():
            raise InputError(f"{path}: is a folder\n  fix   name a file in it")
        if not path.parent.is_dir():
            raise InputError(f"{path}: there is no folder {path.parent}\n  fix   make it, or name another")
        at = path.resolve().parent if files.replaceable(path) else path
        if not os.access(at, os.W_OK):
            raise InputError(f"{path}: {at} cannot be written in\n  fix   name a file in another folder")


def command_line(arguments: Sequence[str]) -> str:
    """The command that was given, without the files that it writes, which say nothing of what was found."""
    kept = [one for one in arguments if not one.lstrip("-").startswith(("out=", "json=", "html="))]
    return shlex.join(["python", "main.py", *kept])


def say(line: str) -> None:
    """Prints a line of progress, which is no result, to stderr."""
    Console(stderr=True, highlight=False).print(line, soft_wrap=True, markup=False)
