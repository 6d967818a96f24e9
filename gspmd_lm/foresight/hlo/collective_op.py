"""What the collectives of a compiled program move: each one once, whatever form the compiler gave it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from gspmd_lm.foresight.hlo.replica_groups import groups
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
