"""Seconds from the start of the process to the end of its first step, without and with a warm compile cache, and the
lines it prints on the way.

    python -m benchmarks.startup [--config=bench_4m] [--rules=tp8] [--rounds=3] [--write]
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

from benchmarks import measure


def first_step(config: str, rules: str, cache: str, workdir: str) -> tuple[float, int]:
    """Seconds to the line of the first step, and how many lines stood before it."""
    command = [sys.executable, "main.py", f"--config={config}", f"--rules={rules}", "--steps=1", f"--workdir={workdir}"]
    began = time.perf_counter()
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"GSPMD_LM_CACHE": cache, "PYTHONUNBUFFERED": "1", "JAX_PLATFORMS": "cpu"},
    )
    assert process.stdout is not None
    lines, taken_s = [], None
    for line in process.stdout:
        lines.append(line)
        if taken_s is None and line.startswith("step"):
            taken_s = time.perf_counter() - began, len(lines) - 1
    if process.wait() or taken_s is None:
        raise RuntimeError(f"{' '.join(command)} failed:\n{''.join(lines)}")
    return taken_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="bench_4m")
    parser.add_argument("--rules", default="tp8")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="into benchmarks/results/startup.json")
    options = parser.parse_args()
    seconds: dict[str, list[float]] = {"cold": [], "warm": []}
    printed = 0
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory() as folder:
            for kind, taken in seconds.items():
                taken_s, printed = first_step(options.config, options.rules, f"{folder}/cache", f"{folder}/{kind}")
                taken.append(taken_s)
    result: dict[str, Any] = {
        "config": options.config,
        "rules": options.rules,
        "rounds": options.rounds,
        "cold_s": statistics.median(seconds["cold"]),
        "warm_s": statistics.median(seconds["warm"]),
        "lines_before_first_step": printed,
    }
    print(result)
    if options.write:
        measure.write("startup", [result])


if __name__ == "__main__":
    main()
