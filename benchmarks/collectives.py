"""Counts the collectives of a compiled program from its text, as tensors moved per device and per run.

An instruction that a combiner made carries several tensors and counts as that many; one inside a loop counts once for
every turn.
"""

import dataclasses
import math
from collections.abc import Iterable

from gspmd_lm.foresight import hlo
from gspmd_lm.foresight.hlo.work import CollectiveOp
from gspmd_lm.hardware import network
from gspmd_lm.units import bits


@dataclasses.dataclass(frozen=True)
class Collective:
    """One tensor that one instruction moves."""

    kind: str
    dtype: str
    shape: tuple[int, ...]  # of the output on one device
    group_size: int  # devices that take part in one exchange; 2 for a permute
    times: int  # per run of the program
    in_loop: int  # depth: 0 outside every loop
    computation: str
    op_name: str

    @property
    def elements(self) -> int:
        """Of the output, once."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Of the output, once."""
        return math.ceil(self.elements * bits(self.dtype) / 8)

    @property
    def output_bytes(self) -> int:
        """Of the outputs of all times."""
        return self.bytes * self.times

    @property
    def ring_bytes(self) -> float:
        """What one device sends, all times: see `network.sent_bytes`."""
        shards = self.group_size if self.kind == "reduce-scatter" else 1
        return network.sent_bytes(self.kind, self.output_bytes * shards, self.group_size)


def output_bytes(collectives: Iterable[Collective]) -> int:
    """The size of all outputs on one device in one run."""
    return sum(c.output_bytes for c in collectives)


def ring_bytes(collectives: Iterable[Collective]) -> float:
    """What one device sends in one run (see Collective.ring_bytes)."""
    return sum(c.ring_bytes for c in collectives)


def count(text: str) -> list[Collective]:
    """Every collective of a program, in the order of its text; `text` is that of `compiled.as_text()`.

    A conditional counts with all its branches.

    Raises: ValueError for a loop with collectives whose turns cannot be told.
    """
    module = hlo.parse(text)
    found = []
    for instruction in module.operations:
        for exchange in instruction.collectives:
            loops, computation = instruction.loops, instruction.computation.name
            if any(loop.trip_count is None for loop in loops):
                raise ValueError(f"{computation}: cannot tell how often the loop {loops[-1].name} turns")
            moved = exchange.inputs
            if exchange.kind == "all-to-all" and len(moved) > 1:  # one array, handed over as a tuple of its pieces
                moved = moved[:: exchange.group_size]
            for array in moved:
                found.append(
                    Collective(exchange.kind, array.dtype, _output(exchange, array), exchange.group_size,
                               instruction.executions, len(loops), computation, exchange.instruction.op_name)
                )  # fmt: skip
    return found


def _output(exchange: CollectiveOp, array: hlo.Array) -> tuple[int, ...]:
    """The dimensions of what a device ends with."""
    shape, n = list(array.dimensions), exchange.group_size
    if exchange.kind in ("all-gather", "reduce-scatter"):
        at = int(exchange.instruction.attributes["dimensions"].strip("{}"))
        shape[at] = shape[at] * n if exchange.kind == "all-gather" else shape[at] // n
    if exchange.kind == "all-to-all" and len(exchange.inputs) > 1:
        shape.insert(0, n)
    return tuple(shape)


def table(collectives: Iterable[Collective]) -> str:
    """Lines for people: the tensors moved, those alike added up, the largest traffic first."""
    rows: dict[tuple, list[float]] = {}
    for c in collectives:
        key = c.kind, f"{c.dtype}{list(c.shape)}", c.group_size, c.in_loop, c.op_name
        row = rows.setdefault(key, [0, 0, 0])
        row[:] = row[0] + c.times, row[1] + c.output_bytes, row[2] + c.ring_bytes
    lines = [f"{'kind':19}{'shape':28}{'group':>6}{'loop':>5}{'times':>6}{'output kB':>11}{'ring kB':>11}  op"]
    for (kind, shape, group, loop, op), (times, out, ring) in sorted(rows.items(), key=lambda row: -row[1][1]):
        lines.append(f"{kind:19}{shape:28}{group:6}{loop:5}{times:6.0f}{out / 1e3:11.1f}{ring / 1e3:11.1f}  {op}")
    return "\n".join(lines)
