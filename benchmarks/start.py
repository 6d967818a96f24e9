"""Seconds from the start of a process to the end of its first step, with an empty and with a warm compile cache.

A restart also restores the checkpoint of the warm start. The CPU-seconds are of the whole process and of its parts, the
wall time of the whole process. With --before, runs of another checkout alternate with ours.

    python -m benchmarks.start [--config=tiny] [--rules=tp8] [--rounds=3] [--write]
    git worktree add ../before COMMIT && python -m benchmarks.start --before=../before
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

ROOT = Path(__file__).parent.parent
CHILD = Path(__file__).with_name("start_parts.py")


STARTS = {"cold": ("first", 1), "warm": ("second", 1), "restart": ("second", 2)}  # name -> workdir, last step


def start(checkout: Path, kind: str, arguments: list[str], folder: str, name: str) -> tuple[dict[str, float], int]:
    """The seconds of a start of STARTS, and how many lines it printed before its first step.

    folder: holds the workdirs and the caches of all starts.
    """
    workdir, steps = STARTS[name]
    found = Path(folder) / "found.json"
    command = [sys.executable, str(CHILD), kind, str(found), *arguments]
    command += [f"--workdir={folder}/{workdir}", f"--steps={steps}"]
    environment = os.environ | {"GSPMD_LM_CACHE": f"{folder}/cache", "JAX_PLATFORMS": "cpu", BEGAN: str(time.time())}
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    lines = done.stdout.splitlines()
    return json.loads(found.read_text()), next(at for at, line in enumerate(lines) if line.startswith("step"))


def main() -> None:
    parser = measure.flags(__doc__)
    parser.add_argument("--before", type=Path, help="the root of a checkout of another commit")
    parser.add_argument("--config", default="tiny")
    parser.add_argument("--rules", default="tp8")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    checkouts = {"now": ROOT} | ({"before": options.before.resolve()} if options.before else {})
    arguments = [f"--config={options.config}", f"--rules={options.rules}"]
    seconds: dict[tuple[str, str], dict[str, list[float]]] = {}
    lines = {}
    for turn, kind in itertools.product(range(options.rounds), ("whole", "parts")):
        for name in sorted(checkouts, reverse=bool(turn % 2)):
            with tempfile.TemporaryDirectory() as folder:
                for cache in STARTS:
                    found, lines[name] = start(checkouts[name], kind, arguments, folder, cache)
                    kept = seconds.setdefault((name, cache), {})
                    for part, taken_s in found.items():
                        if (part in ("whole", WALL)) == (kind == "whole"):
                            kept.setdefault(part, []).append(taken_s)
                    print(name, kind, cache, f"{found['whole']:.2f} CPU-s, {found[WALL]:.2f} s", flush=True)
    rows: list[dict[str, Any]] = [
        {
            "commit": name,
            "cache": cache,
            "config": options.config,
            "rules": options.rules,
            "rounds": options.rounds,
            "lines_before_first_step": lines[name],
            "wall_s": round(min(parts[WALL]), 2),
            "cpu_s": {part: round(min(taken), 2) for part, taken in parts.items() if part != WALL},
            "wall_s_of_each_round": [round(taken_s, 2) for taken_s in parts[WALL]],
            "whole_cpu_s_of_each_round": [round(taken_s, 2) for taken_s in parts["whole"]],
        }
        for (name, cache), parts in seconds.items()
    ]
    titles = {f"{row['commit']}, {row['cache']}": {WALL: row["wall_s"]} | row["cpu_s"] for row in rows}
    table = [
        {"part": part} | {title: parts.get(part, "") for title, parts in titles.items()}
        for part in dict.fromkeys(part for parts in titles.values() for part in parts)
    ]
    print(measure.markdown(table, {"part": "CPU-seconds, least of the rounds"} | {title: title for title in titles}))
    if options.before:
        for cache in STARTS:
            now, before = (seconds[name, cache]["whole"] for name in ("now", "before"))
            ratios = ", ".join(f"{ours / theirs:.2f}" for ours, theirs in zip(now, before, strict=True))
            print(f"{cache}: {min(now) / min(before):.2f} of before, in each round {ratios}")
    if options.write:
        measure.write("start", rows)


if __name__ == "__main__":
    main()
