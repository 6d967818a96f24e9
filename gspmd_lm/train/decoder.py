"""The decoder as a task: the functions of a config that the step is made of."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gspmd_lm.config import Config, ModelConfig
from gspmd_lm.model import lora
from gspmd_lm.model.kernels.context import zigzag_sharded
from gspmd_lm.model.loss import Sums, losses
from gspmd_lm.model.moe import balanced
from gspmd_lm.model.task import Batch, Input, Task
from gspmd_lm.model.transformer import decode_routed, init
from gspmd_lm.sharding.axes import DECODER
from gspmd_lm.train import optimizer

# (model, key) -> boxed parameters. A run asks for their shapes and then for their values; jax traces them once.
initial = jax.jit(init, static_argnums=0)


def task(config: Config | Task) -> Task:
    """The task that a config describes, which has it as its `config`. A task is returned as it is.

    What comes after asks `task.config`, which a model of one's own does not have.
    """
    if isinstance(config, Task):
        return config
    model, data = config.model, config.data
    decoder = Task(
        name=config.name,
        vocabulary=DECODER,
        inputs=inputs(config),
        init=functools.partial(initial, model),
        sums=functools.partial(_sums, model),
        optimizer=functools.partial(_optimizer, config),
        count=_targets,
        evaluate=functools.partial(_evaluate, model),
        metrics=functools.partial(_metrics, config),
        scores=_scores,
        partition=functools.partial(lora.partition, cfg=model),
        moved=functools.partial(_moved, model) if model.balance_bias and not model.lora else None,
        random=bool(model.dropout),
        seed=config.train.seed,
        matmul_precision=model.matmul_precision,
        compute_dtype=model.compute_dtype,
        float32=("logits",),
        tokens=data.batch * data.seq,
        train=config.train,
    )
    object.__setattr__(decoder, "config", config)
    return decoder


def inputs(config: Config) -> Mapping[str, Input]:
    """The int32 arrays of a batch, with segment_ids only if documents are kept apart."""
    data = config.data
    names = ["tokens", "targets", "positions"] + ["segment_ids"] * (data.packing == "documents")
    arrays = {name: Input((data.batch, data.seq), "int32", "tokens: batch seq") for name in names}
    return arrays | {"row": Input((data.batch,), "int32", "tokens: batch")}


def _optimizer(config: Config, named: Any) -> optax.GradientTransformation:
    return optimizer.build_optimizer(config.optimizer, config.train.steps, named)


def _sums(model: ModelConfig, params: Any, batch: Batch, key: jax.Array | None) -> Sums:
    batch = zigzag_sharded(dict(batch))
    x_BTD, table, bias, routed = decode_routed(model, params, batch, key)
    sums = losses(x_BTD, table, bias, batch["targets"], model)
    if routed is None:
        return sums
    targets_B = (batch["targets"] >= 0).sum(1, dtype=jnp.float32)
    penalty = (routed.penalty_B.mean(0) * targets_B).sum()
    return sums._replace(loss=sums.loss + penalty, load_LC=routed.load_C)


def _moved(model: ModelConfig, frozen: Any, sums: Sums) -> Any:
    return balanced(frozen, sums.load_LC, model)


def _targets(batch: Batch) -> jax.Array:
    return (batch["targets"] >= 0).sum(dtype=jnp.float32)


def _evaluate(model: ModelConfig, params: Any, batch: Batch) -> dict[str, jax.Array]:
    sums = _sums(model, params, batch, None)
    return {"cross_entropy": sums.cross_entropy, "correct": sums.correct, "target_tokens": _targets(batch)}


def _scores(totals: Mapping[str, float]) -> dict[str, float]:
    targets = totals["target_tokens"]
    loss = totals["cross_entropy"] / targets
    return {
        "eval_loss": loss,
        "eval_perplexity": float(np.exp(loss)),
        "eval_accuracy": totals["correct"] / targets,
        "eval_tokens": targets,
    }


def _metrics(config: Config, sums: Sums, targets: jax.Array, step: jax.Array) -> dict[str, jax.Array]:
    means = {
        "loss": sums.loss / targets,
        "cross_entropy": sums.cross_entropy / targets,
        "accuracy": sums.correct / targets,
    }
    if config.model.experts:
        means["expert_imbalance"] = (sums.load_LC.max(1) / sums.load_LC.mean(1)).max()
    rate = optimizer.schedule(config.optimizer, config.train.steps)
    return means | {"learning_rate": jnp.asarray(rate(step), jnp.float32), "target_tokens": targets}
