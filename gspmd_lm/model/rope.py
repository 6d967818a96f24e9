"""Positions of tokens that are computed and not learned: rotary positions and sinusoids."""

import math

import jax
import jax.numpy as jnp

from gspmd_lm import config
from gspmd_lm.model.tokens import Tokens


def rope(x_BTNH: jax.Array, positions_BT: jax.Array, cfg: config.ModelConfig, length: int | jax.Array) -> jax.Array:
    """Rotary positions (arXiv 2104.09864) on the first `rope_dim` dimensions of a head.

    Their first half is paired with the second, as in Llama's weights on Hugging Face. length: the tokens of each
    row, or one number for all: see `Tokens.length`.
    """
    turned = cfg.attention.rope.dim or cfg.head_dim
    frequency = rope_frequencies(cfg, length)
    frequency = frequency[:, None] if frequency.ndim > 1 else frequency  # each row has its own, or all have the same
    angle_BT1H = (positions_BT[..., None] * frequency)[:, :, None, :]
    factor = cfg.attention.rope.scaling.attention_factor if cfg.attention.rope.scaling else 1.0
    cos, sin = factor * jnp.cos(angle_BT1H), factor * jnp.sin(angle_BT1H)
    first, second, still = jnp.split(x_BTNH.astype(jnp.float32), [turned // 2, turned], axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, still], -1).astype(x_BTNH.dtype)


def rope_frequencies(cfg: config.ModelConfig, length: int | jax.Array) -> jax.Array:
    """The angle by which each pair of dimensions turns from one position to the next, in radians, [H / 2].

    It is [B, H / 2] where the frequencies depend on the length of a row and `length` is that of each row, [B, 1].
    """
    half, theta, scaling = (
        (cfg.attention.rope.dim or cfg.head_dim) // 2,
        cfg.attention.rope.theta,
        cfg.attention.rope.scaling,
    )
    pair = jnp.arange(half, dtype=jnp.float32)
    if scaling is None:
        return theta ** (-pair / half)
    if scaling.kind == "dynamic":
        over = length / scaling.original_context
        over = max(over, 1) if isinstance(over, float) else jnp.maximum(over, 1)
        theta *= (scaling.factor * over - (scaling.factor - 1)) ** (half / (half - 1))
        return theta ** (-pair / half)
    frequency = theta ** (-pair / half)
    if scaling.kind == "longrope":
        factors = (jnp.asarray(each, jnp.float32) for each in (scaling.long_factors, scaling.short_factors))
        return frequency / jnp.where(length > scaling.original_context, *factors)
    kept, low, high = 0.0, scaling.low_freq_factor, scaling.high_freq_factor
    if scaling.kind == "llama3":
        turns = scaling.original_context * frequency / (2 * jnp.pi)
        kept = jnp.clip((turns - low) / max(high - low, 1e-6), 0, 1)
    elif scaling.kind == "yarn":  # the pairs that turn `high` and `low` times within original_context
        at = [half * math.log(scaling.original_context / (2 * math.pi * n), theta) for n in (high, low)]
        first, last = (math.floor(at[0]), math.ceil(at[1])) if scaling.truncate else at
        first, last = max(first, 0), min(last, 2 * half - 1)
        kept = 1 - jnp.clip((pair - first) / (last - first or 1e-3), 0, 1)
    return frequency * (kept + (1 - kept) / scaling.factor)


def sinusoids(positions_BT: jax.Array, width: int) -> jax.Array:
    """Fixed positions, [B, T, width] (arXiv 1706.03762): sines in the first half, cosines in the second."""
    half = (width + 1) // 2
    inverse_wavelength = 10000.0 ** (-jnp.arange(half, dtype=jnp.float32) / max(half - 1, 1))
    angle_BTD = positions_BT[..., None] * inverse_wavelength
    return jnp.concatenate([jnp.sin(angle_BTD), jnp.cos(angle_BTD)], -1)[..., :width]


def rotate(cfg: config.ModelConfig, x_BTNH: jax.Array, tokens: Tokens) -> jax.Array:
    """Queries or keys with rotary positions."""
    return rope(x_BTNH, tokens.positions_BT, cfg, tokens.lengths(x_BTNH.shape[1]))


def scale_by_position(tuned: config.AttentionTemperature, q_BTNH: jax.Array, tokens: Tokens) -> jax.Array:
    """Queries multiplied by a factor that grows with their position (Llama 4)."""
    steps_BT = (tokens.positions_BT + tuned.offset) // tuned.every
    factor_BT = 1 + tuned.scale * jnp.log1p(steps_BT.astype(jnp.float32))
    return q_BTNH * factor_BT[:, :, None, None].astype(q_BTNH.dtype)
