"""The two matrix products of a block, with what must happen around each where their arrays are split.

`fan_out` reads one input with several weights; `fan_in` sums several inputs, each through its own weight, back into
the residual stream. On one device they are plain einsums. Written as one function each, with a backward pass of their
own, they say three things that XLA cannot be relied on to find: a weight is gathered again for the backward pass
instead of being kept, partial sums over a split axis are added up before one reduction pays for them, and a weight's
gradient goes from partial sums straight to its own placement.
"""

from collections.abc import Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gspmd_lm.axes import AXES, Split, Weight, like, partial_einsum, reduce, remat, scope, shard, split, use

RESIDUAL = "residual: batch seq embed"
BLOCK_INPUT = "block_input: batch seq embed"


class Product(NamedTuple):
    """An einsum of an activation and a weight, and the name of the activation on its far side of the residual."""

    equation: str  # "BTD,DNH->BTNH"
    weight: Weight
    array: str  # "q"

    def letters(self) -> tuple[str, str, str]:
        left, _, out = self.equation.partition("->")
        return *left.split(","), out  # type: ignore[return-value]  # an equation has two operands

    def split(self, letters: str) -> tuple[str, Split]:
        """The letter of the wide axis (N, K or F) in `letters`, and how that axis is split."""
        letter = next(letter for letter in letters if letter in "NKF")
        axis = next(axis for axis, (short, _) in AXES.items() if short == letter)
        return letter, split(self.array, axis)


def fan_out(x_BTD: jax.Array, *products: Product) -> tuple[jax.Array, ...]:
    """The product of `x_BTD`, gathered first, with each weight."""

    of = scope("of", *(product.weight.path for product in products))

    def multiply(x_BTD, weights):
        return tuple(jnp.einsum(p.equation, x_BTD, w) for p, w in zip(products, weights, strict=True))

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
        x_BTD, weights = saved if remat() else gathered(*saved)
        terms, gradients = [], []
        for product, weight, dy in zip(products, weights, dys, strict=True):
            x, w, y = product.letters()
            letter, pieces = product.split(y)
            terms.append((pieces, partial_einsum(f"{y},{w}->{x}", dy, weight, letter, pieces)))
            gradients.append(_weight_gradient(f"{x},{y}->{w}", x_BTD, dy, product.weight))
        return _reduced(terms), tuple(gradients)

    call.defvjp(forward, backward)
    return call(like(x_BTD, RESIDUAL), tuple(product.weight.array for product in products))


def fan_in(inputs: tuple[jax.Array, ...], *products: Product) -> jax.Array:
    """The sum of each input's product with its weight, [B, T, D], reduced once into the residual stream."""

    of = scope("of", *(product.weight.path for product in products))

    def multiply(inputs, weights):
        terms = []
        for product, weight, x in zip(products, weights, inputs, strict=True):
            letter, pieces = product.split(product.letters()[0])
            terms.append((pieces, partial_einsum(product.equation, x, weight, letter, pieces)))
        return _reduced(terms)

    @jax.custom_vjp
    @of
    def call(inputs, arrays):
        return multiply(inputs, _in_use(products, arrays))

    @of
    def forward(inputs, arrays):
        weights = _in_use(products, arrays)
        return multiply(inputs, weights), (inputs, weights if remat() else arrays)

    @of
    def backward(saved, dy_BTD):
        inputs, weights = saved
        weights = weights if remat() else _in_use(products, weights)
        dy_BTD = shard(dy_BTD, BLOCK_INPUT)
        dxs, gradients = [], []
        for product, weight, input_ in zip(products, weights, inputs, strict=True):
            x, w, y = product.letters()
            dxs.append(jnp.einsum(f"{y},{w}->{x}", dy_BTD, weight))
            gradients.append(_weight_gradient(f"{x},{y}->{w}", input_, dy_BTD, product.weight))
        return tuple(dxs), tuple(gradients)

    call.defvjp(forward, backward)
    return call(inputs, tuple(product.weight.array for product in products))


def _in_use(products: Iterable[Product], arrays: Iterable[jax.Array]) -> tuple[jax.Array, ...]:
    """The weights ready to be multiplied with; `arrays` are those that a custom derivative was handed.

    Where a block is computed again, what is gathered then serves its backward pass too (not every compiler sees that
    two gathers are the same); otherwise nothing gathered outlives its product.
    """
    return tuple(use(p.weight.holding(array)) for p, array in zip(products, arrays, strict=True))


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


def _weight_gradient(equation: str, a: jax.Array, b: jax.Array, weight: Weight) -> jax.Array:
    """The weight's gradient, summed over the pieces of the batch straight into the placement of gradients."""
    pieces = split("block_input", "batch")
    with scope("optimizer", weight.path):
        partials = partial_einsum(equation, a, b, "B", pieces)
    return reduce(partials, pieces, weight.spec, "optimizer").astype(weight.array.dtype)
