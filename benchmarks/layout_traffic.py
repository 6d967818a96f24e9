"""What each shipped layout sends, holds and is predicted to take, on every kind of target: exact counts to compare.

    python -m benchmarks.layout_traffic [--layouts tp8 fsdp8] [--targets cpu:8 v5p:2x2x2] [--write]
    python -m benchmarks.layout_traffic --before FILE    # beside the rows of another run, kept with --json FILE

Only compilers run: bytes and temporaries are those of the compiled program, times are predicted.
"""

import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks import measure
from gspmd_lm import config
from gspmd_lm.foresight import compile, explain
from gspmd_lm.foresight.report import Report
from gspmd_lm.hardware import target
from gspmd_lm.sharding import rules_file
from gspmd_lm.sharding.rules import Remat, Rules

# Small enough to compile in seconds, and large enough that compilers move activations and weights as in large models.
MODEL = ("model.embed=512", "model.heads=8", "model.kv_heads=8", "model.head_dim=64", "model.mlp=2048",
         "model.vocab=8192", "model.padded_vocab=8192", "model.context=512", "model.compute_dtype=bfloat16",
         "data.batch=32", "data.seq=512")  # fmt: skip
# Wide enough that an eighth of each matrix fills the 128 lanes of a TPU.
WIDE = ("model.embed=1024", "model.head_dim=128")
EXPERTS = (*WIDE, "model.experts=8", "model.experts_per_token=2", "model.expert_mlp=1024")
LONG = (*WIDE, "model.context=4096", "data.seq=4096", "data.batch=8")
# A rules file, what is changed in it, and more of the model.
CASES: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    **{name: (name, {}, ()) for name in ("dp8", "zero1_8", "fsdp8", "tp8", "dp2_tp4", "fsdp2_tp4", "fsdp", "fsdp_tp")},
    "fsdp2_tp4, none": ("fsdp2_tp4", {"remat": Remat("none")}, ()),
    "fsdp2_tp4, dots": ("fsdp2_tp4", {"remat": Remat("dots")}, ()),
    "fsdp8, none": ("fsdp8", {"remat": Remat("none")}, ()),
    "tp8, parallel": ("tp8", {}, ("model.block=parallel",)),
    "fsdp2_tp4, lora": ("fsdp2_tp4", {}, ("model.lora={rank: 8, alpha: 16, targets: [wq, wk, wv, wo, w_up, w_down]}",)),
    **{f"{name}, 4 microbatches": (name, {"microbatches": 4}, ()) for name in ("dp8", "zero1_8", "dp2_tp4", "fsdp8")},
    **{f"{name}, experts": (name, {}, EXPERTS) for name in ("fsdp8", "dp2_tp4", "expert4")},
    **{f"{name}, long": (name, {}, LONG) for name in ("cp8", "cp8_ring", "cp8_ulysses")},
}
GENERATION = ("decode_tp8",)
TARGETS = ("cpu:8", "v5p:2x2x2", "v5e:2x4", "v6e:2x4", "h100:8")
COLUMNS = {"layout": "layout", "target": "target", "sent_mb": "sent, MB",
           "over_floor": "over the floor", "kinds": "of which, MB",
           "temporaries_mb": "temporaries, MB", "step_ms": "predicted step, ms"}  # fmt: skip


def compiled(
    cfg: config.Config, rules: Rules, place: target.Target, phase: Any = "train"
) -> tuple[compile.CompiledProgram, Report, dict[str, Any]]:
    """The program of a layout, its report, and what it sends, holds and is predicted to take."""
    (program,) = compile.programs([compile.CompileRequest(cfg, rules.fill(place.devices), place, phase=phase)], print)
    (report,) = explain.reports(cfg, [rules], place, phase=phase)  # of the same program, which is kept
    predicted = report.prediction
    return (
        program,
        report,
        {
            "sent_mb": round(sum(one.bytes_per_device_per_step for one in report.collectives) / 1e6, 3),
            "temporaries_mb": round(program.memory["temp_size_in_bytes"] / 1e6, 3),
            "step_ms": predicted and round(predicted.step_time_s * 1e3, 4),
        },
    )


def row(case: str, where: str, phase: Any = "train") -> dict[str, Any]:
    """What is compiled and predicted for one layout on one target."""
    layout, changes, sets = (case, {}, ()) if case in GENERATION else CASES[case]
    rules = dataclasses.replace(rules_file.load(layout), **changes)
    cfg, place = config.load("tiny", [*MODEL, *sets]), target.parse(where)
    _, found, figures = compiled(cfg, rules, place, phase)
    kinds: Counter[str] = Counter()
    for one in found.collectives:
        kinds[one.kind] += one.bytes_per_device_per_step
    told = found.prediction
    return {
        "layout": case if phase == "train" else f"{case}, {phase}",
        "target": where,
        "over_floor": round(sum(kinds.values()) / least, 3)
        if told and (least := found.floor.communication_bytes)
        else None,
        "kinds": ", ".join(f"{kind} {size / 1e6:.3f}" for kind, size in sorted(kinds.items())),
        **figures,
        "without_a_row": sum(not one.rules for one in found.collectives),
    }


def compared(rows: list[dict[str, Any]], before: list[dict[str, Any]]) -> str:
    """The figures of rows beside those before, and their ratios."""
    old = {(one["layout"], one["target"]): one for one in before}
    names = ("sent_mb", "temporaries_mb", "step_ms")
    shown = []
    for new in rows:
        if was := old.get((new["layout"], new["target"])):
            figures = {name: f"{was[name]} to {new[name]}" for name in names}
            ratios = {name: f", {new[name] / was[name]:.3f}" if was[name] else "" for name in names}
            shown.append(new | {name: figures[name] + ratios[name] for name in names})
    return measure.markdown(shown, {name: COLUMNS[name] for name in ("layout", "target", *names)})


def main() -> None:
    parser = measure.flags(__doc__)
    parser.add_argument("--layouts", nargs="*", default=[*CASES, *GENERATION])
    parser.add_argument("--targets", nargs="*", default=TARGETS)
    parser.add_argument("--before", type=Path, help="rows of another run to compare with")
    parser.add_argument("--json", type=Path, help="keep the rows in this file")
    arguments = parser.parse_args()
    rows = []
    for where in arguments.targets:
        for case in arguments.layouts:
            for phase in ("prefill", "decode") if case in GENERATION else ("train",):
                rows.append(row(case, where, phase))
                if arguments.json:
                    arguments.json.write_text(json.dumps(rows, indent=1))
    print(
        compared(rows, json.loads(arguments.before.read_text()))
        if arguments.before
        else measure.markdown(rows, COLUMNS)
    )
    if arguments.write:
        measure.write("layout_traffic", rows)


if __name__ == "__main__":
    main()
