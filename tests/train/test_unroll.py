"""Layers that are written out one after the other compute what a loop over them computes."""

import numpy as np
import pytest

from benchmarks.one_device import moved_bytes
from gspmd_lm.sharding import rules_file
from gspmd_lm.sharding.rules import Remat

LAYERS = 3


@pytest.fixture(scope="module")
def three(small, course):
    """A function that trains a model of three layers under changed rules."""
    return lambda rules="single", **changes: course(small(layers=LAYERS), rules, 2, **changes)


def layer_loops(course):
    """How many loops over layers a compiled program has. Other loops, such as that of the loss, turn more often."""
    lines = [line for line in course.program.as_text().splitlines() if " while(" in line]
    return sum(f'"known_trip_count":{{"n":"{LAYERS}"}}' in line for line in lines)


@pytest.mark.long
@pytest.mark.parametrize(
    ("rules", "unroll"),
    [
        ("single", None),  # test_promise.py compares loops of layouts with a loop of one device
        pytest.param("fsdp2_tp4", "all", marks=pytest.mark.slow),
        *(pytest.param("single", n, marks=pytest.mark.slow) for n in ("all", 2)),
    ],
)
def test_every_way_to_unroll_computes_the_same(three, rules, unroll):
    found, want = three(rules, unroll=unroll), three(unroll=1)
    for name in ("loss", "gradient_norm"):
        seen, wanted = ([values[name] for values in one.metrics] for one in (found, want))
        np.testing.assert_allclose(seen, wanted, rtol=1e-5)


@pytest.mark.long
def test_one_cpu_device_has_no_loop_by_default(three, small, built):
    assert layer_loops(three()) == 0
    assert layer_loops(three(unroll=1)) == 2  # forward and backward

    def longest(rules, **changes):
        """The turns of the longest loop that is written out."""
        return built(small(layers=LAYERS), rules, **changes).placement.setting("unroll")[0]

    assert LAYERS <= longest("single") < 9  # a program takes longer to compile the more layers are written out
    assert longest("dp8") == 0
    assert longest("single", remat=Remat("block")) == 0  # without a loop, XLA:CPU saves no memory by it


@pytest.mark.long
def test_one_cpu_device_transposes_little(small, course):
    """Matmuls sum over axes in the order in which these are stored, and attention transposes no weights of its own."""
    program = course(small(layers=LAYERS, embed=64, mlp=128), "single", 2).program
    assert moved_bytes(program.as_text())["transposed"] <= 2_752_512


@pytest.mark.parametrize("value", ["some", 0, True, 1.5])
def test_a_value_that_is_none_is_refused(value):
    rules = rules_file.from_dict({"mesh": {"data": 1}, "unroll": value}, "mine")
    (problem,) = rules.problems
    assert str(problem).endswith("fix   write a whole number from 1, or 'all'")
