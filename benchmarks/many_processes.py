"""Seconds that a run of many processes on this machine takes to start, train, save, lose a process and start again.

    python -m benchmarks.many_processes [--processes=64] [--write]

Each process has one simulated device. Launch starts them, and starts them again after the last one has been killed. The
model has 0.3 million parameters, so that the processes themselves are what is measured.
"""

import contextlib
import json
import os
import re
import signal
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks import measure
from gspmd_lm.launch import logs
from gspmd_lm.launch.job import Job
from gspmd_lm.launch.local import Local
from gspmd_lm.launch.loop import Launch, Waits

STEPS, SAVED_EVERY, KILLED_AT = 30, 10, 15
TRAIN = (
    "--config=tiny --rules=fsdp --platform=cpu --devices=1 --set=model.layers=1 --set=data.source=random:256 "
    "--set=data.held_out=0.0 --set=data.seq=32 --set=train.log_every=1 --set=train.eval_every=0 --set=train.trackers=[]"
)


def follow(place: Local, folder: Path, at: dict[str, float]) -> None:
    """Notes the seconds of each part of a run in `at`, and the memory of its processes; kills the last process once."""

    def wait_for(words: str) -> float:
        """Seconds until a line of the first process has some words."""
        while not re.search(words.encode(), logs.end(log), re.M):
            time.sleep(0.05)
        return time.monotonic() - began

    began, log = time.monotonic(), folder / "1/0.log"
    at["start: until all processes have met"] = wait_for("^process 0 on")
    at["start: until the first step is done"] = wait_for("with one-time work")
    wait_for(rf"^step +{KILLED_AT}[ /]")
    running = place._running
    at["memory of all processes, GB"] = sum(psutil.Process(one.pid).memory_full_info().pss for one in running) / 1e9
    running[-1].send_signal(signal.SIGKILL)
    began, log = time.monotonic(), folder / "2/0.log"
    while not all(is_over(process.pid) for process in running):
        time.sleep(0.05)
    at["after a kill: until all others have ended"] = time.monotonic() - began
    at["after a kill: until the first step is done"] = wait_for("with one-time work")


def is_over(process: int) -> bool:
    """Whether a process has ended. Launch waits for it."""
    try:
        return psutil.Process(process).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def main() -> None:
    parser = measure.flags(__doc__)
    parser.add_argument("--processes", type=int, default=64)
    options = parser.parse_args()
    at: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(measure.ROOT):
        # One process compiles for all: so many compilers at once would need more memory than the run.
        shares = {"JAX_SHARE_BINARY_BETWEEN_HOSTS": "1"}
        os.environ |= shares | {"GSPMD_LM_CACHE": f"{folder}/cache", "PYTHONUNBUFFERED": "1"}
        train = f"{TRAIN} --set=data.batch={options.processes} --set=train.steps={STEPS}"
        train += f" --set=train.checkpoint_every={SAVED_EVERY}"
        job = Job(workdir=f"{folder}/run", logs=f"{folder}/logs", train=train, name="many", processes=options.processes)
        place = Local(job)
        threading.Thread(target=follow, args=(place, Path(job.logs), at), daemon=True).start()
        code = Launch(place, 0, lambda line: print(line, flush=True), Waits(retry=1)).run()
        if code:
            raise RuntimeError(f"exit code {code}")
        rows = [json.loads(line) for line in (Path(job.workdir) / "metrics.jsonl").read_text().splitlines()]
    times = [row["step_time_s"] for row in rows if "step_time_s" in row]
    at["a step, median"] = statistics.median(times)
    saves = 1 + STEPS // SAVED_EVERY  # the first one before the first step
    at[f"saving, standing still, {saves} times"] = rows[-1]["wall_saves_s"]
    found: list[dict[str, Any]] = [{"part": part, "seconds": round(seconds, 2)} for part, seconds in at.items()]
    print(measure.markdown(found, {"part": f"{options.processes} processes", "seconds": "seconds"}))
    if options.write:
        measure.write("many_processes", [{"processes": options.processes, "seconds": found}])


if __name__ == "__main__":
    main()
