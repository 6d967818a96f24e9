"""plot: shows what runs have logged, as a table and as one page."""

import sys
from collections.abc import Sequence

from absl import flags

from gspmd_lm import files
from gspmd_lm.cli import outputs
from gspmd_lm.cli.verb import RESULTS, RUN, Flags, Verb
from gspmd_lm.errors import InputError
from gspmd_lm.workdir import layout


def _define(flags: Flags) -> None:
    flags.group(RUN)
    flags.several(
        "workdir",
        "The folder of a run, or a folder of runs. This flag may be repeated, and folders may also stand without it.",
    )
    flags.group(RESULTS)
    flags.path(
        "html",
        None,
        f"Write the page to this file. The default is {layout.PAGE} in the run's folder; with "
        "several runs, in the current folder.",
    )


def run(values: flags.FlagValues, folders: list[str]) -> int:
    """Prints a row for each run, writes the page, and returns the exit code."""
    from gspmd_lm.show import run as shown
    from gspmd_lm.workdir import history

    folders = [*values.workdir, *folders]
    if not folders:
        raise InputError("plot needs a run\n  fix   plot --workdir=RUN, or plot RUN RUN2 to lay runs over each other")
    runs = history.read_runs(folders)
    where = values.html or _default_page(folders)
    here = [files.expand_user(folder) for folder in folders if not files.is_remote(folder)]
    outputs.check_writable((where,), (file for run in here for file in run.glob("*") if file.name != layout.PAGE))
    console = outputs.console(120)
    shown.show(runs, console)
    outputs.write(where, shown.page(runs, outputs.command_line(sys.argv[1:])))
    console.print(f"wrote {where}", soft_wrap=True, markup=False)
    return 0


def _default_page(folders: Sequence[str]) -> str:
    """Where the page goes if no flag says it: into the folder of a single run, else into the current folder."""
    if len(folders) > 1 or files.is_remote(folders[0]):
        return layout.PAGE
    return str(files.expand_user(folders[0]) / layout.PAGE)


PLOT = Verb(
    "plot",
    "Show what runs have logged, laid over each other in one page: plot RUN RUN2.",
    [("plot runs/a runs/b", "Lay the curves of two runs over each other, in plot.html.")],
    _define,
    run,
    takes_names=True,
)
