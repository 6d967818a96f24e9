"""A chip from its YAML file: each figure is read in its unit, stands beside its source, and is checked."""

import dataclasses
import math
import re
import types
import typing
from collections.abc import Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

from gspmd_lm.errors import InputError, did_you_mean, either
from gspmd_lm.hardware.chips import (
    CHIPS,
    GPU_MEMORY_SHARE,
    KINDS,
    LINKS,
    MOVES,
    PLATFORMS,
    SLOW_ARITHMETIC,
    SPLASH_BLOCKS,
    Chip,
    Cycles,
)
from gspmd_lm.units import PROGRAM_DTYPES

ENDING = ".yaml"  # of such files
LIKE = "like"  # the chip whose figures count where a file states none
_DECIMAL = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
# The end of a field's name -> its units, with what each is of the unit in which programs compute.
_UNITS: dict[str, dict[str, Fraction]] = {
    "_flops_per_s": {f"{prefix}FLOP/s": Fraction(size) for prefix, size in _DECIMAL.items()},
    "_ops_per_s": {f"{prefix}OP/s": Fraction(size) for prefix, size in _DECIMAL.items()},
    "_bytes_per_s": {f"{prefix}B/s": Fraction(size) for prefix, size in (_DECIMAL | _BINARY).items()}
    | {f"{prefix}bit/s": Fraction(size, 8) for prefix, size in _DECIMAL.items()},
    "_bytes": {f"{prefix}B": Fraction(size) for prefix, size in (_DECIMAL | _BINARY).items()},
    "_hz": {f"{prefix}Hz": Fraction(size) for prefix, size in _DECIMAL.items()},
    "usd_per_hour": {"USD/h": Fraction(1)},
    "_s": {"s": Fraction(1), "ms": Fraction(1, 10**3), "us": Fraction(1, 10**6), "ns": Fraction(1, 10**9)},
}
_EXAMPLES = {
    "_flops_per_s": "197 TFLOP/s",
    "_ops_per_s": "393 TOP/s",
    "_bytes_per_s": "819 GB/s",
    "_bytes": "16 GiB",
    "_hz": "1.5 GHz",
    "usd_per_hour": "1.2 USD/h",
    "_s": "2.4 us",
}
# What a chip of a platform must state beside the figures that every chip has.
_NEEDED = {
    "tpu": ("usable_hbm_bytes", "clock_hz", "torus_dimensions", "wraps_multiples_of", "ici_link_bytes_per_s"),
    "gpu": ("clock_hz", "gpu"),
    "cpu": (),
}
# The beginnings of such names. Without a peak for bfloat16 there are no times.
_MAY_BE_ZERO = ("peak_f", "peak_int8", "torus_", "die_", "nvlink_")
# The names in figures that are tables, by the name of the figure or of the column: what they name, and all of them.
_NAMES: dict[str, tuple[str, tuple[str, ...]]] = {
    "slowdowns": ("kind of compute or link", (*KINDS, *LINKS)),
    "element_rates": ("operation", ("add", "select", *SLOW_ARITHMETIC, *MOVES)),
    "kind": ("kind of collective", ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")),
    "dtype": ("dtype of programs", tuple(PROGRAM_DTYPES.values())),
}


class _Problem(Exception):
    """Raised for a figure that cannot be read. Its text names the place and what is wrong."""


def read_chip(path: Path, place: str = "") -> Chip:
    """The chip that a file describes. `place` is how messages call the file.

    Raises InputError, with all that is wrong with the file: unknown keys, missing figures, units and sources.
    """
    place = place or path.name
    raw = _read_raw(path, place)
    problems: list[str] = []
    found = dict(_figures(Chip, raw, "", problems))
    if not problems:
        problems += _check_facts(found)
    if problems:
        raise InputError("\n".join(f"{place}: {problem}" for problem in problems))
    return Chip(**found)


def _read_raw(path: Path, place: str) -> dict[str, Any]:
    """What a file states, laid over what the file of the chip that it is like states."""
    from gspmd_lm.config import core_yaml  # with pydantic, which the help of verbs does without

    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # such as a path that cannot be one, and bytes that are no text
        raise InputError(f"{place}: cannot be read: {error}\n  fix   give a YAML file that describes a chip") from error
    raw = core_yaml.parse(text, place)
    if not isinstance(raw, dict):
        raise InputError(f"{place}: not a mapping\n  fix   name: my, platform: gpu, ... or like: h100 and what differs")
    like = raw.pop(LIKE, None)
    if like is None:
        return raw
    if like not in CHIPS:
        known = ", ".join(CHIPS)
        hint = did_you_mean(str(like), CHIPS)
        raise InputError(f"{place}: {LIKE}: {like}: no such chip{hint}\n  fix   use one of {known}")
    inherited = _read_raw(CHIPS.files[like], like)
    if "hbm_bytes" in raw:
        inherited.pop("usable_hbm_bytes", None)
    sections = {name: inherited.get(name, {}) | raw[name] for name in ("gpu",) if isinstance(raw.get(name), dict)}
    return {"compiler_name": inherited["name"]} | inherited | raw | sections


def _figures(kind: Any, raw: Mapping[Any, Any], path: str, problems: list[str]) -> Iterator[tuple[str, Any]]:
    """The fields of a dataclass, from what a file states for them. What is wrong is added to `problems`."""
    hints = typing.get_type_hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for name in raw:
        if name not in fields:
            near = did_you_mean(str(name), fields)
            problems.append(f"{path}{name}: no such figure{near}\n  fix   use one of {', '.join(fields)}")
    for name, field in fields.items():
        where = f"{path}{name}"
        if name not in raw:
            required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
            if required:
                problems.append(f"{where} is missing\n  fix   {name}: {_example(name, hints[name])}")
            continue
        try:
            yield name, _read_field(hints[name], name, raw[name], where, problems)
        except _Problem as problem:
            problems.append(f"{where}: {problem}")


def _read_field(hint: Any, name: str, stated: Any, where: str, problems: list[str]) -> Any:
    """The value of one field. Texts and sections stand alone; any other value has its source beside it."""
    section = next((one for one in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(one)), None)
    if section and typing.get_origin(hint) in (None, types.UnionType):
        if not isinstance(stated, Mapping):
            raise _Problem(f"{stated!r} is not a section\n  fix   {name}: {{...}}")
        found = dict(_figures(section, stated, f"{where}.", problems))
        return None if problems else section(**found)  # type: ignore[operator]
    if hint is str:
        if not isinstance(stated, str):
            raise _Problem(f"{stated!r} is not a text\n  fix   {name}: text")
        return stated
    if hint == tuple[str, ...]:
        if not isinstance(stated, list) or not all(isinstance(one, str) for one in stated):
            raise _Problem(f"{stated!r} is not a list of texts\n  fix   {name}: [NVIDIA L4]")
        return tuple(stated)
    if not isinstance(stated, list) or len(stated) != 2 or not isinstance(stated[1], str) or not stated[1].strip():
        example = _example(name, hint)
        raise _Problem(f"{stated!r} is not a figure and its source\n  fix   {name}: {example}")
    value = stated[0]
    if name == "splash":
        return _read_splash(value)
    if name in _NAMES:
        return _read_rates(name, value)
    row = typing.get_args(hint)[0] if typing.get_origin(hint) is tuple else None
    if row and hasattr(row, "_fields"):
        return _read_rows(row, value)
    if typing.get_origin(hint) is tuple:
        count = len(typing.get_args(hint))
        if not isinstance(value, list) or len(value) != count or not all(type(one) is int for one in value):
            raise _Problem(f"{value!r} are not {count} whole numbers\n  fix   {name}: [[9, 0], data sheet]")
        return tuple(value)
    if hint is bool:
        if not isinstance(value, bool):
            raise _Problem(f"{value!r} is neither true nor false\n  fix   {name}: [true, data sheet]")
        return value
    if value is None and type(None) in typing.get_args(hint):
        return None
    return _read_number(name, value, hint is int)


def _read_number(name: str, value: Any, whole: bool) -> int | float:
    """A number in the unit that the field's name ends with."""
    ending = next((ending for ending in _UNITS if name.endswith(ending)), None)
    units = _UNITS[ending] if ending else {"": Fraction(1)}
    text = re.fullmatch(r"([0-9.]+(?:[eE][-+]?[0-9]{1,2})?)\s*(\S*)", str(value))
    if isinstance(value, bool) or not text or text[2] not in units:
        wanted = f"a number of {either([*units][:6])}" if ending else "a number"
        raise _Problem(f"{value!r} is not {wanted}\n  fix   {name}: {_example(name, int if whole else float)}")
    try:
        number = Fraction(text[1]) * units[text[2]]
        found = int(number) if whole else float(number)
    except (ValueError, OverflowError):
        raise _Problem(f"{value!r} is not a number\n  fix   {name}: {_example(name, float)}") from None
    if whole and not ending and number.denominator > 1:
        raise _Problem(f"{value!r} is not a whole number\n  fix   {name}: {_example(name, int)}")
    if number <= 0 and not name.startswith(_MAY_BE_ZERO):
        raise _Problem(f"{value!r} must be more than 0\n  fix   {name}: {_example(name, float)}")
    return found


def _read_splash(value: Any) -> Mapping[int, tuple[Cycles, Cycles]]:
    """Size of a head -> cycles of splash attention, forward and backward."""
    try:
        found = {
            int(size): (Cycles(tuple(forward.pop("visited")), **forward), Cycles(tuple(back.pop("visited")), **back))
            for size, passes in value.items()
            for forward, back in [(dict(passes["forward"]), dict(passes["backward"]))]
        }
        for size, passes in found.items():
            numbers = [size, *(number for one in passes for number in (*one.visited, one.step, one.row))]
            blocks = [len(one.visited) for one in passes]
            if not all(map(_is_positive, numbers)) or not all(0 < n <= len(SPLASH_BLOCKS) for n in blocks):
                raise ValueError("no cycles, or those of more blocks than there are")
    except (AttributeError, KeyError, TypeError, ValueError):
        form = "{visited: [502, 1144, 5040], step: 277, row: 702}"
        raise _Problem(f'not cycles of kernels\n  fix   "128": {{forward: {form}, backward: {form}}}') from None
    return found


def _read_rows(kind: Any, value: Any) -> tuple[Any, ...]:
    """Rows of a table that was measured. Their numbers are in the units of the columns' names."""
    columns, hints = kind._fields, typing.get_type_hints(kind)

    def fits(one: Any, hint: Any) -> bool:
        return isinstance(one, str) if hint is str else _is_positive(one)

    for row in value if isinstance(value, list) else [value]:
        right = isinstance(row, list) and len(row) == len(columns)
        if not right or not all(fits(one, hints[name]) for one, name in zip(row, columns, strict=True)):
            raise _Problem(f"{row!r} is not a row of {', '.join(columns)}\n  fix   calibrate writes such rows")
        for name in _NAMES.keys() & {*columns}:
            _check_name(name, row[columns.index(name)])
    return tuple(kind(*row) for row in value)


def _read_rates(name: str, value: Any) -> Mapping[str, float]:
    """Operation -> elements/s; or what is slowed down -> how many times as long it takes."""
    if not isinstance(value, dict) or not all(map(_is_positive, value.values())):
        raise _Problem("not operations and the elements that each computes in a second\n  fix   {add: 1.0e9, ...}")
    for key in value:
        _check_name(name, key)
    missing = [key for key in ("add", *MOVES) if name == "element_rates" and key not in value]
    if missing:
        raise _Problem(f"{missing[0]} is missing\n  fix   {missing[0]}: 1.0e9")
    return {key: float(rate) for key, rate in value.items()}


def _check_name(table: str, name: Any) -> None:
    what, known = _NAMES[table]
    if name not in known:
        near = did_you_mean(str(name), known)
        raise _Problem(f"{name}: no such {what}{near}\n  fix   use one of {', '.join(known)}")


def _is_positive(value: Any) -> bool:
    """Whether a value of YAML is a positive number, and neither true nor infinite."""
    return type(value) in (int, float) and 0 < value < math.inf


def _example(name: str, hint: Any) -> str:
    ending = next((ending for ending in _EXAMPLES if name.endswith(ending)), None)
    if hint is str or hint == tuple[str, ...]:
        return "NAME" if hint is str else "[NVIDIA L4]"
    return f"[{_EXAMPLES[ending] if ending else 'true' if hint is bool else 2}, data sheet]"


def _check_facts(found: dict[str, Any]) -> Iterator[str]:
    """Yields what does not go together. Fills in what a rule says where a file is silent."""
    platform = found["platform"]
    if platform not in PLATFORMS:
        yield f"platform: {platform}: no such platform\n  fix   platform: {either(PLATFORMS)}"
        return
    for name in _NEEDED[platform]:
        if not found.get(name):
            example = "{core_count: [108, data sheet], ...}" if name == "gpu" else _example(name, float)
            yield f"{name} is missing, which a chip of platform {platform} has\n  fix   {name}: {example}"
    found.setdefault("usable_hbm_bytes", int((GPU_MEMORY_SHARE if platform == "gpu" else 1) * found["hbm_bytes"]))
    found.setdefault("compiler_name", found["name"])
    if platform == "gpu":
        found.setdefault("peer_bytes_per_s", found["host_link_bytes_per_s"])
    if found["usable_hbm_bytes"] > found["hbm_bytes"]:
        yield "usable_hbm_bytes is more than hbm_bytes\n  fix   state less"
    if platform == "tpu" and found.get("torus_dimensions") not in (2, 3):
        yield "torus_dimensions: a slice of TPUs has 2 or 3\n  fix   torus_dimensions: [2, data sheet]"
    if platform == "tpu" and found.get("devices_per_chip", 1) > 1 and not found.get("die_link_bytes_per_s"):
        yield (
            "die_link_bytes_per_s is missing, which joins the devices of a chip\n"
            f"  fix   die_link_bytes_per_s: {_example('die_link_bytes_per_s', float)}"
        )
