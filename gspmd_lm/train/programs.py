"""The compiled programs of a run. Each is compiled when it is first needed."""

import dataclasses
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
from etils import epath

from gspmd_lm.runtime import compile_cache, compiler, processes, startup
from gspmd_lm.train.step import Step


class MeasuredStep(NamedTuple):
    """What a run measured of its steps. The first step, which has one-time work, does not count."""

    workdir: epath.Path
    seconds: float  # of a step: the median, without evaluation and saving, and without traced steps if there are others
    wait_s: float  # of them, waiting for rows
    steps: int  # that the run has taken
    trace: Path | None  # the profiler's file of whole steps, for as long as the run; None without a trace
    traced_steps: int


@dataclasses.dataclass(frozen=True)
class PreRunReport:
    """Predictions for a compiled train step before it runs."""

    lines: str  # the text of the report
    step_time_s: float | None  # predicted; None on a platform that is not predicted
    compare: Callable[[MeasuredStep], None]  # keeps a measured step beside the predicted one, and says how they differ
    peak_bytes: int  # per device
    flops: float  # the model's FLOPs in a step, on all devices, without recomputation
    peak_flops_per_s: float | None  # of a device in bfloat16; None where it is not known


# (compiled step, or the compiler's refusal for memory; the traced step; compiler options; seconds to compile) ->
# PreRunReport. Raises InputError where the step does not fit into memory.
ReportStep = Callable[[Any, Any, Mapping[str, Any], float], PreRunReport]


@dataclasses.dataclass
class TrainPrograms:
    """The programs of one step on one process."""

    step: Step
    machine: startup.Runtime
    say: Callable[[str], None]
    cache: compile_cache.CompileCache | None = None
    report_step: ReportStep | None = None
    report: PreRunReport | None = None  # once the train step is compiled
    executable: Any = None  # the compiled train step, if it was compiled elsewhere
    compiled: dict[str, Any] = dataclasses.field(default_factory=dict)

    def train(self) -> Any:
        """The train step, with its pre-run report. Raises InputError where the step does not fit into memory."""
        return self._program("train step", self._train_step)

    def evaluate(self) -> Any:
        return self._program("evaluation", lambda: self.step.compile(self.step.lower_evaluate()))

    def initial_state(self, from_weights: bool = False) -> Any:
        """The program that makes the state of step 0: from nothing, or from weights."""
        lower = self.step.lower_init_from if from_weights else self.step.lower_init
        return self._program("initial state", lambda: self.step.compile(lower(), also=["once"]))

    def ready(self, program: Any) -> Any:
        """`program`, once every process has compiled it. A collective on the CPU fails after a wait of 30 seconds."""
        processes.compare({}, self.say)
        return program

    def _program(self, name: str, make: Callable[[], Any]) -> Any:
        if name not in self.compiled:
            began = time.perf_counter()
            self.compiled[name] = make()
            self.say(f"{name}: {self._source(name, time.perf_counter() - began)}")
        return self.compiled[name]

    def _source(self, name: str, taken_s: float) -> str:
        """Where a program came from: a file, or the compiler and its cache."""
        if name == "train step" and self.executable:
            return "loaded, not compiled"
        return f"compiled in {taken_s:.1f} s{self._cached_programs() if name == 'train step' else ''}"

    def _cached_programs(self) -> str:
        cache = self.cache
        if cache is None:
            return ""
        if cache.directory is None:
            return ", no compile cache"
        saved = f", {cache.saved_s:.0f} s saved" if cache.hits else ""
        return f", compile cache {cache.directory}: {cache.hits} found, {cache.misses} new{saved}"

    def _train_step(self) -> Any:
        """The compiled train step, which fits into memory."""
        also = self.step.program_kinds
        options = self.step.options(*also)
        compiled, report_step = self.executable, self.report_step
        traced: Any = self.step.trace_train() if report_step or not compiled else None
        lowered_at = time.perf_counter()
        if not compiled:
            lowered, lowered_at = traced.lower(), time.perf_counter()
            try:
                compiled = self.step.compile(lowered, also=also)
            except jax.errors.JaxRuntimeError as error:
                if report_step and "RESOURCE_EXHAUSTED" in str(error):
                    report_step(str(error), traced, options, time.perf_counter() - lowered_at)
                raise
        if self.machine.is_simulated:
            fix = "a smaller data.batch, remat: block, or a smaller model"
            compiler.check_room(compiled, list(self.step.mesh.devices.flat), "the train step", fix)
        if report_step:
            self.report = report_step(compiled, traced, options, time.perf_counter() - lowered_at)
        return compiled
