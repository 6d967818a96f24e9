"""A run: restores or starts, trains step by step, logs, evaluates, saves and stops cleanly."""

import collections
import contextlib
import dataclasses
import datetime
import functools
import json
import textwrap
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import jax
import numpy as np
from etils import epath
from rich.console import Console

from gspmd_lm import config as configs
from gspmd_lm import files, versions
from gspmd_lm.config import Config, core_yaml
from gspmd_lm.data import trained
from gspmd_lm.data.loader import Loader
from gspmd_lm.data.tokenizer import trained_size
from gspmd_lm.errors import InputError, RunFailed
from gspmd_lm.runtime import processes, startup
from gspmd_lm.runtime.agreement import Agreement
from gspmd_lm.runtime.preemption import StopSignal
from gspmd_lm.train import metrics, progress, saving, source
from gspmd_lm.train.programs import Programs
from gspmd_lm.train.state import State
from gspmd_lm.train.step import Step
from gspmd_lm.train.stopping import Best, SkippedSteps
from gspmd_lm.units import human_bytes
from gspmd_lm.workdir import checkpoint, layout, trackers
from gspmd_lm.workdir.checkpoint import Checkpoints, Chosen
from gspmd_lm.workdir.log import Log, Sample


class Writer(Protocol):
    """Writes texts with the weights that are being trained."""

    def compile(self) -> None: ...

    def __call__(self, params: Any) -> Sequence[tuple[str, str]]:
        """Pairs of a prompt and the text after it."""
        ...


@dataclasses.dataclass
class Run:
    """One run on one process: what it computes, and where its files and messages go."""

    programs: Programs
    open_rows: Callable[[], tuple[Loader, Loader | None]]  # to train on, and to evaluate on; called once
    workdir: epath.Path
    console: Console
    profile: tuple[int, int] | None = None
    check_lock: Callable[[], None] = lambda: None  # raises RunFailed if another run now writes to the workdir
    writer: Writer | None = None  # of the texts of train.samples
    evaluates: bool = False  # whether the programs of evaluation are compiled

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
    def config(self) -> Config:
        """The config of the step, with the tokenizer that the run keeps in its workdir if it trains one."""
        config = self.step.config
        return trained.kept(config, self.workdir) if trained_size(config.data.tokenizer) else config

    @functools.cached_property
    def rows(self) -> tuple[Loader, Loader | None]:
        """The rows to train on, and those that are held out. Every process has the same rows."""
        train_rows, held_out_rows = self.open_rows()
        processes.compare({"data": train_rows.fingerprint}, self.say)
        return train_rows, held_out_rows

    def train(self, stop: int, step: int | None = None) -> dict[str, float]:
        """The values that were logged last, after training to step `stop`.

        Training begins from the checkpoint of `step`, by default the newest good one. Without a checkpoint, it begins
        from train.init_from or from scratch. If the checkpoint is already at `stop`, nothing is changed, read or
        compiled, and no values come back.

        Raises RunFailed after train.max_skipped steps in a row whose loss or gradient was not finite.
        """
        train = self.config.train
        last: dict[str, float] = {}
        with self.checkpoints() as checkpoints, ThreadPoolExecutor(1) as beside:
            chosen = checkpoints.choose(step, self.step.abstract_state)
            best = Best.of(chosen.extra) if chosen else Best()
            if chosen and (chosen.step >= stop or best.ends(train.patience)):
                self.say(_nothing_to_do(chosen.step, stop, best, train.patience))
                return last
            init_from = source.find(self.config) if train.init_from and not chosen else None
            train_rows, held_out_rows = self.rows
            self.say(train_rows.description)
            compiling = beside.submit(self.programs.train)
            for tracker in train.trackers if self.machine.is_main else ():
                trackers.load(tracker)  # now, while the compiler works
            if not self.machine.simulated:
                compiling.result()  # a step that cannot fit is refused before anything is allocated
            start, state = self._start(checkpoints, chosen, init_from)
            self._write_description()
            program, meter = self.programs.ready(compiling.result()), self._meter(start, stop)
            done, interrupted = start, False
            skipped_steps = SkippedSteps(checkpoints, train.max_skipped)
            if foreseen := self.programs.foreseen:
                self.say(textwrap.fill(foreseen.paragraph, 80, break_on_hyphens=False))
            shown = progress.Shown(
                self.console, start, stop, main=self.machine.is_main, mfu=meter.peak_flops_per_s is not None
            )
            self.say(saving.line(train, self.step.abstract_state))
            clock, agreed = saving.Clock(train.checkpoint_minutes), Agreement(start)
            with (
                StopSignal(lambda: agreed.want("stop")),
                agreed,
                contextlib.closing(self._log(start)) as log,
                contextlib.closing(train_rows.batches(start, self.step.batch_shardings, stop)) as batches,
                shown.running(),
                progress.profiled(self.profile, start, stop, self.workdir / "profile", self.say) as traced,
            ):
                missed = chosen and "best" in chosen.extra and self._counts(start) and best.evaluated != start
                if missed and held_out_rows is not None:
                    # The run was asked to stop at this step, and saved it without evaluating it.
                    best = best.after(start, self._evaluated(state.params, start, log, meter)["eval_loss"])
                    meter.begin()
                for at, batch in meter.waiting(() if best.ends(train.patience) else batches):
                    traced(at)
                    state, values = program(state, batch)
                    done = at + 1
                    shown.advance(done, meter.tokens_per_s, meter.left_s(done))
                    self.check_lock()
                    skipped_steps.add(done, values["skipped_in_a_row"])
                    if self.machine.is_main and clock.due(checkpoints.writing):
                        agreed.want("save")
                    asked = agreed.due(done)
                    interrupted = "stop" in asked
                    ending = interrupted or done == stop
                    if done == start + 1 or _due(done, train.log_every) or ending or skipped_steps.failed:
                        last = meter.read(done, values)
                        log.write(done, last)
                        shown.line(done, last, meter.left_s(done))
                        if done == start + 1:
                            self.say(f"step {done} took {meter.first_step_s:.2f} s, with what happens only once; "
                                     "no step time counts it")  # fmt: skip
                    if skipped_steps.failed:
                        raise self._failed(skipped_steps.failed, checkpoints)
                    before = best
                    if (self._counts(done) or done == stop) and held_out_rows is not None and not interrupted:
                        loss = self._evaluated(state.params, done, log, meter)["eval_loss"]
                        best = best.after(done, loss) if self._counts(done) else best
                        ending = ending or best.ends(train.patience)
                        meter.restart(done)
                    due = _due(done, train.checkpoint_every) or ending or (train.keeps_best and best.step == done)
                    skipped = skipped_steps.skipped_before(done) if due or "save" in asked else 0
                    if due and skipped and not ending:
                        self.say(f"checkpoint {done} is not saved: the last {skipped} steps changed nothing")
                        best = before if best.step == done else best  # the best is always a checkpoint
                    elif due or ("save" in asked and not skipped):
                        with clock.saving():
                            self._save(checkpoints, done, state, best)
                        meter.restart(done)
                    if ending:
                        break
                checkpoints.wait()  # before anything is promised, and while signals cannot end this process
                if interrupted:
                    self.say(f"stopped at step {done} on request; the same command goes on from there")
                elif best.ends(train.patience):
                    self.say(f"stopped early at step {done}: the last {best.since} evaluations were not better "
                             "(train.patience)")  # fmt: skip
                if train.keeps_best and best.step is not None:
                    self.say(f"best evaluation every {train.eval_every} steps: {best.loss:.4f} at {best.step}, kept "
                             f"for --step={best.step}")  # fmt: skip
                if "step_time_s" in last:
                    self._compare(last["step_time_s"])
        return last

    def evaluate(self, step: int | None = None) -> dict[str, float]:
        """The metrics of the held-out rows under the checkpoint of `step`, by default the newest of the workdir."""
        with self.checkpoints() as checkpoints:
            if self.config.data.held_out == 0:
                raise InputError("data.held_out: 0 leaves no rows to evaluate\n  fix   set data.held_out, such as 0.02")
            if checkpoints.choose(step) is None:
                raise InputError(
                    f"{self.workdir}: no checkpoint to evaluate\n  fix   train there first, with --workdir"
                )
            self.say(self.rows[0].description)
            restored = checkpoints.restore_weights(self.step.abstract_state.params, step)
            assert restored is not None
            at, params = restored
        found = self._measured(params, at)
        self.say(f"{found['eval_tokens']:,.0f} tokens were scored")
        return found

    def checkpoints(self) -> Any:
        """A context that closes the run's checkpoints."""
        return checkpoint.of_run(self.workdir, self.config, self.say)

    def _start(
        self, checkpoints: Checkpoints, chosen: Chosen | None, init_from: source.Source | None
    ) -> tuple[int, State]:
        if chosen:
            restored = checkpoints.restore(self.step.abstract_state, chosen.step)
            assert restored is not None
            at, state, extra = restored
            if extra["data"] != self.rows[0].fingerprint:
                self.say(f"warning: the rows are not those that {self.workdir} was trained on so far")
            self.say(f"restored step {at} of {self.workdir}")
            return at, state
        if init_from is not None:
            number, weights = init_from.restore(self.step)
            self.say(f"weights of checkpoint {number} of {init_from.workdir}")
            return 0, self.programs.ready(self.programs.initial_state(from_weights=True))(weights)
        return 0, self.programs.ready(self.programs.initial_state())()

    def _compare(self, step_time_s: float) -> None:
        """Prints predictions beside measurements, where there are both."""
        found, parts = self.programs.foreseen, []
        if found and found.step_time_s:
            times = f"predicted {found.step_time_s * 1e3:.0f} ms, measured {step_time_s * 1e3:.0f} ms"
            parts.append(f"step {times} (ratio {found.step_time_s / step_time_s:.2f})")
        used = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
        if found and used:
            parts.append(f"memory compiled {human_bytes(found.peak_bytes)}, measured {human_bytes(used)} at its peak")
        if parts:
            self.say("; ".join(parts))

    def _save(self, checkpoints: Checkpoints, step: int, state: State, best: Best) -> None:
        extra = {"data": self.rows[0].fingerprint, "rules": self.step.rules.path, "best": dataclasses.asdict(best)}
        checkpoints.save(step, state, extra, keep=best.step if self.config.train.keeps_best else None)

    def _counts(self, step: int) -> bool:
        """Whether a step is evaluated by the schedule. Only such evaluations say what is best; --steps adds one."""
        return _due(step, self.config.train.eval_every) or step == self.config.train.steps

    def _evaluated(self, params: Any, step: int, log: Log, meter: metrics.Meter) -> dict[str, float]:
        """The metrics of the held-out rows. They are logged, and so are the texts of train.samples."""
        if not self.evaluates:
            with meter.once():
                self.programs.evaluate()
                if self.writer:
                    self.writer.compile()
                self.programs.ready(None)
            self.evaluates = True
        found = self._measured(params, step)
        log.write(step, found)
        texts = [Sample(*pair) for pair in self.writer(params)] if self.writer else []
        log.write_samples(step, texts)
        for text in texts:
            self.say(progress.sample(text.prompt, text.text))
        return found

    def _measured(self, params: Any, step: int) -> dict[str, float]:
        """The metrics of the held-out rows, of which at most train.eval_batches batches are read."""
        _, held_out_rows = self.rows
        assert held_out_rows is not None
        program = self.programs.ready(self.programs.evaluate())
        totals: collections.Counter[str] = collections.Counter()
        for _, batch in held_out_rows.batches(0, self.step.batch_shardings, self.config.train.eval_batches):
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
                 f"accuracy {found['eval_accuracy']:.3f}")  # fmt: skip
        return found

    def _failed(self, failed: tuple[int, int], checkpoints: Checkpoints) -> RunFailed:
        """The error for too many steps in a row that were not finite, whose checkpoints later starts do not use."""
        step, skipped = failed
        good, steps = checkpoints.give_up(), checkpoints.steps()
        if good is not None:
            then = f"goes on from checkpoint {good}, the newest that a finite step followed; --step=N from an older one"
        elif steps:
            then = f"with --step={steps[-1]} goes on from that checkpoint, which no finite step followed"
        else:
            then = "begins anew"
        return RunFailed(
            f"step {step}: the loss or gradient of the last {skipped} steps was not finite, and they changed nothing\n"
            f"  fix   lower optimizer.learning_rate, or look at the data; the same command {then}"
        )

    def _meter(self, start: int, stop: int) -> metrics.Meter:
        arrays, config = self.step.arrays, self.config
        foreseen = self.programs.foreseen
        peak = foreseen.peak_flops_per_s if foreseen else None
        return metrics.Meter(
            start, stop, config.data.batch * config.data.seq, config.data.batch / len(self.rows[0].rows),
            metrics.flops_of_step(config, arrays), peak and peak * self.step.mesh.size,
        )  # fmt: skip

    def _log(self, start: int) -> Any:
        if not self.machine.is_main:
            return _Silent()
        return Log(self.workdir, start, self.config.train, configs.to_dict(self.config), self.say)

    def _write_description(self) -> None:
        """Writes config.yaml and rules.yaml as resolved, versions.json and a tokenizer that was trained.

        These are enough to repeat the run.
        """
        if not self.machine.is_main:
            return
        self.workdir.mkdir(parents=True, exist_ok=True)
        if made := self.rows[0].tokenizer:
            files.replace(self.workdir / layout.TOKENIZER, made.read_bytes())
        files.replace(self.workdir / layout.CONFIG, core_yaml.dump(configs.to_dict(self.config)))
        files.replace(self.workdir / layout.RULES, self.step.rules.text)
        packages = ("gspmd_lm", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "libtpu")
        about = {
            "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "command": versions.command(),
            "host": versions.host(),
            "commit": versions.commit(),
            "mesh": dict(self.step.rules.mesh),
            "rows": self.rows[0].description,
            "versions": versions.installed(packages) | {"device": self.machine.device_kind},
        }
        files.replace(self.workdir / layout.ABOUT, json.dumps(about, indent=2) + "\n")


class _Silent:
    """The log of every process but the first."""

    def write(self, step: int, values: Mapping[str, float]) -> None: ...

    def write_samples(self, step: int, samples: Sequence[Sample]) -> None: ...

    def close(self) -> None: ...


def _nothing_to_do(step: int, stop: int, best: Best, patience: int) -> str:
    """What to say where the checkpoint of a step leaves nothing to do."""
    if step >= stop:
        return f"the checkpoint is at step {step}: nothing to do up to step {stop} (--steps, train.steps)"
    return (
        f"the run ended early at step {step}: the last {best.since} evaluations were not better than that of step "
        f"{best.step}, so there is nothing to do (--set train.patience=0 goes on)"
    )


def _due(step: int, every: int) -> bool:
    """Whether `step` is a multiple of `every`; 0 means never."""
    return every > 0 and step % every == 0
