"""The report on one layout: warnings, memory, step time and collectives, and drawings for its page."""

from collections.abc import Mapping, Sequence

from gspmd_lm.foresight.memory import Memory
from gspmd_lm.foresight.report import Report
from gspmd_lm.foresight.table import split
from gspmd_lm.foresight.timing.predict import Prediction, parts_s
from gspmd_lm.show import html, terminal
from gspmd_lm.show.collectives import of_floor, section_of
from gspmd_lm.show.document import (
    Block,
    Cell,
    Column,
    Fact,
    Figure,
    Findings,
    Folded,
    Notes,
    Pair,
    Section,
    Table,
    Text,
    table_of,
)
from gspmd_lm.show.svg import Part, bar, listed, timeline
from gspmd_lm.units import human_bytes, human_count, human_seconds


def paragraph(report: Report) -> str:
    """The paragraph that training prints before it starts: all but the tables and notes."""
    memory, time, sent = (terminal.heading(section).plain for section in sections(report)[1:])
    sentences = [f"{title(report)}, {about(report)}", f"{memory} ({listed(memory_parts(report))})"]
    sentences += [f"{time} ({listed(time_parts(report))})" if report.prediction else time, sent]
    if report.warnings:
        sentences.append(f"Warnings: {', '.join(dict.fromkeys(warning.code for warning in report.warnings))}")
    return ". ".join(sentences) + "."


def title(report: Report) -> str:
    """'llama3_8b under rules/fsdp8.yaml on 8 x TPU v5p (v5p:2x2x2)'"""
    devices = hardware(report.devices, report.chip)
    target = f"{devices} ({report.target})" if report.chip else f"{report.target}, {devices}"
    phase = "" if report.phase in ("train", "step") else f"{report.phase} of "
    under = f" under {report.rules}" if report.rules else ""
    return f"{phase}{report.config}{under} on {target}"


def about(report: Report) -> str:
    """What stands below the title: the mesh, the sizes of model and step, and the kinds of attention and matmuls."""
    if report.parameters is None or report.active_parameters is None or report.tokens is None:
        count = len(report.arrays)
        sizes = f"{count} array{'s' * (count != 1)} as arguments, {report.floor.flops:.3g} FLOPs per device"
    else:
        active = f", {human_count(report.active_parameters)} of them active for a token"
        some = report.active_parameters < report.parameters
        parameters = f"{human_count(report.parameters)} parameters{active if some else ''}"
        sizes = f"{parameters}, {human_count(report.tokens)} tokens per step"
    sentence = f"mesh {mesh(report.mesh)}; counted {sizes}; compiled in {human_seconds(report.compile_s)}"
    choices = ("attention", report.attention), ("matmuls", report.matmuls)
    return "; ".join([sentence, *(f"{name}: {choice}" for name, choice in choices if choice)])


def sections(report: Report) -> list[Section]:
    """What a terminal and a page show of a report: warnings, memory, step time and collectives."""
    return [_warnings(report), _memory(report), _time(report), section_of(report)]


def _warnings(report: Report) -> Section:
    findings = [(warning.code, warning.message, warning.fix) for warning in report.warnings]
    return Section(f"Warnings ({len(findings)})", "", [Findings(findings) if findings else Text("None.")])


def _memory(report: Report) -> Section:
    memory, limit = report.memory, report.memory.limit_bytes
    fit_text = fit(memory) if limit is None else f"of {human_bytes(limit)}: {fit(memory)}"
    style = "" if limit is None else "good" if memory.fits else "bad"
    facts = [Fact("peak memory", human_bytes(memory.peak_bytes), fit_text, style)]
    if memory.host_bytes:
        facts.append(Fact("on the host", human_bytes(memory.host_bytes)))
    largest = [
        (human_bytes(temporary.bytes), temporary.shape, " ".join(axis or "?" for axis in temporary.axes),
         Cell(temporary.source, temporary.source.removeprefix("gspmd_lm/")), temporary.op)
        for temporary in memory.largest
    ]  # fmt: skip
    rest_bytes = memory.temporaries_bytes - sum(temporary.bytes for temporary in memory.largest)
    if largest and rest_bytes > 0:
        largest.append((human_bytes(rest_bytes), "all others", "", Cell(""), ""))
    columns = (Column("size", "number"), Column("largest temporaries", "code"), Column("axes"),
               Column("source", "code"), Column("op", on_terminal=False))  # fmt: skip
    blocks: list[Block] = [Figure(memory_bar(report, max(memory.peak_bytes, limit or 0)))]
    if memory.refusal:
        blocks.append(Text(f"The compiler refused the program: {memory.refusal}", "bad"))
    whole = _table("Memory per device", memory_parts(report), limit or memory.peak_bytes)
    blocks.append(Pair((whole, Table("Largest temporaries", columns, largest))))
    return Section("Memory per device", "compiled", blocks, facts)


def _table(name: str, parts: Sequence[Part], whole: float) -> Table:
    """Parts, each with its share of the whole."""
    shares = [part.amount / whole for part in parts]
    rows = [(Cell(part.label, kind=part.kind), part.quantity, Cell(f"{share:.1%}", share=share))
            for part, share in zip(parts, shares, strict=True)]  # fmt: skip
    return Table(name, (Column(), Column("", "number"), Column("", "number")), rows)


def _time(report: Report) -> Section:
    prediction = report.prediction
    if prediction is None:
        return Section("Step time", "predicted", [], [Fact("step time", "none", report.no_prediction)])
    step_s, exposed_s = prediction.step_time_s, prediction.exposed_communication_s
    sent = f"{exposed_s / step_s:.1%} of the step, of {human_seconds(prediction.communication_s)} in all"
    facts = [
        Fact("step time", human_seconds(step_s), f"error: {prediction.error}"),
        Fact("MFU", f"{prediction.mfu:.1%}")
        if prediction.tokens_per_s_per_device is None
        else Fact("tokens/s per device", f"{prediction.tokens_per_s_per_device:,.0f}", f"MFU {prediction.mfu:.1%}"),
        Fact("exposed communication", human_seconds(exposed_s), sent),
    ]
    blocks: list[Block] = [
        Figure(time_bar(report, step_s)),
        Pair(
            (_table("Where the step's time goes", time_parts(report), step_s), Notes(_time_notes(report, prediction)))
        ),
    ]
    if prediction.fusions:
        computed_s = prediction.matmul_s + prediction.attention_s + prediction.other_s
        rest_s = max(computed_s - sum(seconds for _, seconds in prediction.fusions), 0.0)
        costly = (*prediction.fusions, ("all others", rest_s), ("compute", computed_s))
        rows = [{"operation": name, "time per step": human_seconds(part_s)} for name, part_s in costly]
        operations = table_of("Costliest operations", rows, ("operation",))
        blocks.append(Folded("Costliest operations", [operations]))
    return Section("Step time", "predicted", blocks, facts)


def _time_notes(report: Report, prediction: Prediction) -> list[tuple[str, str]]:
    floor, notes = report.floor, []
    if floor.compute_s is not None and floor.memory_s is not None:
        times = prediction.step_time_s / max(floor.compute_s, floor.memory_s)
        least = f"compute {human_seconds(floor.compute_s)}, memory {human_seconds(floor.memory_s)}"
        notes.append(("floor, counted", f"{least}: the step takes {times:.2f}x the larger"))
    if floor.communication_bytes is not None:
        by_axis = ", ".join(f"{axis} {human_bytes(size)}" for axis, size in floor.communication_by_axis.items())
        least = f"{human_bytes(floor.communication_bytes)} sent{f': {by_axis}' if by_axis else ''}"
        if floor.estimated_because:
            notes.append(("by the trace", f"{least}. This is an estimate and no floor: {floor.estimated_because}"))
        else:
            notes.append(("" if notes else "floor, counted", least))
    notes.append(("basis", prediction.basis))
    if prediction.unpriced_share:
        shares = ", ".join(f"{name} {share:.1%}" for name, share in prediction.unpriced.items())
        notes.append(("not priced", f"{prediction.unpriced_share:.1%} of the program's bytes: {shares}"))
    return notes


# ---- drawings for a page


def page_sections(report: Report, number: int) -> list[Section]:
    """What a page shows: besides `sections`, drawings. `number` is the layout's place in `comparison.data`."""
    warnings, memory, time, sent = sections(report)
    return [warnings, memory, time, *_layer(report), sent, _mesh(report, number), _made_with(report)]


def memory_bar(report: Report, whole: float) -> str:
    """The parts of memory, on the scale of `whole` bytes."""
    memory, parts = report.memory, memory_parts(report)
    marks = [("peak", memory.peak_bytes), ("limit", memory.limit_bytes)]
    label = f"Memory of {report.layout}: {listed(parts)}; {fit(memory)}"
    return bar(parts, max(whole, sum(part.amount for part in parts)), label,
               [(f"{name} {human_bytes(size)}", size) for name, size in marks if size is not None])  # fmt: skip


def time_bar(report: Report, whole: float) -> str:
    """The parts of a step's time, on the scale of `whole` seconds."""
    parts, floor_s = time_parts(report), report.floor.compute_s
    marks = [] if floor_s is None else [(f"floor of compute {human_seconds(floor_s)}", floor_s)]
    return bar(parts, whole, f"Step time of {report.layout}: {listed(parts)}", marks)


def _layer(report: Report) -> list[Section]:
    spans = report.prediction.timeline if report.prediction else ()
    if not spans:
        return []
    kinds = [("matmul", "matmul"), ("attention", "attention"), ("other", "other compute"), ("sent", "collective"),
             ("host", "host copy"), ("idle", "waiting")]  # fmt: skip
    zoom = '<label class="zoom">zoom <input type="range" min="1" max="12" value="1"></label>'
    drawing = (
        f'{html.legend(kinds, zoom)}<div class="timeline">{timeline(spans)}</div>'
        '<p class="status" aria-live="polite">Point at a span, or use the arrow keys in a strip.</p>'
    )
    rows = [
        {"part": span.part, "lane": span.lane, "kind": span.kind, "name": span.name,
         "start": human_seconds(span.start_s), "duration": human_seconds(span.end_s - span.start_s)}
        for span in spans
    ]  # fmt: skip
    table = table_of("Spans of one layer", rows, ("part", "lane", "kind", "name"))
    return [Section("One layer, in time", "predicted", [Figure(drawing), Folded("The same as a table", [table])])]


def _mesh(report: Report, number: int) -> Section:
    drawing = (
        f'<div class="mesh" data-layout="{number}"><div class="choice"></div><div class="drawing"></div>'
        '<p class="status" aria-live="polite"></p></div>'
        '<p class="legend">Each device shows its number, and below it the shard of the array that it holds. Point at a '
        "device, or go from one to the next with the arrow keys.</p>"
    )
    rows = [
        {
            "array": array.path,
            "whole": ", ".join(f"{axis} {size}" for axis, size in zip(array.axes, array.shape, strict=True)),
            "split at rest": "-" if array.at_rest is None else split(array.axes, array.at_rest),
            **({} if report.phase == "step" else {"split in use": split(array.axes, array.in_use)}),
            "per device": human_bytes(array.bytes_per_device),
        }
        for array in report.arrays
    ]
    table = table_of("Arrays and how they are split", rows, ("array", "whole", "split at rest", "split in use"))
    return Section("Mesh and arrays", "counted", [Figure(drawing), table])


def _made_with(report: Report) -> Section:
    rows = [{"what": name, "which": value} for name, value in report.versions.items()]
    versions = table_of("Versions", rows, ("what", "which"))
    rules = [Text(f"{report.layout}, the rules file:"), html.file(report.rules_text)] if report.rules_text else []
    return Section("Made with", "", [*rules, Folded("Versions and compiler options", [versions])])


# ---- words and numbers


def mesh(sizes: Mapping[str, int]) -> str:
    """The sizes of a mesh as 'fsdp=16 x tensor=4'."""
    return " x ".join(f"{name}={size}" for name, size in sizes.items())


def hardware(count: int, chip: str) -> str:
    """'64 x TPU v5p'; '8 simulated devices' where the chip is ''"""
    return f"{count} x {chip}" if chip else f"{count} simulated devices"


def fit(memory: Memory) -> str:
    """A phrase that says whether the program fits, and by how much."""
    if memory.limit_bytes is None:
        return "no limit on this target"
    spare, share = memory.limit_bytes - memory.peak_bytes, memory.peak_bytes / memory.limit_bytes
    if memory.fits:
        return f"fits, {human_bytes(spare)} ({1 - share:.1%}) free"
    if spare < 0:
        return f"does not fit, {human_bytes(-spare)} over ({share:.2f}x the limit)"
    return "does not fit: the compiler refused it"


def memory_parts(report: Report) -> list[Part]:
    """The parts of a device's memory."""
    memory = report.memory
    parts = [
        ("weights", "weights", memory.weights_bytes),
        ("cache", "cache", memory.cache_bytes)
        if memory.cache_bytes
        else ("optimizer", "optimizer", memory.optimizer_bytes),
        ("batch", "batch", memory.batch_bytes),
    ]
    if report.phase == "step":
        parts = [("arguments", "weights", memory.arguments_bytes), ("results", "batch", memory.results_bytes)]
    parts.append(("temporaries", "temporaries", memory.temporaries_bytes))
    return [Part(kind, name, size, human_bytes(size)) for name, kind, size in parts]


def time_parts(report: Report) -> list[Part]:
    """The parts of a step's time that are not 0; none where no time is predicted."""
    if (prediction := report.prediction) is None:
        return []
    seconds = parts_s(prediction)
    kinds = ("matmul", "attention", "other", *["wait"] * len(prediction.exposed_by_axis), "host")
    return [Part(kind, label, part_s, human_seconds(part_s))
            for kind, (label, part_s) in zip(kinds, seconds.items(), strict=True) if part_s]  # fmt: skip


def verdict(report: Report) -> str:
    """What to make of one layout, in three sentences: whether it fits, what its time goes to, and what it sends."""
    memory, prediction = report.memory, report.prediction
    needs = f"needs {human_bytes(memory.peak_bytes)} per device" if memory.limit_bytes is None else fit(memory)
    sentences = [f"{report.layout} {needs}."]
    if prediction:
        label, most_s = max(list(parts_s(prediction).items())[:3], key=lambda part: part[1])
        longest = next(iter(prediction.exposed_by_axis), "")
        sentences.append(
            f"A step takes {human_seconds(prediction.step_time_s)}: {label} take{'s' if label != 'matmuls' else ''} "
            f"{most_s / prediction.step_time_s:.1%} of it, and it waits "
            f"{prediction.exposed_communication_s / prediction.step_time_s:.1%} of it for other devices"
            + (f", most for {longest}." if longest else ".")
        )
    if not memory.refusal:
        sent = filter(None, (human_bytes(report.sent_bytes), of_floor(report)))
        sentences.append(f"Each device sends {', '.join(sent)}.")
    return " ".join(sentences)
