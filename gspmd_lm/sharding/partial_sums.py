"""Products with weights. On one device they are plain einsums; on many, sums over devices are made late and together.

A sum over devices that is still to be made is an array of addends, one for each device, along a new first dimension.
Each device adds up its addends of several sums before one reduction pays for all of them. In the forward pass those
are the products that a parallel block writes to the residual stream. In the backward pass they are the gradients of
one input that several weights read. XLA does not do so everywhere by itself.

In the equations here z stands for the pieces of the axis along which a weight is split, r for those of the batch, and t
for those of the sequence.
"""

import dataclasses
import functools
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange

from gspmd_lm.sharding.annotate import (
    Placement,
    Spec,
    Split,
    Weight,
    like,
    parse,
    placement,
    remat,
    scope,
    shard,
    split,
    use,
)  # fmt: skip

TOKENS = "block_input"  # the activation whose tokens, along batch and seq, weights are multiplied with


def read(x: Any, home: str, spec: str) -> Any:
    """`x` for `einsum`, gathered as `spec` says.

    The gradients of all products that read it are reduced once, to where `home` says. If `x` is a sum over devices that
    is still to be made, it is read as it is, and the sum is made after the next product.
    """
    if isinstance(x, Partial):
        return x
    return Read(x, home, spec) if placement() else shard(x, spec)


def einsum(equation: str, x: Any, w: Weight | jax.Array) -> Any:
    """`jnp.einsum` of an activation and a weight, or of two activations, which gives the gradient of a weight.

    A sum over an axis along which the weight is split is left to `write`, and a sum over the tokens of two activations
    to `gradient`. If the weight is split along several axes that are summed over, the compiler sums over all but the
    first at once.
    """
    if placement() is None:
        return jnp.einsum(equation, x, use(w) if isinstance(w, Weight) else w)
    (a, b), out = _letters(equation)
    if not isinstance(w, Weight):
        tokens = _tokens(x, a)
        with scope("sum", *tokens.sum.axes):
            return _partial(_einsum(f"{a},{b}->rt{out}", x, w, **tokens.cuts), tokens.sum)
    settings: Any = jax.config
    how = functools.partial(_How, w.holding(None), b, precision=settings.jax_default_matmul_precision)
    if isinstance(x, Partial):
        assert not x.rest
        parts = []
        for part in x.parts:
            again = how(f"z{a}", f"z{out}", f"z{a}", "", Sum(part.sum.over, (), (w.path,)))
            parts.append(Addends(_product(again, part.array, None, w.array), part.sum | again.sum))
        return Partial(tuple(parts))
    if not isinstance(x, Read):
        letter, sum_ = _summed(w, b, a)
        return _partial(_product(how(a, f"z{out}", a, letter, sum_), x, None, w.array), sum_)
    letter, sum_ = _summed(w, b, out)
    if not letter:
        return _product(how(a, out, a, letter, sum_), x.x, None, w.array)
    return _product(how(a, out, f"z{a}", letter, sum_), x.fixed, x.slot(sum_), w.array)


def write(y: Any, spec: str, home: str) -> jax.Array:
    """A result of `einsum`, or a sum of several, placed as `home` says. One reduction pays for all of it.

    Its gradient is gathered as `spec` says.
    """
    if isinstance(y, Partial):
        return y.total(parse(home, y.rank), parse(spec, y.rank))
    return like(like(y, spec), home)


def gradient(dw: Any, weight: Weight) -> jax.Array:
    """The gradient of `weight`, a result of `einsum`, placed where the rules keep gradients."""
    place, home = placement(), Spec(weight.path, weight.axes, "optimizer")
    if isinstance(dw, Partial):
        dw = dw.total(home, home)
    elif place:
        dw = place.constrain(dw, home)
    return dw.astype(weight.array.dtype)


def look_up(table: Weight, ids_BT: jax.Array, spec: str, home: str) -> jax.Array:
    """The rows of `table` for `ids_BT`, [B, T, D], placed as `home` says. Gradients of a repeated id add up in float32.

    A table that is whole along its rows is read where it rests: if it is split along `embed`, two small all-to-alls of
    the result cost less than gathering the table. A table that is split along its rows is gathered along `embed`. Each
    device looks up the rows that it has, and one reduction adds them up.
    """
    over, tokens = split(table.path, table.axes[0]), _tokens(ids_BT, "BT")
    with scope("of", table.path):
        if over.pieces == 1:
            found_BTD = table.array.astype(jnp.float32)[ids_BT].astype(table.compute_dtype)
            at_rest = Spec(table.path, table.axes, "weights")
            place = placement()
            return place.columns_apart(found_BTD, at_rest, parse(home, found_BTD.ndim)) if place else found_BTD
        in_use = Spec(table.path, table.axes)
        table_rVD: Any = _copied(tokens.sum, in_use._replace(table="optimizer"), in_use, use(table, jnp.float32))
        table_rzVD = table_rVD.reshape(tokens.sum.over.pieces, over.pieces, -1, table_rVD.shape[-1])
        ids_rBT = tokens.apart(ids_BT)
        first_z = table_rzVD.shape[2] * jnp.arange(over.pieces)

        def found(table_VD: jax.Array, first: jax.Array, ids_BT: jax.Array) -> jax.Array:
            """Zeros for the ids of other pieces, which are out of bounds."""
            at_BT = jnp.where(ids_BT >= first, ids_BT - first, len(table_VD))
            return table_VD.at[at_BT].get(mode="fill", fill_value=0).astype(table.compute_dtype)

        found_zrBTD = jax.vmap(jax.vmap(found, (0, None, 0)), (1, 0, None))(table_rzVD, first_z, ids_rBT)
        found_zBTD = jax.vmap(tokens.together)(found_zrBTD)
        return write(_partial(found_zBTD, Sum(over, (f"{table.path}.{table.axes[0]}",), (table.path,))), spec, home)


# Sums that are still to be made


class Sum(NamedTuple):
    """The mesh axes that a sum is over, and its names for `scope`."""

    over: Split
    axes: tuple[str, ...] = ()  # the logical axes that are summed over: "layers.attention.wo.heads"
    of: tuple[str, ...] = ()  # the weights whose products are added

    def __or__(self, other: "Sum") -> "Sum":
        """One sum of the addends of both."""
        return Sum(self.over, self.axes + other.axes, self.of + other.of)

    def made(self, addends: jax.Array, home: Spec) -> jax.Array:
        with scope("of", *self.of), scope("sum", *self.axes):
            return _place().total(addends, self.over, home)

    def copies(self, x: jax.Array, spec: Spec) -> jax.Array:
        """The derivative of `made`: `x`, gathered as `spec` says, once for each addend."""
        place = _place()
        with scope("of", *self.of):
            return place.copies(place.constrain(x, spec), self.over, spec)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Addends:
    """[pieces, ...]: one addend of a sum for each piece."""

    array: jax.Array
    sum: Sum = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Partial:
    """A sum over devices that is still to be made: addends for each set of mesh axes, and arrays to add afterwards."""

    parts: tuple[Addends, ...]
    rest: tuple[jax.Array, ...] = ()

    @property
    def rank(self) -> int:
        return self.parts[0].array.ndim - 1

    def __add__(self, other: Any) -> "Partial":
        if not isinstance(other, Partial):
            return Partial(self.parts, (*self.rest, other))
        found = {part.sum.over: part for part in self.parts}
        for part in other.parts:
            before = found.get(part.sum.over)
            found[part.sum.over] = Addends(before.array + part.array, before.sum | part.sum) if before else part
        return Partial(tuple(found.values()), self.rest + other.rest)

    __radd__ = __add__

    def __rmul__(self, factor: float) -> "Partial":
        return jax.tree.map(lambda x: factor * x, self)

    def total(self, home: Spec, spec: Spec) -> jax.Array:
        """The sum, placed as `home` says. Its gradient is gathered as `spec` says."""
        made: list[Any] = [_total(part.sum, home, spec, part.array) for part in self.parts]
        return sum((*made[1:], *self.rest), made[0])


def _partial(addends: jax.Array, sum_: Sum) -> Any:
    """A sum of the addends that is still to be made. If nothing is split, the array is returned as it is."""
    return Partial((Addends(addends, sum_),)) if sum_.over.pieces > 1 else addends


class Read:
    """The gathered activation that `einsum` reads.

    Its gradient has one sum over devices for each way in which the weights that read it are split. Autodiff adds up the
    addends of such a sum as the gradient of a slot. A slot is zeros of their shape, whose values are not used.
    """

    def __init__(self, x: jax.Array, home: str, spec: str):
        self.x = shard(like(x, home), spec)
        self.fixed = jax.lax.stop_gradient(self.x)  # one for all products: a scan would keep one for each
        self._before, self._home = x, parse(home, x.ndim)
        self._slots: dict[Split, tuple[jax.Array, list[Sum]]] = {}

    def slot(self, sum_: Sum) -> jax.Array:
        """The slot of the products that read the activation with weights that are split alike."""
        if sum_.over not in self._slots:
            sums: list[Sum] = []  # complete by the time the backward pass is traced, which names the sum after all
            self._slots[sum_.over] = _slot(sum_.over, self._home, sums, self._before), sums
        slot, sums = self._slots[sum_.over]
        sums.append(sum_)
        return slot


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _total(sum_: Sum, home: Spec, spec: Spec, addends: jax.Array) -> jax.Array:
    return sum_.made(addends, home)


_total.defvjp(lambda *given: (_total(*given), None), lambda sum_, home, spec, _, dy: (sum_.copies(dy, spec),))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _copied(sum_: Sum, home: Spec, spec: Spec, x: jax.Array) -> jax.Array:
    return sum_.copies(x, spec)


_copied.defvjp(lambda *given: (_copied(*given), None), lambda sum_, home, spec, _, dx: (sum_.made(dx, home),))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _slot(over: Split, home: Spec, sums: list[Sum], x: jax.Array) -> jax.Array:
    return jnp.zeros((over.pieces, *x.shape), x.dtype)


_slot.defvjp(
    lambda *given: (_slot(*given), None),
    lambda over, home, sums, _, dx: (functools.reduce(operator.or_, sums).made(dx, home),),
)


# One product


class _How(NamedTuple):
    """The letters of a product with a weight. A z before them stands for addends."""

    weight: Weight  # without its array
    w: str
    x: str
    y: str
    dx: str
    letter: str  # of the axis along which the weight is split in use; "" if none that matters is split
    sum: Sum  # over that axis; where `x` is addends, their sum
    precision: Any  # of the product and, as in jax's own products, of those of its derivative


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(how: _How, x: jax.Array, slot: jax.Array | None, w: jax.Array) -> jax.Array:
    """The product of `x` and a weight at rest. With a slot, the gradient of `x` is that of the slot.

    Its derivatives are written here. For autodiff to give them as addends, the forward pass would have to cut the same
    axis, which adds copies in attention to TPU programs: 4% of a step under fsdp2_tp4 on v5p.
    """
    return _forward(how, x, slot, w)[0]


def _forward(how: _How, x: jax.Array, slot: jax.Array | None, w: jax.Array) -> tuple[jax.Array, Any]:
    weight = how.weight.holding(w)
    used = w if weight.used else use(weight)
    names = scope("of", *how.sum.of), scope("sum", *how.sum.axes if "z" in how.y else ())
    with names[0], names[1], jax.default_matmul_precision(how.precision):
        y = _einsum(f"{how.x},{how.w}->{how.y}", x, used, z=(how.letter, how.sum.over))
    # Where a block is recomputed, the backward pass uses the weight that the recomputation gathered. Elsewhere the
    # backward pass gathers it again, so that no gathered weight outlives its product.
    return y, (x, used if remat() else w, jnp.zeros((), w.dtype))


def _backward(how: _How, saved: Any, dy: jax.Array) -> tuple[Any, ...]:
    x, w, at_rest = saved
    weight = how.weight.holding(at_rest)
    tokens = _tokens(x, how.x, without=how.sum.over.over)  # a mesh axis splits only one dimension of an array
    with scope("of", weight.path), jax.default_matmul_precision(how.precision):
        w = w if remat() else use(weight.holding(w))
        with scope("sum", *how.sum.axes):
            dx = _einsum(f"{how.y},{how.w}->{how.dx}", dy, w, z=(how.letter, how.sum.over)).astype(x.dtype)
        dw = None
        if not weight.frozen:
            with scope("optimizer", weight.path):
                cuts = {"z": (how.letter, how.sum.over), **tokens.cuts}
                addends = _einsum(f"{how.x},{how.y}->rt{how.w}", x, dy, **cuts)
            dw = gradient(_partial(addends, tokens.sum), weight)
        found = (dx, None, dw) if how.dx == how.x else (None, dx, dw)
        # A scan has its gradients in place before its next turn. Elsewhere a compiler is free to reduce a weight's
        # gradient only when the optimizer asks for it, and to hold the addends while the other layers are computed.
        return found if weight.scanned else jax.lax.optimization_barrier(found)


_product.defvjp(_forward, _backward)


def _einsum(equation: str, x: jax.Array, y: jax.Array, **cuts: tuple[str, Split]) -> jax.Array:
    """`jnp.einsum` whose axes may be cut: z=("N", split) cuts the axis N in two, z for the piece and N within it.

    If the equation's result has z, the pieces stay apart: as addends, or as those of N. If it has N alone, they become
    one axis again. Nothing is cut where the equation has no z. Where the split has one piece, z is left out.
    """
    (a, b), out = _letters(equation)
    cuts = {piece: cut for piece, cut in cuts.items() if piece in equation}
    for piece, (letter, over) in cuts.items():
        if over.pieces == 1:
            a, b, out = (letters.replace(piece, "") for letters in (a, b, out))
        elif letter:
            (x, a), (y, b) = _cut(x, a, letter, over, piece), _cut(y, b, letter, over, piece)
            out = f"{piece}{out}" if letter in out else out
    if _place().platform == "cpu" and "B" not in out and x.size > y.size:
        # Of two activations, CPUs transpose the first before they multiply: the narrower one. Without a barrier, the
        # compiler would not turn the result but the product.
        turned = "".join(sorted(out, key=lambda letter: (letter not in a) + 2 * (letter not in b)))
        product = jax.lax.optimization_barrier(jnp.einsum(f"{b},{a}->{turned}", y, x))
        found = jnp.einsum(f"{turned}->{out}", product)
    else:
        # With pieces first, the result needs no transposition. H is h, since jnp.einsum sums over axes in alphabetical
        # order, and CPUs transpose arrays in which they stand in another, as heads do before H.
        found = jnp.einsum(f"{a},{b}->{out}".replace("H", "h"), x, y)
    for piece, (letter, over) in cuts.items():
        if over.pieces > 1 and letter and letter in out:
            at, out = out.index(piece), out.replace(piece, "")
            to = out.index(letter)
            found = jnp.moveaxis(found, at, to)
            found = found.reshape(*found.shape[:to], -1, *found.shape[to + 2 :])
    if out.startswith("rt"):  # one addend for each piece of the tokens
        found = found.reshape(-1, *found.shape[2:])
    return found


def _cut(x: jax.Array, letters: str, letter: str, over: Split, piece: str) -> tuple[jax.Array, str]:
    """`x` and its letters, the axis `letter` cut in two if it has it."""
    if letter not in letters:
        return x, letters
    at = letters.index(letter)
    shape = (*x.shape[:at], over.pieces, x.shape[at] // over.pieces, *x.shape[at + 1 :])
    return x.reshape(shape), letters.replace(letter, f"{piece}{letter}")


def _summed(w: Weight, letters: str, among: str) -> tuple[str, Sum]:
    """The first letter of `among` along which the weight is split in use, and the sum over its pieces."""
    of = () if w.used else (w.path,)
    for letter, axis in zip(letters, w.axes, strict=True):
        over = split(w.path, axis)
        if letter in among and over.pieces > 1:
            return letter, Sum(over, (f"{w.path}.{axis}",), of)
    return "", Sum(Split(), (), of)


class _Tokens(NamedTuple):
    """How the tokens are split that weights are multiplied with."""

    batch: Split
    seq: Split

    @property
    def sum(self) -> Sum:
        """The sum over all tokens: over the pieces of the batch, and in each over those of the sequence."""
        over = Split(self.batch.over + self.seq.over, self.batch.pieces * self.seq.pieces)
        return Sum(over, (f"{TOKENS}.batch", *([f"{TOKENS}.seq"] if self.seq.pieces > 1 else [])))

    @property
    def cuts(self) -> dict[str, tuple[str, Split]]:
        """For `_einsum`, whose result begins with rt."""
        return {"r": ("B", self.batch), "t": ("T", self.seq)}

    def apart(self, x_BT: jax.Array) -> jax.Array:
        """[pieces, B, T]: each piece of the tokens by itself."""
        return rearrange(x_BT, "(r B) (t T) -> (r t) B T", r=self.batch.pieces, t=self.seq.pieces)

    def together(self, x_rBTD: jax.Array) -> jax.Array:
        """[B, T, D] of the pieces."""
        return rearrange(x_rBTD, "(r t) B T D -> (r B) (t T) D", r=self.batch.pieces, t=self.seq.pieces)


def _tokens(x: jax.Array, letters: str, without: tuple[str, ...] = ()) -> _Tokens:
    """How the tokens of `x` are split; an axis that a mesh axis of `without` splits counts as whole."""
    batch, seq = (split(TOKENS, axis) for axis in ("batch", "seq"))
    if "T" not in letters or x.shape[letters.index("T")] == 1:  # a single token is never split
        seq = Split()
    return _Tokens(*(Split() if set(one.over) & set(without) else one for one in (batch, seq)))


def _letters(equation: str) -> tuple[list[str], str]:
    """(["BTD", "DNH"], "BTNH") of "BTD,DNH->BTNH"."""
    left, _, out = equation.partition("->")
    return left.split(","), out


def _place() -> Placement:
    place = placement()
    assert place
    return place
