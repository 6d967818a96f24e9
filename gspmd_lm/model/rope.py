"""Rotary positions (arXiv 2104.09864). parts/rope_scaling.py has the frequencies of longer contexts."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gspmd_lm.model.tokens import Tokens


class Rotary(NamedTuple):
    """The rotation of the numbers of a head by the position of its token."""

    dim: int  # how many numbers turn, the first of a head
    # The angle by which each pair of numbers turns from one position to the next, in radians, [dim / 2], from the
    # lengths of rows. It is [B, 1, dim / 2] where it depends on the length, and each row has its own: see
    # `Tokens.lengths`.
    frequencies: Callable[[int | jax.Array], jax.Array]
    factor: float = 1.0  # multiplies the numbers that turn


def frequencies(dim: int, theta: float | jax.Array, length: int | jax.Array) -> jax.Array:
    """The frequencies of `Rotary`, which do not depend on the length: a geometric sequence from 1 to 1 / theta."""
    pair = jnp.arange(dim // 2, dtype=jnp.float32)
    return theta ** (-pair / (dim // 2))


def rotate(rotary: Rotary, x_BTNH: jax.Array, tokens: Tokens) -> jax.Array:
    """Queries or keys with rotary positions. The first half of the numbers that turn is paired with the second."""
    frequency = rotary.frequencies(tokens.lengths(x_BTNH.shape[1]))
    angle_BT1H = (tokens.positions_BT[..., None] * frequency)[:, :, None, :]
    cos, sin = rotary.factor * jnp.cos(angle_BT1H), rotary.factor * jnp.sin(angle_BT1H)
    first, second, still = jnp.split(x_BTNH.astype(jnp.float32), [rotary.dim // 2, rotary.dim], axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, still], -1).astype(x_BTNH.dtype)
