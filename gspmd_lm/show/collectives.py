"""The table of collectives of a page. Its groups fold, and its columns sort."""

import collections
from collections.abc import Sequence

from gspmd_lm.foresight.advice import SLOW_LINKS
from gspmd_lm.foresight.collectives import Collective
from gspmd_lm.foresight.report import Report
from gspmd_lm.show.drawing import text
from gspmd_lm.show.figures import of_floor
from gspmd_lm.show.pieces import Part, breakable, known_as, scroll, term
from gspmd_lm.units import human_bytes

COLUMNS = ("kind", "axes", "dtype", "times", "sent", "overlaps", "phase", "op", "because of", "source")


def table(report: Report) -> Part:
    """The part with all collectives: those over the same axes in the same phase stand in a group with their sums."""
    if report.memory.refusal:
        return "Collectives", "compiled", "<p>None to show: the compiler gave no program.</p>"
    if not report.collectives:
        return "Collectives", "compiled", "<p>None.</p>"
    heads = [
        f'<th scope="col"{" aria-sort=descending" if name == "sent" else ""}><button type="button" data-column="{i}">'
        f"{term(name)}</button></th>"
        for i, name in enumerate(COLUMNS)
    ]
    whole = report.sent_bytes
    groups = collections.defaultdict[tuple[str, str], list[Collective]](list)
    for one in sorted(report.collectives, key=_size, reverse=True):
        groups["+".join(one.mesh_axes), one.phase].append(one)
    ranked_groups = sorted(groups.items(), key=lambda group: -sum(map(_size, group[1])))
    bodies = "".join(_group(*group, whole or 1) for group in ranked_groups)
    foot = f'<tr><th scope="row" colspan="4">in all</th><td class="num">{human_bytes(whole)}</td></tr>'
    rows = (f'<table class="sortable stack"><thead><tr>{"".join(heads)}</tr></thead>{bodies}'
            f"<tfoot>{foot}</tfoot></table>")  # fmt: skip
    above = f", {of_floor(report)} {known_as('counted')}" if of_floor(report) else ""
    total = (f"<p>{human_bytes(whole)} sent per device and step{above}. Choose a group to see its collectives, and a "
             f"heading to sort them by it.</p>")  # fmt: skip
    return f"Collectives ({len(report.collectives)})", "compiled", total + scroll("Collectives", rows)


def _group(of: tuple[str, str], members: Sequence[Collective], whole: int) -> str:
    """Collectives over the same axes in the same phase: a row with their sums, and their own rows, which fold."""
    axes, phase = of
    size = sum(map(_size, members))
    count = f"{len(members)} collective{'s' if len(members) > 1 else ''}, {size / whole:.1%} of the bytes"
    head = (
        f'<tr><th scope="rowgroup" colspan="3"><button type="button" class="fold" aria-expanded="true">{text(axes)}, '
        f'{text(phase)}</button></th><td class="num" data-name="times">{sum(one.times_per_step for one in members):,}'
        f'</td><td class="num size" data-name="sent" style="--share:{size / whole:.4f}">{human_bytes(size)}</td>'
        f'<td colspan="5">{count}</td></tr>'
    )
    rows = "".join(f"<tr>{_collective(one, whole)}</tr>" for one in members)
    return f'<tbody class="group">{head}</tbody><tbody class="members">{rows}</tbody>'


def _collective(one: Collective, whole: int) -> str:
    size, times = _size(one), one.times_per_step
    slow = "<br><small>between slices or hosts</small>" if one.link in SLOW_LINKS else ""
    product = f"<br><small>{breakable(one.einsum)}</small>" if one.einsum else ""
    cells = [
        ("", text(one.kind)),
        ("", text("+".join(one.mesh_axes)) + slow),
        ("", text(one.dtype)),
        (f'class="num" data-value="{times}"', f"{times:,}"),
        (f'class="num size" data-value="{size}" style="--share:{size / whole:.4f}"', human_bytes(size)),
        (f'class="{"good" if one.overlapped else "bad"}"', "yes" if one.overlapped else "no"),
        ("", text(one.phase)),
        ("", breakable(one.op) + product),
        ("", text(", ".join(one.rules)) or "no row"),
        ("", f"<code>{breakable(one.source)}</code>"),
    ]
    named = zip(COLUMNS, cells, strict=True)
    return "".join(f'<td {kind} data-name="{name}">{cell}</td>' for name, (kind, cell) in named)


def _size(one: Collective) -> int:
    return one.bytes_per_device_per_step
