"""Latent attention: what its paper writes, the vector in the cache, and what a config must not ask of it."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspmd_lm.config import AttentionTemperature, LatentAttention, RopeScaling
from gspmd_lm.model.block import BLOCK_INPUT, RESIDUAL
from gspmd_lm.model.cache import empty_cache
from gspmd_lm.model.compose import attention_parts
from gspmd_lm.model.families import init
from gspmd_lm.model.parts import latent
from gspmd_lm.model.tokens import Tokens
from gspmd_lm.sharding.annotate import placed_by
from gspmd_lm.sharding.matmuls import gathered
from gspmd_lm.sharding.partial_sums import reduced
from tests.courses import weights
from tests.model.cached import both_ways

SIZES = {"attention.latent": LatentAttention(kv_rank=12, q_rank=10, v_head_dim=5), "head_dim": 6,
         "attention.rope.dim": 2, "heads": 4, "kv_heads": 4}  # fmt: skip
NO_Q_RANK = SIZES | {"attention.latent": LatentAttention(kv_rank=12, v_head_dim=5)}


ROUNDING = 5e-4  # of gradients: the scores of these weights are large
TUNED = AttentionTemperature(scale=0.1, every=3)


def settings(small, **changes):
    return small(**SIZES | {"init_std": 0.3, "norm.eps": 0.1} | changes).model


def turned(x, positions):
    """Two numbers of a head, turned by their position: the angle of a head of two is the position itself."""
    cos, sin = np.cos(positions)[:, None], np.sin(positions)[:, None]
    return jnp.stack([x[..., 0] * cos - x[..., 1] * sin, x[..., 1] * cos + x[..., 0] * sin], -1)


def as_published(w, x_TD, cfg):
    """Equations 37 to 47 of arXiv 2405.04434 for one row of tokens, head by head, with queries that grow."""

    def normed(x, scale):
        return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale

    T, positions = len(x_TD), np.arange(len(x_TD))
    c_q = normed(x_TD @ w["wq_down"], w["q_norm"]["scale"])
    c_kv = normed(x_TD @ w["wkv_down"], w["kv_norm"]["scale"])
    k_rope, out = turned((x_TD @ w["wk_rope"])[:, None], positions)[:, 0], []
    for head in range(cfg.heads):
        q = c_q @ w["wq_up"][:, head]
        q_rope, q_own = turned(q[:, None, :2], positions)[:, 0], q[:, 2:]
        scores = (q_own @ (c_kv @ w["wk_up"][:, head]).T + q_rope @ k_rope.T) / np.sqrt(6)
        scores *= (1 + TUNED.scale * np.log1p(positions // TUNED.every))[:, None]
        weights = jax.nn.softmax(jnp.where(np.tril(np.ones((T, T), bool)), scores, -jnp.inf))
        out.append(weights @ (c_kv @ w["wv_up"][:, head]) @ w["wo"][head])
    return sum(out)


def test_results_and_gradients_are_those_of_the_equations(small):
    cfg, T = settings(small, **{"attention.temperature": TUNED}), 7
    module, rng = latent.LatentAttention(cfg, attention_parts(cfg)), np.random.default_rng(0)
    batch = {"positions": np.arange(T)[None]}

    def ours(params, x_TD):
        def of_gathered(module, x_BTD):
            with gathered(x_BTD, BLOCK_INPUT, RESIDUAL) as in_BTD:
                return reduced(module(in_BTD, Tokens.from_batch(batch))[0], BLOCK_INPUT, RESIDUAL)

        return nn.apply(of_gathered, module)({"params": params}, x_TD[None])[0]

    @jax.jit
    def both(params, x_TD, weigh):
        functions = ours, lambda *w: as_published(*w, cfg)
        pulled = [jax.vjp(function, params, x_TD) for function in functions]
        small = [function(params, 0.01 * x_TD) for function in functions]  # the epsilon of the norms counts
        return [(out, pull(weigh)) for out, pull in pulled], small

    with placed_by(None):
        x_TD = rng.normal(size=(T, cfg.embed)).astype(np.float32)
        made = nn.unbox(jax.eval_shape(lambda: init(cfg, jax.random.key(0))))["layers"]["attention"]
        params = jax.tree.map(lambda x: (1 + rng.normal(size=x.shape[1:]) * 0.3).astype(x.dtype), made)
        weigh = rng.normal(size=(T, cfg.embed)).astype(np.float32)
        with jax.default_matmul_precision("highest"):
            (ours_and_theirs, small_ones) = jax.device_get(both(params, x_TD, weigh))
    (found, gradients), (wanted, wanted_gradients) = ours_and_theirs
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(*small_ones, rtol=1e-5, atol=1e-4)
    assert {*gradients[0]} == {"wq_down", "q_norm", "wq_up", "wkv_down", "wk_rope", "kv_norm", "wk_up", "wv_up", "wo"}
    for got, want in zip(jax.tree.leaves(gradients), jax.tree.leaves(wanted_gradients), strict=True):
        assert np.linalg.norm(want) > 0 and np.linalg.norm(got - want) < ROUNDING * np.linalg.norm(want)


KINDS = {
    "no vector of queries, padded heads, a scale": NO_Q_RANK | {
        "padded_heads": 6, "attention.scale": 0.3, "attention.rope.scaling": RopeScaling(kind="linear", factor=2.0),
    },
    "windows, chunks, sinks, biases": {
        "layers": 3, "layer_pattern": ("sliding", "chunked", "nope"), "attention.window": 3, "attention.chunk": 5,
        "attention.sinks": True, "attention.out_bias": True,
    },
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_a_new_token_reads_the_vectors_in_the_cache(kind, small):
    """Token by token with a cache, the hidden states are those of whole rows, with padding before some."""
    cfg = settings(small, **KINDS[kind])
    params = weights(cfg)
    tokens = np.random.default_rng(1).integers(0, cfg.vocab, (3, 14), np.int32)
    with jax.default_matmul_precision("highest"):
        found, wanted = both_ways(cfg, params, tokens, np.array([0, 2, 6], np.int32), 8)
    np.testing.assert_allclose(found, wanted, atol=5e-5)
    assert np.abs(wanted[0, 1:] - wanted[0, :-1]).max() > 0.1


def test_a_cache_keeps_the_vector_and_the_shared_key_alone(small):
    cache = jax.eval_shape(lambda: empty_cache(settings(small), 3, 20))
    assert [x.shape for x in jax.tree.leaves(cache)] == [(2, 3, 20, 1, 12 + 2)]


@pytest.mark.parametrize("form", ["alone", "bfloat16"])
def test_values_narrower_than_keys(form, small):
    """In bfloat16, XLA's attention is jax's own, which takes both of one width."""
    from gspmd_lm.model.kernels.attention import attend

    cfg = dataclasses.replace(settings(small), compute_dtype="bfloat16" if form == "bfloat16" else "float32")
    rng = np.random.default_rng(1)
    q, k, v = (rng.normal(size=(2, 9, 4, size)).astype(cfg.compute_dtype) for size in (6, 6, 5))
    found = np.asarray(jax.jit(lambda *qkv: attend(*qkv, None, cfg))(q, k, v), np.float32)
    q, k, v = (x.astype(np.float32) for x in (q, k, v))
    weights = np.exp(np.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(6)) * np.tril(np.ones((9, 9)))
    wanted = np.einsum("bnts,bsnh->btnh", weights / weights.sum(-1, keepdims=True), v)
    assert found.shape == (2, 9, 4, 5)
    np.testing.assert_allclose(found, wanted, atol=0.03 if form == "bfloat16" else 1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_heads": 2}, "kv_heads=2: each of heads=4 has keys of its own: set kv_heads to 4"),
        (
            {"attention.rope.dim": 0},
            "attention.rope.dim=0: set the size of the key that all heads share, below head_dim=6",
        ),
        ({"head_dim": 4}, "v_head_dim=5 is above head_dim=4"),
        ({"attention.qk_norm": True}, "attention.latent does not go with attention.qk_norm"),
        ({"attention.gate": True, "attention.value_norm": True}, "attention.latent does not go with attention.gate"),
    ],
)
def test_what_does_not_go_with_it_is_said(changes, message, small):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        settings(small, **changes)
