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
from gspmd_lm.train import state

PIPELINES = {
    "turn": (Pipeline(4), Remat("block")),
    "repeats": (Pipeline(2, repeats=2), Remat("dots")),
    "step": (Pipeline(4, gather="step"), Remat("names", ("q",))),
    "nothing is computed again": (Pipeline(4), Remat()),
    "nothing is computed again, step": (Pipeline(2, repeats=4, gather="step"), Remat()),
}
BY_DEFAULT = ("turn", "repeats", "step")


@pytest.fixture(scope="module")
def simulated(llama, traces_of):
    return Estimator(llama, targets.parse("cpu:8"), traces_of(llama))


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
    # Positions are left out, and what is one number for each token.
    assert estimate == pytest.approx(sent, rel=3e-4)


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


def test_all_turns_keep_what_the_backward_pass_needs(estimated):
    """A microbatch is half of the rows, and in each of 3 turns a stage keeps the inputs of its layers."""
    block, offloaded = (
        estimated(staged({"microbatches": 2}, remat)) for remat in ("block", {"offload": ["layer_input"]})
    )
    assert block.peak_bytes - offloaded.peak_bytes == 3 * 16 * 8192 * 4096 * 2


@pytest.fixture(scope="module")
def config(small):
    return small(compute_dtype="bfloat16", kv_heads=4, layers=4, data={"batch": 16})


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
