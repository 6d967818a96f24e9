"""The errors of predicted steps in runs of one's own, as a table."""

import statistics
from collections.abc import Sequence

from rich.console import Console

from gspmd_lm.foresight.step_records import StepRecord
from gspmd_lm.show import terminal
from gspmd_lm.show.document import Column, Section, Table, Text, figure
from gspmd_lm.units import human_seconds, plural

COLUMNS = (
    *(Column("date"), Column("run"), Column("target")),
    *(Column("predicted", "number"), Column("measured", "number"), Column("error", "number")),
    Column("measured against predicted, by part", "long"),
)


def show(records: Sequence[StepRecord], console: Console) -> None:
    """Prints a row for each run, and the errors of each chip."""
    rows = [
        (
            one.date[:10],
            f"{one.config} under {one.rules}",
            one.target,
            figure(one.predicted_s, human_seconds),
            human_seconds(one.measured_s),
            figure(one.error, "{:+.0%}".format),
            one.differences or ("not traced" if one.traced_s is None else ""),
        )
        for one in records
    ]
    chips = dict.fromkeys(one.chip for one in records if one.error is not None)
    lines = [Text(_chip_errors(chip, records)) for chip in chips]
    without = sum(one.error is None for one in records)
    if without:
        of_runs = f"of {plural(without, 'run')} nothing was predicted"
        lines.append(Text(f"{of_runs}: their chip is not known; train with --chip=my.yaml, which calibrate writes"))
    terminal.show(console, [Section("Steps", "measured", [Table("Steps", COLUMNS, rows), *lines])])


def _chip_errors(chip: str, records: Sequence[StepRecord]) -> str:
    """'my: 8.2% in the mean of 12 runs, 20.0% at most'"""
    errors = [abs(one.error) for one in records if one.chip == chip and one.error is not None]
    return (
        f"{chip}: {statistics.mean(errors):.1%} in the mean of {plural(len(errors), 'run')}, {max(errors):.1%} at most"
    )
