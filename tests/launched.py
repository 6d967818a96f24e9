"""Python code in a process of its own, in an environment without anything that decides where jax runs.

And what would compile in a process of its own, here.
"""

import os
import subprocess
import sys
from pathlib import Path

import jax

from gspmd_lm.foresight import compile

ROOT = Path(__file__).parent.parent
FROM_OUTSIDE = ("JAX_", "PJRT_", "NPROC", "XLA_", "SLURM_", "OMPI_", "GSPMD_", "CUDA_", "KUBERNETES", "JOB_COMPLETION")


def launch(code: str, **env: str) -> subprocess.Popen:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(FROM_OUTSIDE)}
    pipe = subprocess.PIPE
    # Imports take a sixth less time.
    code = f"from gspmd_lm.runtime.quiet import collect_seldom; collect_seldom()\n{code}"
    return subprocess.Popen(
        [sys.executable, "-c", code], env=clean | {"PYTHONPATH": str(ROOT)} | env, stdout=pipe, stderr=pipe, text=True
    )


def output(process: subprocess.Popen, timeout_s: float = 300) -> tuple[str, str]:
    try:
        out, err = process.communicate(timeout=timeout_s)
    finally:
        process.kill()
    assert process.returncode == 0, err
    # jax's CUDA plugin, which is there to compile with, says that it found no driver.
    noise = ("cudart_stub", "before absl::InitializeLog()")
    return out, "".join(line for line in err.splitlines(True) if not any(words in line for words in noise))


def compiled_here(request: compile.CompileRequest, folder: Path, elsewhere=compile._run_compiler) -> None:
    """Stands in for compile._run_compiler: this process compiles for its own simulated devices, and starts none."""
    if request.target.platform != "cpu" or request.target.devices != jax.device_count() or request.export:
        elsewhere(request, folder)
    else:
        compile._compile(request, folder)
