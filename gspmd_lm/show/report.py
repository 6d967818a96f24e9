"""The report on one layout: warnings, memory, step time and collectives."""

import collections
import dataclasses
from collections.abc import Callable, Collection, Hashable, Sequence

from gspmd_lm.config.paths import short_name
from gspmd_lm.foresight.advice import SLOW_LINKS
from gspmd_lm.foresight.collectives import Collective
from gspmd_lm.foresight.memory import Memory
from gspmd_lm.foresight.report import Report
from gspmd_lm.foresight.timing.predict import Prediction
from gspmd_lm.sharding.rules import describe_mesh
from gspmd_lm.show import terminal, whole_job
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
    Row,
    Section,
    Table,
    Text,
    table_of,
)
from gspmd_lm.show.svg import Part, bar, list_parts
from gspmd_lm.units import human_bytes, human_count, human_seconds, plural

COLLECTIVES = (
    Column("kind"),
    Column("axes"),
    Column("dtype", on_terminal=False),
    Column("times", "number"),
    Column("sent", "number"),
    Column("overlap"),
    Column("phase"),
    Column("op"),
    Column("because of"),
    Column("source", "code", on_terminal=False),
)
MOST_WARNED = 4  # warnings in the first lines
SMALL = 10  # times the floor that a step takes where what it waits for is not the chip's speed
# Short forms for a narrow terminal.
PHASES = {"forward": "fwd", "backward": "bwd", "recomputation": "remat", "optimizer": "optim"}


def first_lines(report: Report, said: Collection[str] = ()) -> str:
    """The lines of 80 columns that training prints before it starts: what a step takes, and warnings.

    said: the messages of warnings that stand above them.
    """
    parts = {"memory": list_parts(memory_parts(report)), "time": list_parts(time_parts(report))}
    lines = [(name, "; ".join(filter(None, (words, parts.get(name))))) for name, words in summary(report)]
    warned = [warning.message for warning in report.warnings if warning.message not in said]
    if warned:
        more = f"; and {len(warned) - MOST_WARNED} more" if len(warned) > MOST_WARNED else ""
        lines.append(("warnings", f"explain gives fixes for: {'; '.join(warned[:MOST_WARNED])}{more}"))
    printed = terminal.text_of(lambda console: console.print(terminal.align(lines)), 80)
    return "\n".join(line.rstrip() for line in printed.splitlines())


def summary(report: Report) -> list[tuple[str, str]]:
    """What a device needs of memory, network and time in one step: three names, each with a sentence about it."""
    return [("memory", _memory_words(report)), ("network", _network_words(report)), ("time", _time_words(report))]


def _memory_words(report: Report) -> str:
    memory = report.memory
    words = f"{human_bytes(memory.peak_bytes)} a device"
    if memory.limit_bytes is not None:
        free = f"fits, {1 - memory.peak_bytes / memory.limit_bytes:.1%} free" if memory.fits else fit(memory)
        words = f"{human_bytes(memory.peak_bytes)} of {human_bytes(memory.limit_bytes)} a device, {free}"
    return words + (f"; {human_bytes(memory.host_bytes)} on the host" if memory.host_bytes else "")


def _network_words(report: Report) -> str:
    if report.memory.refusal:
        return "not known, since the compiler gave no program"
    if not report.collectives:
        return "nothing is sent between devices"
    least = above_least(report)
    return f"{human_bytes(report.sent_bytes)} a device{least and f', {least}'}"


def _time_words(report: Report) -> str:
    prediction = report.prediction
    if prediction is None:
        return f"not predicted: {report.no_prediction}"
    step_s, exposed_s = prediction.step_time_s, prediction.exposed_communication_s
    speed = prediction.tokens_per_s_per_device
    words = f"{human_seconds(step_s)} a step, MFU {prediction.mfu:.1%}"
    if names := prediction.without_price:
        unknown = f"nothing is known of how long this takes: {names}"
        words = f"at least {human_seconds(step_s)} a step ({unknown}), MFU at most {prediction.mfu:.1%}"
    words += "" if speed is None else f", {speed:,.0f} {report.unit}/s per device"
    if prediction.communication_s:
        sent_s = human_seconds(prediction.communication_s)
        words += (
            f"; waits {human_seconds(exposed_s)} ({exposed_s / step_s:.1%}) for communication, which takes {sent_s}"
        )
    return words


def title(report: Report) -> str:
    """'llama3_8b under fsdp8 on 8 x TPU v5p (v5p:2x2x2)'"""
    devices = hardware(report.devices, report.chip)
    target = f"{devices} ({report.target})" if report.chip else f"{report.target}, {devices}"
    phase = "" if report.phase in ("train", "step") else f"{report.phase} of "
    under = f" under {short_name(report.rules, 'rules')}" if report.rules else ""
    return f"{phase}{report.config}{under} on {target}"


def about(report: Report) -> str:
    """What stands below the title: the mesh, the sizes of model and step, and the kinds of attention and matmuls."""
    if report.parameters is None or report.active_parameters is None or report.tokens is None:
        sizes = f"{plural(len(report.arrays), 'array')} as arguments, {report.floor.flops:.3g} FLOPs per device"
    else:
        active = f", {human_count(report.active_parameters)} of them active for a token"
        some = report.active_parameters < report.parameters
        parameters = f"{human_count(report.parameters)} parameters{active if some else ''}"
        sizes = f"{parameters}, {human_count(report.tokens)} {report.unit} per step"
    sentence = f"mesh {describe_mesh(report.mesh)}; {sizes}"
    choices = ("attention", report.attention), ("gather", report.gather), ("matmuls", report.matmuls)
    return "; ".join([sentence, *(f"{name}: {choice}" for name, choice in choices if choice)])


def sections(report: Report) -> list[Section]:
    """What a terminal and a page show: a summary, warnings, memory, step time, collectives, and then the whole job."""
    words = [("job", whole_job.words(report.job))] if report.job else []
    whole = Section("", "", [Notes([*summary(report), *words])])
    job = [whole_job.section(report.job)] if report.job else []
    return [whole, _warnings(report), _memory(report), _time(report), _collectives(report), *job]


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
        (
            human_bytes(temporary.bytes),
            temporary.shape,
            " ".join(axis or "1" for axis in temporary.axes),
            Cell(temporary.source, temporary.source.removeprefix("gspmd_lm/")),
            temporary.op,
        )
        for temporary in memory.largest
    ]
    rest_bytes = memory.temporaries_bytes - sum(temporary.bytes for temporary in memory.largest)
    if largest and rest_bytes > 0:
        largest.append((human_bytes(rest_bytes), "all others", "", Cell(""), ""))
    columns = (
        Column("size", "number"),
        Column("largest temporaries", "code"),
        Column("axes"),
        Column("source", "code"),
        Column("op", on_terminal=False),
    )
    blocks: list[Block] = [Figure(memory_bar(report, max(memory.peak_bytes, limit or 0)))]
    if memory.refusal:
        blocks.append(Text(f"The compiler refused the program: {memory.refusal}", "bad"))
    whole = _table("Memory per device", memory_parts(report), limit or memory.peak_bytes or 1)
    blocks.append(Pair((whole, Table("Largest temporaries", columns, largest))))
    return Section("Memory per device", "compiled", blocks, facts)


def _table(name: str, parts: Sequence[Part], whole: float) -> Table:
    """Parts, each with its share of the whole."""
    shares = [part.amount / whole for part in parts]
    rows = [
        (Cell(part.label, kind=part.kind), part.quantity, Cell(f"{share:.1%}", share=share))
        for part, share in zip(parts, shares, strict=True)
    ]
    return Table(name, (Column(), Column("", "number"), Column("", "number")), rows)


def _time(report: Report) -> Section:
    prediction = report.prediction
    if prediction is None:
        return Section("Step time", "predicted", [], [Fact("step time", "none", report.no_prediction)])
    step_s, exposed_s = prediction.step_time_s, prediction.exposed_communication_s
    sent = f"{exposed_s / step_s:.1%} of the step, of {human_seconds(prediction.communication_s)} in all"
    facts = [
        Fact("step time", human_seconds(step_s)),
        Fact("MFU", f"{prediction.mfu:.1%}")
        if prediction.tokens_per_s_per_device is None
        else Fact(
            f"{report.unit}/s per device", f"{prediction.tokens_per_s_per_device:,.0f}", f"MFU {prediction.mfu:.1%}"
        ),
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
        larger_s = max(floor.compute_s, floor.memory_s)
        ratio = prediction.step_time_s / larger_s if larger_s else 0.0
        times = f": the step takes {ratio:.2f}x the larger" if ratio else ""
        if ratio >= SMALL:
            times = f": the step takes {ratio:.0f} times the larger, so the work is too small for the chip"
        least = f"compute {human_seconds(floor.compute_s)}, memory {human_seconds(floor.memory_s)}"
        notes.append(("floor, counted", f"{least}{times}"))
    if report.memory_bound_share is not None and floor.memory_s is not None:
        once = f"weights and cache are read once in {human_seconds(floor.memory_s)}"
        notes.append(("memory bound", f"{report.memory_bound_share:.0%} of it is reached: {once}"))
    if floor.communication_bytes is not None:
        by_axis = ", ".join(f"{axis} {human_bytes(size)}" for axis, size in floor.communication_by_axis.items())
        least = f"{human_bytes(floor.communication_bytes)} sent{f': {by_axis}' if by_axis else ''}"
        if floor.estimated_because:
            notes.append(("by the trace", f"{least}. This is an estimate and no floor: {floor.estimated_because}"))
        else:
            notes.append(("" if notes else "floor, counted", least))
    notes += [("basis", prediction.basis), ("error", prediction.error)]
    if prediction.unpriced_share:  # the warning and the JSON name the operations
        notes.append(("not priced", f"{prediction.unpriced_share:.1%} of the program's bytes"))
    return notes


# ---- collectives


def above_least(report: Report) -> str:
    """What is sent beside the least that the layout can send; '' if nothing can be compared.

    '1.20 times the least that this layout can send', or the same with 'both as float32, since 52% travels in bf16'.
    """
    ratio, other = report.above_floor, report.other_width
    if ratio is None:
        return ""
    times = "" if f"{ratio:.2f}" == "1.00" else f"{ratio:.2f} times "
    width = f", both as float32, since {other.replace(' in ', ' travels as ')}" if other else ""
    return f"{times}the least that this layout can send{width}"


def _collectives(report: Report) -> Section:
    """The section with all collectives, the largest first."""
    title, whole = f"Collectives ({len(report.collectives)})", report.sent_bytes
    if report.memory.refusal:
        return Section(title, "compiled", [Text("None to show: the compiler gave no program.")])
    facts = [Fact("sent per step", human_bytes(whole), above_least(report))]
    if not report.collectives:
        return Section(title, "compiled", [Text("None.")], facts)
    of_rules = report.phase != "step"
    kept = [n for n, column in enumerate(COLLECTIVES) if of_rules or column.name != "because of"]
    columns = [COLLECTIVES[n] for n in kept]
    if not of_rules:  # the line says what a row says of a layout
        columns[-1] = dataclasses.replace(columns[-1], on_terminal=True)

    def row(cells: Row) -> Row:
        return [cells[n] for n in kept]

    def cause(one: Collective) -> Hashable:
        return one.rules if of_rules else one.source

    alike = _groups(report, lambda one: (one.kind, one.mesh_axes, one.dtype, one.phase, cause(one), one.overlapped))
    by_axes = _groups(report, lambda one: (one.mesh_axes, one.phase))
    table = Table(
        "Collectives",
        columns,
        [row(_merge(group)) for group in alike],
        left_out=lambda shown: f"and {len(alike) - shown} more, {human_bytes(sum(map(_sent_bytes, alike[shown:])))}",
        groups=[
            (row(_sums(group, whole or 1)), [row(_collective(one, whole=whole)) for one in group]) for group in by_axes
        ],
    )
    hint = '<p class="legend">Choose a group to see its collectives, and a heading to sort them by it.</p>'
    return Section(title, "compiled", [Figure(hint), table], facts)


def _groups(report: Report, key: Callable[[Collective], Hashable]) -> list[list[Collective]]:
    """Collectives with the same key together, those that send most first."""
    groups = collections.defaultdict[Hashable, list[Collective]](list)
    for one in sorted(report.collectives, key=lambda one: one.bytes_per_device_per_step, reverse=True):
        groups[key(one)].append(one)
    return sorted(groups.values(), key=_sent_bytes, reverse=True)


def _merge(alike: Sequence[Collective]) -> Row:
    """The row of collectives that differ only in the array they move: the largest of them, with the sums of all."""
    times, more = sum(one.times_per_step for one in alike), len({one.op for one in alike}) - 1
    whole = dataclasses.replace(alike[0], times_per_step=times, bytes_per_device_per_step=_sent_bytes(alike))
    return _collective(whole, f" +{more}" if more else "")


def _sums(members: Sequence[Collective], whole: int) -> Row:
    """The row above collectives over the same axes in the same phase."""
    sent = _sent_bytes(members)
    count = f"{plural(len(members), 'collective')}, {sent / whole:.1%} of the bytes"
    times = f"{sum(one.times_per_step for one in members):,}"
    over = f"{'+'.join(members[0].mesh_axes)}, {members[0].phase}"
    return over, "", "", times, Cell(human_bytes(sent), share=sent / whole), "", "", count, "", ""


def _collective(one: Collective, others: str = "", whole: int = 0) -> Row:
    """A row of COLLECTIVES. `others`: how many more arrays it stands for."""
    size, times = one.bytes_per_device_per_step, one.times_per_step
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


def _sent_bytes(collectives: Sequence[Collective]) -> int:
    return sum(one.bytes_per_device_per_step for one in collectives)


# ---- bars


def memory_bar(report: Report, whole: float) -> str:
    """The parts of memory, on the scale of `whole` bytes."""
    memory, parts = report.memory, memory_parts(report)
    marks = [("peak", memory.peak_bytes), ("limit", memory.limit_bytes)]
    label = f"Memory of {report.layout}: {list_parts(parts)}; {fit(memory)}"
    return bar(
        parts,
        max(whole, sum(part.amount for part in parts)),
        label,
        [(f"{name} {human_bytes(size)}", size) for name, size in marks if size is not None],
    )


def time_bar(report: Report, whole: float) -> str:
    """The parts of a step's time, on the scale of `whole` seconds."""
    parts, floor_s = time_parts(report), report.floor.compute_s
    marks = [] if floor_s is None else [(f"floor of compute {human_seconds(floor_s)}", floor_s)]
    return bar(parts, whole, f"Step time of {report.layout}: {list_parts(parts)}", marks)


# ---- words and numbers


def hardware(count: int, chip: str) -> str:
    """'64 x TPU v5p'; '1 simulated device' where the chip is ''"""
    return f"{count} x {chip}" if chip else plural(count, "simulated device")


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
    seconds = prediction.parts_s
    kinds = ("matmul", "attention", "other", *["wait"] * len(prediction.exposed_by_axis), "host")
    return [
        Part(kind, label, part_s, human_seconds(part_s))
        for kind, (label, part_s) in zip(kinds, seconds.items(), strict=True)
        if part_s
    ]
