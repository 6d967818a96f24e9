"""Every tensor that a compiled program moves between devices, one by one where the compiler merged several.

A loop of permutes around the pieces of a matmul (XLA's windowed einsum) is told as the gather or the reduction that it
stands for.
"""

import dataclasses
import re
from collections.abc import Iterable, Iterator, Sequence

from gspmd_lm.foresight.collectives import ops
from gspmd_lm.foresight.collectives.def_use import DefUse
from gspmd_lm.foresight.collectives.ops import CollectiveOp
from gspmd_lm.foresight.hlo import Array, Executed, Instruction, Module, Value
from gspmd_lm.hardware.network import Groups
from gspmd_lm.sharding.op_names import of_each_tensor

WINDOWED = "windowed "
REDUCTIONS = ("all-reduce", "reduce-scatter", WINDOWED + "reduce-scatter")
GATHERS = ("all-gather", WINDOWED + "all-gather")
# What a device does besides moving data: an asynchronous collective overlaps with these.
_COMPUTES = ("fusion", "dot", "convolution", "custom-call", "while", "conditional", "call", "sort", "reduce", "scatter")


@dataclasses.dataclass(frozen=True)
class MovedTensor:
    """One tensor that one instruction moves."""

    kind: str
    op: CollectiveOp  # of this tensor alone
    step: Executed
    operand: Value  # what a device hands in
    name: str  # the tensor's own, where the instruction's does not stand for several
    merged: bool  # whether the instruction has others
    sent_bytes: int  # what one device sends each time
    overlapped: bool

    @property
    def instruction(self) -> Instruction:
        """The collective, or the send."""
        return self.op.instruction


def moved_tensors(module: Module, def_use: DefUse, slices: Sequence[int] = ()) -> Iterator[MovedTensor]:
    """All of them, in the order of the schedule."""
    loops = (i for i in module.instructions if i.opcode == "while" and "windowed_dot_general_body" in _body(i))
    windows = {
        loop.name: _permutes_of_window(module, loop) for loop in loops
    }  # told as the one operation that they are
    parts = {permute.instruction.name for permutes in windows.values() for permute in permutes}
    for step in module.steps():
        if any(loop.name in windows for loop in step.loops) or step.instruction.name in parts:
            continue
        if permutes := windows.get(step.instruction.name):
            yield _tensor_of_window(module, step, permutes)
        for op in ops.collective_ops(module, step.instruction, slices):
            yield from _tensors_of_op(module, def_use, step, op)


def _tensors_of_op(module: Module, def_use: DefUse, step: Executed, op: CollectiveOp) -> Iterator[MovedTensor]:
    instruction, inputs, kind = op.instruction, op.inputs, op.kind
    if kind == "all-to-all" and len(inputs) == op.group_size:  # one array, handed in as its pieces
        inputs = (Array(inputs[0].dtype, (len(inputs), *inputs[0].dimensions)),)
    names, overlapped = of_each_tensor(instruction.op_name, len(inputs)), _overlaps(module, op)
    for number, array in enumerate(inputs):
        operand = module.operand(instruction, number), ()
        if op.scheduled is not instruction and operand[0].opcode == "pad":  # what is added is not sent
            operand = module.operand(operand[0]), ()
            array = operand[0].shape.arrays[0]
        pieces = def_use.concatenated(operand) if kind == "all-reduce" else [(operand, array.elements)]
        for piece, elements in pieces:
            one = array if len(pieces) == 1 else Array(array.dtype, (elements,))
            name = names[number] if names and len(pieces) == 1 else ""
            merged = len(inputs) > 1 or len(pieces) > 1
            op_of_tensor = dataclasses.replace(op, inputs=(one,))
            yield MovedTensor(kind, op_of_tensor, step, piece, name, merged, op_of_tensor.sent_bytes, overlapped)


def _body(loop: Instruction) -> str:
    return loop.called["body"][0]


def _permutes_of_window(module: Module, loop: Instruction) -> list[CollectiveOp]:
    """The permutes of a windowed einsum: those in its loop, and the first or last ones beside it."""

    def permutes(instructions: Iterable[Instruction]) -> list[CollectiveOp]:
        return [e for i in instructions for e in ops.collective_ops(module, i) if e.kind == "collective-permute"]

    turning = permutes(module.computations[_body(loop)].instructions.values())
    names = {permute.instruction.op_name for permute in turning}
    return turning + permutes(i for i in module.siblings(loop).values() if i.op_name in names)


def _tensor_of_window(module: Module, step: Executed, permutes: Sequence[CollectiveOp]) -> MovedTensor:
    """The ring of permutes in a windowed einsum, which run piece by piece so that matmuls hide them."""
    loop, first = step.instruction, permutes[0]
    kind = "reduce-scatter" if re.search(r"body_(ar|rs)", _body(loop)) else "all-gather"
    iterations = module.trip_count(loop) or 1
    sent_bytes = sum(
        p.sent_bytes * (iterations if p.instruction.computation != loop.computation else 1) for p in permutes
    )
    rings = _rings([pair for permute in permutes for pair in permute.groups])
    piece = first.inputs[0]
    pieces = 1 if kind == "all-gather" else max(map(len, rings))  # a reduction begins with pieces for everybody
    held = Array(piece.dtype, (pieces, *piece.dimensions))
    ring = CollectiveOp(kind, (held,), rings, first.instruction, loop, True)
    operand = module.operand(first.instruction), ()
    return MovedTensor(WINDOWED + kind, ring, step, operand, first.instruction.op_name, False, sent_bytes, True)


def _rings(pairs: Sequence[tuple[int, ...]]) -> Groups:
    """The devices that permutes connect, those connected with each other together."""
    rings: list[set[int]] = []
    for pair in map(set, pairs):
        apart = [ring for ring in rings if not ring & pair]
        rings = [*apart, pair.union(*(ring for ring in rings if ring & pair))]
    return tuple(tuple(sorted(ring)) for ring in rings)


def _overlaps(module: Module, op: CollectiveOp) -> bool:
    """Whether a device computes between the beginning and the end of a movement."""
    scheduled = op.scheduled
    if not op.asynchronous or scheduled.config.get("collective_backend_config", {}).get("is_sync"):
        return False
    callers = [caller for caller, _ in module.callers.get(scheduled.computation, ()) if caller.phase == "-start"]
    start = callers[0] if callers else scheduled
    ends = _ends(module, start)
    begun = False
    for instruction in module.siblings(start).values():
        if begun and instruction.name in ends:
            return False
        if begun and instruction.opcode in _COMPUTES:
            return True
        begun = begun or instruction is start
    return True  # it ends in another iteration of the loop


def _ends(module: Module, start: Instruction) -> set[str]:
    """Names of the instructions with which a movement that `start` begins can end."""
    siblings = module.siblings(start).values()
    if start.opcode == "send":
        meeting = ops.rendezvous(start)
        received = {i.name for i in siblings if i.opcode == "recv" and ops.rendezvous(i) == meeting}
        return {i.name for i in siblings if i.opcode == "recv-done" and received & set(i.operands)}
    if start.opcode == "fusion":
        chains = set(module.chain_ids(start, "AsyncCollectiveStart"))
        fusions = (i for i in siblings if i.opcode == "fusion" and i is not start)
        return {i.name for i in fusions if chains & set(module.chain_ids(i, "AsyncCollectiveDone"))}
    return {i.name for i in siblings if i.phase == "-done" and start.name in i.operands}
