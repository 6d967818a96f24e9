"""Dispatch of tokens to the experts that compute them, and the weighted sum of their results.

Each device sorts its own tokens by expert, and computes them with its own copy of the experts' weights. The gradients
of the copies are partial sums, reduced as other gradients are (partial_sums.py). What is split decides what else
happens:

- `mlp`, or `expert` over axes that do not split tokens: devices compute parts of the same tokens' outputs, which are
  partial sums too.
- `expert` over axes that split tokens: all-to-alls send tokens to the devices of their experts, and results back, in as
  many rounds as the buffers of these devices need (moe_routing.py).
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from gspmd_lm.model.kernels.grouped import expert_rows, grouped, hot, outer
from gspmd_lm.model.moe_routing import Round, Routing, route
from gspmd_lm.sharding import quantised
from gspmd_lm.sharding.annotate import (
    Adapted,
    Spec,
    Split,
    Weight,
    per_device,
    placement,
    remat,
    split,
    use,
)
from gspmd_lm.sharding.matmuls import copies
from gspmd_lm.sharding.op_names import scope
from gspmd_lm.sharding.partial_sums import TOKENS, Sum, Unreduced, gradient, unreduced_sum
from gspmd_lm.sharding.quantised import Quantised

WEIGHTED = Spec("routing", ("batch", "seq", "scores"))
Matrices = Sequence[tuple[Adapted, Weight | None]]  # with their biases


def mixture_of_experts(
    x_BTD: jax.Array,
    chosen_BTk: jax.Array,
    weights_BTk: jax.Array,
    matrices: Matrices,
    activated: Callable[..., jax.Array],
    capacity: int = 0,
    weighted_input: bool = False,
) -> tuple[Unreduced, jax.Array]:
    """The weighted sum of the outputs of each token's experts, [B, T, D], and the number of rounds of all-to-alls for
    each row of the batch, [B]: 1 where tokens stay on their device.

    x_BTD is gathered. chosen_BTk: int32; an expert that does not exist, such as E, computes nothing. matrices: those of
    [E, D, F], from whose products `activated` makes the hidden layer, and the last one, [E, F, D]. capacity: how many
    tokens of a row an expert computes at most; it bounds buffers, and `chosen_BTk` keeps to it. 0: no limit.
    weighted_input: the weights multiply the experts' inputs in place of their outputs.
    """
    leaves, tree = jax.tree.flatten(tuple(zip(*matrices, strict=True)))
    layout = _moe_layout(tuple(w.holding(None) for w in leaves), tree, chosen_BTk.shape)
    layout = layout._replace(activated=activated, capacity=capacity, weighted_input=weighted_input)
    arrays = [w.array for w in leaves]
    mixed: Any = _mixture(layout, copies(x_BTD, layout.sum), weights_BTk, chosen_BTk, *arrays)
    y_zBTD, rounds_B = mixed
    return unreduced_sum(y_zBTD if layout.inner.num_shards > 1 else y_zBTD[0], layout.sum), rounds_B


def map_local_tokens(function: Callable[[jax.Array], jax.Array], x_BTC: jax.Array) -> jax.Array:
    """`function`, which treats tokens alike and gives [B, T, ...] of the same rank, run by each device on its tokens.

    Partitioners gather the operand of a sort, although each row of it is sorted by itself.
    """
    place = [(*(part.over for part in _tokens(x_BTC.shape[1])), ())]
    return per_device(lambda x_BTC: (function(x_BTC),), place, place)(x_BTC)[0]


def _tokens(length: int) -> tuple[Split, Split]:
    """The split of rows, and that of the sequence. A single token, as in generation, is not split."""
    return split(TOKENS, "batch"), split(TOKENS, "seq") if length > 1 else Split()


class _MoeLayout(NamedTuple):
    """The layout of a mixture under the rules."""

    weights: tuple[Weight, ...]  # without their arrays
    tree: Any  # of these weights: the matrices with their adapters, the last one being w_down; then their biases
    down: str  # the path of the last matrix, which is split as what experts compute
    batch: Split
    seq: Split
    expert: Split
    mlp: Split
    all_to_all: bool  # tokens are sent to the devices of their experts
    inner: Split  # over devices that compute parts of the same outputs
    buffer: float  # of a round, in mean loads of a device; 0: any number of rows has room
    activated: Any = None
    capacity: int = 0
    weighted_input: bool = False

    def holding(self, arrays: Sequence[Any]) -> tuple[Sequence[Adapted], Sequence[Weight | None]]:
        """The matrices and the biases with the arrays that a device has of them."""
        return jax.tree.unflatten(self.tree, [w.holding(array) for w, array in zip(self.weights, arrays, strict=True)])

    @property
    def sum(self) -> Sum:
        axes = ("mlp", self.mlp), ("expert", self.expert)
        names = [f"{self.down}.{axis}" for axis, over in axes if over.num_shards > 1]
        return Sum(self.inner, tuple(names), tuple(w.path for w in self.weights))

    @property
    def tokens(self) -> tuple[str, ...]:
        """The mesh axes that split tokens."""
        return self.batch.over + self.seq.over

    @property
    def local(self) -> tuple[str, ...]:
        """The mesh axes along which devices have different rows or columns of what they compute."""
        return self.tokens + self.inner.over

    def place(self, axes: Sequence[str]) -> tuple[tuple[str, ...], ...]:
        """The mesh axes that split each dimension of a weight in use."""
        over = {"expert": self.expert.over, "mlp": self.mlp.over}
        return tuple(over.get(axis, ()) for axis in axes)

    def sharing(self, axis: str) -> tuple[str, ...]:
        """The mesh axes whose devices have other columns of the same rows, where columns are along `axis`."""
        return self.mlp.over if axis == "mlp" and self.mlp.num_shards > 1 else ()

    def in_use(self, arrays: Sequence[Any]) -> list[Any]:
        """The weights, placed as the rules say for use; those of matrices perhaps quantised."""
        weights = [w.holding(array) for w, array in zip(self.weights, arrays, strict=True)]
        return [quantised.use(w, "EDF", "D") if quantised.is_read(w) else use(w) for w in weights]

    def places(self, used: Sequence[Any]) -> list[tuple[tuple[str, ...], ...]]:
        """`place` for the arrays of weights in use: of quantised ones, for their values and then for their scales."""
        axes = [
            (w.axes, small.scale_axes(w.axes)) if isinstance(small, Quantised) else (w.axes,)
            for w, small in zip(self.weights, used, strict=True)
        ]
        return [self.place(one) for both in axes for one in both]

    def routing(self, chosen_BTk: jax.Array, experts: int) -> Routing:
        """The routing of a device's tokens. The device has `experts` experts."""
        return route(chosen_BTk, experts, self.expert, self.all_to_all, self.capacity, self.buffer)

    def rows(self, weight: Weight) -> Split:
        """The devices whose partial sums of the weight's gradient are added up."""
        axes = set(weight.axes)
        weight_split = {name for names in self.place(weight.axes) for name in names}
        # The other matrix of an adapter is split along mlp, so that what lies between the two is a sum.
        local = self.tokens + (self.mlp.over if "rank" in axes else ())
        return placement().over(tuple(name for name in local if name not in weight_split))


def _moe_layout(weights: tuple[Weight, ...], tree: Any, shape: tuple[int, ...]) -> _MoeLayout:
    """The layout for chosen experts of this shape, [B, T, k]."""
    batch, seq = _tokens(shape[1])
    down = jax.tree.unflatten(tree, weights)[0][-1].weight.path
    expert, mlp = split(down, "expert"), split(down, "mlp")
    tokens = {*batch.over, *seq.over}
    if tokens & {*mlp.over}:  # an axis splits tokens or their hidden layer, not both: the weights are gathered
        mlp = Split()
    all_to_all = bool(expert.over) and {*expert.over} <= tokens
    inner = placement().over(mlp.over + (() if all_to_all else expert.over))
    # The buffer for a single token of each row, as in generation, is small whatever the token chooses.
    buffer = placement().setting("expert_buffer") if shape[1] > 1 else 0.0
    return _MoeLayout(weights, tree, down, batch, seq, expert, mlp, all_to_all, inner, buffer)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mixture(layout: _MoeLayout, x_zBTD, weights_BTk, chosen_BTk, *arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Partial sums, [shards of `layout.inner`, B, T, D], and the rounds of each row, [B]."""
    return _forward(layout, x_zBTD, weights_BTk, chosen_BTk, *arrays)[0]


def _forward(layout: _MoeLayout, x_zBTD, weights_BTk, chosen_BTk, *arrays: jax.Array):
    used = layout.in_use(arrays)
    experts = used[0].shape[0] // layout.expert.num_shards

    def dispatch(x_zBTD, weights_BTk, chosen_BTk):
        routing = layout.routing(chosen_BTk, experts)
        before = weights_BTk if layout.weighted_input else None
        rows_ND = routing.sort_rows(x_zBTD.reshape(-1, x_zBTD.shape[-1]), before)
        return routing.round(0).dispatch(rows_ND), routing

    def compute(rows_MD, routing, x_zBTD, weights_BTk, *leaves: jax.Array):
        B, T, _ = weights_BTk.shape
        before, after = (weights_BTk, None) if layout.weighted_input else (None, weights_BTk)
        weights = layout.holding(jax.tree.unflatten(tree, leaves))
        first = routing.round(0)
        y_MD, *kept = _products(layout, weights, rows_MD, first.sizes_E)

        def add(round_: Round, y_ND, x_zBTD):
            rows_MD = round_.dispatch(routing.sort_rows(x_zBTD.reshape(B * T, -1), before))
            return round_.send_back(_products(layout, weights, rows_MD, round_.sizes_E)[0], y_ND)

        y_ND = routing.other_rounds(add, first.send_back(y_MD), x_zBTD)
        rounds_B = jnp.broadcast_to(routing.rounds.astype(jnp.float32), (B,))
        return routing.combine(y_ND, after).reshape(1, B, T, -1), kept, rounds_B

    partial, rows, each, x = (layout.inner.over, *_x(layout)), (layout.local, ()), (layout.local,), _x(layout)
    # Two functions, so that the products can be computed again from rows that were kept.
    rows_MD, routing = per_device(dispatch, [partial, x, x], [rows, each])(x_zBTD, weights_BTk, chosen_BTk)
    rows_MD = checkpoint_name(rows_MD, "dispatched")
    leaves, tree = jax.tree.flatten(used)
    run = per_device(compute, [rows, each, partial, x, *layout.places(used)], [partial, rows, (layout.batch.over,)])
    x_zBTD = x_zBTD if routing.has_rounds else None
    y, kept, rounds_B = run(rows_MD, routing, x_zBTD, weights_BTk, *leaves)
    names = ("hidden", "low_rank")
    kept = [jax.tree.map(functools.partial(checkpoint_name, name=name), x) for name, x in zip(names, kept, strict=True)]
    kept = [rows_MD, *kept]
    # As in matmuls.py: weights are gathered again, unless the block is computed again, which gathers them anyway.
    return (y, rounds_B), (kept, x_zBTD, weights_BTk, chosen_BTk, arrays, used if remat() else None)


def _products(layout: _MoeLayout, weights: Any, rows_MD: jax.Array, sizes_E: jax.Array) -> tuple[jax.Array, Any, Any]:
    """The outputs of experts for their rows, [M, D]; the inputs of their hidden layers; and the values between the two
    matrices of each adapter."""
    (*inward, down), (*b_in, b_down) = weights
    in_MF, low_MR = [], []
    for matrix, b in zip(inward, b_in, strict=True):
        x_MF, *low = _product(layout, matrix, rows_MD, sizes_E)
        with scope("of", matrix.weight.path):
            in_MF.append(x_MF if b is None else x_MF + expert_rows(b.array, sizes_E, len(x_MF)))
        low_MR.append(low)
    y_MD, *low = _product(layout, down, layout.activated(*in_MF), sizes_E)
    if b_down is not None:
        with scope("of", down.weight.path):
            y_MD += (_first(layout) * expert_rows(b_down.array, sizes_E, len(y_MD))).astype(y_MD.dtype)
    return y_MD, in_MF, [*low_MR, low]


def _backward(layout: _MoeLayout, saved: Any, cotangents: tuple[jax.Array, jax.Array]):
    (kept, x_zBTD, weights_BTk, chosen_BTk, arrays, used), (dy, _) = saved, cotangents
    used = used or layout.in_use(arrays)
    leaves, tree = jax.tree.flatten(used)

    def local(dy, x_zBTD, weights_BTk, chosen_BTk, kept, *leaves: jax.Array):
        used, D = jax.tree.unflatten(tree, leaves), dy.shape[-1]
        weights, routing = layout.holding(used), layout.routing(chosen_BTk, used[0].shape[0])
        before, after = (weights_BTk, None) if layout.weighted_input else (None, weights_BTk)
        first = routing.round(0)
        dy_MD = first.dispatch(routing.sort_rows(dy.reshape(-1, D), after))
        drows_MD, weighted_M1, dused = _derivatives_of_round(layout, weights, kept, dy_MD, first.sizes_E)

        def add(round_: Round, added, given):
            x_zBTD, dy = given
            rows_MD = round_.dispatch(routing.sort_rows(x_zBTD.reshape(-1, D), before))
            _, *kept = _products(layout, weights, rows_MD, round_.sizes_E)
            dy_MD = round_.dispatch(routing.sort_rows(dy.reshape(-1, D), after))
            of_round = _derivatives_of_round(layout, weights, [rows_MD, *kept], dy_MD, round_.sizes_E)
            (drows_ND, weighted_N1, dused), (drows_MD, weighted_M1, more) = added, of_round
            dused = jax.tree.map(jnp.add, dused, more)
            return round_.send_back(drows_MD, drows_ND), round_.send_back(weighted_M1, weighted_N1), dused

        added = first.send_back(drows_MD), first.send_back(weighted_M1), dused
        drows_ND, weighted_N1, dused = routing.other_rounds(add, added, (x_zBTD, dy))
        dx = routing.combine(drows_ND, before).reshape(dy.shape)
        weighted = routing.in_order_of_tokens(weighted_N1).reshape(1, *weights_BTk.shape)
        return dx, weighted, *(None if w.frozen else d[None] for w, d in zip(layout.weights, dused, strict=True))

    rows = [layout.rows(w) for w in layout.weights]
    out = (layout.inner.over, *_x(layout))
    inputs = [out, out, _x(layout), _x(layout), (layout.local, ()), *layout.places(used)]
    weights = zip(layout.weights, rows, strict=True)
    outputs = [out, out, *(None if w.frozen else (over.over, *layout.place(w.axes)) for w, over in weights)]
    dx, weighted, *dused = per_device(local, inputs, outputs)(dy, x_zBTD, weights_BTk, chosen_BTk, kept, *leaves)
    weighted_BTk = layout.sum.reduce(weighted, WEIGHTED) if layout.inner.num_shards > 1 else weighted[0]
    # The gradient of a token's weight is the expert's output times dy, and `weighted_BTk` is that times the weight. A
    # weight of 0 comes from a score of 0, which has no gradient whatever its weight's is.
    dweights_BTk = jnp.where(weights_BTk == 0, 0, weighted_BTk / weights_BTk)
    gradients: Any = [
        None if d is None else _reduce_gradient(w.holding(array), layout.down, over, d)
        for w, array, over, d in zip(layout.weights, arrays, rows, dused, strict=True)
    ]
    if not layout.weights[0].scanned:
        gradients = jax.lax.optimization_barrier(gradients)
    return dx, dweights_BTk, None, *gradients


_mixture.defvjp(_forward, _backward)


def _derivatives_of_round(
    layout: _MoeLayout, weights: Any, kept: Any, dy_MD: jax.Array, sizes_E: jax.Array
) -> tuple[jax.Array, jax.Array, list[Any]]:
    """The gradients of the rows of `_products`, of the weight of each row, [M, 1], and of the matrices.

    A row's weight multiplies the output or the input of its expert. Its gradient comes multiplied by the weight itself.
    kept: the rows, and what `_products` gives beside the output.
    """
    (rows_MD, in_MF, low_MR), (matrices, (*_, b_down)) = kept, weights
    hidden_MF, back = jax.vjp(layout.activated, *in_MF)
    dhidden_MF, *ddown = _derivatives(layout, matrices[-1], [hidden_MF, *low_MR[-1]], dy_MD, sizes_E)
    din_MF = back(dhidden_MF)
    drows, dused = [], []
    for matrix, low, d_MF in zip(matrices[:-1], low_MR, din_MF, strict=False):
        d, *dmatrices = _derivatives(layout, matrix, [rows_MD, *low], d_MF, sizes_E)
        drows.append(d)
        dused += dmatrices
    dused += ddown
    drows_MD = sum(drows[1:], drows[0])
    weighted, gradient_ = (rows_MD, drows_MD) if layout.weighted_input else (hidden_MF, dhidden_MF)
    weighted_M1 = (weighted * gradient_.astype(jnp.float32)).sum(1, keepdims=True)
    if b_down is not None:
        if not layout.weighted_input:
            b_MD = expert_rows(b_down.array, sizes_E, len(dy_MD))
            weighted_M1 += _first(layout) * (dy_MD * b_MD).astype(jnp.float32).sum(1, keepdims=True)
        # Devices that compute parts of the same outputs have the same gradient of b_down: it is no partial sum.
        dused += [_sum_by_expert(d, sizes_E) for d in (*din_MF, dy_MD)]
    return drows_MD, weighted_M1, dused


def _reduce_gradient(weight: Weight, down: str, over: Split, partials: jax.Array) -> jax.Array:
    """The reduced gradient of a weight. `down`: see `_MoeLayout`."""
    with scope("of", weight.path):
        if over.num_shards == 1:
            return gradient(Unreduced((), (partials[0],)), weight)
        axes = [f"{TOKENS}.{axis}" for axis in ("batch", "seq") if {*split(TOKENS, axis).over} & {*over.over}]
        axes += [f"{down}.mlp"] if {*over.over} & {*split(down, "mlp").over} else []
        return gradient(unreduced_sum(partials, Sum(over, tuple(axes))), weight)


def _x(layout: _MoeLayout) -> tuple[tuple[str, ...], ...]:
    """The mesh axes that split each dimension of tokens."""
    return layout.batch.over, layout.seq.over, ()


def _first(layout: _MoeLayout) -> jax.Array | float:
    """1 on one of the devices that compute parts of the same outputs, 0 on the others."""
    return 1.0 if layout.mlp.num_shards == 1 else jnp.where(jax.lax.axis_index(layout.mlp.over) == 0, 1.0, 0.0)


def _product(layout: _MoeLayout, matrix: Adapted, rows_MD: jax.Array, sizes_E: jax.Array) -> list[jax.Array]:
    """The product of each row with its expert's matrix; with an adapter, also the values between its two matrices."""
    w, rows = matrix.weight, rows_MD
    with scope("of", w.path):
        if w.matmul_dtype:
            rows = quantised.quantise_rows(rows_MD, w.matmul_dtype, layout.sharing(w.axes[1]))
        y_MF = grouped(rows, w.array, sizes_E)
    if not matrix.adapter:
        return [y_MF]
    a, b = matrix.adapter
    with scope("of", a.path, b.path):
        low_MR = matrix.scale * grouped(rows_MD, a.array, sizes_E)
        added_MF = grouped(low_MR, b.array, sizes_E)
    return [y_MF + added_MF, low_MR]


def _derivatives(
    layout: _MoeLayout, matrix: Adapted, inputs: Sequence[jax.Array], dy_MF: jax.Array, sizes_E: jax.Array
) -> list[Any]:
    """The gradients of the rows of `_product`, of the matrix, and of the matrices of its adapter.

    inputs: the rows and, with an adapter, the rows times its first matrix. The gradient of the matrix is a product in
    the compute dtype even where the other products have operands of 8 bits.
    """
    w = matrix.weight
    with scope("of", w.path):
        rows, array = dy_MF, w.array
        if isinstance(array, Quantised):  # its scales are powers of two, which bfloat16 has
            exact = dy_MF.astype(jnp.float32) * expert_rows(array.scale.astype(jnp.bfloat16), sizes_E, len(dy_MF))
            rows = quantised.quantise_rows(exact, w.matmul_dtype, layout.sharing(w.axes[2]))
            rows, array = dataclasses.replace(rows, dtype=dy_MF.dtype), array.values
        drows_MD = grouped(rows, array, sizes_E, transposed=True)
    gradients = [_gradient(matrix.weight, inputs[0], dy_MF, sizes_E)]
    if matrix.adapter:
        (a, b), (rows_MD, low_MR) = matrix.adapter, inputs
        with scope("of", a.path, b.path):
            dlow_MR = matrix.scale * grouped(dy_MF, b.array, sizes_E, transposed=True)
            drows_MD += grouped(dlow_MR, a.array, sizes_E, transposed=True)
        gradients += [_gradient(a, rows_MD, dlow_MR, sizes_E), _gradient(b, low_MR, dy_MF, sizes_E)]
    return [drows_MD, *gradients]


def _gradient(weight: Weight, rows_MD: jax.Array, dy_MF: jax.Array, sizes_E: jax.Array) -> jax.Array | None:
    if weight.frozen:
        return None
    with scope("optimizer", weight.path):
        return outer(rows_MD, dy_MF, sizes_E)


def _sum_by_expert(d_MF: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """[E, F]: the sum of the rows of each expert, which is the derivative of `expert_rows`."""
    return jnp.einsum("ME,MF->EF", hot(sizes_E, len(d_MF), d_MF.dtype), d_MF)
