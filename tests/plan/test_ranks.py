"""Prices beside what compilers said of the same layouts, as benchmarks/results/plan_rank.json keeps them."""

import pytest

from benchmarks import plan


@pytest.fixture(scope="module", params=["8b-v5e:4x8", "1b-v6e:2x4", "1b-v5p:2x2x2", "8b-h100:8"])
def points(request):
    """The rows of a case that have memory enough, each with its price."""
    bench = plan.Bench(request.param, "plan_rank")
    priced = [(bench.price(row["rules"]), row) for row in bench.rows() if row["fits"]]
    return [(price, row) for price, row in priced if bench.rankable(price)]


def test_prices_order_layouts_as_compiled_predictions_do(points):
    assert len(points) >= 15
    assert plan.spearman(*zip(*((price.step_time_s, row["step_time_s"]) for price, row in points), strict=True)) >= 0.9


def test_memory_is_estimated_within_a_sixth(points):
    for price, row in points:
        assert price.peak_bytes == pytest.approx(row["peak_bytes"], rel=1 / 6), plan.describe(row["rules"])
