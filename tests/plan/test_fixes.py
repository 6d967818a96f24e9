"""The fix of a layout that does not fit is one that was tried."""

import dataclasses
import re
import types

import pytest

from gspmd_lm import config as configs
from gspmd_lm.errors import RunFailed
from gspmd_lm.foresight.report import Finding
from gspmd_lm.hardware import target as targets
from gspmd_lm.plan import advice
from gspmd_lm.plan.estimate import Estimator
from gspmd_lm.sharding import rules_file
from gspmd_lm.train import choices
from tests.foresight.sample import LLAMA

GB = 10**9


def report_of(peak_bytes):
    memory = dataclasses.replace(LLAMA.memory, fits=False, peak_bytes=peak_bytes)
    other, large = Finding("padding", "some", "none"), Finding("does-not-fit", "too much", "")
    return dataclasses.replace(LLAMA, memory=memory, warnings=(other, large))


@pytest.fixture(scope="module")
def target():
    return targets.parse("h100:8")


@pytest.mark.long
@pytest.mark.parametrize(
    ("file", "more"),
    [
        ("fsdp8", 1.3),
        ("pp2_fsdp2_tp2", 2.4),
        *(pytest.param(file, 1.0, marks=pytest.mark.slow) for file in ("fsdp8", "pp2_fsdp2_tp2")),
    ],
)
def test_the_printed_flags_fit_by_the_estimate_that_the_compiler_has_corrected(llama, target, traces_of, file, more):
    layout = rules_file.load(file, overrides=["rules.remat=none"])
    twice = dataclasses.replace(llama, data=dataclasses.replace(llama.data, batch=2 * llama.data.batch))
    estimator = Estimator(twice, target, traces_of(twice))
    peak_bytes = estimator.estimate(layout.fill(8)).peak_bytes
    limit_bytes = target.chip.usable_hbm_bytes
    assert peak_bytes > limit_bytes
    (found,) = advice.with_fixes(twice, [report_of(round(more * peak_bytes))], [layout], target)
    kept, fixed = found.warnings
    assert kept.fix == "none"
    sets = re.findall(r"--set (rules\.\S+?),? ", fixed.fix)
    changed = rules_file.load(file, overrides=["rules.remat=none", *sets]).fill(8)
    changed = choices.settle_rules(twice, changed, target.processor)
    assert ("rules.pipeline.keep=stage" in sets) == (more == 2.4)
    assert sets and more * estimator.estimate(changed).peak_bytes <= advice.SURE * limit_bytes


def test_stages_that_gather_once_may_be_told_to_gather_in_turns(llama, target, traces_of):
    layout = rules_file.load("pp2_fsdp2_tp2", overrides=["rules.pipeline.gather=step"])
    peak_bytes = Estimator(llama, target, traces_of(llama)).estimate(layout.fill(8)).peak_bytes
    (found,) = advice.with_fixes(llama, [report_of(round(1.1 * target.chip.usable_hbm_bytes))], [layout], target)
    assert peak_bytes < target.chip.usable_hbm_bytes
    assert "--set rules.pipeline.gather=turn" in found.warnings[1].fix


@pytest.mark.long
def test_what_no_flag_makes_fit_is_said(llama, target):
    layout = rules_file.load("fsdp8")
    (found,) = advice.with_fixes(llama, [report_of(10**18)], [layout], target)
    assert found.warnings[1].fix.startswith("no rules.remat and no rules.microbatches is estimated to fit")
    assert "--set" not in found.warnings[1].fix


def test_stages_that_keep_their_inputs_alone_are_tried_before_nothing_is_said_to_fit(llama, target):
    name, before = "pp2_fsdp2_tp2", report_of(10**18)
    layouts = [rules_file.load(name), rules_file.load(name, overrides=["rules.pipeline.keep=stage"])]
    first, second = (found.warnings[1].fix for found in advice.with_fixes(llama, [before] * 2, layouts, target))
    assert first == second.replace(" is estimated", ", not even with rules.pipeline.keep=stage, is estimated")


@pytest.mark.long
def test_settings_that_would_save_memory_are_named_and_half_of_one_row_is_none_of_them():
    config, target = configs.load("tiny", ["data.batch=1"]), targets.parse("v5e:1x1")
    estimator = Estimator(config, target)
    layout = rules_file.from_dict({"mesh": {"data": 1}}, "one").fill(1)
    nearest = types.SimpleNamespace(rules=layout, estimate=estimator.estimate(layout))
    saved = dict(advice.savings(config, types.SimpleNamespace(nearest=nearest, target=target)))
    assert {
        "data.seq=64",
        "model.weight_dtype=bfloat16",
        "optimizer.name=adafactor",
        "optimizer.mu_dtype=bfloat16",
    } == saved.keys()
    assert all(size > 0 for size in saved.values()) and [*saved.values()] == sorted(saved.values(), reverse=True)


def test_a_batch_that_is_filled_up_is_doubled_with_its_padding():
    config, target = configs.load("tiny", ["data.batch=6", "data.padded_batch=8"]), targets.parse("v5e:1x1")
    layout = rules_file.from_dict({"mesh": {"data": 1}}, "one").fill(1)
    best = types.SimpleNamespace(rules=layout, step_time_s=Estimator(config, target).estimate(layout).step_time_s)
    changed = advice.changes(config, types.SimpleNamespace(best=best, target=target, candidates=()))
    assert all(change.gain < 1 for change in changed)  # twice the rows take longer


def test_a_larger_target_whose_compiler_fails_is_left_out(monkeypatch):
    def fail(*args):
        raise RunFailed("the compiler was killed")

    monkeypatch.setattr(advice, "estimate_layouts", lambda *args: [layout])
    monkeypatch.setattr(advice.explain, "reports", fail)
    layout = types.SimpleNamespace(name="fsdp 8", rules=None, estimate=types.SimpleNamespace(peak_bytes=1))
    said, plan = [], types.SimpleNamespace(target=targets.parse("v5e:1x1"))
    assert advice.larger(configs.load("tiny"), plan, said.append) is None
    assert said.count("left out: fsdp 8: the compiler was killed") == advice.MOST_LARGER
