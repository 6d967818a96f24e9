"""Arrays that are made of one other array alone, and how the shardings of the two follow from each other.

Such an array may be sent in the form of the other one. So a device that has an array also has its transpose.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from gspmd_lm.foresight.propagation.sharding import ArraySharding, Dims, MeshAxes, MeshShape

ELEMENTWISE = (
    "abs",
    "acos",
    "acosh",
    "add",
    "add_any",
    "and",
    "asin",
    "asinh",
    "atan",
    "atan2",
    "atanh",
    "bessel_i0e",
    "bessel_i1e",
    "bitcast_convert_type",
    "cbrt",
    "ceil",
    "clamp",
    "clz",
    "complex",
    "conj",
    "convert_element_type",
    "copy",
    "copy_p",
    "cos",
    "cosh",
    "digamma",
    "div",
    "eq",
    "eq_to",
    "erf",
    "erf_inv",
    "erfc",
    "exp",
    "exp2",
    "expm1",
    "floor",
    "ge",
    "gt",
    "igamma",
    "igamma_grad_a",
    "igammac",
    "imag",
    "integer_pow",
    "is_finite",
    "le",
    "le_to",
    "lgamma",
    "log",
    "log1p",
    "log2",
    "logistic",
    "lt",
    "lt_to",
    "max",
    "min",
    "mul",
    "mulhi",
    "name",
    "ne",
    "neg",
    "nextafter",
    "not",
    "one_minus_square",
    "or",
    "polygamma",
    "polynomial",
    "population_count",
    "pow",
    "real",
    "reduce_precision",
    "regularized_incomplete_beta",
    "rem",
    "round",
    "rsqrt",
    "shift_left",
    "shift_right_arithmetic",
    "shift_right_logical",
    "sign",
    "sin",
    "sinh",
    "sqrt",
    "square",
    "stop_gradient",
    "sub",
    "tan",
    "tanh",
    "xor",
    "zeta",
)
VIEWS = frozenset((*ELEMENTWISE, "transpose", "broadcast_in_dim", "reshape", "squeeze"))


class View(NamedTuple):
    """What an array is made of: another array, constants, and the operation, one of `VIEWS`, that makes it."""

    source: ArraySharding
    aval: Any
    equation: Any

    def dims_before(self, mesh: MeshShape, target: Dims) -> Dims | None:
        """The sharding of the source with which the result has the sharding `target`; None if there is none."""
        shape, params = self.aval.shape, self.equation.params
        match self.equation.primitive.name:
            case "transpose":
                places = {d: to for to, d in enumerate(params["permutation"])}
                return tuple(target[places[d]] for d in range(len(shape)))
            case "broadcast_in_dim":
                places = enumerate(params["broadcast_dimensions"])
                return tuple(target[to] if shape[d] == params["shape"][to] else () for d, to in places)
            case "squeeze":
                kept = iter(target)
                return tuple(() if d in params["dimensions"] else next(kept) for d in range(len(shape)))
            case "reshape":
                dims, _ = reshaped_dims(mesh, target, params["new_sizes"], shape)
                return dims if reshaped_dims(mesh, dims, shape, params["new_sizes"]) == (target, set()) else None
        result = self.equation.outvars[0].aval.shape
        if len(shape) != len(result):
            return None
        return tuple(names if shape[d] == result[d] else () for d, names in enumerate(target))


class SplitFactor(NamedTuple):
    """One factor of a product that is a partial sum: its contracted dimensions are split, and the other factor is whole
    there. So a device that is sent the whole factor makes its part of the product, without a sum."""

    source: ArraySharding
    aval: Any
    equation: Any
    number: int  # of the factor among both
    other: ArraySharding

    def dims_before(self, mesh: MeshShape, target: Dims) -> Dims | None:
        """The sharding of the factor with which the product has the sharding `target`; None if there is none."""
        contracted, batch = self.equation.params["dimension_numbers"]
        factors, rest = (self.equation.invars[side].aval for side in (0, 1)), iter(target[len(batch[0]) :])
        dims: list[list[MeshAxes]] = [[()] * factor.ndim for factor in factors]
        for side in (0, 1):
            for d, names in zip(batch[side], target, strict=False):
                dims[side][d] = names
            for d in range(len(dims[side])):
                if d not in (*batch[side], *contracted[side]):
                    dims[side][d] = next(rest)
        has = zip(self.other.dims, dims[1 - self.number], strict=True)
        return tuple(dims[self.number]) if all(a == b[: len(a)] for a, b in has) else None


def find_view(
    equation: Any, before: Sequence[ArraySharding], moved: Sequence[ArraySharding], result: ArraySharding
) -> View | SplitFactor | None:
    """The other form in which the result of an operation may be sent; None if there is no other.

    before, moved: its operands, before and after its rule moved them to where it needs them.
    """
    avals = [atom.aval for atom in equation.invars]
    changing = [number for number, one in enumerate(before) if not one.is_constant]
    if len(changing) == 1 and equation.primitive.name in VIEWS:
        (number,) = changing
        return View(moved[number], avals[number], equation)
    if equation.primitive.name != "dot_general" or not result.unreduced:
        return None
    for number, factor in enumerate(before):
        other = before[1 - number]
        split, whole = factor.mesh_axes >= result.unreduced, not other.mesh_axes & result.unreduced
        if split and whole and not factor.unreduced:
            return SplitFactor(factor, avals[number], equation, number, other)
    return None


def reshaped_dims(mesh: MeshShape, dims: Dims, old: Any, new: Any) -> tuple[Dims, set[str]]:
    """The sharding of an array once it is reshaped from `old` to `new`, and the mesh axes that cannot split it then."""
    result: list[MeshAxes] = [()] * len(new)
    lost: set[str] = set()
    for before, after in _groups(old, new):
        names, whole = list[str](), True
        for d in before:
            if whole:
                names += dims[d]
            else:
                lost |= set(dims[d])
            whole = whole and mesh.shards(dims[d]) == old[d]
        for d in after:
            size = new[d]
            while names and size % mesh[names[0]] == 0:
                size //= mesh[names[0]]
                result[d] += (names.pop(0),)
            if size > 1:
                break
        lost |= set(names)
    return tuple(result), lost


def _groups(old: Any, new: Any) -> list[tuple[list[int], list[int]]]:
    """The dimensions of two shapes, in groups that have equally many elements: ([0, 1], [0]) where two are joined."""
    groups, i, j = [], 0, 0
    while i < len(old) or j < len(new):
        a, b = ([i] if i < len(old) else []), ([j] if j < len(new) else [])
        i, j = i + len(a), j + len(b)
        while (left := math.prod(old[d] for d in a)) != (right := math.prod(new[d] for d in b)):
            if left < right:
                a.append(i)
                i += 1
            else:
                b.append(j)
                j += 1
        groups.append((a, b))
    return groups
