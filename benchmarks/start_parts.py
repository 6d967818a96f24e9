"""CPU-seconds of one start, to the end of its first step: of the whole process, and of each of its parts.

    python -m benchmarks.start_parts whole|parts FILE.json --config=... --workdir=...

For the parts, nothing is done beside something else: a process cannot tell for which of the two the compiler's threads
took their time.
"""

import json
import os
import sys
import time
from concurrent.futures import Future
from typing import Any

BEGAN = "BENCHMARK_BEGAN"  # a variable with the time.time() at which the process was started
WALL = "wall time"

# part -> the functions in which the process spends it
PARTS = {
    "arrays and rules checked": ["gspmd_lm.train.state:arrays_and_warnings"],
    "train step lowered": ["gspmd_lm.train.step:Step.lower_train", "gspmd_lm.train.step:Step.trace_train"],
    "initial state lowered": ["gspmd_lm.train.step:Step.lower_init"],
    "compiled": ["gspmd_lm.runtime.compiler:compile"],  # whatever was lowered last
    "checkpoint restored": ["gspmd_lm.train.loop:Run._restore"],
    "report": ["gspmd_lm.foresight.explain:report"],
    "trackers": ["gspmd_lm.workdir.trackers:import_tracker", "gspmd_lm.workdir.trackers:start"],
}


class Inline:
    """An executor that does what it is given at once."""

    def __init__(self, *_: Any) -> None: ...

    def __enter__(self) -> "Inline":
        return self

    def __exit__(self, *_: Any) -> None: ...

    def submit(self, function: Any, *args: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(function(*args))
        return done


def main() -> None:
    kind, path, sys.argv[1:] = sys.argv[1], sys.argv[2], sys.argv[3:]
    seconds: dict[str, float] = {}
    lowered, inside = "", False

    def add(part: str, began: float) -> None:
        seconds[part] = seconds.get(part, 0.0) + time.process_time() - began

    def timed(part: str, function: Any) -> Any:
        def run(*args: Any, **named: Any) -> Any:
            nonlocal lowered, inside
            if inside:
                return function(*args, **named)
            lowered = part if part.endswith("lowered") else lowered
            began, inside = time.process_time(), True
            try:
                return function(*args, **named)
            finally:
                inside = False
                add(lowered.replace("lowered", "compiled") if part == "compiled" else part, began)

        return run

    began = time.process_time()
    from gspmd_lm import cli

    add("imports: cli", began)
    began = time.process_time()
    import jax  # noqa: F401

    add("imports: jax", began)
    began = time.process_time()
    from gspmd_lm import session  # noqa: F401
    from gspmd_lm.train import loop, progress

    add("imports: the rest", began)
    if kind == "parts":
        loop.ThreadPoolExecutor = Inline
        for part, functions in PARTS.items():
            for function in functions:
                module, _, name = function.partition(":")
                owner: Any = sys.modules[module]
                *owners, name = name.split(".")
                for each in owners:
                    owner = getattr(owner, each)
                setattr(owner, name, timed(part, getattr(owner, name)))
    read = progress.Meter.read

    def first_step(meter: progress.Meter, step: int, values: Any) -> dict[str, float]:
        last = read(meter, step, values)  # waits until the step has ended
        if "whole" not in seconds:
            whole = time.process_time()
            seconds["the rest, and the first step"] = whole - sum(seconds.values())
            seconds.update({"whole": whole, WALL: time.time() - float(os.environ[BEGAN])})
            with open(path, "w", encoding="utf-8") as file:
                json.dump(seconds, file)
        return last

    progress.Meter.read = first_step  # pyright: ignore[reportAttributeAccessIssue]
    cli.main()


if __name__ == "__main__":
    main()
