"""Deferred sums over devices: each device adds up its partial sums first, and one reduction serves all of them.

docs/reductions.md explains them with a picture. `einsums.cut_einsum` makes the partial sums.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange

from gspmd_lm.sharding.annotate import (
    Shared,
    Spec,
    Split,
    Weight,
    like,
    parse,
    per_device,
    placement,
    split,
    use,
)
from gspmd_lm.sharding.of_flax import Box, is_box
from gspmd_lm.sharding.op_names import scope

# The axes of the mesh are automatic: the compiler places what no word places, and a sum over devices that is not yet
# made is an array of partial sums. JAX's explicit axes, whose types know unreduced sums, would take less code. But with
# them jax 0.10.2 and 0.12.0 refuse 8 of 22 placements of a decoder's parts that a rules file may ask for, such as any
# split of the token table, unless the model says at the operation where its result lives (benchmarks/README.md).

TOKENS = "block_input"  # its rows of the rules file say how tokens are split, along batch and seq


class Sum(NamedTuple):
    """The mesh axes that a sum is over, and its names for `scope`."""

    over: Split
    axes: tuple[str, ...] = ()  # the logical axes that are summed over: "layers.attention.wo.heads"
    of: tuple[str, ...] = ()  # the weights whose matmuls are added

    def __or__(self, other: "Sum") -> "Sum":
        """One sum of the partial sums of both."""
        return Sum(self.over, self.axes + other.axes, self.of + other.of)

    def reduce(self, partials: jax.Array, spec: Spec) -> jax.Array:
        with scope("of", *self.of), scope("sum", *self.axes):
            return placement().total(partials, self.over, spec)

    def copies(self, x: jax.Array, spec: Spec) -> jax.Array:
        """The derivative of `reduce`: `x`, gathered as `spec` says, once for each partial sum."""
        place = placement()
        with scope("of", *self.of):
            return place.copies(place.constrain(x, spec), self.over, spec)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PartialSums:
    """[shards, ...]: a partial sum for each shard."""

    array: jax.Array
    sum: Sum = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Unreduced:
    """A sum over devices that is not yet made: partial sums for each set of mesh axes, and arrays to add afterwards.

    Where no weight is split, there are no partial sums and `rest` is one array.
    """

    parts: tuple[PartialSums, ...] = ()
    rest: tuple[jax.Array, ...] = ()

    def __add__(self, other: "Unreduced | jax.Array") -> "Unreduced":
        other = other if isinstance(other, Unreduced) else Unreduced((), (other,))
        if not self.parts and not other.parts:
            return Unreduced((), (self.rest[0] + other.rest[0],))
        parts = {part.sum.over: part for part in self.parts}
        for part in other.parts:
            before = parts.get(part.sum.over)
            parts[part.sum.over] = PartialSums(before.array + part.array, before.sum | part.sum) if before else part
        return Unreduced(tuple(parts.values()), self.rest + other.rest)

    def __rmul__(self, factor: jax.Array | float) -> "Unreduced":
        return jax.tree.map(lambda x: factor * x, self)

    def total(self, reduced_spec: Spec, gathered_spec: Spec) -> jax.Array:
        """The sum, placed as `reduced_spec` says. Its gradient is gathered as `gathered_spec` says."""
        each = [*(_total(part.sum, reduced_spec, gathered_spec, part.array) for part in self.parts), *self.rest]
        return sum(each[1:], each[0])

    def gradient(self, spec: Spec, dtype: Any) -> jax.Array:
        """The sum as the gradient of an array of that dtype, placed as `spec` says."""
        total = self.total(spec, spec)
        return (total if self.parts else placement().constrain(total, spec)).astype(dtype)


def unreduced_sum(partials: jax.Array, sum_: Sum) -> Unreduced:
    """The sum over the first dimension of `partials`. A sum over one shard has no such dimension."""
    return Unreduced((PartialSums(partials, sum_),)) if sum_.over.num_shards > 1 else Unreduced((), (partials,))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _total(sum_: Sum, reduced_spec: Spec, gathered_spec: Spec, partials: jax.Array) -> jax.Array:
    return sum_.reduce(partials, reduced_spec)


_total.defvjp(
    lambda *args: (_total(*args), None),
    lambda sum_, reduced_spec, gathered_spec, _, dy: (sum_.copies(dy, gathered_spec),),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def copy_to_shards(sum_: Sum, reduced_spec: Spec, gathered_spec: Spec, x: jax.Array) -> jax.Array:
    """A copy of `x`, gathered as `gathered_spec` says, for each partial sum of its gradient.

    The gradient is placed as `reduced_spec` says.
    """
    return sum_.copies(x, gathered_spec)


copy_to_shards.defvjp(
    lambda *args: (copy_to_shards(*args), None),
    lambda sum_, reduced_spec, gathered_spec, _, dx: (sum_.reduce(dx, reduced_spec),),
)


def for_each_row(w: Weight, rows: int, make: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """[B, ...]: the result of `make` for a weight in use, once for each of `rows` rows of the batch.

    Each device adds up the gradients of its rows before one reduction.
    """
    in_use, batch = Spec(w.path, w.axes), Sum(split(TOKENS, "batch"), (f"{TOKENS}.batch",))
    with scope("of", w.path):
        copies: Any = copy_to_shards(batch, in_use._replace(table="optimizer"), in_use, use(w))
    return jnp.repeat(jax.vmap(make)(copies), rows // len(copies), axis=0)


def reduced(y: Unreduced, gathered_spec: str, reduced_spec: str) -> jax.Array:
    """The sum, placed as `reduced_spec` says. Its gradient is gathered as `gathered_spec` says."""
    if y.parts:
        rank = y.parts[0].array.ndim - 1
        return y.total(parse(reduced_spec, rank), parse(gathered_spec, rank))
    return like(like(y.rest[0], gathered_spec), reduced_spec)


def gradient(dw: Unreduced, weight: Weight) -> jax.Array:
    """The gradient of `weight`, reduced to where the table `optimizer` places it."""
    return dw.gradient(Spec(weight.path, weight.axes, "optimizer"), weight.array.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def gradient_slot(sums: Sequence[Sum], spec: Spec, dtype: Any, x: jax.Array) -> jax.Array:
    """Zeros, [shards, ...] as partial sums are, for all matmuls that read `x` and leave its gradient to the slot.

    Each matmul gives its partial sums as the slot's gradient. Autodiff adds them up, and one reduction places the total
    as `spec` says: the gradient of `x`. `sums` names what is summed. It need not be complete before the backward pass.
    """
    # The zeros depend on `x`: where `x` has a batch dimension of pipeline stages, each stage has a slot of its own.
    zeros, shards = jnp.where(False, x, 0).astype(dtype), sums[0].over.num_shards
    return jnp.broadcast_to(zeros, (shards, *x.shape)) if shards > 1 else zeros


def _reduce_slot(sums: Sequence[Sum], spec: Spec, _: Any, like: jax.Array, partials: jax.Array) -> tuple[jax.Array]:
    sum_ = functools.reduce(operator.or_, sums)
    with scope("of", *sum_.of), scope(spec.table, spec.array):
        return (unreduced_sum(partials, sum_).gradient(spec, like.dtype),)


gradient_slot.defvjp(lambda *args: (gradient_slot(*args), jnp.zeros((), args[-1].dtype)), _reduce_slot)


class TokenSharding(NamedTuple):
    """The sharding of the tokens that weights are multiplied with."""

    batch: Split
    seq: Split

    @property
    def sum(self) -> Sum:
        """The sum over all tokens: over the shards of the batch, and in each over those of the sequence."""
        over = Split(self.batch.over + self.seq.over, self.batch.num_shards * self.seq.num_shards)
        return Sum(over, (f"{TOKENS}.batch", *([f"{TOKENS}.seq"] if self.seq.num_shards > 1 else [])))

    @property
    def cuts(self) -> dict[str, tuple[str, Split]]:
        """For `cut_einsum`, whose result begins with rt."""
        return {"r": ("B", self.batch), "t": ("T", self.seq)}

    def apart(self, x_BT: jax.Array) -> jax.Array:
        """[shards, B, T]: each shard of the tokens by itself."""
        return rearrange(x_BT, "(r B) (t T) -> (r t) B T", r=self.batch.num_shards, t=self.seq.num_shards)

    def together(self, x_rBTD: jax.Array) -> jax.Array:
        """[B, T, D] of the shards."""
        return rearrange(x_rBTD, "(r t) B T D -> (r B) (t T) D", r=self.batch.num_shards, t=self.seq.num_shards)


def token_sharding(x: jax.Array, letters: str, without: tuple[str, ...] = ()) -> TokenSharding:
    """The sharding of the tokens of `x`. An axis that a mesh axis of `without` splits counts as not split."""
    batch, seq = (split(TOKENS, axis) for axis in ("batch", "seq"))
    if "T" not in letters or x.shape[letters.index("T")] == 1:  # a single token is never split
        seq = Split()
    return TokenSharding(*(Split() if set(one.over) & set(without) else one for one in (batch, seq)))


# Weights that several matmuls share: they are gathered once, and their gradients are reduced once


def share_weight(w: Weight, tokens: Sum, in_use: Any, dtype: Any) -> Shared:
    """A weight as all its matmuls read it. in_use: the weight, gathered. tokens: the sum over tokens that its gradient
    is, whose partial sums are added up in `dtype`.
    """
    slot: Any = gradient_slot([tokens._replace(of=(w.path,))], Spec(w.path, w.axes, "optimizer"), dtype, w.array)
    return Shared(jax.lax.stop_gradient(in_use), slot)


def share_box(box: Box, tokens: Sum, dtype: Any, stages: Split | None = None) -> Box:
    """A box whose weight is shared by all turns of a loop. Their gradients are added up in float32.

    stages: of a weight of all stages of a pipeline, [S, R, k, ...], the split over the stages. `tokens` is then the sum
    within one of them.
    """
    lead, own = ((box.axes[0], "", ""), box.axes[1:]) if stages else ((), box.axes)
    weight = Weight(box.value, box.path, (*lead, *own), dtype)
    in_use, slot = share_weight(weight, tokens, use(weight), jnp.dtype("float32"))
    if tokens.over.num_shards > 1:
        of_lead = (stages.over, (), ()) if stages else ()
        place = *of_lead, tokens.over.over, *(split(box.path, axis).over for axis in own)
        slot = per_device(lambda x: (x,), [place], [place])(jnp.moveaxis(slot, 0, len(lead)))[0]
    return box.replace(value=(box.value, Shared(in_use, slot)))


def for_all_layers(weights: Any, x_BTD: jax.Array) -> Any:
    """The weights of one layer, in boxes as `of_flax.readable` makes them, as all layers multiply `x_BTD` with them.

    Two kinds of weights are left as they are, and each layer places them by itself: those that are no matrices, and
    those that a mesh axis splits in use which also splits tokens.
    """
    tokens = token_sharding(x_BTD, "BTD").sum

    def share(box: Any) -> Any:
        if not is_box(box) or placement().is_single or len(box.axes) < 2:
            return box
        in_use = {name for axis in box.axes for name in split(box.path, axis).over}
        return box if in_use & {*tokens.over.over} else share_box(box, tokens, x_BTD.dtype)

    return jax.tree.map(share, weights, is_leaf=is_box)
