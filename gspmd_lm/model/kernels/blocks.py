"""Attention of some queries to some keys, with its softmax sums: what a ring merges, forward and backward."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange

from gspmd_lm import config
from gspmd_lm.config import with_values
from gspmd_lm.model.kernels.common import scores_scale
from gspmd_lm.model.kernels.documents import CallRanges, Documents, runs, shared_documents
from gspmd_lm.sharding.op_names import scope

KEYS = 512  # the keys of a chunk without a fused kernel: scores take [T, KEYS] at a time, so they grow with T alone
_MASKED = -1e30  # finite: a query that sees no key of a block then has a sum that vanishes beside any other
Segments = tuple[jax.Array, jax.Array] | None  # of queries [B, T] and of keys [B, S]


@dataclasses.dataclass(frozen=True)
class Blocks:
    """The kernel of a ring: splash, cuDNN's, or XLA's products in chunks of the keys.

    `causal`: query t sees the keys up to t. Otherwise each query sees all keys. Either stays within a segment.
    """

    kernel: str
    cfg: config.ModelConfig

    def forward(self, q_BTNH, k_BSKH, v_BSKH, segments: Segments, *, causal: bool) -> tuple[jax.Array, jax.Array]:
        """The result [B, T, N, H] and the logarithm of the softmax sums [B, T, N], both float32."""
        if self.kernel == "splash":
            from gspmd_lm.model.kernels import splash

            made = self._splash(q_BTNH, k_BSKH.shape[1], causal)
            with scope("sees", *([] if causal else ["all"])):
                out_BTNH, lse_BTN = splash.forward(q_BTNH, k_BSKH, v_BSKH, self.cfg, made, segments)
            return out_BTNH.astype(jnp.float32), lse_BTN
        if self.kernel == "cudnn":
            from gspmd_lm.model.kernels import cudnn

            packed = _pack_documents(segments, causal)
            out_BTNH, lse_BTN = cudnn.forward(q_BTNH, k_BSKH, v_BSKH, self.cfg, packed, causal=causal)
            return out_BTNH.astype(jnp.float32), lse_BTN
        q = self._group_heads(q_BTNH, k_BSKH)

        @scope("kind", "attention")
        def add(carried, chunk):
            out, most, total = carried
            s = self._scores(q, segments, causal, chunk)[0]
            now = jnp.maximum(most, s.max(-1))
            e, old = jnp.exp(s - now[..., None]), jnp.exp(most - now)
            out = out * old[..., None] + _einsum("BKGTS,BSKH->BKGTH", e.astype(v_BSKH.dtype), chunk[1])
            return (out, now, total * old + e.sum(-1)), None

        (B, T, K, G, _), H = q.shape, v_BSKH.shape[-1]
        most = jnp.full((B, K, G, T), _MASKED, jnp.float32)
        start = jnp.zeros((B, K, G, T, H), jnp.float32), most, jnp.zeros_like(most)
        (out, most, total), _ = jax.lax.scan(add, start, self._chunks(k_BSKH, v_BSKH, segments))
        lse = most + jnp.log(total)
        return rearrange(out / total[..., None], "B K G T H -> B T (K G) H"), rearrange(lse, "B K G T -> B T (K G)")

    def backward(self, q_BTNH, k_BSKH, v_BSKH, segments: Segments, out_BTNH, lse_BTN, dout_BTNH, *, causal: bool):
        """The gradients of queries, keys and values. Result and sums are those of all keys, not of these alone."""
        if self.kernel == "splash":
            from gspmd_lm.model.kernels import splash

            made = self._splash(q_BTNH, k_BSKH.shape[1], causal)
            with scope("sees", *([] if causal else ["all"])):
                return splash.backward(q_BTNH, k_BSKH, v_BSKH, self.cfg, out_BTNH, lse_BTN, dout_BTNH, made, segments)
        if self.kernel == "cudnn":
            from gspmd_lm.model.kernels import cudnn

            arguments = q_BTNH, k_BSKH, v_BSKH, self.cfg, out_BTNH, lse_BTN, dout_BTNH
            return cudnn.backward(*arguments, _pack_documents(segments, causal), causal=causal)
        q, dout = self._group_heads(q_BTNH, k_BSKH), self._group_heads(dout_BTNH, k_BSKH)
        # One number for each query: what the derivative of its softmax takes off.
        off = (dout_BTNH.astype(jnp.float32) * out_BTNH.astype(jnp.float32)).sum(-1)
        lse, off = (rearrange(x, "B T (K G) -> B K G T", K=k_BSKH.shape[2]) for x in (lse_BTN, off))

        @scope("kind", "attention")
        def add(dq, chunk):
            k, v, *_ = chunk
            s, slope = self._scores(q, segments, causal, chunk)
            p = jnp.exp(s - lse[..., None])
            dv = _einsum("BKGTS,BTKGH->BSKH", p.astype(v.dtype), dout)
            ds = p * (_einsum("BTKGH,BSKH->BKGTS", dout, v) - off[..., None]) * slope
            ds = ds.astype(q.dtype)
            return dq + _einsum("BKGTS,BSKH->BTKGH", ds, k), (_einsum("BKGTS,BTKGH->BSKH", ds, q), dv)

        dq, dkv = jax.lax.scan(add, jnp.zeros(q.shape, jnp.float32), self._chunks(k_BSKH, v_BSKH, segments))
        return dq.reshape(q_BTNH.shape), *(rearrange(x, "C B S K H -> B (C S) K H") for x in dkv)

    def _scores(self, q_BTKGH, segments: Segments, causal: bool, chunk) -> tuple[jax.Array, Any]:
        """[B, K, G, T, S]: the masked scores of a chunk of keys, and their derivative by q k."""
        k_BSKH, _, *known = chunk
        scale, cap, T = scores_scale(self.cfg), self.cfg.attention.softcap, q_BTKGH.shape[1]
        s, slope = _einsum("BTKGH,BSKH->BKGTS", q_BTKGH, k_BSKH) * scale, scale
        # Otherwise the masks, which all layers share, are made for all chunks at once: [T, S].
        s, at_S, *ids_BS = jax.lax.optimization_barrier((s, *known))
        if cap:
            bent = jnp.tanh(s / cap)
            s, slope = cap * bent, scale * (1 - bent**2)
        if causal:
            s = jnp.where(jnp.arange(T)[:, None] >= at_S, s, _MASKED)
        if segments:
            alike_BTS = segments[0][:, :, None] == ids_BS[0][:, None, :]
            s = jnp.where(alike_BTS[:, None, None], s, _MASKED)
        return s, slope

    def _chunks(self, k_BSKH, v_BSKH, segments: Segments) -> tuple[jax.Array, ...]:
        """Keys, values, their positions and their segments, cut into chunks along a new first dimension."""
        S = k_BSKH.shape[1]
        size = next(n for n in range(min(KEYS, S), 0, -1) if S % n == 0)
        arrays = [k_BSKH, v_BSKH, *([segments[1]] if segments else [])]
        k, v, *ids = (rearrange(x, "B (C S) ... -> C B S ...", S=size) for x in arrays)
        return k, v, jnp.arange(S).reshape(-1, size), *ids

    def _group_heads(self, x_BTNH: jax.Array, k_BSKH: jax.Array) -> jax.Array:
        return rearrange(x_BTNH, "B T (K G) H -> B T K G H", K=k_BSKH.shape[2])

    def _splash(self, q_BTNH: jax.Array, keys: int, causal: bool) -> Any:
        from gspmd_lm.model.kernels import splash

        cfg = with_values(self.cfg, {"attention.window": 0})
        return splash.kernel(q_BTNH, keys, cfg, everything=not causal)


def _pack_documents(segments: Segments, causal: bool) -> Documents | CallRanges | None:
    """The documents of a block for cuDNN. Where it is not causal, its keys are before its queries."""
    if segments is None:
        return None
    return runs(segments[0]) if causal else shared_documents(*segments)


def _einsum(equation: str, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.einsum(equation, x, y, preferred_element_type=jnp.float32)
