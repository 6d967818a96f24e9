"""The interface of the places of a run, the commands of other programs, and the meaning of their exit codes."""

import abc
import enum
import shlex
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

from gspmd_lm.errors import STOPPED, WRONG_INPUT, InputError
from gspmd_lm.launch import logs as log_files
from gspmd_lm.launch.job import Job

CALL_S = 300  # for a command that asks something; a slice may take longer to create, which is waited for by asking
CREATE_S = 1800
ABOUT = "# By launch --print: one start of the run, without the checks, the budgets and the loop of launch."
_WIDTH = 116  # of a script


class State(enum.Enum):
    """The state of a slice, or of a job's set of processes."""

    ABSENT = "absent"  # nothing has its name
    WAITING = "waiting"  # it was asked for, or is being mended or deleted
    READY = "ready"  # processes can be started
    LOST = "lost"  # it was preempted or has failed, and must be deleted before it is asked for again


class CommandFailed(Exception):
    """Another program has failed, or did not answer in time. The message says which one, and its last lines."""

    def __init__(self, message: str, is_final: bool = False):
        super().__init__(message)
        self.is_final = is_final  # whether the same command would fail again


class Place(abc.ABC):
    """Where a run's processes are. Each method is one step of the loop, which decides when it is taken.

    What a place does not say itself is true of one at which nothing is rented, and where the code is already.
    """

    needed: Sequence[str] = ()  # keys of the job without which nothing can be asked for
    tools: Sequence[str] = ()  # programs that must be installed here
    lasts = True  # whether processes go on when launch ends
    restarts_itself = False  # whether an attempt that has failed was already started again as often as it may be
    sees_this_folder = False  # whether its hosts see the files of this machine under the same paths
    is_rented = False  # whether there is a slice, which costs money until it is deleted

    def __init__(self, job: Job):
        self.job = job

    def check(self) -> None:  # noqa: B027
        """Raises InputError for what is wrong and can be known before anything is asked for."""

    # A slice

    def state(self) -> State:
        """The present state. Raises CommandFailed if nobody answers."""
        return State.READY

    def owner(self) -> str:
        """The token with which the present slice was created; '' for one that was created by something else."""
        return ""

    def create(self, token: str) -> None:
        """Asks for a slice that carries the token. Raises CommandFailed; the slice may be there all the same."""
        raise AssertionError(f"nothing is rented at {self.job.place}")

    def prepare(self) -> None:  # noqa: B027
        """Sends the code that stands here to a slice that is ready, and installs it. Raises CommandFailed."""

    def delete(self) -> None:
        """Gives the slice back. Raises CommandFailed."""
        raise AssertionError(f"nothing is rented at {self.job.place}")

    # The processes of an attempt

    @abc.abstractmethod
    def run(self, attempt: str, logs: Path) -> list[subprocess.Popen[bytes]]:
        """Starts the processes of an attempt and follows them: each writes a file in `logs`, until all have ended.

        What is returned follows them, each in a session of its own. Called again for the same attempt, it follows the
        processes that it finds.
        """

    def exit_code(self, followers: Sequence[subprocess.Popen[bytes]], logs: Path) -> int | None:
        """The exit code of an attempt whose followers have ended; None if a process was lost sight of."""
        return combine(map(log_files.exit_code, log_files.files(logs)))

    @abc.abstractmethod
    def stop(self, attempt: str) -> None:
        """Asks the processes to save and end. Raises CommandFailed."""

    @abc.abstractmethod
    def kill(self, attempt: str) -> None:
        """Ends what is left of the processes at once. Raises CommandFailed."""

    @abc.abstractmethod
    def script(self) -> str:
        """The commands of one round of the loop, as a file for people who keep their own."""


def check_tools(place: Place) -> None:
    """Raises InputError if a program that the place needs is not installed here."""
    if missing := [tool for tool in place.tools if shutil.which(tool) is None]:
        raise InputError(
            f"place {place.job.place}: {' and '.join(missing)} not found\n  fix   install it, and log in with it"
        )


def call(command: Sequence[str], timeout_s: float = CALL_S, stdin: str | None = None) -> str:
    """The output of a command. Raises CommandFailed if it fails or takes longer than `timeout_s`."""
    name = " ".join(command[:5])
    try:
        done = subprocess.run(
            command,
            input=stdin,
            stdin=None if stdin is not None else subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            errors="replace",
        )
    except subprocess.TimeoutExpired as error:
        raise CommandFailed(f"{name}: no answer for {timeout_s:.0f} s") from error
    if done.returncode:
        last = "\n".join(done.stderr.strip().splitlines()[-4:]) or done.stdout[-500:]
        raise CommandFailed(f"{name}: exit code {done.returncode}: {last}")
    return done.stdout


def start(command: Sequence[str], output: Path) -> subprocess.Popen[bytes]:
    """A process in a session of its own, which writes into `output`: Ctrl-C reaches launch alone, and so does the end
    of the terminal."""
    with log_files.open_log(output) as log:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )


def with_cache(job: Job) -> list[str]:
    """The flags of train with the workdir, and with a place beside it for compiled programs: new hosts start warm."""
    flags = [*job.arguments, f"--workdir={job.workdir}"]
    if not any(flag.lstrip("-").replace("-", "_").startswith("compile_cache") for flag in flags):
        flags.append(f"--compile_cache={job.workdir.rstrip('/').rpartition('/')[0]}/compiled")
    return flags


def script_of(*steps: Sequence[str] | str) -> str:
    """A shell script of steps: commands as lists of words, and lines as they are.

    A long command goes over several lines, and a word of several lines stands as people write it.
    """
    return "\n".join(["#!/usr/bin/env bash", ABOUT, "set -euo pipefail", *map(_step, steps), ""])


def _step(step: Sequence[str] | str) -> str:
    if isinstance(step, str):
        return step
    lines, line = [], ""
    for word in map(_quote, step):
        if line and len(line) + len(word.partition("\n")[0]) > _WIDTH:
            lines.append(line)
            line = f"  {word}"
        else:
            line = f"{line} {word}".lstrip() if not lines else f"{line} {word}"
    return " \\\n".join([*lines, line])


def _quote(word: str) -> str:
    if "\n" not in word:
        return shlex.quote(word)
    name, _, text = word.partition("=")
    return f"{name}=\"$(cat <<'END'\n{text}\nEND\n)\""


def combine(codes: Iterable[int | None]) -> int | None:
    """The exit code of a run from those of its processes. None: of one it is not known.

    Wrong input is wrong for all. A process that was lost has others fail, so it counts before them; and a failure
    counts before a stop, which the others may have made of it.
    """
    codes = list(codes)
    if WRONG_INPUT in codes:
        return WRONG_INPUT
    if not codes or None in codes:
        return None
    return next((code for code in codes if code not in (0, STOPPED)), max(code or 0 for code in codes))
