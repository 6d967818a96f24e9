"""What a report says, whoever shows it: `terminal.py` prints it, and `html.py` makes a page of it."""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Literal

Style = Literal["", "good", "bad", "best", "dim"]


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of a table. Code may break between its parts only, and long text anywhere."""

    name: str = ""
    kind: Literal["words", "number", "code", "long", "known"] = "words"
    on_terminal: bool = True


@dataclasses.dataclass(frozen=True)
class Cell:
    """What stands at one place of a table."""

    text: str
    short: str = ""  # the text on a narrow terminal
    style: Style = ""
    kind: str = ""  # what a page shows in a colour beside it, such as "matmul"
    share: float | None = None  # of the whole: drawn as a bar
    value: float | None = None  # by which a page sorts the rows
    notes: tuple[str, ...] = ()  # below it on a page, in small print


Row = Sequence[Cell | str]


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows below the names of their columns.

    The first `labels` columns say what a row is, and stand again where a terminal has no room for all columns at once.
    A terminal may leave out the last rows if there is `left_out`, which makes a line about them from the number of rows
    that are shown. A page shows `groups` in place of the rows if there are any: each is a row with sums and the rows
    that fold below it.
    """

    name: str
    columns: Sequence[Column]
    rows: Sequence[Row]
    labels: int = 0
    left_out: Callable[[int], str] | None = None
    groups: Sequence[tuple[Row, Sequence[Row]]] = ()


def table_of(name: str, rows: Sequence[Mapping[str, Cell | str]], words: Collection[str]) -> Table:
    """The table of rows that name their columns. All columns but `words` hold numbers."""
    columns = [Column(column, "words" if column in words else "number") for column in (rows[0] if rows else ())]
    return Table(name, columns, [list(row.values()) for row in rows])


def cells(row: Row) -> list[Cell]:
    """The cells of a row."""
    return [cell if isinstance(cell, Cell) else Cell(cell) for cell in row]


def figure(value: float | None, show: Callable[[float], str]) -> str:
    """A number as `show` shows it; '-' where it is not known."""
    return "-" if value is None else show(value)


@dataclasses.dataclass(frozen=True)
class Text:
    """A paragraph."""

    text: str
    style: Style = ""


@dataclasses.dataclass(frozen=True)
class Notes:
    """Names, each with a text about it."""

    notes: Sequence[tuple[str, str]]


@dataclasses.dataclass(frozen=True)
class Findings:
    """Findings, each with a code, a message and a fix."""

    findings: Sequence[tuple[str, str, str]]


@dataclasses.dataclass(frozen=True)
class Figure:
    """HTML of something that only a page shows, such as a drawing."""

    html: str


@dataclasses.dataclass(frozen=True)
class Folded:
    """Blocks that a page shows once their title is chosen, and a terminal does not show."""

    title: str
    blocks: Sequence["Block"]


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two blocks that a wide page shows side by side."""

    blocks: tuple["Block", "Block"]


Block = Table | Text | Notes | Findings | Figure | Folded | Pair


@dataclasses.dataclass(frozen=True)
class Fact:
    """A figure that a reader looks for first. A page shows it in large, a terminal in the heading of its section."""

    name: str
    value: str
    note: str = ""
    style: Style = ""


@dataclasses.dataclass(frozen=True)
class Section:
    """A part of a report. `known` says how its figures are known: see `html.MEANINGS`."""

    title: str
    known: str
    blocks: Sequence[Block]
    facts: Sequence[Fact] = ()
