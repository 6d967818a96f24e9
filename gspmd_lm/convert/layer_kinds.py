"""Which layers of a model have a sliding window or no positions, as a config.json says it."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from gspmd_lm import config
from gspmd_lm.convert.fields import MOST_LAYERS, Values
from gspmd_lm.convert.rope import BY_LAYER
from gspmd_lm.convert.source import Source


def _window(source: Source, default: int | None) -> int | None:
    """The value of sliding_window, which is null if there is no window."""
    value = source.get(["sliding_window"], None if "sliding_window" in source.raw else default)
    return None if value is None else source.checked("sliding_window", value)


def every_second(source: Source) -> Callable[[int], bool]:
    """Whether a layer has a window, for `LayerTypes`: the first, the third, ..."""
    return lambda i: i % 2 == 0


def _pattern(kinds: Sequence[str]) -> tuple[str, ...]:
    """The shortest pattern that gives these kinds of layers; () if all layers are of the usual kind."""
    sizes = range(1, len(kinds) + 1)
    size = next(size for size in sizes if all(kind == kinds[i % size] for i, kind in enumerate(kinds)))
    return tuple(kinds[:size]) if size > 1 or kinds[0] == "nope" else ()


@dataclasses.dataclass(frozen=True)
class Window:
    """A sliding window for all layers, or for none."""

    default: int | None
    switch: str = ""  # a field; if it is not set, there is no window

    def read(self, source: Source, values: Values) -> None:
        window = _window(source, self.default)
        if self.switch and not source.flag([self.switch], False):
            window = None
        values["sliding_window"] = window or 0
        kinds = source.get(["layer_types"], [])
        wanted = "sliding_attention" if window else "full_attention"
        if not isinstance(kinds, list) or any(kind != wanted for kind in kinds):
            source.refuse("layer_types", kinds, "does not fit sliding_window, which all layers have or none")

    def write(self, model: config.Model) -> dict[str, Any]:
        switch = {self.switch: model.sliding_window > 0} if self.switch else {}
        return {"sliding_window": model.sliding_window or None} | switch


@dataclasses.dataclass(frozen=True)
class LayerTypes:
    """A sliding window for some layers: layer_types, or the older rules for which layers."""

    default: int | None  # window
    implied: Callable[[Source], Callable[[int], bool]]  # without layer_types: whether layer i has the window
    switch: str = ""  # a field; if it is not set, no layer has a window
    older: Callable[[config.Model], dict[str, Any]] = lambda model: {}  # read by older transformers
    full: str = "full"  # the kind of a layer without a window: nope if it has no positions either

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
        if not isinstance(kinds, list) or len(kinds) != layers or not set(map(str, kinds)) <= BY_LAYER.keys():
            source.refuse("layer_types", kinds, f"must be {layers} of {', '.join(BY_LAYER)}")
            kinds = implied
        short = ["sliding" if window and BY_LAYER[kind] == "sliding" else self.full for kind in kinds]
        values["sliding_window"] = window if "sliding" in short else 0
        values["layer_pattern"] = _pattern(short)

    def write(self, model: config.Model) -> dict[str, Any]:
        kinds = [("sliding" if kind == "sliding" else "full") + "_attention" for kind in model.kind_of_each_layer]
        written: dict[str, Any] = {"layer_types": kinds, "sliding_window": model.sliding_window or None}
        if self.switch:
            written[self.switch] = model.sliding_window > 0
        return written | self.older(model)


@dataclasses.dataclass(frozen=True)
class NoRopeLayers:
    """SmolLM3's layers without positions: those with 0 in no_rope_layers, or every no_rope_layer_interval-th."""

    def read(self, source: Source, values: Values) -> None:
        layers = values["layers"] if isinstance(values["layers"], int) else 1
        interval = source.whole(["no_rope_layer_interval"], 4, 1)
        rotated = source.get(["no_rope_layers"], [int((i + 1) % interval != 0) for i in range(layers)])
        if not isinstance(rotated, list) or len(rotated) != layers or not set(map(str, rotated)) <= {"0", "1"}:
            source.refuse("no_rope_layers", rotated, f"must be {layers} of 0, 1")
            rotated = [1] * layers
        source.read.update(("sliding_window", "use_sliding_window"))
        if source.raw.get("use_sliding_window") and source.raw.get("sliding_window"):
            source.refuse("use_sliding_window", True, "has a window in layers without positions: not supported")
        kinds = source.get(["layer_types"], [])
        if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
            source.refuse("layer_types", kinds, "has layers with a window, which are not supported here")
        values["layer_pattern"] = _pattern(["full" if one else "nope" for one in rotated])

    def write(self, model: config.Model) -> dict[str, Any]:
        rotated = [int(kind != "nope") for kind in model.kind_of_each_layer]
        return {"no_rope_layers": rotated, "use_sliding_window": False}


@dataclasses.dataclass(frozen=True)
class ChunkedLayers:
    """Llama 4's layers: those with positions attend within chunks, and those with 0 in no_rope_layers to all tokens."""

    def read(self, source: Source, values: Values) -> None:
        layers = values["layers"] if isinstance(values["layers"], int) else 1
        interval = source.whole(["no_rope_layer_interval"], 4, 1)
        usual = [int((i + 1) % interval != 0) for i in range(layers)]
        rotated = source.get(["no_rope_layers"], usual) or usual
        if not isinstance(rotated, list) or len(rotated) != layers or not set(map(str, rotated)) <= {"0", "1"}:
            source.refuse("no_rope_layers", rotated, f"must be {layers} of 0, 1")
            rotated = usual
        theirs = {"chunked": "chunked_attention", "full": "full_attention", "nope": "full_attention"}
        chunked = ["chunked" if one else "nope" for one in rotated]
        types = source.get(["layer_types"], [theirs[kind] for kind in chunked])
        known = next((kinds for kinds in (chunked, ["full" if one else "nope" for one in rotated])
                      if types == [theirs[kind] for kind in kinds]), None)  # fmt: skip
        if known is None:
            source.refuse("layer_types", types, "are not chunked_attention in layers with positions alone")
        kinds = known or chunked
        chunk = source.get(["attention_chunk_size"], None if "attention_chunk_size" in source.raw else 8192)
        if "chunked" in kinds:
            values["attention_chunk"] = source.checked("attention_chunk_size", chunk)
        values["layer_pattern"] = _pattern(kinds)

    def write(self, model: config.Model) -> dict[str, Any]:
        kinds = model.kind_of_each_layer
        types = ["chunked_attention" if kind == "chunked" else "full_attention" for kind in kinds]
        rotated = [int(kind != "nope") for kind in kinds]
        return {"no_rope_layers": rotated, "layer_types": types, "attention_chunk_size": model.attention_chunk or None}


@dataclasses.dataclass(frozen=True)
class LinearLayers:
    """Qwen3-Next's layers with linear attention: layer_types, or all but every full_attention_interval-th."""

    def read(self, source: Source, values: Values) -> None:
        layers = values["layers"] if isinstance(values["layers"], int) else 1
        interval = source.whole(["full_attention_interval"], 4, 1)
        usual = ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(layers)]
        types = source.get(["layer_types"], usual)
        known = {"linear_attention": "linear", "full_attention": "full"}
        if not isinstance(types, list) or len(types) != layers or not set(map(str, types)) <= known.keys():
            source.refuse("layer_types", types, f"must be {layers} of {', '.join(known)}")
            types = usual
        key_dim, value_dim = (source.number([f"linear_{name}_head_dim"], 128) for name in ("key", "value"))
        if key_dim != value_dim:
            source.refuse("linear_key_head_dim", key_dim, f"is not linear_value_head_dim: {value_dim}")
        found = {
            "key_heads": source.number(["linear_num_key_heads"], 16),
            "value_heads": source.number(["linear_num_value_heads"], 32),
            "head_dim": value_dim,
            "taps": source.number(["linear_conv_kernel_dim"], 4),
        }
        values["linear_attention"] = found if "linear_attention" in types else None
        values["layer_pattern"] = _pattern([known[kind] for kind in types])

    def write(self, model: config.Model) -> dict[str, Any]:
        kinds = ["linear_attention" if kind == "linear" else "full_attention" for kind in model.kind_of_each_layer]
        written: dict[str, Any] = {"layer_types": kinds}
        if sizes := model.linear_attention:
            written |= {
                "linear_num_key_heads": sizes.key_heads, "linear_num_value_heads": sizes.value_heads,
                "linear_key_head_dim": sizes.head_dim, "linear_value_head_dim": sizes.head_dim,
                "linear_conv_kernel_dim": sizes.taps,
            }  # fmt: skip
        return written


@dataclasses.dataclass(frozen=True)
class LocalLayers:
    """GPT-Neo's layers with a window: attention_layers, or attention_types, and window_size."""

    def read(self, source: Source, values: Values) -> None:
        layers = values["layers"] if isinstance(values["layers"], int) else 1
        window = source.whole(["window_size"], 256, 1)
        turns = source.get(["attention_types"], [[["global", "local"], 12]])
        try:
            implied = [kind for kinds, times in turns for _ in range(min(times, MOST_LAYERS)) for kind in kinds]
        except (TypeError, ValueError):
            implied = []
        kinds = source.get(["attention_layers"], implied) if "attention_types" not in source.raw else implied
        source.read.add("attention_layers")  # transformers makes it from attention_types
        if not isinstance(kinds, list) or len(kinds) != layers or not set(map(str, kinds)) <= {"global", "local"}:
            source.refuse("attention_types", turns, f"must be {layers} of global, local")
            return
        short = ["sliding" if kind == "local" else "full" for kind in kinds]
        values["sliding_window"] = window if "sliding" in short else 0
        values["layer_pattern"] = _pattern(short)

    def write(self, model: config.Model) -> dict[str, Any]:
        kinds = ["local" if kind == "sliding" else "global" for kind in model.kind_of_each_layer]
        return {"attention_types": [[kinds, 1]], "attention_layers": kinds, "window_size": model.sliding_window or 256}
