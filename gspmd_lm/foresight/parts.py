"""The parts of a step's time, and where one layout takes longer than another."""

from collections.abc import Mapping
from typing import Protocol

from gspmd_lm.units import human_seconds


class Parts(Protocol):
    """What a prediction and an estimate both know: the seconds of each part of a step."""

    @property
    def matmul_s(self) -> float: ...
    @property
    def attention_s(self) -> float: ...
    @property
    def other_s(self) -> float: ...
    @property
    def exposed_by_axis(self) -> Mapping[str, float]: ...
    @property
    def exposed_host_copy_s(self) -> float: ...


def parts_s(known: Parts) -> dict[str, float]:
    """The seconds of each part of a step, under names for sentences."""
    waits = {f"waiting for {axes}": seconds for axes, seconds in known.exposed_by_axis.items()}
    return {
        "matmuls": known.matmul_s,
        "attention": known.attention_s,
        "other compute": known.other_s,
        **waits,
        "waiting for copies to the host": known.exposed_host_copy_s,
    }


def differences(best: Parts, other: Parts, step_s: float) -> str:
    """Where `other` takes longer than `best`, and where less: 'waiting for fsdp +12 ms, matmuls -3 ms'.

    Parts that differ by less than a thousandth of `step_s` are left out.
    """
    parts_of_best, parts_of_other = parts_s(best), parts_s(other)
    gaps = {
        name: parts_of_other.get(name, 0.0) - parts_of_best.get(name, 0.0) for name in (*parts_of_best, *parts_of_other)
    }
    shown = sorted((gap, name) for name, gap in gaps.items() if abs(gap) > 0.001 * step_s)
    longer = [f"{name} +{human_seconds(gap)}" for gap, name in reversed(shown) if gap > 0]
    shorter = [f"{name} -{human_seconds(-gap)}" for gap, name in shown if gap < 0]
    return ", ".join([*longer, *shorter]) or "no part differs by more than a thousandth of the step"
