"""The meshes of a step of one's own, and the axes of one of them that the others join."""

import itertools
import operator
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gspmd_lm.errors import InputError

JoinedAxes = Mapping[str, tuple[str, ...]]  # the name of an axis of any mesh -> axes of the mesh that all are read in


def find_meshes(shardings: Iterable[Any], equations: Iterable[Any]) -> Iterator[Any]:
    """The meshes whose axes split an array: of shardings, of those that operations have, and of each `shard_map`."""
    said = [*shardings]
    for equation in equations:
        for param in equation.params.values():
            said += param if isinstance(param, tuple) else [param]
        if equation.primitive.name == "shard_map":
            yield equation.params["mesh"]
    yield from (one.mesh for one in said if isinstance(one, NamedSharding) and any(one.spec))


def choose_mesh(mesh: Mesh, others: Iterable[Any]) -> Mesh:
    """The mesh that has most axes; of several, the first. It has the devices of `mesh`."""
    alike = [mesh, *(one for one in others if one.size == mesh.size)]
    finest = max(alike, key=lambda one: sum(size > 1 for size in one.shape.values()))
    return finest if isinstance(finest, Mesh) else Mesh(mesh.devices.reshape(finest.axis_sizes), finest.axis_names)


def join_axes(mesh: Mesh, others: Iterable[Any], name: str) -> JoinedAxes:
    """The axes of `mesh` that each axis of any mesh stands for. jax sees to it that all list the same devices.

    Raises InputError where an axis joins a part of another one, or where one name means different axes.
    """
    joined: dict[str, tuple[str, ...]] = {}
    for other in (mesh, *others):
        left = [axis for axis, size in mesh.shape.items() if size > 1]
        runs: dict[str, tuple[str, ...]] = {}
        for axis, size in other.shape.items():
            sizes = [*itertools.accumulate((mesh.shape[one] for one in left), operator.mul, initial=1)]
            count = sizes.index(size) if size in sizes else 0
            runs[axis], left = (*left[:count],), left[count:]
        if left or any(joined.setdefault(axis, run) != run for axis, run in runs.items()):
            raise InputError(
                f"{name}: its meshes ({say_sizes(mesh)}) and ({say_sizes(other)}) cannot be read as one: an axis of "
                "the second joins no whole neighbouring axes of the first, or has the name of another axis\n"
                "  fix   one mesh for the whole step; a sharding may join several of its axes, as in "
                'PartitionSpec(("data", "tensor"))'
            )
    return joined


def say_sizes(mesh: Any) -> str:
    """The axes of a mesh: data=4, tensor=2."""
    return ", ".join(f"{axis}={size}" for axis, size in mesh.shape.items())


def place_on(mesh: Mesh, sharding: NamedSharding, joined: JoinedAxes) -> NamedSharding:
    """The same sharding, said in the axes of `mesh`."""
    if sharding.mesh.shape_tuple == mesh.shape_tuple:
        return sharding
    names = [(entry,) if isinstance(entry, str) else entry or () for entry in sharding.spec]
    spec = PartitionSpec(*[tuple(one for axis in entry for one in joined[axis]) for entry in names])
    return NamedSharding(mesh, spec, memory_kind=sharding.memory_kind)
