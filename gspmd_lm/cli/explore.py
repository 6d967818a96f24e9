"""explore: a page on this machine that shows at each keystroke what a rules file does."""

import importlib.util
import webbrowser

from absl import flags

from gspmd_lm.cli import outputs
from gspmd_lm.cli.verb import MACHINE, Flags, Verb, on_target, overrides
from gspmd_lm.errors import InputError

_NEEDED = ("starlette", "uvicorn")


def _define(flags: Flags) -> None:
    on_target(flags)
    flags.text("rules", "fsdp_tp", "The rules file that is edited: a path, or a name in rules/.")
    flags.text("target", "v5p:4x4x4", "The hardware, which need not be here: v5e:4x8, h100:8, cpu:8, ...")
    flags.text(
        "program", None, "A model or a step of your own in place of a config: file.py:TASK, or file.py:function."
    )
    overrides(flags)
    flags.group(MACHINE)
    flags.whole("port", 0, "The port of the page on this machine. By default it is any that is free.", 0)
    flags.yes_no("open", "Open the page in the browser of this machine.")


def run(values: flags.FlagValues, names: list[str]) -> int:
    """Serves the page until it is interrupted. Returns the exit code."""
    from gspmd_lm import api
    from gspmd_lm.cli import inputs

    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise InputError(f"explore needs {' and '.join(missing)}\n  fix   pip install 'gspmd_lm[explore]'")
    if not values.program:
        inputs.read_config(values)  # what is wrong with it is told before anything is served
    from gspmd_lm.explore import opening

    server = opening.open_server(
        api.load_config,
        values.rules,
        values.target,
        "" if values.program else values.config,
        inputs.config_sets(values),
        program=values.program,
        port=values.port,
    )
    outputs.say(f"the workbench is at {server.url}\nCtrl-C ends it")
    if values.open:
        webbrowser.open(server.url)
    server.run()
    return 0


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
