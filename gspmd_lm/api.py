"""What programs call: the functions of `import gspmd_lm`. Each says what it takes, gives back and raises.

A config is one of `load_config` or its name, and rules are those of `load_rules` or their name. Heavy libraries are
imported where they are used, so that a config or a rules file is read without jax.
"""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gspmd_lm import config as configs
from gspmd_lm import files
from gspmd_lm.config import Config
from gspmd_lm.errors import InputError
from gspmd_lm.hardware import capacity
from gspmd_lm.hardware import target as targets
from gspmd_lm.runtime.quiet import import_jax
from gspmd_lm.sharding import rules_file
from gspmd_lm.sharding.axes import DECODER
from gspmd_lm.sharding.rules import Rules
from gspmd_lm.workdir import layout

if TYPE_CHECKING:
    from gspmd_lm.explore.notebook import Explorer
    from gspmd_lm.foresight.report import Report
    from gspmd_lm.infer.loaded import Model, TaskModel
    from gspmd_lm.program.task import Task
    from gspmd_lm.runtime.startup import Runtime
    from gspmd_lm.show.notebook import ComparedRows, Comparison, Explanation, FoundPlan, ShownDryRun, Trained
    from gspmd_lm.train.step import Step
    from gspmd_lm.workdir.checkpoint import OpenCheckpoints

_log = logging.getLogger("gspmd_lm")
SIMULATED = 8  # devices, where the rules do not say how many


def load_config(name: str, overrides: str | Sequence[str] = (), workdir: str | None = None) -> Config:
    """The config of a decoder.

    Args:
        name: the path of a YAML file, or a name in configs/; or of a published model's config.json, or of its folder.
        overrides: `section.key=value`, or several of them, laid over the file.
        workdir: of a run whose tokenizer, if it has trained one, is that of the config.

    Raises:
        InputError: every problem of the file and of the overrides.
    """
    path, overrides = files.expand_user(name), _several(overrides)
    if os.path.isdir(path) or path.suffix == ".json":
        from gspmd_lm.convert import architecture

        if architecture.is_published(path):
            return _with_vocabulary(architecture.new_config(path, overrides), workdir)
    return _with_vocabulary(configs.load(name, overrides), workdir)


def _with_vocabulary(config: Config, workdir: str | None) -> Config:
    """The config with the size of its vocabulary, and with the tokenizer that was trained in the workdir."""
    if config.model.vocab and config.data.tokenizer == "bytes":
        return config
    from gspmd_lm.data import trained

    sized = trained.with_vocab_size(config)
    return trained.with_workdir_tokenizer(sized, workdir) if workdir else sized


def load_rules(name: str, task: "Task | None" = None, mesh: str = "", overrides: str | Sequence[str] = ()) -> Rules:
    """The rules of a file. Its mistakes are reported when the rules are used, with what does not fit the model.

    Args:
        name: the path of a YAML file, or a name in rules/; "none" is one device.
        task: the model whose names the file uses; None for the decoder.
        mesh: sizes laid over the file's mesh, such as "tensor=4" or "data=2,tensor=4".
        overrides: what follows --set on the command line, such as "rules.remat=block" or "rules.rules.heads=null".

    Raises:
        InputError: there is no such file, it is not a YAML mapping, or `mesh` or an override does not fit it.
    """
    return rules_file.load(name, mesh, task.names if task else DECODER, _several(overrides))


def start(rules: Rules | str, platform: str | None = None) -> "Runtime":
    """The devices of this program, simulated on the CPU where no accelerator is.

    Called before anything touches an accelerator, and after `jax.distributed.initialize` where several processes share
    the devices. A size of -1 in the mesh is filled from the devices, 8 simulated ones. A process by itself simulates
    8 or more, so that it can use several layouts: each takes the first of them.

    Args:
        rules: say how many devices are simulated.
        platform: cpu, gpu or tpu; None takes what is there.

    Raises:
        InputError: the platform is not there, or jax already runs with fewer devices.
    """
    import_jax()
    from gspmd_lm.runtime import processes, startup

    devices, count = _rules(rules).devices, processes.count()
    devices = max(SIMULATED, devices) if count == 1 else (devices if devices > 0 else SIMULATED) // count
    return startup.start(platform=platform, simulated_devices=max(1, devices), keep_memory=True)


def build(task: "Task | Config | str", rules: Rules | str) -> "Step":
    """The step of what is computed on this program's devices. Nothing is compiled or allocated yet.

    `step.compile` makes programs of `step.lower_init()`, `step.lower_train()` and `step.lower_evaluate()`. Warnings are
    logged. `step.batch_shardings` says where a batch goes, `step.abstract_state` what a checkpoint is restored into.

    Raises:
        InputError: everything that is wrong in the rules file or does not fit the model or the devices, each with its
            row and a fix.
    """
    import jax

    from gspmd_lm.runtime import startup
    from gspmd_lm.train import state, step

    task = _task(task)
    rules = _rules(rules, task)
    devices = startup.devices_of(rules.devices)
    filled = rules.fill(len(devices))
    arrays, warnings = state.arrays_and_warnings(task, filled, jax.default_backend())
    for warning in warnings:
        _log.warning("%s", warning)
    return step.build_step(task, filled, arrays, devices)


def dry_run(task: "Task | Config | str", rules: Rules | str, devices: int = SIMULATED) -> "ShownDryRun":
    """A table of every array: its shape, how it is split, and the bytes of it on each device. Nothing is compiled.

    It is a text. In a notebook it shows the mesh and each array as a picture, and `.draw("wq")` is that of one array in
    a terminal.

    Args:
        task: what is computed.
        rules: where its arrays live.
        devices: how many there are, where a size of the mesh is -1.

    Raises:
        InputError: as `build` does.
    """
    _simulate()
    from gspmd_lm.show import dry_run as shown
    from gspmd_lm.show import notebook
    from gspmd_lm.train import state

    task = _task(task)
    rules = _rules(rules, task)
    filled = rules.fill(rules.devices if rules.devices > 0 else devices)
    arrays, warnings = state.arrays_and_warnings(task, filled, "cpu")
    return notebook.ShownDryRun(shown.read(task, filled, arrays), [str(warning) for warning in warnings])


def checkpoints(workdir: str | Path, task: "Task | Config | str", keep: int = 3) -> "OpenCheckpoints":
    """A context of the checkpoints in a folder, which may be remote (gs://). It need not exist.

    `save(number, state, extra)` writes in the background; `restore(step.abstract_state)` gives (number, state, extra)
    under the rules of that step, whatever the rules were when it was saved, or None where nothing was saved.

    Args:
        workdir: the folder.
        task: whose checkpoints they are; those of another task are refused.
        keep: how many of the newest stay, for a task; of a config, train.keep_checkpoints does.

    Raises:
        InputError: the path is not a folder. The methods raise it for another model's checkpoint and for damage.
    """
    from gspmd_lm.workdir import checkpoint

    task = _task(task)
    if isinstance(task, Config):
        return checkpoint.run_checkpoints(str(workdir), task)
    kept = configs.Train(steps=1, keep_checkpoints=keep)
    return checkpoint.open_checkpoints(str(workdir), kept, {"task": task.name}, _log.warning)


def train(
    config: "Config | Task | str",
    rules: Rules | str = "none",
    workdir: str | Path | None = None,
    steps: int | None = None,
    platform: str | None = None,
    data: "Callable[[int], Mapping[str, Any]] | None" = None,
    held_out: "Sequence[Mapping[str, Any]]" = (),
) -> "Trained":
    """Trains what a config or a task computes, as the command line does: data, checkpoints, evaluation, metrics.

    A run goes on from the newest checkpoint in its workdir.

    Args:
        config: what is computed; a task says in `train` how long.
        rules: where it runs; says how many devices are simulated where no accelerator is.
        workdir: folder of the run; None: a fresh one in runs/.
        steps: where to stop; None: at train.steps.
        platform: cpu, gpu or tpu; None takes what is there.
        data: of a task, or in place of an encoder's: a function from a step's number to its batch of numpy arrays.
        held_out: the batches that evaluation reads.

    Returns:
        The values last logged by name, such as loss and step_time_s; none where the run stands there already. It has
        the run's `workdir`, and shows its losses in a notebook. Its `has_work_left` is true where SIGTERM or Ctrl-C
        ended the run, which is saved then, before its last step: the same call goes on.

    Raises:
        InputError: what is wrong with the config, the rules or the workdir.
        RunFailed: the loss was not finite for too long, or the disk failed.
    """
    folder = str(workdir) if workdir else None
    config = _task(config)
    rules = _rules(rules, config)
    config = _with_vocabulary(config, folder) if isinstance(config, Config) else config
    machine = start(rules, platform)
    from gspmd_lm import session
    from gspmd_lm.show import notebook

    begun, rows = session.begin(config, rules, machine, folder), session.task_rows(config, data, held_out)
    return notebook.Trained(*session.train(begun, steps, rows))


def load(
    folder: str | Path,
    rules: Rules | str | None = None,
    step: int | None = None,
    platform: str | None = None,
    overrides: str | Sequence[str] = (),
) -> "Model":
    """A model with its weights on this program's devices: `load("runs/a").generate("Once upon")`.

    Args:
        folder: that of a run, here or in a bucket, which train or convert left a checkpoint in; or of a published
            model, with its config.json, *.safetensors and tokenizer.json, which are read as they are.
        rules: where the weights live; None: as the run's rules file says, and one device for a published model. A run
            of many devices can be loaded on one with "none".
        step: of a run's checkpoint; None: the newest that is not in doubt.
        platform: cpu, gpu or tpu; None takes what is there.
        overrides: `section.key=value`, or several of them, laid over the config, such as model.padded_vocab=50264 for a
            published model whose vocabulary the rules do not divide.

    Raises:
        InputError: the folder is neither, has no checkpoint of its config, or has a model that is not supported; or
            the rules do not fit the model or the devices.
    """
    _simulate()
    from gspmd_lm import session
    from gspmd_lm.infer.loaded import Model

    place = str(files.open_path(str(folder)))
    published = session.read_published(place, _several(overrides))
    if not (published or layout.find_earlier(place, layout.CONFIG)):
        raise session.no_model(str(folder))
    config = published.config if published else load_config(f"{place}/{layout.CONFIG}", overrides, place)
    kept = None if published else layout.find_earlier(place, layout.RULES)
    chosen = _rules(rules or kept or "none")
    begun = session.begin(config, chosen, start(chosen, platform), place)
    return Model(
        config,
        begun.rules,
        begun.devices,
        begun.machine.platform,
        place,
        session.reader(begun, place, step, published),
        begun.say,
    )


def load_task(
    folder: str | Path, task: "Task", rules: Rules | str | None = None, step: int | None = None
) -> "TaskModel":
    """A model of one's own with the weights of a run that trained it: it evaluates batches, and generates.

    Args:
        folder: that of the run.
        task: what the run trained.
        rules: where the weights live; None: as the run's rules file says.
        step: of the checkpoint; None: the newest that is not in doubt.

    Raises:
        InputError: the folder has no checkpoint of the task, or the rules do not fit the model or the devices.
    """
    _simulate()
    from gspmd_lm import session

    chosen = _rules(rules or layout.find_earlier(str(folder), layout.RULES) or "none", task)
    return session.task_model(task, chosen, start(chosen), str(folder), step)


def explain(
    task: "Task | Config | Callable[[Sequence[Any]], Any] | str",
    rules: Rules | str | None = None,
    target: str = "",
    phase: str = "train",
    export: str | Path | None = None,
    assume: str = "",
    price: str | Sequence[str] = (),
) -> "Explanation":
    """What a layout costs on hardware that need not be here: memory, collectives with the rows that cause them,
    predicted time, floor and warnings. It shows itself, in a notebook as a page with drawings and elsewhere as text;
    docs/foresight.md explains it.

    Args:
        task: what is computed. Or any jitted step, with a target alone: a function from devices to
            `jax.jit(update).trace(state, batch)`, or where it stands, such as "train.py:step"; docs/foresight.md.
        rules: where its arrays live.
        target: cpu:8, v5e:4x4, v5p-128, h100:8, ...
        phase: train; of a config, also prefill or decode.
        export: a file that the compiled train step is kept in; on the target, train --executable runs it.
        assume: what is known of the whole job, as --assume says it: "preemptions_per_day=4,notice_s=30".
        price: dollars per chip and hour, on demand and on spot: "v5e=1.2/0.6".

    Raises:
        InputError: as `build` does, or the target is not known.
        RunFailed: the compiler failed.
    """
    if callable(task) or (isinstance(task, str) and ":" in task and (rules is None or not target)):
        row = rules.path if isinstance(rules, Rules) else rules
        if other := row or export or assume or price or (phase if phase != "train" else None):
            fix = f"explain(step, target={target or row or 'v5p:2x2x2'!r})"
            raise InputError(f"explain: {other}: one's own step is given a target alone, by its name\n  fix   {fix}")
        _simulate()
        from gspmd_lm.foresight import explain as reports
        from gspmd_lm.show import notebook

        return notebook.Explanation(**vars(reports.report_of_step(task, target, _log.info)))
    if rules is None:
        raise InputError("explain needs rules\n  fix   explain('tiny', 'fsdp8', 'v5p:2x2x2')")
    return compare(task, [rules], target, phase, export, assume, price)[0]


def compare(
    task: "Task | Config | str",
    layouts: Rules | str | Sequence[Rules | str],
    target: str,
    phase: str = "train",
    export: str | Path | None = None,
    assume: str = "",
    price: str | Sequence[str] = (),
) -> "Comparison":
    """A report as of `explain` for each of `layouts`, in their order; compiled side by side. It shows itself too.

    Raises:
        InputError: everything that is wrong with any of them, before anything is compiled.
        RunFailed: the compiler failed.
    """
    place = targets.parse(target)
    assumed = capacity.read_assumptions(assume)
    chip_price = place.price(capacity.read_prices(_several(price), [place.chip]))
    task = _task(task)
    rules = [_rules(one, task) for one in ([layouts] if isinstance(layouts, Rules | str) else layouts)]
    _simulate()
    from gspmd_lm.foresight import explain as reports
    from gspmd_lm.plan import advice
    from gspmd_lm.show import notebook

    reports_of_layouts = reports.reports(task, rules, place, _log.info, Path(export) if export else None, phase)
    reports_of_layouts = [reports.with_job(report, assumed, chip_price) for report in reports_of_layouts]
    return notebook.Comparison(advice.with_fixes(task, reports_of_layouts, rules, place))


def compare_rows(task: "Task | Config | str", before: Rules | str, after: Rules | str, target: str) -> "ComparedRows":
    """What each row changes in which two layouts differ: collectives, arrays, memory and time. Nothing is compiled.

    The rows are applied one after the other, from `before` to `after`; `.changes` has them in this order. It shows
    itself, in a notebook as a page.

    Args:
        task: what is computed.
        before: the layout that the changes begin with.
        after: the one that they lead to.
        target: the hardware: v5p:2x2x2, h100:8, cpu:8, ...

    Raises:
        InputError: everything that is wrong with either layout, or the target is not known.
    """
    place = targets.parse(target)
    task = _task(task)
    first, last = (_rules(one, task) for one in (before, after))
    _simulate()
    from gspmd_lm.plan import row_changes
    from gspmd_lm.show import notebook

    return notebook.ComparedRows(**vars(row_changes.compare_rows(task, first, last, place)))


def plan(task: "Task | Config | str", target: str, minutes: float = 15, phase: Any = "train") -> "FoundPlan":
    """The best layout of a config or task on hardware that need not be here, and the other layouts of the search.

    `.rules` are those of the best layout, and `.yaml` is the text of their file; `.best` is None where nothing fits.
    It shows itself, in a notebook as a page. docs/plan.md explains the search.

    On cpu:N, which has no times, layouts are ranked by what they send and by memory.

    Args:
        task: what is computed.
        target: v5e:4x8, v5p:4x4x4, h100:2x8, cpu:8, ...
        minutes: nothing new is compiled after that.
        phase: train; of a config, also decode, for the layout to generate with.

    Raises:
        InputError: the target is not known, or no mesh of its devices divides the batch.
    """
    place = targets.parse(target)
    task = _task(task)
    _simulate()
    from gspmd_lm.plan import search
    from gspmd_lm.show import notebook

    rank_by = search.ranking(place)
    outcome = search.plan(task, place, minutes=minutes, say=_log.info, rank_by=rank_by, phase=phase)
    return notebook.FoundPlan.of(outcome, task)


def explore(
    task: "Task | Config | Callable[[Sequence[Any]], Any] | str",
    rules: Rules | str | None = None,
    target: str = "v5p:2x2x2",
    port: int = 0,
) -> "Explorer":
    """A page of this machine on which a rules file shows what it does while it is edited; docs/explore.md explains it.

    It is served until `.close()`, or until the program ends. `.url` is its address; a notebook shows it in a frame.

    Args:
        task: what is computed, as `explain` takes it.
        rules: the rules file that is edited; None for a step of one's own, which brings its shardings.
        target: v5p:4x4x4, h100:8, cpu:8, ...
        port: of the page; 0: any that is free.

    Raises:
        InputError: there is no such file or target, or the extra `explore` is not installed.
    """
    from gspmd_lm.explore import opening

    place = task if isinstance(task, str) and ":" in task else None
    name = task if isinstance(task, str) and not place else ""
    given = None if isinstance(task, str) else task
    workbench = opening.make_workbench(load_config, rules, target, name, given=given, program=place)
    opening.check_installed()
    from gspmd_lm.explore.notebook import Explorer

    return Explorer(workbench, port)


def show(*reports: "Report", width: int = 120) -> str:
    """The page of a report, or the comparison of several, as the command line prints it."""
    from gspmd_lm.show import notebook

    return notebook.text(reports, width)


def _simulate() -> None:
    """Imports jax, and has devices simulated if a CPU is all there is, for the layouts that come after."""
    import_jax()
    from gspmd_lm.runtime import startup

    startup.simulate_later(SIMULATED)


def _several(overrides: str | Sequence[str]) -> Sequence[str]:
    return [overrides] if isinstance(overrides, str) else overrides


def _task(task: "Task | Config | str") -> "Task | Config":
    """The config or task that is given, or the config of that name. Raises InputError for anything else."""
    if isinstance(task, str | Config):
        return load_config(task) if isinstance(task, str) else task
    import_jax()
    from gspmd_lm.program.task import Task

    if not isinstance(task, Task):
        raise InputError(
            f"{getattr(task, '__name__', task)!r}: this is no config, task or name of a config\n"
            "  fix   load_config(...) or Task(...); of a step of one's own, use explain(step, target=...) or "
            "explore(step, target=...)"
        )
    return task


def _rules(rules: Rules | str, task: "Task | Config | None" = None) -> Rules:
    if not isinstance(rules, str):
        return rules
    return load_rules(rules, None if task is None or isinstance(task, Config) else task)
