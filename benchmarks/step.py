"""Compares the annotated model's train step with one whose collectives are written by hand.

    python -m benchmarks.step [--config=bench_4m] [--rounds=15] [--write]

Both run in this process, on 8 simulated devices, taking turns; first they must give the same losses. `--write` keeps
the figures in benchmarks/results/. Takes about 4 minutes on two cores.
"""

import dataclasses
import time
from typing import Any

import jax

from benchmarks import collectives, hand_written, measure
from gspmd_lm import config
from gspmd_lm.sharding import rules_file
from gspmd_lm.sharding.rules import Remat

REFERENCES = {
    "fsdp8": hand_written.Layout(fsdp=8),
    "tp8": hand_written.Layout(tensor=8),
    "fsdp2_tp4": hand_written.Layout(fsdp=2, tensor=4, sequence=True),
}
STEPS_COMPARED = 5
LOSS_TOLERANCE = 1e-5
COLUMNS = {
    "layout": "layout",
    "remat": "remat",
    "output_mb": "output MB",
    "reference_output_mb": "by hand",
    "output_ratio": "ratio",
    "ring_ratio": "ring ratio",
    "step_ms": "step ms",
    "reference_step_ms": "by hand",
    "step_ratio": "ratio",
    "cpu_s": "CPU s",
    "reference_cpu_s": "by hand",
    "hlo_lines": "HLO lines",
    "reference_hlo_lines": "by hand",
    "compile_s": "compile s",
    "reference_compile_s": "by hand",
    "loss_difference": "loss difference",
}


def compare(cfg: config.Config, name: str, remat: str, rounds: int, show: bool = False) -> dict[str, Any]:
    """One row of the table: rules file `name` with this remat policy, `none` or `block`, against its reference."""
    rules = dataclasses.replace(rules_file.load(name), remat=Remat(remat))  # type: ignore[arg-type]
    ours = measure.ours(cfg, rules)
    layout = dataclasses.replace(REFERENCES[name], remat=remat == "block")
    mesh, place, jitted = hand_written.build(cfg, layout)
    our_state = ours.start()
    reference_state = place(our_state.params)
    batches = [measure.random_batch(ours.step, jax.random.key(i)) for i in range(STEPS_COMPARED)]
    rows = jax.NamedSharding(mesh, jax.P("fsdp"))
    tokens = [jax.device_put((batch["tokens"], batch["targets"]), rows) for batch in batches]
    began = time.perf_counter()
    reference = jitted.lower(reference_state, *tokens[0]).compile()
    reference_compile_s = time.perf_counter() - began

    placed = [ours.place(batch) for batch in batches]
    difference = 0.0
    for i in range(STEPS_COMPARED):
        our_state, our_metrics = ours.train(our_state, placed[i])
        reference_state, metrics = reference(reference_state, *tokens[i])
        difference = max(difference, abs(float(our_metrics["loss"]) - float(metrics["loss"])))
    if difference > LOSS_TOLERANCE:
        raise SystemExit(f"{name}: the losses differ by {difference:.1e}, so this would compare two different models")
    states = {"ours": our_state, "by hand": reference_state}

    def run_ours():
        states["ours"], metrics = ours.train(states["ours"], placed[0])
        return metrics

    def run_reference():
        states["by hand"], metrics = reference(states["by hand"], *tokens[0])
        return metrics

    times = measure.interleaved({"ours": run_ours, "by hand": run_reference}, rounds, per_round=3)
    text, reference_text = str(ours.train.as_text()), str(reference.as_text())
    moved, reference_moved = collectives.count(text), collectives.count(reference_text)
    if show:
        print(f"\n{name}, ours\n{collectives.table(moved)}\n{name}, by hand\n{collectives.table(reference_moved)}\n")
    out, reference_out = collectives.output_bytes(moved), collectives.output_bytes(reference_moved)
    return {
        "layout": name,
        "remat": remat,
        "output_mb": round(out / 1e6, 2),
        "reference_output_mb": round(reference_out / 1e6, 2),
        "output_ratio": round(out / reference_out, 3),
        "ring_ratio": round(collectives.ring_bytes(moved) / collectives.ring_bytes(reference_moved), 3),
        "step_ms": round(times["ours"].step_s * 1e3, 1),
        "reference_step_ms": round(times["by hand"].step_s * 1e3, 1),
        "step_ratio": round(times["ours"].step_s / times["by hand"].step_s, 3),
        "cpu_s": round(times["ours"].cpu_s, 3),
        "reference_cpu_s": round(times["by hand"].cpu_s, 3),
        "hlo_lines": measure.program_size(text)[0],
        "reference_hlo_lines": measure.program_size(reference_text)[0],
        "compile_s": round(ours.compile_s, 1),
        "reference_compile_s": round(reference_compile_s, 1),
        "loss_difference": float(f"{difference:.1e}"),
    }


def main() -> None:
    parser = measure.flags(__doc__)
    parser.add_argument("--config", default="bench_4m")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--layouts", nargs="*", choices=tuple(REFERENCES), default=tuple(REFERENCES))
    parser.add_argument("--remat", default="block", choices=("block", "none"))
    parser.add_argument("--collectives", action="store_true", help="also list what every collective moves")
    args = parser.parse_args()
    measure.simulate(8)
    cfg = config.load(args.config)
    rows = [compare(cfg, name, args.remat, args.rounds, args.collectives) for name in args.layouts]
    print(f"{args.config}, 8 simulated devices, per device and step")
    print(measure.markdown(rows, COLUMNS))
    if args.write:
        measure.keep(f"step_{args.config}_{args.remat}", rows, "layout")


if __name__ == "__main__":
    main()
