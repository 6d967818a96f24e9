"""Activations, and steps of the hidden layer of an MLP around them."""

import math

import jax
import jax.numpy as jnp
from jax.scipy.special import erf

from gspmd_lm.model.norm import Change
from gspmd_lm.sharding.annotate import recomputed


def gelu(x: jax.Array) -> jax.Array:
    """x times the normal distribution's cumulative probability at x, computed in float32 and rounded once.

    Below -3, where that probability is small, its absolute error is below 1e-6, while its relative error is not
    bounded. `jax.nn.gelu` bounds that as well, with twice the arithmetic.
    """

    @recomputed
    def compute(x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        return (0.5 * wide * (1 + erf(math.sqrt(0.5) * wide))).astype(x.dtype)

    return compute(x)


ACTIVATIONS: dict[str, Change] = {
    "silu": jax.nn.silu,
    "gelu": gelu,
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
    "tanh": jnp.tanh,
}


def drop_small(x_BTF: jax.Array, share: float) -> jax.Array:
    """relu(x - c), where c is the quantile `share` of a normal distribution with the token's mean and deviation."""
    exact_BTF = x_BTF.astype(jnp.float32)
    spread_BT1 = root(jnp.var(exact_BTF, axis=-1, keepdims=True))
    least_BT1 = exact_BTF.mean(-1, keepdims=True) + jax.scipy.special.ndtri(share) * spread_BT1
    return jax.nn.relu(exact_BTF - least_BT1).astype(x_BTF.dtype)


def root(x: jax.Array, least: float = 0.0) -> jax.Array:
    """The square root of `x`, and at least that of `least`. At zero, its gradient is zero."""
    return jnp.sqrt(jnp.maximum(x, max(least, jnp.finfo(x.dtype).tiny)))
