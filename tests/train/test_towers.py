"""Texts and their images: the loss is the same under every layout, and is that of the whole batch."""

import pytest

from gspmd_lm.config import Patches, Vision
from tests.courses import agree

CLIP = {
    "objective": "contrastive", "vision": Vision(patches=Patches(image=16, size=4, bias=False), projection=24, embed=48,
                                                 layers=1, head_dim=6, mlp=40),
    "norm": "layernorm", "norm_bias": True, "mlp_kind": "plain", "activation": "silu", "activation_slope": 1.702,
    "positions": "learned", "qkv_bias": True, "attention_out_bias": True, "mlp_bias": True, "data": {"source_seq": 24},
}  # fmt: skip
LAYOUTS = ("fsdp8", "tp8", "fsdp2_tp4", "zero1_8", "cp8", "cp8_ulysses")


@pytest.mark.parametrize(
    "layout", [one if one == "fsdp2_tp4" else pytest.param(one, marks=pytest.mark.slow) for one in LAYOUTS]
)
def test_a_layout_changes_nothing(layout, small, course):
    config = small(optimizer={"clip_norm": 0.0, "learning_rate": 3.0e-3}, **CLIP)
    alone, found = course(config, "single", 3, unroll=1), course(config, layout, 3)
    # Softmax does not know what all keys have in common.
    agree(found, alone, rtol=1e-6, atol=0, unseen=("attention.bk",))
