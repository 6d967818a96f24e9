"""Parameters of flax models that were written without this package: each is placed for use when it is read."""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct
from flax.core import meta
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.extend import source_info_util

from gspmd_lm.errors import InputError
from gspmd_lm.sharding import constraints, names, products
from gspmd_lm.sharding.annotate import Weight, use
from gspmd_lm.sharding.placement import Named

PARAMS = "params"  # the collection of variables that is trained

# jax notes the ten innermost lines of Python of each operation. These files stand between a model and flax or jax, and
# would push the model's line out.
for file in (__file__, constraints.__file__, products.__file__):
    source_info_util.register_exclusion(file)


class Box(struct.PyTreeNode, meta.AxisMetadata[Any]):
    """A parameter in a box of flax. Modules open the box where they read the parameter, and find it placed for use."""

    value: Any
    path: str = struct.field(pytree_node=False)
    axes: tuple[str, ...] = struct.field(pytree_node=False)

    def unbox(self) -> jax.Array:
        return _use_param(self.value, self.path, self.axes)

    def replace_boxed(self, val: Any) -> "Box":
        return self.replace(value=val)

    def add_axis(self, index: int, params: dict[Any, Any]) -> "Box":
        added = names.name_axes([params.get(nn.PARTITION_NAME)], 1)
        return self.replace(axes=(*self.axes[:index], *added, *self.axes[index:]))

    def remove_axis(self, index: int, params: dict[Any, Any]) -> "Box":
        return self.replace(axes=(*self.axes[:index], *self.axes[index + 1 :]))

    def to_nnx_metadata(self) -> dict[str, Any]:
        """For a module of NNX within `flax.nnx.bridge.to_linen`."""
        return {"value": self.unbox()}


def is_box(leaf: Any) -> bool:
    return isinstance(leaf, Box)


@contextlib.contextmanager
def reading() -> Iterator[None]:
    """A context in which modules of flax are made and called, those of NNX with axes although no mesh is set."""
    eagerly = getattr(_nnx(), "use_eager_sharding", None)  # the first versions of flax 0.12 have none
    constraints.intercept()
    if _nnx():
        _intercept_layers_of_nnx()
        _intercept_reads_of_nnx()
    quiet = eagerly(False) if eagerly else contextlib.nullcontext()
    with quiet, nn.intercept_methods(_intercept_method), constraints.taking_specs():
        yield


def box_params(drawn: Any) -> Any:
    """The output of a model's `init` as nested dicts of arrays, in boxes that know their logical axes.

    A linen module has such dicts: its parameters, or its collections, of which one is `params`. The state of an NNX
    module becomes one of both. An array that the model names no axes of is in no box. Raises InputError for the keys of
    NNX that draw random numbers.
    """
    return _nnx_dicts(drawn) if _is_state(drawn) else drawn


def variables(made: Any) -> Any:
    """The output of a model's `init`. If that is a module of NNX, it is the state of the module's variables."""
    if not is_module(made):
        return made
    _, _, state, _ = _nnx().split(made, _nnx().RngState, _nnx().Variable, ...)
    return state


def is_module(made: Any) -> bool:
    """Whether `init` returns an NNX module, which is then an argument of the model's functions."""
    return _nnx() is not None and isinstance(made, _nnx().Module)


def fill_module(module: Any, state: Any, key: jax.Array | None) -> Any:
    """A module of NNX with the variables of a state, which draws its random numbers from a key."""
    _nnx().update(module, state)
    key = jax.random.key(0) if key is None else key
    streams = _nnx().to_flat_state(_nnx().state(module, _nnx().RngKey))
    for number, (_, stream) in enumerate(streams):
        drawn = jax.random.fold_in(key, number)
        shape = stream.get_raw_value().shape
        stream.set_raw_value(jax.random.split(drawn, shape) if shape else drawn)
    _nnx().update(module, _nnx().from_flat_state(streams))
    return module


def draws_randomly(module: Any) -> bool:
    """Whether a module of NNX draws random numbers when it is called, as dropout does."""
    return bool(_nnx().to_flat_state(_nnx().state(module, _nnx().RngKey)))


def read_changes(module: Any, before: Any) -> Any:
    """The state of the variables of a module that a call has changed, parameters aside. before: the state before it."""
    nnx, was = _nnx(), {keys: variable.get_raw_value() for keys, variable in _nnx().to_flat_state(before)}
    state = nnx.state(module, nnx.All(nnx.Variable, nnx.Not(nnx.Any(nnx.Param, nnx.RngState))))
    now = [(keys, one) for keys, one in nnx.to_flat_state(state) if one.get_raw_value() is not was.get(keys)]
    return nnx.from_flat_state(now)


def draw_params(init: Callable[[jax.Array], Any], paths: Sequence[str], key: jax.Array) -> dict[str, jax.Array]:
    """The parameters at `paths` of those that `init` draws, as path -> array."""
    params: Any = flatten_dict(nn.unbox(init(key)), sep=".")
    return {path: params[path] for path in paths}


def split_trained(variables: Any) -> tuple[Any, Any]:
    """The part of nested dicts of arrays that has no gradients, and the part that has: of collections, `params`."""
    if not isinstance(variables, Mapping) or PARAMS not in variables:
        return {}, variables
    return {name: variables[name] for name in variables if name != PARAMS}, {PARAMS: variables[PARAMS]}


def state(changed: Any) -> Any:
    """The arrays of collections that a function of the model has changed, as nested dicts."""
    if _is_state(changed):
        return unflatten_dict({keys: variable.get_raw_value() for keys, variable in _variables(changed)})
    return jax.tree.map(lambda x: x.value if meta.is_axis_metadata(x) else x, changed, is_leaf=meta.is_axis_metadata)


def _nnx_dicts(variables: Any) -> Any:
    """The variables of NNX as nested dicts. Those with axes are in boxes."""
    arrays = {}
    for keys, variable in _variables(variables):
        if isinstance(variable, _nnx().RngState):
            raise InputError(
                f"{'.'.join(keys[1:])} draws random numbers, and no step has those of the step before\n"
                "  fix   have init return the model itself, or nnx.state(model, (nnx.Param, nnx.BatchStat))"
            )
        arrays[keys] = nn.LogicallyPartitioned(variable.get_raw_value(), _axes_of_nnx(variable))
    kinds = {type(variable).__name__ for _, variable in _variables(variables)}
    if len(kinds) > 1 and not any(isinstance(variable, _nnx().Param) for _, variable in _variables(variables)):
        raise InputError(
            f"variables of NNX of several kinds, and no nnx.Param: {', '.join(sorted(kinds))}\n"
            "  fix   make those that are trained nnx.Param, or a subclass of it"
        )
    return unflatten_dict(arrays)


def _variables(state: Any) -> list[tuple[tuple[str, ...], Any]]:
    """The variables of NNX, with the keys of each in nested dicts. Unless all are parameters, the first key is the
    collection, with the name that a linen module would give it.
    """
    nnx, flat = _nnx(), _nnx().to_flat_state(state)
    several = not all(isinstance(variable, nnx.Param) for _, variable in flat)

    def collection(variable: Any) -> str:
        kind = nnx.Param if isinstance(variable, nnx.Param) else type(variable)
        return nnx.variable_name_from_type(kind, allow_register=True)

    return [((collection(variable),) * several + tuple(map(str, path)), variable) for path, variable in flat]


def name_params(boxes: Any) -> Any:
    """The path and logical axes of each parameter of nested dicts, as a tree of Named.

    A box with fewer names than its array has dimensions names the leading ones, as in flax. Where it has more, there
    are more axes than dimensions.
    """

    def name_leaf(path: Any, leaf: Any) -> Named:
        (array,) = jax.tree.leaves(leaf)
        axes = tuple(leaf.get_partition_spec()) if hasattr(leaf, "get_partition_spec") else ()
        where = ".".join(str(key.key) for key in path)
        return Named(where, names.name_axes(axes, array.ndim), max(array.ndim - len(axes), 0))

    return jax.tree_util.tree_map_with_path(name_leaf, boxes, is_leaf=meta.is_axis_metadata)


def readable(like: Any, params: Any) -> Any:
    """The parameters, nested dicts of arrays, as the functions of a model take them: each is placed for use where it is
    read. like: the output of the model's `init`, or its shapes.
    """
    named = name_params(box_params(like))
    boxes = jax.tree.map(lambda leaf, array: Box(array, leaf.path, leaf.axes), named, params)
    if not _is_state(like):
        return boxes
    flat: list[Any] = []
    of_keys: dict[Any, Any] = flatten_dict(boxes)
    for (path, _), (keys, variable) in zip(_nnx().to_flat_state(like), _variables(like), strict=True):
        variable = variable.replace(of_keys[keys].value)
        variable.set_metadata(on_get_value=_Read(of_keys[keys].path))
        flat.append((path, variable))
    return _nnx().from_flat_state(flat)


class _Read:
    """The function that NNX calls where a module reads a variable. Equal paths make it equal, as variables need."""

    def __init__(self, path: str):
        self.path = path

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Read) and self.path == other.path

    def __hash__(self) -> int:
        return hash(self.path)

    def __call__(self, variable: Any, value: Any) -> Any:
        return _use_param(value, self.path, names.name_axes(_axes_of_nnx(variable), value.ndim))


def _axes_of_nnx(variable: Any) -> tuple[Any, ...]:
    """The names that a variable of NNX has for its leading dimensions."""
    axes = variable.get_metadata("out_sharding", None)
    return tuple(getattr(axes, "spec", axes) or ())


_FACTS = "shape", "dtype", "ndim", "size", "nbytes", "itemsize", "aval", "sharding", "weak_type"  # no read of values


@functools.cache
def _intercept_reads_of_nnx() -> None:
    """Has a variable placed before an index or an attribute of its array is taken: `table[ids]`, `kernel.T`.

    Flax (0.12) hands `on_get_value` what the index has left of the array, and calls nothing for an attribute.
    """
    kind = _nnx().Variable
    get_value, get_attribute = kind.get_value, kind.__getattr__

    def is_placed(variable: Any) -> bool:
        return isinstance(object.__getattribute__(variable, "_var_metadata").get("on_get_value"), _Read)

    @functools.wraps(get_value)
    def value(self: Any, **how: Any) -> Any:
        if "index" in how and is_placed(self):
            whole = get_value(self)
            return whole if how["index"] is ... else whole[how["index"]]
        return get_value(self, **how)

    @functools.wraps(get_attribute)
    def attribute(self: Any, name: str) -> Any:
        of_metadata = name in object.__getattribute__(self, "_var_metadata")
        if name.startswith("_") or name in _FACTS or of_metadata or not is_placed(self):
            return get_attribute(self, name)
        return getattr(self.get_value(), name)

    kind.get_value, kind.__getattr__ = value, attribute


def _use_param(value: jax.Array, path: str, axes: tuple[str, ...]) -> jax.Array:
    """A parameter that a module reads, placed for use."""
    dtype, narrower = value.dtype, _dtype.get()
    if narrower is not None and jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(narrower).itemsize < dtype.itemsize:
        dtype = jnp.dtype(narrower)  # the layer would cast it first: what is gathered is smaller
    return products.read(use(Weight(value, path, axes, dtype)), path, axes)


# The layers of flax.


_dtype: ContextVar[Any] = ContextVar("dtype", default=None)  # of the layer that is called
_CASTING = "Dense", "DenseGeneral", "Linear", "LinearGeneral", "Embed", "Conv", "Einsum"


def _intercept_method(call: Callable[..., Any], args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
    """The output of a linen module's method. A method that a subclass of a layer overrides is not flax's own."""
    module, method = type(context.module), context.orig_method
    kind = next((one for one in module.__mro__ if one in _layers_of_linen()), None)
    inherited = _is_of_flax(getattr(method, "func", method)) and (module is kind or not _is_of_flax(module))
    return _call_layer(context.module, call, *args, **kwargs) if kind and inherited else call(*args, **kwargs)


@functools.cache
def _layers_of_linen() -> tuple[Any, ...]:
    return tuple(getattr(nn, name) for name in _CASTING if hasattr(nn, name))


def _is_of_flax(code: Any) -> bool:
    """Whether flax has written a function or a class."""
    return code.__module__.partition(".")[0] == "flax"


@functools.cache
def _intercept_layers_of_nnx() -> None:
    """Has `_call_layer` called where a layer of NNX is, which has no interceptors."""
    for name in _CASTING:
        if kind := getattr(_nnx(), name, None):
            kind.__call__ = constraints.take_spec(_intercept_call(kind.__call__), name)


def _intercept_call(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def intercept(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _call_layer(self, call, self, *args, **kwargs)

    return intercept


def _call_layer(module: Any, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The output of a method of a flax layer. The layer casts its parameters to its dtype first."""
    token = _dtype.set(module.dtype if _is_of_flax(getattr(module, "promote_dtype", nn.Dense)) else None)
    try:
        return call(*args, **kwargs)
    finally:
        _dtype.reset(token)


def _is_state(params: Any) -> bool:
    return _nnx() is not None and isinstance(params, _nnx().State)


def _nnx() -> Any:
    """The module flax.nnx, if anything has imported it."""
    return sys.modules.get("flax.nnx")
