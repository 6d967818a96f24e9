"""The estimated step time and memory of a layout: from shapes, rules and links alone, without a compiler.

It follows the parts of a compiled prediction. The time of a matmul is that of its FLOPs or of its bytes, whichever is
longer. Attention kernels take the cycles or the share of peak that `foresight/timing` gives them, and everything else
takes its bytes. The communication volume comes from `foresight/bounds`, and its time from the network of the real mesh.
What the backward pass recomputes, and what is saved for it, follow from the traced program and the remat policy.
"""

import collections
import dataclasses
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from gspmd_lm.config import Config
from gspmd_lm.foresight import bounds
from gspmd_lm.foresight.timing import attention, op_time
from gspmd_lm.hardware.chips import Chip
from gspmd_lm.hardware.target import Target
from gspmd_lm.model.kernels import grouped
from gspmd_lm.model.kernels.attention import splash_block
from gspmd_lm.model.task import Task
from gspmd_lm.plan.decoder_transfers import DecoderTransfers
from gspmd_lm.plan.operations import AttentionOp, NamedNodes, Op, OpGraph, SavedActivations
from gspmd_lm.plan.overlap import Overlap
from gspmd_lm.plan.traces import ForwardTrace, TraceCache
from gspmd_lm.plan.transfers import FLOAT32_BYTES, AnyModelTransfers, EstimatedTransfer
from gspmd_lm.sharding.rules import Remat, Rules
from gspmd_lm.sharding.shapes import pairs

# Read from compiled programs: `python -m benchmarks.plan show` sets them beside estimates.
#
# How often the bytes of activations that are saved for the backward pass go through memory. On GPUs the stack is filled
# with zeros first, and its slices are copied.
SAVED_PASSES = {"tpu": 2.0, "gpu": 3.2}
# Kernels of a loop's iteration that handle scalars and scales.
SMALL_KERNELS = {"tpu": 0, "gpu": 35}
# TPU programs fuse most elementwise operations into matmuls, some into several: how often their bytes go through memory
# on their own, and within matmuls. Arrays of up to ON_CHIP_BYTES may stay on the chip: the share that does not.
ELEMENTWISE_PASSES = {"tpu": 0.7, "gpu": 1.0}
FUSED_PASSES = {"tpu": 0.8, "gpu": 0.0}
ON_CHIP_BYTES, OFF_CHIP_SHARE = 2**25, {"tpu": 0.6, "gpu": 1.0}


@dataclasses.dataclass(frozen=True)
class WorkingSet:
    """How many copies of arrays a compiled program holds while it computes, besides its state and saved activations."""

    matmul_inputs: float  # of the matmuls of a layer
    matmul_outputs: float
    outer_weights: float  # the weights of matmuls outside of layers, such as the vocabulary's: whole, and gradients
    gradients: float
    weights: tuple[float, float]  # in the dtype of the matmuls: with one microbatch, and with several


WORKING_SETS = {
    "tpu": WorkingSet(matmul_inputs=2.25, matmul_outputs=1.0, outer_weights=5.0, gradients=1.0, weights=(0.25, 0.5)),
    "gpu": WorkingSet(matmul_inputs=1.0, matmul_outputs=1.5, outer_weights=1.5, gradients=0.0, weights=(0.0, 0.25)),
}
_CUDNN_MATMULS = (2, 5)  # of a forward and of a backward pass


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Estimated seconds of one step and bytes of one device. All seconds are 0 where the target has no times."""

    step_time_s: float
    matmul_s: float
    attention_s: float
    other_s: float
    exposed_by_axis: Mapping[str, float]  # mesh axes -> seconds of exposed communication
    exposed_host_copy_s: float
    peak_bytes: int
    sent_by_axis: Mapping[str, int] = dataclasses.field(default_factory=dict)  # mesh axes -> bytes
    host_bytes: int = 0  # of activations that are offloaded
    communication_s: float = 0.0  # exposed or not

    @property
    def sent_bytes(self) -> int:
        return sum(self.sent_by_axis.values())


class RematEstimate(NamedTuple):
    """What one layout takes under a remat policy, communication left out: enough to compare policies."""

    seconds: float  # where the target has no times: the FLOPs of what is recomputed
    device_bytes: float  # of the activations that a device saves in one microbatch
    host_bytes: float
    peak_bytes: float


@dataclasses.dataclass(frozen=True)
class _TimedOp:
    """One op on one device: seconds of one execution forward and backward."""

    kind: str
    forward_s: float
    backward_s: float
    trip_count: int
    op: Op | AttentionOp

    @property
    def in_loop(self) -> bool:
        return self.trip_count > 1


@dataclasses.dataclass
class _LayoutCosts:
    """What all remat policies of one layout have in common."""

    rules: Rules
    trace: ForwardTrace
    op_graph: OpGraph
    timed_ops: list[_TimedOp]
    update_s: float
    state_bytes: float
    working_bytes: float  # of the working set while a layer, or the loss, is computed
    shard_counts: dict[NamedNodes, int]
    gathers_activations: bool  # before matmuls read them: the sequence is split between blocks
    transfers: dict[tuple[bool, ...], list[EstimatedTransfer]]


class Estimator:
    """The estimates of one config and one target. Layouts that differ in remat alone share most of the work."""

    def __init__(self, config: Config | Task, target: Target, traces: TraceCache | None = None):
        self.traces = traces or TraceCache(config)
        self.target, self.chip = target, target.chip
        self._overlap = Overlap(target)
        self._layouts: dict[tuple, _LayoutCosts] = {}

    def estimate(self, rules: Rules) -> Estimate:
        """The estimate for filled and checked rules."""
        layout = self._layout(rules)
        saved = layout.op_graph.saved_activations(rules.remat)
        transfers = self._transfers(layout, rules)
        sent: dict[str, float] = collections.defaultdict(float)
        for transfer in transfers:
            sent[transfer.axes] += transfer.bytes * transfer.times_per_step
        device_bytes = self._sharded_bytes(layout, saved.on_device)
        host_bytes = self._host_bytes(layout, saved)
        peak_bytes = layout.state_bytes + device_bytes + layout.working_bytes
        by_kind_s, exposed, host_s, communication_s = {}, {}, 0.0, 0.0
        if self.chip:
            by_kind_s, passes_s = self._compute_s(self.chip, layout, saved, device_bytes)
            gathers_of_activations = layout.gathers_activations * (2 if self._recomputes(rules.remat) else 1)
            exposed, communication_s = self._overlap.exposed(rules, transfers, passes_s, gathers_of_activations)
            host_s = self._host_s(layout, saved, passes_s)
        return Estimate(
            step_time_s=sum(by_kind_s.values()) + sum(exposed.values()) + host_s,
            matmul_s=by_kind_s.get("matmul", 0.0),
            attention_s=by_kind_s.get("attention", 0.0),
            other_s=by_kind_s.get("other", 0.0),
            exposed_by_axis=exposed,
            exposed_host_copy_s=host_s,
            peak_bytes=round(peak_bytes),
            sent_by_axis={axes: round(count) for axes, count in sent.items() if round(count)},
            host_bytes=round(host_bytes),
            communication_s=communication_s,
        )

    def estimate_remat(self, rules: Rules, remat: Remat) -> RematEstimate:
        """What filled and checked rules would take under another remat policy."""
        layout = self._layout(rules)
        saved = layout.op_graph.saved_activations(remat)
        device_bytes = self._sharded_bytes(layout, saved.on_device)
        host_bytes = self._host_bytes(layout, saved)
        if self.chip:
            by_kind_s, passes_s = self._compute_s(self.chip, layout, saved, device_bytes)
            seconds = sum(by_kind_s.values()) + self._host_s(layout, saved, passes_s)
        else:
            seconds = sum(one.flops * one.trip_count for one in saved.recomputed if isinstance(one, Op))
        peak_bytes = layout.state_bytes + device_bytes + layout.working_bytes
        return RematEstimate(seconds, device_bytes, host_bytes, peak_bytes)

    # Compute

    def _compute_s(
        self, chip: Chip, layout: _LayoutCosts, saved: SavedActivations, device_bytes: float
    ) -> tuple[dict[str, float], tuple[float, float]]:
        """Seconds of compute by kind; and those of loops in both passes, behind which communication hides."""
        by_kind_s: dict[str, float] = collections.defaultdict(float)
        forward_s = backward_s = 0.0
        microbatches = layout.rules.microbatches
        for timed in layout.timed_ops:
            executions = timed.trip_count * microbatches
            if timed.kind == "matmul" and saved.on_host:
                executions *= chip.offloading_slowdown
            op_backward_s = timed.backward_s + (timed.forward_s if timed.op in saved.recomputed else 0.0)
            by_kind_s[timed.kind] += executions * (timed.forward_s + op_backward_s)
            if timed.in_loop:
                forward_s += executions * timed.forward_s
                backward_s += executions * op_backward_s
        saved_s = SAVED_PASSES[chip.platform] * microbatches * device_bytes / op_time.hbm_bytes_per_s(chip)
        iterations = 2 * microbatches * sum(layout.op_graph.trip_counts)
        small_kernels_s = iterations * SMALL_KERNELS[chip.platform] * op_time.LAUNCH_S[chip.platform]
        by_kind_s["other"] += saved_s + small_kernels_s + layout.update_s
        return by_kind_s, (forward_s + saved_s / 2, backward_s + saved_s / 2)

    def _timed_ops(
        self, chip: Chip, rules: Rules, op_graph: OpGraph, shard_counts: dict[NamedNodes, int]
    ) -> Iterable[_TimedOp]:
        share = op_time.MATMUL_SHARE[chip.platform] / chip.matmul_slowdown
        launch_s = op_time.LAUNCH_S[chip.platform]
        rounds_to_bf16 = (
            chip.platform == "tpu" and self.traces.task.matmul_precision == "default"
        )  # float32 to bfloat16
        for op in op_graph.ops:
            local_bytes = [size / self._shard_count(rules, nodes, shard_counts) for size, nodes in op.moved]
            memory_s = sum(local_bytes) / op_time.hbm_bytes_per_s(chip)
            if op.only_casts and chip.platform == "tpu":  # they are fused with the next matmul or gather
                continue
            if not op.flops:
                moved = sum(
                    size * (OFF_CHIP_SHARE[chip.platform] if size <= ON_CHIP_BYTES else 1.0) for size in local_bytes
                )
                memory_s = moved / op_time.hbm_bytes_per_s(chip)
                seconds = ELEMENTWISE_PASSES[chip.platform] * memory_s + launch_s
                yield _TimedOp(op.kind, seconds, op.backward * seconds, op.trip_count, op)
                if fused_s := FUSED_PASSES[chip.platform] * memory_s:
                    yield _TimedOp("matmul", fused_s, op.backward * fused_s, op.trip_count, op)
                continue
            flops = op.flops / self._shard_count(rules, op.sharded_like, shard_counts)
            peak = chip.matmul_flops_per_s("bf16" if rounds_to_bf16 and op.dtype == "f32" else op.dtype)
            # The matmul, and the gradients of its operands: of the activation, then of the weight.
            x, w, y = map(operator.truediv, local_bytes, op.itemsizes)
            kernels = [(1.0, 0.0)] * 3
            if op.grouped and chip.platform == "tpu":
                inner, columns = flops / (2 * y), flops / (2 * x)
                rows, experts, width = x / inner, w / (inner * columns), op.itemsizes[1]
                sides = ((inner, columns), False), ((columns, inner), False), ((inner, columns), True)
                kernels = [grouped.work(rows, experts, *side, width, chip.kinds[0], outer) for side, outer in sides]
            passes = list(zip((y, x, w), kernels, strict=True))
            forward_s, *backward_s = (
                launch_s
                + max(
                    memory_s,
                    kernel_bytes / op_time.hbm_bytes_per_s(chip),
                    flops / (share * used * self._tile_share(chip, elements, flops, op) * peak),
                )
                for elements, (used, kernel_bytes) in passes[: 1 + round(op.backward)]
            )
            yield _TimedOp(op.kind, forward_s, sum(backward_s), op.trip_count, op)
        for attention_op in op_graph.attention_ops:
            kernels_s, beside_s = self._attention_s(chip, rules, attention_op, shard_counts)
            forward_s, backward_s = (launch_s + seconds for seconds in kernels_s)
            yield _TimedOp("attention", forward_s, backward_s, attention_op.trip_count, attention_op)
            yield _TimedOp("other", beside_s[0], beside_s[1], attention_op.trip_count, attention_op)

    def _tile_share(self, chip: Chip, elements: float, flops: float, op: Op) -> float:
        """The share of a GPU that a matmul uses whose result has so many elements."""
        depth_bytes = flops / (2 * elements) * op.itemsizes[0]
        return op_time.tile_share(elements, depth_bytes, chip.gpu.core_count) if chip.gpu else 1.0

    def _attention_s(
        self, chip: Chip, rules: Rules, op: AttentionOp, shard_counts: dict[NamedNodes, int]
    ) -> tuple[Sequence[float], Sequence[float]]:
        """Seconds of a fused attention kernel, forward and backward, and of what else its layer does for it."""
        queries, keys, values = op.queries, op.keys, op.values
        rows, seq, heads, size = queries.shape
        shards = self._shard_count(rules, (queries,), shard_counts)
        count = rows * heads / shards  # may be a fraction, where its tokens are split
        if rules.kernel(chip.platform) != "splash":
            causal = op.mask_window != "all"
            window = int(op.mask_window or 0) if causal else 0
            scores = attention.masked_scores(seq, window) if causal else seq**2
            multiply_adds = count * size * scores  # of one matmul
            return [
                attention.cudnn_s(2.0 * matmuls * multiply_adds, matmuls > 2, chip, seq, size, causal, window)
                for matmuls in _CUDNN_MATMULS
            ], (0.0, 0.0)
        assert queries.placed
        devices = rules.num_shards(rules.split(queries.placed.table, queries.placed.array, "seq"))
        ring = devices if rules.context == "ring" else 1
        sizes = size, values.shape[-1]
        kernels_s = attention.splash_passes_s(count, sizes, seq, queries.itemsize, op.mask_window, ring, chip)
        blocks = seq // splash_block(seq, size, queries.itemsize)
        key_bytes = (keys.bytes + values.bytes) / self._shard_count(rules, (keys,), shard_counts)
        moved = attention.splash_moved_bytes(blocks, queries.bytes / shards, key_bytes, rules.context, devices)
        return kernels_s, [size / op_time.hbm_bytes_per_s(chip) for size in moved]

    # Communication

    def _transfers(self, layout: _LayoutCosts, rules: Rules) -> list[EstimatedTransfer]:
        """What a device sends. It depends on the remat policy in two ways only."""
        remat = rules.remat
        names = {*remat.save, *remat.offload}
        named = tuple(name in names for name in ("block_input", "residual")) if remat.policy == "names" else ()
        key = (remat.policy == "none", remat.policy == "block", *named)
        if key not in layout.transfers:
            kind = DecoderTransfers if self.traces.task.config else AnyModelTransfers
            layout.transfers[key] = kind(rules, self.traces.arrays, layout.trace.graph).all
        return layout.transfers[key]

    def _recomputes(self, remat: Remat) -> bool:
        """Whether matmuls that read gathered activations are recomputed."""
        return remat.policy not in ("none", "dots")

    def _host_s(self, layout: _LayoutCosts, saved: SavedActivations, passes_s: tuple[float, float]) -> float:
        """The exposed seconds of copies to the host in the forward pass, and from the host in the backward pass."""
        microbatches = layout.rules.microbatches
        sizes = [
            [microbatches * self._sharded_bytes(layout, [array]) for array in loop.arrays] for loop in saved.on_host
        ]
        computes_again = any(op.flops for op in saved.recomputed if isinstance(op, Op))
        return self._overlap.exposed_host_copy_s(saved.on_host, sizes, passes_s, computes_again)

    def _host_bytes(self, layout: _LayoutCosts, saved: SavedActivations) -> float:
        return sum(self._sharded_bytes(layout, loop.arrays) for loop in saved.on_host)

    # What all remat policies share

    def _layout(self, rules: Rules) -> _LayoutCosts:
        platform = self.target.platform
        trace = self.traces.trace(rules)
        fused = rules.kernel(platform) != "xla" and "attention" in trace.recorder.asked
        rows = tuple((row.key, row.mesh_axes) for row in rules.rows)
        key = (tuple(rules.mesh.items()), rows, tuple(rules.dcn.items()), rules.microbatches, rules.context, fused)
        if key not in self._layouts:
            op_graph, shard_counts = trace.op_graph(fused), dict[NamedNodes, int]()
            timed_ops = list(self._timed_ops(self.chip, rules, op_graph, shard_counts)) if self.chip else []
            weight_bytes, gradient_bytes = self._weight_bytes(rules), self._gradient_bytes(rules)
            sum_bytes = self._gradient_bytes(rules, FLOAT32_BYTES) if rules.microbatches > 1 else 0.0
            # Gradients are accumulated: two are read, and one is written.
            moved_bytes = bounds.updated_bytes(rules, self.traces.arrays) + 3 * rules.microbatches * sum_bytes
            update_s = moved_bytes / op_time.hbm_bytes_per_s(self.chip) if self.chip else 0.0
            self._layouts[key] = _LayoutCosts(
                rules,
                trace,
                op_graph,
                timed_ops,
                update_s,
                weight_bytes + self._optimizer_bytes(rules) + gradient_bytes + sum_bytes,
                self._working_bytes(rules, op_graph, shard_counts, weight_bytes, gradient_bytes),
                shard_counts,
                self._gathers_activations(rules, trace, shard_counts),
                {},
            )
        return self._layouts[key]

    def _gathers_activations(self, rules: Rules, trace: ForwardTrace, shard_counts: dict[NamedNodes, int]) -> bool:
        """Whether the inputs of matmuls are gathered from arrays that have more shards."""
        return any(
            self._shard_count(rules, (source,), shard_counts) > self._shard_count(rules, (matmul.input,), shard_counts)
            for matmul in trace.graph.matmuls
            if (source := trace.graph.gathered_from(matmul.input))
        )

    def _gradient_bytes(self, rules: Rules, itemsize: int = 0) -> float:
        """The bytes of gradients on a device: in the dtype of their weights, unless an `itemsize` is given."""
        trained = pairs(self.traces.arrays.named_trained, self.traces.arrays.trained)
        return sum(
            bounds.bytes_per_device(rules, "optimizer", *pair, itemsize or pair[1].dtype.itemsize) for pair in trained
        )

    def _weight_bytes(self, rules: Rules) -> float:

        weights = pairs(self.traces.arrays.named_params, self.traces.arrays.params)
        return sum(bounds.bytes_per_device(rules, "weights", *pair, pair[1].dtype.itemsize) for pair in weights)

    def _optimizer_bytes(self, rules: Rules) -> float:

        optimizer = pairs(self.traces.arrays.named_optimizer, self.traces.arrays.optimizer)
        return sum(bounds.bytes_per_device(rules, "optimizer", *pair, pair[1].dtype.itemsize) for pair in optimizer)

    def _working_bytes(
        self,
        rules: Rules,
        op_graph: OpGraph,
        shard_counts: dict[NamedNodes, int],
        weight_bytes: float,
        gradient_bytes: float,
    ) -> float:
        """The bytes of the working set: what a device holds while it computes, but state and saved activations."""
        working_set = WORKING_SETS.get(self.target.platform, WORKING_SETS["gpu"])
        total = working_set.gradients * gradient_bytes + working_set.weights[rules.microbatches > 1] * weight_bytes
        for op in op_graph.ops:
            if op.kind == "other" or len(op.moved) < 3:
                continue
            x, weight, out = (size / self._shard_count(rules, nodes, shard_counts) for size, nodes in op.moved)
            total += (
                working_set.matmul_inputs * x + working_set.matmul_outputs * out
                if op.in_block
                else working_set.outer_weights * weight
            )
        return total

    def _sharded_bytes(self, layout: _LayoutCosts, arrays: Iterable[tuple[float, NamedNodes]]) -> float:
        return sum(size / self._shard_count(layout.rules, nodes, layout.shard_counts) for size, nodes in arrays)

    def _shard_count(self, rules: Rules, nodes: NamedNodes, shard_counts: dict[NamedNodes, int]) -> int:
        """How many shards an array has that is split over the mesh axes of all of these nodes."""
        if nodes not in shard_counts:
            names: set[str] = set()
            for node in nodes:
                assert node.placed
                array, axes, table = node.placed
                names |= {name for split in rules.resolve(table, array, axes, node.shape)[0] for name in split}
            shard_counts[nodes] = rules.num_shards(names)
        return shard_counts[nodes]
