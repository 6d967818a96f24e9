"""Layouts of published models that are kept in benchmarks/plans: a change of estimates, or a slower plan, is seen.

`pytest -n 0 -m slow tests/plan/test_plan_table.py` plans one pair again.
"""

import json

import pytest

from benchmarks import plan_table
from gspmd_lm.plan.estimate import Estimator
from gspmd_lm.sharding import rules_file
from gspmd_lm.train import choices

KEPT = [pair for pair in plan_table.pairs() if "estimate_s" in plan_table.facts(pair.file)]
SAMPLED = [pair for pair in KEPT if pair.model == "gpt2_124m"][:1] + KEPT[len(KEPT) // 2 :][:1]


@pytest.mark.parametrize("pair", SAMPLED, ids=lambda pair: f"{pair.model} on {pair.target}")
def test_a_kept_layout_is_estimated_as_it_was(pair):
    config, where, _ = pair.load()
    rules = choices.settle_rules(config, rules_file.load(str(pair.file)).fill(where.devices), where.processor)
    told, found = plan_table.facts(pair.file), Estimator(config, where).estimate(rules)
    again = f"python -m benchmarks.plan_table --again --minutes={told['minutes']:g} --targets {pair.target}"
    assert found.step_time_s == pytest.approx(told["estimate_s"], rel=0.01), again


@pytest.mark.slow
def test_a_plan_is_no_slower_than_the_one_that_is_kept():
    pair = SAMPLED[0]
    before = plan_table.facts(pair.file)["step_s"]
    text = plan_table.find(pair, minutes=0)
    line = next(line for line in text.splitlines() if line.startswith(plan_table.FACTS))
    assert json.loads(line.removeprefix(plan_table.FACTS))["step_s"] <= 1.005 * before


def test_the_page_shows_what_the_files_say():
    assert (plan_table.PLANS.parent / "planned.md").read_text() == plan_table.page()


def test_every_kept_layout_is_a_rules_file_of_its_target():
    assert len(SAMPLED) == 2
    for pair in KEPT:
        devices = plan_table.targets.parse(pair.target).devices
        assert rules_file.load(str(pair.file)).fill(devices).devices == devices
