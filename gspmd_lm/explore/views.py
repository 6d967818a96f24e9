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
        weight = one.at_rest is not None
        tables = ("weights", "rules") if weight else ("rules",)
        listed.append(
            _array(one.path, "weights" if weight else "activations", one.dtype, one.axes, one.shape)
            | {
                "at_rest": one.at_rest and [list(names) for names in one.at_rest],
                "in_use": [list(names) for names in one.in_use],
                "bytes_per_device": one.bytes_per_device,
                "bytes_text": human_bytes(one.bytes_per_device),
                "rows": deciding_rows(rules, tables, one.path, one.axes, known),
            }
        )
    for leaf, like in pairs(arrays.named_optimizer, arrays.optimizer):
        spec, size = table.split_and_size(rules, "optimizer", leaf, like)
        listed.append(
            _array(leaf.path, "optimizer", str(like.dtype), leaf.axes, like.shape)
            | {
                "at_rest": [list(names) for names in spec],
                "in_use": [list(names) for names in spec],
                "bytes_per_device": size,
                "bytes_text": human_bytes(size),
                "rows": deciding_rows(rules, ("optimizer",), leaf.path, leaf.axes, known),
            }
        )
    return listed


def _array(path: str, group: str, dtype: str, axes: Sequence[str], shape: Sequence[int]) -> dict[str, Any]:
    return {"path": path, "group": group, "dtype": dtype, "axes": list(axes), "shape": list(shape)}


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
