"""Preemption: what a run is asked to do, such as to stop, and the step after which all its processes do it."""

import contextlib
import itertools
import threading
from typing import Any

import jax

from gspmd_lm.runtime import processes

_LONG_MS = 600_000
_PAUSE_S = 0.2  # until the thread looks whether this process wants something
_LEAVING = "leave"  # is announced as a thing when all processes leave


class Agreement:
    """A context in which the processes of a run agree on the step after which all of them do something, such as stop.

    Processes are not at the same step, because a process may dispatch steps before devices have computed earlier ones.
    So when a process wants something, all of them stand still and report their steps. The thing is done after the
    step that follows the farthest one, which none of them has come to. For a step as such, nothing is sent. A process
    that is alone does things after the step that it is at.

    A thread of each process answers, because the main thread may wait for a device, and so for another process. Another
    one announces what this process wants. While nobody wants anything, nothing is sent: gRPC probes a connection after
    traffic, and closes it if the other process, which may be stopped, does not answer within a minute.
    """

    def __init__(self, start: int):
        """start: the step that this process is at."""
        self._at = start
        self._wanted: dict[str, None] = {}  # things that this process wants and has not announced, the first one first
        self._agreed: list[tuple[int, str]] = []  # steps, each with what is done after it
        self._standing = threading.Lock()  # whoever holds it keeps this process at its step
        self._left = threading.Event()
        self._error: Exception | None = None  # of the thread
        self._key = ""  # under which the next thing is announced
        self._threads: list[threading.Thread] = []

    def want(self, thing: str) -> None:
        """Asks for a thing to be done soon, unless it will be. A signal handler may call it, as it never waits."""
        if not any(at > self._at and thing == other for at, other in self._agreed):
            self._wanted[thing] = None

    def due(self, step: int) -> set[str]:
        """The things to do after `step`. Each process asks once after every step."""
        if not self._threads:
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
            self._threads = [
                threading.Thread(target=self._answer, args=(name,), daemon=True),
                threading.Thread(target=self._announce, daemon=True),
            ]
            for thread in self._threads:
                thread.start()
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        if not self._threads:
            return
        if kind is None:
            processes.compare({})  # one that has not asked about its last step may want something: it needs an answer
        self._left.set()
        if kind is None:  # all processes leave; where this one alone fails, its threads end with it
            self._set(_LEAVING)
            for thread in self._threads:
                thread.join()

    def _answer(self, name: str) -> None:
        """Agrees on one thing after the other, until the context is left."""
        try:
            for number in itertools.count():
                self._key = f"{name}/{number}/thing"
                thing = self._wait_for(self._key, _LONG_MS)
                if thing is None or thing == _LEAVING:
                    return
                with self._standing:
                    if (farthest := self._farthest(f"{name}/{number}")) is None:
                        return
                    self._agreed.append((farthest + 1, thing))
                    self._wanted.pop(thing, None)
                if jax.process_index() == 0 and number:
                    processes.client().key_value_delete(f"{name}/{number - 1}")  # all processes have come to `number`
        except Exception as error:
            self._error = error  # the main thread raises it

    def _wait_for(self, key: str, wait_ms: int = processes.POLL_MS) -> str | None:
        """Waits for the value that any process stores under `key`. It is None if the context is left before."""
        while not self._left.is_set():
            if (value := processes.read_stored(key, wait_ms)) is not None:
                return value
        return None

    def _announce(self) -> None:
        """Announces what this process wants, until the context is left."""
        while not self._left.wait(_PAUSE_S):
            for thing in list(self._wanted)[:1]:
                self._set(thing)

    def _set(self, thing: str) -> None:
        """Announces a thing, unless another process has announced one."""
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            processes.client().key_value_set(self._key, thing)

    def _farthest(self, key: str) -> int | None:
        """The step of the process that is farthest; None when the context is left."""
        processes.client().key_value_set(f"{key}/{jax.process_index()}", str(self._at))
        if jax.process_index() == 0:
            steps = [self._wait_for(f"{key}/{process}") for process in range(jax.process_count())]
            known = [int(step) for step in steps if step is not None]
            if len(known) < len(steps):
                return None
            processes.client().key_value_set(f"{key}/farthest", str(max(known)))
        farthest = self._wait_for(f"{key}/farthest")
        return None if farthest is None else int(farthest)
