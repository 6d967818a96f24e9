"""A run: restores or starts, trains step by step, logs, evaluates, saves and stops cleanly."""

import contextlib
import dataclasses
import functools
import logging
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import jax
from etils import epath
from rich.console import Console

from gspmd_lm.config import Config, Train
from gspmd_lm.data import trained
from gspmd_lm.data.ahead import AheadLoader
from gspmd_lm.data.batches import Batches
from gspmd_lm.data.loader import Loader
from gspmd_lm.errors import InputError, RunFailed, StoreFailed
from gspmd_lm.program.program import add_totals
from gspmd_lm.runtime import processes, startup
from gspmd_lm.runtime.endings import StopSignal
from gspmd_lm.runtime.preemption import Agreement
from gspmd_lm.runtime.watchdog import Watchdog
from gspmd_lm.train import init_from, progress, reading, saving
from gspmd_lm.train.init_from import InitFrom
from gspmd_lm.train.programs import PreRunReport, TrainPrograms
from gspmd_lm.train.saving import Best, SkippedSteps
from gspmd_lm.train.state import State, describe_run
from gspmd_lm.train.step import Step
from gspmd_lm.units import human_bytes
from gspmd_lm.workdir import checkpoint, compatible, history, trackers
from gspmd_lm.workdir.checkpoint import Checkpoints, Chosen
from gspmd_lm.workdir.log import Log, Sample
from gspmd_lm.workdir.wall_time import WallTime

Rows = Loader | Batches

_log = logging.getLogger(__name__)


class SampleWriter(Protocol):
    """Writes texts with the weights that are being trained."""

    def compile(self) -> None: ...

    def __call__(self, params: Any) -> Sequence[tuple[str, str]]:
        """Pairs of a prompt and the text after it."""
        ...


@dataclasses.dataclass
class Run:
    """One run on one process: what it computes, and where its files and messages go."""

    programs: TrainPrograms
    open_rows: Callable[[], tuple[Rows, Rows | None]]  # to train on, and to evaluate on; called once
    workdir: epath.Path
    console: Console
    profile: tuple[int, int] | None = None
    check_lock: Callable[[], None] = lambda: None  # raises RunFailed if another run now writes to the workdir
    writer: SampleWriter | None = None  # of the texts of train.samples
    evaluates: bool = False  # whether the programs of evaluation are compiled
    has_work_left: bool = False  # whether training was asked to stop before its last step
    wall_time: WallTime = dataclasses.field(default_factory=WallTime)

    @property
    def step(self) -> Step:
        return self.programs.step

    @property
    def machine(self) -> startup.Runtime:
        return self.programs.machine

    @property
    def say(self) -> Callable[[str], None]:
        return self.programs.say

    @functools.cached_property
    def config(self) -> Config | None:
        """The config of the decoder, with the tokenizer that the run keeps in its workdir, and with absolute places."""
        config = self.step.config
        return trained.with_places(config, self.workdir) if config else None

    @property
    def settings(self) -> Train:
        """The settings of the run: how long it trains, and how often it logs, evaluates and saves."""
        assert self.step.task.train is not None, "the session has checked it"
        return self.step.task.train

    @property
    def batch(self) -> int:
        """The rows that a step takes from the data."""
        return self.step.config.data.batch if self.step.config else self.step.task.rows

    @functools.cached_property
    def rows(self) -> tuple[Rows, Rows | None]:
        """The rows to train on, and those that are held out. Every process has the same rows."""
        train_rows, held_out_rows = self.open_rows()
        processes.compare({"data": train_rows.fingerprint}, self.say)
        return train_rows, held_out_rows

    def train(self, stop: int, step: int | None = None) -> dict[str, float]:
        """The values that were logged last, after training to step `stop`.

        Training begins from the checkpoint of `step`, by default the newest healthy one. Without a checkpoint, it
        begins from train.init_from or from scratch. If the checkpoint is already at `stop`, nothing is changed, read or
        compiled, and no values come back.

        Raises RunFailed after train.max_skipped steps in a row whose loss or gradient was not finite, or where the
        workdir can no longer be written to.
        """
        with self.checkpoints() as checkpoints:
            chosen = checkpoints.choose(step, self.step.abstract_state)
            best = Best.from_extra(chosen.extra) if chosen else Best()
            if chosen and (chosen.step >= stop or best.ends(self.settings.patience)):
                self.say(saving.nothing_to_do(chosen.step, stop, best, self.settings.patience))
                return {}
            with Watchdog(self.settings.hang_minutes, _log.warning) as watchdog:
                self.wall_time.observe, watchdog.count_hang = watchdog.begin, self.wall_time.count_hang
                training = _Training(self, checkpoints, watchdog, stop, best, *self._begin(checkpoints, chosen))
                try:
                    return training.train(chosen)
                except (RunFailed, OSError) as error:
                    if message := saving.describe_unsaved(error, self.workdir, checkpoints, training.done):
                        raise RunFailed(message) from error
                    raise

    def evaluate(self, step: int | None = None) -> dict[str, float]:
        """The metrics of the held-out rows under the checkpoint of `step`, by default the newest of the workdir."""
        with self.checkpoints() as checkpoints:
            if self.config and self.config.data.held_out == 0:
                raise InputError("data.held_out: 0 leaves no rows to evaluate\n  fix   set data.held_out, such as 0.02")
            chosen = checkpoints.choose(step)
            if chosen is None:
                raise InputError(
                    f"{self.workdir}: no checkpoint to evaluate\n  fix   train there first, with --workdir"
                )
            self.say(self.rows[0].description)
            params = checkpoints.read_weights(chosen, self.step.abstract_state.params)
        values = self.held_out_metrics(params, chosen.step)
        self.say(progress.describe_scored(values))
        return values

    def checkpoints(self) -> Any:
        """A context that closes the run's checkpoints."""
        facts = compatible.facts(self.config.model) if self.config else {"task": self.step.task.name}
        return checkpoint.open_checkpoints(self.workdir, self.settings, facts, self.say)

    def _begin(self, checkpoints: Checkpoints, chosen: Chosen | None) -> tuple[int, State, Any]:
        """The step to begin with, the state at that step, and the train step, which is compiled meanwhile."""
        train, config = self.settings, self.config
        origin = init_from.find(config) if config and train.init_from and not chosen else None
        self.say(self.rows[0].description)
        with ThreadPoolExecutor(1) as background, progress.clock(self.console, "compiling", self.machine.is_main):
            compiling = background.submit(self.programs.train)
            for tracker in train.trackers if self.machine.is_main else ():
                trackers.import_tracker(tracker)  # now, while the compiler works
            if not self.machine.is_simulated:
                with self.wall_time.spending("compile"):
                    compiling.result()  # a step that cannot fit is refused before anything is allocated
            with self.wall_time.spending("restore"):
                start, state = self._restore(checkpoints, chosen) if chosen else (0, self._initial_state(origin))
            self._write_description()
            with self.wall_time.spending("compile"):
                return start, state, self.programs.ready(compiling.result())

    def _restore(self, checkpoints: Checkpoints, chosen: Chosen) -> tuple[int, State]:
        state = checkpoints.read(chosen, self.step.abstract_state)
        if chosen.extra.get("data") != self.rows[0].fingerprint:
            self.say(f"warning: the rows are not those that {self.workdir} was trained on so far")
        if isinstance(self.rows[0], AheadLoader):
            self.rows[0].resume(chosen.extra.get("positions"))
        changes = history.changes(self.workdir, describe_run(self.config or self.step.task))
        changes += saving.moved_rows(chosen.step, chosen.extra, self.batch)
        self.say("\n".join([f"restored step {chosen.step} of {self.workdir}", *changes]))
        return chosen.step, state

    def _initial_state(self, origin: InitFrom | None) -> State:
        if origin is None:
            return self.programs.ready(self.programs.initial_state())()
        number, weights = origin.restore(self.step)
        new = f"; new, and to be learnt: {', '.join(origin.new)}" if origin.new else ""
        self.say(f"weights of checkpoint {number} of {origin.workdir}{new}")
        return self.programs.ready(self.programs.initial_state(from_weights=True))(weights)

    def compile_evaluation(self) -> None:
        """Compiles the programs of evaluation, of samples too, unless they are compiled."""
        if not self.evaluates:
            self.programs.evaluate()
            if self.writer:
                self.writer.compile()
            self.programs.ready(None)
            self.evaluates = True

    def held_out_metrics(self, params: Any, step: int, beat: Callable[[], None] = lambda: None) -> dict[str, float]:
        """The metrics of the held-out rows, of which at most train.eval_batches batches are read.

        beat: is called after each batch.
        """
        _, held_out_rows = self.rows
        assert held_out_rows is not None
        program = self.programs.ready(self.programs.evaluate())
        batches = held_out_rows.batches(0, self.step.batch_shardings, self.settings.eval_batches)

        def totals() -> Iterator[Any]:
            for _, batch in batches:
                yield program(params, batch)  # it is read before the next one is asked for
                beat()

        values = self.step.task.evaluation_values(add_totals(totals()))
        self.say(f"step {step}: held-out {progress.scores(values)}")
        return values

    def _write_description(self) -> None:
        if self.machine.is_main:
            made = self.rows[0].tokenizer
            kept = trained.files_to_keep(self.step.config, self.workdir, made) if self.step.config else {}
            history.write_description(
                self.workdir,
                describe_run(self.config or self.step.task),
                self.step.rules.text,
                kept,
                self.rows[0].classes,
                mesh=dict(self.step.rules.mesh),
                rows=self.rows[0].description,
                device=self.machine.device_kind,
            )


class _Training:
    """The steps of a run: the state between two of them, and what is done after each."""

    def __init__(
        self,
        run: Run,
        checkpoints: Checkpoints,
        watchdog: Watchdog,
        stop: int,
        best: Best,
        start: int,
        state: State,
        program: Any,
    ):
        """program: (state, batch) -> (state, values), with the state of step `start` donated."""
        self.run, self.checkpoints, self.watchdog, self.program = run, checkpoints, watchdog, program
        self.config, self.say, self.is_main = run.settings, run.say, run.machine.is_main
        self.start, self.stop, self.done = start, stop, start
        self.wall_time = run.wall_time
        self.state, self.best = state, best
        self.interrupted = False  # whether the run was asked to stop
        self.last: dict[str, float] = {}  # the values that were logged last
        self.trace_file: Any = None  # the path of the profiler's file
        self.meter = self._meter()
        self.skipped_steps = SkippedSteps(checkpoints, self.config.max_skipped)
        self.save_clock, self.agreed = saving.Clock(self.config.checkpoint_minutes), Agreement(start)

    def train(self, chosen: Chosen | None) -> dict[str, float]:
        """The values that were logged last, after the last step. chosen: the checkpoint that training goes on from."""
        run, start = self.run, self.start
        self.say(saving.line(self.config, run.step.abstract_state))
        if report := run.programs.report:
            self.say(report.lines)
        has_peak = self.meter.peak_flops_per_s is not None
        unit = self.meter.unit
        self.shown = progress.Shown(run.console, start, self.stop, main=self.is_main, mfu=has_peak, unit=unit)
        with (
            StopSignal(lambda: self.agreed.want("stop")),
            self.agreed,
            contextlib.closing(self._log()) as self.log,
            contextlib.closing(run.rows[0].batches(start, run.step.batch_shardings, self.stop)) as batches,
            self.shown.bar,
            self._counting_time(),
            progress.profile_steps(run.profile, start, self.stop, run.workdir / "profile", self.say) as trace,
        ):
            self._say_reading()
            if chosen and "best" in chosen.extra and self._is_scheduled(start) and self.best.evaluated != start:
                # The run was asked to stop at this step, and saved it without evaluating it.
                self._evaluate()
                self.meter.begin()
            if not chosen and processes.several():  # where saving fails, it fails before anything was computed
                self._save()
            try:
                for at, batch in self.meter.waiting(() if self._ends_early else batches, self.wall_time):
                    self._trace(trace, at)
                    self.state, values = self.program(self.state, batch)
                    self.meter.device.follow(values)
                    self.done = at + 1
                    ends = self._after_step(values)
                    self.watchdog.beat(self.done)
                    if ends:
                        break
            except (InputError, StoreFailed) as error:  # a row that cannot be read, such as an image that ends early
                if not processes.several() and self.done > self.start:  # no other process waits for that row
                    self._save_if_due(True, False, self.best)
                    self.checkpoints.wait()
                    when = "when the store answers" if isinstance(error, StoreFailed) else "once that row is mended"
                    self.say(f"saved step {self.done}; {when}, the same command goes on from there")
                raise
            self._trace(trace, None)
            with self.wall_time.spending("saves"):
                self.checkpoints.wait()  # before anything is promised, and while signals cannot end this process
            self._say_how_it_ended()
        return self.last

    def _trace(self, trace: Callable[[int | None], Any], at: int | None) -> None:
        """Begins or ends the trace of --profile where that is due before step `at`, or None at the end of the run."""
        if self.run.profile and (at is None or at in self.run.profile):
            jax.block_until_ready(self.state)  # so that the trace has whole steps
            self.trace_file = trace(at) or self.trace_file
            self.meter.restart(self.done)

    @contextlib.contextmanager
    def _counting_time(self) -> Iterator[None]:
        """A context of the steps, whose wall time is counted with that of earlier starts and logged at the end."""
        self.wall_time.add_earlier(self.log.wall_s)
        self.watchdog.done, self.watchdog.count_hang = self.start, self._count_hang
        with self.wall_time.spending("steps"):
            yield
        if self.done > self.start:
            self.log.write(self.done, self.wall_time.totals())

    def _say_reading(self) -> None:
        """Says what the steps read, and what the source can deliver, which some rows are read for."""
        rows, report = self.run.rows[0], self.run.programs.report
        if self.is_main and isinstance(rows, Loader) and not isinstance(rows, AheadLoader):
            step_time = reading.find_step_time(report and report.step_time_s, self.log.wall_s, self.start)
            span, count = (self.start, self.stop), self.run.machine.process_count
            with self.wall_time.spending("start"):
                self.say(reading.describe(rows, self.run.step.batch_shardings, span, step_time, count))
            self.meter.begin()

    def _count_hang(self, kind: str, seconds: float) -> None:
        self.wall_time.count_hang(kind, seconds)
        self.log.write(self.done, self.wall_time.totals())

    @property
    def _ends_early(self) -> bool:
        return self.best.ends(self.config.patience)

    def _after_step(self, values: Mapping[str, jax.Array]) -> bool:
        """Whether the run ends with the step just dispatched, after what is due: logging, evaluation, a checkpoint.

        Raises RunFailed if too many steps were not finite.
        """
        done = self.done
        self.shown.advance(done, self.meter.per_s, self.meter.left_s(done))
        self.run.check_lock()
        self.skipped_steps.add(done, values["skipped_in_a_row"])
        if self.is_main and self.save_clock.due(self.checkpoints.writing):
            self.agreed.want("save")
        asked = self.agreed.due(done)
        self.interrupted = "stop" in asked
        ends = self.interrupted or done == self.stop
        if ends or self.skipped_steps.failed or done == self.start + 1 or _due(done, self.config.log_every):
            self._log_values(values)
        if self.skipped_steps.failed:
            raise self.skipped_steps.error()
        best_before = self.best
        if not self.interrupted and (done == self.stop or self._is_scheduled(done)):
            self._evaluate()
            ends = ends or self._ends_early
        self._save_if_due(ends, "save" in asked, best_before)
        return ends

    def _log_values(self, values: Mapping[str, jax.Array]) -> None:
        self.last = self.meter.read(self.done, values)
        self.log.write(self.done, self.last | self.wall_time.totals())
        self.shown.line(self.done, self.last, self.meter.left_s(self.done))
        if self.done == self.start + 1:
            self.say(f"step {self.done}: {self.meter.first_step_s:.2f} s, with one-time work; left out of step times")

    def _save_if_due(self, ends: bool, asked: bool, best_before: Best) -> None:
        """Saves a checkpoint if one is due, or if the clock asked for one. Steps that changed nothing are not saved.

        ends: whether the run ends here, with a checkpoint in any case. best_before: the best before this step.
        """
        done, train = self.done, self.config
        due = ends or _due(done, train.checkpoint_every) or (train.keeps_best and self.best.step == done)
        if not due and not asked:
            return
        skipped = self.skipped_steps.skipped_before(done)
        if not skipped or ends:
            self._save()
        elif due:
            self.say(f"checkpoint {done} is not saved: the last {skipped} steps changed nothing")
            if self.best.step == done:
                self.best = best_before  # the best is always a checkpoint

    def _save(self) -> None:
        run, rows, best = self.run, self.run.rows[0], self.best
        extra = {"data": rows.fingerprint, "batch": run.batch, "rules": run.step.rules.path, "best": vars(best)}
        if isinstance(rows, AheadLoader):
            extra["positions"] = processes.gather(rows.positions(self.done))
        with self.save_clock.saving(), self.wall_time.spending("saves"):
            self.log.flush()  # a run that goes on from here finds the rows so far
            self.checkpoints.save(self.done, self.state, extra, keep=best.step if self.config.keeps_best else None)
        self.meter.restart(self.done)

    def _is_scheduled(self, step: int) -> bool:
        """Whether the schedule evaluates a step. Only these evaluations say what is best; --steps adds one."""
        return _due(step, self.config.eval_every) or step == self.config.steps

    def _evaluate(self) -> None:
        """Evaluates the weights on the held-out rows, if there are any. Logs metrics and the texts of train.samples."""
        run, step, params = self.run, self.done, self.state.params
        if run.rows[1] is None:
            return
        with self.meter.once(), self.wall_time.spending("compile"):
            run.compile_evaluation()
        with self.wall_time.spending("evaluation"):
            values = run.held_out_metrics(params, step, self.watchdog.beat)
            texts = [Sample(*pair) for pair in run.writer(params)] if run.writer else []
        self.log.write(step, values)
        self.log.write_samples(step, texts)
        for text in texts:
            self.say(progress.sample(text.prompt, text.text))
        if self._is_scheduled(step):
            self.best = self.best.after(step, values["eval_loss"])
        self.meter.restart(step)

    def _say_how_it_ended(self) -> None:
        run, train, best = self.run, self.config, self.best
        if self.interrupted:
            run.has_work_left = self.done < self.stop
            then = "the same command goes on from there" if run.has_work_left else "it is the last, and not evaluated"
            self.say(f"stopped at step {self.done} on request; {then}")
        elif self._ends_early:
            self.say(
                f"stopped early at step {self.done}: the last {best.since} evaluations were not better (train.patience)"
            )
        if train.keeps_best and best.step is not None:
            self.say(
                f"best evaluation every {train.eval_every} steps: {best.loss:.4f} at {best.step}, kept "
                f"for --step={best.step}"
            )
        if run.programs.report and self.is_main:
            with self.wall_time.spending("start"):  # what has no kind of its own: a trace may take seconds to read
                self._compare(run.programs.report)

    def _compare(self, report: PreRunReport) -> None:
        """Prints predictions beside measurements, where there are both."""
        if measured := self.meter.measured_step(self.run.workdir, self.run.profile, self.trace_file):
            report.compare(measured)
        if report.peak_bytes and (used := (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")):
            self.say(f"memory: compiled {human_bytes(report.peak_bytes)}, measured {human_bytes(used)} at its peak")

    def _meter(self) -> progress.Meter:
        run, task = self.run, self.run.step.task
        report = run.programs.report
        flops = report.flops if report else 0.0
        peak = report.peak_flops_per_s if report and flops else None
        return progress.Meter(
            self.start,
            self.stop,
            task.batch_size,
            run.rows[0].epochs_per_step,
            flops,
            peak and peak * run.step.mesh.size,
        )

    def _log(self) -> "Log | _Silent":
        if not self.is_main:
            return _Silent()
        return Log(
            self.run.workdir,
            self.start,
            self.config,
            describe_run(self.run.step.config or self.run.step.task),
            self.say,
        )


class _Silent:
    """The log of every process but the first."""

    wall_s: Mapping[str, float] = types.MappingProxyType({})

    def write(self, step: int, values: Mapping[str, float]) -> None: ...

    def write_samples(self, step: int, samples: Sequence[Sample]) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


def _due(step: int, every: int) -> bool:
    """Whether `step` is a multiple of `every`; 0 means never."""
    return every > 0 and step % every == 0
