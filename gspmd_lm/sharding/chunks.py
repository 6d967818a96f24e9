"""Chunks of sequences, which a loop computes. Where rules split sequences, a chunk has an equal part of each shard."""

import math

import jax
from einops import rearrange

from gspmd_lm.sharding.annotate import placement


def count(rows: int, length: int, tokens: int) -> int:
    """The number of equal chunks into which sequences are cut. A device has at most `tokens` tokens of each."""
    most = length // _shards(length)
    shared = placement().num_shards("logits", "batch") * min(placement().num_shards("logits", "seq"), length)
    wanted = -(-rows * length // (shared * tokens))
    return next((n for n in range(wanted, most) if most % n == 0), most)


def split(x: jax.Array, chunks: int) -> jax.Array:
    """[B, T, ...] as [chunks, B, T / chunks, ...]."""
    return rearrange(x, "B (P C T) ... -> C B (P T) ...", C=chunks, P=_shards(x.shape[1]))


def join(x: jax.Array) -> jax.Array:
    """The inverse of `split`: [chunks, ..., T / chunks, D] as [..., T, D]."""
    length = x.shape[0] * x.shape[-2]
    return rearrange(x, "C ... (P T) D -> ... (P C T) D", P=_shards(length))


def _shards(length: int) -> int:
    """The number of equal shards into which the rules split the sequence of the logits, and of what they are made of.

    A loop cuts each shard further. Rules that split the sequence unequally are refused. For them there is one shard per
    token, so that nothing is cut.
    """
    shards = math.lcm(placement().num_shards("logits", "seq"), placement().num_shards("block_input", "seq"))
    return length if length % shards else shards
