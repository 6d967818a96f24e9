"""Options that have the CPU's compiler take a fifth of its time. What is computed is the same up to rounding."""

import json
from importlib.metadata import version

QUICK: dict[str, bool | int] = {"xla_backend_optimization_level": 0, "xla_cpu_parallel_codegen_split_count": 1}
if tuple(map(int, version("jax").split(".")[:2])) < (0, 11):  # later ones have no other emitters
    QUICK["xla_cpu_use_fusion_emitters"] = False
XLA_FLAGS = " ".join(f"--{name}={json.dumps(value)}" for name, value in QUICK.items())
# The same for a command, whose processes get no XLA_FLAGS from tests.
QUICK_FLAGS = tuple(f"--set=rules.compiler_options.cpu.{name}={json.dumps(value)}" for name, value in QUICK.items())
