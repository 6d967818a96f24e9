"""Rules from the plain values of a YAML file, with every problem of the file collected."""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from gspmd_lm.config import core_yaml
from gspmd_lm.config.paths import find_file, read_text
from gspmd_lm.errors import did_you_mean, either, name_kind, nearest
from gspmd_lm.hardware.chips import PLATFORMS
from gspmd_lm.hardware.target import MOST_DEVICES
from gspmd_lm.sharding.axes import DECODER
from gspmd_lm.sharding.names import Vocabulary
from gspmd_lm.sharding.problems import Problem, ShardingError, flow, place
from gspmd_lm.sharding.rules import (
    CONTEXTS,
    EXPERT_BUFFER,
    GATHERS,
    KEEPS,
    KERNELS,
    MESH_AXES,
    REMATS,
    SCHEDULES,
    TABLES,
    Pipeline,
    Remat,
    Row,
    Rules,
)
from gspmd_lm.sharding.rules_keys import RulesFile
from gspmd_lm.units import whole_number

SECTIONS = tuple(field.name for field in dataclasses.fields(RulesFile))


def load(name: str, mesh_override: str = "", vocabulary: Vocabulary = DECODER, overrides: Sequence[str] = ()) -> Rules:
    """The rules of a file, with its problems in `.problems`.

    `name` is a path, or a name in rules/; "none" is rules/single.yaml. `mesh_override` is 'tensor=4' or
    'data=2,tensor=4'. `vocabulary` has the names of the model's axes and arrays. Each of `overrides`, such as
    'rules.rules.residual.seq=null' or 'rules.remat=block', is laid over the file before `mesh_override`. Raises
    InputError if the file does not exist or is not a YAML mapping, or if an override cannot be laid over it.
    """
    path = find_file("single" if name == "none" else name, "rules")
    return from_text(read_text(path), str(path), mesh_override, vocabulary, overrides)


def from_text(
    text: str, path: str, mesh_override: str = "", vocabulary: Vocabulary = DECODER, overrides: Sequence[str] = ()
) -> Rules:
    """Rules from the text of a rules file, as `load` gives them. `path` is for messages."""
    raw = core_yaml.parse(text, path)
    if not isinstance(raw, dict):
        kind = "is empty" if raw is None else f"is {name_kind(raw)}"
        raise ShardingError(
            f"{path}: a rules file is a mapping with a mesh and rules; this one {kind}\n"
            f"  fix   begin with 'mesh: {{tensor: 8}}'; rules/tp8.yaml shows how"
        )
    reader = _Reader(path, vocabulary)
    values = reader.lay_over(raw, mesh_override, overrides)
    if reader.flags:
        text = f"# {path} with {' '.join(dict.fromkeys(reader.flags.values()))}\n{core_yaml.dump(values)}"
    return dataclasses.replace(reader.rules(values), text=text)


def from_dict(raw: Mapping[Any, Any], path: str, vocabulary: Vocabulary = DECODER) -> Rules:
    """Rules from the plain values of a rules file, with their problems in `.problems`. `path` is for messages."""
    return _Reader(path, vocabulary).rules(raw)


def to_dict(rules: Rules) -> dict[str, Any]:
    """The plain values of a rules file that says what `rules` say: `from_dict` makes the same rules of them.

    What is at its default is left out.
    """
    tables: dict[str, dict[str, Any]] = {table: {} for table in TABLES}
    for row in rules.rows:
        names = [*row.mesh_axes]
        key = row.key.removeprefix(f"{row.table}.")
        tables[row.table][key] = None if not names else names[0] if len(names) == 1 else names
    values = {
        "mesh": dict(rules.mesh),
        **tables,
        "remat": rules.remat.plain,
        "microbatches": rules.microbatches,
        "pipeline": rules.pipeline.plain if rules.pipeline else None,
        "interleave": rules.interleave,
        "expert_buffer": rules.expert_buffer,
        "unroll": rules.unroll,
        "attention": dict(rules.attention),
        "context": rules.context,
        "compiler_options": {platform: dict(options) for platform, options in rules.compiler_options.items()},
        "dcn": dict(rules.dcn),
    }
    usual = {field.name: field.default for field in dataclasses.fields(RulesFile)}
    return {key: value for key, value in values.items() if value not in (usual[key], {}, None)}


def key_path(key: str) -> tuple[str, ...]:
    """The names that lead to a key of a rules file: what follows the name of a table, with its dots, is one row."""
    return tuple(key.split(".", 2 if key.startswith("compiler_options.") else 1))


def read_setting(text: str, vocabulary: Vocabulary = DECODER) -> tuple[tuple[str, ...], Any]:
    """The path of the key and the value that 'rules.KEY=VALUE' of a flag --set names."""
    flag = f"--set {text}"
    name, equals, written = text.partition("=")
    first, _, key = name.strip().partition(".")
    if not equals or first != "rules" or not key or key.endswith("."):
        raise ShardingError(
            f"{flag}: not a key of a rules file and its value\n"
            "  fix   write --set rules.TABLE.ROW=VALUE, such as rules.rules.heads=null"
        )
    path = key_path(key)
    if path[0] not in SECTIONS:
        row_of_rules = key.rpartition(".")[2] in vocabulary.axes
        table = "rules" if row_of_rules else "mesh" if key in MESH_AXES else ""
        fix = f"--set rules.{table}.{key}={written}" if table else f"use {either(SECTIONS)}"
        hint = "" if table else did_you_mean(path[0], SECTIONS)
        raise ShardingError(f"{flag}: a rules file has no section {path[0]}{hint}\n  fix   {fix}")
    return path, core_yaml.parse(written, flag)


def read_sizes(text: str) -> dict[str, int]:
    """The mesh axes and sizes that a flag --mesh names, such as 'data=2,tensor=4'."""
    sizes: dict[str, int] = {}
    for item in filter(None, text.split(",")):
        name, _, size = item.partition("=")
        if (count := whole_number(size.removeprefix("-"))) is None:
            instead = name.replace(":", "=") if ":" in name else f"{name}=SIZE"
            raise ShardingError(f"--mesh={text}: {name} has no size\n  fix   write --mesh={instead}")
        if name in sizes:
            raise ShardingError(f"--mesh={text}: {name} appears twice\n  fix   give it one size")
        sizes[name] = -count if size.startswith("-") else count
    return sizes


class _Reader:
    """Turns the plain values of one rules file into Rules, and collects every problem."""

    def __init__(self, path: str, vocabulary: Vocabulary):
        self.path = path
        self.vocabulary = vocabulary
        self.problems: list[Problem] = []
        self.flags: dict[str, str] = {}  # key -> the flag that set it

    def wrong(self, message: str, key: str, value: Any, fix: str, **more: Any) -> None:
        self.problems.append(Problem(message, place(self.path, self.flags, key, value), fix, **more))

    def check_word(self, word: Any, words: Iterable[str], what: str, key: str, value: Any, fix: str = "") -> bool:
        """Whether `word` is one of `words`. If not, that is a problem."""
        words = tuple(words)
        if word not in words:
            message = f"{what} {flow(word)}{did_you_mean(str(word), words)}"
            misspelt = str(word), nearest(str(word), words)
            self.wrong(message, key, value, f"use {either(words)}{fix}", misspelt=misspelt)
        return word in words

    def size(self, number: Any, what: str, key: str, fix: str = "") -> bool:
        """Whether `number` is a whole number from 1. If not, that is a problem."""
        good = isinstance(number, int) and not isinstance(number, bool) and number >= 1
        if not good:
            self.wrong(f"{what}={flow(number)} is not a size", key, number, f"write a whole number from 1{fix}")
        return good

    def mapping(self, key: str, value: Any) -> Mapping[Any, Any]:
        if value is not None and not isinstance(value, dict):
            self.wrong(f"{key}: must be a mapping", key, value, f"write '{key}: {{name: value}}' or drop it")
        return value if isinstance(value, dict) else {}

    def lay_over(self, raw: Mapping[Any, Any], mesh_override: str, overrides: Sequence[str]) -> dict[Any, Any]:
        """The values of a file with those of flags laid over them."""
        values = dict(raw)
        for text in overrides:
            self.lay(values, text)
        if mesh_override and isinstance(values.get("mesh"), dict):
            values["mesh"] = self.sizes(values["mesh"], mesh_override)
        return values

    def lay(self, raw: dict[Any, Any], text: str) -> None:
        """Lays one 'rules.KEY=VALUE' over the values of a file."""
        flag, (path, value), within = f"--set {text}", read_setting(text, self.vocabulary), raw
        for number, part in enumerate(path[:-1], 1):
            if within.get(part) is not None and not isinstance(within[part], dict):
                known = ".".join(path[:number])
                raise ShardingError(
                    f"{flag}: in {self.path}, {known} is {flow(within[part])}, which has no rows\n"
                    f"  fix   --set rules.{known}=VALUE"
                )
            within[part] = dict(within.get(part) or {})
            within = within[part]
        within[path[-1]] = value
        self.flags[".".join(path)] = flag

    def sizes(self, mesh: Mapping[Any, Any], override: str) -> dict[Any, Any]:
        """The sizes of a mesh with those of --mesh laid over them."""
        sizes = read_sizes(override)
        for name in sizes:
            if name not in mesh:
                raise ShardingError(
                    f"--mesh={override}: {self.path} has no mesh axis {name!r}{did_you_mean(name, map(str, mesh))}\n"
                    f"  fix   its axes are {', '.join(map(str, mesh))}"
                )
            self.flags[f"mesh.{name}"] = f"--mesh={override}"
        return {**mesh, **sizes}

    def rules(self, raw: Mapping[Any, Any]) -> Rules:
        for key, value in raw.items():
            self.check_word(key, SECTIONS, "unknown section", str(key), value)
        mesh = self.mesh(raw.get("mesh"))
        rows = tuple(row for table in TABLES for row in self.table(table, raw.get(table), mesh))
        microbatches, context = raw.get("microbatches", 1), raw.get("context", CONTEXTS[0])
        interleave = raw.get("interleave", 1)
        return Rules(
            path=self.path,
            vocabulary=self.vocabulary,
            mesh=mesh,
            rows=rows,
            remat=self.remat(raw.get("remat", REMATS[0])),
            microbatches=microbatches if self.size(microbatches, "microbatches", "microbatches") else 1,
            unroll=self.unroll(raw.get("unroll")),
            attention=self.attention(raw.get("attention")),
            context=context
            if self.check_word(context, CONTEXTS, "context: unknown form", "context", context)
            else CONTEXTS[0],
            compiler_options={
                platform: self.mapping(f"compiler_options.{platform}", entries)
                for platform, entries in self.by_platform("compiler_options", raw.get("compiler_options"))
            },
            dcn=self.dcn(raw.get("dcn"), mesh),
            pipeline=self.pipeline(raw),
            interleave=interleave if self.size(interleave, "interleave", "interleave") else 1,
            expert_buffer=self.expert_buffer(raw.get("expert_buffer", EXPERT_BUFFER)),
            problems=tuple(self.problems),
            flags=self.flags,
        )

    def mesh(self, raw: Any) -> dict[str, int]:
        if not isinstance(raw, dict) or not raw:
            self.wrong("mesh: a rules file needs a mesh", "mesh", raw, "write for example 'mesh: {tensor: 8}'")
            return {}
        mesh: dict[str, int] = {}
        for name, size in raw.items():
            self.check_word(name, MESH_AXES, "mesh: unknown mesh axis", f"mesh.{name}", size)
            rest = ", or -1 for all the devices that are left"
            is_open = size == -1 and isinstance(size, int)
            mesh[str(name)] = size if is_open or self.size(size, f"mesh: {name}", f"mesh.{name}", rest) else 1
        still_open = [name for name, size in mesh.items() if size == -1]
        if len(still_open) > 1:
            self.wrong(f"mesh: {' and '.join(still_open)} are both -1", "mesh", raw, "give all but one of them a size")
            mesh |= dict.fromkeys(still_open[1:], 1)
        if math.prod(size for size in mesh.values() if size > 0) > MOST_DEVICES:
            what = f"mesh: its sizes multiply to more than {MOST_DEVICES:,} devices, which no mesh has"
            key = max(mesh, key=lambda name: mesh[name])
            self.wrong(what, f"mesh.{key}", mesh[key], f"a smaller size of {key}")
            return {}
        return mesh

    def table(self, table: str, value: Any, mesh: Mapping[str, int]) -> Iterable[Row]:
        axes = self.vocabulary.axes
        for key, target in self.mapping(table, value).items():
            array, _, axis = str(key).rpartition(".")
            where = f"{table}.{key}"
            names = tuple(target) if isinstance(target, list) else () if target is None else (target,)
            problems_before = len(self.problems)
            if axis not in axes:
                hint, near = did_you_mean(axis, axes), nearest(axis, axes)
                if not array and axis in self.vocabulary.arrays:
                    hint, near = f" ({axis} is an array: write {axis}.AXIS)", ""
                fix, more = f"use {either(axes)}", {"axes": tuple(axes), "misspelt": (axis, near)}
                self.wrong(f"{where}: unknown axis {axis}{hint}", where, target, fix, **more)
            for at, name in enumerate(names):
                if name in names[:at]:
                    self.wrong(f"{where}: {flow(name)} appears twice", where, target, f"name {flow(name)} once")
                elif mesh and isinstance(name, str) and len(parts := name.replace(",", " ").split()) > 1:
                    what = f"{where}: {flow(name)} is one name, and no list of mesh axes"
                    self.wrong(what, where, target, f"write [{', '.join(parts)}]")
                elif mesh:  # a missing mesh is a problem already
                    what, rest = f"{where}: the mesh has no axis", ", or null to replicate"
                    self.check_word(name, mesh, what, where, target, rest)
            if len(self.problems) == problems_before and mesh:
                yield Row(place(self.path, self.flags, where, target), table, array, axis, names)

    def remat(self, value: Any) -> Remat:
        if not isinstance(value, dict):
            policies = *REMATS, "{save: [q, k, v], offload: [residual]}"
            good = self.check_word(value, policies, "remat: unknown policy", "remat", value)
            if good and value not in REMATS:
                self.wrong("remat: a mapping in quotes is a word", "remat", value, "leave out the quotes")
            return Remat(value if value in REMATS else REMATS[0])
        lists: dict[str, list[str]] = {"save": [], "offload": []}
        for key, names in value.items():
            if not self.check_word(key, lists, "remat: unknown entry", f"remat.{key}", names):
                continue
            if not isinstance(names, list):
                self.wrong(f"remat.{key}: must be a list", f"remat.{key}", names, "write for example [q, k, v]")
                continue
            what = "remat: no activation of a block is named"
            kept = self.vocabulary.saveable_names
            lists[key] = [name for name in names if self.check_word(name, kept, what, f"remat.{key}", names)]
        for name in sorted(set(lists["save"]) & set(lists["offload"])):
            self.wrong(f"remat: {name} is both saved and offloaded", "remat", value, "drop one of them")
        save, offload = tuple(lists["save"]), tuple(lists["offload"])
        return Remat("names", save, offload) if save or offload else Remat("block")  # which keeps nothing either

    def pipeline(self, raw: Mapping[Any, Any]) -> Pipeline | None:
        value = raw.get("pipeline")
        if not self.mapping("pipeline", value):
            return None
        words = {
            "gather": (GATHERS, "weights are gathered once in a"),
            "keep": (KEEPS, "nothing is kept of"),
            "schedule": (SCHEDULES, "unknown schedule"),
        }
        usual = {"microbatches": None, "repeats": 1, **{key: known[0] for key, (known, _) in words.items()}}
        values = {**usual, "gather": None, **self.mapping("pipeline", value)}
        # What is wrong with a key stands in its own message; a missing one reads as null.
        good = [
            self.check_word(key, usual, "pipeline: unknown key", f"pipeline.{key}", one)
            and (
                (one is None and key == "gather")
                or self.check_word(one, words[key][0], f"pipeline: {words[key][1]}", f"pipeline.{key}", one)
                if key in words
                else self.size(one, f"pipeline: {key}", f"pipeline.{key}")
            )
            for key, one in values.items()
        ]
        if not all(good):
            return None
        if values["schedule"] == "1f1b":
            offload = raw["remat"].get("offload") if isinstance(raw.get("remat"), dict) else None
            for key, one, only in (
                *((f"pipeline.{key}", values[key] or usual[key], usual[key]) for key in ("repeats", "gather", "keep")),
                ("microbatches", raw.get("microbatches", 1), 1),
                ("remat.offload", offload or [], []),
            ):
                if one != only:
                    message = f"pipeline: schedule: 1f1b does not go with {key}={flow(one)}"
                    self.wrong(message, key, one, f"--set rules.{key}={only}, or rules.pipeline.schedule=gpipe")
        return Pipeline(**{**values, "gather": values["gather"] or ""})

    def expert_buffer(self, value: Any) -> float:
        if isinstance(value, int | float) and not isinstance(value, bool) and 1 <= value < math.inf:
            return float(value)
        fix = "write a number from 1, such as 2: room for twice the mean number of rows"
        self.wrong(f"expert_buffer={flow(value)} is no room for what arrives on average", "expert_buffer", value, fix)
        return EXPERT_BUFFER

    def unroll(self, value: Any) -> int | Literal["all"] | None:
        good = value is None or value == "all" or self.size(value, "unroll", "unroll", ", or 'all'")
        return value if good else None

    def by_platform(self, section: str, value: Any) -> list[tuple[str, Any]]:
        entries = self.mapping(section, value).items()
        what = f"{section}: unknown platform"
        return [
            (name, entry)
            for name, entry in entries
            if self.check_word(name, PLATFORMS, what, f"{section}.{name}", entry)
        ]

    def attention(self, value: Any) -> dict[str, str]:
        chosen: dict[str, str] = {}
        for platform, kernel in self.by_platform("attention", value):
            what = f"attention: {platform} has no kernel"
            if self.check_word(kernel, KERNELS[platform], what, f"attention.{platform}", kernel):
                chosen[platform] = kernel
        return chosen

    def dcn(self, value: Any, mesh: Mapping[str, int]) -> dict[str, int]:
        """The parts into which mesh axes are cut; none where that is chosen when the devices are known."""
        if not mesh:  # a missing mesh is a problem already
            return {}
        return {
            name: slices
            for name, slices in self.mapping("dcn", None if value == "auto" else value).items()
            if self.check_word(name, mesh, "dcn: the mesh has no axis", f"dcn.{name}", slices)
            and self.size(slices, f"dcn: {name}", f"dcn.{name}")
        }
