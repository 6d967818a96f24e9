"""The records of runs: the predicted step beside the measured one, by part, and what a plan learns from them.

A run writes its record into its workdir and into the folder of all records (`paths.records_folder`).
"""

import dataclasses
import datetime
import hashlib
import math
import re
import statistics
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from etils import epath

from gspmd_lm import files, versions
from gspmd_lm.config import paths
from gspmd_lm.errors import InputError
from gspmd_lm.foresight import hlo
from gspmd_lm.foresight.report import Report
from gspmd_lm.foresight.timing.predict import differences
from gspmd_lm.foresight.timing.traced import scale_slowdowns, traced_step
from gspmd_lm.hardware.chips import KINDS, LINKS, Chip
from gspmd_lm.hardware.network import Network
from gspmd_lm.hardware.target import Target
from gspmd_lm.train.programs import MeasuredStep
from gspmd_lm.units import human_seconds
from gspmd_lm.workdir import layout

SCHEMA = 1  # counted up when a field changes its meaning or goes away
LONG_WAIT = 0.01  # the share of a step from which on waiting for rows is reported
# Fields of a chip that depend on the target or on the process, and texts: not what its description measures.
_OF_TARGET = ("usable_hbm_bytes", "network_bytes_per_s", "matmul_slowdown", "note", "slowdowns")


@dataclasses.dataclass(frozen=True)
class StepRecord:
    """The predicted and the measured step of a run. All parts are seconds of one step."""

    date: str
    config: str
    rules: str  # the name of the rules file
    mesh: Mapping[str, int]
    target: str  # the devices of the run, as in a --target
    chip: str  # the name of its chip; "" where none is known
    chip_figures: str  # a hash of the figures that the prediction used
    device: str  # as jax calls it
    versions: Mapping[str, str | None]
    workdir: str
    predicted_s: float | None = None  # None where the chip is not known
    predicted_parts_s: Mapping[str, float] = dataclasses.field(default_factory=dict)
    measured_s: float = 0.0  # the median, without the first step, evaluation and saving
    wait_s: float = 0.0  # of measured_s, waiting for rows
    steps: int = 0  # since the run was started
    traced_s: float | None = None  # a step of the profiler's trace; None without --profile
    measured_parts_s: Mapping[str, float] = dataclasses.field(default_factory=dict)  # of traced_s
    slowdowns: Mapping[str, float] = dataclasses.field(default_factory=dict)  # as `Chip.slowdowns`, of the trace

    @property
    def error(self) -> float | None:
        """The error of the prediction as a share of the measured time; None where nothing was predicted."""
        return None if self.predicted_s is None else self.predicted_s / self.measured_s - 1

    @property
    def differences(self) -> str:
        """The parts that were measured longer than predicted, and shorter ones; '' where no trace has told them."""
        if self.predicted_s is None or self.traced_s is None:
            return ""
        return differences(self.predicted_parts_s, self.measured_parts_s, self.traced_s)

    @property
    def name(self) -> str:
        """The name of its file: runs of one workdir under one layout have the same name, and the last one stays."""
        run = self.workdir, self.config, self.rules, self.mesh, self.target
        plain = re.sub(r"[^\w.-]+", "-", f"{self.config}-{self.rules}")
        return f"{plain}-{hashlib.sha256(repr(run).encode()).hexdigest()[:8]}.json"

    def describe(self) -> str:
        """What a run says at its end: its measured step beside the predicted one, and which parts differ.

        '' where nothing was predicted or traced.
        """
        if self.predicted_s is None and self.traced_s is None:
            return ""
        times = f"step: measured {human_seconds(self.measured_s)}"
        if self.wait_s > LONG_WAIT * self.measured_s:
            times += f", of which {human_seconds(self.wait_s)} waiting for rows"
        if self.predicted_s is not None:
            times += f", predicted {human_seconds(self.predicted_s)} ({self.error:+.0%})"
        if self.traced_s is None:
            return times
        shown = (f"{part} {human_seconds(s)}" for part, s in self.measured_parts_s.items() if s > 1e-3 * self.traced_s)
        parts = f"; measured against predicted: {self.differences}" if self.differences else f": {', '.join(shown)}"
        traced = f"traced steps took {human_seconds(self.traced_s)} each{parts}"
        return f"{times}\n{textwrap.fill(traced, 80, subsequent_indent='  ')}"


def record(report: Report, measured: MeasuredStep, network: Network, device: str) -> StepRecord:
    """The record of a run without a trace. report: of its step. device: as jax calls it."""
    chip, prediction = network.chip, report.prediction
    return StepRecord(
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        config=report.config,
        rules=report.layout,
        mesh=report.mesh,
        target=report.target,
        chip=chip.name if chip else "",
        chip_figures=figures(chip) if chip else "",
        device=device,
        versions=versions.installed_versions(("gspmd_lm", "jax", "jaxlib", "libtpu")),
        workdir=_place(measured.workdir),
        predicted_s=prediction and prediction.step_time_s,
        predicted_parts_s=prediction.parts_s if prediction else {},
        measured_s=measured.seconds,
        wait_s=measured.wait_s,
        steps=measured.steps,
    )


def read_trace(
    record: StepRecord, measured: MeasuredStep, text: str, network: Network, partitions: Mapping[int, int]
) -> StepRecord:
    """The record with the parts of its step that the run's trace shows.

    text: of the compiled program. partitions: of it, those of the devices of this process.
    """
    assert measured.trace
    module = hlo.parse(text, network.slices)
    traced = traced_step(measured.trace.read_bytes(), measured.traced_steps, module, network, partitions)
    found = traced.slowdowns(module, network) if network.chip else {}
    return dataclasses.replace(record, traced_s=traced.step_time_s, measured_parts_s=traced.parts_s, slowdowns=found)


def _place(workdir: epath.Path) -> str:
    """The workdir, as it is found from any folder."""
    return str(workdir) if files.is_remote(workdir) else str(Path(workdir).absolute())


def keep(record: StepRecord) -> None:
    """Writes a record into its workdir and into the folder of all records."""
    plain = {"schema": SCHEMA} | dataclasses.asdict(record)
    folder = files.open_path(paths.records_folder())
    folder.mkdir(parents=True, exist_ok=True)
    for path in (files.open_path(record.workdir) / layout.STEP, folder / record.name):
        files.replace_json(path, plain)


def read_records(names: Iterable[str] = ()) -> list[StepRecord]:
    """The records of workdirs, of files, or of folders of either, in the order of their dates.

    names: none stand for the folder of all records. Raises InputError where there is no record, or a damaged one.
    """
    found = [path for name in names or [paths.records_folder()] for path in _files(name)]
    return sorted((_read(path) for path in dict.fromkeys(found)), key=lambda record: record.date)


def _files(name: str) -> list[epath.Path]:
    path = files.open_path(name)
    if path.is_file():
        return [path]
    if (path / layout.STEP).exists():
        return [path / layout.STEP]
    if path.is_dir() and (found := sorted({*path.glob("*.json"), *path.glob(f"*/{layout.STEP}")})):
        return found
    raise InputError(
        f"{name}: no step of a run is recorded here\n"
        "  fix   train for three steps or more: a run writes its record when it ends"
    )


def _read(path: epath.Path) -> StepRecord:
    """The record of a file, whose checksum says that a run has written it."""
    value, names = files.read_json(path), {field.name for field in dataclasses.fields(StepRecord)}
    if not isinstance(value, dict) or value.pop("schema", None) != SCHEMA or {*value} != names:
        raise InputError(
            f"{path}: not a record of a step, or one of another version\n  fix   delete it, or give another file"
        )
    return StepRecord(**value)


# What a plan learns


def figures(chip: Chip) -> str:
    """A hash of what the description of a chip says of its speed."""
    plain = dataclasses.asdict(chip)
    kept = {name: value for name, value in plain.items() if name not in _OF_TARGET}
    return hashlib.sha256(repr(kept).encode()).hexdigest()[:16]


def correct(target: Target, records: Sequence[StepRecord], place: str) -> Target:
    """The target with a chip that takes as long as it took in runs.

    Of several records, those with a trace count, by their geometric mean. Without a trace, all parts are longer alike.
    place: what the user gave, for messages. Raises InputError if no record has a prediction for the chip.
    """
    chip = target.chip
    if chip is None:
        raise InputError(
            f"{place}: {target.text} has no times to correct\n  fix   --chip=my.yaml, which calibrate writes"
        )
    alike = [one for one in records if one.chip == chip.name and one.predicted_s]
    if not alike:
        others = ", ".join(sorted({one.chip or f"{one.target} without a --chip" for one in records}))
        raise InputError(
            f"{place}: predicts nothing for {chip.name}, but for {others}\n"
            f"  fix   give a run on {chip.name}, with its --chip where it has a file"
        )
    if any(one.chip_figures != figures(chip) for one in alike):
        raise InputError(
            f"{place}: its step was predicted with other figures of {chip.name} than those of now\n"
            "  fix   give the --chip file of the run, or train again"
        )
    traced = [one for one in alike if one.slowdowns]
    found = _mean([one.slowdowns for one in traced] or [_overall(one) for one in alike])
    words = {name: name if name in KINDS else f"collectives over {name}" for name in found}
    longer = ", ".join(f"{words[name]} {factor:.3g}" for name, factor in found.items())
    if not traced:
        longer = f"everything {found['other']:.3g}, since no trace tells parts apart"
    note = f"corrected by {place} (times as long: {longer})"
    chip = dataclasses.replace(chip, slowdowns=scale_slowdowns(chip.slowdowns, found), note=note)
    return dataclasses.replace(target, chip=chip)


def _overall(record: StepRecord) -> dict[str, float]:
    assert record.predicted_s
    ratio = max(record.measured_s - record.wait_s, 0.01 * record.measured_s) / record.predicted_s
    return dict.fromkeys((*KINDS, *LINKS), ratio)


def _mean(several: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The geometric mean of each factor, over those that have it."""
    names = dict.fromkeys(name for one in several for name in one)
    logs = {name: [math.log(one[name]) for one in several if name in one] for name in names}
    return {name: math.exp(statistics.mean(values)) for name, values in logs.items()}


def to_json(records: Sequence[StepRecord]) -> dict[str, Any]:
    """The output of --json: the runs, and the errors of their predictions."""
    errors = [abs(one.error) for one in records if one.error is not None]
    return {
        "runs": [{**dataclasses.asdict(one), "error": one.error} for one in records],
        "mean_error": statistics.mean(errors) if errors else None,
        "largest_error": max(errors, default=None),
    }
