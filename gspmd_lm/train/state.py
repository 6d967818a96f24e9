"""What a run carries from step to step, and the shape, name and placement of every array in it."""

import dataclasses
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from gspmd_lm.config import Config
from gspmd_lm.kernels.attention import unsupported
from gspmd_lm.model import lora
from gspmd_lm.model.loss import losses
from gspmd_lm.model.transformer import decode, init
from gspmd_lm.placement import Named, Recorder, problems, record
from gspmd_lm.rules import Problem, Rules, check
from gspmd_lm.train import optimizer


class State(NamedTuple):
    """One step's result and the next one's input: arrays, or what stands for them in a tree of shapes or shardings."""

    step: Any  # int32: steps done, which is also the position in the data
    params: Any
    optimizer: Any
    key: Any  # of dropout; folded with the step
    skipped: Any  # int32: steps so far whose loss or gradient was not finite
    skipped_in_a_row: Any


Activations = dict[str, tuple[tuple[str, ...], tuple[int, ...]]]  # name -> logical axes, shape


@dataclasses.dataclass(frozen=True)
class Arrays:
    """The arrays of a state, from shapes alone: nothing is allocated."""

    named_params: Any  # trees of placement.Named
    params: Any  # trees of jax.ShapeDtypeStruct
    named_trained: Any  # the part of the parameters that is trained
    trained: Any
    named_optimizer: Any
    optimizer: Any
    transform: optax.GradientTransformation

    @property
    def parameter_count(self) -> int:
        return _count(self.params)

    @property
    def trained_count(self) -> int:
        return _count(self.trained)


def abstract_batch(config: Config, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
    """The int32 arrays of a batch of `rows` sequences; segment_ids only where documents are kept apart."""
    names = ["tokens", "targets", "positions"] + ["segment_ids"] * (config.data.packing == "documents")
    batch = {name: jax.ShapeDtypeStruct((rows, config.data.seq), jnp.int32) for name in names}
    return batch | {"row": jax.ShapeDtypeStruct((rows,), jnp.int32)}


def arrays(config: Config) -> Arrays:
    """The parameters and the optimizer state of `config`."""
    boxed = jax.eval_shape(lambda: init(config.model, jax.random.key(0)))
    specs = nn.get_partition_spec(boxed)
    params = nn.unbox(boxed)
    named = jax.tree_util.tree_map_with_path(
        lambda path, spec: Named(".".join(key.key for key in path), tuple(spec)), specs
    )
    named_trained, trained = (lora.split(tree, config.model)[1] for tree in (named, params))
    transform = optimizer.build(config.optimizer, config.train.steps, named_trained)
    state = jax.eval_shape(transform.init, trained)
    named_optimizer = optimizer.named_state(state, named_trained, trained)
    return Arrays(named, params, named_trained, trained, named_optimizer, state, transform)


def activations(config: Config, found: Arrays, microbatches: int, rules: Rules) -> Activations:
    """The activations that the model names in one microbatch under `rules`."""
    return recorded(config, found, microbatches, rules).arrays


def recorded(config: Config, found: Arrays, microbatches: int, rules: Rules) -> Recorder:
    def forward(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        x_BTD, table, bias = decode(config.model, params, batch)
        return losses(x_BTD, table, bias, batch["targets"], config.model).loss

    batch = abstract_batch(config, max(config.data.batch // microbatches, 1))
    return record(rules, forward, found.params, batch)


def checked(config: Config, rules: Rules, platform: str) -> tuple[Arrays, list[Problem]]:
    """The arrays of `config`, and the warnings about `rules` for it, before anything is compiled or allocated.

    Raises ShardingError that lists everything that does not fit.
    """
    found = arrays(config)
    whole = config.data.batch % rules.microbatches == 0
    more = problems(
        rules,
        pairs(found.named_params, found.params),
        recorded(config, found, rules.microbatches if whole else 1, rules),
        pairs(found.named_optimizer, found.optimizer),
    )
    if not whole:
        more.append(
            Problem(
                f"tokens: batch={config.data.batch} does not divide into microbatches={rules.microbatches}",
                f"{rules.path}: microbatches: {rules.microbatches}",
                "use a divisor of data.batch",
            )
        )
    kernel = rules.attention[platform]
    if lacking := attention_lacks(kernel, config, rules):
        more.append(
            Problem(
                f"attention: {kernel} cannot do {lacking}",
                f"{rules.path}: attention.{platform}: {kernel}",
                f"set attention.{platform} to xla, or change the config",
            )
        )
    return found, check(more)


def attention_lacks(kernel: str, config: Config, rules: Rules) -> str | None:
    """What training asks of attention that `kernel` cannot do, or None."""
    if kernel == "splash" and (rules.split("rules", "q", "seq") or rules.split("rules", "k", "kv_seq")):
        return "a split sequence (rules for q.seq or k.kv_seq)"
    seq, segments = config.data.seq, config.data.packing == "documents"
    lacking = (unsupported(kernel, kind, seq=seq, segments=segments) for kind in config.model.layer_kinds)
    return next(filter(None, lacking), None)


def _count(tree: Any) -> int:
    return sum(like.size for like in jax.tree.leaves(tree))


def pairs(named: Any, abstract: Any) -> list[tuple[Named, Any]]:
    """The leaves of a tree of Named, each with the leaf of `abstract` that it names."""
    leaves = jax.tree.leaves(named, is_leaf=lambda leaf: isinstance(leaf, Named))
    return list(zip(leaves, jax.tree.leaves(abstract), strict=True))
