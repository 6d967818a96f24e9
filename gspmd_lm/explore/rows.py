"""The text of a rules file: the lines of its keys, and changes that leave every other byte as it is."""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from gspmd_lm.config import core_yaml
from gspmd_lm.errors import InputError
from gspmd_lm.sharding.problems import flow
from gspmd_lm.sharding.rules import TABLES

Path = tuple[str, ...]  # of a key: ("rules", "residual.seq")


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a key and its value stand in a text, as offsets of characters."""

    line: int  # of the key, counted from 1
    key_begin: int
    key_end: int
    begin: int  # of the value
    end: int
    mapping: yaml.MappingNode  # that has the key
    value: yaml.Node


def places(text: str) -> dict[Path, Place]:
    """Each key of a rules file and its place. Raises InputError where the text is not YAML that a rules file may be."""
    core_yaml.parse(text, "the rules file")  # neither deep nor with aliases, tags or several documents
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    return dict(_places(root, ())) if isinstance(root, yaml.MappingNode) else {}


def _places(node: yaml.MappingNode, above: Path) -> Iterator[tuple[Path, Place]]:
    for key, value in node.value:
        path = (*above, key.value)
        spans = key.start_mark.index, key.end_mark.index, value.start_mark.index, value.end_mark.index
        yield path, Place(key.start_mark.line + 1, *spans, node, value)
        if isinstance(value, yaml.MappingNode):
            yield from _places(value, path)


def lines(text: str) -> dict[str, int]:
    """Key, such as rules.residual.seq -> its line, counted from 1."""
    return {".".join(path): place.line for path, place in places(text).items()}


def line_of(row: str, path: str, known: Mapping[str, int]) -> int | None:
    """The line of the row that a problem names as `file: key: value`, or of the nearest key above it in the file."""
    key = row.removeprefix(f"{path}: ").partition(": ")[0]
    while key and key not in known:
        key = key.rpartition(".")[0]
    return known.get(key)


def set_value(text: str, path: Path, value: Any) -> str:
    """The text with a key set to a value; the key is added where the text lacks it. Every other byte stays.

    Raises InputError where the text has something in the key's place that cannot hold it.
    """
    known = places(text)
    if path in known:
        changed = _replace(text, known[path], flow(value))
    elif len(path) == 2 and path[0] in TABLES and path[:1] not in known:
        changed = _append(text, f"{path[0]}:\n  {flow(path[1])}: {flow(value)}")
    elif len(path) > 1 and path[:-1] not in known:
        return set_value(text, path[:-1], {path[len(path) - 1]: value})
    elif len(path) == 1 and not known:
        changed = _append(text, f"{flow(path[0])}: {flow(value)}")
    else:
        changed = _add(text, known, path, f"{flow(path[len(path) - 1])}: {flow(value)}")
    return _check(text, changed, path, value)


def remove(text: str, path: Path) -> str:
    """The text without a key that it has, and without the rest of the line of its value. Raises InputError as above."""
    known = places(text)
    if path not in known:
        raise InputError(f"{'.'.join(path)}: the text has no such key")
    place = known[path]
    if place.mapping.flow_style:
        begin, end = place.key_begin, _end(place.value, place.end)
        if after := re.match(r"\s*,[ \t]*", text[end:]):
            end += after.end()
        elif before := re.search(r",\s*$", text[:begin]):
            begin = before.start()
    else:
        begin = text.rfind("\n", 0, place.key_begin) + 1
        end = _line_end(text, _end(place.value, place.end))
    return _check(text, text[:begin] + text[end:], path, _ABSENT)


_ABSENT = object()
_COLON = re.compile(r"\s*:")  # behind a key


def _replace(text: str, place: Place, value: str) -> str:
    """The text with another value of a key."""
    end = _end(place.value, place.end)
    if place.begin == end or not _is_flow(place.value):  # nothing stands there, or a mapping below the key
        if not (colon := _COLON.match(text, place.key_end)):  # as in {data, tensor: 4}
            return f"{text[: place.key_end]}: {value}{text[place.key_end :]}"
        return f"{text[: colon.end()]} {value}{text[max(colon.end(), end) :]}"
    return text[: place.begin] + value + text[end:]


def _add(text: str, known: Mapping[Path, Place], path: Path, entry: str) -> str:
    """The text with one more entry in the mapping above `path`, which is there."""
    siblings = [place for other, place in known.items() if other[:-1] == path[:-1]]
    above = known[path[:-1]] if len(path) > 1 else None
    if above and _is_flow(above.value) and isinstance(above.value, yaml.MappingNode):
        close = above.end - 1
        inner = text[above.begin + 1 : close]
        comma = "" if not inner.strip() or inner.rstrip().endswith(",") else ", "
        at = above.begin + 1 + len(inner.rstrip())
        return text[:at] + comma + entry + text[at:]
    if siblings:
        first = min(siblings, key=lambda place: place.key_begin)
        last = max(siblings, key=lambda place: place.key_begin)
        indent = " " * (first.key_begin - text.rfind("\n", 0, first.key_begin) - 1)
        at = _line_end(text, _end(last.value, last.end))
    elif above and above.begin == above.end and (colon := _COLON.match(text, above.key_end)):  # nothing stands below it
        at, indent = _line_end(text, colon.end()), "  "
    else:
        raise _refusal(path)
    before = "" if text[:at].endswith("\n") else "\n"
    return f"{text[:at]}{before}{indent}{entry}\n{text[at:]}"


def _append(text: str, entry: str) -> str:
    """The text with one more entry at its end."""
    before = "" if not text or text.endswith("\n") else "\n"
    return f"{text}{before}{entry}\n"


def _is_flow(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) or bool(getattr(node, "flow_style", False))


def _end(node: yaml.Node, end: int) -> int:
    """Where a value ends. PyYAML says of a mapping in lines of its own that it ends where the next key begins."""
    if _is_flow(node) or not node.value:
        return end
    last = node.value[-1]
    if isinstance(last, tuple):
        key, value = last
        return max(key.end_mark.index + 1, _end(value, value.end_mark.index))
    return _end(last, last.end_mark.index)


def _line_end(text: str, at: int) -> int:
    """Where the line ends in which `at` stands, its newline included."""
    newline = text.find("\n", at)
    return len(text) if newline < 0 else newline + 1


def _check(text: str, changed: str, path: Path, value: Any) -> str:
    """The changed text. Raises InputError unless it says what the text said, but for the key."""
    wanted = core_yaml.load(text)
    within = wanted if isinstance(wanted, dict) else {}
    root = within
    for part in path[:-1]:
        if not isinstance(within.get(part), dict):
            within[part] = {}
        within = within[part]
    if value is _ABSENT:
        del within[path[-1]]
    else:
        within[path[-1]] = value
    try:
        said = core_yaml.load(changed)
    except core_yaml.YamlError as error:
        raise _refusal(path) from error
    if (said or {}) != root and _without_empty(said) != _without_empty(root):
        raise _refusal(path)
    return changed


def _without_empty(value: Any) -> Any:
    """A mapping in which what has nothing below it is null."""
    return {key: one if one != {} else None for key, one in (value or {}).items()}


def _refusal(path: Path) -> InputError:
    key = ".".join(path)
    return InputError(f"{key}: cannot be changed where it stands in the text\n  fix   write it in a line of its own")
