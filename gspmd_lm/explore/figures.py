"""What a workbench shows of a layout, as plain values: worked out from shapes, in a process that has jax."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gspmd_lm.config import Config
from gspmd_lm.errors import InputError
from gspmd_lm.explore import rows
from gspmd_lm.explore.headline import headline
from gspmd_lm.explore.inputs import Inputs
from gspmd_lm.explore.subject import Subject
from gspmd_lm.explore.views import list_arrays, show_mesh
from gspmd_lm.foresight import explain
from gspmd_lm.hardware import target as targets
from gspmd_lm.hardware.target import Target
from gspmd_lm.plan.estimate import Estimate, Estimator
from gspmd_lm.plan.traces import TraceCache
from gspmd_lm.program.task import Task
from gspmd_lm.sharding import rules_file
from gspmd_lm.sharding.problems import Problem, ShardingError
from gspmd_lm.sharding.rules import Rules
from gspmd_lm.sharding.shapes import Arrays
from gspmd_lm.train import decoder, state

MOST_TASKS = 4  # configs whose traces are kept
MOST_TARGETS = 8  # whose estimators are kept


@dataclasses.dataclass(frozen=True)
class Layout:
    """A layout that has passed all checks, with its estimate."""

    task: Task
    target: Target
    rules: Rules  # filled
    arrays: Arrays
    warnings: Sequence[Problem]
    estimator: Estimator
    estimate: Estimate
    not_known: tuple[str, ...]


class Figures:
    """The figures of layouts of one subject. Traces and estimates are kept for the layouts that come next."""

    def __init__(self, subject: Subject):
        self.subject = subject
        self._traces: dict[tuple[Any, ...], TraceCache] = {}
        self._estimators: dict[tuple[Any, ...], tuple[Estimator, tuple[str, ...]]] = {}

    def parts(self, request: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The answers to a request, one after the other: problems and figures."""
        inputs = Inputs(**request["inputs"] | {"set": tuple(request["inputs"]["set"])})
        try:
            layout = self.layout(inputs)
        except InputError as error:
            yield {"problems": describe_error(error, inputs), "shown": None}
            return
        known = rows.lines(inputs.text)
        warnings = [_describe(str(one), one, inputs, known) for one in layout.warnings]
        yield {"problems": warnings, "shown": self.show(layout, known)}

    def layout(self, inputs: Inputs) -> Layout:
        """The layout of some inputs. Raises InputError for everything that is wrong with it, as `explain` does."""
        target = targets.parse(inputs.target)
        traces = self._trace_cache(inputs)
        task = traces.task
        rules = rules_file.from_text(inputs.text, inputs.path, vocabulary=task.names)
        rules = explain.settle_layout(task, rules, target)
        arrays, warnings = state.arrays_and_warnings(task, rules, target.platform)
        estimator, not_known = self._estimator(inputs, traces, target)
        return Layout(task, target, rules, arrays, warnings, estimator, estimator.estimate(rules), not_known)

    def show(self, layout: Layout, known: Mapping[str, int]) -> dict[str, Any]:
        """What is shown of a layout. known: the lines of the keys of its rules."""
        return {
            "not_known": list(layout.not_known),
            "headline": headline(layout.task, layout.target, layout.rules, layout.estimator),
            "mesh": show_mesh(layout.rules, layout.estimator),
            "arrays": list_arrays(layout.task, layout.rules, layout.arrays, known),
            "batch": layout.task.rows,
            "seq": layout.task.config.data.seq if layout.task.config else None,
        }

    def _trace_cache(self, inputs: Inputs) -> TraceCache:
        key = inputs.config, *inputs.overrides
        if key not in self._traces:
            computed = self.subject.resolve(inputs)
            assert isinstance(computed, Config | Task)
            self._traces[key] = TraceCache(decoder.task(computed))
            for old in [*self._traces][:-MOST_TASKS]:
                del self._traces[old]
        return self._traces[key]

    def _estimator(self, inputs: Inputs, traces: TraceCache, target: Target) -> tuple[Estimator, tuple[str, ...]]:
        """The estimator of a target, and what it does not know."""
        key = id(traces), target.text
        if key not in self._estimators:
            not_known: tuple[str, ...] = ()
            if target.chip is None:
                not_known = (f"times, MFU and price: {explain.NOT_ON_CPU}",)
            try:
                made = Estimator(traces.task, target, traces)
            except InputError as error:  # the links of a target are asked of its compiler
                not_known = (f"times, MFU and price: {error}",)
                made = Estimator(traces.task, dataclasses.replace(target, chip=None), traces)
            self._estimators[key] = made, not_known
            for old in [*self._estimators][:-MOST_TARGETS]:
                del self._estimators[old]
        return self._estimators[key]


def describe_error(error: InputError, inputs: Inputs) -> list[dict[str, Any]]:
    """The problems that an error tells, in its words, each at its line."""
    if isinstance(error, ShardingError) and error.causes:
        known = rows.lines(inputs.text)
        return [_describe(message, problem, inputs, known) for message, problem in error.causes]
    message, _, fix = str(error).partition("\n  fix   ")
    return [
        {
            "line": _yaml_line(message, inputs),
            "message": message,
            "fix": fix or None,
            "fix_text": False,
            "warning": False,
        }
    ]


def _yaml_line(message: str, inputs: Inputs) -> int | None:
    """The line that an error of YAML names."""
    words = message.removeprefix(f"{inputs.path}: not valid YAML").replace(",", " ").replace(":", " ").split()
    if message == f"{inputs.path}: not valid YAML" or "line" not in words or not message.startswith(inputs.path):
        return None
    numbers = [
        int(after) for before, after in zip(words, words[1:], strict=False) if before == "line" and after.isdecimal()
    ]
    return numbers[-1] if numbers else None


def _describe(message: str, problem: Problem, inputs: Inputs, known: Mapping[str, int]) -> dict[str, Any]:
    head, _, rest = message.partition("\n  fix   ")
    return {
        "line": rows.line_of(problem.row, inputs.path, known),
        "message": head,
        "fix": rest or None,
        "fix_text": False,
        "warning": problem.warning,
    }
