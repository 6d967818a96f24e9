"""The arrays in the shape of an instruction: their types, sizes, memories and bytes."""

import dataclasses
import functools
import math
import re

from gspmd_lm.units import bits

ARRAY = re.compile(r"([a-z]\w*)\[([^\]]*)\](?:\{((?:[^{}]|\{[^{}]*\})*)\})?")
_MEMORY_SPACE = re.compile(r"S\((\d+)\)")
_TILED = re.compile(r"([\d,]*):.*?T\((\d+(?:,\d+)*)\)")
HOST_SPACE = 5  # the memory space of the host in layouts of TPU programs
# The memories of a TPU, by the number that layouts have for them. On-chip memory is 3 in programs for v4.
MEMORIES = {0: "hbm", 1: "chip", 3: "chip", HOST_SPACE: "host"}


@dataclasses.dataclass(frozen=True)
class Array:
    """One array of a shape. `memory_space` is the n in S(n) of its layout, and 0 without one: see `MEMORIES`."""

    dtype: str
    dimensions: tuple[int, ...]
    memory_space: int = 0
    layout: str = ""

    @property
    def elements(self) -> int:
        return math.prod(self.dimensions)

    @property
    def bytes(self) -> int:
        """The bytes of the array, without the padding of tiles."""
        return math.ceil(self.elements * bits(self.dtype) / 8)

    @property
    def padded_bytes(self) -> int:
        """The bytes of the array in memory. A tiled TPU layout, such as T(8,128), is filled up to whole tiles."""
        tiled = _TILED.match(self.layout)
        if not tiled or not self.dimensions:
            return self.bytes
        order = [int(n) for n in tiled.group(1).split(",") if n] or list(reversed(range(len(self.dimensions))))
        tile = [int(n) for n in tiled.group(2).split(",")]
        sizes = [self.dimensions[n] for n in order]  # the fastest dimension first
        for n, size in enumerate(reversed(tile[-len(sizes) :])):
            sizes[n] = -(-sizes[n] // size) * size
        return math.ceil(math.prod(sizes) * bits(self.dtype) / 8)


@dataclasses.dataclass(frozen=True)
class Shape:
    """A shape as the program writes it."""

    text: str

    @functools.cached_property
    def arrays(self) -> tuple[Array, ...]:
        """All arrays of the shape, with tuples flattened."""
        return tuple(_array(match) for match in ARRAY.finditer(self.text))

    @property
    def bytes(self) -> int:
        return sum(array.bytes for array in self.arrays)


def _array(match: re.Match) -> Array:
    dtype, sizes, layout = match.groups(default="")
    space = _MEMORY_SPACE.search(layout)
    dimensions = tuple(int(size.strip(" <=")) for size in sizes.split(",") if size.strip())
    return Array(dtype, dimensions, int(space.group(1)) if space else 0, layout)
