"""The uses of the arrays of a jaxpr: the shardings that they are wanted in, and which arrays are only added up."""

import collections
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jax.extend import core

from gspmd_lm.foresight import equations
from gspmd_lm.foresight.propagation.sharding import UNCONSTRAINED, Dims, MeshShape

# Those of several terms, or of one: the sum of what they give is what they give of the sum.
ADDITIVE = frozenset(
    (
        "add",
        "sub",
        "add_any",
        "neg",
        "convert_element_type",
        "reduce_sum",
        "transpose",
        "reshape",
        "squeeze",
        "broadcast_in_dim",
        "copy",
        "copy_p",
        "name",
        "expand_dims",
        "reduce_precision",
        "sharding_constraint",
        "concatenate",
        "roll",
        "slice",
        "split",
        "unstack",
        "pad",
        "rev",
        "reduce_window_sum",
        "dynamic_slice",
        "optimization_barrier",
        "reshard",
    )
)

# Those that say where an array is -> the parameter that has its sharding. `reshard` is that of programs whose types say
# how arrays are sharded.
CONSTRAINTS = {"sharding_constraint": "sharding", "reshard": "dst_sharding"}

Wanted = Mapping[Any, Dims]  # variables -> mesh axes of each dimension
# Of these the dimensions of the result are not those of an operand, although the shapes may agree.
_OTHER_DIMENSIONS = equations.CALLS.union(
    equations.LOOPS,
    ("cond", "shard_map", "reshape", "dot_general", "conv_general_dilated", "gather", "sort", "rev"),
)


def wanted_dims(mesh: MeshShape, jaxpr: Any, results: Sequence[Dims | None]) -> Wanted:
    """The next constraint of each array, past operations that change no dimension; `results` are those of results."""
    wanted = {
        atom: dims
        for atom, dims in zip(jaxpr.outvars, results, strict=False)
        if dims is not None and not isinstance(atom, core.Literal)
    }
    for equation in reversed(jaxpr.eqns):
        primitive = equation.primitive.name
        operands = [atom for atom in equation.invars if not isinstance(atom, core.Literal)]
        if primitive in CONSTRAINTS and operands:
            spec = equation.params[CONSTRAINTS[primitive]].spec
            if UNCONSTRAINED not in spec:
                wanted[operands[0]] = mesh.dims(spec, operands[0].aval.ndim)
            continue
        if len(equation.outvars) != 1 or equation.outvars[0] not in wanted:
            continue
        if primitive in _OTHER_DIMENSIONS or equations.is_call(equation):
            continue
        result: Any = equation.outvars[0]
        if primitive == "transpose" and operands:
            before: list[tuple[str, ...]] = [()] * result.aval.ndim
            for to, dimension in enumerate(equation.params["permutation"]):
                before[dimension] = wanted[result][to]
            wanted.setdefault(operands[0], tuple(before))
            continue
        for operand in operands:
            if getattr(operand.aval, "shape", None) == result.aval.shape:
                wanted.setdefault(operand, wanted[result])
    return wanted


def use_counts(jaxpr: Any) -> Mapping[Any, int]:
    """How often each array is read, or is a result."""
    read = [atom for equation in jaxpr.eqns for atom in equation.invars]
    return collections.Counter(atom for atom in (*read, *jaxpr.outvars) if not isinstance(atom, core.Literal))


def terms(jaxpr: Any, results: Iterable[int], uses: Mapping[Any, int]) -> dict[Any, int]:
    """The arrays that are read once, to become terms of one of these results -> the number of the result.

    uses: see `use_counts`.
    """
    ends = [(jaxpr.outvars[number], number) for number in results]
    found = {atom: number for atom, number in ends if not isinstance(atom, core.Literal) and uses[atom] == 1}
    for equation in reversed(jaxpr.eqns):
        number = found.get(equation.outvars[0]) if equation.outvars else None
        if equation.primitive.name in ADDITIVE and number is not None:
            read = [atom for atom in equation.invars if not isinstance(atom, core.Literal)]
            found |= {atom: number for atom in read if uses[atom] == 1}
    return found
