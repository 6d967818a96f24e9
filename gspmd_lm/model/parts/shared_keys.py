"""Keys and values that later layers reuse: the last layers compute none of their own (Gemma 3n)."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from gspmd_lm import config
from gspmd_lm.model.attention import Attention
from gspmd_lm.model.cache import Kept
from gspmd_lm.model.kernels.context import keys_spec
from gspmd_lm.model.norm import Change
from gspmd_lm.model.tokens import Tokens
from gspmd_lm.sharding.annotate import like, shard


def keep_keys(
    cfg: config.ModelConfig, begin: Callable[[jax.Array], tuple[jax.Array, Change, Any]], x_BTD: jax.Array
) -> tuple[jax.Array, Change, Kept]:
    """The result of `begin`, with the keys and values that layers keep for later ones, [B, T, K, H].

    They are zeros before the first layer. begin: see `compose.StackParts`.
    """
    shape = *x_BTD.shape[:2], cfg.kv_head_rows, cfg.head_dim
    none = [like(jnp.zeros(shape, jnp.dtype(cfg.compute_dtype)), keys_spec(name)) for name in "kv"]
    x_BTD, join, _ = begin(x_BTD)
    return x_BTD, join, {kind: tuple(none) for kind in set(cfg.kind_of_each_layer)}


def kind_of_layer(cfg: config.ModelConfig) -> str:
    """The kind of the layers whose keys and values a layer of this kind reuses."""
    return "sliding" if cfg.attention.window else "full"


class KeepingAttention(Attention):
    """Attention that keeps its keys and values for later layers."""

    @nn.nowrap
    def finish_keys(self, k_BSKH: jax.Array, v_BSKH: jax.Array, tokens: Tokens) -> tuple[jax.Array, jax.Array, Tokens]:
        """Keys and values, and the tokens with both kept."""
        assert tokens.kept is not None
        kept = tokens.kept | {kind_of_layer(self.cfg): (k_BSKH, v_BSKH)}
        return super().finish_keys(k_BSKH, v_BSKH, tokens._replace(kept=kept))


class SharingAttention(Attention):
    """Attention to the keys and values of an earlier layer, which kept them, or has them in the cache."""

    made = ""

    @nn.nowrap
    def keys(self, in_BTD: jax.Array, tokens: Tokens) -> tuple[jax.Array, jax.Array, Tokens]:
        """The keys and values of the earlier layer."""
        assert tokens.shared is not None
        k, v = tokens.shared[kind_of_layer(self.cfg)]
        if tokens.cache and in_BTD.shape[1] == 1:
            k, v = tokens.cache.read(tokens.place_in_cache)
            return k, v, tokens
        return shard(k, keys_spec("k")), shard(v, keys_spec("v")), tokens
