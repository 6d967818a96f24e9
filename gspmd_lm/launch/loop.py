"""The loop around a run: it asks for a slice, starts the run, and goes on after a preemption or a failure."""

import contextlib
import dataclasses
import secrets
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import filelock

from gspmd_lm import files
from gspmd_lm.errors import STOPPED, WRONG_INPUT, InputError, RunFailed
from gspmd_lm.launch import logs
from gspmd_lm.launch.budget import Budget
from gspmd_lm.launch.place import CommandFailed, Place, State
from gspmd_lm.runtime import endings
from gspmd_lm.units import plural

RECORD = "launch.json"  # in the folder of the logs: what the same command, given again, must know
SAME_STEP = 3  # failures at one step, after which another attempt would fail there too
UNREACHABLE = 10  # the same for processes that are only out of sight


@dataclasses.dataclass(frozen=True)
class Waits:
    """How long the loop waits, in seconds. Tests take shorter ones."""

    poll: float = 1.0  # between two looks at the logs
    ask: float = 30.0  # between two questions about a slice that is waited for
    look: float = 120.0  # between two questions about the slice of a run that goes on
    retry: float = 10.0  # after a failure; twice as long after each further one, up to `longest`
    longest: float = 600.0
    others: float = 60.0  # that processes get to end by themselves after one of them has ended early
    stop: float = 600.0  # that processes get to save


@dataclasses.dataclass
class Record:
    """What a launch remembers. `token` marks the slices that it creates, so that it deletes no others."""

    token: str
    attempt: int = 0  # the number of the newest one
    is_open: bool = False  # whether its processes may still go on
    train: str = ""  # its flags


class _Stopped(Exception):
    """The run is not finished, and no further attempt is made. The message says why."""


class Launch:
    """One launch: a job at a place."""

    def __init__(self, place: Place, usd_per_hour: float, tell: Callable[[str], None], waits: Waits | None = None):
        """usd_per_hour: of the whole slice; 0 where no price is known. tell: prints a line."""
        self.place, self.job, self.waits, self._tell = place, place.job, waits or Waits(), tell
        self.budget = Budget(self.job, usd_per_hour)
        self.folder = files.expand_user(self.job.logs).absolute()
        self.folder.mkdir(parents=True, exist_ok=True)
        record = self.folder / RECORD
        fix = "go on with the version that wrote it, or give another --name"
        self._record = files.read_fields(Record, record, fix) if record.exists() else Record(secrets.token_hex(8))
        self._has_code = False  # whether the slice has the code that stands here
        self._retries, self._failures, self._last_step = 0, 0, -1
        self._stop_asked = False

    def run(self) -> int:
        """The exit code: 0 for a finished run, STOPPED with work left, WRONG_INPUT.

        Raises RunFailed if a step fails again and again, or if the slice cannot be had.
        """
        with self._signals(), self._alone():
            try:
                code = self._repeat()
            except _Stopped as stopped:
                self._say(f"{stopped}. The run is not finished: the same command goes on from the newest checkpoint")
                code = STOPPED
            except KeyboardInterrupt:
                self._say(f"launch ends at once, and leaves {self.job.name} as it is")
                raise
            except BaseException:
                self._give_back()
                raise
            self._give_back()
            return code

    def _repeat(self) -> int:
        while True:
            self._get_ready()
            code, folder = self._attempt()
            if code == 0:
                self._say("the run is finished")
                return 0
            for line in logs.last_lines(folder) if code != STOPPED else ():
                self._say(line)
            if code == WRONG_INPUT:
                return WRONG_INPUT
            self._count(code, logs.step(folder))

    # A slice that is ready

    def _get_ready(self) -> None:
        """Returns when processes can be started: there is a slice, and it has the code."""
        failures, said = 0, None
        while True:
            self._check_budget()
            try:
                state = self.place.state()
                if state is not said and self.place.is_rented:
                    self._say(f"{self.job.name} is {state.value}")
                said = state
                if state is State.READY:
                    self.budget.hold()
                    self._bring_code()
                    return
                self.budget.release()
                self._has_code = False
                if state is State.WAITING:
                    self._pause(self.waits.ask)
                    continue
                self._close_attempt()
                if state is State.ABSENT:
                    self._say(f"asking for {self.job.accelerator}{' spot' * self.job.spot}")
                    self._save_record()  # before the request: what it creates has the token
                    self.place.create(self._record.token)
                elif self.place.owner() == self._record.token:
                    self._say(f"{self.job.name} was lost; it is deleted and asked for again")
                    self.place.delete()
                else:
                    raise RunFailed(f"{self.job.name} was lost, and launch did not create it\n  fix   delete it")
            except CommandFailed as error:
                self._say(str(error))
                if error.is_final:
                    raise RunFailed(f"{self.job.name} cannot be had: {error}") from error
                failures += 1
                if failures >= UNREACHABLE and self.budget.is_held:
                    raise RunFailed(f"{self.job.name} is there and cannot be used: {error}") from error
                self._pause(self.waits.retry * 2 ** min(failures, 10))

    def _bring_code(self) -> None:
        """Sends the code, unless processes of an earlier launch, which may go on, have it and the same flags."""
        if self._record.is_open and self._record.train != self.job.train:
            self._say("the flags of train have changed: the processes of the earlier launch are ended")
            self.place.kill(self._attempt_name)
            self._close_attempt()
        if not self._has_code and not self._record.is_open:
            self.place.prepare()
            self._has_code = True

    def _give_back(self) -> None:
        """Deletes the slice at the end, if that is wanted and launch created it."""
        if not self.place.is_rented:
            return
        try:
            state = self.place.state()
            if state is State.ABSENT:
                return
            if not self.job.autodelete:
                price = self.budget.usd_per_hour
                costs = f"{price:.2f} USD an hour" if price else "money"
                self._say(f"{self.job.name} is {state.value} and may cost {costs} until it is deleted")
            elif self.place.owner() == self._record.token:
                self.place.delete()
                self.budget.release()
                self._say(f"{self.job.name} is deleted, after {self.budget.spent}")
            else:
                self._say(f"{self.job.name} stays: launch did not create it")
        except CommandFailed as error:
            self._say(f"{self.job.name} may cost money: {error}")

    # An attempt

    @property
    def _attempt_name(self) -> str:
        return f"{self._record.token}-{self._record.attempt}"

    def _attempt(self) -> tuple[int | None, Path]:
        """The exit code of the next attempt, None if its processes are out of sight; and the folder of its logs."""
        if not self._record.is_open:
            earlier = [int(one.name) for one in self.folder.iterdir() if one.name.isdecimal()]
            number = 1 + max([self._record.attempt, *earlier])
            self._record = Record(self._record.token, number, self.place.lasts, self.job.train)
            self._save_record()
        folder = self.folder / str(self._record.attempt)
        self._say(f"attempt {self._record.attempt}: logs in {folder}")
        folder.mkdir(exist_ok=True)
        followers = self.place.run(self._attempt_name, folder)
        self._follow(followers, folder)
        code = self.place.exit_code(followers, folder)
        if code is not None:
            self._close_attempt()
        return code, folder

    def _close_attempt(self) -> None:
        self._record.is_open = False
        self._save_record()

    def _save_record(self) -> None:
        files.replace_json(self.folder / RECORD, dataclasses.asdict(self._record))

    def _follow(self, followers: Sequence[subprocess.Popen[bytes]], folder: Path) -> None:
        """Shows the lines of the first process until all have ended, or are ended here."""
        first = logs.Follower(folder / "0.log")
        try:
            self._wait_for(followers, folder, first)
        finally:
            for follower in followers:
                if follower.poll() is None:
                    endings.kill_group(follower.pid)  # with what it has started: gcloud starts ssh
                follower.wait()
        self._show(first.lines())

    def _wait_for(self, followers: Sequence[subprocess.Popen[bytes]], folder: Path, first: logs.Follower) -> None:
        """Returns when all have ended, when the slice is lost, or when those that are left have been killed."""
        looked, ended, stopped = time.monotonic(), None, None  # since when one has ended early, and all are to stop
        while None in [follower.poll() for follower in followers]:  # each is asked: `_codes` reads the answers
            time.sleep(self.waits.poll)
            self._show(first.lines())
            now = time.monotonic()
            if now - looked > self.waits.look:
                looked = now
                if self._is_lost():
                    return
            codes = self._codes(followers, folder)
            ended = ended or (now if codes else None)
            is_left = ended is not None and now - ended > self.waits.others
            starts = codes == {STOPPED} and logs.step(folder) < 0  # the others have nothing to save, and wait for it
            why = (
                self.budget.over or "asked to stop" * self._stop_asked or "a process was stopped" * (is_left or starts)
            )
            if why and stopped is None and codes <= {STOPPED}:
                stopped = now
                self._say(f"{why}: the processes save and end")
                self._try(self.place.stop)
            if (is_left and codes - {STOPPED}) or (stopped and now - stopped > self.waits.stop):
                self._say("the processes that have not ended are killed")
                self._try(self.place.kill)
                return

    def _codes(self, followers: Sequence[subprocess.Popen[bytes]], folder: Path) -> set[int]:
        """The exit codes of the processes that have failed or stopped, of which others may still go on."""
        codes = [logs.read_code(follower.returncode or 0) for follower in followers]
        return {code for code in [*codes, *map(logs.exit_code, logs.files(folder))] if code}

    def _is_lost(self) -> bool:
        """Whether the slice is no longer there. If nobody answers it may be, and the run itself has not ended."""
        try:
            return self.place.state() in (State.LOST, State.ABSENT)
        except CommandFailed as error:
            self._say(str(error))
            return False

    def _try(self, do: Callable[[str], None]) -> None:
        try:
            do(self._attempt_name)
        except CommandFailed as error:
            self._say(str(error))

    def _count(self, code: int | None, step: int) -> None:
        """Counts an attempt after which the run is not finished, and waits. Raises what ends the loop if it was one too
        many."""
        lost = code is None and self._is_lost()
        how = {None: "lost its processes", STOPPED: "stopped with work left"}.get(code, f"failed with exit code {code}")
        at = f" at step {step}" if step >= 0 else ""
        self._say(f"attempt {self._record.attempt} {'was preempted' if lost else how}{at}")
        self._check_budget()
        failed = not lost and code != STOPPED
        if failed:
            self._failures = self._failures + 1 if step <= self._last_step else 1
            if self._failures >= (UNREACHABLE if code is None else 1 if self.place.restarts_itself else SAME_STEP):
                raise RunFailed(
                    f"{plural(self._failures, 'attempt')} failed{at}, and a further one would too\n"
                    f"  fix   read {self.folder}, mend the cause, then start the same command"
                )
        self._last_step = max(step, self._last_step)
        self._retries += 1
        if self._retries > self.job.max_retries:
            raise _Stopped(f"max_retries: the run was started {self._retries} times")
        if failed:
            if code is None and self._failures > 1:  # they may never have been there
                self._try(self.place.kill)
                self._close_attempt()
                self._has_code = False
            self._pause(self.waits.retry * 2 ** (self._failures - 1))

    def _check_budget(self) -> None:
        if over := self.budget.over or "asked to stop" * self._stop_asked:
            raise _Stopped(over)

    def _pause(self, seconds: float) -> None:
        """Waits, but not longer than `longest`, and not when it is time to stop."""
        until = time.monotonic() + min(seconds, self.waits.longest)
        while time.monotonic() < until and not self._stop_asked and not self.budget.over:
            time.sleep(min(self.waits.poll, seconds))

    # What a person sees

    def _say(self, text: str) -> None:
        """Prints a text, and keeps it in a file that is there when the terminal is closed."""
        with contextlib.suppress(OSError):  # the disk is full, say, and the run goes on
            logs.add_line(self.folder / logs.OF_LAUNCH, f"{time.strftime('%F %T')} {text}")
        self._show([text])

    def _show(self, lines: Iterator[str] | Sequence[str]) -> None:
        with contextlib.suppress(OSError):  # the terminal was closed, and the run goes on
            for line in lines:
                self._tell(line)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """A context in which no other launch of this machine works on the same run."""
        try:
            with files.lock(self.folder / "lock", timeout_s=0):
                yield
        except filelock.Timeout as error:
            raise InputError(
                f"{self.folder}: another launch of {self.job.name} is at work\n  fix   end it, or give another --name"
            ) from error

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """A context in which SIGTERM or Ctrl-C asks the run to stop, a second one ends launch at once, and the end of
        the terminal changes nothing."""

        def stop(*_: Any) -> None:
            if self._stop_asked:
                raise KeyboardInterrupt
            self._stop_asked = True

        wanted = {signal.SIGINT: stop, signal.SIGTERM: stop, signal.SIGHUP: signal.SIG_IGN}
        before = {number: signal.signal(number, handler) for number, handler in wanted.items()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
