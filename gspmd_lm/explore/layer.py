"""One layer, forward and backward: its blocks with their times, and the collectives between them with their rows.

The collectives are those that the trace of the whole step must send, as the lower bound of `explain` counts them.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from gspmd_lm.explore.views import show_row
from gspmd_lm.foresight import table
from gspmd_lm.foresight.collectives import GATHER, OTHER, SCATTERED_SUM, SUM, Attribution
from gspmd_lm.foresight.graph import DataflowGraph
from gspmd_lm.foresight.propagation import Reading, Transfer, read_train
from gspmd_lm.foresight.table import PlacedArray
from gspmd_lm.plan.estimate import Estimator, OpTime
from gspmd_lm.sharding.op_names import LOSS, OpName
from gspmd_lm.sharding.rules import Rules
from gspmd_lm.train import state
from gspmd_lm.train.step import Step
from gspmd_lm.units import human_bytes, human_seconds

TRIFLE_BYTES = 1024  # what sends less is left out: sums of scalars
_DOES = {"all-gather": GATHER, "all-reduce": SUM, "reduce-scatter": SCATTERED_SUM}
_WORDS = {
    "all-gather": "gathered",
    "all-reduce": "summed",
    "reduce-scatter": "summed and split",
    "all-to-all": "exchanged",
    "ragged-all-to-all": "exchanged",
    "collective-permute": "sent on",
}


def read_layer(step: Step, estimator: Estimator, known: Mapping[str, int]) -> dict[str, Any]:
    """The layer view of a step, which is traced. known: the lines of the keys of its rules."""
    rules, arrays = step.rules, step.arrays
    reading = read_train(step)
    recorded = state.record_arrays(step.task, arrays, rules.microbatches, rules)
    placed = list(table.rows(step.task, rules, arrays, recorded.arrays, recorded.used))
    graph = DataflowGraph.from_recorder(recorded, arrays)
    view = _View(rules, placed, graph, estimator, known)
    return view.show(reading)


@dataclasses.dataclass
class _View:
    """A layer view that is being made."""

    rules: Rules
    placed: Sequence[PlacedArray]
    graph: DataflowGraph
    estimator: Estimator
    known: Mapping[str, int]

    @functools.cached_property
    def arrays(self) -> dict[str, PlacedArray]:
        """All arrays by their paths."""
        return {array.path: array for array in self.placed}

    @functools.cached_property
    def attribution(self) -> Attribution:
        """What finds the rows behind a transfer."""
        return Attribution(self.rules, {path: array.axes for path, array in self.arrays.items()}, self.graph)

    def show(self, reading: Reading) -> dict[str, Any]:
        names = self._blocks()
        blocks = [{"name": name, "phase": "forward", "ops": []} for name in names]
        blocks += [{"name": name, "phase": "backward", "ops": []} for name in reversed(names)]
        for timed in self.estimator.op_times(self.rules) if self.estimator.chip else ():
            name = _block_of_nodes(timed)
            if name in names:
                at, back = names.index(name), 2 * len(names) - 1 - names.index(name)
                for index, seconds in ((at, timed.forward_s), (back, timed.backward_s)):
                    if seconds:
                        one = {"name": timed.name, "seconds": seconds, "text": human_seconds(seconds)}
                        blocks[index]["ops"].append(one)
        return {"blocks": blocks, "collectives": list(self._collectives(reading, names))}

    def _blocks(self) -> list[str]:
        """The modules that have operations, in the order of the program: a layer's, and what stands around layers."""
        found = dict.fromkeys(_block(".".join(node.name.modules), node.name.owners) for node in self.graph.nodes)
        return [name for name in found if name]

    def _collectives(self, reading: Reading, names: Sequence[str]) -> Iterator[dict[str, Any]]:
        sent = [one for one in reading.transfers if one.phase != "optimizer" and one.bytes >= TRIFLE_BYTES]
        overlap, timed = self.estimator.overlap, self.estimator.chip is not None
        times = [overlap.transfer_s(self.rules, one) if timed else None for one in sent]
        shares = self._exposed_shares(sent, times)
        taken: collections.Counter[Any] = collections.Counter()
        for number, (one, seconds) in enumerate(zip(sent, times, strict=True)):
            block = _block(one.array)
            of_stack = any(name.startswith(f"{block}.") for name in names)
            if of_stack and one.kind == "all-gather":  # of the array between blocks: the next one reads it
                later = (_block(other.array) for other in sent[number:] if other.phase == one.phase)
                block = next((name for name in later if "." in name), block)
            if block not in names:
                continue
            array = self._array(one, taken)
            phase = "forward" if one.phase == "forward" else "backward"
            at = names.index(block) if phase == "forward" else 2 * len(names) - 1 - names.index(block)
            first = one.kind == "all-gather" or one.phase == "recomputation"
            rows = self._rows(one, array)
            yield {
                **describe_transfer(one, array or one.array, [show_row(row) for row in rows]),
                "phase": phase,
                "after": at - 1 if first else at,
                "seconds": seconds,
                "exposed_s": None if seconds is None else seconds * shares.get(one.mesh_axes, 0.0),
                "text": "" if seconds is None else human_seconds(seconds),
                "line": self.known.get(rows[0].key) if rows else None,
                "array": array or None,
            }

    def _exposed_shares(self, sent: Iterable[Transfer], times: Iterable[float | None]) -> dict[str, float]:
        """Mesh axes -> the exposed share of all transfers over them. The estimate does not know it of a single one."""
        total = collections.defaultdict[str, float](float)
        for one, seconds in zip(sent, times, strict=True):
            total[one.mesh_axes] += (seconds or 0.0) * one.times_per_step
        exposed = self.estimator.estimate(self.rules).exposed_by_axis
        return {axes: min(1.0, exposed.get(axes, 0.0) / seconds) for axes, seconds in total.items() if seconds}

    def _array(self, one: Transfer, taken: "collections.Counter[Any]") -> str:
        """The array that a transfer moves: a weight that is gathered is known by its shape, the next of those alike."""
        if one.array in self.arrays:
            is_gathered = one.kind == "all-gather" and not _same_size(self.arrays[one.array], one.shape)
            return "" if is_gathered else one.array  # of a product that is summed, its weight
        if one.kind != "all-gather":
            return ""
        weights = [array for array in self.placed if array.at_rest is not None]
        inside = [array for array in weights if array.path.startswith(f"{one.array}.")]
        exact = [array.path for array in inside if one.shape in (array.shape, array.shape[1:])]
        alike = exact or [array.path for array in inside or weights if _same_size(array, one.shape)]
        order = {name: number for number, name in enumerate(self.rules.vocabulary.weights)}
        alike.sort(key=lambda path: order.get(path.rpartition(".")[2], len(order)))
        if not alike:
            return ""
        key = one.phase, *alike
        taken[key] += 1
        return alike[(taken[key] - 1) % len(alike)]

    def _rows(self, one: Transfer, array: str) -> list[Any]:
        """The rows behind a transfer, by the rule with which `explain` attributes compiled collectives."""
        over = tuple(one.mesh_axes.split("+"))
        weights = self.graph.weights
        owners = _owners(one.array) if one.kind != "all-gather" or array not in weights else (array,)
        owners = tuple(path for path in owners if path in weights or path == LOSS)
        modules = () if owners else tuple(one.array.split("."))
        name = OpName(one.phase, modules, owners)
        weight = array if one.kind == "all-gather" and array in weights else ""
        if (
            one.kind == "reduce-scatter"
            and one.phase == "backward"
            and len(owners) == 1
            and owners[0] in self.arrays
            and _same_size(self.arrays[owners[0]], one.shape)  # it is the gradient of the weight
        ):
            name = dataclasses.replace(name, table="optimizer", array=owners[0])
        keys = self.attribution.rows(_DOES.get(one.kind, OTHER), name, over, weight, "")
        rows = [row for row in self.rules.rows if row.key in keys]
        split = [row for row in rows if {*over} & {*row.mesh_axes}]
        return split or rows


def describe_transfer(one: Transfer, name: str, rows: Sequence[str]) -> dict[str, Any]:
    """A transfer as a page shows it, without times. name: what is sent. rows: those that cause it."""
    cause = " because of " + " and ".join(f"`{row}`" for row in rows) if rows else ""
    again = ", computed again" if one.phase == "recomputation" else ""
    return {
        "kind": one.kind,
        "axis": one.mesh_axes,
        "bytes": one.bytes,
        "bytes_text": human_bytes(one.bytes),
        "times_per_step": one.times_per_step,
        "seconds": None,
        "exposed_s": None,
        "text": "",
        "row": rows[0] if rows else None,
        "rows": list(rows),
        "line": None,
        "source": one.source or None,
        "because": f"{name}{again}: {_WORDS.get(one.kind, one.kind)} over {one.mesh_axes}{cause}",
    }


def _owners(array: str) -> tuple[str, ...]:
    """The paths that 'layers.attention.wq+wk' names."""
    first, *others = array.split("+")
    module = first.rpartition(".")[0]
    return (first, *(other if "." in other else f"{module}.{other}".lstrip(".") for other in others))


def _same_size(array: PlacedArray, shape: Sequence[int]) -> bool:
    """Whether a shape has as many elements as an array, or as a layer of it."""
    return math.prod(shape) in (math.prod(array.shape), math.prod(array.shape[1:]))


def _block(path: str, owners: Sequence[str] = ()) -> str:
    """The block that a module or an array belongs to: layers.attention of layers.attention.wq."""
    if not path and owners:
        path = owners[0]
    parts = path.split("+")[0].split(".")
    return ".".join(parts[:2]) if len(parts) > 1 else path


def _block_of_nodes(timed: OpTime) -> str:
    """The block of an operation, by the first of its nodes that stands in one."""
    for node in timed.nodes:
        if name := _block(".".join(node.name.modules), node.name.owners):
            return name
    return ""
