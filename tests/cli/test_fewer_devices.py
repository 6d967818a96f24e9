"""train --elastic: runs that go on with fewer or more devices come to the losses of a run that lost none."""

import dataclasses
import json

import numpy as np
import pytest

from gspmd_lm import config as configs
from gspmd_lm import files
from gspmd_lm.cli import elastic
from gspmd_lm.hardware import target as targets
from gspmd_lm.sharding import mesh as meshes
from gspmd_lm.workdir.history import RunHistory
from tests.quick import QUICK_FLAGS

FLAGS = (
    "--platform=cpu", "--config=tiny", "--set=data.source=random:64", "--set=data.held_out=0.0", "--set=data.seq=32",
    "--set=model.layers=1", "--set=model.embed=32", "--set=model.mlp=64", "--set=train.steps=20",
    "--set=train.trackers=[]", "--set=train.log_every=1", "--set=optimizer.warmup_steps=0", *QUICK_FLAGS,
)  # fmt: skip
FSDP = ("--rules=fsdp8", "--mesh=fsdp=6")
STEPS = 20


def losses(workdir):
    rows = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    found = {row["step"]: row["loss"] for row in rows if "loss" in row}
    assert [*found] == [*range(1, STEPS + 1)]
    return np.array([*found.values()])


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The losses of a run on one device."""
    found = []

    def run_once(run):
        if not found:
            workdir = tmp_path_factory.mktemp("undisturbed")
            code, out, err = run("train", *FLAGS, "--rules=none", f"--workdir={workdir}")
            assert code == 0, out + err
            found.append(losses(workdir))
        return found[0]

    return run_once


@pytest.mark.long
def test_six_devices_then_three_then_six(run, tmp_path, undisturbed):
    """Sixteen rows do not divide over six, nor over three, nor does the width."""

    def go_on(devices, stop, *flags):
        elastic = "--elastic", f"--devices={devices}", f"--steps={stop}", f"--workdir={tmp_path}"
        code, out, err = run("train", *FLAGS, *elastic, *flags)
        assert code == 0, out + err
        return out, err

    _, err = go_on(6, 7, *FSDP)
    assert "--elastic: 6 devices: mesh data=3 x fsdp=2, in place of fsdp=6; a step has the same 16 rows and 2" in err
    code, _, err = run("train", *FLAGS, *FSDP, "--mesh=fsdp=3", f"--workdir={tmp_path}")
    assert code == 2 and "the run had 6 devices when it was last started, and has 3 now\n  fix   add --elastic" in err
    out, err = go_on(3, 14, *FSDP)
    assert "restored step 7" in out and "mesh data=3 on 3 simulated cpu devices" in out
    assert "--elastic: 3 devices: mesh data=3, microbatches=2" in err
    assert "on 6 devices, and will take about" in err and "; the 7 steps that are left: about " in err
    out, _ = go_on(6, 20)  # the rules with which it began are found in the workdir
    assert "restored step 14" in out and "mesh data=3 x fsdp=2 on 6 simulated cpu devices" in out
    assert "warning: step" not in out  # no row is skipped or read again
    np.testing.assert_allclose(losses(tmp_path), undisturbed(run), rtol=1e-6)
    assert files.read_json(tmp_path / "beginning.json")["devices"] == 6


@pytest.mark.slow
def test_one_of_four_slices_is_lost(run, tmp_path, undisturbed, monkeypatch):
    """Each slice has two devices. Three slices hold replicas, and three quarters of the devices go on."""
    from_devices = targets.from_devices

    def with_slices(devices, chip_file=""):
        target = from_devices(devices, chip_file)
        return dataclasses.replace(target, topology=(2,), slices=max(1, len(devices) // 2))

    monkeypatch.setattr(targets, "from_devices", with_slices)
    monkeypatch.setattr(meshes, "count_slices", lambda devices: max(1, len(devices) // 2))
    for devices, stop in ((8, 9), (6, 20)):
        elastic = "--rules=fsdp8", "--elastic", f"--devices={devices}", f"--steps={stop}", f"--workdir={tmp_path}"
        code, out, err = run("train", *FLAGS, *elastic)
        assert code == 0, out + err
    assert "data=3 crosses the 3 slices (dcn)" in out and "mesh data=3 x fsdp=2 on 6 simulated cpu devices" in out
    np.testing.assert_allclose(losses(tmp_path), undisturbed(run), rtol=1e-6)


@pytest.mark.long
def test_rules_of_another_kind_begin_anew(run, tmp_path):
    """Other rules than those with which the run began are taken as they are, where they fit."""
    place = f"--workdir={tmp_path}", "--elastic", "--set=train.steps=2"
    for rules in ("--rules=fsdp8", "--rules=tp8"):
        code, out, err = run("train", *FLAGS, *place, rules, "--steps=1")
        assert code == 0 and "--elastic" not in err, out + err
    assert files.read_json(tmp_path / "beginning.json")["rules"]["mesh"] == {"tensor": 8}


def test_a_damaged_beginning_is_named(run, tmp_path):
    files.replace_json(tmp_path / "beginning.json", {"devices": 6})
    code, _, err = run("train", *FLAGS, f"--workdir={tmp_path}", "--elastic")
    assert code == 2 and f"{tmp_path}/beginning.json: has other fields" in err and "\n  fix   delete it" in err


def test_the_time_and_the_price_of_the_rest():
    """Half of the devices take twice as long for the same rows, and a ninth more for two rows without targets."""
    rows = [{"step": step, "loss": 1.0, "step_time_s": 2.0} for step in range(1, 101)]
    earlier = RunHistory("a", "a", rows, [], [], {"data": {"batch": 16}}, "", {"mesh": {"fsdp": 8}})
    config, target = configs.load("tiny"), targets.parse("v5e:2x2")
    assert target.chip and target.chip.usd_per_hour
    usd = 4 * target.chip.usd_per_hour * 50 * 4.0 / 3600
    assert elastic._forecast(earlier, config, target, None) == (
        "a step took 2 s on 8 devices, and will take about 4 s; the 50 steps that are left: about 3m20s, "
        f"{usd:.2f} USD at {target.chip.usd_per_hour:.2f} USD a chip and hour"
    )
    padded = configs.load("tiny", ["data.padded_batch=18"])
    assert "will take about 4.5 s; the 20 steps that are left" in elastic._forecast(earlier, padded, target, 120)
    assert elastic._forecast(earlier, config, targets.parse("v5e:2x4"), None) == ""  # as many as before
