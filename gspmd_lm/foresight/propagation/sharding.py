"""The sharding of an array of a traced step, and the collectives that bring it to another sharding."""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jax.sharding import PartitionSpec

from gspmd_lm.hardware.network import sent_bytes
from gspmd_lm.sharding.sizes import element_bits

UNCONSTRAINED = PartitionSpec.UNCONSTRAINED  # what splits a dimension is left open

MeshAxes = tuple[str, ...]
Dims = tuple[MeshAxes, ...]  # of each dimension, the mesh axes that split it, the major one first


class ArraySharding(NamedTuple):
    """The reader's facts about an array: its sharding, and the mesh axes over which it is still a partial sum."""

    dims: Dims = ()
    unreduced: frozenset[str] = frozenset()
    is_constant: bool = False  # made of constants alone: each device makes what it needs
    loop_depth: int = 0  # how many of the loops around it change it; the collectives of others are hoisted
    identity: Any = None  # of its value: what is equal has one, and is brought to a sharding once
    scatter: Any = None  # the `ScatterAdd` that it is the result of

    @property
    def mesh_axes(self) -> frozenset[str]:
        """The mesh axes that split some dimension."""
        return axes_of(self.dims)

    def with_dims(self, dims: Iterable[MeshAxes]) -> "ArraySharding":
        """The same array, split by `dims`. It is no partial sum over a mesh axis that splits a dimension."""
        dims = tuple(dims)
        return self._replace(dims=dims, unreduced=self.unreduced - axes_of(dims), identity=None)

    def without_partial_sums(self) -> "ArraySharding":
        """The same sharding of an array that is no partial sum."""
        return self._replace(unreduced=frozenset()) if self.unreduced else self


class ScatterAdd(NamedTuple):
    """Rows that were added into an array of zeros: the rows can be sent where the sum is wanted, instead of the sum."""

    updates: Any  # their shape and dtype
    updates_sharding: ArraySharding
    indices: Any
    indices_sharding: ArraySharding
    dimension: Mapping[int, int]  # of the updates -> of the result, where a dimension is not looked up


class CollectiveCost(NamedTuple):
    """One collective: what one device sends."""

    kind: str
    mesh_axes: frozenset[str]
    bytes: float


def replicated_sharding(rank: int, is_constant: bool = False) -> ArraySharding:
    """The sharding of an array that every device has whole."""
    return ArraySharding(((),) * rank, is_constant=is_constant)


def axes_of(dims: Iterable[Sequence[str]]) -> frozenset[str]:
    """The mesh axes that split some dimension. A tuple of them is one of tuples."""
    return _axes_of(dims) if isinstance(dims, tuple) else frozenset(itertools.chain.from_iterable(dims))


@functools.lru_cache(maxsize=65536)
def _axes_of(dims: Dims) -> frozenset[str]:
    """See `axes_of`, which the reader asks several times of each array."""
    return frozenset(itertools.chain.from_iterable(dims))


def without(dims: Iterable[MeshAxes], dropped: Iterable[str]) -> Dims:
    """`dims` without some mesh axes."""
    dropped = frozenset(dropped)
    return tuple(tuple(name for name in names if name not in dropped) for names in dims)


def rank_of(aval: Any) -> int:
    """The number of dimensions; 0 for what is no array, such as a token of an effect."""
    return getattr(aval, "ndim", 0)


def is_empty(aval: Any) -> bool:
    """Whether an array has no elements, such as one of shape (0, 64)."""
    return 0 in getattr(aval, "shape", ())


def array_bytes(aval: Any) -> float:
    """The bytes of a whole array; of a random key, those of its words."""
    return math.prod(aval.shape) * element_bits(aval.dtype) / 8


class MeshShape(dict[str, int]):
    """Sizes by the name of a mesh axis, and the costs of collectives over these axes.

    The axes are the prime factors of those of the program, the major one first: tensor of size 8 is tensor/0, tensor/1
    and tensor/2. So a part of an axis can split a dimension, as where 8 split heads are 4 for each of 2 keys.
    """

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.factors = {name: _named_factors(name, size) for name, size in sizes.items()}
        self.axis = {part: name for name, parts in self.factors.items() for part in parts}  # of a factor
        super().__init__(part for parts in self.factors.values() for part in parts.items())

    def join_axes(self, joined: Mapping[str, MeshAxes]) -> None:
        """Names runs of axes, as another mesh of the program does: all of size 8 is data of size 4 and tensor of 2."""
        for name, axes in joined.items():
            self.factors.setdefault(name, {part: self[part] for part in self.parts(axes)})

    def parts(self, names: Iterable[str]) -> MeshAxes:
        """The factors of some axes of the program."""
        return tuple(part for name in names for part in self.factors[name])

    def dims(self, spec: Iterable[Any], rank: int, before: Dims = ()) -> Dims:
        """The factors that split each of `rank` dimensions, from a jax PartitionSpec.

        Where it leaves open what splits a dimension, that is what splits it `before`, if no other dimension has it.
        """
        entries = (*spec, *(None,) * rank)[:rank]
        said = [() if names is UNCONSTRAINED else names for names in entries]
        dims = [self.parts((names,) if isinstance(names, str) else names or ()) for names in said]
        taken = axes_of(dims)
        for d, names in enumerate(entries if before else ()):
            if names is UNCONSTRAINED:
                dims[d] = tuple(name for name in before[d] if name not in taken)
        return tuple(dims)

    def shards(self, names: Iterable[str]) -> int:
        """The number of shards that some mesh axes make together."""
        return math.prod([self[name] for name in names])

    def local_bytes(self, aval: Any, dims: Dims) -> float:
        """The bytes that one device holds of an array."""
        return array_bytes(aval) / self.shards(axes_of(dims))

    def label(self, names: Iterable[str]) -> str:
        """The axes of the program of which some factors are: 'fsdp+tensor'."""
        axes = {self.axis[name] for name in names}
        return "+".join(name for name in self.factors if name in axes)

    def cost(self, kind: str, names: Iterable[str], input_bytes: float, group: int = 0) -> list[CollectiveCost]:
        """The cost of one collective, of which a device hands in `input_bytes`; none where one device is alone.

        group: how many devices take part in it; 0 means all along these mesh axes.
        """
        names = frozenset(names)
        shards = group or self.shards(names)
        sent = sent_bytes(kind, input_bytes * (shards if kind == "all-gather" else 1), shards)
        return [CollectiveCost(kind, names, sent)] if shards > 1 and sent else []

    def reshard(
        self, size_bytes: float, source: Dims, target: Dims, unreduced: Iterable[str] = ()
    ) -> list[CollectiveCost]:
        """See `reshard`. A dimension of the array is known by its number."""
        return [*reshard(size_bytes, dict(enumerate(source)), dict(enumerate(target)), unreduced, self.shards)]


def reshard(
    size_bytes: float,
    source: Mapping[Any, Sequence[str]],
    target: Mapping[Any, Sequence[str]],
    unreduced: Iterable[str],
    shards: Callable[[Iterable[str]], int],
) -> Iterator[CollectiveCost]:
    """The collectives that bring an array of `size_bytes` from one sharding to another: dimension -> its mesh axes.

    A device first drops what its target shard does not have, which costs nothing. A partial sum is scattered over
    the mesh axes that split the target, and reduced to all over the others. A mesh axis that splits another dimension
    of the target is exchanged, and one that splits none of them is gathered. shards: into how many pieces mesh axes
    split an array.
    """
    source_axes, target_axes = axes_of(source.values()), axes_of(target.values())
    summed = frozenset(unreduced) - source_axes
    exchanged = frozenset(
        name
        for dimension, names in source.items()
        for name in names
        if name in target_axes and name not in target.get(dimension, ())
    )
    local_bytes = size_bytes / shards(source_axes | (target_axes - summed))
    for kind, over in (
        ("reduce-scatter", summed & target_axes),
        ("all-reduce", summed - target_axes),
        ("all-to-all", exchanged),
        ("all-gather", source_axes - target_axes),
    ):
        if (count := shards(over)) > 1:
            held_bytes = local_bytes * count if kind == "all-gather" else local_bytes
            if sent := sent_bytes(kind, held_bytes, count):
                yield CollectiveCost(kind, over, sent)
            local_bytes /= count if kind == "reduce-scatter" else 1


def _named_factors(name: str, size: int) -> dict[str, int]:
    """The prime factors of an axis, by name. One of a prime size, or of one device, is its own factor."""
    factors, rest = list[int](), size
    for prime in itertools.takewhile(lambda number: number * number <= size, itertools.count(2)):
        while rest % prime == 0:
            factors.append(prime)
            rest //= prime
    factors += [rest] if rest > 1 else []
    return {f"{name}/{n}": factor for n, factor in enumerate(factors)} if len(factors) > 1 else {name: size}


def total_bytes(costs: Iterable[CollectiveCost]) -> float:
    return sum(cost.bytes for cost in costs)
