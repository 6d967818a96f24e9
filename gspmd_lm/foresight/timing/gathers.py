"""What gathers, sorts and sums over few rows take on a TPU, where that is longer than their bytes take.

The cycles are those of schedules that libtpu 0.0.42.1 writes down without a TPU: `benchmarks/gather_schedules.py`. A
gather on a TensorCore begins a copy for each of 128 rows, takes the rows out of their tiles as they arrive, stores them
and waits until they are stored. In tiles of a narrow type the rows lie interleaved, so that two rows of bfloat16 are
read for one.
"""

import math
import re

from gspmd_lm.foresight.hlo import Instruction
from gspmd_lm.hardware.chips import Chip
from gspmd_lm.units import bits

LANES, REGISTER = 128, 1024  # numbers of 32 bits
GATHER_ROW = 6.7  # cycles that begin the copy of a row
# 128 numbers of 32 bits, or of two interleaved rows, that the two SparseCores of a device of tpu7x fetch in a second.
# Source: "SparseCore Kernel Writing" in the documentation of jax (2026): 4,194,304 rows of 128 numbers take 4.05 ms,
# where each SparseCore fetches all of them. A TensorCore takes 18.1 ms there; 14.8 by the cycles here.
SPARSECORE_PIECES_PER_S = 2 * 4_194_304 / 4.05e-3
SUM_TILE = 2.6  # cycles of a weighted sum for each tile of fewer rows than a register has
# Cycles that take 128 numbers of a row out of their tile; and those of a sort of keys with their places, for each
# register of them in each round of comparisons.
_NEWER, _OLDER = (0.73, 5.1), (1.07, 8.2)  # v6e, v5p
_CYCLES = {"v6e": _NEWER, "tpu7x": _NEWER, "v5p": _OLDER, "v5e": _OLDER, "v4": _OLDER}  # v4 and tpu7x: inferred
_NARROW = re.compile(r"T\(([124]),128\)")
_WHOLE = re.compile(r"\d+")


def least_s(instruction: Instruction, chip: Chip, hbm_bytes_per_s: float) -> float:
    """The seconds that an instruction takes at least on a TPU; 0 if nothing but its bytes is known of it.

    `hbm_bytes_per_s` is the bandwidth that operations reach.
    """
    piece, step = _CYCLES[chip.name]
    if instruction.opcode == "sort":
        return _sort_cycles(instruction, step) / chip.clock_hz
    if gather := _gather(instruction):
        table, found = gather.operands[0].shape.arrays[0], gather.shape.arrays[0]
        read_s = found.padded_bytes * max(1, 32 // bits(table.dtype)) / hbm_bytes_per_s
        stored_s = sum(array.padded_bytes for array in instruction.shape.arrays if not array.memory_space)
        stored_s /= hbm_bytes_per_s
        if instruction.config.get("compute_type") == "COMPUTE_TYPE_TILE":  # on the SparseCores
            return max(read_s + stored_s, _pieces(gather)[1] / SPARSECORE_PIECES_PER_S)
        rows, pieces = _pieces(gather)
        cycles = rows * GATHER_ROW + pieces * piece
        return max(read_s, cycles / chip.tensor_cores / chip.clock_hz) + stored_s
    return SUM_TILE * _narrow_tiles(instruction) / chip.tensor_cores / chip.clock_hz


def _gather(instruction: Instruction) -> Instruction | None:
    """The gather that an instruction is, or that a fusion was made for."""
    if instruction.opcode == "fusion" and instruction.attributes.get("kind") == "kCustom":
        return next((one for one in instruction.inside if one.opcode == "gather"), None)
    return instruction if instruction.opcode == "gather" else None


def _pieces(gather: Instruction) -> tuple[float, float]:
    """The rows that are looked up, and their pieces of 128 numbers; a single number is no piece."""
    sizes = [int(size) for size in _WHOLE.findall(gather.attributes["slice_sizes"])]
    rows = gather.shape.arrays[0].elements / math.prod(sizes)
    return rows, rows * math.prod(sizes[:-1]) * math.ceil(sizes[-1] / LANES) if sizes[-1] > 1 else 0.0


def _sort_cycles(sort: Instruction, step_cycles: float) -> float:
    """Those of a bitonic sort of 2^n numbers, which has n (n + 1) / 2 rounds of comparisons."""
    arrays = sort.shape.arrays
    length = arrays[0].dimensions[int(sort.attributes["dimensions"].strip("{}"))]
    doublings = math.ceil(math.log2(max(2, length)))
    registers = math.ceil(arrays[0].elements / length * 2**doublings / REGISTER)
    return registers * doublings * (doublings + 1) / 2 * step_cycles * len(arrays) / 2


def _narrow_tiles(instruction: Instruction) -> float:
    """The tiles of 1, 2 or 4 rows of the largest array that a fusion sums up."""
    if instruction.opcode != "fusion" or not any(one.opcode == "reduce" for one in instruction.inside):
        return 0.0
    arrays = [array for operand in instruction.operands for array in operand.shape.arrays]
    largest = max(arrays, key=lambda array: array.padded_bytes, default=None)
    if largest is None or len(largest.dimensions) < 3 or not (narrow := _NARROW.search(largest.layout)):
        return 0.0
    return largest.padded_bytes * 8 / bits(largest.dtype) / (int(narrow[1]) * LANES)
