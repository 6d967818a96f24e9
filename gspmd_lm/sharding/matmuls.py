"""Matmuls with weights. On one device they are plain einsums; on many, reductions are made late and together.

A sum over devices that is not yet made is an array of partial sums, one for each shard, along a new first dimension.
Each device adds up its partial sums of several matmuls before one reduction pays for all of them:

- `sum_of_matmuls`: forward, the matmuls whose results a block adds to the residual stream.
- `project`: backward, the gradients of one input that several weights are multiplied with.

XLA does not do so everywhere by itself. Between the two stand plain arrays. Equations are made from the axes of
weights: the last axes of an input are the first ones of its weight. In them z stands for the shards of the axis along
which a weight is split, r for those of the batch, and t for those of the sequence.
"""

import dataclasses
import functools
import operator
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gspmd_lm.sharding.annotate import (
    Adapted,
    Spec,
    Split,
    Weight,
    like,
    parse,
    placement,
    platform,
    remat,
    scope,
    shard,
    split,
    use,
)
from gspmd_lm.sharding.partial_sums import (
    PartialSums,
    Sum,
    Unreduced,
    copied,
    gradient,
    reduced,
    tokens_of,
    unreduced,
)

LOW_RANK = "low_rank: batch seq rank"


# The words


@dataclasses.dataclass(frozen=True)
class Matmul:
    """A matmul that is still to be made, x w + bias, for `sum_of_matmuls`."""

    x: jax.Array
    weight: Weight | Adapted
    bias: jax.Array | None = None

    def scaled(self, factor: jax.Array) -> "Matmul":
        """The matmul whose result is `factor` times that of this one."""
        bias = None if self.bias is None else factor * self.bias
        return Matmul((factor * self.x).astype(self.x.dtype), self.weight, bias)


@dataclasses.dataclass(frozen=True)
class Copies:
    """What asks `project` for the input itself: [shards, B, T, D], a copy for each shard of a sum over devices.

    The gradients of the copies are partial sums of it.
    """

    sum_of: Callable[[tuple[int, ...]], Sum]  # by the shape of the input


def project(
    x: jax.Array, weights: Mapping[str, Weight | Adapted | Copies], spec: str, home: str
) -> dict[str, jax.Array]:
    """`x` times each of the weights, by their names. `x` is gathered once, as `spec` says.

    The gradients of `x` are added up on each device and reduced once, to where `home` says. Matmuls with weights that
    are split over other mesh axes have another reduction.
    """
    matrices = {name: w if isinstance(w, Adapted) else Adapted(w) for name, w in weights.items()}
    readers = [w for matrix in matrices.values() for w in (matrix.weight, *matrix.adapter[:1])]
    products = iter(_products(x, readers, spec, home))
    found = {}
    for name, matrix in matrices.items():
        found[name] = next(products)
        if matrix.adapter:
            low_BTR = matrix.scale * next(products)
            found[name] += _products(low_BTR, matrix.adapter[1:], LOW_RANK, LOW_RANK)[0]
    return found


def sum_of_matmuls(terms: Sequence["Matmul | Unreduced"], spec: str, home: str) -> jax.Array:
    """The sum of all terms, placed as `home` says. One reduction pays for all weights that are split alike.

    Its gradient is gathered once, as `spec` says.
    """
    each = [term if isinstance(term, Unreduced) else _unreduced(term, _token_axes(home)) for term in terms]
    return reduced(functools.reduce(operator.add, each), spec, home)


def einsum(equation: str, x: jax.Array, w: Weight | jax.Array) -> "Unreduced":
    """The einsum of an activation and a weight, or of two activations, which gives the gradient of a weight.

    Its sum over an axis along which the weight is split is left to `reduced`, and a sum over the tokens of two
    activations to `gradient`. If the weight is split along several axes that are summed over, the compiler sums over
    all but the first at once.
    """
    if isinstance(w, Weight):
        return _matmul(equation, x, w)
    if placement() is None:
        return Unreduced((), (jnp.einsum(equation, x, w),))
    (a, b), out = _letters(equation)
    tokens = tokens_of(x, a)
    with scope("sum", *tokens.sum.axes):
        return unreduced(_einsum(f"{a},{b}->rt{out}", x, w, **tokens.cuts), tokens.sum)


def look_up(table: Weight, ids_BT: jax.Array, spec: str, home: str) -> jax.Array:
    """The rows of `table` for `ids_BT`, [B, T, D], placed as `home` says. Gradients of a repeated id add up in float32.

    A table that is whole along its rows is read where it rests: if it is split along `embed`, two small all-to-alls of
    the result cost less than gathering the table. A table that is split along its rows is gathered along `embed`. Each
    device looks up the rows that it has, and one reduction adds them up.
    """
    over, tokens = split(table.path, table.axes[0]), tokens_of(ids_BT, "BT")
    with scope("of", table.path):
        if over.pieces == 1:
            found_BTD = table.array.astype(jnp.float32)[ids_BT].astype(table.compute_dtype)
            at_rest = Spec(table.path, table.axes, "weights")
            place = placement()
            return place.columns_apart(found_BTD, at_rest, parse(home, found_BTD.ndim)) if place else found_BTD
        in_use = Spec(table.path, table.axes)
        table_rVD: Any = copied(tokens.sum, in_use._replace(table="optimizer"), in_use, use(table, jnp.float32))
        table_rzVD = table_rVD.reshape(tokens.sum.over.pieces, over.pieces, -1, table_rVD.shape[-1])
        ids_rBT = tokens.apart(ids_BT)
        first_z = table_rzVD.shape[2] * jnp.arange(over.pieces)

        def found(table_VD: jax.Array, first: jax.Array, ids_BT: jax.Array) -> jax.Array:
            """Zeros for the ids of other pieces, which are out of bounds."""
            at_BT = jnp.where(ids_BT >= first, ids_BT - first, len(table_VD))
            return table_VD.at[at_BT].get(mode="fill", fill_value=0).astype(table.compute_dtype)

        found_zrBTD = jax.vmap(jax.vmap(found, (0, None, 0)), (1, 0, None))(table_rzVD, first_z, ids_rBT)
        found_zBTD = jax.vmap(tokens.together)(found_zrBTD)
        sum_ = Sum(over, (f"{table.path}.{table.axes[0]}",), (table.path,))
        return reduced(unreduced(found_zBTD, sum_), spec, home)


# Several weights that are multiplied with one input


def _products(x: jax.Array, readers: Sequence[Weight | Copies], spec: str, home: str) -> list[jax.Array]:
    """What `project` gives, without adapters.

    The gradient of `x` has one sum over devices for each way in which the weights are split. Autodiff adds up the
    partial sums of one as the gradient of a slot. A slot is zeros of their shape, whose values are not used.
    """
    gathered = shard(like(x, home), spec)
    equations = ["" if isinstance(w, Copies) else _equation(w, x.ndim, _token_axes(spec)) for w in readers]
    if placement() is None:
        each = zip(readers, equations, strict=True)
        return [gathered[None] if isinstance(w, Copies) else _plain(equation, gathered, w) for w, equation in each]
    hows = [w if isinstance(w, Copies) else _reading(w, eq) for w, eq in zip(readers, equations, strict=True)]
    sums = [how.sum_of(x.shape) if isinstance(how, Copies) else how.sum for how in hows]
    together: dict[Split, Sum] = {}
    for one in sums:
        together[one.over] = together[one.over] | one if one.over in together else one
    slots = {over: _slot(one, parse(home, x.ndim), x) for over, one in together.items() if over.pieces > 1}
    fixed = jax.lax.stop_gradient(gathered)  # one for all matmuls: a scan would keep one for each

    def product(w: Weight | Copies, how: Any, sum_: Sum) -> jax.Array:
        slot = slots.get(sum_.over)
        if isinstance(w, Weight):
            return _product(how, gathered if slot is None else fixed, slot, w.array)
        return gathered[None] if slot is None else _copies(sum_, parse(spec, x.ndim), fixed, slot)

    return list(map(product, readers, hows, sums))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _slot(sum_: Sum, home: Spec, x: jax.Array) -> jax.Array:
    return jnp.zeros((sum_.over.pieces, *x.shape), x.dtype)


_slot.defvjp(lambda *given: (_slot(*given), None), lambda sum_, home, _, dx: (sum_.made(dx, home),))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _copies(sum_: Sum, spec: Spec, x: jax.Array, slot: jax.Array) -> jax.Array:
    """A copy of `x` for each partial sum of its gradient, which is that of the slot."""
    return sum_.copies(x, spec)


_copies.defvjp(lambda *given: (_copies(*given), None), lambda sum_, spec, _, dx: (None, dx))


# One matmul


def _plain(equation: str, x: jax.Array, w: Weight) -> jax.Array:
    with jax.default_matmul_precision(_precision(w)):
        return jnp.einsum(equation, x, use(w))


def _precision(w: Weight) -> Any:
    settings: Any = jax.config
    return w.precision or settings.jax_default_matmul_precision


def _reading(w: Weight, equation: str) -> "_How":
    """How an input that is read as it is, is multiplied: its gradient is a sum if a result's axis is split."""
    (a, b), out = _letters(equation)
    letter, sum_ = _summed(w, b, out)
    return _How(w.holding(None), b, a, out, f"z{a}" if letter else a, letter, sum_, _precision(w))


def _unreduced(term: Matmul, tokens: Sequence[str]) -> Unreduced:
    """The matmul, and that of the adapter, before they are reduced."""
    matrix = term.weight if isinstance(term.weight, Adapted) else Adapted(term.weight)
    y = _matmul(_equation(matrix.weight, term.x.ndim, tokens), term.x, matrix.weight)
    if matrix.adapter:
        a, b = matrix.adapter
        low = jax.tree.map(lambda x: matrix.scale * x, _matmul(_equation(a, term.x.ndim, tokens), term.x, a))
        if low.parts:
            y += _matmul_of_partial_sums(_equation(b, low.rank, tokens), low, b)
        else:
            y += Unreduced((), tuple(_products(low.rest[0], [b], LOW_RANK, LOW_RANK)))
    return y if term.bias is None else y + Unreduced((), (term.bias,))


def _matmul(equation: str, x: jax.Array, w: Weight) -> Unreduced:
    """The matmul, a sum over the shards of the axis along which the weight is split."""
    if placement() is None:
        return Unreduced((), (_plain(equation, x, w),))
    (a, b), out = _letters(equation)
    letter, sum_ = _summed(w, b, a)
    how = _How(w.holding(None), b, a, f"z{out}", a, letter, sum_, _precision(w))
    return unreduced(_product(how, x, None, w.array), sum_)


def _matmul_of_partial_sums(equation: str, x: Unreduced, w: Weight) -> Unreduced:
    """The matmuls of partial sums, of which the sum is made afterwards."""
    (a, b), out = _letters(equation)
    parts = []
    for part in x.parts:
        sum_ = Sum(part.sum.over, (), (w.path,))
        how = _How(w.holding(None), b, f"z{a}", f"z{out}", f"z{a}", "", sum_, _precision(w))
        parts.append(PartialSums(_product(how, part.array, None, w.array), part.sum | sum_))
    return Unreduced(tuple(parts))


class _How(NamedTuple):
    """The letters of a matmul with a weight. A z before them stands for partial sums."""

    weight: Weight  # without its array
    w: str
    x: str
    y: str
    dx: str
    letter: str  # of the axis along which the weight is split in use; "" if none that matters is split
    sum: Sum  # over that axis; where `x` is partial sums, theirs
    precision: Any  # of the matmul and, as in jax's own, of those of its derivative


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(how: _How, x: jax.Array, slot: jax.Array | None, w: jax.Array) -> jax.Array:
    """The product of `x` and a weight at rest. With a slot, the gradient of `x` is that of the slot.

    Its derivatives are written here. For autodiff to give them as partial sums, the forward pass would have to cut the
    same axis, which adds copies in attention to TPU programs: 4% of a step under fsdp2_tp4 on v5p.
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
    tokens = tokens_of(x, how.x, without=how.sum.over.over)  # a mesh axis splits only one dimension of an array
    with scope("of", weight.path), jax.default_matmul_precision(how.precision):
        w = w if remat() else use(weight.holding(w))
        with scope("sum", *how.sum.axes):
            dx = _einsum(f"{how.y},{how.w}->{how.dx}", dy, w, z=(how.letter, how.sum.over)).astype(x.dtype)
        dw = None
        if not weight.frozen:
            with scope("optimizer", weight.path):
                cuts = {"z": (how.letter, how.sum.over), **tokens.cuts}
                partials = _einsum(f"{how.x},{how.y}->rt{how.w}", x, dy, **cuts)
            dw = gradient(unreduced(partials, tokens.sum), weight)
        found = (dx, None, dw) if how.dx == how.x else (None, dx, dw)
        # A scan has its gradients in place before its next turn. Elsewhere a compiler is free to reduce a weight's
        # gradient only when the optimizer asks for it, and to hold the partials while the other layers are computed.
        return found if weight.scanned else jax.lax.optimization_barrier(found)


_product.defvjp(_forward, _backward)


def _einsum(equation: str, x: jax.Array, y: jax.Array, **cuts: tuple[str, Split]) -> jax.Array:
    """`jnp.einsum` whose axes may be cut: z=("N", split) cuts the axis N in two, z for the piece and N within it.

    If the equation's result has z, the pieces stay apart: as partial sums, or as those of N. If it has N alone, they
    become one axis again. Nothing is cut where the equation has no z. Where the split has one piece, z is left out.
    """
    (a, b), out = _letters(equation)
    cuts = {piece: cut for piece, cut in cuts.items() if piece in equation}
    for piece, (letter, over) in cuts.items():
        if over.pieces == 1:
            a, b, out = (letters.replace(piece, "") for letters in (a, b, out))
        elif letter:
            (x, a), (y, b) = _cut(x, a, letter, over, piece), _cut(y, b, letter, over, piece)
            out = f"{piece}{out}" if letter in out else out
    if platform() == "cpu" and "B" not in out and x.size > y.size:
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
    if out.startswith("rt"):  # one partial sum for each piece of the tokens
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


def _token_axes(spec: str) -> list[str]:
    """The axes of an activation but for the last one: ["batch", "seq"]."""
    return spec.partition(": ")[2].split()[:-1]


def _equation(w: Weight, rank: int, tokens: Sequence[str]) -> str:
    """ "BTD,DNH->BTNH": after the axes of its tokens, those of an input of this rank are the first ones of the weight.

    Letters are those of the model's axes, as far as they are known and differ.
    """
    place, axes, count = placement(), (*tokens, *w.axes), len(tokens)
    known = {axis: letter for axis, (letter, _) in place.vocabulary.axes.items()} if place else {}
    wanted = [{**known, "batch": "B", "seq": "T"}.get(axis, "") for axis in axes]
    free = iter(sorted({*string.ascii_uppercase} - {*wanted}))
    letters = [
        letter if letter in {*string.ascii_uppercase} - {*wanted[:at]} else next(free)
        for at, letter in enumerate(wanted)
    ]
    outer, weight, summed = "".join(letters[:count]), "".join(letters[count:]), rank - count
    return f"{outer}{weight[:summed]},{weight}->{outer}{weight[summed:]}"


def _letters(equation: str) -> tuple[list[str], str]:
    """(["BTD", "DNH"], "BTNH") of "BTD,DNH->BTNH"."""
    left, _, out = equation.partition("->")
    return left.split(","), out
