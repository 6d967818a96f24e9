"""One process with its config, rules and devices, and what it begins: a run in a workdir, or reading weights."""

import contextlib
import dataclasses
import datetime
import functools
import hashlib
import itertools
import logging
import socket
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from etils import epath
from rich.console import Console

from gspmd_lm import config as configs
from gspmd_lm import files, versions
from gspmd_lm.config import Config, paths
from gspmd_lm.convert import architecture, pretrained
from gspmd_lm.convert.pretrained import Pretrained
from gspmd_lm.data import ahead, loader, trained
from gspmd_lm.data.batches import Batches
from gspmd_lm.data.tokenizer import Tokenizer
from gspmd_lm.errors import InputError, is_whole_number, printable
from gspmd_lm.foresight import compile, explain, step_records
from gspmd_lm.foresight.propagation import read_train
from gspmd_lm.foresight.report import Report
from gspmd_lm.hardware import target
from gspmd_lm.hardware.network import Network
from gspmd_lm.infer import eight_bits
from gspmd_lm.infer.generate import SampleGenerator
from gspmd_lm.infer.loaded import TaskModel
from gspmd_lm.program.task import Task
from gspmd_lm.runtime import compile_cache as compile_caches
from gspmd_lm.runtime import processes, startup, topology
from gspmd_lm.runtime.startup import Runtime
from gspmd_lm.sharding import mesh
from gspmd_lm.sharding.problems import Problem
from gspmd_lm.sharding.quantised import EIGHT_BITS
from gspmd_lm.sharding.rules import Rules, describe_mesh
from gspmd_lm.show import comparison, terminal
from gspmd_lm.show.progress import progress
from gspmd_lm.show.report import first_lines
from gspmd_lm.train import decoder, loop, state, step
from gspmd_lm.train.optimizer import unfinished_schedule_note
from gspmd_lm.train.programs import MeasuredStep, PreRunReport, ReportStep, TrainPrograms
from gspmd_lm.train.step import Step
from gspmd_lm.units import plural
from gspmd_lm.workdir import checkpoint, history, layout, lock, orbax_folder, trackers

_log = logging.getLogger("gspmd_lm")

OpenRows = Callable[[], tuple[loop.Rows, loop.Rows | None]]  # to train on, and to evaluate on
ReadWeights = Callable[[Any], Any]  # a tree of jax.ShapeDtypeStruct -> the weights, placed and cast as it says


@dataclasses.dataclass(frozen=True)
class Session:
    """One process of a command or of a program."""

    config: Any  # config.Config; of a model of one's own, its Task
    rules: Rules  # filled: no size is -1
    machine: Runtime
    devices: list[Any]
    console: Console
    workdir: epath.Path | None
    chip_file: str = ""  # which describes the chip of the devices; "": the table of chips does

    def say(self, message: str) -> None:
        if self.machine.is_main:
            self.console.print(printable(message), soft_wrap=True, highlight=False, markup=False)


def begin(
    config: Config | Task,
    rules: Rules,
    machine: Runtime,
    workdir: str | None,
    stderr: bool = False,
    flags: Mapping[str, Any] = types.MappingProxyType({}),
    devices: list[Any] | None = None,
    chip_file: str = "",
) -> Session:
    """The session of a process whose devices are started. stderr: messages go there, because stdout has results.

    Raises InputError if other processes of the run were given something else. flags: of the command line. devices:
    stand-ins where nothing is to run; None: those that `rules` take. chip_file: the description of their chip.
    """
    devices = startup.devices_of(rules.devices) if devices is None else devices
    folder, console = files.open_path(workdir) if workdir else None, terminal.console(240, stderr)
    session = Session(config, rules.fill(len(devices)), machine, devices, console, folder, chip_file)
    if chip_file:
        session.say(f"--chip={chip_file}: {target.read_own_chip(chip_file).note}")
    crossing = mesh.cross_slices(session.rules, mesh.count_slices(devices), session.say)
    session = dataclasses.replace(session, rules=crossing)
    if processes.several():
        _log.info(topology.describe_process(machine.process_index, socket.gethostname(), jax.local_devices()))
        if order := topology.describe_order(devices):
            session.say(order)
        processes.compare(_facts(session) | {"flags": dict(flags)}, session.say)
    return session


def _facts(session: Session) -> dict[str, Any]:
    """The facts, besides flags and data, that must be equal in every process of a run."""
    packages = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy", "tokenizers", "libtpu")
    return {
        "config": state.describe_run(session.config),
        "rules": session.rules.facts(),
        "versions": versions.installed_versions(packages) | {"gspmd_lm's code": versions.source()[:12]},
    }


def compare_texts(session: Session, tokens: Tokenizer, texts: Iterable[npt.ArrayLike]) -> None:
    """Raises InputError in every process if they have read different texts or tokenizers."""
    if not processes.several():
        return  # a checksum of a long text would take long
    sums = hashlib.sha256()
    for ids in texts:
        row = np.asarray(ids, np.float64)  # tokens, or the frames of a sound
        sums.update(np.int64(row.size).tobytes() + row.tobytes())
    processes.compare({"tokenizer": tokens.fingerprint, "texts, as tokens": sums.hexdigest()}, session.say)


# Weights


def holds_published(folder: str) -> bool:
    """Whether a folder has a config.json and is not that of a run."""
    path = files.expand_user(folder)
    return not files.is_remote(folder) and not layout.is_run(path) and (path / architecture.CONFIG).is_file()


def read_published(folder: str, overrides: Sequence[str] = ()) -> Pretrained | None:
    """The model of a folder that transformers wrote, checked; None for a run's folder, and for any other.

    overrides: section.key=value. Raises InputError if the model is not supported or has no tokenizer.
    """
    if not holds_published(folder):
        return None
    model = pretrained.open_folder(
        files.expand_user(folder), overrides, fix=f"convert --from={folder} --workdir=W {{flags}}, then use W,"
    )
    if not model.reads_text:
        raise InputError(
            f"{folder}: there is no {architecture.TOKENIZER}, so the model cannot read text\n"
            f"  fix   with transformers, AutoTokenizer.from_pretrained('{folder}').save_pretrained('{folder}') writes "
            "one from what there is"
        )
    return model


def reader(session: Session, folder: str, step: int | None, model: Pretrained | None) -> ReadWeights:
    """A function that reads the weights of a folder, as often as it is called. None are read yet.

    model: what `read_published` says of the folder. Raises InputError if a run's folder has no weights of the config's
    model, or if `step` is asked of a published model.
    """
    if not model:
        with checkpoint.run_checkpoints(folder, session.config) as checkpoints:
            if not checkpoints.candidates(step):
                raise no_checkpoint(folder)
        return lambda wanted: _restore(session, folder, wanted, step)
    if step is not None:
        raise InputError(f"step {step}: {folder} is a published model, which has no steps\n  fix   drop it")

    def read(wanted: Any) -> Any:
        return model.load(
            jax.tree.map(lambda like: like.sharding, wanted), jax.tree.map(lambda like: like.dtype, wanted)
        )

    return eight_bits.reading(model.config.model, read)


def _restore(session: Session, workdir: str, wanted: Any, step: int | None) -> Any:
    with checkpoint.run_checkpoints(workdir, session.config, session.say) as checkpoints:
        chosen = checkpoints.choose(step)
        assert chosen is not None, "reader() has seen a checkpoint"
        model = session.config.model
        read = functools.partial(checkpoints.read_weights, chosen, part=model.weight_dtype in EIGHT_BITS)
        return eight_bits.reading(model, read)(wanted)


def task_model(task: Task, rules: Rules, machine: Runtime, folder: str, step: int | None) -> TaskModel:
    """A model of one's own with the weights of checkpoint `step` of a run, or of the newest.

    Raises InputError if the run's folder has none of the task, or the rules do not fit.
    """
    begun = begin(task, rules, machine, folder)
    built, _ = build_step(begun)
    with checkpoint.open_checkpoints(
        folder, task.train or configs.Train(steps=1), {"task": task.name}, begun.say
    ) as checkpoints:
        restored = checkpoints.restore_weights(built.abstract_state.params, step)
    if restored is None:
        raise no_checkpoint(folder)
    return TaskModel(built, restored[1])


def no_checkpoint(workdir: str) -> InputError:
    """The error for a workdir without weights."""
    if holds_published(workdir):
        return InputError(
            f"{workdir}: no checkpoint; it is the folder of a published model\n"
            f"  fix   convert --from={workdir} --workdir=W, then --workdir=W"
        )
    return InputError(
        f"{workdir}: no checkpoint\n  fix   train there first, or bring one: convert --from=DIR --workdir={workdir}"
    )


def no_model(folder: str) -> InputError:
    """The error for a folder that is neither a run's nor that of a published model."""
    what = "neither a config.yaml nor a config.json in it" if Path(folder).is_dir() else "no such folder here"
    fix = (
        "give the folder of a run, which train or convert left, or of a published model with its config.json, "
        "*.safetensors and tokenizer.json; nothing is fetched"
    )
    return InputError(f"{folder}: {what}\n  fix   {paths.download(folder, fix)}")


# A run


def task_rows(task: Config | Task, data: Any, held_out: Sequence[Any]) -> OpenRows | None:
    """A function that opens the batches of a task, or those given for an encoder's config; None for any other config.
    Raises InputError where they do not fit it.
    """
    if isinstance(task, Config) and task.objective != "causal" and data is not None:
        task = decoder.task(task)
    if isinstance(task, Config):
        if data or held_out:
            raise InputError("train: data and held_out are a task's\n  fix   say in the config's data what is read")
        return None
    settings, wrong = task.train, ""
    if settings is None or data is None:
        wrong = "the task has no train" if settings is None else "there is no data"
    elif settings.samples or settings.init_from:
        wrong = "train.samples and train.init_from need the decoder of a config"
    elif settings.keeps_best and not held_out:
        wrong = "train.keep_best and train.patience need held_out"
    elif held_out and task.changed_paths and not task.evaluate and not task.is_module:
        wrong = "held_out needs evaluate in the task, since sums() changes the model's state"
    if wrong or data is None:
        raise InputError(
            f"train: task {task.name}: {wrong}\n"
            "  fix   Task(..., train=gspmd_lm.config.Train(steps=1000)), and train(task, rules, data=batch), where "
            "batch(step) gives numpy arrays; held_out has such batches"
        )
    shapes = task.batch(task.rows)
    evaluation = Batches(held_out.__getitem__, shapes, "evaluation", len(held_out)) if held_out else None
    return lambda: (Batches(data, shapes), evaluation)


def train(
    session: Session, steps: int | None = None, rows: OpenRows | None = None
) -> tuple[dict[str, float], epath.Path, bool]:
    """Trains to step `steps`, or the config's last one.

    Returns what was logged last, the workdir, and whether work is left because the run was asked to stop.

    rows: opens the data, of a model of one's own.
    """
    if steps is not None and not is_whole_number(steps, 1):
        raise InputError(f"steps={steps}: not a step to stop at\n  fix   a whole number, or None for train.steps")
    built, warnings = build_step(session)
    with open_run(session, built, warnings, rows=rows) as run:
        return train_to(run, steps), run.workdir, run.has_work_left


def train_to(run: loop.Run, steps: int | None, step: int | None = None) -> dict[str, float]:
    """Trains a run to step `steps`, from checkpoint `step` or the newest. Returns what was logged last."""
    last = run.train(run.settings.steps if steps is None else steps, step)
    if last:
        run.say(f"metrics {run.workdir / layout.METRICS}, checkpoints {run.workdir / layout.CHECKPOINTS}")
    return last


def build_step(session: Session) -> tuple[Step, list[Problem]]:
    """The step of a session, and the warnings of its check, which are said."""
    arrays, warnings = state.arrays_and_warnings(session.config, session.rules, session.machine.platform)
    for warning in warnings:
        session.say(f"warning: {warning}")
    built = step.build_step(session.config, session.rules, arrays, session.devices)
    for choice in built.choices:
        session.say(choice)
    return built, warnings


@contextlib.contextmanager
def open_run(
    session: Session,
    built: Step,
    warnings: Sequence[Problem],
    writes: bool = True,
    compile_cache: str | None = None,
    profile: tuple[int, int] | None = None,
    executable: Any = None,
    rows: OpenRows | None = None,
) -> Iterator[loop.Run]:
    """A context of the run in the session's workdir, or in a fresh one; `writes` says whether it trains there.

    rows: opens the data; None: those of the config.
    """
    config, rules, machine, console = session.config, session.rules, session.machine, session.console
    settings = built.task.train
    assert settings is not None, "a config has a section train, and api.train asks for it"
    if session.workdir is None and machine.process_count > 1:
        raise InputError(
            "each of several processes would choose its own workdir\n  fix   give all of them the same --workdir=DIR"
        )
    built.check_held(built.arrays_within_step if writes else {"weights": built.arrays_between_steps["weights"]})
    with contextlib.ExitStack() as stack:
        writer = None
        if writes:
            if settings.samples:
                shown = progress(console) if machine.is_main else None
                writer = SampleGenerator(
                    trained.with_trained_tokenizer(config, shown), rules, session.devices, machine.platform
                )
            trackers.check_installed(settings.trackers)
            workdir = session.workdir or _fresh_workdir(f"{config.name}-{rules.name}")
            check_lock = stack.enter_context(exclusive(session, workdir))
        else:
            workdir, check_lock = epath.Path(session.workdir or ""), lambda: None
        run = loop.Run(
            programs=TrainPrograms(
                built,
                machine,
                session.say,
                compile_caches.enable(compile_cache),
                report_step=_report_step(built, warnings, session) if writes else None,
                executable=executable,
            ),
            open_rows=rows or functools.partial(_open_rows, session, workdir),
            workdir=workdir,
            console=console,
            profile=profile,
            check_lock=check_lock,
            writer=writer,
        )
        device = f"{'simulated ' * machine.is_simulated}{machine.device_kind} device"
        run.say(
            f"{config.name}: {built.arrays.parameter_count:,} parameters under {rules.label}, "
            f"mesh {describe_mesh(rules.mesh)} on "
            f"{plural(len(session.devices), device)}"
        )
        run.say(f"workdir {workdir}")
        if writes and built.config:
            for line in filter(
                None, (_learning_rate(config), unfinished_schedule_note(config.optimizer, config.train.steps))
            ):
                run.say(line)
        yield run


def _open_rows(session: Session, workdir: epath.Path) -> tuple[loop.Rows, loop.Rows | None]:
    """The rows of a config, whose classes have the order that a run or the weights that it begins with gave them.

    Raises InputError if the run keeps other classes.
    """
    config, shown = session.config, progress(session.console) if session.machine.is_main else None
    known = history.known_classes(workdir, config.train.init_from) if config.objective == "classes" else ()
    if config.data.tokenize == "ahead":
        return ahead.open_ahead(config, shown, session.say)
    train_rows, held_out_rows = loader.open_loaders(config, shown, known)
    history.check_classes(workdir, known, train_rows.classes, session.say)
    return train_rows, held_out_rows


def exclusive(session: Session, workdir: epath.Path) -> contextlib.AbstractContextManager[Callable[[], None]]:
    """A context in which a workdir that can hold checkpoints exists, and this run alone writes to it."""
    orbax_folder.resolve(f"{workdir}/{layout.CHECKPOINTS}")  # a path that cannot hold them is refused before it is made
    return lock.exclusive(workdir, session.machine.is_main, session.say)


def _learning_rate(config: Config) -> str:
    """The learning rate of fine-tuning, and the usual one where the config states another; '' for new weights."""
    begun, lora, rate = config.train.init_from, config.model.lora, config.optimizer.learning_rate
    usual = configs.usual_rate({"lora": lora}, {"init_from": begun})
    if not begun and not lora:
        return ""
    what = "adapters" if lora else f"fine-tuning of {begun}"
    other = f"; usual is {usual:g}: --set optimizer.learning_rate=null" if rate != usual else ""
    return f"{what}: learning rate up to {rate:g}{other}"


def _fresh_workdir(name: str) -> epath.Path:
    began = f"{name}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    candidates = (epath.Path("runs") / f"{began}{f'-{number}' if number else ''}" for number in itertools.count())
    return next(path for path in candidates if not path.exists())


def _report_step(built: Step, problems: Sequence[Problem], session: Session) -> ReportStep:
    """A function that says what a compiled step costs here. It raises InputError if the step does not fit."""

    def report_step(compiled: Any, traced: Any, options: Mapping[str, Any], compile_s: float) -> PreRunReport:
        devices = target.from_devices(list(built.mesh.devices.flat), session.chip_file)
        try:
            reading = read_train(built, traced)
            program = compile.describe_compiled(built, compiled, reading, options, devices, compile_s)
            report = explain.report(built.config or built.task, built.rules, devices, built.arrays, problems, program)
        except Exception as error:  # a run does not end because nothing can be said of it
            return PreRunReport(f"warning: nothing is predicted ({_reason(error)})", None, lambda _: None, 0, 0.0, None)
        if not report.memory.fits:
            page = terminal.text_of(lambda console: comparison.show([report], console), 120)
            raise InputError(
                f"{page}the layout does not fit, and nothing was started\n"
                "  fix   rules that split or recompute more (fsdp, remat: block), or a smaller data.batch"
            )
        return PreRunReport(
            first_lines(report, [problem.message for problem in problems]),
            report.prediction.step_time_s if report.prediction else None,
            functools.partial(
                _compare_step, session, compiled, report, explain.network(program, built.rules, devices), built
            ),
            report.memory.peak_bytes,
            report.floor.flops * built.mesh.size,
            devices.chip and devices.chip.peak_bf16_flops_per_s,
        )

    return report_step


def _compare_step(
    session: Session, compiled: Any, report: Report, network: Network, built: Step, measured: MeasuredStep
) -> None:
    """Keeps a measured step beside the predicted one, and says how they differ. Whatever fails is a warning."""
    record = step_records.record(report, measured, network, session.machine.device_kind)
    if measured.trace:
        try:
            record = step_records.read_trace(
                record, measured, compiled.as_text(), network, target.local_partitions(built.mesh)
            )
        except Exception as error:  # the run has reached its end, whatever its trace holds
            session.say(f"warning: the trace cannot be read, and the parts of a step are not known ({_reason(error)})")
    try:
        step_records.keep(record)
    except Exception as error:  # a store raises what it likes
        session.say(f"warning: the record of the step is not kept ({_reason(error)})")
    if words := record.describe():
        session.say(words)


def _reason(error: Exception) -> str:
    """An error in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
