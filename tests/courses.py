"""Short trainings of small models, which tests of layouts compare."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax


@dataclasses.dataclass(frozen=True)
class Course:
    """Some steps on one batch, and what came of them, on the host."""

    program: jax.stages.Compiled
    before: Any  # the parameters
    after: Any
    metrics: list[dict[str, float]]  # of each step
    gradients: Any  # of the first step, times 1 - b1; as they are only if nothing is clipped. Of adamw alone

    @property
    def losses(self) -> list[float]:
        return [values["loss"] for values in self.metrics]


def agree(found: Course, wanted: Course) -> None:
    """Fails unless two courses have the same losses and gradients, up to the rounding of float32."""
    np.testing.assert_allclose(found.losses, wanted.losses, rtol=0, atol=1e-5)
    for got, want in zip(jax.tree.leaves(found.gradients), jax.tree.leaves(wanted.gradients), strict=True):
        assert np.linalg.norm(want) > 0 and np.linalg.norm(got - want) <= 1e-5 * np.linalg.norm(want)


def once(built: Callable[..., Any], batch_of: Callable[..., Any]) -> Callable[..., Course]:
    """A function that trains a config under rules for some steps. What it was asked before, it does not run again.

    All layouts begin with the state that one device draws, or with `start(step)`. What each draws itself is compared in
    train/test_constraints.py.
    """
    starts, found = {}, {}

    def drawn(step: Any) -> Any:
        config = step.config
        if config not in starts:
            starts[config] = jax.device_get(built(config, "single").lower_init().compile()())
        return starts[config]

    def run(config: Any, rules: Any, steps: int = 2, start: Callable[..., Any] = drawn, **changes: Any) -> Course:
        step = built(config, rules, **changes)
        key = config, repr(step.rules.facts()), steps, start
        if key not in found:
            program, batch, metrics, gradients = step.lower_train().compile(), batch_of(step), [], None
            given = start(step)
            state = jax.device_put(given, step.state_shardings, may_alias=False)  # a step uses up what it is given
            for _ in range(steps):
                state, values = program(state, batch)
                metrics.append({name: float(value) for name, value in values.items()})
                if gradients is None and config.optimizer.name == "adamw":
                    gradients = jax.device_get(optax.tree.get(state.optimizer, "mu"))
            found[key] = Course(program, given.params, jax.device_get(state.params), metrics, gradients)
        return found[key]

    return run
