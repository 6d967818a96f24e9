"""The table of logical axes and arrays, and the few words with which the model says how its arrays are split.

The model names arrays and axes; it never sees a mesh. Whoever builds a step supplies a `Placement` through
`placed_by`; without one every function here is the identity, which is the single-device meaning of the model.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

# Logical axis -> its letter in shapes and einsums, and its meaning.
AXES = {
    "batch": ("B", "sequences"),
    "seq": ("T", "query positions"),
    "kv_seq": ("S", "key positions"),
    "embed": ("D", "model width"),
    "layers": ("L", "scanned layers"),
    "positions": ("-", "rows of a position table"),
    "mlp": ("F", "feed-forward width"),
    "heads": ("N", "query heads"),
    "kv_heads": ("K", "key and value heads"),
    "head_dim": ("H", "size of one head"),
    "vocab": ("V", "padded vocabulary"),
    "rank": ("R", "rank of an adapter"),
    "expert": ("E", "experts"),
}

# Every array that a rules file may name: weights by the end of their path, activations by their name in `shard`.
WEIGHTS = {
    "embedding": "token table",
    "position_embedding": "table of learned positions",
    "unembedding": "output matrix of an untied model",
    "unembedding_bias": "its bias",
    "wq": "query projection",
    "wk": "key projection",
    "wv": "value projection",
    "wo": "output projection of attention",
    "bq": "query bias",
    "bk": "key bias",
    "bv": "value bias",
    "bo": "bias of the output projection",
    "w_gate": "gate projection of a gated MLP",
    "w_up": "first projection of the MLP",
    "w_down": "second projection of the MLP",
    "b_gate": "bias of w_gate",
    "b_up": "bias of w_up",
    "b_down": "bias of w_down",
    "scale": "scale of a norm (final_norm.scale, attention_norm.scale, ...)",
    "bias": "bias of a norm",
}
# What may have a low-rank adapter (LoRA, arXiv 2106.09685) beside it: x @ wq + scale * (x @ wq_a) @ wq_b.
ADAPTED = ("wq", "wk", "wv", "wo", "w_gate", "w_up", "w_down")
ADAPTERS = {
    f"{name}_{part}": f"{which} matrix of the adapter of {name}"
    for name in ADAPTED
    for part, which in (("a", "first"), ("b", "second"))
}
WEIGHTS |= ADAPTERS
ACTIVATIONS = {
    "tokens": "the batch: input tokens, and what has their shape",
    "residual": "the residual stream between blocks",
    "block_input": "what the projections of a block read: the normed residual, gathered",
    "q": "queries",
    "k": "keys",
    "v": "values",
    "attention_out": "output of attention, before wo",
    "hidden": "output of the MLP's activation, before w_down",
    "low_rank": "output of an adapter's first matrix",
    "logits": "one chunk of the logits",
    "cache": "keys and values of the tokens so far, kept while text is generated",
}
ARRAYS = WEIGHTS | ACTIVATIONS


@dataclasses.dataclass(frozen=True)
class Weight:
    """A parameter as a layer holds it: its array at rest, its path ('layers.attention.wq') and logical axes.

    One that is frozen is not trained: derivatives that the model writes itself leave it out.
    """

    array: jax.Array
    path: str
    axes: tuple[str, ...]
    compute_dtype: jnp.dtype
    frozen: bool = False

    @property
    def spec(self) -> str:
        return f"{self.path}: {' '.join(self.axes)}"

    def holding(self, array: jax.Array) -> "Weight":
        return dataclasses.replace(self, array=array)


@dataclasses.dataclass(frozen=True)
class Split:
    """Into how many pieces an axis is split, and over what. The model may only compare splits and count pieces.

    `axes` names the axes that are split so, "q.heads": only the compiled program's names are made of it.
    """

    over: tuple[str, ...] = ()
    pieces: int = 1
    axes: tuple[str, ...] = dataclasses.field(default=(), compare=False)

    def __or__(self, other: "Split") -> "Split":
        """An equal split of other axes, for what is summed together."""
        return dataclasses.replace(self, axes=tuple(dict.fromkeys(self.axes + other.axes)))


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

    def constrain(self, x: jax.Array, array: str, axes: tuple[str, ...], table: str = "rules") -> jax.Array:
        """`x` where `table` (rules: in use; weights: at rest; optimizer: gradients) says `array` lives."""
        ...

    def split(self, array: str, axis: str) -> Split:
        """How one axis of an activation is split, for sums over its pieces."""
        ...

    def pieces(self, array: str, axis: str) -> int:
        """Into how many pieces one axis of an activation is split, for loops that cut it further."""
        ...

    def reduce(self, partials: jax.Array, split: Split, array: str, axes: tuple[str, ...], table: str) -> jax.Array:
        """The sum over the leading dimension, one entry for each piece of `split`, where `table` puts `array`: a
        reduce-scatter where the result is split over the same mesh axes, else an all-reduce."""
        ...

    def per_device(self, function: Callable[..., jax.Array], inputs: Sequence[str], output: str) -> Callable[..., Any]:
        """`function` run by each device on its own piece of the arrays, which are named as in `shard`."""
        ...


def scope(role: str, *names: str) -> Any:
    """A context in which the compiled program's operations carry `names` in theirs; `foresight` reads them there.

    The role is a table, for an array where that table puts it; `sum`, for the axes that a reduction adds over; or
    `of`, for the weights that the operations belong to.
    """
    return jax.named_scope(f"{role}.{'+'.join(names)}")


_placement: ContextVar[Placement | None] = ContextVar("placement", default=None)


@contextlib.contextmanager
def placed_by(placement: Placement | None) -> Iterator[None]:
    """While a step is traced, arrays are placed by `placement`."""
    token = _placement.set(placement)
    try:
        yield
    finally:
        _placement.reset(token)


def parse(spec: str, rank: int) -> tuple[str, tuple[str, ...]]:
    """('residual', ('batch', 'seq', 'embed')) for 'residual: batch seq embed'."""
    array, _, names = spec.partition(": ")
    axes = tuple(names.split())
    assert array.split(".")[-1] in ARRAYS and all(axis in AXES for axis in axes) and len(axes) == rank, (spec, rank)
    return array, axes


def shard(x: jax.Array, spec: str) -> jax.Array:
    """`x`, an activation, where the rules say it lives, and under its name for a remat policy.

    `spec` names the array and each of its dimensions: "residual: batch seq embed".
    """
    array, axes = parse(spec, x.ndim)
    placement = _placement.get()
    return checkpoint_name(placement.constrain(x, array, axes) if placement else x, array)


def like(x: jax.Array, spec: str) -> jax.Array:
    """`x` placed like the activation that `spec` names: says in which dtype it is gathered from there."""
    array, axes = parse(spec, x.ndim)
    placement = _placement.get()
    return placement.constrain(x, array, axes) if placement else x


def split(array: str, axis: str) -> Split:
    """How an axis of an activation is split; in one piece on a single device."""
    placement = _placement.get()
    return placement.split(array, axis) if placement else Split()


def pieces(array: str, axis: str) -> int:
    """Into how many pieces an axis of an activation is split: a loop cuts it so that each step has a part of each."""
    placement = _placement.get()
    return placement.pieces(array, axis) if placement else 1


def remat() -> Remat | None:
    """What the backward pass computes again; None where it keeps what it needs."""
    placement = _placement.get()
    return placement.remat if placement else None


def attention_kernel() -> str:
    """The attention kernel that the rules choose for the platform at hand."""
    placement = _placement.get()
    return placement.attention if placement else "xla"


def per_device(function: Callable[..., jax.Array], inputs: Sequence[str], output: str) -> Callable[..., Any]:
    """`function`, which must not look across devices, run on each device's own piece of the named arrays."""
    placement = _placement.get()
    return placement.per_device(function, inputs, output) if placement else function


def use(weight: Weight) -> jax.Array:
    """The weight in its compute dtype, cast before it is gathered, where the rules say it is in use.

    Its cotangent goes to the placement of gradients.
    """
    return _use(weight.path, weight.axes, weight.compute_dtype, weight.array)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _use(path: str, axes: tuple[str, ...], dtype: jnp.dtype, w: jax.Array) -> jax.Array:
    placement = _placement.get()
    with scope("rules", path):
        w = w.astype(dtype)
    if placement is None:
        return w
    # Said of the cast weight too, or some compilers gather first and cast then: twice the bytes.
    w = placement.constrain(w, path, axes, "weights")
    return placement.constrain(w, path, axes)


def _use_fwd(path, axes, dtype, w):
    return _use(path, axes, dtype, w), jnp.zeros((), w.dtype)


def _use_bwd(path, axes, dtype, like, dw):
    placement = _placement.get()
    dw = placement.constrain(dw, path, axes, "optimizer") if placement else dw
    return (dw.astype(like.dtype),)


_use.defvjp(_use_fwd, _use_bwd)


def partial_einsum(equation: str, a: jax.Array, b: jax.Array, letter: str, split: Split) -> jax.Array:
    """An einsum whose contraction over `letter` is left in one sum per piece of `split`, along a new first dimension.

    Each sum is computed where its piece of the contracted axis lives, so that several results can be added, or one
    be accumulated over a loop, before `reduce` pays for all of it.
    """
    left, _, out = equation.partition("->")

    def pieces(x: jax.Array, letters: str) -> tuple[jax.Array, str]:
        at = letters.index(letter)
        shape = (*x.shape[:at], split.pieces, x.shape[at] // split.pieces, *x.shape[at + 1 :])
        return x.reshape(shape), letters.replace(letter, f"z{letter}")

    a_letters, b_letters = left.split(",")
    with scope("sum", *split.axes):
        (a, a_letters), (b, b_letters) = pieces(a, a_letters), pieces(b, b_letters)
        return jnp.einsum(f"{a_letters},{b_letters}->z{out}", a, b)


def reduce(partials: jax.Array, split: Split, spec: str, table: str = "rules") -> jax.Array:
    """The sum over the first dimension of `partials`, placed as `table` says for the array that `spec` names."""
    array, axes = parse(spec, partials.ndim - 1)
    placement = _placement.get()
    with scope("sum", *split.axes):
        return placement.reduce(partials, split, array, axes, table) if placement else partials.sum(0)
