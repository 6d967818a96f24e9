"""The table of a layout: every array, how it is split, and the bytes that each device holds. Counted from shapes."""

import dataclasses
from collections.abc import Collection, Iterator
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from gspmd_lm.config import Config
from gspmd_lm.model.task import Task
from gspmd_lm.sharding import annotate
from gspmd_lm.sharding.placement import Named
from gspmd_lm.sharding.rules import Rules
from gspmd_lm.sharding.shapes import Activations, Arrays, pairs, placed
from gspmd_lm.train import decoder
from gspmd_lm.train.state import recorded
from gspmd_lm.units import human_bytes

Spec = tuple[tuple[str, ...], ...]


@dataclasses.dataclass(frozen=True)
class PlacedArray:
    """One array of a layout. A Spec has the mesh axes that split each dimension, the outermost first."""

    path: str
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    at_rest: Spec | None  # None for an activation
    in_use: Spec  # of a weight that the model does not place for use: as it rests
    bytes_per_device: int  # at rest; for an activation, in use


def rows(
    config: Config | Task, rules: Rules, arrays: Arrays, named: Activations, used: Collection[str] | None = None
) -> Iterator[PlacedArray]:
    """Every weight, and the activations `named`. `used`: paths of the weights that are placed for use; None: all."""
    task = decoder.task(config)
    dtypes = {spec.array: task.inputs[name].dtype for name, spec in task.specs().items()}
    dtypes |= dict.fromkeys(task.float32, "float32")
    for leaf, like in pairs(arrays.named_params, arrays.params):
        at_rest, held = _held(rules, "weights", leaf, like)
        placed = used is None or leaf.path in used
        in_use = rules.resolve("rules", leaf.path, leaf.axes, like.shape)[0] if placed else at_rest
        yield PlacedArray(leaf.path, leaf.axes, like.shape, at_rest, in_use, held)
    for name, (axes, shape) in named.items():
        like = jax.ShapeDtypeStruct(shape, dtypes.get(name, task.compute_dtype))
        yield PlacedArray(name, axes, shape, None, *_held(rules, "rules", Named(name, axes), like))


def show(config: Config | Task, rules: Rules, arrays: Arrays, console: Console) -> None:
    """Prints the arrays of a layout and, per device, the totals of weights, optimizer state and gradients."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("array", "logical axes", "shape", "at rest", "in use"):
        table.add_column(heading, overflow="fold")
    table.add_column("bytes per device", justify="right", no_wrap=True)
    weights = True
    recorder = recorded(config, arrays, rules.microbatches, rules)
    for row in rows(config, rules, arrays, recorder.arrays, recorder.used):
        if weights and row.at_rest is None:
            table.add_section()
        weights = row.at_rest is not None
        at_rest = "" if row.at_rest is None else split(row.axes, row.at_rest)
        path = annotate.CONSTRAINT if annotate.Spec(row.path, row.axes).is_constraint else row.path
        table.add_row(path, " ".join(row.axes), " x ".join(map(str, row.shape)), at_rest,
                      split(row.axes, row.in_use), f"{row.bytes_per_device:,}")  # fmt: skip
    console.print(table)
    console.print()
    totals = {
        "weights": [_held(rules, "weights", *pair)[1] for pair in pairs(arrays.named_params, arrays.params)],
        "optimizer": [_held(rules, "optimizer", *pair)[1] for pair in pairs(arrays.named_optimizer, arrays.optimizer)],
        "gradients": [_held(rules, "optimizer", *pair)[1] for pair in pairs(arrays.named_trained, arrays.trained)],
    }
    mesh = " x ".join(f"{name}={size}" for name, size in rules.mesh.items())
    some = arrays.trained_count < arrays.parameter_count
    trained = f" ({arrays.trained_count:,} trained)" if some else ""
    parameters = f"{arrays.parameter_count:,} parameters{trained}"
    console.print(f"{config.name} under {rules.path}: {parameters}, mesh {mesh}", soft_wrap=True)
    if rules.stages:
        (busy, turns), stages = rules.turns, rules.num_shards(rules.stages)
        console.print(f"pipeline: {stages} stages, each of which computes in {busy} of {turns} turns")
    if kinds := len(recorder.constraints):
        whole = len(recorder.unmapped)
        console.print(f"kinds of constraints on activations: {kinds}, {whole} of them without an axis that a row maps")
    console.print("bytes per device, counted:")
    for name, held in totals.items():
        console.print(f"  {name:10} {sum(held):>20,}  {human_bytes(sum(held))}")
    everything = sum(map(sum, totals.values()))
    console.print(f"  {'sum':10} {everything:>20,}  {human_bytes(everything)}, activations and temporaries not counted")


def _held(rules: Rules, table: str, leaf: Named, like: Any) -> tuple[Spec, int]:
    spec, held_bytes = placed(rules, table, leaf, like)
    return spec, int(held_bytes)


def split(axes: tuple[str, ...], spec: Spec) -> str:
    """The split dimensions of an array as 'embed/fsdp heads/tensor'; 'replicated' if there are none."""
    parts = [f"{axis}/{'+'.join(names)}" for axis, names in zip(axes, spec, strict=True) if names]
    return " ".join(parts) or "replicated"
