"""Pictures of arrays on a mesh: the blocks that an array is cut into, each with the devices that hold it.

A terminal draws them as coloured cells, and a page or a document as SVG.
"""

import colorsys
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from rich import box
from rich.table import Table
from rich.text import Text

from gspmd_lm.foresight.table import Spec
from gspmd_lm.show.svg import text
from gspmd_lm.units import plural

MOST = (8, 16)  # blocks that are drawn down and across; the others follow on in the same way
RUNS = 3  # of neighbouring devices that stand in a block
HUE, TURN = 215, 320  # of the first block, and of all of them together, in degrees
WIDTH, HEIGHT = 240, 120  # of a picture in pixels
SPACE, HEAD, FOOT = 28, 44, 60  # beside the panels of a document, above their blocks and below them
_STYLE = (
    "rect { stroke: #fff; stroke-width: 1.5 } text { fill: #15181c; text-anchor: middle; dominant-baseline: central } "
    ".name, .about, .gap { fill: #76808c; text-anchor: start } .name { font-size: 15px; font-weight: bold } "
    ".about { font-size: 12px }"
)
GAP = "…"


@dataclasses.dataclass(frozen=True)
class Blocks:
    """An array that is cut into blocks, `down` times `across`."""

    axes: tuple[str, str]  # what is cut down and across: "embed 128"; "" where the array has no such dimension
    shape: tuple[int, ...]  # of each block
    devices: tuple[tuple[tuple[int, ...], ...], ...]  # by row and column, the devices that hold this block

    @property
    def size(self) -> tuple[int, int]:
        """The number of blocks down and across."""
        return len(self.devices), len(self.devices[0])

    @property
    def copies(self) -> int:
        """The number of devices that hold the same block."""
        return len(self.devices[0][0])

    @property
    def about(self) -> str:
        """'8 blocks of 4 x 16, 2 copies of each', or '8 devices' of a mesh"""
        count = math.prod(self.size)
        if count > 1 and not self.shape:
            return plural(count, "device")
        shape = " x ".join(map(str, self.shape)) or "1"
        copies = f", {self.copies} copies" + (" of each" if count > 1 else "") if self.copies > 1 else ""
        return f"{plural(count, 'block')} of {shape}{copies}" if count > 1 else f"whole{copies}"

    @property
    def directions(self) -> str:
        """'embed 128 down, heads 8 across'"""
        named = zip(self.axes, ("down", "across"), strict=True)
        return ", ".join(f"{axis} {direction}" for axis, direction in named if axis)


def cut_array(axes: Sequence[str], shape: Sequence[int], spec: Spec, mesh: Mapping[str, int]) -> Blocks:
    """The blocks of an array whose dimensions are split by `spec`. Devices are numbered in the order of the mesh."""
    pieces = [math.prod(mesh[name] for name in names) for names in spec]
    # Two dimensions are drawn: those that are split, then the largest. Further ones that are split are cut down, too.
    order = sorted(range(len(shape)), key=lambda n: (pieces[n] == 1, -shape[n]))
    drawn = sorted(n for at, n in enumerate(order) if at < 2 or pieces[n] > 1)
    down, across = drawn[:-1], drawn[-1:]
    names = [[name for n in dimensions for name in spec[n]] for dimensions in (down, across)]
    numbers = np.arange(math.prod(mesh.values())).reshape(*mesh.values())
    position = {name: n for n, name in enumerate(mesh)}
    used = [position[name] for name in (*names[0], *names[1])]
    ordered = np.moveaxis(numbers, used, range(len(used)))
    rows, columns = (math.prod(pieces[n] for n in dimensions) for dimensions in (down, across))
    held = ordered.reshape(rows, columns, -1).tolist()
    return Blocks(
        (_list_axes(axes, shape, down), _list_axes(axes, shape, across)),
        tuple(size // count for size, count in zip(shape, pieces, strict=True)),
        tuple(tuple(map(tuple, row)) for row in held),
    )


def _list_axes(axes: Sequence[str], shape: Sequence[int], dimensions: Sequence[int]) -> str:
    return " x ".join(f"{axes[n]} {shape[n]:,}" for n in dimensions)


def cut_mesh(mesh: Mapping[str, int]) -> Blocks:
    """The devices of a mesh as blocks of one device each: the last mesh axis across, the others down."""
    blocks = cut_array([*mesh], [*mesh.values()], tuple((name,) for name in mesh), mesh)
    return dataclasses.replace(blocks, shape=())


def list_devices(devices: Sequence[int]) -> str:
    """'0-3 8-11', '0 2 4', or '0 4 … 28' of devices in the order of their numbers."""
    runs: list[list[int]] = []
    for number in sorted(devices):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    words = [f"{first}" if first == last else f"{first}-{last}" for first, last in runs]
    return " ".join(words if len(words) <= RUNS else [*words[: RUNS - 1], GAP, words[-1]])


def _some(count: int, most: int) -> list[int | None]:
    """The numbers below `count`; where these are more than `most`, the first ones, None for a gap, and the last."""
    return [*range(count)] if count <= most else [*range(most - 2), None, count - 1]


def _hue_and_shade(blocks: Blocks, row: int, column: int) -> tuple[float, float]:
    """The hue of a block in degrees, and its shade from 0 to 1. Where both ways are cut, rows differ in hue."""
    rows, columns = blocks.size
    hue, shade = ((row, rows), (column, columns)) if rows > 1 else ((column, columns), (0, 1))
    return (HUE + TURN * hue[0] / hue[1]) % 360, shade[0] / (shade[1] - 1) if shade[1] > 1 else 0.5


# Terminal


def table(blocks: Blocks) -> Table:
    """The blocks as a table whose cells have the colours of the blocks and the numbers of their devices."""
    rows, columns = (_some(count, most) for count, most in zip(blocks.size, MOST, strict=True))
    drawn = Table(box=box.SQUARE, show_header=False, show_lines=True, padding=(0, 1))
    for _ in columns:
        drawn.add_column(justify="center", no_wrap=True)
    for row in rows:
        drawn.add_row(*(_cell(blocks, row, column) for column in columns))
    return drawn


def _cell(blocks: Blocks, row: int | None, column: int | None) -> Text:
    if row is None or column is None:
        return Text(GAP, "dim")
    red, green, blue = _rgb(*_hue_and_shade(blocks, row, column))
    return Text(f" {list_devices(blocks.devices[row][column])} ", f"black on rgb({red},{green},{blue})")


def _rgb(hue: float, shade: float) -> tuple[int, int, int]:
    red, green, blue = colorsys.hls_to_rgb(hue / 360, 0.82 - 0.2 * shade, 0.5)
    return round(255 * red), round(255 * green), round(255 * blue)


# SVG


def drawing(blocks: Blocks, label: str) -> str:
    """The blocks as an element of a page. label: what it shows, for whoever does not see it."""
    about = f"{label}: {blocks.about}"
    return (
        f'<svg class="blocks" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{text(about)}">'
        f"{cells(blocks)}</svg>"
    )


def cells(blocks: Blocks, left: float = 0, top: float = 0) -> str:
    """The rectangles of the blocks, with the numbers of their devices, at a place of a drawing."""
    rows, columns = (_some(count, most) for count, most in zip(blocks.size, MOST, strict=True))
    wide, high = WIDTH / len(columns), HEIGHT / len(rows)
    drawn = []
    for y, row in enumerate(rows):
        for x, column in enumerate(columns):
            middle = f'x="{left + (x + 0.5) * wide:.1f}" y="{top + (y + 0.5) * high:.1f}"'
            if row is None or column is None:
                drawn.append(f'<text {middle} class="gap">{GAP}</text>')
                continue
            devices = list_devices(blocks.devices[row][column])
            hue, shade = _hue_and_shade(blocks, row, column)
            size = max(5.0, min(13.0, 0.8 * high, 1.7 * wide / max(len(devices), 2)))
            place = f'x="{left + x * wide:.1f}" y="{top + y * high:.1f}" width="{wide:.1f}" height="{high:.1f}"'
            drawn.append(
                f'<rect {place} fill="hsl({hue:.0f} 50% {82 - 20 * shade:.0f}%)">'
                f"<title>devices {text(devices)}</title></rect>"
                f'<text {middle} font-size="{size:.1f}">{text(devices)}</text>'
            )
    return "".join(drawn)


class Panel(NamedTuple):
    """One of several pictures that stand side by side."""

    name: str
    above: str  # a line below the name
    below: str  # the last line, below the blocks
    blocks: Blocks


def picture(title: str, panels: Sequence[Panel]) -> str:
    """An SVG document of some panels, which can be read on light and on dark paper."""
    drawn = []
    for n, panel in enumerate(panels):
        left = n * (WIDTH + SPACE)
        cut, end = panel.blocks, HEAD + HEIGHT
        lines = [(14, "name", panel.name), (32, "about", panel.above)]
        lines += [(end + 17 * n, "about", words) for n, words in enumerate((cut.about, cut.directions, panel.below), 1)]
        drawn += [f'<text class="{kind}" x="{left}" y="{y}">{text(words)}</text>' for y, kind, words in lines if words]
        drawn.append(cells(cut, left, HEAD))
    width, height = len(panels) * (WIDTH + SPACE) - SPACE, HEAD + HEIGHT + FOOT
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'font-family="Helvetica, Arial, sans-serif"><title>{text(title)}</title><style>{_STYLE}</style>\n'
        + "\n".join(drawn)
        + "\n</svg>\n"
    )
