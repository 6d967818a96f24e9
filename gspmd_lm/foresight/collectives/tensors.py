"""Every tensor that a compiled program moves between devices, one by one where the compiler merged several.

A loop of permutes around the pieces of a matmul (XLA's windowed einsum) is told as the gather or the reduction that it
stands for.
"""

import dataclasses
import re
from collections.abc import Iterator, Sequence

from gspmd_lm.foresight.collectives import exchanges
from gspmd_lm.foresight.collectives.exchanges import Exchange
from gspmd_lm.foresight.collectives.provenance import Place, Provenance
from gspmd_lm.foresight.hlo import Array, Executed, Instruction, Module
from gspmd_lm.foresight.hlo.replica_groups import Groups
from gspmd_lm.foresight.names import each

WINDOWED = "windowed "
REDUCTIONS = ("all-reduce", "reduce-scatter", WINDOWED + "reduce-scatter")
GATHERS = ("all-gather", WINDOWED + "all-gather")
# What a device does besides moving data: an asynchronous collective overlaps with these.
_COMPUTES = ("fusion", "dot", "convolution", "custom-call", "while", "conditional", "call", "sort", "reduce", "scatter")


@dataclasses.dataclass(frozen=True)
class MovedTensor:
    """One tensor that one instruction moves."""

    kind: str
    exchange: Exchange  # of this tensor alone
    step: Executed
    place: Place  # what a device hands in
    name: str  # the tensor's own, where the instruction's does not stand for several
    merged: bool  # whether the instruction has others
    windowed_bytes: int = 0  # what one device sends in a windowed einsum

    @property
    def instruction(self) -> Instruction:
        """The collective, or the send."""
        return self.exchange.instruction

    @property
    def whole(self) -> int:
        """Elements, all of its pieces in one group."""
        return sum(self.exchange.whole)

    @property
    def sent_bytes(self) -> int:
        """What one device sends each time."""
        return self.windowed_bytes or self.exchange.sent_bytes


def tensors(module: Module, origins: Provenance, slices: Sequence[int] = ()) -> Iterator[MovedTensor]:
    """All of them, in the order of the schedule."""
    windows: set[str] = set()  # loops that were told as the one operation that they are
    parts = {permute.instruction.name for loop in _windows(module) for permute in _ring_of(module, loop)}
    for step in module.steps():
        if any(loop.name in windows for loop in step.loops) or step.instruction.name in parts:
            continue
        if step.instruction.opcode == "while" and _is_window(step.instruction):
            windows.add(step.instruction.name)
            yield from _of_window(module, origins, step)
        for exchange in exchanges.of(module, step.instruction, slices):
            yield from _of_exchange(module, origins, step, exchange)


def _of_exchange(module: Module, origins: Provenance, step: Executed, exchange: Exchange) -> Iterator[MovedTensor]:
    instruction, inputs, kind = exchange.instruction, exchange.inputs, exchange.kind
    if kind == "all-to-all" and len(inputs) == exchange.group_size:  # one array, handed in as its pieces
        inputs = (Array(inputs[0].dtype, (len(inputs), *inputs[0].dimensions)),)
    names = each(instruction.op_name, len(inputs))
    for number, array in enumerate(inputs):
        place = origins.operand(instruction, number)
        if exchange.runs is not instruction and place[0].opcode == "pad":  # what is added is not sent
            place = module.operand(place[0]), ()
            array = place[0].shape.arrays[0]
        pieces = origins.pieces(place) if kind == "all-reduce" else [(place, array.elements)]
        for piece, elements in pieces:
            one = array if len(pieces) == 1 else Array(array.dtype, (elements,))
            own = names[number] if names and len(pieces) == 1 else ""
            merged = len(inputs) > 1 or len(pieces) > 1
            yield MovedTensor(kind, dataclasses.replace(exchange, inputs=(one,)), step, piece, own, merged)


def _is_window(loop: Instruction) -> bool:
    """Whether a loop is a windowed einsum."""
    return "windowed_dot_general_body" in loop.called["body"][0]


def _windows(module: Module) -> list[Instruction]:
    computations = module.computations.values()
    return [i for computation in computations for i in computation.instructions.values()
            if i.opcode == "while" and _is_window(i)]  # fmt: skip


def _ring_of(module: Module, loop: Instruction) -> list[Exchange]:
    """The permutes of a windowed einsum: those in its loop, and the first or last ones beside it."""
    inside = module.computations[loop.called["body"][0]].instructions.values()
    turning = [permute for i in inside for permute in exchanges.of(module, i) if permute.kind == "collective-permute"]
    names = {permute.instruction.op_name for permute in turning}
    beside = (i for i in module.computations[loop.computation].instructions.values() if i.op_name in names)
    return turning + [e for i in beside for e in exchanges.of(module, i) if e.kind == "collective-permute"]


def _of_window(module: Module, origins: Provenance, step: Executed) -> Iterator[MovedTensor]:
    """The ring of permutes in a windowed einsum."""
    loop, permutes = step.instruction, _ring_of(module, step.instruction)
    if not permutes:
        return
    kind = "reduce-scatter" if re.search(r"body_(ar|rs)", loop.called["body"][0]) else "all-gather"
    turns, first = module.trip_count(loop) or 1, permutes[0]
    sent_bytes = sum(p.sent_bytes * (turns if p.instruction.computation != loop.computation else 1) for p in permutes)
    rings = _rings([pair for permute in permutes for pair in permute.groups])
    piece = first.inputs[0]
    pieces = 1 if kind == "all-gather" else max(map(len, rings))  # a reduction begins with pieces for everybody
    held = Array(piece.dtype, (pieces, *piece.dimensions))
    ring = Exchange(kind, (held,), rings, first.instruction, loop, True)
    place = origins.operand(first.instruction)
    yield MovedTensor(WINDOWED + kind, ring, step, place, first.instruction.op_name, False, sent_bytes)


def _rings(pairs: Sequence[tuple[int, ...]]) -> Groups:
    """The devices that permutes connect, those connected with each other together."""
    rings: list[set[int]] = []
    for pair in map(set, pairs):
        apart = [ring for ring in rings if not ring & pair]
        rings = [*apart, pair.union(*(ring for ring in rings if ring & pair))]
    return tuple(tuple(sorted(ring)) for ring in rings)


def overlaps(module: Module, exchange: Exchange) -> bool:
    """Whether a device computes between the beginning and the end of a movement."""
    runs = exchange.runs
    if runs.opcode == "while":
        return True  # done piece by piece so that matmuls hide it
    if not exchange.asynchronous or runs.config.get("collective_backend_config", {}).get("is_sync"):
        return False
    callers = [caller for caller, _ in module.callers.get(runs.computation, ()) if caller.phase == "-start"]
    start = callers[0] if callers else runs
    ends = _ends(module, start)
    begun = False
    for instruction in module.computations[start.computation].instructions.values():
        if begun and instruction.name in ends:
            return False
        if begun and instruction.opcode in _COMPUTES:
            return True
        begun = begun or instruction is start
    return True  # it ends in another turn of the loop


def _ends(module: Module, start: Instruction) -> set[str]:
    """Names of the instructions with which a movement that `start` begins can end."""
    siblings = module.computations[start.computation].instructions.values()
    if start.opcode == "send":
        meeting = exchanges.rendezvous(start)
        received = {i.name for i in siblings if i.opcode == "recv" and exchanges.rendezvous(i) == meeting}
        return {i.name for i in siblings if i.opcode == "recv-done" and received & set(i.operands)}
    if start.opcode == "fusion":
        chains = set(module.carried(start, "AsyncCollectiveStart"))
        fusions = (i for i in siblings if i.opcode == "fusion" and i is not start)
        return {i.name for i in fusions if chains & set(module.carried(i, "AsyncCollectiveDone"))}
    return {i.name for i in siblings if i.phase == "-done" and start.name in i.operands}
