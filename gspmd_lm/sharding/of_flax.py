"""Parameters as flax hands them to models that know nothing of this package: each is placed for use when it is read."""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import flax
import flax.linen as nn
import jax
from flax import struct
from flax.core import meta

from gspmd_lm.errors import InputError
from gspmd_lm.sharding import names
from gspmd_lm.sharding.annotate import Weight, use
from gspmd_lm.sharding.placement import Named


@struct.dataclass
class Box(meta.AxisMetadata[Any]):
    """A parameter in a box of flax. Modules open the box where they read the parameter, and find it placed for use."""

    value: Any
    path: str = struct.field(pytree_node=False)
    axes: tuple[str, ...] = struct.field(pytree_node=False)

    def unbox(self) -> jax.Array:
        return use(Weight(self.value, self.path, self.axes, self.value.dtype))

    def replace_boxed(self, val: Any) -> "Box":
        return self.replace(value=val)

    def add_axis(self, index: int, params: dict[Any, Any]) -> "Box":
        return self.replace(axes=(*self.axes[:index], params[nn.PARTITION_NAME], *self.axes[index:]))

    def remove_axis(self, index: int, params: dict[Any, Any]) -> "Box":
        return self.replace(axes=(*self.axes[:index], *self.axes[index + 1 :]))

    def to_nnx_metadata(self) -> dict[str, Any]:
        """For a module of NNX within `flax.nnx.bridge.to_linen`."""
        return {"value": self.unbox()}


@contextlib.contextmanager
def without_a_mesh() -> Iterator[None]:
    """A context in which modules of NNX with axes are made although no mesh is set."""
    with flax.config.temp_flip_flag("always_shard_variable", False):
        yield


def boxed(params: Any) -> Any:
    """What a model's `init` gives, as nested dicts: arrays in boxes that know their logical axes.

    Those of a linen module are such dicts; the state of an NNX module becomes one. Raises InputError for a state with
    variables that are no parameters.
    """
    if not _is_state(params):
        return params
    tree: dict[str, Any] = {}
    for path, variable in _nnx().to_flat_state(params):
        name = ".".join(map(str, path))
        if not isinstance(variable, _nnx().Param):
            raise InputError(
                f"{name} is a {type(variable).__name__}, and only parameters are trained\n"
                "  fix   have init return nnx.state(model, nnx.Param); what a step changes otherwise is not supported"
            )
        *modules, last = map(str, path)
        within = tree
        for module in modules:
            within = within.setdefault(module, {})
        axes = variable.get_metadata("out_sharding", None)
        value = variable.get_raw_value()
        within[last] = value if axes is None else nn.LogicallyPartitioned(value, tuple(axes))
    return tree


def named(boxes: Any) -> Any:
    """The path and logical axes of each parameter of nested dicts, as a tree of Named."""
    return jax.tree_util.tree_map_with_path(
        lambda path, spec: Named(".".join(str(key.key) for key in path), names.named(spec)),
        nn.get_partition_spec(boxes),
    )


def readable(like: Any, params: Any) -> Any:
    """The parameters, nested dicts of arrays, as the functions of a model take them, whose `init` gave what is like
    `like`: each is placed for use where it is read.
    """
    boxes = jax.tree.map(
        lambda leaf, array: Box(array, leaf.path, leaf.axes),
        named(boxed(like)), params, is_leaf=lambda leaf: isinstance(leaf, Named),
    )  # fmt: skip
    if not _is_state(like):
        return boxes
    flat = []
    for path, variable in _nnx().to_flat_state(like):
        box = boxes
        for key in path:
            box = box[str(key)]
        variable = variable.replace(box.value)
        variable.set_metadata(on_get_value=_Read(box.path))
        flat.append((path, variable))
    return _nnx().from_flat_state(flat)


class _Read:
    """What NNX calls where a module reads a variable. Equal for equal paths, since variables are compared by it."""

    def __init__(self, path: str):
        self.path = path

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Read) and self.path == other.path

    def __hash__(self) -> int:
        return hash(self.path)

    def __call__(self, variable: Any, value: Any) -> Any:
        return use(Weight(value, self.path, names.named(variable.get_metadata("out_sharding")), value.dtype))


def _is_state(params: Any) -> bool:
    return "flax.nnx" in sys.modules and isinstance(params, _nnx().State)


def _nnx() -> Any:
    return sys.modules["flax.nnx"]
