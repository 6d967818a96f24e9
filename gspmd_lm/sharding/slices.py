"""Which axes of a mesh cross the slices of TPUs, between which the network is slow."""

import math
from collections.abc import Mapping

_INNER = "expert", "context", "tensor"  # they cross slices only where nothing else can, the last one last


def find_crossings(mesh: Mapping[str, int], slices: int) -> list[dict[str, int]]:
    """The ways in which a mesh can cross slices: mesh axis -> into how many parts they cut it.

    The stages of a pipeline cross as many as they can, and data the rest. Without stages, these are the ways to divide
    the slices over data and fsdp, from the least of data to the most of it.
    """
    stages, data, fsdp = (mesh.get(name, 1) for name in ("stage", "data", "fsdp"))
    if stages > 1:
        outer = math.gcd(stages, slices)
        parts = [{"stage": outer, "data": slices // outer}]
        fitting = [one for one in parts if data % one["data"] == 0]
    else:
        most = math.gcd(slices, data)
        parts = [{"data": n, "fsdp": slices // n} for n in range(1, most + 1) if most % n == 0]
        fitting = [one for one in parts if fsdp % one["fsdp"] == 0]
    return [{name: n for name, n in one.items() if n > 1} for one in fitting]


def choose_crossing(mesh: Mapping[str, int], slices: int) -> dict[str, int]:
    """The way in which a mesh crosses slices that sends least: the last one that `find_crossings` knows.

    Over data only the sums of gradients are sent. Another axis is taken where neither data nor fsdp divides; the result
    is empty where none does.
    """
    inner = [{name: slices} for name in _INNER if mesh.get(name, 1) % slices == 0]
    return next(iter([*reversed(find_crossings(mesh, slices)), *inner]), {})
