"""The arrays and the mesh of a layout, as plain values that a page draws."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gspmd_lm.foresight import table
from gspmd_lm.foresight.table import PlacedArray
from gspmd_lm.program.task import Task
from gspmd_lm.sharding.problems import flow
from gspmd_lm.sharding.rules import Row, Rules
from gspmd_lm.sharding.shapes import Arrays, pairs
from gspmd_lm.train import state
from gspmd_lm.units import human_bytes

MOST_DEVICES = 512  # that are shown


def list_arrays(task: Task, rules: Rules, arrays: Arrays, known: Mapping[str, int]) -> list[dict[str, Any]]:
    """Weights, optimizer state and activations: how each is split, by which rows, and its bytes on a device."""
    recorder = state.record_arrays(task, arrays, rules.microbatches, rules)
    listed = []
    for one in table.rows(task, rules, arrays, recorder.arrays, recorder.used):
        group, tables = ("activations", ("rules",)) if one.at_rest is None else ("weights", ("weights", "rules"))
        listed.append(describe_array(one, group, deciding_rows(rules, tables, one, known)))
    for leaf, like in pairs(arrays.named_optimizer, arrays.optimizer):
        spec, size = table.split_and_size(rules, "optimizer", leaf, like)
        one = PlacedArray(leaf.path, leaf.axes, like.shape, spec, spec, size, str(like.dtype))
        listed.append(describe_array(one, "optimizer", deciding_rows(rules, ("optimizer",), one, known)))
    return listed


def describe_array(array: PlacedArray, group: str, rows: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """An array as a page draws it. rows: those that decide how it is split."""
    return {
        "path": array.path,
        "group": group,
        "dtype": array.dtype,
        "axes": array.axes,
        "shape": array.shape,
        "at_rest": array.at_rest,
        "in_use": array.in_use,
        "bytes_per_device": array.bytes_per_device,
        "bytes_text": human_bytes(array.bytes_per_device),
        "rows": rows,
    }


def deciding_rows(
    rules: Rules, tables: Iterable[str], array: PlacedArray, known: Mapping[str, int]
) -> list[dict[str, Any]]:
    """The rows that decide how the dimensions of an array are split. known: the lines of keys."""
    found: dict[tuple[int, str], dict[str, Any]] = {}
    for name in tables:
        for dimension, axis in enumerate(array.axes):
            if row := rules.row(name, array.path, axis):
                shown = {"dim": dimension, "line": known.get(row.key), "row": show_row(row), "table": name}
                found.setdefault((dimension, row.key), shown)
    return list(found.values())


def show_row(row: Row) -> str:
    """'weights: embed: fsdp'"""
    names = list(row.mesh_axes)
    target = flow(None if not names else names[0] if len(names) == 1 else names)
    return f"{row.table}: {row.key.removeprefix(f'{row.table}.')}: {target}"


def show_mesh(sizes: Mapping[str, int], where: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """The mesh axes, and the devices in the order of the mesh: where each of them is, and its place in the mesh.

    where: the ids, hosts and slices of the devices, as `target.numbered_locations` has them.
    """
    places = itertools.islice(itertools.product(*map(range, sizes.values())), MOST_DEVICES)
    devices = [
        {"id": where["ids"][n], "host": where["hosts"][n], "slice": where["slices"][n], "coords": list(place)}
        for n, place in enumerate(places)
    ]
    left_out = len(where["ids"]) - len(devices)
    axes = [{"name": name, "size": size} for name, size in sizes.items()]
    return {"axes": axes, "devices": devices, **({"devices_left_out": left_out} if left_out else {})}
