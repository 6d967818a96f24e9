"""What gathers, sorts and sums over few rows take on a TPU, where that is longer than their bytes take.

The cycles are those of schedules that libtpu 0.0.42.1 writes down without a TPU: `benchmarks/gather_schedules.py`. A
gather on a TensorCore begins a copy for each of 128 rows, takes the rows out of their tiles as they arrive, stores them
and waits until they are stored. In tiles of a narrow type the rows lie interleaved, so that two rows of bfloat16 are
read for one.
"""

import math
import re
from collections.abc import Sequence

from gspmd_lm.foresight.hlo import Instruction
from gspmd_lm.hardware.chips import Chip
from gspmd_lm.units import bits

LANES, REGISTER = 128, 1024  # numbers of 32 bits
GATHER_ROW = 6.7  # cycles that begin the copy of a row
# 128 numbers of 32 bits, or of two interleaved rows, that the two SparseCores of a device of tpu7x fetch in a second.
# Source: "SparseCore Kernel Writing" in the documentation of jax (2026): 4,194,304 rows of 128 numbers take 4.05 ms,
# where each SparseCore fetches all of them. A TensorCore takes 18.1 ms there; 14.8 by the cycles here.
SPARSECORE_CHIPS = ("tpu7x",)  # where libtpu hands large gathers on to SparseCores
SPARSECORE_PIECES_PER_S = 2 * 4_194_304 / 4.05e-3
FEW = (1, 2, 4)  # rows of a tile with fewer rows than a register has
SUM_TILE = 2.6  # cycles of a weighted sum for each tile of FEW rows
# Cycles that take 128 numbers of a row out of their tile; and those of a sort of keys with their places, for each
# register of them in each round of comparisons.
_NEWER, _OLDER = (0.73, 5.1), (1.07, 8.2)  # v6e, v5p
_CYCLES = {"v6e": _NEWER, "tpu7x": _NEWER}  # tpu7x: inferred, as are v2, v3 and v4, which are taken to be as v5p
_NARROW = re.compile(r"T\(([124]),128\)")


def least_s(instruction: Instruction, chip: Chip, hbm_bytes_per_s: float) -> float:
    """The seconds that an instruction takes at least on a TPU; 0 if nothing but its bytes is known of it.

    `hbm_bytes_per_s` is the bandwidth that operations reach.
    """
    if instruction.opcode == "sort":
        arrays = instruction.shape.arrays
        length = arrays[0].dimensions[int(instruction.attributes["dimensions"].strip("{}"))]
        return sort_s(arrays[0].elements, length, len(arrays), chip)
    if gather := _gather(instruction):
        table, found = gather.operands[0].shape.arrays[0], gather.shape.arrays[0]
        sizes = whole_numbers(gather.attributes["slice_sizes"])
        stored_bytes = sum(array.padded_bytes for array in instruction.shape.arrays if not array.memory_space)
        return gather_s(
            found.elements / math.prod(sizes),
            sizes,
            found.padded_bytes,
            bits(table.dtype),
            chip,
            hbm_bytes_per_s,
            stored_bytes,
            instruction.config.get("compute_type") == "COMPUTE_TYPE_TILE",
        )
    return sum_s(*_narrow_tiles(instruction), chip)


def gather_s(
    rows: float,
    sizes: Sequence[int],
    found_bytes: float,
    table_bits: int,
    chip: Chip,
    hbm_bytes_per_s: float,
    stored_bytes: float,
    on_sparse_cores: bool,
) -> float:
    """The seconds of a gather of slices of these sizes, which may be rows.

    found_bytes: of what is found, in whole tiles. stored_bytes: those of them that go to HBM.
    """
    # A single number is no piece of a row.
    pieces = rows * math.prod(sizes[:-1]) * math.ceil(sizes[-1] / LANES) if sizes[-1] > 1 else 0.0
    read_s, stored_s = (size / hbm_bytes_per_s for size in (found_bytes * max(1, 32 // table_bits), stored_bytes))
    if on_sparse_cores:
        return max(read_s + stored_s, pieces / SPARSECORE_PIECES_PER_S)
    cycles = rows * GATHER_ROW + pieces * _CYCLES.get(chip.compiler_name, _OLDER)[0]
    return max(read_s, cycles / chip.tensor_cores / chip.clock_hz) + stored_s


def sort_s(elements: float, length: int, arrays: int, chip: Chip) -> float:
    """The seconds of a bitonic sort along a dimension: of 2^n numbers, it has n (n + 1) / 2 rounds of comparisons.

    elements: those of one of the arrays that are sorted alike.
    """
    doublings = math.ceil(math.log2(max(2, length)))
    registers = math.ceil(elements / length * 2**doublings / REGISTER)
    cycles = registers * doublings * (doublings + 1) / 2 * _CYCLES.get(chip.compiler_name, _OLDER)[1] * arrays / 2
    return cycles / chip.clock_hz


def sum_s(elements: float, few: int, chip: Chip) -> float:
    """The seconds of a sum over `few` rows each, whose tiles have no more rows than these. elements: in whole tiles."""
    return SUM_TILE * elements / (few * LANES) / chip.tensor_cores / chip.clock_hz if few in FEW else 0.0


def whole_numbers(attribute: str) -> list[int]:
    """Those that an attribute such as slice_sizes={1,128} lists."""
    return [int(number) for number in re.findall(r"\d+", attribute)]


def _gather(instruction: Instruction) -> Instruction | None:
    """The gather that an instruction is, or that a fusion was made for."""
    if instruction.opcode == "fusion" and instruction.attributes.get("kind") == "kCustom":
        return next((one for one in instruction.inside if one.opcode == "gather"), None)
    return instruction if instruction.opcode == "gather" else None


def _narrow_tiles(instruction: Instruction) -> tuple[float, int]:
    """The numbers of the largest array that a fusion sums up, in whole tiles, and the few rows of a tile; or zeros."""
    if instruction.opcode != "fusion" or not any(one.opcode == "reduce" for one in instruction.inside):
        return 0.0, 0
    arrays = [array for operand in instruction.operands for array in operand.shape.arrays]
    largest = max(arrays, key=lambda array: array.padded_bytes, default=None)
    if largest is None or len(largest.dimensions) < 3 or not (narrow := _NARROW.search(largest.layout)):
        return 0.0, 0
    return largest.padded_bytes * 8 / bits(largest.dtype), int(narrow[1])
