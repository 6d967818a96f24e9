"""The operations of a step, from its traced forward pass: matmuls, attention kernels and others, and their arrays.

An estimate needs to know of an operation how many FLOPs it does, which arrays it reads and writes, and which mesh axes
share it out. The trace knows all but the last, which follows from how the nearest arrays with a name are sharded. A
trace is made once for all rules that the model cannot tell apart.
"""

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable
from typing import NamedTuple

from gspmd_lm.foresight.graph import (
    GROUPED,
    MATMULS,
    OUT,
    SAME_VALUES,
    VIEWS,
    AttentionOp,
    DataflowGraph,
    Node,
    breadth_first,
)
from gspmd_lm.plan.expert_buffers import in_buffers
from gspmd_lm.sharding.remat_policy import KEPT_WITH_DOTS
from gspmd_lm.sharding.rules import Remat
from gspmd_lm.units import program_dtype

NamedNodes = tuple[Node, ...]  # an array or operation is split over the mesh axes of all of these that are placed

# Operations whose derivative needs none of their values.
LINEAR = (
    *SAME_VALUES,
    "add",
    "add_any",
    "sub",
    "neg",
    "reduce_sum",
    "slice",
    "split",
    "concatenate",
    "pad",
    "carry",
    "select_n",
    "gather",
    "dynamic_slice",
    "dynamic_update_slice",
)
_MATMULS = (*MATMULS, "conv_general_dilated")
_NOT_ELEMENTWISE = (*_MATMULS, "input", "carry", "constant")  # of no group of elementwise operations
_SORTS = ("sort", "top_k")


@dataclasses.dataclass(frozen=True, eq=False)
class Op:
    """A matmul, or elementwise operations that are one kernel. Numbers are of one run forward, of all devices."""

    kind: str  # matmul, attention or other
    flops: float
    dtype: str  # of what is multiplied
    itemsizes: tuple[int, ...]  # bytes of an element of each array that is touched
    sharded_like: NamedNodes  # what shares out the FLOPs
    moved: tuple[tuple[float, NamedNodes], ...]  # bytes that are read and written
    trip_count: int
    backward: float  # the work of the backward pass, in that of the forward pass
    nodes: frozenset[Node]
    in_block: bool  # whether it stands in a block, to which remat applies

    @property
    def is_grouped(self) -> bool:
        """Whether it multiplies rows with the matrices of their groups, such as experts."""
        return any(node.primitive == GROUPED for node in self.nodes)

    @property
    def only_casts(self) -> bool:
        """Whether it changes nothing but the dtype, as of a weight before its matmul."""
        return not self.flops and all(node.primitive in SAME_VALUES for node in self.nodes)


@dataclasses.dataclass(frozen=True, eq=False)
class MoveOp:
    """A gather or a sort; or a sum over a dimension before the last, which stays a part of its group."""

    node: Node
    nodes: frozenset[Node]  # what is computed again with it: of a sort, also the gathers that read its result
    sharded_like: NamedNodes
    backward: float  # its runs in the backward pass: moved tokens have gradients to move back, and a choice has none

    @property
    def trip_count(self) -> int:
        return self.node.trip_count


AnyOp = Op | AttentionOp | MoveOp


class Offloaded(NamedTuple):
    """The arrays that the iterations of a loop copy to the host."""

    arrays: tuple[tuple[float, NamedNodes], ...]  # bytes, of all layers; in the order in which an iteration makes them
    made_later: tuple[frozenset[AnyOp], ...]  # of each array: the ops that its iteration has left
    begins_with_input: bool  # whether the first of them is the input of an iteration


@dataclasses.dataclass(frozen=True)
class SavedActivations:
    """A microbatch's activations that a remat policy saves for the backward pass, and the recomputed operations."""

    on_device: tuple[tuple[float, NamedNodes], ...]  # bytes, of all layers
    on_host: tuple["Offloaded", ...]  # of each loop
    recomputed: frozenset[AnyOp]


class OpGraph:
    """The ops of one forward pass of a microbatch; with a `stack`, those within that stack of layers or outside of it.

    fused: attention is a kernel of its own. moves: gathers and sorts are, as on TPUs.
    """

    def __init__(self, graph: DataflowGraph, fused: bool, moves: bool = False, stack: str = "", within: bool = False):
        # Caches stand in the instance, so that they go with the trace.
        self.sharded_like = functools.cache(self._sharded_like)
        self._in_buffers = in_buffers(graph)
        self.saved_activations = functools.cache(self._saved_activations)
        self.made_later = functools.cache(self._made_later)
        self.graph, self._stack, self._within = graph, stack, within
        covered = [op for op in graph.attention_ops if self._covers(op.out)]
        self.attention_ops = covered if fused else []
        self.inside_attention = frozenset(node for kernel in self.attention_ops for node in kernel.nodes)
        self.matmuls = {matmul.node: matmul for matmul in graph.matmuls}
        rules = collections.Counter(matmul.node.residuals for matmul in graph.matmuls)
        # What a frozen weight is multiplied with has no use in the backward pass.
        frozen = (matmul.node.residuals for matmul in graph.matmuls if matmul.path not in graph.trained)
        self.unused_residuals = {kept for kept in frozen if kept is not None and rules[kept] == 1}
        self.blocks = {
            matmul.node.name.modules[0]
            for matmul in graph.matmuls
            if matmul.node.name.modules and self._covers(matmul.node)
        }
        self.move_ops = {op.node: op for op in self._move_ops()} if moves else {}
        self.ops = [*self._matmul_ops(), *self._elementwise_ops()]
        self.every_op: list[AnyOp] = [*self.ops, *self.attention_ops, *self.move_ops.values()]

    @functools.cached_property
    def trip_counts(self) -> list[int]:
        """The trip count of each loop that has matmuls."""
        matmuls = filter(self._covers, self.matmuls)
        return sorted({(node.name.modules[:1], node.trip_count): node.trip_count for node in matmuls}.values())

    def _covers(self, node: Node) -> bool:
        return not self._stack or (node.name.modules[:1] == (self._stack,)) == self._within

    # Where arrays live

    def _sharded_like(self, node: Node) -> NamedNodes:
        """The nodes that tell how an array is sharded: see `_placed_near`. In a buffer, a product of experts is one."""
        product = self._in_buffers.get(node)
        return (*self._placed_near(node), product) if product else self._placed_near(node)

    def _placed_near(self, node: Node) -> NamedNodes:
        """An array itself if it is placed, the next placement, or the last one; of a matmul, those around it."""
        if node.placed:
            return (node,)
        if node.primitive == "name":  # another name of what was placed
            return self.sharded_like(node.inputs[0])
        if matmul := self.matmuls.get(node):
            return tuple(filter(None, (matmul.input, matmul.weight, matmul.output)))
        neighbours = itertools.chain(
            breadth_first([node], lambda one: one.users), breadth_first([node], lambda one: one.inputs)
        )
        return tuple(itertools.islice((one for one in neighbours if one.placed), 1))

    def _has_gradient(self, node: Node) -> bool:
        return node in self.graph.differentiable

    def in_block(self, node: Node) -> bool:
        return bool(node.name.modules) and node.name.modules[0] in self.blocks

    # What there is to do

    def _matmul_ops(self) -> Iterable[Op]:
        for node in filter(self._covers, self.graph.nodes):
            if node.primitive not in _MATMULS or node in self.inside_attention:
                continue
            kind = "matmul"
            if node not in self.matmuls and any(near.array == OUT for near in self.graph.after([node])):
                kind = "attention"
            backward = float(self.graph.gradients(node))
            nodes = tuple(dict.fromkeys(place for near in (*node.inputs, node) for place in self.sharded_like(near)))
            moved = tuple((float(near.bytes), self.sharded_like(near)) for near in (*node.inputs[:2], node))
            itemsizes = tuple(near.itemsize for near in (*node.inputs[:2], node))
            yield Op(
                kind,
                node.flops,
                program_dtype(node.inputs[0].dtype.name),
                itemsizes,
                nodes,
                moved,
                node.trip_count,
                backward,
                frozenset([node]),
                self.in_block(node),
            )

    def _move_ops(self) -> Iterable[MoveOp]:
        for node in filter(self._covers, self.graph.nodes):
            of = node.inputs[0].shape if node.primitive == "reduce_sum" else ()
            sums = len(of) > 2 and of[-2] > 1 and node.shape == (*of[:-2], of[-1])
            if node in self.inside_attention or not (sums or node.primitive in ("gather", *_SORTS)):
                continue
            after = breadth_first([node], lambda one: one.users, lambda one: one.primitive != "gather")
            served = [one for one in after if one.primitive == "gather"] if node.primitive in _SORTS else []
            goes_back = node.primitive != "top_k" and (self._has_gradient(node) or not node.is_float)
            yield MoveOp(node, frozenset([node, *served]), self.sharded_like(node), float(goes_back))

    def _elementwise_ops(self) -> Iterable[Op]:
        """Groups of elementwise operations that nothing interrupts: neither a matmul nor an array that has a name."""
        moves = {node for node in self.move_ops if node.primitive != "reduce_sum"}

        def root(node: Node) -> Node:
            while group[node] is not node:
                node = group[node]
            return node

        group = {
            node: node
            for node in filter(self._covers, self.graph.nodes)
            if node.primitive not in _NOT_ELEMENTWISE and node not in self.inside_attention and node not in moves
        }
        for node in group:
            for operand in node.inputs:
                named = operand.placed is not None and node.primitive != "name"
                joins = operand in group and operand.trip_count == node.trip_count and not named
                if joins and operand.is_float and node.is_float:
                    group[root(node)] = root(operand)
        members: dict[Node, list[Node]] = {}
        for node in group:
            members.setdefault(root(node), []).append(node)
        for nodes in members.values():
            if all(node.primitive in VIEWS for node in nodes):
                continue
            within = set(nodes)
            bytes_of: dict[Node, float] = {}
            for node in nodes:
                for n, operand in enumerate(node.inputs):
                    if operand in within or not operand.is_float or operand.primitive == "constant":
                        continue
                    # Of what is looked up or taken apart, only the part that is read counts.
                    elements = math.prod(node.shape) if node.primitive in ("gather", "dynamic_slice") and n == 0 else 0
                    elements = elements or (
                        math.prod(operand.shape) if operand.trip_count == node.trip_count else math.prod(node.shape)
                    )
                    read = float(min(math.prod(operand.shape), elements) * operand.itemsize)
                    bytes_of[operand] = max(bytes_of.get(operand, 0.0), read)
                if node.is_float and not (node.users and all(user in within for user in node.users)):
                    bytes_of[node] = float(node.bytes)
            if bytes_of:
                moved = tuple((size, self.sharded_like(near)) for near, size in bytes_of.items())
                in_block, backward = any(map(self.in_block, nodes)), 2.0 * any(map(self._has_gradient, nodes))
                yield Op("other", 0.0, "", (), (), moved, nodes[0].trip_count, backward, frozenset(nodes), in_block)

    # What is kept

    @functools.cached_property
    def _computed_nodes(self) -> frozenset[Node]:
        """The operations that depend on a weight, trained or not."""
        return self.graph.made_of(self.graph.weights)

    def _saved_activations(self, remat: Remat) -> SavedActivations:
        on_host, on_device, recomputed = dict[Node, None](), dict[Node, None](), set[Node]()
        waiting = [*self._needed_backward]
        while waiting:
            node = waiting.pop()
            if node in recomputed or node in on_host or node in on_device:
                continue
            if not node.is_float or node not in self._computed_nodes or self._is_weight(node):
                continue
            if not self._has_gradient(node):  # nothing before it is trained, so it is not computed again
                on_device[node] = None
            elif node.always_recomputed:
                recomputed.add(node)
                waiting += node.inputs
            elif node.checkpoint_name in remat.offload and remat.policy == "names":
                on_host[node] = None
            elif self._is_saved(node, remat):
                on_device[node] = None
            else:
                recomputed.add(node)
                waiting += node.inputs

        device_bytes = tuple(map(self._with_bytes, self._distinct(on_device)))
        ops = frozenset(op for op in self.every_op if op.nodes & recomputed)
        return SavedActivations(device_bytes, self._offloaded_bytes(on_host), ops)

    def _with_bytes(self, node: Node) -> tuple[float, NamedNodes]:
        """The bytes of a saved value in all iterations, and what tells how it is sharded."""
        return float(node.bytes * self._saved_times(node)), self.sharded_like(node)

    def _offloaded_bytes(self, nodes: Iterable[Node]) -> tuple[Offloaded, ...]:
        distinct, loops = set(self._distinct(nodes)), dict[tuple[str, ...], list[Node]]()
        for node in self.graph.nodes:
            if node in distinct:
                loops.setdefault(node.name.modules[:1], []).append(node)
        return tuple(
            Offloaded(
                tuple(map(self._with_bytes, made)),
                tuple(map(self.made_later, made)),
                _same_as(made[0]).primitive == "carry",
            )
            for made in loops.values()
        )

    def _made_later(self, node: Node) -> frozenset[AnyOp]:
        """The ops that an iteration of a loop runs after it has made a value."""
        nodes = self.graph.nodes
        later, loop = set(nodes[nodes.index(node) + 1 :]), node.name.modules[:1]
        trip_count = self._saved_times(node)
        return frozenset(
            op
            for op in self.every_op
            if op.trip_count == trip_count and op.nodes <= later and next(iter(op.nodes)).name.modules[:1] == loop
        )

    @functools.cached_property
    def _needed_backward(self) -> list[Node]:
        """The values that the derivatives of all operations in blocks need, whatever the remat policy."""
        needed = [near for node in self.graph.nodes if self.in_block(node) for near in self._needed_by_derivative(node)]
        needed += [
            near
            for kernel in self.attention_ops
            if kernel.backward
            for node in kernel.nodes
            for near in node.inputs
            if near not in kernel.nodes
        ]
        return needed

    def _needed_by_derivative(self, node: Node) -> Iterable[Node]:
        """The values that the derivative of an operation needs."""
        if node in self.inside_attention or not self._has_gradient(node):
            return ()
        if node.residuals is not None:
            return () if node.residuals in self.unused_residuals else node.residuals
        if node.array == OUT and self.attention_ops:
            return node.users  # what a remat policy knows it by
        if node.primitive in ("mul", *MATMULS):
            first, second = node.inputs[0], node.inputs[:2][-1]
            return [one for one, other in ((first, second), (second, first)) if self._has_gradient(other)]
        return () if node.primitive in LINEAR else node.inputs

    def _is_saved(self, node: Node, remat: Remat) -> bool:
        if node.primitive == "carry" or not self.in_block(node):
            return True
        if remat.policy == "none":
            return bool(node.checkpoint_name) or node.primitive in MATMULS
        if remat.policy == "dots":
            return node.saved_by_dots or node.checkpoint_name in KEPT_WITH_DOTS
        return remat.policy == "names" and node.checkpoint_name in remat.save

    def _is_weight(self, node: Node) -> bool:
        """Whether a node is a weight on its way to where it is used: it is not kept, but gathered again."""
        nodes = self.sharded_like(node)
        return len(nodes) == 1 and nodes[0].array in self.graph.weights

    def _distinct(self, nodes: Iterable[Node]) -> list[Node]:
        """Nodes that are not only another name of one of the others."""
        sources = dict[Node, Node]()
        for node in nodes:
            sources.setdefault(_same_as(node), node)
        return list(sources.values())

    def _saved_times(self, node: Node) -> int:
        """How often a value is saved: once in each iteration of its loop. So is each value that a loop carries."""
        uses = node.users if node.primitive == "carry" else ()
        return max([node.trip_count, *(user.trip_count for user in uses)])


def _same_as(node: Node) -> Node:
    """The value that a node is only another name of."""
    while node.primitive == "name":
        node = node.inputs[0]
    return node
