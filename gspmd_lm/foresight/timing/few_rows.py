"""What a product of few rows takes on a TPU. It reads its weights, or the cache, and uses each number a few times.

libtpu 0.0.42.1 adds up the copies of an operand's windows and their products in the cycles that it estimates. In its
schedules, which `benchmarks/few_row_schedules.py` reads, the next window is copied while one is multiplied. So the
longer of both counts, and of the shorter one window: the first is copied and the last multiplied beside nothing. A TPU
v5e reads 8 bits of a weight in 1.9 cycles for 1,024 numbers and multiplies them in 0.6.

TPUs up to v4 have no instruction that unpacks 8 bits, and take 7 others for 1,024 numbers: longer than reading them.

Train steps, which have few such products, keep the estimates with which constants of `op_time.py` were fitted.
"""

import math

from gspmd_lm.foresight.hlo import Instruction
from gspmd_lm.foresight.hlo.work import read_bytes
from gspmd_lm.hardware.chips import Chip

FEW = 128  # fewer rows than a matrix unit is wide
LONGER = 2  # A product whose FLOPs take so many times as long as its bytes is none of these.
REGISTER = 1024  # numbers
# Cycles of a core that widen 1,024 numbers of 8 bits, and those that multiply them with each row. In the schedules of a
# step of decode of 64 rows, both together take 4.4 to 4.6 cycles, which is 0.016 for each row. The benchmark's program,
# whose product normalises the rows too, takes 0.022, and a product alone 0.010.
WIDENING: dict[str, tuple[float, float]] = {name: (3.5, 0.016) for name in ("v2", "v3", "v4")}  # v2, v3: inferred
_NARROW = ("s8", "f8")


def seconds(product: Instruction, matmul: Instruction, chip: Chip, memory_s: float, units_s: float) -> float | None:
    """The seconds of a product of few rows; None for others.

    product: an instruction of the schedule. matmul: the one in it. memory_s, units_s: of its bytes, and of its FLOPs.
    """
    if product.module.trains:
        return None
    widened = _widened_numbers(product, matmul)
    if units_s > LONGER * memory_s or not (widened or _rows(matmul) < FEW):
        return None
    copies_s = product.moved_bytes["hbm"] / chip.hbm_bytes_per_s
    estimated_s = (product.estimated_cycles or 0) / chip.clock_hz
    rows = product.flops / (2 * widened) if widened else 0.0
    loop_s = max(units_s, estimated_s - copies_s, widening_s(widened, rows, chip))
    return max(memory_s, loop_s) + min(memory_s, loop_s) / count_windows(product, chip)


def widening_s(numbers: float, rows: float, chip: Chip) -> float:
    """The seconds in which a TPU widens numbers of 8 bits and multiplies them with some rows; 0 where it unpacks."""
    fixed, each_row = WIDENING.get(chip.compiler_name, (0.0, 0.0))
    return numbers / REGISTER * (fixed + each_row * rows) / chip.tensor_cores / chip.clock_hz


def count_windows(operation: Instruction, chip: Chip) -> float:
    """How many windows of an operation's operands one core copies; infinitely many if the compiler does not say."""
    bounds = operation.config.get("window_config", {}).get("iteration_bounds") or [math.inf]
    return max(1.0, math.prod(map(float, bounds)) / chip.tensor_cores)


def _widened_numbers(product: Instruction, matmul: Instruction) -> int:
    """How many numbers of 8 bits a product widens before it multiplies them."""
    if all(operand.shape.arrays[0].dtype.startswith(_NARROW) for operand in matmul.operands[:2]):
        return 0  # they are multiplied as they are
    narrow = (n for n, one in enumerate(product.operands) if one.shape.arrays[0].dtype.startswith(_NARROW))
    return sum(read_bytes(product, n) for n in narrow)


def _rows(matmul: Instruction) -> float:
    """The rows, or the columns, of a product, whichever are fewer."""
    left, right = (operand.shape.arrays[0].elements for operand in matmul.operands[:2])
    result = matmul.shape.arrays[0].elements
    return math.sqrt(result * min(left / right, right / left))
