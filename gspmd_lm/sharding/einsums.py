"""Einsums in the letters of the model's axes, of which some are cut into shards. They make partial sums."""

import functools
import string
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from gspmd_lm.sharding import quantised
from gspmd_lm.sharding.annotate import Split, Weight, placement, platform
from gspmd_lm.sharding.op_names import einsum_equation
from gspmd_lm.sharding.quantised import Quantised


def cut_einsum(equation: str, x: Any, y: Any, **cuts: tuple[str, Split]) -> jax.Array:
    """`jnp.einsum` whose axes may be cut: z=("N", split) cuts the axis N in two, z for the shard and N within it.

    If the equation's result has z, so has the array: for partial sums, or for the shards of N. If the result has N but
    not z, the shards become one axis again. Without z in the equation nothing is cut. A single shard has no z.
    Operands may be quantised; the result is then scaled.
    """
    (a, b), out = parse_equation(equation)
    small = [(one, letters) for one, letters in ((x, a), (y, b)) if isinstance(one, Quantised)]
    scales = [(one.scale, "".join(one.scale_axes(letters))) for one, letters in small]
    x, y = (one.values if isinstance(one, Quantised) else one for one in (x, y))
    if x.dtype.itemsize != y.dtype.itemsize and small:  # a weight that rests in 8 bits, and an activation that does not
        x, y = (one.astype(small[0][0].dtype) for one in (x, y))
    cuts = {shards: cut for shards, cut in cuts.items() if shards in equation}
    for shards, (letter, over) in cuts.items():
        if over.num_shards == 1:
            a, b, out = (letters.replace(shards, "") for letters in (a, b, out))
            scales = [(scale, letters.replace(shards, "")) for scale, letters in scales]
        elif letter:
            (x, a), (y, b) = _cut(x, a, letter, over, shards), _cut(y, b, letter, over, shards)
            scales = [_cut(*scale, letter, over, shards) for scale in scales]
            out = f"{shards}{out}" if letter in out else out
    sums = quantised.dtype_of_sums(x, small[0][0].dtype) if small else None
    product = functools.partial(jnp.einsum, preferred_element_type=sums)
    if platform() == "cpu" and "B" not in out and x.size > y.size:
        # Of two activations, CPUs transpose the first before they multiply: the narrower one. Without a barrier, the
        # compiler would not turn the result but the product.
        turned = "".join(sorted(out, key=lambda letter: (letter not in a) + 2 * (letter not in b)))
        turned_product = jax.lax.optimization_barrier(product(f"{b},{a}->{turned}", y, x))
        result = jnp.einsum(f"{turned}->{out}", turned_product)
    else:
        result = product(einsum_equation(f"{a},{b}->{out}"), x, y)  # shards first: no transposition of the result
    for scale, letters in scales:
        result = result * quantised.align_scale(scale, letters, out)
    result = result.astype(small[0][0].dtype) if small else result
    for shards, (letter, over) in cuts.items():
        if over.num_shards > 1 and letter and letter in out:
            at, out = out.index(shards), out.replace(shards, "")
            to = out.index(letter)
            result = jnp.moveaxis(result, at, to)
            result = result.reshape(*result.shape[:to], -1, *result.shape[to + 2 :])
    if out.startswith("rt"):  # one partial sum for each shard of the tokens
        result = result.reshape(-1, *result.shape[2:])
    return result


def _cut(x: jax.Array, letters: str, letter: str, over: Split, shards: str) -> tuple[jax.Array, str]:
    """`x` and its letters. If `x` has the axis `letter`, that axis is cut in two."""
    if letter not in letters:
        return x, letters
    at = letters.index(letter)
    shape = (*x.shape[:at], over.num_shards, x.shape[at] // over.num_shards, *x.shape[at + 1 :])
    return x.reshape(shape), letters.replace(letter, f"{shards}{letter}")


def parse_equation(equation: str) -> tuple[list[str], str]:
    """(["BTD", "DNH"], "BTNH") of "BTD,DNH->BTNH"."""
    left, _, out = equation.partition("->")
    return left.split(","), out


def write_equation(outer: Sequence[str], summed: int, w: Weight) -> str:
    """ "BTD,DNH->BTNH": an input has the axes `outer`, and then the first axes of the weight, which are summed over.

    Letters are those of the model's axes, as far as they are known and differ.
    """
    axes, count = (*outer, *w.axes), len(outer)
    known = {axis: letter for axis, (letter, _) in placement().vocabulary.axes.items()}
    wanted = [{**known, "batch": "B", "seq": "T"}.get(axis, "") for axis in axes]
    free = iter(sorted({*string.ascii_uppercase} - {*wanted}))
    letters = [
        letter if letter in {*string.ascii_uppercase} - {*wanted[:at]} else next(free)
        for at, letter in enumerate(wanted)
    ]
    rows, weight = "".join(letters[:count]), "".join(letters[count:])
    return f"{rows}{weight[:summed]},{weight}->{rows}{weight[summed:]}"
