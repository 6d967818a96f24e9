"""The FLOPs of matmuls in a compiled program: dots, convolutions and calls of libraries."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from gspmd_lm.foresight.equations import input_pairs

if TYPE_CHECKING:
    from gspmd_lm.foresight.hlo.instruction import Instruction

_FIELD = re.compile(r"(\w+)=([\d_x\-]+)")
_GEMMS = ("__cublas$gemm", "__cublas$lt$matmul", "__cublas$lt$matmul$f8", "__triton_gemm")


def of_matmuls(instruction: Instruction) -> float:
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
