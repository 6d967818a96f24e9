"""Rules and devices -> a jax Mesh."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from gspmd_lm.rules import Problem, Rules, check


def build(rules: Rules, devices: Sequence[Any]) -> Mesh:
    """The mesh of `rules`, already filled, over exactly as many `devices` (real, simulated or compile-only).

    Simulated devices keep their order, the last mesh axis varying fastest; accelerators are ordered so that mesh axes
    follow the physical topology. `rules.dcn` says which part of an axis crosses slices or hosts.

    Raises ShardingError for several slices of TPU that `rules.dcn` does not fit.
    """
    assert rules.devices == len(devices), (rules.mesh, len(devices))
    shape = tuple(rules.mesh.values())
    slices = len({getattr(device, "slice_index", None) or 0 for device in devices})
    if slices > 1 and math.prod(rules.dcn.values()) != slices:
        axis = next((name for name, size in rules.mesh.items() if size % slices == 0), next(iter(rules.mesh)))
        message = f"dcn: the devices are {slices} slices, the rules say {math.prod(rules.dcn.values())}"
        place = f"{rules.path}: dcn: {dict(rules.dcn)}"
        check([Problem(message, place, f"say which mesh axis crosses them, such as dcn: {{{axis}: {slices}}}")])
    if devices[0].platform == "cpu" or len(devices) == 1:
        grid = np.array(devices).reshape(shape)
    elif rules.dcn:
        across = tuple(rules.dcn.get(name, 1) for name in rules.mesh)
        within = tuple(size // outer for size, outer in zip(shape, across, strict=True))
        grid = mesh_utils.create_hybrid_device_mesh(
            within,
            across,
            devices,
            process_is_granule=slices == 1,  # GPU hosts all say slice 0
            allow_split_physical_axes=True,
        )
    else:
        grid = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    return Mesh(grid, tuple(rules.mesh), axis_types=(AxisType.Auto,) * len(shape))


def platform(mesh: Mesh) -> str:
    """cpu, gpu or tpu, as rules files call them; jax says cuda and rocm of devices that are compiled for only."""
    found = str(mesh.devices.flat[0].platform)
    return {"cuda": "gpu", "rocm": "gpu"}.get(found, found)
