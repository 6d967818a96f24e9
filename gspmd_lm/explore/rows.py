"""The text of a rules file: the lines of its keys, and changes that leave every other byte as it is."""

import dataclasses
from collections.abc import Iterator, Mapping

import yaml

from gspmd_lm.config import core_yaml

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
    """Each key of a rules file and its place. Raises YamlError where the text is not YAML that a rules file may be."""
    core_yaml.load(text)  # neither deep nor with aliases, tags or several documents
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
    """The line of the row that a problem names as `file: key: value`; of a key above it where the file lacks it."""
    key = row.removeprefix(f"{path}: ").partition(": ")[0]
    while key and key not in known:
        key = key.rpartition(".")[0]
    return known.get(key)
