"""The kinds of facts that families.py states: how fields of a config.json become settings of a model, and back."""

import dataclasses
from collections.abc import Mapping
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
    none: bool = False  # whether it may be 0

    def read(self, source: Source, values: Values) -> None:
        names = self.names.split()
        default = self.default(values) if callable(self.default) else self.default
        values[self.setting] = 0
        if not self.none or source.get(names) != 0:
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


@dataclasses.dataclass(frozen=True)
class Agrees:
    """A field of other families that says what settings of this family say too. Where no part reads it, it must agree.

    It agrees if it is null or equal to the settings, or if it is true or empty and they are set or not set.
    """

    name: str
    settings: tuple[str, ...]

    def read(self, source: Source, values: Values) -> None:
        if self.name in source.read or (given := source.get([self.name])) is None:
            return
        for setting in self.settings:
            default = _DEFAULTS[setting]
            value = values.get(setting, default)
            is_set = value != default and default is not dataclasses.MISSING  # a size that every model has is no switch
            if given != value and not (given is True and is_set) and (given or value != default):
                source.refuse(self.name, given, f"contradicts this family, where model.{setting} is {value}")
                return

    def write(self, model: config.Model) -> dict[str, Any]:
        return {}


_DEFAULTS = {field.name: field.default for field in dataclasses.fields(config.Model)}
ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "relu": "relu", "gelu": "gelu", "gelu_python": "gelu", "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh", "gelu_python_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh", "relu2": "relu2",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class QueryScale:
    """A field whose power multiplies the scores of attention."""

    name: str = "query_pre_attn_scalar"
    power: float = -0.5
    default: float = 256

    def read(self, source: Source, values: Values) -> None:
        scale = source.number([self.name], self.default) ** self.power
        usual = values["head_dim"] ** -0.5 if values["head_dim"] else 0.0
        values["query_scale"] = 0.0 if scale == usual else float(scale)

    def write(self, model: config.Model) -> dict[str, Any]:
        scale = model.query_scale or model.head_dim**-0.5
        return {self.name: _root(scale, self.power)}


@dataclasses.dataclass(frozen=True)
class Divisor:
    """A field that divides what a setting multiplies."""

    name: str
    setting: str
    default: float = 1.0

    def read(self, source: Source, values: Values) -> None:
        values[self.setting] = 1 / source.number([self.name], self.default)

    def write(self, model: config.Model) -> dict[str, Any]:
        return {self.name: _root(getattr(model, self.setting), -1)}


def _root(value: float, power: float) -> float:
    """The number whose power `value` is, whole if that is exact."""
    root = value ** (1 / power)
    return round(root) if root >= 0.5 and round(root) ** power == value else root


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
class Unless:
    """A field whose setting is 0 if it is missing or equals another setting."""

    name: str
    setting: str
    other: str

    def read(self, source: Source, values: Values) -> None:
        value = source.number([self.name], values[self.other])
        values[self.setting] = 0 if value == values[self.other] else value

    def write(self, model: config.Model) -> dict[str, Any]:
        return {self.name: getattr(model, self.setting) or getattr(model, self.other)}


@dataclasses.dataclass(frozen=True)
class Temperature:
    """Llama 4's queries that grow with their position, in layers without positions."""

    def read(self, source: Source, values: Values) -> None:
        tuned = source.flag(["attn_temperature_tuning"], True)
        scale, every = source.number(["attn_scale"], 0.1), source.number(["floor_scale"], 8192)
        found = {"scale": float(scale), "every": every, "offset": 1, "layers": "nope"}
        values["attention_temperature"] = found if tuned else None

    def write(self, model: config.Model) -> dict[str, Any]:
        tuned = model.attention_temperature
        if tuned is None:
            return {"attn_temperature_tuning": False}
        return {"attn_temperature_tuning": True, "attn_scale": tuned.scale, "floor_scale": tuned.every}


@dataclasses.dataclass(frozen=True)
class DualChunks:
    """dual_chunk_attention_config: attention (arXiv 2402.17463) that is plain for a context that is not too long.

    Positions are those of plain attention as long as no row is longer than a chunk, than twice the part of a chunk that
    is not local, or than the context that the model was trained with.
    """

    def read(self, source: Source, values: Values) -> None:
        name = "dual_chunk_attention_config"
        if not (given := source.get([name])):
            return
        if not isinstance(given, dict) or "chunk_size" not in given:
            source.refuse(name, given, "is not an object with chunk_size")
            return
        sizes = ("chunk_size", "local_size", "original_max_position_embeddings")
        chunk, local, original = (source.checked(f"{name}.{size}", given.get(size, 1)) for size in sizes)
        plain, context = min(chunk, 2 * (chunk - local), original if original > 1 else chunk), values["context"]
        if plain < 1:
            source.refuse(f"{name}.local_size", local, f"is not below chunk_size: {chunk}")
        elif plain < context:
            values["context"] = plain
            source.notes.append(
                f"{name} is attention within chunks, which is not supported. For up to {plain:,} tokens it is plain "
                f"attention, so model.context is {plain}, not {context}"
            )

    def write(self, model: config.Model) -> dict[str, Any]:
        return {}


@dataclasses.dataclass(frozen=True)
class OptNorms:
    """OPT's norms: before attention and MLP, with a last norm that a field removes; or after the residual sums."""

    def read(self, source: Source, values: Values) -> None:
        before = source.flag(["do_layer_norm_before"], True)
        removed = source.flag(["_remove_final_layer_norm"], False)
        values |= {"pre_norms": before, "sum_norms": not before, "final_norm": before and not removed}

    def write(self, model: config.Model) -> dict[str, Any]:
        removed = model.pre_norms and not model.final_norm
        return {"do_layer_norm_before": model.pre_norms, "_remove_final_layer_norm": removed}


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


@dataclasses.dataclass(frozen=True)
class MultiQuery:
    """multi_query: one key head for all query heads, or one for each."""

    def read(self, source: Source, values: Values) -> None:
        values["kv_heads"] = 1 if source.flag(["multi_query"], True) else values["heads"]

    def write(self, model: config.Model) -> dict[str, Any]:
        return {"multi_query": model.kv_heads == 1}
