"""The place slurm: jobs on the GPUs of several nodes, which see this folder. launch runs where sbatch does.

Sources: the manual pages of sbatch, srun, squeue and scancel at slurm.schedmd.com, read in 2026.
"""

import os
import shlex
import subprocess
from pathlib import Path

from gspmd_lm import files, versions
from gspmd_lm.errors import InputError
from gspmd_lm.launch import logs as log_files
from gspmd_lm.launch import place
from gspmd_lm.launch.place import Place

# Submits the job unless it is in the queue, and ends when it has left it. A job that is requeued stays in it.
_FOLLOW = """
in_queue() { test -n "$(squeue --noheader --me --name="$1")"; }
in_queue "$1" || sbatch "$2" || exit
while in_queue "$1"; do sleep "${LAUNCH_POLL_S:-10}"; done"""
# One task for each GPU: jax gives every task of a Slurm job the device of its local number, so a task must see all GPUs
# of its node. bash leaves SIGTERM to Python, and writes the exit code behind the lines of its task.
_SCRIPT = """#!/usr/bin/env bash
{about}
# Submitted from the repository: mkdir -p {logs} && sbatch FILE
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node={gpus}
#SBATCH --gpus-per-node={gpus}
#SBATCH --cpus-per-task=8
#SBATCH --time={time}
#SBATCH --output={logs}/job-%j.txt
#SBATCH --open-mode=append
#SBATCH --requeue
# Five minutes before the end the tasks are asked to save and stop.
#SBATCH --signal=TERM@300
set -euo pipefail
srun --kill-on-bad-exit=1 --open-mode=append --output={logs}/%t.log bash -c '
  trap : TERM; "$@"; code=$?; echo "{ended} $code"; exit $code' run \\
  {command}
"""


class Slurm(Place):
    """A job of Slurm for each attempt. Nothing is rented beyond it."""

    needed = ("accelerator",)
    tools = ("sbatch", "srun", "squeue", "scancel")
    sees_this_folder = True

    def check(self) -> None:
        self._script("", "")
        if not files.is_remote(self.job.workdir):
            files.check_folder("workdir: ", files.expand_user(self.job.workdir))

    def _script(self, name: str, logs: str) -> str:
        target = self.job.target
        if not target or target.platform != "gpu":
            raise InputError(f"accelerator: {self.job.accelerator}: no GPUs\n  fix   accelerator: h100:2x8")
        nodes, gpus = target.topology
        main = os.path.relpath(versions.PACKAGE.parent / "main.py")
        words = [self.job.python, main, "train", *self.job.arguments, f"--workdir={self.job.workdir}"]
        return _SCRIPT.format(
            about=place.ABOUT,
            name=name,
            nodes=f"1-{nodes}" if self.job.elastic and nodes > 1 else nodes,  # as many as there are without a wait
            gpus=gpus,
            time=self.job.time,
            logs=shlex.quote(logs),
            ended=log_files.ENDED,
            command=shlex.join(words),
        )

    def run(self, attempt: str, logs: Path) -> list[subprocess.Popen[bytes]]:
        script = logs / "job.sbatch"
        files.replace(script, self._script(attempt, str(logs)))
        return [place.start(["bash", "-c", _FOLLOW, "follow", attempt, str(script)], logs / "slurm.txt")]

    def stop(self, attempt: str) -> None:
        place.call(["scancel", "--me", f"--name={attempt}", "--signal=TERM"])

    def kill(self, attempt: str) -> None:
        place.call(["scancel", "--me", f"--name={attempt}"])

    def script(self) -> str:
        return self._script(self.job.name, self.job.logs)
