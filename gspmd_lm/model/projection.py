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

from gspmd_lm.axes import AXES, Split, Weight, partial_einsum, reduce, shard, split, use

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

    @jax.custom_vjp
    def call(x_BTD, arrays):
        x_BTD = shard(x_BTD, BLOCK_INPUT)
        return tuple(jnp.einsum(p.equation, x_BTD, use(p.weight)) for p in _holding(products, arrays))

    def backward(saved, dys):
        x_BTD, arrays = saved
        x_BTD = shard(x_BTD, BLOCK_INPUT)
        terms, gradients = [], []
        for product, dy in zip(_holding(products, arrays), dys, strict=True):
            x, w, y = product.letters()
            letter, pieces = product.split(y)
            terms.append((pieces, partial_einsum(f"{y},{w}->{x}", dy, use(product.weight), letter, pieces)))
            gradients.append(_weight_gradient(f"{x},{y}->{w}", x_BTD, dy, product.weight))
        return _reduced(terms), tuple(gradients)

    call.defvjp(lambda x_BTD, arrays: (call(x_BTD, arrays), (x_BTD, arrays)), backward)
    return call(x_BTD, tuple(product.weight.array for product in products))


def fan_in(inputs: tuple[jax.Array, ...], *products: Product) -> jax.Array:
    """The sum of each input's product with its weight, [B, T, D], reduced once into the residual stream."""

    @jax.custom_vjp
    def call(inputs, arrays):
        terms = []
        for product, x in zip(_holding(products, arrays), inputs, strict=True):
            letter, pieces = product.split(product.letters()[0])
            terms.append((pieces, partial_einsum(product.equation, x, use(product.weight), letter, pieces)))
        return _reduced(terms)

    def backward(saved, dy_BTD):
        inputs, arrays = saved
        dy_BTD = shard(dy_BTD, BLOCK_INPUT)
        dxs, gradients = [], []
        for product, input_ in zip(_holding(products, arrays), inputs, strict=True):
            x, w, y = product.letters()
            dxs.append(jnp.einsum(f"{y},{w}->{x}", dy_BTD, use(product.weight)))
            gradients.append(_weight_gradient(f"{x},{y}->{w}", input_, dy_BTD, product.weight))
        return tuple(dxs), tuple(gradients)

    call.defvjp(lambda inputs, arrays: (call(inputs, arrays), (inputs, arrays)), backward)
    return call(inputs, tuple(product.weight.array for product in products))


def _holding(products: Iterable[Product], arrays: Iterable[jax.Array]) -> list[Product]:
    """The products with the arrays that a custom derivative was handed in place of the ones they were made with."""
    return [p._replace(weight=p.weight.holding(array)) for p, array in zip(products, arrays, strict=True)]


def _reduced(terms: list[tuple[Split, jax.Array]]) -> jax.Array:
    """The sum of partial sums in the residual's placement, with one reduction for all terms that are split alike."""
    sums: dict[Split, jax.Array] = {}
    for pieces, partials in terms:
        sums[pieces] = sums[pieces] + partials if pieces in sums else partials
    total, *more = (reduce(partials, pieces, RESIDUAL) for pieces, partials in sums.items())
    return sum(more, total)


def _weight_gradient(equation: str, a: jax.Array, b: jax.Array, weight: Weight) -> jax.Array:
    """The weight's gradient, summed over the pieces of the batch straight into the placement of gradients."""
    pieces = split("block_input", "batch")
    partials = partial_einsum(equation, a, b, "B", pieces)
    return reduce(partials, pieces, weight.spec, "optimizer").astype(weight.array.dtype)
