"""Measures the devices at hand: rates of matmuls, memory bandwidth, gaps, collectives and the link to the host.

A measurement runs one compiled program several times and takes the fastest run. On a CPU with one core the clock is
that of the process, so that other processes do not disturb it. Everything else is timed by the wall clock.
"""

import datetime
import functools
import itertools
import math
import platform as machine
import time
import timeit
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gspmd_lm import versions
from gspmd_lm.hardware.chips import (
    GPU_MEMORY_SHARE,
    Bandwidth,
    Chip,
    CollectiveTime,
    MatmulRate,
    chip_of,
    platform_of,
)
from gspmd_lm.hardware.network import Network
from gspmd_lm.hardware.target import device_locations
from gspmd_lm.runtime import host
from gspmd_lm.units import program_dtype

# What is measured of matmuls: (batch, rows, contracted, columns). Projections and gradients of weights, square products
# of several sizes, few rows, and the small products of attention.
MATMULS = {
    "cpu": (
        (1, 2048, 128, 384),
        (1, 2048, 384, 128),
        (1, 384, 2048, 128),
        (1, 128, 2048, 128),
        (1, 2048, 128, 128),
        (1, 256, 256, 256),
        (1, 512, 512, 512),
        (1, 1024, 1024, 1024),
        (1, 1024, 256, 1024),
        (1, 1024, 1024, 256),
        (1, 256, 1024, 1024),
        (1, 1024, 64, 256),
        (1, 1024, 256, 64),
        (1, 64, 1024, 256),
        (1, 16, 512, 512),
        (1, 2048, 256, 256),
        (1, 256, 2048, 512),
        (64, 128, 16, 128),
        (64, 128, 128, 16),
        (64, 16, 128, 128),
        (16, 256, 64, 256),
        (16, 256, 256, 64),
        (16, 64, 256, 256),
        (8, 128, 64, 128),
        (8, 64, 256, 128),
    ),
    "other": (
        *((1, side, side, side) for side in (512, 1024, 2048, 4096, 8192)),
        (1, 8192, 4096, 14336),
        (1, 8192, 14336, 4096),
        (1, 4096, 8192, 14336),
        (1, 8192, 1024, 4096),
        (1, 8192, 4096, 1024),
        (1, 8, 4096, 14336),
        (1, 64, 4096, 14336),
        (32, 2048, 128, 2048),
        (32, 2048, 2048, 128),
    ),
}
DTYPES = {"cpu": ("float32", "bfloat16"), "other": ("bfloat16", "float32", "int8")}
MOVED_BYTES = {"cpu": (2**16, 2**19, 2**22, 2**25, 2**28), "other": (2**20, 2**24, 2**28, 2**31)}
COLLECTIVE_BYTES = (2**10, 2**14, 2**18, 2**22, 2**25)
WORKING_SET_BYTES = 2**26
_COUNT = 2**16  # elements of an array that a cache holds
_CHAIN = 8  # operations of one kind, one after the other
_LEAST_S, _RUNS = 0.04, 4


class Program(NamedTuple):
    """What is timed: a compiled function without an effect, its arguments, and how often it does its work.

    one_by_one: whether it is a collective of CPUs. Each run then waits for the one before, since CPUs would overlap the
    collectives of several runs, as those of a step do not. Its time is that of the wall clock, since a process that
    waits for another one uses no CPU.
    """

    run: Callable[..., Any]
    arguments: tuple[Any, ...]
    times: int = 1
    one_by_one: bool = False


Say = Callable[[str], None]


def measure_chip(devices: Sequence[Any], name: str, say: Say = lambda _: None) -> dict[str, Any]:
    """The fields of a `Chip` that describe the devices, each with its source, as `write_chip` writes them.

    What cannot be measured is that of the known chip of the devices: prices, the topology, cycles of TPU kernels.
    """
    first = devices[0]
    platform = platform_of(first)
    known, local = chip_of(first.device_kind), next(one for one in devices if one.process_index == jax.process_index())
    with jax.default_device(local):
        say("matmuls")
        matmuls = measure_matmuls(platform)
        say("memory")
        gap_s = measure_gap()
        bandwidths = measure_bandwidths(platform, gap_s, _memory_bytes(local, known))
        say("operations")
        elements = measure_elements(gap_s) if platform == "cpu" else {}
        say("the host link")
        host = measure_host_link(local) if platform != "cpu" else bandwidths[-1].bytes_per_s
    say("collectives")
    collectives = measure_collectives(devices)
    return {
        "name": name,
        "kinds": [first.device_kind],
        "platform": platform,
        "note": f"calibrated on {datetime.date.today()} with {_software()}; not compared with a measured step",
        **_memory(local, known),
        **_peaks(matmuls),
        "hbm_bytes_per_s": (f"{bandwidths[-1].bytes_per_s / 1e9:.4g} GB/s", "measured: the largest arrays"),
        "hbm_share": (1.0, "measured: it is what operations reach"),
        "host_link_bytes_per_s": (f"{host / 1e9:.4g} GB/s", "measured"),
        "network_bytes_per_s": _network(collectives, known, host),
        "kernel_gap_s": (f"{gap_s * 1e6:.3g} us", "measured: small operations of one program"),
        "matmul_rates": (matmuls, "measured"),
        "bandwidths": (bandwidths, "measured"),
        **({"element_rates": (elements, "measured")} if elements else {}),
        **({"collective_times": (collectives, "measured")} if collectives else {}),
    } | ({"like": known.name, "matmul_slowdown": (1.0, "measured rates have it already")} if known else {})


def write_chip(fields: Mapping[str, Any]) -> str:
    """The text of the YAML file with these fields."""
    lines = [f"# {fields['note']}"]
    for name, value in fields.items():
        if not isinstance(value, tuple):
            lines.append(f"{name}: {_plain(value)}")
            continue
        content, source = value
        if isinstance(content, str | int | float):
            lines.append(f"{name}: [{content}, {_quote(source)}]")
            continue
        lines.append(f"{name}:")
        if isinstance(content, Mapping):
            rows = [f"{key}: {rate:.4g}".replace("e+", "e") for key, rate in content.items()]
            lines.append(f"  - {{{', '.join(rows)}}}")
        else:
            lines.append(f"  - # {', '.join(content[0]._fields)}")
            lines += [f"    - [{', '.join(_number(one) for one in row)}]" for row in content]
        lines.append(f"  - {_quote(source)}")
    return "\n".join(lines) + "\n"


def _number(value: Any) -> str:
    return f"{value:.4g}".replace("e+", "e") if isinstance(value, float) else str(value)


def _plain(value: Any) -> str:
    return f"[{', '.join(map(_quote, value))}]" if isinstance(value, list) else _quote(value)


def _quote(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _software() -> str:
    installed = versions.installed_versions(("jax", "jaxlib"))
    cores = f", {host.count_cpus()} cores" if jax.default_backend() == "cpu" else ""
    packages = f"jax {installed['jax']}, jaxlib {installed['jaxlib']}, Python {installed['python']}"
    return f"{packages}, {machine.machine()}{cores}"


def _memory_bytes(device: Any, known: Chip | None) -> int:
    """The memory that a program may use."""
    if device.platform == "cpu":
        return host.memory_bytes()
    return (device.memory_stats() or {}).get("bytes_limit") or (known.usable_hbm_bytes if known else 2**34)


def _memory(device: Any, known: Chip | None) -> dict[str, Any]:
    if known:
        return {}
    usable = _memory_bytes(device, None)
    share_bytes = host.memory_bytes() // max(1, jax.local_device_count())
    share = GPU_MEMORY_SHARE if device.platform != "cpu" else 1
    return {
        "hbm_bytes": (f"{int(usable / share)} B", "the system's memory" if share == 1 else "jax's limit"),
        "usable_hbm_bytes": (f"{usable} B", "the same" if share == 1 else "jax's limit"),
        "host_bytes": (f"{share_bytes} B", "the system's memory, the share of each device"),
    }


def _peaks(rates: Sequence[MatmulRate]) -> dict[str, Any]:
    best = {
        dtype: max(one.flops_per_s for one in rates if one.dtype == dtype) for dtype in {one.dtype for one in rates}
    }
    names = {"bf16": "peak_bf16_flops_per_s", "f32": "peak_f32_flops_per_s"}
    found = {
        field: (f"{best[dtype] / 1e12:.4g} TFLOP/s", "measured: the fastest matmul")
        for dtype, field in names.items()
        if dtype in best
    }
    if best.get("s8", 0) > best.get("bf16", math.inf):
        found["peak_int8_ops_per_s"] = (f"{best['s8'] / 1e12:.4g} TOP/s", "measured: the fastest matmul")
    return found


def _network(rows: Sequence[CollectiveTime], known: Chip | None, host_bytes_per_s: float) -> tuple[str, str]:
    """What each device sends to others: of the largest collective between processes, else what is known."""
    across = [one for one in rows if one.kind == "all-gather" and (one.processes > 1 or not known)]
    if across:
        largest = max(across, key=lambda one: one.size_bytes)
        sent = largest.size_bytes * (largest.devices - 1) / largest.devices
        return f"{sent / largest.seconds / 1e9:.4g} GB/s", "measured: the largest all-gather"
    if known:
        return f"{known.network_bytes_per_s / 1e9:.4g} GB/s", f"as {known.name}: there was no other process"
    return f"{host_bytes_per_s / 1e9:.4g} GB/s", "rule: as copies to the host; there was one device"


# ---- measurements


def time_s(program: Program) -> float:
    """The seconds that a program takes, in the fastest of several runs.

    On one CPU it is CPU time, which other work on the machine changes little. Programs that run one by one are timed by
    the wall clock, since CPU time does not count waiting.
    """
    cpu_alone = jax.default_backend() == "cpu" and host.count_cpus() == 1
    clock = time.process_time if cpu_alone and not program.one_by_one else time.perf_counter

    def run(times: int) -> float:
        began = clock()
        found: Any = None
        for _ in range(times):  # what a run gives makes room for what the next one does
            found = program.run(*program.arguments)
            if program.one_by_one:
                jax.block_until_ready(found)
        jax.block_until_ready(found)
        return clock() - began

    run(2)
    times = max(1, math.ceil(_LEAST_S / max(run(1), 1e-6)))
    if jax.process_count() > 1:  # all take part in each run of a collective
        times = int(multihost_utils.broadcast_one_to_all(np.int32(times)))
    return min(run(times) for _ in range(_RUNS)) / times / program.times


def measure_gap() -> float:
    """The seconds of a small operation, in a program of many small matmuls, each of which needs the one before."""

    def chain(length: int) -> Program:
        @jax.jit
        def run(x: jax.Array) -> jax.Array:
            for _ in range(length):
                x = jnp.tanh(x @ x)  # two operations, which no compiler fuses with those before
            return x

        return Program(run, (jnp.zeros((8, 8)),))

    return max(1e-8, (time_s(chain(96)) - time_s(chain(32))) / 64 / 2)


def measure_matmuls(platform: str) -> list[MatmulRate]:
    """The rates of products of many shapes, in each dtype."""
    side = "cpu" if platform == "cpu" else "other"
    return [_matmul_rate(dtype, shape) for dtype in DTYPES[side] for shape in MATMULS[side]]


def _matmul_rate(dtype: str, shape: tuple[int, int, int, int]) -> MatmulRate:
    batch, rows, contracted, columns = shape
    flops = 2.0 * math.prod(shape)
    times = max(2, min(32, round(2e7 / flops)))  # independent products, so that a call has some work
    wide = jnp.int32 if dtype == "int8" else jnp.dtype(dtype)

    @jax.jit
    def run(xs: list[jax.Array], w: jax.Array) -> list[jax.Array]:
        return [jnp.einsum("bmk,bkn->bmn", x, w, preferred_element_type=wide) for x in xs]

    make = functools.partial(jnp.ones, dtype=dtype)
    xs = [make((batch, rows, contracted)) for _ in range(times)]
    seconds = time_s(Program(run, (xs, make((batch, contracted, columns))), times))
    return MatmulRate(program_dtype(dtype), *shape, flops / seconds)


def measure_bandwidths(platform: str, gap_s: float, memory_bytes: int) -> list[Bandwidth]:
    """The bytes/s of operations that read and write arrays of several sizes, each of its own.

    A program's arrays are rarely still in the nearest cache, so that the arrays together have WORKING_SET_BYTES.
    """

    @jax.jit
    def run(x: jax.Array) -> jax.Array:
        def add(row: jax.Array, x: jax.Array) -> jax.Array:
            changed = jax.lax.dynamic_index_in_dim(x, row, keepdims=False) + 1
            return jax.lax.dynamic_update_index_in_dim(x, changed, row, 0)

        return jax.lax.fori_loop(0, len(x), add, x)

    found = []
    for moved_bytes in MOVED_BYTES["cpu" if platform == "cpu" else "other"]:
        if moved_bytes > memory_bytes / 8:
            break
        count = max(2, WORKING_SET_BYTES // moved_bytes)
        seconds = time_s(Program(run, (jnp.zeros((count, moved_bytes // 8), jnp.float32),), count))
        found.append(Bandwidth(moved_bytes, moved_bytes / max(seconds - gap_s, seconds / 8)))
    return found


def _chains() -> Iterator[tuple[str, Callable[[jax.Array, jax.Array], jax.Array]]]:
    """An operation of compiled programs, and a function that does it once, of an array and a scalar that is 1."""
    yield "exponential", lambda x, one: jnp.exp(x)
    yield "log", lambda x, one: jnp.log(x)
    yield "tanh", lambda x, one: jnp.tanh(x)
    yield "logistic", lambda x, one: jax.nn.sigmoid(x)
    yield "erf", lambda x, one: jax.lax.erf(x)
    yield "rsqrt", lambda x, one: jax.lax.rsqrt(x)
    yield "sqrt", lambda x, one: jnp.sqrt(x)
    yield "divide", lambda x, one: one / x
    yield "power", lambda x, one: jnp.power(x, one)
    yield "sine", lambda x, one: jnp.sin(x)
    yield "select", lambda x, one: jnp.where(x > one, x, one)


def measure_elements(gap_s: float) -> dict[str, float]:
    """An operation of a CPU's programs -> the elements that it computes in a second, on arrays that a cache holds."""

    def chain(step: Callable[[jax.Array, jax.Array], jax.Array], length: int) -> Program:
        @jax.jit
        def run(x: jax.Array, one: jax.Array) -> jax.Array:
            for _ in range(length):
                x = step(x, one)
            return x

        return Program(run, (jnp.linspace(0.5, 1.0, _COUNT), jnp.float32(1.0001)))

    def each_s(step: Callable[[jax.Array, jax.Array], jax.Array]) -> float:
        return max(1e-12, (time_s(chain(step, 3 * _CHAIN)) - time_s(chain(step, _CHAIN))) / (2 * _CHAIN) / _COUNT)

    add_s = each_s(lambda x, one: (x + one) * one) / 2
    found = {"add": 1 / add_s}
    for name, step in _chains():
        found[name] = 1 / max(add_s, each_s(lambda x, one, step=step: step(x, one) * one) - add_s)
    return found | {name: 1 / seconds for name, seconds in _moves(gap_s)}


def _moves(gap_s: float) -> Iterator[tuple[str, float]]:
    """Operations that move or sum elements, each with the seconds of an element."""
    side, width = 512, 128
    matrices = jnp.ones((64, width, width))
    rows = jnp.asarray(np.random.default_rng(0).integers(0, side, 4 * side), jnp.int32)
    table, many = jnp.ones((side, width)), jnp.ones((4 * side, width))
    numbers = jnp.asarray(np.random.default_rng(0).permutation(2**13), jnp.int32)
    tall = jnp.ones((4 * side, width))
    programs = {
        "reduce": (lambda x: x.sum(-1), (tall,), tall.size),
        "reduce columns": (lambda x: x.sum(0), (tall,), tall.size),
        "transpose": (lambda x: jnp.swapaxes(x, 1, 2), (matrices,), matrices.size),
        "gather": (lambda table, rows: table[rows], (table, rows), many.size),
        "scatter": (lambda table, rows, many: table.at[rows].add(many), (table, rows, many), many.size),
        "sort": (lambda x: jnp.sort(x), (numbers,), numbers.size * 13 * 14 / 2),
        "reduce-window": (lambda x: jnp.cumsum(x, 0), (tall,), tall.size),
    }
    for name, (function, arguments, count) in programs.items():
        seconds = time_s(Program(jax.jit(function), arguments))
        yield name, max(seconds - gap_s, seconds / 8) / count


def measure_host_link(device: Any) -> float:
    """The bytes/s of copies to a device and back, the slower of the two."""
    array = np.ones(2**25, np.float32)
    there = jax.device_put(array, device)
    to_s = time_s(Program(lambda: jax.device_put(array, device), ()))
    back_s = min(timeit.repeat(lambda: np.asarray(there + 1), number=1, repeat=_RUNS))
    return array.nbytes / max(to_s, back_s)


def measure_collectives(devices: Sequence[Any]) -> list[CollectiveTime]:
    """The times of each kind of collective, for several sizes, in groups of two devices and of all."""
    found = []
    for groups in sorted({2, len(devices)} & set(range(2, len(devices) + 1))):
        if len(devices) % groups:
            continue
        grid = np.reshape(np.asarray(devices), (-1, groups))
        mesh = Mesh(grid, ("others", "group"))
        processes = count_outer(mesh, groups)
        for (kind, step), size_bytes in itertools.product(_exchanges(groups), COLLECTIVE_BYTES):
            seconds = time_s(_collective(mesh, step, size_bytes))
            found.append(CollectiveTime(kind, groups, processes, size_bytes, seconds))
    return found


def count_outer(mesh: Any, count: int) -> int:
    """The `processes` of a `CollectiveTime` in a group of the first `count` devices of a mesh."""
    devices = list(mesh.devices.flat)
    if chip := chip_of(devices[0].device_kind):
        return Network(chip, **device_locations(mesh), mesh=mesh.shape).outer(range(count))
    return len({device.process_index for device in devices[:count]})


def _exchanges(devices: int) -> Iterable[tuple[str, Callable[[jax.Array], jax.Array]]]:
    """Kinds of collectives, each with a function of what one device begins with."""
    ring = [(n, (n + 1) % devices) for n in range(devices)]
    gather = functools.partial(jax.lax.all_gather, axis_name="group", tiled=True)
    exchange = functools.partial(jax.lax.all_to_all, axis_name="group", split_axis=0, concat_axis=0, tiled=True)
    return (
        ("all-gather", lambda x: gather(x[: len(x) // devices])),
        ("all-reduce", lambda x: jax.lax.psum(x, "group")),
        ("reduce-scatter", lambda x: jax.lax.psum_scatter(x, "group", tiled=True)),
        ("all-to-all", exchange),
        ("collective-permute", lambda x: jax.lax.ppermute(x, "group", ring)),
    )


def _collective(mesh: Mesh, step: Callable[[jax.Array], jax.Array], size_bytes: int) -> Program:
    """A program with one collective, of which each device holds or gets `size_bytes`."""
    spec = PartitionSpec(("others", "group"))
    count = size_bytes // 4 // mesh.shape["group"] * mesh.shape["group"]
    shape = (max(count, mesh.shape["group"]) * mesh.size,)
    sharding = NamedSharding(mesh, spec)
    x = jax.jit(lambda: jnp.ones(shape, jnp.float32), out_shardings=sharding)()
    run = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    return Program(run, (x,), one_by_one=mesh.devices.flat[0].platform == "cpu")
