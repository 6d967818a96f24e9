"""Low-rank adapters, and trees of parameters with them: by themselves, joined with the weights, or merged."""

import dataclasses
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from gspmd_lm import config
from gspmd_lm.model.weights import first_output, weight
from gspmd_lm.sharding.annotate import Adapted, Weight
from gspmd_lm.sharding.axes import ADAPTERS, BALANCE_BIAS, FIXED

Tree = dict[str, Any]  # nested, with anything for leaves


def adapt(cfg: config.ModelConfig, module: nn.Module, weight_: Weight) -> Adapted:
    """The matrix, with an adapter if it is one of `lora.targets`. An adapter adds nothing at first.

    Adapters rest in float32, because a step changes them by less than bfloat16 can resolve.
    """
    name, names, sizes = weight_.path.rpartition(".")[2], weight_.axes, weight_.array.shape
    lora = cfg.lora
    assert lora
    if name not in lora.targets:
        return Adapted(weight_)
    cfg = dataclasses.replace(cfg, weight_dtype="float32")
    first, rank, inner = names.count("expert"), lora.rank, first_output(names)  # each expert has one of its own
    start, zeros = nn.initializers.normal(math.prod(sizes[first:inner]) ** -0.5), nn.initializers.zeros
    a = weight(module, f"{name}_a", " ".join((*names[:inner], "rank")), (*sizes[:inner], rank), cfg, start)
    b_names, b_sizes = (*names[:first], "rank", *names[inner:]), (*sizes[:first], rank, *sizes[inner:])
    b = weight(module, f"{name}_b", " ".join(b_names), b_sizes, cfg, zeros)
    return Adapted(weight_, (a, b), lora.scale)


def adapters(params: Tree) -> Tree:
    """The adapters alone."""
    return unflatten_dict({path: leaf for path, leaf in _flat(params).items() if path[-1] in ADAPTERS})


def weights(params: Tree) -> Tree:
    """Everything but the adapters."""
    return unflatten_dict({path: leaf for path, leaf in _flat(params).items() if path[-1] not in ADAPTERS})


def join_trees(left: Tree, right: Tree) -> Tree:
    """One tree of two. Where both have a leaf, it is the leaf of `right`."""
    return unflatten_dict(_flat(left) | _flat(right))


def partition(params: Tree, cfg: config.ModelConfig) -> tuple[Tree, Tree]:
    """The parameters that gradients do not change, and the others. A model with adapters trains only them."""
    if cfg.lora:
        return weights(params), adapters(params)
    flat = _flat(params)
    fixed = {path for path in flat if path[-1] in (BALANCE_BIAS, *FIXED) or path[0] in cfg.frozen}
    frozen, trained = ({path: flat[path] for path in flat if (path in fixed) is kind} for kind in (True, False))
    return unflatten_dict(frozen), unflatten_dict(trained)


def merge_adapters(params: Tree, cfg: config.ModelConfig) -> tuple[Tree, config.ModelConfig]:
    """Parameters without adapters that compute the same, and their model.

    Each adapter's product is added to its weight in float32. The sum is cast to the weight's dtype.
    """
    if not cfg.lora:
        return params, cfg
    flat, scale = _flat(params), cfg.lora.scale

    def sum_of(path: tuple[str, ...], weight: jax.Array) -> jax.Array:
        *module, name = path
        if (*module, f"{name}_a") not in flat:
            return weight
        a, b = (flat[*module, f"{name}_{part}"].astype(jnp.float32) for part in "ab")
        layers = a.shape[: a.ndim + b.ndim - 2 - weight.ndim]  # () if weights are not stacked
        a, b = a.reshape(*layers, -1, a.shape[-1]), b.reshape(*layers, a.shape[-1], -1)
        added = scale * jnp.matmul(a, b, precision="highest").reshape(weight.shape)
        return (weight.astype(jnp.float32) + added).astype(weight.dtype)

    sums = {path: sum_of(path, weight) for path, weight in _flat(weights(params)).items()}
    return unflatten_dict(sums), dataclasses.replace(cfg, lora=None)


def _flat(tree: Tree) -> dict[tuple[str, ...], Any]:
    return flatten_dict(tree)
