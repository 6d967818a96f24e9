"""What one run of an instruction computes and moves: the FLOPs of its matmuls, and the bytes in each memory.

Matmuls are dots, convolutions and calls of libraries. Parts of an array that a slice leaves out do not count as moved.
"""

from __future__ import annotations

import collections
import math
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from gspmd_lm.foresight.equations import input_pairs
from gspmd_lm.foresight.hlo.collective_op import COLLECTIVES
from gspmd_lm.foresight.hlo.shape import HOST_SPACE, Array

if TYPE_CHECKING:
    from gspmd_lm.foresight.hlo.instruction import Instruction

_FIELD = re.compile(r"(\w+)=([\d_x\-]+)")
_GEMMS = ("__cublas$gemm", "__cublas$lt$matmul", "__cublas$lt$matmul$f8", "__triton_gemm")
_LIBRARIES = ("__cublas$", "__cudnn$")  # the last result of such a call is the memory that it works in
_SLICES = ("dynamic-slice", "slice", "gather")
_VIEWS = ("bitcast", "reshape", "get-tuple-element", "tuple", "optimization-barrier")
_CARRIED = (*COLLECTIVES, "custom-call")  # in fusions, asynchronous collectives keep these between their steps
_ON_CHIP = 1  # a memory space of TPU layouts
_MEMORY = {0: "hbm", _ON_CHIP: "chip", HOST_SPACE: "host"}


def matmul_flops(instruction: Instruction) -> float:
    """The FLOPs of one run of an instruction, 2 x multiply-adds of all its matmuls; 0 if it has none."""
    if instruction.opcode == "fusion":
        return sum(inner.flops for inner in instruction.inside if inner.opcode != "fusion")
    if instruction.opcode == "dot":
        return _dot(instruction, re.findall(r"\d+", instruction.attributes.get("lhs_contracting_dims", "")))
    if instruction.opcode == "convolution":
        return _convolution(instruction)
    if instruction.custom_call_target in _GEMMS:
        dimensions = instruction.config.get("gemm_backend_config", {}).get("dot_dimension_numbers", {})
        return _dot(instruction, dimensions.get("lhs_contracting_dimensions", ()))
    return 0.0


def _dot(instruction: Instruction, contracted: Iterable[str]) -> float:
    left = instruction.operands[0].shape.arrays[0].dimensions
    return 2.0 * instruction.shape.arrays[0].elements * math.prod(left[int(d)] for d in contracted)


def _convolution(instruction: Instruction) -> float:
    """The multiply-adds of a convolution: pairs of an output and a kernel position that meet an input.

    Padding and the holes of a dilation are not inputs. TPU programs write batches and heads as windows, whose size,
    dilation and padding let every output meet one kernel position. Such a window is not a contraction.
    """
    left, kernel = (operand.shape.arrays[0].dimensions for operand in instruction.operands)
    result = instruction.shape.arrays[0].dimensions
    left_labels, rest = instruction.attributes["dim_labels"].split("_", 1)
    kernel_labels, result_labels = rest.split("->")
    dimensions = len(left_labels) - 2
    given_window = {name: text.split("x") for name, text in _FIELD.findall(instruction.attributes.get("window", ""))}
    window = {"pad": ["0_0"] * dimensions} | dict.fromkeys(("stride", "lhs_dilate", "rhs_dilate"), ["1"] * dimensions)
    window |= given_window
    positions = 1
    for n in range(dimensions):
        at = str(n)
        positions *= input_pairs(
            left[left_labels.index(at)],
            kernel[kernel_labels.index(at)],
            result[result_labels.index(at)],
            stride=int(window["stride"][n]),
            low=int(window["pad"][n].split("_")[0]),
            left_dilate=int(window["lhs_dilate"][n]),
            kernel_dilate=int(window["rhs_dilate"][n]),
        )
    # The kernel's input features are already those of one group.
    batch, outputs = result[result_labels.index("b")], result[result_labels.index("f")]
    batch //= int(instruction.attributes.get("batch_group_count", 1)) if batch < left[left_labels.index("b")] else 1
    return 2.0 * positions * batch * outputs * kernel[kernel_labels.index("i")]


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
        results = instruction.shape.arrays
        scratch = instruction.custom_call_target.startswith(_LIBRARIES) and len(results) > 1
        _add(traffic, results[:-1] if scratch else results, None)
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
