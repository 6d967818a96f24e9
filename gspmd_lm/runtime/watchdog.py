"""A watchdog over a run: it says what takes too long and for which process it waits, and ends the run."""

import collections
import contextlib
import faulthandler
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import jax

from gspmd_lm.errors import FAILED
from gspmd_lm.runtime import endings, processes
from gspmd_lm.units import human_seconds

LATE = 10  # a step is late when it has taken so many times the median
LATE_S = 60.0  # and at least this long, and so is anything else that is watched
TICK_S = 5.0  # between two looks
STEPS = 101  # the median is that of so many steps
WHOLE = 6  # what comes in one piece, such as a save, may take so many times as long as a step

_STEP = {"steps", "data"}  # the kinds of time that make a step
_WHOLE = {"saves", "compile", "restore"}
# Kind of time -> what the process is at. Time of other kinds, such as that of reading a corpus, is not watched.
_WATCHED = {
    "steps": "step {next}",
    "data": "step {next}",
    "evaluation": "a batch or the samples of an evaluation",
    "saves": "saving",
    "compile": "compiling",
    "restore": "making or restoring the state",
}


class Watchdog:
    """A context in which what is late is reported once, and what never ends ends all processes.

    `begin` says what the process is at, as a kind of time. A step and a batch of an evaluation end with a `beat`.

    One thread of each process looks at the clock. If something takes half as long as makes it late, another thread
    reports to the first process, through the key-value store of the run, what its process is at. Before, nothing is
    sent: gRPC closes a connection on which it expects an answer, if the other process is stopped for a minute. Time in
    which this process is stopped as a whole does not count.
    """

    def __init__(self, hang_minutes: float, say: Callable[[str], None]):
        """hang_minutes: until a run ends; 0 means never. say: prints a line."""
        self.done, self.hang_s, self.say = 0, 60 * hang_minutes, say
        # Called with the kind and the seconds of each late step, once it is done, and of whatever ends the run.
        self.count_hang: Callable[[str, float], None] = lambda kind, seconds: None
        self.taken_s: collections.deque[float] = collections.deque(maxlen=STEPS)
        self._kind = "start"
        self._waited_s, self._said = 0.0, False  # in the present part, and whether a line was said about it
        self._near = False  # whether the present part has taken half as long as makes it late
        self._began = time.monotonic()  # of the part that is computed
        self._left, self._lock = threading.Event(), threading.Lock()
        self._reported_at = time.monotonic()  # when the first process last took a report
        # Process -> its last report: a count, the step done, and what it is at. None before the first look.
        self._reports: dict[int, list[Any]] | None = None
        self._ends = False  # whether something hangs, here or in another process

    def __enter__(self) -> "Watchdog":
        self.several = processes.several()
        self._threads = [threading.Thread(target=self._look, daemon=True)]
        if self.several:
            self._index, self._name = jax.process_index(), processes.next_key("watchdog")
            self._threads.append(threading.Thread(target=self._report, daemon=True))
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._left.set()
        for thread in self._threads:
            thread.join(TICK_S)

    def begin(self, kind: str) -> None:
        """Notes that the process now spends its time on `kind`."""
        with self._lock:
            hung = None if {kind, self._kind} <= _STEP else self._restart(time.monotonic())
            self._kind = kind
        self._count(hung)

    def beat(self, step: int | None = None) -> None:
        """Notes that a part is done: `step`, or a batch of an evaluation."""
        now = time.monotonic()
        with self._lock:
            if step is not None:
                self.taken_s.append(now - self._began)
                self.done = step
            hung = self._restart(now)
        self._count(hung)

    def _restart(self, now: float) -> tuple[str, float] | None:
        """Begins a new part. Returns the kind and the seconds of the old one, if it was a step that was late."""
        hung = (self._kind, self._waited_s) if self._said and self._kind in _STEP else None
        self._began, self._waited_s, self._said, self._near, self._reports = now, 0.0, False, False, None
        return hung

    def _count(self, hung: tuple[str, float] | None) -> None:
        if hung:
            self.count_hang(*hung)

    def _at(self) -> str:
        """The present work of the process, in words, such as 'step 7' or 'saving'."""
        return _WATCHED.get(self._kind, self._kind).format(next=self.done + 1)

    def _look(self) -> None:
        """Looks at the clock until the context is left; ends the process if something hangs."""
        before = time.monotonic()
        while not self._left.wait(TICK_S):
            now = time.monotonic()
            with self._lock:
                if self._kind in _WATCHED:
                    self._waited_s += min(now - before, 2 * TICK_S)  # it is more where this process was stopped
                waited_s, at = self._waited_s, self._at()
                usual_s = statistics.median(self.taken_s) if self.taken_s and self._kind in _STEP else 0.0
                late_s, hang_s = max(LATE_S, LATE * usual_s), max(self.hang_s, LATE * usual_s)
                self._near = waited_s > late_s / 2
                late = waited_s > late_s and not self._said
                hangs = self.hang_s > 0 and waited_s > hang_s * (WHOLE if self._kind in _WHOLE else 1)
            before = now
            if hangs or self._ends:
                self._end(waited_s, at)
            elif late and (line := self._describe(waited_s, usual_s, at)):
                self._said = True
                self.say(line)

    def _describe(self, waited_s: float, usual_s: float, at: str) -> str:
        """The line about what is late; '' where another process says it, or where one more look is needed."""
        times = f", {waited_s / usual_s:.0f} times the usual {human_seconds(usual_s)}" if usual_s else ""
        line = f"warning: {at} has taken {waited_s:.0f} s{times}"
        if not self.several:
            return line
        if self._index:  # the first process says it, unless it is the one that does not answer
            return f"{line}; process 0 does not answer" if time.monotonic() - self._reported_at > 3 * TICK_S else ""
        before, reports = self._reports, self._read()
        self._reports = reports
        if before is None:
            return ""
        who, most = [], max([self.done, *(step for _, step, _ in reports.values())])
        for number in range(1, jax.process_count()):
            report = reports.get(number)
            if report is None or report == before.get(number):
                who.append(f"process {number} does not answer")
            elif report[1] < most:
                who.append(f"process {number} has done step {report[1]} only")
            elif report[2] != at:
                who.append(f"process {number}: {report[2]}")
        return f"{line}; {', '.join(who[:8]) or 'all processes answer, and wait in the same place'}"

    def _end(self, waited_s: float, at: str) -> None:
        """Writes the stacks of all threads into the log, has the other processes do so too, and ends this one."""
        self._ends = True
        number = f"process {self._index}: " if self.several else ""
        print(f"{number}{at} hangs; the Python stacks:", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(sys.__stderr__ or sys.stderr)
        counting = threading.Thread(target=self.count_hang, args=(self._kind, waited_s), daemon=True)
        counting.start()
        counting.join(TICK_S)  # it may write to what hangs
        if self.several:
            time.sleep(2 * TICK_S)  # until all others have heard of it, and have written theirs
        endings.end(
            FAILED,
            f"{number}{at} has not ended within {waited_s:.0f} s, and the run ends\n"
            "  fix   start the same command again: it goes on from the newest checkpoint. "
            "--set=train.hang_minutes=30 waits longer, and 0 without end",
        )

    def _report(self) -> None:
        """Reports what this process is at while it is near being late, and hears whether something hangs elsewhere."""
        store, count = processes.client(), 0
        while not self._left.wait(TICK_S / 2):  # so that each look finds a new report
            if not self._near and not self._ends:
                self._reported_at = time.monotonic()
                continue
            count += 1
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # no answer of the first process: `_describe` says it
                report = json.dumps([count, self.done, self._at()])
                store.key_value_set(f"{self._name}/at/{self._index}", report, allow_overwrite=True)
                self._reported_at = time.monotonic()
                if self._ends:
                    store.key_value_set(f"{self._name}/ends/{self._index}", "", allow_overwrite=True)
                self._ends = self._ends or bool(store.key_value_dir_get(f"{self._name}/ends"))

    def _read(self) -> dict[int, list[Any]]:
        """The last report of each process but the first."""
        found = processes.client().key_value_dir_get(f"{self._name}/at")
        reports = {int(key.rpartition("/")[2]): json.loads(value) for key, value in found}
        return {number: report for number, report in reports.items() if number}
