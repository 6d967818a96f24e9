"""The FLOPs of matmuls in a compiled program: dots, convolutions, calls of libraries and kernels."""

import math
import re
from collections.abc import Iterable

from gspmd_lm.foresight.equations import input_pairs
from gspmd_lm.foresight.hlo import Array, Instruction, Module
from gspmd_lm.foresight.timing import memory_traffic
from gspmd_lm.hardware.chips import Chip
from gspmd_lm.model.kernels import grouped
from gspmd_lm.units import bits

_FIELD = re.compile(r"(\w+)=([\d_x\-]+)")
_GROUPED = "/grouped/"  # in the names of what kernels/grouped.py computes
_GEMMS = ("__cublas$gemm", "__cublas$lt$matmul", "__cublas$lt$matmul$f8", "__triton_gemm")


def flops_of(module: Module, instruction: Instruction) -> float:
    """The FLOPs of one run of an instruction, 2 x multiply-adds of all its matmuls; 0 if it has none."""
    if instruction.opcode == "fusion":
        return sum(flops_of(module, inner) for inner in module.inside(instruction) if inner.opcode != "fusion")
    if instruction.opcode == "dot":
        return _dot(module, instruction, re.findall(r"\d+", instruction.attributes.get("lhs_contracting_dims", "")))
    if instruction.opcode == "convolution":
        return _convolution(module, instruction)
    if instruction.custom_call_target in _GEMMS:
        dimensions = instruction.config.get("gemm_backend_config", {}).get("dot_dimension_numbers", {})
        return _dot(module, instruction, dimensions.get("lhs_contracting_dimensions", ()))
    return 0.0


def kernel_work(module: Module, call: Instruction) -> tuple[float, float] | None:
    """The (FLOPs, bytes) of a kernel: its own estimate or, without one, what a grouped matmul's shapes say; else None.

    Of a buffer for the worst case, only the rows that balanced routing fills count: kernels skip the tiles of others.
    A kernel may have more rows than the buffer, to fill its last tile.
    """
    arrays, work = _arrays(module, call), call.cost_estimate
    rows = max((array.dimensions[0] for array in arrays if len(array.dimensions) == 2), default=0)
    if work is None and _GROUPED in call.op_name:
        # Of [M, D], [E, D, F] and [M, F], any two give the third.
        matrices = next((array.dimensions[1:] for array in arrays if len(array.dimensions) == 3), ())
        moved = float(memory_traffic.bytes_of(module, call)["hbm"])
        work = (2.0 * rows * math.prod(matrices), moved) if rows and matrices else None
    buffers = sorted(module.buffers.items(), reverse=True)
    share = next((filled * many / rows for many, filled in buffers if many <= rows < many + grouped.MOST_ROWS), 1.0)
    return work and (work[0] * share, work[1] * share)


def tiled_work(
    module: Module, call: Instruction, chip: Chip, operations: float, moved_bytes: float
) -> tuple[float, float]:
    """The FLOPs and bytes of a TPU's kernel that says so many: of a grouped matmul, those of its tiles.

    Megablox says that it reads its weights again for each tile of rows, also where they stay on the chip.
    """
    arrays = _arrays(module, call)
    matrices = next((array for array in arrays if len(array.dimensions) == 3), None)
    if _GROUPED not in call.op_name or matrices is None or not operations:
        return operations, moved_bytes
    experts, inner, columns = matrices.dimensions
    outer = matrices is arrays[-1]
    if not outer and arrays[0].dimensions[-1] != inner:  # given as its transpose
        inner, columns = columns, inner
    rows = operations / (2 * inner * columns)
    itemsize = bits(matrices.dtype) // 8
    share, kernel_bytes = grouped.work(rows, experts, inner, columns, itemsize, chip.kinds[0], outer)
    return operations / share, kernel_bytes


def _arrays(module: Module, call: Instruction) -> list[Array]:
    """The operands and results of a kernel that are no whole numbers."""
    arrays = (array for one in (*module.operands(call), call) for array in one.shape.arrays)
    return [array for array in arrays if not array.dtype.startswith(("s", "u"))]


def _dot(module: Module, instruction: Instruction, contracted: Iterable[str]) -> float:
    left = module.operand(instruction).shape.arrays[0].dimensions
    return 2.0 * instruction.shape.arrays[0].elements * math.prod(left[int(d)] for d in contracted)


def _convolution(module: Module, instruction: Instruction) -> float:
    """The multiply-adds of a convolution: pairs of an output and a kernel position that meet an input.

    Padding and the holes of a dilation are not inputs. TPU programs write batches and heads as windows, whose size,
    dilation and padding let every output meet one kernel position. Such a window is not a contraction.
    """
    left, kernel = (module.operand(instruction, n).shape.arrays[0].dimensions for n in (0, 1))
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
