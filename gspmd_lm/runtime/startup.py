"""The platform, devices and processes of a run, and its compiler options."""

import contextlib
import ctypes
import dataclasses
import importlib.util
import logging
import math
import mmap
import os
import re
from collections.abc import Iterator, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from platform import libc_ver
from typing import Any

import jax
import jaxlib
from jax.extend import backend

from gspmd_lm.errors import InputError, did_you_mean
from gspmd_lm.hardware.chips import GPU_MEMORY_SHARE, PLATFORMS
from gspmd_lm.runtime import processes, quiet, rendezvous
from gspmd_lm.units import plural

JAX_PLATFORMS = {"cpu": "cpu", "gpu": "cuda,cpu", "tpu": "tpu,cpu"}  # the first is used; cpu serves host computations

# Seconds that simulated devices wait for each other before XLA warns, and before XLA ends the process. The defaults, 20
# and 40, are too short where other work on the machine delays a device.
PATIENT_FLAGS = {
    "xla_cpu_collective_call_warn_stuck_timeout_seconds": 120,
    "xla_cpu_collective_call_terminate_timeout_seconds": 1200,
}
# With XLA's order of operations for concurrency, simulated devices of jax 0.12 can wait for each other without end. A
# step of Whisper over 8 devices did in 3 of 6 runs, and in the other order in none of 9. The cause was not found.
ORDER_FLAGS = {"xla_cpu_enable_concurrency_optimized_scheduler": "false"}

# Parameters of glibc's mallopt, with their numbers in malloc.h: one heap for all threads, all memory from it, and at
# most 2 GiB of it free.
MALLOC = {"M_ARENA_MAX": (-8, 1), "M_MMAP_MAX": (-4, 0), "M_TRIM_THRESHOLD": (-1, 2**31 - 1)}
MEMORY_SHARES = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"  # jax's, and its older name

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Runtime:
    """The platform and the devices of this process. Counts are over all processes."""

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
    def is_simulated(self) -> bool:
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
    """The devices of this run. It must be called before anything else touches a device, unless they are simulated.

    A program that has called it may call it again for as many simulated devices or fewer, of which it takes the first.

    `platform` takes precedence over JAX_PLATFORMS, and both over the platform that is found. `simulated_devices` is per
    process and counts only on cpu. Processes join as the three flags say. Without flags, jax finds the processes of
    Slurm, Open MPI, an indexed Kubernetes job or a TPU VM. `num_processes=1` alone keeps this process by itself. With
    `keep_memory`, a process with simulated devices keeps memory that it frees, which makes many steps faster and takes
    more memory.

    Raises InputError if a flag is wrong, if the platform cannot be used, or if jax cannot join the processes, and
    RunFailed if one of them does not come.
    """
    _check_flags(coordinator, num_processes, process_id)
    if simulated_devices < 1:
        raise InputError(f"--devices={simulated_devices}: at least 1 device is needed\n  fix   --devices=8")
    chosen = _choose_platform(platform)
    jax.config.update("jax_platforms", JAX_PLATFORMS[chosen])
    if not jax.distributed.is_initialized():
        _join(chosen, coordinator, num_processes, process_id)
    if chosen == "cpu":
        _prepare_anew(simulated_devices)
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


def _prepare_anew(device_count: int) -> None:
    """Sets up simulated devices, although a module may have touched the CPU when it was imported: a jnp constant does.

    Nobody has said then how many devices there are, and jax begins anew. Arrays that it has made stay usable.
    """
    try:
        prepare_cpu(device_count)
    except InputError:
        unsaid = jax.config.jax_num_cpu_devices == -1  # pyright: ignore[reportAttributeAccessIssue]
        if not unsaid or jax.distributed.is_initialized():
            raise
        backend.clear_backends()
        prepare_cpu(device_count)


def prepare_cpu(device_count: int) -> None:
    """Sets up `device_count` simulated devices, before the first one is touched."""
    # XLA:CPU gives a process as many threads as there are cores or devices. All of them can then block in collectives
    # over different mesh axes and wait for devices that no thread is left to run. Spare threads prevent this. A device
    # that has no others to wait for would only have its work cut finer (benchmarks/README.md).
    if device_count > 1 or jax.distributed.is_initialized():
        for name in ("PJRT_NPROC", "NPROC"):
            os.environ.setdefault(name, str(max(32, 4 * device_count)))
    flags = os.environ.get("XLA_FLAGS", "")
    wanted = PATIENT_FLAGS | (ORDER_FLAGS if device_count > 1 and jax.__version_info__ >= (0, 11) else {})
    more = [f"--{name}={value}" for name, value in wanted.items() if name not in flags and _xla_knows(name)]
    os.environ["XLA_FLAGS"] = " ".join([flags, *more]).strip()
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


def devices_of(count: int) -> list[Any]:
    """The devices that a layout of `count` devices takes: the first ones, or all where only all can compute together.

    count: below 1 where a layout takes as many as there are.
    """
    devices = jax.devices()
    some = jax.process_count() == 1 and (jax.default_backend() == "cpu" or count == 1) and count > 0
    return devices[:count] if some else devices


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
    values = {"--coordinator": coordinator, "--num_processes": num_processes, "--process_id": process_id}
    missing = [name for name, value in values.items() if value is None]
    if 0 < len(missing) < len(values):
        raise InputError(
            f"{', '.join(name for name in values if name not in missing)} given without {' and '.join(missing)}{fix}"
        )
    if coordinator is not None and not re.fullmatch(r".+:\d+", coordinator):
        raise InputError(f"--coordinator={coordinator}: no port{fix}")
    if process_id is not None and num_processes is not None and not 0 <= process_id < num_processes:
        raise InputError(f"--process_id={process_id} must be at least 0 and below --num_processes={num_processes}{fix}")


def _join(platform: str, coordinator: str | None, num_processes: int | None, process_id: int | None) -> None:
    """Starts jax.distributed if there are, or may be, other processes."""
    if coordinator is None and (num_processes == 1 or not _launched_in_parallel(platform)):
        return
    if coordinator or num_processes or _launched_in_parallel("cpu"):
        _log.info("waiting for the other processes%s", f" at {coordinator}" if coordinator else "")
    else:
        _log.info("looking for other processes of a TPU slice; --num_processes=1 says that there are none")
    with _naming_flags():
        address, count, number, local_devices = _find_processes(coordinator, num_processes, process_id)
    if address is None or count is None or number is None or count == 1:
        return  # this process is alone, and needs no port
    rendezvous.meet(address, count, number, _log.info)
    # It takes SIGTERM, also where nobody asks for it, and agrees on a step that may be past: Orbax asks it about steps
    # that it has saved, which sets it back. preemption.py takes its place.
    jax.config.update("jax_enable_preemption_service", False)
    with _naming_flags():
        jax.distributed.initialize(
            address,
            count,
            number,
            local_devices,
            cluster_detection_method="deactivate",
            heartbeat_timeout_seconds=processes.HEARTBEAT_S,
        )


@contextlib.contextmanager
def _naming_flags() -> Iterator[None]:
    """A context whose errors, which are jax's, become one that names the flags."""
    try:
        yield
    except (ValueError, RuntimeError) as error:
        raise InputError(
            f"the other processes cannot be joined: {error}\n"
            "  fix   give --coordinator, --num_processes and --process_id, or run by itself with --num_processes=1"
        ) from error


def _find_processes(
    coordinator: str | None, num_processes: int | None, process_id: int | None
) -> tuple[str | None, int | None, int | None, Sequence[int] | None]:
    """The address of process 0, the count of processes, the number of this one, and its devices; None if unknown.

    They are what the flags say, or else what jax finds in the environment of Slurm, Open MPI, Kubernetes or TPU VMs.
    """
    if coordinator:
        return coordinator, num_processes, process_id, None
    from jax._src import clusters  # jax has no public name for what it finds

    given = {name: os.environ.get(f"JAX_{name}") for name in ("COORDINATOR_ADDRESS", "COORDINATOR_PORT")}
    address, count, number, devices = clusters.ClusterEnv.auto_detect_unset_distributed_params(
        given["COORDINATOR_ADDRESS"], None, None, None, None, math.ceil(rendezvous.resolve_s())
    )
    step = os.environ.get("SLURM_STEP_ID", "")
    if address and step.isdecimal() and not any(given.values()):
        # jax chooses the port by the job alone, and two steps of a job may share a host. The range of ports is jax's.
        host, _, port = address.rpartition(":")
        address = f"{host}:{2**16 - 2**12 + (int(port) + 1031 * int(step)) % 2**12}"
    return address, count, number, None if os.environ.get("JAX_LOCAL_DEVICE_IDS") else devices


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
        f"{plural(want, 'simulated device')} asked for, but jax already runs with {have}\n"
        f"  fix   use {have}, or call gspmd_lm.start(rules) before anything touches a device"
    )
