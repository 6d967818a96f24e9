"""Fixes of problems that a button can apply, as changes of the text: those that leave no choice."""

import re
from collections.abc import Sequence
from typing import Any

from gspmd_lm.config import core_yaml
from gspmd_lm.errors import InputError
from gspmd_lm.explore import rows
from gspmd_lm.sharding.problems import UNUSED, Problem
from gspmd_lm.sharding.rules_file import key_path, read_sizes

Edit = list[Any]  # ["set", path, value as YAML], ["remove", path] or ["replace", path, word, other word]


def find_edits(problem: Problem, file: str) -> list[Edit]:
    """The changes of the text that the first fix of a problem makes; none where it leaves a choice."""
    path = [*key_path(problem.row.removeprefix(f"{file}: ").partition(": ")[0])]
    if problem.misspelt[1]:
        return [["replace", path, *problem.misspelt]]
    if problem.code == UNUSED:
        return [["remove", path]]
    if listed := re.fullmatch(r"write (\[[\w, ]+\])", problem.fix):
        return [["set", path, listed.group(1)]]
    return _read_flags(problem.fix)


def _read_flags(fix: str) -> list[Edit]:
    """What the flags set with which a fix begins; none where one of them is not of the rules file, or cannot be read.

    A mesh axis of the text may have a name with a space, which a flag cannot have.
    """
    edits: list[Edit] = []
    words = iter(fix.partition(", ")[0].split())  # what follows is another fix
    for word in words:
        if word.startswith("--mesh="):
            try:
                sizes = read_sizes(word.removeprefix("--mesh="))
            except InputError:
                return []
            edits += [["set", ["mesh", axis], str(size)] for axis, size in sizes.items()]
        elif word == "--set":
            key, _, value = next(words, "").partition("=")
            if not key.startswith("rules."):
                return []
            edits.append(["set", [*key_path(key.removeprefix("rules."))], value])
        else:
            return edits
    return edits


def apply_edits(text: str, edits: Sequence[Edit]) -> str:
    """The text with the changes of a fix. Raises InputError where they do not fit the text."""
    for kind, path, *values in edits:
        if kind == "set":
            text = rows.set_value(text, tuple(path), core_yaml.parse(values[0], ".".join(path)))
        elif kind == "remove":
            text = rows.remove(text, tuple(path))
        else:
            text = _replace_word(text, tuple(path), *values)
    return text


def _replace_word(text: str, path: rows.Path, word: str, name: str) -> str:
    """The text with a misspelt word replaced in a key, or else in its value. Raises as `apply_edits`."""
    place = rows.places(text).get(path)
    if place is None:
        raise InputError(f"{'.'.join(path)}: the text has no such key")
    for begin, end in ((place.key_begin, place.key_end), (place.begin, place.end)):
        found = re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", text[begin:end])
        if found:
            changed = text[: begin + found.start()] + name + text[begin + found.end() :]
            rows.places(changed)  # the mapping may have a key of this name already
            return changed
    raise InputError(f"{'.'.join(path)}: {word} does not stand there")
