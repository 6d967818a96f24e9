"""Weights that rest in 8 bits, made of weights that were trained while they are read."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, cast

import jax
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Sharding

from gspmd_lm.config import Config, ModelConfig
from gspmd_lm.infer.programs import parameters
from gspmd_lm.model.weights import first_output
from gspmd_lm.sharding.axes import SCALES, STACKED
from gspmd_lm.sharding.quantised import EIGHT_BITS, at_rest

Read = Callable[[Any], Any]  # a tree of jax.ShapeDtypeStruct -> the weights, placed and cast as it says


def without(config: Config) -> Config | None:
    """The config with weights in the dtype in which they are multiplied; None where they do not rest in 8 bits."""
    model = config.model
    if model.weight_dtype not in EIGHT_BITS:
        return None
    return dataclasses.replace(config, model=dataclasses.replace(model, weight_dtype=model.compute_dtype))


def reading(model: ModelConfig, read: Read) -> Read:
    """`read`, which knows nothing of 8 bits, as what reads the weights of `model`, which may rest in them.

    Matrices are read one after the other, and each is quantised before the next one is read: a device never holds more
    than one of them in another dtype.
    """
    return functools.partial(_quantise, model, read) if model.weight_dtype in EIGHT_BITS else read


def _quantise(model: ModelConfig, read: Read, wanted: Any) -> Any:
    named, likes = _flat(parameters(model).named_params), _flat(wanted)
    matrices = {(*path[:-1], SCALES[path[-1]]): path for path in likes if path[-1] in SCALES}  # path -> that of scales
    others = {path: like for path, like in likes.items() if path not in matrices and path not in matrices.values()}
    weights = _flat(read(unflatten_dict(others)))
    for path, scales in matrices.items():
        like, axes = likes[path], named[path].axes
        source = jax.ShapeDtypeStruct(like.shape, model.compute_dtype, sharding=like.sharding)
        (matrix,) = _flat(read(unflatten_dict({path: source}))).values()
        over = tuple(range(sum(axis in STACKED for axis in axes), first_output(axes)))
        quantise = _program(over, like.dtype, like.sharding, likes[scales].sharding)
        weights[path], weights[scales] = jax.block_until_ready(quantise(matrix))
        matrix.delete()
    return unflatten_dict(weights)


def _flat(tree: Any) -> dict[tuple[str, ...], Any]:
    return cast(Any, flatten_dict(tree))


@functools.lru_cache(maxsize=64)
def _program(over: tuple[int, ...], dtype: Any, values: Sharding, scales: Sharding) -> Any:
    def quantise(matrix: jax.Array) -> tuple[jax.Array, jax.Array]:
        small = at_rest(matrix, over, dtype)
        return small.values, small.scale

    return jax.jit(quantise, out_shardings=(values, scales))
