"""Layers that are written out one after the other compute what a loop over them computes."""

import dataclasses

import jax
import numpy as np
import pytest

from gspmd_lm import rules_file
from gspmd_lm.rules import Remat
from tests.convert.ours import QUICK

LAYERS = 3


@pytest.fixture(scope="module")
def compiled(small, built):
    """A function that gives a step and its compiled program, for a config of three layers under changed rules."""

    def make(rules="single", seq=16, **changes):
        step = built(small(layers=LAYERS, data={"seq": seq}, context=seq), rules, **changes)
        return step, step.lower_train().compile(QUICK)

    return make


@pytest.fixture(scope="module")
def course(batch_of):
    """A function that gives the losses and gradient norms of two steps of a compiled program."""

    def run(step, program):
        state, found = step.lower_init().compile(QUICK)(), []
        for _ in range(2):
            state, metrics = program(state, batch_of(step))
            found += [float(metrics["loss"]), float(metrics["gradient_norm"])]
        return found

    return run


def layer_loops(program):
    """How many loops over layers a compiled program has; a loop over parts of the loss is none of them."""
    lines = [line for line in program.as_text().splitlines() if " while(" in line]
    return sum("of.loss" not in line for line in lines)


def test_every_way_to_unroll_computes_the_same(compiled, course):
    step, looped = compiled(unroll=1)
    want = course(step, looped)
    for rules, unroll in (("single", "all"), ("single", 2), ("fsdp2_tp4", "all")):
        np.testing.assert_allclose(course(*compiled(rules, unroll=unroll)), want, rtol=1e-5)


def test_one_cpu_device_has_no_loop_by_default(compiled):
    assert layer_loops(compiled()[1]) == 0
    assert layer_loops(compiled(unroll=1)[1]) == 2  # forward and backward
    assert layer_loops(compiled("dp8")[1]) == 2
    assert layer_loops(compiled(remat=Remat("block"))[1]) == 2  # without a loop, XLA:CPU saves no memory by it


@pytest.mark.parametrize("value", ["some", 0, True, 1.5])
def test_a_value_that_is_none_is_refused(value):
    rules = rules_file.from_dict({"mesh": {"data": 1}, "unroll": value}, "mine")
    (problem,) = rules.problems
    assert str(problem).endswith("fix   write a whole number from 1, or 'all'")


def test_long_stacks_keep_their_loop_by_default(small, built):
    """Their programs would take longer to compile the more layers they have."""
    step = built(dataclasses.replace(small(), name="deep", model=small(layers=9).model), "single")
    assert "stablehlo.while" in step.lower_train().as_text()
    jax.clear_caches()
