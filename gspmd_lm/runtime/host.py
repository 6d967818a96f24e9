"""The processors and the memory that this process may use, on Linux and elsewhere."""

import contextlib
import os
from pathlib import Path


def count_cpus() -> int:
    """The number of processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory_bytes() -> int:
    """The memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def free_bytes() -> int | None:
    """The memory that this process may still take, swap included; None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        bytes_of = {name: int(value.split()[0]) * 1024 for name, _, value in (line.partition(":") for line in lines)}
        free = bytes_of["MemAvailable"] + bytes_of["SwapFree"]
    except (OSError, KeyError, ValueError):
        return None
    with contextlib.suppress(OSError, ValueError, KeyError):  # a container's limit; "max" if it has none
        group = Path("/sys/fs/cgroup")
        held = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        used = int((group / "memory.current").read_text()) - int(held["inactive_file"])  # which the system reclaims
        free = min(free, int((group / "memory.max").read_text()) - used)
    return free
