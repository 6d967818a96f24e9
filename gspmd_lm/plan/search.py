"""The search for the best layout: all are estimated, few are compiled, and what these show corrects the estimates."""

import dataclasses
import functools
import itertools
import math
import operator
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

from gspmd_lm.config import Config
from gspmd_lm.errors import InputError, RunFailed
from gspmd_lm.foresight import compile, explain
from gspmd_lm.foresight.known_errors import estimate_error, kind_of, mean_error
from gspmd_lm.foresight.report import Report
from gspmd_lm.hardware.target import Target
from gspmd_lm.plan.candidate import HOPELESS, Candidate, Plan
from gspmd_lm.plan.decoding import DecodeSpace
from gspmd_lm.plan.space import Space
from gspmd_lm.plan.traces import TraceCache
from gspmd_lm.program.task import Task
from gspmd_lm.train import decoder
from gspmd_lm.units import plural

BEYOND = 2.0  # the share of the limit above which an estimate of memory is believed without a compiler
LEAST_NEEDING = 3  # layouts far above the limit that are compiled before a plan says that nothing fits
EQUAL = 0.002  # two predictions that differ by less are the same time: memory and simplicity decide
GAIN = 0.005  # what another compilation must promise
UNKNOWN_ERROR = 0.1  # of predictions for a chip that no published step time was compared with
ESTIMATE_ERROR = 0.05  # taken for that of estimates where none is known and nothing is compiled yet
LEAST_ERROR = 0.01  # of corrected estimates, however well they agree
SIMILARITY = 0.25  # how much less a compiled layout says of another for each feature in which they differ
FARTHEST = 3  # features in which layouts differ that have nothing to say of each other
ESTIMATING = 0.5  # the share of the minutes in which layouts are estimated
FEWEST = 8  # compilations before a plan may be content
EXPLORED = 1.15  # of the first compilations, every other looks so far above the shortest promise
FINALISTS = 2  # layouts with host offload that are compiled where that takes long
SLOW_OFFLOAD = ("v6e",)  # chips for which the compiler takes 9 to 20 minutes for a program that offloads to the host

Reports = Callable[..., list[Report]]
Say = Callable[..., None]
See = Callable[[Candidate], None]
RankBy = Literal["time", "bytes"]
Phase = Literal["train", "decode"]


def ranking(target: Target) -> RankBy:
    """The criteria by which layouts of a target can be ranked: simulated devices have no times."""
    return "time" if target.chip else "bytes"


def estimate_layouts(
    space: Space | DecodeSpace, until_s: float = math.inf, see: See = lambda _: None
) -> list[Candidate]:
    """Every layout of a space, with its estimate. until_s: see `Space.fill_layouts`. see: is told of each at once."""
    chip, estimate = space.target.chip, space.estimator.estimate
    limit_bytes = chip.usable_hbm_bytes if chip else None
    candidates = []
    for raw, rules in space.fill_layouts(until_s):
        candidates.append(Candidate(raw, rules, estimate(rules), limit_bytes=limit_bytes))
        see(candidates[-1])
    return candidates


def plan(config: Config | Task, target: Target, **how: Any) -> Plan:
    """The best layout of `config` on `target`, and what else was looked at. how: see `plans`."""
    return plans([(config, target)], **how)[0]


def plans(
    cases: Sequence[tuple[Config | Task, Target]],
    *,
    minutes: float = 15,
    say: Say = lambda _: None,
    rank_by: RankBy = "time",
    most: int = 40,
    reports: Reports = explain.reports,
    see: See = lambda _: None,
    phase: Phase = "train",
) -> list[Plan]:
    """The best layout of each config on its target, and what else was looked at.

    The cases share the minutes. Half of them may go into estimates, of which each case that is left gets an equal part.
    Then the case that has compiled for the shortest time is the next to compile, until the minutes are over: after that
    the compiler starts nothing. Where it has compiled nothing for a case by then, the best layout is the best estimate.

    most: how many layouts of a case are compiled; with 0 all are only estimated.
    rank_by: "bytes" needs no times and compiles nothing; layouts are ranked by what they send, then by memory. reports:
    what compiles, as `explain.reports` does. see: is told of each layout when it is estimated, and when it is compiled.
    phase: decode asks for layouts of generation, see `decoding.DecodeSpace`.

    Raises InputError where a target has no times, and where no mesh of its devices divides the batch.
    """
    began = time.monotonic()
    if phase not in get_args(Phase):
        raise InputError(f"phase={phase}: a plan is for a step of train or decode\n  fix   phase=decode")
    for _, target in cases:
        if target.chip is None and rank_by == "time":
            raise InputError(f"--target={target.text}: {explain.NOT_ON_CPU}\n  fix   or rank by bytes and memory alone")
    clock, traces, searches = _Clock(began, minutes), dict[int, TraceCache](), list[_Search]()
    for number, (config, target) in enumerate(cases):
        now = time.monotonic()
        share_s = max(began + 60 * minutes * ESTIMATING - now, 0.0) / (len(cases) - number)
        if phase == "decode":
            make_space: Callable[[], Space | DecodeSpace] = functools.partial(DecodeSpace, config, target)
        else:
            if id(config) not in traces:
                traces[id(config)] = TraceCache(config)
            make_space = functools.partial(Space, config, target, traces[id(config)])
        place = f"{target.text}, {decoder.task(config).rows} rows: " if len(cases) > 1 else ""
        say_of_case: Say = lambda message, place=place: say(place + message)  # noqa: E731
        reports_of_phase = functools.partial(reports, phase=phase) if phase != "train" else reports
        searches.append(_Search(make_space, now + share_s, say_of_case, reports_of_phase, clock, most, see))
    if rank_by == "bytes":
        for search in searches:
            search.stopped = "layouts are ranked by bytes alone"
    while going := [search for search in searches if not search.stopped]:
        min(going, key=lambda search: search.compiling_s).compile_next()
    if rank_by == "time":
        for search in searches:
            search.finish()
    return [search.result(rank_by) for search in searches]


class _Clock(NamedTuple):
    """The time that there is for everything."""

    began_s: float
    minutes: float

    @property
    def left_s(self) -> float:
        return self.began_s + 60 * self.minutes - time.monotonic()


class _Search:
    """The search of one case. It begins with the estimates, as many as there is time for until `until_s`."""

    def __init__(
        self,
        make_space: Callable[[], Space | DecodeSpace],
        until_s: float,
        say: Say,
        reports: Reports,
        clock: _Clock,
        most: int,
        see: See,
    ):
        began = time.monotonic()
        self.space = space = make_space()
        self.task, self.target, self.say, self.reports = space.task, space.target, say, reports
        self.clock, self.most, self.see = clock, most, see
        candidates = estimate_layouts(space, until_s, see)
        if not candidates:
            raise _no_mesh(space)
        for note in space.notes:
            say(note)
        self.estimating_s, self.compiling_s = time.monotonic() - began, 0.0
        said = f"estimated {plural(len(candidates), 'layout')} in {self.estimating_s:.0f} s", space.not_estimated
        say("; ".join(filter(None, said)))
        self.late = False  # whether something was not compiled for want of time
        self.searched = len(candidates)
        may_fit = [one for one in candidates if one.fits is not False]
        self.untried = [one for one in may_fit if not self._is_slow(one)]
        self.slow = [one for one in may_fit if self._is_slow(one)]
        self.far = [one for one in candidates if one.fits is False]
        self.tried: list[Candidate] = []
        self.dropped: list[Candidate] = []  # HOPELESS
        self.compiled_error: float | None = None  # of estimates, by the layouts that were compiled
        known = estimate_error(self.target) if space.phase == "train" else None
        _, self.known_error = known or (0, ESTIMATE_ERROR)
        self.stopped = ""
        self.longest_s = 0.0  # of a round of compilations

    @property
    def best(self) -> Candidate | None:
        """The fastest of those that fit. Among equals the one with most memory left, then the simplest."""
        fitting = [one for one in self.tried if one.fits and one.step_time_s < math.inf]
        if not fitting:
            return None
        fastest = min(one.step_time_s for one in fitting)
        equal = [one for one in fitting if one.step_time_s <= fastest * (1 + EQUAL)]
        return min(equal, key=lambda one: (round(one.peak_bytes / 2**28), one.entries, one.step_time_s))

    def _is_slow(self, one: Candidate) -> bool:
        """Whether the compiler takes too long for a layout that is no finalist."""
        chip = self.target.chip
        return bool(chip and chip.name in SLOW_OFFLOAD and one.rules.remat.offload)

    def compile_next(self) -> None:
        """Compiles what promises most; `stopped` says when nothing promises more than GAIN, or the time is over."""
        if len(self.tried) >= self.most:
            self.stopped = f"{self.most} layouts were compiled"
            return
        chosen = self._next(compile.side_by_side(2))
        if chosen and self._in_time(self.longest_s / 2):
            before = self.compiling_s
            self._compile(chosen)
            self.longest_s = max(self.longest_s, self.compiling_s - before)
            self._correct()

    def finish(self) -> None:
        """Compiles what comes last, while there is time: slow finalists, what needs least, and variants of the best."""
        best = self.best
        finalists = sorted(self.slow, key=self._promised_s)[:FINALISTS]
        for one in finalists if self.most else ():
            if (best is None or self._promised_s(one) < best.step_time_s * (1 - GAIN)) and self._in_time():
                self.say("a finalist that offloads to the host: its compilation takes long")
                self._compile([one])
        self._try_least()
        if len(self.tried) < self.most and self.clock.left_s > 0:
            for variants in self.space.variants:
                self._try_variants(variants)

    def _in_time(self, takes_s: float = 0.0) -> bool:
        """Whether there is time for what takes so long; if not, the search has stopped for want of it."""
        if takes_s < self.clock.left_s:
            return True
        self.late, over = True, f"the {self.clock.minutes:.2g} minutes are over"
        self.stopped = self.stopped if over in self.stopped else "; ".join(filter(None, (self.stopped, over)))
        return False

    def _try_least(self) -> None:
        """Where nothing fits, compiles the layouts with the least estimated memory, one of each family, until one fits.

        A TPU's compiler that is short of memory makes do with less than it would take.
        """
        families = set[Any]()
        for one in sorted([*self.untried, *self.slow, *self.far], key=lambda one: one.estimate.peak_bytes):
            assert one.limit_bytes
            beyond = one.estimate.peak_bytes > BEYOND * one.limit_bytes or len(families) == LEAST_NEEDING
            if self.best or beyond or len(self.tried) >= self.most:
                return
            if one.family not in families:
                if not self._in_time():
                    return
                families.add(one.family)
                self.far = [other for other in self.far if other is not one]
                self._compile([one])

    def _try_variants(self, variants: Callable[[Mapping[str, Any]], Iterable[dict[str, Any]]]) -> None:
        """Compiles the best layout with settings whose effect no estimate knows."""
        if best := self.best:
            for raw in variants(best.raw):
                if self.clock.left_s <= 0:
                    return
                self.searched += 1
                self._compile([dataclasses.replace(best, raw=raw, rules=self.space.rules(raw), report=None)])

    def _promised_s(self, one: Candidate) -> float:
        """The shortest time that a layout may have: the less like the compiled ones, the less its estimate is known.

        A GPU program that does not fit takes as long to compile as one that does, so such layouts come later.
        """
        compiled = [other for other in self.tried if other.report]
        distance = min((_distance(one, other) for other in compiled), default=FARTHEST)
        error = self.known_error if self.compiled_error is None else max(LEAST_ERROR, self.compiled_error)
        seconds = one.step_time_s * math.exp(-error * min(distance, FARTHEST))
        if self.target.platform == "gpu" and one.limit_bytes:
            seconds *= max(1.0, one.estimate.peak_bytes / one.limit_bytes) ** 2
        return seconds

    def _next(self, count: int) -> list[Candidate]:
        """The layouts to compile next, the most promising first, one of each family; none if none is worth it."""
        if not self.untried:
            self.stopped = "every layout that may fit was compiled" if self.tried else "no layout is estimated to fit"
            return []
        promised = sorted(((self._promised_s(one), one) for one in self.untried), key=lambda pair: pair[0])
        best = self.best
        if best and len(self.tried) >= FEWEST and promised[0][0] >= best.step_time_s * (1 - GAIN):
            self.stopped = f"no other layout promises to be more than {GAIN:.1%} faster"
            return []
        chosen: list[Candidate] = []
        while len(chosen) < min(count, len(promised)):
            number, taken = len(self.tried) + len(chosen), [*self.tried, *chosen]
            left = [(promise, one) for promise, one in promised if one not in chosen]
            if number < FEWEST:  # the top is flat: neighbours of what was compiled have little to tell
                seen = {one.family for one in taken}
                left = [(promise, one) for promise, one in left if one.family not in seen] or left
            if number < FEWEST and number % 2:  # what is least like all that was compiled, and is not far behind
                near = [one for promise, one in left if promise <= EXPLORED * left[0][0]]
                chosen.append(max(near, key=lambda one: min(_distance(one, other) for other in taken)))
            else:
                chosen.append(left[0][1])
        return chosen

    def _compile(self, chosen: Sequence[Candidate]) -> None:
        best = self.best
        best_so_far = f"; best so far {best.step_time_s:.4g} s: {best.name}" if best else ""
        self.say(f"compiling {len(self.tried) + 1} to {len(self.tried) + len(chosen)}{best_so_far}")
        began = time.monotonic()
        try:
            reports: list[Report | None] = [
                *self.reports(self.task, [one.rules for one in chosen], self.target, self.say)
            ]
        except RunFailed as error:
            self.compiling_s += time.monotonic() - began
            if len(chosen) > 1:
                for one in chosen:
                    self._compile([one])
                return
            self.say(f"left out: {chosen[0].name}: {error}")
            self._done(dataclasses.replace(chosen[0], failure=str(error)), chosen[0])
            return
        self.compiling_s += time.monotonic() - began
        for one, report in zip(chosen, reports, strict=True):
            self._done(dataclasses.replace(one, report=report), one)

    def _done(self, tried: Candidate, before: Candidate) -> None:
        self.tried.append(tried)
        self.see(tried)
        self.untried = [one for one in self.untried if one is not before]
        self.slow = [one for one in self.slow if one is not before]

    def _correct(self) -> None:
        """Corrects the estimates of what is left by the compiled layouts, by those that are like it above all.

        A layout that needs more than one that was refused, and is like it in all but what it keeps, is dropped.
        """
        compiled = [one for one in self.tried if one.report and one.report.prediction]
        ratios = [math.log(one.step_time_s / one.estimate.step_time_s) for one in compiled]
        if len(compiled) > 2:  # each from the others
            errors = [
                ratio - _log_correction(one, [*compiled[:n], *compiled[n + 1 :]], [*ratios[:n], *ratios[n + 1 :]])
                for n, (one, ratio) in enumerate(zip(compiled, ratios, strict=True))
            ]
            self.compiled_error = statistics.mean(map(abs, errors))
        kept: list[list[Candidate]] = []
        for those in (self.untried, self.slow):
            kept.append([])
            for one in those:
                if self._hopeless(one):
                    self.dropped.append(dataclasses.replace(one, failure=HOPELESS))
                else:
                    corrected_s = one.estimate.step_time_s * math.exp(_log_correction(one, compiled, ratios))
                    kept[-1].append(dataclasses.replace(one, corrected_s=corrected_s))
        self.untried, self.slow = kept

    def _hopeless(self, one: Candidate) -> bool:
        """Whether a layout of the same kind that is estimated to need no more memory did not fit."""
        return any(
            other.fits is False
            and not other.failure
            and other.features[:-2] == one.features[:-2]
            and one.rules.microbatches <= other.rules.microbatches
            and one.estimate.peak_bytes >= other.estimate.peak_bytes
            for other in self.tried
        )

    def _error(self) -> float:
        """The known error of predictions for the target, as a share."""
        chip, best = self.target.chip, self.best
        experts = self.task.config.model.num_experts if self.task.config else 0
        if self.space.phase != "train":  # no other step was compared with a measured one
            return UNKNOWN_ERROR
        error = mean_error(kind_of(self.target, best.rules, experts)) if chip and best else None
        return UNKNOWN_ERROR if error is None else error

    def result(self, rank_by: RankBy) -> Plan:
        """The plan, as far as it has come."""
        best, error, space = self.best, self._error(), self.space
        tokens, unit = space.batch_size
        if rank_by == "bytes":
            ranked = sorted(self.untried, key=lambda one: (one.estimate.sent_bytes, one.peak_bytes, one.entries))
            best, ties = (ranked[0] if ranked else None), []
        else:
            fitting = [one for one in self.tried if one.fits and one.step_time_s < math.inf]
            others = [one for one in self.tried if one not in fitting]
            fitting.sort(key=lambda one: (one is not best, one.step_time_s))
            others = sorted([*self.untried, *self.slow], key=lambda one: one.step_time_s) + others
            if self.late and not self.tried:  # nothing was asked of a compiler: the best estimate is what there is
                best = next((one for one in others if one.estimate.peak_bytes <= (one.limit_bytes or 0)), None)
                others.sort(key=lambda one: one is not best)
            ranked = [*fitting, *others]
            ties = [one for one in fitting if best and one.step_time_s <= best.step_time_s * (1 + error)]
        ranked += sorted([*self.dropped, *self.far], key=lambda one: one.peak_bytes)
        nearest = min(itertools.chain(self.tried, self.far), key=lambda one: one.peak_bytes, default=None)
        return Plan(
            target=self.target,
            config=self.task.name,
            tokens=tokens,
            unit=unit,
            candidates=tuple(ranked),
            ties=tuple(ties),
            searched=self.searched,
            compiled=len(self.tried),
            seconds=self.estimating_s + self.compiling_s,
            error=error,
            best=best,
            estimate_error=self.compiled_error,
            refused=space.refused,
            nearest=None if best else nearest,
            stopped="; ".join(filter(None, (self.stopped, space.not_estimated))),
            late=self.late,
            left_out=space.left_out,
            tables=space.tables,
            notes=tuple(space.notes),
            phase=space.phase,
        )


def _log_correction(one: Candidate, compiled: Sequence[Candidate], ratios: Sequence[float]) -> float:
    """The logarithm of prediction over estimate that compiled layouts make likely, each by its similarity."""
    if not compiled:
        return 0.0
    weights = [SIMILARITY ** _distance(one, other) for other in compiled]
    return sum(map(operator.mul, weights, ratios)) / sum(weights)


def _distance(one: Candidate, other: Candidate) -> int:
    """The number of features in which two layouts differ."""
    return sum(map(operator.ne, one.features, other.features))


def _no_mesh(space: Space | DecodeSpace) -> InputError:
    task, target = space.task, space.target
    why = f"; the rules' own checks refused {space.refused} layouts" if space.refused else ""
    setting = task.names.settings.get(task.names.rows, "rows of a batch")
    return InputError(
        f"{task.name}: no mesh of the {target.devices} devices of {target.text} divides its {task.rows} rows{why}\n"
        f"  fix   make {setting} a multiple of {target.devices}, or of a large part of it"
    )
