"""The place local: processes on this machine, a log each."""

import shlex
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from gspmd_lm import versions
from gspmd_lm.launch import logs as log_files
from gspmd_lm.launch import place
from gspmd_lm.launch.job import Job
from gspmd_lm.launch.place import Place
from gspmd_lm.runtime import endings


class Local(Place):
    """Processes of this machine. It is always there, and nobody gives it back."""

    lasts = False

    def __init__(self, job: Job):
        super().__init__(job)
        self._running: list[subprocess.Popen[bytes]] = []

    def commands(self, program: Sequence[str], port: int) -> list[list[str]]:
        """The command of each process; `port` is where they meet."""
        command = [*program, "train", *self.job.arguments, f"--workdir={self.job.workdir}"]
        if self.job.processes == 1:
            return [command]
        together = [f"--coordinator=localhost:{port}", f"--num_processes={self.job.processes}"]
        return [[*command, *together, f"--process_id={index}"] for index in range(self.job.processes)]

    def run(self, attempt: str, logs: Path) -> list[subprocess.Popen[bytes]]:
        main = versions.PACKAGE.parent / "main.py"
        program = [sys.executable, str(main)] if main.exists() else [sys.executable, "-m", versions.PACKAGE.name]
        commands = self.commands(program, free_port())
        self._running = [place.start(command, logs / f"{index}.log") for index, command in enumerate(commands)]
        return self._running

    def exit_code(self, followers: Sequence[subprocess.Popen[bytes]], logs: Path) -> int | None:
        return place.combine(log_files.read_code(process.returncode) for process in followers)

    def stop(self, attempt: str) -> None:
        for process in self._running:
            process.terminate()

    def kill(self, attempt: str) -> None:
        for process in self._running:
            endings.kill_group(process.pid)
            process.wait()

    def script(self) -> str:
        commands = self.commands(versions.program().split(), self.job.port)
        return place.script_of(*(f"{shlex.join(command)} &" for command in commands), "wait")


def free_port() -> int:
    """A port that no other process has."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]
