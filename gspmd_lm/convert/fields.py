"""The kinds of facts that families.py states: how fields of a config.json become settings of a model, and back."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from gspmd_lm import config
from gspmd_lm.convert.source import LARGEST, MISSING, Source

Values = dict[str, Any]  # name of a setting of config.Model -> value
MOST_LAYERS = 2000  # a limit: published decoders have up to 126 layers


class Part(Protocol):
    """The interface of one fact about a family's config.json."""

    def read(self, source: Source, values: Values) -> None:
        """Adds settings of the model to `values`, or problems to the source."""
        ...

    def write(self, model: config.Model) -> dict[str, Any]:
        """The fields of config.json that express this fact about a model."""
        ...


@dataclasses.dataclass(frozen=True)
class Same:
    """A field that states one setting of the model."""

    names: str  # the field's names: the first is written, the later ones are older names
    setting: str
    default: Any = MISSING  # if the field is missing or null: a value, or a function of the settings so far
    most: float = LARGEST

    def read(self, source: Source, values: Values) -> None:
        names = self.names.split()
        default = self.default(values) if callable(self.default) else self.default
        values[self.setting] = source.number(names, default, self.most)

    def write(self, model: config.Model) -> dict[str, Any]:
        return {self.names.split()[0]: getattr(model, self.setting)}


@dataclasses.dataclass(frozen=True)
class Always:
    """A setting that all models of the family have: a value, or a function of the settings so far."""

    setting: str
    value: Any

    def read(self, source: Source, values: Values) -> None:
        values[self.setting] = self.value(values) if callable(self.value) else self.value

    def write(self, model: config.Model) -> dict[str, Any]:
        return {}


@dataclasses.dataclass(frozen=True)
class Switch:
    """A field, true or false, that decides one or several settings: their values if true, and if false."""

    name: str
    settings: tuple[str, ...]
    default: bool
    on: Any = True
    off: Any = False

    def read(self, source: Source, values: Values) -> None:
        value = self.on if source.flag([self.name], self.default) else self.off
        values.update(dict.fromkeys(self.settings, value))

    def write(self, model: config.Model) -> dict[str, Any]:
        return {self.name: getattr(model, self.settings[0]) == self.on}


@dataclasses.dataclass(frozen=True)
class Only:
    """A field that must have one value, because models with another value are not supported. null means false."""

    name: str
    value: Any
    why: str

    def read(self, source: Source, values: Values) -> None:
        source.read.add(self.name)
        given = source.raw.get(self.name, self.value)
        if (False if given is None else given) != self.value:
            source.refuse(self.name, given, self.why)

    def write(self, model: config.Model) -> dict[str, Any]:
        return {}


@dataclasses.dataclass(frozen=True)
class Activation:
    """The field that names the activation. `also` has names with another meaning in this family."""

    names: str
    default: str
    written: Mapping[str, str]  # our name -> the published name
    also: tuple[tuple[str, str], ...] = ()

    def read(self, source: Source, values: Values) -> None:
        names = self.names.split()
        source.read.update(names)
        known = ACTIVATIONS | dict(self.also)
        words = {name: source.raw[name] for name in names if source.raw.get(name) is not None}
        for name, word in (words or {names[0]: self.default}).items():
            ours = known.get(word) if isinstance(word, str) else None
            if ours is None:
                source.refuse(name, word, f"is not known; known are {', '.join(sorted(known))}")
            elif values.setdefault("activation", ours) != ours:
                source.refuse(name, word, f"contradicts {next(iter(words))}")
        values.setdefault("activation", "silu")

    def write(self, model: config.Model) -> dict[str, Any]:
        return {self.names.split()[0]: self.written.get(model.activation, model.activation)}


ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "relu": "relu", "gelu": "gelu", "gelu_python": "gelu", "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh", "gelu_python_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh",
}  # fmt: skip
_ROPE_FIELDS = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
}
_ROPE_ALWAYS = {"type", "rope_type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"}
_BY_LAYER = {"full_attention": "full", "sliding_attention": "sliding"}


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary positions: rope_theta, rope_scaling and partial_rotary_factor, or transformers 5's rope_parameters."""

    theta: float = 10000.0
    theta_name: str = "rope_theta"
    part: float = 0.0  # the default of partial_rotary_factor; 0: the family has no such field
    part_name: str = "partial_rotary_factor"
    sliding_theta: float = 0.0  # the default of rope_local_base_freq; 0: the family has no such field

    def read(self, source: Source, values: Values) -> None:
        values["positions"] = "rope"
        theta = source.number([self.theta_name, "rope_theta"], self.theta)
        part = source.number([self.part_name, "partial_rotary_factor"], self.part or 1.0)
        if self.part not in (0, 1) and source.raw.get("partial_rotary_factor", self.part) is None:
            source.refuse("partial_rotary_factor", None, "must be a number above zero")  # transformers would take 1
        local = source.number(["rope_local_base_freq"], self.sliding_theta) if self.sliding_theta else 0.0
        older = source.get(["rope_scaling"])
        name = "rope_scaling" if older else "rope_parameters"
        newer = source.get(["rope_parameters"])
        if older and newer and older != newer:
            source.refuse("rope_scaling", older, "contradicts rope_parameters")
        given = older or newer or {}
        if not isinstance(given, dict):
            source.refuse(name, given, "is not an object")
            return
        if given.keys() & _BY_LAYER.keys():
            if not self.sliding_theta or older:
                source.refuse(name, given, "sets positions for kinds of layers, which this family does not have")
            if unknown := sorted(given.keys() - _BY_LAYER.keys()):
                source.refuse(name, unknown, "are kinds of layers that are not known")
            sliding, at = given.get("sliding_attention") or {}, f"{name}.sliding_attention"
            given, name = given.get("full_attention") or {}, f"{name}.full_attention"
            for place, kind in ((at, sliding), (name, given)):
                if not isinstance(kind, dict):
                    source.refuse(place, kind, "is not an object")
                    return
            local = source.checked(f"{at}.rope_theta", sliding.get("rope_theta", local or 1))
            if self._kind(source, at, sliding) != "default" or sliding.get("partial_rotary_factor", 1) != 1:
                source.refuse(at, sliding, "scales the positions of sliding layers, which is not supported")
        kind = self._kind(source, name, given)
        given = {
            field: source.checked(f"{name}.{field}", value) if field not in ("type", "rope_type") else value
            for field, value in given.items()
            if value is not None and (kind != "default" or field in _ROPE_ALWAYS)
        }
        theta, part = given.get("rope_theta", theta), given.get("partial_rotary_factor", part)
        values["rope_theta"] = theta
        values["sliding_rope_theta"] = 0.0 if local == theta and kind == "default" else local or 0.0
        if part != 1 and not self.part:
            source.refuse("partial_rotary_factor", part, "is not a setting of this family")
        turned = int(values["head_dim"] * part)
        values["rope_dim"] = 0 if turned == values["head_dim"] else turned
        if kind in ("linear", "llama3"):
            fields = ("factor", "low_freq_factor", "high_freq_factor")
            scaling = {field: float(given[field]) for field in fields if field in given and field in _ROPE_FIELDS[kind]}
            if kind == "llama3":
                low, high = scaling.get("low_freq_factor", 0), scaling.get("high_freq_factor", LARGEST)
                if high <= low:
                    source.refuse(f"{name}.high_freq_factor", high, f"is not above low_freq_factor: {low}")
                scaling["original_context"] = given.get("original_max_position_embeddings", values["context"])
            values["rope_scaling"] = {"kind": kind, **scaling}

    def _kind(self, source: Source, name: str, given: Mapping[str, Any]) -> str:
        kind = str(given.get("rope_type", given.get("type")) or "default")
        if kind not in _ROPE_FIELDS:
            source.refuse(f"{name}.rope_type", kind, "is not supported; use default, linear or llama3")
            return "default"
        unknown = sorted(key for key in given.keys() - _ROPE_ALWAYS - _ROPE_FIELDS[kind] if given[key] is not None)
        if unknown and kind != "default":
            source.refuse(name, unknown, f"are not fields of {kind}")
        if lacking := sorted(_ROPE_FIELDS[kind] - given.keys() - {"original_max_position_embeddings"}):
            source.refuse(name, dict(given), f"lacks {', '.join(lacking)}")
        return kind

    def write(self, model: config.Model) -> dict[str, Any]:
        """The fields in the older form, which transformers 5 reads too."""
        written: dict[str, Any] = {self.theta_name: model.rope_theta, "rope_scaling": None}
        if scaling := model.rope_scaling:
            written["rope_scaling"] = {"rope_type": scaling.kind, "factor": scaling.factor}
            if scaling.kind == "llama3":
                written["rope_scaling"] |= {
                    "low_freq_factor": scaling.low_freq_factor,
                    "high_freq_factor": scaling.high_freq_factor,
                    "original_max_position_embeddings": scaling.original_context,
                }
        if self.part:
            written[self.part_name] = model.rope_dim / model.head_dim if model.rope_dim else 1.0
        if self.sliding_theta:
            written["rope_local_base_freq"] = model.sliding_rope_theta or model.rope_theta
        return written


def _window(source: Source, default: int | None) -> int | None:
    """The value of sliding_window, which is null if there is no window."""
    value = source.get(["sliding_window"], None if "sliding_window" in source.raw else default)
    return None if value is None else source.checked("sliding_window", value)


@dataclasses.dataclass(frozen=True)
class Window:
    """A sliding window for all layers, or for none."""

    default: int | None

    def read(self, source: Source, values: Values) -> None:
        window = _window(source, self.default)
        values["sliding_window"] = window or 0
        kinds = source.get(["layer_types"], [])
        wanted = "sliding_attention" if window else "full_attention"
        if not isinstance(kinds, list) or any(kind != wanted for kind in kinds):
            source.refuse("layer_types", kinds, "does not fit sliding_window, which all layers have or none")

    def write(self, model: config.Model) -> dict[str, Any]:
        return {"sliding_window": model.sliding_window or None}


@dataclasses.dataclass(frozen=True)
class LayerTypes:
    """A sliding window for some layers: layer_types, or the older rules for which layers."""

    default: int | None  # window
    implied: Callable[[Source], Callable[[int], bool]]  # without layer_types: whether layer i has the window
    switch: str = ""  # a field; if it is not set, no layer has a window
    older: Callable[[config.Model], dict[str, Any]] = lambda model: {}  # read by older transformers

    def read(self, source: Source, values: Values) -> None:
        layers = values["layers"] if isinstance(values["layers"], int) else 1
        slides = self.implied(source)
        implied = ["sliding_attention" if slides(i) else "full_attention" for i in range(layers)]
        if self.switch and not source.flag([self.switch], False):
            source.read.add("sliding_window")
            window = None
            implied = ["full_attention"] * layers
        else:
            window = _window(source, self.default)
        kinds = source.get(["layer_types"], implied)
        if not isinstance(kinds, list) or len(kinds) != layers or not set(map(str, kinds)) <= _BY_LAYER.keys():
            source.refuse("layer_types", kinds, f"must be {layers} of {', '.join(_BY_LAYER)}")
            kinds = implied
        short = [_BY_LAYER[kind] if window else "full" for kind in kinds]
        pattern = next(
            short[:size] for size in range(1, layers + 1) if all(short[i] == short[i % size] for i in range(layers))
        )
        values["sliding_window"] = window if "sliding" in short else 0
        values["layer_pattern"] = tuple(pattern) if len(pattern) > 1 else ()

    def write(self, model: config.Model) -> dict[str, Any]:
        pattern = model.layer_pattern or ("sliding" if model.sliding_window else "full",)
        names = {short: long for long, short in _BY_LAYER.items()}
        kinds = [names[pattern[i % len(pattern)]] for i in range(model.layers)]
        written: dict[str, Any] = {"layer_types": kinds, "sliding_window": model.sliding_window or None}
        if self.switch:
            written[self.switch] = model.sliding_window > 0
        return written | self.older(model)


@dataclasses.dataclass(frozen=True)
class QueryScale:
    """query_pre_attn_scalar, whose inverse square root multiplies the scores."""

    default: int = 256

    def read(self, source: Source, values: Values) -> None:
        scalar = source.number(["query_pre_attn_scalar"], self.default)
        values["query_scale"] = 0.0 if scalar == values["head_dim"] else scalar**-0.5

    def write(self, model: config.Model) -> dict[str, Any]:
        if not model.query_scale:
            return {"query_pre_attn_scalar": model.head_dim}
        scalar = model.query_scale**-2
        return {"query_pre_attn_scalar": round(scalar) if round(scalar) ** -0.5 == model.query_scale else scalar}


@dataclasses.dataclass(frozen=True)
class Cap:
    """A cap of scores or logits; null means none."""

    name: str
    setting: str
    default: float | None

    def read(self, source: Source, values: Values) -> None:
        cap = source.get([self.name], None if self.name in source.raw else self.default)
        values[self.setting] = 0.0 if cap is None else source.checked(self.name, cap)

    def write(self, model: config.Model) -> dict[str, Any]:
        return {self.name: getattr(model, self.setting) or None}


@dataclasses.dataclass(frozen=True)
class RotaryDim:
    """GPT-J's rotary positions: the number of dimensions that are rotated."""

    default: int = 64

    def read(self, source: Source, values: Values) -> None:
        turned = source.get(["rotary_dim"], None if "rotary_dim" in source.raw else self.default)
        turned = source.checked("rotary_dim", turned)
        values["positions"] = "rope"
        values["rope_dim"] = 0 if turned == values["head_dim"] else turned

    def write(self, model: config.Model) -> dict[str, Any]:
        return {"rotary_dim": model.rope_dim or model.head_dim}


@dataclasses.dataclass(frozen=True)
class Equal:
    """A field that must be equal to a setting."""

    name: str
    setting: str
    why: str

    def read(self, source: Source, values: Values) -> None:
        value = source.get([self.name], values[self.setting])
        if value != values[self.setting]:
            source.refuse(self.name, value, self.why)

    def write(self, model: config.Model) -> dict[str, Any]:
        return {self.name: getattr(model, self.setting)}


@dataclasses.dataclass(frozen=True)
class FalconBlock:
    """Falcon's block: key heads, norms, and whether attention and MLP are parallel, in the old form and the new."""

    def read(self, source: Source, values: Values) -> None:
        new = source.flag(["new_decoder_architecture"], False)
        heads = source.number(["num_kv_heads", "n_head_kv"], values["heads"])
        one = source.flag(["multi_query"], True)
        parallel = source.flag(["parallel_attn"], True)
        norms = source.get(["num_ln_in_parallel_attn"], 2 if new else 1)
        if norms not in (1, 2) or (norms == 2 and not new):
            source.refuse("num_ln_in_parallel_attn", norms, "is not 1, nor 2 with new_decoder_architecture")
        if new and not parallel:
            source.refuse("parallel_attn", parallel, "contradicts new_decoder_architecture")
        values["kv_heads"] = heads if new else 1 if one else values["heads"]
        values["block"] = "parallel" if parallel else "sequential"
        values["shared_norm"] = norms == 1

    def write(self, model: config.Model) -> dict[str, Any]:
        parallel = model.block == "parallel"
        new = parallel and (not model.shared_norm or model.kv_heads not in (1, model.heads))
        written: dict[str, Any] = {"new_decoder_architecture": new, "parallel_attn": parallel}
        if not new:
            return written | {"multi_query": model.kv_heads == 1}
        return written | {"num_kv_heads": model.kv_heads, "num_ln_in_parallel_attn": 1 if model.shared_norm else 2}
