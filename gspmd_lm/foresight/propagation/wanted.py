"""How the arrays of a jaxpr are wanted to be split, where the program says so further on."""

from collections.abc import Mapping, Sequence
from typing import Any

from jax.extend import core

from gspmd_lm.foresight.propagation.sharding import Dims, MeshShape

Wanted = Mapping[Any, Dims]  # variables -> mesh axes of each dimension
# Of these the dimensions of the result are not those of an operand, although the shapes may agree.
_OTHER_DIMENSIONS = frozenset((
    "reshape", "jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call", "remat2", "checkpoint",
    "scan", "while", "cond", "shard_map", "dot_general", "conv_general_dilated", "gather", "sort", "rev",
))  # fmt: skip


def wanted_dims(mesh: MeshShape, jaxpr: Any, results: Sequence[Dims | None]) -> Wanted:
    """The next constraint of each array, past operations that change no dimension; `results` are those of results."""
    wanted = {
        atom: dims for atom, dims in zip(jaxpr.outvars, results, strict=False)
        if dims is not None and not isinstance(atom, core.Literal)
    }  # fmt: skip
    for equation in reversed(jaxpr.eqns):
        primitive = equation.primitive.name
        operands = [atom for atom in equation.invars if not isinstance(atom, core.Literal)]
        if primitive == "sharding_constraint" and operands:
            wanted[operands[0]] = mesh.dims(equation.params["sharding"].spec, operands[0].aval.ndim)
            continue
        if len(equation.outvars) != 1 or equation.outvars[0] not in wanted or primitive in _OTHER_DIMENSIONS:
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
