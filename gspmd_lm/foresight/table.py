"""The arrays of a layout: how each is split, and the bytes of it that each device holds. Counted from shapes."""

import collections
import dataclasses
from collections.abc import Collection, Iterator
from typing import Any

import jax

from gspmd_lm.config import Config
from gspmd_lm.program.task import Task
from gspmd_lm.sharding.placement import Named
from gspmd_lm.sharding.rules import Rules
from gspmd_lm.sharding.shapes import Activations, Arrays, pairs, place_array
from gspmd_lm.train import decoder

Spec = tuple[tuple[str, ...], ...]


@dataclasses.dataclass(frozen=True)
class PlacedState:
    """The optimizer state of one weight. Gradients are split as the weight's state is."""

    split: Spec  # of each dimension of the weight
    bytes_per_device: int  # of all arrays of the state that belong to the weight


@dataclasses.dataclass(frozen=True)
class PlacedArray:
    """One array of a layout. A Spec has the mesh axes that split each dimension, the outermost first."""

    path: str
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    at_rest: Spec | None  # None for an activation
    in_use: Spec  # of a weight that the model does not place for use: as it rests
    bytes_per_device: int  # at rest; for an activation, in use
    dtype: str = ""  # at rest; for an activation, in use
    optimizer: PlacedState | None = None  # None for an activation, and for a weight that is not trained


def rows(
    config: Config | Task, rules: Rules, arrays: Arrays, named: Activations, used: Collection[str] | None = None
) -> Iterator[PlacedArray]:
    """Every weight, and the activations `named`. `used`: paths of the weights that are placed for use; None: all."""
    task = decoder.task(config)
    dtypes = {spec.array: task.inputs[name].dtype for name, spec in task.specs().items()}
    dtypes |= dict.fromkeys(task.float32, "float32")
    trained = {leaf.path for leaf, _ in pairs(arrays.named_trained, arrays.trained)}
    state_bytes = collections.defaultdict[str, int](int)
    for leaf, like in pairs(arrays.named_optimizer, arrays.optimizer):
        state_bytes[leaf.path] += split_and_size(rules, "optimizer", leaf, like)[1]
    for leaf, like in pairs(arrays.named_params, arrays.params):
        at_rest, size = split_and_size(rules, "weights", leaf, like)
        placed = used is None or leaf.path in used
        in_use = rules.resolve("rules", leaf.path, leaf.axes, like.shape)[0] if placed else at_rest
        state = None
        if leaf.path in trained:
            state = PlacedState(split_and_size(rules, "optimizer", leaf, like)[0], state_bytes[leaf.path])
        yield PlacedArray(leaf.path, leaf.axes, like.shape, at_rest, in_use, size, str(like.dtype), state)
    for name, (axes, shape) in named.items():
        like = jax.ShapeDtypeStruct(shape, dtypes.get(name, task.compute_dtype))
        placed = split_and_size(rules, "rules", Named(name, axes), like)
        yield PlacedArray(name, axes, shape, None, *placed, str(like.dtype))


def split_and_size(rules: Rules, table: str, leaf: Named, like: Any) -> tuple[Spec, int]:
    """The mesh axes that split each dimension of an array under `table`, and its bytes on each device."""
    spec, size = place_array(rules, table, leaf, like)
    return spec, int(size)
