"""Attention over a split sequence, in each form and by each kernel, against attention on one device.

Splash runs in Pallas's interpreter.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspmd_lm import config
from gspmd_lm.config import from_values
from gspmd_lm.model.kernels import attention, common, context, splash
from gspmd_lm.model.tokens import Tokens
from gspmd_lm.sharding import mesh, rules_file
from gspmd_lm.sharding.annotate import placed_by
from gspmd_lm.sharding.placement import MeshPlacement

N, K = 4, 2


def placement(form, kernel="xla", size=2):
    rows = {"seq": "context", "heads": "tensor", "kv_heads": "tensor"}
    raw = {"mesh": {"context": size, "tensor": 1}, "rules": rows, "context": form}
    rules = dataclasses.replace(rules_file.from_dict(raw, "here.yaml"), attention={"cpu": kernel})
    return MeshPlacement(rules, mesh.build(rules, jax.devices()[:size]))


def arrays(B, T, H):
    rng = np.random.default_rng(0)
    q, k, v, weigh = (rng.standard_normal((B, T, n, H), np.float32) for n in (N, K, K, N))
    places = np.arange(T, dtype=np.int32)[None]
    cut = np.array([[T // 3], [T - 9]], np.int32)[:B]
    batch = {
        "tokens": np.zeros((B, T), np.int32),
        "segment_ids": np.where(places < cut, 1, 2).astype(np.int32),
        "positions": np.where(places < cut, places, places - cut),
    }
    return jax.device_put(((q, k, v), weigh, batch))  # XLA would fold what a program reads of the host


def settings(H, **changes):
    usual = {"layers": 1, "embed": 8, "heads": N, "kv_heads": K, "head_dim": H, "mlp": 8, "vocab": 8, "context": 8}
    return from_values(config.ModelConfig, usual | changes)


def both(cfg, place, qkv, weigh, batch, own_RN=None):
    """Results and gradients on one device, and as `place` has them, in the order of the text.

    Besides, where each token stands that the step has sharded in zigzag.
    """

    def split(qkv, weigh, batch):
        with placed_by(place):
            B, T = batch["tokens"].shape
            batch = context.zigzag_sharded(batch | {"at": jnp.broadcast_to(jnp.arange(T), (B, T))}, cfg.attention.mask)
            order = batch.get("places", batch["at"])[0]
            back = jnp.argsort(order)
            function = functools.partial(context.attend, tokens=Tokens.from_batch(batch), cfg=cfg, own_RN=own_RN)
            out, pull = jax.vjp(function, *(x[:, order] for x in qkv))
            found = (out, *pull(weigh[:, order]))
            return [x[:, back] for x in found], batch["at"]

    def whole(qkv, weigh, batch):
        out, pull = jax.vjp(
            lambda *qkv: attention.attend(*qkv, batch.get("segment_ids"), cfg, batch["positions"], own_RN), *qkv
        )
        return (out, *pull(weigh))

    with jax.default_matmul_precision("highest"):
        return jax.jit(whole)(qkv, weigh, batch), jax.jit(split)(qkv, weigh, batch)


@pytest.mark.long
@pytest.mark.parametrize(
    ("form", "packed", "blocks", "mask"),
    [
        ("gather", False, 8, "causal"),
        ("gather", True, 8, "full"),
        ("ring", True, 1, "causal"),
        ("ulysses", True, 1, "causal"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ("gather", True, 1, "causal"), ("ring", False, 8, "causal"), ("ulysses", False, 8, "causal"),
                ("gather", True, 1, "full"), ("gather", False, 8, "full"), ("ulysses", True, 8, "full"),
            ]
        ),
    ],
)  # fmt: skip
def test_splash_over_a_split_sequence_computes_what_xla_does(form, packed, blocks, mask, monkeypatch):
    """Two devices of 256 tokens each; with blocks of 128, a backward pass takes one block of keys at a time, or all."""
    monkeypatch.setattr(common, "SPLASH_BLOCK_BYTES", 1)
    monkeypatch.setattr(splash, "MOST_BLOCKS", blocks)
    qkv, weigh, batch = arrays(1, 512, 128)
    if not packed:
        del batch["segment_ids"]
    want, (got, at) = both(settings(128, **{"attention.mask": mask}), placement(form, "splash"), qkv, weigh, batch)
    order = np.arange(512) if form == "ulysses" or mask == "full" else np.r_[:128, 384:512, 128:384]
    np.testing.assert_array_equal(at, order[None])
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-4)


@pytest.mark.long
def test_a_ring_holds_no_array_that_grows_with_the_square_of_the_length():
    """Twice the length takes twice the memory. With gathered keys, it holds the scores of all pairs of tokens.

    In a loop over layers, a compiler may make once what all layers share, such as masks.
    """
    taken = {}
    for form, T in (("ring", 2048), ("ring", 4096), ("gather", 4096)):
        qkv, weigh, batch = arrays(1, T, 8)
        place = placement(form)

        def loss(qkv, layers, batch, place=place, weigh=weigh):
            with placed_by(place):
                batch, (q, k, v) = context.zigzag_sharded(batch), qkv
                layer = jax.checkpoint(
                    lambda q, w: (context.attend(w * q, k, v, Tokens.from_batch(batch), settings(8)), None)
                )
                return (jax.lax.scan(layer, q, layers)[0] * weigh).sum()

        one = jax.jit(jax.grad(loss)).lower(qkv, np.ones(3, np.float32), batch).compile()
        taken[form, T] = one.memory_analysis().temp_size_in_bytes
    assert taken["ring", 4096] < 2.1 * taken["ring", 2048]
    assert taken["gather", 4096] > 4 * N * 2048 * 4096 > taken["ring", 4096]


NEAR = config.RelativePositions(ranges=8, distance=12)
VECTORS = {"attention.relative_vectors": config.RelativeVectors(ranges=8, distance=12), "kv_heads": N,
           "positions": "none",
           "attention.qkv_bias": True}  # fmt: skip


@pytest.mark.parametrize("form", ["gather", "ulysses"])
@pytest.mark.parametrize(
    ("changes", "ranges"),
    [({}, 0), ({"attention.relative_positions": NEAR}, 8), pytest.param(VECTORS, 2 * 8 * 8, marks=pytest.mark.long)],
    ids=["mask alone", "bias", "vectors"],
)
def test_a_full_mask_and_what_depends_on_distance_are_right_over_a_split_sequence(form, changes, ranges):
    """Under vectors, heads have the queries and the keys of 8 ranges, of 8 numbers each."""
    (q, k, v), weigh, batch = arrays(2, 32, 8)
    cfg = settings(8, **{"attention.mask": "full"}, **changes)
    own_RN = np.random.default_rng(7).standard_normal((ranges, N), np.float32)
    scales_K1 = np.arange(1, cfg.kv_heads + 1, dtype=np.float32)[:, None]
    k, v = (np.repeat(x, cfg.kv_heads // K, axis=2) * scales_K1 for x in (k, v))
    want, (got, at) = both(cfg, placement(form), (q, k, v), weigh, batch, own_RN if ranges else None)
    np.testing.assert_array_equal(at[0], np.arange(32))  # nothing is sharded in zigzag
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5 * np.abs(b).max())
