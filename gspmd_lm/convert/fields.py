"""Codecs of config.json fields: each reads settings of a model from some fields, and writes the fields from a model.

Here are those that many families share. A codec that one family alone has stands in that family's file.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from gspmd_lm import config
from gspmd_lm.config import value_at
from gspmd_lm.convert.config_reader import LARGEST, MISSING, ConfigReader

Values = dict[str, Any]  # name of a setting of config.ModelConfig -> value
MOST_LAYERS = 2000  # a limit: published decoders have up to 126 layers
BY_LAYER = {"full_attention": "full", "sliding_attention": "sliding"}


class FieldCodec(Protocol):
    """The interface of a codec. Families differ in their codecs."""

    def read(self, reader: ConfigReader, values: Values) -> None:
        """Adds settings of the model to `values`, or problems to the reader."""
        ...

    def write(self, model: config.ModelConfig) -> dict[str, Any]:
        """The fields of config.json that express these settings of a model. By default there are none."""
        return {}


@dataclasses.dataclass(frozen=True)
class Renamed:
    """A field that states one setting of the model."""

    names: str  # the field's names: the first is written, the later ones are older names
    setting: str
    default: Any = MISSING  # if the field is missing or null: a value, or a function of the settings so far
    most: float = LARGEST
    may_be_zero: bool = False

    def read(self, reader: ConfigReader, values: Values) -> None:
        default = self.default(values) if callable(self.default) else self.default
        values[self.setting] = 0
        if not self.may_be_zero or reader.get(self.names) != 0:
            values[self.setting] = reader.number(self.names, default, self.most)

    def write(self, model: config.ModelConfig) -> dict[str, Any]:
        return {self.names.split()[0]: value_at(model, self.setting)}


class Given(FieldCodec):
    """Settings, by their keys, that all models of the family have: each a value, or a function of those so far."""

    def __init__(self, settings: Values):
        self.settings = settings

    def read(self, reader: ConfigReader, values: Values) -> None:
        for name, value in self.settings.items():
            values[name] = value(values) if callable(value) else value


@dataclasses.dataclass(frozen=True)
class Flag:
    """A field, true or false, that decides one or several settings.

    on, off: their value if it is true, and if it is false; each a value, or a function of the settings so far.
    """

    name: str
    settings: tuple[str, ...]
    default: bool
    on: Any = True
    off: Any = False
    null_is_false: bool = False  # otherwise null means the default

    def read(self, reader: ConfigReader, values: Values) -> None:
        default = self.default and not (self.null_is_false and self.name in reader.raw)
        value = self.on if reader.flag(self.name, default) else self.off
        values.update(dict.fromkeys(self.settings, value(values) if callable(value) else value))

    def write(self, model: config.ModelConfig) -> dict[str, Any]:
        value = value_at(model, self.settings[0])
        return {self.name: value != self.off if callable(self.on) else value == self.on}


@dataclasses.dataclass(frozen=True)
class Fixed(FieldCodec):
    """A field that must have one value, because models with another value are not supported. null means false."""

    name: str
    value: Any
    why: str

    def read(self, reader: ConfigReader, values: Values) -> None:
        reader.names_read.add(self.name)
        value = reader.raw.get(self.name, self.value)
        if (False if value is None else value) != self.value:
            reader.refuse(self.name, value, self.why)


@dataclasses.dataclass(frozen=True)
class Activation:
    """The field that names the activation. `also` has names with another meaning in this family."""

    names: str
    default: str
    written: Mapping[str, str]  # our name -> the published name
    also: tuple[tuple[str, str], ...] = ()

    def read(self, reader: ConfigReader, values: Values) -> None:
        names = self.names.split()
        reader.names_read.update(names)
        known = ACTIVATIONS | dict(self.also)
        words = {name: reader.raw[name] for name in names if reader.raw.get(name) is not None}
        for name, word in (words or {names[0]: self.default}).items():
            ours = known.get(word) if isinstance(word, str) else None
            if ours is None:
                reader.refuse(name, word, f"is not known; known are {', '.join(sorted(known))}")
            elif values.setdefault("feed_forward.activation", ours) != ours:
                reader.refuse(name, word, f"contradicts {next(iter(words))}")
        values.setdefault("feed_forward.activation", "silu")

    def write(self, model: config.ModelConfig) -> dict[str, Any]:
        return {self.names.split()[0]: self.written.get(model.feed_forward.activation, model.feed_forward.activation)}


@dataclasses.dataclass(frozen=True)
class MustAgree(FieldCodec):
    """A field of other families that says what settings of this family say too. If no codec reads it, it must agree.

    It agrees if it is null or equal to the settings, or if it is true or empty and they are set or not set.
    """

    name: str
    settings: tuple[str, ...]

    def read(self, reader: ConfigReader, values: Values) -> None:
        if self.name in reader.names_read or (stated := reader.get(self.name)) is None:
            return
        for setting in self.settings:
            default = config.default_at(config.ModelConfig, setting)
            value = values.get(setting, default)
            is_set = value != default and default is not dataclasses.MISSING  # a size that every model has is no switch
            if stated != value and not (stated is True and is_set) and (stated or value != default):
                reader.refuse(self.name, stated, f"contradicts this family, where model.{setting} is {value}")
                return


ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "relu": "relu", "gelu": "gelu", "gelu_python": "gelu", "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh", "gelu_python_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh", "relu2": "relu2",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class MustEqual:
    """A field that must be equal to a setting."""

    name: str
    setting: str
    why: str

    def read(self, reader: ConfigReader, values: Values) -> None:
        value = reader.get(self.name, values[self.setting])
        if value != values[self.setting]:
            reader.refuse(self.name, value, self.why)

    def write(self, model: config.ModelConfig) -> dict[str, Any]:
        return {self.name: value_at(model, self.setting)}


@dataclasses.dataclass(frozen=True)
class DefaultsTo:
    """A field whose setting is 0 if it equals another setting."""

    name: str
    setting: str
    other: str
    default: int = 0  # if the field is missing; 0: the other setting

    def read(self, reader: ConfigReader, values: Values) -> None:
        value = reader.number(self.name, self.default or values[self.other])
        values[self.setting] = 0 if value == values[self.other] else value

    def write(self, model: config.ModelConfig) -> dict[str, Any]:
        return {self.name: value_at(model, self.setting) or value_at(model, self.other)}


@dataclasses.dataclass(frozen=True)
class QueryScale:
    """A field whose power multiplies the scores of attention."""

    name: str = "query_pre_attn_scalar"
    power: float = -0.5
    default: float = 256

    def read(self, reader: ConfigReader, values: Values) -> None:
        scale = reader.number(self.name, self.default) ** self.power
        usual = values["head_dim"] ** -0.5 if values["head_dim"] else 0.0
        values["attention.scale"] = 0.0 if scale == usual else float(scale)

    def write(self, model: config.ModelConfig) -> dict[str, Any]:
        scale = model.attention.scale or model.head_dim**-0.5
        return {self.name: find_root(scale, self.power)}


def find_root(value: float, power: float) -> float:
    """The number whose power `value` is, whole if that is exact."""
    root = value ** (1 / power)
    return round(root) if root >= 0.5 and round(root) ** power == value else root


@dataclasses.dataclass(frozen=True)
class KeyHeads:
    """num_key_value_heads. null means as many as heads, and so does a missing field whose default is 0."""

    default: int = 0

    def read(self, reader: ConfigReader, values: Values) -> None:
        name = "num_key_value_heads"
        usual = values["heads"] if name in reader.raw or not self.default else self.default
        values["kv_heads"] = reader.number(name, usual)

    def write(self, model: config.ModelConfig) -> dict[str, Any]:
        return {"num_key_value_heads": model.kv_heads}


def read_window(reader: ConfigReader, default: int | None) -> int | None:
    """The value of sliding_window, which is null if there is no window."""
    value = reader.get("sliding_window", None if "sliding_window" in reader.raw else default)
    return None if value is None else reader.positive("sliding_window", value)


def every_second(reader: ConfigReader) -> Callable[[int], bool]:
    """Whether a layer has a window, for `LayerTypes`: the first, the third, ..."""
    return lambda i: i % 2 == 0


def shortest_pattern(kinds: Sequence[str]) -> tuple[str, ...]:
    """The shortest pattern that gives these kinds of layers; () if all layers are of the usual kind."""
    sizes = range(1, len(kinds) + 1)
    size = next(size for size in sizes if all(kind == kinds[i % size] for i, kind in enumerate(kinds)))
    return tuple(kinds[:size]) if size > 1 or kinds[0] in ("nope", "whole") else ()


def number_of_layers(values: Values) -> int:
    """The number of layers; 1 where it is not a whole number, which is a problem already."""
    return values["layers"] if isinstance(values["layers"], int) else 1


def check_each_layer(reader: ConfigReader, name: str, found: Any, usual: list[Any], known: Iterable[str]) -> list[Any]:
    """The value of a field for each layer, one of `known`. Any other value is a problem, and `usual` is returned."""
    if isinstance(found, list) and len(found) == len(usual) and set(map(str, found)) <= {*known}:
        return found
    reader.refuse(name, found, f"must be {len(usual)} of {', '.join(known)}")
    return usual


def default_rotation(reader: ConfigReader, values: Values) -> list[int]:
    """The default of no_rope_layers: 0 for every no_rope_layer_interval-th layer, and 1 for the others."""
    interval = reader.whole("no_rope_layer_interval", 4, 1)
    return [int((i + 1) % interval != 0) for i in range(number_of_layers(values))]


@dataclasses.dataclass(frozen=True)
class Window:
    """A sliding window for all layers, or for none."""

    default: int | None
    switch: str = ""  # a field; if it is not set, there is no window

    def read(self, reader: ConfigReader, values: Values) -> None:
        window = read_window(reader, self.default)
        if self.switch and not reader.flag(self.switch, False):
            window = None
        values["attention.window"] = window or 0
        kinds = reader.get("layer_types", [])
        wanted = "sliding_attention" if window else "full_attention"
        if not isinstance(kinds, list) or any(kind != wanted for kind in kinds):
            reader.refuse("layer_types", kinds, "does not fit sliding_window, which all layers have or none")

    def write(self, model: config.ModelConfig) -> dict[str, Any]:
        switch = {self.switch: model.attention.window > 0} if self.switch else {}
        return {"sliding_window": model.attention.window or None} | switch


@dataclasses.dataclass(frozen=True)
class LayerTypes:
    """A sliding window for some layers: layer_types, or the older rules for which layers."""

    default: int | None  # window
    implied: Callable[[ConfigReader], Callable[[int], bool]]  # without layer_types: whether layer i has the window
    switch: str = ""  # a field; if it is not set, no layer has a window
    older: Callable[[config.ModelConfig], dict[str, Any]] = lambda model: {}  # read by older transformers
    full: str = "full"  # the kind of a layer without a window: nope if it has no positions either

    def read(self, reader: ConfigReader, values: Values) -> None:
        slides = self.implied(reader)
        implied = ["sliding_attention" if slides(i) else "full_attention" for i in range(number_of_layers(values))]
        if self.switch and not reader.flag(self.switch, False):
            reader.names_read.add("sliding_window")
            window = None
            implied = ["full_attention"] * len(implied)
        else:
            window = read_window(reader, self.default)
        kinds = check_each_layer(reader, "layer_types", reader.get("layer_types", implied), implied, BY_LAYER)
        short = ["sliding" if window and BY_LAYER[kind] == "sliding" else self.full for kind in kinds]
        values["attention.window"] = window if "sliding" in short else 0
        values["layer_pattern"] = shortest_pattern(short)

    def write(self, model: config.ModelConfig) -> dict[str, Any]:
        kinds = [("sliding" if kind == "sliding" else "full") + "_attention" for kind in model.kind_of_each_layer]
        written: dict[str, Any] = {"layer_types": kinds, "sliding_window": model.attention.window or None}
        if self.switch:
            written[self.switch] = model.attention.window > 0
        return written | self.older(model)
