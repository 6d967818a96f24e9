"""Images cut into patches: the loss is the same under every layout, and padding and wrong sizes are dealt with."""

import dataclasses

import pytest

from gspmd_lm.config import Lora, RelativePositions, Windows
from gspmd_lm.config.media import Images, Patches
from gspmd_lm.config.windows import Level
from gspmd_lm.errors import InputError
from gspmd_lm.sharding import rules_file
from gspmd_lm.train import state
from tests.courses import agree

VIT = {
    "objective": "classes", "classes.count": 3, "attention.mask": "full", "norm.kind": "layernorm", "norm.bias": True,
    "feed_forward.kind": "plain",
    "feed_forward.activation": "gelu", "positions": "learned", "attention.qkv_bias": True, "attention.out_bias": True,
    "feed_forward.bias": True,
    "vocab": 0, "padded_vocab": 0, "patches": Patches(image=16, size=4), "context": 17,
}  # fmt: skip
ROWS = {"seq": 24}  # 17 rows of an image, and padding up to what 8 devices divide
DEIT = {**VIT, "patches": Patches(image=12, size=4, channels=1, distillation="head"), "context": 11}
BEIT = {
    **VIT, "patches": Patches(image=16, size=4, pool="mean"), "positions": "none", "norm.final": False,
    "attention.key_bias": False, "residual.layer_scale": 0.1,
    "attention.relative_positions": RelativePositions(side=4, ranges=52, shared=False),
}  # fmt: skip
# 4 x 4 patches in four windows, and then 2 x 2 in one, with as many rows of padding.
LEVEL = Level(layers=1, embed=64, heads=16, mlp=128)
SWIN = {
    **VIT, "patches": Patches(image=16, size=4, class_row=False, pool="mean"), "context": 16, "positions": "none",
    "attention.relative_positions": RelativePositions(side=2, ranges=9, shared=False, learned_row=False),
    "embedding.norm": True,
    "windows": Windows(size=2, shift=1, levels=(LEVEL,)),
    "layer_pattern": ("full", "shifted"), "row_multiple": 8,
}  # fmt: skip
ODD, TWELVE = Windows(size=3, shift=1, levels=(LEVEL,)), Patches(image=12, size=2, class_row=False, pool="mean")
BIASED = {**VIT, "residual.layer_scale": 0.1, "attention.relative_positions": BEIT["attention.relative_positions"]}
OTHERS = {"vit": VIT, "deit": {**DEIT, "dropout": 0.1}, "beit": BEIT}
# Windows that are shifted, and then all of an image in one.
SHIFTED = {**SWIN, "layers": 1, "layer_pattern": ("shifted",)}
KINDS = {"vit, biases of beit": BIASED, **OTHERS, "swin": SWIN, "swin dropout": {**SWIN, "dropout": 0.1}}
KINDS["shifted"] = SHIFTED
LAYOUTS = ("fsdp8", "tp8", "fsdp2_tp4", "zero1_8", "cp8", "cp8_ulysses", "pp2_fsdp2_tp2")
# Each layout with one or two of the kinds.
CASES = [(layout, kind) for i, layout in enumerate(LAYOUTS) for j, kind in enumerate(OTHERS) if (i + j) % 2 == 0]
CASES += [("tp8", "swin"), ("zero1_8", "swin"), ("fsdp2_tp4", "swin dropout")]
CASES.append(("fsdp2_tp4", "shifted"))
DEFAULT = [("fsdp2_tp4", "vit, biases of beit")]  # test_mask_layouts.py has windows


@pytest.mark.long
@pytest.mark.parametrize(
    ("layout", "kind"), [*DEFAULT, *(pytest.param(*case, marks=pytest.mark.slow) for case in CASES)]
)
def test_a_layout_changes_nothing(layout, kind, small, course):
    settings = small(optimizer={"clip_norm": 0.0, "learning_rate": 3.0e-3}, data=ROWS, **KINDS[kind])
    alone, found = course(settings, "single", unroll=1), course(settings, layout)
    # Softmax does not know what all keys have in common.
    agree(found, alone, rtol=1e-6, atol=0, unseen=("attention.bk",))


@pytest.mark.parametrize(
    ("layout", "changes", "words"),
    [
        (
            "cp8",
            {},
            r"model\.windows: patches of one are not neighbours(.|\n)*rule  .*cp8(.|\n)*fix   do not split seq",
        ),
        (
            "pp2_fsdp2_tp2",
            {},
            r"which model\.windows does not go with(.|\n)*rule  .*pipeline(.|\n)*rules\.pipeline=null",
        ),
        ("interleave", {}, r"layers with model\.windows are not computed in parts(.|\n)*--set rules\.interleave=1"),
        (
            "fsdp2_tp4",
            {"row_multiple": 1, "windows": ODD, "patches": TWELVE, "context": 36, "attention.relative_positions": None},
            r"seq=9 does not divide",
        ),
    ],
)
def test_rules_that_levels_of_windows_do_not_go_with_are_refused(layout, changes, words, small):
    rules = dataclasses.replace(rules_file.load("fsdp8"), interleave=2) if layout == "interleave" else None
    settings = small(data={"seq": 40}, **{**SWIN, **changes})
    with pytest.raises(InputError, match=words):
        state.arrays_and_warnings(settings, (rules or rules_file.load(layout)).fill(8), "cpu")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"objective": "masked", "classes": None}, "model.patches needs model.classes or model.masks"),
        ({"vocab": 61}, "model.patches has no tokens: set vocab=61 to 0"),
        ({"context": 16}, "model.patches gives 17 rows of an image: set context=16 to 17"),
        ({"data": {"seq": 16}}, "set data.seq=16 to 17 or more"),
        ({"positions": "rope"}, "model.patches goes with positions: learned or none, not rope"),
        (
            {"attention.relative_positions": RelativePositions(side=3, ranges=28)},
            "model.patches has 4 patches on a side, and one",
        ),
        (
            {
                "patches": None,
                "vocab": 61,
                "context": 24,
                "attention.relative_positions": RelativePositions(side=3, ranges=28),
            },
            "model.attention.relative_positions.side needs model.patches",
        ),
        ({"embedding.token_types": 2}, "patches does not go with embedding.token_types"),
        ({**SWIN, "kv_heads": 4}, "windows needs kv_heads equal to heads"),
        ({**SWIN, "positions": "sinusoidal"}, "model.patches goes with positions: learned or none, not sinusoidal"),
        ({**SWIN, "lora": Lora(targets=("wq",))}, "windows does not go with lora"),
        ({**SWIN, "layer_pattern": ("full", "nope")}, "windows goes with layers of kind full, shifted and whole"),
        ({**SWIN, "windows": Windows(size=2, shift=2)}, "windows.shift=2 must be below windows.size=2"),
        ({**SWIN, "windows": Windows(size=2)}, "layer_pattern has shifted layers: set windows.shift"),
        (
            {**SWIN, "windows": Windows(size=2, levels=(LEVEL, LEVEL)), "layer_pattern": ()},
            "windows.size=2 does not divide the patches on a side of a level: 4, 2, 1",
        ),
        (
            {**SWIN, "attention.relative_positions": RelativePositions(side=4, ranges=52)},
            "set attention.relative_positions.side to as many",
        ),
        (
            {**SWIN, "patches": Patches(image=16, size=4, pool="mean"), "context": 17},
            "set patches, with class_row: false",
        ),
        (
            {**SWIN, "windows": None, "attention.relative_positions": None},
            "layer_pattern has shifted layers: set windows",
        ),
        ({"row_multiple": 8}, "model.row_multiple=8 needs model.windows"),
        (
            {"data": {**ROWS, "fields": ("image", "text"), "label": "of"}},
            r"model.patches needs data.fields=\[image\] and data.label: this",
        ),
        ({"data": {**ROWS, "images": Images(resize=8)}}, "data.images.resize=8 is below model.patches.image=16"),
        ({"data": {**ROWS, "images": Images(std=(0.5, 0.5))}}, "mean and std need 1 number, or 3"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(changes, words, small):
    with pytest.raises(ValueError, match=words):
        small(**{**VIT, "data": ROWS, **changes})
    with pytest.raises(ValueError, match="class_row: false needs pool: mean"):
        Patches(image=16, size=4, class_row=False)
    with pytest.raises(ValueError, match="image=16 is not a multiple of size=5"):
        Patches(image=16, size=5)
    with pytest.raises(ValueError, match="side=4 gives 52 ranges: set ranges=32 to 52"):
        RelativePositions(side=4)
