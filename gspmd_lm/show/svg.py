"""Pictures as HTML and SVG: stacked bars, the timeline of one layer, and plots with two axes. All text is escaped.

Lengths are shares of the width, so that pictures follow the width of the page. A plot is stretched to it. Its text is
HTML above the drawing, and lines keep their width, so that it can be read on a phone.
"""

import dataclasses
import html
import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from gspmd_lm.units import human_seconds, human_short

if TYPE_CHECKING:  # pages of runs need no jax, which it imports
    from gspmd_lm.foresight.timing.predict import Span

LANE, AXIS, GAP = 22, 20, 6  # heights in pixels: a row of spans, the time axis, and the space between lanes
NAMED = 0.035  # a span with this share of the width has room for its name
COLOURED = ("matmul", "attention", "other")  # kinds with a colour of their own; all collectives share one
SIZE = 1000  # of the drawing in both directions, before it is stretched
TICKS = 5  # about so many on an axis

Point = tuple[float, float]


def text(value: object) -> str:
    """`value`, escaped for use in the text and the attributes of HTML."""
    return html.escape(str(value))


class Part(NamedTuple):
    """A part of something, such as of a device's memory or of a step's time."""

    kind: str  # its colour
    label: str
    amount: float
    quantity: str  # the amount with its unit


def list_parts(parts: Iterable[Part]) -> str:
    """'matmul 9.24 s, attention 2.34 s'"""
    return ", ".join(f"{part.label} {part.quantity}" for part in parts)


def bar(parts: Iterable[Part], whole: float, label: str, marks: Sequence[tuple[str, float]]) -> str:
    """A stacked bar of parts out of `whole`.

    Marks are lines across the bar. The name of the first stands above the bar, and the names of the others below.
    """
    whole = whole or 1.0  # where there is nothing, it has no parts
    pieces = [
        f'<span class="k-{text(part.kind)}" style="width:{100 * part.amount / whole:.3f}%" '
        f'title="{text(list_parts([part]))}"></span>'
        for part in parts
        if part.amount > 0
    ]
    lines = []
    for i, (name, at) in enumerate(marks):
        side = f"{'below' if i else 'above'}{' left' if at > whole / 2 else ''}"
        lines.append(f'<i class="{side}" style="left:{100 * at / whole:.3f}%"><small>{text(name)}</small></i>')
    return f'<div class="bar" role="img" aria-label="{text(label)}">{"".join(pieces)}{"".join(lines)}</div>'


def timeline(spans: "Sequence[Span]") -> str:
    """The forward and the backward turn of the loop over layers, one below the other on one scale."""
    turns = [(part, [span for span in spans if span.part == part]) for part in dict.fromkeys(s.part for s in spans)]
    longest = max(max(span.end_s for span in turn) - min(span.start_s for span in turn) for _, turn in turns)
    return "".join(_turn(part, turn, longest or 1.0) for part, turn in turns)


def _turn(part: str, spans: "Sequence[Span]", scale_s: float) -> str:
    first, last = min(span.start_s for span in spans), max(span.end_s for span in spans)
    names, drawn, height = [], [], AXIS
    for lane in sorted({span.lane for span in spans}, key=lambda lane: (lane != "compute", lane == "host", lane)):
        placed, rows = _rows([span for span in spans if span.lane == lane])
        names.append(f'<li style="top:{height}px;height:{rows * LANE}px">{text(lane)}</li>')
        if lane == "compute":  # compute waits where no span covers the lane
            width = 100 * (last - first) / scale_s
            drawn.append(f'<rect class="idle" y="{height}" height="{rows * LANE - 2}" width="{width:.3f}%"/>')
        drawn += [_span(span, height + row * LANE, first, scale_s) for span, row in placed]
        height += rows * LANE + GAP
    about = f"One layer, {part}: {human_seconds(last - first)} in {len(spans)} spans on {len(names)} lanes"
    return (
        f'<figure class="turn"><figcaption>{text(part)}, {human_seconds(last - first)} per layer</figcaption>'
        f'<div class="lanes"><ul style="height:{height}px" aria-hidden="true">{"".join(names)}</ul>'
        f'<div class="strip" tabindex="0" role="group" aria-label="{text(about)}; arrow keys go from span to span">'
        f'<svg role="img" aria-label="{text(about)}" height="{height}">{_ticks(scale_s, height)}{"".join(drawn)}</svg>'
        f"</div></div></figure>"
    )


def _rows(spans: "Sequence[Span]") -> "tuple[list[tuple[Span, int]], int]":
    """Each span with its row, and the number of rows. Spans that run at the same time have different rows."""
    ends: list[float] = []
    placed = []
    for span in sorted(spans, key=lambda span: span.start_s):
        row = next((i for i, end in enumerate(ends) if end <= span.start_s + 1e-12), len(ends))
        ends[row:] = [span.end_s, *ends[row + 1 :]]
        placed.append((span, row))
    return placed, len(ends)


def _span(span: "Span", top: float, first_s: float, scale_s: float) -> str:
    left, width = 100 * (span.start_s - first_s) / scale_s, 100 * (span.end_s - span.start_s) / scale_s
    kind = span.kind if span.kind in COLOURED else "host" if span.lane == "host" else "sent"
    about = (
        f"{span.lane}: {span.kind} {span.name}, {human_seconds(span.end_s - span.start_s)}, "
        f"from {human_seconds(span.start_s - first_s)}"
    )
    name = f'<text x="4" y="14">{text(span.name)}</text>' if width >= 100 * NAMED else ""
    place = f'x="{left:.3f}%" y="{top}" width="{width:.3f}%" height="{LANE - 2}"'
    content = f'<title>{text(about)}</title><rect class="k-{kind}" width="100%" height="100%"/>{name}'
    return f'<svg class="span" {place} data-about="{text(about)}">{content}</svg>'


def round_step(least: float) -> float:
    """The smallest of 1, 2, 5, 10, 20, ... and their fractions that is at least `least`."""
    step = 10 ** math.floor(math.log10(least))
    return step * next(times for times in (1, 2, 5, 10) if times * step >= least)


def _ticks(scale_s: float, height: float) -> str:
    """About eight lines at round times."""
    step = round_step(scale_s / 8)
    lines = []
    for i in range(int(scale_s / step) + 1):
        at = f"{100 * i * step / scale_s:.3f}%"
        label = (
            f'<text class="tick" x="{at}" dx="3" y="12">{human_seconds(i * step)}</text>'
            if i * step < 0.96 * scale_s
            else ""
        )
        lines.append(f'<line x1="{at}" x2="{at}" y1="0" y2="{height}"/>{label}')
    return "".join(lines)


# Plots


@dataclasses.dataclass(frozen=True)
class Axis:
    """An axis from `low` to `high`. A logarithmic one begins above 0."""

    name: str
    low: float
    high: float
    show: Callable[[float], str] = "{:,.4g}".format
    log: bool = False

    def share(self, value: float) -> float:
        """Where a value is: 0 at `low`, 1 at `high`."""
        low, high, at = (math.log(max(x, 1e-300)) if self.log else x for x in (self.low, self.high, value))
        return (at - low) / (high - low or 1.0)

    def ticks(self) -> list[float]:
        """Round values on the axis, about five: on a logarithmic one 1, 2, 5, 10, ..., or powers of 10."""
        if self.log:
            first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            every = max(1, math.ceil((last - first) / (2 * TICKS)))
            factors = (1, 2, 5) if last - first <= 3 else (1,)
            candidates = [factor * 10.0**power for power in range(first, last + 1, every) for factor in factors]
            return [value for value in candidates if self.low <= value <= self.high]
        step = round_step(max((self.high - self.low or abs(self.high) or 1.0) / TICKS, 1e-300))
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [n * step for n in range(first, last + 1)]


def short(value: float) -> str:
    """'20k', '1.5M': a round number"""
    if value < 1000:
        return f"{value:g}"
    shortened = human_short(value)
    number = shortened.rstrip("kMBT")
    return (number.rstrip("0").rstrip(".") if "." in number else number) + shortened[len(number) :]


class Plot:
    """A plot that is filled mark by mark. Colours are CSS."""

    def __init__(self, x: Axis, y: Axis):
        self.x, self.y = x, y
        self.marks: list[str] = []
        self.words: list[str] = []

    def line(self, points: Sequence[Point], colour: str, about: str = "", *, dashed: bool = False) -> None:
        """A line through points. One with `about` can be pointed at: a script then says its values."""
        series = f' data-about="{text(about)}"' if about else ""
        kind = "line dashed" if dashed else "line"
        self.marks.append(f'<polyline class="{kind}" style="stroke:{colour}" points="{self._all_at(points)}"{series}/>')

    def band(self, points: Sequence[tuple[float, float, float]], colour: str) -> None:
        """An area between two values at each x."""
        edge = [*((x, high) for x, _, high in points), *((x, low) for x, low, _ in reversed(points))]
        self.marks.append(f'<polygon class="band" style="fill:{colour}" points="{self._all_at(edge)}"/>')

    def dot(self, at: Point, colour: str, about: str, *, size: float = 9, faint: bool = False) -> None:
        """A dot of `size` pixels. Whoever points at it reads what it is."""
        x, y = self._at(at)
        style = f"stroke:{colour};stroke-width:{size}px{';opacity:.45' if faint else ''}"
        # A circle would be stretched with the drawing. The cap of a line is not.
        self.marks.append(
            f'<path class="dot" style="{style}" d="M{x:.1f} {y:.1f}h.01"><title>{text(about)}</title></path>'
        )

    def limit(self, x: float, name: str) -> None:
        """A line across the plot, with a name."""
        at = SIZE * self.x.share(x)
        self.marks.append(f'<path class="line" style="stroke:var(--bad)" d="M{at:.1f} 0V{SIZE}"/>')
        self.word((x, self.y.high), name, before=self.x.share(x) > 0.5)

    def word(self, at: Point, label: str, *, before: bool = False) -> None:
        """Text beside a point."""
        x, y = self._at(at)
        side = ' class="before"' if before else ""
        self.words.append(f'<b{side} style="left:{x / SIZE:.2%};top:{y / SIZE:.2%}">{text(label)}</b>')

    def html(self, label: str, tall: bool = False) -> str:
        """The plot; `label` says what it shows to whoever does not see it."""
        rows = [(1 - self.y.share(tick), tick) for tick in self.y.ticks()]
        grid = "".join(f'<path class="grid" d="M0 {SIZE * at:.1f}H{SIZE}"/>' for at, _ in rows)
        names = "".join(f'<i class="y" style="top:{at:.2%}">{text(self.y.show(tick))}</i>' for at, tick in rows)
        for tick in self.x.ticks():
            names += f'<i class="x" style="left:{self.x.share(tick):.2%}">{text(self.x.show(tick))}</i>'
        caption = f"<figcaption>{text(self.y.name)}</figcaption>" if self.y.name else ""
        ends = " ".join(f"{value:.6g}" for value in (self.x.low, self.x.high, self.y.low, self.y.high))
        scale = f'data-ends="{ends}" data-log="{int(self.y.log)}" data-x="{text(self.x.name)}"'
        return (
            f'<figure class="plot{" tall" if tall else ""}">{caption}'
            f'<div class="area" {scale}><svg viewBox="0 0 {SIZE} {SIZE}" preserveAspectRatio="none" role="img" '
            f'aria-label="{text(label)}">{grid}{"".join(self.marks)}</svg>{names}{"".join(self.words)}</div>'
            f'<p class="under"><span>{text(self.x.name)}</span></p></figure>'
        )

    def _all_at(self, points: Sequence[Point]) -> str:
        return " ".join(f"{x:.1f},{y:.1f}" for x, y in map(self._at, points))

    def _at(self, point: Point) -> Point:
        return SIZE * self.x.share(point[0]), SIZE * (1 - self.y.share(point[1]))
