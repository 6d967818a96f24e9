"""A long run holds no more memory, descriptors and threads at its end than when it had settled.

pytest -n 0 -m slow -s tests/attacks/test_long.py
"""

import json
import os
import statistics
import time
from pathlib import Path

import pytest

from tests.attacks.runs import RANDOM, SMALL, start

STEPS, SETTLED = 5000, 1000  # steps in all, and before the first measurement that counts
GROWTH = 0.02  # of resident memory, between the first and the last quarter of what counts


def held(pid):
    """Resident bytes, open descriptors and threads of a process."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(status["VmRSS"].split()[0]) * 1024, len(os.listdir(f"/proc/{pid}/fd")), int(status["Threads"])


def reached(metrics):
    lines = metrics.read_bytes().rsplit(b"\n", 2) if metrics.exists() else []
    return json.loads(lines[-2])["step"] if len(lines) > 1 else 0


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="not run: there is no /proc here")
def test_five_thousand_steps_hold_no_more_than_one_thousand(tmp_path):
    often = "--set=train.checkpoint_every=100", "--set=train.eval_every=500", "--set=data.held_out=0.1"
    flags = [*SMALL, *RANDOM, *often, "--rules=fsdp2_tp4", f"--set=train.steps={STEPS}", f"--workdir={tmp_path}/run"]
    process = start(flags, tmp_path, tmp_path / "log")
    samples = []
    while process.poll() is None:
        step = reached(tmp_path / "run/metrics.jsonl")
        if SETTLED <= step < STEPS - 10:  # at the very end it closes things
            samples.append((step, *held(process.pid)))
        time.sleep(0.5)
    assert process.returncode == 0, (tmp_path / "log").read_text()
    assert len(samples) >= 20
    for step, *values in samples[:: len(samples) // 16]:
        print(step, *(f"{value:,}" for value in values))
    quarter = len(samples) // 4
    first, last = ([statistics.median(of) for of in zip(*part, strict=True)] for part in
                   (samples[:quarter], samples[-quarter:]))  # fmt: skip
    for name, *values in zip(("step", "resident bytes", "descriptors", "threads"), first, last, strict=True):
        print(f"{name}: {values[0]:,.0f} -> {values[1]:,.0f}")
    assert last[1] < first[1] * (1 + GROWTH)
    assert last[2] <= first[2] and last[3] <= first[3]
