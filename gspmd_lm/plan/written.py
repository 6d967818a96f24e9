"""A layout of a plan as a rules file: text that people read, and that any verb takes as --rules."""

from collections.abc import Mapping
from typing import Any

from gspmd_lm.plan.candidate import Candidate, Plan
from gspmd_lm.sharding.rules import flow
from gspmd_lm.units import human_bytes, human_seconds

_OWN_LINES = ("rules", "weights", "optimizer")  # sections with one row per line
FOUND_BY = "found by"


def rules_file(plan: Plan, candidate: Candidate, command: str) -> str:
    """The YAML of a candidate. Its first line has the idea, the command, the prediction and its known error."""
    return f"# {candidate.name}, {FOUND_BY}: {command} ({prediction(plan, candidate)})\n{yaml(candidate.raw)}"


def prediction(plan: Plan, candidate: Candidate) -> str:
    """What is expected of a candidate: of its program where it was compiled, else by its price."""
    peak = human_bytes(candidate.peak_bytes)
    if plan.target.chip is None:
        sent = human_bytes(candidate.price.sent_bytes)
        return f"{sent} sent and about {peak} per device; simulated devices have no times"
    seconds = human_seconds(candidate.step_time_s)
    if candidate.report is None or candidate.report.prediction is None:
        return f"priced at {seconds} a step, {peak} per device, not compiled"
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
