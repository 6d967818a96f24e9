"""explain and compare: print what layouts cost on hardware that need not be here."""

import functools
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from absl import flags

from gspmd_lm.cli import outputs
from gspmd_lm.cli.verb import INPUTS, RESULTS, Flags, Verb, about_job, on_target, overrides
from gspmd_lm.errors import InputError

if TYPE_CHECKING:
    from gspmd_lm.sharding.rules import Rules


def _define(flags: Flags) -> None:
    on_target(flags)
    flags.text(
        "rules",
        None,
        "The rules file: a path, or a name in rules/. Commas separate several. "
        "It says where and how the config is computed.",
    )
    flags.text(
        "target",
        None,
        "The hardware, which need not be here: cpu:8, v5e:4x4, v5p:4x4x8, 2@v6e:16x16, h100:8, "
        "h100:4x8, h100:4x8/800 (hosts with a network of 800 Gbit/s), ... How wrong predicted step times were: "
        "docs/validation.md.",
    )
    flags.text(
        "phase",
        "train",
        "The step to explain: train, prefill or decode. prefill and decode work on data.batch "
        "rows with data.seq slots each.",
    )
    about_job(flags)
    flags.group(RESULTS)
    flags.yes_no("rows", "Say at once, without a compiler, what each row changes in which two layouts differ.")
    flags.path("json", None, "Write all figures to this file (docs/explain_json.md).")
    flags.path("html", None, "Write one self-contained page to this file.")
    flags.path(
        "export",
        None,
        "Keep the compiled train step of one layout in this file. On the target, train --executable runs it.",
    )
    overrides(flags)


def _define_explain(flags: Flags) -> None:
    _define(flags)
    flags.group(INPUTS)
    flags.text(
        "program",
        None,
        "A step of your own in place of a config and rules: module:function or "
        "file.py:function, from devices to jax.jit(...).trace(...) (docs/foresight.md).",
    )


def run(verb: str, values: flags.FlagValues, names: list[str]) -> int:
    """Prints the reports of the layouts `names` and of --rules, writes the files of the flags, and returns the exit
    code."""
    from gspmd_lm import api
    from gspmd_lm.cli import inputs
    from gspmd_lm.hardware import capacity
    from gspmd_lm.hardware import target as targets

    layouts, config = inputs.layouts(values, names), inputs.read_config(values)
    program = values.program if verb == "explain" else None
    if (not layouts and not program) or values.target is None:
        lacking = "--target" if layouts or program else "--rules"
        example = [] if layouts or program else ["--rules=fsdp8"] if verb == "explain" else ["fsdp8", "tp8"]
        given = [one for name in values if values[name].present for one in values[name].serialize().split("\n")]
        target = [] if values.target else ["--target=v5p:2x2x2"]
        others = " (or cpu:8, h100:8)" if target else ""
        command = shlex.join([verb, *names, *example, *given, *target])
        raise InputError(f"{verb} needs {lacking}\n  fix   {command}{others}")
    if values.chip:
        values.target = targets.with_chip(values.target, values.chip)
    place = targets.parse(values.target)  # what is wrong with it is told before jax is imported
    capacity.read_assumptions(values.assume)
    capacity.read_prices(values.price, [place.chip])
    outputs.check_writable((values.json, values.html, values.export), inputs.read_files(values, layouts))
    if program:
        names_of_configs = ("config", "rules", "mesh", "set", "phase", "export", "assume", "price")
        of_configs = [f"--{name}" for name in names_of_configs if values[name].present]
        if of_configs or names:
            raise InputError(
                f"--program={program}: {' '.join([*of_configs, *names])}: this step has no config and no rules"
                f"\n  fix   explain --program={program} --target={values.target}"
            )
        if ":" not in program:
            raise InputError(f"--program={program}: no such form\n  fix   module:function, or file.py:function")
    if values.rows:
        _check_rows(values, layouts, program)
    of_job = " ".join(f"--{name}" for name in ("assume", "price") if values[name].present)
    if of_job and (values.rows or values.phase != "train"):
        raise InputError(f"{of_job}: no job is predicted here\n  fix   drop {of_job}, or explain a step of train")
    inputs.log_to_stderr()
    inputs.on_the_cpu()
    if values.rows:
        with outputs.clock("estimating"):
            rows = api.compare_rows(config, layouts[0], layouts[1], values.target)
        from gspmd_lm.show import row_changes

        row_changes.show(rows, outputs.console(120))
        outputs.write_results(values, rows.to_json(), lambda command: row_changes.page(rows, command))
        return 0
    with outputs.clock("compiling"):
        if program:
            reports = [api.explain(program, target=values.target)]
        else:
            reports = api.compare(
                config, layouts, values.target, values.phase, values.export, values.assume, values.price
            )
        rows = None
        if len(layouts) == 2 and values.phase == "train":  # which plan estimates
            rows = api.compare_rows(config, layouts[0], layouts[1], values.target)
    from gspmd_lm.foresight import report
    from gspmd_lm.show import comparison

    comparison.show(reports, outputs.console(120), rows)
    outputs.write_results(values, report.to_json(reports), lambda command: comparison.page(reports, command, rows))
    return 0


def _check_rows(values: flags.FlagValues, layouts: Sequence["Rules"], program: str | None) -> None:
    """Raises InputError where --rows has no two layouts of a train step to compare."""
    phase = values.phase if values.phase != "train" else None
    offending = {"program": program, "phase": phase, "export": values.export}
    if other := " ".join(f"--{name}={value}" for name, value in offending.items() if value):
        raise InputError(f"--rows: {other}: the rows of two layouts of a train step are compared\n  fix   drop {other}")
    if len(layouts) != 2:
        given = ", ".join(one.label for one in layouts)
        fix = f"compare --rows dp8 fsdp8 --target={values.target}"
        raise InputError(f"--rows: {given}: the rows of two layouts are compared\n  fix   {fix}")


EXPLAIN = Verb(
    "explain",
    "Say what a layout costs on hardware you do not have.",
    [
        ("explain --config=tiny --rules=fsdp8 --target=v5p:2x2x2", "Time, memory and collectives on 8 TPU v5p."),
        ("explain --config=llama3_8b --rules=fsdp_tp --target=v5p-128 --html=page.html", "The same as a page."),
        ("explain --program=examples/any_step.py:step --target=h100:8", "Any jitted step, as a function of devices."),
    ],
    _define_explain,
    functools.partial(run, "explain"),
    takes_names=True,
)
COMPARE = Verb(
    "compare",
    "Explain several layouts side by side: compare fsdp8 tp8 --target=...",
    [
        ("compare fsdp8 tp8 --config=tiny --target=v5p:2x2x2", "Two layouts side by side."),
        ("compare dp8 fsdp8 --rows --config=tiny --target=v5p:2x2x2", "What each row changes, without a compiler."),
    ],
    _define,
    functools.partial(run, "compare"),
    takes_names=True,
)
