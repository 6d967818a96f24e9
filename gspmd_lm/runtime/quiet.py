"""Accelerators that are not here, what libraries write to stderr about them, and how often garbage is looked for."""

import contextlib
import ctypes
import functools
import gc
import glob
import importlib
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from importlib.metadata import entry_points
from pathlib import Path

from gspmd_lm.versions import PACKAGE

# For processes that compile for TPUs and use none: no metadata server outside Google's cloud is asked, and libtpu's
# lock, which is for processes that use chips, is not taken.
WITHOUT_TPU = {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
_DEVICE_FILES = {
    "cpu": ("/",),
    "gpu": ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg"),
    "tpu": ("/dev/accel[0-9]*", "/dev/vfio/[0-9]*"),
}


def collect_seldom(new_objects: int = 200_000) -> None:
    """Has this process look for garbage only after so many new objects. Imports and traces make many that live: to look
    through all of them took a tenth of the time."""
    gc.set_threshold(new_objects, 20, 50)


def environment_without_accelerators(folders: Iterable[str]) -> dict[str, str]:
    """The environment of a process that uses none of the accelerators here, and finds modules in `folders`, too."""
    absolute = (str(Path(folder).absolute()) for folder in folders)
    paths = (str(PACKAGE.parent), *absolute, os.environ.get("PYTHONPATH", ""))
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(filter(None, paths))),
        "JAX_PLATFORMS": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        **WITHOUT_TPU,
    }


def is_there(platform: str) -> bool:
    """Whether the machine shows a device of a platform: cpu, gpu or tpu."""
    return any(map(glob.glob, _DEVICE_FILES[platform]))


@contextlib.contextmanager
def unless_there(platform: str) -> Iterator[None]:
    """A context that drops what libraries write to stderr where it fails for want of a device.

    Where the machine shows one, everything is written at once.
    """
    if is_there(platform):
        yield
        return
    with capture_stderr() as lines:
        yield
    for line in lines:
        print(line, file=sys.stderr)


@contextlib.contextmanager
def capture_stderr() -> Iterator[list[str]]:
    """A context in which nothing that is written to stderr appears, be it Python or a library that writes it.

    When it ends, its value has the lines.
    """
    lines: list[str] = []
    stderr = os.dup(2)
    with tempfile.TemporaryFile() as written:
        os.dup2(written.fileno(), 2)
        try:
            yield lines
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            written.seek(0)
            lines += written.read().decode(errors="replace").splitlines()


@functools.cache
def import_jax() -> None:
    """Imports jax once, and hides the lines that its CUDA plugin writes on a machine without a GPU's driver.

    The plugin is also installed for foresight, on machines that never had a GPU.
    """
    plugins = [plugin for plugin in entry_points(group="jax_plugins") if plugin.name.startswith("xla_cuda")]
    if not plugins or os.path.exists("/dev/nvidiactl"):
        return
    written: list[str] = []
    try:
        with capture_stderr() as written:
            importlib.import_module("jax")
            for plugin in plugins:
                for library in Path(plugin.load().__file__).parent.glob("xla_*plugin.so"):
                    ctypes.CDLL(str(library))  # jax would load it later, with the first device
    finally:
        for line in written:
            if "cudart_stub" not in line and "before absl::InitializeLog()" not in line:
                print(line, file=sys.stderr)
