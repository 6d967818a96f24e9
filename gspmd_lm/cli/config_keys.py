"""Every key of a config: its type, its default and its meaning, as config/ says them.

The meaning of a key is the comment on the line of its field, or right above it. A mapping without a comment means what
the docstring of its class says.
"""

import ast
import dataclasses
import inspect
import io
import re
import textwrap
import tokenize
from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import annotated_types

from gspmd_lm.config import Config
from gspmd_lm.config.core_yaml import dump
from gspmd_lm.errors import InputError, did_you_mean, either

REQUIRED = "required"
_LARGEST = 2**31 - 2  # bounds from here on are those of int32, not of the setting


@dataclasses.dataclass(frozen=True)
class Key:
    """One key that a config may have."""

    name: str  # model.rope_scaling.factor
    kind: str  # whole number from 1
    default: str  # as in YAML, or "required"
    meaning: str


@dataclasses.dataclass(frozen=True)
class KeyGroup:
    """The keys of one mapping of a config."""

    name: str  # model.rope_scaling; "" for the whole config
    about: str
    keys: tuple[Key, ...]


def sections(kind: type = Config, name: str = "") -> Iterator[KeyGroup]:
    """The mappings of a config, each before those that it contains."""
    hints, comments = get_type_hints(kind, include_extras=True), _comments(kind)
    keys, inner = [], []
    for field in dataclasses.fields(kind):
        path = f"{name}.{field.name}".lstrip(".")
        mappings = [*_mappings(hints[field.name], path)]
        meaning = comments[field.name]
        if not meaning and mappings:
            meaning = _first_sentence(mappings[0][0])
        keys.append(Key(path, _kind(hints[field.name]), _default(field), _sentence(meaning)))
        inner += mappings
    yield KeyGroup(name, " ".join((inspect.getdoc(kind) or "").split()), tuple(keys))
    for mapping, path in inner:
        yield from sections(mapping, path)


def text(wanted: str = "") -> str:
    """What the verb `keys` prints: all keys, or those whose names contain `wanted`. Raises InputError for none."""
    lines = []
    for section in sections():
        shown = [key for key in section.keys if wanted in key.name]
        if shown:
            about = f"{section.name}: {section.about}" if section.name else section.about
            lines += ["", *textwrap.wrap(about, 100)]
        for key in shown:
            lines += [f"  {f'{key.name}: {key.default}':40} {key.kind}".rstrip()]
            lines += textwrap.wrap(key.meaning, 94, initial_indent=" " * 6, subsequent_indent=" " * 6)
    if not lines:
        names = [key.name for section in sections() for key in section.keys]
        hint = did_you_mean(wanted, names) or did_you_mean(wanted, {name.rpartition(".")[2] for name in names})
        raise InputError(f"{wanted}: no key of a config has this in its name{hint}\n  fix   keys shows all of them")
    return "\n".join(lines[1:])


def page() -> str:
    """The page of the site that lists all keys."""
    lines = [
        "# The config",
        "",
        "A config says what is computed. A rules file, which [rules.md](rules.md) explains, says where. The command",
        "`python main.py keys --markdown` prints this page, and `python main.py keys WORD` prints the keys with that",
        "word in their names. `--set KEY=VALUE` sets any of them on the command line, with the value written as in",
        "YAML: `--set model.layers=4`, `--set train.trackers=[]`.",
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


def _mappings(hint: Any, path: str) -> Iterator[tuple[type, str]]:
    """The dataclasses of a type, each with the path of its keys."""
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        yield hint, path
    inside = f"{path}[]" if get_origin(hint) is tuple else path
    for arm in get_args(hint) if get_origin(hint) is not Literal else ():
        yield from _mappings(arm, inside)


def _kind(hint: Any) -> str:
    """The type of a key in words."""
    if get_origin(hint) is Annotated:
        kind, *about = get_args(hint)
        return _kind(kind) + _bounds(about)
    if get_origin(hint) is Literal:
        return either(get_args(hint))
    if get_origin(hint) in (Union, UnionType):
        return either(map(_kind, get_args(hint)))
    if get_origin(hint) is tuple:
        return f"list of {_kind(get_args(hint)[0])}"
    if dataclasses.is_dataclass(hint):
        return "mapping"
    words = {int: "whole number", float: "number", bool: "true or false", str: "text", NoneType: "null"}
    return words[hint]


def _bounds(about: list[Any]) -> str:
    """The bounds of a number in words: ' from 0 to below 1'."""
    marks = [mark for field in about for mark in getattr(field, "metadata", [field])]
    words = ""
    for mark in marks:
        if isinstance(mark, annotated_types.Ge):
            words += f" from {mark.ge}"
        elif isinstance(mark, annotated_types.Gt):
            words += f" above {mark.gt}"
    for mark in marks:
        if isinstance(mark, annotated_types.Le) and float(str(mark.le)) < _LARGEST:
            words += f" to {mark.le}"
        elif isinstance(mark, annotated_types.Lt) and float(str(mark.lt)) < _LARGEST:
            words += f" to below {mark.lt}"
    return words


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        value = list(field.default) if isinstance(field.default, tuple) else field.default
        return dump([value], flow=True).strip()[1:-1]
    return REQUIRED if field.default_factory is dataclasses.MISSING else "{}"


def _first_sentence(kind: type) -> str:
    return (inspect.getdoc(kind) or "").partition("\n")[0]


def _sentence(words: str) -> str:
    """The words as a sentence. A word of the config file at its beginning stays as it is."""
    first = re.match(r"\w+(?![:\w]| \|)", words)
    capital = words[:1].upper() if first and "_" not in first[0] else words[:1]
    return capital + words[1:] + "." * (bool(words) and not words.endswith("."))


def _code(words: str) -> str:
    return re.sub(r"(?<!`)\b(\w+_\w+)\b(?!`)", r"`\1`", words)
