"""Scores of attention that depend on the distance of two tokens and on the tokens themselves (arXiv 2006.03654)."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange

from gspmd_lm import config
from gspmd_lm.model.layers import Norm
from gspmd_lm.model.weights import matrix
from gspmd_lm.sharding.annotate import Weight, shard, use

VECTORS = "vectors: ranges embed"


def vectors(module: nn.Module, cfg: config.ModelConfig, relative: config.RelativeVectors) -> jax.Array:
    """The normed vectors of all ranges of distances, [R, D], for all layers. Their table is a weight of `module`."""
    table = matrix(module, "relative_embedding", "ranges embed", (relative.ranges, cfg.embed), cfg)
    return shard(Norm(cfg, name="relative_norm")(use(table)), VECTORS)


def of_heads(vectors_RD: jax.Array, wq: Weight, wk: Weight, bq: jax.Array, bk: jax.Array) -> jax.Array:
    """The query and the key of each range as numbers of each head, [2 R H, N]."""
    pairs = [jnp.einsum("RD,DNH->RNH", vectors_RD, use(w)) + b for w, b in ((wq, bq), (wk, bk))]
    return rearrange(jnp.stack(pairs), "z R N H -> (z R H) N")


def bias(
    q_BTNH: jax.Array, k_BSNH: jax.Array, heads_RN: jax.Array, queries_BT: jax.Array, keys_BS: jax.Array,
    relative: config.RelativeVectors,
) -> jax.Array:  # fmt: skip
    """What is added to the products of queries and keys, before both are scaled, [B, N, T, S].

    heads_RN: see `of_heads`. queries_BT, keys_BS: the place of each in its row; one row stands for all if it has one.
    """
    queries_RNH, keys_RNH = rearrange(heads_RN, "(z R H) N -> z R N H", z=2, H=q_BTNH.shape[-1])
    longest = keys_BS.shape[-1] - 1
    ahead_BTS = queries_BT[:, :, None] - keys_BS[:, None]
    range_B1TS = jnp.asarray(ranges(longest, relative))[ahead_BTS + longest][:, None]
    of_queries_BNTR = jnp.einsum("BTNH,RNH->BNTR", q_BTNH, keys_RNH)
    of_keys_BNSR = jnp.einsum("BSNH,RNH->BNSR", k_BSNH, queries_RNH)
    of_keys_BNST = jnp.take_along_axis(of_keys_BNSR, jnp.swapaxes(range_B1TS, 2, 3), -1)
    return jnp.take_along_axis(of_queries_BNTR, range_B1TS, -1) + jnp.swapaxes(of_keys_BNST, 2, 3)


@functools.cache
def ranges(longest: int, relative: config.RelativeVectors) -> np.ndarray:
    """The range of each distance from query to key, from -longest to longest, int32 [2 longest + 1].

    A distance up to a quarter of the ranges has one of its own; beyond, ranges grow with its logarithm.
    """
    ahead, own, half = np.arange(-longest, longest + 1), relative.ranges // 4, relative.ranges // 2
    far = np.maximum(np.abs(ahead), own).astype(np.float32) / np.float32(own)
    share = np.log(far) / np.log(np.float32((relative.distance - 1) / own))
    beyond = np.ceil(share * np.float32(own - 1)).astype(np.int32) + own
    placed = np.where(np.abs(ahead) <= own, ahead, np.sign(ahead) * beyond)
    return np.clip(placed + half, 0, relative.ranges - 1).astype(np.int32)
