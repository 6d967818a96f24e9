"""plot: shows what runs have logged, as a table and as one page."""

import sys
from collections.abc import Sequence
from pathlib import Path

from absl import flags
from rich.console import Console

from gspmd_lm import files
from gspmd_lm.cli import outputs
from gspmd_lm.errors import InputError
from gspmd_lm.show import run as shown
from gspmd_lm.workdir import history

PAGE = "plot.html"  # in the workdir of a single run


def run(values: flags.FlagValues, folders: Sequence[str]) -> int:
    """Prints a row for each run, writes the page, and returns the exit code."""
    folders = [*values.workdir, *folders]
    if not folders:
        raise InputError("plot needs a run\n  fix   plot --workdir=RUN, or plot RUN RUN2 to lay runs over each other")
    runs = history.read(folders)
    where = values.html or _beside(folders)
    outputs.check((where,))
    shown.show(runs, Console(highlight=False, width=None if sys.stdout.isatty() else 120))
    files.replace(Path(where), shown.page(runs, outputs.command_line(sys.argv[1:])))
    Console(highlight=False).print(f"wrote {where}", soft_wrap=True, markup=False)
    return 0


def _beside(folders: Sequence[str]) -> str:
    """Where the page goes if no flag says it: into the folder of a single run, else into the current folder."""
    if len(folders) > 1 or files.is_remote(folders[0]):
        return PAGE
    return str(Path(folders[0]).expanduser() / PAGE)
