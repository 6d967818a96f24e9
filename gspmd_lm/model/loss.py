"""The prediction of tokens: cross-entropy in chunks of the sequence, without ever holding all logits.

The vocabulary may be split. The gradients are computed in the forward pass (as in arXiv 2410.10989): a chunk's logits
live only while the chunk's share of the gradients is computed. The table is put in use once, before the loop. Its
gradient is accumulated as one partial sum per shard of the batch, and reduced once, after the loop.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gspmd_lm import config
from gspmd_lm.model.ends import table_specs
from gspmd_lm.model.kernels.context import zigzag_sharded
from gspmd_lm.model.objectives import Batch, Objective, count_targets, target_inputs
from gspmd_lm.sharding import chunks
from gspmd_lm.sharding.annotate import Weight, in_use, like, platform, shard, use
from gspmd_lm.sharding.matmuls import einsum
from gspmd_lm.sharding.op_names import LOSS, scope
from gspmd_lm.sharding.partial_sums import gradient, reduced

LOGITS = "logits: batch seq vocab"
CHUNK_TOKENS = 1024  # per device; enough to keep a matrix unit busy, 0.5 GB of float32 logits at V 128256
# cuBLAS computes nothing while it adds a chunk's gradients to those of the table. On one H100, a step of 4 layers of
# Llama 3 8B took 332 ms in chunks of 1,024 tokens, 318 of 2,048 and 315 of 4,096, which needed 0.6 GB more.
GPU_CHUNK_TOKENS = 2048


class Sums(NamedTuple):
    """Sums over target tokens, float32 scalars. `loss` is cross-entropy and what is added to it.

    The losses of routers are added later, and so are the loads of experts: tokens of each expert, in each layer. So are
    the rounds that tokens travel in to their experts: a mean over layers, of each target token.
    """

    loss: jax.Array
    cross_entropy: jax.Array
    correct: jax.Array
    load_LC: Any = ()
    expert_rounds: Any = ()


def losses(
    x_BTD: jax.Array, table: Weight, bias: Weight | None, targets_BT: jax.Array, cfg: config.ModelConfig
) -> Sums:
    """Sums of the losses of all tokens whose target is not negative.

    x_BTD: the output of the decoder. table: [V, D]. bias: [V]. targets_BT: int32, -1 where there is no target.
    Logits, softmax and sums are float32. Rows of padding (cfg.vocab and up) have probability 0.
    """

    of = scope("of", LOSS)

    def scan_chunks(arrays, gradients):
        x_BTD, table_VD, *bias_V = arrays
        held = [table.holding(table_VD), *([bias.holding(*bias_V)] if bias else [])]
        return _scan(x_BTD, held, targets_BT, cfg, gradients)

    @jax.custom_vjp
    @of
    def call(*arrays):
        return scan_chunks(arrays, gradients=False)[0]

    @of
    def forward(*arrays):
        return scan_chunks(arrays, gradients=True)

    @of
    def backward(gradients, cotangent):
        return jax.tree.map(lambda g: (g * cotangent.loss).astype(g.dtype), gradients)

    call.defvjp(forward, backward)
    return call(x_BTD, table.array, *([bias.array] if bias else []))


def _scan(x_BTD, weights, targets_BT, cfg, gradients):
    """The sums and, if `gradients`, the gradients of sums.loss with respect to x_BTD and `weights` (None if frozen).

    A chunk's share of the gradients is computed right after its logits, so that these need not be kept.
    """
    count = chunk_count(*x_BTD.shape[:2])
    reduced_spec, gathered_spec = table_specs(cfg)
    x_CBTD = chunks.split(shard(like(x_BTD, reduced_spec), gathered_spec), count)
    inputs = x_CBTD, chunks.split(targets_BT, count)
    table, *bias = map(in_use, weights)

    def chunk(inputs):
        x_BTD, targets_BT = inputs
        raw_BTV = _raw_logits(x_BTD, table.array, *(b.array for b in bias))
        loss, back, sums = jax.vjp(lambda raw_BTV: _sums(raw_BTV, targets_BT, cfg), raw_BTV, has_aux=True)
        if not gradients:
            return (sums, ()), None
        (draw_BTV,) = back(jnp.ones_like(loss))
        small_BTV = shard(draw_BTV.astype(x_BTD.dtype), LOGITS)
        dweights = []
        if not table.frozen:
            dweights.append(einsum("BTV,BTD->VD", small_BTV, x_BTD))
            dweights += [einsum("BTV,BT->V", draw_BTV, jnp.ones(targets_BT.shape)) for _ in bias]
        return (sums, dweights), einsum("BTV,VD->BTD", small_BTV, table)

    def add(total, inputs):
        new, dx = chunk(inputs)
        return jax.tree.map(jnp.add, total, new), dx

    like_, _ = jax.eval_shape(chunk, jax.tree.map(lambda x: x[0], inputs))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), like_)
    (sums, dweights), dx_chunks = jax.lax.scan(add, zeros, inputs)
    if not gradients:
        return sums, None
    dx_BTD = reduced(jax.tree.map(chunks.join, dx_chunks), gathered_spec, reduced_spec)
    if not dweights:
        return sums, (dx_BTD, *(None for _ in weights))
    # The backward pass begins when the table's gradient is reduced: partial sums of the whole table would otherwise
    # be held until the optimizer asks for them.
    return sums, jax.lax.optimization_barrier((dx_BTD, *map(gradient, dweights, weights)))


def _sums(raw_BTV: jax.Array, targets_BT: jax.Array, cfg: config.ModelConfig) -> tuple[jax.Array, Sums]:
    """The loss and all sums of one chunk, from its raw logits."""
    has_target_BT = targets_BT >= 0
    target_BT, highest_BT, log_z_BT = target_logits(_finish_logits(raw_BTV, cfg), targets_BT)
    cross_entropy_BT = jnp.where(has_target_BT, log_z_BT - target_BT, 0)
    loss = (cross_entropy_BT + jnp.where(has_target_BT, cfg.logits.z_loss * log_z_BT**2, 0)).sum()
    correct = (has_target_BT & (target_BT >= highest_BT)).sum(dtype=jnp.float32)
    return loss, Sums(loss, cross_entropy_BT.sum(), correct)


def target_logits(logits_BTV: jax.Array, targets_BT: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The logit of each target, the highest logit, and the logarithm of the sum of all exp(logits), each [B, T]."""
    highest_BT = jax.lax.stop_gradient(logits_BTV.max(-1))
    log_z_BT = highest_BT + jnp.log(jnp.exp(logits_BTV - highest_BT[..., None]).sum(-1))
    # Comparing with an iota keeps the vocabulary split; take_along_axis would gather it.
    target_BT = jnp.where(jnp.arange(logits_BTV.shape[-1]) == targets_BT[..., None], logits_BTV, 0).sum(-1)
    return target_BT, highest_BT, log_z_BT


def logits(x_BTD: jax.Array, table: Weight, bias: Weight | None, cfg: config.ModelConfig) -> jax.Array:
    """The logits of the decoder's output, [B, T, V] in float32; -inf for rows of padding (cfg.vocab and up)."""
    with scope("of", "logits"):
        reduced_spec, gathered_spec = table_specs(cfg)
        x_BTD = shard(like(x_BTD, reduced_spec), gathered_spec)
        return logits_of(x_BTD, use(table), None if bias is None else use(bias), cfg)


def logits_of(x_BTD: jax.Array, table_VD: jax.Array, bias_V: jax.Array | None, cfg: config.ModelConfig) -> jax.Array:
    """`logits` of hidden states and a table that are ready to be multiplied."""
    return _finish_logits(_raw_logits(x_BTD, table_VD, bias_V), cfg)


def _raw_logits(x_BTD: jax.Array, table_VD: jax.Array, bias_V: jax.Array | None = None) -> jax.Array:
    raw_BTV = jnp.einsum("BTD,VD->BTV", x_BTD, table_VD, preferred_element_type=jnp.float32)
    return shard(raw_BTV if bias_V is None else raw_BTV + bias_V, LOGITS)


def _finish_logits(raw_BTV: jax.Array, cfg: config.ModelConfig) -> jax.Array:
    """The logits, scaled and capped as the model has it, and -inf for rows of padding."""
    cap, scaled_BTV = cfg.logits.softcap, raw_BTV * cfg.logits.scale if cfg.logits.scale != 1 else raw_BTV
    capped_BTV = cap * jnp.tanh(scaled_BTV / cap) if cap else scaled_BTV
    if cfg.vocab == cfg.vocab_rows:
        return capped_BTV
    return jnp.where(jnp.arange(cfg.vocab_rows) < cfg.vocab, capped_BTV, -jnp.inf)


def chunk_count(rows: int, length: int) -> int:
    """The number of chunks of the loss: see `chunks.count`."""
    return chunks.count(rows, length, GPU_CHUNK_TOKENS if platform() == "gpu" else CHUNK_TOKENS)


# The objective: next-token or masked-token prediction


def _sums_of_tokens(module: Any, params: Any, batch: Batch, key: jax.Array | None) -> Sums:
    cfg = module.cfg
    batch = zigzag_sharded(dict(batch), cfg.attention.mask)
    x_BTD, table, bias, _, routed = module.apply({"params": params}, batch, key)
    sums = losses(x_BTD, table, bias, batch["targets"], cfg)
    if routed is None:
        return sums
    targets_B = (batch["targets"] >= 0).sum(1, dtype=jnp.float32)
    penalty, rounds = ((of_LB.mean(0) * targets_B).sum() for of_LB in (routed.penalty_B, routed.rounds_B))
    return sums._replace(loss=sums.loss + penalty, load_LC=routed.load_C, expert_rounds=rounds)


def _totals_of_tokens(module: Any, params: Any, batch: Batch) -> dict[str, jax.Array]:
    sums = _sums_of_tokens(module, params, batch, None)
    return {"cross_entropy": sums.cross_entropy, "correct": sums.correct, "target_tokens": count_targets(batch)}


def _means_of_tokens(sums: Sums, targets: jax.Array) -> dict[str, jax.Array]:
    means = {
        "loss": sums.loss / targets,
        "cross_entropy": sums.cross_entropy / targets,
        "accuracy": sums.correct / targets,
        "target_tokens": targets,
    }
    if not isinstance(sums.load_LC, tuple):
        means["expert_imbalance"] = (sums.load_LC.max(1) / sums.load_LC.mean(1)).max()
        means["expert_rounds"] = sums.expert_rounds / targets
    return means


def _scores_of_tokens(totals: Mapping[str, float]) -> dict[str, float]:
    targets = totals["target_tokens"]
    loss = totals["cross_entropy"] / targets
    return {
        "eval_loss": loss,
        "eval_perplexity": float(np.exp(loss)),
        "eval_accuracy": totals["correct"] / targets,
        "eval_tokens": targets,
    }


TOKENS = Objective(
    target_inputs, _sums_of_tokens, count_targets, _totals_of_tokens, _means_of_tokens, _scores_of_tokens
)
