"""The numbers of a run: what its steps give, and what the clock adds to them."""

import contextlib
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np


def added(totals: Iterable[Mapping[str, jax.Array]]) -> dict[str, Any]:
    """The sums of the totals of batches, in float64: numbers, and arrays of the totals that are arrays."""
    sums: dict[str, Any] = {}
    for of_batch in totals:
        for name, total in jax.device_get(of_batch).items():
            sums[name] = sums.get(name, 0.0) + np.float64(total)
    return sums


class Meter:
    """Turns the results of steps and the clock into the values that are logged.

    The first step also waits for its rows and for devices that start, so it has no speed. Neither have evaluation and
    saving, after which a new interval begins.
    """

    def __init__(self, start: int, stop: int, tokens: int, epochs: float, flops: float, peak_flops_per_s: float | None):
        """tokens, epochs, flops: of one step. peak_flops_per_s: of all devices together; None if it is not known."""
        self.start, self.stop = start, stop
        self.tokens, self.epochs, self.flops, self.peak_flops_per_s = tokens, epochs, flops, peak_flops_per_s
        self.first_step_s: float | None = None  # from the beginning until the first step had ended
        self.tokens_per_s: float | None = None  # in the last interval
        self.begin()

    def begin(self) -> None:
        """Begins before the first step."""
        self.began, self.once_s = time.perf_counter(), 0.0
        self.restart(self.start)

    def restart(self, step: int) -> None:
        """Begins a new interval, so that evaluation and saving are not counted as steps."""
        self.interval_began, self.at, self.wait_s = time.perf_counter(), step, 0.0

    @contextlib.contextmanager
    def once(self) -> Iterator[None]:
        """A context for what happens only once, such as compiling: the time left does not count it."""
        before = time.perf_counter()
        yield
        self.once_s += time.perf_counter() - before

    def waiting(self, batches: Any) -> Any:
        """The batches. The time spent waiting for them is recorded."""
        batches = iter(batches)
        while True:
            before = time.perf_counter()
            batch = next(batches, None)
            self.wait_s += time.perf_counter() - before
            if batch is None:
                return
            yield batch

    def read(self, step: int, values: Mapping[str, jax.Array]) -> dict[str, float]:
        """The values of the step just dispatched, and the speed since the last read. Waits for the step."""
        logged = {name: float(value) for name, value in jax.device_get(values).items()}
        now, steps = time.perf_counter(), step - self.at
        if "cross_entropy" in logged:
            logged["perplexity"] = math.exp(min(logged.pop("cross_entropy"), 700.0))
        logged |= {"tokens": float(step * self.tokens)} | ({"epoch": step * self.epochs} if self.epochs else {})
        if self.first_step_s is None:
            self.first_step_s = now - self.began
        else:
            step_time_s = (now - self.interval_began) / steps
            self.tokens_per_s = self.tokens / step_time_s
            logged |= {
                "step_time_s": step_time_s,
                "tokens_per_s": self.tokens_per_s,
                "data_wait_s": self.wait_s / steps,
            }
            if self.peak_flops_per_s:
                logged["mfu"] = self.flops / step_time_s / self.peak_flops_per_s
        self.restart(step)
        return logged

    def left_s(self, step: int) -> float | None:
        """The time until the last step, at the speed since the first one, evaluation and saving included."""
        steps = step - self.start - 1
        if self.first_step_s is None or not steps:
            return None
        taken_s = time.perf_counter() - self.began - self.first_step_s - self.once_s
        return taken_s / steps * (self.stop - step)
