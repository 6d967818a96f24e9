"""Ctrl-C and SIGTERM: a run saves and ends, and the third Ctrl-C ends a process that waits."""

import os
import signal
import threading

import pytest

from gspmd_lm.runtime.preemption import StopSignal
from tests.launched import launch, output


def test_sigterm_only_ever_asks_and_the_handlers_come_back():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    asked = []
    with StopSignal(lambda: asked.append(1)):
        assert not asked
        signal.raise_signal(signal.SIGTERM)
        assert len(asked) == 1
        signal.raise_signal(signal.SIGTERM)
        assert len(asked) == 2
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_another_thread_than_the_main_one_handles_no_signals():
    """Python refuses it, and a program may train in a thread."""
    before, entered = signal.getsignal(signal.SIGTERM), []

    def run():
        with StopSignal(lambda: None):
            entered.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert entered == [before] == [signal.getsignal(signal.SIGTERM)]


def test_the_file_that_python_tells_of_signals_comes_back():
    """An event loop has one, as in notebooks."""
    reading, written = os.pipe()
    os.set_blocking(written, False)
    before = signal.set_wakeup_fd(written)
    try:
        with StopSignal(lambda: None):
            pass
        assert signal.set_wakeup_fd(before) == written
    finally:
        signal.set_wakeup_fd(before)
        os.close(reading)
        os.close(written)


def test_the_handler_of_a_library_comes_back():
    """jax.distributed has one, if a program started it by itself. Python does not know of it."""
    process = launch("""
import ctypes, os, signal
from gspmd_lm.runtime.preemption import StopSignal
libc, seen = ctypes.CDLL(None), []
handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(seen.append)
libc.signal(signal.SIGTERM, handler)
with StopSignal(lambda: seen.append("asked")):
    os.kill(os.getpid(), signal.SIGTERM)
os.kill(os.getpid(), signal.SIGTERM)
print(seen)
""")
    assert output(process)[0] == "['asked', 15]\n"


def test_the_third_interrupt_ends_a_process_that_waits_in_a_library():
    """Python calls its handlers only when the wait is over; a mutex that is locked already stands for any such wait."""
    process = launch("""
import ctypes, os, signal, threading
from gspmd_lm.runtime.preemption import StopSignal
def interrupt():
    for _ in range(3):
        os.kill(os.getpid(), signal.SIGINT)
        threading.Event().wait(0.2)
with StopSignal(lambda: None):
    threading.Thread(target=interrupt).start()
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):
        ctypes.CDLL(None).pthread_mutex_lock(mutex)
""")
    process.communicate(timeout=300)
    assert process.returncode == 130


def test_the_second_interrupt_is_at_once():
    asked = []
    with StopSignal(lambda: asked.append(1)):
        signal.raise_signal(signal.SIGINT)
        assert asked
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
