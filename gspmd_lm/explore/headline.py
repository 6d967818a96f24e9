"""The headline of a layout: time, speed, price and memory, each with what is known of its error."""

from collections.abc import Mapping
from typing import Any

from gspmd_lm.foresight import bounds
from gspmd_lm.foresight.known_errors import estimate_error, kind_of, mean_error
from gspmd_lm.hardware.target import Target
from gspmd_lm.plan.estimate import Estimator
from gspmd_lm.program.task import Task
from gspmd_lm.sharding.rules import Rules
from gspmd_lm.units import human_bytes, human_seconds, human_short


def figure(name: str, label: str, value: float, text: str, better: str = "lower", **more: Any) -> dict[str, Any]:
    """One figure of the headline. better: lower or higher."""
    return {"name": name, "label": label, "value": value, "text": text, "better": better} | {
        "kind": "estimated",
        "error": None,
        "compiled": None,
        "pinned": None,
        **more,
    }


def headline(task: Task, target: Target, rules: Rules, estimator: Estimator) -> dict[str, Any]:
    """The headline of a layout whose rules are filled and checked."""
    estimate, chip = estimator.estimate(rules), estimator.chip
    figures: list[dict[str, Any]] = []
    if chip:
        error, about = _known_error(task, target, rules)
        known = {"error": error, "error_about": about}
        tokens, unit = task.batch_size
        flops = bounds.step_flops(rules, estimator.traces.trace(rules).graph) / rules.devices
        figures += figures_of_time(
            estimate.step_time_s, flops / chip.peak_bf16_flops_per_s / estimate.step_time_s, tokens, unit, target
        )
        for one in figures:
            one |= known
    figures.append(figure("sent_bytes", "sent per device", estimate.sent_bytes, human_bytes(estimate.sent_bytes)))
    limit_bytes = chip.usable_hbm_bytes if chip else None
    waits = dict(estimate.exposed_by_axis)
    if estimate.exposed_host_copy_s:
        waits["host"] = estimate.exposed_host_copy_s
    return {
        "figures": figures,
        "memory": describe_memory(estimate.peak_bytes, limit_bytes, estimator.memory_parts(rules)),
        "exposed": [
            {"axis": axes, "seconds": seconds, "text": human_seconds(seconds)}
            for axes, seconds in sorted(waits.items(), key=lambda one: -one[1])
        ],
    }


def describe_memory(peak_bytes: int, limit_bytes: int | None, parts: Mapping[str, float]) -> dict[str, Any]:
    """The memory of a device. parts: what holds its bytes, and how many of them."""
    return {
        "peak_bytes": peak_bytes,
        "text": human_bytes(peak_bytes),
        "limit_bytes": limit_bytes,
        "parts": [{"name": name, "bytes": round(size), "text": human_bytes(size)} for name, size in parts.items()],
        "fits": limit_bytes is None or peak_bytes <= limit_bytes,
    }


def figures_of_time(
    step_time_s: float, mfu: float, tokens: int | None, unit: str, target: Target
) -> list[dict[str, Any]]:
    """The figures that follow from the time of a step."""
    assert target.chip
    made = [
        figure("step_time_s", "step time", step_time_s, human_seconds(step_time_s)),
        figure("mfu", "MFU", mfu, f"{mfu:.1%}", "higher"),
    ]
    if tokens is None or not step_time_s:
        return made
    speed = tokens / step_time_s
    made.append(figure("tokens_per_s", f"{unit}/s", speed, human_short(speed), "higher"))
    if target.chip.usd_per_hour is not None:
        usd = target.usd_per_billion(speed, target.chip.usd_per_hour)
        made.append(figure("usd_per_billion", f"price per billion {unit}", usd, f"${usd:,.0f}"))
    return made


def _known_error(task: Task, target: Target, rules: Rules) -> tuple[str | None, str]:
    """The known error of an estimated time as a share, and a sentence about it."""
    compared = estimate_error(target)
    experts = task.config.model.num_experts if task.config else 0
    of_predictions = None if rules.stages else mean_error(kind_of(target, rules, experts))
    if compared is None:
        return None, "estimates for this target were not compared with compiled programs"
    layouts, mean = compared
    about = f"{mean:.1%} in the mean of {layouts} layouts that were compiled"
    if of_predictions is not None:
        about += f"; predictions of compiled programs miss measured times by {of_predictions:.1%} in the mean"
    return f"{mean:.0%}", about
