"""How much of its arguments a traced program must read, and which parts of them it updates in place."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from gspmd_lm.foresight.equations import LOOPS, Loop, applied_jaxpr, read_loop
from gspmd_lm.foresight.propagation.sharding import Dims, MeshShape, array_bytes
from gspmd_lm.foresight.propagation.wanted import CONSTRAINTS

# Those that set a part of their first operand -> the number of the operand that is the part.
_SETTING = {
    **dict.fromkeys(("scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max"), 2),
    "dynamic_update_slice": 1,
}
_TAKING_PARTS = ("slice", "dynamic_slice", "split", "unstack")
_JOINING = ("concatenate", "pad")
# The array in its place is their operand: nothing need be moved.
_IN_PLACE = (
    "reshape",
    "squeeze",
    "expand_dims",
    "optimization_barrier",
    *CONSTRAINTS,
    "device_put",
    "name",
    "copy",
    "copy_p",
    "pvary",
    "pcast",
)
_KERNELS = ("pallas_call", "ffi_call", "custom_linear_solve")  # they may leave any part of an operand unread


class Share(NamedTuple):
    """The least share of an array that is read, and the least that must be made.

    A result must be made, but need not be read. An argument is there without being made.
    """

    read: float
    made: float  # as much as is read, or more


_NOTHING, _RESULT, _ALL = Share(0.0, 0.0), Share(0.0, 1.0), Share(1.0, 1.0)

Parts = list[tuple[Any, int]]  # shapes and dtypes of the parts of an array that are set, and how often


def held_bytes(mesh: MeshShape, jaxpr: Any, arguments: Sequence[Dims], results: Sequence[Dims]) -> float:
    """The bytes of arguments and results that one device must read and write, from how they are split."""
    updated, made = updated_parts(jaxpr), [_RESULT] * len(results)
    for number, (found, dims) in enumerate(zip(updated, results, strict=True)):
        if found and arguments[found[0]] != dims:  # it cannot stand in the place of an argument that is split otherwise
            updated[number], made[number] = None, _ALL
    shares = needed_shares(jaxpr, made)
    total = sum(
        share.read * mesh.local_bytes(var.aval, dims)
        for var, dims, share in zip(jaxpr.invars, arguments, shares, strict=True)
    )
    for var, dims, found in zip(jaxpr.outvars, results, updated, strict=True):
        if not hasattr(var, "val"):
            parts = [(var.aval, 1)] if found is None else found[1]
            written = sum(times * mesh.local_bytes(part, dims) for part, times in parts)
            total += min(written, mesh.local_bytes(var.aval, dims))
    return total


def needed_shares(jaxpr: Any, results: Sequence[Share]) -> list[Share]:
    """The share of each argument that is needed for these shares of the results of a program: a lower bound.

    For a part of a result, a compiler computes only what that part depends on. Most operations use each element of an
    operand equally often, so for a share of the result they need at least that share of each operand. Several parts of
    one array may overlap, so the largest counts. An array in which rows are looked up, or of which parts are set,
    counts nothing. Of a conditional, what all branches need counts.
    """
    needed: dict[Any, Share] = {}

    def note(atoms: Sequence[Any], shares: Sequence[Share]) -> None:
        for atom, share in zip(atoms, shares, strict=True):
            if not hasattr(atom, "val"):
                before = needed.get(atom, share)
                needed[atom] = share if before == share else _combine(max, share, before)

    note(jaxpr.outvars, results)
    for equation in reversed(jaxpr.eqns):
        shares = [needed.get(var, _NOTHING) for var in equation.outvars]
        if any(share.made for share in shares) or not shares:
            note(equation.invars, _operand_shares(equation, shares))
    return [needed.get(var, _NOTHING) for var in jaxpr.invars]


def _combine(choose: Callable[[Iterable[float]], float], *shares: Share) -> Share:
    return Share(*map(choose, zip(*shares, strict=True)))


def _operand_shares(equation: Any, results: Sequence[Share]) -> list[Share]:
    """The share of each operand that an operation needs for these shares of its results."""
    primitive, operands = equation.primitive.name, equation.invars
    made = max((share.made for share in results), default=1.0)
    if primitive == "cond":
        branches = [needed_shares(branch.jaxpr, results) for branch in equation.params["branches"]]
        return [_ALL, *(_combine(min, *shares) for shares in zip(*branches, strict=True))]
    if primitive in LOOPS:
        return _loop_shares(read_loop(equation), results)
    if (inner := _find_called(equation)) is not None:
        return needed_shares(inner, results)
    if primitive in _IN_PLACE:
        return [*results]
    shares = [Share(made, made)] * len(operands)
    if primitive in _JOINING:  # a part of the result may be all of another operand
        crops = primitive == "pad" and min(min(sides) for sides in equation.params["padding_config"]) < 0
        shares = [_ALL if made == 1.0 and not crops else _NOTHING] * len(operands)
    elif primitive in _SETTING:
        part, shares = _SETTING[primitive], [_ALL] * len(operands)
        kept = made - operands[part].aval.size / max(1, operands[0].aval.size)
        shares[0], shares[part] = Share(0.0, max(0.0, kept)), _ALL if made == 1.0 else _NOTHING
    elif primitive in _KERNELS:
        shares = [_NOTHING] * len(operands)
    elif primitive == "sort":  # what is no key is needed as far as it is read itself
        keys = equation.params["num_keys"]
        shares[keys:] = [Share(one.made, one.made) for one in results[keys:]]
    elif primitive == "gather":
        shares[0] = _NOTHING
    elif primitive in _TAKING_PARTS:
        taken = sum(one.made * var.aval.size for one, var in zip(results, equation.outvars, strict=True))
        share = taken / max(1, operands[0].aval.size)
        shares[0] = Share(share, share)
    return shares


def _find_called(equation: Any) -> Any:
    """The program that an operation runs with its own operands and results; None if there is none."""
    inner = applied_jaxpr(equation)
    return inner if inner is not None and len(inner.outvars) == len(equation.outvars) else None


def _loop_shares(loop: Loop, results: Sequence[Share]) -> list[Share]:
    """The share of each operand that a loop needs. It runs at least once if its trip count is not known.

    All iterations run the same program. So an initial value is needed as far as every iteration needs the value that it
    is given. A loop of no iterations returns its initial values.
    """
    end, carry = loop.constants + loop.carried, [*results[: loop.carried]]
    if not loop.times:
        return [_NOTHING] * loop.constants + carry + [_NOTHING] * (len(loop.body.invars) - end)
    # A part of what is stacked may be that of other iterations.
    stacked = [share if share.made == 1.0 else _NOTHING for share in results[loop.carried :]]
    asked = [_NOTHING] * (loop.asked + loop.carried)
    if loop.condition is not None:
        asked = needed_shares(loop.condition, [_ALL])
        carry = [_combine(max, *shares) for shares in zip(carry, asked[loop.asked :], strict=True)]
    needed = of_last = needed_shares(loop.body, [*carry, *stacked])
    while True:
        begin = needed[loop.constants : end]
        kept = [
            Share(*(a if b >= a else 0.0 for a, b in zip(*pair, strict=True)))
            for pair in zip(carry, begin, strict=True)
        ]
        if kept == carry:
            break
        carry, needed = kept, needed_shares(loop.body, [*kept, *stacked])
    begin = [_combine(max, *shares) for shares in zip(begin, asked[loop.asked :], strict=True)]
    return [*asked[: loop.asked], *of_last[: loop.constants], *begin, *of_last[end:]]


def updated_parts(jaxpr: Any) -> list[tuple[int, Parts] | None]:
    """The number of the argument that each result updates in place, and the parts of it that change.

    Such a result can have the memory of the argument, so that the parts alone are written. None: a result of its own.
    """
    makers = {var: equation for equation in jaxpr.eqns for var in equation.outvars}
    numbers = {var: number for number, var in enumerate(jaxpr.invars)}
    parts_of_called = functools.cache(updated_parts)  # once for all results of a call

    def find_parts(atom: Any) -> tuple[int, Parts] | None:
        parts: Parts = []
        while not hasattr(atom, "val") and atom not in numbers:
            if (equation := makers.get(atom)) is None:
                return None
            primitive, result = equation.primitive.name, equation.outvars.index(atom)
            if primitive in _SETTING:
                parts = [(equation.invars[_SETTING[primitive]].aval, 1), *parts]
                atom = equation.invars[0]
            elif primitive in _IN_PLACE:
                atom = equation.invars[result]
            elif (found := find_inside(equation, result)) is not None:
                atom, parts = found[0], [*found[1], *parts]
            else:
                return None
        return None if hasattr(atom, "val") else (numbers[atom], parts)

    def find_inside(equation: Any, result: int) -> tuple[Any, Parts] | None:
        """The operand that a result updates in place, and the parts, where an operation runs another program."""
        if equation.primitive.name == "cond":
            branches = [parts_of_called(branch.jaxpr)[result] for branch in equation.params["branches"]]
            found = min(filter(None, branches), key=lambda one: _total_bytes(one[1]), default=None)
            return found and (equation.invars[1 + found[0]], found[1])
        loop = read_loop(equation) if equation.primitive.name in LOOPS else None
        if loop and not loop.times:
            begins = loop.asked + loop.constants + result
            return (equation.invars[begins], []) if result < loop.carried else None
        inner = loop.body if loop else _find_called(equation)
        found = parts_of_called(inner)[result] if inner is not None else None
        if found is None or (loop and found[0] != loop.constants + result):
            return None
        number, parts = found
        if loop:
            number, parts = loop.asked + number, [(part, times * loop.times) for part, times in parts]
        return equation.invars[number], parts

    updated = [find_parts(atom) for atom in jaxpr.outvars]
    for number, (var, found) in enumerate(zip(jaxpr.outvars, updated, strict=True)):
        if found and not found[1] and var.aval.shape != jaxpr.invars[found[0]].aval.shape:
            updated[number] = None  # the argument in another shape is a copy, unless the argument is given away
    return updated


def _total_bytes(parts: Parts) -> float:
    return sum(times * array_bytes(part) for part, times in parts)
