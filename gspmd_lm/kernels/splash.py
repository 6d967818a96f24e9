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
from gspmd_lm.kernels.attention import scores_scale, splash_block
from gspmd_lm.placing import scope


@dataclasses.dataclass(frozen=True)
class _Before:
    """Whether a query's token sees a key's, given the places of both. The kernel computes it for a block at a time."""

    window: int

    def __call__(self, queries: Any, keys: Any) -> Any:
        seen = queries >= keys
        return seen & (queries - keys < self.window) if self.window else seen


class _Mask(masks.Mask):
    """The causal mask of queries whose places are given and keys in their order.

    Splash asks of each block only whether any and whether all of it is seen. Neighbours in a block of queries are
    neighbours in the text, so the corners of the block tell. At 128k tokens, a mask in full would take minutes.
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
    q_BTNH: jax.Array, places_T: np.ndarray, keys: int, cfg: config.Model, *, piece: int = 0, devices: int = 1,
    everything: bool = False, **options: Any,
) -> Any:  # fmt: skip
    """The kernel for the heads of `q_BTNH` and queries of all `devices`, whose places in the text are given.

    Neighbours within a `piece` of the places are neighbours in the text. With `everything` nothing is masked.
    """
    _, _, N, H = q_BTNH.shape
    itemsize = q_BTNH.dtype.itemsize
    rows, columns = splash_block(piece or len(places_T), H, itemsize), splash_block(keys, H, itemsize)
    sizes = splash.BlockSizes(
        block_q=rows, block_kv=columns, block_kv_compute=columns,
        block_q_dkv=rows, block_kv_dkv=columns, block_kv_dkv_compute=columns, use_fused_bwd_kernel=True,
    )  # fmt: skip
    one: Any = masks.FullMask((len(places_T), keys)) if everything else _Mask(places_T, keys, cfg.sliding_window)
    return splash.make_splash_mha(
        masks.MultiHeadMask([one] * N), block_sizes=sizes, head_shards=1, q_seq_shards=devices,
        attn_logits_soft_cap=cfg.attention_softcap or None, **options,
    )  # fmt: skip


def of_device(made: Any, devices: int, device: jax.Array) -> Any:
    """The kernel for the queries of one of the devices that `made` is for."""

    def own(x: jax.Array) -> jax.Array:
        axis = 0 if x.ndim == 1 else 1  # places of queries, or a table of heads x blocks of queries x blocks of keys
        cut = x.reshape(*x.shape[:axis], devices, -1, *x.shape[axis + 1 :])
        return jax.lax.dynamic_index_in_dim(cut, device, axis, keepdims=False)

    return jax.tree.map(own, made)


def attend(
    made: Any, q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, cfg: config.Model,
    segments: tuple[jax.Array, jax.Array] | None,
) -> jax.Array:  # fmt: skip
    """Attention by a kernel, [B, T, N, H]. `segments` are those of queries and of keys."""
    q_BNTH, k_BKSH, v_BKSH = (jnp.swapaxes(x, 1, 2) for x in (q_BTNH * scores_scale(cfg), k_BSKH, v_BSKH))
    ids = [splash.SegmentIds(*segments)] if segments else []
    with scope("sees", *([str(cfg.sliding_window)] if cfg.sliding_window else [])):
        out_BNTH = jax.vmap(made)(q_BNTH, k_BKSH, v_BKSH, *ids)
    return jnp.swapaxes(out_BNTH, 1, 2).astype(q_BTNH.dtype)


def forward(
    made: Any, q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, cfg: config.Model,
    segments: tuple[jax.Array, jax.Array] | None,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """The result of a kernel with save_residuals, [B, T, N, H], and the logarithm of its softmax sums, [B, T, N]."""
    q_BNTH, k_BKSH, v_BKSH = (jnp.swapaxes(x, 1, 2) for x in (q_BTNH * scores_scale(cfg), k_BSKH, v_BSKH))
    ids = [splash.SegmentIds(*segments)] if segments else []
    out_BNTH, (lse_BNT,) = jax.vmap(made)(q_BNTH, k_BKSH, v_BKSH, *ids)
    return jnp.swapaxes(out_BNTH, 1, 2), jnp.swapaxes(lse_BNT, 1, 2)


def backward(
    made: Any, q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, cfg: config.Model,
    segments: tuple[jax.Array, jax.Array] | None, out_BTNH: jax.Array, lse_BTN: jax.Array, dout_BTNH: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """The gradients of queries, keys and values, given the result and the softmax sums over all keys.

    Those of jax's own derivative are over the keys of the kernel alone. So its backward kernel is called as it calls it.
    """
    scale = scores_scale(cfg)
    arrays = q_BTNH * scale, k_BSKH, v_BSKH, out_BTNH, dout_BTNH
    q, k, v, out, dout = (jnp.swapaxes(x, 1, 2) for x in arrays)
    options = {name: value for name, value in made.kwargs.items() if name not in ("save_residuals", "interpret")}
    names = ("mask_value", "is_mqa", "block_sizes", "residual_checkpoint_name", "mask_function", "attn_logits_soft_cap")
    fixed = [options[name] for name in names]

    def one(q, k, v, out, lse, dout, *ids):
        saved = q, k, v, splash.SegmentIds(*ids) if ids else None, None, out, lse, None, made.dkv_mask_info
        return splash._splash_attention_bwd(False, *fixed, made.kwargs["interpret"], saved, dout)[3:6]

    dq, dk, dv = jax.vmap(one)(q, k, v, out, jnp.swapaxes(lse_BTN, 1, 2), dout, *(segments or ()))
    return tuple(jnp.swapaxes(x, 1, 2) for x in (dq * scale, dk, dv))
