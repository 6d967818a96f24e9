"""The two matrix products of a block, with what must happen around each where their arrays are split.

`fan_out` reads one input with several weights; `fan_in` sums several inputs, each through its own weight, back into
the residual stream. On one device they are plain einsums. Written as one function each, with a backward pass of their
own, they say three things that XLA cannot be relied on to find: a weight is gathered again for the backward pass
instead of being kept, partial sums over a split axis are added up before one reduction pays for them, and a weight's
gradient goes from partial sums straight to its own placement.

A weight may have a low-rank adapter. Its products join those of the weight: where an axis is split, all that is summed
over devices for the adapter alone is [B, T, R], in the backward pass.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gspmd_lm.axes import AXES, Split, Weight, like, partial_einsum, reduce, remat, scope, shard, split, use

RESIDUAL = "residual: batch seq embed"
BLOCK_INPUT = "block_input: batch seq embed"
LOW_RANK = "low_rank: batch seq rank"


class Adapter(NamedTuple):
    """A low-rank adapter of a weight: scale * (x @ a) @ b is added to what the weight makes of x."""

    a: Weight
    b: Weight
    scale: float


class Product(NamedTuple):
    """An einsum of an activation and a weight, and the name of the activation on its far side of the residual."""

    equation: str  # "BTD,DNH->BTNH"
    weight: Weight
    array: str  # "q"
    adapter: Adapter | None = None

    @property
    def weights(self) -> tuple[Weight, ...]:
        return (self.weight, *self.adapter[:2]) if self.adapter else (self.weight,)

    @property
    def low_letters(self) -> tuple[str, str]:
        """The letters of an adapter's two matrices: ("DR", "RNH")."""
        x, _, y = self.letters()
        return f"{x[2:]}R", f"R{y[2:]}"

    def letters(self) -> tuple[str, str, str]:
        left, _, out = self.equation.partition("->")
        return *left.split(","), out  # type: ignore[return-value]  # an equation has two operands

    def split(self, letters: str) -> tuple[str, Split]:
        """The letter of the wide axis (N, K or F) in `letters`, and how that axis is split."""
        letter = next(letter for letter in letters if letter in "NKF")
        axis = next(axis for axis, (short, _) in AXES.items() if short == letter)
        return letter, split(self.array, axis)


def fan_out(x_BTD: jax.Array, *products: Product, scanned: bool = True) -> tuple[jax.Array, ...]:
    """The product of `x_BTD`, gathered first, with each weight; `scanned` says whether a scan over layers is around."""

    of = scope("of", *(product.weight.path for product in products))

    def low_rank(x_BTD: jax.Array, a: jax.Array, product: Product, adapter: Adapter) -> jax.Array:
        return shard(adapter.scale * jnp.einsum(f"BTD,{product.low_letters[0]}->BTR", x_BTD, a), LOW_RANK)

    def multiply(x_BTD, held):
        found = []
        for product, (weight, *ab) in zip(products, held, strict=True):
            y = jnp.einsum(product.equation, x_BTD, weight)
            if product.adapter:
                low_BTR = low_rank(x_BTD, ab[0], product, product.adapter)
                y += jnp.einsum(f"BTR,{product.low_letters[1]}->{product.letters()[2]}", low_BTR, ab[1])
            found.append(y)
        return tuple(found)

    def gathered(x_BTD, arrays):
        return shard(x_BTD, BLOCK_INPUT), _in_use(products, arrays)

    @jax.custom_vjp
    @of
    def call(x_BTD, arrays):
        return multiply(*gathered(x_BTD, arrays))

    @of
    def forward(x_BTD, arrays):
        found = gathered(x_BTD, arrays)
        return multiply(*found), found if remat() else (x_BTD, arrays)

    @of
    def backward(saved, dys):
        x_BTD, held = saved if remat() else gathered(*saved)
        terms, gradients = [], []
        for product, (weight, *ab), dy in zip(products, held, dys, strict=True):
            x, w, y = product.letters()
            letter, pieces = product.split(y)
            partials = partial_einsum(f"{y},{w}->{x}", dy, weight, letter, pieces)
            found = [_weight_gradient(f"{x},{y}->{w}", x_BTD, dy, product.weight)]
            if product.adapter:
                (a, b), (A, B, scale) = product.low_letters, product.adapter
                dlow_zBTR = scale * partial_einsum(f"{y},{b}->BTR", dy, ab[1], letter, pieces)
                partials += jnp.einsum(f"zBTR,{a}->z{x}", dlow_zBTR, ab[0])
                dlow_BTR = reduce(dlow_zBTR, pieces, LOW_RANK)
                low_BTR = low_rank(x_BTD, ab[0], product, product.adapter)
                found.append(_weight_gradient(f"{x},BTR->{a}", x_BTD, dlow_BTR, A))
                found.append(_weight_gradient(f"BTR,{y}->{b}", low_BTR, dy, B))
            terms.append((pieces, partials))
            gradients.append(tuple(found))
        return _settled((_reduced(terms), tuple(gradients)), scanned)

    call.defvjp(forward, backward)
    return call(like(x_BTD, RESIDUAL), _arrays(products))


def fan_in(inputs: tuple[jax.Array, ...], *products: Product, scanned: bool = True) -> jax.Array:
    """The sum of each input's product with its weight, [B, T, D], reduced once into the residual stream."""

    of = scope("of", *(product.weight.path for product in products))

    def low_rank(x: jax.Array, a: jax.Array, product: Product, adapter: Adapter) -> jax.Array:
        """Partial sums, zBTR: whoever multiplies them with `b` adds them up with those of the weight itself."""
        letters = product.letters()[0]
        equation = f"{letters},{product.low_letters[0]}->BTR"
        return adapter.scale * partial_einsum(equation, x, a, *product.split(letters))

    def multiply(inputs, held):
        terms = []
        for product, (weight, *ab), x in zip(products, held, inputs, strict=True):
            letter, pieces = product.split(product.letters()[0])
            partials = partial_einsum(product.equation, x, weight, letter, pieces)
            if product.adapter:
                low_zBTR = low_rank(x, ab[0], product, product.adapter)
                partials += jnp.einsum("zBTR,RD->zBTD", low_zBTR, ab[1])
            terms.append((pieces, partials))
        return _reduced(terms)

    @jax.custom_vjp
    @of
    def call(inputs, arrays):
        return multiply(inputs, _in_use(products, arrays))

    @of
    def forward(inputs, arrays):
        held = _in_use(products, arrays)
        return multiply(inputs, held), (inputs, held if remat() else arrays)

    @of
    def backward(saved, dy_BTD):
        inputs, held = saved
        held = held if remat() else _in_use(products, held)
        dy_BTD = shard(dy_BTD, BLOCK_INPUT)
        dxs, gradients = [], []
        for product, (weight, *ab), input_ in zip(products, held, inputs, strict=True):
            x, w, y = product.letters()
            dx = jnp.einsum(f"{y},{w}->{x}", dy_BTD, weight)
            found = [_weight_gradient(f"{x},{y}->{w}", input_, dy_BTD, product.weight)]
            if product.adapter:
                (a, _), (A, B, scale) = product.low_letters, product.adapter
                dlow_BTR = shard(scale * jnp.einsum("BTD,RD->BTR", dy_BTD, ab[1]), LOW_RANK)
                dx += jnp.einsum(f"BTR,{a}->{x}", dlow_BTR, ab[0])
                low_BTR = reduce(low_rank(input_, ab[0], product, product.adapter), product.split(x)[1], LOW_RANK)
                found.append(_weight_gradient(f"{x},BTR->{a}", input_, dlow_BTR, A))
                found.append(_weight_gradient("BTR,BTD->RD", low_BTR, dy_BTD, B))
            dxs.append(dx)
            gradients.append(tuple(found))
        return _settled((tuple(dxs), tuple(gradients)), scanned)

    call.defvjp(forward, backward)
    return call(inputs, _arrays(products))


def _arrays(products: Iterable[Product]) -> tuple[tuple[jax.Array, ...], ...]:
    return tuple(tuple(weight.array for weight in product.weights) for product in products)


def _in_use(products: Iterable[Product], arrays: Iterable[tuple[jax.Array, ...]]) -> tuple[tuple[jax.Array, ...], ...]:
    """The weights ready to be multiplied with; `arrays` are those that a custom derivative was handed.

    Where a block is computed again, what is gathered then serves its backward pass too (not every compiler sees that
    two gathers are the same); otherwise nothing gathered outlives its product.
    """
    return tuple(
        tuple(use(weight.holding(array)) for weight, array in zip(product.weights, held, strict=True))
        for product, held in zip(products, arrays, strict=True)
    )


def _reduced(terms: list[tuple[Split, jax.Array]]) -> jax.Array:
    """The sum of partial sums in the residual's placement, with one reduction for all terms that are split alike."""
    sums: dict[Split, tuple[Split, jax.Array]] = {}
    for pieces, partials in terms:
        if pieces in sums:
            before, total = sums[pieces]
            pieces, partials = before | pieces, total + partials
        sums[pieces] = pieces, partials
    total, *more = (reduce(partials, pieces, RESIDUAL) for pieces, partials in sums.values())
    return sum(more, total)


def _settled(cotangents: Any, scanned: bool) -> Any:
    """Cotangents of inputs and weights, of which those of the inputs are used when all are where they belong.

    A scan sees to that in each of its turns. Elsewhere a compiler is free to reduce a weight's gradient when the
    optimizer asks for it, and holds its partial sums while the other layers are computed.
    """
    return cotangents if scanned else jax.lax.optimization_barrier(cotangents)


def _weight_gradient(equation: str, a: jax.Array, b: jax.Array, weight: Weight) -> jax.Array | None:
    """The weight's gradient, summed over the pieces of the batch straight into the placement of gradients.

    None, which jax takes for zero, for a frozen weight.
    """
    if weight.frozen:
        return None
    pieces = split("block_input", "batch")
    with scope("optimizer", weight.path):
        partials = partial_einsum(equation, a, b, "B", pieces)
    return reduce(partials, pieces, weight.spec, "optimizer").astype(weight.array.dtype)
