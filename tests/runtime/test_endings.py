"""Ctrl-C and SIGTERM: a run saves and ends, a process that waits is ended, and what it holds is given back first."""

import os
import re
import signal
import threading

import pytest

from gspmd_lm.errors import STOPPED, WRONG_INPUT, InputError, RunFailed, Stopped, exit_code
from gspmd_lm.runtime import endings
from gspmd_lm.runtime.endings import StopSignal
from tests.launched import ROOT, launch, output


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
from gspmd_lm.errors import STOPPED, WRONG_INPUT, InputError, RunFailed, Stopped, exit_code
from gspmd_lm.runtime import endings
from gspmd_lm.runtime.endings import StopSignal
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
from gspmd_lm.errors import STOPPED, WRONG_INPUT, InputError, RunFailed, Stopped, exit_code
from gspmd_lm.runtime import endings
from gspmd_lm.runtime.endings import StopSignal
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
    assert process.returncode == STOPPED


def test_the_second_interrupt_is_at_once():
    asked = []
    with StopSignal(lambda: asked.append(1)):
        signal.raise_signal(signal.SIGINT)
        assert asked
        with pytest.raises(Stopped) as error:
            signal.raise_signal(signal.SIGINT)
    assert exit_code(error.value) == STOPPED


def test_the_exit_codes_are_those_of_the_documents():
    """A loop that somebody wrote in a shell knows them, too."""
    errors = InputError(""), RunFailed(""), OSError(), KeyboardInterrupt(), Stopped()
    assert [exit_code(error) for error in errors] == [2, 1, 1, 130, 75]
    codes = re.findall(r"^\| (\d+) \|", (ROOT / "docs/pods.md").read_text(), re.M)
    assert codes == ["0", str(STOPPED), str(WRONG_INPUT)] == ["0", "75", "2"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_where_nothing_is_to_be_saved_one_signal_ends_a_process_that_waits_after_its_last_acts(number):
    process = launch(f"""
import ctypes, os, threading
from gspmd_lm.runtime import endings
endings.add_last_act(lambda code, message: print("told", code, message[:18], flush=True))
def fail(code, message):
    raise OSError("no network")
endings.add_last_act(fail)
with endings.StopSignal(), endings.giving_back(lambda: print("given back", flush=True)):
    threading.Timer(0.3, os.kill, (os.getpid(), {number:d})).start()
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):
        ctypes.CDLL(None).pthread_mutex_lock(mutex)
""")
    out, err = process.communicate(timeout=300)
    assert process.returncode == STOPPED
    assert out == "told 75 stopped on request\ngiven back\n"
    assert "stopped on request; nothing had to be saved" in err and "at the end of this process: no network" in err


def test_what_is_held_is_given_back_once():
    given = []
    with endings.giving_back(lambda: given.append(1)):
        assert not given
        endings.do_last_acts(0, "")
        assert given == [1]
    assert given == [1]
    with pytest.raises(ValueError, match="x"), endings.giving_back(lambda: given.append(2)):
        raise ValueError("x")
    endings.do_last_acts(0, "")
    assert given == [1, 2]


def test_an_act_that_never_ends_does_not_keep_a_process(monkeypatch):
    codes, forever = [], threading.Event()
    monkeypatch.setattr(endings, "LAST_S", 0.1)
    monkeypatch.setattr(endings, "_acts", [lambda code, message: forever.wait(60)])
    monkeypatch.setattr(endings.os, "_exit", codes.append)
    endings.end(STOPPED)
    assert codes == [STOPPED] and not forever.is_set()
    forever.set()
