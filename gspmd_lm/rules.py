"""The rules file: which mesh axes split each logical axis, and everything that can be wrong with it.

`load` reads a file and collects what is wrong in it; `Rules.resolve` maps the logical axes of one array onto mesh
axes and collects what does not fit. Problems are gathered, never raised one by one: `check` raises them together.
"""

import dataclasses
import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from gspmd_lm.axes import ARRAYS, AXES, MESH_AXES
from gspmd_lm.config import InputError, did_you_mean, find_file, parse_yaml

TABLES = ("rules", "weights", "optimizer")  # each refines the one before it
PLATFORMS = ("cpu", "gpu", "tpu")
KERNELS = {"cpu": ("xla",), "gpu": ("xla", "cudnn"), "tpu": ("xla", "splash")}
SECTIONS = ("mesh", *TABLES, "remat", "microbatches", "attention", "compiler_options", "dcn")


class ShardingError(InputError):
    """A rules file does not fit itself, the model or the devices. The message lists every problem with its fix."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """One thing that is wrong: what, the row that says so, how to mend it."""

    message: str
    row: str
    fix: str
    warning: bool = False

    def __str__(self) -> str:
        return f"{self.message}\n  rule  {self.row}\n  fix   {self.fix}"


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of a table, such as `residual.seq: tensor` under `rules`."""

    place: str  # rules/tp8.yaml: rules.residual.seq: tensor
    table: str
    array: str  # the end of an array's path; "" for every array
    axis: str
    mesh_axes: tuple[str, ...]

    def speaks_of(self, path: str) -> bool:
        return not self.array or path == self.array or path.endswith("." + self.array)


@dataclasses.dataclass(frozen=True)
class Remat:
    """Which activations the backward pass finds again and which it computes again."""

    policy: Literal["none", "block", "dots", "names"] = "none"
    save: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Rules:
    """A rules file. `mesh` sizes may still hold one -1 until `fill` knows how many devices there are."""

    path: str
    mesh: Mapping[str, int]
    rows: tuple[Row, ...]
    remat: Remat
    microbatches: int
    attention: Mapping[str, str]
    compiler_options: Mapping[str, Mapping[str, Any]]
    dcn: Mapping[str, int]
    problems: tuple[Problem, ...]
    text: str = ""  # as it stands in the file

    @property
    def name(self) -> str:
        return self.path.rsplit("/", 1)[-1].removesuffix(".yaml")

    @property
    def devices(self) -> int:
        """How many devices the mesh has; -1 while a size is still open."""
        return -1 if -1 in self.mesh.values() else math.prod(self.mesh.values())

    def row(self, table: str, path: str, axis: str) -> Row | None:
        """The row that speaks for one axis of an array: a finer table first, in it the row that names the array."""
        for name in reversed(TABLES[: TABLES.index(table) + 1]):
            found = [row for row in self.rows if row.table == name and row.axis == axis and row.speaks_of(path)]
            if found:
                return max(found, key=lambda row: len(row.array))
        return None

    def split(self, table: str, path: str, axis: str) -> tuple[str, ...]:
        """The mesh axes that split one axis of an array, the first one outermost."""
        row = self.row(table, path, axis)
        return tuple(name for name in row.mesh_axes if self.mesh[name] > 1) if row else ()

    def resolve(
        self, table: str, path: str, axes: Sequence[str], shape: Sequence[int], itemsize: int = 0
    ) -> tuple[tuple[tuple[str, ...], ...], list[Problem]]:
        """The mesh axes of each dimension of an array, and what does not fit.

        `itemsize` is in bytes and 0 for an activation, whose dimensions of size 1 (a decoded token) are never split.
        """
        spec: list[tuple[str, ...]] = []
        problems: list[Problem] = []
        taken: dict[str, Row] = {}
        for axis, size in zip(axes, shape, strict=True):
            row = self.row(table, path, axis)
            names = () if size == 1 and not itemsize else self.split(table, path, axis)
            spec.append(names)
            if row is None or not names:
                continue
            twice = [name for name in names if name in taken]
            if twice:
                first = taken[twice[0]]
                problems.append(
                    Problem(
                        f"{path}: {twice[0]} would split both {first.axis} and {axis}",
                        f"{first.place}\n        {row.place}",
                        f"give one of them another mesh axis, or set {row.table}.{path.split('.')[-1]}.{axis} to null",
                    )
                )
            taken.update(dict.fromkeys(names, row))
            pieces = math.prod(self.mesh[name] for name in names)
            if size % pieces:
                problems.append(self._does_not_divide(row, path, axis, size, names, math.prod(shape) * itemsize))
        return tuple(spec), problems

    def _does_not_divide(
        self, row: Row, path: str, axis: str, size: int, names: tuple[str, ...], total_bytes: int
    ) -> Problem:
        over = " x ".join(f"{name}={self.mesh[name]}" for name in names)
        cost = f" (replicates {human_bytes(total_bytes)} per device)" if total_bytes else ""
        fix = f"set {row.table}.{row.axis if not row.array else f'{row.array}.{row.axis}'} to null{cost}"
        if len(names) == 1:
            fitting = [n for n in range(1, self.mesh[names[0]] + 1) if size % n == 0 and (n & (n - 1) == 0 or n == size)]
            fix += f", or use {names[0]}={' or '.join(map(str, fitting))}"
        return Problem(f"{path}: {axis}={size} does not divide over {over}", row.place, fix)

    def fill(self, device_count: int, override: str = "") -> "Rules":
        """These rules with a -1 in the mesh replaced, so that the mesh has exactly `device_count` devices.

        A mesh that does not is a problem added to the result.
        """
        known = math.prod(size for size in self.mesh.values() if size > 0)
        mesh = dict(self.mesh)
        open_axis = next((name for name, size in mesh.items() if size == -1), None)
        problems = list(self.problems)
        if open_axis is not None:
            mesh[open_axis] = max(1, device_count // known)
        if math.prod(mesh.values()) != device_count:
            written = ", ".join(f"{name}: {size}" for name, size in self.mesh.items())
            if open_axis is not None:
                fix = f"make the other sizes divide {device_count}"
            else:
                sizes = [f"{name}={size * device_count // known}" for name, size in mesh.items()
                         if size * device_count % known == 0]
                fix = f"--mesh={sizes[0]}" if sizes else f"choose sizes whose product is {device_count}"
            problems.append(
                Problem(f"mesh: {known} device{'s' * (known > 1)} asked for, {device_count} here",
                        f"{self.path}: mesh: {{{written}}}", fix)
            )  # fmt: skip
        return dataclasses.replace(self, mesh=mesh, problems=tuple(problems))

    def unused(self, arrays: Mapping[str, Sequence[str]]) -> list[Problem]:
        """Rows that speak of nothing in a model whose arrays (path -> logical axes) are given.

        An array or axis that no model has is an error; one that only this model lacks is a warning.
        """
        problems = []
        for row in self.rows:
            named = {path: axes for path, axes in arrays.items() if row.speaks_of(path)}
            if any(row.axis in axes for axes in named.values()):
                continue
            if row.array and named:
                has = sorted({axis for axes in named.values() for axis in axes})
                problems.append(Problem(f"{row.array} has no axis {row.axis}", row.place, f"its axes: {', '.join(has)}"))
            elif row.array and row.array.split(".")[-1] not in ARRAYS:
                hint = did_you_mean(row.array, [*ARRAYS, *arrays])
                problems.append(
                    Problem(f"{row.array}: no array has this name{hint}", row.place,
                            f"name one of {', '.join(ARRAYS)}")
                )  # fmt: skip
            elif row.array and "." in row.array and any(path.endswith(row.array.split(".")[-1]) for path in arrays):
                near = difflib.get_close_matches(row.array, arrays, n=3, cutoff=0)
                problems.append(Problem(f"{row.array}: no array has this name", row.place, f"nearest: {', '.join(near)}"))
            else:
                what = row.array or row.axis
                problems.append(
                    Problem(f"{what}: this config has none, the row does nothing", row.place, "drop the row", warning=True)
                )
        for name, size in self.mesh.items():
            if size > 1 and not any(name in row.mesh_axes for row in self.rows):
                problems.append(
                    Problem(f"mesh: {name}={size} splits nothing, its devices compute the same {size} times",
                            f"{self.path}: mesh.{name}: {size}", f"map an axis to {name}, or drop it", warning=True)
                )  # fmt: skip
        return problems


def check(problems: Iterable[Problem]) -> list[Problem]:
    """The warnings among `problems`. Raises ShardingError with all the others, alike ones folded into one."""
    problems = list(problems)
    groups: dict[tuple[str, str], list[Problem]] = {}
    for problem in problems:
        if not problem.warning:
            place, _, finding = problem.message.partition(": ")
            groups.setdefault((problem.row, finding), []).append(problem)
    if groups:
        texts = []
        for alike in groups.values():
            others = list(dict.fromkeys(p.message.partition(": ")[0] for p in alike[1:]))
            others = [name for name in others if name != alike[0].message.partition(": ")[0]]
            texts.append(f"{alike[0]}" + (f"\n  also  {', '.join(others)}" if others else ""))
        raise ShardingError("\n".join(texts))
    return [problem for problem in problems if problem.warning]


def load(name: str, mesh_override: str = "") -> Rules:
    """The rules of a file (a path, or a name in rules/; "none" is rules/single.yaml), its problems collected.

    `mesh_override` is 'tensor=4' or 'data=2,tensor=4'. Raises InputError where there is no file or it is not a YAML
    mapping; everything else that is wrong stands in `.problems`.
    """
    path = find_file("single" if name == "none" else name, "rules")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from error
    raw = parse_yaml(text, str(path))
    if not isinstance(raw, dict):
        kind = "is empty" if raw is None else f"is a {type(raw).__name__}"
        raise ShardingError(f"{path}: a rules file is a mapping with a mesh and rules; this one {kind}\n"
                            f"  fix   begin with 'mesh: {{tensor: 8}}'; rules/tp8.yaml shows how")  # fmt: skip
    return dataclasses.replace(_Reader(str(path)).rules(raw, mesh_override), text=text)


class _Reader:
    """Turns the plain values of one rules file into Rules, noting every problem on the way."""

    def __init__(self, path: str):
        self.path = path
        self.problems: list[Problem] = []

    def wrong(self, message: str, key: str, value: Any, fix: str) -> None:
        shown = _flow(value)
        self.problems.append(Problem(message, f"{self.path}: {key}: {shown}", fix))

    def rules(self, raw: Mapping[Any, Any], mesh_override: str) -> Rules:
        for key, value in raw.items():
            if key not in SECTIONS:
                self.wrong(f"{key}: unknown section{did_you_mean(str(key), SECTIONS)}", str(key), value,
                           f"use one of {', '.join(SECTIONS)}")  # fmt: skip
        mesh = self.mesh(raw.get("mesh"), mesh_override)
        rows = tuple(row for table in TABLES for row in self.table(table, raw.get(table), mesh))
        microbatches = raw.get("microbatches", 1)
        if not _is_int(microbatches) or microbatches < 1:
            self.wrong("microbatches: must be a whole number from 1", "microbatches", microbatches, "write 1")
            microbatches = 1
        return Rules(
            path=self.path,
            mesh=mesh,
            rows=rows,
            remat=self.remat(raw.get("remat", "none")),
            microbatches=microbatches,
            attention=self.attention(raw.get("attention")),
            compiler_options=self.compiler_options(raw.get("compiler_options")),
            dcn=self.dcn(raw.get("dcn"), mesh),
            problems=tuple(self.problems),
        )

    def mapping(self, key: str, value: Any) -> Mapping[Any, Any]:
        if value is None:
            return {}
        if not isinstance(value, dict):
            self.wrong(f"{key}: must be a mapping", key, value, f"write '{key}: {{name: value}}' or drop it")
            return {}
        return value

    def mesh(self, value: Any, override: str) -> dict[str, int]:
        if not value:
            self.wrong("mesh: a rules file needs a mesh", "mesh", value, "write for example 'mesh: {tensor: 8}'")
        raw = dict(self.mapping("mesh", value))
        for item in filter(None, override.split(",")):
            name, _, size = item.partition("=")
            if name not in raw:
                raise ShardingError(
                    f"--mesh={override}: {self.path} has no mesh axis {name!r}{did_you_mean(name, map(str, raw))}\n"
                    f"  fix   its axes are {', '.join(map(str, raw))}"
                )
            raw[name] = int(size) if size.lstrip("-").isdigit() else size
        mesh: dict[str, int] = {}
        for name, size in raw.items():
            if name not in MESH_AXES:
                self.wrong(f"mesh: unknown mesh axis {name}{did_you_mean(str(name), MESH_AXES)}", f"mesh.{name}", size,
                           f"use one of {', '.join(MESH_AXES)}")  # fmt: skip
            if not _is_int(size) or (size < 1 and size != -1):
                self.wrong(f"mesh: {name}={size} is no size", f"mesh.{name}", size,
                           "write a whole number from 1, or -1 for all the devices that are left")  # fmt: skip
                size = 1
            mesh[str(name)] = size
        if list(mesh.values()).count(-1) > 1:
            names = [name for name, size in mesh.items() if size == -1]
            self.wrong(f"mesh: {' and '.join(names)} are both -1", "mesh", value, "give all but one of them a size")
            for name in names[1:]:
                mesh[name] = 1
        return mesh

    def table(self, table: str, value: Any, mesh: Mapping[str, int]) -> Iterable[Row]:
        for key, target in self.mapping(table, value).items():
            array, _, axis = str(key).rpartition(".")
            where = f"{table}.{key}"
            names = tuple(target) if isinstance(target, list) else () if target is None else (target,)
            good = True
            if axis not in AXES:
                known = [f"{array}.{name}" if array else name for name in AXES]
                hint = did_you_mean(str(key), known) or did_you_mean(axis, AXES)
                self.wrong(f"{where}: unknown axis {axis}{hint}", where, target, f"use one of {', '.join(AXES)}")
                good = False
            for name in names:
                if name not in mesh:
                    hint = did_you_mean(str(name), mesh)
                    self.wrong(f"{where}: {name} is no axis of the mesh{hint}", where, target,
                               f"use one of {', '.join(mesh)}, or null to replicate")  # fmt: skip
                    good = False
            for name in dict.fromkeys(names):
                if names.count(name) > 1:
                    self.wrong(f"{where}: {name} stands twice", where, target, f"name {name} once")
                    good = False
            if good:
                yield Row(f"{self.path}: {where}: {_flow(target)}", table, array, axis, names)

    def remat(self, value: Any) -> Remat:
        if value in ("none", "block", "dots"):
            return Remat(value)
        if not isinstance(value, dict):
            hint = did_you_mean(str(value), ("none", "block", "dots"))
            self.wrong(f"remat: unknown policy {value}{hint}", "remat", value,
                       "use none, block, dots, or {save: [q, k, v], offload: [residual]}")  # fmt: skip
            return Remat()
        lists: dict[str, tuple[str, ...]] = {}
        for key, names in value.items():
            if key not in ("save", "offload") or not isinstance(names, list):
                self.wrong(f"remat: unknown entry {key}{did_you_mean(str(key), ('save', 'offload'))}", f"remat.{key}",
                           names, "write {save: [q, k, v], offload: [residual]}")  # fmt: skip
                continue
            for name in names:
                if name not in ARRAYS:
                    self.wrong(f"remat: no array is named {name}{did_you_mean(str(name), ARRAYS)}", f"remat.{key}",
                               names, "name activations, such as residual, q, k, v, attention_out, hidden")  # fmt: skip
            lists[key] = tuple(map(str, names))
        return Remat("names", lists.get("save", ()), lists.get("offload", ()))

    def attention(self, value: Any) -> dict[str, str]:
        chosen = dict.fromkeys(PLATFORMS, "xla")
        for platform, kernel in self.mapping("attention", value).items():
            if platform not in PLATFORMS:
                self.wrong(f"attention: unknown platform {platform}{did_you_mean(str(platform), PLATFORMS)}",
                           f"attention.{platform}", kernel, f"use {', '.join(PLATFORMS)}")  # fmt: skip
            elif kernel not in KERNELS[platform]:
                self.wrong(f"attention: {platform} has no kernel {kernel}{did_you_mean(str(kernel), KERNELS[platform])}",
                           f"attention.{platform}", kernel, f"use {' or '.join(KERNELS[platform])}")  # fmt: skip
            else:
                chosen[platform] = kernel
        return chosen

    def compiler_options(self, value: Any) -> dict[str, Mapping[str, Any]]:
        options: dict[str, Mapping[str, Any]] = {}
        for platform, entries in self.mapping("compiler_options", value).items():
            if platform not in PLATFORMS:
                self.wrong(f"compiler_options: unknown platform {platform}{did_you_mean(str(platform), PLATFORMS)}",
                           f"compiler_options.{platform}", entries, f"use {', '.join(PLATFORMS)}")  # fmt: skip
            else:
                options[platform] = self.mapping(f"compiler_options.{platform}", entries)
        return options

    def dcn(self, value: Any, mesh: Mapping[str, int]) -> dict[str, int]:
        parts: dict[str, int] = {}
        for name, size in self.mapping("dcn", value).items():
            if name not in mesh:
                self.wrong(f"dcn: {name} is no axis of the mesh{did_you_mean(str(name), mesh)}", f"dcn.{name}", size,
                           f"use one of {', '.join(mesh)}")  # fmt: skip
            elif not _is_int(size) or size < 1 or (mesh[name] > 0 and mesh[name] % size):
                self.wrong(f"dcn: {name}={mesh[name]} is not made of {size} slices", f"dcn.{name}", size,
                           f"use a divisor of {mesh[name]}")  # fmt: skip
            else:
                parts[name] = size
        return parts


def human_bytes(count: float) -> str:
    """'1.2 MB': decimal units, as the field counts memory traffic."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _flow(value: Any) -> str:
    """A value as it would stand on one line of YAML."""
    if value is None:
        return "null"
    if isinstance(value, list):
        return f"[{', '.join(map(_flow, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_flow(entry)}" for key, entry in value.items()) + "}"
    return str(value)
