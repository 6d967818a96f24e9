"""What each row in which two layouts differ changes: collectives, arrays, memory and time, estimated at once.

The rows are applied one after the other, from the first layout to the second. Nothing is compiled.
"""

import collections
import copy
import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gspmd_lm.config import Config
from gspmd_lm.foresight import table
from gspmd_lm.foresight.explain import settle_layout
from gspmd_lm.foresight.table import PlacedArray, Spec
from gspmd_lm.hardware.target import Target
from gspmd_lm.plan.estimate import Estimate, Estimator
from gspmd_lm.plan.transfers import EstimatedTransfer
from gspmd_lm.program.task import Task
from gspmd_lm.sharding import rules_file
from gspmd_lm.sharding.problems import flow
from gspmd_lm.sharding.rules import TABLES, Rules
from gspmd_lm.train import state

SCHEMA = 1  # of the JSON: counted up when a key changes its meaning or goes away


@dataclasses.dataclass(frozen=True)
class RowChange:
    """One row or key of a rules file in which two layouts differ."""

    key: str  # rules.residual.seq, remat
    before: str | None  # as the file writes the value; None where the file does not have the key
    after: str | None

    def __str__(self) -> str:
        if self.before is None:
            return f"+ {self.key}: {self.after}"
        return f"- {self.key}: {self.before}" if self.after is None else f"~ {self.key}: {self.before} -> {self.after}"


@dataclasses.dataclass(frozen=True)
class CollectiveChange:
    """The collectives of one kind, over the same mesh axes and for the same purpose, which became more or fewer."""

    collective: str  # all-gather, reduce-scatter, all-reduce, all-to-all or collective-permute
    axes: str  # fsdp, or fsdp+tensor
    purpose: str  # weights, gradients, activations, keys, stages or waiting, as in `EstimatedTransfer`
    in_layers: bool  # whether the loop over layers sends them
    times_before: int  # in a step; 0 where there were none
    times_after: int
    bytes_before: int  # that one device sends in a step
    bytes_after: int


@dataclasses.dataclass(frozen=True)
class ArrayChange:
    """An array that is split otherwise than before. One side is None where only the other layout places the array."""

    before: PlacedArray | None
    after: PlacedArray | None

    @property
    def path(self) -> str:
        array = self.after or self.before
        assert array
        return array.path


@dataclasses.dataclass(frozen=True)
class Change:
    """What some rows change together. They are several where the first of them gives no layout without the others."""

    rows: tuple[RowChange, ...]
    collectives: tuple[CollectiveChange, ...]
    arrays: tuple[ArrayChange, ...]
    before: Estimate
    after: Estimate


@dataclasses.dataclass(frozen=True)
class RowComparison:
    """All changes from one layout to another, in the order in which they were applied."""

    config: str
    target: str
    timed: bool  # whether the target has times; else those of the estimates are 0
    limit_bytes: int | None  # of a device's memory; None for simulated devices
    before: str  # the names of the two layouts
    after: str
    estimates: tuple[Estimate, Estimate]  # of the two layouts
    changes: tuple[Change, ...]


_TransferKey = tuple[str, str, str, bool]  # the first four fields of a CollectiveChange


@dataclasses.dataclass(frozen=True)
class _Layout:
    """A layout that can stand alone: filled and checked rules, with what the changes are read from."""

    estimate: Estimate
    transfers: Mapping[_TransferKey, tuple[int, int]]  # times, bytes
    arrays: Mapping[str, tuple[PlacedArray, Any]]  # path -> the array, and all that says how it is split


def compare_rows(
    computed: Config | Task, before: Rules, after: Rules, target: Target, estimator: Estimator | None = None
) -> RowComparison:
    """The changes from the layout `before` to the layout `after`, row by row.

    Args:
        computed: what is computed.
        before: rules as they were loaded; a -1 in their mesh is filled from the target.
        after: those to compare them with.
        target: the hardware, which need not be here.
        estimator: of `computed` and `target`, which keeps its traces; None: a new one.

    Raises:
        ShardingError: everything in one of the two files that does not fit the model or the target.
    """
    estimator = estimator or Estimator(computed, target)
    layouts = [_checked_layout(estimator, rules) for rules in (before, after)]
    first, last = layouts
    filled = [rules.fill(target.devices) for rules in (before, after)]
    idle = _idle_axes(filled[1])
    raw, wanted = map(rules_file.to_dict, filled)
    changes, waiting, differing = list[Change](), list[RowChange](), [*_differing_rows(raw, wanted)]
    for number, (path, row) in enumerate(differing, 1):
        waiting.append(row)
        _set(raw, path, wanted)
        layout = last if number == len(differing) else _layout_alone(estimator, raw, before, idle)
        if layout:
            changes.append(_change(waiting, first, layout))
            first, waiting = layout, []
    chip = target.chip
    return RowComparison(
        estimator.traces.task.name,
        target.text,
        chip is not None,
        chip and chip.usable_hbm_bytes,
        before.label,
        after.label,
        (layouts[0].estimate, layouts[1].estimate),
        tuple(changes),
    )


def to_json(comparison: RowComparison) -> dict[str, Any]:
    """The plain values of a comparison, which `compare --rows --json` writes."""
    return {"schema": SCHEMA, **json.loads(json.dumps(dataclasses.asdict(comparison)))}


# Rows


def _differing_rows(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], RowChange]]:
    """The path and the change of each row or key that differs: the mesh first, then rows that go, then all others."""
    flat = [dict(_flat(values)) for values in (before, after)]
    paths = [path for path in dict.fromkeys((*flat[0], *flat[1])) if flat[0].get(path) != flat[1].get(path)]

    def order(path: tuple[str, ...]) -> int:
        section, *row = path
        return 0 if section in ("mesh", "dcn") else 3 if not row else 1 if path not in flat[1] else 2

    for path in sorted(paths, key=order):
        yield path, RowChange(".".join(path), flat[0].get(path), flat[1].get(path))


def _flat(values: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], str]]:
    """The path of each row of a table, and of each other key, with the value as a file writes it."""
    for section, value in values.items():
        if section in TABLES:
            yield from (((section, row), flow(entry)) for row, entry in value.items())
        else:
            yield (section,), flow(value)


def _set(raw: dict[str, Any], path: tuple[str, ...], wanted: Mapping[str, Any]) -> None:
    """Gives one row or key of `raw` the value that it has in `wanted`, or takes it away where `wanted` has none."""
    section, *row = path
    source, values = wanted, raw
    if row:
        values = raw[section] = dict(raw.get(section, {}))
        source = wanted.get(section, {})
    key = path[-1]
    if key in source:
        values[key] = copy.deepcopy(source[key])
    else:
        del values[key]


# Layouts


def _checked_layout(estimator: Estimator, rules: Rules) -> _Layout:
    target = estimator.target
    filled = rules.fill(target.devices, f"a target of {{known}} devices: {target.text} has {target.devices}")
    state.arrays_and_warnings(estimator.traces.task, filled, target.platform)
    return _layout(estimator, filled)


def _layout_alone(estimator: Estimator, raw: Mapping[str, Any], like: Rules, idle: set[str]) -> _Layout | None:
    """The layout of some plain values; None if they do not fit together, or leave other mesh axes than `idle` idle."""
    rules = rules_file.from_dict(raw, like.path, vocabulary=like.vocabulary)
    if rules.problems:
        return None
    rules = rules.fill(estimator.target.devices)
    if rules.problems or _idle_axes(rules) - idle or estimator.traces.problems(rules, estimator.target.platform):
        return None
    return _layout(estimator, rules)


def _idle_axes(rules: Rules) -> set[str]:
    """The mesh axes of filled rules that no row names: their devices all compute the same."""
    return {name for name, size in rules.mesh.items() if size > 1} - {
        name for row in rules.rows for name in row.mesh_axes
    }


def _layout(estimator: Estimator, filled: Rules) -> _Layout:
    traces = estimator.traces
    rules = settle_layout(traces.task, filled, estimator.target)
    recorder = state.record_arrays(traces.task, traces.arrays, rules.microbatches, rules)
    arrays = table.rows(traces.task, rules, traces.arrays, recorder.arrays, recorder.used)
    return _Layout(
        estimator.estimate(rules),
        _sum_transfers(estimator.transfers(rules)),
        {array.path: (array, _splits(array, rules)) for array in arrays},
    )


def _splits(array: PlacedArray, rules: Rules) -> Any:
    """The splits of an array at rest, in use and of its optimizer state, each mesh axis with its size."""

    def with_sizes(spec: Spec | None) -> Any:
        return spec and [[(name, rules.mesh[name]) for name in names] for names in spec]

    return with_sizes(array.at_rest), with_sizes(array.in_use), with_sizes(array.optimizer and array.optimizer.split)


def _sum_transfers(transfers: Sequence[EstimatedTransfer]) -> Mapping[_TransferKey, tuple[int, int]]:
    times, sizes = collections.Counter[_TransferKey](), collections.defaultdict[_TransferKey, float](float)
    for one in transfers:
        key = one.collective, one.axes, one.kind, one.in_loop
        times[key] += one.times_per_step
        sizes[key] += one.bytes * one.times_per_step
    return {key: (times[key], round(sizes[key])) for key in times}


def _change(rows: Sequence[RowChange], before: _Layout, after: _Layout) -> Change:
    keys = dict.fromkeys((*before.transfers, *after.transfers))
    counts = {key: (before.transfers.get(key, (0, 0)), after.transfers.get(key, (0, 0))) for key in keys}
    collectives = [
        CollectiveChange(*key, was[0], becomes[0], was[1], becomes[1])
        for key, (was, becomes) in counts.items()
        if was != becomes
    ]
    paths = dict.fromkeys((*before.arrays, *after.arrays))
    placed = {path: (before.arrays.get(path, (None, None)), after.arrays.get(path, (None, None))) for path in paths}
    arrays = [ArrayChange(was[0], becomes[0]) for was, becomes in placed.values() if was[1] != becomes[1]]
    return Change(tuple(rows), tuple(collectives), tuple(arrays), before.estimate, after.estimate)
