"""The traced forward passes of a config or task, which layouts share that its model cannot tell apart, and their parts.

An estimate prices the parts of a step apart: what stages of a pipeline compute in their turns, and all else.
"""

import dataclasses
import functools

from gspmd_lm.config import Config, ModelConfig
from gspmd_lm.foresight.graph import DataflowGraph, Node
from gspmd_lm.plan.expert_buffers import buffer_share
from gspmd_lm.plan.operations import NamedNodes, OpGraph
from gspmd_lm.program.task import Task
from gspmd_lm.sharding import placement
from gspmd_lm.sharding.placement import Recorder
from gspmd_lm.sharding.problems import Problem
from gspmd_lm.sharding.rules import Rules
from gspmd_lm.sharding.shapes import pairs
from gspmd_lm.train import decoder, state


@dataclasses.dataclass(frozen=True, eq=False)
class ForwardTrace:
    """One forward pass of a microbatch, as it was recorded."""

    recorder: Recorder
    graph: DataflowGraph
    _op_graphs: dict[tuple[bool, bool, str, bool], OpGraph] = dataclasses.field(default_factory=dict)

    def op_graph(self, fused: bool, moves: bool = False, stack: str = "", within: bool = False) -> OpGraph:
        """The ops of the pass; with a `stack`, those within that stack of layers, or those outside of it.

        fused: attention is a kernel of its own. moves: gathers and sorts are.
        """
        key = fused, moves, stack, within
        if key not in self._op_graphs:
            self._op_graphs[key] = OpGraph(self.graph, *key)
        return self._op_graphs[key]


class TraceCache:
    """The traces of a config or task.

    They depend on the microbatches, on `context`, and on which splits the model finds equal.
    """

    def __init__(self, config: Config | Task):
        self.task = decoder.task(config)
        self.arrays = state.arrays(self.task)
        self._compared: set[tuple[str, str]] = set()
        self._traces: dict[tuple, ForwardTrace] = {}

    def trace(self, rules: Rules) -> ForwardTrace:
        """The trace of filled `rules`, whose microbatches divide the batch."""
        key = rules.microbatches, rules.context, self._pattern(rules)
        if key not in self._traces:
            recorder = state.record_arrays(self.task, self.arrays, rules.microbatches, rules)
            self._compared |= recorder.compared
            key = rules.microbatches, rules.context, self._pattern(rules)  # of all that it compares
            graph = DataflowGraph.from_recorder(recorder, self.arrays)
            self._traces[key] = ForwardTrace(recorder, graph)
        return self._traces[key]

    def _pattern(self, rules: Rules) -> tuple[int, ...]:
        """Which of the splits that the model compares are equal, and which split nothing."""
        splits = [(), *(rules.split("rules", array, axis) for array, axis in sorted(self._compared))]
        return tuple(map(splits.index, splits))

    def problems(self, rules: Rules, platform: str) -> list[Problem]:
        """What is wrong with filled `rules`, warnings left out: something if `state.arrays_and_warnings` would raise.

        The check of a file reads what is recorded under its own rules. Here it reads a trace that others share, and
        none is made for rules that are refused without it.
        """
        if self.task.rows % rules.microbatches:
            return [Problem("microbatches do not divide the batch", f"{rules.path}: microbatches", "")]
        if known := [one for one in state.task_problems(self.task, rules, platform) if not one.warning]:
            return known
        params = pairs(self.arrays.named_params, self.arrays.params)
        optimizer = pairs(self.arrays.named_optimizer, self.arrays.optimizer)
        if known := [one for one in placement.weight_problems(rules, params, optimizer) if not one.warning]:
            return known
        problems = placement.problems(rules, params, self.trace(rules).recorder.under(rules), optimizer)
        return [problem for problem in problems if not problem.warning]


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """The layers of stages, or all that is outside of them. Without a pipeline, there is one part: the whole step."""

    step_rules: Rules  # filled, of the whole step
    rules: Rules  # the same; of the layers of stages, those within a stage
    trace: ForwardTrace  # of one microbatch; of the layers of stages, one of those that go through the stages
    of_stages: bool | None  # None: the whole step
    runs: float  # how often a device runs this part of the trace in a step
    kept: float  # for how many runs a device holds the saved activations at once
    again: bool = False  # whether it runs forward once more, from what a stage was given

    @property
    def graph(self) -> DataflowGraph:
        return self.trace.graph

    def op_graph(self, fused: bool, moves: bool) -> OpGraph:
        """The ops of this part. fused: attention is a kernel of its own. moves: gathers and sorts are."""
        return self.trace.op_graph(fused, moves, self.stack, bool(self.of_stages))

    @property
    def turns(self) -> int:
        """The number of turns that the stages of a pipeline have in a step."""
        return self.step_rules.microbatches * self.step_rules.turns[1]

    @functools.cached_property
    def stream(self) -> Node:
        """The residual stream, which blocks read, gathered, and to which their sums go back."""
        block_input = next(matmul.input for matmul in self.graph.matmuls if self.graph.gathered_from(matmul.input))
        return self.graph.gathered_from(block_input) or block_input

    @property
    def inputs_kept(self) -> int:
        """The turns whose inputs a stage keeps beside what its layers keep."""
        pipeline = self.step_rules.pipeline
        if not (self.of_stages and self.again and pipeline):
            return 0
        stages = self.step_rules.num_shards(self.step_rules.stages)
        return 2 * stages - 3 if pipeline.schedule == "1f1b" else self.step_rules.turns[1]

    @property
    def gathers_once(self) -> bool:
        """Whether a stage gathers its matrices once in a step, and sums their gradients once."""
        pipeline = self.step_rules.pipeline
        return bool(self.of_stages and pipeline and pipeline.gathers_once)

    @property
    def gathers_ahead(self) -> bool:
        """Whether a stage gathers its matrices once for all forward turns: jax hoists what no turn changes."""
        pipeline = self.step_rules.pipeline
        if not self.of_stages or not pipeline or self.gathers_once:
            return False
        return self.rules.remat.policy == "none" and pipeline.repeats == 1 and pipeline.schedule == "gpipe"

    @property
    def reduced_last(self) -> tuple[str, ...]:
        """The mesh axes over which gradients are summed once, after the last microbatch or the last turn."""
        step = self.step_rules
        in_turns = self.of_stages or (step.pipeline and step.pipeline.schedule == "1f1b" and step.stages)
        return step.replicas if step.microbatches > 1 or in_turns else ()

    @property
    def stack(self) -> str:
        """The layers that are cut in stages; "" where none are."""
        return "" if self.of_stages is None else self.rules.vocabulary.stages

    def has(self, path: str) -> bool:
        """Whether a weight belongs to this part."""
        return self.of_stages is None or (path.partition(".")[0] == self.stack) == self.of_stages


def parts(rules: Rules, traces: TraceCache) -> list[Part]:
    """The parts of a step under filled and checked rules. What is outside of stages comes first."""
    trace, times = traces.trace(rules), rules.microbatches
    if not rules.pipeline or not rules.stages:
        return [Part(rules, rules, trace, None, times, 1.0)]
    pipeline, turns = rules.pipeline, rules.turns[1]
    within = dataclasses.replace(rules.within_stage, microbatches=times * pipeline.microbatches)
    trace_within = traces.trace(within)
    # In a turn, a stage computes one of so many parts of the layers, whether it has rows or not.
    share = 1 / (rules.num_shards(rules.stages) * pipeline.repeats)
    kept = share if pipeline.keeps_inputs else share * turns
    outside = Part(rules, rules, trace, False, times, 1.0)
    if pipeline.schedule == "1f1b":  # what is outside of stages is computed by each of them in each turn
        in_turns = dataclasses.replace(within, microbatches=turns)
        outside = Part(rules, in_turns, trace_within, False, turns, 1.0, again=True)
    return [outside, Part(rules, within, trace_within, True, times * turns * share, kept, pipeline.keeps_inputs)]


class Shards:
    """The number of shards of each array under filled rules, and the bytes that a device has of it.

    model: None for one without experts.
    """

    def __init__(self, rules: Rules, model: ModelConfig | None = None):
        self.rules, self.model = rules, model
        self.count = functools.cache(self._count)  # in the instance, so that it goes with the rules

    def held_bytes(self, size: float, nodes: NamedNodes) -> float:
        """The bytes that one device holds of an array of `size` bytes; for rows at experts, those of the buffer."""
        return self.buffer_share(nodes) * size / self.count(nodes)

    def at_rest(self, weight: Node) -> int:
        """The shards of a weight where it rests; of one of a layer, without those of layers."""
        assert weight.placed
        spec = self.rules.resolve("weights", weight.array, weight.placed.axes, weight.shape)[0]
        return self.rules.num_shards({name for names in spec for name in names})

    def buffer_share(self, nodes: NamedNodes) -> float:
        """See `expert_buffers.buffer_share`."""
        return buffer_share(self.rules, self.model, nodes) if self.model and self.model.experts else 1.0

    def _count(self, nodes: NamedNodes) -> int:
        """The shards of an array that is split over the mesh axes of all of these nodes."""
        names: set[str] = set()
        for node in nodes:
            if node.placed:  # unlike a product of experts
                array, axes, table = node.placed
                names |= {name for split in self.rules.resolve(table, array, axes, node.shape)[0] for name in split}
        return self.rules.num_shards(names)
