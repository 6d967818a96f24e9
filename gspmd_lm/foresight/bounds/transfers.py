"""The communication volume of a step: what one device sends to bring arrays from one sharding to another.

What must be moved follows from the sharding of each array, by logic on axes alone:

  an axis that a matmul sums over is split       its partial sums are reduced: scattered where the result is split
                                                 over the same mesh axis, else reduced to all
  an array is stored split, and is used whole    it is gathered
  a mesh axis splits another dimension in use    its devices exchange pieces, all to all

Scalars are left out, and what optimizers such as muon or adafactor sum over a split matrix.
"""

import abc
import collections
import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from gspmd_lm.foresight.graph import DataflowGraph, Node
from gspmd_lm.hardware.network import sent_bytes
from gspmd_lm.sharding.rules import Rules
from gspmd_lm.sharding.shapes import Arrays, pairs

Sharding = Mapping[str, tuple[str, ...]]  # logical axis -> the mesh axes that split it
Volume = Mapping[str, float]  # mesh axes -> the bytes that one device sends over them

FLOAT32_BYTES = 4


def mesh_axes(sharding: Sharding, *axes: str) -> set[str]:
    """The mesh axes that split some logical axes; all of them where none is named."""
    return {name for axis in axes or sharding for name in sharding.get(axis, ())}


def mesh_axes_except(sharding: Sharding, *axes: str) -> set[str]:
    """The mesh axes that split the other logical axes."""
    return {name for axis, names in sharding.items() if axis not in axes for name in names}


class Transfer(NamedTuple):
    """What one device sends over some mesh axes, one or more times in a step."""

    kind: str  # weights, gradients, activations, or keys that go round beside attention
    axes: str  # mesh axes: fsdp, or fsdp+tensor
    bytes: float  # sent each time
    times_per_step: int
    in_loop: bool  # in a loop of the model, such as that over its layers


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


class Transfers(abc.ABC):
    """What one device sends in a step: `all` transfers, and `bytes_by_axes`, their sums by mesh axes.

    `trains` says whether the program runs backward too. If it does not, it is a step of generation. An element that has
    fewer bytes than `narrowest` is counted with so many.
    """

    def __init__(self, rules: Rules, arrays: Arrays, graph: DataflowGraph, trains: bool = True, narrowest: int = 0):
        self.rules, self.graph, self.trains, self.narrowest = rules, graph, trains, narrowest
        self.microbatches = rules.microbatches if trains else 1
        self.saved = {*rules.remat.save, *rules.remat.offload}  # names of activations
        # Mesh axes over which gradients are summed once, after the last microbatch.
        self.reduced_last = {*rules.replicas} if self.microbatches > 1 else set()
        self.all: list[Transfer] = []
        self.weights: dict[str, Parameter] = {}
        trained = {leaf.path for leaf, _ in pairs(arrays.named_trained, arrays.trained)} if trains else set()
        for leaf, like in pairs(arrays.named_params, arrays.params):
            tables = ("weights", "rules", "optimizer")
            specs = (rules.resolve(table, leaf.path, leaf.axes, like.shape)[0] for table in tables)
            shardings = (dict(zip(leaf.axes, spec, strict=True)) for spec in specs)
            sizes, itemsize = dict(zip(leaf.axes, like.shape, strict=True)), max(like.dtype.itemsize, narrowest)
            self.weights[leaf.path] = Parameter(leaf.path, sizes, itemsize, *shardings, trained=leaf.path in trained)
        self.add_model()
        reduced_last, self.reduced_last = self.reduced_last, set()
        for weight in self.weights.values():
            if not weight.trained:
                continue
            gradient_bytes = weight.elements * FLOAT32_BYTES
            self.add(self.volume(gradient_bytes, weight.gradient, weight.gradient, reduced_last), 1, "gradients")
            # The update runs in the sharding of the optimizer's state; its result goes to that of stored weights.
            self.add(self.volume(weight.elements * weight.itemsize, weight.gradient, weight.storage), 1, "weights")

    @functools.cached_property
    def bytes_by_axes(self) -> dict[str, float]:
        """Mesh axes -> the bytes that one device sends over them in a step."""
        total: dict[str, float] = collections.defaultdict(float)
        for transfer in self.all:
            total[transfer.axes] += transfer.bytes * transfer.times_per_step
        return total

    @abc.abstractmethod
    def add_model(self) -> None:
        """Adds all that the program does before its weights are updated."""

    def itemsize(self, node: Node) -> int:
        return max(node.itemsize, self.narrowest)

    def bytes(self, node: Node) -> int:
        """The bytes of a whole array."""
        return math.prod(node.shape) * self.itemsize(node)

    def sharding(self, node: Node) -> dict[str, tuple[str, ...]]:
        """The sharding of an activation. Key positions are called seq, for both come from the block's input."""
        assert node.placed
        array, axes, _ = node.placed
        spec = self.rules.resolve("rules", array, axes, node.shape)[0]
        return {"seq" if axis == "kv_seq" else axis: names for axis, names in zip(axes, spec, strict=True)}

    def transfer(self, size_bytes: float, source: Sharding, target: Sharding, summed_over: Iterable[str] = (),
                 times: int = 1, kind: str = "activations") -> None:  # fmt: skip
        """Adds what a device sends to bring an array from one sharding to another, `times` in each microbatch.

        size_bytes: of the whole array. summed_over: the mesh axes over which the array is a partial sum. A device first
        drops what its target shard does not have, which costs nothing.
        """
        self.add(self.volume(size_bytes, source, target, summed_over), self.microbatches * times, kind, times > 1)

    def add_cheapest(self, *ways: list[Volume], times: int = 1) -> None:
        """Adds the way that sends least."""
        for volume in min(ways, key=lambda way: sum(sum(volume.values()) for volume in way)):
            self.add(volume, self.microbatches * times, in_loop=times > 1)

    def add(self, volume: Volume, times_per_step: int, kind: str = "activations", in_loop: bool = False) -> None:
        self.all += [
            Transfer(kind, axes, size_bytes, times_per_step, in_loop)
            for axes, size_bytes in volume.items()
            if size_bytes
        ]

    def volume(self, size_bytes: float, source: Sharding, target: Sharding, summed_over: Iterable[str] = ()) -> Volume:
        """What `transfer` adds in one microbatch."""
        source_axes, target_axes = mesh_axes(source), mesh_axes(target)
        summed = set(summed_over) - source_axes - self.reduced_last
        exchanged = {
            name for axis, names in source.items() for name in names if name in target_axes - set(target.get(axis, ()))
        }
        bytes_over: dict[str, float] = collections.defaultdict(float)
        local = size_bytes / self.rules.piece_count(source_axes | (target_axes - summed))
        for kind, over in (
            ("reduce-scatter", summed & target_axes),
            ("all-reduce", summed - target_axes),
            ("all-to-all", exchanged),
            ("all-gather", source_axes - target_axes),
        ):
            if (shards := self.rules.piece_count(over)) > 1:
                size_bytes = local * shards if kind == "all-gather" else local
                bytes_over[self.axes_key(over)] += sent_bytes(kind, size_bytes, shards)
                local /= shards if kind == "reduce-scatter" else 1
        return bytes_over

    def axes_key(self, names: Iterable[str]) -> str:
        return "+".join(name for name in self.rules.mesh if name in set(names))

    def gather(self, weight: Parameter, itemsize: int) -> None:
        """Adds the gather of a weight for compute. A weight that no loop uses is gathered once for all microbatches."""
        iterations = max((node.trip_count for node in self.graph.used.get(weight.path, ())), default=1)
        volume = self.volume(weight.elements * itemsize / iterations, weight.storage, weight.compute)
        self.add(volume, self.microbatches * iterations if iterations > 1 else 1, "weights", iterations > 1)
