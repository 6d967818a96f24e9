"""What the collectives of a compiled program move, and between which devices: each collective once, in any form."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from gspmd_lm.errors import InputError
from gspmd_lm.foresight.hlo.shape import Array
from gspmd_lm.hardware import network
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
# How programs write groups of devices.
_IOTA = re.compile(r"\[([\d,]+)\](?:<=\[([\d,]+)\])?(?:T\(([\d,]+)\))?")
_MESH = re.compile(r"mesh\[([^\]]*)\](?:, device_ids=\((.*)\))? \{(.*)\}$")
_SIZE = re.compile(r"'?([^'=,\s]+)'?=(\d+)")
_AXIS = re.compile(r"'?([^',:\s]+)'?(?::\((\d+)\)(\d+))?")


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
        shards = self.group_size if self.kind == "all-gather" else 1
        return shards * sum(array.bytes for array in self.inputs)

    @property
    def sent_bytes(self) -> int:
        """What one device sends."""
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
        return _sent_between_slices(instruction)
    if instruction.base in COLLECTIVES:
        begun = [instruction] if instruction.phase in ("", "-start") else []
    else:
        hidden = instruction.inside if instruction.opcode == "fusion" else ()
        begin = (one for one in hidden if one.base in COLLECTIVES and one.phase in ("", "-start"))
        begun = [one for one in begin if not one.is_carried or one in instruction.carried[STARTED]]
    return tuple(_collective_op(one, instruction) for one in begun)


def carried_by(fusion: Instruction) -> Mapping[str, tuple[Instruction, ...]]:
    """See `Instruction.carried`."""
    handed = {one: {user.custom_call_target for user in one.users} for one in fusion.inside}
    return {
        target: tuple(one for one, targets in handed.items() if target in targets and one.is_carried)
        for target in (STARTED, ENDED)
    }


def rendezvous(instruction: Instruction) -> str:
    """What a send and the receive of its answer have in common."""
    return instruction.frontend.get("_xla_host_transfer_rendezvous", "")


def _collective_op(inner: Instruction, scheduled: Instruction) -> CollectiveOp:
    inputs = tuple(array for operand in inner.operands for array in operand.shape.arrays)
    if inner.base == "ragged-all-to-all":  # its operand or its result may be a buffer for the worst case
        inputs = (min(inputs[:2], key=lambda array: array.elements),)
    # A device keeps but its slice of a reduction: what TPU programs call all-reduce-scatter.
    scattered = inner is not scheduled and {user.opcode for user in inner.users} == {"dynamic-slice"}
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


def _sent_between_slices(send: Instruction) -> tuple[CollectiveOp, ...]:
    """An exchange between slices: each device with those in its place in the other slices. () for other sends."""
    kind = send.frontend.get("_xla_megascale_transfer_type", "").lower().replace("_", "-")
    if not kind:
        return ()
    kind = kind if kind in COLLECTIVES else "collective-permute"
    assert send.module.slices, "a program that sends to other slices is parsed with the slice of each partition"
    across = tuple(zip(*_partitions_of_slices(send.module.slices), strict=True))
    return (CollectiveOp(kind, send.operands[0].shape.arrays, across, send, send, True),)


def _partitions_of_slices(slices: Sequence[int]) -> list[list[int]]:
    """The partitions of each slice, in their order."""
    return [[k for k, at in enumerate(slices) if at == n] for n in sorted(set(slices))]


def groups(instruction: Instruction, devices: int) -> Groups:
    """The groups of a collective, each in its order; for a permute, its (source, target) pairs. Raises as `read`."""
    pairs = instruction.attributes.get("source_target_pairs")
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
        return _of_mesh(*match.groups())
    if (match := _IOTA.fullmatch(text)) and match.group(2):
        return tuple(map(tuple, _iota(match).reshape(_numbers(match.group(1))).tolist()))
    raise InputError(f"replica_groups={text[:80]}: an unknown form of replica groups")


def _of_mesh(sizes: str, device_ids: str | None, axes: str) -> Groups:
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
