"""The notes that the reader takes of a step, and the result of reading."""

import collections
import copy
import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from gspmd_lm.foresight.propagation.sharding import ArraySharding

_TRIFLE = 0.01  # of all bytes
_OF_BACKWARD = ("backward", "recomputation")
UNKNOWN_TRIP_COUNT = "the trip count of a while loop"  # is noted where a program does not say it
_MOST = 2**31 - 1  # scipy's flows are int32
_BEGIN, _END = 0, 1


class Transfer(NamedTuple):
    """One collective of the step: an array on its way from one sharding to another."""

    array: str  # where in the model: layers.attention.wq, residual, loss
    shape: tuple[int, ...]
    dtype: str
    element_bits: int  # the size of an element of this dtype
    kind: str  # all-gather, reduce-scatter, all-reduce, all-to-all, collective-permute
    mesh_axes: str  # fsdp, or fsdp+tensor
    bytes: float  # what one device sends each time
    times_per_step: int
    phase: str  # forward, backward, recomputation, optimizer
    chosen: bool  # by the reader, between ways to compute an operation whose operands do not fit each other
    source: str = ""  # the line of the model: gspmd_lm/model/mlp.py:50

    @property
    def bytes_per_step(self) -> float:
        return self.bytes * self.times_per_step


@dataclasses.dataclass(frozen=True)
class ArrayTransfers:
    """The transfers of one device for one array, or for several together, in one phase of a step."""

    array: str  # where in the model, as `Collective.op` has it: layers.attention.wq+wk+wv, residual, loss
    phase: str
    mesh_axes: str
    kind: str
    times_per_step: int
    bytes_per_device_per_step: int


@dataclasses.dataclass
class SavedValues:
    """Values of a step by identity, what they are made from, and which of them wait for the backward pass.

    An early value belongs to the forward pass, or can be made from such values and arguments of the step again.
    Matmuls, convolutions, kernels and loops are not done again, all other operations may be. A late value is one of the
    backward pass. An early value that a late operation reads waits for it in one of these cases:

      The value is stacked by a loop, whose other iterations come before it is read.
      The operation also reads what other matmuls have made since.
      The operation computes again what the program has already computed.

    Values that the table does not have are arguments of the step, or what a loop is given.
    """

    # How many matmuls, kernels and loops lie on the longest way to a value.
    depth: dict[Any, int] = dataclasses.field(default_factory=dict)
    # An early value -> from what it can be made again; None where it is not made again.
    made_from: dict[Any, tuple[Any, ...] | None] = dataclasses.field(default_factory=dict)
    local_bytes: dict[Any, float] = dataclasses.field(default_factory=dict)  # on one device, in a step
    stacked: set[Any] = dataclasses.field(default_factory=set)  # by a loop
    late: set[Any] = dataclasses.field(default_factory=set)
    waiting: set[Any] = dataclasses.field(default_factory=set)

    def add(
        self, phase: str, operands: Sequence[Any], results: Iterable[tuple[Any, float]], is_repeatable: bool
    ) -> None:
        """Notes an operation by the identities of its operands and of its results, the results with their bytes."""
        depth = max((self.depth.get(one, 0) for one in operands), default=0)
        is_late = not self.late.isdisjoint(operands) or (phase in _OF_BACKWARD and not is_repeatable)
        if is_late and phase in _OF_BACKWARD:
            self.waiting.update(
                one
                for one in operands
                if one in self.made_from
                and (phase == "recomputation" or one in self.stacked or self.depth[one] < depth)
            )
        for result, size in results:
            if result in self.depth:  # it is brought to another sharding, or is the same as another value
                self.local_bytes[result] = min(self.local_bytes.get(result, size), size)
            elif result not in operands:  # of the arguments
                self.depth[result] = depth + (not is_repeatable)
                self.local_bytes[result] = size
                if is_late:
                    self.late.add(result)
                else:
                    self.made_from[result] = tuple(operands) if is_repeatable else None

    def link(self, value: Any, same: Any) -> None:
        """Notes that a value is another one under another identity."""
        self.depth[value] = self.depth.get(same, 0)
        if same in self.late:
            self.late.add(value)
        elif same in self.made_from:
            self.made_from[value], self.local_bytes[value] = (same,), self.local_bytes[same]
            self.stacked |= {value} if same in self.stacked else set()

    def __copy__(self) -> "SavedValues":
        return SavedValues(**{name: copy.copy(table) for name, table in vars(self).items()})

    def update(self, other: "SavedValues") -> None:
        """Adds the values of a part of the step that was read apart."""
        for field in dataclasses.fields(self):
            getattr(self, field.name).update(getattr(other, field.name))

    def least_bytes(self) -> float:
        """The least bytes that one device must keep so that the backward pass has what waits for it.

        This is a minimum cut (Ford and Fulkerson 1956) between the values that are not made again and those that wait.
        """
        from scipy.sparse import csr_array  # 0.2 s, of which most processes have no need
        from scipy.sparse.csgraph import maximum_flow

        nodes: dict[Any, int] = {}
        reached = list(self.waiting)
        while reached:
            value = reached.pop()
            if value not in nodes:
                nodes[value] = len(nodes)
                reached += [one for one in self.made_from[value] or () if one in self.made_from]
        if not nodes:
            return 0.0
        unit = max(1.0, sum(self.local_bytes[value] for value in nodes) / (_MOST - 1))
        # Of value n, what comes in is node 2n + 2, and what goes out 2n + 3. Between them lie its bytes.
        edges = [(2 * n + 2, 2 * n + 3, int(self.local_bytes[value] / unit)) for value, n in nodes.items()]
        edges += [(2 * nodes[value] + 3, _END, _MOST) for value in self.waiting]
        for value, n in nodes.items():
            source = self.made_from[value]
            before = [_BEGIN] if source is None else [2 * nodes[one] + 3 for one in {*source} if one in nodes]
            edges += [(node, 2 * n + 2, _MOST) for node in before]
        begins, ends, capacities = map(np.array, zip(*edges, strict=True))
        size = 2 * len(nodes) + 2
        network = csr_array((capacities.astype(np.int32), (begins, ends)), shape=(size, size))
        return float(maximum_flow(network, _BEGIN, _END).flow_value * unit)


_no_flops = functools.partial(collections.defaultdict[str, float], float)


@dataclasses.dataclass
class Record:
    """The notes of the reader so far."""

    transfers: list[Transfer] = dataclasses.field(default_factory=list)
    flops: collections.defaultdict[str, float] = dataclasses.field(default_factory=_no_flops)  # of one device, by phase
    # See `Reading.model_flops_by_dtype`.
    model_flops: collections.defaultdict[str, float] = dataclasses.field(default_factory=_no_flops)
    unknown: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    # An array's identity -> the shardings in which devices have it already.
    copies: dict[Any, tuple[ArraySharding, ...]] = dataclasses.field(default_factory=dict)
    # What is computed from which arrays, and how they are split -> the results, for whoever computes the same again.
    results: dict[Any, list[ArraySharding]] = dataclasses.field(default_factory=dict)
    # The identity of rows that are added to tables -> what was sent of the tables, in place of the rows.
    sums: dict[Any, list[Transfer]] = dataclasses.field(default_factory=dict)
    values: SavedValues = dataclasses.field(default_factory=SavedValues)
    branch_bytes: float = 0.0  # see `Reading.branch_bytes`

    @property
    def sent_bytes(self) -> float:
        return sum(transfer.bytes_per_step for transfer in self.transfers)

    def copy(self) -> "Record":
        """These notes, to which nothing is added when more is noted here."""
        return Record(**{name: copy.copy(notes) for name, notes in vars(self).items()})

    def take_back(self, before: "Record") -> None:
        """Takes back all that was noted since the copy `before` was made."""
        vars(self).update(vars(before))

    def add(self, other: "Record") -> None:
        self.transfers += other.transfers
        for phase, flops in other.flops.items():
            self.flops[phase] += flops
        for dtype, flops in other.model_flops.items():
            self.model_flops[dtype] += flops
        self.unknown += other.unknown
        self.copies = other.copies
        self.values.update(other.values)
        self.branch_bytes += other.branch_bytes


@dataclasses.dataclass(frozen=True)
class Reading:
    """The transfers and FLOPs of one device in a step, from its traced program.

    `unknown` names what the reader has no rule for, and how often the program has it. The operands of such a primitive
    are counted as gathered, the body of a `while` whose trip count is unknown as run once.
    """

    transfers: tuple[Transfer, ...]
    flops_by_phase: Mapping[str, float]
    unknown: Mapping[str, int]
    # The wider dtype of two factors -> the FLOPs of all devices. Neither recomputation nor what kernels do is counted.
    model_flops_by_dtype: Mapping[str, float] = dataclasses.field(default_factory=dict)
    saved_bytes: float = 0.0  # of one device: what it must keep of the forward pass for the backward pass
    held_bytes: float = 0.0  # of one device: the arguments that it must read, and the results that it must write
    # What one device sends beyond the transfers where a conditional runs the branch that sends most, and not least.
    branch_bytes: float = 0.0

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> "Reading":
        """The reading of which `values` are what `dataclasses.asdict` made, once it was written as JSON."""
        transfers = tuple(Transfer(*one)._replace(shape=tuple(one[1])) for one in values["transfers"])
        return cls(**{**values, "transfers": transfers})

    @property
    def knows_trip_counts(self) -> bool:
        """Whether all iterations of all loops are counted. A loop of unknown length counts once."""
        return UNKNOWN_TRIP_COUNT not in self.unknown

    @property
    def model_flops(self) -> float:
        """The FLOPs of the model, of all devices."""
        return sum(self.model_flops_by_dtype.values(), 0.0)

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
    def estimated_because(self) -> str:
        """Why `communication_bytes` is an estimate; '' if it is a lower bound.

        It is one if the program says how arrays are sharded, but for trifles such as the integers of a look-up.
        """
        if self.unknown:
            return f"there is no rule for {', '.join(self.unknown)}"
        is_open = self.chosen_bytes > _TRIFLE * self.communication_bytes
        return "the program does not say how all arrays are sharded" if is_open else ""

    def bytes_if_wider(self, itemsize: int) -> float:
        """The bytes that one device sends in a step if no element has fewer bytes than `itemsize`."""
        return sum(one.bytes_per_step * max(1.0, 8 * itemsize / one.element_bits) for one in self.transfers)

    @property
    def flops(self) -> float:
        """The FLOPs of the matmuls, convolutions and kernels of one device, recomputation included."""
        return sum(self.flops_by_phase.values())
