"""A pipeline whose stages compute one microbatch forward and another one backward in each turn, known as 1F1B.

In turn t, stage s computes microbatch t - s, as in `pipeline`. Then it computes microbatch t - 2 (S - 1) + s once more,
and its derivative, with the gradient that the next stage has sent. The last stage has both at once: a microbatch goes
back as soon as it has come through. So a stage holds the inputs of 2 S - 3 microbatches, and what the derivative of one
of them needs, however many there are (arXiv 1806.03377, 2006.09503).

All stages run one program, so each computes the loss, and all else that stands before and after the layers. Only that
of the first and of the last stage counts.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from gspmd_lm.sharding.annotate import Spec, placed_by, placement
from gspmd_lm.sharding.op_names import scope
from gspmd_lm.sharding.pipeline import OneStage, placed, placed_of_stages, sent
from gspmd_lm.sharding.placement import Named


def one_forward_one_backward(
    loss: Callable[[Any, Any, Any], tuple[jax.Array, Any]], named: tuple[Any, Any], weights: tuple[Any, Any], batch: Any
) -> tuple[Any, Any]:
    """The gradients of the sum of all losses, and the sums of what else `loss` gives.

    loss: (trained, frozen, microbatch) -> the loss, and a tree to add up, by a model that calls `in_stages` once.
    weights: the trained ones, of which gradients are computed, and the frozen ones. named: the same, as trees of Named.
    batch: a tree of [M, ...].
    """
    place = placement()
    assert place and place.stages
    over, M, S = place.stages.split, place.stages.microbatches, place.stages.split.num_shards
    stage_S, depth = jnp.arange(S), 2 * S - 3  # stage 0 is given nothing, and stage 1 waits 2 S - 4 turns
    each = functools.partial(jax.vmap, spmd_axis_name=over.over)

    def is_cut(leaf: Named) -> bool:
        return leaf.path.partition(".")[0] == place.vocabulary.stages

    def apart(leaf: Named, w: jax.Array) -> jax.Array:
        """[S, ...]: the layers of each stage, or a copy for each stage."""
        w_S = w.reshape(S, -1, *w.shape[1:]) if is_cut(leaf) else jnp.broadcast_to(w, (S, *w.shape))
        return each(functools.partial(placed, spec=Spec(leaf.path, leaf.axes, "weights")))(w_S)

    def together(leaf: Named, dw_S: jax.Array, w: jax.Array) -> jax.Array:
        if not is_cut(leaf):
            with scope("of", leaf.path):
                dw_S = place.total(dw_S, over, Spec(leaf.path, leaf.axes, "optimizer"))
        return dw_S.reshape(w.shape).astype(w.dtype)

    def of_leaves(function: Callable[..., jax.Array], named: Any, *trees: Any) -> Any:
        return jax.tree.map(function, named, *trees, is_leaf=lambda leaf: isinstance(leaf, Named))

    @each
    def computed(trained: Any, given: Any, frozen: Any, number: jax.Array, microbatch: jax.Array):
        own = jax.tree.map(lambda x: x[jnp.clip(microbatch, 0, M - 1)], batch)
        with OneStage(number, S, given).alone() as stage:
            of_loss, more = loss(trained, frozen, own)
        return (stage.passed, of_loss), more

    def of_stages(chosen_S: jax.Array, tree: Any) -> Any:
        """A tree of [S, ...] of the chosen stages; zeros of the others."""
        return jax.vmap(lambda chosen, tree: jax.tree.map(lambda x: jnp.where(chosen, x, 0), tree))(chosen_S, tree)

    def to_neighbour(step: int, given: Any) -> Any:
        return sent(over, step, given[0]), *jax.tree.map(lambda x: jnp.roll(x, step, 0), given[1:])

    def turn(carried: Any, t: jax.Array):
        given, back, held, gradients, total = carried
        first_S, second_S = t - stage_S, t - 2 * (S - 1) + stage_S  # the microbatches that stages compute, one by one
        held = jax.tree.map(lambda all_, x: jax.lax.dynamic_update_index_in_dim(all_, x, t % depth, 1), held, given)
        with jax.named_scope("jvp"):  # as autodiff calls operations of the forward pass
            (passed, _), _ = computed(trained, given, frozen, stage_S, first_S)
            passed = to_neighbour(1, passed)

        begun_S = (second_S + stage_S) % depth  # the turn in which a stage was given its second microbatch
        given = jax.tree.map(lambda x: jax.vmap(lambda x, turn: x[turn])(x, begun_S), held)
        run = lambda trained, given: computed(trained, given, frozen, stage_S, second_S)  # noqa: E731
        (_, of_loss), derivative, more = jax.vjp(run, trained, given, has_aux=True)
        last_S = stage_S == S - 1
        ends_S = last_S & (second_S >= 0) & (second_S < M)
        of_weights, back = derivative((of_stages(~last_S, back), ends_S.astype(of_loss.dtype)))
        with jax.named_scope("transpose"):
            back = to_neighbour(-1, back)
        gradients, total = jax.tree.map(jnp.add, (gradients, total), (of_weights, of_stages(ends_S, more)))
        return (passed, back, held, gradients, total), None

    with placed_by(place.of_a_stage):
        trained, frozen = (of_leaves(apart, *pair) for pair in zip(named, weights, strict=True))
        (passed, _), more = jax.eval_shape(computed, trained, None, frozen, stage_S, stage_S)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (passed, passed, more))
        held = jax.tree.map(lambda x: jnp.zeros((S, depth, *x.shape[1:]), x.dtype), passed)
        held = placed_of_stages(over, held[0]), *held[1:]
        sums = jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), trained)
        begun = *zeros[:2], held, sums, zeros[2]
        (*_, gradients, total), _ = jax.lax.scan(turn, begun, jnp.arange(M + 2 * (S - 1)))
    return of_leaves(together, named[0], gradients, weights[0]), jax.tree.map(lambda x: x.sum(0), total)
