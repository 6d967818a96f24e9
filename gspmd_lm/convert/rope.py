"""Rotary positions in a config.json: rope_theta, rope_scaling and partial_rotary_factor, or rope_parameters."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from gspmd_lm import config
from gspmd_lm.convert.config_reader import LARGEST, ConfigReader
from gspmd_lm.convert.fields import BY_LAYER, Values

ORIGINAL = "original_max_position_embeddings"
# Kind of scaling -> the fields that it needs, and those that it may have.
_NEEDED = {
    "default": set(), "linear": {"factor"}, "dynamic": {"factor"}, "yarn": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor"}, "longrope": {"short_factor", "long_factor"},
}  # fmt: skip
_OPTIONAL = {
    "llama3": {ORIGINAL},
    "longrope": {ORIGINAL, "factor", "attention_factor"},
    "yarn": {
        ORIGINAL, "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", "finetuned",
    },
}  # fmt: skip
BETA = "llama_4_scaling_beta"
_MSCALES = ("short_mscale", "long_mscale")
_ALWAYS = {"type", "rope_type", "rope_theta", "partial_rotary_factor", ORIGINAL}
_UNSCALED = _ALWAYS | {BETA}  # what positions without scaling may have
_NO_NUMBER = ("type", "rope_type", "truncate", "finetuned", "short_factor", "long_factor")


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary positions: rope_theta, rope_scaling and partial_rotary_factor, or transformers 5's rope_parameters."""

    theta: float = 10000.0
    theta_name: str = "rope_theta"
    part: float = 0.0  # the default of partial_rotary_factor; 0: the family has no such field
    part_name: str = "partial_rotary_factor"
    sliding_theta: float = 0.0  # the default of sliding layers' rope_theta; 0: they have that of all layers
    sliding_name: str = ""  # its older field; "": only rope_parameters says it
    original: int = 0  # the default of a field original_max_position_embeddings of its own; 0: the context
    default: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # rope_parameters, if none are given
    older_kinds: tuple[tuple[str, str], ...] = ()  # names of kinds of scaling in older files -> today's names
    temperature: bool = False  # queries grow with their position, as llama_4_scaling_beta says
    # The field that says how many numbers of a head are rotated. Its families' mscale_all_dim strengthens scores.
    turned_name: str = ""
    mscales: bool = False  # longrope says its attention factors as short_mscale and long_mscale

    def read(self, reader: ConfigReader, values: Values) -> None:
        values["positions"] = "rope"
        theta = reader.number(f"{self.theta_name} rope_theta", self.theta)
        part = reader.number(f"{self.part_name} partial_rotary_factor", self.part or 1.0)
        if self.part not in (0, 1) and reader.raw.get("partial_rotary_factor", self.part) is None:
            reader.refuse("partial_rotary_factor", None, "must be a number above zero")  # transformers would take 1
        local = reader.number(self.sliding_name, self.sliding_theta) if self.sliding_name else self.sliding_theta
        reader.get(ORIGINAL)
        older = reader.get("rope_scaling")
        name = "rope_scaling" if older else "rope_parameters"
        newer = reader.get("rope_parameters")
        if older and newer and older != newer:
            reader.refuse("rope_scaling", older, "contradicts rope_parameters")
        for field, value in (("rope_scaling", older), ("rope_parameters", newer)):
            if not isinstance(value, dict | None):
                reader.refuse(field, value, "is not an object")
                return
        rope = older or newer or self.default
        if rope.keys() & BY_LAYER.keys():
            if not self.sliding_theta or older:
                reader.refuse(name, rope, "sets positions for kinds of layers, which this family does not have")
            if unknown := sorted(rope.keys() - BY_LAYER.keys()):
                reader.refuse(name, unknown, "are kinds of layers that are not known")
            sliding, at = rope.get("sliding_attention") or {}, f"{name}.sliding_attention"
            rope, name = rope.get("full_attention") or {}, f"{name}.full_attention"
            for place, kind in ((at, sliding), (name, rope)):
                if not isinstance(kind, dict):
                    reader.refuse(place, kind, "is not an object")
                    return
            local = reader.positive(f"{at}.rope_theta", sliding.get("rope_theta", local or 1))
            if self._kind(reader, at, sliding) != "default" or sliding.get("partial_rotary_factor", 1) != 1:
                reader.refuse(at, sliding, "scales the positions of sliding layers, which is not supported")
        kind = self._kind(reader, name, rope)
        rope = {
            field: value if field in _NO_NUMBER else reader.positive(f"{name}.{field}", value)
            for field, value in rope.items()
            if value is not None and (kind != "default" or field in (*_ALWAYS, BETA))
        }
        if self.temperature:
            every = reader.get(ORIGINAL, rope.get(ORIGINAL))
            if BETA not in rope or every is None:
                reader.refuse(name, rope, f"lacks {BETA} or {ORIGINAL}")
            values["attention.temperature"] = {"scale": float(rope.get(BETA, 1)), "every": every}
        theta, part = rope.get("rope_theta", theta), rope.get("partial_rotary_factor", part)
        values["attention.rope.theta"] = theta
        values["attention.rope.window_theta"] = 0.0 if local == theta and kind == "default" else local or 0.0
        if part != 1 and not self.part:
            reader.refuse("partial_rotary_factor", part, "is not a setting of this family")
        if self.mscales and kind != "default":
            short, long = rope.get("short_mscale"), rope.get("long_mscale")
            if kind != "longrope" or short is None or short != long:
                reader.refuse(name, [kind, short, long], "is not longrope with short_mscale equal to long_mscale")
            rope["attention_factor"] = short or 1.0
        turned = reader.number(self.turned_name, 64) if self.turned_name else int(values["head_dim"] * part)
        values["attention.rope.dim"] = 0 if turned == values["head_dim"] else turned
        if self.turned_name:
            under = rope.get("mscale_all_dim") if kind != "default" else None
            values["attention.scale"] = _query_scale(values["head_dim"], rope.get("factor", 1), under or 0)
        scaling = _scaling(reader, kind, name, rope, values, self.original)
        if scaling:
            values["attention.rope.scaling"] = {"kind": kind, **scaling}

    def _kind(self, reader: ConfigReader, name: str, rope: Mapping[str, Any]) -> str:
        named = rope.get("rope_type") or rope.get("type")
        kind = str(named or "default")
        if not named and (scaled := sorted(key for key in rope.keys() - _UNSCALED if rope[key] is not None)):
            reader.refuse(name, dict(rope), f"has {', '.join(scaled)}, and no rope_type says what they scale")
        kind = dict(self.older_kinds).get(kind, kind)
        if kind not in _NEEDED:
            reader.refuse(f"{name}.rope_type", kind, f"is not supported; use one of {', '.join(_NEEDED)}")
            return "default"
        known = _ALWAYS | _NEEDED[kind] | _OPTIONAL.get(kind, set()) | {*_MSCALES[: 2 * self.mscales]}
        known |= {BETA, "max_position_embeddings"} if self.temperature else set()
        unknown = sorted(key for key in rope.keys() - known if rope[key] is not None)
        if unknown and kind != "default":
            reader.refuse(name, unknown, f"are not fields of {kind}")
        if lacking := sorted(_NEEDED[kind] - rope.keys()):
            reader.refuse(name, dict(rope), f"lacks {', '.join(lacking)}")
        return kind

    def write(self, model: config.ModelConfig) -> dict[str, Any]:
        """The fields in the older form, which transformers 5 reads too."""
        written: dict[str, Any] = {self.theta_name: model.attention.rope.theta, "rope_scaling": None}
        if scaling := model.attention.rope.scaling:
            written["rope_scaling"] = _write_scaling(scaling)
            if scaling.kind == "longrope":
                written[ORIGINAL] = scaling.original_context
            if self.mscales:
                written["rope_scaling"] |= dict.fromkeys(_MSCALES, scaling.attention_factor)
            if self.turned_name and model.attention.scale:
                written["rope_scaling"]["mscale_all_dim"] = _mscale_all_dim(model, scaling.factor)
        if self.temperature and (tuned := model.attention.temperature):
            scaled = written["rope_scaling"] or {"rope_type": "default"}
            written["rope_scaling"] = scaled | {BETA: tuned.scale, ORIGINAL: tuned.every}
        if self.turned_name:
            written[self.turned_name] = model.attention.rope.dim
        if self.part:
            written[self.part_name] = model.attention.rope.dim / model.head_dim if model.attention.rope.dim else 1.0
        local = model.attention.rope.window_theta or model.attention.rope.theta
        if self.sliding_name:
            written[self.sliding_name] = local
        elif self.sliding_theta:
            full = (written["rope_scaling"] or {"rope_type": "default"}) | {"rope_theta": model.attention.rope.theta}
            sliding = {"rope_type": "default", "rope_theta": local}
            written["rope_parameters"] = {"full_attention": full, "sliding_attention": sliding}
            written["rope_scaling"] = None
        return written


def _scaling(
    reader: ConfigReader, kind: str, name: str, rope: Mapping[str, Any], values: Values, default: int
) -> dict[str, Any]:
    """The fields of config.RopeScaling for a kind of scaling, with transformers' defaults; {} for the default kind."""
    if kind == "default":
        return {}
    # The field beside rope_scaling has precedence over the one in it, with its default too.
    original = reader.get(ORIGINAL, default or rope.get(ORIGINAL, values["context"]))
    original = reader.positive(ORIGINAL, original)
    if original < 2:
        reader.refuse(ORIGINAL, original, "must be at least 2")
        return {}
    factor = rope.get("factor", values["context"] / original)
    if kind == "linear":
        return {"factor": float(factor)}
    if kind == "dynamic":
        return {"factor": float(factor), "original_context": values["context"]}
    attention = rope.get("attention_factor")
    if kind == "longrope":
        if attention is None:
            attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
        lists = {ours: _numbers(reader, f"{name}.{field}", rope.get(field, [])) for ours, field in _LISTS.items()}
        # Only the lists and the attention factor are used, which is made from `factor`.
        return {"factor": float(factor), "original_context": original, "attention_factor": float(attention), **lists}
    low, high = ("beta_slow", "beta_fast") if kind == "yarn" else ("low_freq_factor", "high_freq_factor")
    lowest, highest = float(rope.get(low, 1)), float(rope.get(high, 32 if kind == "yarn" else LARGEST))
    if highest < lowest:
        reader.refuse(f"{name}.{high}", highest, f"is below {low}: {lowest}")
    scaling = {
        "factor": float(factor), "low_freq_factor": lowest, "high_freq_factor": highest, "original_context": original,
    }  # fmt: skip
    if kind == "llama3":
        return scaling
    if attention is None:
        over, under = rope.get("mscale"), rope.get("mscale_all_dim")
        attention = _mscale(factor, over) / _mscale(factor, under) if over and under else _mscale(factor, 1)
    return scaling | {"attention_factor": float(attention), "truncate": rope.get("truncate", True)}


_LISTS = {"short_factors": "short_factor", "long_factors": "long_factor"}


def _mscale(factor: float, weight: float) -> float:
    """How much yarn strengthens attention for a stretch by `factor` (arXiv 2309.00071, section 3.4)."""
    return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0


def _query_scale(head_dim: int, factor: float, weight: float) -> float:
    """What DeepSeek multiplies scores with for a stretch by `factor`; 0 for the usual scale."""
    strength = _mscale(factor, weight)
    return 0.0 if strength == 1 else float(head_dim**-0.5 * strength * strength)


def _mscale_all_dim(model: config.ModelConfig, factor: float) -> float:
    """The weight that gives a model its query_scale, which is a short number in published models."""
    strength = (model.attention.scale * model.head_dim**0.5) ** 0.5
    weight = (strength - 1) / (0.1 * math.log(factor)) if factor > 1 else 0.0
    short = round(weight, 6)
    return short if _query_scale(model.head_dim, factor, short) == model.attention.scale else weight


def _numbers(reader: ConfigReader, name: str, value: Any) -> list[float]:
    if not isinstance(value, list):
        reader.refuse(name, value, "is not a list")
        return []
    return [float(reader.positive(f"{name}[{i}]", number)) for i, number in enumerate(value)]


def _write_scaling(scaling: config.RopeScaling) -> dict[str, Any]:
    """The object rope_scaling of a config.json."""
    written: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind in ("llama3", "yarn", "longrope"):
        written[ORIGINAL] = scaling.original_context
    if scaling.kind in ("yarn", "longrope"):
        written["attention_factor"] = scaling.attention_factor
    if scaling.kind == "llama3":
        written |= {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
    if scaling.kind == "yarn":
        written |= {"beta_slow": scaling.low_freq_factor, "beta_fast": scaling.high_freq_factor}
        written |= {} if scaling.truncate else {"truncate": False}
    if scaling.kind == "longrope":
        written |= {theirs: list(getattr(scaling, ours)) for ours, theirs in _LISTS.items()}
    return written
