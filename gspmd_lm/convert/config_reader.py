"""Reads fields of a config.json: gives checked values, and collects problems."""

from collections.abc import Mapping
from typing import Any

from gspmd_lm.convert.strict_json import show_value

LARGEST = 2**53  # floats hold every whole number up to here
SMALLEST = 2.0**-100  # a smaller number is nearly zero in float32, and one that is divided by it has no float
MISSING: Any = object()


class ConfigReader:
    """A config.json that codecs read. It records which fields were read, their problems, and notes for the user."""

    def __init__(self, raw: Mapping[str, Any]):
        self.raw = raw
        self.names_read: set[str] = set()
        self.problems: list[str] = []
        self.notes: list[str] = []

    def get(self, names: str, default: Any = None) -> Any:
        """The value of the first of the fields `names`, with spaces between them, that is set and not null.

        All `names` mean the same. If several are set and differ, that is a problem.
        """
        self.names_read.update(names.split())
        values = {name: self.raw[name] for name in names.split() if self.raw.get(name) is not None}
        first = next(iter(values), "")
        for name, value in values.items():
            if value != values[first]:
                self.refuse(name, value, f"contradicts {first}: {show_value(values[first])}")
        return values.get(first, default)

    def number(self, names: str, default: Any = MISSING, most: float = LARGEST) -> Any:
        """The value as by `get`, a number above zero. It is a problem if there is neither a value nor a default."""
        value = self.get(names, default)
        if value is MISSING:
            self.problems.append(f"{names.split()[0]}: missing")
            return 1
        if value is default:
            return value
        return self.positive(next(name for name in names.split() if self.raw.get(name) is not None), value, most)

    def positive(self, name: str, value: Any, most: float = LARGEST) -> Any:
        """`value` if it is a number above zero and at most `most`; otherwise 1, and that is a problem."""
        if isinstance(value, bool) or not isinstance(value, int | float) or not value >= SMALLEST:
            self.refuse(name, value, "must be a number above zero")
            return 1
        if value > most:
            self.refuse(name, value, f"is above {most:,}, which no model reaches")
            return 1
        return value

    def whole(self, names: str, default: int, least: int) -> int:
        """The value as by `get`, a whole number from `least` on."""
        value = self.get(names, default)
        if type(value) is int and value >= least:
            return value
        self.refuse(names.split()[0], value, f"must be a whole number from {least} on")
        return default

    def flag(self, name: str, default: bool) -> bool:
        """The value as by `get`, true or false."""
        value = self.get(name, default)
        if not isinstance(value, bool):
            self.refuse(name, value, "must be true or false")
        return bool(value)

    def refuse(self, name: str, value: Any, why: str) -> None:
        self.problems.append(f"{name}: {show_value(value)} {why}")
