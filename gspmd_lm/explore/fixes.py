"""Fixes of problems that a button can apply: those that a message spells out, as changes of the text."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from gspmd_lm.config import core_yaml
from gspmd_lm.errors import InputError
from gspmd_lm.explore import rows
from gspmd_lm.sharding.problems import Problem
from gspmd_lm.sharding.rules_file import key_path

Edit = list[Any]  # ["set", path, value as YAML], ["remove", path] or ["replace", path, word, other word]

_SET = re.compile(r"--set rules\.(\S+?)=([^\s,]+)(?:,? |,|$)")
_MESH = re.compile(r"--mesh=(\S+)")
_MEANT = re.compile(r"(\S+) \(did you mean ([^\s?)]+)\?\)")


def find_edits(problem: Problem, file: str) -> list[Edit]:
    """The changes of the text that the first fix of a problem spells out; none where it leaves a choice."""
    path = key_path(problem.row.removeprefix(f"{file}: ").partition(": ")[0])
    first = problem.fix
    if meant := _MEANT.search(problem.message):
        word, name = meant.group(1).strip("'\""), meant.group(2)
        return [["replace", list(path), word, name]]
    if first.startswith("--set rules."):
        return [["set", list(key_path(key)), value] for key, value in _assignments(first)]
    if mesh := _MESH.match(first):
        sizes = (one.partition("=") for one in mesh.group(1).strip(",").split(","))
        return [["set", ["mesh", axis], size] for axis, _, size in sizes]
    if first == "drop the row" or first == f"drop {'.'.join(path)}":
        return [["remove", list(path)]]
    if listed := re.fullmatch(r"write (\[[\w, ]+\])", first):
        return [["set", list(path), listed.group(1)]]
    return []


def _assignments(fix: str) -> Iterator[tuple[str, str]]:
    """The settings with which a fix begins; what follows is another fix."""
    at = 0
    while found := _SET.match(fix, at):
        yield found.group(1), found.group(2)
        if found.group(0).endswith((", ", ",")):
            return
        at = found.end()


def apply_edits(text: str, edits: Sequence[Edit]) -> str:
    """The text with the changes of a fix. Raises InputError where it does not have what they change."""
    for kind, path, *values in edits:
        if kind == "set":
            text = rows.set_value(text, tuple(path), core_yaml.parse(values[0], ".".join(path)))
        elif kind == "remove":
            text = rows.remove(text, tuple(path))
        else:
            text = _replace_word(text, tuple(path), *values)
    return text


def _replace_word(text: str, path: rows.Path, word: str, name: str) -> str:
    """The text with a misspelt word replaced in the value of a key, or else in the key itself."""
    known = rows.places(text)
    place = known.get(path)
    if place is None:
        raise InputError(f"{'.'.join(path)}: the text has no such key")
    value = text[place.begin : place.end]
    whole = re.compile(rf"(?<![\w.-]){re.escape(word)}(?![\w-])")
    if whole.search(value):
        return text[: place.begin] + whole.sub(name, value, count=1) + text[place.end :]
    key = text[place.key_begin : place.key_end]
    changed = re.sub(rf"(?<![\w-]){re.escape(word)}(?![\w-])", name, key)
    if changed == key:
        raise InputError(f"{'.'.join(path)}: {word} does not stand there")
    return text[: place.key_begin] + changed + text[place.key_end :]
