"""Advice for a plan: changes of hardware and batch that would help its best layout, and remedies where nothing fits."""

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from gspmd_lm.config import Config
from gspmd_lm.errors import RunFailed
from gspmd_lm.foresight import explain
from gspmd_lm.foresight.report import Report
from gspmd_lm.hardware import target as targets
from gspmd_lm.hardware.chips import Chip
from gspmd_lm.hardware.target import Target
from gspmd_lm.plan.candidate import Candidate, Plan
from gspmd_lm.plan.estimate import Estimator
from gspmd_lm.plan.search import estimate_layouts
from gspmd_lm.plan.space import Space
from gspmd_lm.plan.traces import TraceCache
from gspmd_lm.program.task import Task
from gspmd_lm.sharding.rules import Remat, Rules
from gspmd_lm.train import decoder
from gspmd_lm.train.choices import settle_rules
from gspmd_lm.units import human_bytes

SURE = 0.95  # the share of a chip's memory up to which an estimate is said to fit
MICROBATCHES = (1, 2, 4, 8, 16, 32)  # times as many as the layout has
MOST_LARGER = 6  # targets that are tried where nothing fits
SMALL = 0.005  # a gain that is not worth a line


class Change(NamedTuple):
    """Something that the user could change, and the share of tokens per second that it would add."""

    what: str
    gain: float


def changes(config: Config | Task, plan: Plan) -> list[Change]:
    """The changes that would help the best layout of a plan, the most effective first; estimated, not compiled."""
    best, chip = plan.best, plan.target.chip
    assert best and chip
    traces = TraceCache(config)
    task = traces.task
    before_s = Estimator(task, plan.target, traces).estimate(best.rules).step_time_s
    changes = []
    for what, changed in _faster(chip):
        if changed != chip:
            target = dataclasses.replace(plan.target, chip=changed)
            after_s = Estimator(task, target, traces).estimate(best.rules).step_time_s
            changes.append(Change(what, before_s / after_s - 1))
    if task.config:
        data = task.config.data
        data = dataclasses.replace(data, batch=2 * data.batch, padded_batch=2 * data.padded_batch)
        twice = dataclasses.replace(task.config, data=data)
        after_s = Estimator(twice, plan.target).estimate(best.rules).step_time_s
        changes.append(Change("a batch twice as large, where it fits", 2 * before_s / after_s - 1))
    corrected = best.step_time_s / before_s
    limit = chip.usable_hbm_bytes
    more = [one for one in plan.candidates if one.fits is False and one.estimate.peak_bytes <= 2 * limit]
    if more:
        fastest = min(more, key=lambda one: one.estimate.step_time_s)
        gain = best.step_time_s / (fastest.estimate.step_time_s * corrected) - 1
        changes.append(Change(f"twice the memory, for {fastest.name}", gain))
    return sorted((change for change in changes if change.gain > SMALL), key=lambda change: -change.gain)


def _faster(chip: Chip) -> Iterator[tuple[str, Chip]]:
    parts = {
        "links": ("ici_link_bytes_per_s", "die_link_bytes_per_s", "nvlink_bytes_per_s", "peer_bytes_per_s"),
        "a network between slices or hosts": ("network_bytes_per_s",),
        "memory": ("hbm_bytes_per_s",),
        "a link to the host": ("host_link_bytes_per_s",),
    }
    for what, names in parts.items():
        yield f"{what} twice as fast", dataclasses.replace(chip, **{name: 2 * getattr(chip, name) for name in names})


class Larger(NamedTuple):
    """The smallest larger target of the same chip on which a layout fits, as its compiler says."""

    target: Target
    candidate: Candidate


def larger(config: Config | Task, plan: Plan, say: Callable[[str], None], until_s: float = math.inf) -> Larger | None:
    """The first larger target of the same chip on which the plan fits; None if it fits on none that was tried.

    until_s: what `time.monotonic` says when nothing new is estimated or compiled any more.
    """
    traces = TraceCache(config)
    for target in itertools.islice(targets.larger(plan.target), MOST_LARGER):
        assert target.chip
        candidates = estimate_layouts(Space(config, target, traces), until_s)
        if time.monotonic() > until_s:
            return None
        least = min(candidates, key=lambda one: one.estimate.peak_bytes, default=None)
        if least is None or least.estimate.peak_bytes > target.chip.usable_hbm_bytes:
            continue
        say(f"compiling {least.name} for {target.text}, to see whether it fits")
        try:
            (report,) = explain.reports(config, [least.rules], target, say)
        except RunFailed as error:
            say(f"left out: {least.name}: {error}")
            continue
        if report.memory.fits:
            return Larger(target, dataclasses.replace(least, report=report))
    return None


def savings(computed: Config | Task, plan: Plan) -> list[tuple[str, int]]:
    """Settings of a config that would save memory under the layout that comes nearest, and the bytes per device.

    The greatest saving comes first. A plan changes none of these by itself, because they change what is computed.
    """
    nearest, config = plan.nearest, decoder.task(computed).config
    if nearest is None or config is None:
        return []
    tried: list[tuple[str, str, Any]] = [
        ("data", "batch", config.data.batch // 2),
        ("data", "seq", config.data.seq // 2),
        ("model", "weight_dtype", "bfloat16"),
        ("optimizer", "name", "adafactor"),
        ("optimizer", "mu_dtype", "bfloat16"),
    ]
    before, savings = nearest.estimate.peak_bytes, []
    for section, key, value in tried:
        if not value:  # half of a single row, or token
            continue
        try:
            changed = {section: dataclasses.replace(getattr(config, section), **{key: value})}
            estimator = Estimator(dataclasses.replace(config, **changed), plan.target)
            after = estimator.estimate(nearest.rules).peak_bytes
        except ValueError:  # the layout does not divide the smaller batch, or another setting does not allow it
            continue
        if after < before:
            savings.append((f"{section}.{key}={value}", before - after))
    return sorted(savings, key=lambda pair: -pair[1])


def with_fixes(
    config: Config | Task, reports: Sequence[Report], layouts: Sequence[Rules], target: Target
) -> list[Report]:
    """Reports of train steps, each under its rules. Of one that does not fit, the fix is a change that was tried.

    Tried are fewer saved activations, more microbatches, and stages that keep their inputs alone. Of those that are
    estimated to fit, the fix is the one that is estimated to be fastest. Nothing is compiled.
    """
    if all(report.memory.fits or report.phase != "train" for report in reports):
        return list(reports)  # without tracing the model once more
    traces, fixed = TraceCache(config), []
    for report, rules in zip(reports, layouts, strict=True):
        warnings = report.warnings
        if not report.memory.fits and report.phase == "train":
            filled = settle_rules(config, rules.fill(target.devices), target.processor)
            fix = _fix(report, filled, target, Estimator(config, target, traces))
            warnings = [dataclasses.replace(one, fix=fix) if one.code == "does-not-fit" else one for one in warnings]
        fixed.append(dataclasses.replace(report, warnings=tuple(warnings)))
    return fixed


def _fix(report: Report, rules: Rules, target: Target, estimator: Estimator) -> str:
    assert target.chip, "simulated devices have no limit"
    fitting, key, before = [], "pipeline.microbatches" if rules.pipeline else "microbatches", _microbatches(rules)
    # What the compiler says of this layout corrects the estimates of those that are like it.
    correction = max(1.0, report.memory.peak_bytes / estimator.estimate(rules).peak_bytes)
    keeps: Sequence[dict[str, str]] = [{}]
    if rules.pipeline:
        keeps = [*keeps, *([] if rules.pipeline.keeps_inputs else [{"keep": "stage"}])]
        # Where the rules leave it open, a layout that holds less may choose to gather once, which holds more again.
        turns = [{**keep, "gather": "turn"} for keep in keeps] if rules.pipeline.schedule == "gpipe" else []
        keeps = [*keeps, *turns]
    for remat, times, keep in itertools.product(dict.fromkeys((rules.remat, Remat("block"))), MICROBATCHES, keeps):
        changed = dataclasses.replace(_with_microbatches(rules, times * before), remat=remat)
        if changed.pipeline:
            changed = dataclasses.replace(changed, pipeline=dataclasses.replace(changed.pipeline, **keep))
        changed = settle_rules(estimator.traces.task, changed, target.processor)  # stages may gather otherwise
        if changed != rules and not estimator.traces.problems(changed, target.platform):
            estimate = estimator.estimate(changed)
            peak_bytes = correction * estimate.peak_bytes
            if peak_bytes <= SURE * target.chip.usable_hbm_bytes:
                fitting.append((estimate.step_time_s, peak_bytes, changed))
    if not fitting:
        even = ", not even with rules.pipeline.keep=stage," * any("keep" in keep for keep in keeps)
        tried = f"no rules.remat and no rules.{key}{even}"
        return f"{tried} is estimated to fit under this mesh; plan --target={target.text} looks for another layout"
    _, peak_bytes, changed = min(fitting, key=lambda one: one[:2])
    flags = ["--set rules.remat=block"] if changed.remat != rules.remat else []
    flags += [f"--set rules.{key}={_microbatches(changed)}"] if _microbatches(changed) != before else []
    if changed.pipeline and rules.pipeline and changed.pipeline.keep != rules.pipeline.keep:
        flags.append("--set rules.pipeline.keep=stage")
    if changed.pipeline and rules.pipeline and changed.pipeline.gather != rules.pipeline.gather:
        flags.append("--set rules.pipeline.gather=turn")
    return f"{' '.join(flags)}, which is estimated to fit with {human_bytes(round(peak_bytes))}"


def _microbatches(rules: Rules) -> int:
    """How many microbatches go through the stages of a pipeline; without one, those of a step."""
    return rules.pipeline.microbatches if rules.pipeline else rules.microbatches


def _with_microbatches(rules: Rules, count: int) -> Rules:
    if rules.pipeline is None:
        return dataclasses.replace(rules, microbatches=count)
    return dataclasses.replace(rules, pipeline=dataclasses.replace(rules.pipeline, microbatches=count))
