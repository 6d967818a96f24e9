"""The one jitted step: train, eval, explain and the benchmarks all build it here."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from einops import rearrange

from gspmd_lm import mesh as meshes
from gspmd_lm.arrays import Arrays
from gspmd_lm.config import Config
from gspmd_lm.model import lora
from gspmd_lm.model.loss import Sums, losses
from gspmd_lm.model.transformer import decode
from gspmd_lm.placement import MeshPlacement, Named
from gspmd_lm.placing import Spec, Split, scope
from gspmd_lm.program import Program, placed
from gspmd_lm.rules import Rules
from gspmd_lm.train import optimizer
from gspmd_lm.train.state import State, abstract_batch, initial

Batch = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Step(Program):
    """The functions of a config under rules on a mesh, ready to be jitted, with the placement of what they take."""

    @functools.cached_property
    def of_a_replica(self) -> MeshPlacement:
        """The placement of what one replica of the weights computes; the others are a batch dimension of it."""
        return MeshPlacement(self.rules.of_a_replica, self.mesh)

    @functools.cached_property
    def state_shardings(self) -> State:
        """Where each array of the state lives between steps."""
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
        return placed(shapes, self.state_shardings)

    @functools.cached_property
    def abstract_batch(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The shapes and shardings of a global batch."""
        shapes = abstract_batch(self.config, self.config.data.batch)
        return {
            name: placed(like, self.placement.sharding("rules", "tokens", ("batch", "seq")[: like.ndim], like.shape))
            for name, like in shapes.items()
        }

    @functools.cached_property
    def batch_shardings(self) -> dict[str, Any]:
        """Where each array of a batch lives."""
        return {name: like.sharding for name, like in self.abstract_batch.items()}

    @property
    def held(self) -> dict[str, Any]:
        """What a device holds between steps: trees of shapes and shardings, by what they are for."""
        state = self.abstract_state
        return {"weights": state.params, "optimizer": state.optimizer, "batch": self.abstract_batch}

    def lower_init(self) -> jax.stages.Lowered:
        """() -> State at step 0; the same values wherever they are placed."""
        return jax.jit(self._init, out_shardings=self.state_shardings).lower()

    def lower_init_from(self) -> jax.stages.Lowered:
        """(weights) -> State at step 0 with those weights, which are used up; adapters are drawn as by `lower_init`."""
        jitted = jax.jit(self._init_from, out_shardings=self.state_shardings, donate_argnums=0)
        return jitted.lower(lora.weights(self.abstract_state.params))

    def lower_train(self) -> jax.stages.Lowered:
        """(State, batch) -> (State, metrics); the state given is used up."""
        jitted = jax.jit(self._train, out_shardings=(self.state_shardings, None), donate_argnums=0)
        return jitted.trace(self.abstract_state, self.abstract_batch).lower()

    def lower_evaluate(self) -> jax.stages.Lowered:
        """(params, batch) -> sums over the batch's target tokens, nothing dropped."""
        return jax.jit(self._evaluate).trace(self.abstract_state.params, self.abstract_batch).lower()

    def _init(self) -> State:
        return self._init_from({})

    def _init_from(self, weights: Any) -> State:
        model, seed, zero = self.config.model, self.config.train.seed, jnp.zeros((), jnp.int32)
        params = jax.tree.map(lambda box: box.unbox(), initial(model, jax.random.key(seed)), is_leaf=_is_boxed)
        params = lora.joined(params, weights)
        _, trained = lora.split(params, model)
        return State(zero, params, self.arrays.transform.init(trained), jax.random.key(seed + 1), zero, zero)

    def _sums(self, params: Any, batch: Batch, dropout_key: jax.Array | None) -> Sums:
        model = self.config.model
        x_BTD, table, bias = decode(model, params, batch, dropout_key)
        return losses(x_BTD, table, bias, batch["targets"], model)

    def _train(self, state: State, batch: Batch) -> tuple[State, dict[str, jax.Array]]:
        with scope("of", "loss"):
            targets = jnp.maximum((batch["targets"] >= 0).sum(dtype=jnp.float32), 1)
        frozen, trained = lora.split(state.params, self.config.model)
        sums, gradients = self._gradients(state, frozen, trained, batch, targets)
        with scope("of", "gradient_norm"):
            norm = optax.tree.norm(gradients)
        finite = jnp.isfinite(sums.loss) & jnp.isfinite(norm)
        # The update runs where the optimizer's state lives; only its result goes back to where weights rest.
        params = self._place(trained)
        with scope("of", "update"):
            updates, new_optimizer = self.arrays.transform.update(gradients, state.optimizer, params)
            new_params = optax.apply_updates(params, updates)
        keep = lambda new, old: jnp.where(finite, new, old)  # noqa: E731
        skipped = 1 - finite.astype(jnp.int32)
        new_state = State(
            step=state.step + 1,
            params=lora.joined(frozen, jax.tree.map(keep, new_params, params)),
            optimizer=jax.tree.map(keep, new_optimizer, state.optimizer),
            key=state.key,
            skipped=state.skipped + skipped,
            skipped_in_a_row=(state.skipped_in_a_row + 1) * skipped,
        )
        with scope("of", "weight_norm"):
            weight_norm = optax.tree.norm(params)
        rate = optimizer.schedule(self.config.optimizer, self.config.train.steps)
        return new_state, {
            "loss": sums.loss / targets,
            "cross_entropy": sums.cross_entropy / targets,
            "accuracy": sums.correct / targets,
            "gradient_norm": norm,
            "weight_norm": weight_norm,
            "learning_rate": jnp.asarray(rate(state.step), jnp.float32),
            "target_tokens": targets,
            "skipped_steps": new_state.skipped,
            "skipped_in_a_row": new_state.skipped_in_a_row,
        }

    def _gradients(self, state: State, frozen: Any, trained: Any, batch: Batch, targets: jax.Array) -> tuple[Sums, Any]:
        """The sums and the gradients of loss / targets by the trained parameters.

        Over the rules' microbatches they are accumulated in float32. Where devices hold replicas of all weights, each
        adds up the gradients of its own rows, and they are summed over the replicas once, after the last microbatch.
        """
        key = jax.random.fold_in(state.key, state.step) if self.config.model.dropout else None

        def loss(trained: Any, batch: Batch) -> tuple[jax.Array, Sums]:
            sums = self._sums(lora.joined(frozen, trained), batch, key)
            return sums.loss / targets, sums

        def differentiate(batch: Batch, placement: MeshPlacement | None = None) -> tuple[Any, Sums]:
            with self.traced(placement):
                return jax.grad(loss, has_aux=True)(trained, batch)

        count = self.rules.microbatches
        if count == 1:
            gradients, sums = differentiate(batch)
            return sums, self._place(gradients)

        names = self.rules.replicas
        replicas = Split(names, math.prod(self.rules.mesh[name] for name in names))
        # A dimension of one replica would keep compilers from reduce-scattering.
        each = functools.partial(jax.vmap, spmd_axis_name=names) if names else lambda function: function
        lead = (replicas.pieces,) if names else ()

        def split(x: jax.Array) -> jax.Array:
            """[M, R, rows, ...], without R where there are no replicas."""
            # Row r goes to microbatch r % count: every device then works on rows that it already has.
            x = rearrange(x, "(row M) ... -> M row ...", M=count)
            spec = self.placement.sharding("rules", "tokens", ("", "batch", "seq")[: x.ndim], x.shape)
            x = jax.lax.with_sharding_constraint(x, spec)
            return x.reshape(count, *lead, -1, *x.shape[2:])

        one, place = each(functools.partial(differentiate, placement=self.of_a_replica)), each(self._place)

        def accumulate(carry: tuple[Any, Sums], microbatch: Batch) -> tuple[tuple[Any, Sums], None]:
            gradients, sums = one(microbatch)
            return jax.tree.map(jnp.add, carry, (place(gradients), sums)), None

        def zeros(like: Any) -> jax.Array:
            return jnp.zeros((*lead, *like.shape), jnp.float32)

        start = place(jax.tree.map(zeros, trained)), Sums(*(zeros(targets) for _ in Sums._fields))
        (gradients, sums), _ = jax.lax.scan(accumulate, start, jax.tree.map(split, batch))
        if names:
            gradients = jax.tree.map(
                lambda named, g: self._summed(g, replicas, named),
                self.arrays.named_trained, gradients, is_leaf=lambda leaf: isinstance(leaf, Named),
            )  # fmt: skip
            sums = jax.tree.map(lambda x: x.sum(0), sums)
        return sums, jax.tree.map(lambda g, p: g.astype(p.dtype), gradients, trained)

    def _summed(self, addends: jax.Array, replicas: Split, named: Named) -> jax.Array:
        """A gradient from those of the replicas, [R, ...]."""
        with scope("of", named.path), scope("sum", "tokens.batch"):
            return self.placement.total(addends, replicas, Spec(named.path, named.axes, "optimizer"))

    @functools.cached_property
    def _gradient_shardings(self) -> Any:
        """Where the trained parameters' gradients and optimizer state live."""
        return self.placement.shardings("optimizer", self.arrays.named_trained, self.arrays.trained)

    def _place(self, tree: Any) -> Any:
        """A tree shaped like the trained parameters, where gradients and optimizer state live."""
        return jax.tree.map(jax.lax.with_sharding_constraint, tree, self._gradient_shardings)

    def _evaluate(self, params: Any, batch: Batch) -> dict[str, jax.Array]:
        with self.traced():
            sums = self._sums(params, batch, None)
        targets = (batch["targets"] >= 0).sum(dtype=jnp.float32)
        return {"cross_entropy": sums.cross_entropy, "correct": sums.correct, "target_tokens": targets}


def build(config: Config, rules: Rules, arrays: Arrays, devices: Sequence[Any]) -> Step:
    """The step of `config` under `rules`, which have been checked, on `devices`: real, simulated or compile-only."""
    return Step(config, rules, arrays, meshes.build(rules, devices))


def _is_boxed(leaf: Any) -> bool:
    return hasattr(leaf, "unbox")
