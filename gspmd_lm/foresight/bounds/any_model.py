"""Lower bounds of a train step of any model, read from its trace; and the transfers that `plan` prices a model by.

The transfers know nothing but how arrays are sharded: weights are gathered, their gradients are reduced, and a matmul
that sums over a split axis is reduced. What a model moves between two shardings of its activations is not among them,
but for what `gathered` and `reduced` of matmuls.py move.
"""

import collections
import math
from typing import Any

import jax
from flax.traverse_util import flatten_dict, unflatten_dict

from gspmd_lm.foresight import equations
from gspmd_lm.foresight.bounds import LowerBounds, updated_bytes
from gspmd_lm.foresight.bounds.transfers import FLOAT32_BYTES, Transfers, mesh_axes_except
from gspmd_lm.foresight.graph import Matmul, Node
from gspmd_lm.foresight.propagation import Reading
from gspmd_lm.hardware.chips import Chip
from gspmd_lm.model.task import Task
from gspmd_lm.sharding.rules import Rules
from gspmd_lm.sharding.shapes import Arrays


def of_training(task: Task, rules: Rules, arrays: Arrays, chip: Chip | None, reading: Reading) -> LowerBounds:
    """The lower bounds of a train step of `task` under `rules`, filled and checked; `chip` is None if simulated.

    `reading` is that of the whole step. FLOPs are shared out evenly over all devices, however few of them the rules
    use. Activations that are kept for the backward pass are not counted among the bytes of memory.
    """
    flops = traced_flops(task, arrays) / rules.devices
    return LowerBounds(
        compute_s=chip and flops / chip.peak_bf16_flops_per_s,
        memory_s=chip and updated_bytes(rules, arrays) / chip.hbm_bytes_per_s,
        flops=flops,
        dtype=task.compute_dtype,
        **communication(reading),
    )


def communication(reading: Reading) -> dict[str, Any]:
    """The fields of `LowerBounds` that say what one device sends."""
    sent = {axes: round(size) for axes, size in reading.bytes_by_axes.items()}
    return {
        "communication_bytes": round(reading.communication_bytes),
        "communication_by_axis": {axes: size for axes, size in sent.items() if size},
        "float32_bytes": round(reading.bytes_if_wider(FLOAT32_BYTES)),
        "estimated_because": reading.estimated_because,
    }


def traced_flops(task: Task, arrays: Arrays) -> float:
    """The FLOPs of the matmuls and convolutions of the loss and its gradients, as they are traced for one device."""

    def loss(trained: Any, params: Any, batch: Any, key: Any) -> jax.Array:
        joined = unflatten_dict(flatten_dict(params) | flatten_dict(trained))
        return task.sums(joined, batch, key if task.random else None).loss

    key = jax.eval_shape(jax.random.key, 0)
    program = jax.make_jaxpr(jax.grad(loss))(arrays.trained, arrays.params, task.batch(task.rows), key)
    return jaxpr_flops(program.jaxpr)


def jaxpr_flops(jaxpr: Any) -> float:
    """2 for each multiply-add of matmuls and convolutions, those of all devices, without recomputation.

    A loop whose trip count is unknown counts once.
    """
    total = 0.0
    for equation in jaxpr.eqns:
        primitive, params = equation.primitive.name, equation.params
        if "rematted_computation" in str(equation.source_info.name_stack):
            continue
        total += equations.flops(equation)
        inner = [jaxpr_flops(inner_jaxpr) for inner_jaxpr in equations.inner_jaxprs(params)]
        if primitive == "cond":
            total += max(inner)
        elif primitive == "shard_map":  # the program of one device; along an axis that splits no input all do the same
            entries = jax.tree.leaves([tuple(spec) for spec in params["in_specs"]])
            total += sum(inner) * math.prod(params["mesh"].shape[axis] for axis in {*entries})
        else:
            total += sum(inner) * (params["length"] if primitive == "scan" else 1)
    return total


class AnyModelTransfers(Transfers):
    """The transfers of any model."""

    def add_model(self) -> None:
        for path, nodes in self.graph.used.items():
            for _ in range(1 if self.rules.remat.policy == "none" else 2):  # for the backward pass again
                self.gather(self.weights[path], self.itemsize(nodes[0]))
        readers, written = collections.defaultdict[Node, list[Matmul]](list), dict[Node, set[frozenset[str]]]()
        for matmul in self.graph.matmuls:
            self.add_output_side(matmul, written)
            readers[matmul.input].append(matmul)
        for x, matmuls in readers.items():
            source = self.graph.gathered_from(x)
            self.add_input_side(x, None if source in written else source, matmuls)
        for path in set(self.graph.used) - self.graph.multiplied:
            weight, applied = self.weights[path], self.graph.applied_to(path)
            if weight.trained and applied:
                sharding, node = self.sharding(applied), self.graph.used[path][0]
                local_gradient = {axis: names for axis, names in sharding.items() if axis in weight.sizes}
                summed_over = mesh_axes_except(sharding, *weight.sizes)
                self.transfer(
                    self.bytes(node), local_gradient, weight.gradient, summed_over, node.trip_count, "gradients"
                )

    def add_output_side(self, matmul: Matmul, written: dict[Node, set[frozenset[str]]]) -> None:
        """Adds the reduction of a matmul's partial sums. Results that one `reduced` adds up are reduced once."""
        x, y, times = self.sharding(matmul.input), matmul.output or matmul.input, matmul.node.trip_count
        compute = self.weights[matmul.path].compute
        summed_over = frozenset(mesh_axes_except(compute, *(compute.keys() - x.keys())))
        destination = self.graph.written_to(y) if matmul.output else y
        if destination is not y:
            if y not in written and self.trains:
                self.transfer(self.bytes(y), self.sharding(destination), self.sharding(y), times=times)  # the gradient
            if summed_over in written.setdefault(y, set()):
                return
            written[y].add(summed_over)
        computed = {
            axis: tuple(name for name in names if name not in summed_over) for axis, names in self.sharding(y).items()
        }
        self.transfer(self.bytes(matmul.node), computed, self.sharding(destination), summed_over, times)

    def add_input_side(self, x: Node, source: Node | None, matmuls: list[Matmul]) -> None:
        """Adds the gradients of matmuls that have one input.

        Where `gathered` gathers that input from a `source`, the gather is added too, and the gradients are summed once.
        """
        sharding = self.sharding(x)
        if source:
            input_saved = not self.trains or self.rules.remat.policy == "none" or x.array in self.saved
            for _ in range(1 if input_saved else 2):
                self.transfer(self.bytes(x), self.sharding(source), sharding, times=x.trip_count)
        if not self.trains:
            return
        sums = [frozenset(mesh_axes_except(self.weights[matmul.path].compute, *sharding)) for matmul in matmuls]
        for summed_over in dict.fromkeys(sums) if source else sums:
            self.transfer(self.bytes(x), sharding, self.sharding(source or x), summed_over, x.trip_count)
        for matmul in matmuls:
            weight = self.weights[matmul.path]
            if weight.trained:
                row_axes = mesh_axes_except(sharding, *weight.sizes)
                size_bytes, times = self.bytes(matmul.weight), matmul.node.trip_count
                self.transfer(size_bytes, weight.compute, weight.gradient, row_axes, times, "gradients")
