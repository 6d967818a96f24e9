"""Jobs that are preempted and fail at random moments, beside the time that `foresight/whole_job.py` expects of them.

    python -m benchmarks.preemptions [--runs=10000] [--seed=0] [--write]

Each run is simulated from one interruption to the next one, in whole steps. The moments are drawn with numpy.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks import measure
from gspmd_lm.foresight import whole_job
from gspmd_lm.foresight.whole_job import DAY_S, HOUR_S, WholeJob, Work
from gspmd_lm.hardware.capacity import Assumptions, Price

# 8 B parameters with AdamW on 256 chips. The cases change it.
_USUAL = Work(
    steps=100_000,
    step_time_s=6.0,
    compile_s=60.0,
    chips=256,
    hosts=64,
    checkpoint_bytes=96_000_000_000,
    restored_bytes=1_500_000_000,
    state_bytes=375_000_000,
    copied_bytes=375_000_000,
    host_bytes_per_s=15e9,
    rows_per_s=1.0,
    read_bytes_per_s=1e5,
    checkpoint_minutes=10.0,
    checkpoint_every=0,
)
_FEW = dataclasses.replace(_USUAL, chips=8, hosts=2, steps=20_000, checkpoint_bytes=12_000_000_000)
_MANY = dataclasses.replace(_USUAL, chips=16_384, hosts=2048, checkpoint_bytes=5_000_000_000_000, steps=500_000)
CASES: dict[str, tuple[Work, Assumptions]] = {
    "256 chips, failures alone": (_USUAL, Assumptions()),
    "16,384 chips, failures alone": (_MANY, Assumptions(storage_gb_per_s=20)),
    "256 chips, 4 preemptions a day, too short a notice": (_USUAL, Assumptions(preemptions_per_day=4)),
    "256 chips, 24 preemptions a day, too short a notice": (_USUAL, Assumptions(preemptions_per_day=24)),
    "256 chips, 24 preemptions a day, notice of 120 s": (_USUAL, Assumptions(preemptions_per_day=24, notice_s=120)),
    "8 chips, 12 preemptions a day, notice of 30 s": (_FEW, Assumptions(preemptions_per_day=12)),
    "8 chips, 12 preemptions a day, a slow disk": (_FEW, Assumptions(preemptions_per_day=12, storage_gb_per_s=0.05)),
    "256 chips, steps of 90 s, 12 preemptions a day": (
        dataclasses.replace(_USUAL, step_time_s=90.0, steps=8000),
        Assumptions(preemptions_per_day=12),
    ),
    "256 chips, a checkpoint every 1,000 steps, 8 preemptions a day": (
        dataclasses.replace(_USUAL, checkpoint_minutes=0.0, checkpoint_every=1000),
        Assumptions(preemptions_per_day=8),
    ),
    "256 chips, hosts that are away for an hour, 8 preemptions a day": (
        _USUAL,
        Assumptions(preemptions_per_day=8, away_s=3600),
    ),
}


def simulate(job: WholeJob, runs: int, seed: int) -> np.ndarray:
    """The seconds that each of so many runs of a job takes, from its first start to its last step."""
    random, work, assumed = np.random.default_rng(seed), job.work, job.assumed
    failures = work.chips / (assumed.failure_hours * HOUR_S)
    preemptions = assumed.preemptions_per_day / DAY_S
    every = math.ceil(job.interval_s / work.step_time_s)  # steps between two checkpoints
    cycle_s = every * work.step_time_s + job.copy_s
    saved, total_s = np.zeros(runs), np.zeros(runs)  # steps that whole checkpoints hold; seconds so far
    back_s = np.full(runs, assumed.start_s + work.compile_s)  # until the first new step begins
    going = np.arange(runs)
    while going.size:
        failure_s = random.exponential(1 / failures, going.size)
        preemption_s = random.exponential(1 / preemptions, going.size) if preemptions else np.inf
        until_s = np.minimum(failure_s, preemption_s)
        worked_s = until_s - back_s[going]
        left = work.steps - saved[going]
        needed_s = left * work.step_time_s + (np.ceil(left / every) - 1) * job.copy_s
        ends = worked_s >= needed_s
        # What is lost is all after the newest checkpoint that was whole.
        whole = np.maximum(np.floor((worked_s - job.save_s) / cycle_s), 0) * every
        # Where the notice suffices, the run ends its step and saves.
        stops = (preemption_s < failure_s) & job.fits_notice & (worked_s > 0) & ~ends
        cycles = np.floor(worked_s / cycle_s)
        begun = np.minimum(np.ceil((worked_s - cycles * cycle_s) / work.step_time_s), every)
        step_end_s = np.maximum(cycles * cycle_s + begun * work.step_time_s - worked_s, 0)
        gained = np.where(stops, np.minimum(cycles * every + begun, left), np.where(ends, left, whole))
        saved[going] += gained
        stopping_s = np.where(stops, step_end_s + job.copy_s + job.save_s, 0)
        total_s[going] += np.where(ends, back_s[going] + needed_s, until_s + stopping_s)
        back_s[going] = job.return_s
        going = going[saved[going] < work.steps]
    return total_s


def compare(names: Sequence[str], runs: int, seed: int) -> Iterator[dict[str, Any]]:
    """A row for each case: the expected and the simulated days, and by how much the expected ones are off."""
    for name in names:
        job = whole_job.predict(*CASES[name], Price())
        course = job.on_spot or job.on_demand
        assert course.days
        days = simulate(job, runs, seed) / DAY_S
        yield {
            "case": name,
            "goodput": round(course.goodput, 4),
            "expected_days": round(course.days, 3),
            "simulated_days": round(days.mean(), 3),
            "error": round(course.days / days.mean() - 1, 5),
            "standard_error": round(days.std() / math.sqrt(runs) / days.mean(), 5),
            "runs": runs,
        }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as a table of Markdown."""
    lines = ["| case | goodput | expected, days | simulated, days | error |", "|---|---|---|---|---|"]
    for row in rows:
        figures = f"{row['goodput']:.1%} | {row['expected_days']:.2f} | {row['simulated_days']:.2f}"
        lines.append(f"| {row['case']} | {figures} | {row['error']:+.2%} |")
    return "\n".join(lines)


def main() -> None:
    parser = measure.flags(__doc__)
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rows = list(compare(list(CASES), options.runs, options.seed))
    print(table(rows))
    if options.write:
        measure.write("preemptions", rows)


if __name__ == "__main__":
    main()
