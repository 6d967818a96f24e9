"""Compiled memory beside measured memory, on 8 simulated CPU devices: a table of benchmarks/known_runs.md.

    python -m benchmarks.foresight_memory [--write]

Each layout runs in a process of its own, which notes its resident memory with the arguments in place and its highest
resident memory during steps (Linux: VmRSS and VmHWM of /proc/self/status). The compiler's figures are those of one
device, so they are taken 8 times. Takes a few minutes on two cores.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax

from benchmarks import measure
from gspmd_lm import config
from gspmd_lm.sharding import rules_file

LAYOUTS = ("dp8", "zero1_8", "fsdp8", "tp8", "dp2_tp4", "fsdp2_tp4")
SIZES = ("model.embed=512", "model.heads=8", "model.head_dim=64", "model.mlp=2048", "model.layers=6", "data.seq=256",
         "model.context=256", "data.batch=16", "model.vocab=8000", "model.padded_vocab=8000",
         "data.source=random:64")  # fmt: skip
COLUMNS = {"layout": "layout", "arguments_mb": "arguments, counted MB", "arguments_measured_mb": "live MB",
           "temporaries_mb": "temporaries, compiled MB", "temporaries_measured_mb": "measured MB",
           "error": "error of the sum"}  # fmt: skip


def resident_bytes(name: str) -> int:
    """VmRSS (now) or VmHWM (the highest since it was reset) of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) * 1024


def one(name: str) -> dict[str, Any]:
    """The figures of one layout, in this process."""
    measure.simulate(8)
    cfg = config.load("tiny", SIZES)
    ours = measure.ours(cfg, rules_file.load(name))
    analysis = ours.train.memory_analysis()
    program = ours.start()
    batch = ours.place(measure.random_batch(ours.step, jax.random.key(0)))
    state, _ = jax.block_until_ready(ours.train(program, batch))  # whatever is allocated once is allocated now
    live = {id(array): array for array in jax.tree.leaves((state, batch))}.values()
    live_bytes = sum(shard.data.nbytes for array in live for shard in array.addressable_shards)
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    before = resident_bytes("VmRSS")
    for _ in range(3):
        state, _ = jax.block_until_ready(ours.train(state, batch))
    highest = resident_bytes("VmHWM")
    arguments = 8 * analysis.argument_size_in_bytes
    temporaries = 8 * (analysis.temp_size_in_bytes + analysis.output_size_in_bytes - analysis.alias_size_in_bytes)
    measured = highest - before
    return {
        "layout": name,
        "arguments_mb": round(arguments / 1e6, 1),
        "arguments_measured_mb": round(live_bytes / 1e6, 1),
        "temporaries_mb": round(temporaries / 1e6, 1),
        "temporaries_measured_mb": round(measured / 1e6, 1),
        "error": round((arguments + temporaries) / (live_bytes + measured) - 1, 4),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """The table of benchmarks/known_runs.md."""
    return measure.markdown([{**row, "error": f"{row['error']:+.1%}"} for row in rows], COLUMNS)


def main() -> None:
    parser = measure.flags(__doc__)
    parser.add_argument("--one", choices=LAYOUTS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(one(arguments.one)))
        return
    rows = []
    for name in LAYOUTS:
        command = [sys.executable, "-m", "benchmarks.foresight_memory", f"--one={name}"]
        rows.append(json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout))
        print(rows[-1], flush=True)
    print(table(rows))
    if arguments.write:
        measure.write("foresight_memory", rows)


if __name__ == "__main__":
    main()
