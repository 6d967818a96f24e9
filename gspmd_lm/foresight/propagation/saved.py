"""What the forward pass leaves in memory for the backward pass."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

_OF_BACKWARD = ("backward", "recomputation")
_MOST = 2**31 - 1  # scipy's flows are int32


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
        """Notes an operation by the identities of what it reads and makes, the latter with their bytes."""
        depth = max((self.depth.get(one, 0) for one in operands), default=0)
        is_late = not self.late.isdisjoint(operands) or (phase in _OF_BACKWARD and not is_repeatable)
        if is_late and phase in _OF_BACKWARD:
            self.waiting.update(
                one for one in operands if one in self.made_from
                and (phase == "recomputation" or one in self.stacked or self.depth[one] < depth)
            )  # fmt: skip
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


_BEGIN, _END = 0, 1
