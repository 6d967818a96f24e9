"""Grouped-query attention: of tokens to those of their row, of patches to a window, or to what another stack made."""

import dataclasses
from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
from einops import rearrange

from gspmd_lm import config
from gspmd_lm.model.cache import Cache, Kept
from gspmd_lm.model.kernels import attention as kernels
from gspmd_lm.model.kernels.attention import OUT, SEGMENTS, K, Q, Tokens, V, keys_axis, masked, of_heads, scores_scale
from gspmd_lm.model.kernels.context import attend, keys_spec
from gspmd_lm.model.layers import Norm, lengths, rope
from gspmd_lm.model.weights import adapted, bias, matrix
from gspmd_lm.sharding.annotate import Adapted, Weight, like, platform, shard, split, use
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
        if cfg.relative_vectors and cfg.relative_vectors.own_projections:
            to_q, to_k = (matrix(self, f"w{name}_relative", "embed heads head_dim", (D, N, H), cfg) for name in "qk")
            self.of_ranges = (to_q, bias(self, "bq_relative", "heads head_dim", (N, H), cfg)), (to_k, 0.0)
        elif cfg.relative_vectors:
            self.of_ranges = (wq, self.bq), (w_keys[0], self.b_keys["k"])
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
            q = _plus(q, self.bq)
            if own_kv:
                k, v = (_plus(x, self.b_keys[name]) if name in self.b_keys else x for name, x in (("k", k), ("v", v)))
        k_spec, v_spec = (keys_spec(name, of_memory=cfg.reads > 0) for name in "kv")
        q_BTNH, k_BSKH, v_BSKH = shard(q, Q), shard(k, k_spec), shard(v, v_spec)
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
            length = lengths(batch, q.shape[1])
            q_BTNH = shard(rope(q_BTNH, batch["positions"], cfg, length), Q)
            k_BSKH = shard(rope(k_BSKH, batch["positions"], cfg, length), k_spec) if own_kv else k_BSKH
        if kept is not None:
            kept = kept | {kind: (k_BSKH, v_BSKH)}
        if cache and own_kv:
            cache = cache.written(k_BSKH, v_BSKH, 0 if cfg.reads else batch["slot"], layer)
        if cache and q.shape[1] == 1:
            k_BSKH, v_BSKH = cache.of(layer)
        of_heads = batch.get("relative_RN", self.of_heads)
        if cfg.relative_vectors:
            of_heads = of_ranges(batch["relative_RD"], *self.of_ranges)
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


def _plus(x_BTNH: jax.Array, b_NH: jax.Array) -> jax.Array:
    """The sum. On GPUs, heads are one dimension: cuBLAS adds a bias of one dimension while it multiplies."""
    if platform() != "gpu" or split("q", "head_dim").num_shards > 1:
        return x_BTNH + b_NH
    return (x_BTNH.reshape(*x_BTNH.shape[:2], -1) + b_NH.reshape(-1)).reshape(x_BTNH.shape)


def of_ranges(vectors_RD: jax.Array, *projections: tuple[Weight, jax.Array | float]) -> jax.Array:
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


def attend_in_windows(
    q_BTNH: jax.Array,
    k_BTNH: jax.Array,
    v_BTNH: jax.Array,
    cfg: config.ModelConfig,
    own_RN: jax.Array | None,
    beyond_NH: Sequence[jax.Array | None] = (None, None),
    vectors_RH: Sequence[jax.Array] = (),
) -> jax.Array:
    """softmax(scale q k) v over the patches of a window, [B, T, N, H]. XLA computes it, unless it is all of an image.

    The first rows are the patches of an image, row by row from the top left one. The others are padding, which gets 0.
    own_RN: the numbers of each head of ranges of distances, if the config has any. beyond_NH: the key and the value of
    places of a window that lie beyond the image; None: zeros. vectors_RH: see `with_places`.

    A window is to attention what a row is elsewhere (arXiv 2103.14030). All windows of an image are in the same rows of
    the batch as the image. So an image must not be split: no device that has a part of its patches has all of a window.
    """
    assert cfg.windows and cfg.patches
    size, shift, side, T = cfg.windows.size, cfg.windows.shift, cfg.patches.side, q_BTNH.shape[1]
    B, across = len(q_BTNH), -(-side // size)
    missing = across * size - side

    def in_windows(x_BTNH: jax.Array, spec: str, beyond_NH: jax.Array | None) -> jax.Array:
        x_ByxNH = rearrange(x_BTNH[:, : side**2], "B (y x) N H -> B y x N H", x=side)
        x_ByxNH = jnp.roll(x_ByxNH, (-shift, -shift), (1, 2)) if shift else x_ByxNH
        if missing:
            x_ByxNH = jnp.pad(x_ByxNH, ((0, 0), (0, missing), (0, missing), (0, 0), (0, 0)))
        if missing and beyond_NH is not None:
            inside_y = jnp.arange(side + missing) < side
            x_ByxNH = jnp.where((inside_y[:, None] & inside_y)[:, :, None, None], x_ByxNH, beyond_NH)
        return like(rearrange(x_ByxNH, "B (h y) (w x) N H -> (B h w) (y x) N H", y=size, x=size), spec)

    segments_BT = None
    if shift:
        segments_BT = jnp.broadcast_to(regions(side, size, shift), (B, across**2, size**2))
        segments_BT = like(segments_BT.reshape(-1, size**2), SEGMENTS)
    tokens = Tokens(jnp.arange(size**2)[None], segments_BT, None)
    specs = Q, *(spec.replace("kv_heads", keys_axis()) for spec in (K, V))
    q, k, v = map(in_windows, (q_BTNH, k_BTNH, v_BTNH), specs, (None, *beyond_NH))
    shards = split("q", "batch").num_shards
    if vectors_RH:
        scale = scores_scale(cfg)
        places_rS = jnp.broadcast_to(jnp.arange(size), (shards, size))
        places_rS = like(places_rS, SEGMENTS) if shards > 1 else places_rS
        q, k = with_places(q, k, vectors_RH, places_rS, scale)
        cfg = dataclasses.replace(cfg, query_scale=scale)  # that of a head without its places
    if size == side:
        out = kernels.attend(q, k, v, None, cfg, own_RN=own_RN)
    else:
        out = masked(q, k, v, tokens, tokens, of_heads(cfg, own_RN), cfg, shards)
    out_ByxNH = rearrange(like(out, OUT), "(B h w) (y x) N H -> B (h y) (w x) N H", h=across, w=across, y=size)
    out_ByxNH = jnp.roll(out_ByxNH, (shift, shift), (1, 2)) if shift else out_ByxNH
    out_BTNH = rearrange(out_ByxNH[:, :side, :side], "B y x N H -> B (y x) N H")
    return shard(jnp.pad(out_BTNH, ((0, 0), (0, T - side**2), (0, 0), (0, 0))), OUT)


def with_places(
    q_WTNH: jax.Array, k_WTNH: jax.Array, vectors_RH: Sequence[jax.Array], places_rS: jax.Array, scale: float
) -> tuple[jax.Array, jax.Array]:
    """Queries and keys of windows with more numbers, so that scale q k has a bias by distance that depends on queries.

    vectors_RH: those of all distances from a key to a query, in height and in width. The bias is the query times the
    vector of each of its two distances (arXiv 2112.01526). A query gets its products with the vectors of all rows and
    columns of keys, and a key a one in the place of its row and of its column. So fused kernels, too, compute the bias.
    places_rS: the places on a side of a window, once for each shard of the batch, each of which adds up its own
    gradients of vectors.
    """
    shards, side = places_rS.shape
    distance_rys = places_rS[:, :, None] - places_rS[:, None] + side - 1
    heights_rysH, widths_rxsH = (vectors[distance_rys] for vectors in vectors_RH)
    q_rWyxNH = rearrange(q_WTNH, "(r W) (y x) N H -> r W y x N H", r=shards, x=side)
    in_height = jnp.einsum("rWyxNH,rysH->rWyxNs", q_rWyxNH, heights_rysH)
    in_width = jnp.einsum("rWyxNH,rxsH->rWyxNs", q_rWyxNH, widths_rxsH)
    products = (rearrange(x / scale, "r W y x N s -> (r W) (y x) N s") for x in (in_height, in_width))
    q_WTNH = jnp.concatenate([q_WTNH, *(x.astype(q_WTNH.dtype) for x in products)], -1)
    ones = [jax.nn.one_hot(place, side, dtype=k_WTNH.dtype) for place in jnp.divmod(jnp.arange(side**2), side)]
    ones_WTNs = jnp.broadcast_to(jnp.concatenate(ones, -1)[:, None], (*k_WTNH.shape[:3], 2 * side))
    return q_WTNH, jnp.concatenate([k_WTNH, ones_WTNs], -1)


def regions(side: int, size: int, shift: int) -> jax.Array:
    """The region of each patch of an image that was moved, int32 [windows, patches of a window].

    Within a window, the patches of one region were neighbours before. Those of another one came from the other side.
    """
    from_other_side = jnp.arange(side) >= side - shift
    region_yx = 2 * from_other_side[:, None].astype(jnp.int32) + from_other_side
    return rearrange(region_yx, "(h y) (w x) -> (h w) (y x)", y=size, x=size)
