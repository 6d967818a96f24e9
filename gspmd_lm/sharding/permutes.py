"""Transfers between devices: shards of sums, an array to another device, layers of a pipeline, slices of rows."""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint

from gspmd_lm.sharding.annotate import Spec, Split, per_device, platform
from gspmd_lm.sharding.op_names import scope


def permute(x: jax.Array, over: Split, to: Mapping[int, int]) -> jax.Array:
    """Within `per_device`, `x` of the device that sends to this one. Devices are counted along the axes of `over`."""
    if all(source == target for source, target in to.items()):
        return x
    # jax.lax.ppermute counts them along the axes of the mesh, and since jax 0.12 takes the names in no other order.
    in_mesh = tuple(name for name in jax.sharding.get_abstract_mesh().axis_names if name in over.over)
    along = [over.over.index(name) for name in in_mesh]
    sizes = [jax.lax.axis_size(name) for name in over.over]
    counted = np.argsort(np.arange(over.num_shards).reshape(sizes).transpose(along).ravel()).tolist()
    return jax.lax.ppermute(x, in_mesh, [(counted[source], counted[target]) for source, target in to.items()])


def shard_of_sum(x: jax.Array, names: Sequence[str], dimension: int, platform: str) -> jax.Array:
    """The sum of `x` over mesh axes, of which each device keeps its shard of `dimension`. It runs inside of one device.

    TPU programs reduce the whole array, which is twice the traffic, where a shard does not end with a tile, such as 128
    columns or 8 rows of bfloat16 (v5e and v5p, libtpu 0.0.42.1). The shards are then made blocks of rows, one behind
    the other in memory. Any dimension but the last may be that of the rows; fewer than 8 of them stay as they are.
    Where the last dimension fills no tiles, such as heads of 64, programs make another one that of the columns.

    TPU programs may also reduce the whole array where a dimension of size 1 comes first, as in a batch of one row: on
    v5e and v6e always, on v5p for small arrays. Such a dimension is left out.
    """
    if platform == "tpu" and dimension and x.shape[0] == 1:
        return shard_of_sum(x[0], names, dimension - 1, platform)[None]
    num_shards, last = jax.lax.axis_size(tuple(names)), dimension == x.ndim - 1
    size = x.shape[dimension] // num_shards
    may_be_columns = last or x.shape[-1] % 128
    aligned = size * x.dtype.itemsize % (512 if may_be_columns else 32) == 0 or (not last and size % 8)
    if platform != "tpu" or x.ndim == 1 or aligned:
        return jax.lax.psum_scatter(x, names, scatter_dimension=dimension, tiled=True)
    if last:
        return jnp.swapaxes(_blocks(jnp.swapaxes(x, -2, -1), names, dimension - 1, num_shards), -2, -1)
    return _blocks(x, names, dimension, num_shards)


def _blocks(x: jax.Array, names: Sequence[str], dimension: int, num_shards: int) -> jax.Array:
    """The shard of the sum that a device keeps, summed as one of several blocks of an array."""
    before, size, after = x.shape[:dimension], x.shape[dimension] // num_shards, x.shape[dimension + 1 :]
    apart = x.reshape(*before, num_shards, size, math.prod(after))
    apart = with_layout_constraint(jnp.moveaxis(apart, dimension, 0), Layout(tuple(range(apart.ndim))))
    return jax.lax.psum_scatter(apart, names, scatter_dimension=0).reshape(*before, size, *after)


def largest_anywhere(x: jax.Array) -> jax.Array:
    """Within `per_device`, the largest `x` of all devices of the mesh."""
    return jax.lax.pmax(x, jax.sharding.get_abstract_mesh().axis_names)


# The layers of a pipeline


def layers_of_stages(over: Split, repeats: int, weight: Spec, w: jax.Array) -> jax.Array:
    """[S, R, k, ...]: the layers of each stage, of a weight of all layers, [L, ...].

    A weight rests in the order of its layers, as under other rules and in checkpoints. With repeats, the layers of a
    stage lie apart in that order, and stages exchange them before the first turn.
    """
    if repeats == 1:
        return w.reshape(over.num_shards, 1, -1, *w.shape[1:])
    return _in_stage_order(over, repeats, weight, w)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _in_stage_order(over: Split, repeats: int, weight: Spec, w: jax.Array) -> jax.Array:
    return _exchange_layers(over, repeats, weight._replace(table="weights"), w)


_in_stage_order.defvjp(
    lambda *args: (_in_stage_order(*args), None),
    lambda over, repeats, weight, _, dw: (
        _exchange_layers(over, repeats, weight._replace(table="optimizer"), dw, back=True),
    ),
)


def _exchange_layers(over: Split, repeats: int, weight: Spec, w: jax.Array, back: bool = False) -> jax.Array:
    """A weight, from where `weight` says that it rests to the stages that compute with it; or its gradient, back."""
    S, rounds = over.num_shards, _rounds(over.num_shards, repeats)
    layers, *axes = weight.axes
    rests, computes = weight, weight._replace(axes=(layers, "", "", *axes))

    def place_rows(w: jax.Array) -> jax.Array:
        parts = w[0] if back else w.reshape(repeats, -1, *w.shape[1:])
        stage, moved = jax.lax.axis_index(over.over), parts
        for round_ in rounds:  # part p rests in stage p // R, and stage p % S computes with it in its repeat p // S
            way = {part // repeats: part % S for part in round_}
            resting = [part % repeats for part in sorted(round_, key=lambda part: part // repeats)]
            computed = [part // S for part in sorted(round_, key=lambda part: part % S)]
            source, target = (computed, resting) if back else (resting, computed)
            way = {to: from_ for from_, to in way.items()} if back else way
            part = jax.lax.dynamic_index_in_dim(parts, jnp.array(source)[stage], keepdims=False)
            moved = jax.lax.dynamic_update_index_in_dim(moved, permute(part, over, way), jnp.array(target)[stage], 0)
        return moved.reshape(-1, *moved.shape[2:]) if back else moved[None]

    spec = [computes, rests] if back else [rests, computes]
    with scope(weight.table, weight.array):
        return per_device(lambda w: (place_rows(w),), spec[:1], spec[1:])(w)[0]


def _rounds(stages: int, repeats: int) -> list[list[int]]:
    """The parts that stages exchange, in rounds: in each of them, a stage sends one part and gets one."""
    # A stage sends parts that follow each other, for which the quotient is the same. Of the parts p that a stage gets,
    # p % R repeats after R / gcd(S, R) of them, and the quotient has then grown by one.
    number = [(part + part // math.lcm(stages, repeats)) % repeats for part in range(stages * repeats)]
    return [[part for part, at in enumerate(number) if at == round_] for round_ in range(repeats)]


# Slices of rows, of other sizes for each device


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Segments:
    """Slices of rows that a device sends and receives: arguments of `jax.lax.ragged_all_to_all`."""

    over: Split = dataclasses.field(metadata={"static": True})
    starts: jax.Array  # of the slices that are sent
    sent: jax.Array  # their sizes
    targets: jax.Array  # where they begin at their receivers
    received: jax.Array  # the sizes of what arrives

    def exchange_rows(self, rows_ND: jax.Array, into_MD: jax.Array, array: str) -> jax.Array:
        """[M, D]: the rows that arrive, and what is in `into_MD` where none does. array: the name of what is sent."""
        with scope("rules", array):
            exchange = _simulate if platform() == "cpu" else jax.lax.ragged_all_to_all
            segments = self.starts, self.sent, self.targets, self.received
            return exchange(rows_ND, into_MD, *segments, axis_name=self.over.over)


def _simulate(rows_ND, into_MD, starts, sent, targets, received, *, axis_name):
    """`jax.lax.ragged_all_to_all` for the CPU, where XLA has none (jax issue 34755): every device receives all rows."""
    all_sND, starts_s, sent_s, targets_s = (jax.lax.all_gather(x, axis_name) for x in (rows_ND, starts, sent, targets))
    device, each = jax.lax.axis_index(axis_name), len(starts) // len(all_sND)
    first, size, at = (
        jax.lax.dynamic_slice_in_dim(x, device * each, each, 1).reshape(-1, 1) for x in (starts_s, sent_s, targets_s)
    )
    offset_gM = jnp.arange(len(into_MD)) - at  # g: the slices that arrive here
    arrives_gM = (offset_gM >= 0) & (offset_gM < size)
    source_gM = jnp.arange(len(at))[:, None] // each * rows_ND.shape[0] + first + offset_gM
    source_M = jnp.where(arrives_gM, source_gM, 0).sum(0)
    rows_MD = all_sND.reshape(-1, rows_ND.shape[1])[source_M]
    return jnp.where(arrives_gM.any(0)[:, None], rows_MD, into_MD)
