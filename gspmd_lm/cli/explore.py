"""explore: a page on this machine that shows at each keystroke what a rules file does."""

import asyncio
import webbrowser
from collections.abc import Mapping
from typing import Any

from absl import flags

from gspmd_lm.cli import outputs
from gspmd_lm.cli.verb import MACHINE, RESULTS, Flags, Verb, on_target, overrides
from gspmd_lm.errors import InputError


def _define(flags: Flags) -> None:
    on_target(flags)
    flags.text(
        "rules",
        None,
        "The rules file that is edited: a path, or a name in rules/. The default is fsdp_tp, or none for --program.",
    )
    flags.text("target", "v5p:4x4x4", "The hardware, which need not be here: v5e:4x8, h100:8, cpu:8, ...")
    flags.text(
        "program", None, "A model or a step of your own in place of a config: file.py:TASK, or file.py:function."
    )
    overrides(flags)
    flags.group(RESULTS)
    flags.path("json", None, "Write what the page would show to this file, and end: no page is served.")
    flags.group(MACHINE)
    flags.whole("port", 0, "The port of the page on this machine. By default it is any that is free.", 0)
    flags.yes_no("open", "Open the page in the browser of this machine.")


def run(values: flags.FlagValues, names: list[str]) -> int:
    """Serves the page until it is interrupted. Returns the exit code."""
    from gspmd_lm import api
    from gspmd_lm.cli import inputs
    from gspmd_lm.explore import opening
    from gspmd_lm.hardware import target as targets
    from gspmd_lm.sharding import rules_file

    if values.program and (values["config"].present or values.set):
        raise InputError(f"--program={values.program}: says itself what is computed\n  fix   drop --config and --set")
    changes = dict(map(rules_file.read_setting, inputs.rules_sets(values)))
    changes |= {("mesh", axis): size for axis, size in rules_file.read_sizes(values.mesh).items()}
    if not values.program:
        inputs.read_config(values)  # what is wrong with it is told before anything is served
    workbench = opening.make_workbench(
        api.load_config,
        values.rules or (None if values.program else "fsdp_tp"),
        targets.with_chip(values.target, values.chip) if values.chip else values.target,
        "" if values.program else values.config,
        inputs.config_sets(values),
        program=values.program,
        changes=changes,
    )
    if values.json:
        outputs.check_writable((values.json,), inputs.read_files(values))
        state = asyncio.run(workbench.finish())
        outputs.write_json(values.json, state)
        if not state["shown_version"]:
            raise InputError("\n".join(_words(one) for one in state["problems"]))
        outputs.say(f"wrote {values.json}")
        return 0
    opening.check_installed()
    from gspmd_lm.explore.server import Server

    server = Server(workbench, values.port)
    outputs.say(f"the workbench is at {server.url}\nCtrl-C ends it")
    if values.open:
        webbrowser.open(server.url)
    server.run()
    return 0


def _words(problem: Mapping[str, Any]) -> str:
    return problem["message"] + (f"\n  fix   {problem['fix']}" if problem["fix"] else "")


EXPLORE = Verb(
    "explore",
    "Open a page on which a rules file shows what it does while you edit it.",
    [
        ("explore --config=llama3_8b --rules=fsdp_tp --target=v5p:4x4x4", "Edit a layout of 64 TPU v5p."),
        ("explore --program=train.py:TASK --rules=mine.yaml --target=cpu:8", "The same for a model of your own."),
    ],
    _define,
    run,
)
