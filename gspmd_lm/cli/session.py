"""The start of every verb that computes: the config, the rules and the machine, found and checked."""

import contextlib
import dataclasses
import hashlib
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import numpy.typing as npt
from absl import flags
from etils import epath
from rich.console import Console

from gspmd_lm import config as configs
from gspmd_lm import files, versions
from gspmd_lm.cli import given, outputs
from gspmd_lm.config import Config, paths
from gspmd_lm.data.sources import Progress
from gspmd_lm.data.tokenizer import Tokenizer
from gspmd_lm.errors import InputError
from gspmd_lm.runtime import processes, startup
from gspmd_lm.sharding import rules_file
from gspmd_lm.sharding.rules import Rules
from gspmd_lm.workdir import checkpoint, lock

PROGRESS_S = 10.0


@dataclasses.dataclass(frozen=True)
class Session:
    """One process of a command: its config, rules and devices."""

    config: Config
    rules: Rules  # filled: no size is -1
    machine: startup.Runtime
    devices: list[Any]
    console: Console
    workdir: epath.Path | None

    def say(self, message: str) -> None:
        if self.machine.is_main:
            self.console.print(message, soft_wrap=True, highlight=False, markup=False)

    def deliver(self, results: Iterator[Any], output: str | None, write: Callable[[Any, TextIO], None]) -> None:
        """Lets the first process write results to a file or the terminal. All processes compute them."""
        if not self.machine.is_main:
            for _ in results:
                pass
        elif output:
            path = Path(output)
            if files.replaceable(path):
                outputs.say(f"{files.partial_of(path)}: holds the lines so far, and becomes {path} when all are there")
            with files.growing(path) as out:
                write(results, out)
        else:
            write(results, sys.stdout)


def begin(
    values: flags.FlagValues, config: Config | None = None, stderr: bool = False, keep_memory: bool = True
) -> Session:
    """The session of a command, with jax started on the devices that the flags and the rules ask for.

    config: takes the place of the config that the flags or the workdir name. stderr: messages go there, because
    stdout is for results. keep_memory: see `startup.start`.
    """
    log = logging.getLogger("gspmd_lm")  # it tells what a process waits for, and warns
    if not log.handlers:
        log.addHandler(logging.StreamHandler())
        log.setLevel(logging.INFO)
        log.propagate = False
    if config is None:
        config = given.config(values)
    rules = given.rules(values)
    wanted = rules.devices if rules.devices > 0 else values.devices
    machine = startup.start(
        platform=values.platform,
        simulated_devices=max(1, wanted // (values.num_processes or 1)),
        coordinator=values.coordinator,
        num_processes=values.num_processes,
        process_id=values.process_id,
        keep_memory=keep_memory,
    )
    if given.planned(values):
        rules = _planned(values, config, machine)
    here = of(config, rules, machine, values.workdir, stderr)
    processes.watch(log.warning)
    processes.compare(_facts(here, values), here.say)
    return here


def _planned(values: flags.FlagValues, config: Config, machine: startup.Runtime) -> Rules:
    """The best layout for the devices at hand: the one that was found for them in the workdir before, else a new plan.

    On simulated devices, which have no times, layouts are ranked by what they send and by memory.
    """
    if machine.process_count > 1:
        raise InputError(
            "--rules=plan: each of several processes would plan for itself\n"
            "  fix   python main.py plan --target=... --out=mine.yaml, then --rules=mine.yaml"
        )
    import jax

    from gspmd_lm.hardware import target as targets
    from gspmd_lm.plan import search, written

    target = targets.of(jax.devices())
    sets = [f"--set={one}" for one in values.set]
    command = outputs.command_line(
        ["plan", f"--config={values.config or config.name}", f"--target={target.text}", *sets]
    )
    if values.workdir and (kept := path_of(values.workdir) / "rules.yaml").is_file():
        text = paths.read_text(kept)
        if f"{written.FOUND_BY}: {command} (" in text.partition("\n")[0]:
            outputs.say(f"--rules=plan: {kept} was found for these devices before")
            return rules_file.load(str(kept))
    if target.chip is None:
        outputs.say(f"--rules=plan: {target.text} has no times; layouts are ranked by bytes and memory")
    found = search.plan(config, target, say=outputs.say, rank_by=search.ranking(target))
    if found.best is None:
        raise InputError(f"--rules=plan: no layout of {config.name} fits on {target.text}\n"
                         f"  fix   {command} says what would")  # fmt: skip
    rules = rules_file.from_dict(found.best.raw, given.PLAN)
    return dataclasses.replace(rules, text=written.rules_file(found, found.best, command))


def of(config: Config, rules: Rules, machine: startup.Runtime, workdir: str | None, stderr: bool = False) -> Session:
    """The session of a process whose devices are started. A program that has no command line begins here."""
    import jax

    devices = jax.devices()
    if machine.process_count == 1 and (machine.simulated or rules.devices == 1) and rules.devices > 0:
        devices = devices[: rules.devices]
    watched = sys.stderr if stderr else sys.stdout
    notebook = False if "ipykernel" in sys.modules else None  # where lines are one text, and colours are asked for
    console = Console(stderr=stderr, highlight=False, width=None if watched.isatty() else 160, force_jupyter=notebook,
                      force_terminal=notebook)  # fmt: skip
    return Session(config, rules.fill(len(devices)), machine, devices, console, path_of(workdir) if workdir else None)


def _facts(here: Session, values: flags.FlagValues) -> dict[str, Any]:
    """The facts, besides its data, that must be equal in every process of a run."""
    packages = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy", "tokenizers", "libtpu")
    own = ("coordinator", "num_processes", "process_id", "config", "rules", "compile_cache", "platform", "set", "help")
    return {
        "config": configs.to_dict(here.config),
        "rules": here.rules.facts(),
        "flags": {name: values[name].value for name in values if name not in own},
        "versions": versions.installed(packages) | {"gspmd_lm's code": versions.source()[:12]},
    }


def compare_texts(here: Session, tokens: Tokenizer, texts: Iterable[npt.ArrayLike]) -> None:
    """Raises InputError in every process if they have read different texts or tokenizers."""
    if not processes.several():
        return  # a checksum of a long text would take long
    sums = hashlib.sha256()
    for ids in texts:
        row = np.asarray(ids, np.int64)
        sums.update(np.int64(row.size).tobytes() + row.tobytes())
    processes.compare({"tokenizer": tokens.fingerprint, "texts, as tokens": sums.hexdigest()}, here.say)


def needs(values: flags.FlagValues, flag: str, example: str) -> str:
    """The value of a flag that a verb needs. Raises InputError if it is missing."""
    value = getattr(values, flag)
    if value is None:
        raise InputError(f"--{flag} is missing\n  fix   {example}")
    return value


def path_of(name: str) -> epath.Path:
    """A local path, in which ~ may stand for the home folder, or a remote one."""
    return epath.Path(name) if "://" in name else epath.Path(name).expanduser()


def needs_weights(values: flags.FlagValues, example: str) -> str:
    """--workdir, if it is remote or a folder with checkpoints. Raises InputError if it is not."""
    workdir = needs(values, "workdir", example)
    if "://" not in workdir and not (path_of(workdir) / "checkpoints").is_dir():
        raise no_checkpoint(workdir)
    return workdir


def no_checkpoint(workdir: str) -> InputError:
    """The error for a workdir without weights."""
    if not files.is_remote(workdir) and (path_of(workdir) / "config.json").exists():
        return InputError(
            f"{workdir}: no checkpoint; it is the folder of a published model\n"
            f"  fix   convert --from={workdir} --workdir=W, then --workdir=W"
        )
    return InputError(
        f"{workdir}: no checkpoint\n  fix   train there first, or bring one: convert --from=DIR --workdir={workdir}"
    )


def check_output(output: str | None, source: str | None) -> None:
    """Raises InputError if --output cannot be written, or is the file that is read."""
    outputs.check((output,))
    path = Path(output or "")
    if output and source and path.exists() and Path(source).exists() and path.samefile(source):
        raise InputError(f"--output={output}: would overwrite the file that is read\n  fix   name another file")


def check_folder(flag: str, folder: Path) -> None:
    """Raises InputError if a folder that a flag names cannot be made or written in."""
    at = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not at.is_dir() or not os.access(at, os.W_OK):
        raise InputError(f"--{flag}={folder}: {at} cannot be written in\n  fix   give another folder")


@contextlib.contextmanager
def written(here: Session, workdir: epath.Path) -> Iterator[Callable[[], None]]:
    """A context in which a workdir exists and this run alone writes to it. Gives the check of `lock.held`.

    A folder that was made here and stayed empty is removed again. Raises InputError if the folder cannot be made, or
    if another run writes to it.
    """
    with checkpoint.of_run(workdir, here.config):  # a path that cannot hold checkpoints is refused before it is made
        pass
    path = Path(workdir)
    if not files.is_remote(workdir) and path.is_symlink() and not path.exists():
        raise InputError(
            f"{workdir}: a symbolic link to {path.readlink()}, which is not there\n  fix   make that folder"
        )
    if not here.machine.is_main:
        yield lambda: None
        return
    fresh = not workdir.exists()
    try:
        workdir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{workdir}: cannot be written ({files.reason(error)})\n  fix   --workdir=DIR") from error
    with lock.held(workdir, here.say) as check:
        try:
            yield check
        finally:
            if fresh and {file.name for file in workdir.iterdir()} <= {lock.LOCK, lock.HOLDER}:
                workdir.rmtree()


def progress(console: Console) -> Progress:
    """A function that shows a long preparation: its MB, percent and time left.

    A terminal shows one line that is rewritten. Elsewhere there is a line every PROGRESS_S seconds, and one for each
    stage that took as long, when it is done.
    """
    stage, began, before, shown = "", 0.0, 0, 0.0

    def show(what: str, done: int, total: int) -> None:
        nonlocal stage, began, before, shown
        now = time.monotonic()
        if what != stage:
            stage, began, before, shown = what, now, done, now if not console.is_terminal else 0.0
        if not total:  # it waits for another process
            console.print(f"{what} ...", highlight=False)
            return
        ended = done >= total
        if now - shown < (0.1 if console.is_terminal else PROGRESS_S) and not (ended and console.is_terminal):
            return
        shown = now
        left = (now - began) * (total - done) / (done - before) if done > before else 0.0
        time_left = f", {left:.0f} s left" if 0 < left < 90 else f", {left / 60:,.0f} min left" if left else ""
        line = f"{what}: {done / 1e6:,.1f} of {total / 1e6:,.1f} MB, {done / total:.0%}{time_left}"
        if console.is_terminal:
            console.print(f"{line:<70}", end="\n" if ended else "\r", highlight=False)
        else:
            console.print(line, highlight=False)

    return show
