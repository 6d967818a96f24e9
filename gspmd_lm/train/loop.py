"""A run: restore or start, step by step, write down, evaluate, save, stop cleanly."""

import collections
import contextlib
import dataclasses
import datetime
import importlib.metadata
import json
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
import yaml
from etils import epath
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

from gspmd_lm import checkpoint, runtime
from gspmd_lm import config as configs
from gspmd_lm.checkpoint import Checkpoints
from gspmd_lm.config import Config, InputError, RunFailed
from gspmd_lm.data.loader import Loader
from gspmd_lm.rules import human_bytes
from gspmd_lm.train import metrics, source
from gspmd_lm.train.state import State
from gspmd_lm.train.step import Step


@dataclasses.dataclass(frozen=True)
class Foreseen:
    """What is known of a compiled step before it runs."""

    paragraph: str
    step_time_s: float | None  # None on a platform that is not predicted
    peak_bytes: int  # per device
    peak_flops_per_s: float | None  # of a device in bfloat16; None where it is not known


# (compiled step, or the compiler's refusal for memory; its options; seconds to trace and to compile) -> Foreseen.
# Raises InputError where the step cannot fit.
Foresee = Callable[[Any, Mapping[str, Any], float, float], Foreseen]


@dataclasses.dataclass
class Run:
    """One run on one process: what it computes, where it writes, how it speaks."""

    step: Step
    train_rows: Loader
    held_out_rows: Loader | None
    workdir: epath.Path
    machine: runtime.Runtime
    console: Console
    cache: runtime.CompileCache | None = None
    profile: tuple[int, int] | None = None
    foresee: Foresee | None = None
    foreseen: Foreseen | None = None
    executable: Any = None  # the compiled train step, where it was compiled elsewhere
    compiled: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def config(self) -> Config:
        return self.step.config

    def train(self, stop: int) -> dict[str, float]:
        """Trains to step `stop` from the newest checkpoint; without one from train.init_from, or from scratch.

        Returns the last logged values.

        Raises RunFailed after train.max_skipped steps in a row whose loss or gradient was not finite.
        """
        train = self.config.train
        last: dict[str, float] = {}
        with self.checkpoints() as checkpoints, ThreadPoolExecutor(1) as beside:
            init_from = source.find(self.config) if train.init_from and not checkpoints.steps() else None
            compiling = beside.submit(self._program, "train step", self.step.lower_train)
            if not self.machine.simulated:
                compiling.result()  # a step that cannot fit is refused before anything is allocated
            start, state = self._start(checkpoints, init_from)
            self._write_description()
            if start >= stop:
                self.say(f"the checkpoint stands at step {start}, nothing to do up to {stop} (--steps, train.steps)")
            program, meter, done, interrupted = compiling.result(), _Meter(self, start), start, False
            if self.foreseen:
                self.say(self.foreseen.paragraph)
            with (
                contextlib.closing(self._log(start)) as log,
                contextlib.closing(self.train_rows.batches(start, self.step.batch_shardings, stop)) as batches,
                self._bar(start, stop) as advance,
                self._trace() as trace,
                runtime.StopSignal() as signal,
            ):
                for at, batch in meter.waiting(batches):
                    trace(at)
                    state, values = program(state, batch)
                    done = at + 1
                    advance()
                    interrupted = signal.requested(done)
                    ending = interrupted or done == stop
                    if done == start + 1 or _due(done, train.log_every) or ending:
                        last = meter.read(done, values)
                        log.write(done, last)
                        self._stop_if_skipping(last, done)
                        meter.show(done, stop, last)
                    if _due(done, train.checkpoint_every) or ending:
                        self._save(checkpoints, done, state)
                        meter.restart(done)
                    if interrupted:
                        break
                    if (_due(done, train.eval_every) or done == stop) and self.held_out_rows is not None:
                        log.write(done, self._evaluated(state.params, done))
                        meter.restart(done)
            if interrupted:
                self.say(f"stopped at step {done} on request; the same command goes on from there")
            if last:
                self._compare(last["step_time_s"])
            checkpoints.wait()
        return last

    def evaluate(self, step: int | None = None) -> dict[str, float]:
        """Loss of the held-out rows under the newest checkpoint of the workdir, or that of `step`."""
        with self.checkpoints() as checkpoints:
            restored = checkpoints.restore_weights(self.step.abstract_state.params, step)
            if restored is None:
                raise InputError(
                    f"{self.workdir}: no checkpoint to evaluate\n  fix   train there first, with --workdir"
                )
            at, params = restored
        if self.held_out_rows is None:
            raise InputError("data.held_out: 0 leaves no rows to evaluate\n  fix   set data.held_out, such as 0.02")
        return self._evaluated(params, at)

    def checkpoints(self) -> Any:
        """A context that closes the run's checkpoints."""
        return checkpoint.of_run(self.workdir, self.config, self.say)

    def say(self, message: str) -> None:
        if self.machine.is_main:
            self.console.print(message, soft_wrap=True, highlight=False, markup=False)

    def _start(self, checkpoints: Checkpoints, init_from: source.Source | None) -> tuple[int, State]:
        restored = checkpoints.restore(self.step.abstract_state)
        if restored is not None:
            at, state, extra = restored
            if extra["data"] != self.train_rows.fingerprint:
                self.say(f"warning: the rows are not those that {self.workdir} was trained on so far")
            self.say(f"restored step {at} of {self.workdir}")
            return at, state
        if init_from is not None:
            number, weights = init_from.restore(self.step)
            self.say(f"weights of checkpoint {number} of {init_from.workdir}")
            return 0, self._program("initial state", self.step.lower_init_from)(weights)
        return 0, self._program("initial state", self.step.lower_init)()

    def _program(self, name: str, lower: Callable[[], jax.stages.Lowered]) -> Any:
        """A compiled function of the step, compiled once."""
        if name not in self.compiled:
            rules = self.step.rules
            machine = self.machine
            options = runtime.compiler_options(
                machine.platform, rules.compiler_options, rules.path, machine.device_kind
            )
            began = time.perf_counter()
            train = name == "train step"
            ready, foresee = (self.executable, self.foresee) if train else (None, None)
            traced = began
            try:
                if ready:
                    compiled = ready
                else:
                    lowered, traced = lower(), time.perf_counter()
                    compiled = runtime.compile(lowered, options, self.machine.platform, rules.path)
            except jax.errors.JaxRuntimeError as error:
                if foresee and "RESOURCE_EXHAUSTED" in str(error):
                    foresee(str(error), options, traced - began, time.perf_counter() - traced)
                raise
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

    def _compare(self, step_time_s: float) -> None:
        """Says what was foreseen beside what was measured, as far as there is both."""
        found, parts = self.foreseen, []
        if found and found.step_time_s:
            times = f"predicted {found.step_time_s * 1e3:.0f} ms, measured {step_time_s * 1e3:.0f} ms"
            parts.append(f"step {times} (ratio {found.step_time_s / step_time_s:.2f})")
        used = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
        if found and used:
            parts.append(f"memory compiled {human_bytes(found.peak_bytes)}, measured {human_bytes(used)} at its peak")
        if parts:
            self.say("; ".join(parts))

    def _save(self, checkpoints: Checkpoints, step: int, state: State) -> None:
        checkpoints.save(step, state, {"data": self.train_rows.fingerprint, "rules": self.step.rules.path})

    def _evaluated(self, params: Any, step: int) -> dict[str, float]:
        """Mean loss over the held-out rows, at most train.eval_batches batches of them."""
        assert self.held_out_rows is not None
        program = self._program("evaluation", self.step.lower_evaluate)
        totals: collections.Counter[str] = collections.Counter()
        for _, batch in self.held_out_rows.batches(0, self.step.batch_shardings, self.config.train.eval_batches):
            totals.update({name: float(value) for name, value in program(params, batch).items()})
        targets = totals["target_tokens"]
        loss = totals["cross_entropy"] / targets
        found = {
            "eval_loss": loss,
            "eval_perplexity": float(np.exp(loss)),
            "eval_accuracy": totals["correct"] / targets,
            "eval_tokens": targets,
        }
        self.say(f"step {step}: held-out loss {loss:.4f}, perplexity {found['eval_perplexity']:.2f}, "
                 f"accuracy {found['eval_accuracy']:.3f} over {targets:,.0f} tokens")  # fmt: skip
        return found

    def _stop_if_skipping(self, values: Mapping[str, float], step: int) -> None:
        if values["skipped_in_a_row"] >= self.config.train.max_skipped:
            raise RunFailed(
                f"step {step}: the loss or gradient of the last {values['skipped_in_a_row']:.0f} steps was not finite, "
                f"and they changed nothing\n  fix   lower optimizer.learning_rate, or look at the data; the newest "
                f"checkpoint is from before"
            )

    @contextlib.contextmanager
    def _trace(self) -> Iterator[Callable[[int], None]]:
        """A function that is told each step before it runs, and writes a trace of those in `profile`."""
        start, stop = self.profile or (-1, -1)
        tracing = False

        def told(step: int | None) -> None:
            nonlocal tracing
            if tracing and step in (stop, None):
                jax.profiler.stop_trace()
                tracing = False
                self.say(f"trace of steps {start} to {stop}: {self.workdir / 'profile'}")
            elif step == start:
                jax.profiler.start_trace(str(self.workdir / "profile"))
                tracing = True

        try:
            yield told
        finally:
            told(None)

    @contextlib.contextmanager
    def _bar(self, start: int, stop: int) -> Iterator[Callable[[], None]]:
        """A function that moves a progress bar by one step; the bar is there only where somebody watches."""
        columns = (MofNCompleteColumn(), BarColumn(), TimeRemainingColumn())
        watched = self.machine.is_main and self.console.is_terminal
        with Progress(*columns, console=self.console, transient=True, disable=not watched) as progress:
            bar = progress.add_task("", total=stop, completed=start)
            yield lambda: progress.advance(bar)

    def _log(self, start: int) -> Any:
        if not self.machine.is_main:
            return _Silent()
        trackers = self.config.train.trackers
        return metrics.Log(self.workdir, start, trackers, self.workdir.name, configs.to_dict(self.config))

    def _write_description(self) -> None:
        """config.yaml and rules.yaml as resolved, versions.json: enough to do it again."""
        if not self.machine.is_main:
            return
        self.workdir.mkdir(parents=True, exist_ok=True)
        (self.workdir / "config.yaml").write_text(yaml.safe_dump(configs.to_dict(self.config), sort_keys=False))
        (self.workdir / "rules.yaml").write_text(self.step.rules.text)
        packages = ("gspmd_lm", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "libtpu")
        versions = {name: _version(name) for name in packages}
        versions |= {"python": platform.python_version(), "device": self.machine.device_kind}
        about = {
            "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "mesh": dict(self.step.rules.mesh),
            "rows": self.train_rows.description,
            "versions": versions,
        }
        (self.workdir / "versions.json").write_text(json.dumps(about, indent=2) + "\n")


class _Silent:
    """The log of every process but the first."""

    def write(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class _Meter:
    """Turns what a step returned and the clock into logged values and the line that people watch."""

    def __init__(self, run: Run, start: int):
        self.run = run
        self.wait_s = 0.0
        step = run.step
        arrays, config = step.arrays, step.config
        counts = arrays.parameter_count, config.data.seq, arrays.trained_count
        flops = metrics.flops_per_token(config.model, *counts)
        peak = run.foreseen and run.foreseen.peak_flops_per_s
        devices = step.mesh.size
        self.mfu_of = (lambda tokens_per_s: tokens_per_s * flops / (peak * devices)) if peak else None
        self.restart(start)

    def restart(self, step: int) -> None:
        """Begins a new interval, so that evaluation and saving are not counted as steps."""
        self.began, self.at, self.wait_s = time.perf_counter(), step, 0.0

    def waiting(self, batches: Any) -> Any:
        """The batches, with the time spent waiting for them noted."""
        batches = iter(batches)
        while True:
            before = time.perf_counter()
            batch = next(batches, None)
            self.wait_s += time.perf_counter() - before
            if batch is None:
                return
            yield batch

    def read(self, step: int, values: Mapping[str, jax.Array]) -> dict[str, float]:
        """The values of the step just dispatched, which are waited for, and the speed since the last reading."""
        found = {name: float(value) for name, value in jax.device_get(values).items()}
        steps = step - self.at
        step_time_s = (time.perf_counter() - self.began) / steps
        data = self.run.config.data
        found["perplexity"] = float(np.exp(min(found.pop("cross_entropy"), 700.0)))
        found["step_time_s"] = step_time_s
        found["tokens_per_s"] = data.batch * data.seq / step_time_s
        found["data_wait_s"] = self.wait_s / steps
        if self.mfu_of:
            found["mfu"] = self.mfu_of(found["tokens_per_s"])
        self.restart(step)
        return found

    def show(self, step: int, stop: int, values: Mapping[str, float]) -> None:
        run = self.run
        if not run.machine.is_main:
            return
        mfu = f"  mfu {values['mfu']:.1%}" if "mfu" in values else ""
        skipped = f"  skipped {values['skipped_steps']:.0f}" if values["skipped_steps"] else ""
        run.say(
            f"step {step:>{len(str(stop))}}/{stop}  loss {values['loss']:.6f}  accuracy {values['accuracy']:.3f}  "
            f"|gradient| {values['gradient_norm']:.3f}  lr {values['learning_rate']:.2e}  "
            f"{values['step_time_s'] * 1e3:.0f} ms/step  {values['tokens_per_s']:,.0f} tokens/s{mfu}{skipped}"
        )


def _due(step: int, every: int) -> bool:
    """Whether `step` is a multiple of `every`; 0 means never."""
    return every > 0 and step % every == 0


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
