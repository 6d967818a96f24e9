"""The inputs of a workbench: a config, a target and the text of a rules file, with the limits of each."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from gspmd_lm.errors import InputError

MOST_TEXT = 100_000  # characters of a rules file
MOST_WORDS = 2_000  # characters of any other input
SIMULATED = 64  # devices, for which layouts of cpu:N are traced
MOST_SETS = 100  # overrides of a config


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The inputs of a workbench. A page may change all but the last three."""

    config: str  # a name in configs/, or a path
    set: tuple[str, ...]  # section.key=value, laid over the config
    target: str
    batch: int | None  # rows of a step; None: those of the config, or of the task
    seq: int | None  # tokens of a row; likewise
    text: str  # of the rules file
    path: str  # of the rules file, which it is saved in
    editable: bool = True  # whether there are rules to edit: a step of one's own has none
    program: str | None = None  # where a model or a step of one's own stands, in place of a config

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> "Inputs":
        """The inputs of which `values` are what `dataclasses.asdict` made, once it was written as JSON."""
        return cls(**{**values, "set": tuple(values["set"])})

    def with_changes(self, asked: Mapping[str, Any]) -> "Inputs":
        """These inputs with those that a page asks for. Raises InputError for a key or value that may not be."""
        known = {"text", "config", "set", "target", "batch", "seq"}
        if unknown := asked.keys() - known:
            raise InputError(f"{min(unknown)}: there is no such input\n  fix   use {', '.join(sorted(known))}")
        if not self.editable and "text" in asked:
            raise InputError("text: a step of one's own has no rules file")
        if self.program and asked.keys() & {"config", "set", "batch", "seq"}:
            raise InputError(f"{self.program}: says itself what is computed, and has no config")
        values = dict(asked)
        for name in ("text", "config", "target"):
            if name in values:
                _check_text(name, values[name], MOST_TEXT if name == "text" else MOST_WORDS)
        for name in ("batch", "seq"):
            size = values.get(name)
            if size is not None and (isinstance(size, bool) or not isinstance(size, int) or not 1 <= size < 2**31):
                raise InputError(f"{name}={size!r}: is not a size\n  fix   write a whole number from 1")
        if "set" in values:
            values["set"] = _check_sets(values["set"])
        return dataclasses.replace(self, **values)

    @property
    def overrides(self) -> tuple[str, ...]:
        """All that is laid over the config."""
        sizes = {"data.batch": self.batch, "data.seq": self.seq}
        return (*self.set, *(f"{key}={size}" for key, size in sizes.items() if size is not None))


def _check_text(name: str, value: Any, most: int) -> None:
    if not isinstance(value, str):
        raise InputError(f"{name}: must be text")
    if len(value) > most:
        raise InputError(f"{name}: has {len(value):,} characters, and at most {most:,} are read")


def _check_sets(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or len(value) > MOST_SETS:
        raise InputError(f"set: must be a list of at most {MOST_SETS} texts such as model.layers=4")
    for one in value:
        _check_text("set", one, MOST_WORDS)
        key, equals, _ = one.partition("=")
        if not equals or key.partition(".")[0].strip() == "rules":
            raise InputError(f"--set {one[:80]}: write section.key=value of the config; rules stand in the editor")
    return tuple(value)
