"""The arrays of a layout without a compiler: as tables, as pictures of some of them, and as a page of all pictures."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from rich.columns import Columns
from rich.console import Console, Group
from rich.text import Text

from gspmd_lm.config import Config
from gspmd_lm.errors import InputError, did_you_mean
from gspmd_lm.foresight import table
from gspmd_lm.foresight.table import PlacedArray, Spec
from gspmd_lm.program.task import Task
from gspmd_lm.sharding.rules import Rules, describe_split
from gspmd_lm.sharding.shapes import Arrays, pairs
from gspmd_lm.show import arrays as tables
from gspmd_lm.show import blocks, comparison, html, svg
from gspmd_lm.show.document import Fact, Figure, Notes, Section
from gspmd_lm.train import decoder
from gspmd_lm.train.state import record_arrays
from gspmd_lm.units import human_bytes


@dataclasses.dataclass(frozen=True)
class DryRun:
    """All arrays of a layout, counted from shapes: nothing is compiled or allocated."""

    config: str
    layout: str
    mesh: Mapping[str, int]
    arrays: tuple[PlacedArray, ...]
    parameters: int
    trained: int  # of the parameters
    bytes_per_device: Mapping[str, int]  # of weights, optimizer state and gradients
    keys: tuple[str, ...]  # a line for each key of the rules file that changes what is computed where
    constraints: str  # on activations of a model that has some
    phase: str = "train"


def read(config: Config | Task, rules: Rules, arrays: Arrays) -> DryRun:
    """The dry run of filled and checked rules. arrays: those of the config or task."""
    recorder = record_arrays(config, arrays, rules.microbatches, rules)
    sizes = {
        "weights": ("weights", pairs(arrays.named_params, arrays.params)),
        "optimizer": ("optimizer", pairs(arrays.named_optimizer, arrays.optimizer)),
        "gradients": ("optimizer", pairs(arrays.named_trained, arrays.trained)),
    }
    constraints = ""
    if kinds := len(recorder.constraints):
        whole = len(recorder.unmapped_constraints)
        constraints = f"kinds of constraints on activations: {kinds}, {whole} of them without an axis that a row maps"
    return DryRun(
        config.name,
        rules.label,
        dict(rules.mesh),
        tuple(table.rows(config, rules, arrays, recorder.arrays, recorder.used)),
        arrays.parameter_count,
        arrays.trained_count,
        {name: sum(table.split_and_size(rules, key, *pair)[1] for pair in of) for name, (key, of) in sizes.items()},
        tuple(tables.keys(rules, decoder.task(config).rows)),
        constraints,
    )


def show(dry_run: DryRun, console: Console) -> None:
    """Prints the arrays of a layout and, per device, the totals of weights, optimizer state and gradients."""
    tables.show_tables(dry_run.arrays, console)
    mesh = Text(" x ").join(Text(f"{name}={size}", tables.COLOURS.get(name, "")) for name, size in dry_run.mesh.items())
    console.print(Text.assemble(f"{_title(dry_run)}: {_sizes(dry_run)}, mesh ", mesh), soft_wrap=True)
    for line in filter(None, (*dry_run.keys, dry_run.constraints)):
        console.print(line, soft_wrap=True, markup=False)
    console.print("bytes per device, counted, without activations and temporaries:")
    for name, size in (*dry_run.bytes_per_device.items(), ("sum", sum(dry_run.bytes_per_device.values()))):
        console.print(f"  {name:10} {size:>20,}  {human_bytes(size)}")


def _title(dry_run: DryRun) -> str:
    return f"{dry_run.config} under {dry_run.layout}"


def _sizes(dry_run: DryRun) -> str:
    trained = f" ({dry_run.trained:,} trained)" if dry_run.trained < dry_run.parameters else ""
    return f"{dry_run.parameters:,} parameters{trained}"


# Pictures


def find_arrays(dry_run: DryRun, names: Sequence[str]) -> list[PlacedArray]:
    """The arrays of some names, each the path of an array or its end. Raises InputError for a name of none."""
    found: dict[str, PlacedArray] = {}
    for name in names:
        matches = [array for array in dry_run.arrays if array.path == name or array.path.endswith(f".{name}")]
        if not matches:
            known = dict.fromkeys(array.path.rpartition(".")[2] for array in dry_run.arrays)
            raise InputError(
                f"--show={name}: no array is named {name}{did_you_mean(name, known)}\n  fix   one of {', '.join(known)}"
            )
        found |= {array.path: array for array in matches}
    return list(found.values())


def draw(dry_run: DryRun, names: Sequence[str], console: Console) -> None:
    """Prints the mesh and some arrays as coloured blocks, each with the numbers of the devices that hold it.

    Raises InputError for a name that no array has.
    """
    chosen = find_arrays(dry_run, names)
    console.print(Text(_title(dry_run), "bold"))
    for line in dry_run.keys:
        console.print(line, soft_wrap=True, markup=False)
    mesh = blocks.cut_mesh(dry_run.mesh)
    console.print(Group(Text(f"mesh: {mesh.directions}"), blocks.table(mesh)))
    for array in chosen:
        console.print(Text.assemble("\n", (array.path, "bold"), f"  {_about(array)}"))
        pictures = [
            Group(Text(f"{when}: {_placement(array, spec, cut)}"), Text(cut.directions, "dim"), blocks.table(cut))
            for when, spec in placements(array)
            for cut in [blocks.cut_array(array.axes, array.shape, spec, dry_run.mesh)]
        ]
        console.print(Columns(pictures, padding=(0, 4)))


def placements(array: PlacedArray) -> Iterator[tuple[str, Spec]]:
    """When an array is split, and by which mesh axes. What is split alike at several times stands once."""
    times: dict[Spec, list[str]] = {}
    states = (("at rest", array.at_rest), ("in use", array.in_use))
    for when, spec in (*states, ("optimizer state", array.optimizer and array.optimizer.split)):
        if spec is not None:
            times.setdefault(spec, []).append(when)
    yield from ((" and ".join(names), spec) for spec, names in times.items())


def _about(array: PlacedArray) -> str:
    """'layers 4, embed 128, heads 8; float32, 32.8 kB a device'"""
    sizes = ", ".join(f"{axis} {size:,}" for axis, size in zip(array.axes, array.shape, strict=True))
    return "; ".join(filter(None, (sizes, f"{array.dtype}, {human_bytes(array.bytes_per_device)} a device")))


def _placement(array: PlacedArray, spec: Spec, cut: blocks.Blocks) -> str:
    return f"{describe_split(array.axes, spec)}, {cut.about}"


def picture(dry_run: DryRun, names: Sequence[str]) -> str:
    """An SVG document of the mesh and of some arrays side by side: at rest, in use, and of their optimizer state.

    Raises InputError for a name that no array has.
    """
    mesh = blocks.cut_mesh(dry_run.mesh)
    panels = [blocks.Panel("mesh", dry_run.layout, "", mesh)]
    for array in find_arrays(dry_run, names):
        name, state = array.path.rpartition(".")[2], array.optimizer
        states = [("at rest", array.at_rest, array.bytes_per_device)] if array.at_rest is not None else []
        states.append(("in use", array.in_use, 0 if states else array.bytes_per_device))
        states += [("optimizer state", state.split, state.bytes_per_device)] if state else []
        for when, spec, size in states:
            cut = blocks.cut_array(array.axes, array.shape, spec, dry_run.mesh)
            held = f"{human_bytes(size)} a device" if size else ""
            panels.append(blocks.Panel(f"{name}, {when}", describe_split(array.axes, spec), held, cut))
    return blocks.picture(_title(dry_run), panels)


# Page


def page(dry_run: DryRun, command: str = "", warnings: Sequence[str] = ()) -> str:
    """The HTML of a page with a picture of each array. Without scripts it shows all but the mesh that one points at.

    command: what made the page, for readers who want to repeat it.
    """
    sizes = dry_run.bytes_per_device
    facts = [Fact(f"{name} on a device", human_bytes(size)) for name, size in sizes.items()]
    notes = [("warning", warning) for warning in warnings]
    notes += [("key", line) for line in filter(None, (*dry_run.keys, dry_run.constraints))]
    whole = Section("Layout", "counted", [Notes([("size", _sizes(dry_run)), *notes])], facts)
    content = [whole, comparison.mesh_section(dry_run, 0), _pictures(dry_run)]
    body = html.facts(content) + html.sections(content) + html.words()
    return html.page(f"{_title(dry_run)}, a dry run", command, body, comparison.data([dry_run]))


def _pictures(dry_run: DryRun) -> Section:
    mesh = blocks.cut_mesh(dry_run.mesh)
    drawn = [_figure("mesh", mesh.directions, [("devices by their numbers", blocks.drawing(mesh, "mesh"))])]
    for array in dry_run.arrays:
        cuts = [
            (when, spec, blocks.cut_array(array.axes, array.shape, spec, dry_run.mesh))
            for when, spec in placements(array)
        ]
        pictures = [
            (f"{when}: {_placement(array, spec, cut)}", blocks.drawing(cut, f"{array.path} {when}"))
            for when, spec, cut in cuts
        ]
        drawn.append(_figure(array.path, f"{_about(array)}. Drawn: {cuts[0][2].directions or 'one number'}", pictures))
    explained = (
        '<p class="legend">Each block has a colour of its own, and the numbers of the devices that hold it. Where '
        "several devices stand in one block, they hold copies of it.</p>"
    )
    return Section("Pictures", "counted", [Figure(explained + "".join(drawn))])


def _figure(name: str, about: str, pictures: Sequence[tuple[str, str]]) -> str:
    """An array with a picture of each of its placements side by side."""
    drawn = "".join(f"<div><p>{svg.text(caption)}</p>{picture}</div>" for caption, picture in pictures)
    caption = f"<figcaption><b>{svg.text(name)}</b> {svg.text(about)}</figcaption>"
    return f'<figure class="cuts">{caption}<div>{drawn}</div></figure>'
