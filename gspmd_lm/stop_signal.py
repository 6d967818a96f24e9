"""Requests to stop a run."""

import os
import signal
import threading
from typing import Any

import jax
from jax.experimental import multihost_utils

from gspmd_lm import processes


class StopSignal:
    """Whether this run was asked, by Ctrl-C or SIGTERM, to save and end.

    The second Ctrl-C interrupts at once. The third ends the process, whatever the process waits for. With several
    processes, a signal to any of them stops all of them at the same step.
    """

    def __enter__(self) -> "StopSignal":
        self._asked = False
        self._interrupted = False
        self._together = jax.distributed.is_initialized()
        # Under jax.distributed jax itself notices SIGTERM and agrees on a step; a handler of ours would disable that.
        numbers = [signal.SIGINT] if self._together else [signal.SIGINT, signal.SIGTERM]
        self._previous = {number: signal.signal(number, self._notice) for number in numbers}
        # Python calls handlers between its own instructions, so not while it waits in a library. A signal is written to
        # this pipe at once.
        reading, self._written = os.pipe()
        os.set_blocking(self._written, False)
        self._previous_fd = signal.set_wakeup_fd(self._written, warn_on_full_buffer=False)
        threading.Thread(target=self._count, args=(reading,), daemon=True).start()
        return self

    def __exit__(self, *_: Any) -> None:
        signal.set_wakeup_fd(self._previous_fd)
        os.close(self._written)
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _notice(self, number: int, _: Any) -> None:
        if number == signal.SIGINT and self._interrupted:
            raise KeyboardInterrupt
        self._interrupted |= number == signal.SIGINT
        if self._together:
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            self._asked = True

    @staticmethod
    def _count(reading: int) -> None:
        """Ends the process at the third Ctrl-C; returns when the context is left."""
        interrupts = 0
        while numbers := os.read(reading, 64):
            interrupts += numbers.count(signal.SIGINT)
            if interrupts >= 3:
                processes.leave(130, "interrupted")
                os._exit(130)
        os.close(reading)

    def requested(self, step: int) -> bool:
        """Whether to stop after `step`. Every process asks about the same steps in the same order, once for each."""
        if self._together and not self._asked:
            self._asked = multihost_utils.reached_preemption_sync_point(step)
        return self._asked
