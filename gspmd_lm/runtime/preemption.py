"""Requests to stop a run."""

import ctypes
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

from gspmd_lm.runtime import processes

_NUMBERS = signal.SIGINT, signal.SIGTERM


class StopSignal:
    """A context in which Ctrl-C and SIGTERM do not end the process: they call `asked`, which must not wait for a lock.

    The second Ctrl-C interrupts at once. The third ends the process, whatever the process waits for. SIGTERM only ever
    asks, so that a launcher that is impatient does not end what the first one asked for.
    """

    def __init__(self, asked: Callable[[], None]):
        self._asked = asked
        self._interrupted = False

    def __enter__(self) -> "StopSignal":
        # Python knows no handlers of libraries, such as the one of jax.distributed where another program started it.
        self._actions = {number: _action(number) for number in _NUMBERS}
        self._previous = {number: signal.signal(number, self._notice) for number in _NUMBERS}
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
            if handler is not None:  # as that of a library is, if it came before Python
                signal.signal(number, handler)
            _action(number, self._actions[number])

    def _notice(self, number: int, _: Any) -> None:
        if number == signal.SIGINT and self._interrupted:
            raise KeyboardInterrupt
        self._interrupted |= number == signal.SIGINT
        self._asked()

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


def _action(number: int, new: Any = None) -> Any:
    """What the system does at a signal, as its struct sigaction. `new` takes its place."""
    old = ctypes.create_string_buffer(256)  # of which the struct takes a part
    ctypes.CDLL(None).sigaction(int(number), new, old)
    return old
