"""Pieces of HTML that pages share, and the document around them. Arguments are escaped already, but for headings and
names.
"""

import importlib.resources
import re
from collections.abc import Iterable, Sequence

from gspmd_lm.show.drawing import text
from gspmd_lm.show.meanings import MEANINGS

MOST_ON_A_PHONE = 4  # short columns side by side
TEMPLATE = importlib.resources.files("gspmd_lm.show") / "page.html"
Part = tuple[str, str, str]  # of a page: a title, how its figures are known, and HTML


def document(title: str, command: str, body: str, data: str = "[]") -> str:
    """The HTML of a page. Its styles and scripts are in `page.html`. `data` is the JSON that the scripts draw from.

    command: what made the page, for readers who want to repeat it; "" for pages made in Python.
    """
    made_by = f"<p class=about><code>{text(command)}</code></p>" if command else ""
    filled = TEMPLATE.read_text(encoding="utf-8")
    # The filled-in text contains no "<!--", so no place is filled twice.
    for place, content in {"title": text(title), "body": made_by + body, "data": data}.items():
        filled = filled.replace(f"<!-- {place} -->", content)
    return filled


def section(heading: str, title: str, known: str, content: str, name: str = "") -> str:
    identity = f' id="{name}"' if name else ""
    return f"<section{identity}><{heading}>{text(title)} {known_as(known)}</{heading}>{content}</section>"


def known_as(how: str) -> str:
    """The label that says how a figure is known."""
    return f'<span class="known" title="{text(MEANINGS[how])}">{how}</span>' if how else ""


def term(name: str) -> str:
    """A word of `MEANINGS`, which says its meaning where one points; any other text as it is."""
    return f'<abbr title="{text(MEANINGS[name])}">{text(name)}</abbr>' if name in MEANINGS else text(name)


def breakable(name: object) -> str:
    """A path or a name, which may go on in the next line after each of its parts, but not within one."""
    return re.sub(r"(?<=[./_(\],:+-])(?=\w)", "<wbr>", text(name))


def words() -> str:
    """The meanings of all words, folded: for screens on which one cannot point."""
    return folded("What the words mean", notes_of(MEANINGS.items()))


def notes_of(notes: Iterable[tuple[str, str]]) -> str:
    """A list of names, each with what is said of it."""
    told = "".join(f"<dt>{text(name)}</dt><dd>{text(said)}</dd>" for name, said in notes)
    return f'<dl class="notes">{told}</dl>'


def folded(summary: str, content: str) -> str:
    """Content that is shown once its summary is chosen."""
    return f"<details><summary>{summary}</summary>{content}</details>"


def pick(number: int, name: str) -> str:
    """The button that shows a layout, counted as `page.layouts` counts them."""
    return f'<button type="button" class="pick" data-layout="{number}" aria-pressed="false">{text(name)}</button>'


def file_of(content: str) -> str:
    """The text of a file."""
    return f"<pre>{text(content)}</pre>"


def facts_of(facts: Iterable[tuple[str, str, str, str]], over: bool = False) -> str:
    """Figures in large: each a name, how it is known, a value and a note. `over`: the first is beyond its limit."""
    cells = "".join(
        f"<div><dt>{term(name)} {known_as(known)}</dt><dd><b>{text(value)}</b> <small>{text(note)}</small></dd></div>"
        for name, known, value, note in facts
    )
    return f'<dl class="facts{" over" if over else ""}">{cells}</dl>'


def swatch(kind: str) -> str:
    return f'<i class="swatch k-{kind}"></i>' if kind else ""


def legend(kinds: Iterable[tuple[str, str]], more: str = "") -> str:
    """What colours mean: kinds, each with a name."""
    return f'<p class="legend">{"".join(f"<span>{swatch(kind)}{name}</span>" for kind, name in kinds)}{more}</p>'


def scroll(name: str, content: str) -> str:
    """A box for content that is wider than a phone. It scrolls by itself, also with the keyboard."""
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{text(name)}">{content}</div>'


def rows_of(columns: Sequence[str], rows: Iterable[Sequence[str]], name: str, numbers: Sequence[int] = ()) -> str:
    kinds = ['class="num"' if i in numbers else "" for i in range(len(columns))]
    head = "".join(
        f'<th scope="col" {kind}>{term(name)}</th>' if name else "<td></td>"
        for name, kind in zip(columns, kinds, strict=True)
    )
    body = "".join(f"<tr>{''.join(map(_cell, columns, kinds, row))}</tr>" for row in rows)
    stack = ' class="stack"' if len(columns) > MOST_ON_A_PHONE else ""
    table = f"<table{stack}><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return scroll(name, table) if body else ""


def _cell(column: str, kind: str, content: str) -> str:
    """A cell that names its column: on a phone a row is a list of names and values."""
    return f'<td {kind} data-name="{text(column)}">{content}</td>'
