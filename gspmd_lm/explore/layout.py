"""A layout that has passed all checks, with what is worked out of it."""

import dataclasses
from collections.abc import Sequence

from gspmd_lm.hardware.target import Target
from gspmd_lm.plan.estimate import Estimate, Estimator
from gspmd_lm.program.task import Task
from gspmd_lm.sharding.problems import Problem
from gspmd_lm.sharding.rules import Rules
from gspmd_lm.sharding.shapes import Arrays


@dataclasses.dataclass(frozen=True)
class Layout:
    """A layout that has passed all checks, with its estimate."""

    task: Task
    target: Target
    rules: Rules  # filled
    arrays: Arrays
    warnings: Sequence[Problem]
    estimator: Estimator
    estimate: Estimate
    not_known: tuple[str, ...]  # what cannot be estimated, and why
