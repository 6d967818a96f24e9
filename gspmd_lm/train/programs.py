"""The compiled programs of a run. Each is compiled when it is first needed."""

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

from gspmd_lm.runtime import compile_cache, compiler, processes, startup
from gspmd_lm.train.step import Step


@dataclasses.dataclass(frozen=True)
class Foreseen:
    """What is known about a compiled step before it runs."""

    paragraph: str
    step_time_s: float | None  # None on a platform that is not predicted
    peak_bytes: int  # per device
    peak_flops_per_s: float | None  # of a device in bfloat16; None where it is not known


# (compiled step, or the compiler's refusal for memory; its options; seconds to trace and to compile) -> Foreseen.
# Raises InputError where the step cannot fit.
Foresee = Callable[[Any, Mapping[str, Any], float, float], Foreseen]


@dataclasses.dataclass
class Programs:
    """The programs of one step on one process."""

    step: Step
    machine: startup.Runtime
    say: Callable[[str], None]
    cache: compile_cache.CompileCache | None = None
    foresee: Foresee | None = None
    foreseen: Foreseen | None = None  # once the train step is compiled
    executable: Any = None  # the compiled train step, if it was compiled elsewhere
    compiled: dict[str, Any] = dataclasses.field(default_factory=dict)

    def train(self) -> Any:
        """The train step, which is foreseen. Raises InputError where it cannot fit."""
        return self._program("train step", self.step.lower_train)

    def evaluate(self) -> Any:
        return self._program("evaluation", self.step.lower_evaluate)

    def initial_state(self, from_weights: bool = False) -> Any:
        """The program that makes the state of step 0: from nothing, or from weights."""
        return self._program("initial state", self.step.lower_init_from if from_weights else self.step.lower_init)

    def ready(self, program: Any) -> Any:
        """`program`, once every process has compiled it. A collective on the CPU fails after a wait of 30 seconds."""
        processes.compare({}, self.say)
        return program

    def _program(self, name: str, lower: Callable[[], jax.stages.Lowered]) -> Any:
        if name not in self.compiled:
            rules = self.step.rules
            machine, train = self.machine, name == "train step"
            also = {"initial state": ("once",), "train step": rules.compiled_for}.get(name, ())
            options = compiler.options(machine.platform, rules.compiler_options, rules.path, machine.device_kind, also)
            began = time.perf_counter()
            ready, foresee = (self.executable, self.foresee) if train else (None, None)
            traced = began
            try:
                if ready:
                    compiled = ready
                else:
                    lowered, traced = lower(), time.perf_counter()
                    compiled = compiler.compile(lowered, options, self.machine.platform, rules.path)
            except jax.errors.JaxRuntimeError as error:
                if foresee and "RESOURCE_EXHAUSTED" in str(error):
                    foresee(str(error), options, traced - began, time.perf_counter() - traced)
                raise
            if train and machine.simulated:
                fix = "a smaller data.batch, remat: block, or a smaller model"
                compiler.check_room(compiled, list(self.step.mesh.devices.flat), "the train step", fix)
            if foresee:
                self.foreseen = foresee(compiled, options, traced - began, time.perf_counter() - traced)
            self.compiled[name] = compiled
            cache = f", {self._cached()}" if self.cache and train else ""
            how = "loaded, not compiled" if ready else f"compiled in {time.perf_counter() - began:.1f} s{cache}"
            self.say(f"{name}: {how}")
        return self.compiled[name]

    def _cached(self) -> str:
        cache = self.cache
        assert cache is not None
        if cache.directory is None:
            return "no compile cache"
        saved = f", {cache.saved_s:.0f} s saved" if cache.hits else ""
        return f"compile cache {cache.directory}: {cache.hits} found, {cache.misses} new{saved}"
