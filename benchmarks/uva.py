"""The tensor-parallel tutorial's model under our layouts: traffic, parameters, size of the program, and its task.

    python -m benchmarks.uva [--write]

Everything is counted in compiled programs for 8 simulated devices, but for the task, which is run. Takes about 6
minutes on two cores.
"""

import dataclasses
from typing import Any

import jax

from benchmarks import collectives, measure
from gspmd_lm import config
from gspmd_lm.sharding import rules_file
from gspmd_lm.sharding.rules import Rules

GOALS_MB = {("uva", "parallel"): 8.1, ("uva", "sequential"): 11.7,
            ("uva_large", "parallel"): 433, ("uva_large", "sequential"): 735}  # fmt: skip
TRAFFIC = {"config": "config", "block": "block", "layout": "layout", "parameters_m": "parameters, M",
           "ring_mb": "ring MB", "goal_mb": "at most", "output_mb": "output MB"}  # fmt: skip
PROGRAMS = {"tensor": "tensor", "layers": "layers", "hlo_lines": "HLO lines", "instructions": "instructions"}
TASK = {"layout": "layout", "steps": "steps", "loss": "loss", "accuracy": "accuracy"}


def traffic(name: str, block: str, rules: Rules, show: bool) -> dict[str, Any]:
    """Bytes of collectives per device and step on tensor 4 x data 2."""
    ours = measure.ours(config.load(name, [f"model.block={block}"]), rules)
    moved = collectives.count(ours.train.as_text())
    if show:
        print(f"\n{name}, {block}\n{collectives.table(moved)}")
    return {
        "config": name,
        "block": block,
        "layout": rules.name,
        "parameters_m": round(ours.step.arrays.parameter_count / 1e6, 1),
        "ring_mb": round(collectives.ring_bytes(moved) / 1e6, 2),
        "goal_mb": GOALS_MB[name, block],
        "output_mb": round(collectives.output_bytes(moved) / 1e6, 2),
    }


def program(tensor: int, layers: int) -> dict[str, Any]:
    """The size of the optimised program of `uva` under tensor parallelism."""
    rules = dataclasses.replace(rules_file.load("tp8"), mesh={"tensor": tensor})
    ours = measure.ours(config.load("uva", [f"model.layers={layers}"]), rules)
    lines, instructions = measure.program_size(ours.train.as_text())
    return {"tensor": tensor, "layers": layers, "hlo_lines": lines, "instructions": instructions}


def task(name: str) -> dict[str, Any]:
    """`uva` learns one random batch by heart; the last step's loss and accuracy."""
    cfg = config.load("uva")
    ours = measure.ours(cfg, rules_file.load(name))
    state, batch = ours.start(), ours.place(measure.random_batch(ours.step, jax.random.key(0)))
    metrics = {}
    for _ in range(cfg.train.steps):
        state, metrics = ours.train(state, batch)
    return {"layout": name, "steps": cfg.train.steps, "loss": round(float(metrics["loss"]), 4),
            "accuracy": round(float(metrics["accuracy"]), 4)}  # fmt: skip


def main() -> None:
    parser = measure.flags(__doc__)
    parser.add_argument("--collectives", action="store_true", help="also list what every collective moves")
    args = parser.parse_args()
    measure.simulate(8)
    moved = [traffic(name, block, rules_file.load("dp2_tp4"), args.collectives) for name, block in GOALS_MB]
    print("Bytes of collectives per device and step, data 2 x tensor 4")
    print(measure.markdown(moved, TRAFFIC))
    programs = [program(tensor, layers) for tensor, layers in ((1, 6), (2, 6), (4, 6), (8, 6), (8, 12))]
    print(f"\nSize of the optimised program\n{measure.markdown(programs, PROGRAMS)}")
    tasks = [task(name) for name in ("single", "tp8", "dp2_tp4")]
    print(f"\nOne random batch, by heart\n{measure.markdown(tasks, TASK)}")
    if args.write:
        measure.write("uva_traffic", moved)
        measure.write("uva_programs", programs)
        measure.write("uva_task", tasks)


if __name__ == "__main__":
    main()
