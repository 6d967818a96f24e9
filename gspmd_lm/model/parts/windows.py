"""Attention within windows of an image (Swin, arXiv 2103.14030; SAM, arXiv 2304.02643)."""

from collections.abc import Callable, Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
from einops import rearrange

from gspmd_lm import config
from gspmd_lm.config import with_values
from gspmd_lm.model.attention import Attention
from gspmd_lm.model.kernels import attention as kernels
from gspmd_lm.model.kernels.attention import OUT, SEGMENTS, K, Q, TokenPlaces, V, attend_masked, head_numbers, keys_axis
from gspmd_lm.model.kernels.common import scores_scale
from gspmd_lm.model.weights import matrix
from gspmd_lm.sharding.annotate import like, shard, split, use


def window_attention(cfg: config.ModelConfig, module: nn.Module) -> Callable[..., jax.Array]:
    """Attention of a layer within windows. The module holds its learned relative position vectors, if it has any."""
    assert cfg.windows and isinstance(module, Attention)
    vectors_RH: list[jax.Array] = []
    if cfg.windows.vectors:
        prefix, shape = "whole_" * config.is_whole(cfg), (2 * cfg.windows.size - 1, cfg.head_dim)
        vectors_RH = [
            use(matrix(module, f"{prefix}{name}_vectors", "ranges head_dim", shape, cfg))
            for name in ("height", "width")
        ]
    beyond_NH = [module.biases.get(name) for name in "kv"]

    def attend(q_BTNH, k_BTNH, v_BTNH, tokens, cfg, own_RN):
        return attend_in_windows(q_BTNH, k_BTNH, v_BTNH, cfg, own_RN, beyond_NH, vectors_RH)

    return attend


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
    own_RN: the relative position bias of each head, if the config has one. beyond_NH: the key and the value of the
    positions of a window beyond the image; None: zeros. vectors_RH: see `with_places`.

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
    tokens = TokenPlaces(jnp.arange(size**2)[None], segments_BT, None)
    specs = Q, *(spec.replace("kv_heads", keys_axis()) for spec in (K, V))
    q, k, v = map(in_windows, (q_BTNH, k_BTNH, v_BTNH), specs, (None, *beyond_NH))
    shards = split("q", "batch").num_shards
    if vectors_RH:
        scale = scores_scale(cfg)
        places_rS = jnp.broadcast_to(jnp.arange(size), (shards, size))
        places_rS = like(places_rS, SEGMENTS) if shards > 1 else places_rS
        q, k = with_places(q, k, vectors_RH, places_rS, scale)
        cfg = with_values(cfg, {"attention.scale": scale})  # that of a head without the appended dimensions
    if size == side:
        out = kernels.attend(q, k, v, None, cfg, own_RN=own_RN)
    else:
        out = attend_masked(q, k, v, tokens, tokens, head_numbers(cfg, own_RN), cfg, shards)
    out_ByxNH = rearrange(like(out, OUT), "(B h w) (y x) N H -> B (h y) (w x) N H", h=across, w=across, y=size)
    out_ByxNH = jnp.roll(out_ByxNH, (shift, shift), (1, 2)) if shift else out_ByxNH
    out_BTNH = rearrange(out_ByxNH[:, :side, :side], "B y x N H -> B (y x) N H")
    return shard(jnp.pad(out_BTNH, ((0, 0), (0, T - side**2), (0, 0), (0, 0))), OUT)


def with_places(
    q_WTNH: jax.Array, k_WTNH: jax.Array, vectors_RH: Sequence[jax.Array], places_rS: jax.Array, scale: float
) -> tuple[jax.Array, jax.Array]:
    """Appends dimensions to queries and keys so that scale q k includes SAM's decomposed relative position bias.

    The bias is the query times the vector of its relative position to the key in height, plus the same in width (arXiv
    2112.01526). A query gets its products with the vectors of all rows and columns of keys, and a key gets the one-hot
    vectors of its row and column. So fused kernels compute the bias too. vectors_RH: the vectors of all relative
    positions, in height and in width. places_rS: the coordinates along a side of a window, once for each shard of the
    batch, so that each shard sums its own gradients of the vectors.
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
