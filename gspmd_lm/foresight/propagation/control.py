"""The rules of primitives that run another jaxpr: calls, loops, branches, and `shard_map`.

In a `shard_map`, the program says itself what devices send each other.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from jax.extend import core

from gspmd_lm.foresight import equations
from gspmd_lm.foresight.equations import called_jaxprs, same_rank
from gspmd_lm.foresight.propagation.matmuls import kernel_flops
from gspmd_lm.foresight.propagation.reader import CALLS, Operation, Reader, Rule
from gspmd_lm.foresight.propagation.record import Record
from gspmd_lm.foresight.propagation.sharding import ArraySharding, Dims, array_bytes, rank_of, replicated, without
from gspmd_lm.foresight.propagation.wanted import ADDITIVE, terms, use_counts

_FIXED_POINT_TURNS = 3  # iterations of a loop after which what it carries has settled, in all programs that were tried
_COLLECTIVES = {
    "psum": "all-reduce",
    "psum_invariant": "all-reduce",
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
_SUMS = ADDITIVE | {"psum", "psum_invariant", *_NO_COLLECTIVES}


def call(reader: Reader, operation: Operation) -> list[ArraySharding]:
    """A function that is called: its operations are read in its place.

    A jitted function may say how its arguments and results are sharded. XLA does not merge what `jax.checkpoint`
    computes again with what was computed before, unless `prevent_cse` is off. A barrier stands before it then, behind
    which nothing leaves a loop that changes any of its operands.
    """
    inner = called_jaxprs(operation.params)[0]
    operands = _as_asked(reader, operation, operation.params.get("in_shardings", ()), inner.invars, operation.operands)
    if operation.params.get("prevent_cse"):
        depth = max((operand.loop_depth for operand in operands), default=0)
        operands = [dataclasses.replace(_renamed(reader, operand), loop_depth=depth) for operand in operands]
    asked = operation.params.get("out_shardings", ())
    wanted = [operation.wanted.get(var) for var in operation.equation.outvars]
    for number, sharding in enumerate(asked):
        if hasattr(sharding, "spec"):
            wanted[number] = reader.mesh.dims(sharding.spec, inner.outvars[number].aval.ndim)
    results = reader.read(inner, operands, operation.stack, wanted, operation.terms)
    return _as_asked(reader, operation, asked, inner.outvars, results)


def _renamed(reader: Reader, array: ArraySharding) -> ArraySharding:
    """The same array, which is another one for collectives."""
    renamed = dataclasses.replace(array, identity=object())
    if array.identity is not None:
        reader.record.values.link(renamed.identity, array.identity)
    return renamed


def scan(reader: Reader, operation: Operation) -> list[ArraySharding]:
    """A loop with a trip count.

    What it takes apart is gathered along the dimension that it runs over. What it carries has the sharding that it has
    after an iteration. A partial sum may be carried on if it begins as one, or as zeros, and is only added to.
    """
    body = called_jaxprs(operation.params)[0]
    carried = same_rank(body.outvars, operation.equation.outvars)
    constants = same_rank(body.invars, operation.equation.invars) - carried
    for number in range(constants + carried, len(operation.operands)):  # each iteration takes a part of these
        target = ((), *operation.operands[number].dims[1:])
        reader.move_operand(operation, number, target, keep_unreduced=True)  # or exchanged, to split what is taken
    begin, stacked = operation.operands[constants : constants + carried], operation.operands[constants + carried :]
    reader.loops.append(operation.params["length"])
    depth, once = len(reader.loops), operation.params["length"] == 1  # a single iteration is written out: no loop

    def inside(one: ArraySharding, outside: ArraySharding) -> ArraySharding:
        if once:
            return dataclasses.replace(_renamed(reader, one), loop_depth=outside.loop_depth)
        return dataclasses.replace(one, loop_depth=depth, identity=object())

    added = terms(body, range(carried), use_counts(body))
    sums = [n for n, var in enumerate(body.invars[constants:][:carried]) if added.get(var) == n and not once]
    slices = [inside(dataclasses.replace(one, dims=one.dims[1:]), one) for one in stacked]

    def iterate(carry: Sequence[ArraySharding]) -> list[ArraySharding]:
        carried = map(inside, carry, begin)
        operands = [*operation.operands[:constants], *carried, *slices]
        return reader.read(body, operands, operation.stack, accumulated=sums)

    with reader.trial():
        carry = _settled_carry(iterate, begin)
    for aval, before, one in zip(operation.inputs[constants:], begin, carry, strict=False):
        before = before.reduced() if before.unreduced == one.unreduced else before
        reader.move(operation, aval, before, one.dims)
    results = iterate(carry)
    for var, result, one in zip(body.outvars, results, carry, strict=False):
        if result.unreduced == one.unreduced:
            result = result.reduced()
        elif one.unreduced:
            reader.add_unknown("a partial sum that a loop carries")
        reader.move(operation, var.aval, result, one.dims)
    reader.loops.pop()
    around = min(depth - 1, max((one.loop_depth for one in operation.operands), default=0))
    stacks = [dataclasses.replace(one, dims=((), *one.dims)) for one in results[carried:]]
    identities = [object() for _ in (*carry, *stacks)]
    _note_stacks(reader, results, identities, stacked, slices, carried if not once else None)
    return [
        dataclasses.replace(one, loop_depth=around, identity=identity, scatter=None)
        for one, identity in zip((*carry, *stacks), identities, strict=True)
    ]


def _note_stacks(
    reader: Reader, results: Sequence[ArraySharding], identities: Sequence[object], stacked: Sequence[ArraySharding],
    slices: Sequence[ArraySharding], carried: int | None,
) -> None:  # fmt: skip
    """Notes which results of a loop, of which `carried` are carried and the others stacked, are other arrays too.

    What is stacked twice is one array, as is what the loop takes apart and stacks again. None: it is no loop.
    """
    values = reader.record.values
    if carried is None:
        for identity, result in zip(identities, results, strict=True):
            values.link(identity, result.identity)
        return
    known = {one.identity: outside.identity for one, outside in zip(slices, stacked, strict=True)}
    for identity, result in zip(identities[carried:], results[carried:], strict=True):
        if result.identity in known:
            values.link(identity, known[result.identity])
        else:
            known[result.identity] = identity
            values.stacked.add(identity)


def _settled_carry(iterate: Any, begin: Sequence[ArraySharding]) -> list[ArraySharding]:
    """The sharding of what a loop carries, once another iteration does not change it."""
    carry = list(begin)
    sums = [one.is_constant or bool(one.unreduced) for one in begin]  # what may be carried as a partial sum
    for turn in range(_FIXED_POINT_TURNS):
        after = iterate(carry)
        settled = []
        for number, (one, result) in enumerate(zip(carry, after, strict=False)):
            dims = one.dims if result.is_constant else result.dims
            unreduced = result.unreduced if sums[number] else frozenset()
            sums[number] &= turn == 0 or not one.unreduced or one.unreduced == unreduced
            settled.append(ArraySharding(dims, unreduced))
        if [(one.dims, one.unreduced) for one in settled] == [(one.dims, one.unreduced) for one in carry]:
            return settled
        carry = settled
    return carry


def while_loop(reader: Reader, operation: Operation) -> list[ArraySharding]:
    """A loop whose trip count is not known: it counts once, and is noted as unknown."""
    reader.add_unknown("the trip count of a while loop")
    condition, body = (operation.params[name].jaxpr for name in ("cond_jaxpr", "body_jaxpr"))
    skipped, constants = operation.params["cond_nconsts"], operation.params["body_nconsts"]
    asked, captured = operation.operands[:skipped], operation.operands[skipped:][:constants]
    begin = operation.operands[skipped + constants :]
    avals = operation.inputs[skipped + constants :]
    carry = [reader.move(operation, aval, one, one.dims) for aval, one in zip(avals, begin, strict=True)]
    reader.loops.append(1)
    depth = len(reader.loops)

    def iterate(carry: Sequence[ArraySharding]) -> list[ArraySharding]:
        inside = [dataclasses.replace(one, loop_depth=depth, identity=object()) for one in carry]
        reader.read(condition, [*asked, *inside], operation.stack)
        return reader.read(body, [*captured, *inside], operation.stack)

    with reader.trial():
        carry = [one.reduced() for one in _settled_carry(iterate, carry)]
    results = iterate(carry)
    for var, result, one in zip(body.outvars, results, carry, strict=True):
        reader.move(operation, var.aval, result, one.dims)
    reader.loops.pop()
    return [dataclasses.replace(one, loop_depth=depth - 1, identity=None) for one in carry]


def branches(reader: Reader, operation: Operation) -> list[ArraySharding]:
    """One of several functions: what the one sends that sends least, and what the one computes that computes most."""
    records: list[Record] = []
    results: list[list[ArraySharding]] = []
    for branch in operation.params["branches"]:
        with reader.trial() as record:
            after = reader.read(branch.jaxpr, operation.operands[1:], operation.stack)
            avals = [var.aval for var in branch.jaxpr.outvars]
            results.append(
                [reader.move(operation, aval, one, one.dims) for aval, one in zip(avals, after, strict=True)]
            )
        records.append(record)
    reader.record.add(least_of(records))
    depth = max((one.loop_depth for one in (*operation.operands, *itertools.chain(*results))), default=0)
    return [
        ArraySharding(_least_split(one.dims for one in each), loop_depth=depth) for each in zip(*results, strict=True)
    ]


def least_of(records: Sequence[Record]) -> Record:
    """Of several branches, what the one sends that sends least, and what the one computes that computes most."""
    least = min(records, key=lambda record: record.sent_bytes)
    dearest = max(records, key=lambda record: sum(record.flops.values()))
    return dataclasses.replace(least, flops=dearest.flops)


def _least_split(shardings: Iterable[Dims]) -> Dims:
    return min(shardings, key=lambda dims: sum(map(len, dims)))


def barrier(reader: Reader, operation: Operation) -> list[ArraySharding]:
    """What comes out is what went in."""
    return [_renamed(reader, operand) for operand in operation.operands]


def device_put(reader: Reader, operation: Operation) -> list[ArraySharding]:
    """The same arrays in another memory, or where the program asks for them."""
    atoms = operation.equation.invars
    return _as_asked(reader, operation, operation.params["devices"], atoms, barrier(reader, operation))


def _as_asked(
    reader: Reader, operation: Operation, shardings: Iterable[Any], atoms: Sequence[Any],
    arrays: Sequence[ArraySharding],
) -> list[ArraySharding]:  # fmt: skip
    """Arrays in the shardings that a jitted function asks for; None or an unspecified one leaves an array as it is."""
    arrays = list(arrays)
    for number, (sharding, atom) in enumerate(zip(shardings, atoms, strict=False)):
        if hasattr(sharding, "spec"):
            target = reader.mesh.dims(sharding.spec, atom.aval.ndim)
            arrays[number] = reader.move(operation, atom.aval, arrays[number], target)
    return arrays


# What devices do each for itself


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
    only_sums = all(equation.primitive.name in _SUMS for equation in body.eqns)
    is_late = only_sums and len(operation.terms) == len(operation.equation.outvars)
    # On TPUs and GPUs, XLA makes a sum over devices that a loop adds to what it carries once, after the loop.
    depth = len(reader.loops) - is_late
    operands = [dataclasses.replace(one, loop_depth=min(one.loop_depth, depth)) for one in operation.operands]
    results = PerDevice(reader, operation.stack, 1 / reader.mesh.shards(left)).read(body, operands)
    return [
        ArraySharding(reader.mesh.dims(spec, var.aval.ndim), loop_depth=result.loop_depth + is_late)
        for var, spec, result in zip(operation.equation.outvars, operation.params["out_specs"], results, strict=True)
    ]


@dataclasses.dataclass
class PerDevice:
    """Reads the program of one device. Of each array it follows which loops change it, and which array it is."""

    reader: Reader
    stack: str
    share: float = 1.0  # of what the program does, that one device does; less where the compiler shares it out further
    # A buffer for the worst case is filled as balanced routing fills it. Rows of such buffers -> how much of them is.
    filled: dict[int, float] = dataclasses.field(default_factory=dict)

    def read(self, jaxpr: Any, arguments: Sequence[ArraySharding]) -> list[ArraySharding]:
        """What is known of the results of a jaxpr, from what is known of its arguments."""
        known = {
            var: dataclasses.replace(replicated(rank_of(var.aval)), loop_depth=one.loop_depth, identity=one.identity)
            for var, one in zip(jaxpr.invars, arguments, strict=True)
        }

        def array(atom: Any) -> ArraySharding:
            if isinstance(atom, core.Literal):
                return dataclasses.replace(replicated(rank_of(atom.aval)), identity=str(atom.val))
            return known.get(atom, replicated(rank_of(atom.aval)))

        for equation in jaxpr.eqns:
            names = "/".join(filter(None, (self.stack, str(equation.source_info.name_stack))))
            results = self._results(Operation(equation, names, [array(atom) for atom in equation.invars], {}))
            known.update(zip(equation.outvars, results, strict=True))
        return [array(atom) for atom in jaxpr.outvars]

    def _results(self, operation: Operation) -> list[ArraySharding]:
        primitive, params, operands = operation.primitive, operation.params, operation.operands
        if primitive in _COLLECTIVES:
            return self._collective(operation)
        if primitive == "scan":
            return self._scan(operation)
        if primitive == "while":
            self.reader.add_unknown("the trip count of a while loop")
            asked, captured = operands[: params["cond_nconsts"]], operands[params["cond_nconsts"] :]
            self._inside(params["cond_jaxpr"].jaxpr, operation, [*asked, *captured[params["body_nconsts"] :]])
            return self._inside(params["body_jaxpr"].jaxpr, operation, captured)
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
        part = self._filled_part(operation) if primitive == equations.GROUPED else 1.0
        self.reader.add_flops(operation, equations.flops(operation.equation) * self.share * part)
        return self._results_that_change_with(operation, operands, self.reader.value(operation))

    def _results_that_change_with(
        self, operation: Operation, operands: Sequence[ArraySharding], identity: Any = None
    ) -> list[ArraySharding]:
        depth = max((one.loop_depth for one in operands), default=0)
        return [
            dataclasses.replace(replicated(rank_of(var.aval)), loop_depth=depth, identity=identity and (identity, n))
            for n, var in enumerate(operation.equation.outvars)
        ]

    def _inside(self, jaxpr: Any, operation: Operation, arguments: Sequence[ArraySharding]) -> list[ArraySharding]:
        if len(jaxpr.invars) != len(arguments):  # such as a function with a derivative written by hand
            depth = max((one.loop_depth for one in arguments), default=0)
            arguments = [ArraySharding(loop_depth=depth)] * len(jaxpr.invars)
        return dataclasses.replace(self, stack=operation.stack).read(jaxpr, arguments)

    def _scan(self, operation: Operation) -> list[ArraySharding]:
        body, changed = called_jaxprs(operation.params)[0], len(self.reader.loops) + 1
        carried = same_rank(body.outvars, operation.equation.outvars)
        constants = same_rank(body.invars, operation.equation.invars) - carried
        inside = [
            one if number < constants else ArraySharding(loop_depth=changed)
            for number, one in enumerate(operation.operands)
        ]
        self.reader.loops.append(operation.params["length"])
        self._inside(body, operation, inside)
        self.reader.loops.pop()
        return self._results_that_change_with(operation, operation.operands)

    def _branches(self, operation: Operation) -> None:
        """Adds what the branch sends that sends least, and what the one computes that computes most."""
        records: list[Record] = []
        for branch in operation.params["branches"]:
            with self.reader.trial() as record:
                self._inside(branch.jaxpr, operation, operation.operands[1:])
            records.append(record)
        self.reader.record.add(least_of(records))

    def _collective(self, operation: Operation) -> list[ArraySharding]:
        """XLA does the same collective of the same arrays once, in a loop and after what it takes out of loops."""
        names = operation.params.get("axes") or operation.params["axis_name"]
        named = (names,) if isinstance(names, str) else names
        over = self.reader.mesh.parts(name for name in named if isinstance(name, str))
        inputs, operands = operation.inputs, operation.operands
        kind, groups = _COLLECTIVES[operation.primitive], operation.params.get("axis_index_groups")
        if kind == "ragged-all-to-all":
            # One of operand and result is a buffer for the worst case: the fewer rows travel.
            few, many = sorted(inputs[:2], key=lambda aval: aval.shape[0])
            self.filled[many.shape[0]] = few.shape[0] / many.shape[0]
            inputs, operands = [few], operands[:1]
        identity = self.reader.value(operation)
        if identity is None or identity not in self.reader.record.copies:
            for aval, operand in zip(inputs, operands, strict=True):
                sent_bytes, group = array_bytes(aval) * self.share, len(groups[0]) if groups else 0
                costs = self.reader.mesh.cost(kind, over, sent_bytes, group)
                self.reader.add_transfers(operation, aval, operand, operand.dims, costs)
            if identity is not None:
                self.reader.record.copies[identity] = ()
        return self._results_that_change_with(operation, operation.operands, identity)

    def _filled_part(self, operation: Operation) -> float:
        rows = (aval.shape[0] for aval in operation.inputs if aval.shape)
        return next((self.filled[n] for n in rows if n in self.filled), 1.0)


RULES: dict[str, Rule] = {
    **dict.fromkeys(CALLS, call),
    "scan": scan,
    "while": while_loop,
    "cond": branches,
    "optimization_barrier": barrier,
    "device_put": device_put,
    "shard_map": shard_map,
}
