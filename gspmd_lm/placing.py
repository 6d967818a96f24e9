"""The words with which a model says where its arrays live; on one device each of them is the identity.

A model names arrays and axes and never sees a mesh. Whoever builds a step supplies a `Placement` through `placed_by`.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from gspmd_lm.axes import ARRAYS, AXES


@dataclasses.dataclass(frozen=True)
class Weight:
    """A parameter as a layer holds it: its array at rest, its path ('layers.attention.wq') and logical axes.

    The gradient of one that is frozen is never computed. One that is scanned belongs to a layer of the scan.
    """

    array: jax.Array
    path: str
    axes: tuple[str, ...]
    compute_dtype: jnp.dtype
    frozen: bool = False
    scanned: bool = False
    used: bool = False  # whether the array is in use already

    def holding(self, array: Any) -> "Weight":
        return dataclasses.replace(self, array=array)


class Split(NamedTuple):
    """Into how many pieces an axis is split, and over what. The model may only compare splits and count pieces."""

    over: tuple[str, ...] = ()
    pieces: int = 1


class Spec(NamedTuple):
    """An array's name and its logical axes, in one of the tables of a rules file."""

    array: str
    axes: tuple[str, ...]
    table: str = "rules"


@dataclasses.dataclass(frozen=True)
class Remat:
    """A block is computed again in the backward pass, except for the values that `policy` keeps."""

    policy: Callable[..., Any]


class Placement(Protocol):
    """How arrays are split: the answers that rules and a mesh give to the model's questions."""

    @property
    def remat(self) -> Remat | None:
        """What the backward pass computes again."""
        ...

    @property
    def attention(self) -> str:
        """The attention kernel: xla, cudnn or splash."""
        ...

    def constrain(self, x: jax.Array, spec: Spec) -> jax.Array:
        """`x` where the table (rules: in use; weights: at rest; optimizer: gradients) says the array lives."""
        ...

    def split(self, array: str, axis: str) -> Split:
        """How one axis of an array in use is split, for copies and sums."""
        ...

    def pieces(self, array: str, axis: str) -> int:
        """Into how many pieces one axis of an activation is split, for loops that cut it further."""
        ...

    def copies(self, x: jax.Array, split: Split, spec: Spec) -> jax.Array:
        """One copy of `x`, which `spec` names, for each piece of `split`, along a new first dimension."""
        ...

    def total(self, addends: jax.Array, split: Split, spec: Spec) -> jax.Array:
        """The sum over the first dimension, one addend for each piece of `split`, where `spec` lives: a
        reduce-scatter where that is split over the same mesh axes, else an all-reduce."""
        ...

    def per_device(self, function: Callable[..., jax.Array], inputs: Sequence[str], output: str) -> Callable[..., Any]:
        """`function` run by each device on its own piece of the arrays, which are named as in `shard`."""
        ...


def scope(role: str, *names: str) -> Any:
    """A context in which the compiled program's operations carry `names` in theirs; `foresight` reads them there.

    The role is a table, for an array where that table puts it; `sum`, for the axes that a reduction adds over; or
    `of`, for the weights that the operations belong to.
    """
    return jax.named_scope(f"{role}.{'+'.join(dict.fromkeys(names))}")


_current: ContextVar[Placement | None] = ContextVar("placement", default=None)


@contextlib.contextmanager
def placed_by(placement: Placement | None) -> Iterator[None]:
    """While a step is traced, arrays are placed by `placement`."""
    token = _current.set(placement)
    try:
        yield
    finally:
        _current.reset(token)


def placement() -> Placement | None:
    """What places arrays now; None on a single device."""
    return _current.get()


def parse(text: str, rank: int) -> Spec:
    """Spec("residual", ("batch", "seq", "embed")) for 'residual: batch seq embed'."""
    array, _, names = text.partition(": ")
    axes = tuple(names.split())
    assert array.split(".")[-1] in ARRAYS and all(axis in AXES for axis in axes) and len(axes) == rank, (text, rank)
    return Spec(array, axes)


# What a model asks about


def split(array: str, axis: str) -> Split:
    """How an axis of an array is split; in one piece on a single device."""
    place = placement()
    return place.split(array, axis) if place else Split()


def pieces(array: str, axis: str) -> int:
    """Into how many pieces an axis of an activation is split: a loop cuts it so that each step has a part of each."""
    place = placement()
    return place.pieces(array, axis) if place else 1


def remat() -> Remat | None:
    """What the backward pass computes again; None where it keeps what it needs."""
    place = placement()
    return place.remat if place else None


def attention_kernel() -> str:
    """The attention kernel that the rules choose for the platform at hand."""
    place = placement()
    return place.attention if place else "xla"


def per_device(function: Callable[..., jax.Array], inputs: Sequence[str], output: str) -> Callable[..., Any]:
    """`function`, which must not look across devices, run on each device's own piece of the named arrays."""
    place = placement()
    return place.per_device(function, inputs, output) if place else function


# The words


def shard(x: jax.Array, spec: str) -> jax.Array:
    """`x`, an activation, where the rules say it lives, and under its name for a remat policy.

    `spec` names the array and each of its dimensions: "residual: batch seq embed".
    """
    return checkpoint_name(like(x, spec), spec.partition(":")[0])


def like(x: jax.Array, spec: str) -> jax.Array:
    """`x` placed like the activation that `spec` names: says in which dtype it is gathered from there."""
    place, found = placement(), parse(spec, x.ndim)
    return place.constrain(x, found) if place else x


def use(weight: Weight, dtype: Any = None) -> jax.Array:
    """The weight where the rules say it is in use, cast to its compute dtype before it is gathered.

    With another `dtype` its values still have that precision. Its gradients are added up in `dtype`, and live where the
    rules say gradients do.
    """
    what = Spec(weight.path, weight.axes), weight.compute_dtype, jnp.dtype(dtype or weight.compute_dtype)
    return _placed(what, weight.array)


def used(weight: Weight) -> Weight:
    """The weight with its array in use, for products without a gradient."""
    return dataclasses.replace(weight, array=use(weight), used=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _placed(what: tuple[Spec, Any, Any], w: jax.Array) -> jax.Array:
    place, (spec, compute_dtype, dtype) = placement(), what
    with scope("rules", spec.array):
        w = w.astype(compute_dtype)
    if place:
        # Said of the cast weight at rest too, or some compilers gather first and cast then: twice the bytes.
        w = place.constrain(place.constrain(w, spec._replace(table="weights")), spec)
    return w.astype(dtype)


def _placed_backward(what: tuple[Spec, Any, Any], like: jax.Array, dw: jax.Array) -> tuple[jax.Array]:
    place = placement()
    dw = place.constrain(dw, what[0]._replace(table="optimizer")) if place else dw
    return (dw.astype(like.dtype),)


_placed.defvjp(lambda what, w: (_placed(what, w), jnp.zeros((), w.dtype)), _placed_backward)
