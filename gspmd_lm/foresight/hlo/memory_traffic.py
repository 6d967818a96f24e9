"""The bytes that an instruction reads and writes in each memory. Parts that a slice leaves out do not count."""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING

from gspmd_lm.foresight.hlo.collective_op import COLLECTIVES
from gspmd_lm.foresight.hlo.shape import HOST_SPACE, Array

if TYPE_CHECKING:
    from gspmd_lm.foresight.hlo.instruction import Instruction

_SLICES = ("dynamic-slice", "slice", "gather")
_VIEWS = ("bitcast", "reshape", "get-tuple-element", "tuple", "optimization-barrier")
_CARRIED = (*COLLECTIVES, "custom-call")  # in fusions, asynchronous collectives keep these between their steps
_ON_CHIP = 1  # a memory space of TPU layouts
_MEMORY = {0: "hbm", _ON_CHIP: "chip", HOST_SPACE: "host"}


def moved_bytes(instruction: Instruction) -> collections.Counter[str]:
    """The bytes that one run of an instruction of the schedule reads and writes, in "hbm", "chip" and "host".

    "chip" is on-chip memory that the compiler manages (TPU). Semaphores and scalars in other memories are left out.
    """
    traffic = collections.Counter[str]()
    operands = instruction.operands
    if instruction.opcode == "fusion":
        (inside,) = instruction.called["calls"]
        for n, operand in enumerate(operands):
            _add(traffic, operand.shape.arrays, _bytes_read(inside.parameters[n]))
        _add(traffic, instruction.shape.arrays, _bytes_written(inside.root))
    elif instruction.opcode in _SLICES:
        _add(traffic, instruction.shape.arrays, None)
        _add(traffic, operands[0].shape.arrays, instruction.shape.arrays[0].padded_bytes)
    elif instruction.opcode == "dynamic-update-slice":
        _add(traffic, operands[1].shape.arrays, None)
        _add(traffic, instruction.shape.arrays, operands[1].shape.arrays[0].padded_bytes)
    else:
        for operand in operands:
            _add(traffic, operand.shape.arrays, None)
        _add(traffic, instruction.shape.arrays, None)
    return traffic


def _add(traffic: collections.Counter[str], arrays: tuple[Array, ...], limit_bytes: int | None) -> None:
    """Adds the arrays of one operand or result, or only `limit_bytes` of them."""
    whole = sum(array.padded_bytes for array in arrays) or 1
    share = 1.0 if limit_bytes is None else min(1.0, limit_bytes / whole)
    for array in arrays:
        memory = _MEMORY.get(array.memory_space)
        if memory:
            traffic[memory] += round(array.padded_bytes * share)


def _bytes_read(value: Instruction) -> int:
    """How many bytes of `value`, a parameter or a view of one, its fused computation reads."""
    whole = sum(array.padded_bytes for array in value.shape.arrays)
    total = 0
    for user in value.users:
        first = user.operands[0] is value
        if (user.opcode in _SLICES and first) or user.opcode == "get-tuple-element":
            total += sum(array.padded_bytes for array in user.shape.arrays)
        elif user.opcode in _CARRIED or (user.opcode == "dynamic-update-slice" and first):
            continue
        elif user.opcode in _VIEWS:
            total += 0 if user.is_root else _bytes_read(user)
        elif user.opcode == "fusion":
            (inside,) = user.called["calls"]
            total += _bytes_read(inside.parameters[user.operands.index(value)])
        else:
            return whole
    return min(total, whole)


def _bytes_written(root: Instruction) -> int:
    """How many bytes of a result a fusion writes: the new part of an update in place, none of a value passed on."""
    if root.opcode == "tuple":
        return sum(map(_bytes_written, root.operands))
    if root.opcode in ("bitcast", "reshape", "optimization-barrier") and root.operands:
        return _bytes_written(root.operands[0])
    if root.opcode == "dynamic-update-slice":
        return root.operands[1].shape.arrays[0].padded_bytes
    if root.opcode == "fusion":
        (inside,) = root.called["calls"]
        return _bytes_written(inside.root)
    if root.opcode == "parameter" or root.opcode in _CARRIED:
        return 0
    return sum(array.padded_bytes for array in root.shape.arrays)
