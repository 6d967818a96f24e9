"""Ctrl-C and SIGTERM: a run saves and ends, and the third Ctrl-C ends a process that waits."""

import signal

import pytest

from gspmd_lm.stop_signal import StopSignal
from tests.launched import launch


def test_sigterm_stops_and_the_handlers_come_back():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with StopSignal() as stop:
        assert not stop.requested(0)
        signal.raise_signal(signal.SIGTERM)
        assert stop.requested(1)
        assert stop.requested(2)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_the_third_interrupt_ends_a_process_that_waits_in_a_library():
    """Python calls its handlers only when the wait is over; a mutex that is locked already stands for any such wait."""
    process = launch("""
import ctypes, os, signal, threading
from gspmd_lm.stop_signal import StopSignal
def interrupt():
    for _ in range(3):
        os.kill(os.getpid(), signal.SIGINT)
        threading.Event().wait(0.2)
with StopSignal():
    threading.Thread(target=interrupt).start()
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):
        ctypes.CDLL(None).pthread_mutex_lock(mutex)
""")
    process.communicate(timeout=300)
    assert process.returncode == 130


def test_the_second_interrupt_is_at_once():
    with StopSignal() as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.requested(0)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
