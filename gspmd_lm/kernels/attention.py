"""Causal attention by the kernel that the rules choose: XLA's own, cuDNN's fused one, or splash on TPU.

The fused kernels never hold a T x T array. None of them changes what is computed.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange
from jax.ad_checkpoint import checkpoint_name

from gspmd_lm.axes import attention_kernel, per_device, shard, split

Q = "q: batch seq heads head_dim"
K = "k: batch kv_seq kv_heads head_dim"
V = "v: batch kv_seq kv_heads head_dim"
OUT = "attention_out: batch seq heads head_dim"
SEGMENTS = "tokens: batch seq"
LANES = 128  # the width of a TPU register: splash works on blocks of it
SPLASH_BLOCK_BYTES = 1024 * LANES * 2


def keys_axis() -> str:
    """The axis of the heads of keys and values as a kernel reads them.

    It is `heads` where query heads are split finer than their keys: each device needs the keys of its own heads.
    """
    return "kv_heads" if split("q", "heads") == split("k", "kv_heads") else "heads"


def attend(q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, segments_BT: jax.Array | None, softcap: float):
    """softmax(q k / sqrt(H)) v over earlier positions of the same segment, [B, T, N, H], softmax in float32.

    Key heads, the axis `keys_axis`, are shared by N / K query heads each. segments_BT: int32, equal within a document;
    None where a row is one text. softcap: scores become softcap * tanh(scores / softcap); 0 for none. A remat policy
    that keeps `attention_out` keeps all that a fused kernel's backward pass needs of its forward pass.
    """
    kernel = attention_kernel()
    if kernel == "splash":
        return _splash(q_BTNH, k_BSKH, v_BSKH, segments_BT, softcap)
    if kernel == "cudnn":
        return _cudnn(q_BTNH, k_BSKH, v_BSKH)
    mask_B1TS = None if segments_BT is None else segments_BT[:, None, :, None] == segments_BT[:, None, None, :]
    if softcap:
        out_BTNH = _softcapped(q_BTNH, k_BSKH, v_BSKH, mask_B1TS, softcap)
    else:
        out_BTNH = jax.nn.dot_product_attention(q_BTNH, k_BSKH, v_BSKH, mask=mask_B1TS, is_causal=True)
    return shard(out_BTNH, OUT)


def unsupported(kernel: str, *, head_dim: int, seq: int, segments: bool, softcap: float, dtype: str) -> str | None:
    """What a config asks for that `kernel` cannot do, or None."""
    if kernel == "cudnn":
        if segments:
            return "data.packing: documents (it has no segments, only whole rows)"
        if softcap:
            return f"model.attention_softcap: {softcap}"
        if dtype == "float32":
            return "model.compute_dtype: float32 (only bfloat16)"
        if head_dim % 8 or head_dim > 128:
            return f"model.head_dim: {head_dim} (only multiples of 8 up to 128)"
    if kernel == "splash" and seq % LANES:
        return f"data.seq: {seq} (only multiples of {LANES})"
    return None


def _softcapped(q_BTNH, k_BSKH, v_BSKH, mask_B1TS, softcap):
    """Attention with capped scores, which jax.nn.dot_product_attention does not offer."""
    T, H = q_BTNH.shape[1], q_BTNH.shape[3]
    q_BTKGH = rearrange(q_BTNH, "B T (K G) H -> B T K G H", K=k_BSKH.shape[2])
    scores_BKGTS = jnp.einsum("BTKGH,BSKH->BKGTS", q_BTKGH, k_BSKH, preferred_element_type=jnp.float32) * H**-0.5
    scores_BKGTS = softcap * jnp.tanh(scores_BKGTS / softcap)
    seen_TS = jnp.tril(jnp.ones((T, T), bool))
    seen = seen_TS if mask_B1TS is None else seen_TS & mask_B1TS[:, :, None]
    weights_BKGTS = jax.nn.softmax(jnp.where(seen, scores_BKGTS, -jnp.inf), axis=-1).astype(q_BTNH.dtype)
    return rearrange(jnp.einsum("BKGTS,BSKH->BTKGH", weights_BKGTS, v_BSKH), "B T K G H -> B T (K G) H")


def _cudnn(q_BTNH, k_BSKH, v_BSKH):
    """cuDNN's fused attention, which each device runs on its own heads and rows."""

    def local(q_BTNH, k_BSKH, v_BSKH):
        attention = _keeping(lambda *qkv: jax.nn.dot_product_attention(*qkv, is_causal=True, implementation="cudnn"))
        return attention(q_BTNH, k_BSKH, v_BSKH)

    return per_device(local, _inputs(), OUT)(q_BTNH, k_BSKH, v_BSKH)


def _inputs() -> tuple[str, ...]:
    return Q, K.replace("kv_heads", keys_axis()), V.replace("kv_heads", keys_axis())


def _keeping(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """`function`, with its result and what its derivative needs besides its arguments named `attention_out`."""

    @jax.custom_vjp
    def call(*args):
        return function(*args)

    def forward(*args):
        out, back = jax.vjp(function, *args)
        leaves, tree = jax.tree.flatten(back)
        named: dict[int, jax.Array] = {id(arg): arg for arg in args}
        for x in (out, *leaves):
            if id(x) not in named:
                named[id(x)] = checkpoint_name(x, "attention_out")
        return named[id(out)], jax.tree.unflatten(tree, [named[id(leaf)] for leaf in leaves])

    call.defvjp(forward, lambda back, dout: back(dout))
    return call


def _splash(q_BTNH, k_BSKH, v_BSKH, segments_BT, softcap, interpret=False):
    """Splash attention, which reads only the blocks that the causal mask leaves.

    A Pallas call is not partitioned by XLA, so each device runs it on its own heads and rows. Sources: the kernel that
    jax ships, jax.experimental.pallas.ops.tpu.splash_attention.
    """
    H = q_BTNH.shape[-1]

    def local(q_BTNH, k_BSKH, v_BSKH, *segments_BT):
        from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash

        kernel: Any = _splash_kernel(q_BTNH, softcap or None, interpret)
        q_BNTH, k_BKSH, v_BKSH = (jnp.swapaxes(x, 1, 2) for x in (q_BTNH * H**-0.5, k_BSKH, v_BSKH))
        segments = [splash.SegmentIds(ids_BT, ids_BT) for ids_BT in segments_BT]
        out_BNTH = jax.vmap(kernel)(q_BNTH, k_BKSH, v_BKSH, *segments)
        return jnp.swapaxes(out_BNTH, 1, 2).astype(q_BTNH.dtype)

    if segments_BT is None:
        return per_device(local, _inputs(), OUT)(q_BTNH, k_BSKH, v_BSKH)
    return per_device(local, (*_inputs(), SEGMENTS), OUT)(q_BTNH, k_BSKH, v_BSKH, segments_BT)


def _splash_kernel(q_BTNH: jax.Array, softcap: float | None, interpret: bool):
    """The kernel for the heads and rows of `q_BTNH`, its own result and statistics named `attention_out`."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    _, T, N, H = q_BTNH.shape
    block = splash_block(T, H, q_BTNH.dtype.itemsize)
    sizes = splash.BlockSizes(
        block_q=block, block_kv=block, block_kv_compute=block,
        block_q_dkv=block, block_kv_dkv=block, block_kv_dkv_compute=block, use_fused_bwd_kernel=True,
    )  # fmt: skip
    mask = masks.MultiHeadMask([masks.CausalMask((T, T))] * N)
    return splash.make_splash_mha(
        mask, block_sizes=sizes, head_shards=1, q_seq_shards=1, attn_logits_soft_cap=softcap,
        residual_checkpoint_name="attention_out", interpret=interpret,
    )  # fmt: skip


def splash_block(seq: int, head_dim: int, itemsize: int) -> int:
    """The rows of a block of queries or keys: the most that divide `seq` and leave room in the on-chip memory.

    1024 rows of a bfloat16 head of 128 compile within the 16 MB that one kernel gets by default on v4, v5e and v5p.
    Blocks of 2048, which AI-Hypercomputer/tpu-recipes uses on v6e, need xla_tpu_scoped_vmem_limit_kib: 98304 and
    have the same static schedule per visited score: 21% and 35% of peak forward and backward (causal half, T 8192,
    H 128, libtpu 0.0.42), as blocks of 1024 have; blocks of 512 have 15% and 30%.
    """
    row_bytes = -(-head_dim // LANES) * LANES * itemsize
    most = max(SPLASH_BLOCK_BYTES // row_bytes, LANES)
    return next(block for block in range(min(most, seq), 0, -LANES) if seq % block == 0)
