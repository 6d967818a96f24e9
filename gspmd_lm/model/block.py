"""A layer: branches around a residual stream. compose.py chooses the branches of each family."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from einops import rearrange
from jax.ad_checkpoint import checkpoint_name

from gspmd_lm.model.cache import Cache, Kept
from gspmd_lm.model.norm import Change, same
from gspmd_lm.model.tokens import Tokens
from gspmd_lm.sharding.annotate import interleave, shard
from gspmd_lm.sharding.chunks import Part as Turn
from gspmd_lm.sharding.chunks import after, in_turns
from gspmd_lm.sharding.matmuls import gathered, sharing_weights
from gspmd_lm.sharding.partial_sums import Unreduced, reduced

RESIDUAL = "residual: batch seq embed"
BLOCK_INPUT = "block_input: batch seq embed"

Stream = Turn[tuple[jax.Array, Tokens]]  # the residual stream and its tokens, which come in turns: see `in_turns`

# Attention or a feed-forward network: it reads gathered tokens and returns a sum over devices that is not yet reduced.
Part = Callable[[jax.Array, Tokens], tuple[Unreduced, Tokens]]


class Branch(NamedTuple):
    """x + after(part(before(x)))."""

    part: Part
    before: Change = same
    after: Change = same
    after_sum: Change = same
    dropout: float = 0.0
    site: int = 0  # the number of the dropout within a layer

    def __call__(self, x_BTD: jax.Array, tokens: Tokens) -> Stream:
        """The residual stream after the branch. It yields once, until the other parts of the rows have gathered too."""
        with gathered(self.before(x_BTD), BLOCK_INPUT, RESIDUAL) as in_BTD:
            others = yield in_BTD
            y, tokens = self.part(in_BTD, tokens)
        y_BTD = self.after(reduced(after(y, others), BLOCK_INPUT, RESIDUAL))
        x_BTD += dropout(y_BTD, self.dropout, tokens.keys_BT, self.site)
        return shard(self.after_sum(x_BTD), RESIDUAL), tokens


class Carried(NamedTuple):
    """The carry of the scan over layers.

    A loop carries the number of the layer, so that XLA knows it from the loop's own counter. On GPUs, matmuls then read
    a layer's keys and values where they lie in the cache.
    """

    layer: jax.Array | int  # counted from 0
    x_BTD: jax.Array  # the residual stream, or several, [M, B, T, D]
    cache: Cache[jax.Array] | None = None
    kept: Kept | None = None  # for later layers


class Block(nn.Module):
    """One layer: its branches, one after the other."""

    branches: Callable[[nn.Module], Sequence[Callable[[jax.Array, Tokens], Stream]]]

    @nn.compact
    def __call__(self, carried: Carried, input_BTY: jax.Array | None, tokens: Tokens) -> tuple[Carried, Any]:
        """The carry after the layer, and its router's output. input_BTY: see `altup.LayerInputs`."""
        layer, x_BTD, cache, kept = carried
        # Without these names, a scan keeps its carry on the device, whatever the remat policy says.
        x_BTD = checkpoint_name(checkpoint_name(x_BTD, "layer_input"), "residual")
        branches = self.branches(self)

        def compute(x_BTD: jax.Array, tokens: Tokens) -> Stream:
            for branch in branches:
                x_BTD, tokens = yield from branch(x_BTD, tokens)
            return x_BTD, tokens

        x_BTD, tokens = in_parts(compute, x_BTD, tokens.for_layer(layer, cache, kept, input_BTY))
        return Carried(layer + 1, x_BTD, tokens.cache, tokens.kept), tokens.routed


def in_parts(
    compute: Callable[[jax.Array, Tokens], Stream], x_BTD: jax.Array, tokens: Tokens
) -> tuple[jax.Array, Tokens]:
    """The result of `compute` for all rows, which are interleaved in as many parts as the rules say."""
    parts = interleave() if tokens.cache is None and x_BTD.shape[0] > 1 else 1
    if parts == 1:
        return in_turns([compute(x_BTD, tokens)])[0]
    # No row moves: each device has rows of every part.
    rows = jax.tree.map(lambda x: rearrange(x, "(b p) ... -> p b ...", p=parts), (x_BTD, tokens.rows))
    with sharing_weights():
        each = [jax.tree.map(lambda x, i=i: x[i], rows) for i in range(parts)]
        ends = in_turns([compute(shard(x_bTD, RESIDUAL), of_part) for x_bTD, of_part in each])
    x_pbTD = jnp.stack([x_bTD for x_bTD, _ in ends])
    return shard(rearrange(x_pbTD, "p b ... -> (b p) ..."), RESIDUAL), tokens


def dropout(x_BTD: jax.Array, rate: float, keys_BT: jax.Array | None, site: int) -> jax.Array:
    """`x_BTD` with entries dropped. Each token has a key of its own: its mask is the same however tokens are split."""
    if keys_BT is None or rate == 0:
        return x_BTD

    def keep(key: jax.Array) -> jax.Array:
        return jax.random.bernoulli(jax.random.fold_in(key, site), 1 - rate, x_BTD.shape[2:])

    return jnp.where(jax.vmap(jax.vmap(keep))(keys_BT), x_BTD / (1 - rate), 0).astype(x_BTD.dtype)
