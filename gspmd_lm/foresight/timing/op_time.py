"""The op time: how long one instruction of a compiled program computes on a chip."""

import dataclasses
import itertools
import math
import operator
import re
from collections.abc import Collection, Iterator

from gspmd_lm.foresight.hlo import Array, Instruction
from gspmd_lm.foresight.hlo.work import dot_sides
from gspmd_lm.foresight.timing import attention, cpu_fusions, few_rows, gathers, gpu_fusions
from gspmd_lm.hardware import measured
from gspmd_lm.hardware.chips import Chip
from gspmd_lm.model.kernels import grouped, grouped_gpu
from gspmd_lm.units import bits

# Fitted or measured constants, which no data sheet gives. FITTED in benchmarks/published_errors.py says to which
# published steps they were fitted.
#
# The share of HBM bandwidth that operations reach, where `Chip.hbm_share` says no other. TPU: fitted to v6e steps. GPU:
# long operations of train steps moved 2.9 to 3.1 of 3.35 TB/s on one H100.
HBM_SHARE = {"tpu": 0.86, "gpu": 0.90, "cpu": 1.0}
# The share of the peak that matmuls without an estimate of the compiler reach. GPU: the matmuls of train steps on one
# H100 or H200, without what GPU_TILES and GPU_TILE_BYTES take of it there (benchmarks/results/on_device.json).
MATMUL_SHARE = {"tpu": 0.85, "gpu": 0.755, "cpu": 1.0}
# The share that Triton's grouped matmuls reach (model/kernels/grouped_gpu.py), in two mixtures of those.
GROUPED_SHARE = 0.64
# The share of the peak of int8 that they reach: 16 kernels of one of those mixtures took 78.5 ms in int8.
GROUPED_SHARE_OF_INT8 = 0.4
# Those whose kernel converts weights of 8 bits take so many times as long on Hopper: 22 of one of those mixtures took
# 135 ms in bfloat16, and 232 ms in fp8, where 16 of them converted weights.
CONVERTING_SLOWDOWN = 2.0
# A GPU multiplies in tiles of a result. Tiles are dealt out to its cores in waves, and the last wave leaves some idle.
# These are the tiles of cuBLAS's kernels in those steps, by their names. To begin a tile takes as long as so many more
# bytes of the contracted dimension: kernels store a tile of 16 bits while they compute the next one.
GPU_TILES = tuple(
    rows * columns
    for rows, columns in ((128, 128), (192, 96), (128, 160), (176, 128), (128, 192), (128, 256), (192, 192), (320, 128))
)
GPU_TILE_BYTES = 100
# A result in float32, and what is added to it, is stored while the next tile is computed, but takes so many times as
# long as its bytes: cuBLAS's kernels for logits and gradients of their weights, in those steps.
WIDE_STORE_SLOWDOWN = 1.9
# Of operands of 8 bits, an estimate of the compiler counts unless it is so many times as long as the share of the peak
# says. libtpu 0.0.42.1 estimates 64.6 M cycles on tpu7x for a product of E4M3 that takes 2.5 M in bfloat16, 26 times.
MISJUDGED = 8
# What a kernel of a GPU takes besides its bytes: 1.7 us for the shortest, and 0.7 us to the next one in the mean.
# Of a CPU, it is what `calibrate` measured on a server: an operation of a compiled program is a call in a list.
LAUNCH_S = {"tpu": 0.0, "gpu": 2.4e-6, "cpu": 0.5e-6}
# A GPU is idle for so long where the host reads whether a loop goes on, because the compiler does not know its trip
# count. Steps of BERT and Whisper on one H100 had 144, 384 and 576 such readings, for loops over documents. They took
# longer than their kernels by 50, 38 and 64 us for each. Steps without any took 0.3% longer, which is 5 us of that.
HOST_DECISION_S = 46e-6
# On-chip memory of a TPU is about 22 times as fast as HBM. Source: scaling-book, chapter on rooflines.
ON_CHIP_SPEED = 22
# Outside of train steps, with which that speed was used when constants were fitted, an operation without a matmul takes
# what libtpu's schedules say of such operations on v4, v5e and v6e (benchmarks/few_row_schedules.py): a core reads and
# writes so many bytes of the memory on the chip in a cycle, in the geometric mean, and needs some cycles to begin.
ON_CHIP_BYTES_PER_CYCLE = 1800
START_CYCLES = 57

_FREE = {
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "after-all",
    "partition-id",
    "replica-id",
    "optimization-barrier",
    "add-dependency",
    "domain",
    "while",
    "call",
    "conditional",
}
_FREE_CALLS = {
    "AllocateBuffer",
    "ConcatBitcast",
    "SliceId",
    "AssumeGatherIndicesInBound",
    "Sharding",
    "MoveToHost",
    "MoveToDevice",
    "annotate_device_placement",
    "AsyncCollectiveStart",
    "AsyncCollectiveDone",
    "PrepareAsyncCallStart",
    "PrepareAsyncCallDone",
    "GatherScatterIndicesBitpacked",
}
# The compiler's own kernels that only move their bytes, by call target or op_name.
_MOVING_KERNELS = ("ZeroCrop", "ragged-dot-metadata", "X64SplitLow", "X64SplitHigh", "X64Combine")
_GROUPED = "/grouped/"  # in the names of what kernels/grouped.py computes
_TILE = re.compile(r"tile_([mkn])\W+(\d+)")  # in what MaxText's grouped kernels say of themselves
# Opcodes whose time is that of their bytes, or too short to matter.
_BY_BYTES = gpu_fusions.ARITHMETIC | {
    "bitcast-convert",
    "broadcast",
    "concatenate",
    "copy",
    "dynamic-slice",
    "dynamic-update-slice",
    "fusion",
    "gather",
    "iota",
    "map",
    "pad",
    "reduce",
    "reduce-window",
    "reshape",
    "reverse",
    "scatter",
    "slice",
    "transpose",
}


@dataclasses.dataclass(frozen=True)
class OpTime:
    """The seconds of one run of an instruction, and their kind: matmul, attention or other.

    `unknown` names a part whose time is not known: an opcode, or `CALL` and a call's target. The seconds are then those
    of the other parts, or of the bytes, which are a lower bound.
    """

    seconds: float
    kind: str = "other"
    unknown: str = ""


NO_TIME = OpTime(0.0)
CALL, MATMUL_OF = "custom-call ", "matmul of "  # how the names of unknown times begin
FLOAT64 = ("f64", "c128")


def op_time(instruction: Instruction, chip: Chip) -> OpTime:
    """The time of the compute of an instruction, without its collectives."""
    if instruction.opcode in _FREE or instruction.custom_call_target in _FREE_CALLS:
        return NO_TIME
    calls = kernels_of(instruction)
    kernel_times = [_kernel_time(call, chip) for call in calls]
    unknown = next(
        (CALL + call.custom_call_target for call, time in zip(calls, kernel_times, strict=True) if not time), ""
    )
    kernels_s = sum(time.seconds for time in kernel_times if time)
    if matmul_flops := instruction.flops:
        time = _matmul_time(instruction, chip, matmul_flops)
        time = dataclasses.replace(time, seconds=time.seconds + kernels_s)
        if chip.gpu and not chip.peak_f64_flops_per_s and not unknown:
            wide = {array.dtype for operand in instruction.operands for array in operand.shape.arrays} & {*FLOAT64}
            unknown = f"{MATMUL_OF}{wide.pop()}" if wide else ""
    elif kernels_s:
        kind = max((time for time in kernel_times if time), key=lambda time: time.seconds).kind
        time = OpTime(max(kernels_s, _memory_s(instruction, chip) if kind == "attention" else 0.0), kind)
    elif chip.platform == "tpu" and _only_scalars(instruction):
        time = NO_TIME  # the scalar unit works beside the other units
    else:
        time, known = _memory_time(instruction, chip), instruction.opcode in _BY_BYTES
        if chip.platform == "tpu":
            least_s = gathers.least_s(instruction, chip, hbm_bytes_per_s(chip))
            time, known = dataclasses.replace(time, seconds=max(time.seconds, least_s)), known or least_s > 0
        unknown = unknown or ("" if kernel_times or known else instruction.opcode)
    launch_s = kernel_gap_s(chip) if time is not NO_TIME else 0.0
    return dataclasses.replace(time, seconds=time.seconds + launch_s, unknown=unknown)


def compute_kind(instruction: Instruction) -> str:
    """matmul, attention or other: the kind of an instruction's compute, on whatever chip."""
    calls = kernels_of(instruction)
    if any(map(attention.flops, calls)) or ((instruction.flops or not calls) and _is_attention(instruction)):
        return "attention"
    return "matmul" if instruction.flops or any((kernel_work(call) or (0.0,))[0] for call in calls) else "other"


def kernels_of(instruction: Instruction) -> list[Instruction]:
    """The kernels that an instruction runs: itself, or the kernels inside a fusion."""
    calls = (i for i in (instruction, *instruction.inside) if i.opcode == "custom-call")
    return [call for call in calls if call.custom_call_target not in _FREE_CALLS and not call.flops]


def _kernel_time(call: Instruction, chip: Chip) -> OpTime | None:
    """The time of a kernel: of attention by its name, of another by its FLOPs and bytes; None if they are unknown."""
    if seconds := attention.kernel_s(call, chip):
        return OpTime(seconds + attention.summed_bytes(call) / hbm_bytes_per_s(chip), "attention")
    if call.custom_call_target in _MOVING_KERNELS or call.op_name.rpartition("/")[2] in _MOVING_KERNELS:
        return NO_TIME  # its bytes are counted by `_memory_time`
    if (work := kernel_work(call)) is None:
        return None
    flop_count, moved_bytes = work
    if chip.platform == "tpu":
        flop_count, moved_bytes = tiled_work(call, chip, flop_count, moved_bytes)
    elif sides := _grouped_sides(call, flop_count):
        _, experts, inner, columns, outer, _ = sides
        rows = _rows(call)[0].dimensions[0]  # all, since a block of rows is chosen by them
        flop_count /= grouped_gpu.speed(rows, experts, inner, columns, outer)
    memory_s = moved_bytes / hbm_bytes_per_s(chip)
    return OpTime(max(_flops_s(call, chip, flop_count), memory_s), "matmul" if flop_count else "other")


def kernel_work(call: Instruction) -> tuple[float, float] | None:
    """The (FLOPs, bytes) of a kernel: its own estimate or, without one, what a grouped matmul's shapes say; else None.

    Of a buffer where rows arrive, only the rows that balanced routing fills count: kernels skip the tiles of others.
    A kernel may have more rows than the buffer, to fill its last tile.
    """
    work, rows = call.cost_estimate, max((array.dimensions[0] for array in _rows(call)), default=0)
    if work is None and _GROUPED in call.op_name:
        # Of [M, D], [E, D, F] and [M, F], any two give the third.
        matrices, moved = _matrices(call), float(call.moved_bytes["hbm"])
        work = (2.0 * rows * math.prod(matrices.dimensions[1:]), moved) if rows and matrices else None
    buffers = sorted(call.module.buffers.items(), reverse=True)
    share = next((filled * many / rows for many, filled in buffers if many <= rows < many + grouped.MOST_ROWS), 1.0)
    return work and (work[0] * share, work[1] * share)


def tiled_work(call: Instruction, chip: Chip, operations: float, moved_bytes: float) -> tuple[float, float]:
    """The FLOPs and bytes of a kernel on a TPU: those that it states, but for a grouped matmul those of its tiles.

    Megablox says that it reads its weights again for each tile of rows, also where they stay on the chip.
    """
    if not (sides := _grouped_sides(call, operations)):
        return operations, moved_bytes
    rows, experts, inner, columns, outer, itemsize = sides
    share, kernel_bytes = grouped.work(rows, experts, inner, columns, itemsize, chip.kinds[0], outer, _tile(call))
    return operations / share, kernel_bytes


def _grouped_sides(call: Instruction, operations: float) -> tuple[float, int, int, int, bool, int] | None:
    """Of a grouped matmul the rows, experts, inner dimensions and columns, whether it gives matrices, and the bytes of
    a number of theirs; None for another kernel."""
    rows, matrices = _rows(call), _matrices(call)
    outer = matrices is not None and matrices is _arrays(call)[-1]
    grouped_here = _GROUPED in call.op_name or _tile(call)
    if not grouped_here or matrices is None or not operations or len(rows) < 1 + outer:
        return None
    experts, inner, columns = matrices.dimensions
    if outer:  # the result may have more columns, in whole lanes
        inner, columns = (array.dimensions[-1] for array in rows[:2])
    elif rows[0].dimensions[-1] != inner:  # given as its transpose
        inner, columns = columns, inner
    return operations / (2 * inner * columns), experts, inner, columns, outer, bits(matrices.dtype) // 8


def _rows(call: Instruction) -> list[Array]:
    """The arrays of rows that a kernel multiplies or gives."""
    return [array for array in _arrays(call) if len(array.dimensions) == 2]


def _matrices(call: Instruction) -> Array | None:
    """The matrices of experts that it multiplies or gives."""
    return next((array for array in _arrays(call) if len(array.dimensions) == 3), None)


def _tile(call: Instruction) -> tuple[int, int, int] | None:
    """The rows, inner columns and columns of a tile, if a grouped matmul of another program says them."""
    sizes = {side: int(size) for side, size in _TILE.findall(call.frontend.get("kernel_metadata", ""))}
    return (sizes["m"], sizes["k"], sizes["n"]) if len(sizes) == 3 else None


def _arrays(call: Instruction) -> list[Array]:
    """The operands and results of a kernel that are multiplied or added up: of whole numbers, those of 8 bits."""
    arrays = (array for one in (*call.operands, call) for array in one.shape.arrays)
    return [array for array in arrays if array.dtype == "s8" or not array.dtype.startswith(("s", "u"))]


def _matmul_time(instruction: Instruction, chip: Chip, operations: float) -> OpTime:
    inside = (instruction, *instruction.inside)
    matmul = next(i for i in inside if i.opcode != "fusion" and i.flops)
    units_s, memory_s = _flops_s(matmul, chip, operations), _memory_s(instruction, chip)
    seconds = max(units_s, _stored_s(matmul, chip), memory_s)
    few_rows_s = few_rows.seconds(instruction, matmul, chip, memory_s, units_s) if chip.platform == "tpu" else None
    if few_rows_s is not None:
        return OpTime(few_rows_s, "attention" if _is_attention(instruction) else "matmul")
    if chip.platform == "cpu":
        seconds += cpu_fusions.arithmetic_s(instruction, chip)
    if instruction.estimated_cycles is not None:
        estimated_s = instruction.estimated_cycles / chip.clock_hz
        peak = max(_peak(matmul, chip), chip.peak_bf16_flops_per_s)
        narrow = _peak(matmul, chip) > chip.peak_bf16_flops_per_s
        misjudged = narrow and estimated_s > MISJUDGED * seconds
        if operations <= estimated_s * peak and not misjudged:  # otherwise the estimate is faster than the chip
            seconds = _slowdown(instruction, chip) * estimated_s
    return OpTime(seconds, "attention" if _is_attention(instruction) else "matmul")


def _slowdown(instruction: Instruction, chip: Chip) -> float:
    return chip.matmul_slowdown * (chip.offloading_slowdown if instruction.module.offloads else 1.0)


def matmul_share(chip: Chip, grouped: bool, dtypes: Collection[str]) -> float:
    """The share of the peak that matmuls reach, or grouped ones, without what slows a chip down.

    dtypes: of what a program's kernel multiplies.
    """
    int8 = bool(dtypes) and all(dtype.startswith(("s", "u")) and bits(dtype) <= 8 for dtype in dtypes)
    if not chip.gpu or not grouped:
        return chip.int8_share if int8 and chip.int8_share else MATMUL_SHARE[chip.platform]
    if int8:
        return GROUPED_SHARE_OF_INT8
    converts = len({*map(bits, dtypes)}) > 1 and grouped_gpu.on_hopper(chip.kinds[0])
    return GROUPED_SHARE / (CONVERTING_SLOWDOWN if converts else 1)


def _flops_s(matmul: Instruction, chip: Chip, operations: float) -> float:
    dtypes = _multiplied_dtypes(matmul)
    if matmul.flops and (rate := measured.matmul_flops_per_s(chip, dtypes, *dot_sides(matmul))):
        return operations / rate
    share = matmul_share(chip, not matmul.flops, dtypes) / _slowdown(matmul, chip)
    if chip.gpu and matmul.flops:
        elements = matmul.shape.arrays[0].elements
        width = max(bits(operand.shape.arrays[0].dtype) for operand in matmul.operands[:2])
        share *= tile_share(elements, operations / (2 * elements) * width / 8, chip.gpu.core_count)
    return operations / (share * _peak(matmul, chip))


def _stored_s(matmul: Instruction, chip: Chip) -> float:
    """The seconds in which a matmul of a GPU stores a result wider than its factors, and reads what is added to it."""
    result = matmul.shape.arrays[0]
    factors, added = matmul.operands[:2], matmul.operands[2:]
    if not chip.gpu or bits(result.dtype) <= max(bits(factor.shape.arrays[0].dtype) for factor in factors):
        return 0.0
    alike = [array for operand in added for array in operand.shape.arrays if array.elements == result.elements]
    stored_bytes = sum(array.padded_bytes for array in (result, *alike))
    return WIDE_STORE_SLOWDOWN * stored_bytes / hbm_bytes_per_s(chip)


def tile_share(elements: float, depth_bytes: float, cores: int) -> float:
    """The share of a GPU's cores and time that a matmul uses: of the best of a few tilings, as libraries choose it.

    `elements` are those of its result, and `depth_bytes` is how long the contracted dimension is. That dimension may be
    split too, which makes more and shorter tiles.
    """
    best = 0.0
    for tile, splits in itertools.product(GPU_TILES, (1, 2, 4, 8, 16)):
        waves = elements / tile * splits / cores
        best = max(best, waves / math.ceil(waves) / (1 + GPU_TILE_BYTES * splits / depth_bytes))
    return best


def _peak(matmul: Instruction, chip: Chip) -> float:
    """The peak FLOPs/s of the wider factor."""
    precision = matmul.config.get("gemm_backend_config", {}).get("precision_config", {}).get("operand_precision")
    whole = "highest" in str(precision or matmul.attributes.get("operand_precision")).lower()
    peaks = (chip.matmul_flops_per_s(dtype, whole) for dtype in _multiplied_dtypes(matmul))
    return min(peaks, default=chip.peak_bf16_flops_per_s)


def _multiplied_dtypes(matmul: Instruction) -> list[str]:
    """The dtypes of the factors: of the first two operands, or of the two largest of a kernel, but for its scales."""
    arrays = [array for operand in matmul.operands for array in operand.shape.arrays]
    if not matmul.flops:
        arrays = sorted((one for one in arrays if len(one.dimensions) > 1), key=lambda array: -array.elements)
    return [array.dtype for array in arrays[:2]]


def _memory_time(instruction: Instruction, chip: Chip) -> OpTime:
    seconds = _memory_s(instruction, chip)
    if chip.platform == "cpu":
        seconds = max(seconds, cpu_fusions.arithmetic_s(instruction, chip))
    if chip.platform == "tpu" and not instruction.module.trains:
        on_chip_cycles = instruction.moved_bytes["chip"] / (ON_CHIP_BYTES_PER_CYCLE * chip.tensor_cores)
        seconds = max(seconds, on_chip_cycles / chip.clock_hz) + START_CYCLES / chip.clock_hz
    if instruction.estimated_cycles is not None:  # without a matmul inside, often several times too long
        seconds = min(seconds, instruction.estimated_cycles / chip.clock_hz)
    return OpTime(seconds, "attention" if _is_attention(instruction) else "other")


def _is_attention(instruction: Instruction) -> bool:
    """Whether an instruction is a part of attention without a kernel of its own: scores, their softmax, or a product
    with them. XLA loses the names of some products on GPUs; what they read, or what reads their result, has one."""
    named = [instruction] if instruction.op_name else _neighbours(instruction)
    return any(one.name_in_model.kind == "attention" for one in named)


def _neighbours(instruction: Instruction) -> Iterator[Instruction]:
    """The operands and the users of an instruction, past operations that only change a view."""
    for following in (operator.attrgetter("operands"), operator.attrgetter("users")):
        waiting = [*following(instruction)]
        for one in waiting:
            if one.opcode in ("get-tuple-element", "bitcast"):
                waiting += following(one)
            else:
                yield one


def _only_scalars(instruction: Instruction) -> bool:
    operands_and_results = (instruction, *instruction.operands)
    return not any(array.dimensions for one in operands_and_results for array in one.shape.arrays)


def _memory_s(instruction: Instruction, chip: Chip) -> float:
    moved = instruction.moved_bytes
    if chip.bandwidths:
        seconds = moved.total() / measured.bytes_per_s(chip, moved.total())
    else:
        seconds = (moved["hbm"] + moved["chip"] / ON_CHIP_SPEED) / hbm_bytes_per_s(chip)
    return gpu_fusions.seconds(instruction, chip, seconds) if chip.gpu else seconds


def kernel_gap_s(chip: Chip) -> float:
    """The time that an operation takes besides its work."""
    return chip.kernel_gap_s or LAUNCH_S[chip.platform]


def hbm_bytes_per_s(chip: Chip) -> float:
    """The bandwidth of HBM that operations reach."""
    return (chip.hbm_share or HBM_SHARE[chip.platform]) * chip.hbm_bytes_per_s
