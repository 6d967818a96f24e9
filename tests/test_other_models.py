"""Models of others: what is said of them is true, whether they use the words of this package or not."""

import collections
import dataclasses
import re

import pytest
from flax import nnx

import gspmd_lm
from gspmd_lm import InputError
from gspmd_lm.hardware import target as targets
from gspmd_lm.plan import search
from gspmd_lm.plan.estimate import Estimator
from gspmd_lm.plan.space import Space
from gspmd_lm.sharding import rules_file
from tests import own_models
from tests.quick import QUICK

FSDP = {"mesh": {"fsdp": 8}, "rules": {"batch": "fsdp"}, "weights": {"width": "fsdp"}}
SEQUENCE = {
    "mesh": {"data": 2, "tensor": 4},
    "rules": {"batch": "data", "wide": "tensor", "stream.position": "tensor"},
}


def rules(raw):
    quick = {**raw, "compiler_options": {"cpu": QUICK}}
    return rules_file.from_dict(quick, "layout.yaml", vocabulary=own_models.VOCABULARY)


def test_a_model_that_reads_and_writes_a_stream_and_pools_it_is_priced_on_every_layout():
    target = targets.parse("v5e:2x4")
    space = Space(own_models.POOLED, target)
    found = search.estimated(space)
    assert len(found) > 100 and all(one.estimate.step_time_s > 0 for one in found)


def test_what_a_stream_sends_is_priced_as_the_compiler_counts_it():
    """What its blocks read is gathered and what they write reduced: once each, forward and backward."""
    layout = rules(SEQUENCE)
    estimator = Estimator(own_models.POOLED, targets.parse("cpu:8"))
    estimated = estimator.estimate(layout.fill(8)).sent_by_axis
    compiled = collections.Counter()
    for one in gspmd_lm.explain(own_models.POOLED, layout, "cpu:8").collectives:
        compiled["+".join(one.mesh_axes)] += one.bytes_per_device_per_step
    stream_bytes = 4 * own_models.ROWS // 2 * own_models.POSITIONS * own_models.WIDTH * 3 / 4
    # The input of the first block has no gradient, and that of the mean is the same at all positions: a price does not
    # know either.
    assert estimated["tensor"] == pytest.approx(2 * 4 * stream_bytes, rel=0.01)
    assert compiled["tensor"] == pytest.approx((2 * 4 - 2) * stream_bytes, rel=0.03)
    assert estimated["data"] == pytest.approx(compiled["data"], rel=0.02)


def test_what_places_nothing_is_said_and_not_shown_as_placed():
    page = gspmd_lm.dry_run(own_models.PLAIN, rules(FSDP))
    assert "nn.with_logical_constraint: calls of it, 1 in all, place nothing here" in page
    assert "up.kernel: read without use(), so `rules` does not place it" in page
    assert re.search(r"up.kernel +width wide +128 x 512 +width/fsdp +width/fsdp ", page)
    said = gspmd_lm.dry_run(own_models.POOLED, rules(FSDP))
    assert "warning" not in said
    assert re.search(r"block_0.up +width wide +128 x 512 +width/fsdp +replicated ", said)


def test_explain_does_not_say_of_split_weights_that_all_devices_compute_the_same():
    split = {"mesh": {"tensor": 8}, "rules": {"wide": "tensor"}}
    report = gspmd_lm.explain(own_models.PLAIN, rules(split), "cpu:8")
    assert [one.code for one in report.warnings] == ["rule-matched-nothing"]
    assert "with_logical_constraint" in report.warnings[0].message


def test_a_task_that_another_module_has_configured_is_refused(monkeypatch):
    monkeypatch.setattr(own_models, "WIDE", 2 * own_models.WIDE)
    with pytest.raises(InputError) as error:
        gspmd_lm.explain(own_models.task("configured", own_models.Plain()), rules(FSDP), "cpu:8")
    assert "task configured: its functions have other sizes in the process that compiles" in str(error.value)
    assert "head.kernel: [1024, 8] here, [512, 8] there" in str(error.value)
    handed = own_models.task("handed", own_models.Plain(hidden_units=own_models.WIDE))
    assert gspmd_lm.explain(handed, rules(FSDP), "cpu:8").parameters == 1024 * (128 + 8)


class Layers(nnx.Module):
    """A model of NNX, with a list, whose keys are numbers."""

    def __init__(self, rngs):
        kernel = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("width", "wide"))
        self.layers = nnx.List(nnx.Linear(128, 128, use_bias=False, kernel_init=kernel, rngs=rngs) for _ in range(2))

    def __call__(self, rows_BPW):
        for layer in self.layers:
            rows_BPW = layer(rows_BPW)
        return rows_BPW.mean(1)


@pytest.fixture
def lazily():
    before = nnx.using_eager_sharding()
    nnx.use_eager_sharding(False)
    yield
    nnx.use_eager_sharding(before)


def test_the_state_of_an_nnx_module_is_refused_and_what_the_fix_names_works(lazily):
    def init(key):
        return nnx.split(Layers(nnx.Rngs(key)))[1]

    state = own_models.task("nnx", nnx.bridge.to_linen(Layers))
    wrong = dataclasses.replace(state, init=init)
    with pytest.raises(InputError) as error:
        gspmd_lm.dry_run(wrong, rules(FSDP))
    assert "the model's parameters are not nested dicts of arrays: .value in ['layers'][0]" in str(error.value)
    assert "flax.nnx.bridge.to_linen" in str(error.value)
    assert "layers.0.kernel" in gspmd_lm.dry_run(state, rules(FSDP))
