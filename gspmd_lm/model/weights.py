"""The weights of a model and products with them; a matrix may have a low-rank adapter."""

import dataclasses
import math
from typing import Any, get_args

import flax.linen as nn
import jax

from gspmd_lm import config
from gspmd_lm.sharding.annotate import Adapted, Weight, parameter, use
from gspmd_lm.sharding.axes import ADAPTERS
from gspmd_lm.sharding.partial_sums import einsum, read

LOW_RANK = "low_rank: batch seq rank"
LOOPS = [(name,) for name in get_args(config.StackName)]


def weight(
    module: nn.Module,
    name: str,
    axes: str,
    shape: tuple[int, ...],
    cfg: config.Model,
    init: nn.initializers.Initializer,
) -> Weight:
    """A parameter of `module`, with one logical axis per dimension. A model with adapters trains only its adapters."""
    found = parameter(module, name, axes, shape, init, cfg.weight_dtype, cfg.compute_dtype)
    frozen, scanned = cfg.lora is not None and name not in ADAPTERS, module.path[:1] in LOOPS
    array = jax.lax.stop_gradient(found.array) if frozen else found.array
    return dataclasses.replace(found, array=array, frozen=frozen, scanned=scanned)


def matrix(module: nn.Module, name: str, axes: str, shape: tuple[int, ...], cfg: config.Model) -> Weight:
    """A matrix drawn from a normal distribution. Matrices that write to the residual stream start smaller in a deeper
    model."""
    shrink = math.sqrt(2 * cfg.layers) if name in ("wo", "w_down", "linear_out", "laurel_out") else 1.0
    return weight(module, name, axes, shape, cfg, nn.initializers.normal(cfg.init_std / shrink))


def adapted(module: nn.Module, weight_: Weight, cfg: config.Model) -> Adapted:
    """The matrix, with an adapter if the config gives it one. An adapter adds nothing at first.

    Adapters rest in float32, because a step changes them by less than bfloat16 can resolve.
    """
    name, names, sizes = weight_.path.rpartition(".")[2], weight_.axes, weight_.array.shape
    lora, cfg = cfg.lora, dataclasses.replace(cfg, weight_dtype="float32")
    if lora is None or name not in lora.targets:
        return Adapted(weight_)
    first, rank = names.count("expert"), lora.rank  # each expert has an adapter of its own
    inner = first + 1 if names[first] == "embed" else len(names) - 1  # where the weight's outputs begin
    start, zeros = nn.initializers.normal(math.prod(sizes[first:inner]) ** -0.5), nn.initializers.zeros
    a = weight(module, f"{name}_a", " ".join((*names[:inner], "rank")), (*sizes[:inner], rank), cfg, start)
    b_names, b_sizes = (*names[:first], "rank", *names[inner:]), (*sizes[:first], rank, *sizes[inner:])
    b = weight(module, f"{name}_b", " ".join(b_names), b_sizes, cfg, zeros)
    return Adapted(weight_, (a, b), lora.scale)


def project(equation: str, x: Any, matrix: Adapted) -> Any:
    """The einsum of `x` and a matrix w; with an adapter, x w + scale (x a) b."""
    y = einsum(equation, x, matrix.weight)
    if not matrix.adapter:
        return y
    (outer, w), out = equation.partition("->")[0].split(","), equation.partition("->")[2]
    summed = "".join(letter for letter in w if letter in outer)
    a, b = matrix.adapter
    low_BTR = matrix.scale * einsum(f"{outer},{summed}R->BTR", x, a)
    return y + einsum(f"BTR,R{w.replace(summed, '')}->{out}", read(low_BTR, LOW_RANK, LOW_RANK), b)


def bias(module: nn.Module, name: str, axes: str, shape: tuple[int, ...], cfg: config.Model) -> jax.Array:
    """A bias that starts at zero, ready to be added."""
    return use(weight(module, name, axes, shape, cfg, nn.initializers.zeros))
