"""Predicted beside measured, on the first accelerator of this machine: step time and memory of two models.

    python -m benchmarks.on_device [--write]

Each model at three batch sizes, with and without recomputation, each in a process of its own, since peaks of memory are
a process's. The predictions are those of `explain` for the very program that then runs. On a CPU no time is predicted
and no memory measured (`--cases gpt2_124m --rows 1` keeps that short). A case that is predicted not to fit is not run.
"""

import argparse
import json
import subprocess
import sys
import time
from typing import Any

import jax

from benchmarks import layouts, measure
from gspmd_lm import config, rules_file, runtime
from gspmd_lm.foresight import compile, explain
from gspmd_lm.foresight.machine import target
from gspmd_lm.train import state, step

CASES = {  # what is computed, and rows per batch
    "gpt2_124m": ("gpt2_124m", (), (8, 16, 32)),
    "llama_1b": ("llama3_8b", layouts.LLAMA_1B, (4, 8, 16)),
}
REMAT = ("none", "block")
STEPS = 10
COLUMNS = {"case": "model", "rows": "rows", "remat": "remat", "predicted_ms": "predicted, ms",
           "measured_ms": "measured, ms", "error": "error", "compiled_gb": "memory compiled, GB",
           "measured_gb": "measured, GB", "memory_error": "error of memory"}  # fmt: skip


def one(case: str, rows: int, remat: str) -> dict[str, Any]:
    """One model at one batch size, on the first device of this process."""
    name, sets, _ = CASES[case]
    cfg = config.load(name, [*sets, f"data.batch={rows}"])
    layout = rules_file.from_dict({"mesh": {"data": 1}, "remat": remat}, "single")
    runtime.start(simulated_devices=1)  # as a run starts: on a GPU it takes the share of memory that is compared with
    device = jax.devices()[0]
    arrays, problems = state.checked(cfg, layout, device.platform)
    built = step.build(cfg, layout, arrays, [device])
    options = runtime.compiler_options(device.platform, layout.compiler_options, layout.path, device.device_kind)
    began = time.perf_counter()
    lowered = built.lower_train()
    traced = time.perf_counter()
    compiled = runtime.compile(lowered, options, device.platform, layout.path)
    here = target.of([device])
    ready = measure.Ours(built, compiled, time.perf_counter() - began)
    program = compile.described(built, compiled, options, here, traced - began, time.perf_counter() - traced)
    found = explain.report(cfg, built.rules, here, arrays, problems, program)
    predicted_s = found.prediction.step_time_s if found.prediction else None
    measured_s, used = _run(ready, device) if found.memory.fits else (None, None)
    return {
        "device": device.device_kind,
        "case": case,
        "rows": rows,
        "remat": remat,
        "predicted_ms": predicted_s and round(predicted_s * 1e3, 2),
        "measured_ms": measured_s and round(measured_s * 1e3, 2),
        "error": predicted_s and measured_s and f"{predicted_s / measured_s - 1:+.1%}",
        "limit_gb": found.memory.limit_bytes and round(found.memory.limit_bytes / 1e9, 2),
        "compiled_gb": round(found.memory.peak_bytes / 1e9, 2),
        "measured_gb": used and round(used / 1e9, 2),
        "memory_error": used and f"{found.memory.peak_bytes / used - 1:+.1%}",
        "versions": dict(found.versions),
    }


def _run(ready: measure.Ours, device: Any) -> tuple[float, int | None]:
    """Seconds per step, and the most bytes that were in use; None where the device does not count them."""
    batch = ready.place(measure.random_batch(ready.step.config, jax.random.key(0)))
    now, _ = jax.block_until_ready(ready.train(ready.start(), batch))
    began = time.perf_counter()
    for _ in range(STEPS):
        now, _ = ready.train(now, batch)
    jax.block_until_ready(now)
    taken_s = (time.perf_counter() - began) / STEPS
    return taken_s, (device.memory_stats() or {}).get("peak_bytes_in_use")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", choices=tuple(CASES), default=tuple(CASES))
    parser.add_argument("--rows", type=int, nargs="*", help="per batch; default: three sizes of each model")
    parser.add_argument("--write", action="store_true", help="keep the figures in results/")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        case, rows, remat = arguments.one
        print(json.dumps(one(case, int(rows), remat)))
        return
    found = []
    for case in arguments.cases:
        for rows in arguments.rows or CASES[case][2]:
            for remat in REMAT:
                command = [sys.executable, "-m", "benchmarks.on_device", "--one", case, str(rows), remat]
                answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
                found.append(json.loads(answer.splitlines()[-1]))
                print(found[-1], flush=True)
    print(found[0]["device"])
    print(measure.markdown(found, COLUMNS))
    if arguments.write:
        measure.write("on_device", found)


if __name__ == "__main__":
    main()
