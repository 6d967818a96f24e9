"""Masks of objects: the loss is the same under every layout, it is what it says, and wrong settings are refused."""

import types
from typing import Any

import jax
import numpy as np
import pytest

from gspmd_lm.config import Images, Masks, Patches, RelativePositions, Windows
from gspmd_lm.errors import InputError
from gspmd_lm.model.families import apply
from gspmd_lm.model.families.sam import MASKS, Drawn
from gspmd_lm.sharding import rules_file
from gspmd_lm.train import progress, state
from tests.courses import agree, weights

# 6 x 6 patches: windows of 4 reach beyond them. Two layers, of which the second sees the whole image.
SAM = {
    "objective": "masks", "masks": Masks(embed=32, mlp=64), "attention.mask": "full", "norm.kind": "layernorm",
    "norm.bias": True,
    "feed_forward.kind": "plain", "feed_forward.activation": "gelu", "positions": "learned", "attention.qkv_bias": True,
    "attention.out_bias": True,
    "feed_forward.bias": True, "vocab": 0, "padded_vocab": 0, "norm.final": False, "layer_pattern": ("full", "whole"),
    "patches": Patches(image=24, size=4, class_row=False, pool="mean"), "context": 36,
    "windows": Windows(size=4, vectors=True),
}  # fmt: skip
ROWS = {"seq": 40}  # 36 patches, and padding up to what 8 devices divide
# Without mask prompts, nothing depends on what reads them. Softmax does not know what all keys have in common.
UNSEEN = ("mask_in_bias", "mask_middle_bias", "mask_out_bias", "mask_in_norm.scale", "mask_in_norm.bias",
          "mask_middle_norm.scale", "mask_middle_norm.bias", "bk")  # fmt: skip
LAYOUTS = ("fsdp8", "tp8", "fsdp2_tp4", "zero1_8")


# By default without what images have by themselves: test_image_layouts.py has their norms and biases.
NAMES = (
    "objective",
    "masks",
    "attention.mask",
    "feed_forward.kind",
    "vocab",
    "padded_vocab",
    "patches",
    "context",
    "windows",
)
LEAN = {name: SAM[name] for name in NAMES} | {
    "layers": 1, "positions": "none", "masks": Masks(embed=32, layers=1, mlp=64), "norm.final": False,
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        ("fsdp2_tp4", LEAN),
        *(pytest.param(layout, SAM, marks=pytest.mark.slow) for layout in LAYOUTS),
        pytest.param("fsdp2_tp4", SAM | {"dropout": 0.1}, marks=pytest.mark.slow),
    ],
)
def test_a_layout_changes_nothing(layout, kind, small, course):
    settings = small(optimizer={"clip_norm": 0.0, "learning_rate": 3.0e-3}, data=ROWS, **kind)
    alone, found = course(settings, "single", unroll=1), course(settings, layout)
    # Where patches attend to tokens, these are nearly alike: gradients are a thousandth of what they are sums of.
    agree(found, alone, rtol=1e-6, atol=0, unseen=UNSEEN, gradients=1e-4)


@pytest.fixture(scope="module")
def drawn_before():
    """Masks of three rows, of which the last one holds no object, and the objects."""
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 2, (3, 5, 16))
    pixels[:, 4], pixels[2] = -1, -1
    return Drawn(3 * rng.standard_normal((3, 4, 5, 16)).astype(np.float32), rng.random((3, 4), np.float32)), pixels


def test_the_loss_is_focal_and_dice_and_the_quality_of_masks(drawn_before):
    drawn, pixels = drawn_before
    model: Any = types.SimpleNamespace(apply=lambda *_: drawn)
    losses, quality = np.zeros((2, 4)), np.zeros((2, 4))
    for row in range(2):
        is_object = pixels[row, :4].astype(bool)
        for mask in range(4):
            share = 1 / (1 + np.exp(-drawn.masks_BMTP[row, mask, :4].astype(np.float64)))
            right = np.where(is_object, share, 1 - share)
            focal = -(np.where(is_object, 0.25, 0.75) * (1 - right) ** 2 * np.log(right)).mean()
            dice = 1 - (2 * share[is_object].sum() + 1) / (share.sum() + is_object.sum() + 1)
            losses[row, mask], found = 20 * focal + dice, share > 0.5
            quality[row, mask] = (found & is_object).sum() / (found | is_object).sum()
    want = losses[:, 0] + losses[:, 1:].min(1) + ((drawn.iou_BM[:2] - quality) ** 2).mean(1)
    found = jax.jit(lambda pixels: MASKS.evaluate(model, None, {"object": pixels}))(pixels)
    np.testing.assert_allclose(found["loss"], want.sum(), rtol=1e-5)
    scores = MASKS.scores({name: float(value) for name, value in found.items()})
    np.testing.assert_allclose(scores["eval_iou"], quality[:, 0].mean(), rtol=1e-6)
    assert progress.describe_scored(scores) == "2 objects were scored"


@pytest.mark.long
def test_what_is_beside_the_image_changes_no_mask(small):
    model = small(data=ROWS, **LEAN).model
    rng = np.random.default_rng(0)
    batch = {"patches": rng.standard_normal((1, 40, 48)).astype(np.float32), "row": np.arange(1),
             "points": rng.random((1, 2, 2), np.float32), "point_kinds": np.array([[1, -1]])}  # fmt: skip
    run = jax.jit(lambda batch: apply(model, weights(model), batch))
    found = run(batch)
    other = batch["patches"].copy()
    other[:, 36:] = 9.0
    np.testing.assert_array_equal(run(batch | {"patches": other}).masks_BMTP[:, :, :36], found.masks_BMTP[:, :, :36])
    points = batch["points"].copy()
    points[:, 1] = 0.5  # of what is no point
    np.testing.assert_array_equal(run(batch | {"points": points}).iou_BM, found.iou_BM)
    points[:, 0] = 0.5
    assert np.abs(run(batch | {"points": points}).iou_BM - found.iou_BM).max() > 1e-4


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ("cp8", r"model\.masks: its neck reads all around a patch, and no device has all of a row"),
        ("pp2_fsdp2_tp2", r"which model\.windows does not go with(.|\n)*rules\.pipeline=null"),
    ],
)
def test_rules_that_masks_do_not_go_with_are_refused(layout, words, small):
    with pytest.raises(InputError, match=words):
        state.arrays_and_warnings(small(data=ROWS, **LEAN), rules_file.load(layout).fill(8), "cpu")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"objective": "classes"}, "objective: classes needs model.classes. With model.masks, it is masks: leave obj"),
        ({"classes.count": 3}, "classes does not go with masks"),
        ({"attention.mask": "causal", "windows": None, "layer_pattern": ()}, "mask: causal does not go with patches"),
        ({"masks": None}, "objective: masks needs model.masks"),
        ({"masks": Masks(embed=32, heads=6)}, "masks.embed=32 / narrowing=2 does not divide over heads=6"),
        (
            {"masks": Masks(embed=32), "shared_layers": True, "layer_pattern": ()},
            "masks does not go with shared_layers",
        ),
        (
            {"patches": Patches(image=24, size=4), "context": 37, "data": {"seq": 40}},
            "masks needs patches without a row",
        ),
        ({"windows": None}, "layer_pattern has whole layers: set windows"),
        ({"windows": Windows(size=4, shift=1)}, "windows.size=4 does not divide the patches on a side of a level"),
        (
            {"attention.relative_positions": RelativePositions(side=4, ranges=49, learned_row=False, shared=False)},
            "windows.vectors and layers of kind whole do not go with attention.relative_positions",
        ),
        ({"data": {**ROWS, "images": Images(resize=30)}}, "objective: masks does not go with data.images.resize and k"),
        ({"data": {**ROWS, "fields": ("a",)}}, r"masks needs data.fields=\[image, mask\] or \[image, mask, prompt\]"),
        ({"data": {**ROWS, "fields": ("a", "b"), "label": "c"}}, r"prompt\], without data.label: this config has"),
        ({"data": {**ROWS, "messages_field": "m"}}, r"without data.label: this config has data.messages_field"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(changes, words, small):
    with pytest.raises(ValueError, match=words):
        small(**{**SAM, "data": ROWS, **changes})
