"""Splash attention: jax's Pallas kernel for TPU, which reads only the blocks of keys that its mask leaves.

It is imported where it is used, because Pallas takes long to import. Source: the kernel that jax ships,
jax.experimental.pallas.ops.tpu.splash_attention.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

from gspmd_lm import config
from gspmd_lm.model.kernels.common import MOST_BLOCKS, scores_scale, sees, splash_block, with_sums


@dataclasses.dataclass(frozen=True)
class _Before:
    """Whether a query may attend to a key, from the positions of both. The kernel computes it a block at a time."""

    window: int

    def __call__(self, queries: Any, keys: Any) -> Any:
        seen = queries >= keys
        return seen & (queries - keys < self.window) if self.window else seen


class _Mask(masks.Mask):
    """The causal mask of queries at `places_T` and keys in their order.

    Splash asks of each block only whether any and whether all of it is seen. Neighbours in a block of queries are
    neighbours in the text, so the corners of the block are enough. At 128k tokens, a full mask would take minutes.
    """

    def __init__(self, places_T: np.ndarray, keys: int, window: int):
        self.q_sequence, self.keys, self.mask_function = places_T.astype(np.int32), keys, _Before(window)

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self.q_sequence), self.keys

    def __getitem__(self, idx: tuple[slice, slice]) -> np.ndarray:
        rows, columns = idx
        first, last = self.q_sequence[rows][[0, -1]]
        start, stop = columns.start, columns.stop - 1
        window = self.mask_function.window
        some = last >= start and (not window or first - stop < window)
        every = first >= stop and (not window or last - start < window)
        return np.array([every, some])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Mask) and self._facts == other._facts

    def __hash__(self) -> int:
        return hash(self._facts)

    @property
    def _facts(self) -> tuple[Any, ...]:
        return self.keys, self.mask_function, self.q_sequence.tobytes()


def kernel(
    q_BTNH: jax.Array,
    keys: int,
    cfg: config.ModelConfig,
    *,
    places_T: np.ndarray | None = None,
    piece: int = 0,
    devices: int = 1,
    everything: bool = False,
    residual_checkpoint_name: str | None = None,
) -> Any:
    """The kernel for the heads of `q_BTNH` and queries of all `devices`, which are at `places_T` in the text.

    Without positions, queries are in the order of the text. Neighbours within a `piece` of the positions are neighbours
    in the text. With `everything` nothing is masked.
    """
    _, T, N, H = q_BTNH.shape
    places_T = np.arange(T) if places_T is None else places_T
    itemsize = q_BTNH.dtype.itemsize
    rows, columns = splash_block(piece or len(places_T), H, itemsize), splash_block(keys, H, itemsize)
    sizes = splash.BlockSizes(
        block_q=rows,
        block_kv=columns,
        block_kv_compute=columns,
        block_q_dkv=rows,
        block_kv_dkv=columns,
        block_kv_dkv_compute=columns,
        use_fused_bwd_kernel=True,
    )
    everything = everything or cfg.attention.mask == "full"
    one: Any = masks.FullMask((len(places_T), keys)) if everything else _Mask(places_T, keys, cfg.attention.window)
    return splash.make_splash_mha(
        masks.MultiHeadMask([one] * N),
        block_sizes=sizes,
        head_shards=1,
        q_seq_shards=devices,
        attn_logits_soft_cap=cfg.attention.softcap or None,
        residual_checkpoint_name=residual_checkpoint_name,
    )


def device_kernel(made: Any, devices: int, device: jax.Array) -> Any:
    """The kernel for the queries of one of the devices that `made` is for."""

    def local_part(x: jax.Array) -> jax.Array:
        axis = 0 if x.ndim == 1 else 1  # positions of queries, or a table of heads x blocks of queries x blocks of keys
        cut = x.reshape(*x.shape[:axis], devices, -1, *x.shape[axis + 1 :])
        return jax.lax.dynamic_index_in_dim(cut, device, axis, keepdims=False)

    return jax.tree.map(local_part, made)


def attend(
    made: Any,
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    heads_RN: jax.Array,
    cfg: config.ModelConfig,
    segments: tuple[jax.Array, jax.Array] | None,
) -> jax.Array:
    """Attention by a kernel, [B, T, N, H]. `segments` are those of queries and of keys; heads_RN: the sinks, if any."""
    if cfg.attention.sinks or k_BSKH.shape[1] // made.kwargs["block_sizes"].block_kv_dkv > MOST_BLOCKS:
        return with_sums((forward, backward), cfg, q_BTNH, k_BSKH, v_BSKH, heads_RN, (made, segments))
    out_BNTH = _call_kernel(made, q_BTNH, k_BSKH, v_BSKH, cfg, segments)
    return jnp.swapaxes(out_BNTH, 1, 2).astype(q_BTNH.dtype)


def _call_kernel(
    made: Any, q_BTNH, k_BSKH, v_BSKH, cfg: config.ModelConfig, segments: tuple[jax.Array, jax.Array] | None
) -> Any:
    """The result of a kernel, with heads before tokens."""
    q_BNTH, k_BKSH, v_BKSH = (jnp.swapaxes(x, 1, 2) for x in (q_BTNH * scores_scale(cfg), k_BSKH, v_BSKH))
    ids = [splash.SegmentIds(*segments)] if segments else []
    with sees(cfg):
        return jax.vmap(made)(q_BNTH, k_BKSH, v_BKSH, *ids)


def forward(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    cfg: config.ModelConfig,
    made: Any,
    segments: tuple[jax.Array, jax.Array] | None,
) -> tuple[jax.Array, jax.Array]:
    """The result of a kernel, [B, T, N, H], and the logarithm of its softmax sums, [B, T, N]."""
    masks_of = made.fwd_mask_info, made.dq_mask_info, made.dkv_mask_info
    whole = splash.SplashAttentionKernel(*masks_of, **made.kwargs | {"save_residuals": True})
    out_BNTH, (lse_BNT,) = _call_kernel(whole, q_BTNH, k_BSKH, v_BSKH, cfg, segments)
    return jnp.swapaxes(out_BNTH, 1, 2), jnp.swapaxes(lse_BNT, 1, 2)


def backward(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    cfg: config.ModelConfig,
    out_BTNH: jax.Array,
    lse_BTN: jax.Array,
    dout_BTNH: jax.Array,
    made: Any,
    segments: tuple[jax.Array, jax.Array] | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients of queries, keys and values, given the result and the softmax sums over all keys.

    Splash's own derivative is over the keys of the kernel alone, and it holds the gradients of queries once for each
    block of keys. Here its backward kernel is called as it calls it, on a few blocks of keys at a time.
    """
    scale, block = scores_scale(cfg), made.kwargs["block_sizes"].block_kv_dkv
    blocks = k_BSKH.shape[1] // block
    at_once = next(n for n in range(min(MOST_BLOCKS, blocks), 0, -1) if blocks % n == 0)
    heads_first = (jnp.swapaxes(x, 1, 2) for x in (q_BTNH * scale, out_BTNH, dout_BTNH, lse_BTN))
    q_BNTH, out_BNTH, dout_BNTH, lse_BNT = heads_first
    names = (
        "mask_value",
        "is_mqa",
        "block_sizes",
        "residual_checkpoint_name",
        "mask_function",
        "attn_logits_soft_cap",
        "interpret",
    )
    options, table = [made.kwargs[name] for name in names], made.dkv_mask_info

    def chunk(dq_BNTH: jax.Array, inputs: tuple[jax.Array, ...]) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        number, k_BKSH, v_BKSH, *ids_BS = inputs

        def take_chunk(x: jax.Array) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(x, number * at_once, at_once, axis=2)

        # Keys are counted from the first one of the chunk.
        places = None if table.q_sequence is None else table.q_sequence - number * at_once * block
        part = table._replace(
            data_next=take_chunk(table.data_next), block_mask=take_chunk(table.block_mask), q_sequence=places
        )

        def one(q, k, v, out, lse, dout, *ids):
            saved = q, k, v, splash.SegmentIds(*ids) if ids else None, None, out, lse, None, part
            kernel: Any = splash._splash_attention_bwd
            return kernel(False, *options, saved, dout)[3:6]

        ids = [segments[0], *ids_BS] if segments else []
        with sees(cfg):
            dq, dk, dv = jax.vmap(one)(q_BNTH, k_BKSH, v_BKSH, out_BNTH, lse_BNT, dout_BNTH, *ids)
        return dq_BNTH + dq.astype(jnp.float32), (dk, dv)

    def cut(x_BS: jax.Array) -> jax.Array:
        return jnp.moveaxis(x_BS.reshape(x_BS.shape[0], blocks // at_once, -1, *x_BS.shape[2:]), 1, 0)

    keys = [jnp.swapaxes(cut(x), 2, 3) for x in (k_BSKH, v_BSKH)]
    inputs = jnp.arange(blocks // at_once), *keys, *([cut(segments[1])] if segments else [])
    dq_BNTH, dkv = jax.lax.scan(chunk, jnp.zeros(q_BNTH.shape, jnp.float32), inputs)
    from_chunks = (jnp.moveaxis(x, (1, 3), (0, 2)) for x in dkv)  # from [chunks, B, K, S, H]
    dk, dv = (x.reshape(like.shape) for x, like in zip(from_chunks, (k_BSKH, v_BSKH), strict=True))
    return jnp.swapaxes(dq_BNTH, 1, 2) * scale, dk, dv
