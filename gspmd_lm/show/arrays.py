"""Prints the arrays of a layout: how each is split, and the bytes of it on each device. A mesh axis has one colour."""

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from gspmd_lm.foresight.table import PlacedArray, Spec
from gspmd_lm.sharding import annotate
from gspmd_lm.sharding.problems import flow
from gspmd_lm.sharding.rules import CONTEXTS, EXPERT_BUFFER, MESH_AXES, Rules, describe_split
from gspmd_lm.units import plural

COLOURS: dict[str, str] = dict(zip(MESH_AXES, ("green", "cyan", "magenta", "yellow", "blue", "red"), strict=True))
WHOLE = "dim"  # the style of an array that every device holds whole
AXES_LEFT_OUT = "A wider terminal, or | cat, shows the logical axes that are not split, too."


class Form(NamedTuple):
    """How much of an array stands in its row."""

    whole_paths: bool  # else the module of several arrays stands once, above them
    all_axes: bool  # else those alone that are split
    times: str = " x "  # between the sizes of a shape
    gap: int = 2  # columns between cells
    stacked: bool = False  # whether each split of an array has a line of its own


FORMS = (  # the widest first
    Form(whole_paths=True, all_axes=True),
    Form(whole_paths=False, all_axes=True),
    Form(whole_paths=False, all_axes=False),
    Form(whole_paths=False, all_axes=False, times="x", gap=1),
    Form(whole_paths=False, all_axes=False, times="x", gap=1, stacked=True),
)


def show_tables(arrays: Sequence[PlacedArray], console: Console) -> None:
    """Prints the weights and the activations of a layout. A narrow console leaves out what each row of a wide one
    repeats."""
    weights = [row for row in arrays if row.at_rest is not None]
    parts = {"weights": weights, "activations": [row for row in arrays if row.at_rest is None]}
    forms = [_print_table(name, part, console) for name, part in parts.items() if part]
    if not all(form.all_axes for form in forms):
        console.print(Text(AXES_LEFT_OUT, WHOLE))


def _print_table(name: str, listed: Sequence[PlacedArray], console: Console) -> Form:
    """Prints the table of some arrays in the first of FORMS that the console has room for, and returns the form."""
    room = console.options.update(max_width=10_000)
    fitting = (
        form for form in FORMS if Measurement.get(console, room, _table(name, listed, form)).maximum <= console.width
    )
    form = next(fitting, FORMS[-1])
    console.print(_table(name, listed, form))
    console.print()
    return form


def _table(name: str, listed: Sequence[PlacedArray], form: Form) -> Table:
    """The rows of some arrays. Another split is shown if one of them is split otherwise in use than at rest, and a
    third one if its optimizer state is."""
    both = any(row.at_rest not in (None, row.in_use) for row in listed)
    third = any(row.optimizer and row.optimizer.split != row.at_rest for row in listed)
    headings = [name, *["logical axes"] * form.all_axes, "shape", *(["at rest", "in use"] if both else ["split"])]
    headings += ["optimizer state"] * third
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, form.gap, 0, 0))
    for heading in headings:
        table.add_column(heading, overflow="fold")
    table.add_column("bytes per\ndevice" if form.stacked else "bytes per device", overflow="fold", justify="right")
    for module, members in _modules(listed):
        above = f"{module}." if module and not form.whole_paths else ""
        if above:
            table.add_row(Text(above, WHOLE))
        for row in members:
            is_constraint = annotate.Spec(row.path, row.axes).is_constraint
            path = annotate.CONSTRAINT if is_constraint else row.path.removeprefix(above)
            texts = [
                "  " * bool(above) + path,
                *[" ".join(row.axes)] * form.all_axes,
                form.times.join(map(str, row.shape)),
            ]
            splits: list[Spec | None] = [row.in_use if row.at_rest is None else row.at_rest, *[row.in_use] * both]
            splits += [row.optimizer and row.optimizer.split] * third
            coloured = (Text("-", WHOLE) if spec is None else _colour_axes(row.axes, spec, form) for spec in splits)
            table.add_row(*map(Text, texts), *coloured, f"{row.bytes_per_device:,}")
    return table


def _modules(listed: Sequence[PlacedArray]) -> Iterator[tuple[str, list[PlacedArray]]]:
    """Arrays that follow each other and stand in one module, with its path; '' for an array that stands alone."""
    for _, members in itertools.groupby(listed, lambda row: row.path.partition(".")[0]):
        group = list(members)
        paths = [row.path.split(".")[:-1] for row in group]
        shared = itertools.takewhile(lambda names: len(set(names)) == 1, zip(*paths, strict=False))
        yield ".".join(names[0] for names in shared) if len(group) > 1 else "", group


def _colour_axes(axes: tuple[str, ...], spec: Spec, form: Form) -> Text:
    """What `split` says, each mesh axis in its colour."""
    parts = [
        Text("+").join(Text(f"{'' if n else f'{axis}/'}{name}", COLOURS[name]) for n, name in enumerate(names))
        for axis, names in zip(axes, spec, strict=True)
        if names
    ]
    return Text("\n" if form.stacked else " ").join(parts) if parts else Text(describe_split(axes, spec), WHOLE)


def keys(rules: Rules, batch_rows: int) -> Iterator[str]:
    """A line for each key of a rules file, besides the mesh and the tables, that changes what is computed where."""
    remat, pipeline = rules.remat, rules.pipeline
    if remat.policy != "none":
        names = {"save": [*remat.save], "offload": [*remat.offload]}
        yield f"remat {flow(names) if remat.policy == 'names' else remat.policy}"
    if rules.microbatches > 1:
        yield f"{rules.microbatches} microbatches of {plural(batch_rows // rules.microbatches, 'row')}"
    if pipeline and rules.stages:
        (busy, turns), stages = rules.turns, rules.num_shards(rules.stages)
        yield f"pipeline: {stages} stages, each of which computes in {busy} of {turns} turns; {flow(pipeline.plain)}"
    if rules.interleave > 1:
        yield f"interleave {rules.interleave}"
    others = {
        "expert_buffer": None if rules.expert_buffer == EXPERT_BUFFER else rules.expert_buffer,
        "unroll": rules.unroll,
        "attention": rules.attention,
        "compiler_options": rules.compiler_options,
        "dcn": rules.dcn,
        "context": None if rules.context == CONTEXTS[0] else rules.context,
    }
    yield from (f"{name} {flow(value)}" for name, value in others.items() if value)
