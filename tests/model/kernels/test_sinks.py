"""Attention sinks: a logit of nothing in each head's softmax, on one device and where the sequence is split."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_context import arrays, placement, settings

from gspmd_lm.config import with_values
from gspmd_lm.model.kernels import attention, context
from gspmd_lm.model.tokens import Tokens
from gspmd_lm.sharding.annotate import placed_by

WITH = with_values(settings(8), {"attention.sinks": True})


def inputs(T=32, H=8):
    (q, k, v), weigh, batch = arrays(2, T, H)
    return (q, k, v, jax.random.normal(jax.random.key(5), q.shape[2:3])), weigh, batch


@functools.partial(jax.jit, static_argnames="cfg")
def one_device(q, k, v, sinks_N, batch, cfg=WITH):
    return attention.attend(q, k, v, batch["segment_ids"], cfg, batch["positions"], sinks_N)


def test_a_sink_takes_its_share_of_the_softmax():
    (q, k, v, sinks_N), _, batch = inputs()
    group = q.shape[2] // k.shape[2]
    k_BSNH, v_BSNH = (np.repeat(np.asarray(x), group, axis=2) for x in (k, v))
    scores_BNTS = np.einsum("BTNH,BSNH->BNTS", q, k_BSNH) * q.shape[-1] ** -0.5
    segments, T = np.asarray(batch["segment_ids"]), q.shape[1]
    seen = (segments[:, :, None] == segments[:, None]) & np.tri(T, dtype=bool)
    weights_BNTS = np.where(seen[:, None], np.exp(scores_BNTS), 0)
    weights_BNTS /= weights_BNTS.sum(-1, keepdims=True) + np.exp(np.asarray(sinks_N))[:, None, None]
    want = np.einsum("BNTS,BSNH->BTNH", weights_BNTS, v_BSNH)
    np.testing.assert_allclose(one_device(q, k, v, sinks_N, batch=batch), want, atol=1e-5)


@pytest.mark.parametrize("form", ["gather", "ulysses"])
@pytest.mark.parametrize(
    ("kernel", "T", "H"), [("xla", 32, 8), pytest.param("splash", 512, 128, marks=pytest.mark.slow)]
)
def test_a_split_sequence_gives_the_same_results_and_gradients(form, kernel, T, H):
    arguments, weigh, batch = inputs(T, H)
    cfg = dataclasses.replace(WITH, head_dim=H)

    @jax.jit
    def whole(arguments, weigh, batch):
        out, pull = jax.vjp(functools.partial(one_device, batch=batch, cfg=cfg), *arguments)
        return out, *pull(weigh)

    @jax.jit
    def split(arguments, weigh, batch):
        with placed_by(placement(form, kernel)):
            B, T = batch["tokens"].shape
            batch = context.zigzag_sharded(batch)
            order = batch.get("places", jnp.broadcast_to(jnp.arange(T), (B, T)))[0]
            back = jnp.argsort(order)
            *qkv, sinks_N = arguments
            tokens = Tokens.from_batch(batch)
            out, pull = jax.vjp(
                lambda q, k, v, sinks_N: context.attend(q, k, v, tokens, cfg, sinks_N),
                *(x[:, order] for x in qkv), sinks_N,
            )  # fmt: skip
            *found, dsinks_N = (out, *pull(weigh[:, order]))
            return [*(x[:, back] for x in found), dsinks_N]

    with jax.default_matmul_precision("highest"):
        got, want = (function(arguments, weigh, batch) for function in (split, whole))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)
