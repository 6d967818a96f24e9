"""A lock with which one run at a time writes to a workdir. A run that died does not keep it.

Whatever ends a process, the process gives the lock back first, unless it is killed.

On a file system this is the system's own lock, which ends with the process that holds it. An object store has no locks.
There it is an object that can be created only if it does not exist, and that its holder rewrites as long as it lives.
A file system without locks has such an object, too.
"""

import contextlib
import datetime
import errno
import functools
import json
import os
import secrets
import shlex
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import filelock
from etils import epath

from gspmd_lm import files
from gspmd_lm.errors import FAILED, InputError, RunFailed
from gspmd_lm.files import json_object
from gspmd_lm.runtime import endings
from gspmd_lm.workdir.layout import CONFIG, HOLDER, LOCK

BEAT_S = 10.0
AGED_S = 30.0  # how long a holder may be silent whose last beat is older than STALE_S by the clocks of both hosts
STALE_S = 60.0  # how long any holder may be silent
WAIT_S = 300.0  # how long a start waits for a holder that lives: it may be a run that saves and ends

Say = Callable[[str], None]


@contextlib.contextmanager
def hold(workdir: epath.Path, say: Say) -> Iterator[Callable[[], None]]:
    """A context in which this process alone writes to an existing workdir. Gives a check that this is still so.

    A lock that a dead process left is taken over, and `say` is told so. On an object store a start waits until the lock
    is stale, so that a job may be started again at once.

    Raises InputError if another run holds the lock, with its process, its host and the time since when, and RunFailed
    if the disk is full. The check raises RunFailed if the lock was lost.
    """
    if files.is_remote(workdir):
        with _Beating(f"{workdir}/{HOLDER}", say) as beating:
            yield beating.check
        return
    # Any thread may end this process, and give the lock back. A soft lock of a host that is lost would never be free.
    lock = filelock.FileLock(workdir / LOCK, thread_local=False, fallback_to_soft=False)
    holder = Path(workdir / HOLDER)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout as error:
        raise already_running(workdir, _read(holder)) from error
    except OSError as error:
        if error.errno in files.NO_LOCKS:
            with _Beating(str(holder.absolute()), say) as beating:
                yield beating.check
            return
        raise _unwritable(workdir, error, "written in") from error

    def give_back() -> None:
        with contextlib.suppress(OSError):  # what the folder does not let the run write is said by the run
            holder.unlink(missing_ok=True)
        lock.release()

    with endings.giving_back(give_back):
        if left := _read(holder):
            say(f"{workdir}: the lock of {_describe_holder(left)} is taken over: that process is gone")
        files.replace(holder, json.dumps(_me()))
        yield functools.partial(_check_there, Path(workdir))


@contextlib.contextmanager
def exclusive(workdir: epath.Path, is_main: bool, say: Say) -> Iterator[Callable[[], None]]:
    """A context in which a workdir exists and this run alone writes to it. Gives the check of `hold`.

    The first process alone holds the lock. A folder that was made here and stayed empty is removed again. Raises
    InputError if the folder cannot be made, or if another run writes to it, and RunFailed if the disk is full.
    """
    path = Path(workdir)
    if not files.is_remote(workdir) and path.is_symlink() and not path.exists():
        raise InputError(
            f"{workdir}: a symbolic link to {path.readlink()}, which is not there\n  fix   make that folder"
        )
    if not is_main:
        yield lambda: None
        return
    fresh = not workdir.exists()
    try:
        workdir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(workdir, error, "written") from error
    with hold(workdir, say) as check:
        try:
            yield check
        finally:
            with contextlib.suppress(OSError):  # it is gone, say
                if fresh and {file.name for file in workdir.iterdir()} <= {LOCK, HOLDER}:
                    workdir.rmtree()


def _check_there(workdir: Path) -> None:
    """Raises RunFailed if a folder has lost what a run keeps in it: it was moved or deleted, or its disk is gone.

    Otherwise the run would go on in a new folder of that name.
    """
    if not any((workdir / name).exists() for name in (HOLDER, CONFIG)):
        raise RunFailed(
            f"{workdir}: {CONFIG} and {HOLDER} are gone; the folder was moved, emptied or unmounted during "
            "the run\n  fix   put it back, then start the same command: it goes on from the newest checkpoint there"
        )


def already_running(workdir: object, holder: dict[str, Any] | None) -> InputError:
    """The error for a second run."""
    who = _describe_holder(holder) if holder else "another process"
    return InputError(f"{workdir}: {who} is writing there\n  fix   wait for it or stop it, or give another --workdir")


def _unwritable(workdir: epath.Path, error: OSError, what: str) -> InputError | RunFailed:
    """The error for a folder in which nothing can be written. On a full disk, a later start may find room."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return RunFailed(f"{workdir}: {files.reason(error)}\n  fix   make room there, then start the same command")
    return InputError(f"{workdir}: cannot be {what} ({files.reason(error)})\n  fix   --workdir=DIR")


def _me() -> dict[str, Any]:
    return {
        "process": os.getpid(),
        "life": _read_life("self"),
        "host": socket.gethostname(),
        "since": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(sys.argv),
    }


def _read_life(process: Any) -> list[str] | None:
    """An identity that no other process ever has; None if the process is gone, or if the system has no /proc.

    It is the boot of the machine, the namespace of process numbers (a container has its own), and when it started.
    """
    try:
        state, *numbers = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return None if state in "ZX" else [boot, os.readlink("/proc/self/ns/pid"), numbers[18]]
    except OSError:
        return None


def _is_gone(holder: dict[str, Any]) -> bool:
    """Whether a holder was a process of this machine that has ended. False if that cannot be known."""
    life, mine = holder.get("life"), _read_life("self")
    if not isinstance(life, list) or mine is None or life[:-1] != mine[:-1]:
        return False
    return _read_life(holder.get("process")) != life


def _describe_holder(holder: dict[str, Any]) -> str:
    return f"process {holder.get('process')} on {holder.get('host')}, since {holder.get('since')},"


def _read(path: Path) -> dict[str, Any] | None:
    try:
        return _parse_lock(path.read_bytes())
    except OSError:
        return None


def _parse_lock(written: bytes) -> dict[str, Any] | None:
    try:
        return json_object(written, HOLDER)
    except InputError:
        return None


class _Beating:
    """A lock that is an object of a store: created only if it does not exist, and rewritten every BEAT_S.

    It is stale if its holder was a process of this machine that is gone. It is stale if a waiting start saw no new beat
    for STALE_S. It is also stale if its last beat is older than STALE_S and no new one came for AGED_S. The first two
    rules need no clock but the waiting process's own.

    A holder may be alive and silent: its process was stopped, or it did not reach the store. So a holder that has not
    beaten for AGED_S reads the lock before it goes on, and one that finds its lock taken ends.
    """

    def __init__(self, url: str, say: Say):
        import fsspec

        self.store, self.path = fsspec.core.url_to_fs(url, use_listings_cache=False)
        self.url, self.say = url, say
        self.mine = _me() | {"token": secrets.token_hex(8)}
        self.lost = ""
        self.beaten_at = 0.0  # by time.monotonic
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._beat, daemon=True)

    def __enter__(self) -> "_Beating":
        with contextlib.ExitStack() as stack:
            stack.enter_context(endings.giving_back(self._give_back))
            self._acquire()
            self.thread.start()
            self.held = stack.pop_all()
        return self

    def __exit__(self, *_: Any) -> None:
        self.held.close()

    def _give_back(self) -> None:
        self.ended.set()
        if self.lost:
            return
        if self.thread.is_alive():
            self.thread.join(BEAT_S)
        try:
            if (held := _parse_lock(self._content())) and held.get("token") == self.mine["token"]:
                self.store.rm_file(self.path)
        except Exception as error:  # a store raises what it likes, and the run has done its work
            self.say(f"warning: {self.url}: the lock could not be given back: {error}")

    def check(self) -> None:
        """Raises RunFailed if the lock was lost."""
        if time.monotonic() - self.beaten_at > AGED_S:
            with contextlib.suppress(Exception):  # a store that does not answer takes no checkpoint either
                self._renew()
        if self.lost:
            raise RunFailed(self.lost)

    def _acquire(self) -> None:
        waited_from = seen_at = time.monotonic()
        seen: bytes | None = None
        while not self._create():
            written, now = self._content(), time.monotonic()
            holder = _parse_lock(written)
            who = _describe_holder(holder) if holder else "a process that left no name"
            if written != seen:
                if seen is None:
                    self.say(f"{self.url}: {who} holds the lock; waiting until it ends or is silent")
                elif now - waited_from > WAIT_S:
                    raise already_running(self.url.rpartition("/")[0], holder)
                seen, seen_at = written, now
            silent_s, beat = now - seen_at, holder.get("beat") if holder else None
            aged = isinstance(beat, float) and time.time() - beat > STALE_S and silent_s >= AGED_S
            gone = holder is not None and _is_gone(holder)
            if gone or aged or silent_s > STALE_S:
                why = "that process is gone" if gone else f"it was silent for {silent_s:.0f} s"
                self.say(f"{self.url}: the lock of {who} is taken over: {why}")
                with contextlib.suppress(FileNotFoundError):
                    self.store.rm_file(self.path)
                continue
            time.sleep(min(BEAT_S / 3, 5.0))

    def _create(self) -> bool:
        try:
            self._write(mode="create")
        except FileExistsError:
            return False
        return True

    def _write(self, **how: Any) -> None:
        began = time.monotonic()
        self.store.pipe_file(self.path, json.dumps(self.mine | {"beat": time.time()}).encode(), **how)
        self.beaten_at = began

    def _content(self) -> bytes:
        try:
            return self.store.cat_file(self.path)
        except OSError:
            return b""

    def _renew(self) -> None:
        """Writes the lock anew, unless another run has it, or had it and has ended. Raises what the store raises."""
        try:
            holder = _parse_lock(self.store.cat_file(self.path)) or {}
        except FileNotFoundError:
            holder = None
        if holder and holder.get("token") != self.mine["token"]:
            why = f"the lock was taken over by {_describe_holder(holder)} while this process was silent"
        elif holder is None:
            why = "the lock is gone: another run took it over and has ended, or the folder was deleted"
        else:
            self._write()
            return
        self.lost = f"{self.url}: {why}\n  fix   see which of the two runs is to go on, and start it again"

    def _beat(self) -> None:
        while not self.ended.wait(BEAT_S):
            if self.lost:  # and the main thread waits for something: a checkpoint may be under way
                endings.end(FAILED, self.lost)
            try:
                self._renew()
            except Exception as error:  # the store may answer at the next beat
                self.say(f"warning: {self.url}: the lock could not be renewed: {error}")
