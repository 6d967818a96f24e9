"""The jax Mesh of a rules file and devices."""

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from gspmd_lm.hardware.chips import Processor, chip_of, platform_of
from gspmd_lm.sharding.problems import Problem, check
from gspmd_lm.sharding.rules import Rules, describe_mesh
from gspmd_lm.sharding.slices import choose_crossing
from gspmd_lm.units import plural


def build(rules: Rules, devices: Sequence[Any]) -> Mesh:
    """The mesh of filled `rules` over exactly as many `devices`, which may be real, simulated or compile-only.

    Simulated devices keep their order, and the last mesh axis varies fastest. Accelerators are ordered so that mesh
    axes follow the physical topology. `rules.dcn` says which part of an axis crosses slices or hosts; where it is
    empty, `cross_slices` chooses it.

    Raises ShardingError if `rules.dcn` does not fit the slices of the devices, or their hosts where there is one slice.
    """
    assert rules.devices == len(devices), (rules.mesh, len(devices))
    slices = count_slices(devices)
    rules = cross_slices(rules, slices)
    shape = tuple(rules.mesh.values())
    if slices > 1:
        _check_dcn(rules, slices, "slice")
    elif rules.dcn and devices[0].platform != "cpu":
        _check_dcn(rules, len({device.process_index for device in devices}), "host")
    if devices[0].platform == "cpu" or len(devices) == 1:
        grid = np.array(devices).reshape(shape)
    elif rules.dcn:
        across = tuple(rules.dcn.get(name, 1) for name in rules.mesh)
        within = tuple(size // outer for size, outer in zip(shape, across, strict=True))
        grid = mesh_utils.create_hybrid_device_mesh(
            within,
            across,
            devices,
            process_is_granule=slices == 1,  # every GPU host reports slice 0
            allow_split_physical_axes=True,
        )
    else:
        grid = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    return Mesh(grid, tuple(rules.mesh), axis_types=(AxisType.Auto,) * len(shape))


def _check_dcn(rules: Rules, count: int, what: str) -> None:
    """Raises ShardingError if `rules.dcn` cuts the mesh into another number of parts than `count` slices or hosts."""
    parts = math.prod(rules.dcn.values())
    if parts == count:
        return
    axis = next((name for name, size in rules.mesh.items() if size % count == 0), next(iter(rules.mesh)))
    message = f"dcn: the devices are {plural(count, what)}, the rules say {parts}"
    fix = f"say which mesh axis crosses them, such as --set rules.dcn.{axis}={count}"
    if not rules.dcn:
        message = f"dcn: no axis of the mesh can cross {plural(count, what)}"
        fix = f"a mesh with data={count}, say"
    elif count == 1:
        fix = "--set rules.dcn={}"
    elif what == "slice":
        fix = "--set rules.dcn=auto chooses the mesh axis that crosses them"
    check([Problem(message, rules.place("dcn", dict(rules.dcn)), fix)])


def cross_slices(rules: Rules, slices: int, say: Callable[[str], None] = lambda _: None) -> Rules:
    """Filled rules that say which mesh axis crosses the slices of TPUs, as plans choose it; the same if they said it.

    They stay as they are, too, where there is one slice, or where no axis can cross so many. `say` is told what was
    chosen.
    """
    if slices == 1 or rules.dcn:
        return rules
    chosen = choose_crossing(rules.mesh, slices)
    if chosen:
        say(f"{rules.label}: {describe_mesh(chosen)} crosses the {slices} slices (dcn)")
    return dataclasses.replace(rules, dcn=chosen)


def count_slices(devices: Sequence[Any]) -> int:
    """The number of slices of TPUs; 1 for other devices."""
    return len({getattr(device, "slice_index", None) or 0 for device in devices})


def platform(mesh: Mesh) -> str:
    """cpu, gpu or tpu, as in a rules file."""
    return platform_of(mesh.devices.flat[0])


def processor(device: Any) -> Processor:
    """The facts about a jax device that decide which kernels it can run."""
    name = platform_of(device)
    version = str(getattr(device, "compute_capability", "")) if name == "gpu" else ""
    capability = tuple(map(int, version.split("."))) if re.fullmatch(r"\d+\.\d+", version) else (0, 0)
    chip = chip_of(device.device_kind)
    return Processor(name, chip.name if chip else device.device_kind, capability if name == "gpu" else (), chip)
