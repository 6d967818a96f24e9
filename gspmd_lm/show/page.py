"""One self-contained HTML page of the costs of one layout or of several. It loads nothing."""

import json
from collections.abc import Sequence

from gspmd_lm.foresight.report import Report
from gspmd_lm.foresight.table import split
from gspmd_lm.show import collectives, figures
from gspmd_lm.show.drawing import bar, text, timeline
from gspmd_lm.show.pieces import (
    Part,
    breakable,
    document,
    facts_of,
    file_of,
    folded,
    known_as,
    legend,
    notes_of,
    pick,
    rows_of,
    scroll,
    section,
    swatch,
    term,
    words,
)
from gspmd_lm.units import human_bytes, human_count, human_seconds


def render(reports: Sequence[Report], command: str = "") -> str:
    """The HTML of the page. Its styles and scripts are in `page.html`. Without scripts it shows all but the mesh.

    command: what made the page, for readers who want to repeat it.
    """
    reports = figures.ranked(reports)
    several = len(reports) > 1
    configs = ", ".join(dict.fromkeys(report.config for report in reports))
    title = f"{len(reports)} layouts of {configs}" if several else _name(reports[0])
    body = (_comparison(reports) if several else "") + layouts(reports) + words()
    return document(title, command, body, data(reports))


def layouts(reports: Sequence[Report]) -> str:
    """All about each layout. Where there are several, a script shows the one that is chosen."""
    heading = "h3" if len(reports) > 1 else "h2"
    return "".join(_layout(report, number, heading) for number, report in enumerate(reports))


def data(reports: Sequence[Report]) -> str:
    """The JSON from which the scripts draw meshes. It contains nothing that ends its HTML element."""
    found = [
        {
            "mesh": list(report.mesh.items()),
            "arrays": [
                {
                    "path": array.path,
                    "axes": array.axes,
                    "shape": array.shape,
                    "rest": array.at_rest,
                    "use": array.in_use,
                }
                for array in report.arrays
            ],
        }
        for report in reports
    ]
    return json.dumps(found, separators=(",", ":")).replace("<", "\\u003c")


def _name(report: Report) -> str:
    return f"{report.config} under {report.layout} on {report.target}"


# ---- parts of the page


def _comparison(reports: Sequence[Report]) -> str:
    names = [report.layout for report in reports]
    heads = [f'<th scope="col" data-column="{i}">{pick(i, name)}</th>' for i, name in enumerate(names)]
    rows = [
        f'<tr><th scope="row">{term(row.label)} {known_as(row.known)}</th>'
        + "".join(
            f'<td class="num{" best" if i in row.best else " bad" if cell == "NO" else ""}" '
            f'data-name="{text(names[i])}">{text(cell)}{"*" if i in row.best else ""}</td>'
            for i, cell in enumerate(row.cells)
        )
        + "</tr>"
        for row in figures.compared(reports)
    ]
    slowest = max((report.prediction.step_time_s for report in reports if report.prediction), default=0)
    largest = max(max(report.memory.peak_bytes, report.memory.limit_bytes or 0) for report in reports)
    bars = "".join(
        f"<dt>{text(report.layout)}</dt><dd>{_memory_bar(report, largest)}"
        f"{_time_bar(report, slowest) if report.prediction else ''}</dd>"
        for report in reports
    )
    head = f"<tr><td></td>{''.join(heads)}</tr>"
    table = f'<table class="compare stack"><thead>{head}</thead><tbody>{"".join(rows)}</tbody></table>'
    content = (
        f'<p class="verdict">{text(figures.winner(reports))}</p>'
        + scroll("Comparison of layouts", table)
        + "<p>* best of those that fit. Ranked by predicted time. Choose a name to see that layout below.</p>"
        + "".join(f"<p>Error of predicted times: {text(error)}.</p>" for error in figures.errors(reports))
        + f"<h3>Memory {known_as('compiled')} above step time {known_as('predicted')}, on one scale each</h3>"
        + "<p>Lines mark the peak and the limit of memory, and the floor of compute.</p>"
        + f'<dl class="bars">{bars}</dl>'
    )
    return section("h2", "Side by side", "", content, "comparison")


def _layout(report: Report, number: int, heading: str) -> str:
    found = [
        _warnings(report),
        _memory(report),
        _time(report),
        _layer(report),
        _mesh(report, number),
        collectives.table(report),
        _made_with(report),
    ]
    sections = "".join(section(heading, *part) for part in found if part)
    name = f"<h2>{text(_name(report))}</h2>" if heading == "h3" else ""
    about = (
        f"{text(report.layout)} on {text(figures.hardware(report.devices, report.chip))}, "
        f"mesh {text(figures.mesh(report.mesh))}. "
        f"{figures.parameters(report)} and {human_count(report.tokens)} tokens per step "
        f"{known_as('counted')}; phase {text(report.phase)}."
    )
    about += f" Attention: {text(report.attention)}." if report.attention else ""
    return (
        f'<article class="layout" id="layout-{number}">{name}<p class="about">{about}</p>'
        f'<p class="verdict">{text(figures.verdict(report))}</p>{_facts(report)}{sections}</article>'
    )


def _facts(report: Report) -> str:
    memory, found = report.memory, report.prediction
    of_limit = f"of {human_bytes(memory.limit_bytes)}: " if memory.limit_bytes is not None else ""
    facts = [("peak memory", "compiled", human_bytes(memory.peak_bytes), of_limit + figures.fit(memory))]
    if found:
        facts += [
            ("step time", "predicted", human_seconds(found.step_time_s), f"error: {found.error}"),
            ("tokens/s per device", "predicted", f"{found.tokens_per_s_per_device:,.0f}", f"MFU {found.mfu:.1%}"),
            ("exposed communication", "predicted", human_seconds(found.exposed_communication_s),
             f"{found.exposed_communication_s / found.step_time_s:.1%} of the step"),
        ]  # fmt: skip
    else:
        facts.append(("step time", "predicted", "none", report.no_prediction))
    if not memory.refusal:
        facts.append(("sent per device and step", "compiled", human_bytes(report.sent_bytes), figures.of_floor(report)))
    return facts_of(facts, over=not memory.fits)


def _warnings(report: Report) -> Part:
    found = [
        f"<li><b>{text(warning.code)}</b> {text(warning.message)}<br><span>Fix: {text(warning.fix)}</span></li>"
        for warning in report.warnings
    ]
    content = f'<ul class="warnings">{"".join(found)}</ul>' if found else "<p>None.</p>"
    return f"Warnings ({len(found)})", "", content


def _memory(report: Report) -> Part:
    memory = report.memory
    rows = [[swatch(name), term(name), human_bytes(size)] for name, size in figures.parts(memory)]
    whole = (("peak", memory.peak_bytes), ("limit", memory.limit_bytes), ("on the host", memory.host_bytes))
    rows += [["", term(name), human_bytes(size)] for name, size in whole if size is not None]
    largest = [
        [human_bytes(found.bytes), f"<code>{breakable(found.shape)}</code>",
         text(" ".join(axis or "?" for axis in found.axes)), f"<code>{breakable(found.source)}</code>",
         breakable(found.op)]
        for found in memory.largest
    ]  # fmt: skip
    if largest:
        largest.append([human_bytes(figures.other_temporaries_bytes(memory)), "all others", "", "", ""])
    refusal = (
        f'<p class="refusal">The compiler refused the program: {text(memory.refusal)}</p>' if memory.refusal else ""
    )
    content = (
        _memory_bar(report, max(memory.peak_bytes, memory.limit_bytes or 0))
        + f'<p class="{"good" if memory.fits else "bad"}">{text(figures.fit(memory))}.</p>{refusal}'
        + '<div class="pair">'
        + rows_of(["", "part", "size"], rows, "Memory per device", numbers=(2,))
        + rows_of(["size", "largest temporaries", "axes", "source", "op"], largest, "Largest temporaries", numbers=(0,))
        + "</div>"
    )
    return "Memory per device", "compiled", content


def _memory_bar(report: Report, whole: float) -> str:
    memory = report.memory
    amounts = [(name, f"{name} {human_bytes(size)}", float(size)) for name, size in figures.parts(memory)]
    total = sum(size for _, _, size in amounts)
    marks = [(f"peak {human_bytes(memory.peak_bytes)}", float(memory.peak_bytes))]
    if memory.limit_bytes is not None:
        marks.append((f"limit {human_bytes(memory.limit_bytes)}", float(memory.limit_bytes)))
    label = f"Memory of {report.layout}: " + ", ".join(about for _, about, _ in amounts) + f"; {figures.fit(memory)}"
    return bar(amounts, max(whole, total), label, marks)


def _time(report: Report) -> Part:
    found, floor = report.prediction, report.floor
    if found is None:
        return "Step time", "predicted", f"<p>None: {text(report.no_prediction)}.</p>"
    rows = [
        [swatch(kind), text(label), human_seconds(seconds), f"{seconds / found.step_time_s:.1%}"]
        for kind, label, seconds in figures.breakdown(found)
    ]
    rows.append(["", "step", human_seconds(found.step_time_s), ""])
    notes = [("Basis", found.basis), ("Error", found.error)]
    if floor.compute_s is not None and floor.memory_s is not None:
        times = found.step_time_s / max(floor.compute_s, floor.memory_s)
        compute, memory = human_seconds(floor.compute_s), human_seconds(floor.memory_s)
        notes.append(
            ("Floor (counted)", f"compute {compute}, memory {memory}; the step takes {times:.2f} times the larger")
        )
    by_axis = ", ".join(f"{axis} {human_bytes(size)}" for axis, size in floor.communication_by_axis.items())
    if floor.communication_bytes is not None:
        least = f"{human_bytes(floor.communication_bytes)} per device and step"
        notes.append(("Floor of communication (counted)", least + (f": {by_axis}" if by_axis else "")))
    notes.append(("Communication, exposed or not", human_seconds(found.communication_s)))
    if found.unpriced_share:
        shares = ", ".join(f"{name} {share:.1%}" for name, share in found.unpriced.items())
        notes.append(("Not priced", f"{found.unpriced_share:.1%} of the program's bytes: {shares}"))
    costly = [[breakable(name), human_seconds(seconds)] for name, seconds in found.fusions]
    if costly:
        computed_s = found.matmul_s + found.attention_s + found.other_s
        rest_s = computed_s - sum(seconds for _, seconds in found.fusions)
        costly += [["all others", human_seconds(max(rest_s, 0.0))], ["compute", human_seconds(computed_s)]]
    operations = rows_of(["operation", "time per step"], costly, "Costliest operations", numbers=(1,))
    content = (
        _time_bar(report, found.step_time_s)
        + '<div class="pair">'
        + rows_of(["", "where it goes", "time", "share"], rows, "Where the step's time goes", numbers=(2, 3))
        + notes_of(notes)
        + "</div>"
        + (folded("Costliest operations", operations) if costly else "")
    )
    return "Step time", "predicted", content


def _time_bar(report: Report, whole: float) -> str:
    assert report.prediction is not None
    pieces = [
        (kind, f"{label} {human_seconds(seconds)}", seconds)
        for kind, label, seconds in figures.breakdown(report.prediction)
    ]
    label = f"Step time of {report.layout}: " + ", ".join(about for _, about, _ in pieces)
    floor = report.floor.compute_s
    marks = [] if floor is None else [(f"floor of compute {human_seconds(floor)}", floor)]
    return bar(pieces, whole, label, marks)


def _layer(report: Report) -> Part | None:
    spans = report.prediction.timeline if report.prediction else ()
    if not spans:
        return None
    kinds = [("matmul", "matmul"), ("attention", "attention"), ("other", "other compute"), ("sent", "collective"),
             ("host", "host copy"), ("idle", "waiting")]  # fmt: skip
    zoom = '<label class="zoom">zoom <input type="range" min="1" max="12" value="1"></label>'
    rows = [
        [text(span.part), text(span.lane), text(span.kind), breakable(span.name), human_seconds(span.start_s),
         human_seconds(span.end_s - span.start_s)]
        for span in spans
    ]  # fmt: skip
    table = rows_of(["part", "lane", "kind", "name", "start", "duration"], rows, "Spans of one layer", numbers=(4, 5))
    content = (
        f"{legend(kinds, zoom)}"
        f'<div class="timeline">{timeline(spans)}</div>'
        '<p class="status" aria-live="polite">Point at a span, or use the arrow keys in a strip.</p>'
        f"{folded('The same as a table', table)}"
    )
    return "One layer, in time", "predicted", content


def _mesh(report: Report, number: int) -> Part:
    rows = [
        [
            breakable(array.path),
            text(", ".join(f"{axis} {size}" for axis, size in zip(array.axes, array.shape, strict=True))),
            "-" if array.at_rest is None else text(split(array.axes, array.at_rest)),
            text(split(array.axes, array.in_use)),
            human_bytes(array.bytes_per_device),
        ]
        for array in report.arrays
    ]
    columns = ["array", "whole", "split at rest", "split in use", "per device"]
    content = (
        f'<div class="mesh" data-layout="{number}"><div class="choice"></div><div class="drawing"></div>'
        '<p class="status" aria-live="polite"></p></div>'
        '<p class="legend">Each device shows its number, and below it the piece of the array that it holds. Point at a '
        "device, or go from one to the next with the arrow keys.</p>"
        f"{rows_of(columns, rows, 'Arrays and how they are split', numbers=(4,))}"
    )
    return "Mesh and arrays", "counted", content


def _made_with(report: Report) -> Part:
    rows = [[breakable(name), breakable(value)] for name, value in report.versions.items()]
    content = folded("Versions and compiler options", rows_of(["what", "which"], rows, "Versions"))
    if report.rules_text:
        content = f"<p>{text(report.layout)}, the rules file:</p>{file_of(report.rules_text)}{content}"
    return "Made with", "", f"{content}<p>Compiled in {human_seconds(report.compile_s)}.</p>"
