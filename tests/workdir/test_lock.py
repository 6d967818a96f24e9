"""The lock of a workdir: one run at a time, on a file system and on an object store."""

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from unittest.mock import Mock

import fsspec
import pytest
from etils import epath

from gspmd_lm.errors import FAILED, InputError, RunFailed
from gspmd_lm.runtime import endings
from gspmd_lm.workdir import lock

SECONDS = {name: getattr(lock, name) for name in ("BEAT_S", "AGED_S", "STALE_S", "WAIT_S")}
HOLD = """
import sys, time
from etils import epath
from gspmd_lm.workdir import lock
with lock.hold(epath.Path(sys.argv[1]), print):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the lock of tmp_path."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_a_second_run_is_refused_and_told_who_holds_it(holder, tmp_path):
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(InputError) as error, lock.hold(epath.Path(tmp_path), print):
        pass
    message = str(error.value)
    assert message.startswith(f"{tmp_path}: process {holder.pid} on {os.uname().nodename}, since 20")
    assert message.endswith("is writing there\n  fix   wait for it or stop it, or give another --workdir")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_the_lock_of_a_dead_process_is_taken_over_and_said(holder, tmp_path):
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    said = []
    with lock.hold(epath.Path(tmp_path), said.append):
        assert json.loads((tmp_path / "lock.json").read_text())["process"] == os.getpid()
    assert said[0].startswith(f"{tmp_path}: the lock of process {holder.pid} on {os.uname().nodename}, since 20")
    assert said[0].endswith(", is taken over: that process is gone")
    assert not (tmp_path / "lock.json").exists()
    with lock.hold(epath.Path(tmp_path), said.append):
        assert len(said) == 1


@pytest.mark.parametrize("harm", ["moved", "emptied", "locked"])
def test_a_workdir_that_is_gone_is_said_and_leaving_it_hides_no_error(tmp_path, harm, monkeypatch):
    workdir = tmp_path / "run"
    with pytest.raises(RunFailed) as error, lock.exclusive(epath.Path(workdir), True, print) as check:
        check()
        (workdir / "config.yaml").touch()
        (workdir / "lock.json").unlink()
        check()
        if harm == "locked":
            monkeypatch.setattr(lock.Path, "unlink", lambda *args, **more: os.unlink(tmp_path))  # fails
            raise RunFailed("the first error")
        workdir.rename(tmp_path / "elsewhere")
        if harm == "emptied":
            workdir.mkdir()
        check()
    said = "the first error" if harm == "locked" else f"{workdir}: config.yaml and lock.json are gone; the folder was"
    assert str(error.value).startswith(said)


@pytest.mark.parametrize(("number", "kind"), [(errno.ENOSPC, RunFailed), (errno.EACCES, InputError)])
@pytest.mark.parametrize("place", ["os.makedirs", "filelock.FileLock.acquire"])
def test_a_start_on_a_full_disk_may_be_tried_again(tmp_path, monkeypatch, place, number, kind):
    monkeypatch.setattr(place, Mock(side_effect=OSError(number, os.strerror(number))))
    with pytest.raises(kind, match=os.strerror(number)), lock.exclusive(epath.Path(tmp_path / "run"), True, print):
        pass


@pytest.fixture
def store(monkeypatch):
    """An object store in memory whose locks beat fast."""
    for name, seconds in {"BEAT_S": 0.1, "AGED_S": 0.5, "STALE_S": 1.0, "WAIT_S": 1.5}.items():
        monkeypatch.setattr(lock, name, seconds)
    store = fsspec.filesystem("memory")
    store.makedirs("/run", exist_ok=True)
    yield store
    with contextlib.suppress(FileNotFoundError):
        store.rm("/run", recursive=True)


URL = "memory:///run/lock.json"


class Clock:
    """The time of a process that sleeps without waiting."""

    now_s = 0.0

    def monotonic(self):
        return self.now_s

    time = monotonic

    def sleep(self, seconds):
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(lock, "time", clock)
    return clock


def test_on_a_store_a_living_run_keeps_its_lock(store):
    said = []
    with lock._Beating(URL, said.append):
        first = json.loads(store.cat_file("/run/lock.json"))
        with pytest.raises(InputError, match="is writing there"), lock._Beating(URL, said.append):
            pass
        assert json.loads(store.cat_file("/run/lock.json"))["beat"] > first["beat"]
    assert len(said) == 1 and "holds the lock; waiting until it ends or is silent" in said[0]
    assert not store.exists("/run/lock.json")


def test_on_a_store_a_start_waits_for_the_run_before_it(store):
    said, entered = [], []
    first = lock._Beating(URL, said.append)
    first.__enter__()

    def second():
        with lock._Beating(URL, said.append):
            entered.append(time.monotonic())

    waiting = threading.Thread(target=second)
    waiting.start()
    time.sleep(0.3)
    left = time.monotonic()
    first.__exit__()
    waiting.join(180)
    assert entered and entered[0] >= left and len(said) == 1


def test_on_a_store_a_silent_lock_is_taken_over(store, clock):
    dead = {"process": 7, "host": "elsewhere", "since": "yesterday", "token": "x", "beat": clock.time() - 2}
    store.pipe_file("/run/lock.json", json.dumps(dead).encode())
    said = []
    with lock._Beating(URL, said.append):
        assert json.loads(store.cat_file("/run/lock.json"))["process"] == os.getpid()
    assert "the lock of process 7 on elsewhere, since yesterday, is taken over: it was silent" in said[-1]


def test_on_a_store_a_silent_lock_is_taken_over_whatever_it_says(store, clock):
    ahead = {"process": 7, "host": "elsewhere", "since": "tomorrow", "token": "x", "beat": clock.time() + 3600}
    for written in (json.dumps(ahead).encode(), b"", b"{\xff", b"[]"):
        store.pipe_file("/run/lock.json", written)
        said = []
        with lock._Beating(URL, said.append):
            assert json.loads(store.cat_file("/run/lock.json"))["process"] == os.getpid()
        who = "process 7 on elsewhere, since tomorrow," if b"7" in written else "a process that left no name"
        assert f"{who} holds the lock; waiting" in said[0] and f"the lock of {who} is taken over" in said[-1]


def test_on_a_store_the_lock_of_a_process_of_this_machine_that_is_gone_is_taken_over_at_once(store, clock):
    held = lock._Beating(URL, print).mine
    for life in (["another boot", *held["life"][1:]], [held["life"][0], "pid:[1]", held["life"][2]], held["life"]):
        store.pipe_file("/run/lock.json", json.dumps(held | {"life": life, "token": "x"}).encode())
        with lock._Beating(URL, print):
            assert clock.now_s > 0  # a process that lives here, or one that cannot be seen from here
        clock.now_s = 0.0
    dead = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    life, said = lock._read_life(dead.pid), []
    dead.kill()
    while lock._read_life(dead.pid):  # nobody has waited for it yet
        pass
    for process in (dead.pid, os.getpid()):  # its number may belong to another process since
        store.pipe_file("/run/lock.json", json.dumps(held | {"process": process, "life": life, "token": "x"}).encode())
        with lock._Beating(URL, said.append):
            assert clock.now_s == 0
        assert said[-1].endswith(", is taken over: that process is gone")
    dead.communicate()


@pytest.mark.parametrize("place", ["a store", "a folder"])
def test_a_process_that_any_thread_ends_gives_its_lock_back(store, place, tmp_path):
    def hold():
        return lock._Beating(URL, print) if place == "a store" else lock.hold(epath.Path(tmp_path), print)

    def is_held():
        return store.exists("/run/lock.json") if place == "a store" else (tmp_path / "lock.json").exists()

    with contextlib.ExitStack() as first:
        first.enter_context(hold())
        assert is_held()
        ending = threading.Thread(target=endings.do_last_acts, args=(75, "stopped"))
        ending.start()
        ending.join()
        assert not is_held()
        with hold():  # by another run, whose lock the first one leaves alone
            first.close()
            assert is_held()


@pytest.fixture
def ends(monkeypatch):
    """The codes and messages with which threads wanted to end this process."""
    ends = []
    monkeypatch.setattr(endings, "end", lambda code, message: ends.append((code, message)))
    return ends


@pytest.mark.parametrize("harm", ["taken", "taken and given back"])
def test_on_a_store_a_run_that_lost_its_lock_stops_or_is_ended(store, ends, harm):
    with lock._Beating(URL, print) as held:
        held.check()
        if harm == "taken":
            other = held.mine | {"token": "another", "process": 9, "host": "there"}
            store.pipe_file("/run/lock.json", json.dumps(other).encode())
        else:
            store.rm_file("/run/lock.json")
        until = time.monotonic() + 180
        while not ends and time.monotonic() < until:  # of a main thread that hangs
            time.sleep(0.05)
        said = "taken over by process 9 on there" if harm == "taken" else "the lock is gone: another run took it over"
        with pytest.raises(RunFailed, match=said):
            held.check()
        assert ends[0][0] == FAILED and said in ends[0][1]
    assert store.exists("/run/lock.json") == (harm == "taken")  # it is the other one's


def test_on_a_store_a_run_that_was_stopped_for_long_looks_at_its_lock_before_it_goes_on(store, clock, monkeypatch):
    with lock._Beating(URL, print) as held:
        held.ended.set()  # its thread has not come to beat yet
        held.thread.join(180)
        clock.now_s = 0.9 * lock.AGED_S
        store.pipe_file("/run/lock.json", json.dumps(held.mine | {"token": "another"}).encode())
        held.check()
        clock.now_s = 1.1 * lock.AGED_S
        with pytest.raises(RunFailed, match="taken over by"):
            held.check()


@pytest.mark.parametrize("error", [OSError, RuntimeError])  # stores raise others, too
def test_on_a_store_that_does_not_answer_nobody_loses_a_lock_and_a_run_may_end(store, clock, monkeypatch, error):
    with lock._Beating(URL, print) as held:
        monkeypatch.setattr(held.store, "cat_file", Mock(side_effect=error("no route to host")))
        clock.now_s = 100.0
        held.check()
        assert not held.lost


def test_on_a_store_a_new_host_waits_half_a_minute_for_one_that_was_lost_a_while_ago(store, clock, monkeypatch):
    for name, seconds in SECONDS.items():
        monkeypatch.setattr(lock, name, seconds)
    for age_s, least_s, most_s in ((5, 50, 65), (90, 30, 40)):
        clock.now_s = 1000.0
        lost = {"process": 7, "host": "gone", "since": "yesterday", "token": "x", "beat": clock.time() - age_s}
        store.pipe_file("/run/lock.json", json.dumps(lost).encode())
        with lock._Beating(URL, print):
            assert least_s <= clock.now_s - 1000 <= most_s


def test_on_a_store_a_run_that_ends_leaves_a_lock_that_is_not_its_own(store, monkeypatch):
    monkeypatch.setattr(lock, "BEAT_S", 3600.0)  # it ends before it can notice
    with lock._Beating(URL, print) as held:
        store.pipe_file("/run/lock.json", json.dumps(held.mine | {"token": "another"}).encode())
    assert not held.lost and json.loads(store.cat_file("/run/lock.json"))["token"] == "another"


def test_on_a_store_a_living_run_whose_clock_is_behind_keeps_its_lock(store, clock, monkeypatch):
    def sleep(seconds):
        """Time goes by, and every BEAT_S the holder writes what its own clock says."""
        before = clock.now_s // lock.BEAT_S
        Clock.sleep(clock, seconds)
        if clock.now_s // lock.BEAT_S > before:
            beat()

    def beat():
        behind_s = clock.now_s - 100 * lock.STALE_S
        store.pipe_file("/run/lock.json", json.dumps({"process": 7, "beat": behind_s}).encode())

    monkeypatch.setattr(clock, "sleep", sleep)
    beat()
    with pytest.raises(InputError, match=r"process 7 on .* is writing there"), lock._Beating(URL, print):
        pass
    assert lock.WAIT_S < clock.now_s < 2 * lock.WAIT_S and b'"process": 7' in store.cat_file("/run/lock.json")


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK])
def test_a_file_system_without_locks_has_the_lock_of_a_store(tmp_path, monkeypatch, code):
    for name, seconds in {"BEAT_S": 0.1, "AGED_S": 0.3, "STALE_S": 0.5, "WAIT_S": 0.5}.items():
        monkeypatch.setattr(lock, name, seconds)

    monkeypatch.setattr("fcntl.flock", Mock(side_effect=OSError(code, os.strerror(code))))
    with lock.hold(epath.Path(tmp_path), print) as check:
        check()
        assert "beat" in json.loads((tmp_path / "lock.json").read_text())
        with pytest.raises(InputError, match="is writing there"), lock.hold(epath.Path(tmp_path), print):
            pass
    assert not (tmp_path / "lock.json").exists()
