"""The collectives of a layout: a row for each, and on a page groups of them that fold."""

import collections
import dataclasses
from collections.abc import Sequence

from gspmd_lm.foresight.advice import SLOW_LINKS
from gspmd_lm.foresight.collectives import Collective
from gspmd_lm.foresight.report import Report
from gspmd_lm.show.document import Cell, Column, Fact, Figure, Row, Section, Table, Text
from gspmd_lm.units import human_bytes

COLLECTIVES = (
    Column("kind", least=14), Column("axes"), Column("dtype", on_terminal=False), Column("times", "number"),
    Column("sent", "number"), Column("overlap", least=7), Column("phase", least=5), Column("op", least=10),
    Column("because of", least=13), Column("source", "code", on_terminal=False),
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
    found = sorted(report.collectives, key=_size, reverse=True)
    merged = _merged(found)

    def left_out(shown: int) -> str:
        return f"and {len(merged) - shown} more, {human_bytes(sum(_size(one) for one, _ in merged[shown:]))}"

    by_axes = collections.defaultdict[tuple[str, str], list[Collective]](list)
    for one in found:
        by_axes["+".join(one.mesh_axes), one.phase].append(one)
    groups = sorted(by_axes.items(), key=lambda group: -sum(map(_size, group[1])))
    table = Table(
        "Collectives",
        COLLECTIVES,
        [_collective(one, f" +{more}" if more else "") for one, more in merged],
        left_out=left_out,
        groups=[(_sums(*group, whole or 1), [_collective(one, whole=whole) for one in group[1]]) for group in groups],
    )
    hint = '<p class="legend">Choose a group to see its collectives, and a heading to sort them by it.</p>'
    return Section(title, "compiled", [Figure(hint), table], facts)


def _merged(collectives: Sequence[Collective]) -> list[tuple[Collective, int]]:
    """Collectives that differ only in the array they move become one with their sums; the largest sum comes first.

    Each is a pair: the largest of them with the sums, and how many other arrays there are.
    """
    groups: dict[tuple, list[Collective]] = {}
    for one in collectives:
        key = (one.kind, one.mesh_axes, one.dtype, one.phase, one.rules, one.overlapped)
        groups.setdefault(key, []).append(one)
    pairs = []
    for group in groups.values():
        times = sum(one.times_per_step for one in group)
        whole = dataclasses.replace(group[0], times_per_step=times, bytes_per_device_per_step=sum(map(_size, group)))
        pairs.append((whole, len({one.op for one in group}) - 1))
    return sorted(pairs, key=lambda pair: -_size(pair[0]))


def _sums(of: tuple[str, str], members: Sequence[Collective], whole: int) -> Row:
    """The row above collectives over the same axes in the same phase."""
    size = sum(map(_size, members))
    count = f"{len(members)} collective{'s' if len(members) > 1 else ''}, {size / whole:.1%} of the bytes"
    times = f"{sum(one.times_per_step for one in members):,}"
    return ", ".join(of), "", "", times, Cell(human_bytes(size), share=size / whole), "", "", count, "", ""


def _collective(one: Collective, others: str = "", whole: int = 0) -> Row:
    """A row of COLLECTIVES. `others` says how many arrays it stands for besides its own."""
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
