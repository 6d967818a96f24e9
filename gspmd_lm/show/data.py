"""What a run would read, in the terminal and as a page: counts, the tokenizer, and rows as text with the loss mask."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text as Line

from gspmd_lm.data.overview import Overview, Piece, ShownRow, Side
from gspmd_lm.data.speed import describe_speed
from gspmd_lm.show import html, svg, terminal
from gspmd_lm.show.document import Block, Fact, Figure, Notes, Section, Text
from gspmd_lm.units import human_count, plural

SCHEMA = 1  # of the JSON; to be raised when a key changes its meaning
MOST = 800  # characters of a row in a terminal
LEARNT = "green"
OPEN, CLOSE = "[[", "]]"  # around what is predicted, where there are no colours


def to_json(overview: Overview) -> dict[str, Any]:
    """The plain values that `data --json` writes."""
    speed = {"rows_per_s": overview.speed.rows_per_s, "bytes_per_s": overview.speed.bytes_per_s}
    return {"schema": SCHEMA, **dataclasses.asdict(overview), "speed": speed}


def show(overview: Overview, console: Console) -> None:
    """Prints the counts, and the beginning of each row: what the loss counts in colour, or in brackets without it."""
    terminal.show(console, [_counts(overview)])
    has_colours = console.color_system is not None and not console.no_color
    marks = Line.assemble(("green", LEARNT)) if has_colours else Line(f"{OPEN}in brackets{CLOSE}")
    console.print(Line.assemble(("\nRows", "bold"), ": tokens that are predicted are ", marks))
    for row in overview.rows:
        console.print(Line(f"\n{_about(row)}", "bold"))
        console.print(_line(row, has_colours), soft_wrap=True)


def page(overview: Overview, command: str) -> str:
    """The HTML of the page, which has the rows whole. command: what made it."""
    sections = [
        _counts(overview),
        *(Section(_about(row), "", [Figure("".join(_segment(*one) for one in row.segments))]) for row in overview.rows),
    ]
    legend = "<p><small>The loss counts the <mark>marked</mark> tokens. The others are read only.</small></p>"
    body = html.facts(sections) + html.sections(sections[:1]) + legend + html.sections(sections[1:])
    return html.page("Data", command, body)


def _counts(overview: Overview) -> Section:
    train, held_out = overview.training, overview.evaluation
    facts = [Fact("rows", f"{train.rows:,}", f"{train.rows / overview.batch:,.2f} batches of {overview.batch:,}")]
    facts += [Fact("tokens", human_count(train.tokens))] if train.tokens else []
    facts.append(Fact("held-out rows", f"{held_out.rows:,}" if held_out else "none"))
    notes = [("training", train.description)]
    notes += [("evaluation", _shorten(held_out, train))] if held_out else []
    notes += [("note", line) for line in overview.notes]
    notes += [("tokenizer", overview.tokenizer)] if overview.tokenizer else []
    notes.append(
        (
            "reading",
            f"this machine reads {describe_speed(overview.speed)}, measured on {plural(overview.speed.rows, 'row')}",
        )
    )
    blocks: list[Block] = [Notes(notes), *(Text(f"warning: {one}", "bad") for one in overview.warnings)]
    return Section("Data", "", blocks, facts)


def _shorten(held_out: Side, train: Side) -> str:
    """What is said of the rows for evaluation, without the source if that of training says it."""
    origin = train.description[train.description.find(" (") :]
    return held_out.description.removesuffix(origin)


def _about(row: ShownRow) -> str:
    """'Row 17: 128 tokens, 120 predicted, 3 segments, 12 positions of padding'"""
    segments = plural(len(row.segments), "segment") if len(row.segments) > 1 and not row.segments[0][0] else ""
    padding = f"{plural(row.padding, 'position')} of padding" if row.padding else ""
    counts = [f"{plural(row.tokens, 'token')}, {row.learnt:,} predicted"] if row.tokens else []
    about = ", ".join([*counts, *filter(None, (segments, padding))])
    return f"Row {row.number:,}{about and f': {about}'}"


def _line(row: ShownRow, has_colours: bool) -> Line:
    """The first characters of a row, for a terminal."""
    line, left = Line(), MOST
    for number, (name, pieces) in enumerate(row.segments):
        if number:
            line.append("\n" if name else "\n---\n", "dim")
        line.append(f"{name}: " if name else "", "dim")
        for piece in pieces:
            text = _visible(piece.text)[:left]
            left -= len(text)
            if piece.is_learnt and has_colours:
                line.append(text, LEARNT)
            else:
                line.append(f"{OPEN}{text}{CLOSE}" if piece.is_learnt else text)
            if not left:
                return line.append(" ... --html=FILE shows the rest", "dim")
    return line


def _visible(text: str) -> str:
    """A text in which what would control a terminal is shown as U+FFFD, and a tab as spaces."""
    return "".join(one if one.isprintable() or one == "\n" else "\ufffd" for one in text.replace("\t", "    "))


def _segment(name: str, pieces: Sequence[Piece]) -> str:
    named = f"<b>{svg.text(name)}</b>\n" if name else ""
    return f'<pre class="segment">{named}{"".join(_mark(pieces))}</pre>'


def _mark(pieces: Sequence[Piece]) -> Iterator[str]:
    for piece in pieces:
        text = svg.text(_visible(piece.text))
        yield f"<mark>{text}</mark>" if piece.is_learnt else text
