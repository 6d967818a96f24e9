"""What verbs write: the files of their flags, results, lines of progress, and their own command."""

import contextlib
import json
import logging
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from absl import flags

from gspmd_lm import files, versions
from gspmd_lm.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console


_WRITING = ("out", "json", "html")  # flags


def check_writable(names: Iterable[str | None], read: Iterable[Any] = ()) -> None:
    """Raises InputError if the file of a flag cannot be written.

    It may be a folder, or lie in one that is missing or read-only. It may also be the file of another of these flags,
    or one that is `read`.
    """
    paths, kept = [Path(name) for name in names if name], [Path(name) for name in read if name]
    for number, path in enumerate(paths):
        if files.replaceable(path) and any(_is_same(path, other) for other in (*paths[:number], *kept)):
            raise InputError(f"{path}: would overwrite a file that is read or written, too\n  fix   name another file")
        if path.is_dir():
            raise InputError(f"{path}: is a folder\n  fix   name a file in it")
        if not path.parent.is_dir():
            raise InputError(f"{path}: there is no folder {path.parent}\n  fix   make it, or name another")
        at = path.resolve().parent if files.replaceable(path) else path
        if not os.access(at, os.W_OK):
            raise InputError(f"{path}: {at} cannot be written in\n  fix   name a file in another folder")


def _is_same(path: Path, other: Path) -> bool:
    return path.absolute() == other.absolute() or (path.exists() and other.exists() and path.samefile(other))


def command_line(arguments: Sequence[str]) -> str:
    """The command that was given, without the files that it writes, which say nothing of what was found."""
    kept, is_file = [], False
    for word in arguments:
        name, equals, _ = word.lstrip("-").partition("=")
        writes = word.startswith("-") and name in _WRITING
        if not (writes or is_file):
            kept.append(word)
        is_file = writes and not equals  # --out FILE
    return f"{versions.program()} {shlex.join(kept)}"


def say(line: str) -> None:
    """Prints a line of progress, which is no result, to stderr."""
    from gspmd_lm.show import terminal

    terminal.console(80, stderr=True).print(line, soft_wrap=True, markup=False)


@contextlib.contextmanager
def clock(what: str) -> Iterator[None]:
    """A context that shows on a terminal how long something takes, below the lines of the package's log."""
    from gspmd_lm.show import terminal

    shown = terminal.console(80, stderr=True)
    if not shown.is_terminal:
        yield
        return
    from gspmd_lm.train import progress

    handlers = [one for one in logging.getLogger("gspmd_lm").handlers if isinstance(one, logging.StreamHandler)]
    streams = [handler.stream for handler in handlers]
    with progress.clock(shown, what):
        for handler in handlers:
            handler.setStream(sys.stderr)  # which the clock has replaced, so that lines stand above it
        try:
            yield
        finally:
            for handler, stream in zip(handlers, streams, strict=True):
                handler.setStream(stream)


def console(width: int) -> "Console":
    """The terminal, as wide as it is. Where results go elsewhere, they have `width` columns."""
    from gspmd_lm.show import terminal

    return terminal.console(width)


def write(name: str, text: str) -> None:
    """Writes the file of a flag."""
    files.replace(Path(name), text)


def write_json(name: str, plain: Any) -> None:
    """Writes the file of a flag: plain values, as JSON."""
    write(name, json.dumps(plain, indent=1) + "\n")


def write_results(values: flags.FlagValues, plain: Any, page: Callable[[str], str]) -> None:
    """Writes the files of --json and --html, where they are asked for. page: from the command to the page's HTML."""
    if values.json:
        write_json(values.json, plain)
    if values.html:
        write(values.html, page(command_line(sys.argv[1:])))


def deliver(is_main: bool, results: Iterator[Any], output: str | None, write: Callable[[Any, TextIO], None]) -> None:
    """Lets the first process write results to a file or the terminal. All processes compute them."""
    if not is_main:
        for _ in results:
            pass
    elif output:
        path = Path(output)
        if files.replaceable(path):
            say(f"{files.partial_of(path)}: holds the lines so far, and becomes {path} when all are there")
        with files.growing(path) as out:
            write(results, out)
    else:
        write(results, sys.stdout)
