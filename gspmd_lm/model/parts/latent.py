"""Multi-head latent attention: keys and values of all heads come from one latent vector (arXiv 2405.04434, 2.1)."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from gspmd_lm import config
from gspmd_lm.config import with_values
from gspmd_lm.model.attention import AttentionParts
from gspmd_lm.model.kernels.attention import Q, attend_to_cache
from gspmd_lm.model.kernels.context import gathered_early, keys_spec
from gspmd_lm.model.norm import Norm
from gspmd_lm.model.tokens import Tokens
from gspmd_lm.model.weights import matrix
from gspmd_lm.sharding.annotate import shard
from gspmd_lm.sharding.matmuls import gathered, project, unreduced_matmul
from gspmd_lm.sharding.partial_sums import Unreduced
from gspmd_lm.sharding.quantised import whole

Q_LATENT = "q_latent: batch seq q_rank"
KV_LATENT = "kv_latent: batch seq kv_rank"
K_ROPE = "k_rope: batch seq rope_dim"
LATENT_EPS = 1e-6  # of both norms, independent of norm.eps, as in the code of DeepSeek-V2 and V3


class LatentAttention(nn.Module):
    """Self-attention whose cache keeps a latent vector and a rotary key for each token, which all heads share.

    Queries and keys begin with the rope_dim dimensions that are rotated. In keys, all heads share these dimensions.
    """

    cfg: config.ModelConfig
    parts: AttentionParts = AttentionParts()

    def setup(self):
        cfg = self.cfg
        sizes = cfg.attention.latent
        assert sizes
        D, N, H, P, R, Z = cfg.embed, cfg.head_rows, cfg.head_dim, cfg.attention.rope.dim, sizes.q_rank, sizes.kv_rank
        norm = with_values(cfg, {"norm.eps": LATENT_EPS})
        self.wq = None
        if R:
            self.wq_down = matrix(self, "wq_down", "embed q_rank", (D, R), cfg)
            self.q_norm = Norm(norm, "q_rank")
            self.wq_up = matrix(self, "wq_up", "q_rank heads head_dim", (R, N, H), cfg)
        else:
            self.wq = self.parts.adapt(self, matrix(self, "wq", "embed heads head_dim", (D, N, H), cfg))
        self.wkv_down = matrix(self, "wkv_down", "embed kv_rank", (D, Z), cfg)
        self.wk_rope = matrix(self, "wk_rope", "embed rope_dim", (D, P), cfg)
        self.kv_norm = Norm(norm, "kv_rank")
        self.wk_up = matrix(self, "wk_up", "kv_rank heads head_dim", (Z, N, H - P), cfg)
        self.wv_up = matrix(self, "wv_up", "kv_rank heads head_dim", (Z, N, sizes.v_head_dim), cfg)
        self.wo = self.parts.adapt(self, matrix(self, "wo", "heads head_dim embed", (N, sizes.v_head_dim, D), cfg))
        self.out_bias, self.numbers = self.parts.out_bias(self), self.parts.numbers(self)
        self.attend = self.parts.attend(self)

    def __call__(self, in_BTD: jax.Array, tokens: Tokens) -> tuple[Unreduced, Tokens]:
        """The output that the residual stream adds, and the tokens with their updated cache: see `Attention`.

        A decoding step does not compute keys and values from the cache. It multiplies the query by `wk_up` and the
        weighted sum of latent vectors by `wv_up` instead, so that attention reads the latent vectors themselves.
        """
        latent_BTZ = self.kv_norm(shard(project(in_BTD, self.wkv_down), KV_LATENT))
        q_BTNH, shared_BTP = shard(self._queries(in_BTD), Q), shard(project(in_BTD, self.wk_rope), K_ROPE)
        for turn in (*self.parts.query_turns, *self.parts.turns):
            q_BTNH = shard(turn(q_BTNH, tokens), Q)
        for turn in self.parts.turns:
            shared_BTP = shard(turn(shared_BTP[:, :, None], tokens)[:, :, 0], K_ROPE)
        if tokens.cache:
            new_BTG = jnp.concatenate([latent_BTZ, shared_BTP], -1)
            cache = tokens.cache.write(new_BTG[:, :, None], None, tokens.slot, tokens.place_in_cache)
            tokens = tokens._replace(cache=cache)
        if tokens.cache and in_BTD.shape[1] == 1:
            out_BTNH = self._attend_absorbed(q_BTNH, tokens)
        else:
            out_BTNH = self._attend(q_BTNH, latent_BTZ, shared_BTP, tokens)
        return self.out_bias(unreduced_matmul(self.parts.result(out_BTNH), self.wo)), tokens

    def _attend(self, q_BTNH: jax.Array, latent_BTZ: jax.Array, shared_BTP: jax.Array, tokens: Tokens) -> jax.Array:
        """The result of attention in training and prefill, [B, T, N, H]."""
        cfg, specs, vectors = self.cfg, (KV_LATENT, K_ROPE), (latent_BTZ, shared_BTP)
        if not cfg.matmul_dtype:  # gradients of keys are then sums of parts, which 8 bits would round otherwise
            specs, vectors = gathered_early(specs, vectors, tokens)
        latent_BTZ, shared_BTP = vectors
        with gathered(latent_BTZ, specs[0], KV_LATENT) as in_BTZ:
            own_BTNH, v_BTNH = project(in_BTZ, self.wk_up), project(in_BTZ, self.wv_up)
        shared_BTNP = jnp.broadcast_to(shared_BTP[:, :, None], (*own_BTNH.shape[:3], cfg.attention.rope.dim))
        k, v = (keys_spec(name).replace("kv_heads", "heads") for name in "kv")
        k_BTNH = shard(jnp.concatenate([shared_BTNP, own_BTNH], -1), k)
        return self.attend(q_BTNH, k_BTNH, shard(v_BTNH, v), self.parts.seen(tokens), cfg, self.numbers(tokens))

    def _queries(self, x_BTD: jax.Array) -> jax.Array:
        """[B, T, N, H], before they are rotated."""
        if self.wq is not None:
            return project(x_BTD, self.wq)
        latent_BTQ = self.q_norm(shard(project(x_BTD, self.wq_down), Q_LATENT))
        with gathered(latent_BTQ, Q_LATENT, Q_LATENT) as latent_BTQ:
            return project(latent_BTQ, self.wq_up)

    def _attend_absorbed(self, q_B1NH: jax.Array, tokens: Tokens) -> jax.Array:
        """The result of attention of one new token per row to the cache, [B, 1, N, H]."""
        cfg, rank, seen = self.cfg, self.wk_up.array.shape[0], self.parts.seen(tokens)
        assert tokens.cache
        (stored_BS1G,) = tokens.cache.read(tokens.place_in_cache)
        shared_B1NP, own_B1NH = jnp.split(q_B1NH, [cfg.attention.rope.dim], axis=-1)
        q_B1NZ = jnp.einsum("BTNH,ZNH->BTNZ", own_B1NH, whole(self.wk_up))
        q_B1NG = jnp.concatenate([q_B1NZ, shared_B1NP], -1)
        # The rotary keys are part of the values, and their sum is cut off. To leave them out would copy the cache.
        sum_B1NG = attend_to_cache(q_B1NG, stored_BS1G, stored_BS1G, seen.slot, seen.start_B, cfg, self.numbers(tokens))
        return jnp.einsum("BTNZ,ZNH->BTNH", sum_B1NG[..., :rank], whole(self.wv_up))
