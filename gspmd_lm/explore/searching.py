"""The search of `plan` for a workbench, which is told of each layout when it is estimated and when it is compiled."""

import json
import time
from collections.abc import Callable
from typing import Any

from gspmd_lm.config import Config
from gspmd_lm.errors import InputError
from gspmd_lm.explore.inputs import Inputs
from gspmd_lm.explore.subject import Subject
from gspmd_lm.hardware import target as targets
from gspmd_lm.plan import candidate, search
from gspmd_lm.plan.candidate import Candidate
from gspmd_lm.program.task import Task
from gspmd_lm.units import human_bytes, human_seconds

EACH_S = 0.3  # between answers
MINUTES = 15.0  # after which nothing new is compiled


def search_layouts(subject: Subject, inputs: Inputs, answer: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """What the search ends with; layouts and progress are answered meanwhile. Raises as `plan` does."""
    target, computed = targets.parse(inputs.target), subject.resolve(inputs.config, inputs.overrides)
    if not isinstance(computed, Config | Task):
        raise InputError("a step of one's own has no rules file, so there are no layouts to search")
    numbers: dict[str, int] = {}
    waiting: list[dict[str, Any]] = []
    answered_s = time.monotonic()

    def see(one: Candidate) -> None:
        nonlocal answered_s
        number = numbers.setdefault(json.dumps(one.raw), len(numbers))
        waiting.append(describe(number, one, has_times=target.chip is not None))
        if one.compiled or time.monotonic() - answered_s > EACH_S:
            tell("")

    def tell(line: str) -> None:
        nonlocal answered_s
        answer({"points": waiting, **({"progress": line} if line else {})})
        waiting.clear()
        answered_s = time.monotonic()

    found = search.plan(computed, target, minutes=MINUTES, say=tell, rank_by=search.ranking(target), see=see)
    tell("")
    best = found.best
    expected = candidate.expectation(found, best) if best else "no layout fits"
    return {"text": f"{found.stopped}; {expected}", "best": numbers[json.dumps(best.raw)] if best else None}


def describe(number: int, one: Candidate, has_times: bool) -> dict[str, Any]:
    """A layout as a point of time and memory, with the text of its rules file. Its number stays the same."""
    known = has_times and one.step_time_s < float("inf")
    time_text = human_seconds(one.step_time_s) if known else f"{human_bytes(one.estimate.sent_bytes)} sent"
    how = "compiled" if one.compiled else "estimated"
    return {
        "rank": number,
        "name": one.name,
        "step_time_s": one.step_time_s if known else None,
        "sent_bytes": one.estimate.sent_bytes,
        "peak_bytes": one.peak_bytes,
        "fits": one.fits is not False and not one.failure,
        "compiled": one.compiled,
        "text": f"{one.name}: {time_text}, {human_bytes(one.peak_bytes)}, {how}",
        "rules": f"# {one.name}, found by the search\n{candidate.yaml(one.raw)}",
    }
