"""A layout that a plan looks at, what a plan finds, and a layout as the text of a rules file, which any verb takes."""

import dataclasses
import functools
import json
import math
from collections.abc import Mapping
from typing import Any

from gspmd_lm.foresight.report import Report
from gspmd_lm.hardware.target import Target
from gspmd_lm.plan.estimate import Estimate
from gspmd_lm.sharding.problems import flow
from gspmd_lm.sharding.rules import Rules
from gspmd_lm.units import human_bytes, human_seconds

_OWN_LINES = ("rules", "weights", "optimizer")  # sections with one row per line
FOUND_BY = "found by"
HOPELESS = "it needs more memory than a layout like it that does not fit"
FAR_ABOVE = 1.2  # the share of the limit above which nothing is compiled while something else may fit


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One layout: its rules, its estimate and, where it was compiled, its report."""

    raw: Mapping[str, Any]  # the plain values of its rules file
    rules: Rules  # filled
    estimate: Estimate
    report: Report | None = None  # None: only estimated
    corrected_s: float = 0.0  # the estimated step time, corrected by what compiled layouts like it showed
    limit_bytes: int | None = None
    failure: str = ""  # why it could not be compiled

    @property
    def name(self) -> str:
        """The layout in one line."""
        return self.rules.path

    @property
    def compiled(self) -> bool:
        return self.report is not None

    @property
    def step_time_s(self) -> float:
        """The seconds of a step as predicted, else as estimated; infinite where the compiler refused it."""
        if self.report is None:
            return self.corrected_s or self.estimate.step_time_s
        return self.report.prediction.step_time_s if self.report.prediction else math.inf

    @property
    def peak_bytes(self) -> int:
        return self.report.memory.peak_bytes if self.report else self.estimate.peak_bytes

    @property
    def fits(self) -> bool | None:
        """Whether it fits; None where no compiler was asked and it may."""
        if self.report:
            return self.report.memory.fits
        if self.limit_bytes is None:
            return True
        return False if self.failure or self.estimate.peak_bytes > FAR_ABOVE * self.limit_bytes else None

    @property
    def entries(self) -> int:
        """The number of entries in its rules file: the fewer, the simpler."""
        return sum(len(value) if isinstance(value, Mapping) else 1 for value in self.raw.values())

    @functools.cached_property
    def features(self) -> tuple[Any, ...]:
        """The values by which two layouts are compared: see `search._distance`."""
        tables = "weights" in self.raw, "optimizer" in self.raw
        mesh = dict(self.rules.mesh)
        shares = tuple(mesh.get(name, 1) for name in ("stage", "data", "fsdp", "tensor", "context", "expert"))
        between = len(self.raw.get("rules", {}))
        pipeline = json.dumps(self.raw.get("pipeline"))
        return (
            *shares,
            pipeline,
            self.raw.get("context"),
            tuple(self.rules.dcn.items()),
            between,
            tables,
            json.dumps(self.raw.get("remat", "none"), sort_keys=True),
            self.rules.microbatches,
        )

    @property
    def family(self) -> tuple[Any, ...]:
        """What one representative is compiled of: mesh, split of the sequence, tables, and remat but for its names."""
        remat = self.rules.remat
        return (*self.features[:-2], remat.policy, bool(remat.offload))


@dataclasses.dataclass(frozen=True)
class Plan:
    """The result of a search."""

    target: Target
    config: str
    tokens: int  # of a step, on all devices
    candidates: tuple[Candidate, ...]  # best first
    ties: tuple[Candidate, ...]  # compiled, within `error` of the best, which comes first
    searched: int
    compiled: int
    seconds: float
    error: float  # of predictions for the chip, as a share
    best: Candidate | None  # None: nothing fits
    estimate_error: float | None = None  # of corrected estimates, as compiled layouts of this plan say; None: too few
    refused: int = 0  # candidates that a check of the rules refused
    nearest: Candidate | None = None  # where nothing fits: what comes nearest to it
    stopped: str = ""  # why the search ended
    unit: str = "tokens"  # what `tokens` counts: tokens, or rows of a task that does not say how many it has
    late: bool = False  # whether something was not compiled for want of time
    left_out: int = 0  # meshes, each with its tables, that were not estimated for want of time
    tables: int = 0  # of how many
    notes: tuple[str, ...] = ()  # what the user should know of the choice
    phase: str = "train"  # of which step: train or decode


def rules_file(plan: Plan, candidate: Candidate, command: str) -> str:
    """The YAML of a candidate. Its first line has the idea, the command, the prediction and its known error."""
    return f"# {candidate.name}, {FOUND_BY}: {command} ({expectation(plan, candidate)})\n{yaml(candidate.raw)}"


def expectation(plan: Plan, candidate: Candidate) -> str:
    """The expected time and memory of a candidate: from its compiled program if there is one, else its estimate."""
    peak = human_bytes(candidate.peak_bytes)
    if plan.target.chip is None:
        sent = human_bytes(candidate.estimate.sent_bytes)
        return f"{sent} sent and about {peak} per device; simulated devices have no times"
    seconds = human_seconds(candidate.step_time_s)
    if candidate.report is None or candidate.report.prediction is None:
        return f"estimated at {seconds} a step, {peak} per device, not compiled"
    return f"predicted: {seconds} a step, {peak} per device; error of predictions: {candidate.report.prediction.error}"


def yaml(raw: Mapping[str, Any]) -> str:
    """Plain values in the form of the files in rules/: a mesh on one line, and a table with a row on each line."""
    lines: list[str] = []
    for section, value in raw.items():
        if section in _OWN_LINES and isinstance(value, Mapping):
            lines += [f"{section}:"] + [f"  {key}: {flow(entry)}" for key, entry in value.items()] if value else []
        else:
            lines.append(f"{section}: {flow(value)}")
    return "\n".join(lines) + "\n"
