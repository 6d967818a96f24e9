"""What a workbench shows of a layout, as plain values: worked out from shapes, in a process that has jax."""

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from gspmd_lm.config import Config
from gspmd_lm.errors import InputError
from gspmd_lm.explore import fixes, rows
from gspmd_lm.explore.controls import describe_names
from gspmd_lm.explore.display import describe_problem
from gspmd_lm.explore.headline import headline
from gspmd_lm.explore.inputs import SIMULATED, Inputs
from gspmd_lm.explore.layer import read_layer
from gspmd_lm.explore.steps import show_step
from gspmd_lm.explore.subject import Subject
from gspmd_lm.explore.views import list_arrays, show_mesh
from gspmd_lm.foresight import explain
from gspmd_lm.hardware import target as targets
from gspmd_lm.hardware.target import Target
from gspmd_lm.plan.estimate import Estimator
from gspmd_lm.plan.row_changes import compare_rows
from gspmd_lm.plan.traces import TraceCache
from gspmd_lm.program.task import Task
from gspmd_lm.sharding import rules_file
from gspmd_lm.sharding.problems import Problem, ShardingError
from gspmd_lm.sharding.rules import Rules
from gspmd_lm.sharding.shapes import Arrays
from gspmd_lm.show.row_changes import list_effects, name_rows
from gspmd_lm.train import decoder, state, step

MOST_TASKS = 4  # configs whose traces are kept
MOST_LAYERS = 64  # that are kept
MOST_TARGETS = 8  # whose estimators are kept


@dataclasses.dataclass(frozen=True)
class Layout:
    """A layout that has passed all checks, with what works out its figures."""

    task: Task
    target: Target
    rules: Rules  # filled
    arrays: Arrays
    warnings: Sequence[Problem]
    estimator: Estimator
    not_known: tuple[str, ...]  # what cannot be estimated, and why


class Figures:
    """The figures of layouts of one subject. Traces and estimates are kept for the layouts that come next."""

    def __init__(self, subject: Subject):
        self.subject = subject
        self._layout = functools.lru_cache(1)(self._read_layout)  # its layer needs it again
        self._layer = functools.lru_cache(MOST_LAYERS)(self._read_layer)
        self._step = functools.lru_cache(MOST_TARGETS)(self._read_step)
        self._trace_cache = functools.lru_cache(MOST_TASKS)(self._make_trace_cache)
        self._estimator = functools.lru_cache(MOST_TARGETS)(self._make_estimator)

    def estimate(self, inputs: Inputs) -> dict[str, Any]:
        """The problems of a layout and, where it can be estimated, all that is shown of it but its layer."""
        try:
            if not inputs.editable:
                return {"problems": [], "shown": self._step(inputs)}
            layout, known = self._layout(inputs), rows.lines(inputs.text)
            problems = [_describe(str(one), one, inputs, known) for one in layout.warnings]
            return {"problems": problems, "shown": self.show(layout, known)}
        except InputError as error:
            return {"problems": describe_error(error, inputs), "shown": None}

    def trace(self, inputs: Inputs, pinned: Inputs | None = None) -> dict[str, Any]:
        """The layer of a layout that can be estimated, and its changes against a pinned one."""
        if not inputs.editable:
            return {"shown": {"layer": self._step(inputs)["layer"], "changes": None}}
        layout, layer = self._layout(inputs), self._layer(inputs)
        shown: dict[str, Any] = {"layer": layer, "changes": None}
        if layer is None:
            shown["layer_not_known"] = f"the layer: it is traced for up to {SIMULATED} simulated devices"
        if pinned and pinned != inputs:
            shown["changes"] = list_changes(self._layout(pinned), layout)
        return {"shown": shown}

    def show(self, layout: Layout, known: Mapping[str, int]) -> dict[str, Any]:
        """What is shown of a layout. known: the lines of the keys of its rules."""
        return {
            "not_known": list(layout.not_known),
            "headline": headline(layout.task, layout.target, layout.rules, layout.estimator),
            "mesh": show_mesh(layout.rules.mesh, layout.estimator.overlap.locations(layout.rules)),
            "arrays": list_arrays(layout.task, layout.rules, layout.arrays, known),
            "batch": layout.task.rows,
            "seq": layout.task.config.data.seq if layout.task.config else None,
            "names": describe_names(layout.task.names),
        }

    def _read_layout(self, inputs: Inputs) -> Layout:
        """The layout of some inputs. Raises InputError for everything that is wrong with it, as `explain` does."""
        target = targets.parse(inputs.target)
        traces = self._trace_cache(inputs.config, inputs.overrides)
        task = traces.task
        rules = rules_file.from_text(inputs.text, inputs.path, vocabulary=task.names)
        rules = explain.settle_layout(task, rules, target)
        arrays, warnings = state.arrays_and_warnings(task, rules, target.platform)
        estimator, not_known = self._estimator(traces, target)
        return Layout(task, target, rules, arrays, warnings, estimator, not_known)

    def _read_layer(self, inputs: Inputs) -> dict[str, Any] | None:
        """What is shown of a traced layer of the layout; None if it has more devices than can be simulated."""
        layout = self._layout(inputs)
        devices = layout.estimator.overlap.devices or simulated_devices(layout.target.devices)
        if not devices:
            return None
        built = step.build_step(layout.task, layout.rules, layout.arrays, devices)
        return read_layer(built, layout.estimator, rows.lines(inputs.text))

    def _read_step(self, inputs: Inputs) -> dict[str, Any]:
        """All that is shown of a step of one's own."""
        computed = self.subject.resolve(inputs.config, inputs.overrides)
        target = targets.parse(inputs.target)
        if isinstance(computed, Config | Task):
            raise InputError(f"{inputs.program}: a model needs rules\n  fix   --rules=FILE")
        devices = simulated_devices(target.devices) if target.chip is None else targets.devices(target)
        return show_step(computed, target, devices)

    def _make_trace_cache(self, config: str, overrides: tuple[str, ...]) -> TraceCache:
        computed = self.subject.resolve(config, overrides)
        if not isinstance(computed, Config | Task):
            raise InputError(
                f"{self.subject.name}: a step of one's own brings its shardings\n  fix   leave out --rules"
            )
        return TraceCache(decoder.task(computed))

    def _make_estimator(self, traces: TraceCache, target: Target) -> tuple[Estimator, tuple[str, ...]]:
        """The estimator of a target, and what it does not know."""
        not_known: tuple[str, ...] = ()
        if target.chip is None:
            not_known = (f"times, MFU and price: {explain.NOT_ON_CPU}",)
        try:
            return Estimator(traces.task, target, traces), not_known
        except InputError as error:  # the links of a target are asked of its compiler
            not_known = (f"times, MFU and price: {error}",)
            return Estimator(traces.task, dataclasses.replace(target, chip=None), traces), not_known


def list_changes(pinned: Layout, current: Layout) -> list[dict[str, Any]] | None:
    """The rows that differ, each as `{"row": "+ residual.seq: tensor", "lines": [...]}` with what it changes.

    None where the two are of different models or targets, for then rows are not all that differs.
    """
    if pinned.task is not current.task or pinned.target.text != current.target.text:
        return None
    compared = compare_rows(current.task, pinned.rules, current.rules, current.target, current.estimator)
    return [
        {
            "row": name_rows(change),
            "lines": [f"{label}: {words}" for label, words in list_effects(change, compared.timed)],
        }
        for change in compared.changes
    ]


def simulated_devices(count: int) -> list[Any]:
    """`count` simulated devices; none where this process has fewer."""
    devices = jax.devices("cpu")
    return devices[:count] if count <= len(devices) else []


def describe_error(error: InputError, inputs: Inputs) -> list[dict[str, Any]]:
    """The problems that an error tells, in its words, each at its line."""
    if isinstance(error, ShardingError) and error.causes:
        known = rows.lines(inputs.text)
        return [_describe(message, found, inputs, known) for message, found in error.causes]
    message, _, fix = str(error).partition("\n  fix   ")
    return [describe_problem(message, fix, _yaml_line(message, inputs))]


def _yaml_line(message: str, inputs: Inputs) -> int | None:
    """The last of the lines that an error of YAML names."""
    found = re.findall(r"line (\d+)", message) if message.startswith(f"{inputs.path}: not valid YAML") else []
    return int(found[-1]) if found else None


def _describe(message: str, found: Problem, inputs: Inputs, known: Mapping[str, int]) -> dict[str, Any]:
    head, _, rest = message.partition("\n  fix   ")
    edits = fixes.find_edits(found, inputs.path)
    line = rows.line_of(found.row, inputs.path, known)
    return describe_problem(head, rest, line, found.warning, edits)
