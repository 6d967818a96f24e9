"""A language model written once for one device, laid out over many by a small YAML file.

The names below are for programs; `import gspmd_lm` imports neither them nor jax before they are used. What is computed
is a config of the decoder (`load_config`) or a model of one's own (`Task`); docs/your_own_model.md shows the latter.
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gspmd_lm.api import (
        build,
        checkpoints,
        compare,
        compare_rows,
        dry_run,
        explain,
        explore,
        load,
        load_config,
        load_rules,
        load_task,
        plan,
        show,
        start,
        train,
    )
    from gspmd_lm.errors import InputError, RunFailed
    from gspmd_lm.program.task import Generation, Input, Task
    from gspmd_lm.sharding.annotate import parameter, shard, use
    from gspmd_lm.sharding.names import Vocabulary
    from gspmd_lm.versions import __version__ as __version__

__all__ = [
    "Generation",
    "Input",
    "InputError",
    "RunFailed",
    "Task",
    "Vocabulary",
    "build",
    "checkpoints",
    "compare",
    "compare_rows",
    "dry_run",
    "explain",
    "explore",
    "load",
    "load_config",
    "load_rules",
    "load_task",
    "parameter",
    "plan",
    "shard",
    "show",
    "start",
    "train",
    "use",
]

_MODULES = {
    "api": "build checkpoints compare compare_rows dry_run explain explore load load_config load_rules load_task plan "
    "show start train",
    "errors": "InputError RunFailed",
    "sharding.annotate": "parameter shard use",
    "program.task": "Generation Input Task",
    "sharding.names": "Vocabulary",
    "versions": "__version__",
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names.split():
            return getattr(importlib.import_module(f"gspmd_lm.{module}"), name)
    raise AttributeError(f"module 'gspmd_lm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__]


class _Package(ModuleType):
    """This package, of which `train` is the function, though a folder has its name too."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _MODULES["api"].split():  # Python sets each folder when it is imported
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
