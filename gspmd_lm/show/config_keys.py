"""Every key of a config and of a rules file: its type, its default and its meaning; and their JSON schemas.

All is read from the dataclasses. The meaning of a key is the comment on the line of its field, or right above it. A
mapping without a comment means what the docstring of its class says.
"""

import ast
import dataclasses
import inspect
import io
import json
import re
import textwrap
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pydantic
from pydantic.json_schema import GenerateJsonSchema

from gspmd_lm import versions
from gspmd_lm.config import Config
from gspmd_lm.config.core_yaml import dump
from gspmd_lm.config.types import OTHER_WORDS, is_end_of
from gspmd_lm.errors import InputError, did_you_mean, either
from gspmd_lm.runtime import quiet
from gspmd_lm.sharding.axes import ARRAYS, AXES
from gspmd_lm.sharding.rules_keys import RulesFile

REQUIRED = "required"
SCHEMAS = {"config": Config, "rules": RulesFile}
_LARGEST = 2**31 - 2  # bounds from here on are those of int32, not of the setting
_KINDS = {
    "integer": "whole number",
    "number": "number",
    "boolean": "true or false",
    "string": "text",
    "null": "null",
    "object": "mapping",
}


@dataclasses.dataclass(frozen=True)
class Key:
    """One key that a file may have."""

    name: str  # model.attention.rope.scaling.factor
    kind: str  # whole number from 1
    default: str  # as in YAML, or "required"
    meaning: str


@dataclasses.dataclass(frozen=True)
class KeyGroup:
    """The keys of one mapping of a file."""

    name: str  # model.attention.rope.scaling; "" for the whole file
    about: str
    keys: tuple[Key, ...]


class _WithMeanings(GenerateJsonSchema):
    """Makes the schema of a dataclass, with the meaning of each key."""

    def dataclass_schema(self, schema: Any) -> dict[str, Any]:
        found = super().dataclass_schema(schema)
        for name, meaning in _comments(schema["cls"]).items():
            if meaning:
                found["properties"][name]["description"] = _sentence(meaning)
        return found

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False  # the title would be the key's name again


def schema(kind: type = Config) -> dict[str, Any]:
    """The JSON schema of a file that is read into a dataclass."""
    return pydantic.TypeAdapter(kind).json_schema(schema_generator=_WithMeanings)


def schema_text(which: str) -> str:
    """The schema of a config or of a rules file as an editor reads it. A config is named by its file, if not by itself.

    Raises InputError for any other word.
    """
    if which not in SCHEMAS:
        raise InputError(f"{which}: there is no schema of it\n  fix   keys --schema={either(SCHEMAS)}")
    found = schema(SCHEMAS[which])
    found["required"] = [name for name in found["required"] if name != "name"]
    return json.dumps({"$schema": "https://json-schema.org/draft/2020-12/schema", **found}, indent=1)


def sections(kind: type = Config, name: str = "") -> Iterator[KeyGroup]:
    """The mappings of a file, each before those that it contains."""
    whole = schema(kind)
    yield from _sections(whole, whole.get("$defs", {}), name)


def _sections(found: Mapping[str, Any], defined: Mapping[str, Any], name: str) -> Iterator[KeyGroup]:
    keys, inner = [], []
    for field, value in found["properties"].items():
        path = f"{name}.{field}".lstrip(".")
        mappings = [(defined[reference], within) for reference, within in _references(value, path)]
        meaning = value.get("description", "")
        if not meaning and mappings:
            meaning = _sentence(mappings[0][0]["description"].partition("\n")[0])
        default = REQUIRED if field in found.get("required", ()) else _default(value)
        keys.append(Key(path, _kind(value), default, meaning))
        inner += mappings
    yield KeyGroup(name, " ".join(found.get("description", "").split()), tuple(keys))
    for mapping, path in inner:
        yield from _sections(mapping, defined, path)


def every_key() -> Iterator[KeyGroup]:
    """The mappings of a config, and then those of a rules file, as --set names them."""
    yield from sections()
    yield from sections(RulesFile, "rules")


def text(wanted: str = "") -> str:
    """What the verb `keys` prints: all keys, axes and arrays, or those that have `wanted` in their names or meanings.

    A word of other projects stands for the key that has this meaning here. Raises InputError if nothing has `wanted`.
    """
    groups = [*every_key()]
    names = [key.name for group in groups for key in group.keys]
    shown = {name for name in names if wanted in name}
    shown |= {key.name for group in groups for key in group.keys if wanted and _stands_in(wanted, key.meaning)}
    if not shown or wanted in OTHER_WORDS:
        here = _words_here(wanted)
        meant = [name for name in names if any(is_end_of(words, name) for words in here)]
        depth = min((name.count(".") for name in meant), default=0)
        shown |= {name for name in meant if name.count(".") == depth}
    meanings = {name: meaning for name, (_, meaning) in AXES.items()} | ARRAYS
    named = [name for name in meanings if wanted in name or _stands_in(wanted, meanings[name])]
    if not shown and not named:
        hint = did_you_mean(wanted, names) or did_you_mean(wanted, {name.rpartition(".")[2] for name in names})
        raise InputError(f"{wanted}: no key has this in its name or meaning{hint}\n  fix   keys shows all of them")
    lines = []
    for group in groups:
        keys = [key for key in group.keys if key.name in shown]
        if keys:
            about = f"{group.name}: {group.about}" if group.name else group.about
            lines += ["", *textwrap.wrap(about, 100)]
        for key in keys:
            lines += [f"  {f'{key.name}: {key.default}':40} {key.kind}".rstrip()]
            lines += textwrap.wrap(key.meaning, 94, initial_indent=" " * 6, subsequent_indent=" " * 6)
    if named:
        lines += ["", "Axes and arrays that a row of a rules file may name (docs/rules_reference.md)"]
        lines += [f"  {name:29} {meanings[name]}" for name in named]
    return versions.with_documents("\n".join(lines[1:]))


def _stands_in(word: str, meaning: str) -> bool:
    return bool(re.search(rf"\b{re.escape(word)}", meaning, re.IGNORECASE))


def _words_here(word: str) -> set[str]:
    """The ends of the keys that mean what a word means in other projects.

    The fields of published models' config.json are known to what converts them, which takes a second to import.
    """
    if word in OTHER_WORDS:
        return {OTHER_WORDS[word]}
    quiet.import_jax()
    from gspmd_lm.convert.families import FAMILIES
    from gspmd_lm.convert.fields import Renamed

    codecs = [codec for family in FAMILIES for codec in family.codecs if isinstance(codec, Renamed)]
    return {codec.setting for codec in codecs if word in codec.names.split()}


def page() -> str:
    """The page of the site that lists all keys."""
    lines = [
        "# The config",
        "",
        "A config says what is computed. A rules file, which [rules.md](rules.md) explains, says where. The command",
        "`python main.py keys --markdown` prints this page. `python main.py keys WORD` prints the",
        "keys of both files with that word in their names or meanings, or what other projects call so: `keys lr`.",
        "`--set KEY=VALUE` sets any of them on the command line, with the value written as in YAML:",
        "`--set model.layers=4`, `--set train.trackers=[]`.",
    ]
    for section in sections():
        title = f"`{section.name}`" if section.name else "The whole file"
        lines += ["", f"## {title}", "", *textwrap.wrap(_code(section.about), 120), ""]
        lines += ["| key | default | type | meaning |", "|---|---|---|---|"]
        for key in section.keys:
            default = key.default if key.default == REQUIRED else f"`{key.default}`"
            cells = f"`{key.name}`", default, key.kind, key.meaning
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _comments(kind: type) -> dict[str, str]:
    """Field -> the comment above it and on its lines, in the class that has it."""
    source = textwrap.dedent(inspect.getsource(kind))
    fields = {
        token.start[0]: (token.string.lstrip("# "), token.line.strip().startswith("#"))
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    (body,) = ast.parse(source).body
    assert isinstance(body, ast.ClassDef)
    base = kind.__mro__[1]
    comments = _comments(base) if dataclasses.is_dataclass(base) else {}
    for node in body.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            first = node.lineno
            while fields.get(first - 1, ("", False))[1]:
                first -= 1
            lines = range(first, (node.end_lineno or node.lineno) + 1)
            comments[node.target.id] = " ".join(fields[line][0] for line in lines if line in fields)
    return comments


def _references(value: Mapping[str, Any], path: str) -> Iterator[tuple[str, str]]:
    """The mappings that a value may be or hold, by their names in the schema, each with the path of its keys."""
    if "$ref" in value:
        yield value["$ref"].rpartition("/")[2], path
    for choice in _choices(value):
        yield from _references(choice, path)
    if isinstance(items := value.get("items"), dict):
        yield from _references(items, f"{path}[]")


def _choices(value: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return value.get("anyOf") or value.get("oneOf") or ()


def _kind(value: Mapping[str, Any]) -> str:
    """The type of a value in words, with its bounds: 'number from 0 to below 1'."""
    if choices := _choices(value):
        return either(map(_kind, choices))
    if "enum" in value or "const" in value:
        return either(value.get("enum") or [value["const"]])
    if value.get("type") == "array":
        return f"list of {_kind(value['items'])}"
    words = _KINDS[value.get("type", "object")]
    for word, key in (
        ("from", "minimum"),
        ("above", "exclusiveMinimum"),
        ("to", "maximum"),
        ("to below", "exclusiveMaximum"),
    ):
        if key in value and value[key] < _LARGEST:
            words += f" {word} {value[key]}"
    return words


def _default(value: Mapping[str, Any]) -> str:
    return dump([value["default"]], flow=True).strip()[1:-1] if "default" in value else "{}"


def _sentence(words: str) -> str:
    """The words as a sentence. A word of the config file at its beginning stays as it is."""
    first = re.match(r"\w+(?![:\w]| \|)", words)
    capital = words[:1].upper() if first and "_" not in first[0] else words[:1]
    return capital + words[1:] + "." * (bool(words) and not words.endswith("."))


def _code(words: str) -> str:
    return re.sub(r"(?<!`)\b(\w+_\w+)\b(?!`)", r"`\1`", words)
