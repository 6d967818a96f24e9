"""Latent attention: keys and values of all heads are made from one short vector of a token (arXiv 2405.04434, 2.1)."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp

from gspmd_lm import config
from gspmd_lm.model.attention import in_chunks, temperature, to_residual
from gspmd_lm.model.cache import Cache, Kept
from gspmd_lm.model.kernels.attention import Q, attend_to_cache
from gspmd_lm.model.kernels.context import attend, gathered_early, keys_spec
from gspmd_lm.model.layers import Norm, lengths, rope
from gspmd_lm.model.weights import adapted, bias, matrix
from gspmd_lm.sharding.annotate import shard
from gspmd_lm.sharding.matmuls import gathered, project
from gspmd_lm.sharding.partial_sums import Unreduced
from gspmd_lm.sharding.quantised import whole

Q_LATENT = "q_latent: batch seq q_rank"
KV_LATENT = "kv_latent: batch seq kv_rank"
K_ROPE = "k_rope: batch seq rope_dim"
LATENT_EPS = 1e-6  # of both norms, whatever a model's other norms have: as in the code of DeepSeek-V2 and V3


class LatentAttention(nn.Module):
    """Self-attention whose cache keeps the vector that keys and values are made from, and the key that all heads share.

    A query and a key of a head begin with the rope_dim numbers that are rotated. In a key, all heads share them.
    """

    cfg: config.ModelConfig

    def setup(self):
        cfg = self.cfg
        sizes = cfg.latent_attention
        assert sizes
        D, N, H, P, R, Z = cfg.embed, cfg.head_rows, cfg.head_dim, cfg.rope_dim, sizes.q_rank, sizes.kv_rank
        norm = dataclasses.replace(cfg, norm_eps=LATENT_EPS)
        self.wq = None
        if R:
            self.wq_down = matrix(self, "wq_down", "embed q_rank", (D, R), cfg)
            self.q_norm = Norm(norm, "q_rank")
            self.wq_up = matrix(self, "wq_up", "q_rank heads head_dim", (R, N, H), cfg)
        else:
            self.wq = adapted(self, matrix(self, "wq", "embed heads head_dim", (D, N, H), cfg), cfg)
        self.wkv_down = matrix(self, "wkv_down", "embed kv_rank", (D, Z), cfg)
        self.wk_rope = matrix(self, "wk_rope", "embed rope_dim", (D, P), cfg)
        self.kv_norm = Norm(norm, "kv_rank")
        self.wk_up = matrix(self, "wk_up", "kv_rank heads head_dim", (Z, N, H - P), cfg)
        self.wv_up = matrix(self, "wv_up", "kv_rank heads head_dim", (Z, N, sizes.v_head_dim), cfg)
        self.wo = adapted(self, matrix(self, "wo", "heads head_dim embed", (N, sizes.v_head_dim, D), cfg), cfg)
        self.bo = bias(self, "bo", "embed", (D,), cfg) if cfg.attention_out_bias else None
        self.sinks = bias(self, "sinks", "heads", (N,), cfg) if cfg.attention_sinks else None

    def __call__(
        self,
        x_BTD: jax.Array,
        batch: dict[str, jax.Array],
        cache: Cache[jax.Array] | None = None,
        layer: jax.Array | int = 0,
        kept: Kept | None = None,
    ) -> tuple[Unreduced, Cache[jax.Array] | None, Kept | None]:
        """What is added to the residual stream, the cache, and `kept`: see `Attention`.

        Keys and values of a new token's predecessors are not made from the cache. Instead the query is multiplied with
        `wk_up`, and the sum of the vectors with `wv_up`, so that attention reads the vectors themselves.
        """
        cfg, positions_BT = self.cfg, batch["positions"]
        length = lengths(batch, x_BTD.shape[1])
        latent_BTZ = self.kv_norm(shard(project(x_BTD, self.wkv_down), KV_LATENT))
        q_BTNH, shared_BTP = shard(self._queries(x_BTD), Q), shard(project(x_BTD, self.wk_rope), K_ROPE)
        if cfg.attention_temperature:
            q_BTNH = shard(q_BTNH * temperature(positions_BT, cfg.attention_temperature).astype(q_BTNH.dtype), Q)
        if cfg.attention_chunk:
            batch = in_chunks(batch, cfg.attention_chunk)
        if cfg.positions == "rope":
            q_BTNH = shard(rope(q_BTNH, positions_BT, cfg, length), Q)
            shared_BTP = shard(rope(shared_BTP[:, :, None], positions_BT, cfg, length)[:, :, 0], K_ROPE)
        if cache:
            new_BTG = jnp.concatenate([latent_BTZ, shared_BTP], -1)
            cache = cache.written(new_BTG[:, :, None], None, batch["slot"], layer)
        if cache and x_BTD.shape[1] == 1:
            (stored_BS1G,) = cache.of(layer)
            out_BTNH = self._absorbed(q_BTNH, stored_BS1G, batch)
        else:
            specs, vectors = (KV_LATENT, K_ROPE), (latent_BTZ, shared_BTP)
            if not cfg.matmul_dtype:  # gradients of keys are then sums of parts, which 8 bits would round otherwise
                specs, vectors = gathered_early(specs, vectors, batch)
            latent_BTZ, shared_BTP = vectors
            with gathered(latent_BTZ, specs[0], KV_LATENT) as latent_BTZ:
                own_BTNH, v_BTNH = project(latent_BTZ, self.wk_up), project(latent_BTZ, self.wv_up)
            shared_BTNP = jnp.broadcast_to(shared_BTP[:, :, None], (*own_BTNH.shape[:3], cfg.rope_dim))
            k, v = (keys_spec(name).replace("kv_heads", "heads") for name in "kv")
            k_BTNH = shard(jnp.concatenate([shared_BTNP, own_BTNH], -1), k)
            out_BTNH = attend(q_BTNH, k_BTNH, shard(v_BTNH, v), batch, cfg, batch.get("relative_RN", self.sinks))
        return to_residual(out_BTNH, self.wo, self.bo, cfg), cache, kept

    def _queries(self, x_BTD: jax.Array) -> jax.Array:
        """[B, T, N, H], before they are rotated."""
        if self.wq is not None:
            return project(x_BTD, self.wq)
        latent_BTQ = self.q_norm(shard(project(x_BTD, self.wq_down), Q_LATENT))
        with gathered(latent_BTQ, Q_LATENT, Q_LATENT) as latent_BTQ:
            return project(latent_BTQ, self.wq_up)

    def _absorbed(self, q_B1NH: jax.Array, stored_BS1G: jax.Array, batch: dict[str, jax.Array]) -> jax.Array:
        """The result of attention of one new token per row, [B, 1, N, H], from what the cache keeps."""
        cfg, rank = self.cfg, self.wk_up.array.shape[0]
        shared_B1NP, own_B1NH = jnp.split(q_B1NH, [cfg.rope_dim], axis=-1)
        q_B1NZ = jnp.einsum("BTNH,ZNH->BTNZ", own_B1NH, whole(self.wk_up))
        q_B1NG = jnp.concatenate([q_B1NZ, shared_B1NP], -1)
        # The shared keys are summed up along, as values, and cut off: without them, the cache would have to be copied.
        own_RN = batch.get("relative_RN", self.sinks)
        sum_B1NG = attend_to_cache(q_B1NG, stored_BS1G, stored_BS1G, batch["slot"], batch["start"], cfg, own_RN)
        return jnp.einsum("BTNZ,ZNH->BTNH", sum_B1NG[..., :rank], whole(self.wv_up))
