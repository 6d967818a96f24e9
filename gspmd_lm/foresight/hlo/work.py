"""The work of one run of an instruction: FLOPs of matmuls, bytes in each memory, exchanges between devices.

Matmuls are dots, convolutions and calls of libraries. Parts of an array that a slice leaves out do not count as moved.
Each collective is found once, in any form.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from gspmd_lm.errors import InputError
from gspmd_lm.foresight.equations import input_pairs
from gspmd_lm.foresight.hlo.shape import MEMORIES, Array
from gspmd_lm.hardware import network
from gspmd_lm.hardware.chips import COMPLEX
from gspmd_lm.hardware.network import Groups

if TYPE_CHECKING:
    from gspmd_lm.foresight.hlo.instruction import Instruction

COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
# Custom calls of a TPU fusion that are given an asynchronous collective which it begins or ends.
STARTED, ENDED = "AsyncCollectiveStart", "AsyncCollectiveDone"
# Attributes of sends: of those to other slices of TPUs, and of those that XLA:GPU makes of permutes.
BETWEEN_SLICES, _PAIRS = "_xla_megascale_transfer_type", "_xla_send_recv_source_target_pairs"
# How programs write groups of devices.
_IOTA = re.compile(r"\[([\d,]+)\](?:<=\[([\d,]+)\])?(?:T\(([\d,]+)\))?")
_MESH = re.compile(r"mesh\[([^\]]*)\](?:, device_ids=\((.*)\))? \{(.*)\}$")
_SIZE = re.compile(r"'?([^'=,\s]+)'?=(\d+)")
_AXIS = re.compile(r"'?([^',:\s]+)'?(?::\((\d+)\)(\d+))?")
_FIELD = re.compile(r"(\w+)=([\d_x\-]+)")
_GEMMS = ("__cublas$gemm", "__cublas$lt$matmul", "__cublas$lt$matmul$f8", "__triton_gemm")
# Convolutions of cuDNN -> which two of (picture, kernel, result) are its operands; the third is what it gives.
_CONVOLUTIONS = {
    "__cudnn$convForward": (0, 1),
    "__cudnn$convForwardGraph": (0, 1),
    "__cudnn$convBiasActivationForward": (0, 1),
    "__cudnn$convBackwardInput": (2, 1),
    "__cudnn$convBackwardFilter": (0, 2),
}
_LIBRARIES = ("__cublas$", "__cudnn$")  # the last result of such a call is the memory that it works in
_SLICES = ("dynamic-slice", "slice", "gather")
_VIEWS = ("bitcast", "reshape", "get-tuple-element", "tuple", "optimization-barrier")
_CARRIED = (*COLLECTIVES, "custom-call")  # in fusions, asynchronous collectives keep these between their steps


# FLOPs and bytes


def matmul_flops(instruction: Instruction) -> float:
    """The FLOPs of one run of an instruction, 2 x multiply-adds of all its matmuls; 0 if it has none.

    A product of complex numbers is four of real ones.
    """
    if instruction.opcode == "fusion":
        return sum(inner.flops for inner in instruction.inside if inner.opcode != "fusion")
    return 2.0 * _multiply_adds(instruction) * _real_products(instruction)


def _real_products(matmul: Instruction) -> int:
    arrays = [array for operand in matmul.operands[:1] for array in operand.shape.arrays]
    return 4 if any(array.dtype in COMPLEX for array in arrays) else 1


def _multiply_adds(instruction: Instruction) -> float:
    if instruction.opcode == "dot":
        return _dot(instruction, re.findall(r"\d+", instruction.attributes.get("lhs_contracting_dims", "")))
    if instruction.opcode == "convolution" or instruction.custom_call_target in _CONVOLUTIONS:
        return _convolution(instruction)
    if instruction.custom_call_target in _GEMMS:
        dimensions = instruction.config.get("gemm_backend_config", {}).get("dot_dimension_numbers", {})
        return _dot(instruction, dimensions.get("lhs_contracting_dimensions", ()))
    return 0.0


def _dot(instruction: Instruction, contracted: Iterable[str]) -> float:
    left = instruction.operands[0].shape.arrays[0].dimensions
    return instruction.shape.arrays[0].elements * math.prod(left[int(d)] for d in contracted)


def dot_sides(instruction: Instruction) -> tuple[float, float, float, float]:
    """The sides of a matmul that is no fusion: how many matrices, and rows, contracted numbers and columns of each.

    A convolution is one product of all outputs of a feature and of all features.
    """
    left, right = (operand.shape.arrays[0] for operand in instruction.operands[:2])
    result = instruction.shape.arrays[0].elements
    contracted = instruction.flops / (2 * result * _real_products(instruction))
    if instruction.opcode == "convolution":
        columns = max(right.dimensions)
        return 1.0, result / columns, contracted, columns
    dimensions = instruction.config.get("gemm_backend_config", {}).get("dot_dimension_numbers", {})
    batches = dimensions.get("lhs_batch_dimensions", ()) or re.findall(
        r"\d+", instruction.attributes.get("lhs_batch_dims", "")
    )
    batch = math.prod(left.dimensions[int(d)] for d in batches)
    return batch, left.elements / batch / contracted, contracted, right.elements / batch / contracted


def _convolution(instruction: Instruction) -> float:
    """The multiply-adds of a convolution: pairs of an output and a kernel position that meet an input.

    Padding and the holes of a dilation are not inputs. TPU programs write batches and heads as windows, whose size,
    dilation and padding let every output meet one kernel position. Such a window is not a contraction. A call of cuDNN
    says of a gradient which convolution it is the gradient of.
    """
    dimensions_of = dict[int, tuple[int, ...]]()
    places = _CONVOLUTIONS.get(instruction.custom_call_target, (0, 1))
    for place, one in zip((*places, 3 - sum(places)), (*instruction.operands[:2], instruction), strict=True):
        dimensions_of[place] = one.shape.arrays[0].dimensions
    left, kernel, result = (dimensions_of[place] for place in range(3))
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
    return positions * batch * outputs * kernel[kernel_labels.index("i")]


def moved_bytes(instruction: Instruction) -> collections.Counter[str]:
    """The bytes that one run of an instruction of the schedule reads and writes, in "hbm", "chip" and "host".

    "chip" is on-chip memory that the compiler manages (TPU). Semaphores and scalars in other memories are left out.
    """
    traffic = collections.Counter[str]()
    operands = instruction.operands
    if instruction.opcode == "fusion":
        (inside,) = instruction.called_computations["calls"]
        for n, operand in enumerate(operands):
            _add(traffic, operand.shape.arrays, read_bytes(instruction, n))
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
        memory = MEMORIES.get(array.memory_space)
        if memory:
            traffic[memory] += round(array.padded_bytes * share)


def read_bytes(instruction: Instruction, operand: int) -> int:
    """How many bytes an instruction reads of one of its operands."""
    if instruction.opcode != "fusion":
        return sum(array.padded_bytes for array in instruction.operands[operand].shape.arrays)
    (inside,) = instruction.called_computations["calls"]
    return _bytes_read(inside.parameters[operand])


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
        elif user.opcode in _VIEWS or _tiles_anew(user):
            total += 0 if user.is_root else _bytes_read(user)
        elif user.opcode == "fusion":
            (inside,) = user.called_computations["calls"]
            parameter = inside.parameters[user.operands.index(value)]
            total += _bytes_read(parameter)
            if _is_view(inside.root, parameter) and not user.is_root:
                total += _bytes_read(user)
        else:
            return whole
    return min(total, whole)


def _is_view(value: Instruction, of: Instruction) -> bool:
    """Whether a value is another view of a parameter of its fusion."""
    while value.opcode in ("bitcast", "reshape") and value.operands:
        value = value.operands[0]
    return value is of


def _tiles_anew(inner: Instruction) -> bool:
    """Whether a fusion changes only the tiles of its operand, in place, so that nothing is moved."""
    if inner.opcode != "fusion" or "output_to_operand_aliasing" not in inner.attributes:
        return False
    (inside,) = inner.called_computations["calls"]
    return inside.root.opcode == "copy" and inside.root.operands[0].opcode == "parameter"


def _bytes_written(root: Instruction) -> int:
    """How many bytes of a result a fusion writes: the new part of an update in place, none of a value passed on."""
    if root.opcode == "tuple":
        return sum(map(_bytes_written, root.operands))
    if root.opcode in ("bitcast", "reshape", "optimization-barrier") and root.operands:
        return _bytes_written(root.operands[0])
    if root.opcode == "dynamic-update-slice":
        return root.operands[1].shape.arrays[0].padded_bytes
    if root.opcode == "fusion":
        (inside,) = root.called_computations["calls"]
        return _bytes_written(inside.root)
    if root.opcode == "parameter" or root.opcode in _CARRIED:
        return 0
    return sum(array.padded_bytes for array in root.shape.arrays)


# Exchanges


@dataclasses.dataclass(frozen=True)
class CollectiveOp:
    """One collective, as seen from one device."""

    kind: str  # one of COLLECTIVES
    inputs: tuple[Array, ...]  # what a device gives, several where a combiner joined tensors
    groups: Groups  # partitions; of a permute, the (source, target) pairs
    instruction: Instruction  # the collective itself; `runs` is the instruction of the schedule that has it
    scheduled: Instruction
    asynchronous: bool  # begins here and ends at another instruction

    @property
    def group_size(self) -> int:
        """Devices that take part in one exchange; 2 for a permute."""
        return max((len(group) for group in self.groups), default=1)

    @property
    def size_bytes(self) -> int:
        """The size by which network.py counts a collective: see `network.sent_bytes`."""
        return sum(self.tensor_bytes)

    @property
    def tensor_bytes(self) -> tuple[int, ...]:
        """The same of each tensor that a combiner joined. The pieces of an all-to-all are one tensor."""
        shards = self.group_size if self.kind == "all-gather" else 1
        sizes = tuple(shards * array.bytes for array in self.inputs)
        return (sum(sizes),) if self.kind == "all-to-all" else sizes

    @property
    def sent_bytes(self) -> int:
        """The bytes that one device sends."""
        if self.kind == "collective-permute" and all(source == target for source, target, *_ in self.groups):
            return 0
        return math.ceil(network.sent_bytes(self.kind, self.size_bytes, self.group_size))

    @property
    def elements(self) -> int:
        """Elements of the tensors moved, all of their pieces in one group."""
        pieces = self.group_size if self.kind in ("all-gather", "all-to-all", "ragged-all-to-all") else 1
        return pieces * sum(array.elements for array in self.inputs)


def begun_by(instruction: Instruction) -> tuple[CollectiveOp, ...]:
    """The exchanges that begin with an instruction of the schedule.

    A fusion may hide some. Each is found once. A pair is found at its -start, whose shape may hold more than the
    result. An asynchronous collective that several fusions carry on is found in the fusion that starts it. The
    computations of `Instruction.bodies` are not searched.

    The program of several TPU slices is that of one slice: it numbers the devices within it, and sends to the others
    through the host. The groups are told in partitions of the whole.
    """
    if instruction.opcode == "send":
        return _exchange_of_send(instruction)
    if instruction.base in COLLECTIVES:
        begun = [instruction] if instruction.phase in ("", "-start") else []
    else:
        hidden = instruction.inside if instruction.opcode == "fusion" else ()
        begin = (one for one in hidden if one.base in COLLECTIVES and one.phase in ("", "-start"))
        begun = [one for one in begin if not one.is_carried or one in instruction.carried_collectives[STARTED]]
    return tuple(_collective_op(one, instruction) for one in begun)


def carried_by(fusion: Instruction) -> Mapping[str, tuple[Instruction, ...]]:
    """See `Instruction.carried_collectives`."""
    handed = {one: {user.custom_call_target for user in one.users} for one in fusion.inside}
    return {
        target: tuple(one for one, targets in handed.items() if target in targets and one.is_carried)
        for target in (STARTED, ENDED)
    }


def rendezvous(instruction: Instruction) -> str:
    """What a send and the receive of its answer have in common."""
    return instruction.frontend.get("_xla_host_transfer_rendezvous") or instruction.attributes.get("channel_id", "")


def _collective_op(inner: Instruction, scheduled: Instruction) -> CollectiveOp:
    inputs = tuple(array for operand in inner.operands for array in operand.shape.arrays)
    if inner.base == "ragged-all-to-all":  # its operand or its result may be a buffer with empty rows
        inputs = (min(inputs[:2], key=lambda array: array.elements),)
    # A device keeps but its slice of a reduction: what TPU programs call all-reduce-scatter. It may be one of several
    # arrays, whose slices are then cut from the elements of a tuple.
    users = [user for one in inner.users for user in (one.users if one.opcode == "get-tuple-element" else [one])]
    scattered = inner is not scheduled and {user.opcode for user in users} == {"dynamic-slice"}
    kind = "reduce-scatter" if inner.base == "all-reduce" and scattered else inner.base
    asynchronous = inner.phase == "-start" or inner.is_carried
    asynchronous |= any(caller.phase == "-start" for caller, _ in scheduled.computation.callers)  # on the sparse core
    module = inner.module
    partitions = groups(inner, module.devices)
    if len(module.slices) > module.devices:
        partitions = tuple(
            tuple(inside[k] for k in group) for inside in _partitions_of_slices(module.slices) for group in partitions
        )
    return CollectiveOp(kind, inputs, partitions, inner, scheduled, asynchronous)


def _exchange_of_send(send: Instruction) -> tuple[CollectiveOp, ...]:
    """An exchange between slices: each device with those in its place in the other slices. () for sends to the host.

    XLA:GPU can make a send and a receive of each permute.
    """
    arrays, pairs = send.operands[0].shape.arrays, send.frontend.get(_PAIRS)
    if pairs:
        return (CollectiveOp("collective-permute", arrays, parse_groups(pairs, send.module.devices), send, send, True),)
    kind = send.frontend.get(BETWEEN_SLICES, "").lower().replace("_", "-")
    if not kind:
        return ()
    kind = kind if kind in COLLECTIVES else "collective-permute"
    assert send.module.slices, "a program that sends to other slices is parsed with the slice of each partition"
    across = tuple(zip(*_partitions_of_slices(send.module.slices), strict=True))
    return (CollectiveOp(kind, arrays, across, send, send, True),)


def _partitions_of_slices(slices: Sequence[int]) -> list[list[int]]:
    """The partitions of each slice, in their order."""
    return [[k for k, at in enumerate(slices) if at == n] for n in sorted(set(slices))]


def groups(instruction: Instruction, devices: int) -> Groups:
    """The groups of a collective, or the (source, target) pairs of a permute. Raises as `parse_groups`."""
    pairs = instruction.attributes.get("source_target_pairs")
    if pairs == "{}":  # no device sends
        return ()
    return parse_groups(pairs if pairs is not None else instruction.attributes.get("replica_groups", "{}"), devices)


@functools.lru_cache(maxsize=4096)
def parse_groups(text: str, devices: int) -> Groups:
    """The groups in the text of an attribute; {} means all devices.

    Raises: InputError for a way of writing that is not known.
    """
    text = text.strip()
    if text in ("", "{}", "{{}}"):
        return (tuple(range(devices)),)
    if text.startswith("{"):
        return tuple(_numbers(group) for group in re.findall(r"\{([\d,\s]+)\}", text))
    if match := _MESH.match(text):
        return _mesh_groups(*match.groups())
    if (match := _IOTA.fullmatch(text)) and match.group(2):
        return tuple(map(tuple, _iota(match).reshape(_numbers(match.group(1))).tolist()))
    raise InputError(f"replica_groups={text[:80]}: an unknown form of replica groups")


def _mesh_groups(sizes: str, device_ids: str | None, axes: str) -> Groups:
    """The groups of mesh['a'=2,'b'=4] {'b'}. 'b':(2)2 is the part of b of size 2 that follows 2 parts."""
    mesh = {name: int(size) for name, size in _SIZE.findall(sizes)}
    wanted = [(name, int(before or 1), int(size or mesh[name])) for name, before, size in _AXIS.findall(axes)]
    devices = np.arange(math.prod(mesh.values()))
    if device_ids:
        iota = _IOTA.fullmatch(device_ids)
        devices = _iota(iota) if iota else np.array(_numbers(re.sub(r"[^\d,]", "", device_ids)))
    dimensions: list[tuple[str, int, int]] = []  # name, how many parts are before it, size
    for name, size in mesh.items():
        cuts = {(before, before * part) for other, before, part in wanted if other == name}
        edges = sorted({1, size}.union(*cuts))
        dimensions += [(name, low, high // low) for low, high in itertools.pairwise(edges)]
    inside = [dimensions.index(axis) for axis in wanted if axis[2] > 1]
    outside = [n for n in range(len(dimensions)) if n not in inside]
    shaped = devices.reshape([size for _, _, size in dimensions]).transpose(outside + inside)
    return tuple(map(tuple, shaped.reshape(-1, math.prod(size for _, _, size in wanted)).tolist()))


def _iota(match: re.Match) -> np.ndarray:
    """The devices of [4,2]<=[2,4]T(1,0), or of [2,4]T(1,0), in their order."""
    sizes = _numbers(match.group(2) or match.group(1))
    order = np.arange(math.prod(sizes)).reshape(sizes)
    return order.transpose(_numbers(match.group(3))) if match.group(3) else order


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(",") if n.strip())
