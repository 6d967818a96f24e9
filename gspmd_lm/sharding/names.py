"""The names that a model brings: its logical axes and its arrays."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gspmd_lm.errors import InputError, did_you_mean

_UNNAMED = "_"  # how the axis of a dimension begins that a model gives no name


def name_axes(axes: Sequence[Any], rank: int) -> tuple[str, ...]:
    """The logical axes of an array of `rank` dimensions, of which `axes` names the leading ones.

    A dimension without a name, which is never split, gets one of its own: _0. Several names of one dimension, as in a
    PartitionSpec, are one: data+fsdp.
    """
    whole = (*axes, *(None,) * (rank - len(axes)))
    return tuple(
        f"{_UNNAMED}{number}" if axis is None else axis if isinstance(axis, str) else "+".join(map(str, axis))
        for number, axis in enumerate(whole)
    )


def is_unnamed(axis: str) -> bool:
    """Whether the model gave a dimension no name."""
    return axis.startswith(_UNNAMED)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """The names of a model's logical axes and arrays, which a rules file for it may use."""

    axes: Mapping[str, tuple[str, str]]  # logical axis -> its letter in shapes and einsums, and its meaning
    weights: Mapping[str, str]  # the end of a parameter's path -> its meaning
    activations: Mapping[str, str]  # name in `shard` -> its meaning
    rows: str = "batch"  # the axis of the rows of a batch, along which microbatches are cut
    remat: tuple[str, ...] | None = None  # what `remat: {save: ...}` has a choice about; None: every activation
    settings: Mapping[str, str] = dataclasses.field(default_factory=dict)  # axis -> the setting of its size, for errors
    stages: str = ""  # the stack of layers that a pipeline cuts in stages: its module, and the axis of its weights
    placed_like: Mapping[str, str] = dataclasses.field(default_factory=dict)  # array -> the one whose rows place it too

    @property
    def arrays(self) -> dict[str, str]:
        """Weights and activations -> their meaning."""
        return {**self.weights, **self.activations}

    def placing_path(self, path: str) -> str:
        """The path of the array whose rows place `path` too: of an adapter's matrix, its weight. Else `path` itself."""
        module, dot, name = path.rpartition(".")
        return f"{module}{dot}{self.placed_like.get(name, name)}"

    @property
    def saveable_names(self) -> tuple[str, ...]:
        """The names that `remat: {save: ...}` may list."""
        return tuple(self.activations) if self.remat is None else self.remat


def check_name(word: str, what: str, name: str, known: Iterable[str]) -> None:
    """Raises InputError unless a model knows the name that a word such as `shard` gives."""
    if name not in known:
        raise InputError(
            f"{word}: the model has no {what} {name}{did_you_mean(name, known)}\n"
            f"  fix   use one of {', '.join(known)}, or add {name} to the model's vocabulary"
        )
