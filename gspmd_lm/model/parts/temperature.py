"""Queries that grow with their position (Llama 4, Ministral)."""

import jax
import jax.numpy as jnp

from gspmd_lm import config
from gspmd_lm.model.tokens import Tokens


def scale_by_position(tuned: config.AttentionTemperature, q_BTNH: jax.Array, tokens: Tokens) -> jax.Array:
    """Queries multiplied by a factor that grows with their position."""
    steps_BT = (tokens.positions_BT + tuned.offset) // tuned.every
    factor_BT = 1 + tuned.scale * jnp.log1p(steps_BT.astype(jnp.float32))
    return q_BTNH * factor_BT[:, :, None, None].astype(q_BTNH.dtype)
