"""Grouped-query attention: of tokens to those of their row, or to what another stack made."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
from einops import rearrange

from gspmd_lm import config
from gspmd_lm.model.cache import Cache, Kept
from gspmd_lm.model.kernels.attention import OUT, Q
from gspmd_lm.model.kernels.context import attend, keys_spec
from gspmd_lm.model.kernels.windows import attend_in_windows
from gspmd_lm.model.layers import Norm, rope
from gspmd_lm.model.weights import adapted, bias, matrix
from gspmd_lm.sharding.annotate import Adapted, Weight, like, shard, use
from gspmd_lm.sharding.matmuls import gathered, project, unreduced_matmul
from gspmd_lm.sharding.partial_sums import Unreduced

MEMORY = "memory: batch seq embed"
WHOLE_MEMORY = "memory: batch kv_seq embed"  # as keys and values are made of it


class Attention(nn.Module):
    """Attention within a segment: to tokens, or to what another stack made if `cfg.reads` says how wide that is.

    What another stack made stands in the batch as memory [B, S, M], with memory_segment_ids [B, S]. Without it, its
    keys and values are those of the cache.
    """

    cfg: config.ModelConfig

    def setup(self):
        cfg = self.cfg
        D, N, K, H = cfg.embed, cfg.head_rows, cfg.kv_head_rows, cfg.head_dim
        wq = matrix(self, "wq", "embed heads head_dim", (D, N, H), cfg)
        kv_names = "" if cfg.shared_kv_layers else "kv"  # a layer that shares keys and values makes none
        w_keys = [matrix(self, f"w{name}", "embed kv_heads head_dim", (cfg.reads or D, K, H), cfg) for name in kv_names]
        wo = matrix(self, "wo", "heads head_dim embed", (N, H, D), cfg)
        self.wg = matrix(self, "wg", "embed heads head_dim", (D, N, H), cfg) if cfg.attention_gate else None
        if cfg.qkv_bias:
            self.bq = bias(self, "bq", "heads head_dim", (N, H), cfg)
            with_bias = kv_names if cfg.key_bias else kv_names.replace("k", "")
            self.b_keys = {name: bias(self, f"b{name}", "kv_heads head_dim", (K, H), cfg) for name in with_bias}
        self.of_heads, relative = None, cfg.relative_positions
        if cfg.attention_sinks:
            self.of_heads = bias(self, "sinks", "heads", (N,), cfg)
        elif relative and not relative.shared:
            self.of_heads = use(matrix(self, "relative_bias", "ranges heads", (relative.ranges, N), cfg))
        self.vectors = []
        if cfg.windows and cfg.windows.vectors:
            of, distances = "whole_" * config.is_whole(cfg), 2 * cfg.windows.size - 1
            self.vectors = [use(matrix(self, f"{of}{name}_vectors", "ranges head_dim", (distances, H), cfg))
                            for name in ("height", "width")]  # fmt: skip
        self.bo = bias(self, "bo", "embed", (D,), cfg) if cfg.attention_out_bias else None
        plain = dataclasses.replace(cfg, norm="rmsnorm", norm_scale=False, norm_bias=False)
        self.value_norm = Norm(plain) if cfg.value_norm else None
        if cfg.qk_norm and cfg.qk_norm_kind == "shared":
            self.q_norm, self.k_norm = Norm(cfg, "head_dim"), Norm(cfg, "head_dim")
        elif cfg.qk_norm and cfg.qk_norm_kind == "unscaled":
            self.q_norm, self.k_norm = Norm(plain), Norm(plain)
        elif cfg.qk_norm:
            unbiased, joint = dataclasses.replace(cfg, norm_bias=False), cfg.qk_norm_kind == "joint"
            self.q_norm = Norm(unbiased, "heads head_dim", cfg.heads * joint)
            self.k_norm = Norm(unbiased, "kv_heads head_dim", cfg.kv_heads * joint)
        self.wq, self.wo, *self.w_keys = (adapted(self, w, cfg) for w in (wq, wo, *w_keys))

    def __call__(
        self,
        x_BTD: jax.Array,
        batch: dict[str, jax.Array],
        cache: Cache[jax.Array] | None = None,
        layer: jax.Array | int = 0,
        kept: Kept | None = None,
    ) -> tuple[Unreduced, Cache[jax.Array] | None, Kept | None]:
        """What is added to the residual stream, the cache, and `kept` with the keys and values of this layer.

        `x_BTD` is gathered.

        With a cache, k and v of the layer, counted from 0, are written to it. A single token per row is the next one:
        it attends to the tokens in the cache. Several tokens are the first ones: they attend to each other. A layer
        that shares keys and values writes none. It reads those that an earlier layer kept, which are in the batch.
        The cache of a memory is one of its own, which is written where the batch has the memory.
        """
        cfg, kind = self.cfg, "sliding" if self.cfg.sliding_window else "full"
        own_kv = not cfg.shared_kv_layers and (not cfg.reads or "memory" in batch)
        q = project(x_BTD, self.wq)
        if own_kv:
            k, v = self._keys(x_BTD, batch)
        elif cache and cfg.reads:
            k, v = cache.of(layer)
        else:
            k, v = (batch[f"shared_{name}_{kind}"] for name in "kv")
        if cfg.qkv_bias:
            q = q + self.bq
            if own_kv:
                k, v = (x + self.b_keys[name] if name in self.b_keys else x for name, x in (("k", k), ("v", v)))
        K, V = (keys_spec(name, of_memory=cfg.reads > 0) for name in "kv")
        q_BTNH, k_BSKH, v_BSKH = shard(q, Q), shard(k, K), shard(v, V)
        if cfg.qk_norm:
            q_BTNH, k_BSKH = self.q_norm(q_BTNH), self.k_norm(k_BSKH) if own_kv else k_BSKH
        if self.value_norm and own_kv:
            v_BSKH = self.value_norm(v_BSKH)
        if cfg.attention_temperature:
            q_BTNH = shard(q_BTNH * temperature(batch["positions"], cfg.attention_temperature).astype(q.dtype), Q)
        if cfg.attention_chunk:
            batch = in_chunks(batch, cfg.attention_chunk)
        if cfg.positions == "rope":
            # Both are named again, so that a remat policy that saves them saves the inputs of attention.
            length = cache.k_LBSKH.shape[2] if cache else q.shape[1]
            q_BTNH = shard(rope(q_BTNH, batch["positions"], cfg, length), Q)
            k_BSKH = shard(rope(k_BSKH, batch["positions"], cfg, length), K) if own_kv else k_BSKH
        if kept is not None:
            kept = kept | {kind: (k_BSKH, v_BSKH)}
        if cache and own_kv:
            cache = cache.written(k_BSKH, v_BSKH, 0 if cfg.reads else batch["slot"], layer)
        if cache and q.shape[1] == 1:
            k_BSKH, v_BSKH = cache.of(layer)
        of_heads = batch.get("relative_RN", self.of_heads)
        if cfg.relative_vectors:
            pairs = (self.wq.weight, self.bq), (self.w_keys[0].weight, self.b_keys["k"])
            of_heads = of_ranges(batch["relative_RD"], *pairs)
        if cfg.windows:
            beyond = [self.b_keys.get(name) if cfg.qkv_bias else None for name in "kv"]
            out_BTNH = attend_in_windows(q_BTNH, k_BSKH, v_BSKH, cfg, of_heads, beyond, self.vectors)
        else:
            out_BTNH = attend(q_BTNH, k_BSKH, v_BSKH, batch, cfg, of_heads)
        if self.wg is not None:
            gate_BTNH = like(project(x_BTD, self.wg), Q)
            out_BTNH = shard(out_BTNH * jax.nn.sigmoid(gate_BTNH), OUT)
        return to_residual(out_BTNH, self.wo, self.bo, cfg), cache, kept

    def _keys(self, x_BTD: jax.Array, batch: dict[str, jax.Array]) -> list[jax.Array]:
        """Keys and values, of the tokens themselves or of what another stack made."""
        if not self.cfg.reads:
            return [project(x_BTD, w) for w in self.w_keys]
        with gathered(batch["memory"], WHOLE_MEMORY, MEMORY) as in_BSM:
            return [project(in_BSM, w) for w in self.w_keys]


def of_ranges(vectors_RD: jax.Array, *projections: tuple[Weight, jax.Array]) -> jax.Array:
    """The query and the key of each range of distances as numbers of each head, [2 R H, N] (arXiv 2006.03654).

    projections: weight and bias of queries, and of keys.
    """
    both = [jnp.einsum("RD,DNH->RNH", vectors_RD, use(w)) + b for w, b in projections]
    return rearrange(jnp.stack(both), "z R N H -> (z R H) N")


def to_residual(out_BTNH: jax.Array, wo: Adapted, bo: jax.Array | None, cfg: config.ModelConfig) -> Unreduced:
    """What the result of attention adds to the residual stream. Heads of padding add nothing."""
    if cfg.head_rows > cfg.heads:
        out_BTNH = jnp.where((jnp.arange(cfg.head_rows) < cfg.heads)[:, None], out_BTNH, 0)
    y = unreduced_matmul(out_BTNH, wo)
    return y if bo is None else y + bo


def temperature(positions_BT: jax.Array, tuned: config.AttentionTemperature) -> jax.Array:
    """What queries are multiplied with, [B, T, 1, 1], float32."""
    steps_BT = (positions_BT + tuned.offset) // tuned.every
    return (1 + tuned.scale * jnp.log1p(steps_BT.astype(jnp.float32)))[:, :, None, None]


def in_chunks(batch: dict[str, jax.Array], size: int) -> dict[str, jax.Array]:
    """The batch of a layer whose tokens attend within chunks of their document, as if each chunk were a document."""
    positions_BT = batch["positions"]
    length = positions_BT.shape[1]
    if length == 1 and "slot" in batch:  # a new token attends to the tokens in the cache that are of its chunk
        return batch | {"start": batch["slot"] - positions_BT[:, 0] % size}
    if length <= size:
        return batch
    segments_BT = batch.get("segment_ids", jnp.zeros_like(positions_BT))
    return batch | {"segment_ids": segments_BT * -(-length // size) + positions_BT // size}
