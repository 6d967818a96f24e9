"""A layer: branches around a residual stream. compose.py chooses the branches of each family."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
from jax.ad_checkpoint import checkpoint_name

from gspmd_lm.model.cache import Cache, Kept
from gspmd_lm.model.norm import Change, apply_changes, same
from gspmd_lm.model.tokens import Tokens
from gspmd_lm.sharding.annotate import shard
from gspmd_lm.sharding.interleave import Turns, after, interleave
from gspmd_lm.sharding.matmuls import gathered
from gspmd_lm.sharding.partial_sums import Unreduced, reduced

RESIDUAL = "residual: batch seq embed"
BLOCK_INPUT = "block_input: batch seq embed"

Stream = Turns[tuple[jax.Array, Tokens]]  # the residual stream and its tokens, which come in turns: see `interleave`

# Attention or a feed-forward network: it reads gathered tokens and returns a sum over devices that is not yet reduced.
Part = Callable[[jax.Array, Tokens], tuple[Unreduced, Tokens]]
Drop = Callable[[jax.Array, Tokens], jax.Array]  # the output of a branch after dropout


def keep_all(y_BTD: jax.Array, tokens: Tokens) -> jax.Array:
    """`y_BTD` itself, of which nothing is dropped."""
    return y_BTD


class Branch(NamedTuple):
    """after_sum(x + drop(after(part(before(x))))): a norm, a scale or nothing stands around attention or an MLP."""

    part: Part
    before: Change
    after: Change
    after_sum: Change
    drop: Drop

    def __call__(self, x_BTD: jax.Array, tokens: Tokens) -> Stream:
        """The residual stream after the branch. It yields once, until the other parts of the rows have gathered too."""
        with gathered(self.before(x_BTD), BLOCK_INPUT, RESIDUAL) as in_BTD:
            others = yield in_BTD
            y, tokens = self.part(in_BTD, tokens)
        y_BTD = self.after(reduced(after(y, others), BLOCK_INPUT, RESIDUAL))
        return shard(self.after_sum(x_BTD + self.drop(y_BTD, tokens)), RESIDUAL), tokens


# It makes a branch in the module of a layer.
BranchMaker = Callable[[nn.Module], Callable[[jax.Array, Tokens], Stream]]


def make_branch(
    part: Callable[[], Part],
    before: Callable[[nn.Module], Change],
    after: Sequence[Callable[[nn.Module], Change]],
    after_sum: Callable[[nn.Module], Change],
    drop: Drop,
    module: nn.Module,
) -> Branch:
    """A branch of functions that make its steps. Steps that have weights make them in the module of the layer."""
    changes = [make(module) for make in after]
    return Branch(part(), before(module), functools.partial(apply_changes, changes=changes), after_sum(module), drop)


def begin_stream(x_BTD: jax.Array) -> tuple[jax.Array, Change, None]:
    """A single residual stream, to which nothing is done after the last layer, and of which layers keep no keys."""
    return shard(x_BTD, RESIDUAL), same, None


class Carried(NamedTuple):
    """The carry of the scan over layers.

    A loop carries the number of the layer, so that XLA knows it from the loop's own counter. On GPUs, matmuls then read
    a layer's keys and values where they lie in the cache.
    """

    layer: jax.Array | int  # counted from 0
    x_BTD: jax.Array  # the residual stream, or several, [M, B, T, D]
    cache: Cache | None = None
    kept: Kept | None = None  # for later layers


class Block(nn.Module):
    """One layer: its branches, one after the other."""

    branches: tuple[BranchMaker, ...]

    @nn.compact
    def __call__(self, carried: Carried, input_BTY: jax.Array | None, tokens: Tokens) -> tuple[Carried, Any]:
        """The carry after the layer, and its router's output. input_BTY: see `altup.LayerInputs`."""
        layer, x_BTD, cache, kept = carried
        # Without these names, a scan keeps its carry on the device, whatever the remat policy says.
        x_BTD = checkpoint_name(checkpoint_name(x_BTD, "layer_input"), "residual")
        branches = [make(self) for make in self.branches]

        def compute(x_BTD: jax.Array, tokens: Tokens) -> Stream:
            for branch in branches:
                x_BTD, tokens = yield from branch(x_BTD, tokens)
            return x_BTD, tokens

        tokens = tokens.for_layer(layer, cache, kept, input_BTY)
        x_BTD, tokens = interleave(compute, x_BTD, tokens, None if cache else tokens.rows, RESIDUAL)
        return Carried(layer + 1, x_BTD, tokens.cache, tokens.kept), tokens.routed
