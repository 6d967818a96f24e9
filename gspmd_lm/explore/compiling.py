"""The figures of a layout that is compiled: those of `explain`."""

import time
from collections.abc import Callable
from typing import Any

from gspmd_lm.config import Config
from gspmd_lm.explore.headline import describe_memory, figure, figures_of_time
from gspmd_lm.explore.inputs import Inputs
from gspmd_lm.explore.subject import Subject
from gspmd_lm.foresight import explain
from gspmd_lm.foresight.report import Report
from gspmd_lm.hardware import target as targets
from gspmd_lm.plan import advice
from gspmd_lm.program.task import Task
from gspmd_lm.sharding import rules_file
from gspmd_lm.show import comparison, report
from gspmd_lm.train import decoder
from gspmd_lm.units import human_bytes

Say = Callable[[str], None]


def explain_layout(subject: Subject, inputs: Inputs, say: Say) -> dict[str, Any]:
    """The compiled figures of a layout, its timeline and its whole report as pages. Raises as `explain` does."""
    began = time.monotonic()
    target = targets.parse(inputs.target)
    computed = subject.resolve(inputs.config, inputs.overrides)
    if not isinstance(computed, Config | Task):
        found = explain.report_of_step(computed.step, inputs.target, say)
    else:
        task = decoder.task(computed)
        rules = rules_file.from_text(inputs.text, inputs.path, vocabulary=task.names)
        reports = explain.reports(task, [rules], target, say)
        (found,) = advice.with_fixes(task, reports, [rules], target)
    return {
        **describe(found, target),
        "timeline": comparison.layer_page(found) or None,
        "page": comparison.page([found]),
        "seconds": time.monotonic() - began,
    }


def describe(found: Report, target: targets.Target) -> dict[str, Any]:
    """The headline of a compiled layout."""
    figures: list[dict[str, Any]] = []
    if predicted := found.prediction:
        figures += figures_of_time(predicted.step_time_s, predicted.mfu, found.tokens, found.unit, target)
    figures.append(figure("sent_bytes", "sent per device", found.sent_bytes, human_bytes(found.sent_bytes)))
    memory, parts = found.memory, {part.label: part.amount for part in report.memory_parts(found)}
    return {
        "figures": [one | {"kind": "compiled"} for one in figures],
        "error": predicted.error if predicted else found.no_prediction,
        "memory": describe_memory(memory.peak_bytes, memory.limit_bytes, parts) | {"fits": memory.fits},
        "warnings": [{"code": one.code, "message": one.message, "fix": one.fix} for one in found.warnings],
        "arrays": [{"path": one.path, "bytes_per_device": one.bytes_per_device} for one in found.arrays],
    }
