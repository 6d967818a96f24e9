"""When the stages of a pipeline gather their weights where rules leave it open, and what is said of it."""

import dataclasses

import pytest

from gspmd_lm.config import with_values
from gspmd_lm.foresight import explain
from gspmd_lm.hardware import target as targets
from gspmd_lm.hardware.chips import CHIPS, Processor
from gspmd_lm.sharding import rules_file
from gspmd_lm.sharding.rules import Pipeline
from gspmd_lm.sharding.shapes import pairs
from gspmd_lm.train import choices, decoder, state

H100, CPU = (targets.parse(text).processor for text in ("h100:8", "cpu:8"))
EXPERTS = {"experts.count": 8, "experts.per_token": 2, "experts.mlp": 16}


def rules_of(fsdp=4, optimizer=None, **pipeline):
    raw = {
        "mesh": {"stage": 2, "data": 4 // fsdp, "fsdp": fsdp}, "rules": {"batch": ["stage", "data", "fsdp"]},
        "weights": {"layers": "stage", "embed": "fsdp"}, "optimizer": optimizer or {}, "remat": "block",
        "pipeline": {"microbatches": 4, **pipeline},
    }  # fmt: skip
    return rules_file.from_dict(raw, "here.yaml").fill(8)


@pytest.fixture(scope="module")
def config(small):
    return small(compute_dtype="bfloat16", matmul_precision="default", layers=4)


@pytest.mark.parametrize(
    ("rules", "on", "model", "said"),
    [
        (rules_of(), H100, {}, "step, which holds "),
        (rules_of(fsdp=2), H100, {}, "step, which holds "),
        (rules_of(fsdp=1), H100, {}, ""),  # sums over replicas come once anyway
        (rules_of(fsdp=1, optimizer={"embed": "data"}), H100, {}, "step, which holds "),
        (rules_of(), CPU, {}, ""),
        (rules_of(), Processor("gpu", "Some New GPU"), {}, "turn, since the memory of Some New GPU is not known"),
        (rules_of(gather="turn"), H100, {}, ""),
        (rules_of(gather="step"), H100, {}, ""),
        (rules_of(schedule="1f1b"), H100, {}, "turn, since schedule: 1f1b does not go with step"),
        (rules_of(), H100, EXPERTS, "turn, since layers with model.experts.count=8 gather their weights in each turn"),
    ],
)
def test_stages_gather_once_where_that_is_possible_and_useful(rules, on, model, said, config):
    config = dataclasses.replace(config, model=with_values(config.model, model))
    chosen = choices.settle_rules(config, rules, on)
    assert choices.settle_rules(config, chosen, on) == chosen
    found = choices.gather_choice(decoder.task(config), chosen, on)
    assert found.startswith(said) and bool(found) == bool(said)
    assert chosen.pipeline.gathers_once == (said.startswith("step") or rules.pipeline.gather == "step")
    assert chosen.pipeline.plain == rules.pipeline.plain  # what a message says that the file says


def test_they_gather_in_turns_where_memory_is_short(config, monkeypatch):
    monkeypatch.setattr(choices, "COUNTED_SHARE", 1e-9)
    rules, task = choices.settle_rules(config, rules_of(), H100), decoder.task(config)
    assert not rules.pipeline.gathers_once
    _, counted = choices._count_held_bytes(task, rules)
    said = choices.gather_choice(task, rules, H100)
    assert said == f"turn, since with step {counted / 1e3:.1f} kB of 78.2 GB are counted, more than 0%"
    assert CHIPS["h100"].usable_hbm_bytes == pytest.approx(78.2e9, rel=1e-3)


def test_what_is_counted_is_held_by_a_device(config):
    arrays, rules = state.arrays(config), rules_of()
    leaves = pairs(arrays.named_params, arrays.params)
    weights = sum(like.size for _, like in leaves)
    of_layers = sum(like.size for leaf, like in leaves if "layers" in leaf.axes)
    more, counted = choices._count_held_bytes(decoder.task(config), rules)
    assert more == (2 + 4) * of_layers / 2
    at_rest = 4 * 4 * (of_layers / 2 + weights - of_layers) / 4  # weights, gradients and two moments, over fsdp
    inputs = 5 * 2 * config.data.batch // 4 // 4 * config.data.seq * config.model.embed * 2  # of 2 layers in 5 turns
    assert counted == pytest.approx(at_rest + more + inputs, abs=1e3)


def test_explain_and_a_run_say_what_was_chosen(config, built):
    target = targets.parse("h100:8")
    asked = explain.settle_layout(decoder.task(config), rules_of(), target)
    assert asked == choices.settle_rules(config, rules_of(), target.processor)
    step = built(config, dataclasses.replace(rules_of(), pipeline=Pipeline(4)))
    assert step.rules.pipeline.chosen == "turn" and not any(one.startswith("gather") for one in step.choices)
