"""The floor of a model of one's own: the FLOPs of its traced step, and the bytes of its weights and optimizer.

What a split of the model must send is not known: `communication_bytes` is None. Activations that are kept for the
backward pass are not counted among the bytes either, so that the floor stays one.
"""

from typing import Any

import jax
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.extend import core

from gspmd_lm.foresight import traced
from gspmd_lm.foresight.floor import Floor, updated_bytes
from gspmd_lm.hardware.chips import Chip
from gspmd_lm.model.task import Task
from gspmd_lm.sharding.rules import Rules
from gspmd_lm.sharding.shapes import Arrays


def floor(task: Task, rules: Rules, arrays: Arrays, chip: Chip | None) -> Floor:
    """The floor of one train step of `task` under `rules`, filled and checked; `chip` is None for simulated devices.

    FLOPs are shared out evenly over all devices, however few of them the rules use.
    """
    flops = flops_of_step(task, arrays) / rules.devices
    return Floor(
        compute_s=chip and flops / chip.peak_bf16_flops_per_s,
        memory_s=chip and updated_bytes(rules, arrays) / chip.hbm_bytes_per_s,
        communication_bytes=None,
        communication_by_axis={},
        flops=flops,
        dtype=task.compute_dtype,
    )


def flops_of_step(task: Task, arrays: Arrays) -> float:
    """What the products and convolutions of the loss and its gradients take, as they are traced for one device."""

    def loss(trained: Any, params: Any, batch: Any, key: Any) -> jax.Array:
        joined = unflatten_dict(flatten_dict(params) | flatten_dict(trained))
        return task.sums(joined, batch, key if task.random else None).loss

    key = jax.eval_shape(jax.random.key, 0)
    program = jax.make_jaxpr(jax.grad(loss))(arrays.trained, arrays.params, task.batch(task.rows), key)
    return flops(program.jaxpr)


def flops(jaxpr: Any) -> float:
    """2 for each multiplication and addition of products and convolutions. A loop of unknown length counts once."""
    total = 0.0
    for equation in jaxpr.eqns:
        primitive, params = equation.primitive.name, equation.params
        total += traced.flops(equation)
        inner = [flops(one) for one in _jaxprs(params)]
        if primitive == "cond":
            total += max(inner)
        else:
            total += sum(inner) * (params["length"] if primitive == "scan" else 1)
    return total


def _jaxprs(params: Any) -> list[Any]:
    leaves = jax.tree.leaves(list(params.values()), is_leaf=lambda x: isinstance(x, core.Jaxpr | core.ClosedJaxpr))
    found = [one.jaxpr if isinstance(one, core.ClosedJaxpr) else one for one in leaves]
    return [one for one in found if isinstance(one, core.Jaxpr)]
