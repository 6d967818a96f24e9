"""Where the wall time of a run went, over all of its starts. Its share of steps is called goodput."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

# Kind -> what it is.
KINDS = {
    "start": "before the first step: imports, other processes, data, and whatever has no line of its own",
    "compile": "waiting for programs to be compiled",
    "restore": "making the first state, or reading it from a checkpoint",
    "steps": "steps whose result was kept",
    "data": "waiting for rows, with nothing left to compute",
    "evaluation": "scoring held-out rows, and writing samples",
    "saves": "standing still while a checkpoint is written",
    "hangs": "steps that took 10 times as long as usual, and whatever took so long that it ended the run",
    "lost": "steps that were computed again, because no checkpoint held them",
}
_NEWER = ("hangs",)  # rows that older versions have written lack it
_LOST_TOO = "steps", "data", "evaluation"  # what a restart from an earlier step does again


class WallTime:
    """A clock that counts each moment for one kind, on the first process of a run."""

    def __init__(self, began: float | None = None):
        """began: the time.monotonic() from which on time counts; None: from now on."""
        self.seconds = dict.fromkeys(KINDS, 0.0)
        self._kind, self._since = "start", time.monotonic() if began is None else began
        self.observe: Callable[[str], None] = lambda kind: None  # called with each new kind

    def add_earlier(self, totals: Mapping[str, float]) -> None:
        """Adds the seconds of earlier starts, as `earlier_totals` finds them."""
        for kind, seconds in totals.items():
            self.seconds[kind] += seconds

    def begin(self, kind: str) -> str:
        """The kind that was counted until now. From now on, time counts for `kind`."""
        now, before = time.monotonic(), self._kind
        self.seconds[before] += now - self._since
        self._kind, self._since = kind, now
        if kind != before:
            self.observe(kind)
        return before

    def count_hang(self, kind: str, seconds: float) -> None:
        """Counts seconds as those of a hang that were, or are being, counted for `kind`."""
        self.move(kind, "hangs", seconds)

    def move(self, kind: str, other: str, seconds: float) -> None:
        """Counts seconds for another kind than `kind`, for which they were, or are being, counted."""
        self.begin(self._kind)
        seconds = min(seconds, self.seconds[kind])
        self.seconds[kind] -= seconds
        self.seconds[other] += seconds

    @contextlib.contextmanager
    def spending(self, kind: str) -> Iterator[None]:
        """A context whose time counts for `kind`. Contexts within it have kinds of their own."""
        before = self.begin(kind)
        try:
            yield
        finally:
            self.begin(before)

    def totals(self) -> dict[str, float]:
        """The seconds so far, as a row of metrics.jsonl has them."""
        self.begin(self._kind)
        return {_key(kind): round(seconds, 3) for kind, seconds in self.seconds.items()}


def earlier_totals(kept: Sequence[Mapping[str, Any]], dropped: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Kind -> seconds of the earlier starts of a run; {} if none were counted.

    kept, dropped: its rows up to the step from which it goes on, and after it. What they took for steps is lost.
    """
    newest, before = read_totals([*kept, *dropped]), read_totals(kept)
    for kind in _LOST_TOO if newest else ():
        lost_s = max(0.0, newest[kind] - before.get(kind, 0.0))
        newest[kind] -= lost_s
        newest["lost"] += lost_s
    return newest


def read_totals(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Kind -> seconds, of the last row that has them; {} if none has."""
    for row in reversed(rows):
        seconds = {kind: row.get(_key(kind), 0.0 if kind in _NEWER else None) for kind in KINDS}
        if all(isinstance(value, int | float) for value in seconds.values()):
            return {kind: float(value) for kind, value in seconds.items()}
    return {}


def goodput(seconds: Mapping[str, float]) -> float:
    """The share of steps that were kept in all seconds."""
    return seconds["steps"] / (sum(seconds.values()) or 1.0)


def _key(kind: str) -> str:
    return f"wall_{kind}_s"
