"""The one jitted step: train, eval, explain and the benchmarks all build it here."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from einops import rearrange

from gspmd_lm.config import Config
from gspmd_lm.model import lora
from gspmd_lm.program.program import TaskProgram, place_shapes
from gspmd_lm.program.supported import Pass
from gspmd_lm.program.task import Task
from gspmd_lm.sharding import mesh as meshes
from gspmd_lm.sharding.annotate import Spec, Split
from gspmd_lm.sharding.op_names import LOSS, scope
from gspmd_lm.sharding.pipeline import one_forward_one_backward
from gspmd_lm.sharding.placement import MeshPlacement, Named
from gspmd_lm.sharding.replicas import replicas_of
from gspmd_lm.sharding.rules import Rules
from gspmd_lm.sharding.shapes import Arrays
from gspmd_lm.train import decoder
from gspmd_lm.train.choices import gather_choice, settle_rules
from gspmd_lm.train.state import State, attention_pass

Batch = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Step(TaskProgram):
    """The functions of a task under rules on a mesh, ready to be jitted, and where their inputs live."""

    @property
    def attention_pass(self) -> Pass:
        return attention_pass(self.config)

    @property
    def choices(self) -> list[str]:
        gather = gather_choice(self.task, self.rules, self.processor)
        return [*super().choices, *([f"gather: {gather}"] if gather else [])]

    @property
    def program_kinds(self) -> tuple[str, ...]:
        return self.rules.program_kinds

    @functools.cached_property
    def state_shardings(self) -> State:
        """The sharding of each array of the state between steps."""
        return State(
            step=self.whole,
            params=self.placement.shardings("weights", self.arrays.named_params, self.arrays.params),
            optimizer=self.placement.shardings("optimizer", self.arrays.named_optimizer, self.arrays.optimizer),
            key=self.whole,
            skipped=self.whole,
            skipped_in_a_row=self.whole,
        )

    @functools.cached_property
    def abstract_state(self) -> State:
        """The state's shapes and shardings: what a checkpoint is restored into and a program is lowered for."""
        count, key = jax.ShapeDtypeStruct((), jnp.int32), jax.eval_shape(jax.random.key, 0)
        shapes = State(count, self.arrays.params, self.arrays.optimizer, key, count, count)
        return place_shapes(shapes, self.state_shardings)

    @functools.cached_property
    def abstract_batch(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The shapes and shardings of a global batch."""
        return self.batch_of(self.task.rows)

    @functools.cached_property
    def batch_shardings(self) -> dict[str, Any]:
        """The sharding of each array of a batch."""
        return {name: like.sharding for name, like in self.abstract_batch.items()}

    @property
    def arrays_between_steps(self) -> dict[str, Any]:
        """The arrays that devices hold between steps: trees of shapes and shardings, by purpose."""
        state = self.abstract_state
        return {"weights": state.params, "optimizer": state.optimizer, "batch": self.abstract_batch}

    @property
    def arrays_within_step(self) -> dict[str, Any]:
        """The same with the gradients, which a step has all at once: it needs their norm before weights change."""
        return self.arrays_between_steps | {"gradients": place_shapes(self.arrays.trained, self._gradient_shardings)}

    def lower_init(self) -> jax.stages.Lowered:
        """() -> State at step 0, with the same values under every placement."""
        return jax.jit(self._init, out_shardings=self.state_shardings).lower()

    def lower_init_from(self) -> jax.stages.Lowered:
        """(weights) -> State at step 0 with these weights, which are donated. Adapters are drawn as by `lower_init`."""
        jitted = jax.jit(self._init_from, out_shardings=self.state_shardings, donate_argnums=0)
        return jitted.lower(lora.weights(self.abstract_state.params))

    def lower_train(self) -> jax.stages.Lowered:
        """(State, batch) -> (State, metrics). The given state is donated."""
        return self.trace_train().lower()

    def trace_train(self) -> jax.stages.Traced:
        """The train step, traced: see `lower_train`."""
        jitted = jax.jit(self._train, out_shardings=(self.state_shardings, None), donate_argnums=0)
        return jitted.trace(self.abstract_state, self.abstract_batch)

    def lower_evaluate(self) -> jax.stages.Lowered:
        """(params, batch) -> totals over the batch, without dropout."""
        return jax.jit(self.evaluate).trace(self.abstract_state.params, self.abstract_batch).lower()

    def _init(self) -> State:
        return self._init_from({})

    def _init_from(self, weights: Any) -> State:
        task, zero = self.task, jnp.zeros((), jnp.int32)
        params = nn.unbox(task.initial(jax.random.key(task.seed)))
        params = lora.join_trees(params, weights)
        _, trained = task.partition(params)
        return State(zero, params, self.arrays.transform.init(trained), jax.random.key(task.seed + 1), zero, zero)

    def _train(self, state: State, batch: Batch) -> tuple[State, dict[str, jax.Array]]:
        with scope("of", LOSS):
            count = jnp.maximum(self.task.divisor(batch), 1)
        frozen, trained = self.task.partition(state.params)
        (sums, changed), gradients = self._gradients(state, frozen, trained, batch, count)
        with scope("of", "gradient_norm"):
            norm = optax.tree.norm(gradients)
        finite = jnp.isfinite(sums.loss) & jnp.isfinite(norm)
        # The update runs where the optimizer's state lives; only its result goes back to where weights rest.
        params = self._constrain(trained)
        with scope("of", "update"):
            updates, new_optimizer = self.arrays.transform.update(gradients, state.optimizer, params)
            new_params = optax.apply_updates(params, updates)
            moved = self.task.moved(frozen, sums) if self.task.moved else lora.join_trees(frozen, changed)
        keep = lambda new, old: jnp.where(finite, new, old)  # noqa: E731
        skipped = 1 - finite.astype(jnp.int32)
        new_state = State(
            step=state.step + 1,
            params=lora.join_trees(jax.tree.map(keep, moved, frozen), jax.tree.map(keep, new_params, params)),
            optimizer=jax.tree.map(keep, new_optimizer, state.optimizer),
            key=state.key,
            skipped=state.skipped + skipped,
            skipped_in_a_row=(state.skipped_in_a_row + 1) * skipped,
        )
        with scope("of", "weight_norm"):
            weight_norm = optax.tree.norm(params)
        return new_state, {
            **self.task.means(sums, count, state.step),
            "gradient_norm": norm,
            "weight_norm": weight_norm,
            "skipped_steps": new_state.skipped,
            "skipped_in_a_row": new_state.skipped_in_a_row,
        }

    def _gradients(self, state: State, frozen: Any, trained: Any, batch: Batch, count: jax.Array) -> tuple[Any, Any]:
        """The sums with the new state, and the gradients of loss / count with respect to the trained parameters.

        Sums and gradients are accumulated in float32 over the rules' microbatches. Where devices hold replicas of
        weights, each replica adds up the gradients of its own rows. Replicas are summed once, after the last
        microbatch.
        """
        key = jax.random.fold_in(state.key, state.step) if self.task.draws else None

        def loss(trained: Any, frozen: Any, batch: Batch) -> tuple[jax.Array, Any]:
            sums, changed = self.task.sum_batch(lora.join_trees(frozen, trained), batch, key)
            return sums.loss / count, (sums, changed)

        def differentiate(batch: Batch, placement: MeshPlacement | None = None) -> tuple[Any, Any]:
            with self.trace_under(placement):
                return jax.grad(loss, has_aux=True)(trained, frozen, batch)

        microbatches, pipeline = self.rules.microbatches, self.rules.pipeline
        if pipeline and pipeline.schedule == "1f1b" and self.placement.stages:
            place = MeshPlacement(self.rules.within_stage, self.mesh)  # of all replicas
            named_frozen, named_trained = self.task.partition(self.arrays.named_params)
            pieces = {name: self._cut(name, x, pipeline.microbatches, place) for name, x in batch.items()}
            with self.trace_under():
                named = named_trained, named_frozen
                gradients, sums = one_forward_one_backward(loss, named, (trained, frozen), pieces)
            return sums, self._constrain(gradients)
        if microbatches == 1:
            gradients, sums = differentiate(batch)
            return sums, self._constrain(gradients)

        array, axes, _ = next(iter(self.task.specs().values()))
        names = self.rules.replicas
        replicas = replicas_of(self.placement, names, self.rules.split("rules", array, axes[0]))
        each, lead = replicas.each, (replicas.split.num_shards,) if names else ()

        def cut(name: str, x: jax.Array) -> jax.Array:
            """[M, R, rows, ...], without R where there are no replicas."""
            x = replicas.apart(self._cut(name, x, microbatches, self.placement), "M")
            return jnp.swapaxes(x, 0, 1) if names else x

        differentiate = functools.partial(differentiate, placement=self.placement.within_replica)
        one, constrain = each(differentiate), each(self._constrain)

        def accumulate(carry: tuple[Any, Any], microbatch: Batch) -> tuple[tuple[Any, Any], None]:
            gradients, sums = one(microbatch)
            return jax.tree.map(jnp.add, carry, (constrain(gradients), sums)), None

        def zeros(like: Any) -> jax.Array:
            return jnp.zeros((*lead, *like.shape), jnp.float32)

        rows = self.task.batch(self.task.rows // microbatches)
        sums = jax.eval_shape(self.task.sum_batch, self.arrays.params, rows, None)
        start = constrain(jax.tree.map(zeros, trained)), jax.tree.map(zeros, sums)
        pieces = {name: cut(name, x) for name, x in sorted(batch.items())}
        (gradients, sums), _ = jax.lax.scan(accumulate, start, pieces)
        if names:
            gradients = jax.tree.map(
                lambda named, g: self._sum_replicas(g, replicas.split, named),
                self.arrays.named_trained,
                gradients,
            )
            sums = jax.tree.map(lambda x: x.sum(0), sums)
        return sums, jax.tree.map(lambda g, p: g.astype(p.dtype), gradients, trained)

    def _cut(self, name: str, x: jax.Array, microbatches: int, placement: MeshPlacement) -> jax.Array:
        """An array of the batch in microbatches, [M, rows, ...]."""
        # Row r goes to microbatch r % M: every device then works on rows that it already has.
        x = rearrange(x, "(row M) ... -> M row ...", M=microbatches)
        array, axes, _ = self.task.specs()[name]
        return jax.lax.with_sharding_constraint(x, placement.sharding("rules", array, ("", *axes), x.shape))

    def _sum_replicas(self, addends: jax.Array, replicas: Split, named: Named) -> jax.Array:
        """The gradient of a parameter from the gradients of its replicas, [R, ...]."""
        first = next(iter(self.task.specs().values()))
        with scope("of", named.path), scope("sum", f"{first.array}.{first.axes[0]}"):
            return self.placement.total(addends, replicas, Spec(named.path, named.axes, "optimizer"))

    @functools.cached_property
    def _gradient_shardings(self) -> Any:
        return self.placement.shardings("optimizer", self.arrays.named_trained, self.arrays.trained)

    def _constrain(self, tree: Any) -> Any:
        """A tree shaped like the trained parameters, placed where gradients and optimizer state live."""
        return jax.tree.map(jax.lax.with_sharding_constraint, tree, self._gradient_shardings)


def build_step(config: Config | Task, rules: Rules, arrays: Arrays, devices: Sequence[Any]) -> Step:
    """The step of a config or task under `rules`, which have been checked, on `devices`: real, simulated or
    compile-only."""
    task, mesh = decoder.task(config), meshes.build(rules, devices)
    return Step(settle_rules(task, rules, meshes.processor(devices[0])), arrays, mesh, task)
