"""What each row changes in which two layouts differ, against what is known of sharding."""

import json

import pytest

from gspmd_lm import config as configs
from gspmd_lm.errors import InputError
from gspmd_lm.hardware import target as targets
from gspmd_lm.plan.estimate import Estimator
from gspmd_lm.plan.row_changes import compare_rows, to_json
from gspmd_lm.sharding import rules_file
from gspmd_lm.train.choices import settle_rules

TINY = configs.load("tiny")
LAYERS = TINY.model.layers


@pytest.fixture(scope="module")
def compare(traces_of):
    """A function that compares two rules files of tiny, the second one with `overrides`."""

    def make(before, after, *overrides, target="v5p:2x2x2"):
        rules = [rules_file.load(before), rules_file.load(after, overrides=overrides)]
        place = targets.parse(target)
        return compare_rows(TINY, *rules, place, Estimator(TINY, place, traces_of(TINY)))

    return make


def collectives(change, purpose, in_layers=True):
    """Kind -> times before and after, and bytes before and after."""
    return {
        one.collective: (one.times_before, one.times_after, one.bytes_before, one.bytes_after)
        for one in change.collectives
        if (one.purpose, one.in_layers) == (purpose, in_layers)
    }


def test_a_split_residual_stream_makes_two_collectives_of_each_reduction(compare):
    """Four reductions in each layer, of 2 (n-1)/n; then as many scatters and gathers, of (n-1)/n each."""
    (change,) = compare("tp8", "tp8", "rules.rules.residual.seq=tensor").changes
    assert [str(row) for row in change.rows] == ["+ rules.residual.seq: tensor"]
    sent = collectives(change, "activations")
    times, size = 4 * LAYERS, TINY.data.batch * TINY.data.seq * TINY.model.embed * 4  # float32
    each = size * 7 // 8
    assert sent == {
        "all-reduce": (times, 0, 2 * times * each, 0),
        "reduce-scatter": (0, times, 0, times * each),
        "all-gather": (0, times, 0, times * each),
    }
    assert [array.path for array in change.arrays] == ["residual"]
    assert change.arrays[0].before.in_use == ((), (), ()) and change.arrays[0].after.in_use == ((), ("tensor",), ())


def test_the_optimizer_row_of_zero1_moves_the_state_alone(compare):
    (change,) = compare("dp8", "zero1_8").changes
    assert {array.path for array in change.arrays} >= {"embedding", "layers.attention.wq"}
    for array in change.arrays:
        assert array.before.at_rest == array.after.at_rest and array.before.in_use == array.after.in_use
        assert array.after.optimizer.bytes_per_device * 8 == array.before.optimizer.bytes_per_device
    assert set(collectives(change, "gradients")) == {"all-reduce", "reduce-scatter"}
    assert change.after.peak_bytes < change.before.peak_bytes


def test_changes_lead_from_one_estimate_to_the_other(compare, traces_of):
    compared = compare("fsdp8", "pp2_fsdp2_tp2")
    ends = [compared.changes[0].before, compared.changes[-1].after]
    assert ends == list(compared.estimates)
    for first, second in zip(compared.changes, compared.changes[1:], strict=False):
        assert first.after == second.before
    place = targets.parse("v5p:2x2x2")
    rules = settle_rules(TINY, rules_file.load("pp2_fsdp2_tp2").fill(8), place.processor)
    assert ends[1] == Estimator(TINY, place, traces_of(TINY)).estimate(rules)
    for change in compared.changes:
        difference = sum(one.bytes_after - one.bytes_before for one in change.collectives)
        assert difference == pytest.approx(change.after.sent_bytes - change.before.sent_bytes, abs=50)


def test_rows_that_cannot_stand_alone_are_one_change(compare):
    """Another mesh goes with the row that names its axis, and each row after that stands alone."""
    changes = compare("dp8", "tp8").changes
    keys = [[row.key for row in change.rows] for change in changes]
    assert keys == [["mesh", "rules.batch", "rules.vocab"], ["rules.heads"], ["rules.kv_heads"], ["rules.mlp"]]
    assert [str(row) for row in changes[0].rows] == [
        "~ mesh: {data: 8} -> {tensor: 8}",
        "- rules.batch: data",
        "+ rules.vocab: tensor",
    ]


def test_a_mesh_axis_that_is_idle_in_both_files_is_no_reason_to_wait(compare):
    changes = compare("dp2_tp4", "dp2_tp4", "rules.rules.batch=null", "rules.rules.residual.seq=tensor").changes
    assert [[row.key for row in change.rows] for change in changes] == [["rules.batch"], ["rules.residual.seq"]]


def test_keys_other_than_rows_are_changes_too(compare):
    changes = compare("fsdp8", "fsdp8", "rules.remat=none", "rules.microbatches=2").changes
    assert [str(row) for change in changes for row in change.rows] == ["- remat: block", "+ microbatches: 2"]
    assert changes[0].after.peak_bytes > changes[0].before.peak_bytes
    assert not changes[0].arrays and not changes[1].arrays


def test_other_sizes_of_the_mesh_move_arrays(compare):
    (change,) = compare("dp2_tp4", "dp2_tp4", "rules.mesh={data: 4, tensor: 2}").changes
    assert "layers.attention.wq" in {array.path for array in change.arrays}
    assert all(array.before.in_use == array.after.in_use for array in change.arrays)


def test_equal_layouts_have_no_changes(compare):
    compared = compare("tp8", "decode_tp8", target="cpu:8")
    assert compared.changes == () and not compared.timed and compared.limit_bytes is None
    assert compare("fsdp8", "fsdp").changes == (), "a size of -1 is filled from the target"


def test_what_is_wrong_with_either_file_is_said(compare):
    with pytest.raises(InputError, match="sizes multiply to 3"):
        compare("fsdp8", "fsdp8", "rules.mesh.fsdp=3")
    with pytest.raises(InputError, match="microbatches=3"):
        compare("fsdp8", "fsdp8", "rules.microbatches=3")


def test_the_json_has_plain_values(compare):
    value = to_json(compare("dp8", "zero1_8"))
    assert json.loads(json.dumps(value)) == value
    assert value["changes"][0]["rows"] == [{"key": "optimizer.embed", "before": None, "after": "data"}]
    assert value["changes"][0]["after"]["peak_bytes"] == value["estimates"][1]["peak_bytes"]


def test_a_model_of_ones_own(mixer):
    """Rules with the vocabulary of a task, and a layout of several arrays that only together are split."""
    load = [rules_file.load(f"examples/rules/{name}", vocabulary=mixer.names) for name in ("data", "fsdp")]
    compared = compare_rows(mixer, *load, targets.parse("h100:8"))
    assert compared.config == mixer.name and compared.changes
    assert compared.changes[-1].after == compared.estimates[1]
