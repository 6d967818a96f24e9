"""When a run is saved by time."""

from types import SimpleNamespace

import jax
import pytest

from gspmd_lm.train import saving


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
