"""The estimated step time and memory of a layout: from shapes, rules and links alone, without a compiler.

It follows the parts of a compiled prediction. The time of a matmul is that of its FLOPs or of its bytes, whichever is
longer. Attention kernels take the cycles or the share of peak that `foresight/timing` gives them, and everything else
takes its bytes. The communication volume comes from `transfers.py`, and its time from the network of the real mesh.
What the backward pass recomputes, and what is saved for it, follow from the traced program and the remat policy.
"""

import collections
import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from gspmd_lm.config import Config
from gspmd_lm.foresight import bounds
from gspmd_lm.foresight.bounds import FLOAT32_BYTES
from gspmd_lm.foresight.graph import Node
from gspmd_lm.foresight.timing import op_time
from gspmd_lm.foresight.timing.predict import Parts
from gspmd_lm.hardware.chips import Chip
from gspmd_lm.hardware.target import Target
from gspmd_lm.plan.model_transfers import ModelTransfers
from gspmd_lm.plan.operations import AnyOp, NamedNodes, Op, OpGraph, SavedActivations
from gspmd_lm.plan.overlap import Overlap
from gspmd_lm.plan.timed_ops import TimedOp, timed_ops
from gspmd_lm.plan.traces import Part, Shards, TraceCache, parts
from gspmd_lm.plan.transfers import EstimatedTransfer
from gspmd_lm.program.task import Task
from gspmd_lm.sharding.rules import Remat, Rules
from gspmd_lm.sharding.shapes import pairs

# Read from compiled programs: `python -m benchmarks.plan show` sets them beside estimates.
#
# How often the bytes of activations that are saved for the backward pass go through memory. On GPUs the stack is filled
# with zeros first, and its slices are copied, in the backward pass too.
SAVED_PASSES = {"tpu": 2.0, "gpu": 4.7, "cpu": 4.7}
# The same of what stages of a pipeline save: the stack of a turn goes into one of all turns. And of the gradients of a
# stage, which each turn adds to those of the turns before.
SAVED_PASSES_OF_TURNS = {"tpu": 2.0, "gpu": 9.0, "cpu": 9.0}
SUM_PASSES = {"tpu": 3.0, "gpu": 6.0, "cpu": 6.0}
# Kernels of a loop's iteration that handle scalars and scales.
SMALL_KERNELS = {"tpu": 0, "gpu": 44, "cpu": 44}


@dataclasses.dataclass(frozen=True)
class WorkingSet:
    """The copies of arrays that a compiled program holds while it computes, besides state and saved activations."""

    matmul_inputs: float  # of the matmuls of a layer
    matmul_outputs: float
    outer_weights: float  # the weights of matmuls outside of layers, such as the vocabulary's: whole, and gradients
    gradients: float
    weights: tuple[float, float]  # in the dtype of the matmuls: with one microbatch, and with several


WORKING_SETS = {
    "tpu": WorkingSet(matmul_inputs=2.25, matmul_outputs=1.0, outer_weights=5.0, gradients=1.0, weights=(0.25, 0.5)),
    "gpu": WorkingSet(matmul_inputs=1.0, matmul_outputs=1.5, outer_weights=1.5, gradients=0.0, weights=(0.0, 0.25)),
}


@dataclasses.dataclass(frozen=True)
class Estimate(Parts):
    """Estimated seconds of one step and bytes of one device. All seconds are 0 where the target has no times."""

    peak_bytes: int
    sent_by_axis: Mapping[str, int] = dataclasses.field(default_factory=dict)  # mesh axes -> bytes
    host_bytes: int = 0  # of activations that are offloaded
    communication_s: float = 0.0  # exposed or not

    @property
    def sent_bytes(self) -> int:
        return sum(self.sent_by_axis.values())


class OpTime(NamedTuple):
    """The seconds of one run of an operation on one device."""

    name: str  # the weights of a matmul; attention, or other
    forward_s: float
    backward_s: float  # with what is computed again
    nodes: tuple[Node, ...]  # in the order of the program


class RematEstimate(NamedTuple):
    """The time and memory of one layout under a remat policy, without communication: enough to compare policies."""

    seconds: float  # where the target has no times: the FLOPs of what is recomputed
    device_bytes: float  # of the activations that a device saves in one microbatch
    host_bytes: float
    peak_bytes: float


@dataclasses.dataclass
class _PartCosts:
    """The costs of one part of the step that all remat policies of a layout share."""

    part: Part
    op_graph: OpGraph
    timed_ops: list[TimedOp]
    shards: Shards
    sum_bytes: float  # of the gradients that the turns of stages add up
    held_bytes: float  # of weights in use, or in another order, that a device holds through all turns, and of sums
    transfers: dict[tuple[str, frozenset[str]], list[EstimatedTransfer]] = dataclasses.field(default_factory=dict)

    def local_bytes(self, arrays: Iterable[tuple[float, NamedNodes]]) -> float:
        """The bytes of arrays on one device."""
        return sum(self.shards.held_bytes(size, nodes) for size, nodes in arrays)

    def travelling_bytes(self) -> float:
        """The bytes per device that a layer whose rows travel to their experts holds at once, besides its buffers.

        It is the rows before they are sent, and results back home; the gradients of the experts' matrices of the first
        round, of another one, and their sum; and matrices that are gathered, with those of which the gather has begun.
        """
        shards = self.shards
        layers, travelled = collections.defaultdict[str, float](float), collections.defaultdict[str, float](float)
        for op in self.op_graph.ops:
            if not op.is_grouped or shards.buffer_share(op.moved[0][1]) == 1:
                continue
            (size, rows), (weight_size, (weight, *_)), _ = op.moved
            in_use, at_rest = shards.count((weight,)), shards.at_rest(weight)
            passes = 3 * (weight.array in self.op_graph.graph.trained) + 2 * (at_rest > in_use)
            layer = weight.array.rpartition(".")[0]
            layers[layer] += passes * weight_size / in_use
            travelled[layer] = max(travelled[layer], 2 * size / shards.count(rows))
        return max((layers[layer] + travelled[layer] for layer in layers), default=0.0)

    def is_computed_once_more(self, op: AnyOp) -> bool:
        """Whether a stage computes an op forward a second time. It computes the loss once, in the backward pass."""
        return self.part.again and (bool(self.part.of_stages) or any(map(self.op_graph.in_block, op.nodes)))

    def forward_s(self, ops: Collection[AnyOp]) -> float:
        """The seconds of some ops in the forward pass, of all iterations."""
        return sum(timed.trip_count * timed.forward_s for timed in self.timed_ops if timed.op in ops)


@dataclasses.dataclass
class _LayoutCosts:
    """The costs that all remat policies of a layout share."""

    parts: list[_PartCosts]
    update_s: float
    state_bytes: float
    working_bytes: float  # of the working set while a layer, or the loss, is computed
    gathers_activations: bool  # before matmuls read them: the sequence is split between blocks

    def saved_bytes(self, remat: Remat) -> list[tuple[_PartCosts, SavedActivations]]:
        return [(costs, costs.op_graph.saved_activations(remat)) for costs in self.parts]


_Saved = Sequence[tuple[_PartCosts, SavedActivations]]


class Estimator:
    """The estimates of one config and one target. Layouts that differ in remat alone share most of the work."""

    def __init__(self, config: Config | Task, target: Target, traces: TraceCache | None = None):
        self.traces = traces or TraceCache(config)
        self.target, self.chip = target, target.chip
        arrays = self.traces.arrays
        self._params = pairs(arrays.named_params, arrays.params)
        self._trained = pairs(arrays.named_trained, arrays.trained)
        self._optimizer = pairs(arrays.named_optimizer, arrays.optimizer)
        self.overlap = Overlap(target)
        self._layouts: dict[tuple, _LayoutCosts] = {}

    def estimate(self, rules: Rules) -> Estimate:
        """The estimate for filled and checked rules."""
        layout = self._layout(rules)
        saved = layout.saved_bytes(rules.remat)
        transfers = self.transfers(rules)
        sent: dict[str, float] = collections.defaultdict(float)
        for transfer in transfers:
            sent[transfer.axes] += transfer.bytes * transfer.times_per_step
        memory = self._memory(layout, saved)
        by_kind_s, exposed, host_s, communication_s = {}, {}, 0.0, 0.0
        if self.chip:
            by_kind_s, passes_s = self._compute_s(self.chip, layout, saved)
            recomputes = rules.remat.policy not in ("none", "dots")  # matmuls that read gathered activations
            gathers_of_activations = layout.gathers_activations * (1 + recomputes)
            exposed, communication_s = self.overlap.exposed_seconds(rules, transfers, passes_s, gathers_of_activations)
            host_s = self._host_s(saved, passes_s)
        return Estimate(
            step_time_s=sum(by_kind_s.values()) + sum(exposed.values()) + host_s,
            matmul_s=by_kind_s.get("matmul", 0.0),
            attention_s=by_kind_s.get("attention", 0.0),
            other_s=by_kind_s.get("other", 0.0),
            exposed_by_axis=exposed,
            exposed_host_copy_s=host_s,
            peak_bytes=round(memory.peak_bytes),
            sent_by_axis={axes: round(count) for axes, count in sent.items() if round(count)},
            host_bytes=round(memory.host_bytes),
            communication_s=communication_s,
        )

    def transfers(self, rules: Rules) -> list[EstimatedTransfer]:
        """What a device sends in a step under filled and checked rules."""
        return [one for costs in self._layout(rules).parts for one in self._transfers(costs, rules.remat)]

    def estimate_remat(self, rules: Rules, remat: Remat) -> RematEstimate:
        """The time and memory of filled and checked rules under another remat policy."""
        layout = self._layout(rules)
        saved = layout.saved_bytes(remat)
        if self.chip:
            by_kind_s, passes_s = self._compute_s(self.chip, layout, saved)
            seconds = sum(by_kind_s.values()) + self._host_s(saved, passes_s)
        else:
            recomputed = (one for _, kept in saved for one in kept.recomputed if isinstance(one, Op))
            seconds = sum(one.flops * one.trip_count for one in recomputed)
        return self._memory(layout, saved)._replace(seconds=seconds)

    def _memory(self, layout: _LayoutCosts, saved: _Saved) -> RematEstimate:
        """The bytes of a layout, without its seconds."""
        device_bytes = host_bytes = 0.0
        for costs, kept in saved:
            device_bytes += costs.part.kept * costs.local_bytes(kept.on_device)
            host_bytes += costs.part.kept * sum(costs.local_bytes(loop.arrays) for loop in kept.on_host)
        return RematEstimate(0.0, device_bytes, host_bytes, layout.state_bytes + device_bytes + layout.working_bytes)

    def memory_parts(self, rules: Rules) -> dict[str, float]:
        """What holds the bytes of which `estimate(rules).peak_bytes` is the sum, and how many of them."""
        layout = self._layout(rules)
        saved_bytes = self._memory(layout, layout.saved_bytes(rules.remat)).device_bytes
        weights = bounds.held_bytes(rules, "weights", self._params)
        optimizer = bounds.held_bytes(rules, "optimizer", self._optimizer)
        return {
            "weights": weights,
            "optimizer": optimizer,
            "gradients": layout.state_bytes - weights - optimizer,
            "saved activations": saved_bytes,
            "working set": layout.working_bytes,
        }

    def op_times(self, rules: Rules) -> list[OpTime]:
        """The operations of a step on a target that has times, in the order of the program."""
        made: list[tuple[int, OpTime]] = []
        layout = self._layout(rules)
        for costs, kept in layout.saved_bytes(rules.remat):
            order = {node: number for number, node in enumerate(costs.part.graph.nodes)}
            for timed in costs.timed_ops:
                nodes = tuple(sorted(timed.op.nodes, key=lambda node: order[node]))
                again = (timed.op in kept.recomputed) + costs.is_computed_once_more(timed.op)
                weights = dict.fromkeys(owner for node in nodes for owner in node.name.owners)
                name = "+".join(path.rpartition(".")[2] for path in weights) if timed.kind == "matmul" else timed.kind
                one = OpTime(name or timed.kind, timed.forward_s, timed.backward_s + again * timed.forward_s, nodes)
                made.append((order[nodes[0]], one))
        return [one for _, one in sorted(made, key=lambda pair: pair[0])]

    # Compute

    def _compute_s(
        self, chip: Chip, layout: _LayoutCosts, saved: _Saved
    ) -> tuple[dict[str, float], tuple[float, float]]:
        """Seconds of compute by kind; and those of loops in both passes, behind which communication hides."""
        by_kind_s: dict[str, float] = collections.defaultdict(float)
        forward_s = backward_s = 0.0
        slowdown = chip.slowdowns.get("other", 1.0)
        for costs, kept in saved:
            runs = costs.part.runs
            for timed in costs.timed_ops:
                executions = timed.trip_count * runs
                if timed.kind == "matmul" and kept.on_host:
                    executions *= chip.offloading_slowdown
                op_backward_s = timed.backward_s + timed.forward_s * (
                    costs.is_computed_once_more(timed.op) + (timed.op in kept.recomputed)
                )
                by_kind_s[timed.kind] += executions * (timed.forward_s + op_backward_s)
                if timed.in_loop:
                    forward_s += executions * timed.forward_s
                    backward_s += executions * op_backward_s
            of_turns = costs.part.of_stages and not costs.part.again
            passes = (SAVED_PASSES_OF_TURNS if of_turns else SAVED_PASSES)[chip.platform] * runs
            saved_s = passes * costs.local_bytes(kept.on_device) / op_time.hbm_bytes_per_s(chip)
            sums_s = SUM_PASSES[chip.platform] * costs.part.turns * costs.sum_bytes / op_time.hbm_bytes_per_s(chip)
            iterations = 2 * runs * sum(costs.op_graph.trip_counts)
            small_kernels_s = iterations * SMALL_KERNELS[chip.platform] * op_time.LAUNCH_S[chip.platform]
            saved_s *= slowdown
            by_kind_s["other"] += saved_s + slowdown * (sums_s + small_kernels_s)
            forward_s, backward_s = forward_s + saved_s / 2, backward_s + saved_s / 2
        by_kind_s["other"] += slowdown * layout.update_s
        return by_kind_s, (forward_s, backward_s)

    # Communication

    def _transfers(self, costs: _PartCosts, remat: Remat) -> list[EstimatedTransfer]:
        """What a device sends. Of the remat policy, it depends on its kind and on few names only."""
        config, names = self.traces.task.config, frozenset([*remat.save, *remat.offload])
        # The outputs of frozen weights matter too: nothing but what is computed again may read their inputs again.
        if len(self._trained) == len(self._params):
            names &= {
                "block_input",
                "residual",
                *(["dispatched"] if config and config.model.experts else []),
                *(["attention_out"] if costs.part.rules.context in ("ulysses", "ring") else []),
            }
        key = remat.policy, names
        if key not in costs.transfers:
            part = dataclasses.replace(costs.part, rules=dataclasses.replace(costs.part.rules, remat=remat))
            costs.transfers[key] = ModelTransfers(part, self.traces.arrays).all
            if part.again:
                costs.transfers[key] += ModelTransfers(part, self.traces.arrays, forward_alone=True).all
        return costs.transfers[key]

    def _host_s(self, saved: _Saved, passes_s: tuple[float, float]) -> float:
        """The exposed seconds of copies to the host in the forward pass, and from the host in the backward pass."""
        loops = [(costs, loop) for costs, kept in saved for loop in kept.on_host]
        sizes = [[costs.part.runs * costs.local_bytes([array]) for array in loop.arrays] for costs, loop in loops]
        remaining_s = [[costs.part.runs * costs.forward_s(ops) for ops in loop.made_later] for costs, loop in loops]
        computes_again = any(op.flops for _, kept in saved for op in kept.recomputed if isinstance(op, Op))
        return self.overlap.exposed_host_copy_s(
            [loop for _, loop in loops], sizes, remaining_s, passes_s, computes_again
        )

    # Costs that all remat policies share

    def _layout(self, rules: Rules) -> _LayoutCosts:
        rows = tuple((row.key, row.mesh_axes) for row in rules.rows)
        kernel = rules.kernel(self.target.platform)
        key = (tuple(rules.mesh.items()), rows, tuple(rules.dcn.items()), rules.microbatches, rules.context, kernel)
        key += rules.pipeline, rules.expert_buffer
        if key not in self._layouts:
            costs = [self._part(part, kernel != "xla") for part in parts(rules, self.traces)]
            weight_bytes = bounds.held_bytes(rules, "weights", self._params)
            gradient_bytes = bounds.held_bytes(rules, "optimizer", self._trained)
            sum_bytes = 0.0
            if rules.microbatches > 1:
                sum_bytes = bounds.held_bytes(rules, "optimizer", self._trained, FLOAT32_BYTES)
            optimizer_bytes = bounds.held_bytes(rules, "optimizer", self._optimizer)
            # Gradients are accumulated: two are read, and one is written.
            moved_bytes = bounds.updated_bytes(rules, self.traces.arrays) + 3 * rules.microbatches * sum_bytes
            update_s = moved_bytes / op_time.hbm_bytes_per_s(self.chip) if self.chip else 0.0
            self._layouts[key] = _LayoutCosts(
                costs,
                update_s,
                weight_bytes + optimizer_bytes + gradient_bytes + sum_bytes,
                self._working_bytes(rules, costs, weight_bytes, gradient_bytes),
                self._gathers_activations(costs[-1]),
            )
        return self._layouts[key]

    def _part(self, part: Part, kernels: bool) -> _PartCosts:
        fused = kernels and "attention" in part.trace.recorder.asked
        op_graph = part.op_graph(fused, self.target.platform == "tpu")
        config = self.traces.task.config
        shards, timed = Shards(part.rules, config.model if config else None), list[TimedOp]()
        if self.chip:
            for one in timed_ops(self.chip, op_graph, shards, self.traces.task.matmul_precision):
                slowdown = self.chip.slowdowns.get(one.kind, 1.0)
                timed.append(
                    dataclasses.replace(one, forward_s=slowdown * one.forward_s, backward_s=slowdown * one.backward_s)
                )
        return _PartCosts(part, op_graph, timed, shards, *self._stage_bytes(part))

    def _stage_bytes(self, part: Part) -> tuple[float, float]:
        """The sums of gradients, and what a device holds besides through all turns, or through all layers."""
        pipeline = part.step_rules.pipeline
        if not part.of_stages and pipeline and pipeline.schedule == "1f1b":
            outside = (pair for pair in self._trained if part.has(pair[0].path))
            sums = [bounds.held_bytes(part.rules, "optimizer", [pair], FLOAT32_BYTES) for pair in outside]
            return sum(sums), max(sums, default=0.0)  # the gradients of stages are added up, and the result is another
        if not part.of_stages:
            shared = {one.path for one in part.graph.matmuls if one.node.trip_count > one.weight.trip_count}
            of_layers = [one for one in self._trained if one[0].path in shared and one[0].path.startswith("layers.")]
            both = FLOAT32_BYTES // 2 + FLOAT32_BYTES  # in use, and the sum of its gradients
            return 0.0, bounds.held_bytes(part.rules, "rules", of_layers, both)
        rules, of_stages = part.step_rules, [pair for pair in self._trained if part.has(pair[0].path)]
        table = "rules" if part.gathers_once else "optimizer"
        sum_bytes, held = bounds.held_bytes(rules, table, of_stages, FLOAT32_BYTES), 0.0
        if part.gathers_once or part.gathers_ahead:
            held += bounds.held_bytes(rules, "rules", of_stages, FLOAT32_BYTES // 2)
        held += sum_bytes if part.gathers_once else 0.0
        held += part.inputs_kept * part.stream.bytes / Shards(part.rules).count((part.stream,))
        if rules.pipeline and rules.pipeline.repeats > 1:
            # Stages that exchange their layers hold them in both orders, and their gradients.
            held += 2 * bounds.held_bytes(rules, "weights", of_stages, FLOAT32_BYTES)
        return sum_bytes, held

    def _gathers_activations(self, costs: _PartCosts) -> bool:
        """Whether the inputs of matmuls are gathered from arrays that have more shards."""
        graph, count = costs.part.graph, costs.shards.count
        return any(
            count((source,)) > count((matmul.input,))
            for matmul in graph.matmuls
            if (source := graph.gathered_from(matmul.input))
        )

    def _working_bytes(
        self, rules: Rules, parts_: Iterable[_PartCosts], weight_bytes: float, gradient_bytes: float
    ) -> float:
        """The bytes of the working set: what a device holds while it computes, but state and saved activations."""
        working_set = WORKING_SETS.get(self.target.platform, WORKING_SETS["gpu"])
        several = rules.microbatches > 1 or rules.pipeline is not None
        total = working_set.gradients * gradient_bytes + working_set.weights[several] * weight_bytes
        for costs in parts_:
            total += costs.held_bytes + costs.travelling_bytes()
            for op in costs.op_graph.ops:
                if op.kind == "other" or len(op.moved) < 3:
                    continue
                x, weight, out = (costs.shards.held_bytes(size, nodes) for size, nodes in op.moved)
                total += (
                    working_set.matmul_inputs * x + working_set.matmul_outputs * out
                    if op.in_block
                    else working_set.outer_weights * weight
                )
        return total
