"""Cross-entropy in chunks of the sequence, over a vocabulary that may be split, without ever holding all logits.

The gradients are computed in the forward pass (as in arXiv 2410.10989): a chunk's logits live only while its own
part of them is worked out. The table is put in place once, before the loop; its gradient is accumulated as one
partial sum per piece of the batch and reduced once, after it.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from einops import reduce as reduce_dimensions

from gspmd_lm import config
from gspmd_lm.axes import Weight, like, partial_einsum, pieces, reduce, scope, shard, split, use
from gspmd_lm.model.projection import BLOCK_INPUT, RESIDUAL

LOGITS = "logits: batch seq vocab"
CHUNK_TOKENS = 1024  # per device; enough to keep a matrix unit busy, 0.5 GB of float32 logits at V 128256


class Sums(NamedTuple):
    """Sums over target tokens, float32 scalars. `loss` is cross-entropy, plus the z-loss where there is one."""

    loss: jax.Array
    cross_entropy: jax.Array
    correct: jax.Array


def losses(x_BTD: jax.Array, table: Weight, bias: Weight | None, targets_BT: jax.Array, cfg: config.Model) -> Sums:
    """Sums of the losses of all tokens whose target is not negative.

    x_BTD: what the decoder returns. table: [V, D]. bias: [V]. targets_BT: int32, -1 where there is no target.
    Logits, softmax and sums are float32. Rows of padding (cfg.vocab and up) have no probability.
    """

    of = scope("of", "loss")

    @jax.custom_vjp
    @of
    def call(x_BTD, table_VD, bias_V):
        return _scan(x_BTD, table.holding(table_VD), _held(bias, bias_V), targets_BT, cfg, gradients=False)[0]

    @of
    def forward(x_BTD, table_VD, bias_V):
        return _scan(x_BTD, table.holding(table_VD), _held(bias, bias_V), targets_BT, cfg, gradients=True)

    @of
    def backward(gradients, cotangent):
        return jax.tree.map(lambda g: (g * cotangent.loss).astype(g.dtype), gradients)

    call.defvjp(forward, backward)
    return call(x_BTD, table.array, None if bias is None else bias.array)


def _held(bias: Weight | None, array: jax.Array) -> Weight | None:
    return bias and bias.holding(array)


def _scan(x_BTD, table, bias, targets_BT, cfg, gradients):
    """The sums, and with `gradients` also d sums.loss / d (x_BTD, table, bias); None for a frozen weight."""
    rows = split("block_input", "batch")
    columns = split("logits", "vocab")
    chunks = chunk_count(*x_BTD.shape[:2])
    x_CBTD = chunked(shard(like(x_BTD, RESIDUAL), BLOCK_INPUT), chunks)
    targets_CBT = chunked(targets_BT, chunks)
    table_VD, bias_V = use(table), None if bias is None else use(bias)
    of_weights = gradients and not table.frozen
    dtable_ZVD: Any = jnp.zeros((rows.pieces, *table_VD.shape), jnp.float32) if of_weights else None
    dbias_ZV: Any = jnp.zeros((rows.pieces, *table_VD.shape[:1]), jnp.float32) if of_weights and bias else None

    def chunk(carry, inputs):
        sums, dtable_ZVD, dbias_ZV = carry
        x_BTD, targets_BT = inputs
        new, dlogits_BTV = _chunk(x_BTD, table_VD, bias_V, targets_BT, cfg, gradients)
        sums = Sums(*(a + b for a, b in zip(sums, new, strict=True)))
        if not gradients:
            return (sums, None, None), None
        small_BTV = shard(dlogits_BTV.astype(x_BTD.dtype), LOGITS)
        if dtable_ZVD is not None:
            dtable_ZVD += partial_einsum("BTV,BTD->VD", small_BTV, x_BTD, "B", rows)
        if dbias_ZV is not None:
            dbias_ZV += reduce_dimensions(dlogits_BTV, "(Z B) T V -> Z V", "sum", Z=rows.pieces)
        dx_ZBTD = partial_einsum("BTV,VD->BTD", small_BTV, table_VD, "V", columns)
        return (sums, dtable_ZVD, dbias_ZV), dx_ZBTD

    zero = jnp.zeros((), jnp.float32)
    start: Any = Sums(zero, zero, zero), dtable_ZVD, dbias_ZV
    end: Any = jax.lax.scan(chunk, start, (x_CBTD, targets_CBT))
    (sums, dtable_ZVD, dbias_ZV), dx_CZBTD = end
    if not gradients:
        return sums, None
    dx_ZBTD = rearrange(dx_CZBTD, "C Z B (P T) D -> Z B (P C T) D", P=_seq_pieces(x_BTD.shape[1]))
    dx_BTD = reduce(dx_ZBTD, columns, RESIDUAL)
    if not of_weights:
        return sums, (dx_BTD, None, None)
    dtable_VD = reduce(dtable_ZVD, rows, table.spec, "optimizer").astype(table.array.dtype)
    dbias_V = bias and reduce(dbias_ZV, rows, bias.spec, "optimizer").astype(bias.array.dtype)
    # The backward pass begins when the table's gradient is reduced: partial sums of the whole table would otherwise
    # be held until the optimizer asks for them.
    return sums, jax.lax.optimization_barrier((dx_BTD, dtable_VD, dbias_V))


def _chunk(x_BTD, table_VD, bias_V, targets_BT, cfg, gradients) -> tuple[Sums, Any]:
    """The sums of one chunk and, with `gradients`, the derivative of its loss by its logits."""
    logits_BTV = logits_of(x_BTD, table_VD, bias_V, cfg)
    vocab_V = jnp.arange(cfg.vocab_rows)
    # Comparing with an iota keeps the vocabulary split; take_along_axis would gather it.
    is_target_BTV = vocab_V == targets_BT[..., None]
    has_target_BT = targets_BT >= 0
    highest_BT = logits_BTV.max(-1)
    exp_BTV = jnp.exp(logits_BTV - highest_BT[..., None])
    total_BT = exp_BTV.sum(-1)
    log_z_BT = highest_BT + jnp.log(total_BT)
    target_BT = jnp.where(is_target_BTV, logits_BTV, 0).sum(-1)
    cross_entropy_BT = jnp.where(has_target_BT, log_z_BT - target_BT, 0)
    loss_BT = cross_entropy_BT + jnp.where(has_target_BT, cfg.z_loss * log_z_BT**2, 0)
    sums = Sums(
        loss_BT.sum(), cross_entropy_BT.sum(), (has_target_BT & (target_BT >= highest_BT)).sum(dtype=jnp.float32)
    )
    if not gradients:
        return sums, None
    scale_BT = (1 + 2 * cfg.z_loss * log_z_BT) / total_BT
    dlogits_BTV = jnp.where(has_target_BT[..., None], exp_BTV * scale_BT[..., None] - is_target_BTV, 0)
    if not cfg.logit_softcap:
        return sums, dlogits_BTV
    slope_BTV = 1 - jnp.square(logits_BTV / cfg.logit_softcap)
    return sums, jnp.where(jnp.isfinite(logits_BTV), dlogits_BTV * slope_BTV, 0)


def logits(x_BTD: jax.Array, table: Weight, bias: Weight | None, cfg: config.Model) -> jax.Array:
    """The logits of what the decoder returned, [B, T, V] in float32; -inf for rows of padding (cfg.vocab and up)."""
    with scope("of", "logits"):
        x_BTD = shard(like(x_BTD, RESIDUAL), BLOCK_INPUT)
        return logits_of(x_BTD, use(table), None if bias is None else use(bias), cfg)


def logits_of(x_BTD: jax.Array, table_VD: jax.Array, bias_V: jax.Array | None, cfg: config.Model) -> jax.Array:
    """`logits` of hidden states and a table that are ready to be multiplied."""
    raw_BTV = jnp.einsum("BTD,VD->BTV", x_BTD, table_VD, preferred_element_type=jnp.float32)
    if bias_V is not None:
        raw_BTV += bias_V
    raw_BTV = shard(raw_BTV, LOGITS)
    cap = cfg.logit_softcap
    capped_BTV = cap * jnp.tanh(raw_BTV / cap) if cap else raw_BTV
    if cfg.vocab == cfg.vocab_rows:
        return capped_BTV
    return jnp.where(jnp.arange(cfg.vocab_rows) < cfg.vocab, capped_BTV, -jnp.inf)


def chunk_count(rows: int, length: int) -> int:
    """Into how many equal chunks sequences are cut so that one has at most CHUNK_TOKENS tokens on a device."""
    most = length // _seq_pieces(length)
    wanted = -(-rows * most // (pieces("logits", "batch") * CHUNK_TOKENS))
    return next((n for n in range(wanted, most) if most % n == 0), most)


def chunked(x: jax.Array, chunks: int) -> jax.Array:
    """[B, T, ...] as [chunks, B, T / chunks, ...]. A chunk has an equal part of each piece of a split sequence."""
    return rearrange(x, "B (P C T) ... -> C B (P T) ...", C=chunks, P=_seq_pieces(x.shape[1]))


def _seq_pieces(length: int) -> int:
    """Into how many equal pieces the rules split the sequence of the logits; a loop cuts each of them further.

    Rules that split it unequally are refused. For them it is one piece per token, so that nothing is cut.
    """
    found = pieces("logits", "seq")
    return length if length % found else found
