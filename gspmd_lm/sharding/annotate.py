"""The words with which a model says where its arrays live. On one device each of them is the identity.

A model names arrays and axes and never sees a mesh. Code that traces a step gives the names a placement by `placed_by`.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from gspmd_lm.errors import InputError
from gspmd_lm.sharding.names import Vocabulary, check_name
from gspmd_lm.sharding.op_names import scope

CONSTRAINT = "constraint"  # the prefix of the names of arrays that a model places without naming them
REPLICAS = "replicas"  # the vmapped axis of replicas of the weights


class Shared(NamedTuple):
    """A weight that several matmuls read: it is gathered once, and its gradient is reduced once."""

    in_use: Any  # an array, or one that is quantised; no gradient flows through it
    slot: jax.Array  # zeros, whose gradient becomes the weight's: see `partial_sums.gradient_slot`


@dataclasses.dataclass(frozen=True)
class Weight:
    """A parameter as a layer holds it: its array, and the facts that the rules and `use` need."""

    array: jax.Array  # at rest, or in use if `used`
    path: str  # "layers.attention.wq"
    axes: tuple[str, ...]  # the logical axis of each dimension
    compute_dtype: jnp.dtype
    frozen: bool = False  # its gradient is never computed
    scanned: bool = False  # it belongs to a layer of the scan
    used: bool = False
    matmul_dtype: str = ""  # of its products: int8 or fp8; "": the compute dtype
    shared: Shared | None = None  # what all its matmuls read, if they share the weight

    def holding(self, array: Any) -> "Weight":
        return dataclasses.replace(self, array=array, shared=None)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Adapted:
    """A matrix, and the two matrices of its low-rank adapter if it has one (arXiv 2106.09685).

    They are of class Weight, or anything else that a tree may have.
    """

    weight: Any
    adapter: tuple[Any, ...] = ()
    scale: float = dataclasses.field(default=1.0, metadata={"static": True})


class Split(NamedTuple):
    """The split of an axis. A model compares splits and counts shards; it never reads the mesh axes."""

    over: tuple[str, ...] = ()  # mesh axes
    num_shards: int = 1


class Stages(NamedTuple):
    """The stages of a pipeline, and how microbatches go through them."""

    split: Split  # of the layers
    microbatches: int
    repeats: int  # how often a microbatch goes through all stages
    gathers_once: bool  # whether weights are gathered once in a step
    keep: str  # layers or stage: whose inputs are kept for the backward pass
    replicas: tuple[str, ...]  # the mesh axes along which the weights of a stage are whole


class Spec(NamedTuple):
    """An array's name and logical axes, and the table of the rules file that places it."""

    array: str
    axes: tuple[str, ...]
    table: str = "rules"  # in use; "weights" at rest; "optimizer" as a gradient

    @classmethod
    def from_text(cls, text: str, table: str = "rules") -> "Spec":
        """Spec("residual", ("batch", "seq", "embed")) for 'residual: batch seq embed'."""
        array, _, axes = text.partition(": ")
        return cls(array, tuple(axes.split()), table)

    @property
    def is_constraint(self) -> bool:
        """Whether a constraint of flax places it, which names axes and no array."""
        return self.array == ",".join((CONSTRAINT, *self.axes))


@dataclasses.dataclass(frozen=True)
class Settings:
    """The choices of the rules besides the placement of arrays, and the platform and devices that they are for.

    The defaults are those of a single device without rules.
    """

    platform: str = "cpu"  # that a program is traced for: cpu, gpu or tpu; `recorded` where nothing will run
    device_kind: str = "cpu"  # what jax calls its devices, such as TPU v6 lite
    attention: str = "xla"  # the attention kernel: xla, cudnn or splash
    context: str = "gather"  # how the keys of a split sequence reach its queries: gather, ring or ulysses
    remat: Callable[..., Any] | None = None  # the policy of `jax.checkpoint` for a block; None: not computed again
    replicas: str = ""  # the name of the vmapped axis of replicas, of one of which the work is traced
    interleave: int = 1  # parts of a device's rows that a layer computes side by side
    expert_buffer: float = 2.0  # of what arrives at a device's experts in one round, in mean numbers of rows
    unroll: tuple[int, int] = (0, 1)  # a loop of up to so many turns is written out; of a longer one, so many turns


class Placement:
    """The answers to a model's questions, which the functions of this module ask: those of a single device.

    A subclass answers with rules and a mesh.
    """

    is_single = True  # whether there is one device, and nothing knows the names of the model's axes and arrays

    @property
    def vocabulary(self) -> Vocabulary:
        """The names of the model's axes and arrays."""
        return Vocabulary(axes={}, weights={}, activations={})

    def setting(self, name: str) -> Any:
        """The value of that name in `Settings`."""
        return getattr(Settings(), name)

    @property
    def devices(self) -> int:
        """The number of devices of the mesh."""
        return 1

    @property
    def stages(self) -> Stages | None:
        """The stages of the pipeline that the layers go through; None where there is none."""
        return None

    @property
    def within_stage(self) -> "Placement":
        """The placement for the work of one stage. The others are a batch dimension of this work."""
        return self

    @property
    def within_mapped_stages(self) -> "Placement":
        """`within_stage`, where a derivative sees the work of all stages and of all replicas."""
        return self

    def constrain(self, x: jax.Array, spec: Spec) -> jax.Array:
        """`x`, placed where the rules place the array that `spec` names."""
        return x

    def split(self, array: str, axis: str) -> Split:
        """The split of an axis of an array in use, for code that makes a copy or a partial sum for each shard."""
        return Split()

    def num_shards(self, array: str, axis: str) -> int:
        """The number of shards of an axis of an activation, for a loop that takes a part of each."""
        return 1

    def over(self, mesh_axes: tuple[str, ...]) -> Split:
        """The split over these mesh axes."""
        return Split(mesh_axes)

    def copies(self, x: jax.Array, split: Split, spec: Spec) -> jax.Array:
        """[num_shards, ...]: a copy of `x`, which is placed as `spec` says, for each shard of `split`."""
        return x[None]

    def total(self, partials: jax.Array, split: Split, spec: Spec) -> jax.Array:
        """The sum over the first dimension, which has a partial sum for each shard of `split`, placed as
        `spec` says.

        The sum is a reduce-scatter where `spec` is split over mesh axes of `split`, else an all-reduce.
        """
        return self.constrain(partials.sum(0), spec)

    def reshard_axis_by_axis(self, x: jax.Array, table: Spec, target: Spec) -> jax.Array:
        """`x`, whose last axis is split as that of a table is, on the way to `target`, one mesh axis after the other.

        Compilers make an all-to-all where one axis is exchanged for another one, but not where it is for two, nor where
        other axes split the same dimension of `target`.
        """
        return x

    def per_device(self, function: Callable[..., Any], inputs: Sequence[Any], outputs: Any) -> Callable[..., Any]:
        """See `annotate.per_device`."""
        return function


_SINGLE = Placement()
_current: ContextVar[Placement] = ContextVar("placement", default=_SINGLE)


@contextlib.contextmanager
def placed_by(placement: Placement | None) -> Iterator[None]:
    """A context in which `placement` places the arrays of what is traced, flax's logical constraints included.

    None: that of a single device.
    """
    token = _current.set(placement or _SINGLE)
    try:
        with nn.logical_axis_rules([("", None)] if placement else ()):  # without rules, flax drops its constraints
            yield
    finally:
        _current.reset(token)


def placement() -> Placement:
    """The placement in effect."""
    return _current.get()


def parse(text: str, rank: int) -> Spec:
    """The Spec that a text says for an array of `rank` dimensions: see `Spec.from_text`.

    Raises InputError for another number of dimensions. Under a placement, it is also raised for a name that the model
    does not have.
    """
    spec, place = Spec.from_text(text), placement()
    array, axes, _ = spec
    if len(axes) != rank:
        raise InputError(
            f'shard(x, "{text}"): {array} has {len(axes)} axes here, and x has {rank} dimensions\n'
            '  fix   name each dimension of x once: "array: axis axis ..."'
        )
    if not place.is_single:
        known, word = place.vocabulary, f'shard(x, "{text}")'
        check_name(word, "activation", array, known.activations)
        for axis in axes:
            check_name(word, "axis", axis, known.axes)
    return spec


# Questions that a model asks about the placement


def split(array: str, axis: str) -> Split:
    """The split of an axis of an array under the rules; on a single device it is one piece."""
    return placement().split(array, axis)


def remat() -> Callable[..., Any] | None:
    """The policy of `jax.checkpoint` for a block, or None where a block is not computed again."""
    return placement().setting("remat")


def unroll(turns: int) -> int:
    """The number of turns that the program unrolls of a loop over layers, which has `turns`."""
    short, some = placement().setting("unroll")
    return turns if turns <= short else min(some, turns)


def recomputed(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, recomputed in the backward pass from its inputs alone, unless the whole block is recomputed.

    Elementwise steps are recomputed faster than their results are read back from memory.
    """
    return function if remat() else jax.checkpoint(function, prevent_cse=False)


def replicas() -> str:
    """The name of the vmapped axis of replicas, where the work of one of them is traced; else ''."""
    return placement().setting("replicas")


def attention_kernel() -> str:
    """The attention kernel that the rules choose for the platform at hand."""
    return placement().setting("attention")


def platform() -> str:
    """The platform that a program is traced for: cpu, gpu or tpu; `recorded` where nothing will run."""
    return placement().setting("platform")


def device_kind() -> str:
    """Jax's name for the devices that a program is traced for, such as TPU v6 lite."""
    return placement().setting("device_kind")


def context() -> str:
    """The form of context parallelism, in which keys of a split sequence reach its queries: gather, ring or ulysses."""
    return placement().setting("context")


def per_device(function: Callable[..., Any], inputs: Sequence[Any], outputs: Any) -> Callable[..., Any]:
    """`function`, run by each device on its own shards of the arrays.

    An array is named as in `shard`, where a dimension called `whole` is not split, by a Spec, or by the mesh axes of
    each dimension; None has no place. `outputs` is one array or a sequence of them.
    """
    return placement().per_device(function, inputs, outputs)


# The words


def parameter(
    module: nn.Module,
    name: str,
    axes: str,
    shape: tuple[int, ...],
    init: nn.initializers.Initializer,
    dtype: Any = "float32",
    compute_dtype: Any = None,
) -> Weight:
    """A parameter of `module`, annotated with one logical axis per dimension: "embed mlp". Layers read it with `use`.

    It rests in `dtype` and is used in `compute_dtype`, by default the same.
    """
    names = tuple(axes.split())
    if module.has_variable("params", name):  # flax traces the initializer once more, for the shape alone
        init = nn.initializers.zeros
    boxed = nn.with_logical_partitioning(init, names)
    array: Any = module.param(name, boxed, shape, jnp.dtype(dtype), unbox=False)
    array = array.value if nn.meta.is_axis_metadata(array) else array  # `use` places it, not its box
    array, shared = array if isinstance(array, tuple) else (array, None)  # see `partial_sums.share_weight`
    in_use = jnp.dtype(compute_dtype or dtype)
    return Weight(array, ".".join((*module.path, name)), names, in_use, shared=shared)


def shard(x: jax.Array, spec: str) -> jax.Array:
    """The activation `x`, placed as the rules say. Remat policies refer to it by its name.

    `spec` names the array and each of its dimensions: "residual: batch seq embed".
    """
    return checkpoint_name(like(x, spec), spec.partition(":")[0])


def like(x: jax.Array, spec: str) -> jax.Array:
    """`x`, placed like the activation that `spec` names, although `x` is not that activation.

    Before a `shard` that gathers, it fixes the dtype that is sent: the dtype of `x`.
    """
    return placement().constrain(x, parse(spec, x.ndim))


def use(weight: Weight, dtype: Any = None) -> jax.Array:
    """The weight, placed as the rules say for use. It is cast to its compute dtype first and gathered afterwards.

    A wider `dtype` changes neither its values nor the bytes that are sent. Only its gradients are added up in `dtype`.
    """
    spec = Spec(weight.path, weight.axes)
    return _use(spec, weight.compute_dtype, jnp.dtype(dtype or weight.compute_dtype), weight.array)


def in_use(weight: Weight) -> Weight:
    """The weight with its array in use, for products in a loop that is not differentiated."""
    return dataclasses.replace(weight, array=use(weight), used=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _use(spec: Spec, compute_dtype: Any, dtype: Any, w: jax.Array) -> jax.Array:
    place = placement()
    with scope("rules", spec.array):
        w = w.astype(compute_dtype)
    # The cast weight is placed at rest too. Otherwise some compilers gather before they cast: twice the bytes.
    return place.constrain(place.constrain(w, spec._replace(table="weights")), spec).astype(dtype)


def _use_forward(spec: Spec, compute_dtype: Any, dtype: Any, w: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _use(spec, compute_dtype, dtype, w), jnp.zeros((), w.dtype)


def _use_backward(spec: Spec, compute_dtype: Any, dtype: Any, like: jax.Array, dw: jax.Array) -> tuple[jax.Array]:
    return (placement().constrain(dw, spec._replace(table="optimizer")).astype(like.dtype),)


_use.defvjp(_use_forward, _use_backward)
