"""The logs of a run's processes, a file each: their new lines, their last lines, and what they tell of the run."""

import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from etils import epath
from etils.epath import PathLike

from gspmd_lm.errors import STOPPED

OF_LAUNCH = "launch.txt"  # in the folder of the logs: all that launch has said
ENDED = "gspmd_lm launch: ended with"  # and the exit code: the last line of a process on another host
_STEP = re.compile(rb"^(?:restored )?step +(\d+)", re.M)
_TAIL_BYTES = 1 << 16


def open_log(path: Path) -> BinaryIO:
    """A new file into which another process writes its lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("wb")


def add_line(path: Path, line: str) -> None:
    """Adds a line to a file that grows."""
    with path.open("ab") as file:
        file.write(f"{line}\n".encode(errors="backslashreplace"))


class Follower:
    """The new lines of one file, which need not be there yet. A file that is written again has the same lines."""

    def __init__(self, path: PathLike, at: int = 0):
        """at: the byte with which the first line begins."""
        self.path, self._at = epath.Path(path), at

    def lines(self) -> Iterator[str]:
        """The whole lines since the last call."""
        size = self.path.stat().length if self.path.exists() else 0
        if size <= self._at:
            return
        with self.path.open("rb") as file:
            file.seek(self._at)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._at += len(whole)
        yield from whole.decode(errors="replace").splitlines()


class RunFollower:
    """Follows the logs of all processes of the newest attempt of a launch, and what launch itself says."""

    def __init__(self, folder: PathLike, count: int):
        """folder: of a launch, which holds a folder for each attempt; or of one attempt. It may be remote.

        count: how many of the last lines of each file come first.
        """
        self.folder, self._count = epath.Path(folder), count
        self._followers: dict[epath.Path, Follower] = {}

    def lines(self) -> Iterator[tuple[str, str]]:
        """The whole lines since the last call, each with the name of its process before it."""
        attempts = [one for one in self.folder.iterdir() if one.name.isdecimal()]
        newest = max(attempts, key=lambda one: int(one.name), default=self.folder)
        own = [path for path in (self.folder / OF_LAUNCH,) if path.exists()]
        for path in [*own, *files(newest)]:
            if path not in self._followers:
                self._followers[path] = Follower(path, _start_of_last(path, self._count))
            name = "launch" if path.name == OF_LAUNCH else process_name(path)
            yield from ((name, line) for line in self._followers[path].lines())


def _start_of_last(path: epath.Path, count: int) -> int:
    """The byte with which the last `count` whole lines of a file begin."""
    start, tail = _tail(path)
    whole = tail[: tail.rfind(b"\n") + 1].splitlines(keepends=True)
    return start + sum(map(len, whole[: max(0, len(whole) - count)]))


def files(folder: PathLike) -> list[epath.Path]:
    """The logs in the folder of an attempt, in the order of their processes."""
    folder = epath.Path(folder)
    slices = sorted(folder.glob("slice*"), key=_by_number)  # but the first one, whose logs are in the folder itself
    return [path for one in (folder, *slices) for path in sorted(one.glob("*.log"), key=_by_number)]


def _by_number(path: epath.Path) -> tuple[int, str]:
    return len(path.stem), path.stem


def process_name(path: PathLike) -> str:
    """The number of a process; that of a host of another slice than the first one as slice1/0."""
    path = epath.Path(path)
    return f"{path.parent.name}/{path.stem}" if path.parent.name.startswith("slice") else path.stem


def end(path: PathLike) -> bytes:
    """The end of a file; nothing if there is none."""
    return _tail(epath.Path(path))[1]


def _tail(path: epath.Path) -> tuple[int, bytes]:
    """The byte with which the end of a file begins, and that end."""
    if not path.exists():
        return 0, b""
    start = max(0, path.stat().length - _TAIL_BYTES)
    with path.open("rb") as file:
        file.seek(start)
        return start, file.read()


def step(folder: Path) -> int:
    """The last step that the first process has printed, or -1."""
    steps = [int(number) for path in files(folder)[:1] for number in _STEP.findall(end(path))]
    return steps[-1] if steps else -1


def exit_code(path: PathLike) -> int | None:
    """The exit code in the last line of a log; None if it is not there."""
    last = re.search(rb"%s (\d+)\s*\Z" % ENDED.encode(), end(path))
    return read_code(int(last[1])) if last else None


def read_code(code: int) -> int:
    """The exit code of a process; 128 + N where signal N has ended it, as in a shell, but STOPPED for SIGTERM.

    SIGTERM itself ends only a process that has nothing to save yet: see `StopSignal`.
    """
    code = 128 - code if code < 0 else code
    return STOPPED if code == 128 + signal.SIGTERM else code


def last_lines(folder: Path, count: int = 5) -> list[str]:
    """The last lines of each process, with its name before them."""
    found = []
    for path in files(folder):
        lines = [line for line in end(path).decode(errors="replace").splitlines() if line.strip()]
        found += [f"{process_name(path)}: {line}" for line in lines[-count:]]
    return found
