"""train and eval: carry out a run in a workdir, from its data to its checkpoints."""

import contextlib
import datetime
import io
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags
from etils import epath
from rich.console import Console

from gspmd_lm import config as configs
from gspmd_lm.cli import session
from gspmd_lm.config import Config
from gspmd_lm.data import loader, sources, trained
from gspmd_lm.data.tokenizer import trained_size
from gspmd_lm.errors import InputError
from gspmd_lm.foresight import compile, explain, exported, table
from gspmd_lm.hardware import target
from gspmd_lm.infer.samples import Writer
from gspmd_lm.runtime import compile_cache as compile_caches
from gspmd_lm.runtime import processes
from gspmd_lm.sharding.rules import Problem
from gspmd_lm.show import comparison
from gspmd_lm.show.report import paragraph
from gspmd_lm.train import loop, state, step
from gspmd_lm.train.programs import Foresee, Foreseen, Programs
from gspmd_lm.train.step import Step
from gspmd_lm.workdir import trackers


def run(verb: str, values: flags.FlagValues) -> int:
    """Trains, or evaluates the held-out rows, and returns the exit code."""
    profile = _profile(values.profile) if verb == "train" else None
    if verb == "eval":
        session.needs_weights(values, "eval --workdir=DIR, the folder of a run that has saved a checkpoint")
        if values.output:
            raise InputError(
                f"--output={values.output}: only for the results of --continuations=FILE.jsonl\n  fix   drop it"
            )
    here = session.begin(values)
    built, warnings = _built(here)
    if verb == "train" and values.dry_run:
        if here.machine.is_main:
            table.show(here.config, here.rules, built.arrays, here.console)
        return 0
    if verb == "train" and values.train_tokenizer:
        return _train_tokenizer(here.config, values.train_tokenizer, here.console)
    if verb == "eval":
        with _opened(here, built, warnings, writes=False, compile_cache=values.compile_cache) as run:
            run.evaluate(values.step)
        return 0
    executable = _executable(values, built) if values.executable else None
    with _opened(here, built, warnings, True, values.compile_cache, profile, executable) as run:
        processes.last_words(_LAST_WORDS.format(run.workdir))
        _train(run, values.steps, values.step)
    return 0


def train(here: session.Session, steps: int | None = None) -> tuple[dict[str, float], epath.Path]:
    """Trains to step `steps`, or the config's last one. Returns what was logged last, and the workdir."""
    built, warnings = _built(here)
    with _opened(here, built, warnings) as run:
        return _train(run, steps), run.workdir


def _train(run: loop.Run, steps: int | None, step: int | None = None) -> dict[str, float]:
    last = run.train(run.config.train.steps if steps is None else steps, step)
    if last:
        run.say(f"metrics {run.workdir / 'metrics.jsonl'}, checkpoints {run.workdir / 'checkpoints'}")
    return last


def _built(here: session.Session) -> tuple[Step, list[Problem]]:
    """The step of a session, and the warnings of its check, which are said."""
    arrays, warnings = state.checked(here.config, here.rules, here.machine.platform)
    for warning in warnings:
        here.say(f"warning: {warning}")
    built = step.build(here.config, here.rules, arrays, here.devices)
    if built.attention:
        here.say(f"attention: {built.attention}")
    return built, warnings


def _rate_said(config: Config) -> str:
    """The learning rate of fine-tuning, and the usual one where the config states another; '' for new weights."""
    begun, lora, rate = config.train.init_from, config.model.lora, config.optimizer.learning_rate
    usual = configs.usual_rate({"lora": lora}, {"init_from": begun})
    if not begun and not lora:
        return ""
    what = "adapters" if lora else f"fine-tuning of {begun}"
    other = f"; usual is {usual:g}: --set optimizer.learning_rate=null" if rate != usual else ""
    return f"{what}: learning rate up to {rate:g}{other}"


@contextlib.contextmanager
def _opened(
    here: session.Session,
    built: Step,
    warnings: Sequence[Problem],
    writes: bool = True,
    compile_cache: str | None = None,
    profile: tuple[int, int] | None = None,
    executable: Any = None,
) -> Iterator[loop.Run]:
    """A context of the run in the session's workdir, or in a fresh one; `writes` says whether it trains there."""
    config, rules, machine, console = here.config, here.rules, here.machine, here.console
    if here.workdir is None and machine.process_count > 1:
        raise InputError(
            "each of several processes would choose its own workdir\n  fix   give all of them the same --workdir=DIR"
        )
    with contextlib.ExitStack() as stack:
        writer = None
        if writes:
            if config.train.samples:
                progress = session.progress(console) if machine.is_main else None
                writer = Writer(trained.made(config, progress), rules, here.devices, machine.platform)
            trackers.check(config.train.trackers)
            workdir = here.workdir or _fresh(f"{config.name}-{rules.name}")
            check_lock = stack.enter_context(session.written(here, workdir))
        else:
            workdir, check_lock = epath.Path(here.workdir or ""), lambda: None
        run = loop.Run(
            programs=Programs(
                built,
                machine,
                here.say,
                compile_caches.enable(compile_cache),
                foresee=_foresee(built, warnings) if writes else None,
                executable=executable,
            ),
            open_rows=lambda: loader.open(config, session.progress(console) if machine.is_main else None),
            workdir=workdir,
            console=console,
            profile=profile,
            check_lock=check_lock,
            writer=writer,
        )
        mesh = " x ".join(f"{name}={size}" for name, size in rules.mesh.items())
        simulated, several = "simulated " if machine.simulated else "", "s" * (len(here.devices) > 1)
        run.say(f"{config.name}: {built.arrays.parameter_count:,} parameters under {rules.path}, mesh {mesh} on "
                f"{len(here.devices)} {simulated}{machine.device_kind} device{several}")  # fmt: skip
        run.say(f"workdir {workdir}")
        if writes and (said := _rate_said(config)):
            run.say(said)
        yield run


_LAST_WORDS = """this process was ended from outside, or by a fault in a library; its last lines are above
  fix   give the same command again: it goes on from the newest checkpoint in {}"""


def _fresh(name: str) -> epath.Path:
    """The path of a folder in runs/ that does not exist yet."""
    began = f"{name}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    candidates = (epath.Path("runs") / f"{began}{f'-{number}' if number else ''}" for number in itertools.count())
    return next(path for path in candidates if not path.exists())


def _foresee(built: Step, problems: Sequence[Problem]) -> Foresee:
    """A function that says what a compiled step costs here. It raises InputError if the step does not fit."""

    def foresee(compiled: Any, options: Mapping[str, Any], trace_s: float, compile_s: float) -> Foreseen:
        here = target.of(list(built.mesh.devices.flat))
        program = compile.described(built, compiled, options, here, trace_s, compile_s)
        found = explain.report(built.config, built.rules, here, built.arrays, problems, program)
        if not found.memory.fits:
            page = io.StringIO()
            comparison.show([found], Console(file=page, width=120))
            raise InputError(
                f"{page.getvalue()}the layout does not fit, and nothing was started\n"
                "  fix   rules that split or recompute more (fsdp, remat: block), or a smaller data.batch"
            )
        return Foreseen(
            paragraph(found),
            found.prediction.step_time_s if found.prediction else None,
            found.memory.peak_bytes,
            here.chip and here.chip.peak_bf16_flops_per_s,
        )

    return foresee


def _executable(values: flags.FlagValues, built: Step) -> Any:
    here = target.of(list(built.mesh.devices.flat))
    wanted = compile.CompileRequest(built.config, built.rules, here, export=True)
    return exported.load(
        Path(values.executable), wanted.key(), wanted.name, compile.compilers(here), trust=values.trust
    )


def _profile(span: str | None) -> tuple[int, int] | None:
    if span is None:
        return None
    start, colon, stop = span.partition(":")
    if not colon or not start.isdigit() or not stop.isdigit() or int(start) >= int(stop):
        raise InputError(f"--profile={span}: not two steps, the first before the second\n  fix   --profile=10:13")
    return int(start), int(stop)


def _train_tokenizer(config: Config, path: str, console: Console) -> int:
    source = sources.open(config.data, session.progress(console))
    made = trained.train(source.documents(), trained_size(config.data.tokenizer) or config.model.vocab, path)
    console.print(f"{path}: {made.vocab_size:,} tokens, trained on {source.description}", soft_wrap=True)
    if source.notes:
        console.print(source.notes, soft_wrap=True, markup=False)
    console.print(f"use it with --set data.tokenizer={path} --set model.vocab=0", soft_wrap=True)
    return 0
