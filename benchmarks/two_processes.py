"""Layouts of two processes on this machine: steps predicted with what `calibrate` measures, beside measured ones.

    python -m benchmarks.two_processes [--chip=my.yaml] [--write]

Each process is one CPU device on a core of its own, and sends to the other one over the loopback interface. The two
calibrate together. Then they train under each layout, and the record of each run has both times, as it does for every
user. What counts is whether the order of the layouts is right. Times are those of the wall clock, so that nothing else
should run on the machine.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import measure
from benchmarks.plan import spearman
from gspmd_lm.errors import RunFailed
from gspmd_lm.foresight import step_records
from gspmd_lm.launch.local import free_port

TENSOR = dict.fromkeys(("heads", "kv_heads", "mlp", "vocab"), "tensor")
ROWS = {"mesh": {"data": 2}, "rules": {"batch": "data"}}
FSDP = {"mesh": {"fsdp": 2}, "rules": {"batch": "fsdp"}, "weights": {"embed": "fsdp"}}
LAYOUTS: Mapping[str, dict[str, Any]] = {
    "data": ROWS,
    "data, 4 microbatches": ROWS | {"microbatches": 4},
    "data, optimizer split": ROWS | {"optimizer": {"embed": "data"}},
    "fsdp": FSDP,
    "fsdp, 4 microbatches": FSDP | {"microbatches": 4},
    "fsdp, remat block": FSDP | {"remat": "block"},
    "tensor": {"mesh": {"tensor": 2}, "rules": TENSOR},
    "context": {"mesh": {"context": 2}, "rules": {"seq": "context"}},
}
# Few tokens and large weights, so that layouts differ by what they send.
TRAIN = (
    "--config=bench_4m", "--set=model.embed=512", "--set=model.mlp=2048", "--set=model.head_dim=64",
    "--set=data.batch=8", "--set=data.seq=32", "--steps=20", "--set=train.eval_every=0", "--set=train.trackers=[]",
    "--set=data.held_out=0.0",
)  # fmt: skip


def run_both(*arguments: str) -> None:
    """Runs a command of this project as two processes, each on a core of its own. Raises RunFailed if one fails."""
    where = "--platform=cpu", f"--coordinator=127.0.0.1:{free_port()}", "--num_processes=2"
    with tempfile.TemporaryFile("w+") as log:  # a pipe that nobody empties would stop its writer
        both = [
            subprocess.Popen(
                ["taskset", "-c", str(index), sys.executable, "main.py", *arguments, *where, f"--process_id={index}"],
                cwd=measure.ROOT, stdout=subprocess.DEVNULL, stderr=log,
            )
            for index in range(2)
        ]  # fmt: skip
        if codes := [process.returncode for process in both if process.wait()]:
            log.seek(0)
            raise RunFailed(f"{' '.join(arguments)}: exit code {codes[0]}\n{log.read()[-2000:]}")


def main() -> None:
    parser = measure.flags(__doc__)
    parser.add_argument("--chip", help="what calibrate wrote; by default the two processes calibrate")
    options, rows = parser.parse_args(), []
    with tempfile.TemporaryDirectory() as folder:
        chip = options.chip or f"{folder}/both.yaml"
        if not options.chip:
            run_both("calibrate", f"--out={chip}")
            print(Path(chip).read_text(), flush=True)
        for name, layout in LAYOUTS.items():
            rules, workdir = Path(folder, "layout.yaml"), f"{folder}/{name}"
            rules.write_text(json.dumps(layout))  # JSON is YAML
            run_both("train", *TRAIN, f"--rules={rules}", f"--chip={chip}", f"--workdir={workdir}")
            (record,) = step_records.read_records([workdir])
            assert record.predicted_s and record.error is not None
            rows.append(
                {
                    "layout": name,
                    "measured_ms": round(1e3 * record.measured_s, 1),
                    "predicted_ms": round(1e3 * record.predicted_s, 1),
                    "error": round(record.error, 3),
                }
            )
            print(rows[-1], flush=True)
    print(measure.markdown(rows, {name: name for name in rows[0]}))
    measured, predicted = ([row[f"{word}_ms"] for row in rows] for word in ("measured", "predicted"))
    errors = [abs(row["error"]) for row in rows]
    print(f"Spearman {spearman(predicted, measured):.3f} over {len(rows)}, mean error {statistics.mean(errors):.1%}")
    if options.write:
        measure.write("two_processes", rows)


if __name__ == "__main__":
    main()
