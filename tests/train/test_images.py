"""Images cut into patches: the loss is the same under every layout, and padding and wrong sizes are dealt with."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from gspmd_lm.config.images import Patches
from gspmd_lm.model.transformer import classify, init

VIT = {
    "objective": "classes", "classes": 3, "mask": "full", "norm": "layernorm", "norm_bias": True, "mlp_kind": "plain",
    "activation": "gelu", "positions": "learned", "qkv_bias": True, "attention_out_bias": True, "mlp_bias": True,
    "vocab": 0, "padded_vocab": 0, "patches": Patches(image=16, size=4), "context": 17,
}  # fmt: skip
ROWS = {"seq": 24}  # 17 rows of an image, and padding up to what 8 devices divide
DEIT = {**VIT, "patches": Patches(image=12, size=4, channels=1, distillation="head"), "context": 11}
KINDS = {"vit": VIT, "deit": {**DEIT, "dropout": 0.1}}
LAYOUTS = ("fsdp8", "tp8", "fsdp2_tp4", "zero1_8", "cp8", "cp8_ulysses", "pp2_fsdp2_tp2")
CASES = [(layout, kind) for layout in LAYOUTS for kind in KINDS if (layout, kind) != ("pp2_fsdp2_tp2", "deit")]


@pytest.mark.parametrize(
    ("layout", "kind"), [case if case == ("fsdp2_tp4", "vit") else pytest.param(*case, marks=pytest.mark.slow) for case in CASES]
)  # fmt: skip
def test_a_layout_changes_nothing(layout, kind, small, course):
    settings = small(optimizer={"clip_norm": 0.0, "learning_rate": 3.0e-3}, data=ROWS, **KINDS[kind])
    alone, found = course(settings, "single", 3, unroll=1), course(settings, layout, 3)
    np.testing.assert_allclose(found.losses, alone.losses, rtol=1e-6)
    got, want = (flatten_dict(one.gradients, sep=".") for one in (found, alone))
    for name in want.keys() - {"layers.attention.bk"}:  # softmax does not know what all keys have in common
        size = np.linalg.norm(want[name])
        assert size > 0 and np.linalg.norm(got[name] - want[name]) < 1e-5 * size
