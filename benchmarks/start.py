"""Seconds from the start of a process to the end of its first step, with an empty and with a warm compile cache.

A restart also restores the checkpoint of the warm start. The CPU-seconds are of the whole process and of its parts, the
wall time of the whole process.

    python -m benchmarks.start [--config=tiny] [--rules=tp8] [--rounds=3] [--write]
"""

import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import measure
from benchmarks.start_parts import BEGAN, WALL

STARTS = {"cold": ("first", 1), "warm": ("second", 1), "restart": ("second", 2)}  # name -> workdir, last step


def start(kind: str, arguments: list[str], folder: str, name: str) -> tuple[dict[str, float], int]:
    """The seconds of a start of STARTS, and how many lines it printed before its first step.

    folder: holds the workdirs and the caches of all starts.
    """
    workdir, steps = STARTS[name]
    found = Path(folder) / "found.json"
    command = [sys.executable, "-m", "benchmarks.start_parts", kind, str(found), *arguments]
    command += [f"--workdir={folder}/{workdir}", f"--steps={steps}"]
    environment = os.environ | {"GSPMD_LM_CACHE": f"{folder}/cache", "JAX_PLATFORMS": "cpu", BEGAN: str(time.time())}
    done = subprocess.run(command, cwd=measure.ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    lines = done.stdout.splitlines()
    return json.loads(found.read_text()), next(at for at, line in enumerate(lines) if line.startswith("step"))


def main() -> None:
    parser = measure.flags(__doc__)
    parser.add_argument("--config", default="tiny")
    parser.add_argument("--rules", default="tp8")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    arguments = [f"--config={options.config}", f"--rules={options.rules}"]
    seconds: dict[str, dict[str, list[float]]] = {name: {} for name in STARTS}
    lines = 0
    for _, kind in itertools.product(range(options.rounds), ("whole", "parts")):
        with tempfile.TemporaryDirectory() as folder:
            for name in STARTS:
                found, lines = start(kind, arguments, folder, name)
                for part, taken_s in found.items():
                    if (part in ("whole", WALL)) == (kind == "whole"):
                        seconds[name].setdefault(part, []).append(taken_s)
                print(kind, name, f"{found['whole']:.2f} CPU-s, {found[WALL]:.2f} s", flush=True)
    rows: list[dict[str, Any]] = [
        {
            "cache": name,
            "config": options.config,
            "rules": options.rules,
            "rounds": options.rounds,
            "lines_before_first_step": lines,
            "wall_s": round(min(parts[WALL]), 2),
            "cpu_s": {part: round(min(taken), 2) for part, taken in parts.items() if part != WALL},
            "wall_s_of_each_round": [round(taken_s, 2) for taken_s in parts[WALL]],
            "whole_cpu_s_of_each_round": [round(taken_s, 2) for taken_s in parts["whole"]],
        }
        for name, parts in seconds.items()
    ]
    titles = {row["cache"]: {WALL: row["wall_s"]} | row["cpu_s"] for row in rows}
    table = [
        {"part": part} | {title: parts.get(part, "") for title, parts in titles.items()}
        for part in dict.fromkeys(part for parts in titles.values() for part in parts)
    ]
    print(measure.markdown(table, {"part": "CPU-seconds, least of the rounds"} | {title: title for title in titles}))
    if options.write:
        measure.write("start", rows)


if __name__ == "__main__":
    main()
