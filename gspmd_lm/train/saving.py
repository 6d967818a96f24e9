"""The rules by which a run is saved, and by which it ends early."""

import collections
import contextlib
import dataclasses
import math
import time
from collections.abc import Iterator
from typing import Any

import jax
from etils import epath

from gspmd_lm import files
from gspmd_lm.config import Train
from gspmd_lm.errors import InputError, RunFailed
from gspmd_lm.units import human_bytes
from gspmd_lm.workdir.checkpoint import Checkpoints

SHARE = 0.05  # the share of the time for which a run may stand still to save by time


class Clock:
    """Says when a run is to be saved by time: some minutes after its last checkpoint was written.

    More time passes where saving takes long. The run then stands still for SHARE of the time at most, and checkpoints
    are written for half of the time at most.
    """

    def __init__(self, minutes: float):
        """minutes: 0 means never."""
        self.asked_s, self.stood_s = 60 * minutes, 0.0
        self.began = self.written = time.monotonic()  # the last save, and the moment when it was last seen unfinished

    def due(self, writing: bool) -> bool:
        """Whether to save. writing: whether a checkpoint is being written."""
        now = time.monotonic()
        if writing:
            self.written = now
        pause_s = max(self.asked_s, self.stood_s * (1 / SHARE - 1), self.written - self.began)
        return self.asked_s > 0 and not writing and now - self.written >= pause_s

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """A context for what the run stands still for: it waits for an earlier save, and copies the arrays."""
        self.began = time.monotonic()
        yield
        self.written = time.monotonic()
        self.stood_s = self.written - self.began


def line(train: Train, state: Any) -> str:
    """A line that says when a run is saved, how large a checkpoint of its state is, and how many are kept."""
    minutes, steps = train.checkpoint_minutes, train.checkpoint_every
    when = [f"every {steps:,} steps"] * (steps > 0) + [f"every {minutes:g} minutes"] * (minutes > 0)
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
    times = f"{', '.join(when)} and at the end" if when else "at the end"
    return f"saves {times}; {human_bytes(size)} each, {train.keep_checkpoints} kept"


@dataclasses.dataclass(frozen=True)
class Best:
    """The evaluation with the lowest held-out loss. Each checkpoint holds it, so that a resumed run goes on from it."""

    step: int | None = None
    loss: float | None = None
    since: int = 0  # how many evaluations later were not better
    evaluated: int | None = None  # the step of the last evaluation that counted

    @classmethod
    def from_extra(cls, extra: dict[str, Any]) -> "Best":
        """The best evaluation that a checkpoint holds; without one, nothing is best yet.

        Raises InputError for one that no run has written.
        """
        found = extra.get("best", {})
        kinds = {"step": int | None, "loss": int | float | None, "since": int, "evaluated": int | None}
        if not isinstance(found, dict) or not all(
            name in kinds and isinstance(value, kinds[name]) for name, value in found.items()
        ):
            raise InputError(
                f"the checkpoint's best evaluation is not one: {str(found)[:100]}\n  fix   give --step of another one"
            )
        return cls(**found)

    def after(self, step: int, loss: float) -> "Best":
        """The best after an evaluation of `step`. A loss that is not finite is not better."""
        if math.isfinite(loss) and (self.loss is None or loss < self.loss):
            return Best(step, loss, 0, step)
        return dataclasses.replace(self, since=self.since + 1, evaluated=step)

    def ends(self, patience: int) -> bool:
        """Whether a run with this patience ends here; 0 never ends it."""
        return 0 < patience <= self.since


def moved_rows(step: int, extra: dict[str, Any], batch: int) -> list[str]:
    """A warning that a run which goes on from `step` skips or repeats rows, if it has another batch now; else nothing.

    The place of a row is a function of the step. extra: of the checkpoint, which says the batch so far.
    """
    before = extra.get("batch", batch)
    if not isinstance(before, int) or before == batch:
        return []
    what = "skipped" if batch > before else "read again"
    return [
        f"warning: step {step} is at row {step * batch:,} with batches of {batch} rows, and was at "
        f"{step * before:,} with those of {before}: {abs(step * (batch - before)):,} rows are {what}"
    ]


def describe_unsaved(error: Exception, workdir: epath.Path, checkpoints: Checkpoints, done: int) -> str:
    """The message of an error about the workdir, with the steps up to `done` that are not saved; '' for another one."""
    message, separator, fix = str(error).partition("\n  fix   ")
    if isinstance(error, OSError):
        message = f"{error.filename}: {files.reason(error)}"
        separator, fix = "\n  fix   ", "see to that folder, then start the same command: it goes on from there"
    if str(workdir) not in message or (written := checkpoints.last_written()) >= done:
        return ""
    steps = f"steps {written + 1} to {done} are" if done > written + 1 else f"step {done} is"
    return f"{message}; {steps} not saved{separator}{fix}"


def nothing_to_do(step: int, stop: int, best: Best, patience: int) -> str:
    """The message for a checkpoint that leaves nothing to do."""
    if step >= stop:
        return f"the checkpoint is at step {step}: nothing to do up to step {stop} (--steps, train.steps)"
    than = f"not better than that of step {best.step}" if best.step is not None else "not finite"
    return (
        f"the run ended early at step {step}: the last {best.since} evaluations were {than}, so there is nothing to do "
        "(--set train.patience=0 goes on)"
    )


class SkippedSteps:
    """The number of consecutive steps that were not finite, and were skipped, read while later steps run.

    The result of a step is read IN_FLIGHT steps later, so that the device never waits for the read. Every process reads
    the result of the same step, so that all processes stop at the same step.
    """

    IN_FLIGHT = 2

    def __init__(self, checkpoints: Checkpoints, most: int):
        self.checkpoints, self.most = checkpoints, most
        self.unread: collections.deque[tuple[int, jax.Array]] = collections.deque()
        self.skipped = 0  # in a row, up to the step last read
        self.failed: tuple[int, int] | None = None  # the step by which too many were skipped, and how many

    def add(self, step: int, skipped_in_a_row: jax.Array) -> None:
        """Adds the result of `step`, which was just dispatched."""
        skipped_in_a_row.copy_to_host_async()
        self.unread.append((step, skipped_in_a_row))
        while len(self.unread) > self.IN_FLIGHT:
            self._read()

    def skipped_before(self, step: int) -> int:
        """The number of skipped steps in a row, the last one being `step`. Waits for their results."""
        while self.unread and self.unread[0][0] <= step:
            self._read()
        return self.skipped

    def error(self) -> RunFailed:
        """The error for too many skipped steps, whose checkpoints later starts do not use. `failed` is set."""
        assert self.failed
        step, skipped = self.failed
        healthy, steps = self.checkpoints.give_up(), self.checkpoints.steps()
        if healthy is not None:
            then = (
                f"goes on from checkpoint {healthy}, the newest that a finite step followed; --step=N from an older one"
            )
        elif steps:
            then = f"with --step={steps[-1]} goes on from that checkpoint, which no finite step followed"
        else:
            then = "begins anew"
        return RunFailed(
            f"step {step}: the loss or gradient of the last {skipped} steps was not finite, and they changed nothing\n"
            f"  fix   lower optimizer.learning_rate, or look at the data; the same command {then}"
        )

    def _read(self) -> None:
        step, skipped = self.unread.popleft()
        self.skipped = int(skipped)
        if not self.skipped:
            self.checkpoints.confirm(step)
        elif self.skipped >= self.most and not self.failed:
            self.failed = step, self.skipped
