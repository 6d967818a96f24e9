"""What flags name: the config, the rules, the workdir and the machine. Files are read before jax is imported."""

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from absl import flags

from gspmd_lm import api, files
from gspmd_lm.cli import outputs
from gspmd_lm.config import Config, paths
from gspmd_lm.errors import InputError
from gspmd_lm.hardware.target import MOST_DEVICES
from gspmd_lm.runtime.quiet import import_jax
from gspmd_lm.sharding import rules_file
from gspmd_lm.sharding.rules import Rules
from gspmd_lm.workdir import layout

if TYPE_CHECKING:
    from gspmd_lm.runtime.startup import Runtime
    from gspmd_lm.session import ReadWeights, Session

_RULES_ALONE = {*rules_file.SECTIONS} - {"rules", "optimizer", "context"}  # what no config has a key of
PLAN = "plan"  # in place of a rules file
# Flags that may differ among the processes of a run, and flags of which the meaning is compared in place of the words.
_OF_ONE_PROCESS = ("coordinator", "num_processes", "process_id", "platform", "compile_cache", "help")
_READ = ("config", "rules", "set")


def read_config(values: flags.FlagValues) -> Config:
    """The config that --config names, else the one in the workdir, else tiny, with --set laid over it."""
    workdir = getattr(values, "workdir", None)
    name = values.config or layout.find_earlier(workdir, layout.CONFIG) or "tiny"
    return api.load_config(name, config_sets(values), workdir)


def config_sets(values: flags.FlagValues) -> list[str]:
    """The values of --set for the config. Raises InputError for a key that rules files have and configs do not."""
    texts = [text for text in values.set if not _sets_rules(text)]
    for text in texts:
        key, equals, value = text.partition("=")
        section = next((part for part in key.split(".") if part in _RULES_ALONE), None)
        if equals and section:
            rest = key[key.index(section) :]
            raise InputError(f"--set {text}: a key of the rules file\n  fix   --set rules.{rest}={value}")
    return texts


def rules_sets(values: flags.FlagValues) -> list[str]:
    """The values of --set for the rules file: those of keys that begin with rules."""
    return [text for text in values.set if _sets_rules(text)]


def _sets_rules(text: str) -> bool:
    return text.partition("=")[0].partition(".")[0].strip() == "rules"


def read_rules(values: flags.FlagValues) -> Rules:
    """The rules file that --rules names, else the one in the workdir, else none, with --mesh laid over it.

    For --rules=plan these are rules for any number of devices, which a plan replaces once the devices are known.
    """
    if values.rules == PLAN:
        if values.mesh:
            raise InputError(
                f"--mesh={values.mesh}: a plan chooses the mesh\n  fix   drop --mesh, or name a rules file"
            )
        no_rules_sets(values)
        return rules_file.from_dict({"mesh": {"data": -1}}, PLAN)
    name = values.rules if values.rules is not None else layout.find_earlier(values.workdir, layout.RULES)
    return rules_file.load(name or "none", values.mesh, overrides=rules_sets(values))


def no_rules_sets(
    values: flags.FlagValues, why: str = "a plan chooses the rules", fix: str = "drop it, or name a rules file"
) -> None:
    """Raises InputError if --set names a key of the rules, which has no effect. why: it has none."""
    for text in rules_sets(values):
        raise InputError(f"--set {text}: {why}\n  fix   {fix}")


def layouts(values: flags.FlagValues, more: Sequence[str]) -> list[Rules]:
    """The rules files of a verb that takes several: those of --rules, with commas between them, and `more`."""
    names = [*filter(None, (values.rules or "").split(",")), *more]
    return [rules_file.load(name, values.mesh, overrides=rules_sets(values)) for name in names]


def needs_workdir(values: flags.FlagValues, example: str) -> str:
    """--workdir. Raises InputError if it is missing."""
    if values.workdir is None:
        raise InputError(f"--workdir is missing\n  fix   {example}")
    return values.workdir


def needs_weights(values: flags.FlagValues, example: str) -> str:
    """--workdir, if it is remote or a folder with checkpoints. Raises InputError if it is not."""
    workdir = needs_workdir(values, example)
    if not files.is_remote(workdir) and not (files.open_path(workdir) / layout.CHECKPOINTS).is_dir():
        from gspmd_lm import session

        raise session.no_checkpoint(workdir)
    return workdir


def read_files(values: flags.FlagValues, layouts: Sequence[Rules] = ()) -> list[str]:
    """The files of the config, the chip and the layouts, which no result may replace."""
    named = {name: getattr(values, name, None) or "" for name in ("config", "chip", "rules")}
    found = (paths.found_file(given, "rules" if name == "rules" else "configs") for name, given in named.items())
    return [*map(str, filter(None, found)), *(rules.path for rules in layouts)]


def log_to_stderr() -> None:
    """Has the package's log on stderr: what a process waits for, progress, and warnings."""
    log = logging.getLogger("gspmd_lm")
    if not log.handlers:
        log.addHandler(logging.StreamHandler())
        log.setLevel(logging.INFO)
        log.propagate = False


def on_the_cpu() -> None:
    """Imports jax for shapes alone, which are computed on the CPU, without this machine's accelerator."""
    import_jax()
    import jax

    jax.config.update("jax_platforms", "cpu")


def start(values: flags.FlagValues, simulated_devices: int, keep_memory: bool) -> "Runtime":
    """The devices that the flags of `on_machine` ask for, as `startup.start` has them."""
    from gspmd_lm.runtime import startup

    return startup.start(
        platform=values.platform,
        simulated_devices=simulated_devices,
        coordinator=values.coordinator,
        num_processes=values.num_processes,
        process_id=values.process_id,
        keep_memory=keep_memory,
    )


def begin(
    values: flags.FlagValues,
    config: Config,
    rules: Rules,
    stderr: bool = False,
    keep_memory: bool = True,
    settle: "Callable[[Config, Rules, Runtime, int], tuple[Config, Rules]] | None" = None,
) -> "Session":
    """The session of a command, with jax started on the devices that the flags and the rules ask for.

    stderr: messages go there, because stdout is for results. keep_memory: see `startup.start`. For a dry run, one
    simulated device stands for all of them: to start thousands takes minutes, and nothing runs on them. settle: gives
    other config and rules, which fit the devices that were started; with it, --devices says how many to simulate.
    """
    log_to_stderr()
    from gspmd_lm import session
    from gspmd_lm.runtime import processes, startup

    wanted = rules.devices if rules.devices > 0 else values.devices
    if settle and values["devices"].present and rules.devices != 1:
        wanted = values.devices
    if wanted > MOST_DEVICES:
        raise InputError(f"--devices={wanted}: there are no more than {MOST_DEVICES:,} devices\n  fix   --devices=8")
    counted = getattr(values, "dry_run", False) and values.rules != PLAN and not settle and not values.num_processes
    simulated = 1 if counted and wanted > 0 else max(1, wanted // (values.num_processes or 1))
    machine = start(values, simulated, keep_memory)
    processes.watch(logging.getLogger("gspmd_lm").warning)
    if values.rules == PLAN:  # the first process plans, and all processes take what it found
        path, text = processes.from_first(_plan_rules(values, config) if machine.is_main else None)
        rules = rules_file.from_text(text, path)
    elif settle:
        config, rules = settle(config, rules, machine, wanted)
    given = {name: values[name].value for name in values if name not in (*_OF_ONE_PROCESS, *_READ)}
    counted &= machine.platform == "cpu" and machine.process_count == 1
    devices = startup.devices_of(1) * wanted if counted else None
    chip_file = getattr(values, "chip", None) or ""
    return session.begin(config, rules, machine, values.workdir, stderr, given, devices, chip_file)


def _plan_rules(values: flags.FlagValues, config: Config) -> tuple[str, str]:
    """The name and the text of the best rules for the devices at hand: those that were found before, else a new plan.

    The workdir keeps what was found for them. On simulated devices, which have no times, layouts are ranked by what
    they send and by memory.
    """
    import jax

    from gspmd_lm.hardware import target as targets
    from gspmd_lm.plan import candidate, search

    target = targets.from_devices(jax.devices(), values.chip or "")
    sets = [f"--set={one}" for one in values.set]
    command = outputs.command_line(
        ["plan", f"--config={values.config or config.name}", f"--target={target.text}", *sets]
    )
    if kept := layout.find_earlier(values.workdir, layout.RULES):
        text = paths.read_text(files.open_path(kept))
        if f"{candidate.FOUND_BY}: {command} (" in text.partition("\n")[0]:
            outputs.say(f"--rules=plan: {kept} was found for these devices before")
            return kept, text
    if target.chip is None:
        outputs.say(f"--rules=plan: {target.text} has no times; layouts are ranked by bytes and memory")
    plan = search.plan(config, target, say=outputs.say, rank_by=search.ranking(target))
    if plan.best is None:
        raise InputError(
            f"--rules=plan: no layout of {config.name} fits on {target.text}\n  fix   {command} says what would"
        )
    return PLAN, candidate.rules_file(plan, plan.best, command)


def folder_with_weights(values: flags.FlagValues, example: str) -> str:
    """--workdir, if it has checkpoints or is a published folder. Raises InputError if it is not."""
    from gspmd_lm import session

    folder = needs_workdir(values, example)
    return folder if session.holds_published(folder) else needs_weights(values, example)


def begin_with_weights(
    values: flags.FlagValues, folder: str, config: Config, rules: Rules, stderr: bool
) -> "tuple[Session, ReadWeights]":
    """The session of a verb that needs the weights of a folder, and what reads them.

    config: of a run; a published model brings its own. Raises InputError if the weights are not of the config's model.
    """
    from gspmd_lm import session

    model = session.read_published(folder, config_sets(values))
    if model and values.config:
        raise InputError(f"--config={values.config}: {folder} has a config.json of its own\n  fix   drop it")
    begun = begin(values, model.config if model else config, rules, stderr)
    for note in model.notes if model else ():
        begun.say(f"{folder}: {note}")
    return begun, session.reader(begun, folder, values.step, model)
