"""Operands of 8 bits for matmuls with weights: int8, or float8 (E4M3, and E5M2 for gradients; arXiv 2209.05433).

Numbers that are summed over share a scale: an activation has one for each token, and a weight one for each output. A
scale is the largest absolute value over the whole axis, wherever its shards are, over the largest number of the dtype.
It is computed anew each time, so a run has no state for it. Operands are multiplied as they are, added up in int32 or
float32, and the sums are scaled. In the backward pass, the scales of an operand that are summed over go into the other
operand, the gradient of the output, before that is quantised. So each operand of the forward pass is quantised once.

Scales are rounded up to powers of two. Scaled integers then add up exactly, in whatever order devices add them, so that
no layout rounds a later operand in another way. That costs int8 half a bit, and float8 nothing but range. Scales are
rounded less for the operands of the gradient of a weight.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from gspmd_lm.sharding import annotate
from gspmd_lm.sharding.annotate import Spec, Weight, placement, replicas
from gspmd_lm.sharding.op_names import scope

# What model.matmul_dtype and model.weight_dtype name -> dtype of operands of the forward pass, and of weights at rest.
EIGHT_BITS: dict[str, Any] = {"int8": jnp.int8, "fp8": jnp.float8_e4m3fn}
SCALED = "scaled"  # the name of a scaled product in remat policies
_BACKWARD = {jnp.dtype(jnp.int8): jnp.int8, jnp.dtype(jnp.float8_e4m3fn): jnp.float8_e5m2}
_POWER_OF_TWO, _FOUR_BITS, _ALL = 0x7F80_0000, 0x7FF0_0000, 0x7FFF_FFFF  # the bits of a scale's inverse that stay
_SMALLEST = 1e-30  # values are zero where none is larger: the scale and its inverse must be finite


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Quantised:
    """An array as `values` times `scale`."""

    values: jax.Array  # int8 or float8
    scale: jax.Array  # float32, without the dimensions of `over`
    over: tuple[int, ...] = dataclasses.field(metadata={"static": True})  # dimensions that share a scale; -1: the last
    dtype: Any = dataclasses.field(metadata={"static": True})  # of the array, and of its products

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def ndim(self) -> int:
        return self.values.ndim

    def scale_axes(self, axes: Sequence[str]) -> list[str]:
        """The axes of `scale`, where `axes` are those of `values`."""
        return [axis for at, axis in enumerate(axes, -len(axes)) if at not in self.over]


def quantise(
    x: jax.Array, letters: str, summed: str, dtype: Any, over_tokens: bool = False, devices: tuple[str, ...] = ()
) -> Quantised:
    """`x`, whose dimensions are `letters`, in `dtype`. Numbers that differ only in dimensions that are `summed` over
    share a scale.

    A sum `over_tokens` is the gradient of a weight. Replicas of the weights share its scales, whose inverses have four
    bits, since that gradient is not quantised again. Where `x` is not finite, neither is the scale, so that a step that
    is to be skipped is still seen. devices: the mesh axes that split what is `summed`, where each device has its own.
    """
    over = tuple(at for at, letter in enumerate(letters, -len(letters)) if letter in summed)
    across = (*devices, *([replicas()] if over_tokens and replicas() else []))
    return _quantise(x, over, dtype, _FOUR_BITS if over_tokens else _POWER_OF_TWO, across)


def quantise_rows(x_MC: jax.Array, matmul_dtype: str, devices: tuple[str, ...]) -> Quantised:
    """Rows that meet the matrices of experts, with a scale for each. devices: the mesh axes that split their columns.

    Gradients of outputs are E4M3 too, because kernels of GPUs multiply no E5M2 with it.
    """
    return quantise(x_MC, "MC", "C", EIGHT_BITS[matmul_dtype], devices=devices)


def at_rest(w: jax.Array, over: tuple[int, ...], dtype: Any) -> Quantised:
    """A weight in `dtype`, with scales that are not rounded. Numbers share one along the dimensions `over`."""
    return _quantise(w, over, dtype, _ALL)


def _quantise(
    x: jax.Array, over: tuple[int, ...], dtype: Any, kept_bits: int, across: tuple[str, ...] = ()
) -> Quantised:
    """`across`: the names of mapped axes whose members share scales."""
    exact = x.astype(jnp.float32)
    largest = jnp.max(jnp.abs(exact), over)
    largest = jax.lax.pmax(largest, across) if across else largest
    top = 127.0 if dtype == jnp.int8 else float(jnp.finfo(dtype).max)
    bits = jax.lax.bitcast_convert_type(top / largest, jnp.int32) & kept_bits
    inverse, some = jax.lax.bitcast_convert_type(bits, jnp.float32), largest > _SMALLEST
    scaled = exact * jnp.expand_dims(jnp.where(some, inverse, 0.0), over)
    values = (jnp.round(scaled) if dtype == jnp.int8 else scaled).astype(dtype)
    return Quantised(values, jnp.where(some, 1 / inverse, largest), over, x.dtype)


def is_read(weight: Weight) -> bool:
    """Whether matmuls read the weight in 8 bits: because they multiply in 8 bits, or because it rests in them."""
    return bool(weight.matmul_dtype) or isinstance(weight.array, Quantised)


def use(weight: Weight, letters: str = "", summed: str = "") -> Quantised:
    """The weight, quantised and then placed as the rules say for use. Products sum over the dimensions `summed`.

    It is quantised where it rests, so that what is gathered has 8 bits. Compare `annotate.use`. A weight that rests in
    8 bits is quantised already.
    """
    place, spec = placement(), Spec(weight.path, weight.axes)
    small: Any = weight.array
    if not isinstance(small, Quantised):
        with scope("rules", spec.array):
            small = quantise(small, letters, summed, EIGHT_BITS[weight.matmul_dtype])
    values, scale = small.values, small.scale
    values = place.constrain(place.constrain(values, spec._replace(table="weights")), spec)
    scale = place.constrain(scale, spec._replace(axes=tuple(small.scale_axes(weight.axes))))
    return dataclasses.replace(small, values=values, scale=scale, dtype=weight.compute_dtype)


def whole(weight: Weight) -> jax.Array:
    """The weight in its compute dtype, placed for use, for what is no matmul. What is gathered has the bits at rest."""
    if not isinstance(weight.array, Quantised):
        return annotate.use(weight)
    small = use(weight)
    exact = small.values.astype(jnp.float32) * jnp.expand_dims(small.scale, small.over)
    return exact.astype(weight.compute_dtype)


def pair(dy: jax.Array, letters: str, other: Any, other_letters: str, over_tokens: bool = False) -> tuple[Any, Any]:
    """`dy` and the other operand of a product of the backward pass, which sums over the letters that both have.

    If `other` is quantised, so is the result, with the scales of `other` in `dy`; else nothing changes.
    """
    if not isinstance(other, Quantised):
        return dy, other
    letters = letters[-dy.ndim :]  # a single shard has no z
    exact = dy.astype(jnp.float32) * align_scale(other.scale, other.scale_axes(other_letters), letters)
    small = quantise(exact, letters, other_letters, _BACKWARD[other.values.dtype], over_tokens)
    return dataclasses.replace(small, dtype=dy.dtype), other.values


def align_scale(scale: jax.Array, letters: Sequence[str], out: str) -> jax.Array:
    """`scale`, whose dimensions are `letters`, to be multiplied with an array whose dimensions are `out`."""
    return jnp.expand_dims(scale, [at for at, letter in enumerate(out) if letter not in letters])


def dtype_of_sums(values: jax.Array, dtype: Any) -> Any:
    """The dtype that a product of `values` has before it is scaled to be a `dtype`.

    Float8 is added up in float32 and rounded to `dtype` at once, as bfloat16 is. A result of float32 would be written
    and read again: 10% of a step of Llama 3 8B on h100:8, as predicted.
    """
    return jnp.int32 if values.dtype == jnp.int8 else dtype
