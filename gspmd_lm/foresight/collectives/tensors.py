"""Every tensor that a compiled program moves between devices, one by one where the compiler merged several.

A loop of permutes around the pieces of a matmul (XLA's windowed einsum) is reported as the gather or the reduction that
it stands for.
"""

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence

from gspmd_lm.foresight.collectives.def_use import concatenated_values, def_chain
from gspmd_lm.foresight.hlo import Array, Computation, Instruction, Module
from gspmd_lm.foresight.hlo.values import Value
from gspmd_lm.foresight.hlo.work import BETWEEN_SLICES, ENDED, STARTED, CollectiveOp, rendezvous
from gspmd_lm.hardware.network import Groups
from gspmd_lm.sharding.op_names import tensor_names

WINDOWED = "windowed "
_NOT_LAST = "last_iteration_noop"  # in the name of a branch that does nothing
REDUCTIONS = ("all-reduce", "reduce-scatter", WINDOWED + "reduce-scatter")
GATHERS = ("all-gather", WINDOWED + "all-gather")
# What a device does besides moving data: an asynchronous collective overlaps with these.
_COMPUTES = ("fusion", "dot", "convolution", "custom-call", "while", "conditional", "call", "sort", "reduce", "scatter")


@dataclasses.dataclass(frozen=True)
class MovedTensor:
    """One tensor that one instruction moves."""

    kind: str
    op: CollectiveOp  # of this tensor alone
    operand: Value  # what a device hands in
    name: str  # the tensor's own, where the instruction's does not stand for several
    merged: bool  # whether the instruction has others
    sent_bytes: int  # what one device sends each time
    overlapped: bool

    @property
    def instruction(self) -> Instruction:
        """The collective, or the send."""
        return self.op.instruction


def moved_tensors(module: Module) -> Iterator[MovedTensor]:
    """All of them, in the order of the schedule. Of a conditional, they are those of the branch that sends most."""
    # Loops that are reported as one operation.
    loops = (i for i in module.operations if i.opcode == "while" and "windowed_dot_general_body" in _body(i).name)
    windows = {loop: permutes for loop in loops if (permutes := _permutes_of_window(loop))}
    parts = {permute.instruction for permutes in windows.values() for permute in permutes}
    parts |= _branches_left_out(module)
    for instruction in module.operations:
        if any(loop in windows for loop in instruction.loops) or instruction in parts:
            continue
        if permutes := windows.get(instruction):
            yield _tensor_of_window(instruction, permutes)
        for op in instruction.collectives:
            yield from _tensors_of_op(op)


def _branches_left_out(module: Module) -> set[Instruction]:
    """The instructions of all branches but those that send most; of branches in branches, the inner ones first."""
    left_out = set[Instruction]()
    for conditional in reversed(module.operations):
        if conditional.opcode == "conditional":
            run = [[one for one in body.operations if one not in left_out] for body in conditional.bodies]
            sent = [sum(one.executions * op.sent_bytes for one in each for op in one.collectives) for each in run]
            largest = sent.index(max(sent))
            left_out.update(one for number, each in enumerate(run) if number != largest for one in each)
    return left_out


def _tensors_of_op(op: CollectiveOp) -> Iterator[MovedTensor]:
    instruction, inputs, kind = op.instruction, op.inputs, op.kind
    if kind == "all-to-all" and len(inputs) == op.group_size:  # one array, handed in as its pieces
        inputs = (Array(inputs[0].dtype, (len(inputs), *inputs[0].dimensions)),)
    names, overlapped = tensor_names(instruction.op_name, len(inputs)), _overlaps(op)
    for number, array in enumerate(inputs):
        operand = instruction.operands[number]
        if op.scheduled is not instruction and operand.opcode == "pad":  # what is added is not sent
            (operand, _) = operand.operands
            array = operand.shape.arrays[0]
        whole = (operand, ()), array.elements
        pieces = concatenated_values((operand, ())) if kind == "all-reduce" else [whole]
        for piece, elements in pieces:
            one = array if len(pieces) == 1 else Array(array.dtype, (elements,))
            name = names[number] if names and len(pieces) == 1 else ""
            merged = len(inputs) > 1 or len(pieces) > 1
            op_of_tensor = dataclasses.replace(op, inputs=(one,))
            yield MovedTensor(kind, op_of_tensor, piece, name, merged, op_of_tensor.sent_bytes, overlapped)


def _body(loop: Instruction) -> Computation:
    return loop.called_computations["body"][0]


def _permutes_of_window(loop: Instruction) -> list[CollectiveOp]:
    """The permutes of a windowed einsum: those in its loop, and the first or last ones beside it.

    Several loops may have permutes of one name beside them. Those of a loop give what it begins with, or move what it
    ends with.
    """

    def permutes(instructions: Iterable[Instruction]) -> list[CollectiveOp]:
        return [op for i in instructions for op in i.collectives if op.kind == "collective-permute"]

    def nearest(chain: Iterable[Instruction], found: Callable[[Instruction], bool]) -> Instruction | None:
        """The first instruction of a chain that is found before another loop."""
        before = itertools.takewhile(lambda one: one.opcode != "while" or one is loop, chain)
        return next(filter(found, before), None)

    turning = permutes(_body(loop).operations)
    names = {permute.instruction.op_name for permute in turning}
    beside = permutes(i for i in loop.computation.instructions.values() if i.op_name in names)
    each = {op.instruction for op in beside}
    (begin,) = loop.operands
    elements = range(len(begin.operands)) if begin.opcode == "tuple" else ()
    begins = {nearest(def_chain((begin, (n,))), each.__contains__) for n in elements}
    return turning + [
        op
        for op in beside
        if op.instruction in begins or nearest(def_chain((op.instruction.operands[0], ())), lambda one: one is loop)
    ]


def _tensor_of_window(loop: Instruction, permutes: Sequence[CollectiveOp]) -> MovedTensor:
    """The ring of permutes in a windowed einsum, which run piece by piece so that matmuls hide them."""
    first = permutes[0]
    kind = "reduce-scatter" if re.search(r"body_(ar|rs)", _body(loop).name) else "all-gather"
    sent_bytes = sum(p.sent_bytes * _times_of_permute(p, loop) for p in permutes)
    rings = _rings([pair for permute in permutes for pair in permute.groups])
    piece = first.inputs[0]
    pieces = 1 if kind == "all-gather" else max(map(len, rings))  # a reduction begins with pieces for everybody
    held = Array(piece.dtype, (pieces, *piece.dimensions))
    ring = CollectiveOp(kind, (held,), rings, first.instruction, loop, True)
    operand = first.instruction.operands[0], ()
    return MovedTensor(WINDOWED + kind, ring, operand, first.instruction.op_name, False, sent_bytes, True)


def _times_of_permute(permute: CollectiveOp, loop: Instruction) -> int:
    """How often a permute runs: once beside its loop, and in it each time, or each time but the last one (libtpu)."""
    within, iterations = permute.instruction.computation, loop.trip_count or 1
    if within is loop.computation:
        return 1
    caller, _ = within.caller
    spared = caller and caller.opcode == "conditional" and any(_NOT_LAST in one.name for one in caller.bodies)
    return iterations - 1 if spared else iterations


def _rings(pairs: Sequence[tuple[int, ...]]) -> Groups:
    """The devices that permutes connect, those connected with each other together."""
    rings: list[set[int]] = []
    for pair in map(set, pairs):
        apart = [ring for ring in rings if not ring & pair]
        rings = [*apart, pair.union(*(ring for ring in rings if ring & pair))]
    return tuple(tuple(sorted(ring)) for ring in rings)


def _overlaps(op: CollectiveOp) -> bool:
    """Whether a device computes between the beginning and the end of a movement."""
    scheduled = op.scheduled
    if not op.asynchronous or scheduled.config.get("collective_backend_config", {}).get("is_sync"):
        return False
    callers = [caller for caller, _ in scheduled.computation.callers if caller.phase == "-start"]
    start = callers[0] if callers else scheduled
    ends = _ends(start)
    begun = False
    for instruction in start.computation.instructions.values():
        if begun and instruction in ends:
            return False
        if begun and instruction.opcode in _COMPUTES:
            return True
        begun = begun or instruction is start
    return True  # it ends in another iteration of the loop


def _ends(start: Instruction) -> set[Instruction]:
    """The instructions with which a movement that `start` begins can end."""
    beside = start.computation.instructions.values()
    if BETWEEN_SLICES in start.frontend:
        received = [i for i in beside if i.opcode == "recv" and rendezvous(i) == rendezvous(start)]
        return {user for one in received for user in one.users if user.opcode == "recv-done"}
    if start.opcode == "fusion":
        chains = {one.chain_id for one in start.carried_collectives[STARTED]}
        fusions = (i for i in beside if i.opcode == "fusion" and i is not start)
        return {i for i in fusions if any(one.chain_id in chains for one in i.carried_collectives[ENDED])}
    return {user for user in start.users if user.phase == "-done"}
