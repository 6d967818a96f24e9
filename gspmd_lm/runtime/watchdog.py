"""A watchdog over the steps of a run: it says which step hangs and for which process it waits, and ends the run."""

import collections
import contextlib
import faulthandler
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator

import jax

from gspmd_lm.errors import FAILED
from gspmd_lm.runtime import endings, processes
from gspmd_lm.units import human_seconds

LATE = 10  # a step is late when it has taken so many times the median
LATE_S = 60.0  # and at least this long
TICK_S = 5.0  # between two looks, and between two reports of a process
STEPS = 101  # the median is that of so many steps


class Watchdog:
    """A context in which a step that is late is reported once, and a step that never ends ends all processes.

    One thread of each process looks at the clock. Another one reports to the first process, through the key-value store
    of the run, at which step its process is. Time in which a process is stopped as a whole does not count.
    """

    def __init__(self, start: int, hang_minutes: float, say: Callable[[str], None]):
        """start: the step that the run is at. hang_minutes: until a run ends; 0 means never. say: prints a line."""
        self.done, self.hang_s, self.say = start, 60 * hang_minutes, say
        self.taken_s: collections.deque[float] = collections.deque(maxlen=STEPS)
        self._waited_s, self._said, self._paused = 0.0, False, 0
        self._began = time.monotonic()  # of the step that is computed
        self._left, self._lock = threading.Event(), threading.Lock()
        self._reported_at = time.monotonic()
        self._heard: dict[int, tuple[int, int]] = {}  # process -> its last report: a count and a step
        self._ends = False  # whether a step hangs, here or in another process

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

    def beat(self, step: int) -> None:
        """Notes that `step` is done."""
        now = time.monotonic()
        with self._lock:
            self.taken_s.append(now - self._began)
            self.done = step
            self._restart(now)

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """A context for what is no step and may take long, such as a save. Nothing is late while it lasts."""
        with self._lock:
            self._paused += 1
        try:
            yield
        finally:
            with self._lock:
                self._paused -= 1
                self._restart(time.monotonic())

    def _restart(self, now: float) -> None:
        self._began, self._waited_s, self._said = now, 0.0, False

    def _look(self) -> None:
        """Looks at the clock until the context is left; ends the process if a step hangs."""
        before = time.monotonic()
        while not self._left.wait(TICK_S):
            now = time.monotonic()
            with self._lock:
                if not self._paused:
                    self._waited_s += min(now - before, 2 * TICK_S)  # it is more where this process was stopped
                waited_s, usual_s = self._waited_s, statistics.median(self.taken_s) if self.taken_s else 0.0
                late = waited_s > max(LATE_S, LATE * usual_s) and not self._said
                hangs = self.hang_s > 0 and waited_s > max(self.hang_s, LATE * usual_s)
            before = now
            if hangs or self._ends:
                self._end(waited_s)
            elif late and (line := self._describe(waited_s, usual_s)):
                self._said = True
                self.say(line)

    def _describe(self, waited_s: float, usual_s: float) -> str:
        """The line about a late step; '' where another process says it, or where one more look is needed."""
        times = f", {waited_s / usual_s:.0f} times the usual {human_seconds(usual_s)}" if usual_s else ""
        line = f"warning: step {self.done + 1} has taken {waited_s:.0f} s{times}"
        if not self.several:
            return line
        if self._index:  # the first process says it, unless it is the one that does not answer
            return f"{line}; process 0 does not answer" if self._silent_s() > 3 * TICK_S else ""
        before, self._heard = self._heard, self._read()
        if not before:
            return ""
        silent = [number for number, report in self._heard.items() if before.get(number) == report]
        silent += [number for number in range(1, jax.process_count()) if number not in self._heard]
        steps = {number: step for number, (_, step) in self._heard.items()} | {0: self.done}
        behind = [number for number, step in steps.items() if step < max(steps.values()) and number not in silent]
        who = [f"process {number} does not answer" for number in sorted(silent)]
        who += [f"process {number} has done step {steps[number]} only" for number in sorted(behind)]
        return f"{line}; {', '.join(who[:8]) or 'all processes answer, and wait in this step'}"

    def _silent_s(self) -> float:
        """How long the first process has not taken a report."""
        return time.monotonic() - self._reported_at

    def _end(self, waited_s: float) -> None:
        """Writes the stacks of all threads into the log, has the other processes do so too, and ends this one."""
        self._ends = True
        number = f"process {self._index}: " if self.several else ""
        print(f"{number}step {self.done + 1} hangs; the Python stacks:", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(sys.__stderr__ or sys.stderr)
        if self.several:
            time.sleep(2 * TICK_S)  # until all others have heard of it, and have written theirs
        endings.end(
            FAILED,
            f"{number}step {self.done + 1} has not ended within {waited_s:.0f} s, and the run ends\n"
            "  fix   start the same command again: it goes on from the newest checkpoint. A limit for longer steps is "
            "--set train.hang_minutes=30, and 0 is none",
        )

    def _report(self) -> None:
        """Reports the step of this process until the context is left, and hears whether a step hangs elsewhere."""
        store, count = processes.client(), 0
        while not self._left.is_set():
            count += 1
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # no answer of the first process: `_describe` says it
                store.key_value_set(
                    f"{self._name}/at/{self._index}", json.dumps([count, self.done]), allow_overwrite=True
                )
                self._reported_at = time.monotonic()
                if self._ends:
                    store.key_value_set(f"{self._name}/ends/{self._index}", "", allow_overwrite=True)
                self._ends = self._ends or bool(store.key_value_dir_get(f"{self._name}/ends"))
            self._left.wait(TICK_S)

    def _read(self) -> dict[int, tuple[int, int]]:
        """The last report of each process but the first."""
        found = processes.client().key_value_dir_get(f"{self._name}/at")
        reports = {int(key.rpartition("/")[2]): json.loads(value) for key, value in found}
        return {number: (count, step) for number, (count, step) in reports.items() if number}
