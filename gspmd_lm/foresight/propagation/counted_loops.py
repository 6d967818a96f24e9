"""Loops that are written as `while` and count their iterations: `with_scans` has a scan in the place of each."""

import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from jax.extend import core

from gspmd_lm.foresight import equations

_SCAN = core.Primitive("scan")
_ARITHMETIC = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "convert_element_type": int,
}


def with_scans(jaxpr: Any) -> Any:
    """A program with a scan in place of each `while` whose trip count it says. XLA knows these trip counts too."""
    return equations.rewrite(jaxpr, _replace_loops)


def _replace_loops(jaxpr: Any) -> list[Any]:
    """The equations of a program. A scan in place of a `while` has the parameters alone that readers of scans need."""
    makers = {var: equation for equation in jaxpr.eqns for var in equation.outvars}
    changed = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == "while" and (count := trip_count(equation, makers)) is not None:
            params = {"length": count, "jaxpr": equation.params["body_jaxpr"]}
            operands = equation.invars[equation.params["cond_nconsts"] :]
            equation = equation.replace(primitive=_SCAN, invars=operands, params=params)
        changed.append(equation)
    return changed


def trip_count(equation: Any, makers: Mapping[Any, Any]) -> int | None:
    """The trip count of a `while`, from a condition such as `counter < limit`; None if it is not known.

    makers: the equations of the program that the loop stands in, by their results.
    """
    loop = equations.read_loop(equation)
    condition, body, asked = loop.condition, loop.body, loop.asked
    of_condition, captured, begin, _ = loop.split(equation.invars)
    carried = body.invars[loop.constants :]
    known = dict(zip(condition.invars, of_condition, strict=False))  # what no iteration changes -> what it is
    known |= dict(zip(body.invars, captured, strict=False))
    for number, (before, after) in enumerate(zip(carried, body.outvars, strict=True)):
        if before is after:
            known[before] = known[condition.invars[asked + number]] = begin[number]
    compare = _maker(condition, 0)
    if compare is None or compare.primitive.name not in equations.SWAPPED:
        return None
    find_integer, direction = _integers(known, makers), compare.primitive.name
    for counter, limit in (compare.invars, compare.invars[::-1]):
        if counter in condition.invars[asked:] and counter not in known:
            number = condition.invars.index(counter) - asked
            step = _offset(_maker(body, number), carried[number], find_integer)
            return _count(find_integer(begin[number]), find_integer(limit), step, direction, counter.aval.dtype)
        direction = equations.SWAPPED[direction]
    return None


def _maker(jaxpr: Any, number: int) -> Any:
    """The equation that makes a result of a program; None if it is an argument or a constant."""
    return next((one for one in jaxpr.eqns if any(var is jaxpr.outvars[number] for var in one.outvars)), None)


def _count(start: int | None, limit: int | None, step: int | None, direction: str, dtype: Any) -> int | None:
    """The trip count; None if it is not known, or if the counter of this dtype wraps around before the loop ends."""
    if start is None or limit is None or step is None:
        return None
    count = equations.count_turns(start, limit, step, direction)
    return count if count is not None and _fits(start + count * step, dtype) else None


def _offset(equation: Any, counter: Any, find_integer: Callable[[Any], int | None]) -> int | None:
    """The constant that an equation adds to a counter; None if it does something else."""
    if equation is None or equation.primitive.name not in ("add", "sub"):
        return None
    left, right = equation.invars
    if left is counter:
        added = find_integer(right)
        return added if added is None or equation.primitive.name == "add" else -added
    return find_integer(left) if right is counter and equation.primitive.name == "add" else None


def _integers(known: Mapping[Any, Any], makers: Mapping[Any, Any]) -> Callable[[Any], int | None]:
    """A function that gives the integer that a scalar is whatever the arguments of the program; None if there is none.

    It gives None where a value does not fit its dtype, too, since such a value wraps around.
    """

    def find_integer(atom: Any) -> int | None:
        found = int(atom.val) if hasattr(atom, "val") and _is_integer(atom) else None
        found = made_integer(atom) if not hasattr(atom, "val") and _is_integer(atom) else found
        return found if found is not None and _fits(found, atom.aval.dtype) else None

    @functools.cache
    def made_integer(var: Any) -> int | None:
        if var in known:
            return find_integer(known[var])
        equation = makers.get(var)
        if equation is None or equation.primitive.name not in _ARITHMETIC:
            return None
        values = [find_integer(one) for one in equation.invars]
        return None if None in values else _ARITHMETIC[equation.primitive.name](*values)

    return find_integer


def _is_integer(atom: Any) -> bool:
    return not atom.aval.shape and jnp.issubdtype(atom.aval.dtype, jnp.integer)


def _fits(value: int, dtype: Any) -> bool:
    return jnp.iinfo(dtype).min <= value <= jnp.iinfo(dtype).max
