"""The arrays and the mesh of a layout, as plain values that a page draws."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gspmd_lm.foresight import table
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
        found = deciding_rows(rules, tables, one.path, one.axes, known)
        splits, size = (one.at_rest, one.in_use), one.bytes_per_device
        listed.append(describe_array(one.path, group, one.dtype, one.axes, one.shape, *splits, size, found))
    for leaf, like in pairs(arrays.named_optimizer, arrays.optimizer):
        spec, size = table.split_and_size(rules, "optimizer", leaf, like)
        found = deciding_rows(rules, ("optimizer",), leaf.path, leaf.axes, known)
        listed.append(
            describe_array(leaf.path, "optimizer", like.dtype, leaf.axes, like.shape, spec, spec, size, found)
        )
    return listed


def describe_array(
    path: str,
    group: str,
    dtype: Any,
    axes: Sequence[str],
    shape: Sequence[int],
    at_rest: Sequence[Sequence[str]] | None,
    in_use: Sequence[Sequence[str]],
    size_bytes: int,
    rows: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """An array as a page draws it. size_bytes: on one device. rows: those that decide how it is split."""
    return {
        "path": path,
        "group": group,
        "dtype": str(dtype),
        "axes": list(axes),
        "shape": list(shape),
        "at_rest": None if at_rest is None else [list(names) for names in at_rest],
        "in_use": [list(names) for names in in_use],
        "bytes_per_device": size_bytes,
        "bytes_text": human_bytes(size_bytes),
        "rows": list(rows),
    }


def deciding_rows(
    rules: Rules, tables: Iterable[str], path: str, axes: Sequence[str], known: Mapping[str, int]
) -> list[dict[str, Any]]:
    """The rows that decide how the dimensions of an array are split. known: the lines of keys."""
    found: dict[tuple[int, str], dict[str, Any]] = {}
    for name in tables:
        for dimension, axis in enumerate(axes):
            if row := rules.row(name, path, axis):
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
