"""What a GPU's fusions take besides their bytes: arithmetic, rows that lie apart, transposed bytes, atomic sums."""

import itertools
import math
import operator

from gspmd_lm.foresight.hlo import Instruction
from gspmd_lm.foresight.timing import gathers
from gspmd_lm.hardware.chips import Chip
from gspmd_lm.units import bits

ARITHMETIC = {
    "abs",
    "acos",
    "acosh",
    "add",
    "and",
    "asin",
    "asinh",
    "atan2",
    "atanh",
    "cbrt",
    "ceil",
    "clamp",
    "compare",
    "complex",
    "convert",
    "cosh",
    "cosine",
    "count-leading-zeros",
    "divide",
    "erf",
    "exponential",
    "exponential-minus-one",
    "floor",
    "imag",
    "is-finite",
    "log",
    "log-plus-one",
    "logistic",
    "maximum",
    "minimum",
    "multiply",
    "negate",
    "not",
    "or",
    "popcnt",
    "power",
    "real",
    "reduce-precision",
    "remainder",
    "rng-bit-generator",
    "round-nearest-afz",
    "round-nearest-even",
    "rsqrt",
    "select",
    "shift-left",
    "shift-right-arithmetic",
    "shift-right-logical",
    "sign",
    "sine",
    "sinh",
    "sqrt",
    "stochastic-convert",
    "subtract",
    "tan",
    "tanh",
    "xor",
}
# Operations of a fusion that a core does in a cycle of the boost clock, of the 128 of any kind that it can begin:
# fusions with the 65 of a GELU by the complement of erf did 84 to 96 on one H100, in BERT, DeBERTa, SAM and Swin.
OPERATIONS_PER_CYCLE = 90
# Those of one erf: at that rate, forward fusions of GELU in BERT, Whisper and SAM took as long as 37 to 39 operations
# for each number, of which 6 are others.
ERF_OPERATIONS = 31
# A fusion of Triton that sums along rows is slow if a tile has ROWS_APART rows or more that lie apart in memory. Each
# number then takes so much longer. Measured on one H100, in T5 and Swin: their scores have one bias for all rows of the
# batch.
ROWS_APART = 32
NUMBER_OF_ROWS_APART_S = 3.4e-12 * 132  # of one core
# What a scatter adds up on a GPU, it adds in atomic steps, each of a sector of memory: so many of them in a second. Two
# scatters of 67.1 million single numbers of bfloat16, of a step of DeBERTa v3 large on one H100, took 2.18 ms each.
SECTOR_BYTES = 32
ADDED_SECTORS_PER_S = 16 * 16 * 512 * 512 / 2.18e-3
# A transposition of 8-bit numbers reaches so much less of a GPU's bandwidth: five fusions of those steps.
NARROW_TRANSPOSE_SLOWDOWN = 1.9


def seconds(instruction: Instruction, chip: Chip, moved_s: float) -> float:
    """The time of an instruction without matmuls whose bytes take `moved_s`."""
    assert chip.gpu
    if _transposes_narrow(instruction):
        moved_s *= NARROW_TRANSPOSE_SLOWDOWN
    rows_s = _count_rows_apart(instruction) * NUMBER_OF_ROWS_APART_S / chip.gpu.core_count
    operations_per_s = OPERATIONS_PER_CYCLE * chip.gpu.core_count * chip.clock_hz
    arithmetic_s = _operations(instruction) / operations_per_s
    return max(moved_s + rows_s, arithmetic_s, added_sectors(instruction) / ADDED_SECTORS_PER_S)


def _operations(fusion: Instruction) -> int:
    """Those of a fusion's arithmetic. Of what it slices, it computes no more than what it sums or gives."""
    summed = (one.operands[0] for one in fusion.inside if one.opcode == "reduce")
    most = max((array.elements for one in (fusion, *summed) for array in one.shape.arrays), default=0)
    return sum(
        min(most, one.shape.arrays[0].elements) * (ERF_OPERATIONS if one.opcode == "erf" else 1)
        for one in fusion.inside
        if one.opcode in ARITHMETIC
    )


def _transposes_narrow(instruction: Instruction) -> bool:
    """Whether an instruction transposes numbers of 8 bits, or makes them and transposes them."""
    narrow = any(bits(array.dtype) == 8 for array in instruction.shape.arrays if array.dimensions)
    return narrow and any(one.opcode == "transpose" for one in (instruction, *instruction.inside))


def _count_rows_apart(fusion: Instruction) -> int:
    """The numbers of a fusion of Triton that sums along rows, if a tile has ROWS_APART or more; else 0.

    Triton makes the sides of a tile powers of two. A sum over other dimensions has them whole in a tile.
    """
    tiles = fusion.config.get("fusion_backend_config", {}).get("block_level_fusion_config", {}).get("output_tiles")
    sums = [one for one in fusion.inside if one.opcode == "reduce"]
    if not tiles or not any(len(_sides(one.operands[0])) - 1 in _summed_dimensions(one) for one in sums):
        return 0
    (computation,) = fusion.called_computations["calls"]
    results = computation.root.operands if computation.root.opcode == "tuple" else (computation.root,)
    root, tile = max(zip(results, tiles, strict=False), key=lambda one: math.prod(_sides(one[0])))
    sides, sizes = _sides(root), [*map(int, tile.get("sizes", ()))]
    if root.opcode == "reduce":
        sides = _sides(root.operands[0])
        for d in sorted(_summed_dimensions(root)):
            sizes.insert(d, sides[d])
    if len(sizes) != len(sides):  # a tile of another view of the result
        return 0
    whole = (size >= side for size, side in zip(sizes[::-1], sides[::-1], strict=True))
    together = sum(itertools.accumulate(whole, operator.and_)) + 1  # last dimensions, whose numbers lie side by side
    if math.prod(sizes[:-together]) < ROWS_APART:
        return 0
    return math.prod(-(-side // size) * 2 ** (size - 1).bit_length() for size, side in zip(sizes, sides, strict=True))


def _sides(instruction: Instruction) -> tuple[int, ...]:
    return instruction.shape.arrays[0].dimensions


def _summed_dimensions(reduction: Instruction) -> list[int]:
    return gathers.whole_numbers(reduction.attributes["dimensions"])


def added_sectors(instruction: Instruction) -> int:
    """The sectors of memory that a scatter adds something to, each time that it does; 0 if no two updates may meet.

    An update is a window of the result. What of it lies side by side in memory is added sector by sector. A device that
    has a part of an embedding table leaves out the tokens of other parts, and how many these are is not known: 0.
    """
    if instruction.module.devices > 1 and "embedding" in instruction.name_in_model.owners:
        return 0
    scatters = (one for one in (instruction, *instruction.inside) if one.opcode == "scatter")
    return sum(_added_sectors(one) for one in scatters if _adds_up(one))


def _adds_up(scatter: Instruction) -> bool:
    """Whether a scatter adds updates that may meet. Others overwrite, or store what never meets."""
    (combined,) = scatter.called_computations["to_apply"]
    return combined.root.opcode != "parameter" and scatter.attributes.get("unique_indices") != "true"


def _added_sectors(scatter: Instruction) -> int:
    result, updates = scatter.shape.arrays[0], scatter.operands[-1].shape.arrays[0]
    taken, windows, batches, minor = (
        gathers.whole_numbers(text)
        for text in (
            scatter.attributes["inserted_window_dims"],
            scatter.attributes["update_window_dims"],
            scatter.attributes.get("input_batching_dims", ""),
            result.layout.partition(":")[0],
        )
    )
    last = len(result.dimensions) - 1
    of_windows = [d for d in range(last + 1) if d not in (*taken, *batches)]
    sizes = dict(zip(of_windows, (updates.dimensions[d] for d in windows), strict=True))
    run = sizes.get(minor[0] if minor else last, 1)  # of numbers side by side
    return updates.elements // run * math.ceil(run * bits(result.dtype) / 8 / SECTOR_BYTES)
