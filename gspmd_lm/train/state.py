"""What a run carries from step to step, and the shape, name and placement of every array in it."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gspmd_lm import arrays as model_arrays
from gspmd_lm.arrays import Activations, Arrays, attention_problems
from gspmd_lm.config import Config
from gspmd_lm.model import lora
from gspmd_lm.model.loss import losses
from gspmd_lm.model.transformer import decode, init
from gspmd_lm.placement import Recorder, record
from gspmd_lm.rules import Problem, Rules
from gspmd_lm.train import optimizer


class State(NamedTuple):
    """One step's result and the next one's input: arrays, or what stands for them in a tree of shapes or shardings."""

    step: Any  # int32: steps done, which is also the position in the data
    params: Any
    optimizer: Any
    key: Any  # of dropout; folded with the step
    skipped: Any  # int32: steps so far whose loss or gradient was not finite
    skipped_in_a_row: Any


def abstract_batch(config: Config, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
    """The int32 arrays of a batch of `rows` sequences; segment_ids only where documents are kept apart."""
    names = ["tokens", "targets", "positions"] + ["segment_ids"] * (config.data.packing == "documents")
    batch = {name: jax.ShapeDtypeStruct((rows, config.data.seq), jnp.int32) for name in names}
    return batch | {"row": jax.ShapeDtypeStruct((rows,), jnp.int32)}


# (model, key) -> boxed parameters. A run asks for their shapes and then for their values; jax traces them once.
initial = jax.jit(init, static_argnums=0)


def arrays(config: Config) -> Arrays:
    """The parameters and the optimizer state of `config`."""
    model = config.model
    found = model_arrays.arrays(functools.partial(initial, model), lambda params: lora.split(params, model)[1])
    transform = optimizer.build(config.optimizer, config.train.steps, found.named_trained)
    state = jax.eval_shape(transform.init, found.trained)
    named = optimizer.named_state(state, found.named_trained, found.trained)
    return dataclasses.replace(found, named_optimizer=named, optimizer=state, transform=transform)


def activations(config: Config, found: Arrays, microbatches: int, rules: Rules) -> Activations:
    """The activations that the model names in one microbatch under `rules`."""
    return _recorded(config, found, microbatches, rules).arrays


def _recorded(config: Config, found: Arrays, microbatches: int, rules: Rules) -> Recorder:
    def forward(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        x_BTD, table, bias = decode(config.model, params, batch)
        return losses(x_BTD, table, bias, batch["targets"], config.model).loss

    batch = abstract_batch(config, max(config.data.batch // microbatches, 1))
    return record(rules, forward, found.params, batch)


def checked(config: Config, rules: Rules, platform: str) -> tuple[Arrays, list[Problem]]:
    """The arrays of `config`, and the warnings about `rules` for it, before anything is compiled or allocated.

    Raises ShardingError that lists everything that does not fit.
    """
    found, data = arrays(config), config.data
    whole = data.batch % rules.microbatches == 0
    more = attention_problems(config, rules, platform, data.seq, segments=data.packing == "documents")
    if not whole:
        more.insert(
            0,
            Problem(
                f"tokens: batch={data.batch} does not divide into microbatches={rules.microbatches}",
                f"{rules.path}: microbatches: {rules.microbatches}",
                "use a divisor of data.batch",
            ),
        )
    recorded = _recorded(config, found, rules.microbatches if whole else 1, rules)
    return found, model_arrays.checked(found, rules, [recorded], more)
