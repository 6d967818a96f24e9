"""Plots with two axes as HTML and SVG: lines, bands, dots and words. All text is escaped.

The drawing is stretched to the width of the page. Text is HTML above it, and lines keep their width, so that a plot can
be read on a phone.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

from gspmd_lm.show.svg import round_step, text
from gspmd_lm.units import human_short

SIZE = 1000  # of the drawing in both directions, before it is stretched
TICKS = 5  # about so many on an axis

Point = tuple[float, float]


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
