"""launch: starts a run where its devices are, and goes on until it is finished."""

import functools
from typing import TYPE_CHECKING

from absl import flags

from gspmd_lm import files
from gspmd_lm.cli import outputs
from gspmd_lm.cli.verb import MACHINE, RESULTS, RUN, Flags, Verb
from gspmd_lm.errors import InputError
from gspmd_lm.launch.job import ABOUT, KEYS, Job

if TYPE_CHECKING:
    from gspmd_lm.config import Config


def _define(flags: Flags) -> None:
    budget = ("max_retries", "max_hours", "max_usd", "usd_per_hour", "assume", "autodelete")
    run = ("place", "workdir", "train", "name", "elastic", *budget)
    for name, field in KEYS.items():
        flags.group(RUN if name in run else RESULTS if name == "logs" else MACHINE)
        if isinstance(field.default, bool):
            flags.yes_no(name, ABOUT[name])
        elif isinstance(field.default, int):
            flags.whole(name, field.default, ABOUT[name])
        elif field.default is None:
            flags.number(name, None, ABOUT[name])
        else:
            flags.text(name, str(field.default) or None, ABOUT[name])
    flags.group(RESULTS)
    flags.yes_no("print", "Print the commands of one start, for a script of your own, and stop.")


def run(values: flags.FlagValues, names: list[str]) -> int:
    """Runs the job of a launch file, and returns its exit code."""
    from gspmd_lm.launch import launch_file, place, places

    file = names[0] if names and not names[0].startswith("-") else None
    given = {name: values[name].value for name in KEYS if values[name].present}
    job = launch_file.read(file, given, names[1:] if file else names)
    run_at = places.find(job)
    launch_file.check(job, run_at.needed)
    if values.print:
        print(run_at.script(), end="")
        return 0
    place.check_tools(run_at)
    price, config = _check(job)
    run_at.check()
    from gspmd_lm.launch import checks, loop

    if job.place != "local":
        for note in checks.check_data(config, run_at):
            outputs.say(note)
    return loop.Launch(run_at, price, functools.partial(print, flush=True)).run()


def _check(job: Job) -> "tuple[float, Config]":
    """The price of the place in USD an hour, and the config, after the flags of train and the layout were checked."""
    from gspmd_lm import cli
    from gspmd_lm.cli import inputs
    from gspmd_lm.cli.train import TRAIN

    # The config and the rules of an earlier start are found in a local workdir, here as there. This machine may lack
    # the package and the login that a bucket needs.
    workdir = [] if files.is_remote(job.workdir) else [f"--workdir={job.workdir}"]
    values, rest = cli.parse_flags(TRAIN, [*job.arguments, *workdir])
    if rest:
        raise InputError(f"train: {rest[0]}: flags begin with --\n  fix   train: --config=NAME --rules=NAME")
    rules, config = inputs.read_rules(values), inputs.read_config(values)
    left_out = [name for name in ("config", "rules") if not (workdir or values[name].value)]
    if left_out:
        outputs.say(f"{job.workdir} was not looked into: if a run is there, its {' and '.join(left_out)} will be used")
    inputs.on_the_cpu()
    from gspmd_lm.launch import checks

    price, target = checks.price(job), job.target
    if target and values.rules != inputs.PLAN:
        if values.elastic:
            from gspmd_lm.plan import elastic

            rules, config, change = elastic.adapt(config, rules, target.devices, target, outputs.say)
            if change:
                outputs.say(f"--elastic: {change}")
        for note in checks.check_layout(config, rules, target, job):
            outputs.say(note)
    return price, config


LAUNCH = Verb(
    "launch",
    "Start a run where its devices are, and go on until it is finished: launch FILE.yaml.",
    [
        ("launch jobs/queued_resource.yaml", "Train on a spot slice, and ask for another one after a preemption."),
        ("launch jobs/queued_resource.yaml --max_usd=500 --autodelete -- --set train.steps=1000", "With a budget."),
        ("launch --place=local --processes=2 --workdir=runs/two -- --rules=fsdp --platform=cpu", "On this machine."),
        ("launch jobs/tpu_vm.yaml --print", "Only print the commands."),
    ],
    _define,
    run,
    takes_names=True,
)
