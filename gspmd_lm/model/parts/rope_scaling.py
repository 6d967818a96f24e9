"""Frequencies of rotary positions for contexts that are longer than those that a model was first trained on.

A function of `KINDS` gives the frequencies of `rope.Rotary` from a section `attention.rope.scaling`, from how many
numbers of a head turn, from theta, and from the lengths of rows: see `Tokens.lengths`.
"""

import math

import jax
import jax.numpy as jnp

from gspmd_lm.config import RopeScaling
from gspmd_lm.model.rope import frequencies


def _interpolate(scaling: RopeScaling, dim: int, theta: float, length: int | jax.Array) -> jax.Array:
    """Frequencies that are divided by the factor (linear)."""
    return _blend(scaling, frequencies(dim, theta, length), 0.0)


def _blend(scaling: RopeScaling, frequency: jax.Array, kept: float | jax.Array) -> jax.Array:
    """The frequencies where `kept` is 1, divided by the factor where it is 0, and interpolated in between."""
    return frequency * (kept + (1 - kept) / scaling.factor)


def _grow_theta(scaling: RopeScaling, dim: int, theta: float, length: int | jax.Array) -> jax.Array:
    """Frequencies whose theta grows with the length of a row (dynamic)."""
    half, over = dim // 2, length / scaling.original_context
    over = max(over, 1) if isinstance(over, float) else jnp.maximum(over, 1)
    grown = theta * (scaling.factor * over - (scaling.factor - 1)) ** (half / (half - 1))
    return frequencies(dim, grown, length)


def _divide_each(scaling: RopeScaling, dim: int, theta: float, length: int | jax.Array) -> jax.Array:
    """Frequencies that are divided by a number each (longrope)."""
    factors = (jnp.asarray(each, jnp.float32) for each in (scaling.long_factors, scaling.short_factors))
    return frequencies(dim, theta, length) / jnp.where(length > scaling.original_context, *factors)


def _keep_fast(scaling: RopeScaling, dim: int, theta: float, length: int | jax.Array) -> jax.Array:
    """Frequencies that stay if they turn often within the original context (llama3)."""
    low, high, frequency = scaling.low_freq_factor, scaling.high_freq_factor, frequencies(dim, theta, length)
    turns = scaling.original_context * frequency / (2 * jnp.pi)
    return _blend(scaling, frequency, jnp.clip((turns - low) / max(high - low, 1e-6), 0, 1))


def _keep_first(scaling: RopeScaling, dim: int, theta: float, length: int | jax.Array) -> jax.Array:
    """Frequencies of which the first ones stay (yarn). Two numbers of turns within the original context limit them."""
    half, frequency = dim // 2, frequencies(dim, theta, length)
    limits = scaling.high_freq_factor, scaling.low_freq_factor
    at = [half * math.log(scaling.original_context / (2 * math.pi * turns), theta) for turns in limits]
    first, last = (math.floor(at[0]), math.ceil(at[1])) if scaling.truncate else at
    first, last = max(first, 0), min(last, dim - 1)
    kept = 1 - jnp.clip((jnp.arange(half, dtype=jnp.float32) - first) / (last - first or 1e-3), 0, 1)
    return _blend(scaling, frequency, kept)


KINDS = {
    "linear": _interpolate,
    "dynamic": _grow_theta,
    "longrope": _divide_each,
    "llama3": _keep_fast,
    "yarn": _keep_first,
}
