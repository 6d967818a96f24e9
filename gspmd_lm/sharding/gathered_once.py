"""Weights that several layers or turns multiply with: they are gathered once, and their gradient is reduced once."""

from typing import Any

import jax
import jax.numpy as jnp

from gspmd_lm.sharding.annotate import Split, Weight, per_device, placement, split, use
from gspmd_lm.sharding.of_flax import Box
from gspmd_lm.sharding.partial_sums import Sum, gradient_slot, tokens_of


def is_box(leaf: Any) -> bool:
    return isinstance(leaf, Box)


def gathered_once(tokens: Sum, box: Box, dtype: Any, w: jax.Array, over: Split | None = None) -> tuple[jax.Array, ...]:
    """A weight with what all its matmuls share: see `Weight.shared`.

    tokens: the sum over tokens. Its partial sums are added up over all matmuls in float32. over: where `w` is the
    weight of all stages, [S, R, k, ...], the split over the stages; `tokens` is then the sum within one of them.
    """
    stages, own = ((box.axes[0], "", ""), box.axes[1:]) if over else ((), box.axes)
    in_use = jax.lax.stop_gradient(use(Weight(w, box.path, (*stages, *own), dtype)))
    slot: Any = gradient_slot(Weight(w, box.path, (*stages, *own), jnp.dtype("float32")).holding(None), tokens, w)
    if tokens.over.num_shards > 1:
        of_stages = (over.over, (), ()) if over else ()
        place = *of_stages, tokens.over.over, *(split(box.path, axis).over for axis in own)
        slot = per_device(lambda x: (x,), [place], [place])(jnp.moveaxis(slot, 0, len(stages)))[0]
    return w, in_use, slot


def for_all_layers(weights: Any, x_BTD: jax.Array) -> Any:
    """The weights of one layer, in boxes as `of_flax.readable` makes them, as all layers multiply `x_BTD` with them.

    What is no matrix is left as it is, and so is a matrix that a mesh axis splits in use which splits tokens too: each
    layer places it by itself.
    """
    tokens = tokens_of(x_BTD, "BTD").sum

    def once(box: Any) -> Any:
        if not is_box(box) or placement().is_single or len(box.axes) < 2:
            return box
        if {name for axis in box.axes for name in split(box.path, axis).over} & {*tokens.over.over}:
            return box
        return box.replace(value=gathered_once(tokens, box, x_BTD.dtype, box.value))

    return jax.tree.map(once, weights, is_leaf=is_box)
