"""What a workbench computes: a config that its page may change, or a model or a step of one's own."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from gspmd_lm import config as configs
from gspmd_lm.config import Config

if TYPE_CHECKING:
    from gspmd_lm.foresight.any_step import Program
    from gspmd_lm.program.task import Task


@dataclasses.dataclass(frozen=True)
class Subject:
    """What is computed, as it is sent to the processes of jobs."""

    name: str
    load_config: Callable[[str, Sequence[str]], Config]  # a name in configs/ or a path, and overrides
    given: Any = None  # a Config or a Task of Python; a step, a function from devices to jax.jit(...).trace(...)
    program: str | None = None  # where a task or a step stands, such as train.py:TASK

    def resolve(self, config: str, overrides: Sequence[str]) -> "Config | Task | Program":
        """What is computed. Raises InputError where the config, or what stands at `program`, is wrong.

        config, overrides: those of the inputs of a workbench.
        """
        from gspmd_lm.foresight import any_step
        from gspmd_lm.program.task import Task

        given = any_step.find(self.program) if self.program else self.given
        if isinstance(given, Task):
            return given
        if isinstance(given, Config) and config == given.name:
            if not overrides:
                return given
            raw = configs.to_dict(given)
            configs.override(raw, overrides, given.name)
            return configs.from_dict(raw, given.name)
        if given is not None and not isinstance(given, Config):
            return any_step.Program(self.program or given)
        return self.load_config(config, overrides)
