"""The traces of a model under many rules files: made once for all rules that the model cannot tell apart."""

import dataclasses

from gspmd_lm.config import Config
from gspmd_lm.foresight.traced import Traced
from gspmd_lm.model.task import Task
from gspmd_lm.plan.work import Work
from gspmd_lm.sharding import placement
from gspmd_lm.sharding.placement import Recorder
from gspmd_lm.sharding.rules import Problem, Rules
from gspmd_lm.sharding.shapes import pairs
from gspmd_lm.train import decoder, state


@dataclasses.dataclass(frozen=True, eq=False)
class Trace:
    """One forward pass of a microbatch, as it was recorded."""

    recorded: Recorder
    traced: Traced
    trained: frozenset[str]
    number: int
    _works: dict[bool, Work] = dataclasses.field(default_factory=dict)

    def work(self, fused: bool) -> Work:
        """Its operations. `fused`: attention is a kernel of its own."""
        if fused not in self._works:
            self._works[fused] = Work(self.traced, self.trained, fused)
        return self._works[fused]


class Traces:
    """The traces of a config or task. One depends on the microbatches, and on which splits the model finds equal."""

    def __init__(self, config: Config | Task):
        self.config, self.task = config, decoder.task(config)
        self.arrays = state.arrays(config)
        self.trained = frozenset(leaf.path for leaf, _ in pairs(self.arrays.named_trained, self.arrays.trained))
        self._compared: set[tuple[str, str]] = set()
        self._known: dict[tuple, Trace] = {}

    def of(self, rules: Rules) -> Trace:
        """The trace of filled `rules`, whose microbatches divide the batch."""
        key = rules.microbatches, self._pattern(rules)
        if key not in self._known:
            recorded = state.recorded(self.config, self.arrays, rules.microbatches, rules)
            self._compared |= recorded.compared
            key = rules.microbatches, self._pattern(rules)  # of all that it compares
            trace = Trace(recorded, Traced.of(recorded, self.arrays), self.trained, len(self._known))
            self._known[key] = trace
        return self._known[key]

    def _pattern(self, rules: Rules) -> tuple[int, ...]:
        """Which of the splits that the model compares are equal, and which split nothing."""
        found = [(), *(rules.split("rules", array, axis) for array, axis in sorted(self._compared))]
        return tuple(map(found.index, found))

    def problems(self, rules: Rules, platform: str) -> list[Problem]:
        """What is wrong with filled `rules`, warnings left out: what `state.arrays_and_warnings` would raise.

        The check of a file reads what is recorded under its own rules. Here it reads a trace that others share.
        """
        if self.task.rows % rules.microbatches:
            return [Problem("microbatches do not divide the batch", f"{rules.path}: microbatches", "")]
        trace = self.of(rules)
        params = pairs(self.arrays.named_params, self.arrays.params)
        optimizer = pairs(self.arrays.named_optimizer, self.arrays.optimizer)
        noted = self._noted(trace, rules)
        found = placement.problems(rules, params, noted, optimizer)
        if isinstance(self.config, Config):
            found += state.config_problems(self.config, rules, platform)
        return [problem for problem in found if not problem.warning]

    def _noted(self, trace: Trace, rules: Rules) -> Recorder:
        """What would have been recorded under `rules`."""
        found = Recorder(rules)
        found.axes, found.arrays = trace.recorded.axes, trace.recorded.arrays
        named = {(node.placed, node.shape) for node in trace.traced.activations if node.placed}
        rows = self.task.rows // rules.microbatches
        inputs = self.task.batch(rows)
        named |= {(spec, inputs[name].shape) for name, spec in self.task.specs().items()}
        for (array, axes, table), shape in named:
            found.problems += rules.resolve(table, array, axes, shape)[1]
        return found
