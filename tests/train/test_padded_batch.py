"""Rows without targets, which fill a batch so that devices divide it, change neither loss nor gradients."""

import numpy as np
import pytest

from gspmd_lm import config as configs
from gspmd_lm.data import loader
from gspmd_lm.errors import InputError
from gspmd_lm.sharding import rules_file
from gspmd_lm.sharding.problems import ShardingError
from gspmd_lm.train import saving, state
from tests.courses import agree
from tests.train import test_encoders, test_image_layouts, test_mask_layouts, test_seq2seq, test_towers

EXPERTS = {"experts.count": 8, "experts.per_token": 2, "experts.mlp": 16, "experts.balance": "row",
           "experts.z_loss": 0.1, "init_std": 0.3, "dropout": 0.1}  # fmt: skip
KINDS = {
    "experts": EXPERTS,
    **{kind: test_encoders.KINDS[kind] for kind in ("masked", "classes", "replaced")},
    "images": test_image_layouts.VIT | {"data": test_image_layouts.ROWS},
    "masks": test_mask_layouts.LEAN | {"data": test_mask_layouts.ROWS},
    "T5": test_seq2seq.T5,
    "Whisper": test_seq2seq.WHISPER,
    "CLIP": test_towers.CLIP,
}
UNSEEN = {"masks": test_mask_layouts.UNSEEN, "experts": ()}
DEFAULT = ("experts",)


@pytest.mark.long
@pytest.mark.parametrize(
    "kind", [*DEFAULT, *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS if kind not in DEFAULT)]
)
def test_padding_changes_nothing(kind, small, course):
    """Thirteen rows on one device, and with three more on eight: two microbatches of one row for each device."""
    model = KINDS[kind]
    data = {"batch": 13, **model.get("data", {})}
    made = {padded: small(optimizer={"clip_norm": 0.0}, **(model | {"data": data | {"padded_batch": padded}}))
            for padded in (0, 16)}  # fmt: skip
    microbatches = 1 if kind == "CLIP" else 2
    alone = course(made[0], "single", unroll=1)
    found = course(made[16], rules_file.load("fsdp8", f"fsdp={8 // microbatches}"), microbatches=microbatches)
    gradients = 1e-4 if kind == "masks" else 1e-5  # as test_mask_layouts.py explains
    agree(found, alone, rtol=1e-6, atol=0, unseen=UNSEEN.get(kind, ("attention.bk",)), gradients=gradients)


@pytest.mark.parametrize("data", [{}, {"packing": "stream"}])
def test_a_loader_pads_each_step_and_skips_no_row(small, data):
    plain, padded = (
        loader.open_loaders(small(data={"batch": 6, "padded_batch": count, "held_out": 0.5, **data}))
        for count in (0, 8)
    )
    assert plain[0].fingerprint == padded[0].fingerprint and plain[0].epochs_per_step == padded[0].epochs_per_step
    for before, after in zip(plain, padded, strict=True):
        assert before and after
        for step in (0, 3, 10):
            wanted, found = before.rows_at(step, slice(None)), after.rows_at(step, slice(None))
            assert len(found["row"]) == 8 and (found["row"] == np.arange(8)).all()
            assert (found["targets"][6:] == -1).all()
            for name, array in wanted.items():
                np.testing.assert_array_equal(found[name][:6], array)


def test_what_a_batch_counts_has_no_padding(small):
    config = small(data={"batch": 13, "padded_batch": 16})
    arrays, _ = state.arrays_and_warnings(config, rules_file.load("fsdp8").fill(8), "cpu")
    assert arrays and config.data.rows == 16
    assert saving.moved_rows(5, {"batch": 13}, config.data.batch) == []
    with pytest.raises(ShardingError, match="batch=13 does not divide over fsdp=8"):
        state.arrays_and_warnings(small(data={"batch": 13}), rules_file.load("fsdp8").fill(8), "cpu")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.padded_batch=15"], "padded_batch=15 is smaller than batch=16"),
        (
            ["data.padded_batch=18", "model.experts.count=8", "model.experts.per_token=2", "model.experts.mlp=16",
             "model.experts.balance=batch"],
            "model.experts.balance: batch takes from the whole batch: set data.padded_batch to 0, or balance to row",
        ),
    ],
)  # fmt: skip
def test_padding_that_is_refused(overrides, message):
    with pytest.raises(InputError, match=message):
        configs.load("tiny", overrides)
