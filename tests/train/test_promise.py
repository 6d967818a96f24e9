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
    "qk_norm": (False, True),
    "kv_heads": (8, 4),  # 4 are shared by two query heads each, and do not divide over tensor 8
    "tied_embeddings": (False, True),
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
HELD_BY_ANOTHER = ("dp2_tp4", "fsdp8")  # fsdp2_tp4 splits as both do, at once
CASES = [case for case in RUNS.items() if case[0] not in HELD_BY_ANOTHER]
MORE = [*((name, RUNS[name]) for name in HELD_BY_ANOTHER), *PAIRS.items()]
CASES += [pytest.param(*case, marks=pytest.mark.slow) for case in MORE]


def settings(bits):
    """What a case has. A gate of attention goes with norms of queries and keys, as in Qwen3-Next."""
    found = {name: values[bit] for (name, values), bit in zip(FACTORS.items(), bits, strict=True)}
    return found | {"attention_gate": found["qk_norm"]}


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
        "layers": 2, "kv_heads": 4, "sliding_window": 5, "shared_kv_layers": 1, "residual_streams": 2, "laurel_rank": 4,
        "layer_embed": 8, "layer_vocab": 50, "activation_sparsity": 0.5, "sparse_layers": 1, "value_norm": True,
        "init_std": 0.1,
    },
    "DeepSeek-V3": {
        "latent_attention": LatentAttention(kv_rank=16, q_rank=24, v_head_dim=4), "head_dim": 6, "rope_dim": 2,
        "experts": 8, "experts_per_token": 2, "expert_mlp": 16, "shared_mlp": 16, "dense_layers": 1,
        "routing": "sigmoid", "expert_groups": 4, "groups_per_token": 2, "expert_scale": 2.5, "balance": "bias",
        "init_std": 0.1,
    },
}  # fmt: skip
LATENT = {key: FAMILIES["DeepSeek-V3"][key] for key in ("latent_attention", "head_dim", "rope_dim", "init_std")}
# A layer with linear attention, and one with latent attention within chunks. Others have experts in layouts.
FAMILIES["linear and latent"] = {
    **LATENT, "layer_pattern": ("linear", "chunked"), "attention_chunk": 5,
    "linear_attention": FAMILIES["Qwen3-Next"]["linear_attention"],
}  # fmt: skip
KEPT = [
    Remat("none"), Remat("dots"), Remat("names", ("kv_latent", "q_latent", "attention_out")),
    Remat("names", ("q", "k", "v")),
]  # fmt: skip


# By default one with all kinds of attention and of layers. convert/test_families.py has several residual streams.
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


def test_bfloat16_stays_within_its_rounding(small, course):
    """In bfloat16 only the order of roundings differs between layouts."""
    config = small(compute_dtype="bfloat16")
    one, many = (course(config, layout, **LOOP) for layout in ("single", "fsdp2_tp4"))
    agree(many, one, rtol=2**-8, gradients=2**-6)
