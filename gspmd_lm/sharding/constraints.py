"""Sharding constraints in users' own models: flax's logical axes and jax's PartitionSpecs, which the rules map."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
from flax.linen import spmd
from jax.sharding import PartitionSpec

from gspmd_lm.errors import InputError
from gspmd_lm.sharding.annotate import CONSTRAINT, Spec, placement
from gspmd_lm.sharding.names import check_name, is_unnamed, name_axes

# Functions of jax that place their result, and are called as attributes of its modules: they have no interceptors.
_PRODUCTS = "einsum", "dot", "matmul", "tensordot", "reshape"
# Those whose second argument says where to place the first.
_PLACING = (jax.lax, "with_sharding_constraint"), (jax.sharding, "reshard"), (jax, "reshard")
_NO_MESH = "not under a mesh context", "non-empty mesh"  # in what jax says where one of another function is left

_answered: ContextVar[bool] = ContextVar("answered", default=False)


@contextlib.contextmanager
def taking_specs() -> Iterator[None]:
    """A context in which functions of jax take PartitionSpecs of a model's own, although no mesh is set.

    Raises InputError for those of a function that is not known here.
    """
    token = _answered.set(True)
    try:
        yield
    except (RuntimeError, ValueError) as error:
        if isinstance(error, InputError) or not any(words in str(error) for words in _NO_MESH):
            raise
        said = str(error).splitlines()[0]
        raise InputError(
            f"the model gives a PartitionSpec to a function that needs a mesh of its own: {said}\n"
            "  fix   jax.lax.with_sharding_constraint(x, spec), called by this name, or nn.with_logical_constraint(x, "
            "axes); for a parameter, nnx.Param(x, out_sharding=axes)"
        ) from error
    finally:
        _answered.reset(token)


@functools.cache
def intercept() -> None:
    """Has flax ask for logical constraints, and jax's functions take PartitionSpecs within `taking_specs`."""
    _intercept_flax()
    for name in _PRODUCTS:
        setattr(jnp, name, take_spec(getattr(jnp, name), f"jnp.{name}"))
    for module, name in _PLACING:
        if function := getattr(module, name, None):
            setattr(module, name, _wrap_placing(function, f"{module.__name__}.{name}"))


def take_spec(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """`function`, whose argument `out_sharding` may be a PartitionSpec within `taking_specs`."""

    @functools.wraps(function)
    def call(*arguments: Any, **how: Any) -> Any:
        spec = how.get("out_sharding")
        if not (_answered.get() and isinstance(spec, PartitionSpec)):
            return function(*arguments, **how)
        return _place(function(*arguments, **how | {"out_sharding": None}), spec, f"{name}(..., out_sharding={spec})")

    return call


def _wrap_placing(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*arguments: Any, **how: Any) -> Any:
        x, spec, *_ = signature.bind(*arguments, **how).arguments.values()  # jax and models also name arguments
        if not (_answered.get() and isinstance(spec, PartitionSpec)):
            return function(*arguments, **how)
        return jax.tree.map(lambda x: _place(x, spec, f"{name}(x, {spec})"), x)

    return call


def _place(x: jax.Array, spec: PartitionSpec, word: str) -> jax.Array:
    """`x`, placed as the rules say of the names in a PartitionSpec; left open where that leaves a dimension open."""
    if placement().is_single or PartitionSpec.UNCONSTRAINED in tuple(spec):
        return x
    return _constrain(x, tuple(spec), word)


def _intercept_flax() -> None:
    """Has flax ask the placement in effect where `nn.with_logical_constraint` places an array.

    Flax (0.12) places it on the mesh of the context, which a compiler for absent hardware does not have, and takes an
    unknown axis, and a mesh axis that is used twice, for one that is not split.
    """
    of_flax = spmd._with_sharding_constraint_one_fallback

    def answer(axes: Any, x: Any, fallback: Any, rules: Any, mesh: Any) -> Any:
        if placement().is_single or axes is None:
            return of_flax(axes, x, fallback=fallback, rules=rules, mesh=mesh)
        more = mesh is not None or fallback != spmd.RulesFallback.AXIS_IS_UNSHARDED
        how = f", fallback={fallback.name}, mesh={mesh}" if more else ""
        return _constrain(x, tuple(axes), f"nn.with_logical_constraint(x, {tuple(axes)})", how)

    spmd._with_sharding_constraint_one_fallback = answer


def _constrain(x: jax.Array, axes: tuple[Any, ...], word: str, unknown: str = "") -> jax.Array:
    """`x`, placed as the rules say of its axes. `word` is how a model says so, with what is `unknown` here.

    Raises InputError for axes that do not fit.
    """
    place = placement()
    if unknown or len(axes) > x.ndim:
        raise InputError(
            f"{word}: x has {x.ndim} dimensions{unknown}\n"
            "  fix   name at most one axis per dimension, without mesh= and fallback=: the rules file says both"
        )
    names = name_axes(axes, x.ndim)
    for axis in names:
        if not is_unnamed(axis):
            check_name(word, "axis", axis, place.vocabulary.axes)
    return place.constrain(x, Spec(",".join((CONSTRAINT, *names)), names))
