"""The rule of `shard_map`: a program of one device, which says itself what devices send each other."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from jax.extend import core

from gspmd_lm.foresight import equations
from gspmd_lm.foresight.equations import CALLS, called_jaxprs, read_loop
from gspmd_lm.foresight.propagation.control import least_of, possible_branches
from gspmd_lm.foresight.propagation.matmuls import kernel_flops
from gspmd_lm.foresight.propagation.reader import Operation, Reader, Rule
from gspmd_lm.foresight.propagation.record import UNKNOWN_TRIP_COUNT, Record
from gspmd_lm.foresight.propagation.sharding import (
    ArraySharding,
    array_bytes,
    axes_of,
    rank_of,
    replicated_sharding,
    without,
)
from gspmd_lm.foresight.propagation.wanted import ADDITIVE, terms, use_counts

_SUMS = ("psum", "psum_invariant")
_COLLECTIVES = {
    **dict.fromkeys(_SUMS, "all-reduce"),
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "reduce_scatter": "reduce-scatter",
    "all_gather": "all-gather",
    "all_gather_invariant": "all-gather",
    "all_to_all": "all-to-all",
    "ppermute": "collective-permute",
    "ragged_all_to_all": "ragged-all-to-all",
}
_NO_COLLECTIVES = ("axis_index", "pvary", "pcast", "pbroadcast")  # they name mesh axes, and send nothing
# Those that may be done before a sum over devices as well as after it: of its terms, and of one factor.
ADDED = ADDITIVE | {*_NO_COLLECTIVES, *_SUMS}
_SCALING = {"mul", "div"}


def shard_map(reader: Reader, operation: Operation) -> list[ArraySharding]:
    """A function of what one device has: its operands are brought to where it says, and its collectives are read.

    Mesh axes that it leaves to the compiler are noted as unknown: all that it does is taken to be shared out over them.
    """
    body = getattr(operation.params["jaxpr"], "jaxpr", operation.params["jaxpr"])
    manual = reader.mesh.parts(operation.params["newly_manual_axes"])
    left: set[str] = set()  # to the compiler
    for number, spec in enumerate(operation.params["in_specs"]):
        kept = without(operation.operands[number].dims, manual)
        left.update(*kept)
        asked = reader.mesh.dims(spec, operation.inputs[number].ndim)
        target = tuple((*names, *others) for names, others in zip(asked, kept, strict=True))
        reader.move_operand(operation, number, target, chosen=False)
    if left:
        reader.add_unknown("a shard_map that leaves mesh axes to the compiler")
    ranks = [aval.ndim for aval in operation.inputs]
    operands = [one._replace(loop_depth=min(one.loop_depth, len(reader.loops))) for one in operation.operands]
    device = PerDevice(reader, operation.stack, 1 / reader.mesh.shards(left))
    places = map(reader.mesh.dims, operation.params["in_specs"], ranks)
    programs = reader.programs
    reader.programs *= reader.mesh.shards(axes_of(itertools.chain(*places)))  # along other axes, all do the same
    results = device.read(body, operands)
    reader.programs = programs
    specs = [
        reader.mesh.dims(spec, var.aval.ndim)
        for spec, var in zip(operation.params["out_specs"], body.outvars, strict=True)
    ]
    if all(one.unreduced for one in results) and len(operation.terms) == len(results):
        # XLA makes a sum that a loop adds to what it carries once, after the loop, also where it is constrained before.
        results = [one._replace(loop_depth=min(one.loop_depth, len(reader.loops) - 1)) for one in results]
        results = device.add_up_all(operation, body, results)
        return [ArraySharding(dims, loop_depth=len(reader.loops)) for dims in specs]
    if left or any(one.unreduced & axes_of(dims) for one, dims in zip(results, specs, strict=True)):
        results = device.add_up_all(operation, body, results)  # sums that are pieces of the results
    return [
        ArraySharding(dims, one.unreduced, loop_depth=one.loop_depth) for dims, one in zip(specs, results, strict=True)
    ]


@dataclasses.dataclass
class PerDevice:
    """Reads the program of one device. Of each array it follows which loops change it, and which array it is.

    A sum over devices is made as late as possible, as compilers do: after what may be done before as well as after it,
    once for sums that are added, and behind a loop that only adds it to what it carries. Until then the array is the
    partial sum, and `unreduced` has the mesh axes over which it is summed.
    """

    reader: Reader
    stack: str
    share: float = 1.0  # of what the program does, that one device does; less where the compiler shares it out further

    def read(self, jaxpr: Any, arguments: Sequence[ArraySharding]) -> list[ArraySharding]:
        """The known facts about the results of a jaxpr, from those about its arguments."""
        known = {
            var: replicated_sharding(rank_of(var.aval))._replace(
                loop_depth=one.loop_depth, identity=one.identity, unreduced=one.unreduced
            )
            for var, one in zip(jaxpr.invars, arguments, strict=True)
        }
        uses = use_counts(jaxpr)

        def array(atom: Any) -> ArraySharding:
            if isinstance(atom, core.Literal):
                return replicated_sharding(rank_of(atom.aval))._replace(identity=str(atom.val))
            return known.get(atom, replicated_sharding(rank_of(atom.aval)))

        for equation in jaxpr.eqns:
            names = equations.join_names(self.stack, equation)
            operation = Operation(equation, names, [array(atom) for atom in equation.invars], {})
            kept = self._kept_sums(operation)
            for number, atom in enumerate(equation.invars):
                if operation.operands[number].unreduced - kept:
                    known[atom] = self._add_up(operation, atom.aval, operation.operands[number])
                    operation.operands[number] = known[atom]
            for var, result in zip(equation.outvars, self._results(operation), strict=True):
                known[var] = self._add_up(operation, var.aval, result) if uses[var] > 1 else result
        return [array(atom) for atom in jaxpr.outvars]

    def _kept_sums(self, operation: Operation) -> frozenset[str]:
        """The mesh axes over which an operation may be given partial sums, and gives one itself."""
        primitive, operands = operation.primitive, operation.operands
        sums = [one.unreduced for one in operands if one.unreduced]
        if not sums or primitive in CALLS or (primitive in _SUMS and not operation.params.get("axis_index_groups")):
            return frozenset().union(*sums)
        scales = primitive in _SCALING and len(sums) == 1 and not (primitive == "div" and operands[-1].unreduced)
        sum_bytes = sum(
            array_bytes(aval) for aval, one in zip(operation.inputs, operands, strict=True) if one.unreduced
        )
        grows = sum(array_bytes(var.aval) for var in operation.equation.outvars) > sum_bytes
        return sums[0] if (primitive in ADDED or scales) and len({*sums}) == 1 and not grows else frozenset()

    def _add_up(self, operation: Operation, aval: Any, array: ArraySharding) -> ArraySharding:
        """An array with its partial sums added up, which XLA does once for each array."""
        done = "sum", array.identity, array.unreduced
        if array.unreduced and (array.identity is None or done not in self.reader.record.copies):
            costs = self.reader.mesh.cost("all-reduce", array.unreduced, array_bytes(aval) * self.share)
            self.reader.add_transfers(operation, aval, array, costs)
            self.reader.record.copies[done] = ()
        return array.without_partial_sums()

    def add_up_all(self, operation: Operation, jaxpr: Any, results: Sequence[ArraySharding]) -> list[ArraySharding]:
        """The results of a program, or those of an iteration of a loop, with their partial sums added up."""
        return [self._add_up(operation, var.aval, one) for var, one in zip(jaxpr.outvars, results, strict=True)]

    def _results(self, operation: Operation) -> list[ArraySharding]:
        primitive, params, operands = operation.primitive, operation.params, operation.operands
        if primitive in _COLLECTIVES:
            return self._collective(operation)
        if primitive == "scan":
            return self._once(operation, self._scan)
        if primitive == "while" and operation.name.trip_count == "0":
            return self._results_that_change_with(operation, operands)
        if primitive == "while":
            self.reader.add_unknown(UNKNOWN_TRIP_COUNT)
            loop = read_loop(operation.equation)
            asked, captured, begin, _ = loop.split(operands)
            self._inside(loop.condition, operation, [*asked, *begin])
            return self.add_up_all(operation, loop.body, self._inside(loop.body, operation, [*captured, *begin]))
        if primitive == "pallas_call":
            self.reader.add_flops(operation, kernel_flops(params) * self.share * self._filled_part(operation))
        elif primitive == "cond":
            self._branches(operation)
        elif inner := next(iter(called_jaxprs(params)), None):
            return self._inside(inner, operation, operands)
        elif "axis_name" in params and primitive not in _NO_COLLECTIVES:
            self.reader.add_unknown(primitive)
        if primitive == "optimization_barrier":
            return self._results_that_change_with(operation, operands, object())  # other arrays for collectives
        identity, done = self.reader.value(operation), self.reader.record.results
        if identity is None or identity not in done:  # what is computed twice is computed once
            part = self._filled_part(operation) if primitive == equations.GROUPED else 1.0
            self.reader.add_flops(operation, equations.flops(operation.equation) * self.share * part)
            done[identity] = []
        kept, results = self._kept_sums(operation), self._results_that_change_with
        return [one._replace(unreduced=kept) for one in results(operation, operands, identity)]

    def _once(self, operation: Operation, rule: Callable[[Operation], list[ArraySharding]]) -> list[ArraySharding]:
        """What a rule gives, whose notes are taken once for operations that compute the same."""
        identity, done = self.reader.value(operation), self.reader.record.results
        if identity is None:
            return rule(operation)
        if identity not in done:
            results = rule(operation)
            done[identity] = [
                one if one.identity is not None else one._replace(identity=(identity, n))
                for n, one in enumerate(results)
            ]
        return done[identity]

    def _results_that_change_with(
        self, operation: Operation, operands: Sequence[ArraySharding], identity: Any = None
    ) -> list[ArraySharding]:
        depth = max((one.loop_depth for one in operands), default=0)
        return [
            replicated_sharding(rank_of(var.aval))._replace(loop_depth=depth, identity=identity and (identity, n))
            for n, var in enumerate(operation.equation.outvars)
        ]

    def _inside(self, jaxpr: Any, operation: Operation, arguments: Sequence[ArraySharding]) -> list[ArraySharding]:
        if len(jaxpr.invars) != len(arguments):  # such as a function with a derivative written by hand
            for aval, one in zip(operation.inputs, operation.operands, strict=True):
                self._add_up(operation, aval, one)
            depth = max((one.loop_depth for one in arguments), default=0)
            arguments = [ArraySharding(loop_depth=depth)] * len(jaxpr.invars)
        return dataclasses.replace(self, stack=operation.stack).read(jaxpr, arguments)

    def _scan(self, operation: Operation) -> list[ArraySharding]:
        loop = read_loop(operation.equation)
        if not loop.times:
            return self._results_that_change_with(operation, operation.operands)
        body, changed = loop.body, ArraySharding(loop_depth=len(self.reader.loops) + 1)
        inside = [*operation.operands[: loop.constants], *[changed] * (len(body.invars) - loop.constants)]
        added = terms(body, range(loop.carried), use_counts(body))
        only_added = {n for n, var in enumerate(loop.split(body.invars)[2]) if added.get(var) == n}
        self.reader.loops.append(loop.times)
        results = self._inside(body, operation, inside)
        sums = [one.unreduced if n in only_added else frozenset() for n, one in enumerate(results)]
        in_each = [one.without_partial_sums() if kept else one for one, kept in zip(results, sums, strict=True)]
        self.add_up_all(operation, body, in_each)
        self.reader.loops.pop()
        around = self._results_that_change_with(operation, operation.operands)
        return [one._replace(unreduced=kept) for one, kept in zip(around, sums, strict=True)]

    def _branches(self, operation: Operation) -> None:
        """Adds what the branch sends that sends least, and what the one computes that computes most."""
        records: list[Record] = []
        for branch in possible_branches(self.reader, operation):
            with self.reader.trial() as record:
                results = self._inside(branch.jaxpr, operation, operation.operands[1:])
                self.add_up_all(operation, branch.jaxpr, results)
            records.append(record)
        self.reader.record.add(least_of(records))

    def _collective(self, operation: Operation) -> list[ArraySharding]:
        """XLA does the same collective of the same arrays once, in a loop and after what it takes out of loops."""
        names = operation.params.get("axes") or operation.params["axis_name"]
        named = (names,) if isinstance(names, str) else names
        over = self.reader.mesh.parts(name for name in named if isinstance(name, str))
        inputs, operands = operation.inputs, operation.operands
        kind, groups = _COLLECTIVES[operation.primitive], operation.params.get("axis_index_groups")
        if operation.primitive in _SUMS and not groups:
            results = self._results_that_change_with(operation, operands, self.reader.value(operation))
            return [
                one._replace(unreduced=operand.unreduced | frozenset(over), loop_depth=operand.loop_depth)
                for one, operand in zip(results, operands, strict=True)
            ]
        pairs = operation.params.get("perm")
        if pairs is not None and all(source == target for source, target in pairs):  # nobody sends anything
            return self._results_that_change_with(operation, operands, self.reader.value(operation))
        if kind == "ragged-all-to-all":
            # One of operand and result is a buffer with more room than even loads fill: the fewer rows travel.
            few, many = sorted(inputs[:2], key=lambda aval: aval.shape[0])
            self.reader.filled[many.shape[0]] = few.shape[0] / many.shape[0]
            inputs, operands = [few], operands[:1]
        identity = self.reader.value(operation)
        if identity is None or identity not in self.reader.record.copies:
            for aval, operand in zip(inputs, operands, strict=True):
                sent_bytes, group = array_bytes(aval) * self.share, len(groups[0]) if groups else 0
                costs = self.reader.mesh.cost(kind, over, sent_bytes, group)
                self.reader.add_transfers(operation, aval, operand, costs)
            if identity is not None:
                self.reader.record.copies[identity] = ()
        return self._results_that_change_with(operation, operation.operands, identity)

    def _filled_part(self, operation: Operation) -> float:
        rows = (aval.shape[0] for aval in operation.inputs if aval.shape)
        return next((self.reader.filled[n] for n in rows if n in self.reader.filled), 1.0)


RULES: dict[str, Rule] = {"shard_map": shard_map}
