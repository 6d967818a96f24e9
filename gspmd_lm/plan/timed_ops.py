"""The seconds of each op of a part of a step on one device, forward and backward: from shapes, rules and the chip."""

import dataclasses
import math
import operator
from collections.abc import Iterator, Sequence

import jax.numpy as jnp

from gspmd_lm.foresight.graph import AttentionOp
from gspmd_lm.foresight.timing import attention, gathers, op_time
from gspmd_lm.hardware import measured
from gspmd_lm.hardware.chips import Chip
from gspmd_lm.model.kernels import grouped, grouped_gpu
from gspmd_lm.model.kernels.common import splash_block
from gspmd_lm.plan.operations import MoveOp, Op, OpGraph
from gspmd_lm.plan.traces import Shards
from gspmd_lm.units import bits

# Read from compiled programs: `python -m benchmarks.plan show` sets them beside estimates.
#
# TPU programs fuse most elementwise operations into matmuls, some into several: how often their bytes go through memory
# on their own, and within matmuls. Arrays of up to ON_CHIP_BYTES may stay on the chip: the share that does not.
ELEMENTWISE_PASSES = {"tpu": 0.7, "gpu": 1.0, "cpu": 1.0}
FUSED_PASSES = {"tpu": 0.8, "gpu": 0.0, "cpu": 0.0}
ON_CHIP_BYTES, OFF_CHIP_SHARE = 2**25, {"tpu": 0.6, "gpu": 1.0, "cpu": 1.0}


@dataclasses.dataclass(frozen=True)
class TimedOp:
    """One op on one device: seconds of one execution forward and backward."""

    kind: str
    forward_s: float
    backward_s: float
    trip_count: int
    op: Op | AttentionOp | MoveOp

    @property
    def in_loop(self) -> bool:
        return self.trip_count > 1


def timed_ops(chip: Chip, op_graph: OpGraph, shards: Shards, precision: str) -> Iterator[TimedOp]:
    """The ops of a part. precision: that of matmuls, as `jax.default_matmul_precision` takes it."""
    rounds_to_bf16 = chip.platform == "tpu" and precision == "default"
    launch_s = op_time.kernel_gap_s(chip)
    for op in op_graph.ops:
        # Kernels of experts skip what of a buffer is empty, as half of it is where loads are even.
        of_device = (lambda size, nodes: size / shards.count(nodes)) if op.is_grouped else shards.held_bytes
        local_bytes = [of_device(*moved) for moved in op.moved]
        memory_s = sum(local_bytes) / op_time.hbm_bytes_per_s(chip)
        if op.only_casts and chip.platform == "tpu":  # they are fused with the next matmul or gather
            continue
        if not op.flops:
            moved = sum(
                size * (OFF_CHIP_SHARE[chip.platform] if size <= ON_CHIP_BYTES else 1.0) for size in local_bytes
            )
            memory_s = moved / op_time.hbm_bytes_per_s(chip)
            seconds = ELEMENTWISE_PASSES[chip.platform] * memory_s + launch_s
            yield TimedOp(op.kind, seconds, op.backward * seconds, op.trip_count, op)
            for sum_op in filter(None, map(op_graph.move_ops.get, op.nodes)):
                longer_s = max(0.0, _sum_s(chip, sum_op, shards) - seconds)
                yield TimedOp(op.kind, longer_s, sum_op.backward * longer_s, op.trip_count, sum_op)
            if fused_s := FUSED_PASSES[chip.platform] * memory_s:
                yield TimedOp("matmul", fused_s, op.backward * fused_s, op.trip_count, op)
            continue
        flops = op.flops / shards.count(op.sharded_like)
        dtype = "bf16" if rounds_to_bf16 and op.dtype == "f32" else op.dtype
        # The matmul, and the gradients of its operands: of the activation, then of the weight.
        x, w, y = map(operator.truediv, local_bytes, op.itemsizes)
        kernels, multiplied, widened_bytes = [(1.0, 0.0)] * 3, [(dtype, dtype)] * 3, 0.0
        if op.is_grouped:
            inner, columns = flops / (2 * y), flops / (2 * x)
            rows, experts, width = x / inner, w / (inner * columns), op.itemsizes[1]
            sides = ((inner, columns), False), ((columns, inner), False), ((inner, columns), True)
            if chip.platform == "tpu":
                kernels = [
                    grouped.work(rows, experts, *side, max(width, 2) if outer else width, chip.kinds[0], outer)
                    for side, outer in sides
                ]
            else:
                kernels = [
                    (grouped_gpu.speed(rows, experts, round(along), round(across), outer), 0.0)
                    for (along, across), outer in sides
                ]
            of_matrix = "bf16" if bits(dtype) == 8 else dtype  # see moe_dispatch.py
            multiplied = [_multiplied_dtypes(chip, dtype, rows / experts)] * 2 + [(of_matrix, of_matrix)]
            widened_bytes = 3 * w if multiplied[0][1] != dtype else 0.0  # of each, one is read and two are written
        rows, inner, columns = (math.sqrt(one) for one in (x * y / w, x * w / y, w * y / x))
        sides = (rows, inner, columns), (rows, columns, inner), (inner, rows, columns)
        passes = zip((y, x, w), kernels, multiplied, (widened_bytes, widened_bytes, 0.0), sides, strict=True)
        forward_s, *backward_s = (
            launch_s
            + before_bytes / op_time.hbm_bytes_per_s(chip)
            + max(
                memory_s,
                kernel_bytes / op_time.hbm_bytes_per_s(chip),
                flops
                / (used * _tile_share(chip, elements, flops, op) * _flops_per_s(chip, op, dtypes, sides, precision)),
            )
            for elements, (used, kernel_bytes), dtypes, before_bytes, sides in [*passes][: 1 + round(op.backward)]
        )
        yield TimedOp(op.kind, forward_s, sum(backward_s), op.trip_count, op)
    for node, move in op_graph.move_ops.items():
        if node.primitive != "reduce_sum":
            seconds = _move_s(chip, move, shards)
            yield TimedOp("other", seconds, move.backward * seconds, move.trip_count, move)
    for attention_op in op_graph.attention_ops:
        kernels_s, beside_s = _attention_s(chip, attention_op, shards)
        forward_s, backward_s = (launch_s + seconds for seconds in kernels_s)
        times, backward = attention_op.trip_count, attention_op.backward
        yield TimedOp("attention", forward_s, backward * backward_s, times, attention_op)
        yield TimedOp("other", beside_s[0], backward * beside_s[1], times, attention_op)


def _multiplied_dtypes(chip: Chip, dtype: str, rows: float) -> tuple[str, str]:
    """The dtypes in which a kernel multiplies rows and the weights of experts, so many rows for each expert."""
    if dtype != "f8e4m3fn" or not grouped_gpu.on_hopper(chip.kinds[0]):
        return dtype, dtype
    return "bf16", "bf16" if grouped_gpu.widens(jnp.dtype(jnp.float8_e4m3fn), chip.kinds[0], rows) else dtype


def _flops_per_s(
    chip: Chip, op: Op, dtypes: tuple[str, str], sides: tuple[float, float, float], precision: str
) -> float:
    """The FLOPs/s of a matmul that fills its tiles. sides: its rows, contracted numbers and columns."""
    if rate := measured.matmul_flops_per_s(chip, dtypes, 1.0, *sides):
        return rate
    share = op_time.matmul_share(chip, op.is_grouped, dtypes) / chip.matmul_slowdown
    return share * min(chip.matmul_flops_per_s(dtype, precision == "highest") for dtype in dtypes)


def _tile_share(chip: Chip, elements: float, flops: float, op: Op) -> float:
    """The share of a GPU that a matmul uses, by the number of elements of its result; of grouped ones, see `speed`."""
    if op.is_grouped or not chip.gpu or chip.matmul_rates:
        return 1.0
    depth_bytes = flops / (2 * elements) * op.itemsizes[0]
    return op_time.tile_share(elements, depth_bytes, chip.gpu.core_count)


def _move_s(chip: Chip, move: MoveOp, shards: Shards) -> float:
    """Seconds of a gather or a sort, as a compiled program's takes. libtpu hands gathers of tpu7x to SparseCores."""
    node, devices = move.node, shards.count(move.sharded_like)
    elements = math.prod(node.shape) / devices
    if node.primitive != "gather":  # a sort of keys alone takes their places along
        length = node.inputs[0].shape[-1]
        elements = math.prod(node.inputs[0].shape) / devices
        return gathers.sort_s(elements, round(min(length, elements)), max(2, len(node.inputs)), chip)
    rows = math.prod(node.inputs[1].shape[:-1]) / devices
    width = node.shape[-1] if elements > rows else 1
    sizes, found_bytes = (round(elements / rows / width), width), elements / width * _pad(width) * node.itemsize
    bandwidth, on_sparse_cores = op_time.hbm_bytes_per_s(chip), chip.compiler_name in gathers.SPARSECORE_CHIPS
    return gathers.gather_s(rows, sizes, found_bytes, 8 * node.itemsize, chip, bandwidth, found_bytes, on_sparse_cores)


def _sum_s(chip: Chip, sum_op: MoveOp, shards: Shards) -> float:
    """Seconds of a sum over few rows."""
    *_, few, width = sum_op.node.inputs[0].shape
    elements = math.prod(sum_op.node.shape) * few / width * _pad(width)
    return gathers.sum_s(elements / shards.count(sum_op.sharded_like), few, chip)


def _pad(width: int) -> int:
    return -(-width // gathers.LANES) * gathers.LANES


def _attention_s(chip: Chip, op: AttentionOp, shards: Shards) -> tuple[Sequence[float], Sequence[float]]:
    """Seconds of a fused attention kernel, forward and backward, and of what else its layer does for it."""
    queries, keys, values, rules = op.queries, op.keys, op.values, shards.rules
    (rows, seq, heads, size), of_keys = queries.shape, keys.shape[1]
    pieces = shards.count((queries,))
    count = rows * heads / pieces  # may be a fraction, where its tokens are split
    if rules.kernel(chip.platform) != "splash":
        causal = op.mask_window != "all"
        window = int(op.mask_window or 0) if causal else 0
        passes = (attention.Cudnn(backward, count, seq, of_keys, size, causal, window) for backward in (False, True))
        return [attention.cudnn_s(one, chip) for one in passes], (0.0, 0.0)
    assert queries.placed
    devices = rules.num_shards(rules.split(queries.placed.table, queries.placed.array, "seq"))
    ring = devices if rules.context == "ring" else 1
    sizes = size, values.shape[-1]
    kernels_s = attention.splash_passes_s(count, sizes, (seq, of_keys), queries.itemsize, op.mask_window, ring, chip)
    blocks = of_keys // splash_block(of_keys, size, queries.itemsize)
    key_bytes = (keys.bytes + values.bytes) / shards.count((keys,))
    moved = attention.splash_moved_bytes(blocks, queries.bytes / pieces, key_bytes, rules.context, devices)
    return kernels_s, [size / op_time.hbm_bytes_per_s(chip) for size in moved]
