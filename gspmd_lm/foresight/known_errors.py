"""The errors of predictions that were compared with measured runs of JAX and XLA, by the kind of program.

`python -m benchmarks.foresight times` makes the errors of published runs, and `python -m benchmarks.on_device` those of
runs on one GPU. benchmarks/known_runs.md lists both.
"""

import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gspmd_lm.hardware.chips import CHIPS
from gspmd_lm.hardware.target import Target
from gspmd_lm.sharding.rules import Rules

NOT_COMPARED = "not compared with any measurement"


class Kind(NamedTuple):
    """Predictions of one `Kind` have comparable errors: same chip, network, attention kernel and kind of model."""

    chip: str
    several: bool  # slices of TPUs, or hosts of GPUs
    attention: str  # the kernel
    experts: bool = False  # of a mixture
    alone: bool = False  # one GPU

    def __str__(self) -> str:
        gpu = CHIPS[self.chip].platform == "gpu"
        where = ("several hosts" if gpu else "several slices") if self.several else ("one host" if gpu else "one slice")
        where = "one GPU" if self.alone else where
        return f"{self.chip}, {where}, {self.attention} attention{', experts' * self.experts}"


# (predicted - published) / published of each run, and whether constants were fitted to it (True) or it was held out.
ERRORS: Mapping[Kind, tuple[tuple[float, bool], ...]] = {
    Kind("v6e", False, "splash"): ((-0.001, True), (-0.017, True), (-0.023, True), (-0.042, True), (-0.034, True)),
    Kind("v5p", False, "splash"): ((0.004, True), (-0.021, True), (-0.02, False)),
    Kind("v5e", False, "xla"): ((0.133, False), (-0.051, False)),
    Kind("tpu7x", False, "splash"): ((-0.027, True), (0.1, False)),
    Kind("h100", False, "cudnn"): ((-0.023, True),),
    Kind("h100", True, "cudnn"): ((-0.073, True), (-0.033, True), (-0.07, True)),
    Kind("h200", True, "cudnn"): ((0.056, True),),
    Kind("a100", True, "cudnn"): ((0.007, True), (-0.007, True)),
    Kind("v5e", True, "xla"): ((0.083, False), (0.089, False), (-0.096, False)),
    Kind("v5p", True, "splash"): ((-0.022, True), (-0.051, True)),
    Kind("v6e", False, "splash", True): ((-0.117, False),),
    Kind("tpu7x", False, "splash", True): ((-0.12, False), (-0.008, False)),
    Kind("v5p", False, "splash", True): ((-0.218, False),),
}

# The same of steps that benchmarks/on_device.py measured, on devices that worked alone: benchmarks/results. They were
# predicted before they ran. After that, constants were chosen with those in view that are marked.
MEASURED: Mapping[Kind, tuple[tuple[float, bool], ...]] = {
    Kind("h100", False, "cudnn", False, True): (
        (0.025, True),
        (0.091, True),
        (0.039, True),
        (0.042, True),
        (-0.026, True),
        (-0.022, True),
        (0.016, True),
        (-0.012, True),
        (0.002, True),
        (-0.028, True),
        (-0.029, True),
        (0.003, True),
        (-0.006, True),
        (0.009, True),
        (0.056, True),
        (0.037, True),
        (0.0, True),
        (-0.06, True),
        (-0.066, False),
        (-0.046, True),
    ),
    Kind("h100", False, "cudnn", True, True): (
        (-0.012, True),
        (0.021, True),
        (-0.064, True),
        (-0.104, True),
    ),
    Kind("h100", False, "xla", False, True): (
        (0.019, True),
        (-0.065, True),
        (-0.063, True),
    ),
    Kind("h200", False, "cudnn", False, True): (
        (-0.005, True),
        (-0.052, True),
        (-0.028, True),
        (-0.036, True),
        (0.009, True),
        (-0.072, True),
    ),
    Kind("h200", False, "cudnn", True, True): (
        (-0.04, True),
        (-0.083, True),
    ),
    Kind("h200", False, "xla", False, True): ((-0.136, True),),
}

# How far the estimates of `plan` are from compiled predictions: (chip, several) -> how many compiled layouts, and
# the mean error as a share. `python -m benchmarks.plan show` makes them of benchmarks/results/plan_rank.json.
ESTIMATES: Mapping[tuple[str, bool], tuple[int, float]] = {
    ("h100", False): (32, 0.044),
    ("h100", True): (16, 0.090),
    ("v5p", False): (31, 0.054),
    ("v6e", False): (15, 0.050),
    ("v6e", True): (15, 0.059),
    ("v5e", False): (15, 0.043),
}


def is_several(target: Target) -> bool:
    """Whether a target has several slices of TPUs, or several hosts of GPUs."""
    return target.slices > 1 if target.platform == "tpu" else target.platform == "gpu" and target.topology[0] > 1


def kind_of(target: Target, rules: Rules, experts: int) -> Kind:
    """The kind of a training step on a chip, of a model with so many experts."""
    assert target.chip
    alone = target.platform == "gpu" and target.devices == 1
    return Kind(target.chip.name, is_several(target), rules.kernel(target.platform), experts > 0, alone)


def estimate_error(target: Target) -> tuple[int, float] | None:
    """The number of compiled layouts that a target's estimates were compared with, and their mean error, or None."""
    return ESTIMATES.get((target.chip.name, is_several(target))) if target.chip else None


def known_error(kind: Kind) -> str:
    """How wrong predictions of this kind were; of others on the chip if there are none. One run is no measure."""
    runs, mean = _runs(kind), mean_error(kind)
    if mean is None:
        return NOT_COMPARED
    fitted = sum(is_fitted for _, is_fitted in runs)
    which = "it" if len(runs) == 1 else "all of them" if fitted == len(runs) else f"{fitted} of them"
    table = _table(kind)
    times = "measured step times" if table is MEASURED else "published step times"
    fit = f"; constants were fitted to {which}" if fitted else ""
    if kind not in table:
        others = f"{mean:.1%} in the mean of {len(runs)} other {times} on {kind.chip}"
        return f"not known for {kind}: {others}{fit}"
    if len(runs) == 1:
        return f"not known: {runs[0][0]:+.1%} for one {times.removesuffix('s')} on {kind}{fit}"
    return f"{mean:.1%} in the mean of {len(runs)} {times} on {kind}{fit}"


def mean_error(kind: Kind) -> float | None:
    """The mean absolute error of runs of this kind, or else of others on the chip; None if there are none."""
    errors = [abs(error) for error, _ in _runs(kind)]
    return statistics.mean(errors) if errors else None


def _runs(kind: Kind) -> Sequence[tuple[float, bool]]:
    table = _table(kind)
    return table.get(kind) or [run for other, runs in table.items() if other.chip == kind.chip for run in runs]


def _table(kind: Kind) -> Mapping[Kind, tuple[tuple[float, bool], ...]]:
    """Where runs like this kind stand: of a GPU alone those that were measured, if its chip has any."""
    return MEASURED if kind.alone and any(one.chip == kind.chip for one in MEASURED) else ERRORS
