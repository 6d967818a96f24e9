"""The folder or bucket in which jax keeps compiled programs: enabled, kept small, and repaired."""

import contextlib
import glob
import logging
import os
import re
import warnings
from pathlib import Path
from typing import Any

import jax
from etils import epath

from gspmd_lm import files
from gspmd_lm.config.paths import cache_folder
from gspmd_lm.errors import InputError

LIMIT_BYTES = 8 * 2**30

_log = logging.getLogger(__name__)


class CompileCache:
    """The compile cache of this process, and the time that it has saved."""

    def __init__(self, directory: epath.Path | None):
        self.directory = directory  # None: the cache is switched off
        self.hits = 0
        self.saved_s = 0.0  # compile time less read time; jax counts whole seconds, so this is rather too little
        self._requests = 0

    @property
    def misses(self) -> int:
        """The number of programs that had to be compiled."""
        return self._requests - self.hits

    def _count(self, event: str, **_: Any) -> None:
        self.hits += event == "/jax/compilation_cache/cache_hits"
        self._requests += event == "/jax/compilation_cache/compile_requests_use_cache"

    def _add_time(self, event: str, duration_secs: float, **_: Any) -> None:
        if event == "/jax/compilation_cache/compile_time_saved_sec":
            self.saved_s += max(0.0, duration_secs)


def enable(directory: str | None = None) -> CompileCache:
    """The compile cache, which from here on keeps programs in `directory`. "none" switches the cache off.

    The default is $GSPMD_LM_CACHE/compile, then jax's own JAX_COMPILATION_CACHE_DIR, then the user's cache directory.
    Raises InputError if the folder cannot be written.
    """
    if directory == "none":
        jax.config.update("jax_enable_compilation_cache", False)
        return CompileCache(None)
    parent = os.environ.get("GSPMD_LM_CACHE")
    preset: str | None = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    chosen = directory or (None if parent else preset)
    try:
        folder = files.open_path(chosen or str(cache_folder("compile")))
        folder.mkdir(parents=True, exist_ok=True)
        if not chosen:  # whoever names a folder keeps it small
            files.trim(Path(folder).glob("*-cache"), LIMIT_BYTES)
    except ImportError as error:
        raise InputError(
            f"{chosen}: the compile cache cannot be opened ({error})\n  fix   pip install the package that it names"
        ) from error
    except OSError as error:
        raise InputError(
            f"{chosen or cache_folder('compile')}: the compile cache cannot be written ({error})\n"
            "  fix   set GSPMD_LM_CACHE to a folder that you may write to, or use --compile_cache=none"
        ) from error
    for name, value in {
        "jax_enable_compilation_cache": True,
        "jax_compilation_cache_dir": str(folder),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
        "jax_persistent_cache_enable_xla_caches": "none",  # they would put the folder's path into every key
        "jax_compilation_cache_max_size": -1,  # jax's own limit locks, and writes to, the folder at each read
    }.items():
        jax.config.update(name, value)
    _with_checksums()
    _repair_on_reading(folder)
    if jax.distributed.is_initialized() and jax.default_backend() == "cpu":
        _share_keys_of_processes()
    cache = CompileCache(folder)
    jax.monitoring.register_event_listener(cache._count)
    jax.monitoring.register_event_duration_secs_listener(cache._add_time)
    return cache


def _with_checksums() -> None:
    """Makes jax compress entries with zlib, which notices a flipped bit.

    If zstandard is installed, jax 0.10 to 0.12 uses it without its checksum. A flipped bit then crashed the process or
    changed the program that ran.
    """
    from jax._src import compilation_cache

    for name in ("zstd", "zstandard"):  # the module of Python 3.14 and the package
        if hasattr(compilation_cache, name):
            setattr(compilation_cache, name, None)


def _share_keys_of_processes() -> None:
    """Makes the processes of a run on CPUs find the entries that process 0 has written.

    On TPUs and GPUs all processes have the same key for a program. On CPUs jax's key has the number of the process, and
    only process 0 writes, so that all other processes compiled again at each start. The key that replaces it still
    tells apart machines whose CPUs have other instructions.
    """
    from jax._src import cache_key
    from jaxlib import xla_client

    as_alone = xla_client.make_cpu_client(num_devices=jax.local_device_count()).devices()
    machine = xla_client.get_topology_for_devices(as_alone).fingerprint()

    def hash_machine(hashed: Any, devices: Any) -> None:
        hashed.update(machine.to_bytes(8, "big"))
        cache_key._hash_devices(hashed, devices)

    cache_key._hash_accelerator_config = hash_machine


def _repair_on_reading(folder: epath.Path) -> None:
    """Makes unreadable entries be deleted at once, so that the program that is compiled instead takes their place.

    jax only warns about them and never overwrites an entry. Its warning names the program and not the entry, so the
    entries of the program's other layouts are deleted too.
    """
    beginning = "Error reading persistent compilation cache entry for "
    show = warnings.showwarning

    def repair_or_show(message: Warning | str, *args: Any, **kwargs: Any) -> None:
        match = re.match(beginning + "'([^']+)'", str(message))
        if not match:
            show(message, *args, **kwargs)
            return
        for entry in folder.glob(f"{glob.escape(match[1])}-*-cache"):
            with contextlib.suppress(PermissionError):  # of another user
                entry.unlink(missing_ok=True)
        _log.warning("%s: entries of %s could not be read and are made anew", folder, match[1])

    warnings.showwarning = repair_or_show
    warnings.filterwarnings("always", message=beginning)  # even if Python was told to ignore warnings or to raise them
