"""One self-contained HTML page of a run, or of several laid over each other. It loads nothing."""

import math
import statistics
from collections.abc import Callable, Sequence

from gspmd_lm.show import run_table
from gspmd_lm.show.drawing import text
from gspmd_lm.show.pieces import breakable, document, facts_of, file_of, folded, rows_of, section
from gspmd_lm.show.plot import Axis, Plot, short
from gspmd_lm.units import human_seconds
from gspmd_lm.workdir.history import RunHistory as Run
from gspmd_lm.workdir.history import differences, settings

BINS = 300  # a longer line is drawn as the median and the range of so many pieces
FAR = 3  # a value so many times as far out as nearly all values is not drawn
HUES = (212, 28, 160, 330, 265, 95, 0, 190)  # of runs

# Key, title, how a value is shown, whether the axis begins at 0, and whether it is logarithmic over long ranges.
_PLOTS: tuple[tuple[str, str, Callable[[float], str], bool, bool], ...] = (
    ("learning_rate", "Learning rate", "{:.3g}".format, True, False),
    ("gradient_norm", "Gradient norm", "{:.3g}".format, False, True),
    ("step_time_s", "Step time", human_seconds, True, False),
    ("tokens_per_s", "Tokens per second", short, True, False),
    ("mfu", "Model FLOPs utilization", "{:.0%}".format, True, False),
)


def render(runs: Sequence[Run], command: str) -> str:
    """The HTML of the page."""
    title = f"Run {runs[0].name}" if len(runs) == 1 else f"{len(runs)} runs"
    body = _facts(runs[0]) if len(runs) == 1 else _runs(runs)
    body += "".join(f'<p class="bad">{text(line)}</p>' for run in runs for line in run.damage.splitlines())
    body += _loss(runs) + '<div class="plots">' + "".join(_plot(runs, *one) for one in _PLOTS) + "</div>"
    body += _samples(runs) + (_made_with(runs[0]) if len(runs) == 1 else _differences(runs))
    return document(title, command, body)


def colour(number: int) -> str:
    """The colour of a run, which can be read on both the light and the dark page."""
    hue = HUES[number % len(HUES)] + 17 * (number // len(HUES))
    return f"light-dark(hsl({hue} 70% 40%), hsl({hue} 75% 68%))"


def _facts(run: Run) -> str:
    return facts_of((name, "measured", value, note) for name, value, note in run_table.facts(run))


def _runs(runs: Sequence[Run]) -> str:
    rows = []
    for number, (name, *cells) in enumerate(map(run_table.cells, runs)):
        swatch = f'<i class="swatch" style="background:{colour(number)}"></i>'
        rows.append([f"<span>{swatch}{text(name)}</span>", *map(text, cells)])
    return section(
        "h2", "Runs", "measured", rows_of(run_table.HEADINGS, rows, "Runs", numbers=range(1, len(run_table.HEADINGS)))
    )


def _loss(runs: Sequence[Run]) -> str:
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
    legend = '<p class="legend">Lines: training. Dots: held-out rows; the largest dot is the best.'
    many = any(len(points) > 2 * BINS for points in trained)
    legend += f"{' Of many steps a line shows the median, and the band around it their range.' if many else ''}</p>"
    label = f"Loss of {', '.join(run.name for run in runs)} against steps"
    return section("h2", "Loss", "measured", legend + drawn.html(label, tall=True) + left)


def _plot(
    runs: Sequence[Run], key: str, title: str, show: Callable[[float], str], zero: bool, logarithmic: bool
) -> str:
    lines = [run.points(key) for run in runs]
    if not any(lines):
        return ""
    y, left = _range(lines, show, zero, logarithmic)
    drawn = Plot(_steps(runs), y)
    for number, (run, points) in enumerate(zip(runs, lines, strict=True)):
        _line(drawn, points, colour(number), run.name if len(runs) > 1 else title.lower())
    label = f"{title} of {', '.join(run.name for run in runs)} against steps"
    return section("h2", title, "measured", drawn.html(label) + left)


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


def _steps(runs: Sequence[Run]) -> Axis:
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
    said = f"<p class=legend>{len(outside):,} value{several} not drawn: up to {text(show(values[-1]))}.</p>"
    return Axis("", 0.0 if zero and not bottom else bottom - room, top + room, show), said if outside else ""


def _samples(runs: Sequence[Run]) -> str:
    """The texts of the last evaluation of each run; of all evaluations of a single one."""
    rows = []
    for run in runs:
        steps = sorted({row["step"] for row in run.samples}, reverse=True)
        for step in steps if len(runs) == 1 else steps[:1]:
            of = f"{run.name}, {step:,.0f}" if len(runs) > 1 else f"{step:,.0f}"
            rows += [
                [text(of), f'<span style="white-space:pre-wrap"><b>{text(row["prompt"])}</b>{text(row["text"])}</span>']
                for row in run.samples if row["step"] == step
            ]  # fmt: skip
    if not rows:
        return ""
    headings = ["run, step" if len(runs) > 1 else "step", "prompt and text"]
    return section("h2", "Samples", "measured", f'<div class="tall">{rows_of(headings, rows, "Samples")}</div>')


def _differences(runs: Sequence[Run]) -> str:
    rows = [[f"<code>{breakable(key)}</code>", *map(_anywhere, values)] for key, values in differences(runs).items()]
    content = rows_of(["setting", *(run.name for run in runs)], rows, "Settings that differ")
    return section("h2", "Settings that differ", "", content or "<p>None.</p>")


def _made_with(run: Run) -> str:
    about = {name: value for name, value in run.about.items() if isinstance(value, str)}
    made = [[text(name), _anywhere(value)] for name, value in {**about, **_versions(run)}.items() if value]
    chosen = [[f"<code>{breakable(key)}</code>", _anywhere(value)] for key, value in settings(run).items()]
    content = (
        rows_of(["what", "which"], made, "Made with")
        + folded("Config", rows_of(["setting", "value"], chosen, "Config"))
        + folded("Rules", file_of(run.rules))
    )
    return section("h2", "Made with", "", content)


def _versions(run: Run) -> dict[str, object]:
    found = run.about.get("versions")
    return found if isinstance(found, dict) else {}


def _anywhere(value: object) -> str:
    """Text that may go on in the next line anywhere, as commands and hashes must on a phone."""
    return f'<span style="overflow-wrap:anywhere">{text(value)}</span>'
