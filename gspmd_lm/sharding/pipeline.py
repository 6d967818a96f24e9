"""Layers in stages: microbatches travel through the devices that hold the layers (arXiv 1811.06965).

All stages compute in every turn, as a dimension of a batch that is split over them. In turn t, stage s computes what
stage 0 has computed in turn t - s. Layers are cut in S * R parts. Stage s has the parts s, S + s, 2 S + s and so on.
S microbatches at a time go R times through all stages, before the next S of them begin (arXiv 2104.04473). A row that
ends a round is in stage 0 in the very next turn, so nothing waits between rounds.

Each stage sends to its neighbours only. Results go to the next stage, and those of the last one to stage 0. The rows
that wait to enter stage 0, and those that have left the last stage, share one buffer that is split over the stages: a
row of the batch waits where the rules place it. When stage 0 takes a row, each stage sends one of its rows to the stage
before, and the last stage gets a finished row in its place.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange

from gspmd_lm.sharding.annotate import Placement, Spec, Split, Stages, per_device, placed_by, placement, remat, split
from gspmd_lm.sharding.of_flax import Box, is_box
from gspmd_lm.sharding.op_names import scope
from gspmd_lm.sharding.partial_sums import TOKENS as INPUT
from gspmd_lm.sharding.partial_sums import Sum, copy_to_shards, share_box, token_sharding
from gspmd_lm.sharding.permutes import layers_of_stages, permute
from gspmd_lm.sharding.placement import Named
from gspmd_lm.sharding.replicas import Replicas, replicas_of

RESIDUAL = Spec("residual", ("batch", "seq", "embed"))
TOKENS = Spec("tokens", ("batch", "seq"))
BUBBLES: float | None = None  # the output of a stage in a turn without a row of the batch; a test sets it

# (weights, [layers, ...]; the number of the part; x_BTD; a tree of [B, T]) -> x_BTD, and of its layers a tree of
# [layers, ...] that is added up over the rows, and one of [layers, B].
Part = Callable[[Any, jax.Array, jax.Array, Any], tuple[jax.Array, Any, Any]]


def parts(stack: str) -> int:
    """The number of parts into which a pipeline cuts the stack of layers of that name; 1 without a pipeline."""
    place, one = placement(), _one_stage.get()
    if place.vocabulary.stages != stack:
        return 1
    stages = place.stages
    return one.of if one else stages.split.num_shards * stages.repeats if stages else 1


def in_stages(part: Part, weights: Any, x_BTD: jax.Array, of_rows: Any) -> tuple[jax.Array, Any, Any]:
    """`x_BTD` after all parts, and the trees of the results of all layers.

    weights: those of all layers, [L, ...], in boxes as `of_flax.readable` makes them. of_rows: what layers read of each
    row besides, a tree of [B, T].
    """
    if one := _one_stage.get():
        return one.compute(part, weights, x_BTD, of_rows)
    place = placement()
    assert place.stages
    over, M, R, once, *_ = place.stages
    replicas = _replicas()
    S, batch = over.num_shards, split(RESIDUAL.array, "batch").over
    outer = next((batch[:at] for at, name in enumerate(batch) if name in over.over), batch)
    sizes = {"r": place.over(outer).num_shards, "S": S, "J": M // S}

    def by_stage(x: jax.Array) -> jax.Array:
        """[S, J, rows, ...]: no row moves where stages split the batch."""
        return rearrange(x, "(r S b J) ... -> S J (r b) ...", **sizes)

    with placed_by(place.within_stage):
        tokens = token_sharding(x_BTD, "BTD").sum

    def place_layers(box: Box) -> Box:
        w = layers_of_stages(over, R, Spec(box.path, box.axes), box.value)
        is_matrix = len(box.axes) > 2
        box = box.replace(value=w)
        return share_box(box, tokens, x_BTD.dtype, over) if once and is_matrix else box

    def copy_to_replicas(box: Box) -> Box:
        """The weight, once for each replica. The gradients of all turns are added up before replicas are summed."""
        spec = Spec(box.path, box.axes, "weights")
        return box.replace(
            value=copy_to_shards(_sum(replicas, box.path), spec._replace(table="optimizer"), spec, box.value)
        )

    if replicas.split.over:
        weights = jax.tree.map(copy_to_replicas, weights, is_leaf=is_box)
    weights = replicas.each(lambda weights: jax.tree.map(place_layers, weights, is_leaf=is_box))(weights)
    of_rows = jax.tree.map(lambda x: replicas.apart(by_stage(x).reshape(M, -1, *x.shape[1:]), "M"), of_rows)
    run = _under(place.within_mapped_stages, replicas.each(functools.partial(_run, part, place.stages)))
    x, sums, rows = run(weights, replicas.apart(by_stage(x_BTD), "S J"), of_rows)
    x, rows = replicas.together(x, "S J"), jax.tree.map(lambda x: replicas.together(x, "R S M k"), rows)
    sums = jax.tree.map(lambda x: x.sum(0), sums) if replicas.split.over else sums
    rows = jax.tree.map(lambda x: rearrange(x, "R S (s J) k (r b) -> (R S k) (r s b J)", **{**sizes, "s": S}), rows)
    sums = jax.tree.map(lambda x: rearrange(x.sum(2), "R S k ... -> (R S k) ..."), sums)
    return rearrange(x, "S J (r b) ... -> (r S b J) ...", **sizes), sums, rows


def _replicas() -> Replicas:
    """The replicas of the weights of a stage, each of which has its own rows."""
    place = placement()
    assert place.stages
    batch = tuple(name for name in split(RESIDUAL.array, "batch").over if name not in place.stages.split.over)
    return replicas_of(place, place.stages.replicas, batch)


def _sum(replicas: Replicas, path: str) -> Sum:
    """The sum of the gradients of a weight over its replicas."""
    return Sum(replicas.split, (f"{INPUT}.batch",), (path,))


def _run(part: Part, stages: Stages, weights: Any, x_SJBTD: jax.Array, of_rows: Any) -> tuple[jax.Array, Any, Any]:
    """`x_SJBTD` after all parts, and what layers give, [R, S, M, k, ...].

    weights: [S, R, k, ...]. of_rows: [M, B, T], on each stage.
    """
    over, M, R, once, keep, _ = stages
    S, J = over.num_shards, M // over.num_shards
    stage_S = jnp.arange(S)
    each = functools.partial(jax.vmap, spmd_axis_name=over.over)

    def exchange(t: Any, state: jax.Array, waiting: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Stage 0 takes a row that waits, unless one comes round to it, and puts there what the last stage has sent."""
        slot, takes = (t // (S * R) * S + t % S) % J, t % (S * R) < S
        fresh = jax.lax.dynamic_index_in_dim(waiting, slot, 1, keepdims=False)
        finished: Any = send(over, -1, _where(stage_S == 0, state, fresh))
        finished = finished if R == 1 else jnp.where(takes, finished, fresh)
        waiting = jax.lax.dynamic_update_index_in_dim(waiting, finished, slot, 1)
        return _where((stage_S == 0) & takes, fresh, state), waiting

    @each
    def compute_stage(weights: Any, repeat: jax.Array, stage: jax.Array, microbatch: jax.Array, x_BTD: jax.Array):
        row_arrays = jax.tree.map(lambda x: placement().constrain(x[microbatch], TOKENS), of_rows)
        weights = jax.tree.map(lambda w: w[0] if R == 1 else w[repeat], weights)
        weights = jax.tree.map(_cast_slot, weights, is_leaf=is_box)
        return part(weights, repeat * S + stage, placement().constrain(x_BTD, RESIDUAL), row_arrays)

    policy = remat()
    if keep == "stage":
        compute_stage = jax.checkpoint(compute_stage, prevent_cse=False)
    elif policy and (R > 1 or not once):
        # Else the weights of a round would be kept, for each turn, or those that the first turn gathers, for all turns.
        # Layers keep their inputs, as without this.
        inputs = jax.checkpoint_policies.save_only_these_names("layer_input")
        kept = lambda *given, **named: inputs(*given, **named) or policy(*given, **named)  # noqa: E731
        compute_stage = jax.checkpoint(compute_stage, policy=kept, prevent_cse=False)

    def turn(carried: tuple[jax.Array, jax.Array], t: jax.Array):
        state, waiting = exchange(t, *carried)
        busy_S = (t >= stage_S) & (t < stage_S + R * M)
        own_S = jnp.clip(t - stage_S, 0, R * M - 1)
        repeat_S, microbatch_S = own_S % (S * R) // S, own_S // (S * R) * S + own_S % S
        # A stage without a row computes with one that waited there at first: what it computes is finite.
        state = _where(busy_S, state, spare)
        state, *of_layers = compute_stage(weights, repeat_S, stage_S, microbatch_S, state)
        state = state if BUBBLES is None else _where(busy_S, state, jnp.full_like(state, BUBBLES))
        return (send(over, 1, state), waiting), of_layers

    waiting = constrain_stages(over, x_SJBTD)
    of_rows = jax.tree.map(lambda x: placement().constrain(x, TOKENS._replace(axes=("", *TOKENS.axes))), of_rows)
    spare = jax.lax.stop_gradient(waiting[:, 0])
    turns = R * M + S - 1
    (state, waiting), of_layers = jax.lax.scan(turn, (spare, waiting), jnp.arange(turns))
    _, waiting = exchange(turns, state, waiting)

    def collect_microbatches(x: jax.Array) -> jax.Array:
        """[R, S, M, ...] of what each stage gave in all turns, of which it was busy in those from its number on."""
        own = jax.vmap(lambda x, stage: jax.lax.dynamic_slice_in_dim(x, stage, R * M), in_axes=(1, 0))(x, stage_S)
        return rearrange(own, "S (g R i) ... -> R S (g i) ...", R=R, i=S)

    return jnp.roll(waiting, -(S % J), axis=1), *jax.tree.map(collect_microbatches, of_layers)


@jax.custom_vjp
def _where(chosen_S: jax.Array, x_SBTD: jax.Array, y_SBTD: jax.Array) -> jax.Array:
    """`x_SBTD` for the chosen stages, else `y_SBTD`. Autodiff would keep the mask of every number in every turn."""
    return jnp.where(chosen_S[:, None, None, None], x_SBTD, y_SBTD)


_where.defvjp(
    lambda chosen_S, x, y: (_where(chosen_S, x, y), chosen_S),
    lambda chosen_S, d: (None, _where(chosen_S, d, jnp.zeros_like(d)), _where(chosen_S, jnp.zeros_like(d), d)),
)


def constrain_stages(over: Split, x_SJBTD: jax.Array) -> jax.Array:
    """The rows of several microbatches in each stage, placed as those of one of them."""
    spec = RESIDUAL._replace(axes=("", *RESIDUAL.axes))
    return jax.vmap(functools.partial(placement().constrain, spec=spec), spmd_axis_name=over.over)(x_SJBTD)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def send(over: Split, step: int, x_SBTD: jax.Array) -> jax.Array:
    """Each stage gets the rows of the stage that is `step` before it. Autodiff would sum over devices of a stage."""
    place = over.over, *(split(RESIDUAL.array, axis).over for axis in RESIDUAL.axes)
    to = {stage: (stage + step) % over.num_shards for stage in range(over.num_shards)}
    with scope("rules", RESIDUAL.array):
        return per_device(lambda x: (permute(x, over, to),), [place], [place])(x_SBTD)[0]


send.defvjp(lambda over, step, x: (send(over, step, x), None), lambda over, step, _, dx: (send(over, -step, dx),))


def _under(place: Placement, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` under another placement, its derivative included, which is traced when the function has returned."""

    @jax.custom_vjp
    def call(*given: Any) -> Any:
        with placed_by(place):
            return function(*given)

    def forward(*given: Any) -> tuple[Any, Any]:
        with placed_by(place):
            return jax.vjp(function, *given)

    def backward(back: Callable[[Any], Any], gradient: Any) -> Any:
        with placed_by(place):
            return back(gradient)

    call.defvjp(forward, backward)
    return call


def _cast_slot(box: Box) -> Box:
    """The weight of a turn, whose gradients have the dtype of its matmuls before they are added to those of others."""
    if not isinstance(box.value, tuple):
        return box
    w, shared = box.value
    return box.replace(value=(w, shared._replace(slot=shared.slot.astype(shared.in_use.dtype))))


# Another schedule: a stage computes one microbatch forward and another one backward in each turn


@dataclasses.dataclass
class OneStage:
    """A stage that is traced with the rest of the model: within it, `in_stages` computes the layers of this stage."""

    number: jax.Array
    of: int  # stages
    given: Any  # what `in_stages` returns, of the layers of the stages before; None as long as its shapes are unknown
    passed: Any = None  # the same, with the layers of this stage

    @contextlib.contextmanager
    def alone(self) -> Iterator["OneStage"]:
        token = _one_stage.set(self)
        try:
            yield self
        finally:
            _one_stage.reset(token)

    def compute(self, part: Part, weights: Any, x_BTD: jax.Array, of_rows: Any) -> tuple[jax.Array, Any, Any]:
        """The results of `in_stages` for the layers up to those of this stage."""
        before = None
        if self.given:
            first = x_BTD, *jax.tree.map(jnp.zeros_like, self.given[1:])
            x_BTD, *before = jax.tree.map(lambda x, y: jnp.where(self.number == 0, x, y), first, self.given)
        x_BTD, *own = part(weights, self.number, placement().constrain(x_BTD, RESIDUAL), of_rows)
        before = before or jax.tree.map(lambda x: jnp.zeros((self.of * len(x), *x.shape[1:]), x.dtype), own)
        put = lambda all_, x: jax.lax.dynamic_update_slice_in_dim(all_, x, self.number * len(x), 0)  # noqa: E731
        self.passed = x_BTD, *jax.tree.map(put, before, own)
        return self.passed


_one_stage: ContextVar[OneStage | None] = ContextVar("one_stage", default=None)


def one_forward_one_backward(
    loss: Callable[[Any, Any, Any], tuple[jax.Array, Any]], named: tuple[Any, Any], weights: tuple[Any, Any], batch: Any
) -> tuple[Any, Any]:
    """The gradients of the sum of all losses, and the sums of what else `loss` gives.

    A stage computes one microbatch forward and another one backward in each turn, known as 1F1B. In turn t, stage s
    computes microbatch t - s, as in `in_stages`. Then it computes microbatch t - 2 (S - 1) + s once more, and its
    derivative, with the gradient that the next stage has sent. The last stage has both at once: a microbatch goes back
    as soon as it has come through. So a stage holds the inputs of 2 S - 3 microbatches, and what the derivative of one
    of them needs, however many there are (arXiv 1806.03377, 2006.09503).

    All stages run one program, so each computes the loss, and all else that stands before and after the layers. Only
    that of the first and of the last stage counts.

    loss: (trained, frozen, microbatch) -> the loss, and a tree to add up, by a model that calls `in_stages` once.
    weights: the trained ones, of which gradients are computed, and the frozen ones. named: the same, as trees of Named.
    batch: a tree of [M, ...].
    """
    place = placement()
    assert place.stages
    over, S, replicas = place.stages.split, place.stages.split.num_shards, _replicas()
    each = functools.partial(jax.vmap, spmd_axis_name=over.over)

    def is_cut(leaf: Named) -> bool:
        return leaf.path.partition(".")[0] == place.vocabulary.stages

    def apart(leaf: Named, w: jax.Array) -> jax.Array:
        """[S, ...]: the layers of each stage, or a copy for each stage."""
        w_S = w.reshape(S, -1, *w.shape[1:]) if is_cut(leaf) else jnp.broadcast_to(w, (S, *w.shape))
        return each(functools.partial(placement().constrain, spec=Spec(leaf.path, leaf.axes, "weights")))(w_S)

    def together(leaf: Named, dw_S: jax.Array, w: jax.Array) -> jax.Array:
        """The gradient of a weight from those of the stages, [S, ...] or [R, S, ...] where there are replicas."""
        names = (*replicas.split.over, *(() if is_cut(leaf) else over.over))
        if names:
            addends, spec = dw_S.reshape(-1, *w.shape), Spec(leaf.path, leaf.axes, "optimizer")
            dw_S = _sum(replicas_of(place, names, ()), leaf.path).reduce(addends, spec)
        return dw_S.reshape(w.shape).astype(w.dtype)

    with placed_by(place.within_stage):
        trained, frozen = (jax.tree.map(apart, *pair) for pair in zip(named, weights, strict=True))
        pieces = jax.tree.map(lambda x: replicas.apart(x, "M"), batch)
        added_up = functools.partial(_one_by_one, loss, place.stages, trained, frozen)
        zero = jnp.zeros((replicas.split.num_shards,) if replicas.split.over else ())
        gradients, total = replicas.each(added_up)(pieces, zero)
    total = jax.tree.map(lambda x: x.sum(0), total) if replicas.split.over else total
    return jax.tree.map(together, named[0], gradients, weights[0]), total


def _one_by_one(
    loss: Callable[[Any, Any, Any], tuple[jax.Array, Any]],
    stages: Stages,
    trained: Any,
    frozen: Any,
    pieces: Any,
    zero: jax.Array,
) -> tuple[Any, Any]:
    """The gradients of each stage, [S, ...], and the sums of what else `loss` gives.

    trained, frozen: the weights of each stage, [S, ...]. pieces: a tree of [M, ...]. zero: of this replica, so that
    what stages hold at first is split over the replicas as what they hold later.
    """
    over, M, S = stages.split, stages.microbatches, stages.split.num_shards
    stage_S, depth = jnp.arange(S), 2 * S - 3  # stage 0 is given nothing, and stage 1 waits 2 S - 4 turns

    @functools.partial(jax.vmap, spmd_axis_name=over.over)
    def compute_stage(trained: Any, given: Any, frozen: Any, number: jax.Array, microbatch: jax.Array):
        own = jax.tree.map(lambda x: x[jnp.clip(microbatch, 0, M - 1)], pieces)
        with OneStage(number, S, given).alone() as stage:
            of_loss, more = loss(trained, frozen, own)
        return (stage.passed, of_loss), more

    def select_stages(chosen_S: jax.Array, tree: Any) -> Any:
        """A tree of [S, ...] of the chosen stages; zeros of the others."""
        return jax.vmap(lambda chosen, tree: jax.tree.map(lambda x: jnp.where(chosen, x, 0), tree))(chosen_S, tree)

    def to_neighbour(step: int, given: Any) -> Any:
        return send(over, step, given[0]), *jax.tree.map(lambda x: jnp.roll(x, step, 0), given[1:])

    def turn(carried: Any, t: jax.Array):
        given, back, held, gradients, total = carried
        first_S, second_S = t - stage_S, t - 2 * (S - 1) + stage_S  # the microbatches that stages compute, one by one
        held = jax.tree.map(lambda all_, x: jax.lax.dynamic_update_index_in_dim(all_, x, t % depth, 1), held, given)
        with jax.named_scope("jvp"):  # as autodiff calls operations of the forward pass
            (passed, _), _ = compute_stage(trained, given, frozen, stage_S, first_S)
            passed = to_neighbour(1, passed)

        begun_S = (second_S + stage_S) % depth  # the turn in which a stage was given its second microbatch
        given = jax.tree.map(lambda x: jax.vmap(lambda x, turn: x[turn])(x, begun_S), held)
        run = lambda trained, given: compute_stage(trained, given, frozen, stage_S, second_S)  # noqa: E731
        (_, of_loss), derivative, more = jax.vjp(run, trained, given, has_aux=True)
        last_S = stage_S == S - 1
        ends_S = last_S & (second_S >= 0) & (second_S < M)
        of_weights, back = derivative((select_stages(~last_S, back), ends_S.astype(of_loss.dtype)))
        with jax.named_scope("transpose"):
            back = to_neighbour(-1, back)
        gradients, total = jax.tree.map(jnp.add, (gradients, total), (of_weights, select_stages(ends_S, more)))
        return (passed, back, held, gradients, total), None

    (passed, _), more = jax.eval_shape(compute_stage, trained, None, frozen, stage_S, stage_S)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (passed, passed, more))
    held = jax.tree.map(lambda x: jnp.zeros((S, depth, *x.shape[1:]), x.dtype) + zero.astype(x.dtype), passed)
    held = constrain_stages(over, held[0]), *held[1:]
    sums = jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), trained)
    begun = *zeros[:2], held, sums, zeros[2]
    (*_, gradients, total), _ = jax.lax.scan(turn, begun, jnp.arange(M + 2 * (S - 1)))
    return gradients, jax.tree.map(lambda x: x.sum(0), total)
