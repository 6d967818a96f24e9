"""Consoles to print on, and reports on a terminal, as wide as it is and no longer than a screen.

Everything is a `Text` of rich, because text from files must not be read as markup.
"""

import io
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.table import Table as Grid
from rich.text import Text as Line

from gspmd_lm.show.document import Block, Cell, Column, Findings, Notes, Pair, Section, Table, Text, cells

INDENT = 2  # of what stands below a heading
WIDE = 110  # columns with which nothing is shortened
STYLES = {"good": "green", "bad": "red", "best": "bold green", "dim": "dim"}
WAITS = ("wait", "host")  # parts of a step in which nothing is computed
# The most rows of a table, and the most findings of a list beside it: the first of these pairs for which a screen has
# room.
ROWS = (10, 9, 8, 7, 6, 6, 6, 6, 5, 4, 3, 3, 3, 2, 1)
FINDINGS = (9, 9, 9, 9, 9, 7, 5, 4, 3, 3, 3, 2, 1, 1, 1)
MOST = tuple(zip(ROWS, FINDINGS, strict=True))
MORE = "see --html"


class Room(NamedTuple):
    """What a terminal has room for: characters of a line, rows of a table, and findings of a list."""

    width: int
    rows: int
    findings: int

    @property
    def wide(self) -> bool:
        return self.width >= WIDE


def console(width: int, stderr: bool = False) -> Console:
    """The terminal, as wide as it is. Where its stream goes elsewhere, it has `width` columns.

    In a notebook it prints plain lines. rich would make a page of each, and a kernel asks for colours (FORCE_COLOR).
    """
    stream, colours = (sys.stderr if stderr else sys.stdout), False if "ipykernel" in sys.modules else None
    return Console(
        stderr=stderr,
        highlight=False,
        width=None if stream.isatty() else width,
        force_jupyter=False,
        force_terminal=colours,
    )


def text_of(print_on: Callable[[Console], None], width: int) -> str:
    """What `print_on` prints, as plain text of `width` columns, also where a notebook's kernel would display it."""
    file = io.StringIO()
    print_on(Console(file=file, width=width, highlight=False, force_jupyter=False, force_terminal=False))
    return file.getvalue()


def show(console: Console, sections: Sequence[Section], title: str = "", about: str = "", lines: int = 0) -> None:
    """Prints a title, `about` below it, and sections. Long tables and lists are cut to `lines`, if it is not 0."""
    page = Group()
    for most in MOST if lines else MOST[:1]:
        page = Group(*_page(sections, title, about, Room(console.width, *most)))
        if len(console.render_lines(page)) <= lines:
            break
    console.print(page)


def heading(section: Section) -> Line:
    """The first line of a section: its title, how its figures are known, and the facts."""
    line = Line.assemble((section.title, "bold"), f", {section.known}" if section.known else "")
    for i, fact in enumerate(section.facts):
        name = "" if fact.name == section.title.lower() else f"{fact.name} "
        fact_text = f"{name}{fact.value}" + (f", {fact.note}" if fact.note else "")
        line.append("; " if i else ": ").append(fact_text, STYLES.get(fact.style))
    return line


def _page(sections: Sequence[Section], title: str, about: str, room: Room) -> Iterator[RenderableType]:
    if title:
        yield Line(title, style="bold")
    if about:
        yield Line(about)
    for i, section in enumerate(sections):
        if i or (title and section.title):
            yield Line()
        if section.title:
            yield heading(section)
        for block in section.blocks:
            yield from (Padding.indent(one, INDENT) for one in _block(block, room))


def _block(block: Block, room: Room) -> Iterator[RenderableType]:
    match block:
        case Text():
            yield Line(block.text, style=STYLES.get(block.style, ""))
        case Table() if block.rows:
            yield from _table(block, room)
        case Notes():
            yield align(block.notes)
        case Findings():
            yield from _findings(block.findings, room.findings)
        case Pair():
            for one in block.blocks:
                yield from _block(one, room)


def align(notes: Sequence[tuple[str, str]]) -> Grid:
    """Names, and what is said of each beside them."""
    grid = Grid.grid(padding=(0, 2, 0, 0))
    for name, note in notes:
        grid.add_row(Line(name, style="bold"), Line(note))
    return grid


def _findings(findings: Sequence[tuple[str, str, str]], most: int) -> Iterator[RenderableType]:
    grid = Grid.grid(padding=(0, 1, 0, 0))
    for code, message, fix in findings[:most]:
        grid.add_row(Line("!", style="yellow"), Line(f"{code}: {message}"))
        grid.add_row(Line(), Line(f"fix  {fix}", style="dim"))
    yield grid
    if left := [code for code, _, _ in findings[most:]]:
        yield Line(f"! and {len(left)} more: {', '.join(dict.fromkeys(left))}; {MORE}", style="yellow")


def _table(table: Table, room: Room) -> Iterator[RenderableType]:
    shown = [i for i, column in enumerate(table.columns) if column.on_terminal]
    columns = [table.columns[i] for i in shown]
    most = room.rows if table.left_out else len(table.rows)
    rows = [[cells(row)[i] for i in shown] for row in table.rows[:most]]
    for some in _together(columns, rows, table.labels, room.width):
        grid = Grid(box=None, pad_edge=False, padding=(0, 2 if room.wide else 1, 0, 0), header_style="dim")
        grid.show_header = any(column.name for column in columns)
        for column in (columns[i] for i in some):
            number = column.kind == "number"
            grid.add_column(Line(column.name), justify="right" if number else "left", no_wrap=number, overflow="fold")
        for row in rows:
            grid.add_row(*(_text(row[i], room.wide) for i in some), *_bars(row, room.wide))
        yield grid
    if table.left_out and len(table.rows) > most:
        yield Line(table.left_out(most), style="dim")


def _together(
    columns: Sequence[Column], rows: Sequence[Sequence[Cell]], labels: int, width: int
) -> Iterator[Sequence[int]]:
    """Numbers of the columns to print together: all of them, or the labels and as many others as there is room for."""
    if not labels:
        yield range(len(columns))
        return
    widths = [max(len(column.name), *(len(row[i].text) for row in rows)) + 2 for i, column in enumerate(columns)]
    left = width - INDENT - sum(widths[:labels])
    first = labels
    while first < len(columns):
        last = first + max(1, sum(used <= left for used in itertools.accumulate(widths[first:])))
        yield [*range(labels), *range(first, last)]
        first = last


def _text(cell: Cell, wide: bool) -> Line:
    return Line(cell.text if wide else cell.short or cell.text, style=STYLES.get(cell.style, ""), overflow="fold")


class _Bar(ProgressBar):
    """A bar whose empty part is blank. In rich it is a dark line, with which an empty bar on white paper looks full."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        empty = console.get_style(self.style)
        for segment in super().__rich_console__(console, options):
            if not isinstance(segment, Segment) or segment.style != empty:
                yield segment


def _bars(row: Sequence[Cell], wide: bool) -> Iterator[ProgressBar]:
    style = "yellow" if any(cell.kind in WAITS for cell in row) else "blue"
    for cell in row:
        if cell.share is not None:
            yield _Bar(1.0, min(cell.share, 1.0), 60 if wide else 40, complete_style=style, finished_style=style)
