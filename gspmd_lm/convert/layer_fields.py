"""Codecs of config.json fields that say what each layer is: its window, its positions, its experts."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from gspmd_lm import config
from gspmd_lm.convert.config_reader import ConfigReader
from gspmd_lm.convert.fields import MOST_LAYERS, Values
from gspmd_lm.convert.rope import BY_LAYER


def _window(reader: ConfigReader, default: int | None) -> int | None:
    """The value of sliding_window, which is null if there is no window."""
    value = reader.get(["sliding_window"], None if "sliding_window" in reader.raw else default)
    return None if value is None else reader.positive("sliding_window", value)


def every_second(reader: ConfigReader) -> Callable[[int], bool]:
    """Whether a layer has a window, for `LayerTypes`: the first, the third, ..."""
    return lambda i: i % 2 == 0


def _pattern(kinds: Sequence[str]) -> tuple[str, ...]:
    """The shortest pattern that gives these kinds of layers; () if all layers are of the usual kind."""
    sizes = range(1, len(kinds) + 1)
    size = next(size for size in sizes if all(kind == kinds[i % size] for i, kind in enumerate(kinds)))
    return tuple(kinds[:size]) if size > 1 or kinds[0] == "nope" else ()


def _layers(values: Values) -> int:
    """The number of layers; 1 where it is not a whole number, which is a problem already."""
    return values["layers"] if isinstance(values["layers"], int) else 1


def _of_each(reader: ConfigReader, name: str, found: Any, usual: list[Any], known: Iterable[str]) -> list[Any]:
    """The value of a field for each layer, one of `known`. Any other value is a problem, and `usual` is returned."""
    if isinstance(found, list) and len(found) == len(usual) and set(map(str, found)) <= {*known}:
        return found
    reader.refuse(name, found, f"must be {len(usual)} of {', '.join(known)}")
    return usual


def _usually_rotated(reader: ConfigReader, values: Values) -> list[int]:
    """The default of no_rope_layers: 0 for every no_rope_layer_interval-th layer, and 1 for the others."""
    interval = reader.whole(["no_rope_layer_interval"], 4, 1)
    return [int((i + 1) % interval != 0) for i in range(_layers(values))]


@dataclasses.dataclass(frozen=True)
class Window:
    """A sliding window for all layers, or for none."""

    default: int | None
    switch: str = ""  # a field; if it is not set, there is no window

    def read(self, reader: ConfigReader, values: Values) -> None:
        window = _window(reader, self.default)
        if self.switch and not reader.flag([self.switch], False):
            window = None
        values["sliding_window"] = window or 0
        kinds = reader.get(["layer_types"], [])
        wanted = "sliding_attention" if window else "full_attention"
        if not isinstance(kinds, list) or any(kind != wanted for kind in kinds):
            reader.refuse("layer_types", kinds, "does not fit sliding_window, which all layers have or none")

    def write(self, model: config.ModelConfig) -> dict[str, Any]:
        switch = {self.switch: model.sliding_window > 0} if self.switch else {}
        return {"sliding_window": model.sliding_window or None} | switch


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
        implied = ["sliding_attention" if slides(i) else "full_attention" for i in range(_layers(values))]
        if self.switch and not reader.flag([self.switch], False):
            reader.names_read.add("sliding_window")
            window = None
            implied = ["full_attention"] * len(implied)
        else:
            window = _window(reader, self.default)
        kinds = _of_each(reader, "layer_types", reader.get(["layer_types"], implied), implied, BY_LAYER)
        short = ["sliding" if window and BY_LAYER[kind] == "sliding" else self.full for kind in kinds]
        values["sliding_window"] = window if "sliding" in short else 0
        values["layer_pattern"] = _pattern(short)

    def write(self, model: config.ModelConfig) -> dict[str, Any]:
        kinds = [("sliding" if kind == "sliding" else "full") + "_attention" for kind in model.kind_of_each_layer]
        written: dict[str, Any] = {"layer_types": kinds, "sliding_window": model.sliding_window or None}
        if self.switch:
            written[self.switch] = model.sliding_window > 0
        return written | self.older(model)


@dataclasses.dataclass(frozen=True)
class NoRopeLayers:
    """SmolLM3's layers without positions: those with 0 in no_rope_layers, or every no_rope_layer_interval-th."""

    def read(self, reader: ConfigReader, values: Values) -> None:
        usual = _usually_rotated(reader, values)
        rotated = _of_each(reader, "no_rope_layers", reader.get(["no_rope_layers"], usual), usual, "01")
        reader.names_read.update(("sliding_window", "use_sliding_window"))
        if reader.raw.get("use_sliding_window") and reader.raw.get("sliding_window"):
            reader.refuse("use_sliding_window", True, "has a window in layers without positions: not supported")
        kinds = reader.get(["layer_types"], [])
        if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
            reader.refuse("layer_types", kinds, "has layers with a window, which are not supported here")
        values["layer_pattern"] = _pattern(["full" if one else "nope" for one in rotated])

    def write(self, model: config.ModelConfig) -> dict[str, Any]:
        rotated = [int(kind != "nope") for kind in model.kind_of_each_layer]
        return {"no_rope_layers": rotated, "use_sliding_window": False}


@dataclasses.dataclass(frozen=True)
class ChunkedLayers:
    """Llama 4's layers: those with positions attend within chunks, and those with 0 in no_rope_layers to all tokens."""

    def read(self, reader: ConfigReader, values: Values) -> None:
        usual = _usually_rotated(reader, values)
        rotated = _of_each(reader, "no_rope_layers", reader.get(["no_rope_layers"], usual) or usual, usual, "01")
        theirs = {"chunked": "chunked_attention", "full": "full_attention", "nope": "full_attention"}
        chunked = ["chunked" if one else "nope" for one in rotated]
        types = reader.get(["layer_types"], [theirs[kind] for kind in chunked])
        known = next((kinds for kinds in (chunked, ["full" if one else "nope" for one in rotated])
                      if types == [theirs[kind] for kind in kinds]), None)  # fmt: skip
        if known is None:
            reader.refuse("layer_types", types, "are not chunked_attention in layers with positions alone")
        kinds = known or chunked
        chunk = reader.get(["attention_chunk_size"], None if "attention_chunk_size" in reader.raw else 8192)
        if "chunked" in kinds:
            values["attention_chunk"] = reader.positive("attention_chunk_size", chunk)
        values["layer_pattern"] = _pattern(kinds)

    def write(self, model: config.ModelConfig) -> dict[str, Any]:
        kinds = model.kind_of_each_layer
        types = ["chunked_attention" if kind == "chunked" else "full_attention" for kind in kinds]
        rotated = [int(kind != "nope") for kind in kinds]
        return {"no_rope_layers": rotated, "layer_types": types, "attention_chunk_size": model.attention_chunk or None}


@dataclasses.dataclass(frozen=True)
class LinearLayers:
    """Qwen3-Next's layers with linear attention: layer_types, or all but every full_attention_interval-th."""

    def read(self, reader: ConfigReader, values: Values) -> None:
        interval = reader.whole(["full_attention_interval"], 4, 1)
        usual = ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(_layers(values))]
        known = {"linear_attention": "linear", "full_attention": "full"}
        types = _of_each(reader, "layer_types", reader.get(["layer_types"], usual), usual, known)
        key_dim, value_dim = (reader.number([f"linear_{name}_head_dim"], 128) for name in ("key", "value"))
        if key_dim != value_dim:
            reader.refuse("linear_key_head_dim", key_dim, f"is not linear_value_head_dim: {value_dim}")
        sizes = {
            "key_heads": reader.number(["linear_num_key_heads"], 16),
            "value_heads": reader.number(["linear_num_value_heads"], 32),
            "head_dim": value_dim,
            "taps": reader.number(["linear_conv_kernel_dim"], 4),
        }
        values["linear_attention"] = sizes if "linear_attention" in types else None
        values["layer_pattern"] = _pattern([known[kind] for kind in types])

    def write(self, model: config.ModelConfig) -> dict[str, Any]:
        kinds = ["linear_attention" if kind == "linear" else "full_attention" for kind in model.kind_of_each_layer]
        written: dict[str, Any] = {"layer_types": kinds}
        if linear := model.linear_attention:
            written |= {
                "linear_num_key_heads": linear.key_heads, "linear_num_value_heads": linear.value_heads,
                "linear_key_head_dim": linear.head_dim, "linear_value_head_dim": linear.head_dim,
                "linear_conv_kernel_dim": linear.taps,
            }  # fmt: skip
        return written


@dataclasses.dataclass(frozen=True)
class LocalLayers:
    """GPT-Neo's layers with a window: attention_layers, or attention_types, and window_size."""

    def read(self, reader: ConfigReader, values: Values) -> None:
        layers = _layers(values)
        window = reader.whole(["window_size"], 256, 1)
        types = reader.get(["attention_types"], [[["global", "local"], 12]])
        try:
            implied = [kind for kinds, times in types for _ in range(min(times, MOST_LAYERS)) for kind in kinds]
        except (TypeError, ValueError):
            implied = []
        kinds = reader.get(["attention_layers"], implied) if "attention_types" not in reader.raw else implied
        reader.names_read.add("attention_layers")  # transformers makes it from attention_types
        if not isinstance(kinds, list) or len(kinds) != layers or not set(map(str, kinds)) <= {"global", "local"}:
            reader.refuse("attention_types", types, f"must be {layers} of global, local")
            return
        short = ["sliding" if kind == "local" else "full" for kind in kinds]
        values["sliding_window"] = window if "sliding" in short else 0
        values["layer_pattern"] = _pattern(short)

    def write(self, model: config.ModelConfig) -> dict[str, Any]:
        kinds = ["local" if kind == "sliding" else "global" for kind in model.kind_of_each_layer]
        return {"attention_types": [[kinds, 1]], "attention_layers": kinds, "window_size": model.sliding_window or 256}


@dataclasses.dataclass(frozen=True)
class DenseLayers:
    """mlp_only_layers: the layers without experts, which must be the first ones."""

    def read(self, reader: ConfigReader, values: Values) -> None:
        dense = reader.get(["mlp_only_layers"], [])
        count = len(dense) if isinstance(dense, list) else 0
        if dense != list(range(count)):
            reader.refuse("mlp_only_layers", dense, "are not the first layers: other layers without experts are not "
                          "supported")  # fmt: skip
        values["dense_layers"] = count
        values["sparse_step"] = reader.whole(["decoder_sparse_step"], 1, 1)

    def write(self, model: config.ModelConfig) -> dict[str, Any]:
        return {"mlp_only_layers": list(range(model.dense_layers)), "decoder_sparse_step": model.sparse_step}


@dataclasses.dataclass(frozen=True)
class MlpTypes:
    """mlp_layer_types: which layers are dense, the first ones, and which have experts."""

    def read(self, reader: ConfigReader, values: Values) -> None:
        layers = _layers(values)
        types = reader.get(["mlp_layer_types"], _mlp_types(1, layers))
        count = types.count("dense") if isinstance(types, list) else 0
        if types != _mlp_types(count, layers):
            reader.refuse("mlp_layer_types", types, "are not dense ones and then sparse ones, one for each layer")
        if (first := reader.get(["first_k_dense_replace"], count)) != count:
            reader.refuse("first_k_dense_replace", first, f"contradicts mlp_layer_types, which has {count} dense ones")
        values["dense_layers"] = count

    def write(self, model: config.ModelConfig) -> dict[str, Any]:
        return {"mlp_layer_types": _mlp_types(model.dense_layers, model.layers)}


def _mlp_types(dense: int, layers: int) -> list[str]:
    return ["dense"] * dense + ["sparse"] * (layers - dense)


@dataclasses.dataclass(frozen=True)
class SparseLayers:
    """Llama 4's layers with experts: moe_layers, or every interleave_moe_layer_step-th."""

    def read(self, reader: ConfigReader, values: Values) -> None:
        layers = _layers(values)
        step = reader.whole(["interleave_moe_layer_step"], 1, 1)
        sparse = reader.get(["moe_layers"], list(range(step - 1, layers, step)))
        if isinstance(sparse, list) and sparse and type(sparse[0]) is int:
            step = max(sparse[0] + 1, 1)
        if not sparse or sparse != list(range(step - 1, layers, step)):
            reader.refuse("moe_layers", sparse, "are not every n-th layer: other layers with experts are not supported")
        values["sparse_step"] = step

    def write(self, model: config.ModelConfig) -> dict[str, Any]:
        step = model.sparse_step
        return {"interleave_moe_layer_step": step, "moe_layers": list(range(step - 1, model.layers, step))}


@dataclasses.dataclass(frozen=True)
class SharedExperts:
    """n_shared_experts: how many experts, each as wide as a routed one, compute every token."""

    default: int = 1

    def read(self, reader: ConfigReader, values: Values) -> None:
        values["shared_mlp"] = reader.whole(["n_shared_experts"], self.default, 0) * values["expert_mlp"]

    def write(self, model: config.ModelConfig) -> dict[str, Any]:
        return {"n_shared_experts": model.shared_mlp // model.expert_width}


@dataclasses.dataclass(frozen=True)
class LatentSizes:
    """The sizes of DeepSeek's latent attention, with defaults. What is rotated of a head is `Rope`'s."""

    q_rank: int = 1536
    own: int = 128
    v_head_dim: int = 128

    def read(self, reader: ConfigReader, values: Values) -> None:
        turned, own = reader.number(["qk_rope_head_dim"], 64), reader.number(["qk_nope_head_dim"], self.own)
        q_rank = reader.get(["q_lora_rank"], None if "q_lora_rank" in reader.raw else self.q_rank)
        values["head_dim"] = turned + own
        values["latent_attention"] = {
            "kv_rank": reader.number(["kv_lora_rank"], 512),
            "q_rank": 0 if q_rank is None else reader.positive("q_lora_rank", q_rank),
            "v_head_dim": reader.number(["v_head_dim"], self.v_head_dim),
        }
        for name, value in (("head_dim", turned), ("qk_head_dim", turned + own)):  # as transformers writes them
            if reader.get([name], value) != value:
                reader.refuse(name, reader.raw[name], f"is not {value}, as the sizes of its parts have it")

    def write(self, model: config.ModelConfig) -> dict[str, Any]:
        if not (latent := model.latent_attention):
            return {}
        return {
            "kv_lora_rank": latent.kv_rank, "q_lora_rank": latent.q_rank or None, "v_head_dim": latent.v_head_dim,
            "qk_nope_head_dim": model.head_dim - model.rope_dim, "head_dim": model.rope_dim,
            "qk_head_dim": model.head_dim,
        }  # fmt: skip


@dataclasses.dataclass(frozen=True)
class GroupLimited:
    """DeepSeek-V2's topk_method: whether experts are chosen in the best groups, n_group and topk_group, or in all."""

    def read(self, reader: ConfigReader, values: Values) -> None:
        method = reader.get(["topk_method"], "greedy")
        groups, used = reader.get(["n_group"], 1), reader.get(["topk_group"], 1)
        if method not in ("greedy", "group_limited_greedy"):
            reader.refuse("topk_method", method, "is not greedy or group_limited_greedy")
        limited = method == "group_limited_greedy"
        values["expert_groups"] = reader.positive("n_group", groups) if limited else 1
        values["groups_per_token"] = reader.positive("topk_group", used) if limited else 1

    def write(self, model: config.ModelConfig) -> dict[str, Any]:
        method = "group_limited_greedy" if model.expert_groups > 1 else "greedy"
        return {"topk_method": method, "n_group": model.expert_groups, "topk_group": model.groups_per_token}


@dataclasses.dataclass(frozen=True)
class LaterTokens:
    """num_nextn_predict_layers: layers behind the last one that predict later tokens. They are left out."""

    def read(self, reader: ConfigReader, values: Values) -> None:
        names = ["num_nextn_predict_layers", "num_mtp_layers"]
        if count := reader.whole(names, 1, 0) * any(map(reader.raw.get, names)):
            reader.notes.append(
                f"{names[0]}: {count}: what predicts later tokens stands behind the last layer and is left out"
            )

    def write(self, model: config.ModelConfig) -> dict[str, Any]:
        return {"num_nextn_predict_layers": 0}


@dataclasses.dataclass(frozen=True)
class EachLayer:
    """A field with a number for all layers, or a list with one for each, which must be equal."""

    name: str
    setting: str
    default: int

    def read(self, reader: ConfigReader, values: Values) -> None:
        value = reader.get([self.name], self.default)
        each = value if isinstance(value, list) and value else [value]
        if isinstance(value, list) and (len(value) != values["layers"] or any(one != value[0] for one in value)):
            reader.refuse(self.name, value, f"is not one number, or {values['layers']} that are equal")
        values[self.setting] = reader.positive(self.name, each[0])

    def write(self, model: config.ModelConfig) -> dict[str, Any]:
        return {self.name: [getattr(model, self.setting)] * model.layers}


@dataclasses.dataclass(frozen=True)
class SparseActivation:
    """activation_sparsity_pattern: a number for each layer, one and the same for the first ones, then 0."""

    def read(self, reader: ConfigReader, values: Values) -> None:
        layers, name = _layers(values), "activation_sparsity_pattern"
        usual = [0.95 if i < 10 < layers else 0.0 for i in range(layers)]
        shares = reader.get([name], usual)
        count = sum(map(bool, shares)) if isinstance(shares, list) else 0
        share = shares[0] if count else 0.0
        if not isinstance(share, float) or not 0 <= share < 1 or shares != [share] * count + [0] * (layers - count):
            reader.refuse(name, shares, f"is not {layers} shares, of which the first are equal and the others 0")
            count = 0
        values["activation_sparsity"] = float(share) if count else 0.0
        values["sparse_layers"] = count if count < layers else 0

    def write(self, model: config.ModelConfig) -> dict[str, Any]:
        share = model.activation_sparsity
        count = (model.sparse_layers or model.layers) if share else 0
        return {"activation_sparsity_pattern": [share] * count + [0.0] * (model.layers - count)}
