"""Shows what each row in which two layouts differ changes: on a terminal, and as a page."""

import collections
from collections.abc import Callable, Iterator, Sequence

from rich.console import Console

from gspmd_lm.foresight.report import Report
from gspmd_lm.plan.estimate import Estimate
from gspmd_lm.plan.row_changes import ArrayChange, Change, CollectiveChange, RowComparison
from gspmd_lm.sharding.rules import describe_split
from gspmd_lm.show import html, terminal
from gspmd_lm.show.document import Cell, Column, Row, Section, Table, Text
from gspmd_lm.units import human_bytes, human_seconds, plural

# What collectives are for, where the estimate's own word does not say it.
PURPOSES = {
    "keys": "keys and values",
    "stages": "rows from stage to stage",
    "waiting": "rows that wait for a stage",
}
TITLE = "Row by row"
EARLIER = "Each row is applied to the layout above it. Figures are estimates for one device and one step."


def show(compared: RowComparison, console: Console) -> None:
    """Prints the changes from one layout to another."""
    terminal.show(console, sections(compared), title(compared))


def page(compared: RowComparison, command: str = "") -> str:
    """The HTML of a page of the changes. command: what made the page, for readers who want to repeat it."""
    return html.page(title(compared), command, html.sections(sections(compared)) + html.words())


def title(compared: RowComparison) -> str:
    """'tiny on v5p:2x2x2: from dp8 to fsdp8'"""
    return f"{compared.config} on {compared.target}: from {compared.before} to {compared.after}"


def sections(compared: RowComparison, reports: Sequence[Report] = (), most: int | None = None) -> list[Section]:
    """The changes from one layout to another: a section about all of them, and one for each change.

    reports: of the two layouts, where they were compiled, too. most: with more changes than that, the first section
    stands alone, and says which flag shows the others; None: there is no limit.
    """
    if not compared.changes:
        return [Section(TITLE, "estimated", [Text("Both layouts have the same rows.")])]
    shown = compared.changes if most is None or len(compared.changes) <= most else ()
    notes = [EARLIER, *(f"Compiled: {words}." for words in _list_compiled(reports))]
    notes += [] if shown else [f"What each of them sends: compare --rows {compared.before} {compared.after}"]
    whole = Section(TITLE, "estimated", [_steps(compared), *(Text(note, "dim") for note in notes)])
    return [whole, *(Section(name_rows(change), "", [_effects(change, compared)]) for change in shown)]


def name_rows(change: Change) -> str:
    """'+ residual.seq: tensor', the rows of a change."""
    return ", ".join(map(str, change.rows))


def _list_compiled(reports: Sequence[Report]) -> Iterator[str]:
    """'tp8 needs 37.3 MB and sends 33.1 MB' for each layout of which the compiler gave a program."""
    for report in reports:
        if not report.memory.refusal:
            time = f", and takes {human_seconds(report.prediction.step_time_s)} a step" if report.prediction else ""
            sizes = f"needs {human_bytes(report.memory.peak_bytes)} and sends {human_bytes(report.sent_bytes)}"
            yield f"{report.layout} {sizes}{time}"


def _steps(compared: RowComparison) -> Table:
    """The memory, the bytes sent and the time of each layout on the way."""
    layouts = [(f"from {compared.before}", compared.estimates[0])]
    layouts += [(name_rows(change), change.after) for change in compared.changes]
    most = max(one.peak_bytes for _, one in layouts)
    columns = [Column("layout", "long"), Column("peak memory", "number"), Column("sent", "number")]
    columns += [Column("step time", "number"), Column("waits", "number")] if compared.timed else []
    rows: list[Row] = []
    for name, estimate in layouts:
        fits = compared.limit_bytes is None or estimate.peak_bytes <= compared.limit_bytes
        memory = Cell(human_bytes(estimate.peak_bytes), style="" if fits else "bad", share=estimate.peak_bytes / most)
        times = [human_seconds(estimate.step_time_s), human_seconds(sum(estimate.exposed_by_axis.values()))]
        rows.append([name, memory, human_bytes(estimate.sent_bytes), *(times if compared.timed else [])])
    return Table("Layouts on the way", columns, rows)


def list_effects(change: Change, timed: bool) -> list[tuple[str, str]]:
    """What some rows change: a label such as 'sends', and a sentence. timed: whether the target has times."""
    lines = [("sends", words) for words in _list_collectives(change.collectives)] or [("sends", "the same as before")]
    lines += [("arrays", words) for words in _list_arrays(change.arrays)]
    lines.append(("memory", _difference(change, lambda one: one.peak_bytes, human_bytes)))
    if timed:
        lines.append(("time", _difference(change, lambda one: one.step_time_s, human_seconds)))
    return lines


def _effects(change: Change, compared: RowComparison) -> Table:
    """What some rows change: a label, and a sentence beside it."""
    lines = list_effects(change, compared.timed)
    labels = ["" if n and lines[n - 1][0] == label else label for n, (label, _) in enumerate(lines)]
    rows = [[label, words] for label, (_, words) in zip(labels, lines, strict=True)]
    return Table(f"What {', '.join(row.key for row in change.rows)} changes", (Column(), Column("", "long")), rows)


def _difference(change: Change, value: Callable[[Estimate], float], show: Callable[[float], str]) -> str:
    """A figure, and by how much it differs from the one before."""
    before, after = value(change.before), value(change.after)
    if show(before) == show(after):
        return f"{show(after)}, as before"
    more = "more" if after > before else "less"
    share = f" ({after / before - 1:+.1%})" if before else ""
    return f"{show(after)}, {show(abs(after - before))} {more} than before{share}"


# Collectives


def _list_collectives(changes: Sequence[CollectiveChange]) -> list[str]:
    """'the 16 all-reduces of the layers' activations over tensor (29.4 MB) become 16 reduce-scatters ...'

    One sentence for each purpose. What makes the greatest difference comes first.
    """
    groups = collections.defaultdict[tuple[str, bool], list[CollectiveChange]](list)
    for change in changes:
        groups[change.purpose, change.in_layers].append(change)
    ordered = sorted(groups.values(), key=lambda group: -max(abs(one.bytes_after - one.bytes_before) for one in group))
    return [words for group in ordered for words in _say_group(group)]


def _say_group(group: Sequence[CollectiveChange]) -> Iterator[str]:
    first = group[0]
    purpose = PURPOSES.get(first.purpose, f"the layers' {first.purpose}")
    if not first.in_layers:
        purpose = f"{first.purpose} outside of the layers"
    changed = sorted((one for one in group if one.times_before != one.times_after), key=_order)
    over = {one.axes for one in changed}
    place = f"{purpose} over {changed[0].axes}" if len(over) == 1 else purpose

    def words(one: CollectiveChange) -> str:
        count = abs(one.times_after - one.times_before)
        some = f"{count} of {one.times_before}" if 0 < one.times_after < one.times_before else f"{count:,}"
        kind = plural(one.times_before if "of" in some else count, one.collective).partition(" ")[2]
        where = "" if len(over) == 1 else f" over {one.axes}"
        return f"{some} {kind}{where} ({human_bytes(abs(one.bytes_after - one.bytes_before))})"

    gone = _join([words(one) for one in changed if one.times_after < one.times_before])
    added = _join([words(one) for one in changed if one.times_after > one.times_before])
    if gone and added:
        yield f"{place}: {gone} become {added}"
    elif gone or added:
        yield f"{place}: {f'without {gone}' if gone else f'{added} more'}"
    for one in group:
        if one not in changed:
            kinds = plural(one.times_after, one.collective)
            sizes = f"{human_bytes(one.bytes_after)} in place of {human_bytes(one.bytes_before)}"
            yield f"{purpose} over {one.axes}: {kinds} of {sizes}"


def _order(change: CollectiveChange) -> tuple[str, str]:
    """A reduction comes before the gather that completes it."""
    return "" if change.collective.startswith("reduce") else change.collective, change.axes


def _join(words: Sequence[str]) -> str:
    """'a, b and c'; '' of nothing"""
    *first, last = words or [""]
    return f"{', '.join(first)} and {last}" if first else last


# Arrays


def _list_arrays(changes: Sequence[ArrayChange]) -> list[str]:
    """'wk, wq: at rest, replicated -> embed/fsdp', for all arrays together that change alike."""
    alike = collections.defaultdict[str, list[ArrayChange]](list)
    for change in changes:
        alike[_say_splits(change)].append(change)
    last_names = collections.Counter(change.path.rpartition(".")[2] for change in changes)
    lines = []
    for words, group in alike.items():
        short = [change.path.rpartition(".")[2] for change in group]
        paths = [name if last_names[name] == 1 else change.path for name, change in zip(short, group, strict=True)]
        before, after = (sum(_held_bytes(change, side) for change in group) for side in ("before", "after"))
        sizes = f" ({human_bytes(before)} -> {human_bytes(after)})" if before and after and before != after else ""
        lines.append(f"{', '.join(paths)}: {words}{sizes}")
    return lines


def _say_splits(change: ArrayChange) -> str:
    """'at rest and in optimizer state, replicated -> embed/fsdp'"""
    before, after = change.before, change.after
    if before is None or after is None:
        array = after or before
        assert array
        return f"{'new' if after else 'gone'}, {describe_split(array.axes, array.in_use)}"
    pairs = {"at rest": (before.at_rest, after.at_rest), "in use": (before.in_use, after.in_use)}
    pairs["in optimizer state"] = (
        before.optimizer and before.optimizer.split,
        after.optimizer and after.optimizer.split,
    )
    where = collections.defaultdict[str, list[str]](list)
    for name, (was, becomes) in pairs.items():
        if was is not None and becomes is not None and was != becomes:
            where[f"{describe_split(before.axes, was)} -> {describe_split(after.axes, becomes)}"].append(name)
    if not where:  # the same mesh axes in other sizes
        placed = next((one for _, one in pairs.values() if one and any(one)), after.in_use)
        return f"{describe_split(after.axes, placed)}, in other sizes"
    if after.at_rest is None:
        return next(iter(where))
    return "; ".join(f"{_join(names)}, {words}" for words, names in where.items())


def _held_bytes(change: ArrayChange, side: str) -> int:
    """The bytes that a device holds of an array and of its optimizer state."""
    array = getattr(change, side)
    return 0 if array is None else array.bytes_per_device + (array.optimizer.bytes_per_device if array.optimizer else 0)
