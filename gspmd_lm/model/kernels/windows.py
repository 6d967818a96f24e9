"""Attention within the windows of an image (arXiv 2103.14030): a window is to it what a row is elsewhere.

All windows of an image are in the same rows of the batch as the image. So an image must not be split: no device that
has a part of its patches has all of a window.
"""

import jax
import jax.numpy as jnp
from einops import rearrange

from gspmd_lm import config
from gspmd_lm.model.kernels.attention import OUT, SEGMENTS, K, Q, Tokens, V, keys_axis, masked, of_heads
from gspmd_lm.sharding.annotate import like, shard, split


def attend_in_windows(
    q_BTNH: jax.Array, k_BTNH: jax.Array, v_BTNH: jax.Array, cfg: config.ModelConfig, own_RN: jax.Array | None
) -> jax.Array:
    """softmax(scale q k) v over the patches of a window, as XLA compiles it, [B, T, N, H].

    The first rows are the patches of an image, row by row from the top left one. The others are padding, which gets 0.
    own_RN: the numbers of each head of ranges of distances, if the config has any.
    """
    assert cfg.windows and cfg.patches
    size, shift, side, T = cfg.windows.size, cfg.windows.shift, cfg.patches.side, q_BTNH.shape[1]
    B, across = len(q_BTNH), side // size

    def in_windows(x_BTNH: jax.Array, spec: str) -> jax.Array:
        x_ByxNH = rearrange(x_BTNH[:, : side**2], "B (y x) N H -> B y x N H", x=side)
        x_ByxNH = jnp.roll(x_ByxNH, (-shift, -shift), (1, 2)) if shift else x_ByxNH
        return like(rearrange(x_ByxNH, "B (h y) (w x) N H -> (B h w) (y x) N H", y=size, x=size), spec)

    segments_BT = None
    if shift:
        segments_BT = jnp.broadcast_to(regions(side, size, shift), (B, across**2, size**2))
        segments_BT = like(segments_BT.reshape(-1, size**2), SEGMENTS)
    tokens = Tokens(jnp.arange(size**2)[None], segments_BT, None)
    specs = Q, *(spec.replace("kv_heads", keys_axis()) for spec in (K, V))
    q, k, v = map(in_windows, (q_BTNH, k_BTNH, v_BTNH), specs)
    out = masked(q, k, v, tokens, tokens, of_heads(cfg, own_RN), cfg, split("q", "batch").num_shards)
    out_ByxNH = rearrange(like(out, OUT), "(B h w) (y x) N H -> B (h y) (w x) N H", h=across, w=across, y=size)
    out_ByxNH = jnp.roll(out_ByxNH, (shift, shift), (1, 2)) if shift else out_ByxNH
    out_BTNH = rearrange(out_ByxNH, "B y x N H -> B (y x) N H")
    return shard(jnp.pad(out_BTNH, ((0, 0), (0, T - side**2), (0, 0), (0, 0))), OUT)


def regions(side: int, size: int, shift: int) -> jax.Array:
    """The region of each patch of an image that was moved, int32 [windows, patches of a window].

    Within a window, the patches of one region were neighbours before. Those of another one came from the other side.
    """
    from_other_side = jnp.arange(side) >= side - shift
    region_yx = 2 * from_other_side[:, None].astype(jnp.int32) + from_other_side
    return rearrange(region_yx, "(h y) (w x) -> (h w) (y x)", y=size, x=size)
