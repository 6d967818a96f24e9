"""Quantised tensors of published models as the weights that they stand for: AWQ, GPTQ and float8.

A tensor is computed from its packed parts as it is read, and only the rows that are asked for. Sources of the formats:
AutoAWQ's WQLinear_GEMM, AutoGPTQ's QuantLinear, DeepSeek-V3's fp8 weights and compressed-tensors' float-quantized ones.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from gspmd_lm.convert.safetensors import DTYPES, Stored, pick
from gspmd_lm.convert.strict_json import show_value
from gspmd_lm.errors import InputError

CONFIG = "quantization_config"
_FIX = "load the model with transformers, dequantise and save it"
_PARTS = ("qweight", "qzeros", "scales", "g_idx")  # of a packed tensor, in the place of `weight`
_GPTQ_LAYOUT = "checkpoint_format", "gptq"  # the older name of the field `format`, and what it is by default
_WORD_BITS = 32
# The order in which AWQ packs eight columns into a word.
_AWQ_COLUMNS = np.argsort([0, 2, 4, 6, 1, 3, 5, 7])
_FLOAT8 = {"F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2}
_SCALES = ("_scale_inv", "_scale")  # behind the name of a float8 tensor
# Scales of activations and of caches, which have their own dtype here.
_UNUSED = (".input_scale", ".activation_scale", ".k_scale", ".v_scale")
_PACKED: dict[str, Any] = DTYPES | _FLOAT8 | {"I32": np.uint32}

Rows = Callable[[int, int], np.ndarray]  # the rows of a tensor from the first to before the second number, float32


@dataclasses.dataclass(frozen=True)
class Dequantised(Stored):
    """A tensor that is computed from others. Its path and offset are those of the packed numbers."""

    rows: Rows

    @property
    def bytes(self) -> int:
        return 4 * math.prod(self.shape)

    def read(self, view: Sequence[int], index: Sequence[slice | np.ndarray]) -> np.ndarray:
        """As `Stored.read`, in float32, and a copy. Only rows between the first and the last that is asked for are
        computed."""
        size, first = self.shape[0] // view[0], index[0]
        asked = np.arange(view[0])[first]
        if not len(asked):
            return np.empty((0, *view[1:]), np.float32)[:, *index[1:]]
        start, stop = int(asked.min()), int(asked.max()) + 1
        rows = self.rows(start * size, stop * size).reshape(stop - start, *view[1:])
        return pick(rows, [asked - start, *index[1:]])


def split_config(raw: Mapping[str, Any], place: str) -> tuple[Mapping[str, Any], Mapping[str, Any] | None]:
    """A config.json without what it says about quantised weights, and that; None for a model that has none.

    Raises InputError if weights that were quantised so are not supported.
    """
    about = raw.get(CONFIG)
    if not about:
        return raw, None
    if not isinstance(about, dict):
        raise InputError(f"{place}: {CONFIG}: {show_value(about)} is not an object\n  fix   fetch the folder again")
    problem = _problem(about)
    if problem:
        raise InputError(f"{place}: {CONFIG}: {problem}\n  fix   {_FIX}")
    return {name: value for name, value in raw.items() if name != CONFIG}, about


def notes(stored: Mapping[str, Stored], about: Mapping[str, Any]) -> list[str]:
    """Sentences that say as what quantised tensors are read."""
    method = about["quant_method"]
    kind = f"{method.upper()}, {_bits(about)} bits" if method in ("awq", "gptq") else "float8"
    count = sum(isinstance(where, Dequantised) for where in stored.values())
    return [f"{count:,} quantised tensors ({kind}) are read as the floats that they stand for"]


def _bits(about: Mapping[str, Any]) -> Any:
    return about.get("bits", about.get("w_bit"))


def _layout(about: Mapping[str, Any], older: str, usual: str) -> tuple[str, str]:
    """The field that names the layout of packed tensors, and the layout. older: the name of `format` in older files."""
    name = older if about.get(older) is not None else "format"
    return name, str(about.get(name) or usual).lower()


def _problem(about: Mapping[str, Any]) -> str:
    """Why weights that were quantised so cannot be read; '' if they can."""
    method = about.get("quant_method")
    if method == "awq":
        name, layout = _layout(about, "version", "gemm")
        if layout != "gemm":
            return f"{name}: {show_value(layout)} of AWQ is not supported, only gemm"
        if _bits(about) != 4:
            return f"bits: {show_value(_bits(about))} of AWQ are not supported, only 4"
        return "" if about.get("zero_point", True) is True else "zero_point: AWQ without zero points is not supported"
    if method == "gptq":
        if _bits(about) not in (4, 8):
            return f"bits: {show_value(_bits(about))} of GPTQ are not supported, only 4 and 8"
        name, layout = _layout(about, *_GPTQ_LAYOUT)
        if layout not in ("gptq", "gptq_v2"):
            return f"{name}: {show_value(layout)} is not supported, only gptq and gptq_v2"
        return "dynamic: settings for each module are not supported" if about.get("dynamic") else ""
    if method == "fp8":
        return (
            "" if about.get("fmt", "e4m3") in ("e4m3", "e5m2") else f"fmt: {show_value(about['fmt'])} is not supported"
        )
    if method == "compressed-tensors":
        rotations = about.get("transform_config") or {}
        if not isinstance(rotations, dict) or any(rotations.values()):
            return "transform_config: rotations of what layers read and write are not supported"
        return _problem_of_groups(about.get("config_groups"))
    return f"quant_method: {show_value(method)} is not supported; supported are awq, gptq, fp8 and compressed-tensors"


def _problem_of_groups(groups: Any) -> str:
    for weights in _weights_of(groups) or [groups]:
        kind = (weights.get("type"), weights.get("num_bits")) if isinstance(weights, dict) else None
        if kind != ("float", 8):
            return f"config_groups: {show_value(weights)}: only weights of type float and 8 bits are supported"
    return ""


def _weights_of(groups: Any) -> list[Any]:
    """The fields of compressed-tensors about the weights of each group."""
    each = groups.values() if isinstance(groups, dict) else []
    return [group.get("weights") if isinstance(group, dict) else group for group in each]


def _block(about: Mapping[str, Any]) -> tuple[int, int]:
    """The rows and columns of a block of a float8 tensor; 0 where there are no blocks."""
    blocks = [
        about.get("weight_block_size"),
        *(one.get("block_structure") for one in _weights_of(about.get("config_groups"))),
    ]
    for one in blocks:
        if isinstance(one, list) and len(one) == 2 and all(type(size) is int and size > 0 for size in one):
            return one[0], one[1]
    return 0, 0


def dequantise_tensors(stored: Mapping[str, Stored], about: Mapping[str, Any], place: str) -> dict[str, Stored]:
    """The tensors of a model, in which the parts of a quantised one have become one, named as in a plain model.

    Raises InputError if parts are missing, or do not fit each other.
    """
    if about["quant_method"] in ("awq", "gptq"):
        return _integers(stored, about, place)
    tensors = {name: where for name, where in stored.items() if not name.endswith(_UNUSED)}
    for name, where in stored.items():
        scale = next((name + end for end in _SCALES if name + end in stored), None)
        if where.dtype in _FLOAT8 and scale:
            tensors[name] = _float8(name, where, tensors.pop(scale), _block(about), place)
    return tensors


def _integers(stored: Mapping[str, Stored], about: Mapping[str, Any], place: str) -> dict[str, Stored]:
    tensors: dict[str, Stored] = {}
    for name, where in stored.items():
        module, _, part = name.rpartition(".")
        if part not in _PARTS or f"{module}.qweight" not in stored:
            tensors[name] = where
        elif part == "qweight":
            parts = {part: stored.get(f"{module}.{part}") for part in _PARTS}
            lacking = [part for part in _PARTS[:3] if parts[part] is None]
            if lacking:
                raise InputError(f"{place}: {module} has no {' and no '.join(lacking)}\n  fix   fetch the folder again")
            kinds = {
                part: where.dtype in (DTYPES if part == "scales" else ("I32",))
                for part, where in parts.items()
                if where
            }
            _check(module, place, all(kinds.values()), parts)
            make = _awq if about["quant_method"] == "awq" else _gptq
            tensors[f"{module}.weight"] = make(module, parts, about, place)
    return tensors


def _awq(module: str, parts: Mapping[str, Any], about: Mapping[str, Any], place: str) -> Dequantised:
    """AWQ's gemm format: qweight [inputs, outputs / 8], qzeros [groups, outputs / 8] and scales [groups, outputs]."""
    packed, zeros, scales = (parts[name] for name in _PARTS[:3])
    groups, outputs = _two(scales.shape)
    inputs, _ = _two(packed.shape)
    fits = packed.shape == (inputs, outputs // 8) and zeros.shape == (groups, outputs // 8) and outputs % 8 == 0
    _check(module, place, fits and groups and inputs % groups == 0, parts)

    def rows(start: int, stop: int) -> np.ndarray:
        words = slice(start // 8, -(-stop // 8))
        each = [_bits_apart(_whole(one)[:, words], 4)[..., _AWQ_COLUMNS] for one in (packed, zeros)]
        numbers, zero = (one.reshape(len(one), -1) for one in each)
        scale = np.asarray(_whole(scales)[:, 8 * words.start : 8 * words.stop], np.float32)
        group = inputs // groups
        weight = (numbers - np.repeat(zero, group, 0)) * np.repeat(scale, group, 0)
        return weight[:, start - 8 * words.start : stop - 8 * words.start].T

    return Dequantised(packed.path, packed.offset, scales.dtype, (outputs, inputs), rows)


def _gptq(module: str, parts: Mapping[str, Any], about: Mapping[str, Any], place: str) -> Dequantised:
    """GPTQ: qweight [inputs / n, outputs], qzeros [groups, outputs / n], scales [groups, outputs] and g_idx [inputs].

    n: numbers in a word. The first version of the format, which is the usual one, holds zero points less one.
    """
    bits, (packed, zeros, scales, order) = _bits(about), (parts[name] for name in _PARTS)
    groups, outputs = _two(scales.shape)
    count = _WORD_BITS // bits
    inputs, added = _two(packed.shape)[0] * count, int(_layout(about, *_GPTQ_LAYOUT)[1] != "gptq_v2")
    fits = packed.shape[1:] == (outputs,) and zeros.shape == (groups, outputs // count) and outputs % count == 0
    fits = fits and inputs > 0 and (order.shape == (inputs,) if order else groups and inputs % groups == 0)
    _check(module, place, fits, parts)
    group = np.asarray(_whole(order), np.int64) if order else np.arange(inputs) // (inputs // groups)
    _check(module, place, group.max() < groups, parts)

    def rows(start: int, stop: int) -> np.ndarray:
        words = slice(start // count, -(-stop // count))
        numbers = _bits_apart(_whole(packed)[:, start:stop], bits)  # [inputs / n, outputs, n]
        numbers = numbers.swapaxes(1, 2).reshape(inputs, -1)
        zero = _bits_apart(_whole(zeros)[:, words], bits).reshape(groups, -1)
        zero = (zero[:, start - count * words.start : stop - count * words.start] + added) % 2**bits
        scale = np.asarray(_whole(scales)[:, start:stop], np.float32)
        return ((numbers - zero[group]) * scale[group]).T

    return Dequantised(packed.path, packed.offset, scales.dtype, (outputs, inputs), rows)


def _float8(name: str, where: Stored, scale: Stored, block: tuple[int, int], place: str) -> Dequantised:
    """A float8 tensor [..., outputs, inputs] and its scales: one for each block, one in all, or one for each row."""
    *lead, outputs, inputs = where.shape if len(where.shape) > 1 else (0, 0)
    shape = scale.shape if len(scale.shape) > 1 else (math.prod(scale.shape), 1)
    ways = [(height, width) for height, width in (block, (outputs, inputs), (1, inputs))
            if height and width and shape == (*lead, -(-outputs // height), -(-inputs // width))]  # fmt: skip
    _check(name, place, ways and scale.dtype in DTYPES, {"weight": where, "scales": scale})
    height, width = ways[0]

    def rows(start: int, stop: int) -> np.ndarray:
        each = np.asarray(_whole(scale), np.float32).reshape(shape)
        if lead:
            each = np.repeat(each[start:stop], height, -2)[..., :outputs, :]
        else:
            each = each[np.arange(start, stop) // height]
        return np.asarray(_whole(where)[start:stop], np.float32) * np.repeat(each, width, -1)[..., :inputs]

    return Dequantised(where.path, where.offset, "BF16", where.shape, rows)


def _whole(stored: Stored) -> np.ndarray:
    return np.memmap(stored.path, _PACKED[stored.dtype], "r", stored.offset, stored.shape or (1,))


def _bits_apart(words: np.ndarray, bits: int) -> np.ndarray:
    """The numbers in words, int32, along a new last dimension, the lowest bits first."""
    shifts = np.arange(0, _WORD_BITS, bits, dtype=np.uint32)
    return (np.asarray(words)[..., None] >> shifts & np.uint32(2**bits - 1)).astype(np.int32)


def _two(shape: tuple[int, ...]) -> tuple[int, int]:
    return (shape[0], shape[1]) if len(shape) == 2 else (0, 0)


def _check(module: str, place: str, fits: Any, parts: Mapping[str, Stored | None]) -> None:
    if not fits:
        shapes = ", ".join(f"{name} {where.dtype} {[*where.shape]}" for name, where in parts.items() if where)
        raise InputError(
            f"{place}: {module}: {CONFIG} does not fit {shapes}\n  fix   fetch the folder again, or {_FIX}"
        )
