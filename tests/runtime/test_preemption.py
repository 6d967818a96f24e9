"""What processes agree on, with a store that counts what is sent. test_startup.py has two real processes."""

import threading
import time

import jax
import pytest

from gspmd_lm.runtime import processes
from gspmd_lm.runtime.preemption import Agreement


class Store:
    """The key-value store of a run, within one process."""

    def __init__(self):
        self.values, self.changed, self.sent = {}, threading.Condition(), 0

    def key_value_set(self, key, value):
        self.sent += 1
        with self.changed:
            if key in self.values:
                raise jax.errors.JaxRuntimeError("ALREADY_EXISTS")
            self.values[key] = value
            self.changed.notify_all()

    def blocking_key_value_get(self, key, wait_ms):
        self.sent += 1
        with self.changed:
            if not self.changed.wait_for(lambda: key in self.values, wait_ms / 1000):
                raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED")
            return self.values[key]

    def key_value_delete(self, folder):
        with self.changed:
            self.values = {key: value for key, value in self.values.items() if not key.startswith(f"{folder}/")}


@pytest.mark.long
def test_nothing_is_sent_while_nobody_wants_anything_and_a_thing_is_announced_at_once(monkeypatch):
    store = Store()
    monkeypatch.setattr(processes, "several", lambda: True)
    monkeypatch.setattr(processes, "client", lambda: store)
    step = 0
    with Agreement(step) as agreed:
        time.sleep(2.5)
        assert store.sent == 1  # a question that is answered when a process wants something
        for thing in ("save", "stop"):
            agreed.want(thing)
            began, due = time.monotonic(), set()
            while not due and time.monotonic() - began < 60:
                step += 1
                due = agreed.due(step)
                time.sleep(0.02)
            assert due == {thing}
    assert not any(thread.is_alive() for thread in agreed._threads)
