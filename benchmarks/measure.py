"""What benchmarks share: flags, simulated devices, batches, our step ready to run, and fair timing of several steps."""

import argparse
import dataclasses
import datetime
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from gspmd_lm import config
from gspmd_lm.foresight import any_step, compile, explain
from gspmd_lm.foresight.report import Report
from gspmd_lm.hardware import target
from gspmd_lm.infer.programs import GenerationPrograms
from gspmd_lm.runtime import startup
from gspmd_lm.sharding.problems import Problem
from gspmd_lm.sharding.rules import Rules
from gspmd_lm.sharding.shapes import Arrays
from gspmd_lm.train import state, step

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def flags(about: str | None, writes: bool = True) -> argparse.ArgumentParser:
    """The flags of a benchmark, whose docstring is its help: --write, if it `writes` its figures."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    if writes:
        parser.add_argument("--write", action="store_true", help="keep the figures in benchmarks/results/")
    return parser


def simulate(devices: int) -> None:
    """Makes this process see `devices` devices on the CPU, as a run does; call it before anything touches one."""
    startup.start(platform="cpu", simulated_devices=devices, keep_memory=True)


def provenance() -> dict[str, Any]:
    """Where and with what a figure was measured, without names of machines."""
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "flax", "optax")}
    machine = f"{os.cpu_count()} cores, {platform.machine()}, {platform.system()}, Python {platform.python_version()}"
    return {"date": datetime.date.today().isoformat(), "machine": machine, **versions}


def random_batch(built: step.Step, key: jax.Array) -> dict[str, jax.Array]:
    """A batch of random numbers for a step: whole texts where it has texts, whose targets are the next tokens."""
    keys = dict(zip(built.abstract_batch, jax.random.split(key, len(built.abstract_batch)), strict=True))
    below = built.config.model.vocab or built.config.model.num_classes

    def values(name: str, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        if name in ("tokens", "targets"):
            text = jax.random.randint(key, (shape[0], shape[1] + 1), 0, below, dtype)
            return text[:, :-1] if name == "tokens" else text[:, 1:]
        if name == "row" or name.endswith("positions"):
            return jnp.broadcast_to(jnp.arange(shape[-1], dtype=dtype), shape)
        if name.endswith("segment_ids"):
            return jnp.ones(shape, dtype)
        if jnp.issubdtype(dtype, jnp.floating):
            return jax.random.normal(keys[name], shape, dtype)
        return jax.random.randint(keys[name], shape, 0, below, dtype)

    return {name: values(name, like.shape, like.dtype) for name, like in built.abstract_batch.items()}


@dataclasses.dataclass(frozen=True)
class Ours:
    """Our compiled step of a config under a rules file, and how long it took to get there."""

    step: step.Step
    train: Any  # jax.stages.Compiled
    compile_s: float  # tracing and lowering included

    def start(self) -> state.State:
        return self.step.lower_init().compile()()

    def place(self, batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        return {name: jax.device_put(batch[name], like.sharding) for name, like in self.step.abstract_batch.items()}


def ours(cfg: config.Config, rules: Rules) -> Ours:
    """Raises ShardingError where the rules do not fit the config."""
    arrays, _ = state.arrays_and_warnings(cfg, rules, jax.default_backend())
    built = step.build_step(cfg, rules, arrays, jax.devices()[: rules.devices])
    began = time.perf_counter()
    train = built.lower_train().compile()
    return Ours(built, train, time.perf_counter() - began)


def explained(
    built: step.Step | GenerationPrograms, traced: Any, cfg: config.Config, rules: Rules, arrays: Arrays,
    problems: Sequence[Problem], phase: str = "train", chip_file: str = "",
) -> tuple[Any, Report, str]:  # fmt: skip
    """A program of one device, compiled for it as a run does; what `explain` says of it; and its text."""
    (device,) = built.mesh.devices.flat
    also = built.program_kinds
    lowered, here = traced.lower(), target.from_devices([device], chip_file)
    compiled, reading = built.compile(lowered, also=also), any_step.read(traced, lowered, built.mesh)
    program = compile.describe_compiled(built, compiled, reading, built.options(*also), here, 0.0)
    return compiled, explain.report(cfg, rules, here, arrays, problems, program, phase), program.text


@dataclasses.dataclass(frozen=True)
class Times:
    """Medians over rounds, per step."""

    step_s: float
    cpu_s: float  # processor seconds of the whole process, user and system


def interleaved(steps: Mapping[str, Callable[[], Any]], rounds: int, per_round: int) -> dict[str, Times]:
    """The times of each function, which runs one step and returns something to wait for.

    The functions take turns, so that whatever else the machine does befalls all of them.
    """
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for turn in range(rounds + 1):
        for name, run in steps.items():
            wall_s, cpu_s = time.perf_counter(), time.process_time()
            jax.block_until_ready([run() for _ in range(per_round)])
            if turn:  # the first round warms up
                taken = time.perf_counter() - wall_s, time.process_time() - cpu_s
                samples[name].append((taken[0] / per_round, taken[1] / per_round))
    return {name: Times(*map(statistics.median, zip(*taken, strict=True))) for name, taken in samples.items()}


def program_size(text: str) -> tuple[int, int]:
    """Lines of a compiled program, and how many of them are instructions; tables of source positions do not count."""
    lines = [line for line in text.splitlines() if line.strip()]
    first = next(at for at, line in enumerate(lines) if line.endswith("{"))
    return len(lines) - first, sum(" = " in line for line in lines[first:])


def taken(command: Sequence[str]) -> tuple[float, float, float]:
    """CPU seconds of a command, its own and the system's for it, and its peak memory in GB. It must succeed."""
    code = "import resource, subprocess, sys; print(subprocess.run(sys.argv[1:], stdout=sys.stderr, check=True) and '')"
    code += "; used = resource.getrusage(resource.RUSAGE_CHILDREN)"
    code += "; print(used.ru_utime, used.ru_stime, used.ru_maxrss)"
    process = [sys.executable, "-c", code, *command]
    done = subprocess.run(process, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr[-4000:]}")
    user_s, system_s, peak_kib = done.stdout.split()
    return float(user_s), float(system_s), int(peak_kib) * 1024 / 1e9


def markdown(rows: list[dict[str, Any]], columns: Mapping[str, str]) -> str:
    """A table of `rows`, its columns in the order of `columns`: key -> heading."""
    lines = [[*columns.values()], ["---"] * len(columns), *([str(row[key]) for key in columns] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def read(name: str) -> list[dict[str, Any]]:
    """The rows of results/<name>.json."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))["rows"]


def kept(name: str) -> list[dict[str, Any]]:
    """The rows of results/<name>.json, or none where nothing was kept yet."""
    return read(name) if (RESULTS / f"{name}.json").exists() else []


def keep(name: str, rows: Sequence[dict[str, Any]], *keys: str) -> None:
    """Writes `rows` to results/<name>.json, in place of those with the same values of `keys`. The others stay.

    Each row has the date on which it was measured.
    """
    path = RESULTS / f"{name}.json"
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"date": "", "rows": []}
    dated = [{"date": before["date"]} | row for row in before["rows"]]
    dated += [{"date": datetime.date.today().isoformat()} | row for row in rows]
    write(name, list({tuple(row[key] for key in keys): row for row in dated}.values()))


def write(name: str, rows: list[dict[str, Any]]) -> None:
    """Keeps `rows` and where they were measured as results/<name>.json."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({**provenance(), "rows": rows}, indent=1) + "\n", encoding="utf-8")
