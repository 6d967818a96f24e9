"""Rules become the plain values of a rules file, which make the same rules."""

from pathlib import Path

import pytest

from gspmd_lm.sharding import rules_file
from tests.show.test_arrays import KEYS

SHIPPED = sorted((Path(__file__).parents[2] / "rules").glob("*.yaml"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_rules_are_read_again_as_they_were(path):
    rules = rules_file.load(str(path))
    again = rules_file.from_dict(rules_file.to_dict(rules), "again")
    assert again.facts() == rules.facts() and not again.problems


@pytest.mark.parametrize("key", KEYS)
def test_every_key_comes_back(key):
    raw = {"mesh": {"stage": 2}, "weights": {"layers": "stage", "wq.embed": None}, key: KEYS[key][0]}
    values = rules_file.to_dict(rules_file.from_dict(raw, "here"))
    assert set(values) == set(raw)
    assert rules_file.from_dict(values, "here").facts() == rules_file.from_dict(raw, "here").facts()


@pytest.mark.parametrize("remat", [{}, {"save": [], "offload": []}])
def test_rules_that_keep_nothing_come_back_as_such(remat):
    rules = rules_file.from_dict({"mesh": {"data": 8}, "remat": remat}, "here")
    assert rules_file.to_dict(rules)["remat"] == rules.remat.policy == "block"


def test_what_is_at_its_default_is_left_out():
    raw = {"mesh": {"data": 8}, "rules": {"batch": "data"}, "remat": "none", "microbatches": 1, "dcn": {}}
    assert rules_file.to_dict(rules_file.from_dict(raw, "here")) == {"mesh": {"data": 8}, "rules": {"batch": "data"}}
