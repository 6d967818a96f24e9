"""The reader: it follows shardings through a jaxpr, and asks the rule of each primitive what must be sent."""

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.extend import core

from gspmd_lm.foresight import equations, source_lines
from gspmd_lm.foresight.propagation.record import Record, Transfer
from gspmd_lm.foresight.propagation.sharding import (
    ArraySharding,
    CollectiveCost,
    Dims,
    MeshShape,
    array_bytes,
    axes_of,
    is_empty,
    rank_of,
    replicated_sharding,
    total_bytes,
    without,
)
from gspmd_lm.foresight.propagation.views import SplitFactor, View, find_view
from gspmd_lm.foresight.propagation.wanted import ADDITIVE, CONSTRAINTS, Wanted, terms, use_counts, wanted_dims
from gspmd_lm.sharding import op_names
from gspmd_lm.sharding.sizes import element_bits

# Those that are additive in one of their operands.
MULTIPLICATIVE = frozenset({"mul", "div", "select_n", "dot_general", "conv_general_dilated"})

# Those that read another jaxpr: what they are given is looked at there.
CONTROL = equations.CALLS | {"scan", "cond", "while", "shard_map", equations.LINEAR_SOLVE}

# Those that are given partial sums as they are: others are given the sum.
_READ_PARTIAL_SUMS = ADDITIVE | MULTIPLICATIVE | CONTROL

RENAMING = ("optimization_barrier", "device_put")  # their rules say that nothing is made

# Those that are computed anew each time: a kernel that XLA does not look into, and what stands behind a barrier.
_NOT_SHARED = {"pallas_call", *RENAMING}
_MOST_VIEWS = 12  # of an array that is known to be made of another one: how many steps are looked back


class Operation:
    """One equation, where the reader meets it."""

    def __init__(
        self,
        equation: Any,
        stack: str,
        operands: list[ArraySharding],
        wanted: Wanted,
        terms: frozenset[int] = frozenset(),
    ) -> None:
        self.equation = equation
        self.primitive: str = equation.primitive.name
        self.params: Mapping[str, Any] = equation.params
        self.stack = stack  # the names of the functions around it
        self.terms = terms  # the results that are only added to what the loop around carries
        self.inputs: list[Any] = [atom.aval for atom in equation.invars]  # shapes and dtypes of the operands
        self.operands = operands
        self.wanted = wanted

    @property
    def output(self) -> Any:
        """Shape and dtype of the first result."""
        return self.equation.outvars[0].aval

    @property
    def wanted_dims(self) -> Dims | None:
        """The sharding in which later operations want the first result; None where the program does not say."""
        return self.wanted.get(self.equation.outvars[0])

    @functools.cached_property
    def name(self) -> op_names.OpName:
        return op_names.parse(f"{self.stack}/{self.primitive}")

    @property
    def label(self) -> str:
        """The path in the model of the operation."""
        return self.name.path or self.primitive

    @property
    def phase(self) -> str:
        return self.name.phase


Rule = Callable[["Reader", Operation], ArraySharding | Sequence[ArraySharding]]


class Way(NamedTuple):
    """A way to bring an array to another sharding."""

    costs: list[CollectiveCost]
    begin: ArraySharding  # from where it is sent
    aval: Any = None  # what is sent, if that is not the array itself but what the array is made of
    copies: Sequence[tuple[ArraySharding, ArraySharding]] = ()  # other arrays, and where they are then, too
    spared: Sequence[Transfer] = ()  # what was noted before and need not be sent then

    @property
    def more_bytes(self) -> float:
        """The bytes that this way sends, less those of earlier transfers that it makes needless."""
        return total_bytes(self.costs) - sum(transfer.bytes for transfer in self.spared)


class Reader:
    """Reads jaxprs on a mesh by `rules`: a rule for each primitive.

    `loops` are the trip counts of the loops around the operation that is read. For `platform`, see `read_step`.
    """

    def __init__(self, mesh: Mapping[str, int], rules: Mapping[str, Rule], platform: str = "") -> None:
        self.record = Record()
        self.mesh = MeshShape(mesh)
        self.rules = rules
        self.platform = platform
        self.loops: list[int] = []
        self.programs = 1  # of devices that compute different things, in the program of one device
        self.products = 0  # how many matmuls, convolutions and kernels were met
        # Buffers of exchanges are filled as balanced routing fills them. Rows of such buffers -> how much of them is.
        self.filled: dict[int, float] = {}
        # A primitive and the identities of its operands -> equations of these, each with the identity of its result.
        self.values: dict[Any, list[tuple[Any, object]]] = {}
        # The identity of what is made of one array, beside constants and whole arrays -> that array.
        self.views: dict[Any, View | SplitFactor] = {}

    @contextlib.contextmanager
    def trial(self) -> Iterator[Record]:
        """A context that notes in a record of its own, as if what was noted before had been noted there too."""
        before = self.record
        self.record = Record(copies=dict(before.copies), results=dict(before.results))
        try:
            yield self.record
        finally:
            self.record = before

    # Notes

    def times(self, depth: int) -> int:
        """How often in a step something runs that the first `depth` loops around it change."""
        return math.prod(self.loops[:depth])

    def add_flops(self, operation: Operation, flops: float) -> None:
        """Notes FLOPs of one device, and those of the model, which run in each iteration of the loops that change them.

        XLA takes what no iteration changes out of a loop. The model is what all devices compute together, without
        recomputation and without kernels of Pallas.
        """
        if flops:
            self.products += 1
            times = self.times(max((one.loop_depth for one in operation.operands), default=0))
            self.record.flops[operation.phase] += flops * times
            if operation.phase != "recomputation" and (counted := equations.flops(operation.equation)):
                wider = str(max((factor.dtype for factor in operation.inputs[:2]), key=element_bits))
                self.record.model_flops[wider] += counted * self.programs * times

    def add_unknown(self, what: str) -> None:
        self.record.unknown[what] += 1

    def add_transfers(
        self,
        operation: Operation,
        aval: Any,
        source: ArraySharding,
        costs: Iterable[CollectiveCost],
        chosen: bool = False,
    ) -> None:
        """Notes what one device sends of an array. It is sent in each iteration of the loops that change the array."""
        for cost in costs:
            self.record.transfers.append(
                Transfer(
                    array=operation.label,
                    shape=tuple(aval.shape),
                    dtype=str(aval.dtype),
                    element_bits=element_bits(aval.dtype),
                    kind=cost.kind,
                    mesh_axes=self.mesh.label(cost.mesh_axes),
                    bytes=cost.bytes,
                    times_per_step=self.times(source.loop_depth),
                    phase=operation.phase,
                    chosen=chosen,
                    source=source_lines.line_of_equation(operation.equation),
                )
            )

    # Moves

    def move(
        self, operation: Operation, aval: Any, source: ArraySharding, target: Dims, chosen: bool = False
    ) -> ArraySharding:
        """The array in another sharding, its partial sums added up. What must be sent for it is noted.

        It is sent from where that costs least, of the shardings in which the array was before, or as what it was made
        of.
        """
        result = source.with_dims(target).without_partial_sums()._replace(scatter=None)
        if source.is_constant or not hasattr(aval, "shape"):
            return result._replace(is_constant=False)
        way, noted = self.cheapest(aval, source, target), len(self.record.transfers)
        self.add_transfers(operation, way.aval or aval, way.begin, way.costs, chosen)
        if source.scatter and source.unreduced:
            self._add_sum(source.scatter.updates_sharding.identity, way, noted)
        if source.identity is not None and way.costs:
            self._add_copy(source, result)
        for array, moved in way.copies:
            self._add_copy(array, moved)
        return result._replace(identity=source.identity)

    def _add_sum(self, rows: Any, way: Way, noted: int) -> None:
        """Notes that the table was sent, of which the transfers from number `noted` are, or that its rows were.

        Where the rows are sent, earlier tables to which they were added need not be.
        """
        if not way.copies:
            self.record.sums[rows] = [*self.record.sums.get(rows, ()), *self.record.transfers[noted:]]
        elif way.spared:
            spared = {id(transfer) for transfer in way.spared}
            self.record.transfers = [one for one in self.record.transfers if id(one) not in spared]
            del self.record.sums[rows]

    def _add_copy(self, array: ArraySharding, moved: ArraySharding) -> None:
        self.record.copies[array.identity] = (*self.record.copies.get(array.identity, ()), moved)

    def cheapest(self, aval: Any, source: ArraySharding, target: Dims) -> Way:
        """The way to bring an array to another sharding that sends least."""
        if source.is_constant:
            return Way([], source)
        sources = [source, *self.record.copies.get(source.identity, ())]
        ways = [Way(self.mesh.reshard(array_bytes(aval), one.dims, target, one.unreduced), one) for one in sources]
        if source.scatter and source.unreduced:
            rows = axes_of(names for d, names in enumerate(target) if d not in source.scatter.dimension.values())
            ways += [self._scattered_elsewhere(aval, source, target, over) for over in {frozenset(), rows}]
        if ways[0].costs:  # of ways that send as much, the earliest, so that others can be made of what it brings
            earlier = [*reversed([*self._before_views(source, target)])]
            # But a product is computed in parts where that sends no more.
            is_product = isinstance(self.views.get(source.identity), SplitFactor)
            ways = [*ways, *earlier] if is_product else [*earlier, *ways]
        return min(ways, key=lambda way: way.more_bytes)

    def _before_views(self, source: ArraySharding, target: Dims) -> Iterator[Way]:
        """The ways to send what an array is made of, where it is made of one array alone: before a transposition, an
        addition of a constant, a conversion to a wider dtype, or a product with what each device has. Each device then
        makes its part of the array."""
        for _ in range(_MOST_VIEWS):
            view = self.views.get(source.identity)
            if view is None or (dims := view.dims_before(self.mesh, target)) is None:
                return
            source, target = view.source, dims
            copies = (source, *self.record.copies.get(source.identity, ()))
            for one in copies:
                costs = self.mesh.reshard(array_bytes(view.aval), one.dims, target, one.unreduced)
                moved = source.with_dims(target).without_partial_sums()._replace(scatter=None)
                yield Way(costs, one, view.aval, [(source, moved)] if costs else ())

    def _scattered_elsewhere(self, aval: Any, source: ArraySharding, target: Dims, rows: frozenset[str]) -> Way:
        """Sends the rows that are added up to where the sum is wanted, with their indices.

        rows: mesh axes that split the rows of the sum, along which each device is then sent all rows that are added.
        Other sums of the same rows, such as those of the tables of tokens and of positions, are then made there, too.
        """
        updates, updates_sharding, indices, indices_sharding, dimension = source.scatter
        columns = [target[dimension[d]] if d in dimension else () for d in range(updates.ndim)]
        over = axes_of(columns) | rows
        remaining = without(updates_sharding.dims, over)
        wanted = tuple(names or left for names, left in zip(columns, remaining, strict=True))
        costs, copies = [], []
        for like, array, dims in (
            (updates, updates_sharding, wanted),
            (indices, indices_sharding, without(indices_sharding.dims, over)),
        ):
            sent = self.cheapest(like, array, dims).costs
            if sent and array.identity is not None:
                copies.append((array, array.with_dims(dims).without_partial_sums()._replace(scatter=None)))
            costs += sent
        looked_up = [tuple(name for name in names if name in over) for names in target]
        costs += self.mesh.reshard(array_bytes(aval), tuple(looked_up), target, source.unreduced - over)
        sums = self.record.sums.get(updates_sharding.identity, ()) if copies else ()
        times = self.times(source.loop_depth)
        return Way(costs, source, None, copies, [one for one in sums if one.times_per_step == times])

    def move_operand(
        self, operation: Operation, number: int, target: Dims, keep_unreduced: bool = False, chosen: bool = True
    ) -> None:
        """Brings an operand to the sharding in which the rule of its operation needs it, if it is not there yet.

        chosen: whether the rule could have chosen another one.
        """
        operand, aval = operation.operands[number], operation.inputs[number]
        if operand.dims == target and (keep_unreduced or not operand.unreduced):
            return
        summed = operand.without_partial_sums() if keep_unreduced else operand
        moved = self.move(operation, aval, summed, target, chosen=chosen and operand.dims != target)
        operation.operands[number] = moved._replace(
            unreduced=operand.unreduced - axes_of(target) if keep_unreduced else frozenset()
        )

    def destination(self, source: ArraySharding, wanted: Dims | None) -> Dims:
        """The best sharding for the reduction of a partial sum: scattered as it is wanted next, where possible."""
        if not wanted or not source.unreduced:
            return source.dims
        dims = []
        for names, others in zip(source.dims, wanted, strict=True):
            more = [name for name in others if name in source.unreduced and name not in source.mesh_axes]
            dims.append((*names, *more) if names == others[: len(names)] else names)
        return tuple(dims)

    def reduce(self, operation: Operation, atom: Any, source: ArraySharding) -> ArraySharding:
        """The array with its partial sums added up."""
        return self.move(operation, atom.aval, source, self.destination(source, operation.wanted.get(atom)))

    # The walk

    def read(
        self,
        jaxpr: Any,
        operands: Sequence[ArraySharding],
        stack: str = "",
        wanted: Sequence[Dims | None] = (),
        accumulated: Iterable[int] = (),
    ) -> list[ArraySharding]:
        """The shardings of the results of a jaxpr, which are wanted as `wanted` says, from those of its operands.

        accumulated: the numbers of results that are only added to what the loop around carries.
        """
        wants, uses = wanted_dims(self.mesh, jaxpr, wanted), use_counts(jaxpr)
        added = terms(jaxpr, accumulated, uses)
        known: dict[Any, ArraySharding] = dict(zip(jaxpr.invars, map(_with_identity, operands), strict=True))
        known |= {
            var: replicated_sharding(rank_of(var.aval), is_constant=True)._replace(identity=var)
            for var in jaxpr.constvars
        }
        constrained: dict[Any, ArraySharding] = {}

        def sharding_of(atom: Any) -> ArraySharding:
            made_anywhere = isinstance(atom, core.Literal) or is_empty(atom.aval)
            return replicated_sharding(rank_of(atom.aval), True) if made_anywhere else known[atom]

        for equation in equations.with_rolls(jaxpr):
            names = equations.join_names(stack, equation)
            outputs = equation.outvars
            of_sum = frozenset(number for number, var in enumerate(outputs) if var in added)
            operation = Operation(equation, names, [sharding_of(atom) for atom in equation.invars], wants, of_sum)
            if operation.primitive not in self.rules and equations.is_call(equation):
                operation.primitive = "closed_call"
            operands, primitive = operation.operands, operation.primitive
            if primitive not in _READ_PARTIAL_SUMS:
                for number, atom in enumerate(equation.invars):  # one sum for all that reads it
                    if operands[number].unreduced:
                        known[atom] = operands[number] = self.reduce(operation, atom, operands[number])
            products = self.products
            if primitive in CONSTRAINTS:
                results = [self._constrain(operation, constrained, uses[outputs[0]])]
            else:
                results = self._results(operation)
            depth = max((one.loop_depth for one in operands), default=0)
            for var, result in zip(outputs, results, strict=True):
                dims, unreduced, is_constant, own_depth, identity, scatter = result
                result = ArraySharding(
                    dims,
                    unreduced - axes_of(dims) if unreduced else unreduced,
                    is_constant,
                    own_depth if primitive in CONTROL else depth,
                    object() if identity is None else identity,
                    scatter,
                )
                known[var] = self._for_all_uses(operation, var, result) if uses[var] > 1 else result
            if primitive not in equations.CALLS:
                self._add_values(operation, [known[var] for var in outputs], self.products > products)
        return [sharding_of(atom) for atom in jaxpr.outvars]

    def _add_values(self, operation: Operation, results: Sequence[ArraySharding], multiplies: bool) -> None:
        """Notes from which values an operation makes its results: see `SavedValues`."""
        operands = [one.identity for one in operation.operands if not one.is_constant]
        if operands and operation.primitive not in RENAMING:
            times = self.times(len(self.loops))
            made = [
                (one.identity, times * self.mesh.local_bytes(var.aval, one.dims) if hasattr(var.aval, "shape") else 0.0)
                for var, one in zip(operation.equation.outvars, results, strict=True)
            ]
            is_repeatable = not multiplies and operation.primitive not in ("scan", "while")
            self.record.values.add(operation.phase, operands, made, is_repeatable)

    def value(self, operation: Operation) -> Any:
        """A key that is the same for operations that compute the same from the same arrays; None if it is not known."""
        operands = []
        for atom, one in zip(operation.equation.invars, operation.operands, strict=True):
            literal = isinstance(atom, core.Literal)
            operands.append(
                (np.asarray(atom.val).tobytes(), getattr(atom.aval, "dtype", None)) if literal else one.identity
            )
        if None in operands or operation.primitive in _NOT_SHARED:
            return None
        alike = self.values.setdefault((operation.primitive, *operands), [])
        for equation, identity in alike:
            if equations.computes_the_same(equation, operation.equation):
                return identity
        alike.append((operation.equation, object()))
        return alike[-1][1]

    def _for_all_uses(self, operation: Operation, var: Any, array: ArraySharding) -> ArraySharding:
        """An array that is read several times: added up once, and moved once if other dimensions are wanted split."""
        if array.unreduced:
            return self.reduce(operation, var, array)
        wanted = operation.wanted.get(var)
        if wanted and any(set(a) & axes_of(wanted) - set(b) for a, b in zip(array.dims, wanted, strict=True)):
            return self.move(operation, var.aval, array, wanted, chosen=True)
        return array

    def _results(self, operation: Operation) -> list[ArraySharding]:
        """The shardings of the results of an operation, by the rule of its primitive.

        Results that are made of constants, or have no elements, need nothing of other devices.
        """
        outputs = operation.equation.outvars
        made_anywhere = all(one.is_constant for one in operation.operands) or (
            len(outputs) > 0 and all(is_empty(var.aval) for var in outputs)
        )
        if operation.primitive not in CONTROL and made_anywhere:
            self.add_flops(operation, equations.flops(operation.equation))
            identity, one = self.value(operation), len(outputs) == 1
            return [
                replicated_sharding(rank_of(var.aval), True)._replace(identity=identity if one else None)
                for var in outputs
            ]
        identity = None if operation.primitive in equations.CALLS else self.value(operation)
        if identity is None:
            return self._by_rule(operation)
        # XLA computes once what a program computes twice from the same arrays, where they are split alike.
        key = identity, *((one.dims, one.unreduced) for one in operation.operands)
        if key not in self.record.results:
            before, one = [*operation.operands], len(outputs) == 1
            results = self._by_rule(operation)
            self.record.results[key] = [
                result if result.identity is not None else result._replace(identity=identity if one else (identity, n))
                for n, result in enumerate(results)
            ]
            if one and (view := find_view(operation.equation, before, operation.operands, results[0])):
                self.views[identity] = view
        return self.record.results[key]

    def _by_rule(self, operation: Operation) -> list[ArraySharding]:
        shardings = self.rules.get(operation.primitive, unknown)(self, operation)
        outputs = operation.equation.outvars
        return [shardings] * len(outputs) if isinstance(shardings, ArraySharding) else list(shardings)

    def _constrain(self, operation: Operation, seen: dict[Any, ArraySharding], uses: int) -> ArraySharding:
        """An array where the program says that it is. XLA does the same constraint of the same array once."""
        operand, aval = operation.operands[0], operation.inputs[0]
        spec = operation.params[CONSTRAINTS[operation.primitive]].spec
        target = self.mesh.dims(spec, aval.ndim, operand.dims)
        if operand.unreduced and uses == 1:  # what is constrained twice in a row is added up where it goes last
            target = self.destination(operand.with_dims(target), operation.wanted_dims)
        key = operation.equation.invars[0], target
        if isinstance(key[0], core.Literal) or key not in seen:
            moved = self.move(operation, aval, operand, target)
            if isinstance(key[0], core.Literal):
                return moved
            seen[key] = moved
        return seen[key]


def unknown(reader: Reader, operation: Operation) -> list[ArraySharding]:
    """A primitive without a rule: it is noted, and every device is given all operands, and computes all of it."""
    reader.add_unknown(operation.primitive)
    gather_operands(reader, operation)
    reader.add_flops(operation, equations.flops(operation.equation))
    return [replicated_sharding(rank_of(var.aval)) for var in operation.equation.outvars]


def _with_identity(array: ArraySharding) -> ArraySharding:
    return array if array.identity is not None else array._replace(identity=object())


def gather_operands(reader: Reader, operation: Operation) -> None:
    """Brings all operands to every device."""
    for number, aval in enumerate(operation.inputs):
        reader.move_operand(operation, number, ((),) * rank_of(aval))
