"""train: trains a run in a workdir, from its data to its checkpoints."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from absl import flags

from gspmd_lm.cli import outputs
from gspmd_lm.cli.verb import Flags, Verb, on_chip, on_devices
from gspmd_lm.errors import STOPPED, InputError
from gspmd_lm.runtime import endings
from gspmd_lm.runtime.quiet import import_jax
from gspmd_lm.units import whole_number

if TYPE_CHECKING:
    from rich.console import Console

    from gspmd_lm.config import Config
    from gspmd_lm.session import Session
    from gspmd_lm.sharding.problems import Problem
    from gspmd_lm.train.step import Step


def _define(flags: Flags) -> None:
    on_devices(flags)
    flags.whole(
        "steps", None, "The step to stop at. The default is train.steps, which also is the length of the schedule.", 1
    )
    flags.yes_no(
        "elastic",
        "Go on with as many devices as there are, more or fewer than before: other rules are chosen if those of the "
        "run do not fit. Batches and losses stay the same. --devices then says how many to simulate.",
    )
    flags.yes_no("dry_run", "Print every array and its bytes per device, look at the data, then stop.")
    flags.path("html", None, "With --dry_run: write a page with pictures of the mesh and of all arrays to this file.")
    flags.text(
        "show",
        None,
        "With --dry_run: draw the mesh and these arrays, such as wq,residual, as blocks with the numbers of the "
        "devices that hold them, in place of the tables.",
    )
    flags.path("executable", None, "Run the train step that explain --export compiled, instead of compiling it here.")
    flags.yes_no("trust", "Accept an --executable that was exported elsewhere. It can run any code as you.")
    on_chip(flags)
    flags.text(
        "profile",
        None,
        "START:STOP: write a trace of these steps into the workdir, and compare their parts with the prediction.",
    )
    flags.path(
        "train_tokenizer",
        None,
        "Train a BPE tokenizer on data.source, write it to this "
        "file, then stop. It gets TOKENS tokens with data.tokenizer=bpe:TOKENS, else model.vocab.",
    )


def run(values: flags.FlagValues, names: list[str]) -> int:
    """Trains, and returns the exit code: 0, or STOPPED if the run was asked to stop before its last step."""
    with endings.StopSignal():  # until the steps, which are saved at a signal
        return _run(values)


def _run(values: flags.FlagValues) -> int:
    from gspmd_lm.cli import elastic, inputs

    began = time.monotonic()
    for name in ("html", "show"):
        if values[name].value and not values.dry_run:
            raise InputError(
                f"--{name}={values[name].value}: a run has no such output\n  fix   add --dry_run, or drop it"
            )
    outputs.check_writable((values.html,))
    # What is wrong with a file is told before jax is imported, which takes a second.
    restart = elastic.Restart(values) if values.elastic else None
    rules = restart.read_rules() if restart else inputs.read_rules(values)
    config = inputs.read_config(values)
    import_jax()
    from gspmd_lm import session
    from gspmd_lm.runtime import processes
    from gspmd_lm.sharding.problems import ShardingError
    from gspmd_lm.workdir import layout, wall_time

    profile = _profile(values.profile)
    begun = inputs.begin(values, config, rules, settle=restart and restart.settle)
    try:
        built, warnings = session.build_step(begun)
    except ShardingError as error:
        raise elastic.explain_refusal(error, begun) from error
    if values.dry_run:
        if begun.machine.is_main:
            _show_dry_run(values, begun, built, warnings)
        return 0
    if values.train_tokenizer:
        return _train_tokenizer(begun.config, values.train_tokenizer, begun.console)
    executable = _executable(values, built) if values.executable else None
    with session.open_run(begun, built, warnings, True, values.compile_cache, profile, executable) as run:
        run.wall_time = wall_time.WallTime(began)
        if restart:
            restart.keep(run.workdir)
        processes.last_words(str(run.workdir), str(run.workdir / layout.CHECKPOINTS))
        session.train_to(run, values.steps, values.step)
        return STOPPED if run.has_work_left else 0


def _show_dry_run(values: flags.FlagValues, begun: "Session", built: "Step", warnings: Sequence["Problem"]) -> None:
    from gspmd_lm.data import overview
    from gspmd_lm.show import dry_run

    read = dry_run.read(begun.config, begun.rules, built.arrays)
    if values.show:
        dry_run.draw(read, [name.strip() for name in values.show.split(",")], begun.console)
    else:
        dry_run.show(read, begun.console)
    about_data = overview.check(begun.config)
    begun.say("\n".join(about_data))
    if values.html:
        command = outputs.command_line(sys.argv[1:])
        warned = [line.removeprefix("warning: ") for line in about_data if line.startswith("warning: ")]
        outputs.write(values.html, dry_run.page(read, command, [*map(str, warnings), *warned]))


def _executable(values: flags.FlagValues, built: "Step") -> Any:
    from gspmd_lm.foresight import compile, exported
    from gspmd_lm.hardware import target

    devices = list(built.mesh.devices.flat)
    place = target.from_devices(devices, values.chip or "")
    wanted = compile.CompileRequest(built.config, built.rules, place, export=True)
    versions = compile.compilers(place)
    return exported.load(Path(values.executable), wanted.key(), wanted.name, versions, values.trust, devices)


def _profile(span: str | None) -> tuple[int, int] | None:
    if span is None:
        return None
    start, stop = (whole_number(step) for step in (*span.split(":", 1), "")[:2])
    if start is None or stop is None or start >= stop:
        raise InputError(f"--profile={span}: not two steps, the first before the second\n  fix   --profile=10:13")
    return start, stop


def _train_tokenizer(config: "Config", path: str, console: "Console") -> int:
    from gspmd_lm.data import sources, trained
    from gspmd_lm.data.tokenizer import trained_size
    from gspmd_lm.show.progress import progress

    source = sources.open_source(config.data, progress(console))
    made = trained.train_tokenizer(source.documents(), trained_size(config.data.tokenizer) or config.model.vocab, path)
    console.print(f"{path}: {made.vocab_size:,} tokens, trained on {source.description}", soft_wrap=True)
    if source.notes:
        console.print(source.notes, soft_wrap=True, markup=False)
    console.print(f"use it with --set data.tokenizer={path} --set model.vocab=0", soft_wrap=True)
    return 0


TRAIN = Verb(
    "train",
    "Train a model, from the newest checkpoint of the workdir or from scratch.",
    [
        ("", "Train the tiny config on one device, on the text that Python brings."),
        ("--config=gpt2_124m --rules=fsdp8 --dry-run", "Show every array, and its bytes on each device."),
        ("--rules=fsdp2_tp4 --dry-run --show=wq,residual", "Draw arrays as they lie on the mesh; --html draws all."),
        (
            "--config=uva --rules=tp8 --workdir=runs/a",
            "Train on 8 devices, simulated if there are none. The same command goes on.",
        ),
        ("--workdir=runs/a --rules=fsdp8", "Go on under another layout."),
        ("--set data.source=FOLDER --set rules.remat=block", "Lay values over the config and the rules."),
        ("--set data.source=FOLDER --set data.tokenizer=bpe:4096 --set model.vocab=0", "Train a tokenizer on it too."),
    ],
    _define,
    run,
)
