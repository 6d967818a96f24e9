"""Short trainings of small models, which tests of layouts compare."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.traverse_util import flatten_dict, unflatten_dict

from gspmd_lm.config import ModelConfig
from gspmd_lm.model.families import init
from gspmd_lm.train.state import State

MOST = 24


@dataclasses.dataclass(frozen=True)
class Course:
    """Some steps on one batch, and what came of them, on the host. Of none, the loss and the gradients."""

    step: Any
    traced: jax.stages.Traced
    program: jax.stages.Compiled
    before: Any  # the parameters
    after: Any
    metrics: list[dict[str, float]]  # of each step; of none, those of the first one that depend on no update
    gradients: Any  # of the first step; of some steps, as they are only if nothing is clipped, and of adamw alone

    @property
    def losses(self) -> list[float]:
        return [values["loss"] for values in self.metrics]


def agree(
    course: Course,
    wanted: Course,
    rtol: float = 0.0,
    atol: float = 1e-5,
    unseen: tuple[str, ...] = (),
    gradients: float = 1e-5,
) -> None:
    """Fails unless two courses have the same losses and gradients, up to the rounding of float32.

    unseen: endings of the paths of weights that no loss depends on. gradients: by which share of its norm the gradient
    of a weight may differ.
    """
    np.testing.assert_allclose(course.losses, wanted.losses, rtol=rtol, atol=atol)
    got, want = (flatten_dict(one.gradients, sep=".") for one in (course, wanted))
    assert got.keys() == want.keys()
    for name, size in ((name, np.linalg.norm(want[name])) for name in want if not name.endswith(unseen)):
        assert size > 0 and np.linalg.norm(got[name] - want[name]) < gradients * size, name


def drawn(abstract: Any) -> Any:
    """Random parameters on the host. They are nowhere 0, as if the model had learned something; scales are 1."""
    rng = np.random.default_rng(0)

    def draw(path: tuple[str, ...], x: Any) -> np.ndarray:
        values = np.ones(x.shape) if path[-1] == "scale" else 0.1 * rng.standard_normal(x.shape)
        return values.astype(x.dtype)

    return unflatten_dict({path: draw(path, x) for path, x in sorted(flatten_dict(abstract).items())})


def weights(cfg: ModelConfig) -> Any:
    """Random weights of a decoder, see `drawn`. What a model draws itself would have to be compiled."""
    return jax.device_put(drawn(nn.unbox(jax.eval_shape(lambda: init(cfg, jax.random.key(0))))))


def begun(step: Any) -> State:
    """The state at the first step, of `drawn` parameters, placed for `step`. Nothing is compiled for it."""
    zero = np.int32(0)
    moments = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), step.arrays.optimizer)
    state = State(zero, drawn(step.arrays.params), moments, jax.random.key(1), zero, zero)
    return jax.device_put(state, step.state_shardings, may_alias=False)  # a step uses up what it is given


def trace_gradients(step: Any) -> jax.stages.Traced:
    """(State, batch) -> (metrics, gradients) as a train step computes them: half of its operations are the update."""

    def computed(state: State, batch: Any) -> tuple[Any, Any]:
        count = jnp.maximum(step.task.divisor(batch), 1)
        (sums, _), gradients = step._gradients(state, *step.task.partition(state.params), batch, count)
        return step.task.means(sums, count, state.step), gradients

    return jax.jit(computed).trace(step.abstract_state, step.abstract_batch)


def once(built: Callable[..., Any], batch_of: Callable[..., Any]) -> Callable[..., Course]:
    """A function that trains a config under rules for some steps. What it was asked lately, it does not run again.

    What an update does to a weight depends on no model, so most models are compared without one. All layouts begin with
    the same weights. What each draws itself is compared in train/test_constraints.py. Of all courses, the last MOST are
    held: a process has memory maps for some 200 programs.
    """
    courses = {}

    def run(config: Any, rules: Any, steps: int = 0, **changes: Any) -> Course:
        step = built(config, rules, **changes)
        key = config, repr(step.rules.facts()), steps
        if key not in courses:
            traced = step.trace_train() if steps else trace_gradients(step)
            program, state, batch = traced.lower().compile(), begun(step), batch_of(step)
            before, found, gradients = jax.device_get(state.params), [], None
            if not steps:
                values, gradients = jax.device_get(program(state, batch))
                found.append(values)
            for _ in range(steps):
                state, values = program(state, batch)
                found.append(values)
                if gradients is None and config.optimizer.name == "adamw":
                    means, share = jax.device_get(optax.tree.get(state.optimizer, "mu")), 1 - config.optimizer.b1
                    gradients = jax.tree.map(functools.partial(np.multiply, np.float32(1 / share)), means)
            metrics = [{name: float(value) for name, value in values.items()} for values in found]
            courses[key] = Course(step, traced, program, before, jax.device_get(state.params), metrics, gradients)
        courses[key] = courses.pop(key)  # the last one
        if len(courses) > MOST:
            del courses[next(iter(courses))]
        return courses[key]

    return run
