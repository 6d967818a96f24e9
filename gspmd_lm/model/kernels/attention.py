"""Attention by the kernel that the rules choose: XLA's own, cuDNN's fused one, or splash on TPU.

The fused kernels never hold a T x T array. None of them changes what is computed.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange

from gspmd_lm import config
from gspmd_lm.model.kernels.common import as_wide, scores_scale, sees, with_sums
from gspmd_lm.model.kernels.distances import alibi_slopes, score_bias, scores_by_distance
from gspmd_lm.sharding.annotate import attention_kernel, like, per_device, platform, recomputed, shard, split
from gspmd_lm.sharding.op_names import scope

Q = "q: batch seq heads head_dim"
K = "k: batch kv_seq kv_heads head_dim"
V = "v: batch kv_seq kv_heads head_dim"
OUT = "attention_out: batch seq heads head_dim"
# The queries of decoded tokens, where they meet the cache, and the result. Without rows of their own, they are placed
# as other queries and results are.
DECODE_Q, DECODE_OUT = "decode_q: batch seq heads head_dim", "decode_out: batch seq heads head_dim"
SEGMENTS = "tokens: batch seq"
KEY_SEGMENTS = "k: batch kv_seq"  # of keys that are other tokens than the queries
HEAD = "q: whole heads"
UNSEEN = -1e38  # added to the score of a key that is masked for a query


class TokenPlaces(NamedTuple):
    """The positions of the tokens of queries or keys, int32."""

    at_BT: jax.Array  # the position of each in its row; a single row is that of all rows
    segments_BT: jax.Array | None  # equal within a document
    places_BT: jax.Array | None  # the position of each in its document, if that is not its position in the row


def keys_axis() -> str:
    """The axis of the heads of keys and values as a kernel reads them.

    It is `heads` where query heads are split finer than their keys: each device needs the keys of its own heads.
    """
    return "kv_heads" if split("q", "heads") == split("k", "kv_heads") else "heads"


def attend(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    segments_BT: jax.Array | None,
    cfg: config.ModelConfig,
    places_BT: jax.Array | None = None,
    own_RN: jax.Array | None = None,
    one_text: bool = False,
) -> jax.Array:
    """softmax(scale q k) v over the positions of the same segment that `model.attention.mask` leaves, [B, T, N, H].

    Kernels compute the softmax in float32, XLA in `model.attention.scores_dtype`.

    Key heads, the axis `keys_axis`, are shared by N / K query heads each. segments_BT: int32, equal within a document,
    which lies in one piece; None where a row is one text. places_BT: int32, the position of a token in its document,
    if that is not its position in the row. own_RN: learned numbers of each head, see `head_numbers`. one_text: see
    `documents.runs`. A remat policy that keeps `attention_out` keeps all that a fused kernel's backward pass needs of
    its forward pass.
    """
    kernel, heads_RN = attention_kernel(), head_numbers(cfg, own_RN)
    if kernel == "xla":
        tokens, shards = TokenPlaces(jnp.arange(q_BTNH.shape[1])[None], segments_BT, places_BT), split("q", "batch")
        out_BTNH = attend_masked(q_BTNH, k_BSKH, v_BSKH, tokens, tokens, heads_RN, cfg, shards.num_shards)
        return shard(out_BTNH, OUT)
    segments = [] if segments_BT is None else [segments_BT]
    return fused_per_device(q_BTNH, k_BSKH, v_BSKH, heads_RN, *segments, kernel=kernel, cfg=cfg, one_text=one_text)


def fused_per_device(
    q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, heads_RN: jax.Array, *segments: jax.Array, **options: Any
) -> jax.Array:
    """Attention by a fused kernel, whose heads and rows devices share. `segments` and `options`: see `fused`."""
    keys = [spec.replace("kv_heads", keys_axis()) for spec in (K, V)]
    inputs = Q, *keys, HEAD, *(SEGMENTS, KEY_SEGMENTS)[: len(segments)]
    return per_device(functools.partial(fused, **options), inputs, OUT)(q_BTNH, k_BSKH, v_BSKH, heads_RN, *segments)


def fused(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    heads_RN: jax.Array,
    segments_BT: jax.Array | None = None,
    key_segments_BS: jax.Array | None = None,
    *,
    kernel: str,
    cfg: config.ModelConfig,
    one_text: bool = False,
) -> jax.Array:
    """Attention by a fused kernel on the heads and rows of one device. XLA does not partition such a kernel.

    heads_RN: see `head_numbers`. key_segments_BS: of keys that are other tokens than the queries. A query without a key
    gets 0. one_text: see `documents.runs`.
    """
    if kernel == "splash":
        from gspmd_lm.model.kernels import splash

        made = splash.kernel(q_BTNH, k_BSKH.shape[1], cfg, residual_checkpoint_name="attention_out")
        segments = [x for x in (segments_BT, key_segments_BS) if x is not None]
        both = (segments[0], segments[-1]) if segments else None
        out_BTNH = splash.attend(made, q_BTNH, k_BSKH, v_BSKH, heads_RN, cfg, both)
        if len(segments) < 2:
            return out_BTNH
        has_key_BT = (segments[0][:, :, None] == segments[1][:, None]).any(-1)
        return jnp.where(has_key_BT[..., None, None], out_BTNH, 0)
    from gspmd_lm.model.kernels import cudnn, documents

    packed = None if segments_BT is None else documents.runs(segments_BT, key_segments_BS, one_text)
    passes = (functools.partial(one, causal=cfg.attention.mask == "causal") for one in (cudnn.forward, cudnn.backward))
    return with_sums(tuple(passes), cfg, q_BTNH, k_BSKH, v_BSKH, heads_RN, (packed,))


def attend_to_cache(
    q_B1NH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    slot: jax.Array,
    start_B: jax.Array,
    cfg: config.ModelConfig,
    own_RN: jax.Array | None = None,
) -> jax.Array:
    """Attention of one new token per row, in `slot`, to the slots of the cache that hold its text, [B, 1, N, H].

    start_B: int32, the first slot of each row's text. Queries move to where the cache is, and results back.
    """
    q_B1NH = shard(q_B1NH, DECODE_Q)
    slots_1S = jnp.arange(k_BSKH.shape[1])[None]
    seen_B1S = mask(cfg)(slot[None, None], slots_1S) & (slots_1S >= start_B[:, None])[:, None]
    keys_BS = slots_1S - start_B[:, None] if cfg.positions == "alibi_bf16" else slots_1S
    heads_RN = head_numbers(cfg, own_RN)
    with sees(cfg):
        out_B1NH = _xla(q_B1NH, k_BSKH, v_BSKH, seen_B1S, slot[None, None], keys_BS, heads_RN, cfg=cfg)
    return shard(shard(out_B1NH, DECODE_OUT), OUT)


@functools.cache
def mask(cfg: config.ModelConfig) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """A function from the positions of queries and keys, [B, T] and [B, S], to the mask of keys in use, [B, T, S]."""
    window = cfg.attention.window

    def full(queries_BT: jax.Array, keys_BS: jax.Array) -> jax.Array:
        return jnp.ones_like(queries_BT[:, :, None] - keys_BS[:, None, :], bool)

    def causal(queries_BT: jax.Array, keys_BS: jax.Array) -> jax.Array:
        return queries_BT[:, :, None] - keys_BS[:, None, :] >= 0

    def sliding(queries_BT: jax.Array, keys_BS: jax.Array) -> jax.Array:
        ahead_BTS = queries_BT[:, :, None] - keys_BS[:, None, :]
        return (ahead_BTS >= 0) & (ahead_BTS < window)

    return {"full": full, "causal": sliding if window else causal}[cfg.attention.mask]


def attend_masked(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    queries: TokenPlaces,
    keys: TokenPlaces,
    heads_RN: jax.Array,
    cfg: config.ModelConfig,
    shards: int = 1,
) -> jax.Array:
    """Attention as XLA compiles it, of some queries to the keys that they see, [B, T, N, H].

    shards: of the batch. Each expands the bias of all relative positions to that of all pairs of tokens. So devices
    reduce the gradients of the relative positions, which are far fewer than the pairs.
    """
    parts, at_BT = score_parts(cfg), queries.at_BT
    seen_BTS = mask(cfg)(at_BT, keys.at_BT)
    if queries.segments_BT is not None and keys.segments_BT is not None:
        seen_BTS &= queries.segments_BT[:, :, None] == keys.segments_BT[:, None, :]
    if parts.by_distance and shards > 1:
        at_BT = like(jnp.broadcast_to(at_BT, (shards, at_BT.shape[1])), SEGMENTS)
    # ALiBi depends on relative positions alone. Only where it is rounded does it depend on absolute ones.
    at_BS = keys.places_BT if parts.rounded and keys.places_BT is not None else keys.at_BT
    attention = recomputed(functools.partial(_xla, cfg=cfg))
    seen_BTS, where_seen = parts.where_seen(seen_BTS)
    # The derivative of this softmax needs the weights alone, not also what they are made of.
    with sees(cfg), jax.softmax_custom_jvp(True):
        return where_seen(attention(q_BTNH, k_BSKH, v_BSKH, seen_BTS, at_BT, at_BS, heads_RN))


def _zero_without_keys(seen_BTS: jax.Array) -> tuple[jax.Array, Callable[[jax.Array], jax.Array]]:
    """A mask with a key for each query, as a softmax needs, and a function that zeroes the results without keys."""
    has_key_BT11 = seen_BTS.any(-1)[:, :, None, None]
    return seen_BTS | ~has_key_BT11[..., 0], lambda out_BTNH: jnp.where(has_key_BT11, out_BTNH, 0)


class ScoreParts(NamedTuple):
    """The parts of the scores of a model's attention."""

    bias: Callable[..., jax.Array | None]
    by_distance: bool  # whether there are learned relative positions
    rounded: bool  # whether the bias depends on absolute positions, rounded
    where_seen: Callable[[jax.Array], tuple[jax.Array, Callable[[jax.Array], jax.Array]]]
    products: Callable[..., jax.Array]
    cap: Callable[[jax.Array], jax.Array]
    sink: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
    dtype: Any
    plain: bool  # whether jax.nn.dot_product_attention offers all of it


@functools.cache
def score_parts(cfg: config.ModelConfig) -> ScoreParts:
    """The parts of the scores of a model."""
    cap, dtype = cfg.attention.softcap, jnp.dtype(cfg.attention.scores_dtype)
    return ScoreParts(
        score_bias(cfg, scores_scale(cfg)),
        bool(cfg.attention.relative_positions or cfg.attention.relative_vectors),
        cfg.positions == "alibi_bf16",
        _zero_without_keys if cfg.reads else lambda seen_BTS: (seen_BTS, lambda out_BTNH: out_BTNH),
        _products_and_distances if cfg.attention.relative_vectors else _products,
        (lambda scores: cap * jnp.tanh(scores / cap)) if cap else lambda scores: scores,
        _with_sink if cfg.attention.sinks else lambda weights, scores, heads_RN: weights,
        dtype,
        dtype == jnp.float32 and not (cap or cfg.attention.sinks or cfg.attention.relative_vectors),
    )


def _products(q_BTNH, k_BSKH, heads_RN, queries_BT, keys_BS, cfg):
    """q k, scaled, [B, K, G, T, S]."""
    q_BKGTH = rearrange(q_BTNH, "B T (K G) H -> B K G T H", K=k_BSKH.shape[2])
    dtype = score_parts(cfg).dtype
    return jnp.einsum("BKGTH,BSKH->BKGTS", q_BKGTH, k_BSKH, preferred_element_type=dtype) * scores_scale(cfg)


def _products_and_distances(q_BTNH, k_BSKH, heads_RN, queries_BT, keys_BS, cfg):
    """q k and the products of both with relative positions, scaled, [B, N, 1, T, S] (disentangled attention)."""
    added_BNTS = scores_by_distance(q_BTNH, k_BSKH, heads_RN, queries_BT, keys_BS, cfg.attention.relative_vectors)
    scores_BNTS: jax.Array = with_added(scores_scale(cfg), score_parts(cfg).dtype, q_BTNH, k_BSKH, added_BNTS)
    return scores_BNTS[:, :, None]


def _with_sink(weights_BKGTS: jax.Array, scores_BKGTS: jax.Array, heads_RN: jax.Array) -> jax.Array:
    """The share of the softmax that is left to the keys."""
    sinks_KG11 = rearrange(heads_RN[0].astype(jnp.float32), "(K G) -> K G 1 1", K=scores_BKGTS.shape[1])
    return weights_BKGTS * jax.nn.sigmoid(jax.nn.logsumexp(scores_BKGTS, axis=-1, keepdims=True) - sinks_KG11)


@scope("kind", "attention")
def _xla(q_BTNH, k_BSKH, v_BSKH, seen_BTS, queries_BT, keys_BS, heads_RN, cfg):
    """Attention with a mask, the positions of queries and keys, and all that a config can ask."""
    parts, scale = score_parts(cfg), scores_scale(cfg)
    dtype, seen_B1TS = parts.dtype, seen_BTS[:, None]
    bias = parts.bias(heads_RN, queries_BT, keys_BS, len(q_BTNH))
    if platform() == "gpu":
        # Before a loop over layers, JAX computes what depends on constants alone, and keeps it. A mask, and what stands
        # for masked scores, would be as large as the scores, and be read with them. So the mask waits for the queries.
        q_BTNH, unseen_B1TS = jax.lax.optimization_barrier((q_BTNH, ~seen_B1TS))
        unseen_B1TS = unseen_B1TS.astype(dtype) * UNSEEN
        bias, seen_B1TS = unseen_B1TS if bias is None else bias.astype(dtype) + unseen_B1TS, None
    if parts.plain and q_BTNH.dtype != jnp.float32:  # its derivative multiplies in the dtype of q, too
        one_width = as_wide(v_BSKH, k_BSKH)
        out_BTNH = jax.nn.dot_product_attention(q_BTNH, k_BSKH, one_width, bias, seen_B1TS, scale=scale)
        return out_BTNH[..., : v_BSKH.shape[-1]]
    # Scores in another dtype, capped scores and sinks: jax.nn.dot_product_attention does not offer them. In float32 it
    # multiplies the values with the weights, not the weights with the values, which CPUs have to transpose for that.
    scores_BKGTS = parts.cap(parts.products(q_BTNH, k_BSKH, heads_RN, queries_BT, keys_BS, cfg))
    if bias is not None:
        keys = k_BSKH.shape[2] if bias.shape[1] > 1 else 1
        scores_BKGTS += rearrange(bias, "B (K G) T S -> B K G T S", K=keys).astype(dtype)
    if seen_B1TS is not None:
        scores_BKGTS = jnp.where(seen_B1TS[:, None], scores_BKGTS, -jnp.inf)
    weights_BKGTS = parts.sink(jax.nn.softmax(scores_BKGTS, axis=-1), scores_BKGTS, heads_RN).astype(q_BTNH.dtype)
    return rearrange(jnp.einsum("BKGTS,BSKH->BKGTH", weights_BKGTS, v_BSKH), "B K G T H -> B T (K G) H")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def with_added(scale: float, dtype: Any, q_BTNH: jax.Array, k_BSNH: jax.Array, added_BNTS: jax.Array) -> jax.Array:
    """scale (q k + added), [B, N, T, S], in `dtype`.

    Autodiff would make the derivatives of both terms apart, though they are the same numbers.
    """
    return _with_added(scale, dtype, q_BTNH, k_BSNH, added_BNTS)[0]


def _with_added(scale, dtype, q_BTNH, k_BSNH, added_BNTS):
    products_BNTS = jnp.einsum("BTNH,BSNH->BNTS", q_BTNH, k_BSNH, preferred_element_type=dtype)
    # Scaled first: XLA would have a plain sum added by the matmul, which takes longer (`WIDE_STORE_SLOWDOWN`).
    return products_BNTS * scale + added_BNTS.astype(dtype) * scale, (q_BTNH, k_BSNH)


def _with_added_backward(scale, dtype, saved, dscores_BNTS):
    q_BTNH, k_BSNH = saved
    d_BNTS = (dscores_BNTS * scale).astype(q_BTNH.dtype)
    dq_BTNH = jnp.einsum("BNTS,BSNH->BTNH", d_BNTS, k_BSNH)
    return dq_BTNH, jnp.einsum("BNTS,BTNH->BSNH", d_BNTS, q_BTNH), d_BNTS


with_added.defvjp(_with_added, _with_added_backward)


def head_numbers(cfg: config.ModelConfig, own_RN: jax.Array | None) -> jax.Array:
    """Numbers of each head, [R, N]: biases, or queries and keys, of R ranges of relative positions, or attention sinks.

    A sink is a logit that takes part in the head's softmax without a key. A head that has learned none of these has its
    ALiBi slope, which is 0 for heads that are padding."""
    if own_RN is not None:
        return jnp.atleast_2d(own_RN)
    return jnp.pad(alibi_slopes(cfg.heads), (0, cfg.head_rows - cfg.heads))[None]
