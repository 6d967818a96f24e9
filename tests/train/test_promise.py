"""The promise: a rules file never changes the loss. Every shipped layout, every pair of what a model can be."""

import dataclasses
import itertools

import pytest

from gspmd_lm.config import AttentionTemperature, LatentAttention, LinearAttention
from gspmd_lm.sharding import rules_file
from gspmd_lm.sharding.rules import Remat
from tests.courses import agree

STEPS = 8
UNCLIPPED = {"clip_norm": 0.0, "learning_rate": 3.0e-3}  # slow enough that Adam does not magnify rounding
LOOP = {"unroll": 1}  # one device writes its layers out, which takes longer to compile: test_unroll.py compares both
# Two values of each thing that a model or a run can be.
FACTORS = {
    "block": ("sequential", "parallel"),
    "attention.qk_norm": (False, True),
    "kv_heads": (8, 4),  # 4 are shared by two query heads each, and do not divide over tensor 8
    "embedding.tied": (False, True),
    "dropout": (0.0, 0.1),
    "microbatches": (1, 4),
}
# Which values a layout runs with, in the order of the factors. Layouts share two models, and one device computes each.
RUNS = {
    "tp8": (0, 0, 0, 0, 0, 0),
    "zero1_8": (0, 0, 0, 0, 0, 1),
    "dp2_tp4": (0, 0, 0, 0, 0, 0),
    "dp8": (1, 1, 1, 1, 1, 1),
    "fsdp8": (1, 1, 1, 1, 1, 0),
    "fsdp2_tp4": (1, 1, 1, 1, 1, 1),
}
# Together they are every pair of values of two factors.
PAIRS = {
    "tp8": (1, 1, 1, 1, 1, 1),
    "dp8": (0, 1, 0, 0, 1, 1),
    "zero1_8": (1, 0, 0, 1, 0, 1),
    "fsdp8": (0, 1, 1, 1, 0, 0),
    "dp2_tp4": (1, 0, 1, 0, 1, 0),
    "fsdp2_tp4": (0, 0, 0, 0, 0, 0),
    "fsdp": (1, 1, 1, 1, 1, 0),  # as fsdp8 on eight devices
    "fsdp_tp": (0, 0, 0, 0, 0, 1),
}
HELD_BY_ANOTHER = ("dp2_tp4", "fsdp8", "dp8")  # fsdp2_tp4 splits as all of them do, at once
CASES = [case for case in RUNS.items() if case[0] not in HELD_BY_ANOTHER]
MORE = [*((name, RUNS[name]) for name in HELD_BY_ANOTHER), *PAIRS.items()]
CASES += [pytest.param(*case, marks=pytest.mark.slow) for case in MORE]


def settings(bits):
    """What a case has. A gate of attention goes with norms of queries and keys, as in Qwen3-Next."""
    found = {name: values[bit] for (name, values), bit in zip(FACTORS.items(), bits, strict=True)}
    return found | {"attention.gate": found["attention.qk_norm"]}


def test_the_cases_hold_every_pair_of_values():
    met = {(i, a, j, b) for bits in PAIRS.values() for (i, a), (j, b) in itertools.combinations(enumerate(bits), 2)}
    assert len(met) == 4 * 15


@pytest.mark.parametrize(
    ("layout", "bits"), CASES, ids=lambda value: value if isinstance(value, str) else "".join(map(str, value))
)
def test_a_layout_changes_nothing(layout, bits, small, course):
    wanted = settings(bits)
    microbatches = wanted.pop("microbatches")
    config = small(optimizer=UNCLIPPED, **wanted)
    rules = without_kv_heads(layout) if layout == "tp8" and wanted["kv_heads"] == 4 else layout
    alone = course(config, "single", STEPS, **LOOP)
    agree(course(config, rules, STEPS, microbatches=microbatches), alone)
    assert alone.losses[-1] < alone.losses[0] - 0.05  # something was learned, so the comparison means something


# What only some families have.
FAMILIES = {
    "Llama 4": {
        "kv_heads": 4, "layer_pattern": ("chunked", "nope"), "attention.chunk": 5,
        "attention.temperature": AttentionTemperature(every=3, offset=1, layers="nope"), "attention.qk_norm": True,
        "attention.qk_norm_kind": "unscaled", "experts.count": 8, "experts.per_token": 2, "experts.mlp": 16,
        "experts.shared_mlp": 16,
        "experts.step": 2, "experts.routing": "sigmoid", "experts.normalized_weights": False,
        "experts.weighted_input": True,
        "experts.balance": "bias", "init_std": 0.1,
    },
    "Qwen3-Next": {
        "kv_heads": 4, "layer_pattern": ("linear", "full"), "attention.gate": True,
        "attention.linear": LinearAttention(key_heads=4, value_heads=8, head_dim=8, taps=3), "init_std": 0.1,
    },
    "Gemma 3n": {
        "layers": 2, "kv_heads": 4, "attention.window": 5, "attention.shared_kv_layers": 1, "residual.streams": 2,
        "residual.laurel_rank": 4,
        "residual.layer_embed": 8, "residual.layer_vocab": 50, "feed_forward.sparsity": 0.5,
        "feed_forward.sparse_layers": 1, "attention.value_norm": True,
        "init_std": 0.1,
    },
    "DeepSeek-V3": {
        "attention.latent": LatentAttention(kv_rank=16, q_rank=24, v_head_dim=4), "head_dim": 6,
        "attention.rope.dim": 2,
        "experts.count": 8, "experts.per_token": 2, "experts.mlp": 16, "experts.shared_mlp": 16,
        "experts.dense_layers": 1,
        "experts.routing": "sigmoid", "experts.groups": 4, "experts.groups_per_token": 2, "experts.scale": 2.5,
        "experts.balance": "bias",
        "init_std": 0.1,
    },
}  # fmt: skip
LATENT = {
    key: FAMILIES["DeepSeek-V3"][key] for key in ("attention.latent", "head_dim", "attention.rope.dim", "init_std")
}
# A layer with linear attention, and one with latent attention within chunks. Others have experts in layouts.
FAMILIES["linear and latent"] = {
    **LATENT, "layer_pattern": ("linear", "chunked"), "attention.chunk": 5,
    "attention.linear": FAMILIES["Qwen3-Next"]["attention.linear"],
}  # fmt: skip
KEPT = [
    Remat("none"), Remat("dots"), Remat("names", ("kv_latent", "q_latent", "attention_out")),
    Remat("names", ("q", "k", "v")),
]  # fmt: skip


# By default one with all kinds of attention and of layers. convert/test_families.py has several residual streams.
@pytest.mark.long
@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=() if name == "linear and latent" else pytest.mark.slow) for name in FAMILIES],
)
def test_a_layout_changes_nothing_of_what_a_family_has(family, small, course):
    config = small(optimizer=UNCLIPPED, **FAMILIES[family])
    agree(course(config, "fsdp2_tp4"), course(config, "single", **LOOP))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["fsdp8", "tp8", "cp8", "cp8_ring", "cp8_ulysses"])
def test_a_layout_changes_nothing_of_latent_attention(layout, small, course):
    config = small(optimizer=UNCLIPPED, **LATENT)
    agree(course(config, layout), course(config, "single", **LOOP))


@pytest.mark.slow
@pytest.mark.parametrize("kept", KEPT, ids=str)
def test_what_is_kept_changes_nothing_of_latent_attention(kept, small, course):
    config = small(optimizer=UNCLIPPED, **LATENT)
    agree(course(config, "fsdp2_tp4", remat=kept), course(config, "single", **LOOP))


def without_kv_heads(layout):
    """The layout with key heads replicated, as its error for too few of them says."""
    loaded = rules_file.load(layout)
    return dataclasses.replace(loaded, rows=tuple(row for row in loaded.rows if row.axis != "kv_heads"))


@pytest.mark.long
def test_bfloat16_stays_within_its_rounding(small, course):
    """In bfloat16 only the order of roundings differs between layouts."""
    config = small(compute_dtype="bfloat16")
    one, many = (course(config, layout, **LOOP) for layout in ("single", "fsdp2_tp4"))
    agree(many, one, rtol=2**-8, gradients=2**-6)
