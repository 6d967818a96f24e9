"""Pipelines in plans: what stages send and keep, what their bubbles cost, and which of them a plan looks at."""

import dataclasses
import math

import pytest

from gspmd_lm.hardware import target as targets
from gspmd_lm.plan import variants
from gspmd_lm.plan.estimate import Estimator
from gspmd_lm.plan.space import describe
from gspmd_lm.sharding import rules_file
from gspmd_lm.sharding.rules import Pipeline, Remat
from gspmd_lm.sharding.shapes import pairs
from gspmd_lm.train import choices, state

PIPELINES = {
    "turn": (Pipeline(4), Remat("block")),
    "repeats": (Pipeline(2, repeats=2), Remat("dots")),
    "step": (Pipeline(4, gather="step"), Remat("names", ("q",))),
    "nothing is computed again": (Pipeline(4), Remat()),
    "nothing is computed again, step": (Pipeline(2, repeats=4, gather="step"), Remat()),
    "inputs alone": (Pipeline(4, keep="stage"), Remat()),
    "inputs alone, block": (Pipeline(4, keep="stage"), Remat("block")),
    "inputs alone, repeats": (Pipeline(2, repeats=2, keep="stage"), Remat("dots")),
    "inputs alone, step": (Pipeline(4, keep="stage", gather="step"), Remat("names", ("q",))),
    "1f1b": (Pipeline(4, schedule="1f1b"), Remat("block")),
    "1f1b, nothing else is computed again": (Pipeline(4, schedule="1f1b"), Remat()),
}
BY_DEFAULT = ("turn", "repeats", "step", "inputs alone", "1f1b")


@pytest.fixture(scope="module")
def simulated(llama, traces_of):
    return Estimator(llama, targets.parse("cpu:8"), traces_of(llama))


@pytest.mark.long
@pytest.mark.parametrize(
    "name", [name if name in BY_DEFAULT else pytest.param(name, marks=pytest.mark.slow) for name in PIPELINES]
)
def test_what_stages_send_is_what_the_trace_says(llama, simulated, built, read, name):
    pipeline, remat = PIPELINES[name]
    file = dataclasses.replace(rules_file.load("pp2_fsdp2_tp2"), pipeline=pipeline, remat=remat)
    step = built(llama, file)
    sent = {axes: size for axes, size in read(step).bytes_by_axes.items() if size > 1e6}
    estimate = {axes: size for axes, size in simulated.estimate(step.rules).sent_by_axis.items() if size > 1e6}
    assert set(sent) == {"stage", "fsdp", "tensor"}
    # Positions are left out, and what is one number for each token. A schedule of 1f1b looks tokens up twice, for which
    # the reader, which gives the least, gathers the table once.
    assert estimate == pytest.approx(sent, rel=6e-3 if pipeline.schedule == "1f1b" else 3e-4)


@pytest.mark.long
@pytest.mark.parametrize(
    ("pipeline", "microbatches"),
    [
        (Pipeline(4), 1),
        pytest.param(Pipeline(4, schedule="1f1b"), 1, marks=pytest.mark.slow),
        pytest.param(Pipeline(2, gather="step"), 1, marks=pytest.mark.slow),
        pytest.param(Pipeline(2), 2, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_what_replicas_of_stages_send_is_what_the_trace_says(llama, simulated, built, read, pipeline, microbatches):
    raw = {"mesh": {"data": 2, "stage": 2, "fsdp": 2}, "rules": {"batch": ["stage", "data", "fsdp"]}}
    raw |= {"weights": {"layers": "stage", "embed": "fsdp"}, "remat": "block", "microbatches": microbatches}
    rules = dataclasses.replace(rules_file.from_dict(raw, "here"), pipeline=pipeline)
    step = built(dataclasses.replace(llama, data=dataclasses.replace(llama.data, batch=16)), rules)
    sent = {axes: size for axes, size in read(step).bytes_by_axes.items() if size > 1e6}
    estimate = Estimator(step.config, targets.parse("cpu:8")).estimate(step.rules).sent_by_axis
    # With 1f1b, the cheapest way of a table's gradients over fsdp is found for all turns at once: a hundredth less.
    estimate = {axes: size for axes, size in estimate.items() if size > 1e6}
    assert estimate == pytest.approx(sent, rel=0.01 if pipeline.schedule == "1f1b" else 3e-4)
    assert estimate["data"] == pytest.approx(sent["data"], rel=3e-4)


@pytest.mark.parametrize("remat", ["block", "dots", {"save": ["attention_out", "hidden"]}], ids=str)
def test_when_to_gather_is_chosen_by_what_an_estimate_says_too(llama, traces_of, remat):
    """What is counted leaves out the layer at work, the logits and buffers, and nothing else."""
    target, traces = targets.parse("h100:8"), traces_of(llama)
    rules = rules_file.from_dict(staged({"microbatches": 2}, remat), "here").fill(8)
    once = dataclasses.replace(rules, pipeline=Pipeline(2, gather="step"))
    once = choices.settle_rules(llama, once, target.processor)
    _, counted = choices._count_held_bytes(traces.task, rules)
    assert 0.75 < counted / Estimator(llama, target, traces).estimate(once).peak_bytes < 1


def staged(pipeline, remat="block"):
    return {"mesh": {"stage": 2, "fsdp": 4}, "rules": {"batch": ["stage", "fsdp"]}, "remat": remat,
            "weights": {"layers": "stage", "embed": "fsdp"}, "pipeline": pipeline}  # fmt: skip


def test_stages_compute_in_their_bubbles_too(estimated):
    whole = {"mesh": {"fsdp": 8}, "rules": {"batch": "fsdp"}, "weights": {"embed": "fsdp"}, "remat": "block"}
    one, two = (estimated(staged({"microbatches": 2, "repeats": n}), "v5p:2x2x2") for n in (1, 2))
    once = estimated(whole, "v5p:2x2x2")
    # In 3 turns of half of the layers for each of 2 rows, or 5 turns of a quarter; the logits are no part of it.
    assert 1.35 < one.attention_s / once.attention_s < 1.55
    assert one.attention_s / two.attention_s == pytest.approx(3 / 2 / (5 / 4), rel=0.01)
    assert 1.3 < one.matmul_s / once.matmul_s < 1.5


def test_weights_that_are_gathered_once_are_held_with_their_sums(estimated, llama):
    turn, step = (estimated(staged({"microbatches": 2, "gather": gather})) for gather in ("turn", "step"))
    arrays = state.arrays(llama)
    of_layers = sum(math.prod(like.shape) for leaf, like in pairs(arrays.named_params, arrays.params)
                    if leaf.path.startswith("layers."))  # fmt: skip
    assert step.peak_bytes - turn.peak_bytes == pytest.approx((2 + 4) * of_layers / 2, abs=1)
    assert step.sent_by_axis["fsdp"] < 0.6 * turn.sent_by_axis["fsdp"]


def test_stages_that_keep_their_inputs_compute_their_layers_once_more(estimated):
    layers, least, stage = (
        estimated(staged({"microbatches": 2, **more}, remat))
        for more, remat in (({}, "block"), ({"keep": "stage"}, "block"), ({"keep": "stage"}, "none"))
    )
    assert 1.05 < stage.matmul_s / layers.matmul_s < 1.08  # the last product of a layer, too
    assert stage.attention_s == layers.attention_s
    # Inputs of 16 layers in 3 turns, or of those of one of them and of all stages.
    assert layers.peak_bytes - least.peak_bytes == (3 * 16 - 16 - 3) * 8192 * 4096 * 2


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"keep": "stage"}, {"schedule": "1f1b"}])
@pytest.mark.parametrize("remat", ["block", "none"])
def test_what_stages_keep_is_what_the_compiled_program_holds(small, built, more, remat):
    """Of 8 microbatches in 2 stages: the least is held with `1f1b`, the most with 6 times as much by default."""
    sizes = {"layers": 8, "embed": 64, "heads": 4, "kv_heads": 4, "head_dim": 16, "mlp": 128, "context": 256}
    config = small(**sizes, data={"batch": 64, "seq": 256})
    raw = {"mesh": {"stage": 2}, "rules": {"batch": "stage"}, "weights": {"layers": "stage"}, "remat": remat}
    step = built(config, rules_file.from_dict({**raw, "pipeline": {"microbatches": 8, **more}}, "two"))
    memory = step.lower_train().compile().memory_analysis()
    found = Estimator(config, targets.parse("cpu:2")).estimate(step.rules)
    assert found.peak_bytes == pytest.approx(memory.temp_size_in_bytes + memory.argument_size_in_bytes, rel=0.12)


def test_all_turns_keep_what_the_backward_pass_needs(estimated):
    """A microbatch is half of the rows, and in each of 3 turns a stage keeps the inputs of its layers."""
    block, offloaded = (
        estimated(staged({"microbatches": 2}, remat)) for remat in ("block", {"offload": ["layer_input"]})
    )
    assert block.peak_bytes - offloaded.peak_bytes == 3 * 16 * 8192 * 4096 * 2


@pytest.fixture(scope="module")
def config(small):
    return small(compute_dtype="bfloat16", kv_heads=4, layers=4, data={"batch": 4})


@pytest.fixture(scope="module")
def found(config, space_of):
    return list(space_of(config, "h100:4"))


def test_a_plan_looks_at_pipelines_that_pass_the_check(config, found):
    stages = [raw for raw in found if "pipeline" in raw]
    assert {raw["mesh"]["stage"] for raw in stages} == {2, 4}
    assert {raw["pipeline"].get("gather", "turn") for raw in stages} == {"turn", "step"}
    assert len(set(map(describe, found))) == len(found)
    for raw in stages[::23]:
        assert state.arrays_and_warnings(config, rules_file.from_dict(raw, "plan").fill(4), "gpu")[1] == []


@pytest.mark.parametrize("short", [False, True])
def test_inputs_are_tried_to_be_all_that_stages_keep_where_memory_is_short(config, space_of, monkeypatch, short):
    monkeypatch.setattr(variants, "SHORT", 0.0 if short else 1.0)
    space = space_of(config, "h100:4")
    layout = next(one for one in space._layouts() if one["mesh"].get("stage") == 2)
    found = [raw["pipeline"] for raw in space._in_microbatches(layout)]
    tried = [one for one in found if one.keys() & {"keep", "schedule"}]
    assert [(one.get("keep"), one.get("schedule")) for one in tried] == [("stage", None), (None, "1f1b")][: 2 * short]
    for pipeline in tried:
        rules = rules_file.from_dict({**layout, "pipeline": pipeline, "remat": "block"}, "plan").fill(4)
        assert state.arrays_and_warnings(config, rules, "gpu")[1] == []


def test_simulated_devices_have_no_bubbles_and_so_no_stages(config, space_of):
    assert not any("stage" in raw["mesh"] for raw in space_of(config, "cpu:4"))


def test_stages_cross_slices_before_anything_else_does():
    slices, hosts = targets.parse("4@v5e:2x2"), targets.parse("h100:4x8")
    mesh = {"stage": 2, "data": 2, "fsdp": 4}
    assert variants.across(slices, 4, mesh) == [{"stage": 2, "data": 2}]
    assert variants.across(slices, 4, {"stage": 4, "fsdp": 4}) == [{"stage": 4}]
    assert variants.across(slices, 4, {"stage": 2, "fsdp": 8}) == []
    assert variants.across(slices, 2, {"stage": 4, "fsdp": 2}) == [{"stage": 2}]
    assert variants.across(hosts, 4, mesh) == [{}]
