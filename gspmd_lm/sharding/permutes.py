"""What devices send to each other, each to one."""

import functools
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from gspmd_lm.sharding.annotate import Spec, Split, per_device
from gspmd_lm.sharding.op_names import scope


def permuted(x: jax.Array, over: Split, to: Mapping[int, int]) -> jax.Array:
    """Within `per_device`, `x` of the device that sends to this one. Devices are counted along the axes of `over`."""
    if all(source == target for source, target in to.items()):
        return x
    # jax.lax.ppermute counts them along the axes of the mesh, and since jax 0.12 takes the names in no other order.
    in_mesh = tuple(name for name in jax.sharding.get_abstract_mesh().axis_names if name in over.over)
    along = [over.over.index(name) for name in in_mesh]
    sizes = [jax.lax.axis_size(name) for name in over.over]
    counted = np.argsort(np.arange(over.num_shards).reshape(sizes).transpose(along).ravel()).tolist()
    return jax.lax.ppermute(x, in_mesh, [(counted[source], counted[target]) for source, target in to.items()])


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
    return _exchanged(over, repeats, weight._replace(table="weights"), w)


_in_stage_order.defvjp(
    lambda *args: (_in_stage_order(*args), None),
    lambda over, repeats, weight, _, dw: (
        _exchanged(over, repeats, weight._replace(table="optimizer"), dw, back=True),
    ),
)


def _exchanged(over: Split, repeats: int, weight: Spec, w: jax.Array, back: bool = False) -> jax.Array:
    """A weight, from where `weight` says that it rests to the stages that compute with it; or its gradient, back."""
    S, rounds = over.num_shards, _rounds(over.num_shards, repeats)
    layers, *axes = weight.axes
    rests, computes = weight, weight._replace(axes=(layers, "", "", *axes))

    def of_a_device(w: jax.Array) -> jax.Array:
        parts = w[0] if back else w.reshape(repeats, -1, *w.shape[1:])
        stage, moved = jax.lax.axis_index(over.over), parts
        for round_ in rounds:  # part p rests in stage p // R, and stage p % S computes with it in its repeat p // S
            way = {part // repeats: part % S for part in round_}
            resting = [part % repeats for part in sorted(round_, key=lambda part: part // repeats)]
            computed = [part // S for part in sorted(round_, key=lambda part: part % S)]
            source, target = (computed, resting) if back else (resting, computed)
            way = {to: from_ for from_, to in way.items()} if back else way
            part = jax.lax.dynamic_index_in_dim(parts, jnp.array(source)[stage], keepdims=False)
            moved = jax.lax.dynamic_update_index_in_dim(moved, permuted(part, over, way), jnp.array(target)[stage], 0)
        return moved.reshape(-1, *moved.shape[2:]) if back else moved[None]

    spec = [computes, rests] if back else [rests, computes]
    with scope(weight.table, weight.array):
        return per_device(lambda w: (of_a_device(w),), spec[:1], spec[1:])(w)[0]


def _rounds(stages: int, repeats: int) -> list[list[int]]:
    """The parts that stages exchange, in rounds: in each of them, a stage sends one part and gets one."""
    # A stage sends parts that follow each other, for which the quotient is the same. Of the parts p that a stage gets,
    # p % R repeats after R / gcd(S, R) of them, and the quotient has then grown by one.
    number = [(part + part // math.lcm(stages, repeats)) % repeats for part in range(stages * repeats)]
    return [[part for part, at in enumerate(number) if at == round_] for round_ in range(repeats)]
