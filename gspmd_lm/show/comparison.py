"""Shows one layout, or several side by side with the best first: on a terminal, and as a page."""

import collections
import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from rich.console import Console

from gspmd_lm.foresight.report import Report
from gspmd_lm.foresight.table import PlacedArray
from gspmd_lm.foresight.timing.predict import differences
from gspmd_lm.hardware.capacity import Assumptions
from gspmd_lm.plan.row_changes import RowComparison
from gspmd_lm.sharding.rules import describe_mesh, describe_split
from gspmd_lm.show import html, row_changes, terminal
from gspmd_lm.show.document import (
    Cell,
    Column,
    Figure,
    Findings,
    Folded,
    Notes,
    Row,
    Section,
    Table,
    Text,
    figure,
    table_of,
)
from gspmd_lm.show.report import about, fit, memory_bar, sections, time_bar, title
from gspmd_lm.show.svg import text, timeline
from gspmd_lm.units import human_bytes, human_seconds

LINES = 49  # of a screen, without the prompt
FEW = 3  # rows that two layouts do not share, whose changes a terminal lists below the comparison
ALIKE = 0.01  # the times of two layouts that differ by less are the same


def show(reports: Sequence[Report], console: Console, rows: RowComparison | None = None) -> None:
    """Prints one report, no longer than a screen, or several side by side with the best first.

    The section on the whole job follows where its user has said something of it.
    rows: what each row changes that two layouts do not share.
    """
    if len(reports) > 1:
        changes = row_changes.sections(rows, reports, FEW) if rows else []
        terminal.show(console, [comparison(rank(reports)), *changes], _title_of(reports))
    else:
        # The summary has the facts.
        shown = [dataclasses.replace(section, facts=()) for section in sections(reports[0]) if section.blocks]
        job = reports[0].job
        terminal.show(console, shown[:-1] if job else shown, title(reports[0]), about(reports[0]), LINES)
        if job and job.assumed != Assumptions():  # somebody asked
            terminal.show(console, [Section("", "", []), *shown[-1:]])


def page(reports: Sequence[Report], command: str = "", rows: RowComparison | None = None) -> str:
    """The HTML of a page of one report or of several. Without scripts it shows all but the mesh.

    command: what made the page, for readers who want to repeat it. rows: as in `show`.
    """
    changes = row_changes.sections(rows, reports) if rows else []
    reports = rank(reports)
    compared = html.sections([comparison(reports), *changes]) if len(reports) > 1 else ""
    return html.page(_title_of(reports), command, compared + layouts(reports) + html.words(), data(reports))


def layer_page(report: Report) -> str:
    """The page of one layer alone: its timeline, if its times are known."""
    drawn = html.sections(_layer(report))
    return html.page(f"One layer: {title(report)}", "", f"<main>{drawn}</main>", "[]") if drawn else ""


def layouts(reports: Sequence[Report]) -> str:
    """The HTML of the reports. Where there are several, a script shows the one that is chosen."""
    return "".join(_layout(report, number, len(reports) > 1) for number, report in enumerate(reports))


def _layout(report: Report, number: int, several: bool) -> str:
    """What a page shows: besides `sections`, drawings. `number` is the layout's place in `data`."""
    whole, warnings, memory, time, sent, *job = sections(report)
    content = [warnings, memory, time, *_layer(report), sent, *job, mesh_section(report, number), _made_with(report)]
    name = f"<h2>{text(title(report))}</h2>" if several else ""
    return (
        f'<article class="layout" id="layout-{number}" data-name="{text(report.layout)}">{name}'
        f'<p class="about">{text(about(report))}</p>{html.blocks(whole.blocks)}'
        f"{html.facts(content)}{html.sections(content, 'h3' if several else 'h2')}</article>"
    )


def _layer(report: Report) -> list[Section]:
    spans = report.prediction.timeline if report.prediction else ()
    if not spans:
        return []
    kinds = [
        ("matmul", "matmul"),
        ("attention", "attention"),
        ("other", "other compute"),
        ("sent", "collective"),
        ("host", "host copy"),
        ("idle", "waiting"),
    ]
    zoom = '<label class="zoom">zoom <input type="range" min="1" max="12" value="1"></label>'
    drawing = (
        f'{html.legend(kinds, zoom)}<div class="timeline">{timeline(spans)}</div>'
        '<p class="status" aria-live="polite">Point at a span, or use the arrow keys in a strip.</p>'
    )
    rows = [
        {
            "part": span.part,
            "lane": span.lane,
            "kind": span.kind,
            "name": span.name,
            "start": human_seconds(span.start_s),
            "duration": human_seconds(span.end_s - span.start_s),
        }
        for span in spans
    ]
    table = table_of("Spans of one layer", rows, ("part", "lane", "kind", "name"))
    return [Section("One layer, in time", "predicted", [Figure(drawing), Folded("The same as a table", [table])])]


class Layout(Protocol):
    """A mesh and the arrays on it: a report, or a dry run."""

    @property
    def mesh(self) -> Mapping[str, int]: ...
    @property
    def arrays(self) -> tuple[PlacedArray, ...]: ...
    @property
    def phase(self) -> str: ...


def mesh_section(layout: Layout, number: int) -> Section:
    """A mesh whose devices can be pointed at, and the table of its arrays. `number` is the layout's place in `data`."""
    drawing = (
        f'<div class="mesh" data-layout="{number}"><div class="choice"></div><div class="drawing"></div>'
        '<p class="status" aria-live="polite"></p></div>'
        '<p class="legend">Each device shows its number, and below it the shard of the array that it holds. Point at a '
        "device, or go from one to the next with the arrow keys.</p>"
    )
    states = any(array.optimizer and array.optimizer.split != array.at_rest for array in layout.arrays)
    rows = [
        {
            "array": array.path,
            "whole": ", ".join(f"{axis} {size}" for axis, size in zip(array.axes, array.shape, strict=True)),
            "split at rest": "-" if array.at_rest is None else describe_split(array.axes, array.at_rest),
            **({} if layout.phase == "step" else {"split in use": describe_split(array.axes, array.in_use)}),
            **({"optimizer state": describe_split(array.axes, state.split) if state else "-"} if states else {}),
            "per device": human_bytes(array.bytes_per_device),
        }
        for array in layout.arrays
        for state in [array.optimizer]
    ]
    words = ("array", "whole", "split at rest", "split in use", "optimizer state")
    table = table_of("Arrays and how they are split", rows, words)
    return Section("Mesh and arrays", "counted", [Figure(drawing), table])


def _made_with(report: Report) -> Section:
    rows = [{"what": name, "which": value} for name, value in report.versions.items()]
    versions = table_of("Versions", rows, ("what", "which"))
    rules = [Text(f"{report.layout}, the rules file:"), html.file(report.rules_text)] if report.rules_text else []
    return Section("Made with", "", [*rules, Folded("Versions and compiler options", [versions])])


def data(layouts: Sequence[Layout]) -> str:
    """The JSON from which the scripts draw meshes. It contains nothing that ends its HTML element."""
    records = [
        {"mesh": list(layout.mesh.items()), "arrays": list(map(dataclasses.asdict, layout.arrays))}
        for layout in layouts
    ]
    return json.dumps(records, separators=(",", ":")).replace("<", "\\u003c")


def comparison(reports: Sequence[Report]) -> Section:
    """Layouts side by side. `reports` are ranked."""
    timed = any(report.prediction for report in reports)
    ranking = "predicted time" if timed else "bytes sent, then memory"
    notes = [f"* best of those that fit; ranked by {ranking}"]
    errors = dict.fromkeys(report.prediction.error for report in reports if report.prediction)
    notes += [f"error of predicted times: {error}" for error in errors]
    layouts_by_finding = collections.defaultdict[tuple[str, str], list[str]](list)
    for report in reports:
        if report.prediction is None and timed:
            notes.append(f"{report.layout}: no prediction, {report.no_prediction}")
        for finding in dict.fromkeys((warning.code, warning.fix) for warning in report.warnings):
            layouts_by_finding[finding].append(report.layout)
    findings = Findings([(code, ", ".join(where), fix) for (code, fix), where in layouts_by_finding.items()])
    slowest = max((report.prediction.step_time_s for report in reports if report.prediction), default=0)
    largest = max(max(report.memory.peak_bytes, report.memory.limit_bytes or 0) for report in reports)
    bars = "".join(
        f"<dt>{text(report.layout)}</dt><dd>{memory_bar(report, largest)}"
        f"{time_bar(report, slowest) if report.prediction else ''}</dd>"
        for report in reports
    )
    drawing = (
        "<p>Memory (compiled) above step time (predicted), on one scale each. Lines mark the peak and the limit of "
        f'memory, and the floor of compute.</p><dl class="bars">{bars}</dl>'
    )
    blocks = [Notes(summary(reports)), figures(reports), *(Text(note, "dim") for note in notes)]
    return Section("Side by side", "", [*blocks, *([findings] if layouts_by_finding else []), Figure(drawing)])


def figures(reports: Sequence[Report]) -> Table:
    """The table of the comparison, with the best in each row marked.

    A layout that does not fit is never best, and none is where all figures read alike.
    """

    def cell(report: Report, value: str, best: bool = False) -> Cell:
        style = "best" if best else "" if report.memory.fits else "bad" if value == "NO" else "dim"
        return Cell(f"{value}*" if best else value, style=style)

    def words(label: str, known: str, values: Sequence[str]) -> Row:
        return [label, known, *map(cell, reports, values)]

    def line(label: str, known: str, values: Sequence[float | None], show: Callable[[float], str], sign=1) -> Row:
        texts = [figure(x, show) for x in values]
        able = {i: sign * x for i, x in enumerate(values) if x is not None and reports[i].memory.fits}
        least = texts[min(able, key=able.__getitem__)] if len({texts[i] for i in able}) > 1 else ""
        return [label, known, *(cell(reports[i], one, i in able and one == least) for i, one in enumerate(texts))]

    def prediction_values(name: str) -> list[float | None]:
        return [getattr(report.prediction, name) if report.prediction else None for report in reports]

    sent = [None if report.memory.refusal else report.sent_bytes for report in reports]
    unit = reports[0].unit
    widths = [report.other_width if report.above_floor is not None else "" for report in reports]
    rows = [words("mesh", "", [describe_mesh(report.mesh) for report in reports])]
    for label in ("config", "target"):
        names = [getattr(report, label) for report in reports]
        rows += [words(label, "", names)] if len(set(names)) > 1 else []
    times = [
        line("step time", "predicted", prediction_values("step_time_s"), human_seconds),
        line(f"{unit}/s per device", "predicted", prediction_values("tokens_per_s_per_device"), "{:,.0f}".format, -1),
        line("MFU", "predicted", prediction_values("mfu"), "{:.1%}".format, -1),
        line("exposed communication", "predicted", prediction_values("exposed_communication_s"), human_seconds),
    ]
    rows += [
        words("fits", "compiled", ["yes" if report.memory.fits else "NO" for report in reports]),
        line("peak memory", "compiled", [report.memory.peak_bytes for report in reports], human_bytes),
        *(times if any(report.prediction for report in reports) else []),
        line("sent", "compiled", sent, human_bytes),
        line("times the least", "counted", [report.above_floor for report in reports], "{:.2f}x".format),
        *([words("of it narrower or wider", "compiled", widths)] if any(widths) else []),
        line("warnings", "", [len(report.warnings) for report in reports], str),
    ]
    columns = (Column(), Column("", "known"), *(Column(report.layout, "number") for report in reports))
    return Table("Comparison of layouts", columns, rows, labels=2)


def summary(reports: Sequence[Report]) -> list[tuple[str, str]]:
    """How layouts differ in memory, network and time: three names, each with a sentence. `reports` are ranked."""
    fitting = [report for report in reports if report.memory.fits]
    if not fitting:
        nearest = min(reports, key=lambda report: report.memory.peak_bytes)
        return [("memory", f"none of the layouts fits; {nearest.layout} comes nearest, and {fit(nearest.memory)}")]
    some = (
        f"; {len(reports) - len(fitting)} of {len(reports)} layouts do not fit" if len(fitting) < len(reports) else ""
    )
    return [
        ("memory", _least(fitting, "needs", lambda report: report.memory.peak_bytes) + some),
        ("network", _least(fitting, "sends", lambda report: report.sent_bytes)),
        ("time", _fastest(fitting)),
    ]


def _least(reports: Sequence[Report], does: str, size: Callable[[Report], int]) -> str:
    """'fsdp8 needs the least, 9.4 MB a device; tp8, the next, 33.1 MB'"""
    least, *others = sorted(reports, key=size)
    words = human_bytes(size(least))
    if not others:
        return f"{least.layout} {does} {words} a device"
    second, more = others[0].layout, human_bytes(size(others[0]))
    if more == words:
        return f"{least.layout} {does} as little as {second}, {words} a device"
    return f"{least.layout} {does} the least, {words} a device; {second}, the next, {more}"


def _fastest(reports: Sequence[Report]) -> str:
    """Which of the layouts that fit is the fastest, and why. `reports` are ranked."""
    best, *others = reports
    if best.prediction is None:
        return f"not predicted: {best.no_prediction}"
    step_s = best.prediction.step_time_s
    second = others[0] if others else None
    if second is None or second.prediction is None:
        return f"{best.layout} takes {human_seconds(step_s)} a step, and of no other that fits the time is known"
    behind = second.prediction.step_time_s / step_s - 1
    if behind < ALIKE:
        return f"{best.layout} and {second.layout} take the same, {human_seconds(step_s)} a step, within {ALIKE:.0%}"
    return (
        f"{best.layout} is the fastest, {human_seconds(step_s)} a step; {second.layout}, the next, takes "
        f"{behind:.1%} longer ({differences(best.prediction.parts_s, second.prediction.parts_s, step_s)})"
    )


def rank(reports: Sequence[Report]) -> list[Report]:
    """The reports, best first: those that fit, then shorter predicted times; where there are none, fewer bytes sent."""

    def cost(report: Report) -> tuple[bool, float, int, int]:
        step_s = report.prediction.step_time_s if report.prediction else math.inf
        return not report.memory.fits, step_s, report.sent_bytes, report.memory.peak_bytes

    return sorted(reports, key=cost)


def _title_of(reports: Sequence[Report]) -> str:
    if len(reports) == 1:
        return title(reports[0])
    return f"{len(reports)} layouts of {', '.join(dict.fromkeys(report.config for report in reports))}"
