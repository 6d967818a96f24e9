"""A stack that sees all of a text: the loss is the same under every layout, and padding changes nothing."""

import dataclasses

import numpy as np
import pytest

from gspmd_lm.config import RelativePositions
from tests.courses import agree

BERT = {
    "mask": "full", "pre_norms": False, "sum_norms": True, "final_norm": False, "norm": "layernorm", "norm_bias": True,
    "embedding_norm": True, "mlp_kind": "plain", "activation": "gelu", "positions": "learned", "token_types": 2,
    "qkv_bias": True, "attention_out_bias": True, "mlp_bias": True,
}  # fmt: skip
HEAD = {"head_transform": True, "unembedding_bias": True, "tied_embeddings": True}
KINDS = {
    "masked": {"objective": "masked", **BERT, **HEAD},
    "classes": {"objective": "classes", **BERT, "classes": 3, "dropout": 0.1},
    "relative": {"objective": "masked", "mask": "full", "positions": "none", "relative_positions": RelativePositions(ranges=8, distance=12)},
    "relative of each layer": {"relative_positions": RelativePositions(ranges=8, distance=12, shared=False)},
}
LAYOUTS = ("fsdp8", "tp8", "fsdp2_tp4", "zero1_8", "cp8", "cp8_ulysses", "pp2_fsdp2_tp2")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_changes_nothing(layout, kind, small, course):
    config = small(optimizer={"clip_norm": 0.0, "learning_rate": 3.0e-3}, **KINDS[kind])
    alone = course(config, "single", 3, unroll=1)
    agree(course(config, layout, 3), alone)
    np.testing.assert_allclose(course(config, layout, 3).losses, alone.losses, rtol=1e-6)
