"""Dropout. Each token has a key of its own: its mask is the same however tokens are split."""

import jax
import jax.numpy as jnp

from gspmd_lm import config
from gspmd_lm.model.tokens import Tokens


def before_blocks(
    cfg: config.ModelConfig, x_BTD: jax.Array, batch: dict[str, jax.Array], dropout_key: jax.Array | None
) -> tuple[jax.Array, jax.Array | None]:
    """`x_BTD` after the dropout before the first block, and a dropout key for each token, if any are dropped."""
    if dropout_key is None or not cfg.dropout:
        return x_BTD, None
    places_BT = batch.get("places", jnp.broadcast_to(jnp.arange(x_BTD.shape[1]), x_BTD.shape[:2]))
    keys_BT = token_keys(dropout_key, batch["row"], places_BT)
    return dropout(x_BTD, cfg.dropout, keys_BT, 0), keys_BT


def drop_in_branch(rate: float, site: int, y_BTD: jax.Array, tokens: Tokens) -> jax.Array:
    """The output of a branch with entries dropped: see `dropout`."""
    return dropout(y_BTD, rate, tokens.keys_BT, site)


def token_keys(dropout_key: jax.Array, row_B: jax.Array, places_BT: jax.Array) -> jax.Array:
    """A key for each token, so that its mask is the same wherever the token is computed."""
    keys_B = jax.vmap(jax.random.fold_in, (None, 0))(dropout_key, row_B)
    return jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)))(keys_B, places_BT)


def dropout(x_BTD: jax.Array, rate: float, keys_BT: jax.Array | None, site: int) -> jax.Array:
    """`x_BTD` with entries dropped; without keys, none is. site: the number of the dropout within a layer."""
    if keys_BT is None or rate == 0:
        return x_BTD

    def keep(key: jax.Array) -> jax.Array:
        return jax.random.bernoulli(jax.random.fold_in(key, site), 1 - rate, x_BTD.shape[2:])

    return jnp.where(jax.vmap(jax.vmap(keep))(keys_BT), x_BTD / (1 - rate), 0).astype(x_BTD.dtype)
