"""The log of a run: metrics.jsonl and samples.jsonl in its workdir, and the trackers that get the same values."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from etils import epath

from gspmd_lm import files
from gspmd_lm.config import Train
from gspmd_lm.errors import InputError
from gspmd_lm.train import trackers

METRICS, SAMPLES = "metrics.jsonl", "samples.jsonl"


class Sample(NamedTuple):
    """A text that the model wrote during evaluation, after a prompt."""

    prompt: str
    text: str


class Log:
    """The files of a run that grow, and its trackers. Only the first process makes one."""

    def __init__(
        self,
        workdir: epath.Path,
        start_step: int,
        train: Train,
        config: dict[str, Any],
        say: Callable[[str], None] = lambda _: None,
    ):
        """Opens the log of a run that is at `start_step`. Rows of later steps are dropped.

        Rows that cannot be read are left out, and `say` reports them.
        """
        self.metrics = _Rows(workdir / METRICS, start_step, say)
        self.samples = _Rows(workdir / SAMPLES, start_step, say)
        online = [tracker for tracker in train.trackers if tracker != "tensorboard"]
        if online and self.metrics.dropped:
            say(f"{' and '.join(online)} keeps the points of steps after {start_step} that it has, and may leave out "
                "new ones")  # fmt: skip
        self.trackers = trackers.start(workdir, start_step, train, config)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Adds one row. Values that are not finite are written as null, which every JSON reader accepts."""
        self.metrics.add(step, {key: value if math.isfinite(value) else None for key, value in values.items()})
        finite = {key: value for key, value in values.items() if math.isfinite(value)}
        for tracker in self.trackers:
            tracker.log(step, finite)

    def write_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Adds a row for each sample."""
        for number, sample in enumerate(samples, 1):
            self.samples.add(step, sample._asdict())
            for tracker in self.trackers:
                tracker.text(step, f"sample {number}", f"**{sample.prompt}**{sample.text}")

    def close(self) -> None:
        for tracker in self.trackers:
            tracker.close()


class _Rows:
    """A file with a JSON object on each line, which has a step."""

    def __init__(self, path: epath.Path, start_step: int, say: Callable[[str], None]):
        """Opens a file, which need not exist, and drops the rows of later steps than `start_step`."""
        self.path = path
        if path.is_dir():
            raise InputError(f"{path}: is a folder, but must be a file\n  fix   move it away")
        old, rows, steps = _parsed(path)
        if damaged := damage(steps):
            say(f"warning: {path}: {damaged}")
        kept = [row for row, step in zip(rows, steps, strict=True) if step is not None and step <= start_step]
        self.dropped = len(rows) - len(kept)
        text = b"".join(row + b"\n" for row in kept)
        if old != text:
            files.replace(path, text)
        self.remote = text if files.is_remote(path) else None

    def add(self, step: int, values: Mapping[str, Any]) -> None:
        row = json.dumps({"step": step, **values}) + "\n"
        if self.remote is not None:  # object stores do not append: the file is written whole
            self.remote += row.encode()
            files.replace(self.path, self.remote)
        else:
            with files.naming(Path(self.path)), self.path.open("a") as file:
                file.write(row)


def read(path: epath.Path) -> tuple[list[dict[str, Any]], str]:
    """The rows of a file of this log, and a sentence about those that cannot be read."""
    _, lines, steps = _parsed(path)
    return [json.loads(line) for line, step in zip(lines, steps, strict=True) if step is not None], damage(steps)


def _parsed(path: epath.Path) -> tuple[bytes, list[bytes], list[float | None]]:
    """The content of a file that need not exist, its lines, and the step of each line."""
    content = path.read_bytes() if path.exists() else b""
    lines = content.splitlines()
    return content, lines, [_step_of(line) for line in lines]


def damage(steps: Sequence[float | None]) -> str:
    """What to say about rows without a step; '' if there are none.

    The last row is not counted, because a process that was killed may have cut it.
    """
    damaged = [number for number, step in enumerate(steps[:-1], 1) if step is None]
    where = ", ".join(map(str, damaged[:5]))
    return f"line {where} cannot be read and is left out ({len(damaged)} in all)" if damaged else ""


def _step_of(row: bytes) -> float | None:
    """The step of a row; None for one that is damaged."""
    try:
        return float(json.loads(row)["step"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
