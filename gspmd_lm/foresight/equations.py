"""The operations of a traced program: their FLOPs and the programs in them; and what a convolution multiplies."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.interpreters import partial_eval

GROUPED = "ragged_dot_general"  # a matmul that has a matrix for each group of rows
LINEAR_SOLVE = "custom_linear_solve"  # a linear system, with a function that solves it
CALLS = frozenset(  # operations whose programs are read in their place
    (
        "jit",
        "pjit",
        "closed_call",
        "core_call",
        "remat",
        "remat2",
        "checkpoint",
        "custom_jvp_call",
        "custom_vjp_call",
        "custom_vjp_call_jaxpr",
        "eval_jaxpr",
    )
)
LOOPS = ("while", "scan")
SWAPPED = {"lt": "gt", "gt": "lt", "le": "ge", "ge": "le", "ne": "ne"}  # a comparison with its sides swapped
ROLL = core.Primitive("roll")  # jax writes jnp.roll as two slices that are joined


def flops(equation: Any) -> float:
    """2 for each multiply-add of a matmul or convolution; 0 for another operation.

    Three products of real numbers are the fewest that make one of complex numbers.
    """
    multiplied = _multiplied_flops(equation)
    is_complex = multiplied and jnp.issubdtype(equation.invars[0].aval.dtype, jnp.complexfloating)
    return 3 * multiplied if is_complex else multiplied


def _multiplied_flops(equation: Any) -> float:
    primitive = equation.primitive.name
    if primitive == "dot_general":
        (contracted, _), _ = equation.params["dimension_numbers"]
        left = equation.invars[0].aval.shape
        return 2.0 * equation.outvars[0].aval.size * math.prod(left[dimension] for dimension in contracted)
    if primitive == GROUPED:
        # Each row meets the matrix of its own group alone, or rows meet within their group.
        numbers = equation.params["ragged_dot_dimension_numbers"]
        (_, contracted), (_, batch) = numbers.dot_dimension_numbers
        left, right = (operand.aval for operand in equation.invars[:2])
        shared = (*contracted, *batch, *numbers.rhs_group_dimensions)
        each = math.prod(size for d, size in enumerate(right.shape) if d not in shared)
        return 2.0 * left.size * each if right.size else 0.0
    return _convolution(equation) if primitive == "conv_general_dilated" else 0.0


def live(jaxpr: Any) -> Any:
    """A program without the results that nothing reads. XLA leaves them out too, also behind a barrier."""
    apart = rewrite(jaxpr, _barriers_apart)
    return partial_eval.dce_jaxpr(apart, [True] * len(jaxpr.outvars), instantiate=True)[0]


def rewrite(jaxpr: Any, change: Callable[[Any], list[Any]], changed: dict[int, Any] | None = None) -> Any:
    """A program with the equations that `change` makes of it and of each program in it; itself if they are the same.

    changed: by their ids, the programs that were changed before, so that calls of one program still share it.
    """
    changed = {} if changed is None else changed
    inner = getattr(jaxpr, "jaxpr", jaxpr)  # of a closed one; from jax 0.12 on, it is itself
    if inner is not jaxpr:
        rewritten = rewrite(inner, change, changed)
        return jaxpr if rewritten is inner else jaxpr.replace(jaxpr=rewritten)
    if id(jaxpr) in changed:
        return changed[id(jaxpr)]
    eqns = []
    for equation in change(jaxpr):
        if any(rewrite(one, change, changed) is not one for one in inner_jaxprs(equation.params)):
            replace = lambda param: rewrite(param, change, changed) if _is_jaxpr(param) else param  # noqa: E731
            equation = equation.replace(params=jax.tree.map(replace, equation.params, is_leaf=_is_jaxpr))
        eqns.append(equation)
    is_same = all(before is after for before, after in itertools.zip_longest(jaxpr.eqns, eqns))
    changed[id(jaxpr)] = jaxpr if is_same else jaxpr.replace(eqns=eqns)
    return changed[id(jaxpr)]


def _barriers_apart(jaxpr: Any) -> list[Any]:
    """The equations of a program, with a barrier for each array in place of barriers for several."""
    eqns = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == "optimization_barrier" and len(equation.invars) > 1:
            pairs = zip(equation.invars, equation.outvars, strict=True)
            eqns += [equation.replace(invars=[before], outvars=[after]) for before, after in pairs]
        else:
            eqns.append(equation)
    return eqns


def _is_jaxpr(param: Any) -> bool:
    return isinstance(param, core.Jaxpr | core.ClosedJaxpr)


def computes_the_same(one: Any, other: Any) -> bool:
    """Whether two equations of one primitive compute the same from equal operands."""
    if one is other:
        return True
    pairs = ((one.params[name], other.params.get(name)) for name in one.params)
    # Programs are compared as they are written: each trace of a function is another one.
    return all(a is b or (type(a) is type(b) and str(a) == str(b)) for a, b in pairs)


def join_names(stack: str, equation: Any) -> str:
    """The names of the functions that an equation stands in: those around its program, `stack`, and those within it."""
    return "/".join(filter(None, (stack, str(equation.source_info.name_stack))))


def called_jaxprs(params: Mapping[str, Any]) -> list[Any]:
    """The programs that an operation with these parameters runs in any case; not the branches of a `cond`."""
    return [x for x in (getattr(x, "jaxpr", x) for x in params.values()) if hasattr(x, "eqns")]


def applied_jaxpr(equation: Any) -> Any:
    """The program that an operation runs with its own operands, as a call or a scan does; None if there is none."""
    inner = next(iter(called_jaxprs(equation.params)), None)  # of a while loop, it is the condition or the body
    applies = inner is not None and len(inner.invars) == len(equation.invars) and equation.primitive.name != "while"
    return inner if applies else None


def is_call(equation: Any) -> bool:
    """Whether an operation has a program of operands and results like its own, as jit and `jax.lax.composite` have.

    The program of `reduce`, in contrast, has single elements.
    """

    def types(atoms: Iterable[Any]) -> list[tuple[Any, Any]]:
        return [(getattr(atom.aval, "shape", None), getattr(atom.aval, "dtype", None)) for atom in atoms]

    inner = applied_jaxpr(equation)
    if inner is None or types(inner.invars) != types(equation.invars):
        return False
    return types(inner.outvars) == types(equation.outvars)


def inner_jaxprs(params: Mapping[str, Any]) -> list[Any]:
    """All programs among the parameters of an operation, branches too."""
    return [getattr(one, "jaxpr", one) for one in _programs(params.values())]


def _programs(values: Iterable[Any]) -> Iterator[Any]:
    """The programs among some parameters of an operation, and in tuples of them."""
    for value in values:
        if _is_jaxpr(value):
            yield value
        elif isinstance(value, tuple | list):
            yield from _programs(value)


def with_rolls(jaxpr: Any) -> list[Any]:
    """The equations of a program, with `ROLL` where two parts of an array are joined the other way round.

    XLA's partitioner knows such parts too: as RotateRight.
    """
    slices = {eqn.outvars[0]: eqn for eqn in jaxpr.eqns if eqn.primitive.name == "slice"}
    changed = []
    for equation in jaxpr.eqns:
        parts = [slices.get(atom) for atom in equation.invars if not hasattr(atom, "val")]
        if equation.primitive.name == "concatenate" and len(equation.invars) == 2 and None not in parts:
            equation = _as_roll(equation, *parts)
        changed.append(equation)
    reads = itertools.chain(jaxpr.outvars, *(eqn.invars for eqn in changed))
    read = {atom for atom in reads if not hasattr(atom, "val")}
    return [eqn for eqn in changed if eqn.primitive.name != "slice" or eqn.outvars[0] in read]


def _as_roll(equation: Any, last: Any, first: Any) -> Any:
    """A concatenation of two slices as a roll of the array that they are of; itself if it is none."""
    source, d = first.invars[0], equation.params["dimension"]
    size, cut = source.aval.shape[d], first.params["limit_indices"][d]
    whole = [0] * source.aval.ndim, list(source.aval.shape)

    def is_part(part: Any, begin: int, end: int) -> bool:
        starts, ends = ([*side[:d], at, *side[d + 1 :]] for side, at in zip(whole, (begin, end), strict=True))
        strides = part.params["strides"] or [1]
        found = [*part.params["start_indices"]], [*part.params["limit_indices"]]
        return part.invars[0] is source and found == (starts, ends) and {*strides} == {1}

    if not (is_part(first, 0, cut) and is_part(last, cut, size)):
        return equation
    return equation.replace(primitive=ROLL, invars=[source], params={"dimension": d, "shift": size - cut})


class Loop(NamedTuple):
    """A `while` or a `scan`. Its operands are those of the condition alone, constants, what it carries and stacks."""

    condition: Any  # None of a scan
    body: Any
    asked: int  # how many operands the condition alone reads
    constants: int  # how many no iteration changes
    carried: int
    times: int  # that the body runs; 1 if that is not known

    def split(self, operands: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any], Sequence[Any]]:
        """Those of the condition alone, constants, what the loop begins with, and the stacks that it takes apart."""
        begin, end = self.asked + self.constants, self.asked + self.constants + self.carried
        return operands[: self.asked], operands[self.asked : begin], operands[begin:end], operands[end:]


def read_loop(equation: Any) -> Loop:
    """The loop that an operation is, one of LOOPS."""
    params = equation.params
    if equation.primitive.name == "while":
        condition, body = params["cond_jaxpr"].jaxpr, params["body_jaxpr"].jaxpr
        return Loop(condition, body, params["cond_nconsts"], params["body_nconsts"], len(equation.outvars), 1)
    body = called_jaxprs(params)[0]
    # What is carried has the same rank outside. jax 0.10 and 0.12 have other parameters for that.
    unstacked, carried = (
        sum(a.aval.ndim == b.aval.ndim for a, b in zip(inside, outside, strict=True))
        for inside, outside in ((body.invars, equation.invars), (body.outvars, equation.outvars))
    )
    return Loop(None, body, 0, unstacked - carried, carried, params["length"])


def _convolution(equation: Any) -> float:
    """Padding and the holes of a dilation are not multiplied."""
    params, numbers = equation.params, equation.params["dimension_numbers"]
    picture, kernel, result = (atom.aval.shape for atom in (*equation.invars[:2], equation.outvars[0]))
    positions = math.prod(
        input_pairs(
            picture[numbers.lhs_spec[2 + n]],
            kernel[numbers.rhs_spec[2 + n]],
            result[numbers.out_spec[2 + n]],
            stride=params["window_strides"][n],
            low=params["padding"][n][0],
            left_dilate=params["lhs_dilation"][n],
            kernel_dilate=params["rhs_dilation"][n],
        )
        for n in range(len(picture) - 2)
    )
    batch, outputs = result[numbers.out_spec[0]], result[numbers.out_spec[1]]
    # The kernel's input features are already those of one group.
    return 2.0 * positions * batch * outputs * kernel[numbers.rhs_spec[1]]


def count_turns(start: int, limit: int, step: int, comparison: str) -> int | None:
    """The trip count of a loop that goes on while its counter compares so with the limit; None if it never ends."""
    if comparison not in SWAPPED or not step:
        return None
    if comparison in ("le", "ge"):  # these include the limit itself
        limit += 1 if comparison == "le" else -1
    runs_away = (limit - start) * step < 0 if comparison == "ne" else (step > 0) != (comparison in ("lt", "le"))
    if runs_away or (comparison == "ne" and (limit - start) % step):
        return None
    return len(range(start, limit, step))


def input_pairs(
    size: int, kernel: int, result: int, stride: int, low: int, left_dilate: int, kernel_dilate: int
) -> int:
    """How many (output, kernel position) pairs of one spatial dimension meet an input."""
    step = left_dilate // math.gcd(stride, left_dilate)
    total = 0
    for k in range(kernel):
        # output o meets the input at o * stride + offset, if that is in [0, last] and a multiple of left_dilate
        offset, last = k * kernel_dilate - low, (size - 1) * left_dilate
        first = max(0, -(offset // stride))
        end = min(result - 1, (last - offset) // stride)
        meets = next((o for o in range(first, first + step) if (o * stride + offset) % left_dilate == 0), None)
        if meets is not None and meets <= end:
            total += (end - meets) // step + 1
    return total
