"""Published layouts, which others chose by hand, beside what a plan finds: the tables of benchmarks/plans.md.

`python -m benchmarks.plan published` and `python -m benchmarks.plan prices` make them.
"""

import collections
import dataclasses
import datetime
import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from benchmarks import measure, step_times
from gspmd_lm.foresight import explain
from gspmd_lm.hardware import target as targets
from gspmd_lm.plan import search
from gspmd_lm.plan.space import Space, describe


def kept(name: str) -> list[dict[str, Any]]:
    """The rows of a file in results/ that may not be there yet."""
    rows = measure.kept(name)
    for row in rows:  # layouts name no kernel since 2026-11-24; those from before name what is the default now
        row.get("rules", {}).pop("attention", None)
    return rows


def published(numbers: Sequence[int], minutes: float) -> None:
    """The plan beside the layouts that others chose by hand and measured: the same work, chips and batch."""
    told = {row["number"]: row["predicted_s"] for row in measure.read("foresight_times")}
    for number, row in enumerate(step_times.rows()):
        if number not in numbers:
            continue
        plan = search.plan(row.config(), targets.parse(row.target), minutes=minutes, say=print)
        assert plan.best
        others = [one for one in kept("plan_published") if one["number"] != number]
        found = {
            "number": number,
            "row": row.name,
            "published_layout_s": told[number],
            "plan_s": round(plan.best.step_time_s, 5),
            "rules": dict(plan.best.raw),
            "compiled": plan.compiled,
            "minutes": round(plan.seconds / 60, 1),
            "date": datetime.date.today().isoformat(),
        }
        measure.write("plan_published", sorted([*others, found], key=lambda one: one["number"]))
    show_published()


def show_published() -> None:
    for row in kept("plan_published"):
        print(f"{row['number']:3} {row['row']:45} by hand {row['published_layout_s']:7.3f} s, the plan "
              f"{row['plan_s']:7.3f} s ({row['plan_s'] / row['published_layout_s'] - 1:+.1%}): "
              f"{describe(row['rules'])}")  # fmt: skip


def published_prices(numbers: Sequence[int], compile_best: bool) -> None:
    """Every published layout beside the best of its plan's space, both estimated; and that best one compiled.

    A published layout ran, so memory for it is taken to be there whatever the estimate says, and for others as well.
    """
    for number, row in enumerate(step_times.rows()):
        if numbers and number not in numbers:
            continue
        began_s = time.process_time()
        config, target = row.config(), targets.parse(row.target)
        assert target.chip
        space = Space(config, target)
        theirs = space.estimator.estimate(row.rules().fill(target.devices))
        limit_bytes = max(theirs.peak_bytes, target.chip.usable_hbm_bytes)
        estimated = search.estimate_layouts(space)
        fitting = [one for one in estimated if one.estimate.peak_bytes <= limit_bytes]
        best = min(fitting, key=lambda one: one.estimate.step_time_s)
        cpu_s = time.process_time() - began_s
        # Both layouts are compiled with the options that the published run names.
        with_options = dataclasses.replace(best.rules, compiler_options=row.rules().compiler_options)
        report = explain.reports(config, [with_options], target, print)[0] if compile_best else None
        found = {
            "number": number,
            "row": row.name,
            "theirs_priced_s": round(theirs.step_time_s, 4),
            "plan_priced_s": round(best.estimate.step_time_s, 4),
            "plan_compiled_s": report and report.prediction and round(report.prediction.step_time_s, 4),
            "plan_fits": report and report.memory.fits,
            "rules": dict(best.raw),
            "layouts": len(estimated),
            "cpu_s": round(cpu_s, 1),
            "date": datetime.date.today().isoformat(),
        }
        others = [one for one in kept("plan_prices") if one["number"] != number]
        measure.write("plan_prices", sorted([*others, found], key=lambda one: one["number"]))
    show_published_prices(row for row in kept("plan_prices") if not numbers or row["number"] in numbers)


def show_published_prices(rows: Iterable[dict[str, Any]]) -> None:
    """The table of benchmarks/plans.md, with the latest compiled prediction of each published layout."""
    theirs = {row["number"]: row for row in measure.read("foresight_times")}
    errors: dict[str, list[float]] = collections.defaultdict(list)
    print("| row | published run | estimated, s | compiled, s | best of all: estimated, s | compiled, s | its layout |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        told = theirs[row["number"]]
        compiled_s, plan_s = told["predicted_s"], row["plan_compiled_s"]
        fits = {True: "", False: ", does not fit", None: "no compiler"}[told.get("fits")]
        refused = row["plan_fits"] is False
        ours = f"{plan_s:.3f}{', does not fit' * refused}" if plan_s else "does not fit" if refused else "not compiled"
        if plan_s and compiled_s:
            ours += f" ({plan_s / compiled_s - 1:+.1%})"
        print(f"| {row['number']} | {row['row']} | {row['theirs_priced_s']:.3f} | "
              f"{f'{compiled_s:.3f}{fits}' if compiled_s else fits.removeprefix(', ')} | "
              f"{row['plan_priced_s']:.3f} ({row['plan_priced_s'] / row['theirs_priced_s'] - 1:+.1%}) | {ours} | "
              f"{describe(row['rules'])} |", flush=True)  # fmt: skip
        for name, seconds in ("theirs_priced_s", compiled_s), ("plan_priced_s", plan_s):
            if seconds:
                platform = targets.parse(step_times.rows()[row["number"]].target).platform
                errors[platform].append(float(np.log(row[name] / seconds)))
    for platform, found in errors.items():
        print(f"{platform}: prices miss {len(found)} compiled layouts by {np.mean(found):+.1%} in the mean, "
              f"spread {np.std(found):.1%}")  # fmt: skip
