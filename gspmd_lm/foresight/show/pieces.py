"""Pieces of HTML that pages share, and the document around them. Arguments are escaped already, but for headings and
names.
"""

import importlib.resources
from collections.abc import Iterable, Sequence

from gspmd_lm.foresight.show.drawing import text

TEMPLATE = importlib.resources.files("gspmd_lm.foresight.show") / "page.html"


def document(title: str, body: str, data: str) -> str:
    """The HTML of a page. Its styles and scripts are in `page.html`. `data` is the JSON that the scripts draw from."""
    filled = TEMPLATE.read_text(encoding="utf-8")
    # The filled-in text contains no "<!--", so no place is filled twice.
    for place, content in {"title": text(title), "body": body, "data": data}.items():
        filled = filled.replace(f"<!-- {place} -->", content)
    return filled


def section(heading: str, title: str, known: str, content: str, name: str = "") -> str:
    identity = f' id="{name}"' if name else ""
    return f"<section{identity}><{heading}>{text(title)} {known_as(known)}</{heading}>{content}</section>"


def known_as(how: str) -> str:
    """The label that says how a figure is known."""
    return f'<span class="known">{how}</span>' if how else ""


def swatch(kind: str) -> str:
    return f'<i class="swatch k-{kind}"></i>' if kind else ""


def scroll(name: str, content: str) -> str:
    """A box for content that is wider than a phone. It scrolls by itself, also with the keyboard."""
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{text(name)}">{content}</div>'


def rows_of(columns: Sequence[str], rows: Iterable[Sequence[str]], name: str, numbers: Sequence[int] = ()) -> str:
    kinds = ['class="num"' if i in numbers else "" for i in range(len(columns))]
    head = "".join(
        f'<th scope="col" {kind}>{name}</th>' if name else "<td></td>"
        for name, kind in zip(columns, kinds, strict=True)
    )
    body = "".join(
        f"<tr>{''.join(f'<td {kind}>{cell}</td>' for cell, kind in zip(row, kinds, strict=True))}</tr>" for row in rows
    )
    return scroll(name, f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>") if body else ""
