"""What the attacks of kills.py leave on this machine, and what they call survived."""

import json
import random
import subprocess

import pytest

from tests.attacks import kills


def test_no_process_outlives_an_attack_that_fails(monkeypatch, tmp_path):
    started = []

    def start(*_):
        command = ["false"] if started else ["sleep", "60"]  # the second process ends at once, and the first goes on
        started.append(subprocess.Popen(command))
        return started[-1]

    monkeypatch.setattr(kills, "start", start)
    with pytest.raises(RuntimeError, match="a process ended before it was killed"):
        kills.signals(tmp_path, None, 2, 0, ())
    assert len(started) == 2 and all(process.returncode is not None for process in started)


def test_a_run_that_hangs_has_not_survived(monkeypatch, tmp_path):
    (tmp_path / "train").mkdir()
    (tmp_path / "train/reference.json").write_text(json.dumps({"seconds": [0.1], "left": {}}))
    monkeypatch.setattr(kills, "start", lambda *_: subprocess.Popen(["sleep", "60"]))
    monkeypatch.setattr(kills, "PATIENCE_S", 0.1)
    rows = []
    assert kills.chain(kills.Train(tmp_path), "train", tmp_path, rows.append, random.Random(0), wanted=2) == 2
    (row,) = rows
    assert not row["survived"] and row["why"].startswith("hangs (starting), see ")
