"""A change of a layout with which it is estimated to fit."""

import dataclasses
import itertools
from collections.abc import Sequence

from gspmd_lm.config import Config
from gspmd_lm.foresight.report import Report
from gspmd_lm.hardware.target import Target
from gspmd_lm.model.task import Task
from gspmd_lm.plan.price import Pricer
from gspmd_lm.plan.traces import Traces
from gspmd_lm.sharding.rules import Remat, Rules
from gspmd_lm.train.state import settled
from gspmd_lm.units import human_bytes

SURE = 0.95  # the share of a chip's memory up to which an estimate is said to fit
MICROBATCHES = (1, 2, 4, 8, 16, 32)  # times as many as the layout has


def with_fixes(
    config: Config | Task, reports: Sequence[Report], layouts: Sequence[Rules], target: Target
) -> list[Report]:
    """Reports of train steps, each under its rules. Of one that does not fit, the fix is a change that was tried.

    Tried are fewer kept activations and more microbatches. Of those that are estimated to fit, the fix is the fastest
    by its price. Nothing is compiled.
    """
    if all(report.memory.fits or report.phase != "train" for report in reports):
        return list(reports)  # without tracing the model once more
    traces, found = Traces(config), []
    for report, rules in zip(reports, layouts, strict=True):
        warnings = report.warnings
        if not report.memory.fits and report.phase == "train":
            filled = settled(config, rules.fill(target.devices), target.processor)
            fix = _fix(report, filled, target, Pricer(config, target, traces))
            warnings = [dataclasses.replace(one, fix=fix) if one.code == "does-not-fit" else one for one in warnings]
        found.append(dataclasses.replace(report, warnings=tuple(warnings)))
    return found


def _fix(report: Report, rules: Rules, target: Target, pricer: Pricer) -> str:
    assert target.chip, "simulated devices have no limit"
    fitting = []
    # What the compiler says of this layout corrects the estimates of those that are like it.
    more = max(1.0, report.memory.peak_bytes / pricer.price(rules).peak_bytes)
    for remat, times in itertools.product(dict.fromkeys((rules.remat, Remat("block"))), MICROBATCHES):
        changed = dataclasses.replace(rules, remat=remat, microbatches=times * rules.microbatches)
        if changed != rules and not pricer.traces.problems(changed, target.platform):
            price = pricer.price(changed)
            peak_bytes = more * price.peak_bytes
            if peak_bytes <= SURE * target.chip.usable_hbm_bytes:
                fitting.append((price.step_time_s, peak_bytes, changed))
    if not fitting:
        return (
            "no rules.remat and no rules.microbatches is estimated to fit under this mesh; "
            f"plan --target={target.text} looks for another layout"
        )
    _, peak_bytes, changed = min(fitting, key=lambda one: one[:2])
    flags = ["--set rules.remat=block"] if changed.remat != rules.remat else []
    flags += [f"--set rules.microbatches={changed.microbatches}"] if changed.microbatches != rules.microbatches else []
    return f"{' '.join(flags)}, which is estimated to fit with {human_bytes(round(peak_bytes))}"
