"""The collectives of a layout: a row for each, and on a page groups of them that fold."""

import collections
import dataclasses
from collections.abc import Callable, Hashable, Sequence

from gspmd_lm.foresight.advice import SLOW_LINKS
from gspmd_lm.foresight.collectives import Collective
from gspmd_lm.foresight.report import Report
from gspmd_lm.show.document import Cell, Column, Fact, Figure, Row, Section, Table, Text
from gspmd_lm.units import human_bytes

COLLECTIVES = (
    Column("kind"), Column("axes"), Column("dtype", on_terminal=False), Column("times", "number"),
    Column("sent", "number"), Column("overlap"), Column("phase"), Column("op"),
    Column("because of"), Column("source", "code", on_terminal=False),
)  # fmt: skip
# Short forms for a narrow terminal.
PHASES = {"forward": "fwd", "backward": "bwd", "recomputation": "remat", "optimizer": "optim"}


def of_floor(report: Report) -> str:
    """Communication beside its floor; '' if nothing can be compared.

    '1.20x the floor', or '1.02x the floor, both as float32: 52% in bf16'.
    """
    ratio, other = report.above_floor, report.other_width
    if ratio is None:
        return ""
    return f"{ratio:.2f}x the floor" + (f", both as float32: {other}" if other else "")


def section_of(report: Report) -> Section:
    """The section with all collectives, the largest first."""
    title, whole = f"Collectives ({len(report.collectives)})", report.sent_bytes
    if report.memory.refusal:
        return Section(title, "compiled", [Text("None to show: the compiler gave no program.")])
    above = of_floor(report)
    facts = [Fact("sent per step", human_bytes(whole), f"{above} (counted)" if above else "")]
    if not report.collectives:
        return Section(title, "compiled", [Text("None.")], facts)
    of_rules = report.phase != "step"
    columns = [column for column in COLLECTIVES if of_rules or column.name != "because of"]
    if not of_rules:  # the line says what a row says of a layout
        columns[-1] = dataclasses.replace(columns[-1], on_terminal=True)

    def row(cells: Row) -> Row:
        return [
            cell for cell, column in zip(cells, COLLECTIVES, strict=True) if of_rules or column.name != "because of"
        ]

    def cause(one: Collective) -> Hashable:
        return one.rules if of_rules else one.source

    alike = _grouped(report, lambda one: (one.kind, one.mesh_axes, one.dtype, one.phase, cause(one), one.overlapped))
    by_axes = _grouped(report, lambda one: (one.mesh_axes, one.phase))
    table = Table(
        "Collectives",
        columns,
        [row(_merged(group)) for group in alike],
        left_out=lambda shown: f"and {len(alike) - shown} more, {human_bytes(sum(map(_sent, alike[shown:])))}",
        groups=[
            (row(_sums(group, whole or 1)), [row(_collective(one, whole=whole)) for one in group]) for group in by_axes
        ],
    )
    hint = '<p class="legend">Choose a group to see its collectives, and a heading to sort them by it.</p>'
    return Section(title, "compiled", [Figure(hint), table], facts)


def _grouped(report: Report, key: Callable[[Collective], Hashable]) -> list[list[Collective]]:
    """Collectives with the same key together, those that send most first."""
    groups = collections.defaultdict[Hashable, list[Collective]](list)
    for one in sorted(report.collectives, key=_size, reverse=True):
        groups[key(one)].append(one)
    return sorted(groups.values(), key=_sent, reverse=True)


def _merged(alike: Sequence[Collective]) -> Row:
    """The row of collectives that differ only in the array they move: the largest of them, with the sums of all."""
    times, more = sum(one.times_per_step for one in alike), len({one.op for one in alike}) - 1
    whole = dataclasses.replace(alike[0], times_per_step=times, bytes_per_device_per_step=_sent(alike))
    return _collective(whole, f" +{more}" if more else "")


def _sums(members: Sequence[Collective], whole: int) -> Row:
    """The row above collectives over the same axes in the same phase."""
    sent = _sent(members)
    count = f"{len(members)} collective{'s' if len(members) > 1 else ''}, {sent / whole:.1%} of the bytes"
    times = f"{sum(one.times_per_step for one in members):,}"
    over = f"{'+'.join(members[0].mesh_axes)}, {members[0].phase}"
    return over, "", "", times, Cell(human_bytes(sent), share=sent / whole), "", "", count, "", ""


def _collective(one: Collective, others: str = "", whole: int = 0) -> Row:
    """A row of COLLECTIVES. `others`: how many more arrays it stands for."""
    size, times = _size(one), one.times_per_step
    return (
        Cell(one.kind, one.kind.replace(" ", "\n")),
        Cell("+".join(one.mesh_axes), notes=("between slices or hosts",) if one.link in SLOW_LINKS else ()),
        one.dtype,
        Cell(f"{times:,}", value=times),
        Cell(human_bytes(size), value=size, share=size / whole if whole else None),
        Cell("yes", style="good") if one.overlapped else Cell("no", style="bad"),
        Cell(one.phase, PHASES.get(one.phase, "")),
        Cell(one.op + others, one.op.removeprefix("layers.") + others, notes=(one.einsum,) if one.einsum else ()),
        " ".join(key.removeprefix("rules.") for key in one.rules) or "no row",  # as in the file
        one.source,
    )


def _size(one: Collective) -> int:
    return one.bytes_per_device_per_step


def _sent(collectives: Sequence[Collective]) -> int:
    return sum(map(_size, collectives))
