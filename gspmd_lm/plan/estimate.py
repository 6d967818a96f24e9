"""The analytic price of a layout: from shapes, rules and links alone, without a compiler.

It follows the parts of a compiled prediction. Products take their FLOPs or their bytes, whichever takes longer;
attention kernels take the cycles or the share of peak that `foresight/cost` gives them; everything else takes its
bytes. What is sent comes from `foresight/floor/traffic.py`, its times from the network of the real mesh. What the
backward pass computes again, and what is kept for it, follow from the traced program and the remat policy.
"""

import collections
import dataclasses
import operator
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from gspmd_lm.config import Config
from gspmd_lm.foresight import bounds
from gspmd_lm.foresight.bounds.any_model import AnyModelTransfers
from gspmd_lm.foresight.bounds.decoder import DecoderTransfers
from gspmd_lm.foresight.bounds.transfers import Transfer
from gspmd_lm.foresight.timing import attention, op_time
from gspmd_lm.hardware.chips import Chip
from gspmd_lm.hardware.target import Target
from gspmd_lm.model.kernels import grouped
from gspmd_lm.model.kernels.attention import splash_block
from gspmd_lm.model.task import Task
from gspmd_lm.plan.operations import AttentionOp, ForwardTrace, NamedNodes, Op, OpGraph, SavedActivations, TraceCache
from gspmd_lm.plan.overlap import Overlap
from gspmd_lm.sharding.rules import Remat, Rules
from gspmd_lm.sharding.shapes import pairs

# Read from compiled programs: `python -m benchmarks.plan show` sets them beside prices.
#
# How often the bytes of what is kept for the backward pass go through memory. On GPUs the stack is filled with zeros
# first, and its slices are copied.
SAVED_PASSES = {"tpu": 2.0, "gpu": 3.2}
# Kernels of a loop's turn that handle scalars and scales.
SMALL_KERNELS = {"tpu": 0, "gpu": 35}
# TPU programs fuse most elementwise operations into products, some into several: how often their bytes go through
# memory on their own, and within products. Arrays of up to ON_CHIP_BYTES may stay on the chip: the share that does not.
ELEMENTWISE_PASSES = {"tpu": 0.7, "gpu": 1.0}
FUSED_PASSES = {"tpu": 0.8, "gpu": 0.0}
ON_CHIP_BYTES, OFF_CHIP_SHARE = 2**25, {"tpu": 0.6, "gpu": 1.0}
# The share of the forward and backward compute behind which copies to and from the host hide.
HOST_HIDDEN_SHARE = 0.8


@dataclasses.dataclass(frozen=True)
class WorkingSet:
    """How often a compiled program holds arrays while it computes, besides its state and what is kept."""

    matmul_inputs: float  # what the products of a layer read
    matmul_outputs: float  # their results
    outer_weights: float  # the weights of products outside of layers, such as the vocabulary's: whole, and gradients
    gradients: float
    weights: tuple[float, float]  # copies in the dtype of the products: with one microbatch, and with several


WORKING_SETS = {
    "tpu": WorkingSet(matmul_inputs=2.25, matmul_outputs=1.0, outer_weights=5.0, gradients=1.0, weights=(0.25, 0.5)),
    "gpu": WorkingSet(matmul_inputs=1.0, matmul_outputs=1.5, outer_weights=1.5, gradients=0.0, weights=(0.0, 0.25)),
}
_ATTENTION_MATMULS = (("fwd", 2), ("dkv", 5))  # of splash attention; matmuls of cuDNN's


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Seconds of one step and bytes of one device. All seconds are 0 where the target has no times."""

    step_time_s: float
    matmul_s: float
    attention_s: float
    other_s: float
    exposed_by_axis: Mapping[str, float]  # mesh axes -> seconds in which compute waits
    exposed_host_copy_s: float
    peak_bytes: int
    sent_by_axis: Mapping[str, int] = dataclasses.field(default_factory=dict)  # mesh axes -> bytes
    host_bytes: int = 0  # of activations that are offloaded
    communication_s: float = 0.0  # exposed or not

    @property
    def sent_bytes(self) -> int:
        return sum(self.sent_by_axis.values())


class RematEstimate(NamedTuple):
    """What a remat policy makes of one layout, links left out: enough to compare policies."""

    seconds: float  # where the target has no times: the FLOPs of what is computed again
    device_bytes: float  # of what is kept on a device, of all that it computes in one microbatch
    host_bytes: float
    peak_bytes: float


@dataclasses.dataclass(frozen=True)
class _TimedOp:
    """One operation on one device: seconds of a run forward and backward."""

    kind: str
    forward_s: float
    backward_s: float
    trip_count: int
    op: Op | AttentionOp

    @property
    def in_loop(self) -> bool:
        return self.trip_count > 1


@dataclasses.dataclass
class _AnyRemat:
    """What all remat policies of one layout have in common."""

    rules: Rules
    trace: ForwardTrace
    op_graph: OpGraph
    timed_ops: list[_TimedOp]
    update_s: float
    state_bytes: float
    working_bytes: float  # what is held while a layer, or the loss, is computed
    shard_counts: dict[NamedNodes, int]
    gathers_activations: (
        bool  # whether activations are gathered before products read them: the sequence is split between
    )
    transfers: dict[tuple[bool, ...], list[Transfer]]


class Estimator:
    """The prices of one config and one target. Layouts that differ in remat alone share most of the work."""

    def __init__(self, config: Config | Task, target: Target, traces: TraceCache | None = None):
        self.traces = traces or TraceCache(config)
        self.config, self.target, self.chip = self.traces.config, target, target.chip
        self._overlap = Overlap(target)
        self._layouts: dict[tuple, _AnyRemat] = {}

    def estimate(self, rules: Rules) -> Estimate:
        """The price of filled and checked rules."""
        layout = self._layout(rules)
        kept = layout.op_graph.saved_activations(rules.remat)
        moves = self._transfers(layout, rules)
        sent: dict[str, float] = collections.defaultdict(float)
        for move in moves:
            sent[move.axes] += move.bytes * move.times_per_step
        device_bytes = self._sharded_bytes(layout, kept.on_device)
        host_bytes = self._sharded_bytes(layout, kept.on_host)
        peak_bytes = layout.state_bytes + device_bytes + layout.working_bytes
        spent, exposed, host_s, communication_s = {}, {}, 0.0, 0.0
        if self.chip:
            spent, loops = self._compute_s(self.chip, layout, kept, device_bytes)
            of_activations = layout.gathers_activations * (2 if self._recomputes(rules.remat) else 1)
            exposed, communication_s = self._overlap.exposed(rules, moves, loops, of_activations)
            host_s = self._host_s(self.chip, layout, host_bytes, loops)
        compute_s = sum(spent.values())
        return Estimate(
            step_time_s=compute_s + sum(exposed.values()) + host_s,
            matmul_s=spent.get("matmul", 0.0),
            attention_s=spent.get("attention", 0.0),
            other_s=spent.get("other", 0.0),
            exposed_by_axis=exposed,
            exposed_host_copy_s=host_s,
            peak_bytes=round(peak_bytes),
            sent_by_axis={axes: round(count) for axes, count in sent.items() if round(count)},
            host_bytes=round(host_bytes),
            communication_s=communication_s,
        )

    def estimate_remat(self, rules: Rules, remat: Remat) -> RematEstimate:
        """What filled and checked rules would need under another remat policy."""
        layout = self._layout(rules)
        kept = layout.op_graph.saved_activations(remat)
        device_bytes, host_bytes = (
            self._sharded_bytes(layout, kept.on_device),
            self._sharded_bytes(layout, kept.on_host),
        )
        if self.chip:
            spent, loops = self._compute_s(self.chip, layout, kept, device_bytes)
            seconds = sum(spent.values()) + self._host_s(self.chip, layout, host_bytes, loops)
        else:
            seconds = sum(one.flops * one.trip_count for one in kept.recomputed if isinstance(one, Op))
        peak_bytes = layout.state_bytes + device_bytes + layout.working_bytes
        return RematEstimate(seconds, device_bytes, host_bytes, peak_bytes)

    # Compute

    def _compute_s(
        self, chip: Chip, layout: _AnyRemat, kept: SavedActivations, device_bytes: float
    ) -> tuple[dict[str, float], tuple[float, float]]:
        """Seconds of compute by kind; and those of the loops' forward and backward passes, behind which links hide."""
        spent: dict[str, float] = collections.defaultdict(float)
        forward_s = backward_s = 0.0
        microbatches = layout.rules.microbatches
        for timed in layout.timed_ops:
            times = timed.trip_count * microbatches
            if timed.kind == "matmul" and kept.on_host:
                times *= chip.offloading_slowdown
            back_s = timed.backward_s + (timed.forward_s if timed.op in kept.recomputed else 0.0)
            spent[timed.kind] += times * (timed.forward_s + back_s)
            if timed.in_loop:
                forward_s += times * timed.forward_s
                backward_s += times * back_s
        kept_s = SAVED_PASSES[chip.platform] * microbatches * device_bytes / op_time.hbm_bytes_per_s(chip)
        turns = 2 * microbatches * sum(layout.op_graph.trip_counts)
        turns_s = turns * SMALL_KERNELS[chip.platform] * op_time.LAUNCH_S[chip.platform]
        spent["other"] += kept_s + turns_s + layout.update_s
        return spent, (forward_s + kept_s / 2, backward_s + kept_s / 2)

    def _timed_ops(self, chip: Chip, rules: Rules, work: OpGraph, pieces: dict[NamedNodes, int]) -> Iterable[_TimedOp]:
        share = op_time.MATMUL_SHARE[chip.platform] / chip.matmul_slowdown
        launch_s = op_time.LAUNCH_S[chip.platform]
        rounded = chip.platform == "tpu" and self.traces.task.matmul_precision == "default"  # float32 to bfloat16
        for operation in work.ops:
            local = [size / self._shard_count(rules, places, pieces) for size, places in operation.moved]
            moving_s = sum(local) / op_time.hbm_bytes_per_s(chip)
            if operation.only_casts and chip.platform == "tpu":  # they are fused with the product or gather beside them
                continue
            if not operation.flops:
                moved = sum(size * (OFF_CHIP_SHARE[chip.platform] if size <= ON_CHIP_BYTES else 1.0) for size in local)
                moving_s = moved / op_time.hbm_bytes_per_s(chip)
                seconds = ELEMENTWISE_PASSES[chip.platform] * moving_s + launch_s
                yield _TimedOp(operation.kind, seconds, operation.backward * seconds, operation.trip_count, operation)
                if fused_s := FUSED_PASSES[chip.platform] * moving_s:
                    yield _TimedOp("matmul", fused_s, operation.backward * fused_s, operation.trip_count, operation)
                continue
            flops = operation.flops / self._shard_count(rules, operation.sharded_like, pieces)
            peak = chip.matmul_flops_per_s("bf16" if rounded else operation.dtype)
            # The product, and the gradients of what is multiplied: of the activation, then of the weight.
            x, w, y = map(operator.truediv, local, operation.itemsizes)
            kernels = [(1.0, 0.0)] * 3
            if operation.grouped and chip.platform == "tpu":
                inner, columns = flops / (2 * y), flops / (2 * x)
                rows, experts, width = x / inner, w / (inner * columns), operation.itemsizes[1]
                sides = ((inner, columns), False), ((columns, inner), False), ((inner, columns), True)
                kernels = [grouped.work(rows, experts, *side, width, chip.kinds[0], outer) for side, outer in sides]
            passes = list(zip((y, x, w), kernels, strict=True))
            forward_s, *backward_s = (
                launch_s
                + max(
                    moving_s,
                    kernel_bytes / op_time.hbm_bytes_per_s(chip),
                    flops / (share * used * self._tile_share(chip, elements, flops, operation) * peak),
                )
                for elements, (used, kernel_bytes) in passes[: 1 + round(operation.backward)]
            )
            yield _TimedOp(operation.kind, forward_s, sum(backward_s), operation.trip_count, operation)
        for kernel in work.attention_ops:
            forward_s, backward_s = self._attention_s(chip, rules, kernel, pieces)
            yield _TimedOp("attention", forward_s + launch_s, backward_s + launch_s, kernel.trip_count, kernel)

    def _tile_share(self, chip: Chip, elements: float, flops: float, operation: Op) -> float:
        """The share of a GPU that a product uses whose result has so many elements."""
        depth_bytes = flops / (2 * elements) * operation.itemsizes[0]
        return op_time.tile_share(elements, depth_bytes, chip.gpu.core_count) if chip.gpu else 1.0

    def _attention_s(
        self, chip: Chip, rules: Rules, kernel: AttentionOp, pieces: dict[NamedNodes, int]
    ) -> tuple[float, float]:
        """Seconds of a fused attention kernel, forward and backward."""
        queries = kernel.queries
        rows, seq, heads, size = queries.shape
        count = rows * heads / self._shard_count(rules, (queries,), pieces)  # a part of one, where its tokens are split
        if rules.kernel(chip.platform) == "splash":
            block = splash_block(seq, size, queries.itemsize)
            blocks = (seq // block, seq // block)
            calls = [
                attention.Splash(part, count, size, blocks, block, block, True, kernel.mask_window)
                for part, _ in _ATTENTION_MATMULS
            ]
            found = [attention.splash_s(call, chip) for call in calls]
        else:
            window = int(kernel.mask_window or 0)
            multiply_adds = count * size * attention.masked_scores(seq, window)  # of one matmul
            found = [
                attention.cudnn_s(2.0 * matmuls * multiply_adds, matmuls > 2, chip, seq, size, window=window)
                for _, matmuls in _ATTENTION_MATMULS
            ]
        return found[0] or 0.0, found[1] or 0.0

    # What is sent

    def _transfers(self, layout: _AnyRemat, rules: Rules) -> list[Transfer]:
        """What is sent. It depends on the remat policy in two ways only."""
        remat = rules.remat
        names = {*remat.save, *remat.offload}
        named = tuple(name in names for name in ("block_input", "residual")) if remat.policy == "names" else ()
        key = (remat.policy == "none", remat.policy == "block", *named)
        if key not in layout.transfers:
            kind = DecoderTransfers if isinstance(self.config, Config) else AnyModelTransfers
            layout.transfers[key] = kind(rules, self.traces.arrays, layout.trace.graph).all
        return layout.transfers[key]

    def _recomputes(self, remat: Remat) -> bool:
        """Whether products that read gathered activations are computed again."""
        return remat.policy not in ("none", "dots")

    def _host_s(self, chip: Chip, layout: _AnyRemat, host_bytes: float, loops: tuple[float, float]) -> float:
        """The seconds in which compute waits for copies to the host in the forward pass, and back in the backward."""
        copy_s = layout.rules.microbatches * host_bytes * chip.devices_per_chip / chip.host_link_bytes_per_s
        return sum(max(0.0, copy_s - HOST_HIDDEN_SHARE * compute_s) for compute_s in loops) if copy_s else 0.0

    # What all remat policies share

    def _layout(self, rules: Rules) -> _AnyRemat:
        platform = self.target.platform
        trace = self.traces.trace(rules)
        fused = rules.kernel(platform) != "xla" and "attention" in trace.recorder.asked
        rows = tuple((row.key, row.mesh_axes) for row in rules.rows)
        key = (tuple(rules.mesh.items()), rows, tuple(rules.dcn.items()), rules.microbatches, rules.context, fused)
        if key not in self._layouts:
            work, pieces = trace.op_graph(fused), dict[NamedNodes, int]()
            timed = list(self._timed_ops(self.chip, rules, work, pieces)) if self.chip else []
            weight_bytes, gradient_bytes = self._weight_bytes(rules), self._gradient_bytes(rules)
            sum_bytes = self._gradient_bytes(rules, bounds.FLOAT32_BYTES) if rules.microbatches > 1 else 0.0
            # Gradients are added up: two are read, and one is written.
            moved = bounds.updated_bytes(rules, self.traces.arrays) + 3 * rules.microbatches * sum_bytes
            update_s = moved / op_time.hbm_bytes_per_s(self.chip) if self.chip else 0.0
            self._layouts[key] = _AnyRemat(
                rules,
                trace,
                work,
                timed,
                update_s,
                weight_bytes + self._optimizer_bytes(rules) + gradient_bytes + sum_bytes,
                self._working_bytes(rules, work, pieces, weight_bytes, gradient_bytes),
                pieces,
                self._gathers_activations(rules, trace, pieces),
                {},
            )
        return self._layouts[key]

    def _gathers_activations(self, rules: Rules, trace: ForwardTrace, pieces: dict[NamedNodes, int]) -> bool:
        """Whether what products read was split finer before it was placed for them."""
        return any(
            self._shard_count(rules, (home,), pieces) > self._shard_count(rules, (matmul.input,), pieces)
            for matmul in trace.graph.matmuls
            if (home := trace.graph.gathered_from(matmul.input))
        )

    def _gradient_bytes(self, rules: Rules, itemsize: int = 0) -> float:
        """What a device holds of the gradients: in the dtype of their weights, unless an `itemsize` is given."""
        trained = pairs(self.traces.arrays.named_trained, self.traces.arrays.trained)
        return sum(
            bounds.bytes_per_device(rules, "optimizer", *pair, itemsize or pair[1].dtype.itemsize) for pair in trained
        )

    def _weight_bytes(self, rules: Rules) -> float:
        """What a device holds of the weights."""
        weights = pairs(self.traces.arrays.named_params, self.traces.arrays.params)
        return sum(bounds.bytes_per_device(rules, "weights", *pair, pair[1].dtype.itemsize) for pair in weights)

    def _optimizer_bytes(self, rules: Rules) -> float:
        """What a device holds of the optimizer's state."""
        optimizer = pairs(self.traces.arrays.named_optimizer, self.traces.arrays.optimizer)
        return sum(bounds.bytes_per_device(rules, "optimizer", *pair, pair[1].dtype.itemsize) for pair in optimizer)

    def _working_bytes(
        self, rules: Rules, work: OpGraph, pieces: dict[NamedNodes, int], weight_bytes: float, gradient_bytes: float
    ) -> float:
        """What a device holds while it computes, besides its state and what is kept for the backward pass."""
        held = WORKING_SETS.get(self.target.platform, WORKING_SETS["gpu"])
        found = held.gradients * gradient_bytes + held.weights[rules.microbatches > 1] * weight_bytes
        for operation in work.ops:
            if operation.kind == "other" or len(operation.moved) < 3:
                continue
            x, weight, out = (size / self._shard_count(rules, places, pieces) for size, places in operation.moved)
            found += (
                held.matmul_inputs * x + held.matmul_outputs * out
                if operation.in_block
                else held.outer_weights * weight
            )
        return found

    def _sharded_bytes(self, layout: _AnyRemat, held: Iterable[tuple[float, NamedNodes]]) -> float:
        return sum(size / self._shard_count(layout.rules, places, layout.shard_counts) for size, places in held)

    def _shard_count(self, rules: Rules, places: NamedNodes, known: dict[NamedNodes, int]) -> int:
        """Into how many pieces the rules split what is placed like all of these arrays."""
        if places not in known:
            names: set[str] = set()
            for node in places:
                assert node.placed
                array, axes, table = node.placed
                names |= {name for split in rules.resolve(table, array, axes, node.shape)[0] for name in split}
            known[places] = rules.piece_count(names)
        return known[places]
