"""Whole runs, as people start them: the README's command, several processes, many runs in a row, the wheel."""

import json
import os
import re
import socket
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SMALL = [
    "--config=bench_4m",
    *(f"--set={item}" for item in ("model.layers=1", "model.embed=64", "model.mlp=128", "data.batch=8", "data.seq=32")),
    "--set=train.log_every=1",
    "--set=train.trackers=[]",
]


def start(*flags, **environment):
    return subprocess.Popen(
        [sys.executable, "main.py", *flags],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | environment,
    )


def finish(process, timeout_s=300):
    output, _ = process.communicate(timeout=timeout_s)
    assert process.returncode == 0, output
    return output


def losses(workdir):
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


def test_the_command_of_the_readme(tmp_path):
    command = re.search(r"python main.py (--rules=\S+)", (ROOT / "README.md").read_text())
    assert command
    output = finish(start(command[1], "--steps=2", f"--workdir={tmp_path}/run"))
    lines = output.splitlines()
    first_step = next(at for at, line in enumerate(lines) if line.startswith("step"))
    assert first_step <= 40
    assert f"{tmp_path}/run" in output and "held-out loss" in output
    assert len(losses(tmp_path / "run")) == 2


def test_two_processes_of_four_devices_compute_what_one_of_eight_does(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = [*SMALL, "--rules=fsdp2_tp4", "--steps=4"]
    together = [
        start(*flags, f"--workdir={tmp_path}/two", f"--coordinator=127.0.0.1:{port}", "--num_processes=2",
              f"--process_id={i}")
        for i in range(2)
    ]  # fmt: skip
    first, second = (finish(process) for process in together)
    assert "step 4/4" in first
    assert "step" not in re.sub(r"\[Gloo\].*", "", second)  # only the first process speaks
    finish(start(*flags, f"--workdir={tmp_path}/one"))
    two, one = losses(tmp_path / "two"), losses(tmp_path / "one")
    assert len(two) == len(one) == 4
    assert max(abs(a - b) for a, b in zip(two, one, strict=True)) < 1e-5

    # What two processes saved, one goes on with.
    finish(start(*flags[:-2], "--rules=tp8", "--steps=6", f"--workdir={tmp_path}/two"))
    assert len(losses(tmp_path / "two")) == 6


@pytest.mark.slow
def test_twenty_runs_on_two_mesh_axes_survive(tmp_path):
    """Simulated devices on few cores can deadlock where threads are too few; see runtime.py."""
    for run in range(20):
        output = finish(start(*SMALL, "--rules=dp2_tp4", "--steps=45", f"--workdir={tmp_path}/{run}"))
        assert "step 45/45" in output


@pytest.mark.slow
def test_the_wheel_carries_rules_and_configs(tmp_path):
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", f"--outdir={tmp_path}", str(ROOT)], check=True, capture_output=True
    )
    (wheel,) = tmp_path.glob("gspmd_lm-*.whl")
    venv.create(tmp_path / "venv", with_pip=True)
    bin_folder = tmp_path / "venv/bin"
    subprocess.run([bin_folder / "pip", "install", "-q", wheel], check=True, capture_output=True)
    empty = tmp_path / "empty"
    empty.mkdir()
    run = subprocess.run(
        [bin_folder / "gspmd-lm", "--rules=tp8.yaml", "--steps=2"], cwd=empty, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert list(empty.glob("runs/tiny-tp8-*/metrics.jsonl"))
