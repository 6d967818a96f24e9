"""logs: shows the new lines of all processes of a launch, until Ctrl-C."""

import time
from typing import TYPE_CHECKING

from absl import flags

from gspmd_lm import files
from gspmd_lm.cli import outputs
from gspmd_lm.cli.verb import RESULTS, Flags, Verb
from gspmd_lm.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

    from gspmd_lm.launch.logs import RunFollower

COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "red")
POLL_S, REMOTE_POLL_S = 0.5, 10.0


def _define(flags: Flags) -> None:
    flags.group(RESULTS)
    flags.whole("lines", 10, "How many of the last lines of each process are shown first.", 0)
    flags.yes_no("stop", "Stop after these lines, and wait for no others.")


def run(values: flags.FlagValues, names: list[str]) -> int:
    """Prints the lines of each process with its number before them, and returns the exit code."""
    from gspmd_lm.launch import launch_file, logs

    if len(names) != 1:
        raise InputError("logs needs one launch\n  fix   logs FILE.yaml, or logs WORKDIR")
    folder = launch_file.find_logs(names[0])
    console, follower = outputs.console(120), logs.RunFollower(folder, values.lines)
    _show(follower, console)
    while not values.stop:
        time.sleep(REMOTE_POLL_S if files.is_remote(folder) else POLL_S)
        _show(follower, console)
    return 0


def _show(follower: "RunFollower", console: "Console") -> None:
    from rich.text import Text

    for name, line in follower.lines():
        number = name.rpartition("/")[2]
        colour = COLOURS[int(number) % len(COLOURS)] if number.isdecimal() else "bold"
        console.print(Text.assemble((f"{name} | ", colour), line), soft_wrap=True)


LOGS = Verb(
    "logs",
    "Follow the lines of all processes that launch has started: logs FILE.yaml, or logs WORKDIR.",
    [
        ("logs jobs/queued_resource.yaml", "Follow the newest attempt, and each later one."),
        ("logs runs/llama3-8b --stop --lines=50", "Show the last lines of a run, and stop."),
    ],
    _define,
    run,
    takes_names=True,
)
