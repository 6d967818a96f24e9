"""A config as a task: the functions that the step is made of, and the arrays of a batch."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from gspmd_lm.config import Config, ModelConfig
from gspmd_lm.model import lora
from gspmd_lm.model.families import family, init
from gspmd_lm.model.loss import Sums
from gspmd_lm.model.moe import balance_experts
from gspmd_lm.model.objectives import Input, Shape
from gspmd_lm.program.task import Task
from gspmd_lm.sharding.axes import DECODER
from gspmd_lm.train import optimizer

# (model, key) -> boxed parameters. A run asks for their shapes and then for their values; jax traces them once.
initial = jax.jit(init, static_argnums=0)


def task(config: Config | Task) -> Task:
    """The task that a config describes, which has it as its `config`. A task is returned as it is.

    What comes after asks `task.config`, which a model of one's own does not have.
    """
    return config if isinstance(config, Task) else _task(config)


@functools.lru_cache(maxsize=8)  # one task for each config: whatever is cached for the task is computed once
def _task(config: Config) -> Task:
    model, data, chosen = config.model, config.data, family(config.model)
    module, objective = chosen.module(model), chosen.objective(config)
    decoder = Task(
        name=config.name,
        vocabulary=DECODER,
        inputs=inputs(config),
        init=functools.partial(initial, model),
        optimizer=functools.partial(_optimizer, config),
        partition=functools.partial(lora.partition, cfg=model),
        moved=functools.partial(_move_balance, model) if model.balance_bias and not model.lora else None,
        random=bool(model.dropout),
        seed=config.train.seed,
        matmul_precision=model.matmul_precision,
        compute_dtype=model.compute_dtype,
        float32=("logits",),
        tokens=data.batch * (data.seq + config.source_seq),
        train=config.train,
        sums=functools.partial(objective.sums, module),
        count=objective.count,
        evaluate=functools.partial(objective.evaluate, module),
        metrics=functools.partial(_metrics, config, objective.means),
        scores=objective.scores,
    )
    object.__setattr__(decoder, "config", config)
    return decoder


def inputs(config: Config) -> Mapping[str, Input]:
    """The arrays of a batch: those that the module reads, and those of the objective."""
    chosen, shape = family(config.model), Shape.for_training(config)
    arrays = chosen.inputs(config.model, shape) | chosen.objective(config).inputs(shape)
    return arrays | {"row": arrays.pop("row")}


def _optimizer(config: Config, named: Any) -> optax.GradientTransformation:
    return optimizer.build_optimizer(config.optimizer, config.train.steps, named)


def _move_balance(model: ModelConfig, frozen: Any, sums: Sums) -> Any:
    return balance_experts(frozen, sums.load_LC, model)


def _metrics(config: Config, means: Any, sums: Any, count: jax.Array, step: jax.Array) -> dict[str, jax.Array]:
    rate = optimizer.schedule(config.optimizer, config.train.steps)
    return means(sums, count) | {"learning_rate": jnp.asarray(rate(step), jnp.float32)}
