"""RMSNorm and LayerNorm, computed in float32."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from gspmd_lm import config
from gspmd_lm.model.weights import weight
from gspmd_lm.sharding.annotate import recomputed, use

Change = Callable[[jax.Array], jax.Array]


def same(x: jax.Array) -> jax.Array:
    """`x` itself: the identity, where a model has no norm, no bias or no scale."""
    return x


def apply_changes(x: jax.Array, changes: Sequence[Change]) -> jax.Array:
    """`x` after all changes, the first one first."""
    return functools.reduce(lambda x, change: change(x), changes, x)


class Learned(NamedTuple):
    """A learned vector of a norm."""

    name: str
    start: float
    read: Change  # the values in use from the stored ones, such as 1 + x
    apply: Callable[[jax.Array, jax.Array], jax.Array]


class NormParts(NamedTuple):
    """The parts of a norm."""

    cfg: config.ModelConfig  # with weights that are used in float32
    center: Change
    learned: tuple[Learned, ...]


@functools.cache
def norm_parts(cfg: config.ModelConfig) -> NormParts:
    """The parts of all norms of a model."""
    scale = Learned("scale", 1 - cfg.norm.offset, lambda x: x + cfg.norm.offset, jnp.multiply)
    learned = [scale] * cfg.norm.scale + [Learned("bias", 0.0, same, jnp.add)] * cfg.norm.bias
    center = {"layernorm": lambda y: y - y.mean(-1, keepdims=True), "rmsnorm": same}[cfg.norm.kind]
    return NormParts(dataclasses.replace(cfg, compute_dtype="float32"), center, tuple(learned))


class Norm(nn.Module):
    """A norm over the last dimension."""

    cfg: config.ModelConfig
    axes: str = "embed"  # of scale and bias: the last axes of what is normed

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        cfg, center, learned = norm_parts(self.cfg)
        size = x.shape[-len(self.axes.split()) :]
        vectors = [
            one.read(use(weight(self, one.name, self.axes, size, cfg, nn.initializers.constant(one.start))))
            for one in learned
        ]

        @recomputed
        def normalize(x: jax.Array, *vectors: jax.Array) -> jax.Array:
            y = center(self.mask_padding(x.astype(jnp.float32)))
            y *= jax.lax.rsqrt(self.mean(jnp.square(y)) + cfg.norm.eps)
            for one, vector in zip(learned, vectors, strict=True):
                y = one.apply(y, vector)
            return y.astype(x.dtype)

        return normalize(x, *vectors)

    @nn.nowrap
    def mask_padding(self, x: jax.Array) -> jax.Array:
        """`x` without its padding, which does not count."""
        return x

    @nn.nowrap
    def mean(self, squares: jax.Array) -> jax.Array:
        """The mean of the squares over the last dimension, [..., 1]."""
        return squares.mean(-1, keepdims=True)


def make_norm(cfg: config.ModelConfig, name: str, module: nn.Module) -> Change:
    """A norm of a layer, in its module."""
    return Norm(cfg, name=name)


def no_norm(module: nn.Module) -> Change:
    """The identity, in place of a norm of a layer."""
    return same
