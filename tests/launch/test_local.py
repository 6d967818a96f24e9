"""Runs that launch starts on this machine, and on stand-ins of TPU hosts: they go on after a kill to the same loss."""

import dataclasses
import errno
import json
import os
import re
import shlex
import signal
import sys
import time
from unittest.mock import Mock

import pytest

from gspmd_lm.errors import STOPPED, WRONG_INPUT
from gspmd_lm.launch import logs
from gspmd_lm.launch.local import Local, free_port
from gspmd_lm.launch.place import CommandFailed, State
from tests.launch.cloud import HOSTS, QUICK
from tests.launched import FROM_OUTSIDE
from tests.quick import QUICK_FLAGS

TRAIN = shlex.join([
    "--platform=cpu", "--devices=2", "--config=tiny", "--rules=fsdp", "--set=data.source=random:64",
    "--set=data.held_out=0.0", "--set=model.vocab=128", "--set=model.layers=1", "--set=train.steps=8",
    "--set=train.trackers=[]", "--set=train.log_every=1", "--set=train.checkpoint_every=2",
    "--set=optimizer.warmup_steps=0", *QUICK_FLAGS,
])  # fmt: skip
SOON = dataclasses.replace(QUICK, others=0.3)
PATIENT = dataclasses.replace(QUICK, others=60, stop=60)  # real processes take longer to end


@pytest.fixture
def machine(cloud, monkeypatch, tmp_path):
    for name in [name for name in os.environ if name.startswith(FROM_OUTSIDE)]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("GSPMD_LM_CACHE", str(tmp_path / "cache"))
    return cloud


def losses(folder):
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def test_wrong_input_ends_a_launch(machine, tmp_path):
    job = machine.job("local", workdir=str(tmp_path / "run"), train="--config=tinny")
    assert machine.launch(job) == WRONG_INPUT
    assert any("0: tinny: no such file" in line for line in machine.said)


def test_a_place_that_is_silent_for_a_week_and_a_full_disk_end_no_launch(machine, tmp_path, monkeypatch):
    states = [CommandFailed("no answer")] * 1100 + [State.READY]
    monkeypatch.setattr(Local, "state", Mock(side_effect=states))
    monkeypatch.setattr(Local, "commands", lambda self, program, port: [["true"]])
    monkeypatch.setattr(logs, "add_line", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    job = machine.job("local", workdir=str(tmp_path / "run"), logs=str(tmp_path / "logs"), train=TRAIN)
    (tmp_path / "logs/1.old").mkdir(parents=True)
    assert machine.launch(job, waits=dataclasses.replace(QUICK, longest=0)) == 0
    assert machine.said.count("no answer") == 1100 and machine.said[-1] == "the run is finished"


@pytest.mark.parametrize("ends", [0, 1])
def test_processes_that_do_not_notice_that_another_one_has_failed_are_killed(machine, tmp_path, monkeypatch, ends):
    commands = [["sleep", "100"], ["sleep", "100"]]
    commands[ends] = ["false"]
    monkeypatch.setattr(Local, "commands", lambda self, program, port: commands)
    job = machine.job("local", processes=2, workdir=str(tmp_path / "run"), train=TRAIN, max_retries=0)
    began = time.monotonic()
    assert machine.launch(job, waits=SOON) == STOPPED
    assert "the processes that have not ended are killed" in machine.said and time.monotonic() - began < 60


@pytest.mark.parametrize(("printed", "others_s"), [("step 5/8", 0.3), ("compiling", 600)])
def test_processes_that_do_not_notice_that_another_one_was_stopped_are_asked_to_stop(
    machine, tmp_path, monkeypatch, printed, others_s
):
    """After a step, they get time to end by themselves. Before it they have nothing to save, and are asked at once."""
    ready = tmp_path / "ready"  # there is a trap for the signal
    scripts = [
        f"echo {printed}; trap 'exit {STOPPED}' TERM; touch {ready}; while true; do sleep 0.1; done",
        f"while [ ! -e {ready} ]; do sleep 0.1; done; exit {STOPPED}",
    ]
    monkeypatch.setattr(Local, "commands", lambda self, program, port: [["sh", "-c", script] for script in scripts])
    job = machine.job("local", processes=2, workdir=str(tmp_path / "run"), train=TRAIN, max_retries=0)
    assert machine.launch(job, waits=dataclasses.replace(QUICK, others=others_s, stop=60)) == STOPPED
    assert "a process was stopped: the processes save and end" in machine.said
    assert any(line.startswith("attempt 1 stopped with work left") for line in machine.said)


@pytest.mark.slow
def test_a_process_that_is_killed_ends_no_run(machine, tmp_path):
    """Two processes, of which one is killed: all start again, and come to the losses of a run that nobody killed."""

    def kill(line):
        if line.startswith("step 5/8") and not killed:
            killed.append(line)
            os.kill(find_process(tmp_path / "killed", 1), signal.SIGKILL)

    killed = []
    for name, tell in (("whole", lambda line: None), ("killed", kill)):
        job = machine.job("local", processes=2, workdir=str(tmp_path / name), logs=str(tmp_path / f"{name}.launch"),
                          train=TRAIN)  # fmt: skip
        assert machine.launch(job, tell=tell, waits=PATIENT) == 0, machine.said
    assert killed and re.search(r"attempt 1 failed .* at step [5-8]", "\n".join(machine.said))
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")


@pytest.mark.slow
def test_a_host_that_is_lost_for_good_leaves_the_other_one(machine, tmp_path):
    """Of two processes with three devices each, one is killed and does not come back: the other one goes on alone.

    The losses are those of a run that never had a second process.
    """

    def kill(line):
        if line.startswith("step 5/8") and not killed:
            killed.append(line)
            os.kill(find_process(tmp_path / "lost", 1), signal.SIGKILL)

    killed, six, three = [], *(TRAIN.replace("--devices=2", f"--devices={count}") for count in (6, 3))
    job = machine.job("local", processes=2, workdir=str(tmp_path / "lost"), train=six, max_retries=0, elastic=True)
    assert machine.launch(job, tell=kill, waits=PATIENT) == STOPPED and killed, machine.said
    job = dataclasses.replace(job, processes=1, train=three)
    assert machine.launch(job, waits=PATIENT) == 0, machine.said
    assert any(line.startswith("restored step 4") for line in machine.said)
    assert any(line.startswith("tiny: ") and "mesh data=3 on 3 simulated" in line for line in machine.said)
    whole = machine.job("local", workdir=str(tmp_path / "whole"), logs=str(tmp_path / "logs"), train=three,
                        elastic=True)  # fmt: skip
    assert machine.launch(whole, waits=PATIENT) == 0, machine.said
    lost, wanted = losses(tmp_path / "lost"), losses(tmp_path / "whole")
    assert [*lost] == [*wanted] == [*range(1, 9)]
    assert [*lost.values()] == pytest.approx([*wanted.values()], rel=1e-6)


def find_process(workdir, number):
    """The process of a run that has this number."""
    (pid,) = (
        int(folder)
        for folder in os.listdir("/proc")
        if folder.isdecimal()
        and f"--workdir={workdir}\0" in command(folder)
        and f"--process_id={number}\0" in command(folder)
    )
    return pid


def command(pid):
    try:
        with open(f"/proc/{pid}/cmdline") as file:
            return file.read()
    except OSError:
        return ""


@pytest.mark.slow
def test_a_slice_that_is_preempted_trains_on_to_the_same_loss(machine, tmp_path, monkeypatch):
    """Two hosts, whose disks are lost: the run goes on from the workdir, and starts with programs that are compiled."""
    # How they find each other is what Slurm says: a real slice asks its metadata.
    machine.program("trained", f"""#!/usr/bin/env bash
export SLURM_JOB_ID=7 SLURM_STEP_NODELIST=127.0.0.1 SLURM_NTASKS={HOSTS} SLURM_PROCID=${{HOME##*host}} SLURM_LOCALID=0
exec {sys.executable} "$@"
""")  # fmt: skip

    def preempt(line):
        if line.startswith("step 5/8") and not preempted:
            preempted.append(line)
            (machine.at / "preempt").touch()

    preempted = []
    for name, tell in (("whole", lambda line: None), ("lost", preempt)):
        job = machine.job("queued-resource", workdir=str(tmp_path / name / "run"), train=TRAIN, port=free_port(),
                          logs=str(tmp_path / f"{name}.launch"), name=name, autodelete=True)  # fmt: skip
        machine.said.clear()
        assert machine.launch(job, tell=tell, waits=PATIENT) == 0, machine.said
    assert preempted and any(line.startswith("attempt 1 was preempted at step") for line in machine.said)
    assert any(line.startswith("restored step 4") for line in machine.said)
    assert any(f"compile cache {tmp_path}/lost/compiled" in line for line in machine.said)
    assert losses(tmp_path / "lost/run") == losses(tmp_path / "whole/run")
