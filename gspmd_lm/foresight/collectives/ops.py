"""What the collectives of a compiled program move: each one once, whatever form the compiler gave it."""

import dataclasses
import math
from collections.abc import Sequence

from gspmd_lm.foresight.hlo import COLLECTIVES, Array, Instruction, Module
from gspmd_lm.foresight.hlo.replica_groups import groups
from gspmd_lm.hardware import network
from gspmd_lm.hardware.network import Groups


@dataclasses.dataclass(frozen=True)
class CollectiveOp:
    """One collective, as seen from one device."""

    kind: str  # one of hlo.COLLECTIVES
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


def collective_ops(module: Module, instruction: Instruction, slices: Sequence[int] = ()) -> tuple[CollectiveOp, ...]:
    """The exchanges that begin with an instruction of the schedule (see Module.collectives).

    The program of several TPU slices is that of one slice: it numbers the devices within it, and sends to the others
    through the host. With `slices`, the slice of each partition, groups are told in partitions of the whole.
    """
    if instruction.opcode == "send":
        ops = [_send_between_slices(module, instruction, slices)]
    else:
        ops = [_collective_op(module, inner, instruction, slices) for inner in module.collectives(instruction)]
    return tuple(exchange for exchange in ops if exchange)


def rendezvous(instruction: Instruction) -> str:
    """What a send and the receive of its answer have in common."""
    return instruction.frontend.get("_xla_host_transfer_rendezvous", "")


def _collective_op(module: Module, inner: Instruction, scheduled: Instruction, slices: Sequence[int]) -> CollectiveOp:
    inputs = tuple(array for operand in module.operands(inner) for array in operand.shape.arrays)
    if inner.base == "ragged-all-to-all":  # its operand or its result may be a buffer for the worst case
        inputs = (min(inputs[:2], key=lambda array: array.elements),)
    kind = (
        "reduce-scatter" if inner.base == "all-reduce" and _is_reduce_scatter(module, inner, scheduled) else inner.base
    )
    callers = module.callers.get(scheduled.computation, ())
    asynchronous = inner.phase == "-start" or "async_collective_fusion_config" in inner.config
    asynchronous |= any(caller.phase == "-start" for caller, _ in callers)  # on the sparse core, say
    partitions = groups(inner, module.devices)
    if len(slices) > module.devices:
        partitions = tuple(
            tuple(inside[k] for k in group) for inside in _partitions_of_slices(slices) for group in partitions
        )
    return CollectiveOp(kind, inputs, partitions, inner, scheduled, asynchronous)


def _send_between_slices(module: Module, send: Instruction, slices: Sequence[int]) -> CollectiveOp | None:
    """An exchange between slices: each device with those in its place in the other slices. None for other sends."""
    kind = send.frontend.get("_xla_megascale_transfer_type", "").lower().replace("_", "-")
    if not kind:
        return None
    kind = kind if kind in COLLECTIVES else "collective-permute"
    across = tuple(zip(*_partitions_of_slices(slices), strict=True)) if slices else ()
    return CollectiveOp(kind, module.operand(send).shape.arrays, across, send, send, True)


def _partitions_of_slices(slices: Sequence[int]) -> list[list[int]]:
    """The partitions of each slice, in their order."""
    return [[k for k, at in enumerate(slices) if at == n] for n in sorted(set(slices))]


def _is_reduce_scatter(module: Module, inner: Instruction, scheduled: Instruction) -> bool:
    """Whether a device keeps but its slice of a reduction: what TPU programs call all-reduce-scatter."""
    users = {user.opcode for user in module.siblings(inner).values() if inner.name in user.operands}
    return scheduled is not inner and users == {"dynamic-slice"}
