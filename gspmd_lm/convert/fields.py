"""Codecs of config.json fields: each reads settings of a model from some fields, and writes the fields from a model."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

from gspmd_lm import config
from gspmd_lm.convert.config_reader import LARGEST, MISSING, ConfigReader

Values = dict[str, Any]  # name of a setting of config.ModelConfig -> value
MOST_LAYERS = 2000  # a limit: published decoders have up to 126 layers


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
        names = self.names.split()
        default = self.default(values) if callable(self.default) else self.default
        values[self.setting] = 0
        if not self.may_be_zero or reader.get(names) != 0:
            values[self.setting] = reader.number(names, default, self.most)

    def write(self, model: config.ModelConfig) -> dict[str, Any]:
        return {self.names.split()[0]: getattr(model, self.setting)}


@dataclasses.dataclass(frozen=True)
class Constant(FieldCodec):
    """A setting that all models of the family have: a value, or a function of the settings so far."""

    setting: str
    value: Any

    def read(self, reader: ConfigReader, values: Values) -> None:
        values[self.setting] = self.value(values) if callable(self.value) else self.value


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
        value = self.on if reader.flag([self.name], default) else self.off
        values.update(dict.fromkeys(self.settings, value(values) if callable(value) else value))

    def write(self, model: config.ModelConfig) -> dict[str, Any]:
        value = getattr(model, self.settings[0])
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
            elif values.setdefault("activation", ours) != ours:
                reader.refuse(name, word, f"contradicts {next(iter(words))}")
        values.setdefault("activation", "silu")

    def write(self, model: config.ModelConfig) -> dict[str, Any]:
        return {self.names.split()[0]: self.written.get(model.activation, model.activation)}


@dataclasses.dataclass(frozen=True)
class MustAgree(FieldCodec):
    """A field of other families that says what settings of this family say too. If no codec reads it, it must agree.

    It agrees if it is null or equal to the settings, or if it is true or empty and they are set or not set.
    """

    name: str
    settings: tuple[str, ...]

    def read(self, reader: ConfigReader, values: Values) -> None:
        if self.name in reader.names_read or (stated := reader.get([self.name])) is None:
            return
        for setting in self.settings:
            default = _DEFAULTS[setting]
            value = values.get(setting, default)
            is_set = value != default and default is not dataclasses.MISSING  # a size that every model has is no switch
            if stated != value and not (stated is True and is_set) and (stated or value != default):
                reader.refuse(self.name, stated, f"contradicts this family, where model.{setting} is {value}")
                return


_DEFAULTS = {field.name: field.default for field in dataclasses.fields(config.ModelConfig)}
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

    def read(self, reader: ConfigReader, values: Values) -> None:
        scale = reader.number([self.name], self.default) ** self.power
        usual = values["head_dim"] ** -0.5 if values["head_dim"] else 0.0
        values["query_scale"] = 0.0 if scale == usual else float(scale)

    def write(self, model: config.ModelConfig) -> dict[str, Any]:
        scale = model.query_scale or model.head_dim**-0.5
        return {self.name: _root(scale, self.power)}


@dataclasses.dataclass(frozen=True)
class Divisor:
    """A field that divides what a setting multiplies."""

    name: str
    setting: str
    default: float = 1.0

    def read(self, reader: ConfigReader, values: Values) -> None:
        values[self.setting] = 1 / reader.number([self.name], self.default)

    def write(self, model: config.ModelConfig) -> dict[str, Any]:
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

    def read(self, reader: ConfigReader, values: Values) -> None:
        cap = reader.get([self.name], None if self.name in reader.raw else self.default)
        values[self.setting] = 0.0 if cap is None else reader.positive(self.name, cap)

    def write(self, model: config.ModelConfig) -> dict[str, Any]:
        return {self.name: getattr(model, self.setting) or None}


@dataclasses.dataclass(frozen=True)
class RotaryDim:
    """GPT-J's rotary positions: the number of dimensions that are rotated."""

    default: int = 64

    def read(self, reader: ConfigReader, values: Values) -> None:
        rotated = reader.get(["rotary_dim"], None if "rotary_dim" in reader.raw else self.default)
        rotated = reader.positive("rotary_dim", rotated)
        values["positions"] = "rope"
        values["rope_dim"] = 0 if rotated == values["head_dim"] else rotated

    def write(self, model: config.ModelConfig) -> dict[str, Any]:
        return {"rotary_dim": model.rope_dim or model.head_dim}


@dataclasses.dataclass(frozen=True)
class MustEqual:
    """A field that must be equal to a setting."""

    name: str
    setting: str
    why: str

    def read(self, reader: ConfigReader, values: Values) -> None:
        value = reader.get([self.name], values[self.setting])
        if value != values[self.setting]:
            reader.refuse(self.name, value, self.why)

    def write(self, model: config.ModelConfig) -> dict[str, Any]:
        return {self.name: getattr(model, self.setting)}


@dataclasses.dataclass(frozen=True)
class DefaultsTo:
    """A field whose setting is 0 if it equals another setting."""

    name: str
    setting: str
    other: str
    default: int = 0  # if the field is missing; 0: the other setting

    def read(self, reader: ConfigReader, values: Values) -> None:
        value = reader.number([self.name], self.default or values[self.other])
        values[self.setting] = 0 if value == values[self.other] else value

    def write(self, model: config.ModelConfig) -> dict[str, Any]:
        return {self.name: getattr(model, self.setting) or getattr(model, self.other)}


@dataclasses.dataclass(frozen=True)
class Temperature:
    """Llama 4's queries that grow with their position, in layers without positions."""

    def read(self, reader: ConfigReader, values: Values) -> None:
        tuned = reader.flag(["attn_temperature_tuning"], True)
        scale, every = reader.number(["attn_scale"], 0.1), reader.number(["floor_scale"], 8192)
        temperature = {"scale": float(scale), "every": every, "offset": 1, "layers": "nope"}
        values["attention_temperature"] = temperature if tuned else None

    def write(self, model: config.ModelConfig) -> dict[str, Any]:
        tuned = model.attention_temperature
        if tuned is None:
            return {"attn_temperature_tuning": False}
        return {"attn_temperature_tuning": True, "attn_scale": tuned.scale, "floor_scale": tuned.every}


@dataclasses.dataclass(frozen=True)
class DualChunks(FieldCodec):
    """dual_chunk_attention_config: attention (arXiv 2402.17463) that is plain for a context that is not too long.

    Positions are those of plain attention as long as no row is longer than a chunk, than twice the part of a chunk that
    is not local, or than the context that the model was trained with.
    """

    def read(self, reader: ConfigReader, values: Values) -> None:
        name = "dual_chunk_attention_config"
        if not (chunks := reader.get([name])):
            return
        if not isinstance(chunks, dict) or "chunk_size" not in chunks:
            reader.refuse(name, chunks, "is not an object with chunk_size")
            return
        sizes = ("chunk_size", "local_size", "original_max_position_embeddings")
        chunk, local, original = (reader.positive(f"{name}.{size}", chunks.get(size, 1)) for size in sizes)
        plain, context = min(chunk, 2 * (chunk - local), original if original > 1 else chunk), values["context"]
        if plain < 1:
            reader.refuse(f"{name}.local_size", local, f"is not below chunk_size: {chunk}")
        elif plain < context:
            values["context"] = plain
            reader.notes.append(
                f"{name} is attention within chunks, which is not supported. For up to {plain:,} tokens it is plain "
                f"attention, so model.context is {plain}, not {context}"
            )


@dataclasses.dataclass(frozen=True)
class OptNorms:
    """OPT's norms: before attention and MLP, with a last norm that a field removes; or after the residual sums."""

    def read(self, reader: ConfigReader, values: Values) -> None:
        before = reader.flag(["do_layer_norm_before"], True)
        removed = reader.flag(["_remove_final_layer_norm"], False)
        values |= {"pre_norms": before, "sum_norms": not before, "final_norm": before and not removed}

    def write(self, model: config.ModelConfig) -> dict[str, Any]:
        removed = model.pre_norms and not model.final_norm
        return {"do_layer_norm_before": model.pre_norms, "_remove_final_layer_norm": removed}


@dataclasses.dataclass(frozen=True)
class FalconBlock:
    """Falcon's block: key heads, norms, and whether attention and MLP are parallel, in the old form and the new."""

    def read(self, reader: ConfigReader, values: Values) -> None:
        new = reader.flag(["new_decoder_architecture"], False)
        heads = reader.number(["num_kv_heads", "n_head_kv"], values["heads"])
        one = reader.flag(["multi_query"], True)
        parallel = reader.flag(["parallel_attn"], True)
        norms = reader.get(["num_ln_in_parallel_attn"], 2 if new else 1)
        if norms not in (1, 2) or (norms == 2 and not new):
            reader.refuse("num_ln_in_parallel_attn", norms, "is not 1, nor 2 with new_decoder_architecture")
        if new and not parallel:
            reader.refuse("parallel_attn", parallel, "contradicts new_decoder_architecture")
        values["kv_heads"] = heads if new else 1 if one else values["heads"]
        values["block"] = "parallel" if parallel else "sequential"
        values["shared_norm"] = norms == 1

    def write(self, model: config.ModelConfig) -> dict[str, Any]:
        parallel = model.block == "parallel"
        new = parallel and (not model.shared_norm or model.kv_heads not in (1, model.heads))
        written: dict[str, Any] = {"new_decoder_architecture": new, "parallel_attn": parallel}
        if not new:
            return written | {"multi_query": model.kv_heads == 1}
        return written | {"num_kv_heads": model.kv_heads, "num_ln_in_parallel_attn": 1 if model.shared_norm else 2}
