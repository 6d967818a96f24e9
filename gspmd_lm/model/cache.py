"""The cache of keys, values and states while text is generated, and the keys and values that later layers reuse."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gspmd_lm import config
from gspmd_lm.sharding.annotate import like, shard

CACHE = "cache: layers batch kv_seq kv_heads head_dim"
Kept = dict[str, tuple[jax.Array, ...]]  # kind of layer -> keys and values of the last one of that kind


class LinearState(NamedTuple):
    """The recurrent state of the layers with linear attention: arrays, or their specs."""

    q_LBAKH: Any  # the inputs of the short convolutions from the last tokens, in the compute dtype
    k_LBAKH: Any
    v_LBANH: Any
    s_LBNIH: Any  # float32

    def write(self, new: "LinearState", layer: jax.Array | int) -> "LinearState":
        """The states, with those of one layer replaced by `new`, [B, ...]."""

        def one(x: jax.Array, y: jax.Array, spec: str) -> jax.Array:
            return shard(jax.lax.dynamic_update_slice(x, y[None].astype(x.dtype), (layer, *[0] * y.ndim)), spec)

        return LinearState._make(map(one, self, new, STATES))

    def read(self, layer: jax.Array | int) -> "LinearState":
        """The states of one layer, [B, ...]."""
        states = (jax.lax.dynamic_index_in_dim(x, layer, keepdims=False) for x in self)
        return LinearState(*(like(x, spec.replace("layers ", "")) for x, spec in zip(states, STATES, strict=True)))


STATES = LinearState(
    "state: layers batch taps kv_heads head_dim",
    "state: layers batch taps kv_heads head_dim",
    "state: layers batch taps heads head_dim",
    "state: layers batch heads key_dim head_dim",
)


class Cache(NamedTuple):
    """The keys and values of the tokens so far in all layers, and the states of linear attention.

    It holds arrays, or their specs.

    Keys and values are [L, B, S, K, H] in the compute dtype; slot s holds a row's token s.

    Latent attention caches no values and one key for all heads: the latent vector that keys and values are projected
    from, and the rotary dimensions that all heads share, [L, B, S, 1, kv_rank + rope_dim].

    L counts the layers of one kind. `Tokens.places_in_cache_L` holds the index of each layer among its kind.

    Cross-attention caches the keys and values of the encoder output in a cache of its own, `memory`.
    """

    k_LBSKH: Any
    v_LBSKH: Any = None
    linear: LinearState | None = None
    memory: "Cache | None" = None

    def write(
        self, k_BTKH: jax.Array, v_BTKH: jax.Array | None, slot: jax.Array | int, layer: jax.Array | int
    ) -> "Cache":
        """The cache with T tokens per row, from `slot` on."""
        at = (layer, 0, slot, 0, 0)

        def one(x_LBSKH: jax.Array, new_BTKH: jax.Array) -> jax.Array:
            return shard(jax.lax.dynamic_update_slice(x_LBSKH, new_BTKH[None].astype(x_LBSKH.dtype), at), CACHE)

        k, v = jax.tree.map(one, self[:2], (k_BTKH, v_BTKH))
        return self._replace(k_LBSKH=k, v_LBSKH=v)

    def read(self, layer: jax.Array | int) -> tuple[jax.Array, ...]:
        """Keys and values of one layer, [B, S, K, H]; for latent attention, the latent vectors alone."""

        def one(x_LBSKH: jax.Array) -> jax.Array:
            x_BSKH = jax.lax.dynamic_index_in_dim(x_LBSKH, layer, keepdims=False)
            return like(x_BSKH, CACHE.replace("layers ", ""))

        return tuple(one(x_LBSKH) for x_LBSKH in self[:2] if x_LBSKH is not None)

    @property
    def specs(self) -> "Cache":
        """The specs of these arrays."""
        memory = self.memory and self.memory.specs
        return Cache(CACHE, None if self.v_LBSKH is None else CACHE, STATES if self.linear else None, memory)


def empty_cache(cfg: config.ModelConfig, rows: int, slots: int, source: int = 0) -> Cache:
    """An empty cache for `rows` rows of up to `slots` tokens, and for sources of up to `source` tokens."""
    linear = sum(layer.attention.linear is not None for layer in cfg.each_layer)
    kv_layers = cfg.layers - linear - cfg.attention.shared_kv_layers
    sizes, latent = (cfg.kv_head_rows, cfg.head_dim), cfg.attention.latent
    if latent:
        sizes = 1, latent.kv_rank + cfg.attention.rope.dim
    zeros = jnp.zeros((kv_layers, rows, slots, *sizes), jnp.dtype(cfg.compute_dtype))
    k, v = shard(zeros, CACHE), None if latent else shard(zeros, CACHE)
    memory = empty_cache(dataclasses.replace(cfg, encoder=None), rows, source) if cfg.encoder else None
    return Cache(k, v, _empty_states(cfg, linear, rows) if linear else None, memory)


def _empty_states(cfg: config.ModelConfig, layers: int, rows: int) -> LinearState:
    """The states before the first token."""
    sizes = cfg.attention.linear
    assert sizes
    K, N, H, before = sizes.key_heads, sizes.value_heads, sizes.head_dim, sizes.taps - 1
    shapes = (before, K, H), (before, K, H), (before, N, H), (N, H, H)
    dtypes = *[jnp.dtype(cfg.compute_dtype)] * 3, jnp.float32
    arrays = (jnp.zeros((layers, rows, *shape), dtype) for shape, dtype in zip(shapes, dtypes, strict=True))
    return LinearState._make(map(shard, arrays, STATES))


def in_cache(cfg: config.ModelConfig) -> list[int]:
    """The index of each layer in the cache: its number among those with linear attention, or among the others.

    A layer that reuses keys has the index of the layer that made them.
    """
    kinds = cfg.kind_of_each_layer
    makers = range(cfg.layers - cfg.attention.shared_kv_layers)  # they make keys of their own
    linear = [kind == "linear" for kind in kinds]
    keys_of = [i if i in makers else max(j for j in makers if kinds[j] == kinds[i]) for i in range(cfg.layers)]
    return [linear[:i].count(linear[i]) for i in keys_of]
