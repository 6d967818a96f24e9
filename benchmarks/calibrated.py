"""Steps of this machine's CPU, predicted with what `calibrate` measures, beside measured ones.

    taskset -c 0 python -m benchmarks.calibrated [--chip=my.yaml] [--only tiny experts] [--ops=20] [--write]

One core computes, and what counts are its CPU seconds. Other work on the machine still makes them longer, by as much as
a third within minutes. So a probe of one matmul and one sum of large arrays is timed when the CPU is calibrated and
around the steps, and measured seconds are divided by how much longer it takes then. --chip takes the file of an earlier
calibration, whose probe is not known. Each config is compiled as `train` compiles it, predicted as `explain` does, and
run. --ops lists the operations that are predicted worst: their times come from jax's profiler.
"""

import collections
import glob
import operator
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import measure
from gspmd_lm import config as configs
from gspmd_lm.config import Config
from gspmd_lm.foresight import calibration, hlo
from gspmd_lm.foresight.explain import settle_layout
from gspmd_lm.foresight.timing.simulate import Simulation
from gspmd_lm.hardware import target
from gspmd_lm.hardware.network import Network
from gspmd_lm.runtime import host
from gspmd_lm.sharding import rules_file
from gspmd_lm.train import decoder, state, step

ROUNDS, STEPS = 7, 2
# A name -> the config that is changed, what is changed, and the remat policy.
CASES: Mapping[str, tuple[str, str, str]] = {
    "tiny": ("tiny", "", "none"),
    "tiny, remat block": ("tiny", "", "block"),
    "8 layers of 64": ("tiny", "model.layers=8 model.embed=64 model.mlp=256 model.heads=4 model.kv_heads=2", "none"),
    "embed 256": ("tiny", "model.embed=256 model.mlp=768 model.head_dim=32 data.batch=8", "none"),
    "embed 256, remat dots": ("tiny", "model.embed=256 model.mlp=768 model.head_dim=32 data.batch=8", "dots"),
    "rows of 256": ("tiny", "data.seq=256 data.batch=8", "none"),
    "vocabulary of 4,096": ("tiny", "model.vocab=4096 model.padded_vocab=4096 data.source=random:4096", "none"),
    "bench_4m": ("bench_4m", "", "none"),
    "bench_4m, remat block": ("bench_4m", "data.batch=8", "block"),
    "experts": ("tiny_experts", "", "none"),
    "16 experts": ("tiny_experts", "model.experts.count=16 model.experts.mlp=128 data.batch=8", "none"),
    "encoder and decoder": (
        "t5_11b",
        "model.layers=2 model.embed=128 model.heads=4 model.kv_heads=4 model.head_dim=32 model.mlp=512 model.vocab=512 "
        "model.context=128 data.batch=8 data.seq=64 data.source_seq=128 model.compute_dtype=float32",
        "none",
    ),
}
COLUMNS = {
    "config": "config",
    "measured_ms": "measured, CPU ms",
    "slower": "probe",
    "predicted_ms": "predicted",
    "error": "error",
}


def case_config(name: str) -> Config:
    """The config of a case."""
    base, changes, _ = CASES[name]
    return configs.load(base, changes.split())


def make_probe() -> Callable[[], float]:
    """A function that gives the CPU seconds of a probe of the machine's speed: a matmul, and sums of large arrays."""

    @jax.jit
    def run(x: jax.Array, large: jax.Array) -> tuple[jax.Array, jax.Array]:
        return x @ x, large + 1

    x, large = jnp.ones((512, 512)), jnp.ones(2**22)
    jax.block_until_ready(run(x, large))

    def probe() -> float:
        began = time.process_time()
        jax.block_until_ready([run(x, large) for _ in range(6)])
        return (time.process_time() - began) / 6

    return probe


def begin(built: step.Step) -> state.State:
    """A state with random weights. No program is compiled for it."""
    rng, zero = np.random.default_rng(0), np.int32(0)
    params = jax.tree.map(lambda x: (0.1 * rng.standard_normal(x.shape)).astype(x.dtype), built.arrays.params)
    moments = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), built.arrays.optimizer)
    first = state.State(zero, params, moments, jax.random.key(1), zero, zero)
    return jax.device_put(first, built.state_shardings, may_alias=False)


def compare(
    name: str, chip_file: str, worst: int, probe: Callable[[], float], calibrated_s: float | None
) -> dict[str, Any]:
    """The measured and the predicted step of a case. calibrated_s: of the probe, when the CPU was calibrated."""
    cfg, remat = case_config(name), CASES[name][2]
    (device,) = jax.devices()
    place = target.from_devices([device], chip_file)
    rules = settle_layout(decoder.task(cfg), rules_file.from_dict({"mesh": {"data": 1}, "remat": remat}, "one"), place)
    arrays, problems = state.arrays_and_warnings(cfg, rules, "cpu")
    built = step.build_step(cfg, rules, arrays, [device])
    compiled, report, text = measure.explained(
        built, built.trace_train(), cfg, rules, arrays, problems, chip_file=chip_file
    )
    now, batch = begin(built), measure.random_batch(built, jax.random.key(0))

    def run(steps: int) -> None:
        nonlocal now
        for _ in range(steps):
            now, _ = compiled(now, batch)
        jax.block_until_ready(now)

    run(2)
    taken, slower = [], []
    for _ in range(ROUNDS):
        before_s, began = probe(), time.process_time()
        run(STEPS)
        taken.append((time.process_time() - began) / STEPS)
        slower.append((before_s + probe()) / 2 / calibrated_s if calibrated_s else 1.0)
    assert report.prediction
    if worst:
        _show_worst(place, text, lambda: run(STEPS), worst)
    measured_s = statistics.median(map(operator.truediv, taken, slower))
    predicted_s = report.prediction.step_time_s
    return {
        "config": name,
        "measured_ms": round(1e3 * measured_s, 2),
        "as_timed_ms": round(1e3 * statistics.median(taken), 2),
        "slower": round(statistics.median(slower), 2),
        "predicted_ms": round(1e3 * predicted_s, 2),
        "error": f"{predicted_s / measured_s - 1:+.0%}",
        "ratio": round(predicted_s / measured_s, 3),
    }


def _show_worst(place: target.Target, text: str, run: Callable[[], None], count: int) -> None:
    """Prints the operations whose predicted and profiled seconds of a step differ most."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        (path,) = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
        events = collections.defaultdict[str, list[float]](list)
        for plane in jax.profiler.ProfileData.from_file(path).planes:
            for line in plane.lines:
                for event in line.events:
                    events[event.name].append(event.duration_ns / 1e9)
    module = hlo.parse(text)
    assert place.chip
    simulation = Simulation(module, place.chip, Network(place.chip, ((0,),), (0,), (0,), {"data": 1}))
    rows = []
    for one in module.operations:
        if (seen := events.get(one.name)) and one.opcode not in ("while", "call", "conditional"):
            predicted_s, seen_s = one.executions * simulation.op_time(one).seconds, one.executions * min(seen)
            rows.append((predicted_s - seen_s, predicted_s, seen_s, one))
    print(f"all operations: predicted {sum(r[1] for r in rows):.4f} s, profiled {sum(r[2] for r in rows):.4f} s")
    for _, predicted_s, seen_s, one in sorted(rows, key=lambda row: -abs(row[0]))[:count]:
        inside = collections.Counter(
            i.opcode for i in one.inside if i.opcode not in ("parameter", "constant", "bitcast")
        )
        print(f"{1e6 * predicted_s:9.0f} {1e6 * seen_s:9.0f} us {one.opcode} {one.shape.arrays[0].dtype}"
              f"{list(one.shape.arrays[0].dimensions)} {dict(inside)} {one.name_in_model.phase}")  # fmt: skip


def main() -> None:
    parser = measure.flags(__doc__)
    parser.add_argument("--chip", help="what calibrate wrote; by default this process calibrates")
    parser.add_argument("--only", nargs="*", choices=tuple(CASES), default=tuple(CASES), help="cases; default: all")
    parser.add_argument("--ops", type=int, default=0, help="how many operations to list for each case")
    flags = parser.parse_args()
    if host.count_cpus() > 1:
        raise SystemExit("one core must be chosen: taskset -c 0 python -m benchmarks.calibrated")
    measure.simulate(1)
    with tempfile.TemporaryDirectory() as folder:
        chip_file, probe, calibrated_s = flags.chip or f"{folder}/here.yaml", make_probe(), None
        if not flags.chip:
            probes = [probe()]

            def say(part: str) -> None:
                print(part, flush=True)
                probes.append(probe())

            found = calibration.write_chip(calibration.measure_chip(jax.devices(), "here", say))
            Path(chip_file).write_text(found)
            probes.append(probe())
            calibrated_s = statistics.median(probes)
            print(f"{found}\nprobes {[round(1e3 * one, 2) for one in probes]} ms")
        rows = []
        for name in flags.only:
            rows.append(compare(name, chip_file, flags.ops, probe, calibrated_s))
            print(rows[-1], flush=True)
    print(measure.markdown(rows, COLUMNS))
    print(f"{statistics.mean(abs(row['ratio'] - 1) for row in rows):.1%} in the mean")
    if flags.write:
        measure.keep("calibrated", rows, "config")


if __name__ == "__main__":
    main()
