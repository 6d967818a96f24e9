"""A run, or several laid over each other: its figures, and on a page what it has logged and was made with."""

import math
import statistics
from collections.abc import Callable, Sequence

from rich.console import Console

from gspmd_lm.show import html, svg, terminal
from gspmd_lm.show.document import Block, Cell, Column, Fact, Figure, Folded, Section, Table, Text, figure, table_of
from gspmd_lm.show.svg import Axis, Plot, short, text
from gspmd_lm.units import human_duration, human_seconds, human_short
from gspmd_lm.workdir.history import RunHistory, differences, settings
from gspmd_lm.workdir.wall_time import KINDS, goodput

BINS = 300  # a longer line is drawn as the median and the range of so many pieces
FAR = 3  # a value so many times as far out as nearly all values is not drawn
COLOURS = "other", "attention", "host", "matmul", "batch", "optimizer", "wait", "hang", "idle"  # of parts of a bar
WALL = dict(zip(KINDS, COLOURS, strict=True))  # kind of wall time -> the kind of a part
HUES = (212, 28, 160, 330, 265, 95, 0, 190)  # of runs

# Key, title, how a value is shown, whether the axis begins at 0, and whether it is logarithmic over long ranges.
_PLOTS: tuple[tuple[str, str, Callable[[float], str], bool, bool], ...] = (
    ("learning_rate", "Learning rate", "{:.3g}".format, True, False),
    ("gradient_norm", "Gradient norm", "{:.3g}".format, False, True),
    ("step_time_s", "Step time", human_seconds, True, False),
    ("tokens_per_s", "Tokens per second", short, True, False),
    ("rows_per_s", "Rows per second", short, True, False),
    ("mfu", "Model FLOPs utilization", "{:.0%}".format, True, False),
)


def show(runs: Sequence[RunHistory], console: Console) -> None:
    """Prints a row for each run."""
    terminal.show(console, [_runs(runs)])


def page(runs: Sequence[RunHistory], command: str) -> str:
    """The HTML of the page."""
    one = runs[0] if len(runs) == 1 else None
    about = Section("", "measured", [], [fact for fact in figures(one) if fact.value != "-"]) if one else _runs(runs)
    plots = html.sections(section for plot in _PLOTS for section in _plot(runs, *plot))
    body = [
        html.facts([about]),
        html.blocks(_damage(runs)) if one else html.sections([about]),
        html.sections([_loss(runs)]),
        f'<div class="plots">{plots}</div>',
        html.sections([*_wall_time(runs), *_samples(runs), _made_with(one) if one else _differences(runs)]),
    ]
    return html.page(f"Run {one.name}" if one else f"{len(runs)} runs", command, "".join(body))


def figures(run: RunHistory) -> list[Fact]:
    """The figures that a reader looks for first; '-' where none was logged."""
    best, mfu, epoch, steps = run.best or {}, run.speed("mfu"), run.last("epoch"), run.whole("train", "steps")
    unit = "tokens" if run.last("rows") is None else "rows"  # of a task that does not say how many tokens it has
    held_out, loss = run.evaluations[-1].get("eval_loss") if run.evaluations else None, "{:.4f}".format
    return [
        Fact("step", f"{run.step:,}", f"of {steps:,}" if steps else ""),
        Fact("loss", figure(run.last("loss"), loss), "training, the last logged step"),
        Fact("held-out", figure(held_out, loss), "loss, the last evaluation"),
        Fact("best", figure(best.get("eval_loss"), loss), "held-out loss"),
        Fact("at step", figure(best.get("step"), "{:,.0f}".format), "the best held-out loss"),
        Fact("step time", figure(run.speed("step_time_s"), human_seconds), "median of the last logged steps"),
        Fact(f"{unit}/s", figure(run.speed(f"{unit}_per_s"), human_short), f"MFU {mfu:.1%}" if mfu else ""),
        Fact(
            unit,
            figure((run.last("rows") or run.step * run.step_tokens) or None, human_short),
            f"{epoch:.2f} epochs" if epoch is not None else "",
        ),
    ]


def _runs(runs: Sequence[RunHistory]) -> Section:
    facts = [{fact.name: fact.value for fact in figures(run)} for run in runs]
    names = dict.fromkeys(name for one in facts for name in one)  # runs may count tokens or rows
    rows = [
        {"run": run.name, **{name: one.get(name, "-") for name in names}} for run, one in zip(runs, facts, strict=True)
    ]
    return Section("Runs", "measured", [table_of("Runs", rows, ("run",)), *_damage(runs)])


def _damage(runs: Sequence[RunHistory]) -> list[Text]:
    return [Text(f"warning: {line}", "bad") for run in runs for line in run.damage.splitlines()]


def colour(number: int) -> str:
    """The colour of a run, which can be read on both the light and the dark page."""
    hue = HUES[number % len(HUES)] + 17 * (number // len(HUES))
    return f"light-dark(hsl({hue} 70% 40%), hsl({hue} 75% 68%))"


def _loss(runs: Sequence[RunHistory]) -> Section:
    trained = [run.points("loss") for run in runs]
    held_out = [run.points("eval_loss") for run in runs]
    y, left = _range([*trained, *held_out], "{:,.4g}".format, False, False)
    drawn = Plot(_steps(runs), y)
    for number, (run, points, dots) in enumerate(zip(runs, trained, held_out, strict=True)):
        of = f"{run.name} " if len(runs) > 1 else ""
        _line(drawn, points, colour(number), f"{of}training")
        if dots:
            drawn.line(dots, colour(number), f"{of}held-out", dashed=True)
        for step, loss in dots:
            best = run.best is not None and run.best["step"] == step
            about = f"{of}held-out loss {loss:.4f} at step {step:,}{', the best' if best else ''}"
            drawn.dot((step, loss), colour(number), about, size=11 if best else 6)
    many = any(len(points) > 2 * BINS for points in trained)
    legend = "Lines: training. Dots: held-out rows; the largest dot is the best."
    legend += " Of many steps a line shows the median, and the band around it their range." if many else ""
    names = "".join(
        f'<span><i class="swatch" style="background:{colour(number)}"></i>{text(run.name)}</span>'
        for number, run in enumerate(runs)
    )
    label = f"Loss of {', '.join(run.name for run in runs)} against steps"
    drawing = f'<p class="legend">{names if len(runs) > 1 else ""}{legend}</p>{drawn.html(label, tall=True)}{left}'
    return Section("Loss", "measured", [Figure(drawing)])


def _plot(
    runs: Sequence[RunHistory], key: str, title: str, show: Callable[[float], str], zero: bool, logarithmic: bool
) -> list[Section]:
    lines = [run.points(key) for run in runs]
    if not any(lines):
        return []
    y, left = _range(lines, show, zero, logarithmic)
    drawn = Plot(_steps(runs), y)
    for number, (run, points) in enumerate(zip(runs, lines, strict=True)):
        _line(drawn, points, colour(number), run.name if len(runs) > 1 else title.lower())
    label = f"{title} of {', '.join(run.name for run in runs)} against steps"
    return [Section(title, "measured", [Figure(drawn.html(label) + left)])]


def _line(drawn: Plot, points: Sequence[tuple[float, float]], shade: str, about: str) -> None:
    """A line through points. If they are many, it goes through the medians of pieces, in the band of their ranges."""
    if len(points) > 2 * BINS:
        size = math.ceil(len(points) / BINS)
        pieces = [points[first : first + size] for first in range(0, len(points), size)]
        values = [[value for _, value in piece] for piece in pieces]
        middle = [piece[len(piece) // 2][0] for piece in pieces]
        drawn.band([(x, min(each), max(each)) for x, each in zip(middle, values, strict=True)], shade)
        points = [(x, statistics.median(each)) for x, each in zip(middle, values, strict=True)]
    if len(points) == 1:
        drawn.dot(points[0], shade, f"{about} {points[0][1]:.4g}")
    elif points:
        drawn.line(points, shade, about)


def _steps(runs: Sequence[RunHistory]) -> Axis:
    return Axis("step", 0, 1.015 * max(run.step for run in runs), short)


def _range(
    lines: Sequence[Sequence[tuple[float, float]]], show: Callable[[float], str], zero: bool, logarithmic: bool
) -> tuple[Axis, str]:
    """An axis for the values of lines, without those that are far out, and a sentence about those."""
    values = sorted(value for line in lines for _, value in line)
    if not values:
        return Axis("", 0, 1, show), ""
    low, high = (values[round(share * (len(values) - 1))] for share in (0.02, 0.98))
    logarithmic = logarithmic and values[0] > 0 and values[-1] > 20 * values[0]
    if logarithmic:
        return Axis("", values[0] / 1.2, values[-1] * 1.2, show, log=True), ""
    most = max(high + FAR * (high - low), 1.5 * high) if high > 0 else high
    outside = [value for value in values if value > most]
    top, bottom = max(value for value in values if value <= most), min(values[0], 0.0) if zero else values[0]
    room = 0.05 * (top - bottom or abs(top) or 1.0)
    several = "s above are" if len(outside) > 1 else " above is"
    note = f"<p class=legend>{len(outside):,} value{several} not drawn: up to {text(show(values[-1]))}.</p>"
    return Axis("", 0.0 if zero and not bottom else bottom - room, top + room, show), note if outside else ""


def _wall_time(runs: Sequence[RunHistory]) -> list[Section]:
    """Where the time of the runs went, as a bar for each and one table; nothing if none of them has counted it."""
    counted = [run for run in runs if run.wall_s]
    longest = max((sum(run.wall_s.values()) for run in counted), default=0.0)
    blocks: list[Block] = []
    for run in counted:
        parts = [svg.Part(WALL[kind], kind, s, human_duration(s)) for kind, s in run.wall_s.items()]
        label = f"Wall time of {run.name}: {svg.list_parts(parts)}"
        blocks += [Text(f"{run.name}: goodput {goodput(run.wall_s):.0%}"), Figure(svg.bar(parts, longest, label, []))]
    columns = (Column("time"), *(Column(run.name, "number") for run in counted), Column("what it is", "long"))
    rows = []
    for kind, about in KINDS.items():
        times = [(run.wall_s[kind], sum(run.wall_s.values()) or 1.0) for run in counted]
        shown = [f"{human_duration(s)} ({s / whole_s:.0%})" for s, whole_s in times]
        rows.append((Cell(kind, kind=WALL[kind]), *shown, about))
    return [Section("Wall time", "measured", [*blocks, Table("Wall time", columns, rows)])] if longest else []


def _samples(runs: Sequence[RunHistory]) -> list[Section]:
    """The texts of the last evaluation of each run; of all evaluations of a single one."""
    rows = []
    for run in runs:
        steps = sorted({row["step"] for row in run.samples}, reverse=True)
        for step in steps if len(runs) == 1 else steps[:1]:
            of = f"{run.name}, {step:,.0f}" if len(runs) > 1 else f"{step:,.0f}"
            rows += [(of, row["prompt"], row["text"]) for row in run.samples if row["step"] == step]
    columns = (Column("run, step" if len(runs) > 1 else "step"), Column("prompt", "long"), Column("text", "long"))
    return [Section("Samples", "measured", [Table("Samples", columns, rows)])] if rows else []


def _differences(runs: Sequence[RunHistory]) -> Section:
    columns = (Column("setting", "code"), *(Column(run.name, "long") for run in runs))
    rows = [(key, *values) for key, values in differences(runs).items()]
    title = "Settings that differ"
    return Section(title, "", [Table(title, columns, rows) if rows else Text("None.")])


def _made_with(run: RunHistory) -> Section:
    about = {name: value for name, value in run.about.items() if isinstance(value, str)}
    versions = run.about.get("versions")
    made = about | (versions if isinstance(versions, dict) else {})
    chosen = Table("Config", (Column("setting", "code"), Column("value", "long")), [*settings(run).items()])
    blocks = [
        Table("Made with", (Column("what"), Column("which", "long")), [(k, str(v)) for k, v in made.items() if v]),
        Folded("Config", [chosen]),
        Folded("Rules", [html.file(run.rules)]),
    ]
    return Section("Made with", "", blocks)
