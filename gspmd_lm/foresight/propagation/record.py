"""What is noted while a step is read, and what the result says of it."""

import collections
import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp

from gspmd_lm.foresight.propagation.saved import SavedValues
from gspmd_lm.foresight.propagation.sharding import ArraySharding

_TRIFLE = 0.01  # of all bytes


class Transfer(NamedTuple):
    """One collective of the step: an array on its way from one sharding to another."""

    array: str  # where in the model: layers.attention.wq, residual, loss
    shape: tuple[int, ...]
    dtype: str
    source_sharding: str  # fsdp,-,tensor; '+fsdp' behind it is a partial sum over fsdp
    target_sharding: str
    kind: str  # all-gather, reduce-scatter, all-reduce, all-to-all, collective-permute
    mesh_axes: str  # fsdp, or fsdp+tensor
    bytes: float  # what one device sends each time
    times_per_step: int
    phase: str  # forward, backward, recomputation, optimizer
    source: str  # file:line
    chosen: bool  # by the reader, between ways to compute an operation whose operands do not fit each other

    @property
    def bytes_per_step(self) -> float:
        return self.bytes * self.times_per_step


@dataclasses.dataclass(frozen=True)
class ArrayTransfers:
    """What one device sends of one array, or for several together, in one phase of a step."""

    array: str  # where in the model, as `Collective.op` has it: layers.attention.wq+wk+wv, residual, loss
    phase: str
    mesh_axes: str
    kind: str
    times_per_step: int
    bytes_per_device_per_step: int


@dataclasses.dataclass
class Record:
    """What was noted so far."""

    transfers: list[Transfer] = dataclasses.field(default_factory=list)
    flops: dict[str, float] = dataclasses.field(default_factory=dict)  # of one device, by phase
    unknown: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    # An array's identity -> the shardings in which devices have it already.
    copies: dict[Any, tuple[ArraySharding, ...]] = dataclasses.field(default_factory=dict)
    # The identity of rows that are added to tables -> what was sent of the tables, in place of the rows.
    sums: dict[Any, list[Transfer]] = dataclasses.field(default_factory=dict)
    values: SavedValues = dataclasses.field(default_factory=SavedValues)

    @property
    def sent_bytes(self) -> float:
        return sum(transfer.bytes_per_step for transfer in self.transfers)

    def add(self, other: "Record") -> None:
        self.transfers += other.transfers
        for phase, flops in other.flops.items():
            self.flops[phase] = self.flops.get(phase, 0.0) + flops
        self.unknown += other.unknown
        self.copies = other.copies
        self.values.update(other.values)


@dataclasses.dataclass(frozen=True)
class Reading:
    """What one device sends and computes in a step, as its traced program says.

    `unknown` names what the reader has no rule for, and how often the program has it. The operands of such a primitive
    are counted as gathered, the body of a `while` as run once.
    """

    transfers: tuple[Transfer, ...]
    flops_by_phase: Mapping[str, float]
    unknown: Mapping[str, int]
    model_flops: float = 0.0  # of all devices, recomputation not counted, nor kernels that the program calls
    saved_bytes: float = 0.0  # of one device: what it must keep of the forward pass for the backward pass
    held_bytes: float = 0.0  # of one device: the arguments that it must read, and the results that it must write

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> "Reading":
        """The reading of which `values` are what `dataclasses.asdict` made, once it was written as JSON."""
        transfers = tuple(Transfer(*one)._replace(shape=tuple(one[1])) for one in values["transfers"])
        return cls(**{**values, "transfers": transfers})

    @functools.cached_property
    def bytes_by_axes(self) -> dict[str, float]:
        """Mesh axes -> the bytes that one device sends over them in a step."""
        total: dict[str, float] = collections.defaultdict(float)
        for transfer in self.transfers:
            total[transfer.mesh_axes] += transfer.bytes_per_step
        return dict(total)

    @functools.cached_property
    def by_array(self) -> tuple[ArrayTransfers, ...]:
        """The transfers that agree in all but size, added up, those that send most first."""
        alike: dict[tuple[str, str, str, str], list[Transfer]] = collections.defaultdict(list)
        for one in self.transfers:
            alike[one.array, one.phase, one.mesh_axes, one.kind].append(one)
        totals = [
            ArrayTransfers(
                *key, sum(one.times_per_step for one in group), round(sum(one.bytes_per_step for one in group))
            )
            for key, group in alike.items()
        ]
        return tuple(sorted(totals, key=lambda one: -one.bytes_per_device_per_step))

    @property
    def communication_bytes(self) -> float:
        """The bytes that one device sends in a step."""
        return sum(transfer.bytes_per_step for transfer in self.transfers)

    @property
    def chosen_bytes(self) -> float:
        """The part of `communication_bytes` that follows from the reader's choice between ways to compute."""
        return sum(transfer.bytes_per_step for transfer in self.transfers if transfer.chosen)

    @property
    def is_bound(self) -> bool:
        """Whether `communication_bytes` is a lower bound; else it is an estimate.

        It is one if the program says how arrays are sharded, but for trifles such as the integers of a look-up.
        """
        return not self.estimated_because

    @property
    def estimated_because(self) -> str:
        """Why `communication_bytes` is an estimate; '' if it is a lower bound."""
        if self.unknown:
            return f"there is no rule for {', '.join(self.unknown)}"
        is_open = self.chosen_bytes > _TRIFLE * self.communication_bytes
        return "the program does not say how all arrays are sharded" if is_open else ""

    def bytes_if_wider(self, itemsize: int) -> float:
        """The bytes that one device sends in a step if no element has fewer bytes than `itemsize`."""
        return sum(
            transfer.bytes_per_step * max(1.0, itemsize / jnp.dtype(transfer.dtype).itemsize)
            for transfer in self.transfers
        )

    @property
    def flops(self) -> float:
        """The FLOPs of the matmuls, convolutions and kernels of one device, recomputation included."""
        return sum(self.flops_by_phase.values())
