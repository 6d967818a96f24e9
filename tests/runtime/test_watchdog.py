"""Steps that hang: said in a line, and ended with the stacks of all processes."""

import re
import signal
import subprocess
import sys
import time

import pytest

from gspmd_lm.errors import FAILED
from gspmd_lm.runtime import watchdog
from gspmd_lm.runtime.watchdog import Watchdog
from tests.launched import ROOT, free_port, launch
from tests.quick import QUICK_FLAGS

# A run whose steps are late after 4 s.
HASTY = """
import sys
from gspmd_lm import cli
from gspmd_lm.runtime import watchdog
watchdog.LATE_S, watchdog.TICK_S = 4.0, 0.5
cli.main(["main.py", *sys.argv[1:]])
"""
SMALL = [
    "--config=bench_4m",
    *(f"--set={item}" for item in ("model.layers=1", "model.embed=64", "model.mlp=128", "data.batch=8", "data.seq=32")),
    *("--set=train.log_every=1", "--set=train.trackers=[]", "--set=train.steps=100000", "--rules=fsdp"),
    *QUICK_FLAGS,
]


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(watchdog, "LATE_S", 0.3)
    monkeypatch.setattr(watchdog, "TICK_S", 0.05)


def wait_until(holds, limit_s=60):
    until = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_a_late_step_is_said_once_and_the_next_one_anew(quick):
    said = []
    with Watchdog(0, 0, said.append) as dog:
        for step in range(1, 4):
            dog.beat(step)
        wait_until(lambda: said)
        time.sleep(0.5)
        assert len(said) == 1 and re.fullmatch(r"warning: step 4 has taken \d s, \d+ times the usual .*s", said[0])
        dog.beat(4)
        wait_until(lambda: len(said) == 2)
        assert "step 5 has taken" in said[1]


def test_what_is_no_step_and_slow_steps_are_not_late(quick):
    said = []
    with Watchdog(0, 0.001, said.append) as dog, dog.paused():
        time.sleep(0.8)
    with Watchdog(0, 0, said.append) as dog:
        dog.taken_s.extend([0.2] * 5)
        time.sleep(0.9)
    assert not said


HANGS = """
import threading, time
from gspmd_lm.runtime import watchdog
watchdog.LATE_S = watchdog.TICK_S = 0.2
def wait_for_a_chip():
    time.sleep(100)
with watchdog.Watchdog(6, 0.01, print) as dog:
    wait_for_a_chip()
"""


def test_a_step_that_hangs_ends_the_process_with_its_stacks():
    process = launch(HANGS)
    _, said = process.communicate(timeout=120)
    assert process.returncode == FAILED
    assert "in wait_for_a_chip" in said and "step 7 hangs; the Python stacks:" in said
    assert re.search(r"step 7 has not ended within \d s, and the run ends\n  fix   start the same command again", said)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_is_stopped_is_named_and_the_run_ends(tmp_path, victim):
    flags = [*SMALL, f"--workdir={tmp_path}/run", f"--coordinator=127.0.0.1:{free_port()}", "--num_processes=2"]
    flags += ["--set=train.hang_minutes=0.2", "--devices=4"]
    logs = [tmp_path / "0.log", tmp_path / "1.log"]
    both = [
        subprocess.Popen(
            [sys.executable, "-c", HASTY, *flags, f"--process_id={number}"],
            cwd=ROOT, stdout=log.open("w"), stderr=subprocess.STDOUT,
        )
        for number, log in enumerate(logs)
    ]  # fmt: skip
    try:
        wait_until(lambda: "step     20" in logs[0].read_text() or any(one.poll() is not None for one in both), 300)
        both[victim].send_signal(signal.SIGSTOP)
        other = 1 - victim
        assert both[other].wait(120) == FAILED, logs[other].read_text()
        said = logs[other].read_text()
        assert re.search(rf"has taken \d+ s, \d+ times the usual .*; process {victim} does not answer", said), said
        assert "hangs; the Python stacks:" in said and 'loop.py", line' in said
        both[victim].send_signal(signal.SIGCONT)
        assert both[victim].wait(120)
    finally:
        for process in both:
            process.kill()
