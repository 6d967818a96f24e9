"""Reports on a terminal: one layout as a page, several side by side, or a paragraph before a run.

Cells are `Text`, because text from files must not be read as markup.
"""

import collections
import dataclasses
import itertools
from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from gspmd_lm.foresight.collectives import Collective
from gspmd_lm.foresight.report import Report
from gspmd_lm.show import figures
from gspmd_lm.units import human_bytes, human_count, human_seconds

LINES = 49  # of a screen, without the prompt
MOST_WARNINGS = 6  # shown below layouts side by side
WIDE = 110  # columns with which nothing is shortened
# Short forms for a narrow terminal.
PHASES = {"forward": "fwd", "backward": "bwd", "recomputation": "remat", "optimizer": "optim"}
MORE = "see --json or --html"


def show(reports: Sequence[Report], console: Console) -> None:
    """Prints one report as a page, or several side by side with the best first."""
    if len(reports) > 1:
        _side_by_side(figures.ranked(reports), console)
        return
    (report,) = reports
    found = len(report.warnings)
    amounts = [(10, found), (8, found), (6, found), *((6, n) for n in range(found - 1, 2, -1)), (5, 3), (4, 3), (4, 1)]
    page = Group()
    for collectives, warnings in amounts:
        page = _page(report, console.width >= WIDE, collectives, warnings)
        if len(console.render_lines(page)) <= LINES:
            break
    console.print(page)


def paragraph(report: Report) -> str:
    """The paragraph that training prints before it starts: fit, communication, predicted time and warnings."""
    memory, found = report.memory, report.prediction
    held = ", ".join(f"{name} {human_bytes(size)}" for name, size in figures.parts(memory))
    hardware = figures.hardware(report.devices, report.chip)
    said = [
        f"{report.config} under {report.rules} on {hardware}, mesh {figures.mesh(report.mesh)}.",
        f"Compiled: {human_bytes(memory.peak_bytes)} per device at the peak ({held}); {figures.fit(memory)}.",
    ]
    if not memory.refusal:
        said.append(f"Compiled: each device sends per step {figures.communication(report)}.")
    if found is None:
        said.append(f"No prediction: {report.no_prediction}.")
    else:
        waits = found.exposed_communication_s + found.exposed_host_copy_s
        said.append(
            f"Predicted: {human_seconds(found.step_time_s)} per step, {found.tokens_per_s_per_device:,.0f} tokens/s "
            f"per device, MFU {found.mfu:.1%}, {waits / found.step_time_s:.1%} of the time waiting "
            f"(error: {found.error})."
        )
    if report.warnings:
        said.append(f"Warnings: {', '.join(dict.fromkeys(warning.code for warning in report.warnings))}.")
    return " ".join(said)


def _page(report: Report, wide: bool, collectives: int, warnings: int) -> Group:
    blocks = [_header(report), _memory(report, wide), _collectives(report, wide, collectives), _time(report, wide)]
    if report.warnings:
        blocks.append(_warnings(report, warnings))
    return Group(*[part for block in blocks for part in (block, Text())][:-1])


def _header(report: Report) -> Text:
    hardware = figures.hardware(report.devices, report.chip)
    target = f"{hardware} ({report.target})" if report.chip else f"{report.target}, {hardware}"
    return Text.assemble(
        (f"{'' if report.phase == 'train' else f'{report.phase} of '}{report.config} under {report.rules}", "bold"),
        f" on {target}\n",
        f"mesh {figures.mesh(report.mesh)}; counted {figures.parameters(report)}, "
        f"{human_count(report.tokens)} tokens per step",
        f"\nattention: {report.attention}" if report.attention else "",
    )


def _memory(report: Report, wide: bool) -> RenderableType:
    memory = report.memory
    whole = (("peak", memory.peak_bytes), ("limit", memory.limit_bytes), ("host", memory.host_bytes))
    known = [(name, size) for name, size in (*figures.parts(memory), *whole) if size is not None]
    table = _table([(name, "right") for name, _ in known])
    table.add_row(*(human_bytes(size) for _, size in known))
    style = "green" if memory.fits else "red"
    line = Table.grid(padding=(0, 1))
    if memory.limit_bytes is not None:
        filled, width = min(memory.limit_bytes, memory.peak_bytes), 60 if wide else 28
        bar = ProgressBar(memory.limit_bytes, filled, width, complete_style=style, finished_style=style)
        line.add_row(bar, Text("|"), Text(figures.fit(memory), style=style))
    else:
        line.add_row(Text(figures.fit(memory)))
    title = _title("Memory per device", f"compiled in {human_seconds(report.compile_s)}")
    blocks: list[RenderableType] = [title, Padding.indent(table, 2), Padding.indent(line, 2)]
    if memory.refusal:
        blocks.append(Padding.indent(Text(memory.refusal, style="dim"), 2))
    if memory.largest:
        largest = _table([("", "right"), ("", "left"), ("", "left"), ("", "left")], head=False)
        for found in memory.largest[:3]:
            axes = " ".join(axis or "?" for axis in found.axes)
            source = found.source if wide else found.source.removeprefix("gspmd_lm/")
            largest.add_row(*map(Text, (human_bytes(found.bytes), found.shape, axes, source)))
        if others := figures.other_temporaries_bytes(memory):
            largest.add_row(human_bytes(others), "all others")
        blocks += [Text("  largest temporaries", style="dim"), Padding.indent(largest, 2)]
    return Group(*blocks)


def _collectives(report: Report, wide: bool, most: int) -> RenderableType:
    if report.memory.refusal:
        return Group(_title("Collectives", "compiled"), Text("  none to show: there is no program"))
    groups = _grouped(report.collectives)
    sent = f"{human_bytes(report.sent_bytes)} per device and step"
    counted = figures.of_floor(report)
    title = _title("Collectives", "compiled", sent + (f", {counted} (counted)" if counted else ""))
    if not groups:
        return Group(title, Text("  no collectives"))
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2 if wide else 1, 0, 0))
    table.add_column("kind", min_width=14, max_width=None if wide else 14)
    table.add_column("axes", overflow="fold")
    table.add_column("times", justify="right", no_wrap=True)
    table.add_column("sent", justify="right", no_wrap=True)
    table.add_column("phase", no_wrap=True)
    table.add_column("op", no_wrap=True)
    table.add_column("because of", overflow="fold", min_width=13)
    table.add_column("overlaps" if wide else "over-\nlaps", no_wrap=True)
    for found, more in groups[:most]:
        others, op = f" +{more}" if more else "", found.op if wide else found.op.removeprefix("layers.")
        room = (40 if wide else 15) - len(others)
        rows = " ".join(key.removeprefix("rules.") for key in found.rules)  # as in the file
        cells = (
            found.kind,
            "+".join(found.mesh_axes),
            f"{found.times_per_step:,}",
            human_bytes(found.bytes_per_device_per_step),
            found.phase if wide else PHASES.get(found.phase, found.phase),
            (op if len(op) <= room else f"{op[: room - 1]}…") + others,
            rows or "no row",
            "yes" if found.overlapped else "no",
        )
        table.add_row(*map(Text, cells))
    rest = groups[most:]
    left = sum(found.bytes_per_device_per_step for found, _ in rest)
    tail = [Text(f"  and {len(rest)} more, {human_bytes(left)}", style="dim")] if rest else []
    return Group(title, Padding.indent(table, 2), *tail)


def _grouped(collectives: Sequence[Collective]) -> list[tuple[Collective, int]]:
    """Groups of collectives that differ only in the array they move, the largest sum first.

    Each is a pair: the largest collective with the sums of its group, and how many other arrays are in the group.
    """
    groups: dict[tuple, list[Collective]] = {}
    for found in sorted(collectives, key=lambda found: -found.bytes_per_device_per_step):
        key = (found.kind, found.mesh_axes, found.dtype, found.phase, found.rules, found.overlapped)
        groups.setdefault(key, []).append(found)
    pairs = []
    for group in groups.values():
        times = sum(found.times_per_step for found in group)
        sent = sum(found.bytes_per_device_per_step for found in group)
        whole = dataclasses.replace(group[0], times_per_step=times, bytes_per_device_per_step=sent)
        pairs.append((whole, len({found.op for found in group}) - 1))
    return sorted(pairs, key=lambda pair: -pair[0].bytes_per_device_per_step)


def _time(report: Report, wide: bool) -> RenderableType:
    found, floor = report.prediction, report.floor
    if found is None:
        return Group(_title("Step time", "predicted"), Padding.indent(Text(f"none: {report.no_prediction}"), 2))
    speed = f"{found.tokens_per_s_per_device:,.0f} tokens/s/device, MFU {found.mfu:.1%}"
    title = _title("Step time", "predicted", f"{human_seconds(found.step_time_s)}, {speed}")
    table = Table.grid(padding=(0, 1))
    for column in ("left", "right", "right"):
        table.add_column(justify=column, no_wrap=True)
    for kind, label, seconds in figures.breakdown(found):
        style = "yellow" if kind in ("wait", "host") else "blue"
        bar = ProgressBar(found.step_time_s, seconds, 60 if wide else 40, complete_style=style)
        table.add_row(Text(label), human_seconds(seconds), f"{seconds / found.step_time_s:.1%}", bar)
    notes = []
    if floor.compute_s is not None and floor.memory_s is not None:
        least = f"compute {human_seconds(floor.compute_s)}, memory {human_seconds(floor.memory_s)}"
        times = found.step_time_s / max(floor.compute_s, floor.memory_s)
        notes.append(("floor, counted", f"{least}: the step takes {times:.2f}x"))
    notes += [("basis", found.basis), ("error", found.error)]
    if found.unpriced_share:
        most = list(found.unpriced)
        names = ", ".join(most[:3]) + (f" and {len(most) - 3} more" if len(most) > 3 else "")
        notes.append(("not priced", f"{found.unpriced_share:.1%} of the program's bytes: {names}"))
    below = _table([("", "left"), ("", "left")], head=False)
    for note in notes:
        below.add_row(*map(Text, note))
    return Group(title, Padding.indent(table, 2), Padding.indent(below, 2))


def _warnings(report: Report, most: int) -> RenderableType:
    lines: list[RenderableType] = [Text("Warnings", style="bold")]
    for warning in report.warnings[:most]:
        table = Table.grid(padding=(0, 1))
        table.add_row(Text(" !", style="yellow"), Text(f"{warning.code}: {warning.message}"))
        table.add_row(Text(), Text(f"fix  {warning.fix}", style="dim"))
        lines.append(table)
    if report.warnings[most:]:
        codes = ", ".join(dict.fromkeys(warning.code for warning in report.warnings[most:]))
        lines.append(Text(f" ! and {len(report.warnings) - most} more: {codes}; {MORE}", style="yellow"))
    return Group(*lines)


def _side_by_side(reports: Sequence[Report], console: Console) -> None:
    """Prints the comparison, with as many columns at a time as the console has room for."""
    rows, names = figures.compared(reports), [report.layout for report in reports]
    room = console.width - max(len(f"{row.label} {row.known}") for row in rows) - 3
    columns = [[name, *(row.cells[i] + "*" * (i in row.best) for row in rows)] for i, name in enumerate(names)]
    widths = [max(map(len, column)) + 2 for column in columns]
    first = 0
    while first < len(reports):
        with_room = sum(used <= room for used in itertools.accumulate(widths[first:]))
        last = first + max(1, with_room)
        table = _table([("", "left"), ("", "left"), *((name, "right") for name in names[first:last])])
        for row in rows:
            marked = [Text(cell, overflow="fold") for cell in row.cells[first:last]]
            for i, cell in enumerate(marked, first):
                if i in row.best:
                    cell.append("*").stylize("bold green")
                if not reports[i].memory.fits:
                    cell.stylize("red" if row.label == "fits" else "dim")
            table.add_row(Text(row.label), Text(row.known, style="dim"), *marked)
        console.print(table)
        console.print()
        first = last
    console.print(Text(figures.winner(reports)))
    notes = ["* best of those that fit; ranked by predicted time"]
    notes += [f"error of predicted times: {error}" for error in figures.errors(reports)]
    found = collections.defaultdict[tuple[str, str], list[str]](list)
    for report, name in zip(reports, names, strict=True):
        if report.prediction is None:
            notes.append(f"{name}: no prediction, {report.no_prediction}")
        for finding in dict.fromkeys((warning.code, warning.fix) for warning in report.warnings):
            found[finding].append(name)
    for note in notes:
        console.print(Text(note, style="dim"))
    for (code, fix), where in itertools.islice(found.items(), MOST_WARNINGS):
        table = Table.grid(padding=(0, 1))
        said = Text.assemble(f"{code}: {', '.join(where)}; ", (f"fix  {fix}", "dim"))
        table.add_row(Text(" !", style="yellow"), said)
        console.print(table)
    if len(found) > MOST_WARNINGS:
        console.print(Text(f" ! and {len(found) - MOST_WARNINGS} more; {MORE}", style="yellow"))


def _title(name: str, known: str, said: str = "") -> Text:
    return Text.assemble((name, "bold"), f", {known}", f": {said}" if said else "")


def _table(columns: Sequence[tuple[str, str]], head: bool = True) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", show_header=head, padding=(0, 2, 0, 0))
    for heading, justify in columns:
        table.add_column(Text(heading), justify=justify, overflow="fold")  # type: ignore[arg-type]
    return table
