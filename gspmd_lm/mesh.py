"""Rules and devices -> a jax Mesh."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from gspmd_lm.rules import Rules


def build(rules: Rules, devices: Sequence[Any]) -> Mesh:
    """The mesh of `rules`, already filled, over exactly as many `devices` (real, simulated or compile-only).

    Simulated devices keep their order, the last mesh axis varying fastest; accelerators are ordered so that mesh axes
    follow the physical topology. `rules.dcn` says which part of an axis crosses slices or hosts.
    """
    assert rules.devices == len(devices), (rules.mesh, len(devices))
    shape = tuple(rules.mesh.values())
    if devices[0].platform == "cpu" or len(devices) == 1:
        grid = np.array(devices).reshape(shape)
    elif rules.dcn:
        across = tuple(rules.dcn.get(name, 1) for name in rules.mesh)
        within = tuple(size // outer for size, outer in zip(shape, across, strict=True))
        grid = mesh_utils.create_hybrid_device_mesh(
            within,
            across,
            devices,
            process_is_granule=getattr(devices[0], "slice_index", None) in (None, 0)
            and len({getattr(device, "slice_index", 0) for device in devices}) == 1,  # GPU hosts all say slice 0
            allow_split_physical_axes=True,
        )
    else:
        grid = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    return Mesh(grid, tuple(rules.mesh), axis_types=(AxisType.Auto,) * len(shape))
