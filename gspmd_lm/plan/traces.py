"""The traced forward passes of a config or task, which layouts share that its model cannot tell apart."""

import dataclasses

from gspmd_lm.config import Config
from gspmd_lm.foresight.graph import DataflowGraph
from gspmd_lm.model.task import Task
from gspmd_lm.plan.operations import OpGraph
from gspmd_lm.sharding import placement
from gspmd_lm.sharding.placement import Recorder
from gspmd_lm.sharding.rules import Problem, Rules
from gspmd_lm.sharding.shapes import pairs
from gspmd_lm.train import decoder, state


@dataclasses.dataclass(frozen=True, eq=False)
class ForwardTrace:
    """One forward pass of a microbatch, as it was recorded."""

    recorder: Recorder
    graph: DataflowGraph
    trained: frozenset[str]
    number: int
    _op_graphs: dict[tuple[bool, bool, str, bool], OpGraph] = dataclasses.field(default_factory=dict)

    def op_graph(self, fused: bool, moves: bool = False, stack: str = "", within: bool = False) -> OpGraph:
        """Its ops, with a `stack` those within that stack of layers or those outside of it.

        fused: attention is a kernel of its own. moves: gathers and sorts are.
        """
        key = fused, moves, stack, within
        if key not in self._op_graphs:
            self._op_graphs[key] = OpGraph(self.graph, self.trained, *key)
        return self._op_graphs[key]


class TraceCache:
    """The traces of a config or task. They depend on the microbatches, and on which splits the model finds equal."""

    def __init__(self, config: Config | Task):
        self.task = decoder.task(config)
        self.arrays = state.arrays(self.task)
        self.trained = frozenset(leaf.path for leaf, _ in pairs(self.arrays.named_trained, self.arrays.trained))
        self._compared: set[tuple[str, str]] = set()
        self._traces: dict[tuple, ForwardTrace] = {}

    def trace(self, rules: Rules) -> ForwardTrace:
        """The trace of filled `rules`, whose microbatches divide the batch."""
        key = rules.microbatches, self._pattern(rules)
        if key not in self._traces:
            recorder = state.recorded(self.task, self.arrays, rules.microbatches, rules)
            self._compared |= recorder.compared
            key = rules.microbatches, self._pattern(rules)  # of all that it compares
            trace = ForwardTrace(
                recorder, DataflowGraph.from_recorder(recorder, self.arrays), self.trained, len(self._traces)
            )
            self._traces[key] = trace
        return self._traces[key]

    def _pattern(self, rules: Rules) -> tuple[int, ...]:
        """Which of the splits that the model compares are equal, and which split nothing."""
        splits = [(), *(rules.split("rules", array, axis) for array, axis in sorted(self._compared))]
        return tuple(map(splits.index, splits))

    def problems(self, rules: Rules, platform: str) -> list[Problem]:
        """What is wrong with filled `rules`, warnings left out: what `state.arrays_and_warnings` would raise.

        The check of a file reads what is recorded under its own rules. Here it reads a trace that others share.
        """
        if self.task.rows % rules.microbatches:
            return [Problem("microbatches do not divide the batch", f"{rules.path}: microbatches", "")]
        trace = self.trace(rules)
        params = pairs(self.arrays.named_params, self.arrays.params)
        optimizer = pairs(self.arrays.named_optimizer, self.arrays.optimizer)
        recorder = self._recorder_under(trace, rules)
        problems = placement.problems(rules, params, recorder, optimizer)
        problems += state.task_problems(self.task, rules, platform)
        return [problem for problem in problems if not problem.warning]

    def _recorder_under(self, trace: ForwardTrace, rules: Rules) -> Recorder:
        """What would have been recorded under `rules`."""
        recorder = Recorder(rules)
        recorder.axes, recorder.arrays = trace.recorder.axes, trace.recorder.arrays
        named = {(node.placed, node.shape) for node in trace.graph.activations if node.placed}
        rows = self.task.rows // rules.microbatches
        inputs = self.task.batch(rows)
        named |= {(spec, inputs[name].shape) for name, spec in self.task.specs().items()}
        for (array, axes, table), shape in named:
            recorder.problems += rules.resolve(table, array, axes, shape)[1]
        return recorder
