"""The dataflow graph of a model's traced program: where arrays are placed, and the operations between them.

The program is the one that `placement.record` traces: it runs forward, and marks where each array is placed. Its
operations carry the names that those of the compiled program carry too.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from gspmd_lm.foresight.equations import GROUPED, applied_jaxpr, called_jaxprs, flops, join_names, read_loop
from gspmd_lm.model.cache import CACHE
from gspmd_lm.model.kernels import attention
from gspmd_lm.sharding.op_names import LOSS, OpName, parse
from gspmd_lm.sharding.placement import Recorder, Spec, as_recorded, marked_placement
from gspmd_lm.sharding.remat_policy import kept_dots
from gspmd_lm.sharding.shapes import Arrays, pairs
from gspmd_lm.sharding.sizes import element_bits

# Operations that make nothing new, and those that make nothing new but perhaps another dtype.
VIEWS = ("name", "reshape", "squeeze", "broadcast_in_dim", "stop_gradient", "copy", "transpose")
SAME_VALUES = (*VIEWS, "convert_element_type")
MATMULS = ("dot_general", GROUPED)
# The output and the inputs of attention.
OUT, *READ = (spec.partition(":")[0] for spec in (attention.OUT, attention.Q, attention.K, attention.V))
_CHECKPOINT = ("remat2", "checkpoint")  # what jax.checkpoint makes of a function
_CUSTOM_DERIVATIVE = "custom_vjp_call"  # a function whose derivative is written by hand
# Where the rules place the integers of rows or of tokens that a program is given. Other inputs have no known axes.
_TOKENS = Spec("tokens", ("batch", "seq"))


@dataclasses.dataclass(eq=False)
class Node:
    """One operation, or one input."""

    primitive: str
    name: OpName
    shape: tuple[int, ...]
    dtype: jnp.dtype
    trip_count: int  # how often it runs: the lengths of the loops around it, multiplied
    placed: Spec | None = None
    checkpoint_name: str = ""  # what remat policies know it by
    flops: float = 0.0  # of one run
    saved_by_dots: bool = False  # what `remat: dots` keeps
    always_recomputed: bool = False  # computed again, whatever a remat policy says
    residuals: tuple["Node", ...] | None = None  # what the hand-written derivative around it keeps; None: there is none
    inputs: list["Node"] = dataclasses.field(default_factory=list, repr=False)
    users: list["Node"] = dataclasses.field(default_factory=list, repr=False)

    @property
    def array(self) -> str:
        """The array that is placed here; "" if none is."""
        return self.placed.array if self.placed else ""

    @functools.cached_property
    def is_float(self) -> bool:
        """Whether it holds numbers of the model, which may be int8, or int32 as sums of their products."""
        return jnp.issubdtype(self.dtype, jnp.floating) or self.dtype == jnp.int8 or self.primitive in MATMULS

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def bytes(self) -> int:
        return math.ceil(math.prod(self.shape) * element_bits(self.dtype) / 8)


@dataclasses.dataclass(frozen=True)
class Matmul:
    """A matmul of an activation and a weight. Its input and output are the placements before and after it."""

    weight: Node  # where the weight is placed in use
    input: Node
    output: Node | None
    node: Node

    @property
    def path(self) -> str:
        """The path of the weight."""
        return self.weight.array

    @property
    def group_axis(self) -> str:
        """The axis of the weight that has a matrix for each group of rows, such as the experts; "" without groups."""
        assert self.weight.placed
        return self.weight.placed.axes[0] if self.node.primitive == GROUPED else ""


@dataclasses.dataclass(frozen=True, eq=False)
class AttentionOp:
    """The attention of one layer: all between its queries, keys and values, and its result."""

    out: Node
    queries: Node  # [B, T, N, H]
    keys: Node  # [B, S, K, H]
    values: Node
    nodes: frozenset[Node]
    backward: float  # 0 where nothing that is trained lies before it

    @property
    def trip_count(self) -> int:
        return self.out.trip_count

    @functools.cached_property
    def mask_window(self) -> str:
        """See `OpName.mask_window`."""
        return max(node.name.mask_window for node in self.nodes)

    @functools.cached_property
    def mask_chunk(self) -> int:
        """See `OpName.mask_chunk`."""
        return max(node.name.mask_chunk for node in self.nodes)


class DataflowGraph:
    """A recorded program as a graph. `weights` are the paths of the parameters, and `trained` those of some of them."""

    def __init__(self, program: Any, weights: Collection[str], trained: Collection[str] = ()):
        # Caches stand in the instance, so that they go with the program.
        self.activations_around = functools.cache(self._activations_around)
        self.made_from = functools.cache(self._made_from)
        self.applied_to = functools.cache(self._applied_to)
        self._neighbours = functools.cache(self._find_neighbours)
        self.weights, self.trained = frozenset(weights), frozenset(trained)
        self.nodes: list[Node] = []
        inputs = [self._node("input", "", var.aval, 1) for var in program.jaxpr.invars]
        for node in inputs:
            if not node.is_float and len(node.shape) <= len(_TOKENS.axes):
                node.placed = _TOKENS._replace(axes=_TOKENS.axes[: len(node.shape)])
        results = self._add_operations(program.jaxpr, inputs, "", 1)
        live = {*results, *breadth_first(results, lambda node: [*node.inputs, *(node.residuals or ())], lambda _: True)}
        self.nodes = [node for node in self.nodes if node in live]
        for node in self.nodes:
            for before in dict.fromkeys(node.inputs):
                before.users.append(node)

    @classmethod
    def from_recorder(cls, recorded: Recorder, arrays: Arrays) -> "DataflowGraph":
        """The graph of what was recorded of a model with these arrays."""
        with as_recorded(recorded):  # for hand-written derivatives, which are traced now
            every = pairs(arrays.named_params, arrays.params), pairs(arrays.named_trained, arrays.trained)
            return cls(recorded.program, *([leaf.path for leaf, _ in leaves] for leaves in every))

    def _node(self, primitive: str, stack: str, like: Any, times: int, inputs: Iterable[Node] = ()) -> Node:
        shape, dtype = getattr(like, "shape", ()), getattr(like, "dtype", jnp.dtype("bool"))
        node = Node(primitive, parse(f"{stack}/{primitive}"), shape, dtype, times, inputs=list(inputs))
        self.nodes.append(node)
        return node

    def _add_operations(self, jaxpr: Any, inputs: list[Node], stack: str, times: int) -> list[Node]:
        """Adds the operations of a jaxpr, those of the functions that it calls in their place, and gives its results.

        What a loop carries is a node that its own result goes into.
        """
        known = dict(zip(jaxpr.invars, inputs, strict=True))

        def node_of(atom: Any) -> Node:
            if hasattr(atom, "val") or atom not in known:
                return self._node("constant", stack, atom.aval, times)
            return known[atom]

        for eqn in jaxpr.eqns:
            operands = [node_of(atom) for atom in eqn.invars]
            name_stack = join_names(stack, eqn)
            inner = applied_jaxpr(eqn)
            if inner is not None and eqn.primitive.name == "scan":
                loop = read_loop(eqn)
                (_, captured, begin, stacked), variables = loop.split(operands), loop.split(inner.invars)[2]
                begins = zip(variables, begin, strict=True)
                carried = [self._node("carry", name_stack, var.aval, times, [init]) for var, init in begins]
                operands = [*captured, *carried, *stacked]
                results = self._add_operations(inner, operands, name_stack, times * loop.times)
                for node, result in zip(carried, results, strict=False):
                    node.inputs.append(result)
            elif inner is not None:
                begin, count = len(self.nodes), len(eqn.outvars)
                rule = _with_residuals(eqn, inner) if eqn.primitive.name == _CUSTOM_DERIVATIVE else None
                outputs = self._add_operations(rule or inner, operands, name_stack, times)
                results = outputs[:count]
                for node in self.nodes[begin:]:
                    node.always_recomputed |= eqn.primitive.name in _CHECKPOINT
                    node.residuals = tuple(outputs[count:]) if rule else node.residuals
            else:
                like = eqn.outvars[0].aval if eqn.outvars else None
                node = self._node(eqn.primitive.name, name_stack, like, times, operands)
                node.flops = flops(eqn)
                node.saved_by_dots = kept_dots(eqn.primitive, *(var.aval for var in eqn.invars), **eqn.params)
                if eqn.primitive.name == "name":
                    node.checkpoint_name = eqn.params["name"]
                    node.placed = marked_placement(node.checkpoint_name)
                results = [node] * len(eqn.outvars)
            known.update(zip(eqn.outvars, results, strict=True))
        return [node_of(atom) for atom in jaxpr.outvars]

    # What there is

    def is_activation(self, node: Node) -> bool:
        """Whether an activation is placed here."""
        return node.placed is not None and node.array not in self.weights

    @functools.cached_property
    def activations(self) -> list[Node]:
        """Where activations are placed, in the order of the program."""
        return [node for node in self.nodes if self.is_activation(node)]

    @functools.cached_property
    def placements_in_use(self) -> dict[str, list[Node]]:
        """Path of a weight -> where it is placed in use."""
        nodes: dict[str, list[Node]] = {}
        for node in self.nodes:
            if node.array in self.weights and node.placed and node.placed.table == "rules":
                nodes.setdefault(node.array, []).append(node)
        return nodes

    @functools.cached_property
    def matmuls(self) -> list[Matmul]:
        """The matmuls of placed activations and weights, in the order of the program."""
        matmuls = []
        for node in self.nodes:
            factors = node.inputs[:2] if node.primitive in MATMULS else []
            for operand, weight in zip(reversed(factors), map(self._weight, factors), strict=True):
                before = [operand] if self.is_activation(operand) else self.before([operand])
                if not before and matmuls and node.primitive == GROUPED:
                    before = [matmuls[-1].input]  # nothing is placed between the matmuls of the same groups
                if weight and before:
                    matmuls.append(Matmul(weight, before[0], next(iter(self.after([node])), None), node))
        return matmuls

    @functools.cached_property
    def looked_up(self) -> dict[str, list[Node]]:
        """Path of a table -> the operations that look up rows of it."""
        nodes: dict[str, list[Node]] = {}
        for node in self.nodes:
            if node.primitive == "gather" and node.is_float:
                weight = self._weight(node.inputs[0])
                paths = [weight.array] if weight else node.name.owners
                for path in self.weights.intersection(paths):
                    nodes.setdefault(path, []).append(node)
        return nodes

    @functools.cached_property
    def matrix_paths(self) -> frozenset[str]:
        """Paths of the weights that are multiplied as matrices."""
        return frozenset(matmul.path for matmul in self.matmuls)

    @functools.cached_property
    def differentiable(self) -> frozenset[Node]:
        """The operations that depend on a trained weight, and so have a gradient."""
        return self.made_of(self.trained)

    def made_of(self, weights: Collection[str]) -> frozenset[Node]:
        """The operations that depend on some weights, these included."""
        start = [node for node in self.nodes if node.array in weights]
        start += [node for path in weights for node in self.looked_up.get(path, ())]
        read_by: dict[Node, list[Node]] = collections.defaultdict(list)
        for node, matmul in self._by_hand.items():
            read_by[matmul.input].append(node)

        def is_derived(node: Node) -> list[Node]:
            users = *node.users, *read_by[node]
            return [user for user in users if user.is_float and user.primitive != "stop_gradient"]

        return frozenset(start).union(breadth_first(start, is_derived, lambda _: True))

    @functools.cached_property
    def attention_ops(self) -> list[AttentionOp]:
        """The attention of each layer, in the order of the program."""
        ops = []
        for out in self.activations:
            if out.array != OUT:
                continue
            waiting, inside, operands, cached = list(out.inputs), set[Node](), list[Node](), list[Node]()
            while waiting:
                node = waiting.pop()
                if node in inside or node.trip_count < out.trip_count:
                    continue
                if node.checkpoint_name in (*READ, OUT):  # what a remat policy knows it by
                    operands.append(node)
                    continue
                if CACHE.startswith(f"{node.array}:"):  # keys, values, or what both are made from
                    cached.append(node)
                    continue
                inside.add(node)
                waiting += node.inputs
            queries, keys, values = (
                [node.inputs[0] for node in operands if node.checkpoint_name == name] for name in READ
            )
            if cached:  # by the cache in the order of the program
                cached.sort(key=self.nodes.index)
                keys, values = cached[:1], cached[-1:]
            of_keys = keys[0].placed.axes if keys and keys[0].placed else ()
            if queries and values and inside and "kv_seq" in of_keys:  # a recurrence has its own tokens alone
                backward = float(out in self.differentiable)
                ops.append(AttentionOp(out, queries[0], keys[0], values[0], frozenset(inside), backward))
        return ops

    def gradients(self, matmul: Node) -> int:
        """Of how many of its two operands a matmul or a convolution has gradients."""
        one = self._by_hand.get(matmul)
        return sum(x in self.differentiable for x in ((one.input, one.weight) if one else matmul.inputs[:2]))

    @functools.cached_property
    def _by_hand(self) -> dict[Node, Matmul]:
        """The matmuls whose derivative is written by hand: the gradient of what they read may go round the read."""
        return {matmul.node: matmul for matmul in self.matmuls if matmul.node.residuals is not None}

    def _applied_to(self, path: str) -> Node | None:
        """The activation that a small weight, such as a bias or the scale of a norm, is added to or multiplied with.

        Of a bias of groups, it is what their matmuls read.
        """
        between = self._between(self.placements_in_use.get(path, []))
        before = self.before(between, past_matmuls=False)
        candidates = [*before, *map(self.written_to, self.after(between, past_matmuls=False))]
        module = path.rpartition(".")[0]
        candidates += [p.input for p in self.matmuls if p.group_axis and p.path.rpartition(".")[0] == module]
        return next(iter(candidates), None)

    def written_to(self, node: Node) -> Node:
        """The second placement of an activation that is placed twice in a row, as by `reduced`; else the first one."""
        after = [user for user in node.users if self.is_activation(user)]
        return after[0] if len(after) == 1 and len(node.users) == 1 else node

    def gathered_from(self, node: Node) -> Node | None:
        """The activation that is only placed anew here, as `gathered` gathers what it is given."""
        while node.inputs and node.inputs[0].primitive == "name":
            node = node.inputs[0]
            if node.placed:
                return node
        return None

    def combined_with(self, node: Node) -> list[Node]:
        """The activations that an activation meets in the operations after it."""
        seen = {node}  # a loop may carry an activation back to where it was placed
        while same := [near for near in self.after([node]) if near.array == node.array and near not in seen]:
            node = same[0]
            seen.add(node)
        return [near for near in self.before(self._between([node])) if near is not node]

    def weight_of(self, matmul: Node) -> Node | None:
        """The placement in use of the weight that a matmul or a convolution multiplies; None if it has none."""
        return next(filter(None, map(self._weight, matmul.inputs[:2])), None)

    def _weight(self, node: Node) -> Node | None:
        """Where a weight was placed in use that has only changed its form since."""
        while node.primitive in SAME_VALUES and not (node.placed and node.placed.table == "rules"):
            node = node.inputs[0]
        return node if node.array in self.weights else None

    # What is near

    def before(self, start: Iterable[Node], past_matmuls: bool = True) -> list[Node]:
        """The activations that were placed last before some operations."""
        return list(filter(self.is_activation, self._neighbours((*start,), False, past_matmuls)))

    def after(self, start: Iterable[Node], past_matmuls: bool = True) -> list[Node]:
        """The activations that are placed first after some operations."""
        return list(filter(self.is_activation, self._neighbours((*start,), True, past_matmuls)))

    def _between(self, start: Iterable[Node]) -> list[Node]:
        """Some operations, and those after them before an activation is placed."""
        start = (*start,)
        return [*start, *(node for node in self._neighbours(start, True, False) if not node.placed)]

    def _find_neighbours(self, start: tuple[Node, ...], forward: bool, past_matmuls: bool) -> list[Node]:
        """The operations after or before some others, the nearest first, as far as the next placement.

        Operations that belong to another weight are not passed, nor integers.
        """
        owners = {(), *(node.name.owners for node in start)}

        def passes(node: Node) -> bool:
            return not node.placed and node.name.owners in owners and (past_matmuls or node.primitive not in MATMULS)

        def near(node: Node) -> list[Node]:
            return [one for one in (node.users if forward else node.inputs) if one.is_float]

        return [*breadth_first(start, near, passes)]

    def _activations_around(self, weight: str = "", modules: tuple[str, ...] = ()) -> frozenset[str]:
        """Names of the activations that operations stand between: those of a weight, or part of the step, or module."""
        named = [node for node in self.nodes if weight in node.name.owners] if weight else []
        start = named or [node for node in self.nodes if node.name.modules == modules and not node.name.owners]
        if weight and not named:
            start = self._between(self.placements_in_use.get(weight, []))
        placed_within = [node for node in start if self.is_activation(node)]
        if not (named and placed_within):  # a part of the step, such as the loss, places itself what it is given
            placed_within += [*self.before(start), *self.after(start)]
        integers = [] if placed_within and not any(n.primitive == "gather" for n in start) else self._tokens_read(start)
        placed = [*map(self.written_to, placed_within), *integers] if named else [*placed_within, *integers]
        if weight and not placed and (applied := self.applied_to(weight)):
            placed = [applied]
        return frozenset(node.array for node in placed)

    def _tokens_read(self, start: Iterable[Node]) -> list[Node]:
        integers = breadth_first(start, lambda node: [one for one in node.inputs if not one.is_float])
        return [node for node in integers if node.placed]

    def _made_from(self, array: str, backward: bool = False) -> frozenset[str]:
        """Names of the activations that one is made from; in the backward pass, that its gradient is made from.

        One that is only placed anew is made from itself in its other place, forward and backward.
        """
        placements = [node for node in self.activations if node.array == array]
        next_to = [near for node in placements for near in (*node.users, self.gathered_from(node)) if near]
        anew = [near for near in next_to if self.is_activation(near)]
        if not anew:
            region = self._between(placements) if backward else placements
            # Past what belongs to other weights too.
            earlier = breadth_first(region, lambda node: [one for one in node.inputs if one.is_float])
            anew = [*(self.after(placements) if backward else ()), *filter(self.is_activation, earlier)]
        return frozenset(node.array for node in anew if node.placed != _TOKENS)


def breadth_first(
    start: Iterable[Any],
    near: Callable[[Any], Iterable[Any]],
    passes: Callable[[Any], bool] = lambda node: not node.placed,
) -> Iterator[Any]:
    """The nodes that one comes to from some others, the nearest first, each once.

    They may be those of any graph. `near` gives what lies next to a node. `passes` says whether the way goes on behind
    it: as far as a placement.
    """
    waiting = collections.deque(start)
    seen = set(waiting)
    while waiting:
        for node in near(waiting.popleft()):
            if node not in seen:
                seen.add(node)
                yield node
                if passes(node):
                    waiting.append(node)


def _with_residuals(equation: Any, function: Any) -> Any:
    """The program of a function whose derivative is written by hand, which also gives what the derivative keeps.

    None where nothing is multiplied, where more is, and of the loss, which makes its gradients on its way forward.
    """
    names = (f"{eqn.source_info.name_stack}/{eqn.primitive.name}" for eqn in function.eqns)
    if not (least := _flops_within(function)) or any(parse(name).owners == (LOSS,) for name in names):
        return None
    given = [core.Var(var.aval) for var in function.invars]
    one = core.Jaxpr((), given, equation.outvars, [equation.replace(invars=given)], debug_info=function.debug_info)
    alone = core.jaxpr_as_fun(core.ClosedJaxpr(one, ()))
    like: list[Any] = [jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in function.invars]
    # The leaves of a vjp function are what it keeps.
    with_residuals = jax.make_jaxpr(lambda *args: jax.tree.leaves(jax.vjp(alone, *args)))(*like).jaxpr
    return with_residuals if _flops_within(with_residuals) == least else None


def _flops_within(jaxpr: Any) -> float:
    """The FLOPs of a program whose loops have one iteration each."""
    return sum(flops(eqn) + sum(map(_flops_within, called_jaxprs(eqn.params))) for eqn in jaxpr.eqns)
