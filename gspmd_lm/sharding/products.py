"""Products of a model with its parameters, whoever wrote them: the gradient of a parameter is summed once.

A plain product leaves the sum over devices of its parameter's gradient to the compiler, which makes an all-reduce of it
where the CPU or a missed pattern is concerned: twice what a reduce-scatter sends. So the traced function is rewritten.
Each parameter is marked where a module reads it, and products with what is marked get a derivative that has one partial
sum for each shard of the rows.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core

from gspmd_lm.sharding.annotate import Spec, Split, placement
from gspmd_lm.sharding.placement import mark, marked_placement

_PARAMETER = "parameter"  # the table of a mark that says which parameter an array is
# Equations whose inner functions stay as they are: they have derivatives of their own, or none, or see one device.
_OPAQUE = ("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr", "while", "shard_map")
_followed: ContextVar[bool] = ContextVar("followed", default=False)  # whether marks of parameters are looked for


def read(array: jax.Array, path: str, axes: tuple[str, ...]) -> jax.Array:
    """A parameter in use, marked where its products are looked for."""
    return mark(array, Spec(path, axes, _PARAMETER)) if _followed.get() else array


def summing_once(function: Callable[..., Any], rows: int) -> Callable[..., Any]:
    """`function` of trees of arrays, whose products of `rows` rows with a parameter have the derivative of `_product`.

    On one device, and where rows are not split, it is the function itself.
    """

    @functools.wraps(function)
    def rewritten(*arguments: Any) -> Any:
        place = placement()
        over = Split() if place.is_single else place.split("", place.vocabulary.rows)
        if not over.over or rows % over.num_shards:
            return function(*arguments)
        token = _followed.set(True)
        try:
            traced, like = jax.make_jaxpr(function, return_shape=True)(*arguments)
        finally:
            _followed.reset(token)
        program = core.ClosedJaxpr(_Products(over, rows).rewrite(traced.jaxpr), traced.consts)
        return jax.tree.unflatten(jax.tree.structure(like), core.jaxpr_as_fun(program)(*jax.tree.leaves(arguments)))

    return rewritten


@dataclasses.dataclass(frozen=True)
class _Products:
    """Rewrites traced functions. `rows`: those of the whole batch, which the mesh axes `over` split."""

    over: Split
    rows: int

    def rewrite(self, jaxpr: Any) -> Any:
        """A jaxpr without the marks of parameters, whose products with them are `_product`s."""
        parameters: dict[Any, Spec] = {}  # variable -> what it is the value of, cast or transposed
        instead: dict[Any, Any] = {}  # variable that a mark has made -> the variable that it has marked
        made: dict[Any, Any] = {}  # variable -> the one that an equation with a derivative of its own made it of
        gathered: dict[Any, Any] = {}  # parameter, and what its value in use is made of -> that value
        equations = []
        for one in jaxpr.eqns:
            variables = [instead.get(v, v) if isinstance(v, core.Var) else v for v in one.invars]
            equation, first = one.replace(invars=variables, params=self._inner(one)), variables[:1]
            spec = parameters.get(first[0]) if first and isinstance(first[0], core.Var) else None
            match equation.primitive.name:
                case "name" if (named := marked_placement(equation.params["name"])) and named.table == _PARAMETER:
                    # Later reads of a parameter take the value of the first one.
                    value = gathered.setdefault((named, first[0].aval, made.get(first[0], first[0])), first[0])
                    instead[equation.outvars[0]] = value
                    parameters[value] = named._replace(table="optimizer")
                    continue
                case "custom_vjp_call" | "custom_vjp_call_jaxpr" if len(variables) == len(equation.outvars) == 1:
                    made[equation.outvars[0]] = first[0]
                case "convert_element_type" if spec:
                    parameters[equation.outvars[0]] = spec
                case "transpose" if spec:
                    axes = tuple(spec.axes[at] for at in equation.params["permutation"])
                    parameters[equation.outvars[0]] = spec._replace(axes=axes)
                case "dot_general" | "conv_general_dilated":
                    equation = self._product(equation, parameters)
            equations.append(equation)
        results = [instead.get(v, v) if isinstance(v, core.Var) else v for v in jaxpr.outvars]
        return jaxpr.replace(eqns=_find_needed(equations, results), outvars=results)

    def _inner(self, equation: Any) -> dict[str, Any]:
        """The parameters of an equation, of which functions are rewritten."""
        if equation.primitive.name in _OPAQUE:
            return equation.params

        def rewritten(value: Any) -> Any:
            if isinstance(value, core.Jaxpr):
                return self.rewrite(value)
            if isinstance(value, core.ClosedJaxpr):
                return core.ClosedJaxpr(self.rewrite(value.jaxpr), value.consts)
            return type(value)(map(rewritten, value)) if type(value) in (tuple, list) else value

        return {name: rewritten(value) for name, value in equation.params.items()}

    def _product(self, equation: Any, parameters: dict[Any, Spec]) -> Any:
        """The equation of a product, or one with another derivative if one of the two factors is a parameter."""
        specs = [parameters.get(v) if isinstance(v, core.Var) else None for v in equation.invars]
        if (specs[0] is None) == (specs[1] is None):
            return equation
        weight = int(specs[1] is not None)
        rows = self._rows(equation, weight)
        if rows is None:
            return equation
        how = _Operation(equation.primitive, tuple(equation.params.items()), weight, rows)
        product = functools.partial(_product, specs[weight], self.over, how)
        (whole,) = jax.make_jaxpr(product)(*(v.aval for v in equation.invars)).jaxpr.eqns
        return whole.replace(invars=equation.invars, outvars=equation.outvars, source_info=equation.source_info)

    def _rows(self, equation: Any, weight: int) -> tuple[int, int] | None:
        """The dimension of the rows in the factor that is no parameter, and in the result; None if there is none."""
        shape, how = equation.invars[1 - weight].aval.shape, equation.params["dimension_numbers"]
        if equation.primitive is jax.lax.conv_general_dilated_p:
            # No row says how channels are split where other mesh axes than those of the rows split arrays.
            alone = self.over.num_shards in (1, placement().devices)
            plain = (
                alone and weight and equation.params["batch_group_count"] == 1 and shape[how.lhs_spec[0]] == self.rows
            )
            return (how.lhs_spec[0], how.out_spec[0]) if plain else None
        summed, batch = (both[1 - weight] for both in how)
        free = [at for at in range(len(shape)) if at not in (*summed, *batch)]
        split = [at for at in free if shape[at] == self.rows or (at == 0 and shape[0] % self.rows == 0)]
        before = 0 if weight else equation.invars[0].aval.ndim - len(how[0][0]) - len(batch)  # of the left factor
        return (split[0], len(batch) + before + free.index(split[0])) if split else None


def _find_needed(equations: Sequence[Any], results: Sequence[Any]) -> list[Any]:
    """The equations that results need: a module of NNX that is made anew draws parameters that nobody reads."""
    read, needed = {v for v in results if isinstance(v, core.Var)}, []
    for equation in reversed(equations):
        if equation.effects or read & {*equation.outvars}:
            read |= {v for v in equation.invars if isinstance(v, core.Var)}
            needed.append(equation)
    return needed[::-1]


class _Operation(NamedTuple):
    """The operation that multiplies two factors, of which one is a parameter."""

    primitive: Any
    options: tuple[tuple[str, Any], ...]
    weight: int  # which factor is the parameter
    rows: tuple[int, int]  # the dimension of the rows in the other factor, and in the result

    @property
    def is_convolution(self) -> bool:
        return self.primitive is jax.lax.conv_general_dilated_p

    def product(self, left: jax.Array, right: jax.Array) -> jax.Array:
        return self.primitive.bind(left, right, **dict(self.options))

    def product_with(self, x: jax.Array, w: jax.Array) -> jax.Array:
        """The product with a parameter `w`."""
        return self.product(x, w) if self.weight else self.product(w, x)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _product(gradient: Spec, over: Split, how: _Operation, left: jax.Array, right: jax.Array) -> jax.Array:
    """A product with a parameter whose gradient is summed once, to where `gradient` says."""
    return how.product(left, right)


def _forward(gradient: Spec, over: Split, how: _Operation, left: jax.Array, right: jax.Array):
    return how.product(left, right), (left, right)


def _backward(gradient: Spec, over: Split, how: _Operation, factors: Any, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, w = factors[1 - how.weight], factors[how.weight]
    (dx,) = jax.vjp(lambda x: how.product_with(x, w), x)[1](dy)

    def compute_piece(x: jax.Array, dy: jax.Array) -> jax.Array:
        return jax.vjp(lambda w: how.product_with(x, w), w)[1](dy)[0]

    if how.is_convolution:
        dw = _compute_pieces(compute_piece, over, how.rows, x, dy)
    else:
        dw = jax.vmap(compute_piece)(_cut(x, how.rows[0], over), _cut(dy, how.rows[1], over))
    dw = placement().total(dw, over, gradient)
    return (dx, dw) if how.weight else (dw, dx)


def _compute_pieces(function: Callable[..., Any], over: Split, rows: Sequence[int], *arrays: jax.Array) -> jax.Array:
    """[shards, ...]: what `function` gives for the pieces of arrays that devices have.

    Partitioners gather the factors of a convolution that is mapped over such pieces.
    """
    inputs = [[over.over if at == row else () for at in range(x.ndim)] for row, x in zip(rows, arrays, strict=True)]
    result = [over.over, *((),) * jax.eval_shape(function, *arrays).ndim]
    return placement().per_device(lambda *pieces: (function(*pieces)[None],), inputs, [result])(*arrays)[0]


def _cut(x: jax.Array, dimension: int, over: Split) -> jax.Array:
    """[shards, ...]: the pieces of one dimension."""
    shape = (*x.shape[:dimension], over.num_shards, -1, *x.shape[dimension + 1 :])
    return jnp.moveaxis(x.reshape(shape), dimension, 0)


_product.defvjp(_forward, _backward)
