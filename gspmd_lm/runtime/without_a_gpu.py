"""jax, imported without the lines that its CUDA plugin writes on a machine that has no GPU."""

import ctypes
import importlib
import os
import sys
from importlib.metadata import entry_points
from pathlib import Path

from gspmd_lm.runtime import quiet


def import_jax() -> None:
    """Imports jax, and hides the lines that its CUDA plugin writes on a machine without a GPU's driver.

    The plugin is also installed for foresight, on machines that never had a GPU.
    """
    plugins = [plugin for plugin in entry_points(group="jax_plugins") if plugin.name.startswith("xla_cuda")]
    if not plugins or os.path.exists("/dev/nvidiactl"):
        return
    written: list[str] = []
    try:
        with quiet.held() as written:
            importlib.import_module("jax")
            for plugin in plugins:
                for library in Path(plugin.load().__file__).parent.glob("xla_*plugin.so"):
                    ctypes.CDLL(str(library))  # jax would load it later, with the first device
    finally:
        for line in written:
            if "cudart_stub" not in line and "before absl::InitializeLog()" not in line:
                print(line, file=sys.stderr)
