"""From the command to the first page and the first figures of `explore`, and from an edit to its figures.

    python -m benchmarks.explore [--config=llama3_8b] [--rules=fsdp_tp] [--target=v5p:4x4x4] [--edits=100] [--write]

The edits are those of somebody who plays: sizes of the mesh, rows of the tables, remat, microbatches, now and then a
slip of the keyboard and its correction. They come one by one, each when the figures of the one before are there; the
layer of the one before may still be traced. An edit ends when its figures or its problems are told. Its CPU-seconds
are those of the server and of the process that estimates, which other work on the machine does not change much.
"""

import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import measure
from gspmd_lm.errors import InputError
from gspmd_lm.explore import controls, rows
from gspmd_lm.hardware import target as targets

WITHIN_S = 0.2


class Page:
    """What a page asks of a server."""

    def __init__(self, url: str):
        self.base, _, self.token = url.partition("?token=")

    def ask(self, path: str, values: Any = None) -> Any:
        """The answer to a request; with values, to a POST of them."""
        body = None if values is None else json.dumps(values).encode()
        headers = {"X-Token": self.token, "Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(self.base + path, body, headers)) as answer:
            text = answer.read()
        return json.loads(text) if path else text

    def states(self) -> Iterator[dict[str, Any]]:
        """The states that the server tells, as they come."""
        with urllib.request.urlopen(f"{self.base}events?token={self.token}") as events:
            for line in events:
                if line.startswith(b"data: "):
                    yield json.loads(line.removeprefix(b"data: "))


def until_told(states: Iterator[dict[str, Any]], version: int) -> dict[str, Any]:
    """The state once the figures or the problems of an edit are there."""
    return next(state for state in states if state["version"] == version and state["busy"] != "estimating")


def cpu_s(processes: Sequence[int]) -> float:
    """The seconds that all threads of some processes have run for."""
    files = [file for pid in processes for file in Path(f"/proc/{pid}/task").glob("*/schedstat")]
    return sum(int(file.read_text().split()[0]) for file in files) / 1e9


def estimating(server: int) -> list[int]:
    """The numbers of a server and of its process that estimates."""
    listed = subprocess.run(["ps", "-o", "pid=,args=", "--ppid", str(server)], capture_output=True, text=True).stdout
    return [server, *(int(line.split()[0]) for line in listed.splitlines() if line.endswith("worker layouts"))]


def edits(text: str, target: targets.Target, count: int) -> Iterator[str]:
    """Texts, each of which changes the one before."""
    draw, good, made = random.Random(8), text, 0
    while made < count:
        before = text
        if text != good:  # a slip is corrected
            made, text = made + 1, good
            yield text
            continue
        kind = draw.choice(("mesh", "mesh", "control", "row", "row", "weights", "slip"))
        try:
            if kind == "mesh":
                axis = draw.choice(("fsdp", "tensor", "data"))
                good = text = controls.set_control(text, target, f"mesh.{axis}", draw.choice((1, 2, 4, 8)))
            elif kind == "control":
                name = draw.choice(("remat", "microbatches"))
                value = draw.choice(controls.REMATS if name == "remat" else (1, 2, 4))
                good = text = controls.set_control(text, target, name, value)
            elif kind == "slip":
                text = text.replace("tensor", "tenser", draw.randint(2, 3))
            else:
                table, axis = ("rules", "tensor") if kind == "row" else ("weights", "fsdp")
                row = draw.choice(("mlp", "vocab", "residual.seq", "heads")) if kind == "row" else "embed"
                good = text = rows.set_value(text, (table, row), draw.choice((None, axis)))
        except InputError:
            continue
        if text != before:
            made += 1
            yield text


def main() -> None:
    parser = measure.flags(__doc__)
    parser.add_argument("--config", default="llama3_8b")
    parser.add_argument("--rules", default="fsdp_tp")
    parser.add_argument("--target", default="v5p:4x4x4")
    parser.add_argument("--edits", type=int, default=100)
    options = parser.parse_args()
    inputs = [f"--{name}={getattr(options, name)}" for name in ("config", "rules", "target")]
    began = time.monotonic()
    command = [sys.executable, "-m", "gspmd_lm", "explore", *inputs]
    process = subprocess.Popen(command, cwd=measure.ROOT, stderr=subprocess.PIPE, text=True)
    assert process.stderr
    try:
        url = next(found[0] for line in process.stderr if (found := re.search(r"http://\S+", line)))
        page = Page(url)
        page.ask("")
        first_page_s = time.monotonic() - began
        states = page.states()
        state = until_told(states, 1)
        first_figures_s = time.monotonic() - began
        while page.ask("state")["busy"]:
            time.sleep(0.05)
        first_layer_s = time.monotonic() - began
        taken_s, used_s, shown = [], [], 0
        processes = estimating(process.pid)
        for text in edits(state["inputs"]["text"], targets.parse(options.target), options.edits):
            started, before_s = time.monotonic(), cpu_s(processes)
            version = page.ask("edit", {"text": text})["version"]
            told = until_told(states, version)
            taken_s.append(time.monotonic() - started)
            used_s.append(cpu_s(processes) - before_s)
            shown += told["shown_version"] == version
    finally:
        process.send_signal(signal.SIGINT)
        process.wait()
    result = {
        **{name: getattr(options, name) for name in ("config", "rules", "target")},
        "first_page_s": round(first_page_s, 2),
        "first_figures_s": round(first_figures_s, 2),
        "first_layer_s": round(first_layer_s, 2),
        "edits": len(taken_s),
        "edits_with_figures": shown,
        "within_s": WITHIN_S,
        "edits_within": sum(one <= WITHIN_S for one in taken_s),
        "edits_within_cpu_s": sum(one <= WITHIN_S for one in used_s),
        "median_s": round(statistics.median(taken_s), 3),
        "median_cpu_s": round(statistics.median(used_s), 3),
        "slowest_cpu_s": [round(one, 3) for one in sorted(used_s)[-5:]],
        "load_of_the_machine": round(os.getloadavg()[0], 1),
        "slowest_s": [round(one, 3) for one in sorted(taken_s)[-5:]],
    }
    print(json.dumps(result, indent=1))
    if options.write:
        measure.write("explore", [result])


if __name__ == "__main__":
    main()
