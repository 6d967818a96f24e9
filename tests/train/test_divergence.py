"""Runs whose steps are not finite: skipped steps, healthy checkpoints, and going back to one on purpose."""

import dataclasses
import shutil

import pytest

from gspmd_lm.errors import InputError, RunFailed
from gspmd_lm.runtime.preemption import Agreement
from tests.train.runs import TRAIN, rows_of, state_of

pytestmark = pytest.mark.long
WILD = {"learning_rate": 1.0e30, "schedule": "constant", "warmup_steps": 0, "weight_decay": 0.0}


def test_steps_that_are_not_finite_stop_the_run(run, small, tmp_path):
    """A learning rate that throws the weights to infinity: later steps are skipped and counted (see test_step.py)."""
    changes = {"max_skipped": 3, "eval_every": 0, "steps": 30}
    config = small(layers=1, data={"batch": 8, "held_out": 0.0}, train=TRAIN | changes, optimizer=WILD)
    doomed = run(tmp_path, "fsdp2", config)
    with pytest.raises(RunFailed, match="last 3 steps was not finite"):
        doomed.train(12)
    rows = rows_of(tmp_path)
    assert [row["skipped_in_a_row"] for row in rows[1:4]] == [1, 2, 3]


@pytest.fixture(scope="module")
def diverged(run, small, tmp_path_factory):
    """A workdir whose run was sound up to step 4 and then diverged, what its failure said, and the sound config."""
    workdir = tmp_path_factory.mktemp("diverged")
    changes = {"checkpoint_every": 1, "keep_checkpoints": 2, "eval_every": 0, "max_skipped": 5, "log_every": 100}
    sound, wild = (
        small(layers=1, data={"batch": 8, "held_out": 0.0}, train=TRAIN | changes | {"steps": 30}, optimizer=optimizer)
        for optimizer in ({"schedule": "constant", "warmup_steps": 0}, WILD)
    )
    run(workdir, "fsdp2", sound).train(4)
    with pytest.raises(RunFailed) as failed:
        run(workdir, "fsdp2", wild).train(30)
    return workdir, str(failed.value), sound


def test_divergence_does_not_rotate_the_healthy_checkpoints_away(diverged):
    """Step 5 is finite and throws the weights to infinity, so that 4 is healthy; steps 6 to 10 are skipped."""
    workdir, said, _ = diverged
    assert sorted(path.name for path in (workdir / "checkpoints").iterdir()) == ["4", "5"]
    assert "step 10: the loss or gradient of the last 5 steps" in said and "goes on from checkpoint 4," in said
    last = rows_of(workdir)[-1]
    assert last["step"] <= 10 + 2 and last["skipped_in_a_row"] >= 5  # the steps in flight, though log_every is 100


def test_a_start_after_divergence_goes_on_from_the_newest_healthy_checkpoint(run, diverged, tmp_path):
    workdir, _, sound = diverged
    shutil.copytree(workdir, tmp_path, dirs_exist_ok=True)
    again = run(tmp_path, "fsdp2", sound)
    again.train(7)
    said = again.console.file.getvalue()
    assert (
        "checkpoint 5 in" in said
        and "not used, because no finite step followed" in said
        and f"restored step 4 of {tmp_path}\noptimizer.learning_rate: " in said
    )
    assert "checkpoint 5 replaces 5" in said
    assert state_of(again)[0] == 7
    assert [row["skipped_steps"] for row in rows_of(tmp_path) if row["step"] == 7 and "loss" in row] == [0]
    assert [row["step"] for row in rows_of(tmp_path) if "loss" in row] == [1, 4, 5, 7]


def test_a_step_can_be_gone_back_to_on_purpose(run, diverged, tmp_path):
    workdir, _, sound = diverged
    shutil.copytree(workdir, tmp_path, dirs_exist_ok=True)
    run(tmp_path, "fsdp2", sound).train(7)
    back = run(tmp_path, "fsdp2", sound)
    back.train(9, step=6)
    assert "restored step 6 of" in (said := back.console.file.getvalue()) and " is now " not in said
    with pytest.raises(InputError, match="there is no checkpoint 2\n  fix   use one of 8, 9"):
        run(tmp_path, "fsdp2", sound).train(9, step=2)


def test_a_signal_among_skipped_steps_does_not_save_over_the_healthy_checkpoint(run, diverged, tmp_path, monkeypatch):
    workdir, _, sound = diverged
    config = dataclasses.replace(
        sound,
        optimizer=dataclasses.replace(sound.optimizer, **WILD),
        train=dataclasses.replace(sound.train, keep_checkpoints=1),
    )
    shutil.copytree(workdir, tmp_path, dirs_exist_ok=True)
    monkeypatch.setattr(Agreement, "due", lambda self, step: {"stop"} if step == 8 else set())
    run(tmp_path, "fsdp2", config).train(30)
    monkeypatch.undo()
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["4", "8"]
    with pytest.raises(RunFailed, match="goes on from checkpoint 4,"):  # skipped steps are counted on
        run(tmp_path, "fsdp2", config).train(30)
