"""Layouts of published tensors: which of their rows and columns are which of our weights.

A tensor is read as an array with one dimension for each axis of its spec, such as "(N H) D". For each axis, a list of
numbers says which entry of the tensor each entry of our weight is; -1 is padding, which is zero. This expresses all
differences between files and our arrays: another order of dimensions, several weights in one tensor, heads of queries,
keys and values in turns, and interleaved rope.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Literal

import numpy as np

from gspmd_lm import config
from gspmd_lm.config import value_at
from gspmd_lm.model.addresses import inner_stacks
from gspmd_lm.model.families.whisper import TAPS
from gspmd_lm.sharding.axes import AXES

# The letters of axes.py, and of axes that only published tensors have:
#   p  rows of a position table, t  rows of a table of token types, r  ranges of relative positions, c  classes
#   b  numbers of a frame of sound, j  numbers of the space of texts and images
#   x  numbers of a patch, which are three dimensions of the file: channels, height and width
#   s  places in a square, which are two dimensions of the file: height and width
#   k  numbers of a pixel of a drawn mask, m  masks that are drawn for one prompt
#   R  heads of queries, keys and values in one tensor, J  gate and up in one tensor
#   X  a query and its gate, or a key and a value, of each head, in one tensor
#   G  what keys and values are made from, and the key that all heads share, in one tensor
#   1  a dimension of size 1
LETTERS = {axis: letter for axis, (letter, _) in AXES.items()}
LETTERS |= {"positions": "p", "types": "t", "ranges": "r", "classes": "c", "pixels": "x", "bands": "b", "joint": "j"}
LETTERS |= {"channels": "k", "masks": "m"}
_NEIGHBOURS = 16  # numbers of 2 or 4 bytes: a cache line, or half of one
_JOINED = {"N": "R", "K": "R", "F": "J", "H": "X", "Z": "G", "P": "G", "A": "s", "p": "s"}


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of a published checkpoint, and the weights in it."""

    # "model.layers.{}.self_attn.q_proj.weight"; {} is the number of the layer. A tensor of one expert has {expert}, and
    # one of a residual stream, the first aside, or of a mask has {stream}.
    name: str
    axes: str  # "(N H) D": axes in brackets share one dimension of the file
    weights: tuple[str, ...]  # our weights: "attention.wq"; within a layer if the name has {}
    # The order of heads in a tensor of several weights (R), such as queries, keys and values: all of the first, all of
    # the second, ...; or for each key head its queries, its key and its value.
    order: Literal["concatenated", "grouped"] = "concatenated"
    interleaved_gate: bool = False  # gate and up in one tensor (J) take turns; otherwise up follows gate
    linear: bool = False  # its heads are those of linear attention
    mlp: str = "mlp"  # the setting of the model that is the size of F
    others: Callable[[config.ModelConfig], Mapping[str, int]] = (
        lambda model: {}
    )  # sizes that differ from those of a model
    interleaved_rope: bool = False  # values that are rotated together are neighbours; ours are half a head apart
    float32: bool = False  # whether files have it in float32, whatever the dtype of the others
    exists_in: Callable[[config.ModelConfig], bool] = lambda model: True  # whether a model has this tensor

    @property
    def is_one_of_several(self) -> bool:
        """Whether a weight is an array of several such tensors, besides those of several layers."""
        return "{expert}" in self.name or "{stream}" in self.name

    @property
    def has_experts(self) -> bool:
        """Whether it holds weights of routed experts."""
        return "{expert}" in self.name or "E" in self.axes

    def stack_config(self, model: config.ModelConfig) -> config.ModelConfig:
        """The settings of the stack of blocks whose weights it holds: those of an inner one, or of the model."""
        return inner_stacks(model).get(self.weights[0].partition(".")[0], model)

    def view(self, model: config.ModelConfig) -> tuple[int, ...]:
        """The shape as which the tensor is read: one dimension per letter."""
        return tuple(self._sizes(model)[letter] for letter in self.axes if letter.isalpha())

    def shape(self, model: config.ModelConfig) -> tuple[int, ...]:
        """The shape of the tensor in the file."""
        sizes = self._sizes(model)
        groups = self.axes.replace("(", " ( ").replace(")", " ) ").split()
        shape, inside = [], False
        for word in groups:
            if word == "(":
                shape.append(1)
                inside = True
            elif word == ")":
                inside = False
            elif inside:
                shape[-1] *= sizes[word]
            elif word == "x" and (patches := self.stack_config(model).patches):
                shape += [patches.channels, patches.size, patches.size]
            elif word == "s":
                shape += [math.isqrt(sizes[word])] * 2
            else:
                shape.append(sizes[word])
        return tuple(shape)

    def rows(self, weight: str, letters: str, model: config.ModelConfig) -> "AxisOrder":
        """Where `weight`, whose dimensions have `letters`, is in the tensor."""
        theirs = [letter for letter in self.axes if letter.isalpha()]
        ours = [letter if letter in theirs else _JOINED[letter] for letter in letters]
        along = tuple(self._along(weight, letter, model) for letter in letters)
        return AxisOrder(along, tuple(ours.index(letter) for letter in theirs))

    def _along(self, weight: str, letter: str, model: config.ModelConfig) -> np.ndarray:
        """For each entry of our weight along an axis, the entry of the tensor; -1 for padding."""
        sizes, model = self._sizes(model), self.stack_config(model)
        padded = {"V": model.padded_vocab or model.vocab}
        if not self.linear:
            padded |= {"N": model.head_rows, "K": model.kv_head_rows}
        size = sizes[letter]
        entries = np.arange(size)
        if letter in "NK" and "R" in self.axes:
            number = self.weights.index(weight)
            heads = self._heads_of_weights(sizes["N"], sizes["K"])
            if self.order == "concatenated":
                entries += sum(heads[:number])
            else:
                each = [count // sizes["K"] for count in heads]  # of one key head
                entries = entries // each[number] * sum(each) + sum(each[:number]) + entries % each[number]
        elif model.attention.latent and letter in "HP" and weight.startswith("attention."):
            entries = _latent_entries(weight, model)
        elif letter == "F" and "J" in self.axes:
            which = self.weights.index(weight)
            entries = 2 * entries + which if self.interleaved_gate else entries + size * which
        elif letter == "H" and "X" in self.axes:
            entries += size * self.weights.index(weight)
        elif letter == "H" and self.interleaved_rope and weight.removesuffix("_norm.scale")[-1] in "qk":
            turned = model.attention.rope.dim or model.head_dim
            first = entries[:turned]
            first[:] = np.concatenate([first[::2], first[1::2]])
        return np.pad(entries, (0, padded.get(letter, size) - size), constant_values=-1)

    def _heads_of_weights(self, N: int, K: int) -> list[int]:
        of_keys = "qk" if self.linear else "kv"
        return [K if weight[-1] in of_keys else N for weight in self.weights]

    def _sizes(self, model: config.ModelConfig) -> Mapping[str, int]:
        j, model = model.vision.projection if model.vision else 0, self.stack_config(model)
        N, K, H = model.heads, model.kv_heads, model.head_dim
        A = model.convolution.taps if model.convolution else TAPS
        if self.weights == ("attention.wo",):
            H = model.v_head_dim
        if self.linear and (sizes := model.attention.linear):
            N, K, H, A = sizes.value_heads, sizes.key_heads, sizes.head_dim, sizes.taps
        F, R = value_at(model, self.mlp), sum(self._heads_of_weights(N, K))
        of_distances = model.attention.relative_positions or model.attention.relative_vectors
        return {
            "V": model.vocab, "D": model.embed, "N": N, "K": K, "H": H, "F": F, "W": model.embedding.width,
            "p": model.embedding.position_offset + model.context, "J": 2 * F, "E": model.num_experts, "X": 2 * H,
            "A": A,
            "R": R, "C": model.num_experts, "1": 1, "L": model.layers, "M": model.residual.streams, "O": model.embed,
            "Y": model.residual.layer_embed, "r": of_distances.ranges if of_distances else 0,
            "t": model.embedding.token_types, "c": model.num_classes, "x": model.patches.pixels if model.patches else 0,
            "b": model.frames.bands if model.frames else 0, "j": j, "k": 0, "m": model.num_classes, "s": model.context,
            **_latent_sizes(model), **self.others(model),
        }  # fmt: skip


def _latent_sizes(model: config.ModelConfig) -> Mapping[str, int]:
    """The sizes of axes that only latent attention has, or that it has of another size."""
    if not (latent := model.attention.latent):
        return {"Q": 0, "Z": 0, "P": 0, "G": 0}
    own, Z = model.head_dim - model.attention.rope.dim, latent.kv_rank
    return {
        "Q": latent.q_rank,
        "Z": Z,
        "P": model.attention.rope.dim,
        "G": Z + model.attention.rope.dim,
        "X": own + latent.v_head_dim,
    }


def _latent_entries(weight: str, model: config.ModelConfig) -> np.ndarray:
    """For the numbers of a head, or of the key that all heads share, the entries of the tensor.

    In files, what is rotated stands last, and numbers that are rotated together are neighbours.
    """
    assert model.attention.latent
    turned, own = (
        np.r_[0 : model.attention.rope.dim : 2, 1 : model.attention.rope.dim : 2],
        model.head_dim - model.attention.rope.dim,
    )
    values = np.arange(model.v_head_dim)
    return {
        "wq": np.r_[own + turned, :own], "wq_up": np.r_[own + turned, :own], "wo": values,
        "wk_rope": model.attention.latent.kv_rank + turned, "wk_up": np.arange(own), "wv_up": own + values,
    }[weight.removeprefix("attention.")]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class AxisOrder:
    """Where one weight is in one tensor."""

    along: tuple[np.ndarray, ...]  # for each axis of our weight: the tensor's entries; -1 for padding
    order: tuple[int, ...]  # for each axis of the tensor's view: the axis of our weight

    def pick(self, index: tuple[slice, ...]) -> tuple[list[slice | np.ndarray], tuple[slice, ...]]:
        """The entries of the view that a slice of our array holds, and where they are in the slice, axis by axis.

        The rest of the slice is padding.
        """
        take: list[slice | np.ndarray] = []
        into = []
        for along, at in zip(self.along, index, strict=True):
            rows = along[at]
            real = rows[: int((rows >= 0).sum())]  # padding stands last
            into.append(slice(0, len(real)))
            take.append(_as_slice(real))
        return [take[axis] for axis in self.order], tuple(into)

    def write_into(self, view: np.ndarray, piece: np.ndarray, index: tuple[slice, ...] | None = None) -> None:
        """Writes a slice of our array, or all of it, into the view of a tensor, without its padding."""
        if not self.along:  # a single number
            view[...] = piece
            return
        take, into = self.pick(index or tuple(slice(0, len(along)) for along in self.along))
        values = piece[into].transpose(self.order)
        slices = tuple(at for at in take if isinstance(at, slice))
        if len(slices) == len(take):
            copy_transposed(view[slices], values)
        else:
            view, values = _bits(view, values)
            numbers = zip(take, view.shape, strict=True)
            view[np.ix_(*(np.arange(size)[at] if isinstance(at, slice) else at for at, size in numbers))] = values


def copy_transposed(into: np.ndarray, values: np.ndarray) -> None:
    """Copies an array into another one of its shape, quickly also where their dimensions lie in another order.

    numpy would go through all of one array's rows for each row of the other one, and each step would miss the cache. So
    the array is cut where `into` has its neighbours, in pieces of a cache line.
    """
    into, values = _bits(into, values)
    near, far = (min(range(x.ndim), key=lambda axis: abs(x.strides[axis]), default=0) for x in (into, values))
    if near == far:
        into[...] = values
        return
    cuts: list[Iterable[int | slice]] = [range(size) for size in into.shape]
    cuts[near] = [slice(start, start + _NEIGHBOURS) for start in range(0, into.shape[near], _NEIGHBOURS)]
    cuts[far] = [slice(None)]
    for at in itertools.product(*cuts):
        into[at] = values[at]


def _bits(into: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Two arrays of one dtype as arrays of whole numbers. numpy copies a bfloat16, which is not its own, one by one."""
    if into.dtype != values.dtype:
        return into, values
    whole = f"u{into.dtype.itemsize}"
    return into.view(whole), values.view(whole)


def _as_slice(rows: np.ndarray) -> slice | np.ndarray:
    if len(rows) == 0:
        return slice(0, 0)
    step = int(rows[1] - rows[0]) if len(rows) > 1 else 1
    return slice(int(rows[0]), int(rows[-1]) + 1, step) if step > 0 and (np.diff(rows) == step).all() else rows


def linear(
    name: str, axes: str, *weights: str, bias: bool = True, biases: tuple[str, ...] = (), **options
) -> tuple[Tensor, ...]:
    """The tensors of a linear layer: its weight, and its bias, which has the output's axes (the first of `axes`)."""
    output = axes[: axes.index(")") + 1] if axes.startswith("(") else axes.split()[0]
    biases = biases or tuple(".b".join(weight.rsplit(".w", 1)) for weight in weights)
    return (
        Tensor(f"{name}.weight", axes, weights, **options),
        *(Tensor(f"{name}.bias", output, biases, **options) for _ in range(bias)),
    )


def norm(name: str, ours: str, bias: bool = False, axis: str = "D", **options) -> tuple[Tensor, ...]:
    scale = Tensor(f"{name}.weight", axis, (f"{ours}.scale",), **options)
    return (scale, Tensor(f"{name}.bias", axis, (f"{ours}.bias",), **options)) if bias else (scale,)


def plain_mlp(prefix: str, up: str, down: str, ours: str = "") -> tuple[Tensor, ...]:
    """The two linear layers of a feed-forward network without a gate. ours: what stands before the names of weights."""
    return (
        *linear(f"{prefix}.{up}", "F D", f"{ours}mlp.w_up"),
        *linear(f"{prefix}.{down}", "D F", f"{ours}mlp.w_down"),
    )


def separate_qkv(
    prefix: str, names: tuple[str, str, str] = ("q_proj", "k_proj", "v_proj"), ours: str = "attention", **options
) -> tuple[Tensor, ...]:
    """Queries, keys and values, each with a linear layer of its own. ours: the module that has these weights."""
    return (
        *linear(f"{prefix}.{names[0]}", "(N H) D", f"{ours}.wq", **options),
        *linear(f"{prefix}.{names[1]}", "(K H) D", f"{ours}.wk", **options),
        *linear(f"{prefix}.{names[2]}", "(K H) D", f"{ours}.wv", **options),
    )


QUERY_KEY_VALUE = "query", "key", "value"  # their names in BERT and its kin, and in models of images
