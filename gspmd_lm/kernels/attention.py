"""Causal attention by the kernel that the rules choose: XLA's own, cuDNN's fused one, or splash on TPU.

The fused kernels never hold a T x T array. None of them changes what is computed.
"""

from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange

from gspmd_lm.axes import attention_kernel, per_device

Q = "q: batch seq heads head_dim"
K = "k: batch kv_seq kv_heads head_dim"
V = "v: batch kv_seq kv_heads head_dim"
OUT = "attention_out: batch seq heads head_dim"
SEGMENTS = "tokens: batch seq"
LANES = 128  # the width of a TPU register: splash works on blocks of it


def attend(q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, segments_BT: jax.Array | None, softcap: float):
    """softmax(q k / sqrt(H)) v over earlier positions of the same segment, [B, T, N, H], softmax in float32.

    Key heads are shared by N / K query heads each. segments_BT: int32, equal within a document; None where a row is
    one text. softcap: scores become softcap * tanh(scores / softcap); 0 for none.
    """
    kernel = attention_kernel()
    if kernel == "splash":
        return _splash(q_BTNH, k_BSKH, v_BSKH, segments_BT, softcap)
    mask_B1TS = None if segments_BT is None else segments_BT[:, None, :, None] == segments_BT[:, None, None, :]
    if softcap:
        return _softcapped(q_BTNH, k_BSKH, v_BSKH, mask_B1TS, softcap)
    return jax.nn.dot_product_attention(
        q_BTNH,
        k_BSKH,
        v_BSKH,
        mask=mask_B1TS,
        is_causal=True,
        implementation=kernel,  # type: ignore[arg-type]
    )


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


def _splash(q_BTNH, k_BSKH, v_BSKH, segments_BT, softcap, interpret=False):
    """Splash attention, which reads only the blocks that the causal mask leaves.

    A Pallas call is not partitioned by XLA, so each device runs it on its own heads and rows. Sources: the kernel that
    jax ships, jax.experimental.pallas.ops.tpu.splash_attention.
    """
    H = q_BTNH.shape[-1]
    segments_BT = jnp.ones(q_BTNH.shape[:2], jnp.int32) if segments_BT is None else segments_BT

    def local(q_BTNH, k_BSKH, v_BSKH, segments_BT):
        from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash

        kernel: Any = _splash_kernel(q_BTNH.shape[1], q_BTNH.shape[2], softcap or None, interpret)
        q_BNTH, k_BKSH, v_BKSH = (jnp.swapaxes(x, 1, 2) for x in (q_BTNH * H**-0.5, k_BSKH, v_BSKH))
        segments = splash.SegmentIds(segments_BT, segments_BT)
        out_BNTH = jax.vmap(kernel)(q_BNTH, k_BKSH, v_BKSH, segments)
        return jnp.swapaxes(out_BNTH, 1, 2).astype(q_BTNH.dtype)

    return per_device(local, (Q, K, V, SEGMENTS), OUT)(q_BTNH, k_BSKH, v_BSKH, segments_BT)


def _splash_kernel(seq: int, heads: int, softcap: float | None, interpret: bool):
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    block = next(size for size in (512, 384, 256, 128) if seq % size == 0)
    sizes = splash.BlockSizes(
        block_q=block, block_kv=block, block_kv_compute=block,
        block_q_dkv=block, block_kv_dkv=block, block_kv_dkv_compute=block, use_fused_bwd_kernel=True,
    )  # fmt: skip
    mask = masks.MultiHeadMask([masks.CausalMask((seq, seq))] * heads)
    return splash.make_splash_mha(
        mask, block_sizes=sizes, head_shards=1, q_seq_shards=1, attn_logits_soft_cap=softcap, interpret=interpret
    )
