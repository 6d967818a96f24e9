"""Steps that know nothing of this package, right ones and wrong ones; each is a function of devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.quick import QUICK

ROWS, WIDTH, WIDE = 32, 64, 256
Shape = jax.ShapeDtypeStruct


def mesh_of(devices):
    return Mesh(np.reshape(devices, (4, -1)), ("data", "tensor"))


def rows(mesh, axis="data"):
    return Shape((ROWS, WIDTH), jnp.float32, sharding=NamedSharding(mesh, P(axis)))


def elementwise(devices, function=jnp.sin):
    return jax.jit(function).trace(rows(mesh_of(devices)))


def loss(weights, x):
    """Of two matmuls, the first of which is computed again in the backward pass."""
    hidden = jax.checkpoint(lambda x: jnp.tanh(x @ weights["up"]))(x)
    return ((hidden @ weights["down"]) ** 2).mean()


def update(weights, unread, x):
    with jax.named_scope("descent"):
        return jax.tree.map(lambda weight, g: weight - 0.1 * g, weights, jax.grad(loss)(weights, x))


def descent(devices, donated=True):
    """Weights split over tensor, said by `in_shardings`; an argument that is not read; and a scalar option."""
    mesh = mesh_of(devices)
    split, rest = NamedSharding(mesh, P(None, "tensor")), NamedSharding(mesh, P("tensor"))
    jitted = jax.jit(
        update, in_shardings=({"up": split, "down": rest}, None, NamedSharding(mesh, P("data"))),
        donate_argnums=0 if donated else (), compiler_options=QUICK if devices[0].platform == "cpu" else {},
    )  # fmt: skip
    weights = {"up": Shape((WIDTH, WIDE), jnp.float32), "down": Shape((WIDE, WIDTH), jnp.float32)}
    return jitted.trace(weights, Shape((7,), jnp.int32), Shape((ROWS, WIDTH), jnp.float32))


class Hidden(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(WIDTH, WIDE, rngs=rngs)
        self.down = nnx.Linear(WIDE, WIDTH, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


def of_nnx(devices):
    """The step of a model and an optimizer of NNX, jitted by NNX."""
    mesh = Mesh(np.array(devices), ("data",))

    def new():
        model = Hidden(nnx.Rngs(0))
        return nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param), model

    def place(like):
        spec = P("data") if like.ndim and like.shape[0] % mesh.size == 0 else P()
        return Shape(like.shape, like.dtype, sharding=NamedSharding(mesh, spec))

    @nnx.jit
    def step(optimizer, model, x):
        value, gradients = nnx.value_and_grad(lambda model: ((model(x) - x) ** 2).mean())(model)
        optimizer.update(model, gradients)
        return value

    graph, state = nnx.split(nnx.eval_shape(new))
    return step.trace(*nnx.merge(graph, jax.tree.map(place, state)), place(Shape((ROWS, WIDTH), jnp.float32)))


def prints(devices):
    return elementwise(devices, lambda x: (jax.debug.print("{x}", x=x.sum()), x + 1)[1])


def calls_python(devices):
    return elementwise(
        devices, lambda x: jax.lax.scan(lambda c, _: (jax.pure_callback(np.sin, x, c), None), x, None, 3)
    )


def calls_in_order(devices):
    from jax.experimental import io_callback

    return elementwise(devices, lambda x: (io_callback(print, None, x.sum(), ordered=True), x + 1)[1])


def repeats(devices):
    whole = Shape((ROWS, WIDTH), jnp.float32, sharding=NamedSharding(mesh_of(devices), P()))
    return jax.jit(lambda x: x @ x.T).trace(whole)


def turns(devices):
    """Products in a loop whose limit is an argument of a function that is jitted apart."""
    square = Shape((WIDTH, WIDTH), jnp.float32, sharding=NamedSharding(mesh_of(devices), P()))
    repeat = jax.jit(lambda turns, x, w: jax.lax.fori_loop(0, turns, lambda _, x: jnp.tanh(x @ w), x))
    return jax.jit(lambda x, w: repeat(9, x, w)).trace(rows(mesh_of(devices)), square)


def asks_where_it_runs(devices):
    """Rows that are gathered on a TPU alone, as libraries choose by these questions."""
    on_tpu = jax.default_backend() == jax.devices()[0].platform == "tpu" and jax.device_count() == len(devices)
    whole = NamedSharding(mesh_of(devices), P())
    return elementwise(devices, lambda x: jax.lax.with_sharding_constraint(x, whole) if on_tpu else jnp.sin(x))


def branches(devices):
    return elementwise(devices, lambda x: x if x.sum() > 0 else -x)


def holds(devices):
    return jax.device_put(np.zeros((ROWS, WIDTH)), NamedSharding(mesh_of(devices), P("data")))


def runs(devices):
    return jax.jit(lambda: jnp.zeros(8), out_shardings=NamedSharding(mesh_of(devices), P("data")))()


def of_floats(devices):
    """Numbers as wide as those of Python, if jax has any."""
    return jax.jit(jnp.sin).trace(Shape((ROWS, WIDTH), float, sharding=NamedSharding(mesh_of(devices), P("data"))))


def few_devices(devices):
    return elementwise(devices[:4])


def other_devices(devices):
    return elementwise(jax.devices("cpu") if devices[0].platform != "cpu" else devices[::-1][:-1] + devices[-1:])


def on_two_meshes(devices):
    """An argument, a constraint and a shard_map on a mesh of one axis, beside an argument on a mesh of two."""
    whole = Mesh(np.array(devices), ("all",))

    def step(x, y):
        columns = jax.lax.with_sharding_constraint(y * y, NamedSharding(whole, P(None, "all")))
        add_up = functools.partial(jax.lax.psum, axis_name="all")
        return x + 1, jax.shard_map(add_up, mesh=whole.abstract_mesh, in_specs=P("all"), out_specs=P())(columns)

    return jax.jit(step).trace(rows(mesh_of(devices)), rows(whole, "all"))


def other_sizes(devices):
    return jax.jit(jnp.add).trace(rows(mesh_of(devices)), rows(Mesh(np.reshape(devices, (2, 4)), ("data", "tensor"))))


def swapped(devices):
    return jax.jit(jnp.add).trace(rows(mesh_of(devices)), rows(Mesh(np.reshape(devices, (2, 4)), ("tensor", "data"))))


def held_on_the_host(devices):
    """Weights that are in the memory of the host, where they are written again."""
    mesh = mesh_of(devices)
    host, device = (NamedSharding(mesh, P("data"), memory_kind=kind) for kind in ("pinned_host", "device"))
    jitted = jax.jit(lambda w, x: jax.device_put(jax.device_put(w, device) + x, host), donate_argnums=0)
    return jitted.trace(Shape((ROWS, WIDTH), jnp.float32, sharding=host), rows(mesh))


def unplaced(devices):
    return jax.jit(jnp.sin).trace(Shape((8,), jnp.float32))


def reads_nothing(devices):
    return elementwise(devices, lambda x: None)


def pair(devices):
    return jax.jit(jnp.sin), rows(mesh_of(devices))


def lowered(devices):
    return elementwise(devices).lower()


def fails(devices):
    return elementwise(devices, lambda x: x @ x)


not_donated = functools.partial(descent, donated=False)


def partitioned(devices):
    """A function that says in Python how it is split."""
    from jax.experimental.custom_partitioning import custom_partitioning

    shifted = custom_partitioning(lambda x: x + 1)
    shifted.def_partition(
        lambda mesh, inputs, result: (mesh, jnp.sin, result.sharding, (inputs[0].sharding,)), sharding_rule="i j -> i j"
    )
    return elementwise(devices, lambda x: shifted(2 * x))
