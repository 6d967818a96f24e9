"""The logs of a run's processes, a file each: their new lines, their last lines, and what they tell of the run."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

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

    def __init__(self, path: Path):
        self.path, self._at = path, 0

    def lines(self) -> Iterator[str]:
        """The whole lines since the last call."""
        size = self.path.stat().st_size if self.path.exists() else 0
        if size <= self._at:
            return
        with self.path.open("rb") as file:
            file.seek(self._at)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._at += len(whole)
        yield from whole.decode(errors="replace").splitlines()


def files(folder: Path) -> list[Path]:
    """The logs in a folder, in the order of their processes."""
    return sorted(folder.glob("*.log"), key=lambda path: (len(path.stem), path.stem))


def end(path: Path) -> bytes:
    """The end of a file; nothing if there is none."""
    if not path.exists():
        return b""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        return file.read()


def step(folder: Path) -> int:
    """The last step that the first process has printed, or -1."""
    steps = [int(number) for path in files(folder)[:1] for number in _STEP.findall(end(path))]
    return steps[-1] if steps else -1


def exit_code(path: Path) -> int | None:
    """The exit code in the last line of a log; None if it is not there."""
    last = re.search(rb"%s (\d+)\s*\Z" % ENDED.encode(), end(path))
    return int(last[1]) if last else None


def last_lines(folder: Path, count: int = 5) -> list[str]:
    """The last lines of each process, with its name before them."""
    found = []
    for path in files(folder):
        lines = [line for line in end(path).decode(errors="replace").splitlines() if line.strip()]
        found += [f"{path.stem}: {line}" for line in lines[-count:]]
    return found
