"""Linear attention by the gated delta rule: a state of fixed size replaces keys and values (arXiv 2412.06464).

The state S of a head turns keys into values. A token with key k, value v, decay d and rate b changes it to
d S + b k (v - d S k), and its query reads it. A training step computes whole chunks of tokens at once, as products of
matrices (arXiv 2406.06484), and goes from chunk to chunk in a loop. Generation keeps the state and computes token by
token. A new document begins with an empty state.
"""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from einops import rearrange

from gspmd_lm import config
from gspmd_lm.config import with_values
from gspmd_lm.model.cache import LinearState
from gspmd_lm.model.norm import Norm
from gspmd_lm.model.parts.activations import ACTIVATIONS
from gspmd_lm.model.tokens import Tokens
from gspmd_lm.model.weights import matrix, weight
from gspmd_lm.sharding.annotate import like, shard, use
from gspmd_lm.sharding.matmuls import project, unreduced_matmul
from gspmd_lm.sharding.partial_sums import Unreduced

CHUNK = 64  # tokens that are computed at once
OF_KEYS, OF_VALUES = ("{}: batch seq kv_heads head_dim", "{}: batch seq heads head_dim")
RATE = "q: batch seq heads"


class GatedDeltaNet(nn.Module):
    """Linear attention of one layer; it stays within a segment."""

    cfg: config.ModelConfig

    def setup(self):
        cfg, sizes = self.cfg, self.cfg.attention.linear
        assert sizes
        D, K, N, H, A = cfg.embed, sizes.key_heads, sizes.value_heads, sizes.head_dim, sizes.taps
        exact = dataclasses.replace(cfg, compute_dtype="float32")
        plain = with_values(cfg, {"norm.kind": "rmsnorm", "norm.scale": True, "norm.bias": False, "norm.offset": 0.0})
        keys, values, tap = "embed kv_heads head_dim", "embed heads head_dim", nn.initializers.normal(A**-0.5)
        self.linear_q = matrix(self, "linear_q", keys, (D, K, H), cfg)
        self.linear_k = matrix(self, "linear_k", keys, (D, K, H), cfg)
        self.linear_v = matrix(self, "linear_v", values, (D, N, H), cfg)
        self.linear_z = matrix(self, "linear_z", values, (D, N, H), cfg)
        self.linear_a = matrix(self, "linear_a", "embed heads", (D, N), cfg)
        self.linear_b = matrix(self, "linear_b", "embed heads", (D, N), cfg)
        self.linear_out = matrix(self, "linear_out", "heads head_dim embed", (N, H, D), cfg)
        self.conv_q = weight(self, "conv_q", "taps kv_heads head_dim", (A, K, H), cfg, tap)
        self.conv_k = weight(self, "conv_k", "taps kv_heads head_dim", (A, K, H), cfg, tap)
        self.conv_v = weight(self, "conv_v", "taps heads head_dim", (A, N, H), cfg, tap)
        self.decay = weight(self, "decay", "heads", (N,), exact, _draw_decay)
        self.decay_bias = weight(self, "decay_bias", "heads", (N,), exact, nn.initializers.ones)
        self.norm = Norm(plain, "head_dim")

    def __call__(self, in_BTD: jax.Array, tokens: Tokens) -> tuple[Unreduced, Tokens]:
        """The output that the residual stream adds, and the tokens with their updated cache. `in_BTD` is gathered.

        With a cache, a single token per row is a decoding step, and several tokens per row are a prefill.
        """
        cfg = self.cfg
        q, k, v, z = (project(in_BTD, w) for w in (self.linear_q, self.linear_k, self.linear_v, self.linear_z))
        a, b = (like(project(in_BTD, w), RATE) for w in (self.linear_a, self.linear_b))
        qkv = shard(q, OF_KEYS.format("q")), shard(k, OF_KEYS.format("k")), shard(v, OF_VALUES.format("v"))
        z_BTNH, decay, bias = like(z, OF_VALUES.format("v")), use(self.decay), use(self.decay_bias)
        log_decay_BTN = -jnp.exp(decay) * jax.nn.softplus(a.astype(jnp.float32) + bias)
        rate_BTN = jax.nn.sigmoid(b.astype(jnp.float32))
        taps = [use(w) for w in (self.conv_q, self.conv_k, self.conv_v)]
        segments_BT = jnp.zeros(v.shape[:2], jnp.int32) if tokens.segments_BT is None else tokens.segments_BT
        states = tokens.cache and tokens.cache.linear
        before = states.read(tokens.place_in_cache) if states and v.shape[1] == 1 else None
        if before:
            windows = [jnp.concatenate([old, x], 1) for old, x in zip(before, qkv, strict=False)]
            convolved = [(x_BANH * w).sum(1, keepdims=True) for x_BANH, w in zip(windows, taps, strict=True)]
            last = [x_BANH[:, 1:] for x_BANH in windows]
        else:
            convolved = [_convolve(x, w, segments_BT) for x, w in zip(qkv, taps, strict=True)]
            last = [_last(x, w.shape[0] - 1, segments_BT) for x, w in zip(qkv, taps, strict=True)]
        q, k, v = (ACTIVATIONS[cfg.feed_forward.activation](x).astype(jnp.float32) for x in convolved)
        group = v.shape[2] // k.shape[2]
        q, k = (like(jnp.repeat(_unit(x), group, axis=2), OF_VALUES.format("q")) for x in (q, k))
        q *= q.shape[-1] ** -0.5
        if before:
            out_BTNH, state = _step(q, k, v, log_decay_BTN, rate_BTN, before.s_LBNIH)
        else:
            out_BTNH, state = _in_chunks(q, k, v, log_decay_BTN, rate_BTN, segments_BT)
        if tokens.cache and states:
            states = states.write(LinearState(*[*last, state]), tokens.place_in_cache)
            tokens = tokens._replace(cache=tokens.cache._replace(linear=states))
        normed_BTNH = self.norm(out_BTNH.astype(z.dtype))
        gated_BTNH = (normed_BTNH * jax.nn.silu(z_BTNH.astype(jnp.float32))).astype(z.dtype)
        out_BTNH = shard(gated_BTNH, OF_VALUES.format("attention_out"))
        return unreduced_matmul(out_BTNH, self.linear_out), tokens


def _draw_decay(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """The initial logarithm of the decay rate of each head, as in Mamba 2."""
    return jnp.log(jax.random.uniform(key, shape, jnp.float32, 0.01, 16.0)).astype(dtype)


def _unit(x: jax.Array) -> jax.Array:
    """Vectors of length 1."""
    return x * jax.lax.rsqrt(jnp.square(x).sum(-1, keepdims=True) + 1e-6)


def _convolve(x_BTNH: jax.Array, taps_ANH: jax.Array, segments_BT: jax.Array) -> jax.Array:
    """A causal convolution of each channel within its segment. The last tap is that of the token itself."""
    length, most = x_BTNH.shape[1], len(taps_ANH)
    total = x_BTNH * taps_ANH[-1]
    for back in range(1, min(most, length)):
        moved_BTNH = jnp.pad(x_BTNH, ((0, 0), (back, 0), (0, 0), (0, 0)))[:, :length]
        same_BT = segments_BT == jnp.pad(segments_BT, ((0, 0), (back, 0)), constant_values=-1)[:, :length]
        total += jnp.where(same_BT[..., None, None], moved_BTNH, 0) * taps_ANH[-1 - back]
    return total


def _last(x_BTNH: jax.Array, count: int, segments_BT: jax.Array) -> jax.Array:
    """The last tokens, [B, count, N, H]; zeros for tokens that are not of the last token's segment."""
    own_BT = segments_BT == segments_BT[:, -1:]
    own_BTNH = jnp.where(own_BT[..., None, None], x_BTNH, 0)
    return jnp.pad(own_BTNH, ((0, 0), (count, 0), (0, 0), (0, 0)))[:, x_BTNH.shape[1] :]


def _step(q_B1NH, k_B1NH, v_B1NH, log_decay_B1N, rate_B1N, state_BNIH) -> tuple[jax.Array, jax.Array]:
    """The output for one more token of each row, [B, 1, N, H], and the state after it."""
    q_BNI, k_BNI, v_BNH = (x[:, 0] for x in (q_B1NH, k_B1NH, v_B1NH))
    state_BNIH = state_BNIH * jnp.exp(log_decay_B1N[:, 0, :, None, None])
    known_BNH = jnp.einsum("BNI,BNIH->BNH", k_BNI, state_BNIH)
    new_BNH = rate_B1N[:, 0, :, None] * (v_BNH - known_BNH)
    state_BNIH += k_BNI[..., None] * new_BNH[..., None, :]
    return jnp.einsum("BNI,BNIH->BNH", q_BNI, state_BNIH)[:, None], state_BNIH


def _in_chunks(q_BTNH, k_BTNH, v_BTNH, log_decay_BTN, rate_BTN, segments_BT) -> tuple[jax.Array, jax.Array]:
    """The output for each token, [B, T, N, H], and the state after the last one, [B, N, I, H], all float32.

    C counts chunks. T and S count the tokens within a chunk, as query and as key.
    """
    length = q_BTNH.shape[1]
    size = min(CHUNK, 1 << (length - 1).bit_length())
    more = -length % size  # tokens that change nothing: their rate and their key are 0

    def cut(x: jax.Array, mode: Any = "constant") -> jax.Array:
        padded = jnp.pad(x, [(0, 0), (0, more), *[(0, 0)] * (x.ndim - 2)], mode=mode)
        return jnp.moveaxis(rearrange(padded, "B (C T) ... -> C B T ...", T=size), 2, min(x.ndim, 3))

    q, k, v = map(cut, (q_BTNH, k_BTNH, v_BTNH))  # [C, B, N, T, H]
    rate, decayed = cut(rate_BTN), jnp.cumsum(cut(log_decay_BTN), -1)  # [C, B, N, T]: since the chunk's beginning
    segments = cut(segments_BT, "edge")[:, :, None]  # [C, B, 1, T]
    same = segments[..., :, None] == segments[..., None, :]
    at = jnp.arange(size)
    seen = same & (at[:, None] >= at)
    between = jnp.exp(jnp.where(seen, decayed[..., :, None] - decayed[..., None, :], -jnp.inf))
    # The last token of the chunk before is of the segment whose state comes into the chunk.
    incoming = jnp.concatenate([segments[:1, ..., :1], segments[:-1, ..., -1:]])
    reached = jnp.where(segments == incoming, jnp.exp(decayed), 0)
    left = jnp.where(segments == segments[..., -1:], jnp.exp(decayed[..., -1:] - decayed), 0)

    strict = jnp.where(at[:, None] > at, rate[..., None] * jnp.einsum("CBNTH,CBNSH->CBNTS", k, k) * between, 0)
    solved = _inverse(strict)
    new = jnp.einsum("CBNTS,CBNSH->CBNTH", solved, rate[..., None] * v)
    erased = jnp.einsum("CBNTS,CBNSI->CBNTI", solved, (rate * reached)[..., None] * k)
    scores = jnp.einsum("CBNTH,CBNSH->CBNTS", q, k) * between

    def chunk(state_BNIH: jax.Array, inputs: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        new, erased, scores, asked, left, kept = inputs
        new = new - jnp.einsum("BNTI,BNIH->BNTH", erased, state_BNIH)
        out = jnp.einsum("BNTI,BNIH->BNTH", asked, state_BNIH) + jnp.einsum("BNTS,BNSH->BNTH", scores, new)
        return kept[..., None] * state_BNIH + jnp.einsum("BNTI,BNTH->BNIH", left, new), out

    B, _, N, H = q_BTNH.shape
    inputs = new, erased, scores, reached[..., None] * q, left[..., None] * k, reached[..., -1:]
    state_BNIH, out = jax.lax.scan(chunk, jnp.zeros((B, N, H, H), jnp.float32), inputs)
    return rearrange(out, "C B N T H -> B (C T) N H")[:, :length], state_BNIH


def _inverse(strict: jax.Array) -> jax.Array:
    """The inverse of I + strict, whose last two dimensions are a strictly lower triangle of a power of two.

    A half at a time: [[A, 0], [C, D]] has the inverse [[A', 0], [-D' C A', D']]. A series of powers would need fewer
    products, but its terms grow to 1e17 where keys repeat, and cancel.
    """
    size = strict.shape[-1]
    if size == 1:
        return jnp.ones_like(strict)
    half = size // 2
    first, last = _inverse(jnp.stack([strict[..., :half, :half], strict[..., half:, half:]]))
    with jax.default_matmul_precision("highest"):
        corner = -last @ strict[..., half:, :half] @ first
    above = jnp.concatenate([first, jnp.zeros_like(first)], -1)
    return jnp.concatenate([above, jnp.concatenate([corner, last], -1)], -2)
