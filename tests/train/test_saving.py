"""When a run is saved by time, the best evaluation, and the settings that go with it."""

import json
import math
from types import SimpleNamespace

import jax
import pytest

from gspmd_lm import config as configs
from gspmd_lm.errors import InputError
from gspmd_lm.train import saving
from gspmd_lm.train.saving import Best


@pytest.fixture
def at(monkeypatch):
    """A function that sets the clock to a number of seconds."""
    now = [0.0]
    monkeypatch.setattr(saving, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return lambda seconds: now.__setitem__(0, seconds)


def test_a_checkpoint_is_due_some_minutes_after_the_last_one_was_written(at):
    clock = saving.Clock(10)
    at(599)
    assert not clock.due(False)
    at(600)
    assert clock.due(False) and clock.due(False)  # until it is saved
    with clock.saving():
        at(602)
    at(700)
    assert not clock.due(True)  # it was still being written
    at(1299)
    assert not clock.due(False)
    at(1300)
    assert clock.due(False)


def test_a_run_does_not_stand_still_for_more_than_a_twentieth_of_the_time(at):
    clock = saving.Clock(10)
    with clock.saving():
        at(60)
    at(60 + 19 * 60 - 1)
    assert not clock.due(False)
    at(60 + 19 * 60)
    assert clock.due(False)


def test_checkpoints_are_not_written_for_more_than_half_of_the_time(at):
    clock = saving.Clock(10)
    with clock.saving():
        at(1)
    at(1801)
    assert not clock.due(True)
    at(3600)
    assert not clock.due(False)
    at(3602)
    assert clock.due(False)


def test_zero_minutes_is_never(at):
    clock = saving.Clock(0)
    at(1e9)
    assert not clock.due(False)


def test_what_is_said_of_it_is_a_line(small):
    state = {"a": jax.ShapeDtypeStruct((250, 10**6), "float32"), "b": jax.ShapeDtypeStruct((), "int32")}
    said = lambda **keys: saving.line(small(train={"steps": 5, **keys}).train, state)  # noqa: E731
    assert said() == "saves every 10 minutes and at the end; 1.0 GB each, 3 kept"
    assert said(checkpoint_minutes=0) == "saves at the end; 1.0 GB each, 3 kept"
    both = said(checkpoint_every=10000, checkpoint_minutes=0.5, keep_checkpoints=10)
    assert both == "saves every 10,000 steps, every 0.5 minutes and at the end; 1.0 GB each, 10 kept"
    assert len(both) <= 80


def test_the_best_is_the_lowest_finite_loss_and_goes_through_a_checkpoint():
    best = Best()
    for step, loss in ((10, math.nan), (20, 3.0), (30, 2.0), (40, 2.0), (50, math.inf), (60, math.nan)):
        best = Best.of({"best": json.loads(json.dumps(vars(best)))}).after(step, loss)
    assert best == Best(step=30, loss=2.0, since=3, evaluated=60)
    assert [best.ends(patience) for patience in (0, 2, 3, 4)] == [False, True, True, False]
    assert Best.of({"data": "an older checkpoint"}) == Best() == Best.of({"best": {}})
    assert Best().after(10, math.nan) == Best(since=1, evaluated=10)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["train.eval_every=0", "train.patience=2"], "patience needs evaluations during training: set eval_every"),
        (["train.eval_every=0", "train.keep_best=true"], "keep_best needs evaluations during training"),
        (["data.held_out=0.0", "train.keep_best=true"], "data.held_out=0 leaves no rows: set data.held_out"),
        (["data.held_out=0.0", "train.samples.prompts=[a]"], "data.held_out=0 leaves no rows: set data.held_out"),
        (["train.samples.prompts=[]"], "must have at least one prompt, and none that is empty"),
        (["train.samples.prompts=['']"], "must have at least one prompt, and none that is empty"),
    ],
)
def test_settings_that_need_others(changes, message):
    with pytest.raises(InputError, match=message):
        configs.load("tiny", changes)
    assert configs.load("tiny", ["train.keep_best=true", "train.samples.prompts=[a]"]).train.keeps_best
