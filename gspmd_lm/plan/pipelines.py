"""The pipelines that a layout with stages is tried with: microbatches, repeats, and when weights are gathered.

More microbatches and repeats make the bubble shorter, and smaller products, more exchanges and more gathers make the
turns slower. Weights that are gathered once in a step take memory. Choices are estimated with `remat: block`, and few
of them are tried with other policies.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from gspmd_lm.hardware.target import Target
from gspmd_lm.model.task import Task
from gspmd_lm.plan.estimate import Estimate

Pipeline = dict[str, Any]  # as a rules file says it
Estimates = Callable[[Pipeline], Estimate | None]  # None where a check of the rules refuses it

MOST_STAGES = 16
MICROBATCHES = (1, 2, 4, 8)  # times as many as stages
REPEATS = (1, 2, 4)


def stage_counts(task: Task, target: Target) -> list[int]:
    """Into how many stages the layers of a task may be cut. Simulated devices have no times, so no bubbles either."""
    most = math.gcd(layers(task), target.devices) if target.chip else 1
    return [n for n in range(1, min(most, MOST_STAGES) + 1) if most % n == 0]


def layers(task: Task) -> int:
    """How many pieces the layers that can be cut in stages have: one for each turn of their pattern.

    Layers that share their weights cannot be cut, nor can those of two stacks or of several widths.
    """
    model = task.config and task.config.model
    whole = model and (model.shared_layers or model.encoder or model.vision or model.windows)
    cut = model and task.names.stages and not whole
    stacks = model.stacks if model and cut else ()
    return next((stack.scanned // len(stack.kinds) for stack in stacks if stack.name == task.names.stages), 1)


def across(target: Target, outer: int, mesh: Mapping[str, int]) -> list[dict[str, int]]:
    """Which parts of a mesh with stages cross `outer` slices or hosts: the stages, and data for those that are left."""
    stages, data = mesh["stage"], mesh.get("data", 1)
    if outer == 1 or target.platform == "gpu":  # hosts follow the order of devices, in which stages are the outermost
        return [{}] if math.gcd(stages * data, outer) == outer else []
    of_stages = math.gcd(stages, outer)
    if data % (outer // of_stages):
        return []
    return [{name: n for name, n in (("stage", of_stages), ("data", outer // of_stages)) if n > 1}]


def worth_trying(task: Task, mesh: Mapping[str, int], estimate: Estimates, limit_bytes: float) -> list[Pipeline]:
    """For each way to gather weights, the pipeline of a mesh that is estimated to be fastest of those that fit.

    Microbatches are chosen first, then repeats. Where nothing fits, what needs least memory is chosen.
    """
    stages, shards = mesh["stage"], math.prod(mesh.get(name, 1) for name in ("data", "fsdp", "expert"))
    assert task.config
    model = task.config.model
    alone = model.experts or model.matmul_dtype or shards == 1

    def best(choices: Iterable[Pipeline]) -> Pipeline | None:
        estimated = [(found, one) for one in choices if (found := estimate(one))]
        fitting = [(found.step_time_s, n) for n, (found, _) in enumerate(estimated) if found.peak_bytes <= limit_bytes]
        least = [(found.peak_bytes, n) for n, (found, _) in enumerate(estimated)]
        return estimated[min(fitting or least)[1]][1] if estimated else None

    microbatches = [times * stages for times in MICROBATCHES if task.rows % (times * stages * shards) == 0]
    repeats = [n for n in REPEATS if layers(task) % (stages * n) == 0]
    first = best({"microbatches": n} for n in microbatches)
    if first is None:
        return []
    chosen = best([first, *({**first, "repeats": n} for n in repeats if n > 1)]) or first
    return [chosen, *([] if alone else [{**chosen, "gather": "step"}])]
