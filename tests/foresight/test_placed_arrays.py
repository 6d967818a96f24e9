"""The dtype and the optimizer state of the arrays of a layout, against the shapes of the state itself."""

import pytest

from gspmd_lm import config as configs
from gspmd_lm.foresight import table
from gspmd_lm.sharding import rules_file
from gspmd_lm.sharding.shapes import pairs
from gspmd_lm.train import state


def place(layout, *overrides):
    """Path -> array of tiny under a rules file, and the arrays from which it was made."""
    config, rules = configs.load("tiny", list(overrides)), rules_file.load(layout).fill(8)
    arrays = state.arrays(config)
    recorder = state.record_arrays(config, arrays, 1, rules)
    return {one.path: one for one in table.rows(config, rules, arrays, recorder.arrays, recorder.used)}, arrays, rules


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor"])
@pytest.mark.parametrize("layout", ["dp8", "zero1_8", "fsdp2_tp4"])
def test_the_states_of_weights_are_all_there_is_but_small_numbers(layout, optimizer):
    """Adafactor has two vectors for a matrix, and stand-ins of one element for what it does not keep."""
    placed, arrays, rules = place(layout, f"optimizer.name={optimizer}")
    states = pairs(arrays.named_optimizer, arrays.optimizer)
    others = [like for leaf, like in states if leaf.path not in placed]
    assert others and all(like.size <= configs.load("tiny").model.layers for like in others)
    total = sum(table.split_and_size(rules, "optimizer", *pair)[1] for pair in states)
    known = sum(one.optimizer.bytes_per_device for one in placed.values() if one.optimizer)
    assert known == total - sum(like.size * like.dtype.itemsize for like in others)


def test_the_state_is_split_by_its_own_table():
    placed, *_ = place("zero1_8")
    weight = placed["layers.mlp.w_up"]
    assert weight.at_rest == weight.in_use == ((), (), ())
    assert weight.optimizer == table.PlacedState(((), ("data",), ()), 2 * weight.bytes_per_device // 8)
    assert placed["residual"].optimizer is None


def test_dtypes():
    placed, *_ = place("dp8", "model.compute_dtype=bfloat16")
    names = ("tokens", "layers.mlp.w_up", "hidden", "logits")
    assert [placed[name].dtype for name in names] == ["int32", "float32", "bfloat16", "float32"]


def test_a_frozen_weight_has_no_state():
    placed, *_ = place("dp8", "model.frozen=[embedding]")
    assert placed["embedding"].optimizer is None and placed["unembedding"].optimizer
