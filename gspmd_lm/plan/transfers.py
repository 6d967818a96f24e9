"""The communication volume of a train step, as `plan` estimates it for many layouts from one trace.

What is sent to bring arrays from one sharding to another follows by logic on axes alone:

  an axis that a matmul sums over is split       its partial sums are reduced: scattered where the result is split
                                                 over the same mesh axis, else reduced to all
  an array is stored split, and is used whole    it is gathered
  a mesh axis splits another dimension in use    its devices exchange pieces, all to all

Scalars are left out, and what optimizers such as muon or adafactor sum over a split matrix. `explain` reads the trace
of each step instead (foresight/propagation): on two busy cores that took 102 ms for a layout, and this count 2.7 ms
(`python -m benchmarks.plan pricing`). tests/plan/test_sent.py compares the two.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from gspmd_lm.foresight.bounds import FLOAT32_BYTES
from gspmd_lm.foresight.graph import OUT, Matmul, Node
from gspmd_lm.foresight.propagation.sharding import reshard
from gspmd_lm.model.parts.latent import K_ROPE, KV_LATENT
from gspmd_lm.plan.traces import Part
from gspmd_lm.sharding.op_names import LOSS
from gspmd_lm.sharding.shapes import Arrays, pairs

Sharding = Mapping[str, tuple[str, ...]]  # logical axis -> the mesh axes that split it
Volume = Mapping[tuple[str, str], float]  # kind of collective, mesh axes -> the bytes that one device sends

SENT_ON = "collective-permute"  # what stages send to the next one
_INT32_BYTES = 4
OF_KEYS = {spec.partition(":")[0] for spec in (KV_LATENT, K_ROPE)}  # what keys of latent attention are made from


def mesh_axes(sharding: Sharding, *axes: str) -> set[str]:
    """The mesh axes that split some logical axes; all of them where none is named."""
    return {name for axis in axes or sharding for name in sharding.get(axis, ())}


def mesh_axes_except(sharding: Sharding, *axes: str) -> set[str]:
    """The mesh axes that split the other logical axes."""
    return {name for axis, names in sharding.items() if axis not in axes for name in names}


class EstimatedTransfer(NamedTuple):
    """A transfer of one device over some mesh axes, one or more times in a step."""

    kind: str  # weights, gradients, activations, or keys that go round beside attention
    axes: str  # mesh axes: fsdp, or fsdp+tensor
    bytes: float  # sent each time
    times_per_step: int
    in_loop: bool  # in a loop of the model, such as that over its layers
    collective: str  # all-gather, reduce-scatter, all-reduce, all-to-all or collective-permute


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A parameter, and its sharding in each of the three tables of the rules."""

    path: str
    sizes: Mapping[str, int]  # by logical axis
    itemsize: int
    storage: Sharding  # table `weights`
    compute: Sharding  # table `rules`
    gradient: Sharding  # table `optimizer`
    trained: bool

    @property
    def elements(self) -> int:
        return math.prod(self.sizes.values())


class Transfers:
    """The transfers of one device in a step: `all`. `ModelTransfers` adds them.

    forward_alone: whether they are those of a second forward pass of a part.
    """

    def __init__(self, part: Part, arrays: Arrays, forward_alone: bool = False):
        self.part, self.rules, self.graph = part, part.rules, part.graph
        self.forward_alone = forward_alone
        self.sharding = functools.cache(self._sharding)
        rules, self.microbatches = part.rules, part.rules.microbatches
        self.saved = {*rules.remat.save, *rules.remat.offload}  # names of activations
        self.reduced_last = {*part.reduced_last}
        self.all: list[EstimatedTransfer] = []
        self.weights: dict[str, Parameter] = {}
        trained = frozenset() if forward_alone else self.graph.trained
        for leaf, like in pairs(arrays.named_params, arrays.params):
            tables = ("weights", "rules", "optimizer")
            specs = (rules.resolve(table, leaf.path, leaf.axes, like.shape)[0] for table in tables)
            shardings = (dict(zip(leaf.axes, spec, strict=True)) for spec in specs)
            sizes, itemsize = dict(zip(leaf.axes, like.shape, strict=True)), like.dtype.itemsize
            self.weights[leaf.path] = Parameter(leaf.path, sizes, itemsize, *shardings, trained=leaf.path in trained)
        self.matmuls = [matmul for matmul in self.graph.matmuls if part.has(matmul.path)]
        self.matmul_inputs = {matmul.input for matmul in self.matmuls if not self.is_head(matmul)}
        self.used = {path: nodes for path, nodes in self.graph.placements_in_use.items() if part.has(path)}

    def add_update(self) -> None:
        """Adds the last sums of gradients, and what the update of the weights sends."""
        part, step, pipeline = self.part, self.part.step_rules, self.part.step_rules.pipeline
        reduced_last, self.reduced_last = self.reduced_last, set()
        if part.of_stages and step.microbatches == 1:  # of several microbatches, everything is summed below
            self.add_sums_of_turns(reduced_last)
        if part.of_stages or self.forward_alone:
            return
        by_all = {*step.stages} if pipeline and pipeline.schedule == "1f1b" else set()  # stages with gradients of it
        for weight in self.weights.values():
            if not weight.trained:
                continue
            gradient_bytes = weight.elements * FLOAT32_BYTES
            if part.has(weight.path) or step.microbatches > 1:
                last = reduced_last | by_all
                self.add(self.volume(gradient_bytes, weight.gradient, weight.gradient, last), 1, "gradients")
            # The update runs in the sharding of the optimizer's state; its result goes to that of stored weights.
            self.add(self.volume(weight.elements * weight.itemsize, weight.gradient, weight.storage), 1, "weights")

    def add_sums_of_turns(self, replicas: set[str]) -> None:
        """Adds the sums over replicas of the gradients that a stage has added up in its turns."""
        pipeline = self.part.step_rules.pipeline
        for weight in self.weights.values():
            if weight.trained and self.part.has(weight.path):
                itemsize = FLOAT32_BYTES if pipeline and pipeline.schedule == "1f1b" else weight.itemsize
                gradient_bytes = weight.elements * itemsize
                self.add_once(self.volume(gradient_bytes, weight.gradient, weight.gradient, replicas), "gradients", 1)

    def has_gradient(self, node: Node | None) -> bool:
        """Whether an array depends on anything that is trained."""
        return not self.forward_alone and node in self.graph.differentiable

    def in_turns(self, transfer: EstimatedTransfer) -> EstimatedTransfer:
        """A transfer as the stages of a pipeline make it: in each of their turns they compute one part of the layers.

        `transfer` is what a microbatch would send in all layers. If a loop sends it, it is a part for each layer.
        """
        runs, turns = self.part.runs / self.microbatches, self.part.turns
        if transfer.in_loop:
            return transfer._replace(times_per_step=round(transfer.times_per_step * runs))
        return transfer._replace(times_per_step=turns, bytes=transfer.bytes * self.part.runs / turns)

    def add_stages(self, residual: Node) -> None:
        """Adds what stages send to each other: see sharding/pipeline.py."""
        step, stages = self.part.step_rules, self.part.step_rules.stages
        assert step.pipeline
        over, count, repeats = self.axes_key(stages), step.num_shards(stages), step.pipeline.repeats
        row_bytes = residual.bytes / self.rules.num_shards(mesh_axes(self.sharding(residual)))
        # Rows go to the next stage, and rows that wait to the one before, in each turn; and so do their gradients. The
        # last turn is followed by an exchange of those that wait.
        self.all.append(EstimatedTransfer("stages", over, row_bytes, 2 * self.part.turns, True, SENT_ON))
        if step.pipeline.schedule == "gpipe":
            waiting = 2 * (self.part.turns + step.microbatches)
            self.all.append(EstimatedTransfer("waiting", over, row_bytes, waiting, True, SENT_ON))
        sent_parts = sum(part // repeats != part % count for part in range(count * repeats)) / (count * repeats)
        for weight in self.weights.values():  # parts of the layers go where they are computed, and gradients back
            if repeats > 1 and self.part.has(weight.path):
                for sharding in (weight.storage, weight.gradient)[: 1 + weight.trained]:
                    local_bytes = weight.elements * weight.itemsize / self.rules.num_shards(mesh_axes(sharding))
                    self.add_once({(SENT_ON, over): sent_parts * local_bytes}, "weights", step.microbatches)

    def _sharding(self, node: Node) -> dict[str, tuple[str, ...]]:
        """The sharding of an activation. Key positions are called seq, for both come from the block's input."""
        assert node.placed
        array, axes, _ = node.placed
        spec = self.rules.resolve("rules", array, axes, node.shape)[0]
        return {"seq" if axis == "kv_seq" else axis: names for axis, names in zip(axes, spec, strict=True)}

    def changes(self, node: Node) -> int:
        """How often the values of an array change in a microbatch. A loop that only places it anew changes none."""
        origin = node
        while origin.primitive == "name":
            origin = origin.inputs[0]
        of_loop = origin.primitive == "carry" or origin.shape != node.shape  # carried on, or taken apart
        return node.trip_count if of_loop else origin.trip_count

    def sharding_of_queries(self, keys: Node) -> Sharding:
        """The sharding of the queries that read keys or values; empty for other activations."""
        if not keys.placed or "kv_seq" not in keys.placed.axes:
            return {}
        queries = [node for node in self.graph.combined_with(keys) if node.placed and "seq" in node.placed.axes]
        return self.sharding(queries[0]) if queries else {}

    def is_head(self, matmul: Matmul) -> bool:
        """Whether a matmul gives the logits: it is a part of the loss."""
        return LOSS in matmul.node.name.owners

    def transfer(
        self,
        size_bytes: float,
        source: Sharding,
        target: Sharding,
        summed_over: Iterable[str] = (),
        times: int = 1,
        kind: str = "activations",
    ) -> None:
        """Adds what a device sends to bring an array from one sharding to another, `times` in each microbatch.

        size_bytes: of the whole array. summed_over: the mesh axes over which the array is a partial sum. A device first
        drops what its target shard does not have, which costs nothing.
        """
        self.add(self.volume(size_bytes, source, target, summed_over), self.microbatches * times, kind, times > 1)

    def add_exchange(
        self,
        array: Node,
        size_bytes: float,
        own: Sharding,
        computed: Sharding,
        summed_over: Iterable[str] = (),
        query_axes: Iterable[str] = (),
        heads: str = "",
        ring: bool = False,
    ) -> None:
        """Adds what brings an array of a split sequence to the devices whose attention reads it, and its gradient back.

        Each query reads all keys and values: they are gathered, or passed round a ring, and once more for gradients.
        With ulysses, a device has all tokens of some heads instead: its queries go there as keys do, and results come
        back. `computed` and `summed_over` are those of the matmul that gives the array, and `own` is the sharding by
        tokens. heads: the axis that ulysses splits further; "" without it. query_axes: what splits the queries.
        """
        times = array.trip_count
        has_gradient, remat = self.has_gradient(array), self.rules.remat.policy != "none"
        if heads:
            self.transfer(size_bytes, computed, own, summed_over, times)
            by_heads = {**own, "seq": (), heads: (*own.get(heads, ()), *own["seq"])}
            again = has_gradient and remat and not (array.array == OUT and OUT in self.saved)
            for _ in range(1 + has_gradient + again):
                self.transfer(size_bytes, own, by_heads, times=times)
            return
        whole, kind = {**own, "seq": ()}, "keys" if ring else "activations"
        self.transfer(size_bytes, computed, whole, summed_over, times, kind)
        if not has_gradient:
            return
        self.transfer(size_bytes, whole, own, query_axes, times, kind)
        if remat or ring:
            self.transfer(size_bytes, own, whole, (), times, kind)
        if ring and remat and OUT not in self.saved and (turns := self.rules.num_shards(own["seq"])) > 1:
            # Recomputation goes round the ring too. What it passes on first, gradients need first.
            self.transfer(size_bytes * (turns - 2) / (turns - 1), own, whole, (), times, kind)

    def gather_vectors(self, vectors: Node, times: int) -> bool:
        """Adds `times` gathers of the vectors that keys are made from, and one reduction of their gradients.

        Returns whether these vectors are gathered at all.
        """
        whole, names = vectors, {vectors.array} & OF_KEYS
        while same := [near for near in self.graph.after([whole]) if near.array in names and near is not whole]:
            whole = same[0]
        if not whole.placed or "kv_seq" not in whole.placed.axes:
            return False
        split, gathered = self.sharding(vectors), self.sharding(whole)
        for _ in range(times):
            self.transfer(whole.bytes, split, gathered, times=whole.trip_count)
        if self.has_gradient(vectors):
            self.transfer(whole.bytes, gathered, split, mesh_axes(split, "seq"), whole.trip_count)
        return True

    def add_look_up(
        self, table: Parameter, rows: Node, small: Iterable[Parameter] = (), is_gathered: bool = False
    ) -> None:
        """Adds the look-up in a table of what is placed as `rows`, forward and backward: see `matmuls.look_up`.

        small: tables whose rows are added, such as learned positions; their gradients are added here too. is_gathered:
        whether the table is gathered anyway, as a tied one for the logits. Its two gradients are reduced apart.
        """
        ids, *_, width = table.sizes
        placed, row_axes, known_over = self.sharding(rows), table.compute[ids], set[str]()
        token_axes, column_axes = mesh_axes_except(placed, *table.sizes), mesh_axes(table.storage, width)
        if row_axes:
            found = {axis: tuple(name for name in names if name not in row_axes) for axis, names in placed.items()}
            self.gather(table, 0 if is_gathered else rows.itemsize)
            self.transfer(rows.bytes, found, placed, row_axes)
            if table.trained:
                self.transfer(rows.bytes, placed, found)
        else:
            # Either rows are looked up where the table is stored, for which the ids of other devices are needed, or the
            # table is gathered.
            looked_up_where_stored = self.volume(rows.bytes, {width: tuple(column_axes)}, placed)
            at_rest = [looked_up_where_stored, self.token_ids(rows, token_axes, column_axes & token_axes)]
            # A table that is looked up where it rests is not cast.
            itemsize = rows.itemsize if is_gathered else table.itemsize
            gathered = [self.volume(table.elements * itemsize, table.storage, {})]
            way = self.add_cheapest(at_rest, gathered, free=gathered if is_gathered else None)
            known_over = column_axes if way is at_rest else set()  # mesh axes over which ids are gathered already
        # Either the gradients of the tables are reduced, or the gradient of the rows is sent to the devices that hold
        # its columns, and is summed there.
        gradients = [(table, FLOAT32_BYTES)] if table.trained else []
        gradients += [(other, rows.itemsize) for other in small if other.trained]
        shared_axes = set() if row_axes else mesh_axes(table.gradient, width) & token_axes
        remaining = {axis: tuple(name for name in names if name not in shared_axes) for axis, names in placed.items()}
        by_columns = {width: tuple(shared_axes)}
        gradients_reduced = [
            self.volume(like.elements * itemsize, {ids: like.compute.get(ids, ())}, like.gradient, token_axes)
            for like, itemsize in gradients
        ]
        rows_sent = [
            self.volume(rows.bytes, placed, {**remaining, **by_columns}),
            self.token_ids(rows, token_axes, shared_axes - known_over),
        ]
        rows_sent += [
            self.volume(like.elements * itemsize, by_columns, like.gradient, token_axes - shared_axes)
            for like, itemsize in gradients
        ]
        self.add_cheapest(gradients_reduced, *([rows_sent] if shared_axes and gradients else []))

    def token_ids(self, rows: Node, token_axes: set[str], gathered_axes: set[str]) -> Volume:
        """The ids of some rows, gathered over some of the mesh axes that split them."""
        ids_bytes, other_axes = math.prod(rows.shape[:-1]) * _INT32_BYTES, token_axes - gathered_axes
        return self.volume(ids_bytes, {"batch": (*gathered_axes, *other_axes)}, {"batch": tuple(other_axes)})

    def add_cheapest(self, *ways: list[Volume], times: int = 1, free: list[Volume] | None = None) -> list[Volume]:
        """Returns the cheapest of several ways, and adds what it sends; nothing if it is `free`, added elsewhere."""
        cheapest = min(ways, key=lambda way: sum(sum(volume.values()) for volume in way))
        for volume in [] if cheapest is free else cheapest:
            self.add(volume, self.microbatches * times, in_loop=times > 1)
        return cheapest

    def add(self, volume: Volume, times_per_step: int, kind: str = "activations", in_loop: bool = False) -> None:
        transfers = [
            EstimatedTransfer(kind, axes, size_bytes, times_per_step, in_loop, collective)
            for (collective, axes), size_bytes in volume.items()
            if size_bytes
        ]
        self.all += map(self.in_turns, transfers) if self.part.of_stages else transfers

    def add_once(self, volume: Volume, kind: str, times: int) -> None:
        """Adds `times` transfers in a step of an array of all layers, which stages send outside of their turns."""
        step = self.part.step_rules
        for (collective, axes), size_bytes in volume.items():
            size_bytes /= step.num_shards(step.stages)
            self.all.append(EstimatedTransfer(kind, axes, size_bytes, times, False, collective))

    def volume(self, size_bytes: float, source: Sharding, target: Sharding, summed_over: Iterable[str] = ()) -> Volume:
        """The bytes that one device sends for what `transfer` adds, in one microbatch."""
        summed = set(summed_over) - self.reduced_last
        bytes_over: dict[tuple[str, str], float] = collections.defaultdict(float)
        for cost in reshard(size_bytes, source, target, summed, self.rules.num_shards):
            bytes_over[cost.kind, self.axes_key(cost.mesh_axes)] += cost.bytes
        return bytes_over

    def axes_key(self, names: Iterable[str]) -> str:
        wanted = {*names}
        return "+".join(name for name in self.rules.mesh if name in wanted)

    def gather(self, weight: Parameter, itemsize: int) -> None:
        """Adds the gather of a weight for compute. A weight that no loop uses is gathered once for all microbatches."""
        iterations = max((node.trip_count for node in self.graph.placements_in_use.get(weight.path, ())), default=1)
        volume = self.volume(weight.elements * itemsize / iterations, weight.storage, weight.compute)
        self.add(volume, self.microbatches * iterations if iterations > 1 else 1, "weights", iterations > 1)
