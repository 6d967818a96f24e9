"""The platform, devices and processes of a run, and its compiler options."""

import contextlib
import ctypes
import dataclasses
import importlib.util
import logging
import mmap
import os
import re
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from platform import libc_ver
from typing import Any

import jax
import jaxlib

from gspmd_lm import processes, quiet, versions
from gspmd_lm.chips import GPU_MEMORY_SHARE, chip_of
from gspmd_lm.errors import InputError, did_you_mean
from gspmd_lm.rules import PLATFORMS

JAX_PLATFORMS = {"cpu": "cpu", "gpu": "cuda,cpu", "tpu": "tpu,cpu"}  # the first is used; cpu serves host computations

# Seconds that simulated devices wait for each other before XLA warns, and before XLA ends the process. The defaults, 20
# and 40, are too short where other work on the machine delays a device.
PATIENT_FLAGS = {
    "xla_cpu_collective_call_warn_stuck_timeout_seconds": 120,
    "xla_cpu_collective_call_terminate_timeout_seconds": 1200,
}

# Compiler options that a rules file may override; null there removes one. Each name was accepted by the compilers that
# come with jax 0.10.2 (libtpu 0.0.42 for v5e, v5p and v6e; the CUDA 12 plugin for an H100), and by libtpu 0.0.50.
DEFAULT_OPTIONS: dict[str, dict[str, bool | int | str]] = {
    "cpu": {},
    # The initial state runs once, and the compiler takes longer than the run. Level 0 would give other values, because
    # a product and the sum that it goes into are then rounded one after the other.
    "cpu once": {"xla_backend_optimization_level": 1},
    "gpu": {
        # Products by cuBLAS. Published runs of large models turn Triton's off too, and where no GPU tunes them, as in
        # `explain`, Triton's take up to a percent longer and fail to compile for some widths, such as 2304.
        "xla_gpu_enable_triton_gemm": False,
        "xla_gpu_enable_latency_hiding_scheduler": True,
        "xla_gpu_all_gather_combine_threshold_bytes": 256 * 2**20,
        "xla_gpu_all_reduce_combine_threshold_bytes": 256 * 2**20,
        "xla_gpu_reduce_scatter_combine_threshold_bytes": 256 * 2**20,
    },
    "tpu": {
        "xla_tpu_enable_latency_hiding_scheduler": True,
        "xla_tpu_overlap_compute_collective_tc": True,
        "xla_enable_async_all_gather": True,
        "xla_enable_async_all_reduce": True,
        "xla_jf_crs_combiner_threshold_in_bytes": 256 * 2**20,  # all-reduces
    },
    # libtpu 0.0.50 refuses to compile with these for other chips than v5e. With 0.0.42, all chips have them.
    "tpu fusion": {
        "xla_tpu_enable_async_collective_fusion": True,
        "xla_tpu_enable_async_collective_fusion_fuse_all_gather": True,
        "xla_tpu_enable_async_collective_fusion_fuse_all_reduce": True,
        "xla_tpu_enable_async_collective_fusion_fuse_reduce_scatter": True,
        "xla_tpu_enable_async_collective_fusion_multiple_steps": True,
    },
    # On a torus of three dimensions, libtpu turns reduce-scatters, and all-gathers over 64 chips or more, into
    # synchronous all-reduces of twice the bytes. With these options the collectives stay what they are, asynchronous.
    "tpu 3d": {
        "xla_tpu_enable_sparse_core_collective_offload_nd_reduce_scatter": True,
        "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter": True,
        "xla_tpu_prefer_async_allgather_to_allreduce": True,
    },
}

FUSES_ON_ALL = 0, 0, 42  # the last libtpu that is known to take the options of "tpu fusion" for all chips

# Parameters of glibc's mallopt, with their numbers in malloc.h: one heap for all threads, all memory from it, and at
# most 2 GiB of it free.
MALLOC = {"M_ARENA_MAX": (-8, 1), "M_MMAP_MAX": (-4, 0), "M_TRIM_THRESHOLD": (-1, 2**31 - 1)}
MEMORY_SHARES = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"  # jax's, and its older name

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Runtime:
    """What this process runs on. Counts are over all processes."""

    platform: str  # cpu, gpu or tpu
    device_kind: str
    device_count: int
    process_index: int
    process_count: int

    @property
    def is_main(self) -> bool:
        """Whether this process is the one that prints and writes logs."""
        return self.process_index == 0

    @property
    def simulated(self) -> bool:
        """Whether the devices are threads of the CPU."""
        return self.platform == "cpu"


def start(
    *,
    platform: str | None = None,
    simulated_devices: int = 8,
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    keep_memory: bool = False,
) -> Runtime:
    """The devices of this run. It must be called before anything else touches a device.

    A program that has called it may call it again for as many simulated devices or fewer, of which it takes the first.

    `platform` takes precedence over JAX_PLATFORMS, and both over the platform that is found. `simulated_devices` is per
    process and counts only on cpu. Processes join as the three flags say. Without flags, jax finds the processes of
    Slurm, Open MPI, an indexed Kubernetes job or a TPU VM; `num_processes=1` alone keeps this process by itself. XLA
    aborts a process that waits for the others in vain for 5 minutes. With `keep_memory`, a process with simulated
    devices keeps memory that it frees, which makes many steps faster and takes more memory.

    Raises InputError if a flag is wrong, if the platform cannot be used, or if jax cannot join the processes.
    """
    _check_flags(coordinator, num_processes, process_id)
    if simulated_devices < 1:
        raise InputError(f"--devices={simulated_devices}: at least 1 device is needed\n  fix   --devices=8")
    chosen = _choose_platform(platform)
    jax.config.update("jax_platforms", JAX_PLATFORMS[chosen])
    if not jax.distributed.is_initialized():
        _join(chosen, coordinator, num_processes, process_id)
    if chosen == "cpu":
        prepare_cpu(simulated_devices)
        if keep_memory:
            _keep_freed_memory()
    elif chosen == "gpu":
        _take_memory()
    with quiet.unless_there(chosen):
        try:
            devices = jax.devices()
        except RuntimeError as error:
            raise InputError(_absent(chosen, str(error))) from error
        if jax.default_backend() != chosen:
            raise InputError(_absent(chosen, f"jax runs on {jax.default_backend()}"))
    if chosen == "cpu" and jax.local_device_count() < simulated_devices:
        raise InputError(_too_late(jax.local_device_count(), simulated_devices))
    return Runtime(chosen, devices[0].device_kind, len(devices), jax.process_index(), jax.process_count())


def _choose_platform(asked: str | None) -> str:
    """cpu, gpu or tpu, found without starting a backend, which would fix the devices before they are chosen.

    TPU chips need no search: on their hosts jax, when imported, sets jax_platforms to "tpu,cpu".
    """
    origin = f"--platform={asked}"
    preset: str | None = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
    if asked is None and preset:
        asked, origin = preset.split(",")[0], f"JAX_PLATFORMS={preset}"
    if asked is not None:
        name = {"cuda": "gpu"}.get(asked.lower(), asked.lower())
        if name not in PLATFORMS:
            raise InputError(
                f"{origin}: unknown platform{did_you_mean(name, PLATFORMS)}\n  fix   use cpu, gpu (or cuda) or tpu"
            )
        return name
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if not hidden and quiet.is_there("gpu"):
        if any(plugin.name.startswith("xla_cuda") for plugin in entry_points(group="jax_plugins")):
            return "gpu"
        _log.warning("an NVIDIA GPU is here, but jax's plugin is not installed: pip install 'gspmd_lm[cuda]' to use it")
    if quiet.is_there("tpu") and not importlib.util.find_spec("libtpu"):
        _log.warning("this may be a TPU host, but libtpu is not installed: pip install 'gspmd_lm[tpu]' to use it")
    return "cpu"


def prepare_cpu(device_count: int) -> None:
    """Sets up `device_count` simulated devices, before the first one is touched."""
    # XLA:CPU gives a process as many threads as there are cores or devices. All of them can then block in collectives
    # over different mesh axes and wait for devices that no thread is left to run. Spare threads prevent this. A device
    # that has no others to wait for would only have its work cut finer (benchmarks/README.md).
    if device_count > 1 or jax.distributed.is_initialized():
        for name in ("PJRT_NPROC", "NPROC"):
            os.environ.setdefault(name, str(max(32, 4 * device_count)))
    given = os.environ.get("XLA_FLAGS", "")
    more = [f"--{name}={value}" for name, value in PATIENT_FLAGS.items() if name not in given and _xla_knows(name)]
    os.environ["XLA_FLAGS"] = " ".join([given, *more]).strip()
    jax.config.update("jax_cpu_collectives_implementation", "gloo")  # between processes; one process does not use it
    try:
        jax.config.update("jax_num_cpu_devices", device_count)
    except RuntimeError as error:  # a device was touched before
        if jax.local_device_count() < device_count:
            raise InputError(_too_late(jax.local_device_count(), device_count)) from error


def _keep_freed_memory() -> None:
    """Has glibc keep up to 2 GiB that this process frees, for the next step.

    XLA:CPU takes new memory for each step. Without this, large pieces go back to the system after a step, and the next
    step gets them again page by page, which takes up to a sixth of its CPU time (benchmarks/README.md). Another libc
    stays as it is.
    """
    if libc_ver()[0] == "glibc":
        for parameter, value in MALLOC.values():
            ctypes.CDLL(None).mallopt(parameter, value)


def _take_memory() -> None:
    """Has jax take GPU_MEMORY_SHARE of a GPU's memory, unless the environment says how much, once it first uses one."""
    name = next((name for name in MEMORY_SHARES if os.environ.get(name)), MEMORY_SHARES[0])
    os.environ[name] = os.environ.get(name) or str(GPU_MEMORY_SHARE)
    _log.info("%s=%s: the share of each GPU's memory that this process takes", name, os.environ[name])


def simulate_later(device_count: int) -> None:
    """Has `device_count` devices simulated when a CPU is first used. If one is in use already, nothing changes."""
    with contextlib.suppress(InputError):  # whoever needs more devices than there are is told so by `start`
        prepare_cpu(device_count)


def _xla_knows(flag: str) -> bool:
    """Whether the library that parses XLA_FLAGS has a flag. An unknown flag there ends the process."""
    library = Path(jaxlib.__file__).with_name("libjax_common.so")
    if not library.exists():
        return False
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(f"\0{flag}\0".encode()) >= 0


def _check_flags(coordinator: str | None, num_processes: int | None, process_id: int | None) -> None:
    fix = "\n  fix   --coordinator=HOST:PORT --num_processes=N --process_id=I (I from 0 to N-1), all three or none"
    if num_processes is not None and num_processes < 1:
        raise InputError(f"--num_processes={num_processes}: at least 1 process is needed{fix}")
    if num_processes == 1 and coordinator is None and not process_id:
        return
    given = {"--coordinator": coordinator, "--num_processes": num_processes, "--process_id": process_id}
    missing = [name for name, value in given.items() if value is None]
    if 0 < len(missing) < len(given):
        raise InputError(
            f"{', '.join(name for name in given if name not in missing)} given without {' and '.join(missing)}{fix}"
        )
    if coordinator is not None and not re.fullmatch(r".+:\d+", coordinator):
        raise InputError(f"--coordinator={coordinator}: no port{fix}")
    if process_id is not None and num_processes is not None and not 0 <= process_id < num_processes:
        raise InputError(f"--process_id={process_id} must be at least 0 and below --num_processes={num_processes}{fix}")


def _join(platform: str, coordinator: str | None, num_processes: int | None, process_id: int | None) -> None:
    """Starts jax.distributed if there are, or may be, other processes."""
    if coordinator is None and (num_processes == 1 or not _launched_in_parallel(platform)):
        return
    _log.info("waiting for the other processes%s", f" at {coordinator}" if coordinator else "")
    # It takes SIGTERM, also where nobody asks for it, and agrees on a step that may be past: Orbax asks it about steps
    # that it has saved, which sets it back. agreement.py takes its place.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            coordinator,
            num_processes,
            process_id,
            cluster_detection_method="deactivate" if coordinator else None,
            heartbeat_timeout_seconds=processes.HEARTBEAT_S,
        )
    except (ValueError, RuntimeError) as error:
        if coordinator is None and "coordinator_address should be defined" in str(error):
            return  # jax does not recognise the environment: this process is alone
        raise InputError(
            f"the other processes cannot be joined: {error}\n"
            "  fix   give --coordinator, --num_processes and --process_id, or run by itself with --num_processes=1"
        ) from error


def _launched_in_parallel(platform: str) -> bool:
    """Whether jax should look for other processes. In a pod without an indexed job, it would warn or raise."""
    counts = [os.environ.get(name, "1") for name in ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE")]
    return platform == "tpu" or "JOB_COMPLETION_INDEX" in os.environ or any(count != "1" for count in counts)


def _absent(platform: str, reason: str) -> str:
    extra = {"gpu": "cuda", "tpu": "tpu"}.get(platform)
    install = f"pip install 'gspmd_lm[{extra}]' on a machine that has one, or " if extra else ""
    return f"platform {platform} cannot be used: {reason}\n  fix   {install}--platform=cpu to simulate devices"


def _too_late(have: int, want: int) -> str:
    return (
        f"{want} simulated device{'s' * (want > 1)} asked for, but jax already runs with {have}\n"
        f"  fix   use {have}, or call runtime.start before anything touches a device"
    )


# Compiler options


def compiler_options(
    platform: str,
    rules_options: Mapping[str, Mapping[str, Any]],
    place: str,
    device_kind: str = "",
    once: bool = False,
) -> dict[str, bool | int | float | str]:
    """The compiler options of `platform`: its defaults, overridden by the rules file's `compiler_options.<platform>`.

    Some defaults are for TPUs of one `device_kind`, as jax calls it, and some for a program that runs only `once`.

    null removes a default. The compiler checks names and values, see `compile`. Rows of other platforms are not
    checked. Raises an InputError that names `place` for a value that is not a scalar.
    """
    chip = chip_of(device_kind)
    wanted = {
        platform: True,
        "tpu fusion": platform == "tpu" and (_libtpu() <= FUSES_ON_ALL or (chip and chip.fuses_collectives)),
        "tpu 3d": chip and chip.torus_dimensions == 3,
        f"{platform} once": once,
    }
    options: dict[str, Any] = {}
    for of, holds in wanted.items():
        options |= DEFAULT_OPTIONS.get(of, {}) if holds else {}
    options |= rules_options.get(platform, {})
    for name, value in options.items():
        if not isinstance(value, bool | int | float | str | None):
            raise InputError(
                f"{place}: compiler_options.{platform}.{name}: {value!r} is not a single value\n"
                "  fix   write true, false, a number or a word; null removes a default"
            )
    options = {str(name): value for name, value in options.items() if value is not None}
    if platform == "tpu":  # libtpu parses text
        return {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in options.items()}
    return options


def _libtpu() -> tuple[int, ...]:
    """The version of libtpu, such as (0, 0, 42); () if it is not installed."""
    return tuple(map(int, re.findall(r"\d+", versions.installed(["libtpu"])["libtpu"] or "")[:3]))


def compile(lowered: jax.stages.Lowered, options: Mapping[str, Any], platform: str, place: str) -> jax.stages.Compiled:
    """The program compiled with `options`. Raises an InputError that names a row of `place` that is refused."""
    try:
        return lowered.compile(compiler_options=dict(options))
    except jax.errors.JaxRuntimeError as error:
        refused = re.search(
            r"No such compile option: '(?P<unknown>[^']*)'"
            r"|While setting option (?P<typed>\w+), '.*?' (?P<kind>is not [^.]*)"
            r"|Failed to parse '.*?' into flag (?P<parsed>\w+): *(?P<why>.*)",
            str(error),
        )
        if not refused:
            raise
        raise InputError(_refusal(refused, options, platform, place)) from error


def _refusal(refused: re.Match[str], options: Mapping[str, Any], platform: str, place: str) -> str:
    name = refused["unknown"] or refused["typed"] or refused["parsed"]
    row = f"{place}: compiler_options.{platform}.{name}"
    of_platform = (rows for of, rows in DEFAULT_OPTIONS.items() if of.split()[0] == platform)
    defaults = {name: value for rows in of_platform for name, value in rows.items()}
    if name in defaults and options[name] == defaults[name]:
        return (
            f"{row}: this default is refused by the compiler of jax {jax.__version__}: {refused[0]}\n"
            f"  fix   add {name}: null to compiler_options.{platform}"
        )
    if refused["unknown"]:
        return f"{row}: the compiler has no such option{did_you_mean(name, defaults)}\n  fix   correct or remove it"
    reason = refused["kind"] or f"cannot be read. {refused['why']}".rstrip()
    return f"{row}: {options[name]!r} {reason}\n  fix   correct the value (true and false are written without quotes)"


def check_room(compiled: jax.stages.Compiled, devices: Sequence[Any], what: str, fix: str) -> None:
    """Raises InputError if a program needs more memory than its devices have free. `what` names it in the message.

    Simulated devices share the memory of this machine.
    """
    analysis: Any = compiled.memory_analysis()
    needed = analysis.argument_size_in_bytes + analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    needed += analysis.temp_size_in_bytes
    here = [device for device in devices if device.process_index == jax.process_index()]
    if devices[0].platform == "cpu":
        free, needed, place = _free_bytes(), needed * len(here), "this machine"
    else:
        free, place = (here[0].memory_stats() or {}).get("bytes_limit"), "each device"
    if free is not None and needed > free:
        sizes = f"needs {needed / 1e9:.3g} GB, and {place} has {free / 1e9:.3g} GB free"
        raise InputError(f"{what} {sizes}\n  fix   {fix}")


def _free_bytes() -> int | None:
    """The memory that this process may still take, swap included; None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        found = {name: int(value.split()[0]) * 1024 for name, _, value in (line.partition(":") for line in lines)}
        free = found["MemAvailable"] + found["SwapFree"]
    except (OSError, KeyError, ValueError):
        return None
    with contextlib.suppress(OSError, ValueError, KeyError):  # a container's limit; "max" if it has none
        group = Path("/sys/fs/cgroup")
        held = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        used = int((group / "memory.current").read_text()) - int(held["inactive_file"])  # which the system reclaims
        free = min(free, int((group / "memory.max").read_text()) - used)
    return free
