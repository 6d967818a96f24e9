"""What a GPU's profiler saw of a compiled step, put beside what is predicted of the same program.

`benchmarks.on_device` uses it for each of its cases. Matmuls run in the order of the program, and cuBLAS's kernels do
not say which instruction they belong to, so that order matches them. Other kernels are told apart by their names.
"""

import contextlib
import dataclasses
import glob
import statistics
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import jax

from gspmd_lm.foresight import hlo
from gspmd_lm.foresight.hlo import Computation, Instruction
from gspmd_lm.units import bits

STEPS = 3
FACTS = "rows_columns", "contracted", "bits", "result", "added"  # of a matmul, by which its time is predicted
_CUBLAS, _ATTENTION, _GROUPED = ("nvjet", "gemm", "cutlass"), ("cudnn",), ("grouped",)
_HOST_COPIES = ("MemcpyD2H", "MemcpyH2D")


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One run of a kernel, or a copy."""

    name: str
    began_ns: float
    taken_s: float

    @property
    def kind(self) -> str:
        """matmul, grouped, attention, host copy or other."""
        name = self.name.lower()
        kinds = {"matmul": _CUBLAS, "grouped": _GROUPED, "attention": _ATTENTION}
        if self.name in _HOST_COPIES:
            return "host copy"
        return next((kind for kind, parts in kinds.items() if any(part in name for part in parts)), "other")


def traced(run: Callable[[], Any]) -> list[Kernel]:
    """The kernels of STEPS calls of `run`, in the order in which they began. There are none without a GPU."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready([run() for _ in range(STEPS)])
        (path,) = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
        planes = jax.profiler.ProfileData.from_file(path).planes
        kernels = [
            Kernel(event.name, event.start_ns, event.duration_ns / 1e9)
            for plane in planes
            if plane.name.startswith("/device:GPU")
            for line in plane.lines
            for event in line.events
        ]
    return sorted(kernels, key=lambda kernel: kernel.began_ns)


def by_kind(kernels: list[Kernel]) -> dict[str, float]:
    """The milliseconds of a step that each kind of kernel took."""
    taken_ms: defaultdict[str, float] = defaultdict(float)
    for kernel in kernels:
        taken_ms[kernel.kind] += kernel.taken_s * 1e3 / STEPS
    return {kind: round(milliseconds, 2) for kind, milliseconds in taken_ms.items()}


def matmuls(module: hlo.Module, kernels: list[Kernel]) -> list[dict[str, Any]]:
    """The matmuls of a program that cuBLAS computes: the FACTS of equal ones, how often they run, and their mean time.

    Raises ValueError if the profiler saw another number of them than the program has.
    """
    calls, runs = list(_in_order(module.entry)), [kernel for kernel in kernels if kernel.kind == "matmul"]
    if len(runs) != STEPS * len(calls):
        raise ValueError(f"{len(runs)} kernels of cuBLAS in {STEPS} steps of a program of {len(calls)} matmuls")
    seconds: defaultdict[tuple[Any, ...], list[float]] = defaultdict(list)
    for at, kernel in enumerate(runs):
        seconds[_facts(calls[at % len(calls)])].append(kernel.taken_s)
    return [
        dict(zip(FACTS, facts, strict=True))
        | {"times": len(taken_s) // STEPS, "us": round(statistics.mean(taken_s) * 1e6, 1)}
        for facts, taken_s in seconds.items()
    ]


def _facts(call: Instruction) -> tuple[Any, ...]:
    """The FACTS of a matmul."""
    result, *factors = (one.shape.arrays[0] for one in (call, *call.operands[:2]))
    added = any(array.elements == result.elements for one in call.operands[2:] for array in one.shape.arrays)
    contracted = round(call.flops / 2 / result.elements)
    return result.dimensions, contracted, max(bits(factor.dtype) for factor in factors), result.dtype, added


def _in_order(computation: Computation) -> Iterator[Instruction]:
    """The calls of cuBLAS in the order in which a program makes them."""
    for one in computation.instructions.values():
        if one.opcode == "while":
            for _ in range(one.trip_count or 1):
                yield from _in_order(one.bodies[1])
        elif one.bodies:
            yield from _in_order(one.bodies[0])
        else:
            yield from (call for call in (one, *one.inside) if "cublas" in call.custom_call_target)


@contextlib.contextmanager
def watched() -> Iterator[dict[str, int]]:
    """The median clock, in MHz, and power, in W, of the first GPU meanwhile; nothing where there is no nvidia-smi."""
    found: dict[str, int] = {}
    query = "nvidia-smi -i 0 --query-gpu=clocks.sm,power.draw --format=csv,noheader,nounits --loop-ms=100"
    try:
        process = subprocess.Popen(query.split(), stdout=subprocess.PIPE, text=True)
    except FileNotFoundError:
        yield found
        return
    try:
        yield found
    finally:
        process.terminate()
        lines, _ = process.communicate()
        samples = [tuple(map(float, line.split(","))) for line in lines.splitlines() if line.count(",") == 1]
        if samples:
            found |= {
                name: round(statistics.median(seen))
                for name, seen in zip(("mhz", "watts"), zip(*samples, strict=True), strict=True)
            }
