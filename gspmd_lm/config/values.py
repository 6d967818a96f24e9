"""Settings by the paths of their keys, such as attention.rope.theta, in dataclasses that contain each other."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, TypeVar, get_type_hints

from gspmd_lm.config.types import dataclass_in

Settings = TypeVar("Settings")


class Section:
    """Settings of a part of a model, of which `flat` gives each by its own path."""


def nest(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values by the names of sections: {"attention.window": 7} becomes {"attention": {"window": 7}}."""
    found: dict[str, Any] = {}
    for path, value in values.items():
        *sections, name = path.split(".")
        target = found
        for section in sections:
            if target.get(section) is None:
                target[section] = {}
            target = target[section]
        target[name] = value
    return found


def with_values(settings: Settings, values: Mapping[str, Any]) -> Settings:
    """The settings with other values, by their paths: {"attention.window": 7, "experts": None}.

    A section that the settings lack is made of the values and its defaults.
    """
    return _with(settings, nest(values))


def from_values(kind: type[Settings], values: Mapping[str, Any]) -> Settings:
    """The settings of a class with values by their paths, and defaults for all others."""
    return _make(kind, nest(values))


def _with(settings: Any, values: Mapping[str, Any]) -> Any:
    own = dict(values)
    for name, value in values.items():
        kind = _sections(type(settings))[name]
        if kind and isinstance(value, Mapping):
            section = getattr(settings, name)
            own[name] = _make(kind, value) if section is None else _with(section, value)
    return dataclasses.replace(settings, **own)


def _make(kind: Any, values: Mapping[str, Any]) -> Any:
    inner = _sections(kind)
    return kind(**{name: _make(inner[name], value) if inner[name] and isinstance(value, Mapping) else value
                   for name, value in values.items()})  # fmt: skip


def value_at(settings: Any, path: str) -> Any:
    """The value of a key by its path. In a section that is not there it is the default, or 0 without one."""
    name, _, rest = path.partition(".")
    value = getattr(settings, name)
    if not rest:
        return value
    if value is not None:
        return value_at(value, rest)
    return default_at(type(settings), path)


@functools.cache
def _sections(kind: Any) -> dict[str, Any]:
    """The name of each setting of a class -> the class of its section, or None if it is no section."""
    return {name: dataclass_in(hint) for name, hint in get_type_hints(kind).items()}


@functools.cache
def default_at(kind: Any, path: str) -> Any:
    """The default of a key by its path in a class of settings.

    Without a default it is dataclasses.MISSING, but 0 in a section that may be left out.
    """
    name, _, rest = path.partition(".")
    if rest:
        default = default_at(_sections(kind)[name], rest)
        return 0 if default is dataclasses.MISSING else default
    (field,) = (field for field in dataclasses.fields(kind) if field.name == name)
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def flat(settings: Any, above: str = "") -> dict[str, Any]:
    """The values of settings by the paths of their keys. The path of a section that they lack has None."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(settings):
        path, value = f"{above}{field.name}", getattr(settings, field.name)
        found |= flat(value, f"{path}.") if isinstance(value, Section) else {path: value}
    return found


def differing(ours: Any, theirs: Any) -> list[tuple[str, Any, Any]]:
    """The path of each key in which two settings differ, with both values."""
    paths = dict.fromkeys((*flat(ours), *flat(theirs)))
    found = [(path, value_at(ours, path), value_at(theirs, path)) for path in paths]
    return [(path, one, other) for path, one, other in found
            if one != other and not isinstance(one, Section) and not isinstance(other, Section)]  # fmt: skip
