"""The compute time of operations in CPU programs. The time of their memory traffic is predicted elsewhere."""

import math

from gspmd_lm.foresight.hlo import Instruction
from gspmd_lm.foresight.timing import gathers, gpu_fusions
from gspmd_lm.hardware.chips import SLOW_ARITHMETIC, Chip

# An operation of a program -> the operation of `Chip.element_rates` that takes as long.
_ALIKE = {
    "exponential-minus-one": "exponential",
    "log-plus-one": "log",
    "cbrt": "power",
    "cosine": "sine",
    "tan": "sine",
    "atan2": "power",
    "remainder": "divide",
    "stochastic-convert": "divide",
    "rng-bit-generator": "divide",
}


def arithmetic_s(instruction: Instruction, chip: Chip) -> float:
    """The time of an instruction's operations, but for its matmuls: what they compute, sum, pick and transpose."""
    return sum(_work_s(one, chip) for one in (instruction, *instruction.inside))


def _work_s(one: Instruction, chip: Chip) -> float:
    """The time of one operation, beside its bytes; 0 for a fusion itself."""
    rates, opcode = chip.element_rates, one.opcode
    if not rates or one.flops or not one.shape.arrays:
        return 0.0
    elements = max(array.elements for array in one.shape.arrays)
    if opcode in gpu_fusions.ARITHMETIC:
        name = _ALIKE.get(opcode, opcode)
        return elements / rates.get(name if name in SLOW_ARITHMETIC else "add", rates["add"])
    if opcode == "reduce":
        source = one.operands[0].shape.arrays[0]
        last = len(source.dimensions) - 1
        along = "reduce" if last in gathers.whole_numbers(one.attributes["dimensions"]) else "reduce columns"
        return source.elements / rates[along]
    if opcode in ("gather", "reduce-window"):
        return elements / rates[opcode]
    if opcode == "scatter":
        return max(array.elements for array in one.operands[-1].shape.arrays) / rates[opcode]
    if opcode == "sort":
        length = one.shape.arrays[0].dimensions[gathers.whole_numbers(one.attributes["dimensions"])[0]]
        doublings = math.ceil(math.log2(max(2, length)))
        return len(one.shape.arrays) * elements * doublings * (doublings + 1) / 2 / rates[opcode]
    if opcode in ("transpose", "copy") and _moves_last(one):
        return elements / rates["transpose"]
    return 0.0


def _moves_last(one: Instruction) -> bool:
    """Whether the elements that lie side by side in memory lie apart before or after it."""
    source, result = one.operands[0].shape.arrays[0], one.shape.arrays[0]
    minor = [int(array.layout.partition(":")[0].split(",")[0] or 0) for array in (source, result) if array.layout]
    if len(minor) < 2:
        return False
    order = gathers.whole_numbers(one.attributes.get("dimensions", "")) or [*range(len(result.dimensions))]
    return order[minor[1]] != minor[0]
