"""Makes a page of reports: one HTML document that loads nothing. Its styles and scripts are in `page.html`."""

import importlib.resources
import re
from collections.abc import Iterable

from gspmd_lm.show import document
from gspmd_lm.show.document import Block, Cell, Column, Fact, Figure, Row, Section, Table, cells
from gspmd_lm.show.svg import text

MOST_ON_A_PHONE = 4  # short columns side by side
TEMPLATE = importlib.resources.files("gspmd_lm.show") / "page.html"
# What words mean, for readers who do not know them.
MEANINGS = {
    "compiled": "Read from the program that the compiler made for the target: exact.",
    "predicted": "Computed from the compiled program with a model of the hardware. The page says how far such "
    "predictions were off.",
    "estimated": "Computed from shapes, rules and links alone, without a compiler. docs/plan.md says how far off such "
    "figures were.",
    "measured": "Logged by a run while it went on.",
    "counted": "Follows from the shapes of the model and from the rules alone.",
    "peak memory": "The most memory of one device that is in use at once.",
    "temporaries": "What is in memory during a step only: activations, gradients and scratch space.",
    "limit": "The memory of a device that a program may use.",
    "tokens/s per device": "Tokens of a step over its time and the number of devices.",
    "rows/s per device": "Rows of a step over its time and the number of devices.",
    "MFU": "Model FLOPs utilisation: FLOPs that the model needs per second, without those of recomputation, as a share "
    "of what the chip can do. Of attention, only the keys that a token sees count.",
    "exposed communication": "The part of a step in which compute waits for other devices. What is sent while compute "
    "goes on takes no time.",
    "floor": "The least that any program must compute, read or send when the model is split so.",
    "split at rest": "The mesh axes that split an array between steps.",
    "split in use": "The mesh axes that split an array while a layer computes.",
    "overlap": "Whether compute goes on while it is sent.",
    "because of": "The rows of the rules file that make it necessary.",
    "recomputation": "Activations that were not kept are computed again in the backward pass.",
    "collective": "An operation in which devices exchange data, such as an all-gather.",
}


def page(title: str, command: str, body: str, data: str = "[]") -> str:
    """The HTML of a page. `data` is the JSON that the scripts draw meshes from.

    command: what made the page, for readers who want to repeat it; "" for pages made in Python.
    """
    made_by = f"<p class=about><code>{text(command)}</code></p>" if command else ""
    filled = TEMPLATE.read_text(encoding="utf-8")
    # The filled-in text contains no "<!--", so no place is filled twice.
    for place, content in {"title": text(title), "body": made_by + body, "data": data}.items():
        filled = filled.replace(f"<!-- {place} -->", content)
    return filled


def sections(content: Iterable[Section], heading: str = "h2") -> str:
    """The sections that have more than facts."""
    return "".join(
        f"<section><{heading}>{text(one.title)} {_known_as(one.known)}</{heading}>{blocks(one.blocks)}</section>"
        for one in content
        if one.blocks
    )


def facts(content: Iterable[Section]) -> str:
    """The facts of sections in large."""
    tiles = [_fact(fact, section.known) for section in content for fact in section.facts]
    return f'<dl class="facts">{"".join(tiles)}</dl>' if tiles else ""


def words() -> str:
    """The meanings of all words, folded: for screens on which one cannot point."""
    return _block(document.Folded("What the words mean", [document.Notes(list(MEANINGS.items()))]))


def legend(kinds: Iterable[tuple[str, str]], more: str = "") -> str:
    """What colours mean: kinds, each with a name."""
    return f'<p class="legend">{"".join(f"<span>{_swatch(kind)}{name}</span>" for kind, name in kinds)}{more}</p>'


def file(content: str) -> Figure:
    """The text of a file."""
    return Figure(f"<pre>{text(content)}</pre>")


def _fact(fact: Fact, known: str) -> str:
    value = f'<b class="{fact.style}">{text(fact.value)}</b> <small>{text(fact.note)}</small>'
    return f"<div><dt>{_term(fact.name)} {_known_as(known)}</dt><dd>{value}</dd></div>"


def blocks(content: Iterable[Block]) -> str:
    """The HTML of blocks."""
    return "".join(map(_block, content))


def _block(block: Block) -> str:
    match block:
        case document.Text():
            return f'<p class="{block.style}">{text(block.text)}</p>'
        case document.Notes():
            items = "".join(f"<dt>{text(name)}</dt><dd>{text(note)}</dd>" for name, note in block.notes)
            return f'<dl class="notes">{items}</dl>'
        case document.Findings():
            items = "".join(
                f"<li><b>{text(code)}</b> {text(message)}<br><span>Fix: {text(fix)}</span></li>"
                for code, message, fix in block.findings
            )
            return f'<ul class="warnings">{items}</ul>'
        case document.Table():
            return _table(block)
        case document.Pair():
            return f'<div class="pair">{blocks(block.blocks)}</div>'
        case document.Folded():
            return f"<details><summary>{text(block.title)}</summary>{blocks(block.blocks)}</details>"
        case document.Figure():
            return block.html


def _table(table: Table) -> str:
    """A table in a box that scrolls by itself, also with the keyboard, where it is wider than a phone."""
    if not table.rows:
        return ""
    classes = ["stack"] if len(table.columns) > MOST_ON_A_PHONE else []
    if table.groups:
        classes.append("sortable")
        bodies = "".join(
            f'<tbody class="group">{_row(table, sums, folds=True)}</tbody>'
            f'<tbody class="members">{"".join(_row(table, row) for row in rows)}</tbody>'
            for sums, rows in table.groups
        )
    else:
        bodies = f"<tbody>{''.join(_row(table, row) for row in table.rows)}</tbody>"
    named = any(column.name for column in table.columns)
    heads = "".join(_head(column, sorts=bool(table.groups)) for column in table.columns) if named else ""
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{text(table.name)}"><table '
        f'class="{" ".join(classes)}"><thead><tr>{heads}</tr></thead>{bodies}</table></div>'
    )


def _head(column: Column, sorts: bool) -> str:
    if not column.name:
        return "<td></td>"
    kind = ' class="num"' if column.kind == "number" else ""
    name = f'<button type="button">{_term(column.name)}</button>' if sorts else _term(column.name)
    return f'<th scope="col"{kind}>{name}</th>'


def _row(table: Table, row: Row, folds: bool = False) -> str:
    """A row of a table. Its first cell is a button if other rows fold below it."""
    first, tags = cells(row)[0].text, list(map(_cell, table.columns, cells(row)))
    if folds:
        button = f'<button type="button" class="fold" aria-expanded="true">{text(first)}</button>'
        tags[0] = f'<th scope="rowgroup">{button}</th>'
    elif table.labels:
        tags[0] = f'<th scope="row">{_term(first)}</th>'
    return f"<tr>{''.join(tags)}</tr>"


def _cell(column: Column, cell: Cell) -> str:
    """A cell that names its column: on a phone a row is a list of names and values."""
    match column.kind:
        case "known":
            content = _known_as(cell.text)
        case "code":
            content = f"<code>{_breakable(cell.text)}</code>" if cell.text else ""
        case "words":
            content = _term(cell.text)
        case _:
            content = text(cell.text)
    content = _swatch(cell.kind) + content + "".join(f"<br><small>{_breakable(note)}</small>" for note in cell.notes)
    classes = {"number": ["num"], "long": ["long"]}.get(column.kind, []) + ([cell.style] if cell.style else [])
    more = "" if cell.value is None else f' data-value="{cell.value}"'
    if cell.share is not None:
        classes.append("size")
        more += f' style="--share:{min(cell.share, 1.0):.4f}"'
    return f'<td class="{" ".join(classes)}" data-name="{text(column.name)}"{more}>{content}</td>'


def _known_as(how: str) -> str:
    """The label that says how a figure is known."""
    return f'<span class="known" title="{text(MEANINGS[how])}">{how}</span>' if how else ""


def _term(name: str) -> str:
    """A word of `MEANINGS`, which says its meaning where one points; any other text, breakable."""
    return f'<abbr title="{text(MEANINGS[name])}">{text(name)}</abbr>' if name in MEANINGS else _breakable(name)


def _breakable(name: str) -> str:
    """A path or a name, which may go on in the next line after each of its parts, but not within one."""
    return re.sub(r"(?<=[./_(\],:+-])(?=\w)", "<wbr>", text(name))


def _swatch(kind: str) -> str:
    return f'<i class="swatch k-{kind}"></i>' if kind else ""
