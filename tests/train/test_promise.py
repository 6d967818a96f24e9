"""The promise: a rules file never changes the loss. Every shipped layout, every pair of what a model can be."""

import dataclasses
import functools

import jax
import numpy as np
import optax
import pytest

from gspmd_lm import rules_file
from gspmd_lm.config import AttentionTemperature, LinearAttention
from tests.convert.ours import QUICK

LAYOUTS = ["dp8", "zero1_8", "fsdp8", "tp8", "dp2_tp4", "fsdp2_tp4", "fsdp", "fsdp_tp"]
STEPS = 20
UNCLIPPED = {"clip_norm": 0.0, "learning_rate": 3.0e-3}  # slow enough that Adam does not magnify rounding
# Two values of each thing that a model or a run can be.
FACTORS = {
    "block": ("sequential", "parallel"),
    "qk_norm": (False, True),
    "kv_heads": (8, 4),  # 4 are shared by two query heads each, and do not divide over tensor 8
    "tied_embeddings": (False, True),
    "dropout": (0.0, 0.1),
    "microbatches": (1, 4),
}
# Together with their complements these bits hold every pair of values of two factors: for any two factors, one row
# has equal bits and another different ones. A layout that runs one row and its complement meets every value.
ROWS = [(0, 0, 0, 0, 0, 0), (0, 0, 0, 1, 1, 1), (0, 1, 1, 0, 0, 1), (1, 0, 1, 0, 1, 0)]
CASES = [
    (layout, tuple(bit ^ flip for bit in ROWS[i % len(ROWS)])) for i, layout in enumerate(LAYOUTS) for flip in (0, 1)
]


def settings(bits):
    return {name: values[bit] for (name, values), bit in zip(FACTORS.items(), bits, strict=True)}


def test_the_cases_hold_every_pair_of_values():
    met = {(i, a, j, b) for _, bits in CASES for i, a in enumerate(bits) for j, b in enumerate(bits) if i < j}
    assert len(met) == 4 * 15
    for layout in LAYOUTS:
        assert {(i, bit) for name, bits in CASES if name == layout for i, bit in enumerate(bits)} == {
            (i, bit) for i in range(6) for bit in (0, 1)
        }


def course(step, batch_of, steps=STEPS, options=None):
    """Losses of a run, the initial weights and the gradients there, all on the host."""
    state = step.lower_init().compile(options)()
    first_weights = jax.device_get(state.params)
    program = step.lower_train().compile(options)
    losses, first_gradients, batch = [], None, batch_of(step, 0)  # one batch, so that there is something to learn
    for _ in range(steps):
        state, values = program(state, batch)
        losses.append(float(values["loss"]))
        # Without clipping, Adam's first moment after one step is (1 - b1) times the gradient.
        first_gradients = first_gradients or jax.device_get(optax.tree.get(state.optimizer, "mu"))
    return np.array(losses), first_weights, first_gradients


@pytest.fixture(scope="module")
def on_one_device(small, built, batch_of):
    """The course of a model on one device, without accumulation."""

    @functools.cache
    def run(bits):
        wanted = settings(bits)
        wanted.pop("microbatches")
        return course(built(small(optimizer=UNCLIPPED, **wanted), "single"), batch_of)

    return lambda bits: run((*bits[:-1], 0))


@pytest.mark.parametrize(
    ("layout", "bits"), CASES, ids=lambda value: value if isinstance(value, str) else "".join(map(str, value))
)
def test_a_layout_changes_nothing(layout, bits, small, built, batch_of, on_one_device):
    wanted = settings(bits)
    microbatches = wanted.pop("microbatches")
    losses, weights, gradients = on_one_device(bits)
    config = small(optimizer=UNCLIPPED, **wanted)
    rules = without_kv_heads(layout) if layout == "tp8" and wanted["kv_heads"] == 4 else layout
    step = built(config, rules, microbatches=microbatches)
    got_losses, got_weights, got_gradients = course(step, batch_of)

    jax.tree.map(lambda a, b: np.testing.assert_array_max_ulp(a, b, 2), got_weights, weights)  # 0 with jax 0.10
    np.testing.assert_allclose(got_losses, losses, rtol=0, atol=1e-5)
    for got, want in zip(jax.tree.leaves(got_gradients), jax.tree.leaves(gradients), strict=True):
        assert np.linalg.norm(got - want) <= 1e-5 * np.linalg.norm(want)
    assert losses[-1] < losses[0] - 0.05  # something was learned, so the comparison means something


# What only some families have.
FAMILIES = {
    "Llama 4": {
        "kv_heads": 4, "layer_pattern": ("chunked", "nope"), "attention_chunk": 5,
        "attention_temperature": AttentionTemperature(every=3, offset=1, layers="nope"), "qk_norm": True,
        "qk_norm_kind": "unscaled", "experts": 8, "experts_per_token": 2, "expert_mlp": 16, "shared_mlp": 16,
        "sparse_step": 2, "routing": "sigmoid", "normalized_weights": False, "weighted_input": True,
        "balance": "bias", "init_std": 0.1,
    },
    "Qwen3-Next": {
        "kv_heads": 4, "layer_pattern": ("linear", "full"), "attention_gate": True,
        "linear_attention": LinearAttention(key_heads=4, value_heads=8, head_dim=8, taps=3), "init_std": 0.1,
    },
    "Gemma 3n": {
        "layers": 3, "kv_heads": 4, "sliding_window": 5, "shared_kv_layers": 2, "residual_streams": 2, "laurel_rank": 4,
        "layer_embed": 8, "layer_vocab": 50, "activation_sparsity": 0.5, "sparse_layers": 1, "value_norm": True,
        "init_std": 0.1,
    },
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_a_layout_changes_nothing_of_what_a_family_has(family, small, built, batch_of):
    config = small(optimizer=UNCLIPPED, **FAMILIES[family])
    (losses, _, gradients), (got_losses, _, got_gradients) = (
        course(built(config, layout), batch_of, 3, QUICK) for layout in ("single", "fsdp2_tp4")
    )
    np.testing.assert_allclose(got_losses, losses, rtol=0, atol=1e-5)
    for got, want in zip(jax.tree.leaves(got_gradients), jax.tree.leaves(gradients), strict=True):
        assert np.linalg.norm(want) > 0 and np.linalg.norm(got - want) <= 1e-5 * np.linalg.norm(want)


def without_kv_heads(layout):
    """The layout with key heads replicated, as its error for too few of them says."""
    loaded = rules_file.load(layout)
    return dataclasses.replace(loaded, rows=tuple(row for row in loaded.rows if row.axis != "kv_heads"))


def test_bfloat16_stays_within_its_rounding(small, built, batch_of):
    """In bfloat16 only the order of roundings differs between layouts."""
    losses = {}
    for layout in ("single", "fsdp2_tp4"):
        losses[layout] = course(built(small(compute_dtype="bfloat16"), layout), batch_of)[0]
    np.testing.assert_allclose(losses["fsdp2_tp4"], losses["single"], rtol=2**-8)
