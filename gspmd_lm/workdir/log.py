"""The log of a run: metrics.jsonl and samples.jsonl in its workdir, and the trackers that get the same values."""

import errno
import itertools
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from etils import epath

from gspmd_lm import files
from gspmd_lm.config import Train
from gspmd_lm.errors import InputError
from gspmd_lm.files import json_object
from gspmd_lm.workdir import trackers, wall_time
from gspmd_lm.workdir.layout import METRICS, SAMPLES

_MOST = 1e39  # above the numbers of float32


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

        Lines that cannot be read are left out, and `say` reports them.
        """
        self.metrics = _JsonLines(workdir / METRICS, start_step, say)
        self.samples = _JsonLines(workdir / SAMPLES, start_step, say)
        if start_step and not self.metrics.rows:
            say(f"warning: {workdir / METRICS}: has no rows of the {start_step} steps so far, and begins anew")
        if not start_step and self.metrics.rows:
            say(
                f"warning: {workdir / METRICS}: has rows of steps that no checkpoint holds; the run begins anew, and "
                "they are replaced"
            )
        self.wall_s = self.metrics.wall_s  # of earlier starts, as `wall_time.earlier_totals` has them
        online = [tracker for tracker in train.trackers if tracker != "tensorboard"]
        if online and self.metrics.dropped:
            say(
                f"{' and '.join(online)} keeps the points of steps after {start_step} that it has, and may leave out "
                "new ones"
            )
        self.trackers, self._say = trackers.start(workdir, start_step, train, config, say), say

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Adds one row. Values that are not finite are written as null, which every JSON reader accepts."""
        self.metrics.add(step, {key: value if math.isfinite(value) else None for key, value in values.items()})
        finite = {key: value for key, value in values.items() if math.isfinite(value)}
        self._tell(lambda tracker: tracker.log(step, finite))

    def write_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Adds a row for each sample."""
        for number, sample in enumerate(samples, 1):
            self.samples.add(step, sample._asdict())
            text = f"**{sample.prompt}**{sample.text}"
            self._tell(lambda tracker, name=f"sample {number}", text=text: tracker.text(step, name, text))

    def flush(self) -> None:
        """Returns when all rows are written that can be written now, such as those before a checkpoint."""
        for file in (self.metrics, self.samples):
            file.flush()

    def close(self) -> None:
        """Writes what could not be written before, if that is possible now, and closes the trackers."""
        for file in (self.metrics, self.samples):
            file.close()
        self._tell(lambda tracker: tracker.close())

    def _tell(self, call: Callable[[Any], None]) -> None:
        """Calls each tracker. One that fails, such as without a network, gets no more: the run goes on."""
        for tracker in list(self.trackers):
            try:
                call(tracker)
            except Exception as error:  # each tracker raises what it likes
                self.trackers.remove(tracker)
                self._say(trackers.describe_failure(tracker.name, error))


class _JsonLines:
    """A file with a JSON object on each line, which has a step.

    Object stores do not append, so there the file is written whole, in the background: no step waits for the store.
    Rows that cannot be written, such as on a full disk, are kept and tried again with the next row.
    """

    def __init__(self, path: epath.Path, start_step: int, say: Callable[[str], None]):
        """Opens a file, which need not exist, and drops the rows of later steps than `start_step`.

        A file with lines that cannot be read is kept beside it, as it was.
        """
        self.path, self.say, self.failing = path, say, False
        if path.is_dir():
            raise InputError(f"{path}: is a folder, but must be a file\n  fix   move it away")
        old, lines, rows = _parse_log(path)
        if damaged := damage(rows):
            aside = _free(path)
            files.replace(aside, old)
            say(f"warning: {path}: {damaged}; {aside.name} is the file as it was")
        kept = [line for line, row in zip(lines, rows, strict=True) if row and row["step"] <= start_step]
        self.rows, self.dropped = len(lines), len(lines) - len(kept)
        whole = [row for row in rows if row]
        left = [row for row in whole if row["step"] > start_step]
        self.wall_s = wall_time.earlier_totals([row for row in whole if row["step"] <= start_step], left)
        text = b"".join(line + b"\n" for line in kept)
        if old != text:
            files.replace(path, text)
        self._file = _Remote(path, text) if files.is_remote(path) else _Local(path)

    def add(self, step: int, values: Mapping[str, Any]) -> None:
        self._file.unwritten += (json.dumps({"step": step, **values}) + "\n").encode()
        self._try()

    def flush(self) -> None:
        """Returns when all rows are written, or when that has failed."""
        if self._file.unwritten:
            self._try(wait=True)

    def close(self) -> None:
        self.flush()
        self.flush()  # again, since what failed may have begun when there were fewer rows
        if self._file.unwritten:
            self.say(f"warning: {self.path}: the last {len(self._file.unwritten.splitlines())} rows are not written")
        self._file.close()

    def _try(self, wait: bool = False) -> None:
        """Writes the rows that are not written yet. The first of several failures is said, and so is their end."""
        try:
            wrote = self._file.write(wait)
        except Exception as error:  # a store raises what it likes
            if not self.failing:
                why = files.reason(error) if isinstance(error, OSError) else " ".join(str(error).split())
                self.say(f"warning: {self.path}: {why}; the run goes on, and tries to write the rows later")
            self.failing = True
            return
        if self.failing and wrote:
            self.say(f"{self.path}: can be written again, and has all rows")
            self.failing = False


class _Local:
    """A file of this machine, which grows."""

    def __init__(self, path: epath.Path):
        self.path, self.unwritten = path, b""

    def write(self, wait: bool) -> bool:
        """Appends what is unwritten, at once. Raises OSError, and then nothing of it is written."""
        with Path(self.path).open("ab", buffering=0) as file:
            size = file.tell()
            if file.write(self.unwritten) < len(self.unwritten):  # as the system does where the disk gets full
                file.truncate(size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.unwritten = b""
        return True

    def close(self) -> None: ...


class _Remote:
    """A file in an object store, which grows: a thread writes it whole, one time after the other."""

    def __init__(self, path: epath.Path, text: bytes):
        self.path, self.text, self.unwritten = path, text, b""
        self._pool = ThreadPoolExecutor(1)
        self._writing: tuple[bytes, Future[None]] | None = None

    def write(self, wait: bool) -> bool:
        """Starts to write the unwritten rows, unless earlier rows are still being written.

        Returns whether rows have been written since the last call. wait: returns only when all rows are written.
        Raises what the store raised, and then no rows are being written.
        """
        wrote = self._take(wait)
        if self.unwritten and not self._writing:
            content = self.text + self.unwritten
            self._writing = self.unwritten, self._pool.submit(files.replace, self.path, content)
        return self._take(wait) or wrote

    def _take(self, wait: bool) -> bool:
        """Whether the rows that were being written are written now. wait: waits until they are."""
        if not self._writing or not (wait or self._writing[1].done()):
            return False
        (rows, writing), self._writing = self._writing, None
        writing.result()
        self.text, self.unwritten = self.text + rows, self.unwritten[len(rows) :]
        return True

    def close(self) -> None:
        self._pool.shutdown()


def read_rows(path: epath.Path) -> tuple[list[dict[str, Any]], str]:
    """The rows of a file of this log, and a sentence about lines that cannot be read.

    A last line without an end is passed over, because a run may be writing it. Numbers that are not finite are None.
    """
    content, _, rows = _parse_log(path)
    whole = rows if content.endswith(b"\n") or not rows or rows[-1] else rows[:-1]
    return [row for row in rows if row], damage(whole)


def damage(rows: Sequence[object]) -> str:
    """A sentence about lines that hold no row; '' if there are none."""
    damaged = [str(number) for number, row in enumerate(rows, 1) if not row]
    if len(damaged) < 2:
        return f"line {damaged[0]} cannot be read and is left out" if damaged else ""
    return f"{len(damaged)} lines cannot be read and are left out, among them {', '.join(damaged[:5])}"


def _parse_log(path: epath.Path) -> tuple[bytes, list[bytes], list[dict[str, Any] | None]]:
    """The content of a file that need not exist, its lines, and the row of each line; None for a damaged one."""
    content = path.read_bytes() if path.exists() else b""
    lines = content.splitlines()
    return content, lines, [_row(line, path.name == SAMPLES) for line in lines]


def _row(line: bytes, of_texts: bool) -> dict[str, Any] | None:
    """The row that a line holds: a sample, or else numbers and null. None for a line that holds no such row."""
    try:
        row = json_object(line, "")
    except InputError:
        return None
    step = row.pop("step", None)
    if not _is_number(step) or not 0 <= step < _MOST:
        return None
    if of_texts:
        return {"step": step, **row} if all(isinstance(row.get(name), str) for name in Sample._fields) else None
    if not all(value is None or _is_number(value) for value in row.values()):
        return None
    return {"step": step} | {
        name: None if value is None or not abs(value) < _MOST else value for name, value in row.items()
    }


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _free(path: epath.Path) -> epath.Path:
    """A path beside a damaged file that nothing has yet."""
    names = (f"{path.name}.damaged{number or ''}" for number in itertools.count())
    return next(at for name in names if not (at := path.parent / name).exists())
