"""An encoder and a decoder that reads it: the loss is the same under every layout, and pairs do not see each other."""

import dataclasses

import flax.linen as nn
import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from gspmd_lm.config import Encoder, RelativePositions
from gspmd_lm.model.transformer import decode, init

T5 = {
    "objective": "seq2seq", "encoder": Encoder(layers=1, heads=16, kv_heads=16, mlp=32, context=24),
    "head_dim": 6, "positions": "none", "relative_positions": RelativePositions(ranges=8, distance=12),
    "query_scale": 1.0, "tied_embeddings": True, "logit_scale": 32**-0.5, "mlp_kind": "plain", "activation": "relu",
    "dropout": 0.1, "data": {"source_seq": 24},
}  # fmt: skip
BART = {
    "objective": "seq2seq", "encoder": Encoder(), "pre_norms": False, "sum_norms": True, "final_norm": False,
    "norm": "layernorm", "norm_bias": True, "embedding_norm": True, "mlp_kind": "plain", "activation": "gelu",
    "positions": "learned", "position_offset": 2, "qkv_bias": True, "attention_out_bias": True, "mlp_bias": True,
    "tied_embeddings": True, "unembedding_bias": True,
}  # fmt: skip
KINDS = {"T5": T5, "BART": BART}
LAYOUTS = ("fsdp8", "tp8", "fsdp2_tp4", "zero1_8", "cp8", "cp8_ulysses")




@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        pytest.param(kind, layout, marks=() if (kind, layout) == ("T5", "fsdp2_tp4") else pytest.mark.slow)
        for kind in KINDS
        for layout in LAYOUTS
    ],
)
def test_a_layout_changes_nothing(kind, layout, small, course):
    config = small(optimizer={"clip_norm": 0.0, "learning_rate": 3.0e-3}, **KINDS[kind])
    alone, found = course(config, "single", 3, unroll=1), course(config, layout, 3)
    np.testing.assert_allclose(found.losses, alone.losses, rtol=1e-6)
    got, want = (flatten_dict(one.gradients, sep=".") for one in (found, alone))
    for name in want:
        if not name.endswith("attention.bk") and not name.endswith("cross.bk"):  # softmax does not see these
            size = np.linalg.norm(want[name])
            assert size > 0 and np.linalg.norm(got[name] - want[name]) < 1e-5 * size, name
