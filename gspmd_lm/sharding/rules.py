"""The rules file: which mesh axes split each logical axis, and everything that can be wrong with it.

`rules_file.load` reads a file and collects its problems. `Rules.resolve` maps the logical axes of one array onto mesh
axes and collects the problems of that array. `problems.check` raises all problems together.
"""

import dataclasses
import difflib
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from gspmd_lm.config.paths import short_name
from gspmd_lm.errors import did_you_mean, either, nearest
from gspmd_lm.sharding.names import Vocabulary
from gspmd_lm.sharding.problems import UNUSED, Clash, ClashingRow, Problem, place
from gspmd_lm.units import plural

MESH_AXES = ("data", "fsdp", "tensor", "context", "expert", "stage")
TABLES = ("rules", "weights", "optimizer")  # each refines the one before it
REMATS = ("none", "block", "dots")  # which activations are kept for the backward pass, where no names say it
CONTEXTS = ("gather", "ring", "ulysses")  # the forms of context parallelism
GATHERS = ("turn", "step")  # once in a turn, or in a step, stages gather their weights and sum the gradients
KEEPS = ("layers", "stage")  # what stages keep for the backward pass: of layers, as `remat` says; or the stage's input
SCHEDULES = ("gpipe", "1f1b")  # of a pipeline: microbatches go back after all of them, or as soon as each can
EXPERT_BUFFER = 2.0  # where tokens travel to their experts
# Attention kernels, the fastest first. XLA's own can do all that a config may ask. A kernel may need more than its
# platform, see `kernels.common.unsupported_setting`.
KERNELS = {"cpu": ("xla",), "gpu": ("cudnn", "xla"), "tpu": ("splash", "xla")}
_NOT_FACTS = ("path", "vocabulary", "text", "flags", "problems")


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of a table, such as `residual.seq: tensor` under `rules`."""

    place: str  # rules/tp8.yaml: rules.residual.seq: tensor
    table: str
    array: str  # the end of an array's path; "" for every array
    axis: str
    mesh_axes: tuple[str, ...]

    @property
    def key(self) -> str:
        """rules.residual.seq"""
        return ".".join(filter(None, (self.table, self.array, self.axis)))

    def mentions(self, path: str) -> bool:
        return not self.array or path == self.array or path.endswith("." + self.array)


@dataclasses.dataclass(frozen=True)
class Remat:
    """Which activations are kept for the backward pass; it computes the others again."""

    policy: Literal["none", "block", "dots", "names"] = "none"
    save: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()

    @property
    def plain(self) -> str | dict[str, list[str]]:
        """The value of the key `remat` in a rules file."""
        lists = {"save": [*self.save], "offload": [*self.offload]}
        return {key: names for key, names in lists.items() if names} if self.policy == "names" else self.policy


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """The schedule of a pipeline: its microbatches, its repeats, and when stages gather their weights."""

    microbatches: int
    repeats: int = 1
    gather: str = ""  # one of GATHERS; "" leaves it to train/choices.py
    keep: str = KEEPS[0]
    schedule: str = SCHEDULES[0]
    chosen: str = ""  # one of GATHERS, where `gather` is ""

    @property
    def gathers_once(self) -> bool:
        """Whether stages gather their weights once in a step."""
        return "step" in (self.gather, self.chosen)

    @property
    def keeps_inputs(self) -> bool:
        """Whether a stage keeps its inputs alone for the backward pass, and computes its layers once more."""
        return (self.keep, self.schedule) != (KEEPS[0], SCHEDULES[0])

    @property
    def plain(self) -> dict[str, Any]:
        """The keys of the rules file that are not at their defaults, and their values."""
        usual = dataclasses.asdict(Pipeline(0, chosen=self.chosen))
        return {key: value for key, value in dataclasses.asdict(self).items() if value != usual[key]}


@dataclasses.dataclass(frozen=True)
class Rules:
    """A rules file for models that use the names of `vocabulary`.

    One size of `mesh` may be -1 until `fill` replaces it.
    """

    path: str
    vocabulary: Vocabulary
    mesh: Mapping[str, int]
    rows: tuple[Row, ...]
    remat: Remat
    microbatches: int
    unroll: int | Literal["all"] | None  # turns of the loop over layers; None leaves it to the platform
    attention: Mapping[str, str]  # platform -> kernel, where the file or `supported.settle_rules` has chosen one
    context: str
    compiler_options: Mapping[str, Mapping[str, Any]]
    dcn: Mapping[str, int]
    problems: tuple[Problem, ...]
    pipeline: Pipeline | None = None
    interleave: int = 1  # parts of a device's rows that each layer computes side by side
    expert_buffer: float = EXPERT_BUFFER  # rows that a device has room for in one round, in mean loads of a device
    text: str = ""  # the content of the file, with what flags have set
    flags: Mapping[str, str] = dataclasses.field(default_factory=dict)  # key -> the flag that set it

    @property
    def name(self) -> str:
        return self.path.rsplit("/", 1)[-1].removesuffix(".yaml")

    @property
    def label(self) -> str:
        """The name of the rules: tp8 for a file that `--rules=tp8` finds, else the path."""
        return short_name(self.path, "rules")

    def place(self, key: str, value: Any) -> str:
        """The flag or the row of the file where the value of a key was set."""
        return place(self.path, self.flags, key, value)

    @property
    def devices(self) -> int:
        """The number of devices of the mesh; -1 while one of its sizes is -1."""
        return -1 if -1 in self.mesh.values() else math.prod(self.mesh.values())

    @property
    def program_kinds(self) -> tuple[str, ...]:
        """The kinds of program that a train step under these rules is, each with compiler options of its own."""
        kinds = {"train": True, "offload": self.remat.offload, "interleave": self.interleave == 2}
        return tuple(kind for kind, holds in kinds.items() if holds)

    def kernel(self, platform: str) -> str:
        """The attention kernel of a platform; XLA's own where none is chosen."""
        return self.attention.get(platform, "xla")

    def num_shards(self, mesh_axes: Iterable[str]) -> int:
        """The number of shards into which these mesh axes split together."""
        return math.prod(self.mesh[name] for name in mesh_axes)

    @property
    def replicas(self) -> tuple[str, ...]:
        """The mesh axes over which `rules.batch` splits and that no other row names.

        Weights and gradients are whole on each device along them. A sum of gradients over them can wait until all
        microbatches, or all turns of a pipeline, are added up: nothing is held for it that is not held anyway. Without
        a pipeline there are none where one of several axes of the batch splits weights too, as in {batch: [data,
        fsdp]}. Waiting for the others would gain nothing: libtpu 0.0.42.1 then makes all-reduces of reduce-scatters
        over fsdp, 510 MB in all instead of 514 and a step 2% longer.
        """
        batch = self.vocabulary.rows
        whole = next((row for row in self.rows if (row.table, row.array, row.axis) == ("rules", "", batch)), None)
        others = [row for row in self.rows if row is not whole]
        elsewhere = {name for row in others for name in row.mesh_axes}
        if whole is None or any(row.axis == batch for row in others):
            return ()
        if elsewhere & {*whole.mesh_axes} and not self.stages:
            return ()
        return tuple(name for name in whole.mesh_axes if self.mesh[name] > 1 and name not in elsewhere)

    @property
    def within_replica(self) -> "Rules":
        """The same rules for the part of the batch that one replica of the weights computes."""
        return self._without(self.replicas)

    @property
    def stages(self) -> tuple[str, ...]:
        """The mesh axes that split the layers into the stages of a pipeline; none without a pipeline."""
        axis = self.vocabulary.stages
        return self.split("weights", f"{axis}.", axis) if self.pipeline and axis else ()

    @property
    def turns(self) -> tuple[int, int]:
        """The turns in which a stage of the pipeline has rows, and all turns; (0, 0) without stages."""
        if not self.pipeline or not self.stages:
            return 0, 0
        busy, others = self.pipeline.microbatches * self.pipeline.repeats, self.num_shards(self.stages) - 1
        return busy, busy + others * (2 if self.pipeline.schedule == "1f1b" else 1)

    @property
    def within_stage(self) -> "Rules":
        """The same rules for the rows and the layers that one stage computes in a turn."""
        return dataclasses.replace(self._without(self.stages), pipeline=None)

    def _without(self, mesh_axes: Sequence[str]) -> "Rules":
        rows = tuple(
            dataclasses.replace(row, mesh_axes=tuple(name for name in row.mesh_axes if name not in mesh_axes))
            for row in self.rows
        )
        return dataclasses.replace(self, rows=rows)

    def facts(self) -> dict[str, Any]:
        """The content of these rules as plain values, without the path of the file and its comments."""
        plain = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        plain["remat"] = dataclasses.asdict(self.remat)
        plain["pipeline"] = dataclasses.asdict(self.pipeline) if self.pipeline else None
        plain["mesh"] = list(self.mesh.items())  # in the order of devices
        plain["rows"] = {row.key: row.mesh_axes for row in self.rows}
        return {name: value for name, value in plain.items() if name not in _NOT_FACTS}

    def row(self, table: str, path: str, axis: str) -> Row | None:
        """The row that places one axis of an array, or None.

        A finer table is asked first. In one table, a row that names the array beats one that does not. A row that names
        a weight places its adapter too, unless a row names the adapter's matrix; compare `Vocabulary.placed_like`.
        """
        key = table, path, axis
        if key not in self._row_cache:
            self._row_cache[key] = self._find_row(*key)
        return self._row_cache[key]

    def _find_row(self, table: str, path: str, axis: str) -> Row | None:
        if self.pipeline and axis == self.vocabulary.stages:
            if path.partition(".")[0] != axis:
                return None  # layers outside of the stages, which all stages compute
            table = max(table, "weights", key=TABLES.index)  # a stage computes with the layers that it holds
        rows, other = [row for row in self.rows if row.axis == axis], self.vocabulary.placing_path(path)
        for name in reversed(TABLES[: TABLES.index(table) + 1]) if rows else ():
            matches = [row for row in rows if row.table == name and (row.mentions(path) or row.mentions(other))]
            if matches:
                return max(matches, key=lambda row: (row.array != "" and row.mentions(path), len(row.array)))
        return None

    @functools.cached_property
    def _row_cache(self) -> dict[tuple[str, str, str], Row | None]:
        """The results of `row` so far, by its arguments."""
        return {}

    def split(self, table: str, path: str, axis: str) -> tuple[str, ...]:
        """The mesh axes that split one axis of an array; the first is the outermost."""
        return self._split_by(self.row(table, path, axis))

    def _split_by(self, row: Row | None) -> tuple[str, ...]:
        return tuple(name for name in row.mesh_axes if self.mesh[name] > 1) if row else ()

    def resolve(
        self, table: str, path: str, axes: Sequence[str], shape: Sequence[int], itemsize: int = 0
    ) -> tuple[tuple[tuple[str, ...], ...], list[Problem]]:
        """The mesh axes of each dimension of an array, and the problems of this placement.

        `itemsize` is in bytes, and 0 for an activation. A dimension of size 1 in an activation (a decoded token) is
        never split. A batch of one row is the exception: rules that split it are a problem.
        """
        spec: list[tuple[str, ...]] = []
        problems: list[Problem] = []
        taken: dict[str, Row] = {}
        for axis, size in zip(axes, shape, strict=True):
            row = self.row(table, path, axis)
            token = size == 1 and not itemsize and axis != self.vocabulary.rows
            names = () if token else self._split_by(row)
            spec.append(names)
            if row is None or not names:
                continue
            twice = [name for name in names if name in taken]
            if twice:
                first, key = taken[twice[0]], f"{row.table}.{path.split('.')[-1]}.{axis}"
                message = f"{path}: {twice[0]} would split both {first.axis} and {axis}"
                fix, places = "give one of them another mesh axis", f"{first.place}\n        {row.place}"
                instead = f"--set rules.{key}=null"
                clash = Clash(
                    twice[0], *(ClashingRow(one.key, one.axis, one.place, self._elsewhere(one)) for one in (first, row))
                )
                problems.append(Problem(message, places, fix, instead, clash=clash))
            taken.update(dict.fromkeys(names, row))
            num_shards = self.num_shards(names)
            if size % num_shards and not (self.pipeline and axis == self.vocabulary.stages):
                problems.append(self._does_not_divide(row, path, axis, size, names, math.prod(shape) * itemsize))
        return tuple(spec), problems

    def _elsewhere(self, row: Row) -> str:
        """A mesh in which a row has a mesh axis for itself; '' where the mesh has several mesh axes already."""
        (name, size), *others = self.mesh.items()
        own = "data" if row.axis == self.vocabulary.rows else "fsdp"
        changed = f"{{{own}: 2, {name}: {size // 2}}} and {row.key.partition('.')[2]}: {own}"
        return "" if others or own == name or size % 4 else changed

    def _does_not_divide(
        self, row: Row, path: str, axis: str, size: int, names: tuple[str, ...], total_bytes: int
    ) -> Problem:
        over = " x ".join(f"{name}={self.mesh[name]}" for name in names)
        num_shards = self.num_shards(names)
        candidates = [size, *(2**power for power in range(num_shards.bit_length()))]
        fitting = [count for count in candidates if count < num_shards and size % count == 0]
        instead = ""
        if len(names) == 1:
            devices = self.devices // num_shards * max(fitting)
            instead = f"--mesh={names[0]}={max(fitting)}, with {plural(devices, 'device')}"
        setting = self.vocabulary.settings.get(axis)
        if axis == self.vocabulary.rows:
            each = f" in each of {self.microbatches} microbatches" if self.microbatches > 1 else ""
            fix = f"make {setting or 'the rows of a batch'} a multiple of {num_shards * self.microbatches}"
            return Problem(f"{path}: {axis}={size}{each} does not divide over {over}", row.place, fix, instead)
        message = f"{path}: {axis}={size} does not divide over {over}"
        if setting:
            pad = f"--set {setting}={-(-size // num_shards) * num_shards}"
            instead = f"{pad}, which pads the table, where weights are first made or converted"
        return Problem(message, row.place, f"--set rules.{row.key}=null", instead, total_bytes)

    def fill(self, device_count: int, instead: str = "--platform=cpu to simulate {known}") -> "Rules":
        """These rules with the -1 in their mesh replaced, so that the mesh has `device_count` devices.

        If the mesh cannot have so many, the result has a problem more, and `instead` is its second fix.
        """
        mesh, place = dict(self.mesh), self.place("mesh", dict(self.mesh))
        known = math.prod(size for size in mesh.values() if size > 0)
        open_axis = next((name for name, size in mesh.items() if size == -1), None)
        problems = list(self.problems)
        if open_axis is not None:
            mesh[open_axis] = max(1, device_count // known)
        if not mesh or math.prod(mesh.values()) == device_count:
            pass  # a missing mesh is a problem already
        elif open_axis is not None:
            others = describe_mesh({name: size for name, size in self.mesh.items() if name != open_axis})
            problems.append(
                Problem(
                    f"mesh: {others} does not divide {device_count} devices",
                    place,
                    f"make the sizes other than {open_axis} a divisor of {device_count}",
                )
            )
        else:
            fitting = [
                (name, size * device_count // known) for name, size in mesh.items() if size * device_count % known == 0
            ]
            message = f"mesh: its sizes multiply to {known}, but the number of devices is {device_count}"
            fix = f"choose sizes whose product is {device_count}"
            fix = next((f"--mesh={name}={size}" for name, size in fitting), fix)
            problems.append(Problem(message, place, fix, instead.format(known=known), sizes=tuple(fitting)))
        problems += [
            Problem(
                f"dcn: {name}={mesh[name]} does not divide into {slices} slices",
                self.place(f"dcn.{name}", slices),
                f"use a divisor of {mesh[name]}",
            )
            for name, slices in self.dcn.items()
            if mesh[name] % slices
        ]
        return dataclasses.replace(self, mesh=mesh, problems=tuple(problems))

    def unused_rows(
        self, weights: Mapping[str, Sequence[str]], activations: Mapping[str, Sequence[str]]
    ) -> list[Problem]:
        """Problems of the rows that place nothing in a model with these weights and activations (path -> logical axes).

        An array or axis that no model has is an error. One that only this model lacks is a warning.
        """
        problems, known = [], self.vocabulary.arrays
        for row in self.rows:
            arrays = {**weights, **activations} if row.table == "rules" else weights
            named = {path: axes for path, axes in arrays.items() if row.mentions(path)}
            last, lasts = row.array.split(".")[-1], {path.split(".")[-1] for path in arrays}
            if any(row.axis in axes for axes in named.values()):
                continue
            if any(row.mentions(path) and row.axis in axes for path, axes in activations.items()):
                message = f"{row.key}: only activations have this axis"
                problems.append(Problem(message, row.place, "move the row to rules"))
            elif row.array and named and any(row.axis in axes for axes in arrays.values()):
                has = sorted({axis for axes in named.values() for axis in axes})
                message = f"{row.key}: {row.array} has no axis {row.axis}"
                problems.append(Problem(message, row.place, f"use {either(has)}"))
            elif row.array and not named and (last not in known or (last != row.array and last in lasts)):
                message = f"{row.key}: no array is named {row.array}{did_you_mean(row.array, [*known, *arrays])}"
                near = difflib.get_close_matches(row.array, {**known, **arrays}, n=3, cutoff=0)
                fix = f"use {either(near)}; --rules=none --dry_run lists them all"
                misspelt = row.array, nearest(row.array, [*known, *arrays])
                problems.append(Problem(message, row.place, fix, misspelt=misspelt))
            else:
                lacks = row.axis if named else row.array or row.axis
                message = f"{row.key}: this config has no {lacks}, so the row does nothing"
                problems.append(Problem(message, row.place, "drop the row", warning=True, code=UNUSED))
        for name, size in self.mesh.items():
            if size > 1 and not any(name in row.mesh_axes for row in self.rows):
                message = f"mesh: {name}={size} splits nothing, so its devices compute the same {size} times"
                place, fix = self.place(f"mesh.{name}", size), f"map an axis to {name}, or drop it"
                problems.append(Problem(message, place, fix, warning=True, code="work-repeated"))
        return problems


def describe_mesh(sizes: Mapping[str, int]) -> str:
    """The sizes of mesh axes as 'fsdp=16 x tensor=4'."""
    return " x ".join(f"{name}={size}" for name, size in sizes.items())


def describe_split(axes: Sequence[str], spec: Sequence[Sequence[str]]) -> str:
    """The split dimensions of an array as 'embed/fsdp heads/tensor'; 'replicated' if there are none."""
    parts = [f"{axis}/{'+'.join(names)}" for axis, names in zip(axes, spec, strict=True) if names]
    return " ".join(parts) or "replicated"


def divisors(number: int) -> list[int]:
    """All divisors of a number, in order: of a number of devices, the sizes that a mesh axis may have."""
    low = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return low + [number // n for n in reversed(low) if n * n < number]
