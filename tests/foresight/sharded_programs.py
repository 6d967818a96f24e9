"""Small steps of other people's kinds, each a function of devices: what compilers merge, move or compute once."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def mesh_of(devices, sizes=(8,), names=("x",)):
    return Mesh(np.array(devices).reshape(sizes), names)


def array(mesh, shape, *split, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*split)))


def placed(x, mesh, *split):
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*split)))


def descend(weights, gradients):
    return jax.tree.map(lambda weight, gradient: weight - 0.1 * gradient, weights, gradients)


def places(tree):
    return jax.tree.map(lambda like: like.sharding, tree)


def pipeline(devices):
    """Stages whose weights are the same on all rows of devices: a gradient is summed over these in each turn."""
    mesh, turns = mesh_of(devices, (2, 4), ("data", "stage")), 11

    def local(w, x):
        def turn(carry, rows):
            y = jnp.tanh(carry @ w[0]) + rows
            y = jax.lax.ppermute(y, "stage", [(n, (n + 1) % 4) for n in range(4)])
            return y, y

        begin, x = (jax.lax.pcast(one, "stage", to="varying") for one in (jnp.zeros_like(x[0]), x))
        return jax.lax.scan(turn, begin, x)[1]

    into = PartitionSpec("stage"), PartitionSpec(None, "data")
    stages = jax.shard_map(local, mesh=mesh, in_specs=into, out_specs=PartitionSpec("stage", "data"))

    def update(w, x):
        return descend(w, jax.grad(lambda w: (stages(w, x) ** 2).mean())(w))

    return jax.jit(update, donate_argnums=0).trace(
        array(mesh, (4, 256, 256), "stage"), array(mesh, (turns, 64, 256), None, "data")
    )


def bags(devices):
    """Tables that are split by rows, and bags of four rows that are looked up in each."""
    mesh = mesh_of(devices)

    def loss(parameters, ids, y):
        found = [table[ids[:, n]].sum(1) for n, table in enumerate(parameters["tables"])]
        return ((jnp.concatenate(found, 1) @ parameters["head"])[:, 0] - y).var()

    def update(parameters, ids, y):
        return descend(parameters, jax.grad(loss)(parameters, ids, y))

    parameters = {
        "tables": [array(mesh, (8192, 64), "x") for _ in range(4)], "head": array(mesh, (256, 1))
    }  # fmt: skip
    return jax.jit(update, donate_argnums=0, out_shardings=places(parameters)).trace(
        parameters, array(mesh, (512, 4, 4), "x", dtype=jnp.int32), array(mesh, (512,), "x")
    )


def two_sums(devices):
    mesh, split = mesh_of(devices), PartitionSpec("x")
    added = jax.shard_map(lambda x, y: jax.lax.psum(x, "x") + jax.lax.psum(y, "x"), mesh=mesh,
                          in_specs=(split, split), out_specs=PartitionSpec())  # fmt: skip
    return jax.jit(added).trace(array(mesh, (4096, 256), "x"), array(mesh, (4096, 256), "x"))


def two_orders(devices):
    """A weight that is gathered as it is, and as its transpose."""
    mesh = mesh_of(devices)
    step = jax.jit(lambda w, x: jnp.tanh(x @ placed(w, mesh)) @ placed(w.T, mesh))
    return step.trace(array(mesh, (512, 1024), "x"), array(mesh, (1024, 512), "x"))


def statistics_twice(devices):
    """The mean of a split batch for its rows, for their variance and for a running mean."""
    mesh = mesh_of(devices)
    step = jax.jit(lambda x: ((x - x.mean(0)) / jnp.sqrt(x.var(0) + 1e-5), 0.9 * x.mean(0)))
    return step.trace(array(mesh, (1024, 4096), "x"))


def summed_before_a_cast(devices):
    """A product in 16 bits, of split factors, that is then made wider."""
    mesh, half = mesh_of(devices), jnp.bfloat16
    step = jax.jit(lambda x, w: placed((x @ w).astype(jnp.float32), mesh))
    return step.trace(array(mesh, (512, 1024), None, "x", dtype=half), array(mesh, (1024, 512), "x", dtype=half))


def fully_sharded(devices):
    """Weights that are gathered for each layer, and gradients that are scattered: TPUs combine these."""
    mesh = mesh_of(devices)

    def loss(weights, x):
        for weight in weights:
            x = jnp.tanh(x @ placed(weight, mesh))
        return (x**2).mean()

    def update(weights, x):
        return descend(weights, jax.grad(loss)(weights, x))

    weights = [array(mesh, shape, "x") for shape in ((256, 512), (512, 256), (256, 128), (128, 256))]
    return jax.jit(update, donate_argnums=0, out_shardings=places(weights)).trace(weights, array(mesh, (64, 256), "x"))


def adversaries(devices):
    """A pair of networks; what one of them makes stands in both losses."""
    mesh = mesh_of(devices)

    def generate(weights, z):
        return jnp.tanh(jax.nn.relu(z @ weights[0]) @ weights[1])

    def judge(weights, x):
        return (jax.nn.relu(x @ weights[0]) @ weights[1])[:, 0]

    def update(generator, judges, z, x):
        def of_judges(judges):
            return jax.nn.softplus(judge(judges, generate(generator, z)) - judge(judges, x)).mean()

        def of_generator(generator):
            return jax.nn.softplus(-judge(judges, generate(generator, z))).mean()

        gradients = jax.grad(of_generator)(generator), jax.grad(of_judges)(judges)
        return descend((generator, judges), gradients)

    generator = [array(mesh, (128, 1024)), array(mesh, (1024, 256))]
    judges = [array(mesh, (256, 1024)), array(mesh, (1024, 8))]
    return jax.jit(update).trace(generator, judges, array(mesh, (512, 128), "x"), array(mesh, (512, 256), "x"))


def convolution(devices):
    mesh, half = mesh_of(devices), jnp.bfloat16

    def loss(kernel, x):
        y = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return (y**2).mean()

    step = jax.jit(lambda kernel, x: kernel - jax.grad(loss)(kernel, x))
    return step.trace(array(mesh, (3, 3, 64, 128), dtype=half), array(mesh, (64, 32, 32, 64), "x", dtype=half))


def branches_that_send(devices):
    """A branch that gathers an array, and one that gathers half of it."""
    mesh = mesh_of(devices)

    def step(x):
        some = lambda x: placed(jnp.sin(x[:256]), mesh).sum()  # noqa: E731
        return jax.lax.cond(x[0, 0] > 0, lambda x: placed(jnp.cos(x), mesh).sum(), some, x)

    return jax.jit(step).trace(array(mesh, (512, 256), "x"))
