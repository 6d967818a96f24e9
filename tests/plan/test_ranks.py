"""Prices beside what compilers said of the same layouts, as benchmarks/results/plan_rank.json keeps them."""

import math
import statistics

import pytest

from benchmarks import plan
from gspmd_lm.foresight import known_errors
from gspmd_lm.hardware import target as targets

CASES = [
    "1b-v6e:2x4",
    "8b-h100:8",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("8b-v5e:4x8", "1b-v5p:2x2x2")),
]


@pytest.fixture(scope="module", params=CASES)
def bench(request):
    return plan.Bench(request.param, "plan_rank")


@pytest.fixture(scope="module")
def points(bench):
    """The rows of a case that have memory enough, each with its price."""
    estimated = [(bench.estimate(row["rules"]), row) for row in bench.rows() if row["fits"]]
    return [(price, row) for price, row in estimated if bench.rankable(price)]


def test_prices_order_layouts_as_compiled_predictions_do(points):
    assert len(points) >= 15
    assert plan.spearman(*zip(*((price.step_time_s, row["step_time_s"]) for price, row in points), strict=True)) >= 0.9


def test_memory_is_estimated_within_a_sixth(points):
    for price, row in points:
        assert price.peak_bytes == pytest.approx(row["peak_bytes"], rel=1 / 6), plan.describe(row["rules"])


def test_the_known_error_of_prices_is_that_of_what_is_recorded(bench, points):
    count, error = known_errors.estimate_error(bench.target)
    errors = [abs(math.log(price.step_time_s / row["step_time_s"])) for price, row in points]
    if bench.target.chip.name in ("v5e", "v6e"):  # one case tells all that is known
        assert (count, error) == (len(points), pytest.approx(statistics.mean(errors), abs=1e-3))
    assert count >= len(points)


def test_where_nothing_was_compiled_no_error_of_prices_is_known():
    assert known_errors.estimate_error(targets.parse("v4:4x4x4")) is None
    assert known_errors.estimate_error(targets.parse("cpu:8")) is None


@pytest.mark.long
@pytest.mark.parametrize("name", ["8-layers-h100:8", pytest.param("8-layers-h100:2x8", marks=pytest.mark.slow)])
def test_pipelines_are_estimated_as_well_as_layouts_without(name):
    bench = plan.Bench(name, "plan_stages")
    points = [(bench.estimate(row["rules"]), row) for row in bench.rows()]
    assert sum("pipeline" in row["rules"] for _, row in points) >= 4
    for estimate, row in points:
        assert estimate.step_time_s == pytest.approx(row["step_time_s"], rel=0.08), plan.describe(row["rules"])
        assert estimate.peak_bytes == pytest.approx(row["peak_bytes"], rel=1 / 5), plan.describe(row["rules"])
    assert plan.spearman(*zip(*((one.step_time_s, row["step_time_s"]) for one, row in points), strict=True)) >= 0.85
