"""Steps that hang: said in a line, and ended with the stacks of all processes."""

import contextlib
import json
import re
import signal
import subprocess
import sys
import time

import pytest

from gspmd_lm.errors import FAILED
from gspmd_lm.launch.local import free_port
from gspmd_lm.runtime import watchdog
from gspmd_lm.runtime.watchdog import Watchdog
from tests.launched import ROOT, launch
from tests.quick import QUICK_FLAGS

# A run whose steps are late after 4 s.
HASTY = """
import sys
from gspmd_lm import cli
from gspmd_lm.runtime import watchdog
watchdog.LATE_S, watchdog.TICK_S = 4.0, 0.5
cli.main(["main.py", *sys.argv[1:]])
"""
# In a process with this before it, the 20th step does not end.
STUCK = """
import time
from gspmd_lm.train.loop import _Training
after_step = _Training._after_step
def wait_for_rows(training, values):
    ends = after_step(training, values)
    while training.done == 20:
        time.sleep(1)
    return ends
_Training._after_step = wait_for_rows
"""
# In a process with this before it, an evaluation does not end.
HANGING_EVALUATION = """
import time
from gspmd_lm.train.loop import Run
Run.held_out_metrics = lambda *args: time.sleep(1000)
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
    said, hung = [], []
    with Watchdog(0, said.append) as dog:
        dog.count_hang = lambda kind, seconds: hung.append((kind, seconds))
        dog.begin("steps")
        for step in range(1, 4):
            dog.beat(step)
        wait_until(lambda: said)
        time.sleep(0.5)
        assert len(said) == 1 and re.fullmatch(r"warning: step 4 has taken \d s, \d+ times the usual .*s", said[0])
        dog.begin("data")  # which is a part of the step
        assert not hung
        dog.beat(4)
        assert [kind for kind, seconds in hung if seconds >= 0.3] == ["data"]
        wait_until(lambda: len(said) == 2)
        assert "step 5 has taken" in said[1]


@pytest.mark.parametrize(
    ("kind", "at"),
    [
        ("evaluation", "a batch or the samples of an evaluation"),
        ("saves", "saving"),
        ("compile", "compiling"),
        ("restore", "making or restoring the state"),
    ],
)
def test_other_work_that_is_late_is_said_too(quick, kind, at):
    said, hung = [], []
    with Watchdog(0, said.append) as dog:
        dog.count_hang = lambda kind, seconds: hung.append(kind)
        dog.begin("steps")
        dog.taken_s.extend([100.0] * 5)  # what is usual for steps says nothing about it
        dog.begin(kind)
        wait_until(lambda: said)
        dog.begin("steps")
    assert len(said) == 1 and re.fullmatch(rf"warning: {at} has taken \d s", said[0])
    assert not hung  # it was slow, and ended


@pytest.mark.long
def test_slow_steps_batches_that_come_and_the_reading_of_a_corpus_are_not_late(quick):
    said = []
    with Watchdog(0.001, said.append):
        time.sleep(0.8)  # at the start, which is not watched
    with Watchdog(0, said.append) as dog:
        dog.taken_s.extend([0.2] * 5)
        dog.begin("steps")
        time.sleep(0.9)
        dog.begin("evaluation")
        for _ in range(8):
            time.sleep(0.1)
            dog.beat()
    assert not said and len(dog.taken_s) == 5


def test_a_save_ends_the_run_later_than_a_step(monkeypatch):
    monkeypatch.setattr(watchdog, "TICK_S", 0.05)
    for kind, least_s in (("evaluation", 0.15), ("saves", 0.15 * watchdog.WHOLE)):
        ended, began = [], time.monotonic()
        with Watchdog(0.15 / 60, print) as dog:
            monkeypatch.setattr(dog, "_end", lambda waited_s, at, ended=ended: ended.append(waited_s))
            dog.begin(kind)
            wait_until(lambda ended=ended: ended)
            assert ended[0] > least_s and time.monotonic() - began < least_s + 30


HANGS = """
import threading, time
from gspmd_lm.runtime import watchdog
watchdog.LATE_S = watchdog.TICK_S = 0.2
def wait_for_a_chip():
    time.sleep(100)
with watchdog.Watchdog(0.005, print) as dog:
    dog.done, dog.count_hang = 6, lambda kind, seconds: print("a hang of", kind, flush=True)
    dog.begin("KIND")
    wait_for_a_chip()
"""


@pytest.mark.parametrize(("kind", "at"), [("steps", "step 7"), pytest.param("saves", "saving", marks=pytest.mark.long)])
def test_what_hangs_ends_the_process_with_its_stacks(kind, at):
    process = launch(HANGS.replace("KIND", kind))
    out, said = process.communicate(timeout=120)
    assert process.returncode == FAILED
    assert "in wait_for_a_chip" in said and f"{at} hangs; the Python stacks:" in said
    assert re.search(rf"{at} has not ended within \d s, and the run ends\n  fix   start the same command again", said)
    assert f"a hang of {kind}" in out


@pytest.fixture
def start(tmp_path):
    """A function that starts two processes of a run, each with a program, and gives them with their logs."""
    with contextlib.ExitStack() as stack:

        def begin(first, second, *more):
            programs = first, second
            flags = [
                *SMALL,
                *more,
                f"--workdir={tmp_path}/run",
                f"--coordinator=127.0.0.1:{free_port()}",
                "--num_processes=2",
            ]
            flags += ["--set=train.hang_minutes=0.5", "--devices=4"]
            logs = [tmp_path / f"{number}.log" for number in range(2)]
            both = []
            for number, (program, log) in enumerate(zip(programs, logs, strict=True)):
                command = [sys.executable, "-c", program, *flags, f"--process_id={number}"]
                out = stack.enter_context(log.open("w"))
                both.append(subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT))
                stack.callback(both[-1].kill)
            reached = "step     20/"
            wait_until(lambda: reached in logs[0].read_text() or any(one.poll() is not None for one in both), 600)
            return both, logs

        yield begin


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_is_stopped_is_named_and_the_run_ends(start, victim):
    both, logs = start(HASTY, HASTY)
    both[victim].send_signal(signal.SIGSTOP)
    assert both[1 - victim].wait(240) == FAILED, logs[1 - victim].read_text()
    said = logs[1 - victim].read_text()
    assert re.search(rf"has taken \d+ s, \d+ times the usual .*; process {victim} does not answer", said), said
    assert "hangs; the Python stacks:" in said and 'loop.py", line' in said
    both[victim].send_signal(signal.SIGCONT)
    assert both[victim].wait(240), logs[victim].read_text()


@pytest.mark.slow
def test_an_evaluation_in_which_a_process_hangs_ends_the_run_and_is_counted(start, tmp_path):
    both, logs = start(HASTY, HANGING_EVALUATION + HASTY, "--set=train.eval_every=30")
    assert [one.wait(240) for one in both] == [FAILED, FAILED], logs[0].read_text()
    first, second = (log.read_text() for log in logs)
    at = "a batch or the samples of an evaluation"
    assert re.search(rf"warning: {at} has taken \d+ s; all processes answer, and wait in the same place", first), first
    assert f"process 0: {at} hangs; the Python stacks:" in first and f"process 1: {at} hangs" in second
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["wall_hangs_s"] > 4 and rows[-1]["wall_evaluation_s"] < 4


@pytest.mark.slow
def test_all_processes_write_their_stacks_when_one_of_them_hangs(start):
    both, logs = start(HASTY, STUCK + HASTY)
    assert [one.wait(240) for one in both] == [FAILED, FAILED], logs[0].read_text()
    first, second = (log.read_text() for log in logs)
    assert re.search(r"warning: step \d+ has taken \d+ s, .*; process 1 has done step 19 only", first), first
    assert "hangs; the Python stacks:" in first and 'loop.py", line' in first
    assert "process 1: step 20 hangs; the Python stacks:" in second and "in wait_for_rows" in second
