"""How this process ends: what it does first, by whatever it ends, and what Ctrl-C and SIGTERM do to a run.

`kill_group` ends processes that it has started.
"""

import contextlib
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from gspmd_lm.errors import STOPPED, Stopped, printable

LAST_S = 10.0  # how long the last acts may take, if the process ends at once

_NUMBERS = signal.SIGINT, signal.SIGTERM
_acts: list[Callable[[int, str], None]] = []  # what is done before this process ends, the oldest first
_acting = threading.RLock()


def add_last_act(act: Callable[[int, str], None]) -> None:
    """Has `act` called once before this process ends by itself, with its exit code and its message."""
    _acts.append(act)


def do_last_acts(code: int, message: str) -> None:
    """Calls what `add_last_act` was given, the oldest first. None of them keeps another one from being called."""
    with _acting:
        while _acts:
            try:
                _acts.pop(0)(code, message)
            except Exception as error:
                print(f"warning: at the end of this process: {error}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def giving_back(give_back: Callable[[], None]) -> Iterator[None]:
    """A context that calls `give_back` once: when it is left, or when any thread ends this process before that."""

    def act(code: int, message: str) -> None:
        give_back()

    _acts.append(act)
    try:
        yield
    finally:
        with _acting:
            if act in _acts:
                _acts.remove(act)
                give_back()


def end(code: int, message: str = "") -> NoReturn:
    """Ends this process at once, whatever its other threads wait for, after it has done its last acts."""

    def finish() -> None:
        sys.stdout.flush()
        if message:
            print(printable(message), file=sys.stderr, flush=True)
        do_last_acts(code, message)

    finishing = threading.Thread(target=finish, daemon=True)
    finishing.start()
    finishing.join(LAST_S)
    os._exit(code)


def kill_group(leader: int) -> None:
    """Kills a process that was started in a process group of its own, and all processes of the group.

    leader: the ID of that process.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended; macOS refuses until it is reaped
        os.killpg(leader, signal.SIGKILL)


class StopSignal:
    """A context in which Ctrl-C and SIGTERM do not end the process: they call `asked`, which must not wait for a lock.

    The second Ctrl-C raises Stopped at once. The third ends the process, whatever the process waits for. SIGTERM only
    ever asks, so that a launcher that is impatient does not end what the first one asked for.

    Without `asked` there is nothing to save, and the first signal of either kind ends the process with STOPPED.

    In another thread than the main one, which alone may handle signals, nothing changes.
    """

    def __init__(self, asked: Callable[[], None] | None = None):
        self._asked = asked
        self._interrupted = False
        self._handles = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> "StopSignal":
        if not self._handles:
            return self
        # Python knows no handlers of libraries, such as the one of jax.distributed where another program started it.
        self._actions = {number: _action(number) for number in _NUMBERS}
        # Python calls handlers between its own instructions, so not while it waits in a library. A signal is written to
        # this pipe at once.
        reading, self._written = os.pipe()
        os.set_blocking(self._written, False)
        self._previous_fd = signal.set_wakeup_fd(self._written, warn_on_full_buffer=False)
        threading.Thread(target=self._follow, args=(reading,), daemon=True).start()
        self._previous = {number: signal.signal(number, self._notice) for number in _NUMBERS}
        return self

    def __exit__(self, *_: Any) -> None:
        if not self._handles:
            return
        signal.set_wakeup_fd(self._previous_fd)
        os.close(self._written)
        for number, handler in self._previous.items():
            if handler is not None:  # as that of a library is, if it came before Python
                signal.signal(number, handler)
            _action(number, self._actions[number])

    def _notice(self, number: int, _: Any) -> None:
        if not self._asked:
            return  # the thread ends the process
        if number == signal.SIGINT and self._interrupted:
            raise Stopped("stopped at once; what was not saved is lost")
        self._interrupted |= number == signal.SIGINT
        self._asked()

    def _follow(self, reading: int) -> None:
        """Ends the process at the signal that is to do so; returns when the context is left."""
        interrupts = 0
        while numbers := os.read(reading, 64):
            interrupts += numbers.count(signal.SIGINT)
            if interrupts >= 3:
                end(STOPPED, "interrupted")
            if not self._asked and any(number in _NUMBERS for number in numbers):
                end(STOPPED, "stopped on request; nothing had to be saved, and the same command starts again")
        os.close(reading)


def _action(number: int, new: Any = None) -> Any:
    """The action of the system at a signal, a struct sigaction. `new` takes its place."""
    old = ctypes.create_string_buffer(256)  # of which the struct takes a part
    ctypes.CDLL(None).sigaction(int(number), new, old)
    return old
