"""Values from YAML text by the core schema of YAML 1.2, restricted to what settings need.

PyYAML reads words as YAML 1.1 does, where 010 is 8 and 1:30 is 90. Here it only splits the text into events, and
`scalar` decides what a word means. Words that the two versions read differently are refused, as are aliases and tags.
"""

import re
from collections.abc import Iterator
from typing import Any

import yaml

from gspmd_lm.errors import InputError

DEEPEST = 32
_MOST = 2**63
# https://yaml.org/spec/1.2.2/#103-core-schema
_NULL = re.compile(r"~|null|Null|NULL|")
_BOOL = re.compile(r"true|True|TRUE|false|False|FALSE")
_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
# Words that are numbers, yes or no in YAML 1.1, but other numbers or text in YAML 1.2; and what to write instead.
_ELSE = {
    re.compile(r"yes|Yes|YES|on|On|ON"): "true",
    re.compile(r"no|No|NO|off|Off|OFF"): "false",
    re.compile(r"[-+]?0[0-9]+"): "the number without a 0 before it",
    re.compile(r"[-+]?0b[01_]+|[-+]0x[0-9a-fA-F]+"): "the number in decimal",
    re.compile(r"[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?"): "the number in decimal",
    re.compile(r"(?=.*_)[-+]?([0-9][0-9_]*(\.[0-9_]*)?|\.[0-9][0-9_]*)([eE][-+]?[0-9]+)?"): "the number without _",
    re.compile(r"(?=.*_)[-+]?0x[0-9a-fA-F_]+"): "the number without _",
    re.compile(r"<<|="): "the keys one by one",
}


class YamlError(ValueError):
    """A text is not YAML, or uses a part of YAML that is not supported here. The message names the line."""


def load(text: str) -> Any:
    """The value of one YAML document: None, bool, int, float, str, and lists and dicts of them. Raises YamlError."""
    try:
        events = _check_events(text)
        value, event = None, next(events, None)
        if event is not None:
            value = _value(event, events)
        if (event := next(events, None)) is not None:
            raise _refusal(event, "a second document; only one is supported")
        return value
    except yaml.YAMLError as error:
        if isinstance(error, yaml.MarkedYAMLError) and error.context == "while scanning an alias":
            line = error.problem_mark.line + 1 if error.problem_mark else 1
            raise YamlError(f"line {line}: put quotes around a word that begins with *") from error
        raise YamlError(" ".join(str(error).replace('in "<unicode string>", ', "at ").split())) from error


def parse(text: str, place: str) -> Any:
    """The value of a text that a user wrote, as by `load`. Raises an InputError that names `place` and the line."""
    try:
        return load(text)
    except YamlError as error:
        raise InputError(f"{place}: not valid YAML\n  {error}") from error


def dump(value: Any, flow: bool = False) -> str:
    """The YAML text of a value, on one line if `flow`. `load` turns it back into the value."""
    width = float("inf") if flow else 80
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, default_flow_style=flow, allow_unicode=True, width=width)


def scalar(text: str) -> Any:
    """The value of a word without quotes.

    Raises ValueError if that depends on the version of YAML, or if the word is a number beyond 64 bits.
    """
    for pattern, instead in _ELSE.items():
        if pattern.fullmatch(text):
            raise ValueError(f"{text} means one thing in YAML 1.1 and another in 1.2: write {instead}, or '{text}'")
    if _NULL.fullmatch(text):
        return None
    if _BOOL.fullmatch(text):
        return text.lower() == "true"
    if _INT.fullmatch(text):
        number = int(text, 0) if text[:2] in ("0o", "0x") else int(text) if len(text) < 25 else _MOST
        if not -_MOST <= number < _MOST:
            raise ValueError(f"{text[:20]}... does not fit 64 bits")
        return number
    if _FLOAT.fullmatch(text):
        number = float(text.replace(".", "", 1) if text[-1].lower() in "fn" else text)
        if text[-1].lower() not in "fn" and abs(number) == float("inf"):
            raise ValueError(f"{text} is beyond what a number can be")
        return number
    return text


def _check_events(text: str) -> Iterator[yaml.Event]:
    """The events of a text that begin, end or are a value. Raises YamlError for YAML that is not supported."""
    depth = 0
    try:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
                raise _refusal(event, "anchors and aliases are not supported: write the value out")
            if isinstance(event, yaml.DocumentStartEvent) and (event.version not in (None, (1, 2)) or event.tags):
                raise _refusal(event, "directives are not supported: drop the line that begins with %")
            if tag := getattr(event, "tag", None):
                raise _refusal(event, f"tags are not supported: drop {tag}")
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > DEEPEST:
                raise _refusal(event, f"more than {DEEPEST} levels")
            if isinstance(event, yaml.ScalarEvent | yaml.CollectionStartEvent | yaml.CollectionEndEvent):
                yield event
    except (ValueError, OverflowError) as error:
        if isinstance(error, YamlError):
            raise
        raise YamlError(f"an escape that stands for no character ({error})") from error


def _value(event: yaml.Event, events: Iterator[yaml.Event]) -> Any:
    """The value that begins with `event`."""
    if isinstance(event, yaml.ScalarEvent):
        if any(0xD800 <= ord(character) < 0xE000 for character in event.value):
            raise _refusal(event, "half of a character (a lone surrogate)")
        try:
            return event.value if event.style else scalar(event.value)
        except ValueError as error:
            raise _refusal(event, str(error)) from error
    if isinstance(event, yaml.SequenceStartEvent):
        items = []
        while not isinstance(item := next(events), yaml.SequenceEndEvent):
            items.append(_value(item, events))
        return items
    mapping: dict[str, Any] = {}
    while not isinstance(event := next(events), yaml.MappingEndEvent):
        key = _value(event, events)
        if not isinstance(key, str):
            raise _refusal(event, f"a key must be a word, not {key!r}")
        if key in mapping:
            raise _refusal(event, f"the key {key!r} appears twice")
        value = next(events)
        plain = isinstance(event, yaml.ScalarEvent) and not event.style
        if plain and ":" in key and value.start_mark.index == value.end_mark.index:
            raise _refusal(event, f"{key} is one word: write {key.replace(':', ': ', 1)} for a key and its value")
        mapping[key] = _value(value, events)
    return mapping


def _refusal(event: yaml.Event, what: str) -> YamlError:
    return YamlError(f"line {event.start_mark.line + 1}: {what}")


class _Dumper(yaml.SafeDumper):
    """Writes YAML, with quotes around texts that would be read as something else without quotes."""

    def represent_str(self, data: str) -> yaml.ScalarNode:
        try:
            plain = scalar(data) == data
        except ValueError:
            plain = False
        return self.represent_scalar("tag:yaml.org,2002:str", data, None if plain else "'")

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_representer(str, _Dumper.represent_str)
