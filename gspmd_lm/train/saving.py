"""When a run is saved by time."""

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import jax

from gspmd_lm.config import Train
from gspmd_lm.units import human_bytes

SHARE = 0.05  # the share of the time for which a run may stand still to save by time


class Clock:
    """Says when a run is to be saved: some minutes after its last checkpoint was written.

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
    """What to say about when a run is saved, how large a checkpoint of its state is, and how many are kept."""
    minutes, steps = train.checkpoint_minutes, train.checkpoint_every
    when = [f"every {steps:,} steps"] * (steps > 0) + [f"every {minutes:g} minutes"] * (minutes > 0)
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
    times = f"{', '.join(when)} and at the end" if when else "at the end"
    return f"saves {times}; {human_bytes(size)} each, {train.keep_checkpoints} kept"
