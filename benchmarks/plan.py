"""How well `plan` estimates and chooses: figures of benchmarks/plans.md. Nothing but compilers runs.

    python -m benchmarks.plan pricing [--write]    # seconds to estimate all layouts of a 405B model on 512 chips
    python -m benchmarks.plan rank 1b-h100:8 [--count 16] [--again]    # estimates beside predictions
    python -m benchmarks.plan stages [8-layers-h100:2x8] [--again]    # pipelines beside layouts without, or published
    python -m benchmarks.plan regret 8b-h100:8 [--minutes 5]    # the plan's best beside the best of 40 compiled
    python -m benchmarks.plan shipped 8b-h100:8    # the plan beside every rules file of rules/ that fits
    python -m benchmarks.plan published --rows 8 9    # the plan beside published layouts, tuned by hand
    python -m benchmarks.plan prices [--rows 2 51] [--compile]    # published layouts beside the best of all, estimated
    python -m benchmarks.plan show    # the tables of all that was kept

rank, regret and shipped keep each compiled layout in results/ at once and go on where they were stopped. What they all
compile is kept by `explain`, too.
"""

import collections
import dataclasses
import datetime
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from benchmarks import measure, step_times
from benchmarks.layouts import LLAMA_1B, PAIRS
from benchmarks.plan_pricing import pricing
from benchmarks.published_plans import kept, published, published_prices, show_published, show_published_prices
from gspmd_lm import config as configs
from gspmd_lm.config import Config
from gspmd_lm.errors import InputError, RunFailed
from gspmd_lm.foresight import explain
from gspmd_lm.foresight.known_errors import is_several
from gspmd_lm.foresight.report import Report
from gspmd_lm.hardware import target as targets
from gspmd_lm.plan import search
from gspmd_lm.plan.estimate import Estimate, Estimator
from gspmd_lm.plan.space import Space, describe
from gspmd_lm.plan.traces import TraceCache
from gspmd_lm.sharding import rules_file
from gspmd_lm.train import choices

SLOWEST = 2.0  # a layout that takes so many times the fastest is no candidate for a rank
OF_MEMORY = 0.95  # the share of the limit that a ranked layout may need by estimate: all but a few then compile
SPARED = 1.02  # the share of the limit that a layout may need by estimate to be compiled beside a plan
PARTS = ("matmul_s", "attention_s", "other_s", "exposed_host_copy_s")


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and a target."""

    config: str
    sets: tuple[str, ...]
    target: str

    def load(self) -> Config:
        return configs.load(self.config, self.sets)


def _1b(target: str, batch: int) -> Case:
    return Case("llama3_8b", (*LLAMA_1B, f"data.batch={batch}"), target)


def _llama(size: str, target: str, batch: int, seq: int = 8192) -> Case:
    return Case(f"llama3_{size}", (f"data.batch={batch}", f"data.seq={seq}"), target)


CASES = {
    "1b-h100:8": _1b("h100:8", 64),
    "1b-h100:2x8": _1b("h100:2x8", 64),
    "8b-h100:8": _llama("8b", "h100:8", 32, 4096),
    "8b-h100:2x8": _llama("8b", "h100:2x8", 64, 4096),
    "1b-v5p:2x2x2": _1b("v5p:2x2x2", 64),
    "1b-v6e:2x4": _1b("v6e:2x4", 64),
    "1b-2@v6e:2x4": _1b("2@v6e:2x4", 64),
    "8b-v5e:4x8": _llama("8b", "v5e:4x8", 32),
    "70b-v5p:4x4x8": _llama("70b", "v5p:4x4x8", 256),
    **{
        f"8-layers-{target}": Case("llama3_8b", ("model.layers=8", "data.batch=64", "data.seq=4096"), target)
        for target in ("h100:8", "h100:2x8", "h100:2x8/100", "v5p:2x2x2")
    },
}


class Bench:
    """One case, with its estimates and all that is kept of its compiled layouts under one name in results/."""

    def __init__(self, name: str, file: str):
        self.name, self.case, self.kept = name, CASES[name], file
        self.config, self.target = self.case.load(), targets.parse(self.case.target)
        self.traces = TraceCache(self.config)
        self.space = Space(self.config, self.target, self.traces)
        self.estimator = self.space.estimator

    def estimate(self, raw: dict[str, Any]) -> Estimate:
        return self.estimator.estimate(self.space.rules(raw))

    def rankable(self, estimate: Estimate) -> bool:
        """Whether there is memory enough by estimate. A compiler that runs short of it computes and gathers again."""
        chip = self.target.chip
        return bool(chip and estimate.peak_bytes <= OF_MEMORY * chip.usable_hbm_bytes)

    def rows(self) -> list[dict[str, Any]]:
        return [row for row in kept(self.kept) if row["case"] == self.name]

    def compiled(self, raw: dict[str, Any], **more: Any) -> dict[str, Any]:
        """What is predicted for a layout: as it was kept, else compiled now and kept."""
        for row in self.rows():
            if row["rules"] == raw:
                return row
        rules, report, failure = self.space.rules(raw), None, ""
        try:
            (report,) = explain.reports(self.config, [rules], self.target, print)
        except RunFailed as error:
            failure = str(error).splitlines()[-1][:200]
        row = {"case": self.name, "rules": raw, **of_report(report, failure), **more}
        measure.write(self.kept, [*kept(self.kept), row])
        return row

    def compile_again(self, layouts: Iterable[dict[str, Any]]) -> None:
        for raw in layouts:
            others = [row for row in kept(self.kept) if (row["case"], row["rules"]) != (self.name, raw)]
            measure.write(self.kept, others)
            self.compiled(raw)


def of_report(report: Report | None, failure: str = "") -> dict[str, Any]:
    told = report.prediction if report else None
    found: dict[str, Any] = {
        "step_time_s": told and round(told.step_time_s, 5),
        "fits": bool(report and report.memory.fits),
        "peak_bytes": report and report.memory.peak_bytes,
        "compile_s": report and round(report.compile_s),
        "date": datetime.date.today().isoformat(),
    }
    if told:
        found["parts_s"] = {name: round(getattr(told, name), 5) for name in PARTS}
        found["exposed_by_axis"] = {axes: round(seconds, 5) for axes, seconds in told.exposed_by_axis.items()}
        found["communication_s"] = round(told.communication_s, 5)
    return found | ({"failure": failure} if failure else {})


def near_fastest(space: Space, fits: Callable[[Estimate], bool]) -> list[tuple[Estimate, dict[str, Any]]]:
    """The layouts that fit by estimate, from the fastest to SLOWEST of it, each with its estimate."""
    estimated = [(space.estimator.estimate(rules), raw) for raw, rules in space.fill_layouts()]
    fitting = sorted((one for one in estimated if fits(one[0])), key=lambda one: one[0].step_time_s)
    return [one for one in fitting if one[0].step_time_s <= SLOWEST * fitting[0][0].step_time_s]


def stratified(bench: Bench, count: int) -> list[dict[str, Any]]:
    """Layouts from the fastest to SLOWEST of it, one of each stratum: the one with most features not yet seen."""
    near = near_fastest(bench.space, bench.rankable)
    edges = np.linspace(0, len(near), count + 1).astype(int)
    seen = collections.Counter[Any]()
    chosen = []
    for begin, end in itertools.pairwise(edges):
        if begin == end:
            continue
        features = [list(enumerate(_features(raw))) for _, raw in near[begin:end]]
        best = min(range(len(features)), key=lambda n: sum(seen[one] for one in features[n]))
        seen.update(features[best])
        chosen.append(near[begin + best][1])
    return chosen


def _features(raw: dict[str, Any]) -> list[str]:
    rules = raw.get("rules", {})
    return [str(part) for part in (raw["mesh"], raw.get("dcn"), [row for row in rules if "." in row],
                                   "optimizer" in raw, raw.get("remat"), raw.get("microbatches", 1))]  # fmt: skip


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """The correlation of ranks; equal values share the mean of their ranks."""

    def ranks(values: Sequence[float]) -> np.ndarray:
        array = np.asarray(values)
        return np.array([(array < value).sum() + (array == value).sum() / 2 for value in values])

    return float(np.corrcoef(ranks(first), ranks(second))[0, 1])


def rank(name: str, count: int, again: bool) -> None:
    bench = Bench(name, "plan_rank")
    done = [row["rules"] for row in bench.rows() if bench.rankable(bench.estimate(row["rules"]))]
    if again:
        bench.compile_again(done)
    wanted = done if len(done) >= count else [*done, *(raw for raw in stratified(bench, count) if raw not in done)]
    for raw in wanted[: max(count, len(done))]:
        bench.compiled(raw)
    show_rank(bench)


def stages(name: str | None, again: bool) -> None:
    """Layouts with stages, and some without, beside estimates; without a case, published runs beside estimates."""
    if name is None:
        for row in step_times.rows(step_times.PIPELINES):
            where, config = targets.parse(row.target), row.config()
            rules = choices.settle_rules(config, row.rules().fill(where.devices), where.processor)
            estimate = Estimator(config, where).estimate(rules)
            print(f"{row.name}: published {row.step_time_s:.2f} s, estimated {estimate.step_time_s:.2f} s, "
                  f"{estimate.peak_bytes / 1e9:.0f} GB")  # fmt: skip
        return
    bench = Bench(name, "plan_stages")
    if again:
        bench.compile_again([row["rules"] for row in bench.rows()])
    show_rank(bench)


def show_rank(bench: Bench) -> None:
    """Every kept point of a case, and how well the estimates of today order them."""
    rows = [row for row in bench.rows() if row["step_time_s"]]
    estimated = [(bench.estimate(row["rules"]), row) for row in rows]
    points = [(estimate, row) for estimate, row in estimated if bench.rankable(estimate)]
    print(f"\n{bench.name}")
    for estimate, row in sorted(estimated, key=lambda point: point[1]["step_time_s"]):
        told, error = row["parts_s"], estimate.step_time_s / row["step_time_s"] - 1
        parts = " ".join(f"{part[:-2]} {getattr(estimate, part):.3f}/{told[part]:.3f}" for part in PARTS)
        waits = sum(estimate.exposed_by_axis.values()), sum(row["exposed_by_axis"].values())
        sent = f"sent {estimate.communication_s:.3f}/{row['communication_s']:.3f}"
        print(f"{estimate.step_time_s:8.4f} {row['step_time_s']:8.4f} {error:+6.1%}  {parts} waits {waits[0]:.3f}/"
              f"{waits[1]:.3f} {sent}  GB {estimate.peak_bytes / 1e9:.1f}/{row['peak_bytes'] / 1e9:.1f}  "
              f"{describe(row['rules'])}{'' if bench.rankable(estimate) else ', not ranked: memory'}")  # fmt: skip
    for row in bench.rows():
        if not row["step_time_s"]:
            print(f"{'refused':>17}  {row.get('failure', '')} {describe(row['rules'])}")
    if len(points) > 2:
        found, told = [p.step_time_s for p, _ in points], [row["step_time_s"] for _, row in points]
        errors = np.log(np.array(found) / np.array(told))
        print(f"Spearman {spearman(found, told):.3f} over {len(points)}; bias {np.exp(errors.mean()) - 1:+.1%}, "
              f"spread {errors.std():.1%}")  # fmt: skip


def show_estimates() -> None:
    """How far estimates are from compiled predictions, by chip: what known_errors.ESTIMATES says."""
    errors = collections.defaultdict(list)
    for name in CASES:
        bench = Bench(name, "plan_rank")
        for row in bench.rows():
            estimate = bench.estimate(row["rules"])
            if row["step_time_s"] and bench.rankable(estimate):
                kind = bench.target.chip and bench.target.chip.name, is_several(bench.target)
                errors[kind].append(abs(np.log(estimate.step_time_s / row["step_time_s"])))
    for kind, found in errors.items():
        print(f"    {kind}: ({len(found)}, {np.mean(found):.3f}),")


def show_memory() -> None:
    """How far estimates of memory are from what compilers say, over every kept layout that fits."""
    errors = collections.defaultdict(list)
    for name in CASES:
        bench = Bench(name, "plan_rank")
        rows = {str(row["rules"]): row for file in ("plan_rank", "plan_regret") for row in kept(file)
                if row["case"] == name and row["fits"]}  # fmt: skip
        for row in rows.values():
            errors[bench.target.platform].append(bench.estimate(row["rules"]).peak_bytes / row["peak_bytes"] - 1)
    for platform, found in errors.items():
        print(f"\nmemory on {platform}: {len(found)} layouts, mean error {np.abs(found).mean():.1%}, "
              f"from {min(found):+.1%} to {max(found):+.1%}")  # fmt: skip


def recorded() -> None:
    """The layouts whose predictions results/foresight_order.json holds, of all targets, beside their prices."""
    rows, found = measure.read("foresight_order"), {}
    for pair in PAIRS:
        row = next(row for row in rows if (row["pair"], row["target"]) == (pair.name, pair.target))
        found |= {(pair.target, str(side)): (side, ms) for side, ms in ((pair.good, row["good_ms"]),
                                                                       (pair.bad, row["bad_ms"]))}  # fmt: skip
    of_target = collections.defaultdict(list)
    for (target, _), (side, ms) in found.items():
        if side.batch != 64:  # kept per token, not per step
            continue
        config, where = side.config(), targets.parse(target)
        estimate = Estimator(config, where).estimate(side.rules().fill(where.devices))
        of_target[target].append((estimate.step_time_s, ms / 1e3, f"{describe(side.raw)} {' '.join(side.sets)}"))
    for target, points in of_target.items():
        print(f"\nrecorded layouts of 1b on {target}")
        for estimated, told, name in sorted(points, key=lambda point: point[1]):
            print(f"{estimated:8.4f} {told:8.4f} {estimated / told - 1:+6.1%}  {name}")
        print(f"Spearman {spearman(*zip(*(point[:2] for point in points), strict=True)):.3f} over {len(points)}")


def regret(name: str, minutes: float, count: int = 40) -> None:
    """The plan's best beside the best of `count` compiled: the plan's own, and the best estimated of each family."""
    bench = Bench(name, "plan_regret")
    plan = search.plan(bench.config, bench.target, minutes=minutes, say=print)
    assert plan.best
    for one in plan.candidates:
        if one.compiled:
            bench.compiled(dict(one.raw), by_plan=True)
    for raw in [None, *_of_families(plan.candidates)]:
        if raw:
            bench.compiled(raw)
        told = [row["step_time_s"] for row in bench.rows() if row["fits"] and row["step_time_s"]]
        print(f"{len(told)} compiled that fit: best {min(told):.5f} s, the plan's {plan.best.step_time_s:.5f} s, "
              f"regret {plan.best.step_time_s / min(told) - 1:.2%}, found in {plan.seconds:.0f} s "
              f"with {plan.compiled} compiled", flush=True)  # fmt: skip
        if len(told) >= count:
            break


def _of_families(candidates: Iterable[search.Candidate]) -> list[dict[str, Any]]:
    """What may fit, the cheapest of each family first, then the second of each."""
    seen = collections.Counter[Any]()
    ranked = []
    for one in sorted(candidates, key=lambda one: one.estimate.step_time_s):
        if one.fits is not False and one.limit_bytes and one.estimate.peak_bytes <= SPARED * one.limit_bytes:
            seen[one.family] += 1
            ranked.append((seen[one.family], one.estimate.step_time_s, dict(one.raw)))
    return [raw for _, _, raw in sorted(ranked, key=lambda item: item[:2])]


def shipped(name: str, minutes: float) -> None:
    """The plan beside every rules file of rules/ that fits the target and its memory."""
    bench = Bench(name, "plan_shipped")
    plan = search.plan(bench.config, bench.target, minutes=minutes, say=print)
    assert plan.best
    for path in sorted((measure.ROOT / "rules").glob("*.yaml")):
        rules = rules_file.load(str(path))
        if any(row["file"] == path.stem for row in bench.rows()):
            continue
        try:
            (report,) = explain.reports(bench.config, [rules], bench.target, print)
        except InputError as error:
            print(f"{path.stem}: {str(error).splitlines()[0]}")
            continue
        row = {"case": name, "file": path.stem, **of_report(report), "plan_s": round(plan.best.step_time_s, 5)}
        measure.write(bench.kept, [*kept(bench.kept), row])
    for row in bench.rows():
        if row["fits"] and row["step_time_s"]:
            print(f"{row['file']:12} {row['step_time_s']:.5f} s, the plan {plan.best.step_time_s:.5f} s: "
                  f"{plan.best.step_time_s / row['step_time_s'] - 1:+.1%}")  # fmt: skip


def main() -> None:
    parser = measure.flags(__doc__)
    parser.add_argument(
        "what", choices=("pricing", "rank", "stages", "regret", "shipped", "published", "prices", "show")
    )
    parser.add_argument("case", nargs="?", choices=CASES)
    parser.add_argument("--count", type=int, default=16, help="how many layouts are ranked")
    parser.add_argument("--again", action="store_true", help="predict kept layouts anew, after prices have changed")
    parser.add_argument("--rows", type=int, nargs="+", default=(), help="numbers of published rows, from 0")
    parser.add_argument("--minutes", type=float, default=15, help="of a plan")
    parser.add_argument("--compile", action="store_true", help="compile the best of the estimated layouts, too")
    arguments = parser.parse_args()
    if arguments.what in ("rank", "regret", "shipped") and not arguments.case:
        parser.error(f"{arguments.what} needs a case: {', '.join(CASES)}")
    measure.simulate(1)
    if arguments.what == "pricing":
        row = pricing()
        print(row)
        if arguments.write:
            measure.write("plan_pricing", [row])
    elif arguments.what == "show":
        for file in ("plan_rank", "plan_stages"):
            for name in dict.fromkeys(row["case"] for row in kept(file)):
                show_rank(Bench(name, file))
        show_estimates()
        show_memory()
        recorded()
        show_published()
        show_published_prices(kept("plan_prices"))
    elif arguments.what == "prices":
        published_prices(arguments.rows, arguments.compile)
    elif arguments.what == "published":
        published(arguments.rows, arguments.minutes)
    elif arguments.what == "rank":
        rank(arguments.case, arguments.count, arguments.again)
    elif arguments.what == "stages":
        stages(arguments.case, arguments.again)
    elif arguments.what == "regret":
        regret(arguments.case, arguments.minutes)
    else:
        shipped(arguments.case, arguments.minutes)


if __name__ == "__main__":
    main()
