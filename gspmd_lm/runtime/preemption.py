"""Preemption: what a run is asked to do, such as to stop, and the step after which all its processes do it."""

import contextlib
import ctypes
import itertools
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import jax

from gspmd_lm.runtime import processes

_NUMBERS = signal.SIGINT, signal.SIGTERM


class StopSignal:
    """A context in which Ctrl-C and SIGTERM do not end the process: they call `asked`, which must not wait for a lock.

    The second Ctrl-C interrupts at once. The third ends the process, whatever the process waits for. SIGTERM only ever
    asks, so that a launcher that is impatient does not end what the first one asked for.

    In another thread than the main one, which alone may handle signals, nothing changes.
    """

    def __init__(self, asked: Callable[[], None]):
        self._asked = asked
        self._interrupted = False
        self._handles = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> "StopSignal":
        if not self._handles:
            return self
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
        if not self._handles:
            return
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


class Agreement:
    """A context in which the processes of a run agree on the step after which all of them do something, such as stop.

    Processes are not at the same step, because a process may dispatch steps before devices have computed earlier ones.
    So when a process wants something, all of them stand still and report their steps. The thing is done after the
    step that follows the farthest one, which none of them has come to. For a step as such, nothing is sent. A process
    that is alone does things after the step that it is at.

    A thread of each process answers, because the main thread may wait for a device, and so for another process.
    """

    def __init__(self, start: int):
        """start: the step that this process is at."""
        self._at = start
        self._wanted: dict[str, None] = {}  # things that this process wants and has not announced, the first one first
        self._agreed: list[tuple[int, str]] = []  # steps, each with what is done after it
        self._standing = threading.Lock()  # whoever holds it keeps this process at its step
        self._left = threading.Event()
        self._error: Exception | None = None  # of the thread
        self._thread: threading.Thread | None = None

    def want(self, thing: str) -> None:
        """Asks for a thing to be done soon, unless it will be. A signal handler may call it, as it never waits."""
        if not any(at > self._at and thing == other for at, other in self._agreed):
            self._wanted[thing] = None

    def due(self, step: int) -> set[str]:
        """The things to do after `step`. Each process asks once after every step."""
        if not self._thread:
            wanted, self._wanted = self._wanted, {}
            return set(wanted)
        with self._standing:
            if self._error:
                raise self._error
            self._at = step
            return {thing for at, thing in self._agreed if at == step}

    def __enter__(self) -> "Agreement":
        if processes.several():
            name = processes.next_key("agreement")
            self._thread = threading.Thread(target=self._answer, args=(name,), daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        if not self._thread:
            return
        if kind is None:
            processes.compare({})  # one that has not asked about its last step may want something: it needs an answer
        self._left.set()
        self._thread.join()

    def _answer(self, name: str) -> None:
        """Agrees on one thing after the other, until the context is left."""
        try:
            for number in itertools.count():
                thing = self._next(f"{name}/{number}/thing")
                with self._standing:
                    farthest = self._farthest(f"{name}/{number}") if thing else None
                    if thing is None or farthest is None:
                        return
                    self._agreed.append((farthest + 1, thing))
                    self._wanted.pop(thing, None)
                if jax.process_index() == 0 and number:
                    processes.client().key_value_delete(f"{name}/{number - 1}")  # all processes have come to `number`
        except Exception as error:
            self._error = error  # the main thread raises it

    def _next(self, key: str) -> str | None:
        """The thing that some process wants first; None when the context is left."""
        while not self._left.is_set():
            for thing in list(self._wanted)[:1]:
                with contextlib.suppress(jax.errors.JaxRuntimeError):  # another process has set it
                    processes.client().key_value_set(key, thing)
            if stored := processes.read_stored(key):
                return stored
        return None

    def _farthest(self, key: str) -> int | None:
        """The step of the process that is farthest; None when the context is left."""
        processes.client().key_value_set(f"{key}/{jax.process_index()}", str(self._at))
        if jax.process_index() == 0:
            steps = [self._stored_step(f"{key}/{process}") for process in range(jax.process_count())]
            known = [step for step in steps if step is not None]
            if len(known) < len(steps):
                return None
            processes.client().key_value_set(f"{key}/farthest", str(max(known)))
        return self._stored_step(f"{key}/farthest")

    def _stored_step(self, key: str) -> int | None:
        """The step under a key, as soon as it is there; None when the context is left."""
        while not self._left.is_set():
            if step := processes.read_stored(key):
                return int(step)
        return None
