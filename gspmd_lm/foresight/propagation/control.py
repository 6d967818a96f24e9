"""The rules of primitives that run another jaxpr: calls, loops and branches."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from gspmd_lm.foresight import equations
from gspmd_lm.foresight.equations import CALLS, called_jaxprs, read_loop
from gspmd_lm.foresight.propagation.reader import Operation, Reader, Rule
from gspmd_lm.foresight.propagation.record import UNKNOWN_TRIP_COUNT, Record
from gspmd_lm.foresight.propagation.sharding import ArraySharding, rank_of, replicated_sharding
from gspmd_lm.foresight.propagation.wanted import terms, use_counts

_FIXED_POINT_TURNS = 3  # iterations of a loop after which what it carries has settled, in all programs that were tried


def call(reader: Reader, operation: Operation) -> list[ArraySharding]:
    """A function that is called: its operations are read in its place.

    A jitted function may say how its arguments and results are sharded. XLA does not merge what `jax.checkpoint`
    computes again with what was computed before, unless `prevent_cse` is off. A barrier stands before it then, behind
    which nothing leaves a loop that changes any of its operands.
    """
    inner = called_jaxprs(operation.params)[0]
    operands = _move_as_asked(
        reader, operation, operation.params.get("in_shardings", ()), inner.invars, operation.operands
    )
    if operation.params.get("prevent_cse"):
        depth = max((operand.loop_depth for operand in operands), default=0)
        operands = [_rename(reader, operand)._replace(loop_depth=depth) for operand in operands]
    asked = operation.params.get("out_shardings", ())
    wanted = [operation.wanted.get(var) for var in operation.equation.outvars]
    for number, sharding in enumerate(asked):
        if hasattr(sharding, "spec"):
            wanted[number] = reader.mesh.dims(sharding.spec, inner.outvars[number].aval.ndim)
    results = reader.read(inner, operands, operation.stack, wanted, operation.terms)
    return _move_as_asked(reader, operation, asked, inner.outvars, results)


def partitioned_call(reader: Reader, operation: Operation) -> list[ArraySharding]:
    """A function that says in Python how it is split, which is noted as unknown: it is read as any other function."""
    reader.add_unknown(operation.primitive)
    return call(reader, operation)


def linear_solve(reader: Reader, operation: Operation) -> list[ArraySharding]:
    """A linear system: the function that solves it is read. What it captures stands before the right-hand side."""
    lengths, solve = operation.params["const_lengths"], operation.params["jaxprs"].solve.jaxpr
    begin = lengths.matvec + lengths.vecmat
    captured = operation.operands[begin : begin + lengths.solve]
    return reader.read(solve, [*captured, *operation.operands[sum(lengths) :]], operation.stack)


def _rename(reader: Reader, array: ArraySharding) -> ArraySharding:
    """The array under a new identity, so that its collectives are not taken for those of the old one."""
    renamed = array._replace(identity=object())
    if array.identity is not None:
        reader.record.values.link(renamed.identity, array.identity)
    return renamed


def scan(reader: Reader, operation: Operation) -> list[ArraySharding]:
    """A loop with a trip count.

    What it takes apart is gathered along the dimension that it runs over. What it carries has the sharding that it has
    after an iteration. A partial sum may be carried on if it begins as one, or as zeros, and is only added to.
    """
    loop = read_loop(operation.equation)
    body, constants, carried = loop.body, loop.constants, loop.carried
    for number in range(constants + carried, len(operation.operands)):  # each iteration takes a part of these
        target = ((), *operation.operands[number].dims[1:])
        # It is gathered, or exchanged where that splits another dimension.
        reader.move_operand(operation, number, target, keep_unreduced=True)
    _, captured, begin, stacked = loop.split(operation.operands)
    if not loop.times:  # it hands on what it is given
        stacks = operation.equation.outvars[carried:]
        return [*begin, *(replicated_sharding(rank_of(var.aval), is_constant=True) for var in stacks)]
    reader.loops.append(loop.times)
    depth, once = len(reader.loops), loop.times == 1  # a single iteration is written out: no loop

    def inside(one: ArraySharding, outside: ArraySharding) -> ArraySharding:
        if once:
            return _rename(reader, one)._replace(loop_depth=outside.loop_depth)
        return one._replace(loop_depth=depth, identity=object())

    slices = [inside(one._replace(dims=one.dims[1:]), one) for one in stacked]

    def enter(carry: Sequence[ArraySharding]) -> None:
        for aval, before, one in zip(operation.inputs[constants:], begin, carry, strict=False):
            before = before.without_partial_sums() if before.unreduced == one.unreduced else before
            reader.move(operation, aval, before, one.dims)

    def iterate(carry: Sequence[ArraySharding]) -> list[ArraySharding]:
        carried = (inside(one._replace(identity=None), outside) for one, outside in zip(carry, begin, strict=True))
        operands = [*captured, *carried, *slices]
        return reader.read(body, operands, operation.stack, accumulated=[n for n, one in enumerate(only_added) if one])

    added = {} if once else terms(body, range(carried), use_counts(body))
    # What is only added to may be a partial sum, whatever it begins with, as where it begins with zeros.
    only_added = [added.get(var) == n for n, var in enumerate(body.invars[constants:][:carried])]
    marked = [
        one._replace(is_constant=one.is_constant or is_sum) for one, is_sum in zip(begin, only_added, strict=True)
    ]
    carry, results = _settle(reader, marked, enter, iterate)
    for var, result, one in zip(body.outvars, results, carry, strict=False):
        if result.unreduced == one.unreduced:
            result = result.without_partial_sums()
        elif one.unreduced:
            reader.add_unknown("a partial sum that a loop carries")
        reader.move(operation, var.aval, result, one.dims)
    reader.loops.pop()
    around = min(depth - 1, max((one.loop_depth for one in operation.operands), default=0))
    stacks = [one._replace(dims=((), *one.dims)) for one in results[carried:]]
    identities = [object() for _ in (*carry, *stacks)]
    _note_stacks(reader, results, identities, stacked, slices, carried if not once else None)
    return [
        one._replace(loop_depth=around, identity=identity, scatter=None)
        for one, identity in zip((*carry, *stacks), identities, strict=True)
    ]


def _note_stacks(
    reader: Reader,
    results: Sequence[ArraySharding],
    identities: Sequence[object],
    stacked: Sequence[ArraySharding],
    slices: Sequence[ArraySharding],
    carried: int | None,
) -> None:
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


def _settle(
    reader: Reader,
    begin: Sequence[ArraySharding],
    enter: Callable[[Sequence[ArraySharding]], None],
    iterate: Callable[[Sequence[ArraySharding]], list[ArraySharding]],
) -> tuple[list[ArraySharding], list[ArraySharding]]:
    """What a loop carries, once another iteration does not change its sharding; and the results of that iteration.

    enter: brings what the loop begins with to the sharding that it carries. The notes of an iteration are taken back if
    its result has another sharding than what it was given.
    """
    carry = list(begin)
    sums = [one.is_constant or bool(one.unreduced) for one in begin]  # what may be carried as a partial sum
    for turn in range(_FIXED_POINT_TURNS):
        before = reader.record.copy()
        enter(carry)
        results = iterate(carry)
        settled = []
        for number, (one, result) in enumerate(zip(carry, results, strict=False)):
            dims = one.dims if result.is_constant else result.dims
            unreduced = result.unreduced if sums[number] else frozenset()
            sums[number] &= turn == 0 or not one.unreduced or one.unreduced == unreduced
            settled.append(ArraySharding(dims, unreduced))
        if settled == [one._replace(loop_depth=0, identity=None) for one in carry]:
            return settled, results
        reader.record.take_back(before)
        is_settled = [one[:2] for one in settled] == [one[:2] for one in carry]
        carry = settled
        if is_settled:  # but what it began with was made of constants
            break
    enter(carry)
    return carry, iterate(carry)


def while_loop(reader: Reader, operation: Operation) -> list[ArraySharding]:
    """A loop whose trip count is not known: it counts once, and is noted as unknown. It may be taken not to run."""
    loop = read_loop(operation.equation)
    asked, captured, begin, _ = loop.split(operation.operands)
    if operation.name.trip_count == "0":
        return [*begin]
    reader.add_unknown(UNKNOWN_TRIP_COUNT)
    avals = loop.split(operation.inputs)[2]
    carry = [reader.move(operation, aval, one, one.dims) for aval, one in zip(avals, begin, strict=True)]
    reader.loops.append(1)
    depth = len(reader.loops)

    def iterate(carry: Sequence[ArraySharding]) -> list[ArraySharding]:
        def inside() -> list[ArraySharding]:
            return [one._replace(loop_depth=depth, identity=object()) for one in carry]

        reader.read(loop.condition, [*asked, *inside()], operation.stack)
        return reader.read(loop.body, [*captured, *inside()], operation.stack)

    carry, results = _settle(reader, carry, lambda _: None, iterate)
    for var, result, one in zip(loop.body.outvars, results, carry, strict=True):
        reader.move(operation, var.aval, result, one.dims)
    reader.loops.pop()
    return [one._replace(loop_depth=depth - 1, identity=None) for one in carry]


def branches(reader: Reader, operation: Operation) -> list[ArraySharding]:
    """One of several functions: what the one sends that sends least, and what the one computes that computes most."""
    records: list[Record] = []
    results: list[list[ArraySharding]] = []
    for branch in possible_branches(reader, operation):
        with reader.trial() as record:
            after = reader.read(branch.jaxpr, operation.operands[1:], operation.stack)
            avals = [var.aval for var in branch.jaxpr.outvars]
            results.append(
                [reader.move(operation, aval, one, one.dims) for aval, one in zip(avals, after, strict=True)]
            )
        records.append(record)
    reader.record.add(least_of(records))
    depth = max((one.loop_depth for one in (*operation.operands, *itertools.chain(*results))), default=0)
    least_split = (
        min((one.dims for one in each), key=lambda dims: sum(map(len, dims))) for each in zip(*results, strict=True)
    )
    return [ArraySharding(dims, loop_depth=depth) for dims in least_split]


def possible_branches(reader: Reader, operation: Operation) -> Sequence[Any]:
    """The functions of which an operation runs one: of those for several platforms, that of the platform, if known."""
    branches, platforms = operation.params["branches"], operation.params.get("branches_platforms") or ()
    named = zip(branches, platforms, strict=False)  # None: the function of all other platforms
    chosen = [branch for branch, names in named if names is None or reader.platform in names]
    return chosen[:1] if reader.platform and chosen else branches


def least_of(records: Sequence[Record]) -> Record:
    """The transfers of the branch that sends least, and the FLOPs of the branch that computes most."""
    least = min(records, key=lambda record: record.sent_bytes)
    most_bytes = max(record.sent_bytes + record.branch_bytes for record in records)
    dearest = max(records, key=lambda record: sum(record.flops.values()))
    most = max((record.model_flops for record in records), key=lambda flops: sum(flops.values()))
    beyond_bytes = most_bytes - least.sent_bytes
    return dataclasses.replace(least, flops=dearest.flops, model_flops=most, branch_bytes=beyond_bytes)


def barrier(reader: Reader, operation: Operation) -> list[ArraySharding]:
    """A barrier changes no array, but XLA sends what stands behind it anew."""
    return [_rename(reader, operand) for operand in operation.operands]


def device_put(reader: Reader, operation: Operation) -> list[ArraySharding]:
    """Moves arrays to another memory, or to the sharding that the program asks for."""
    atoms = operation.equation.invars
    return _move_as_asked(reader, operation, operation.params["devices"], atoms, barrier(reader, operation))


def _move_as_asked(
    reader: Reader,
    operation: Operation,
    shardings: Iterable[Any],
    atoms: Sequence[Any],
    arrays: Sequence[ArraySharding],
) -> list[ArraySharding]:
    """Arrays in the shardings that a jitted function asks for; None or an unspecified one leaves an array as it is."""
    arrays = list(arrays)
    for number, (sharding, atom) in enumerate(zip(shardings, atoms, strict=False)):
        if hasattr(sharding, "spec"):
            target = reader.mesh.dims(sharding.spec, atom.aval.ndim)
            arrays[number] = reader.move(operation, atom.aval, arrays[number], target)
    return arrays


RULES: dict[str, Rule] = {
    **dict.fromkeys(CALLS, call),
    "custom_partitioning": partitioned_call,
    equations.LINEAR_SOLVE: linear_solve,
    "scan": scan,
    "while": while_loop,
    "cond": branches,
    **dict.fromkeys(("debug_callback", "debug_print"), lambda *_: []),
    "optimization_barrier": barrier,
    "device_put": device_put,
}
