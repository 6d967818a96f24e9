"""Logical axes + rules + mesh -> where arrays live, for the model (annotate.Placement) and for whole trees."""

import copy
import dataclasses
import functools
import itertools
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gspmd_lm.sharding import mesh as meshes
from gspmd_lm.sharding.annotate import REPLICAS, Placement, Settings, Spec, Split, Stages, placed_by
from gspmd_lm.sharding.names import Vocabulary
from gspmd_lm.sharding.op_names import scope
from gspmd_lm.sharding.permutes import shard_of_sum
from gspmd_lm.sharding.problems import Problem, check
from gspmd_lm.sharding.remat_policy import policy
from gspmd_lm.sharding.rules import Rules

# On one CPU device, loops over layers of up to so many turns are written out unless the rules say otherwise. XLA then
# copies less: 58 instead of 201 MB a step of bench_4m (benchmarks/one_device.py). Longer loops stay, so that large
# models compile in the same time as before. Layers that are recomputed keep their loop, too: without it, XLA:CPU
# recomputes them and still holds what this was to save.
UNROLLED_TURNS = 8


@dataclasses.dataclass(frozen=True)
class Named:
    """The path and logical axes of one leaf of a tree, which rules files need to know. jax takes it for a leaf, too."""

    path: str
    axes: tuple[str, ...]
    left_out: int = 0  # last dimensions that the model says nothing of


@dataclasses.dataclass(frozen=True)
class MeshPlacement(Placement):
    """Answers the model's questions with the rules and the mesh of one step."""

    rules: Rules
    mesh: Mesh
    replicas: str = ""  # see `Settings`
    mapped: int = 0  # dimensions that a derivative sees and the model does not: those of stages and of replicas

    is_single = False

    @property
    def vocabulary(self) -> Vocabulary:
        return self.rules.vocabulary

    @property
    def devices(self) -> int:
        return self.mesh.size

    @property
    def platform(self) -> str:
        return meshes.platform(self.mesh)

    @functools.cached_property
    def settings(self) -> Settings:
        """The choices of the rules for this mesh."""
        platform, remat, chosen = self.platform, policy(self.rules, self.mapped), self.rules.unroll
        alone = platform == "cpu" and self.mesh.size == 1 and remat is None
        short = UNROLLED_TURNS if alone and chosen is None else sys.maxsize if chosen == "all" else 0
        return Settings(
            platform=platform,
            device_kind=self.mesh.devices.flat[0].device_kind,
            attention=self.rules.kernel(platform),
            context=self.rules.context,
            remat=remat,
            replicas=self.replicas,
            interleave=self.rules.interleave,
            expert_buffer=self.rules.expert_buffer,
            unroll=(short, chosen if isinstance(chosen, int) else 1),
        )

    def setting(self, name: str) -> Any:
        return getattr(self.settings, name)

    def sharding(self, table: str, path: str, axes: tuple[str, ...], shape: tuple[int, ...]) -> NamedSharding:
        """The sharding of an array by `table`. Raises ShardingError for arrays that do not fit."""
        spec, problems = self.rules.resolve(table, path, axes, shape)
        check(problems)
        return NamedSharding(self.mesh, _partition_spec(spec))

    def shardings(self, table: str, named: Any, abstract: Any) -> Any:
        """A tree of shardings for a tree of Named leaves and one of their shapes."""
        return jax.tree.map(lambda leaf, like: self.sharding(table, leaf.path, leaf.axes, like.shape), named, abstract)

    @property
    def stages(self) -> Stages | None:
        over, one = self.rules.stages, self.rules.pipeline
        if not one or not over:
            return None
        return Stages(self.over(over), one.microbatches, one.repeats, one.gathers_once, one.keep, self.rules.replicas)

    @property
    def within_stage(self) -> "MeshPlacement":
        return dataclasses.replace(self.within_replica, rules=self.within_replica.rules.within_stage, mapped=1)

    @property
    def within_mapped_stages(self) -> "MeshPlacement":
        return dataclasses.replace(self.within_stage, mapped=1 + bool(self.rules.replicas))

    @property
    def within_replica(self) -> "MeshPlacement":
        """The placement for the work of one replica of the weights. The others are a batch dimension of this work."""
        replicas = REPLICAS if self.rules.replicas else self.replicas
        return dataclasses.replace(self, rules=self.rules.within_replica, replicas=replicas)

    def constrain(self, x: jax.Array, spec: Spec) -> jax.Array:
        with scope(spec.table, spec.array):
            return jax.lax.with_sharding_constraint(x, self.sharding(spec.table, spec.array, spec.axes, x.shape))

    def split(self, array: str, axis: str) -> Split:
        return _split(self.rules, array, axis)

    def num_shards(self, array: str, axis: str) -> int:
        return _split(self.rules, array, axis).num_shards

    def over(self, mesh_axes: tuple[str, ...]) -> Split:
        return Split(mesh_axes, self.rules.num_shards(mesh_axes))

    def copies(self, x: jax.Array, split: Split, spec: Spec) -> jax.Array:
        """Each device has the copy for its shard, which is the part of `x` that it has: nothing is sent."""
        place = self.sharding(spec.table, spec.array, spec.axes, x.shape)
        each = [tuple(name for name in names if name not in split.over) for names in _dimensions(place.spec, x.ndim)]
        sharding = NamedSharding(self.mesh, _partition_spec([split.over, *each]))
        with scope(spec.table, spec.array):
            return jax.lax.with_sharding_constraint(jnp.broadcast_to(x, (split.num_shards, *x.shape)), sharding)

    def total(self, partials: jax.Array, split: Split, spec: Spec) -> jax.Array:
        """The sum over the first dimension of `partials`, which is split over the mesh axes of `split`.

        The partitioner would make it an all-reduce and a slice on CPU, and elsewhere where its pass for
        reduce-scatters does not match. That is twice the traffic, so psum_scatter is called here. A mesh axis that does
        not split the result is summed with psum. So is one inside of which an axis that is not summed over splits the
        same dimension: the blocks of a reduce-scatter would come out in the wrong order.
        """
        over = split.over
        result = self.sharding(spec.table, spec.array, spec.axes, partials.shape[1:])
        if not over:
            with scope(spec.table, spec.array):
                return jax.lax.with_sharding_constraint(partials.sum(0), result)
        dimensions = _dimensions(result.spec, partials.ndim - 1)
        scatter: list[tuple[int, tuple[str, ...]]] = []
        for dimension, names in enumerate(dimensions):
            inner = names
            while inner and not set(inner) <= set(over):
                inner = inner[1:]
            if inner:
                scatter.append((dimension, inner))
                dimensions[dimension] = names[: len(names) - len(inner)]
        scattered = {name for _, names in scatter for name in names}
        summed = tuple(name for name in over if name not in scattered)
        leftover = [tuple(name for name in names if name not in over) for names in dimensions]

        def local(x: jax.Array) -> jax.Array:
            x = x[0]
            for dimension, names in scatter:
                x = shard_of_sum(x, names, dimension, self.platform)
            return jax.lax.psum(x, summed) if summed else x

        out = [
            names + next((inner for at, inner in scatter if at == dimension), ())
            for dimension, names in enumerate(leftover)
        ]
        with scope(spec.table, spec.array):
            reduced = jax.shard_map(
                local,
                mesh=self.mesh,
                in_specs=_partition_spec([over, *leftover]),
                out_specs=_partition_spec(out),
                check_vma=False,
            )(partials)
            return jax.lax.with_sharding_constraint(reduced, result)

    def reshard_axis_by_axis(self, x: jax.Array, table: Spec, target: Spec) -> jax.Array:
        columns = self.rules.split(table.table, table.array, table.axes[-1])
        want = [self.rules.split(target.table, target.array, axis) for axis in target.axes[:-1]]
        moved = [name for name in columns if any(name in names for names in want)]
        others = {name for names in want for name in names} - {*columns}
        if not moved or (len({names for names in want if set(names) & set(moved)}) < 2 and not others):
            return x
        left = list(columns)
        for name in (None, *reversed(moved[1:])):
            left = [other for other in left if other != name]
            leading = [tuple(other for other in names if other not in left) for names in want]
            sharding = NamedSharding(self.mesh, _partition_spec([*leading, left]))
            x = jax.lax.with_sharding_constraint(x, sharding)
        return x

    def per_device(self, function: Callable[..., Any], inputs: Sequence[Any], outputs: Any) -> Callable[..., Any]:
        def spec(place: Any) -> PartitionSpec | None:
            place = Spec.from_text(place) if isinstance(place, str) else place
            if isinstance(place, Spec):
                place = [self.rules.split(place.table, place.array, axis) for axis in place.axes]
            return None if place is None else _partition_spec(place)

        into, out = tuple(map(spec, inputs)), spec(outputs) if isinstance(outputs, str) else tuple(map(spec, outputs))
        return jax.shard_map(function, mesh=self.mesh, in_specs=into, out_specs=out, check_vma=False)


class Recorder(Placement):
    """A Placement that places nothing. It notes which activations a model names and where its rules do not fit them,
    and marks in the program where each array is placed: see `marked`.

    Loops have as many chunks as the rules say, and two axes compare as split alike or not. But each sum has one partial
    sum, because an axis whose size does not divide has no shards of one size.
    """

    is_single = False

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.asked: set[str] = set()  # names of `Settings` that the model asks for
        self.compared: set[tuple[str, str]] = set()  # arrays and axes whose splits the model compares
        self.counted: set[tuple[str, str]] = set()  # and those whose shards it counts
        self.named: dict[tuple[Spec, tuple[int, ...]], None] = {}  # activations with their shapes, each once
        self.arrays: dict[str, tuple[tuple[str, ...], tuple[int, ...]]] = {}  # name -> axes and shape, as named last
        self.axes: dict[str, tuple[str, ...]] = {}  # name -> all axes that an array of this name has
        self.used: set[str] = set()  # paths of the weights that the model places for use
        self.tables: set[tuple[str, str]] = set()  # weights that are placed for use if this axis of theirs is split
        self.constraints: dict[Spec, None] = {}  # of flax's with_logical_constraint, each once
        self.problems: list[Problem] = []
        self.program: Any = None  # the jaxpr, once the function is traced

    @property
    def vocabulary(self) -> Vocabulary:
        return self.rules.vocabulary

    @property
    def devices(self) -> int:
        return self.rules.devices

    def setting(self, name: str) -> Any:
        self.asked.add(name)
        return getattr(Settings("recorded", "recorded", context=self.rules.context), name)

    @property
    def stages(self) -> Stages | None:
        """None: what is recorded is computed as on one device."""
        self.asked.add("pipeline")
        return None

    def note(self, spec: Spec, shape: tuple[int, ...]) -> None:
        """Notes an activation of this shape."""
        array, axes, table = spec
        if (spec, shape) not in self.named:
            self.named[spec, shape] = None
            self.problems += self.rules.resolve(table, array, axes, shape)[1]
        self.arrays[array] = axes, shape
        self.axes[array] = tuple(dict.fromkeys((*self.axes.get(array, ()), *axes)))

    def constrain(self, x: jax.Array, spec: Spec) -> jax.Array:
        if spec.is_constraint:
            self.constraints[spec] = None
        if spec.is_constraint or spec.array in self.vocabulary.activations:
            self.note(spec, x.shape)
        elif spec.table == "rules":
            self.used.add(spec.array)
        return mark(x, spec)

    def split(self, array: str, axis: str) -> Split:
        self.compared.add((array, axis))
        return _split(self.rules, array, axis)._replace(num_shards=1)

    def num_shards(self, array: str, axis: str) -> int:
        self.counted.add((array, axis))
        return _split(self.rules, array, axis).num_shards

    def reshard_axis_by_axis(self, x: jax.Array, table: Spec, target: Spec) -> jax.Array:
        self.tables.add((table.array, table.axes[0]))
        if self.rules.split("rules", table.array, table.axes[0]):  # else the table is read where it rests
            self.used.add(table.array)
        return x

    def traces_alike(self, rules: Rules) -> bool:
        """Whether the model would trace to the same program under `rules`.

        A model can compare splits, and count their shards. The names of mesh axes do not matter.
        """
        return self._answers(rules) == self._own_answers

    @functools.cached_property
    def _own_answers(self) -> tuple[Any, ...]:
        return self._answers(self.rules)

    def _answers(self, rules: Rules) -> tuple[Any, ...]:
        numbers: dict[str, int] = {}
        splits = [rules.split("rules", *one) for one in sorted(self.compared | self.tables)]
        numbered = [[numbers.setdefault(name, len(numbers)) for name in names] for names in splits]
        counts = [_split(rules, *one).num_shards for one in sorted(self.counted)]
        return rules.vocabulary, rules.context, numbered, counts

    def under(self, rules: Rules) -> "Recorder":
        """The same record under `rules`, under which the model traces alike: see `traces_alike`."""
        other = copy.copy(self)
        other.rules = rules
        resolved = (rules.resolve(table, array, axes, shape)[1] for (array, axes, table), shape in self.named)
        other.problems = list(itertools.chain.from_iterable(resolved))
        return other

    @property
    def unmapped_constraints(self) -> list[Spec]:
        """The constraints that gather an array whole, since no row maps any of their axes."""
        return [one for one in self.constraints if not any(self.rules.row("rules", one.array, x) for x in one.axes)]


def mark(x: jax.Array, spec: Spec) -> jax.Array:
    """`x`, marked in a recorded program as what `spec` places. See `marked`."""
    return checkpoint_name(x, f"{spec.table} {spec.array}: {' '.join(spec.axes)}")


def marked_placement(name: str) -> Spec | None:
    """The placement that an operation `name` of a recorded program marks; None for other names."""
    table, _, text = name.partition(" ")
    return Spec.from_text(text, table) if ": " in text else None


def record(rules: Rules, function: Callable[..., Any], *abstract: Any) -> Recorder:
    """The record of a function that is traced under `rules`, which need not fit it. Nothing is computed."""
    recorder = Recorder(rules)
    with placed_by(recorder):
        recorder.program = jax.make_jaxpr(function)(*abstract)
    return recorder


def as_recorded(recorder: Recorder) -> AbstractContextManager[None]:
    """A context in which a model gets the answers that `recorder` gave it. Nothing is noted in `recorder`."""
    return placed_by(Recorder(recorder.rules))


def problems(
    rules: Rules,
    params: list[tuple[Named, Any]],
    activations: Recorder | None = None,
    optimizer: Sequence[tuple[Named, Any]] = (),
) -> list[Problem]:
    """Everything about `rules` that does not fit the arrays of a model, warnings included.

    `activations` are what the model was recorded to name under the same rules; None where no model runs.
    """
    used = {axis for leaf, _ in params for axis in leaf.axes}.union(*(activations.axes.values() if activations else ()))
    collected = [problem.within(used) for problem in rules.problems]
    collected += weight_problems(rules, params, optimizer)
    collected += activations.problems if activations else []
    collected += rules.unused_rows(
        {leaf.path: leaf.axes for leaf, _ in params}, activations.axes if activations else {}
    )
    return list(dict.fromkeys(collected))


def weight_problems(
    rules: Rules, params: Sequence[tuple[Named, Any]], optimizer: Sequence[tuple[Named, Any]] = ()
) -> list[Problem]:
    """The problems of `rules` with the weights of a model and the state of its optimizer, warnings included."""
    tables = [(table, pair) for pair in params for table in ("rules", "weights", "optimizer")]
    tables += [("optimizer", pair) for pair in optimizer]
    found: list[Problem] = []
    for table, (leaf, like) in tables:
        found += rules.resolve(table, leaf.path, leaf.axes, like.shape, jnp.dtype(like.dtype).itemsize)[1]
    return found


def _split(rules: Rules, array: str, axis: str) -> Split:
    over = rules.split("rules", array, axis)
    return Split(over, rules.num_shards(over))


def _partition_spec(spec: Any) -> PartitionSpec:
    return PartitionSpec(*(names[0] if len(names) == 1 else names or None for names in map(tuple, spec)))


def _dimensions(spec: PartitionSpec, rank: int) -> list[tuple[str, ...]]:
    full = (*spec, *(None,) * (rank - len(spec)))
    return [() if names is None else (names,) if isinstance(names, str) else tuple(names) for names in full]
