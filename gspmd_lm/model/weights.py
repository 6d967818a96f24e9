"""The weights of a model."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, get_args

import flax.linen as nn
import jax
import jax.numpy as jnp

from gspmd_lm import config
from gspmd_lm.sharding.annotate import Weight, parameter, use
from gspmd_lm.sharding.axes import ADAPTERS, FIXED, NARROW, QUANTISED, STACKED, TO_RESIDUAL
from gspmd_lm.sharding.quantised import EIGHT_BITS, Quantised

LOOPS = {*get_args(config.StackName)}


def weight(
    module: nn.Module,
    name: str,
    axes: str,
    shape: tuple[int, ...],
    cfg: config.ModelConfig,
    init: nn.initializers.Initializer,
) -> Weight:
    """A parameter of `module`, with one logical axis per dimension. A model with adapters trains only its adapters, and
    none trains its frozen weights.

    A matrix of a block that rests in 8 bits has a second parameter, its scales.
    """
    names = tuple(axes.split())
    multiplied, at_rest = name in QUANTISED, EIGHT_BITS.get(cfg.weight_dtype)
    if at_rest and multiplied:
        param = _at_rest_in_8_bits(module, name, names, shape, at_rest, cfg)
    else:
        dtype = "float32" if at_rest else cfg.weight_dtype
        param = parameter(module, name, axes, shape, init, dtype, cfg.compute_dtype)
    frozen = name in FIXED or (cfg.lora is not None and name not in ADAPTERS)
    frozen |= (*module.path, name)[0] in cfg.frozen
    scanned = bool({*module.path} & LOOPS)
    array = jax.lax.stop_gradient(param.array) if frozen else param.array
    eight_bits = cfg.matmul_dtype if multiplied else None
    return dataclasses.replace(param, array=array, frozen=frozen, scanned=scanned, matmul_dtype=eight_bits or "")


def _at_rest_in_8_bits(
    module: nn.Module, name: str, axes: tuple[str, ...], shape: tuple[int, ...], dtype: Any, cfg: config.ModelConfig
) -> Weight:
    """A matrix of 8 bits and its scales. They are made of weights that were trained, and never drawn."""
    first, at, zeros = sum(axis in STACKED for axis in axes), first_output(axes), nn.initializers.zeros
    values = parameter(module, name, " ".join(axes), shape, zeros, dtype, cfg.compute_dtype)
    kept = " ".join((*axes[:first], *axes[at:]))
    scale = parameter(module, f"{name}_scale", kept, (*shape[:first], *shape[at:]), zeros)
    over = tuple(range(first - len(axes), at - len(axes)))
    return values.holding(Quantised(values.array, scale.array, over, jnp.dtype(cfg.compute_dtype)))


def first_output(axes: Sequence[str]) -> int:
    """At which dimension the outputs of a matrix begin; those before it are summed over, but for stacked ones."""
    first = sum(axis in STACKED for axis in axes)
    return first + 1 if axes[first] in NARROW else len(axes) - 1


def matrix(module: nn.Module, name: str, axes: str, shape: tuple[int, ...], cfg: config.ModelConfig) -> Weight:
    """A matrix drawn from a normal distribution. Matrices that write to the residual stream start smaller in a deeper
    model."""
    shrink = math.sqrt(2 * cfg.layers) if name in TO_RESIDUAL else 1.0
    return weight(module, name, axes, shape, cfg, nn.initializers.normal(cfg.init_std / shrink))


def bias(module: nn.Module, name: str, axes: str, shape: tuple[int, ...], cfg: config.ModelConfig) -> jax.Array:
    """A bias that starts at zero, ready to be added."""
    return use(weight(module, name, axes, shape, cfg, nn.initializers.zeros))
