"""Memory and time of mixtures whose tokens travel: compiled, as `plan` estimates them, and how they grow with the axis.

    python -m benchmarks.expert_buffers         # compiles each layout that is not in the results
    python -m benchmarks.expert_buffers show    # the table, with the estimates of today

Each device has two rows of 4,096 tokens, whatever the number of devices. Nothing runs: programs are compiled for
hardware that need not be here.
"""

import datetime
from collections.abc import Sequence
from typing import Any

from benchmarks import measure
from gspmd_lm import config as configs
from gspmd_lm.config import Config
from gspmd_lm.foresight import explain
from gspmd_lm.hardware import target as targets
from gspmd_lm.hardware.target import Target
from gspmd_lm.plan.estimate import Estimator
from gspmd_lm.sharding import rules_file
from gspmd_lm.sharding.rules import Rules
from gspmd_lm.train.choices import settle_rules

RESULTS = "expert_buffers"
ROWS = 2  # of each device
SIZES = ("layers=8", "embed=2048", "heads=16", "kv_heads=16", "mlp=1024", "experts.count=64", "experts.per_token=4",
         "context=4096", "experts.balance=row")  # fmt: skip
# target, devices along `expert`, remat
LAYOUTS = (
    ("h100:8", 8, "block"), ("h100:8x8", 64, "block"), ("b200:8", 8, "none"), ("b200:8x8", 64, "none"),
    ("b200:8x8", 8, "block"), ("v5p:2x2x2", 8, "block"), ("v5p:4x4x4", 64, "block"), ("v5p:4x4x4", 8, "none"),
    ("tpu7x:2x2x1", 8, "block"), ("tpu7x:2x4x4", 64, "block"),
)  # fmt: skip


def layout(name: str, over: int, remat: str) -> tuple[Config, Rules, Target]:
    """The config, the rules and the target of a layout."""
    target = targets.parse(name)
    devices = target.devices
    sets = [f"model.{size}" for size in SIZES] + [f"data.batch={ROWS * devices}", "data.source=random:32000"]
    config = configs.load("mixtral_8x7b", sets)
    whole = {"w_gate.embed": None, "w_up.embed": None, "w_down.embed": None}
    raw: dict[str, Any] = {
        "mesh": {"expert": over}, "rules": {"batch": "expert", "expert": "expert"},
        "weights": {"embed": "expert", **whole}, "remat": remat,
    }  # fmt: skip
    if over < devices:
        raw |= {"mesh": {"fsdp": devices // over, "expert": over}}
        raw["rules"]["batch"] = ["fsdp", "expert"]
        raw["weights"] = {"embed": ["fsdp", "expert"], **dict.fromkeys(whole, "fsdp")}
    rules = rules_file.from_dict(raw, "experts").fill(devices)
    return config, settle_rules(config, rules, target.processor), target


def compiled(name: str, over: int, remat: str) -> dict[str, Any]:
    """What is compiled of one layout: gigabytes of a device, and seconds of a step."""
    config, rules, target = layout(name, over, remat)
    (report,) = explain.reports(config, [rules], target, print)
    return {
        "target": name, "expert": over, "remat": remat,
        "state_gb": round((report.memory.weights_bytes + report.memory.optimizer_bytes) / 1e9, 3),
        "compiled_gb": round(report.memory.peak_bytes / 1e9, 3),
        "compiled_s": report.prediction and round(report.prediction.step_time_s, 4),
        "compiled_sent_gb": round(report.sent_bytes / 1e9, 3),
        "compile_s": round(report.compile_s), "date": datetime.date.today().isoformat(),
    }  # fmt: skip


def estimated(name: str, over: int, remat: str) -> dict[str, Any]:
    """What `plan` estimates of one layout, in the same units."""
    config, rules, target = layout(name, over, remat)
    found = Estimator(config, target).estimate(rules)
    return {
        "estimated_gb": round(found.peak_bytes / 1e9, 3), "estimated_s": round(found.step_time_s, 4),
        "estimated_sent_gb": round(found.sent_bytes / 1e9, 3),
    }  # fmt: skip


def show(rows: list[dict[str, Any]]) -> None:
    """Prints what was compiled beside what is estimated now."""
    print("| target | expert | remat | memory, GB | state | estimated | sent, GB | estimated | s a step | estimated |")
    print("|" + 10 * "---|")
    names = ("target", "expert", "remat", "compiled_gb", "state_gb", "estimated_gb", "compiled_sent_gb",
             "estimated_sent_gb", "compiled_s", "estimated_s")  # fmt: skip
    for row in rows:
        row = row | estimated(row["target"], row["expert"], row["remat"])
        print("| " + " | ".join(str(row[name]) for name in names) + " |")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = measure.flags(__doc__, writes=False)
    parser.add_argument("what", nargs="?", choices=("make", "show"), default="make")
    what = parser.parse_args(arguments).what
    rows = measure.kept(RESULTS)
    known = [(row["target"], row["expert"], row["remat"]) for row in rows]
    for one in LAYOUTS if what == "make" else ():
        if one not in known:
            rows.append(compiled(*one) | estimated(*one))
            measure.write(RESULTS, rows)
    show(rows)


if __name__ == "__main__":
    main()
