"""Replicas of the weights, each of which adds up the gradients of its own rows before they are summed once."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from einops import rearrange

from gspmd_lm.sharding.annotate import REPLICAS, Placement, Split


class Replicas(NamedTuple):
    """The replicas of weights along some of the mesh axes that split the batch."""

    split: Split
    batch: Mapping[str, int]  # the mesh axes that split rows, the outermost first, and their sizes

    def each(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` mapped over the first dimension, the replicas; without replicas, `function` itself.

        A mapped dimension of size 1 would keep compilers from making a reduce-scatter.
        """
        over = self.split.over
        return jax.vmap(function, axis_name=REPLICAS, spmd_axis_name=over) if over else function

    def apart(self, x: jax.Array, before: str = "") -> jax.Array:
        """[R, before, rows of a replica, ...] of [before, rows, ...]; `x` itself where there are no replicas."""
        together, apart = self._letters(before)
        return rearrange(x, f"{together} -> {apart}", **self.batch) if self.split.over else x

    def together(self, x: jax.Array, before: str = "") -> jax.Array:
        """The inverse of `apart`."""
        together, apart = self._letters(before)
        return rearrange(x, f"{apart} -> {together}", **self.batch) if self.split.over else x

    def _letters(self, before: str) -> tuple[str, str]:
        own, other = [" ".join(one for one in self.batch if (one in self.split.over) == is_own) for is_own in (1, 0)]
        return f"{before} ({' '.join(self.batch)} row) ...", f"({own}) {before} ({other} row) ..."


def replicas_of(place: Placement, over: tuple[str, ...], batch: tuple[str, ...]) -> Replicas:
    """The replicas along the mesh axes `over`. batch: the mesh axes that split the rows."""
    return Replicas(place.over(over), {name: place.over((name,)).num_shards for name in batch})
