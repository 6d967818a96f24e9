"""The figures and sentences about a plan's layouts that the terminal, the page and the JSON share."""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from gspmd_lm.foresight import whole_job
from gspmd_lm.foresight.timing.predict import differences
from gspmd_lm.foresight.whole_job import DAY_S, WholeJob
from gspmd_lm.hardware.capacity import Assumptions, Price
from gspmd_lm.plan.candidate import HOPELESS, Candidate, Plan
from gspmd_lm.plan.front import pareto_front
from gspmd_lm.units import human_bytes, human_seconds

SHOWN = 10  # layouts in a table


@dataclasses.dataclass(frozen=True)
class Line:
    """One layout of a plan. A figure that is not known is None."""

    rank: int
    candidate: Candidate
    tied: bool
    step_time_s: float
    tokens_per_s: float  # of all devices
    mfu: float | None
    peak_bytes: int
    exposed_by_axis: Mapping[str, float]  # mesh axes -> seconds of a step in which compute waits
    usd_per_billion_tokens: float | None


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A plan with the tokens, the days and the price per chip and hour that its user asked for."""

    plan: Plan
    batch: int  # rows of a step
    price: Price = dataclasses.field(default_factory=Price)  # of a chip
    tokens: float = 0.0  # to train on; 0: none were asked for
    days: float = 0.0  # in which they must be done; 0: no matter when
    assumed: Assumptions = dataclasses.field(default_factory=Assumptions)

    @property
    def job(self) -> WholeJob | None:
        """The course of the whole job under the best layout, for all `tokens`; None if it was not compiled."""
        report = self.plan.best and self.plan.best.report
        if not report or not report.job:
            return None
        steps = math.ceil(self.tokens / self.plan.tokens) or report.job.work.steps
        return whole_job.predict(dataclasses.replace(report.job.work, steps=steps), self.assumed, self.price)

    @property
    def tokens_per_s(self) -> float:
        """The tokens per second of the best layout, on all devices; 0 where nothing fits or no time is known."""
        best = self.plan.best
        return _speed(self.plan, best) if best and self.plan.target.chip else 0.0

    @property
    def days_needed(self) -> float:
        """The days that `tokens` take; infinite where nothing fits."""
        return self.tokens / self.tokens_per_s / DAY_S if self.tokens_per_s else math.inf

    @property
    def in_time(self) -> bool | None:
        """Whether the tokens are done in `days`; None where that was not asked."""
        return self.days_needed <= self.days if self.tokens and self.days else None

    @property
    def chips_in_time(self) -> int | None:
        """The number of chips that would process the tokens in `days` at the same speed each; None if these suffice."""
        late = self.in_time is False and self.tokens_per_s
        return math.ceil(self.plan.target.chips * self.days_needed / self.days) if late else None

    @property
    def searched(self) -> str:
        """How much of the search was done: 'full', or how many meshes were estimated and layouts compiled."""
        plan = self.plan
        if not plan.late and not plan.left_out:
            return "full"
        meshes = f"{plan.tables - plan.left_out:,} of {plan.tables:,} meshes" if plan.left_out else "all meshes"
        return f"{meshes}, {plan.compiled} compiled"

    @property
    def found_nothing(self) -> str:
        """The words for a plan without a best layout. Of a search that had no time, they do not say that none fits."""
        if self.searched != "full":
            return "nothing was found that fits"
        known = all(one.fits is False for one in self.plan.candidates)
        return "nothing fits" if known else "nothing that was compiled fits"

    @property
    def usd(self) -> float | None:
        """The price of all `tokens`."""
        if self.price.on_demand is None or not self.tokens or math.isinf(self.days_needed):
            return None
        return self.tokens / 1e9 * self.plan.target.usd_per_billion(self.tokens_per_s, self.price.on_demand)

    def lines(self) -> list[Line]:
        """All layouts that may fit, the best first; those that were compiled come before those that were estimated."""
        layouts = (one for one in self.plan.candidates if one.fits is not False and one.step_time_s < math.inf)
        return [self._line(rank, one) for rank, one in enumerate(layouts, 1)]

    def _line(self, rank: int, one: Candidate) -> Line:
        plan, predicted = self.plan, one.report.prediction if one.report else None
        speed = _speed(plan, one) if plan.target.chip else 0.0
        usd = None
        if self.price.on_demand is not None and speed:
            usd = plan.target.usd_per_billion(speed, self.price.on_demand)
        return Line(
            rank=rank,
            candidate=one,
            tied=any(one is other for other in plan.ties),
            step_time_s=one.step_time_s,
            tokens_per_s=speed,
            mfu=predicted.mfu if predicted else _mfu(plan, one),
            peak_bytes=one.peak_bytes,
            exposed_by_axis=dict(predicted.exposed_by_axis if predicted else one.estimate.exposed_by_axis),
            usd_per_billion_tokens=usd,
        )

    def runner_up(self) -> Candidate | None:
        """The fastest other layout that was compiled and fits."""
        return next((one.candidate for one in self.lines()[1:] if one.candidate.compiled), None)

    def why_not(self, other: Candidate) -> str:
        """Why a layout lost against the best: in which parts of the step it takes longer, and in which less."""
        best = self.plan.best
        assert best
        behind = other.step_time_s / best.step_time_s - 1
        if behind < 0.0005:
            return f"as fast, {'and it leaves less memory' if other.peak_bytes > best.peak_bytes else 'and no simpler'}"
        within = ", which is within the known error" if any(other is one for one in self.plan.ties) else ""
        return f"{behind:.1%} slower{within}: {differences(_parts_s(best), _parts_s(other), best.step_time_s)}"

    def one_by_one(self) -> str:
        """What `schedule: 1f1b` gives where the best layout has stages; '' where it has none."""
        best, plan = self.plan.best, self.plan
        if best is None or best.rules.pipeline is None or plan.target.chip is None:
            return ""
        if best.rules.pipeline.schedule == "1f1b":
            return "it pays here: no other pipeline that fits is faster"
        pipelines = [(one, one.rules.pipeline) for one in plan.candidates if one.step_time_s < math.inf]
        tried = [one for one, pipeline in pipelines if pipeline and pipeline.schedule == "1f1b"]
        if not tried:
            return (
                "not tried, since other pipelines leave memory free, and stages compute their layers once more for it"
            )
        fastest = min(tried, key=lambda one: one.step_time_s)
        costs = [f"{human_seconds(one.step_time_s)} with {human_bytes(one.peak_bytes)}" for one in (fastest, best)]
        return f"{costs[0]}, against {costs[1]}: it pays only where nothing else fits"

    def waits(self) -> str:
        """The transfers that the best layout waits for."""
        best = self.plan.best
        assert best
        waits = [(seconds, name) for name, seconds in _parts_s(best).items() if name.startswith("waiting")]
        waits = sorted((pair for pair in waits if pair[0] > 0.001 * best.step_time_s), reverse=True)
        if not waits:
            return "nothing: all that it sends is hidden behind compute"
        return ", ".join(f"{seconds / best.step_time_s:.1%} of the step {name}" for seconds, name in waits)


def not_ranked(plan: Plan) -> str:
    """The layouts that were compiled and are in no ranking, and why; '' if all are."""
    said = []
    for one in plan.candidates:
        if one.report and not one.report.memory.fits:
            said.append(f"{one.name} needs {human_bytes(one.peak_bytes)}")
        elif one.failure and one.failure != HOPELESS:
            said.append(f"at {one.name} the compiler failed")
    more = f" and {len(said) - SHOWN} more" if len(said) > SHOWN else ""
    return f"{len(said)} that were compiled: {', '.join(said[:SHOWN])}{more}" if said else ""


def _parts_s(one: Candidate) -> dict[str, float]:
    """The seconds of the parts of its step: of its prediction where it was compiled, else of its estimate."""
    return ((one.report and one.report.prediction) or one.estimate).parts_s


def front(lines: Sequence[Line]) -> list[Line]:
    """The Pareto front of time and memory, the fastest first."""
    return pareto_front(lines, lambda line: (line.step_time_s, line.peak_bytes))


def to_json(outcomes: Sequence[Outcome]) -> dict[str, Any] | list[dict[str, Any]]:
    """The output of --json: an object for one plan, a list for several. docs/plan.md documents the keys."""
    objects = [_object(outcome) for outcome in outcomes]
    return objects[0] if len(objects) == 1 else objects


def _object(outcome: Outcome) -> dict[str, Any]:
    plan = outcome.plan
    shown = outcome.lines()
    lines = [_candidate(line) for line in shown]
    dropped = [_candidate(outcome._line(0, one)) for one in plan.candidates if one.fits is False]
    best = next(iter(lines), None) if plan.best else None
    return {
        "target": plan.target.text,
        "devices": plan.target.devices,
        "config": plan.config,
        "batch": outcome.batch,
        "tokens_per_step": plan.tokens,
        "best": best,
        "candidates": [*lines, *dropped],
        "ties": [line for line, one in zip(lines, shown, strict=True) if one.tied],
        "searched": plan.searched,
        "compiled": plan.compiled,
        "seconds": round(plan.seconds, 1),
        "stopped": plan.stopped,
        "meshes": plan.tables,
        "meshes_left_out": plan.left_out,
        "late": plan.late,
        "notes": list(plan.notes),
        "error": plan.error,
        "price_error": plan.estimate_error,
        "usd_per_chip_hour": outcome.price.on_demand,
        "tokens": outcome.tokens or None,
        "days": outcome.days or None,
        "days_needed": outcome.days_needed if outcome.tokens and outcome.tokens_per_s else None,
        "usd": outcome.usd,
        "chips_in_time": outcome.chips_in_time,
        "job": outcome.job and dataclasses.asdict(outcome.job),
    }


def _candidate(line: Line) -> dict[str, Any]:
    one = line.candidate
    known = not math.isinf(line.step_time_s)
    return {
        "name": one.name,
        "rules": dict(one.raw),
        "mesh": dict(one.rules.mesh),
        "price_s": one.estimate.step_time_s,
        "compiled": one.compiled,
        "step_time_s": line.step_time_s if known else None,
        "tokens_per_s": line.tokens_per_s if known else None,
        "mfu": line.mfu,
        "peak_bytes": line.peak_bytes,
        "fits": one.fits,
        "exposed_by_axis": dict(line.exposed_by_axis),
        "price_per_billion_tokens": line.usd_per_billion_tokens,
    }


def _speed(plan: Plan, one: Candidate) -> float:
    return plan.tokens / one.step_time_s


def _mfu(plan: Plan, one: Candidate) -> float | None:
    """Of a layout that was only estimated, from the FLOPs of one that was compiled: they are those of the model."""
    reports = (other.report for other in itertools.chain((one,), plan.candidates))
    floor = next((report.floor for report in reports if report), None)
    if floor is None or not floor.compute_s or math.isinf(one.step_time_s):
        return None
    return floor.compute_s / one.step_time_s
