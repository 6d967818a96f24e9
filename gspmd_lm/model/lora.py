"""Trees of parameters with adapters: the adapters by themselves, joined with the weights, or merged into them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from gspmd_lm import config
from gspmd_lm.sharding.axes import ADAPTERS, BALANCE_BIAS, FIXED

Tree = dict[str, Any]  # nested, with anything for leaves


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
