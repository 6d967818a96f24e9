"""Matmuls with weights. On one device they are plain einsums; on many, reductions are made late and together.

docs/reductions.md explains them with a picture. A sum over devices that is not yet made is an array of partial sums.
Each device adds up its partial sums of several matmuls before one reduction pays for all of them. XLA does not do so
everywhere by itself. All that lies between is plain arrays:

    with gathered(x_BTD, "block_input: batch seq embed", "residual: batch seq embed") as x_BTD:
        gate_BTF, up_BTF = project(x_BTD, w_gate), project(x_BTD, w_up)
    y = unreduced_matmul(gate_BTF * up_BTF, w_down)
    y_BTD = reduced(y, "block_input: batch seq embed", "residual: batch seq embed")

Equations are made from the axes of weights: the last axes of an input are the first ones of its weight. In equations z
stands for the shards of the axis along which a weight is split, r for those of the batch, and t for those of the
sequence.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from gspmd_lm.errors import InputError
from gspmd_lm.sharding import quantised
from gspmd_lm.sharding.annotate import (
    Adapted,
    Shared,
    Spec,
    Split,
    Weight,
    like,
    parse,
    placement,
    remat,
    shard,
    split,
    use,
)
from gspmd_lm.sharding.einsums import cut_einsum, parse_equation, write_equation
from gspmd_lm.sharding.op_names import scope
from gspmd_lm.sharding.partial_sums import (
    PartialSums,
    Sum,
    TokenSharding,
    Unreduced,
    copy_to_shards,
    gradient,
    gradient_slot,
    reduced,
    share_weight,
    token_sharding,
    unreduced_sum,
)
from gspmd_lm.sharding.quantised import Quantised

LOW_RANK = "low_rank: batch seq rank"


# The words


@contextlib.contextmanager
def gathered(x: jax.Array, gathered_spec: str, reduced_spec: str) -> Iterator[jax.Array]:
    """`x`, gathered as `gathered_spec` says, which `project` multiplies with weights.

    Each device adds up the gradients of all these matmuls, and one reduction places their sum as `reduced_spec` says.
    Weights that are split over other mesh axes have a reduction of their own. Within this context, `gathered` of the
    same array and specs gives the same input.
    """
    same = (earlier for earlier in _inputs.get() if earlier.is_of(x, gathered_spec, reduced_spec))
    input_ = next(same, None) or _Gathered(x, gathered_spec, reduced_spec)
    token = _inputs.set((*_inputs.get(), input_))
    try:
        yield input_.x
    finally:
        _inputs.reset(token)


def project(x: jax.Array, weight: Weight | Adapted) -> jax.Array:
    """`x` times a weight; with an adapter, x w + scale (x a) b. `x` comes from `gathered`."""
    one, matrix = _Gathered.gathered_input(x), weight if isinstance(weight, Adapted) else Adapted(weight)
    y = one.times(matrix.weight)
    if not matrix.adapter:
        return y
    a, b = matrix.adapter
    with gathered(matrix.scale * one.times(a), LOW_RANK, LOW_RANK) as low_BTR:
        return y + project(low_BTR, b)


def unreduced_matmul(x: jax.Array, weight: Weight | Adapted) -> Unreduced:
    """`x` times a weight, of which all axes but the last are summed over, before that sum is made over devices."""
    matrix = weight if isinstance(weight, Adapted) else Adapted(weight)
    summed = matrix.weight.array.ndim - 1
    outer = ["batch", "seq", *map(str, range(x.ndim))][: x.ndim - summed]
    y = einsum(write_equation(outer, summed, matrix.weight), x, matrix.weight)
    if not matrix.adapter:
        return y
    a, b = matrix.adapter
    low = matrix.scale * einsum(write_equation(outer, summed, a), x, a)
    if low.parts:
        return y + _matmul_of_partial_sums(write_equation(outer, 1, b), low, b)
    with gathered(low.rest[0], LOW_RANK, LOW_RANK) as low_BTR:
        return y + project(low_BTR, b)


@contextlib.contextmanager
def sharing_weights() -> Iterator[None]:
    """A context in which matmuls with the same weight gather it once, and sum its gradient over devices once."""
    token = _shared_weights.set({})
    try:
        yield
    finally:
        _shared_weights.reset(token)


def copies(x: jax.Array, sum_: Sum) -> jax.Array:
    """[shards, ...]: a copy of `x` for each shard of a sum over devices. The gradients of the copies are partial sums.

    `x` comes from `gathered`, as in `project`.
    """
    one = _Gathered.gathered_input(x)
    return _copies(sum_, one.gathered_spec, one.fixed, one.slot(sum_)) if sum_.over.num_shards > 1 else one.x[None]


def einsum(equation: str, x: jax.Array, w: Weight | jax.Array) -> Unreduced:
    """The einsum of an activation and a weight, or of two activations, which gives the gradient of a weight.

    Its sum over an axis along which the weight is split is left to `reduced`, and a sum over the tokens of two
    activations to `gradient`. If the weight is split along several axes that are summed over, the compiler sums over
    all but the first at once.
    """
    eight_bits = isinstance(w, Weight) and w.matmul_dtype
    if placement().is_single and not (isinstance(w, Weight) and quantised.is_read(w)):
        return Unreduced((), (jnp.einsum(equation, x, use(w) if isinstance(w, Weight) else w),))
    (a, b), out = parse_equation(equation)
    if isinstance(w, Weight):
        letter, sum_ = _find_split(w, b, a)
        operand, slot = (_quantise(x, a, b, w), x) if eight_bits else (x, None)
        return unreduced_sum(_multiply(operand, slot, w, (b, a, f"z{out}", a), letter, sum_), sum_)
    tokens = token_sharding(x, a)
    with scope("sum", *tokens.sum.axes):
        return unreduced_sum(cut_einsum(f"{a},{b}->rt{out}", x, w, **tokens.cuts), tokens.sum)


def look_up(table: Weight, ids_BT: jax.Array, gathered_spec: str, reduced_spec: str) -> jax.Array:
    """The rows of `table` for `ids_BT`, [B, T, D], placed as `reduced_spec` says. Gradients of an id add up in float32.

    A table that is not split along its rows is read as it is stored: if it is split along `embed`, two small
    all-to-alls of the result cost less than gathering it. A table that is split along its rows is gathered along
    `embed`. Each device looks up the rows that it has, and one reduction adds them up.
    """
    over, tokens = split(table.path, table.axes[0]), token_sharding(ids_BT, "BT")
    with scope("of", table.path):
        if over.num_shards == 1:
            rows_BTD = table.array.astype(jnp.float32)[ids_BT].astype(table.compute_dtype)
            at_rest = Spec(table.path, table.axes, "weights")
            return placement().reshard_axis_by_axis(rows_BTD, at_rest, parse(reduced_spec, rows_BTD.ndim))
        in_use = Spec(table.path, table.axes)
        table_rVD: Any = copy_to_shards(tokens.sum, in_use._replace(table="optimizer"), in_use, use(table, jnp.float32))
        table_rzVD = table_rVD.reshape(tokens.sum.over.num_shards, over.num_shards, -1, table_rVD.shape[-1])
        ids_rBT = tokens.apart(ids_BT)
        first_z = table_rzVD.shape[2] * jnp.arange(over.num_shards)

        def rows_of_shard(table_VD: jax.Array, first: jax.Array, ids_BT: jax.Array) -> jax.Array:
            """The rows of one shard of the table; zeros for ids of other shards, which are out of bounds."""
            at_BT = jnp.where(ids_BT >= first, ids_BT - first, len(table_VD))
            return table_VD.at[at_BT].get(mode="fill", fill_value=0).astype(table.compute_dtype)

        rows_zrBTD = jax.vmap(jax.vmap(rows_of_shard, (0, None, 0)), (1, 0, None))(table_rzVD, first_z, ids_rBT)
        rows_zBTD = jax.vmap(tokens.together)(rows_zrBTD)
        sum_ = Sum(over, (f"{table.path}.{table.axes[0]}",), (table.path,))
        return reduced(unreduced_sum(rows_zBTD, sum_), gathered_spec, reduced_spec)


# One input, and the weights that it is multiplied with


class _Gathered:
    """The gathered input of several matmuls.

    Its gradient has one reduction, and so one `gradient_slot`, for each set of mesh axes that the weights are split
    over.
    """

    def __init__(self, x: jax.Array, gathered_spec: str, reduced_spec: str):
        self.x = shard(like(x, reduced_spec), gathered_spec)
        self.fixed = jax.lax.stop_gradient(self.x)  # one for all matmuls: a scan would keep one for each
        self._before, self._specs = x, (gathered_spec, reduced_spec)
        self.gathered_spec, self._reduced_spec = parse(gathered_spec, x.ndim), parse(reduced_spec, x.ndim)
        self._slots: dict[Split, tuple[jax.Array, list[Sum]]] = {}
        self._quantised: Quantised | None = None  # as all matmuls of 8 bits read it

    def is_of(self, x: jax.Array, gathered_spec: str, reduced_spec: str) -> bool:
        return x is self._before and (gathered_spec, reduced_spec) == self._specs

    @staticmethod
    def gathered_input(x: jax.Array) -> "_Gathered":
        """The gathered input whose array is `x`. Raises InputError where there is none."""
        for one in _inputs.get():
            if one.x is x:
                return one
        raise InputError(
            f"project(x, weight): x, {x.shape}, is not what gathered() gave\n"
            "  fix   with gathered(x, gathered_spec, reduced_spec) as x: ... project(x, weight)"
        )

    def times(self, w: Weight) -> jax.Array:
        """The matmul with one weight."""
        equation = write_equation(self.gathered_spec.axes[:-1], 1, w)
        if placement().is_single and not quantised.is_read(w):
            return jnp.einsum(equation, self.x, use(w))
        (a, b), out = parse_equation(equation)
        letter, sum_ = _find_split(w, b, out)
        x, slot = (self.fixed, self.slot(sum_)) if letter else (self.x, None)
        if w.matmul_dtype:
            self._quantised = self._quantised or _quantise(self.x, a, b, w)
            x, slot = self._quantised, slot if letter else self.x
        return _multiply(x, slot, w, (b, a, out, f"z{a}" if letter else a), letter, sum_)

    def slot(self, sum_: Sum) -> jax.Array:
        """The slot of all matmuls whose weights are split over the same mesh axes."""
        if sum_.over in self._slots:
            slot, sums = self._slots[sum_.over]
            sums.append(sum_)
            return slot
        sums = [sum_]  # complete when the backward pass is traced, which names its reduction after them
        slot: Any = gradient_slot(sums, self._reduced_spec, self._before.dtype, self._before)
        self._slots[sum_.over] = slot, sums
        return slot


_inputs: ContextVar[tuple[_Gathered, ...]] = ContextVar("inputs", default=())


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _copies(sum_: Sum, spec: Spec, x: jax.Array, slot: jax.Array) -> jax.Array:
    """A copy of `x` for each partial sum of its gradient, which is that of the slot."""
    return sum_.copies(x, spec)


_copies.defvjp(lambda *args: (_copies(*args), None), lambda sum_, spec, _, dx: (None, dx))


# One matmul


def _matmul_of_partial_sums(equation: str, x: Unreduced, w: Weight) -> Unreduced:
    """The matmuls of partial sums, of which the sum is made afterwards."""
    (a, b), out = parse_equation(equation)
    parts = []
    for part in x.parts:
        sum_ = Sum(part.sum.over, (), (w.path,))
        product = _multiply(part.array, None, w, (b, f"z{a}", f"z{out}", f"z{a}"), "", sum_)
        parts.append(PartialSums(product, part.sum | sum_))
    return Unreduced(tuple(parts))


class _Matmul(NamedTuple):
    """The letters of a matmul with a weight. A z before them stands for partial sums."""

    weight: Weight  # without its array
    w: str
    x: str
    y: str
    dx: str
    letter: str  # of the axis along which the weight is split in use; "" if none that matters is split
    sum: Sum  # over that axis; where `x` is partial sums, theirs
    precision: Any  # of the matmul and, as in jax's own, of those of its derivative


def _quantise(x: jax.Array, letters: str, w_letters: str, w: Weight) -> Quantised:
    """`x` as the matmul with `w` reads it. Its gradient is that of a slot."""
    return quantised.quantise(jax.lax.stop_gradient(x), letters, w_letters, quantised.EIGHT_BITS[w.matmul_dtype])


def _tokens(matmul: _Matmul, x: jax.Array | Quantised) -> TokenSharding:
    """The split of the tokens of `x`. A mesh axis splits only one dimension of an array."""
    return token_sharding(x.values if isinstance(x, Quantised) else x, matmul.x, without=matmul.sum.over.over)


def _in_use(matmul: _Matmul, w: jax.Array) -> jax.Array | Quantised:
    weight = matmul.weight.holding(w)
    return quantised.use(weight, matmul.w, matmul.x) if quantised.is_read(weight) else use(weight)


def _multiply(
    x: Any, slot: jax.Array | None, w: Weight, letters: tuple[str, str, str, str], letter: str, sum_: Sum
) -> jax.Array:
    """The product of `x` and a weight, which may be shared with other products.

    letters: of the weight, `x`, the product and the gradient of `x`. For the others, see `_Matmul`.
    """
    settings: Any = jax.config
    matmul = _Matmul(w.holding(None), *letters, letter, sum_, settings.jax_default_matmul_precision)
    shared = w.shared or _share(matmul, x, w)
    if not shared:
        return _product(matmul, x, slot, w.array, None)
    matmul = matmul._replace(weight=dataclasses.replace(matmul.weight, used=True))
    # Gradients have the dtype of their matmul before they are added to those of others.
    return _product(matmul, x, slot, shared.in_use, shared.slot.astype(shared.in_use.dtype))


_shared_weights: ContextVar[dict[str, Shared] | None] = ContextVar("shared_weights", default=None)


def _share(matmul: _Matmul, x: jax.Array | Quantised, w: Weight) -> Shared | None:
    """The array and the slot that all products with a weight share within `sharing_weights`; None outside of it."""
    weights = _shared_weights.get()
    if weights is None or w.used or placement().is_single:
        return None
    if w.path not in weights:
        weights[w.path] = share_weight(w, _tokens(matmul, x).sum, _in_use(matmul, w.array), w.compute_dtype)
    return weights[w.path]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(matmul: _Matmul, x: Any, slot: jax.Array | None, w: Any, weight_slot: jax.Array | None) -> jax.Array:
    """The product of `x` and a stored weight. With a slot, the gradient of `x` is returned as that of the slot. With a
    weight's slot, the partial sums of its gradient are.

    Its derivatives are written here. For autodiff to give them as partial sums, the forward pass would have to cut the
    same axis, which adds copies in attention to TPU programs: 4% of a step under fsdp2_tp4 on v5p.
    """
    return _forward(matmul, x, slot, w, weight_slot)[0]


def _forward(matmul: _Matmul, x: Any, slot: Any, w: Any, weight_slot: jax.Array | None) -> tuple[jax.Array, Any]:
    used = w if matmul.weight.used else _in_use(matmul, w)
    names = scope("of", *matmul.sum.of), scope("sum", *matmul.sum.axes if "z" in matmul.y else ())
    with names[0], names[1], jax.default_matmul_precision(matmul.precision):
        y = cut_einsum(f"{matmul.x},{matmul.w}->{matmul.y}", x, used, z=(matmul.letter, matmul.sum.over))
        y = checkpoint_name(y, quantised.SCALED) if isinstance(x, Quantised) and "z" not in matmul.y else y
    # Where a block is recomputed, the backward pass uses the weight that the recomputation gathered. Elsewhere the
    # backward pass gathers it again, so that no gathered weight outlives its product.
    return y, (x, used if remat() else w, jnp.zeros((), w.dtype), weight_slot)


def _backward(matmul: _Matmul, saved: Any, dy: jax.Array) -> tuple[Any, ...]:
    x, w, at_rest, weight_slot = saved
    weight = matmul.weight.holding(at_rest)
    eight_bits = isinstance(x, Quantised)
    tokens = _tokens(matmul, x)
    with scope("of", weight.path), jax.default_matmul_precision(matmul.precision):
        w = w if remat() or weight.used else _in_use(matmul, w)
        with scope("sum", *matmul.sum.axes):
            equation = f"{matmul.y},{matmul.w}->{matmul.dx}"
            operands = quantised.pair(dy, matmul.y, w, matmul.w)
            dx = cut_einsum(equation, *operands, z=(matmul.letter, matmul.sum.over)).astype(x.dtype)
        dw = (None, None)
        if not weight.frozen:
            with scope("optimizer", weight.path):
                cuts = {"z": (matmul.letter, matmul.sum.over), **tokens.cuts}
                right, left = quantised.pair(dy, matmul.y, x, matmul.x, over_tokens=True)
                partials = cut_einsum(f"{matmul.x},{matmul.y}->rt{matmul.w}", left, right, **cuts)
            dw = (
                (None, partials)
                if weight_slot is not None
                else (gradient(unreduced_sum(partials, tokens.sum), weight), None)
            )
        gradients = (dx, None, *dw) if matmul.dx == matmul.x and not eight_bits else (None, dx, *dw)
        # A scan has its gradients in place before its next turn. Elsewhere a compiler is free to reduce a weight's
        # gradient only when the optimizer asks for it, and to hold the partials while the other layers are computed.
        return gradients if weight.scanned else jax.lax.optimization_barrier(gradients)


_product.defvjp(_forward, _backward)


def _find_split(w: Weight, letters: str, among: str) -> tuple[str, Sum]:
    """The first letter of `among` along which the weight is split in use, and the sum over its shards."""
    of = () if w.used else (w.path,)
    for letter, axis in zip(letters, w.axes, strict=True):
        over = split(w.path, axis)
        if letter in among and over.num_shards > 1:
            return letter, Sum(over, (f"{w.path}.{axis}",), of)
    return "", Sum(Split(), (), of)
