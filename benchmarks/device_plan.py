"""The plan's estimates beside measured steps, on the first accelerator of this machine.

    python -m benchmarks.device_plan [CASE ...] [--count=8] [--write]

Each case is a model and a batch, which one accelerator can train in about twenty layouts. `--count` of those that fit
by estimate are taken: the fastest, and one of each further stratum. Each is compiled, predicted as `explain` does, and
run. The plan's choice is the layout that is predicted to be fastest. Its regret is how much longer its measured step is
than the shortest one.
"""

from typing import Any

import jax

from benchmarks import measure, on_device
from benchmarks.plan import near_fastest, spearman
from benchmarks.published_plans import kept
from gspmd_lm.hardware import target as targets
from gspmd_lm.plan.estimate import Estimate
from gspmd_lm.plan.space import Space, describe
from gspmd_lm.runtime import startup

CASES = {"llama_1b": 32, "llama_8b, 4 layers": 8, "mixtral_8x7b, 2 layers": 8, "gpt2_124m": 64}  # rows of a batch
FILE = "device_plan"
SPARED = 0.97  # the share of the memory that a layout may need by estimate: those that need more are not compiled
COLUMNS = {"device": "on", "case": "model", "rows": "rows", "layout": "layout", "estimated_ms": "estimated, ms",
           "predicted_ms": "predicted, ms", "measured_ms": "measured, ms", "estimated_gb": "estimated, GB",
           "compiled_gb": "compiled, GB"}  # fmt: skip


def measured(case: str, count: int, device: Any) -> list[dict[str, Any]]:
    """Layouts of a case, from the fastest by estimate on: estimated, predicted and measured."""
    cfg, target = on_device.CASES[case].load(CASES[case]), targets.from_devices([device])
    space = Space(cfg, target)
    rows = []
    for estimate, raw in chosen(space, target, count):
        row = {
            "case": case,
            "rows": CASES[case],
            "layout": describe(raw),
            "rules": raw,
            "estimated_ms": round(estimate.step_time_s * 1e3, 2),
            "estimated_gb": round(estimate.peak_bytes / 1e9, 2),
        }
        ran = on_device.run(cfg, space.rules(raw), device, steps=5)
        for name in ("measured_gb", "memory_error"):  # a peak is that of the process, so of all layouts before
            ran.pop(name, None)
        rows.append(row | ran)
        print({key: rows[-1][key] for key in COLUMNS}, flush=True)
    return rows


def chosen(space: Space, target: targets.Target, count: int) -> list[tuple[Estimate, dict[str, Any]]]:
    """So many layouts that fit by estimate: the fastest of each of so many strata."""
    limit_bytes = SPARED * target.chip.usable_hbm_bytes if target.chip else float("inf")
    near = near_fastest(space, lambda estimate: estimate.peak_bytes <= limit_bytes)
    return [near[len(near) * stratum // count] for stratum in range(min(count, len(near)))]


def show(rows: list[dict[str, Any]]) -> None:
    """A table of each case, with the order of its layouts and the regret of the one that is predicted to be fastest."""
    for name in dict.fromkeys((row["device"], row["case"]) for row in rows):
        found = [row for row in rows if (row["device"], row["case"]) == name]
        print(f"\n{measure.markdown(found, COLUMNS)}")
        ran = [row for row in found if row["measured_ms"] != ""]
        best_ms = min(row["measured_ms"] for row in ran)
        for word in ("estimated_ms", "predicted_ms"):
            order = spearman([row[word] for row in ran], [row["measured_ms"] for row in ran])
            first = min(ran, key=lambda row: row[word])
            print(f"{word[:-3]}: Spearman {order:.3f} over {len(ran)}, "
                  f"regret {first['measured_ms'] / best_ms - 1:.1%} ({first['layout']})")  # fmt: skip


def main() -> None:
    parser = measure.flags(__doc__)
    parser.add_argument("cases", nargs="*", choices=(*CASES, []), default=[], help="default: all")
    parser.add_argument("--count", type=int, default=8, help="layouts of each case")
    arguments = parser.parse_args()
    startup.start(simulated_devices=1)
    (device, *_) = jax.devices()
    rows = []
    for case in arguments.cases or CASES:
        rows += measured(case, arguments.count, device)
        if arguments.write:
            others = [row for row in kept(FILE) if (row["device"], row["case"]) != (rows[-1]["device"], case)]
            measure.write(FILE, [*others, *(row for row in rows if row["case"] == case)])
    show(rows)


if __name__ == "__main__":
    main()
