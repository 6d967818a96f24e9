"""Random sharded programs: loops, programs of one device, look-ups, branches and gradients, each from a seed."""

import functools
import random

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

MESHES = ({"x": 8}, {"x": 2, "y": 4}, {"x": 4, "y": 2})
SIZES = (16, 32, 64)


class Maker:
    """The choices that make one program. A program is run through once for each trace, with the same choices."""

    def __init__(self, seed, devices):
        self.random = random.Random(seed)
        sizes = self.random.choice(MESHES)
        self.mesh = Mesh(np.array(devices).reshape(tuple(sizes.values())), tuple(sizes))
        self.arguments = []

    def spec(self, shape):
        """A random way to split an array. No mesh axis is used twice."""
        axes, entries = [*self.mesh.axis_names], [None] * len(shape)
        self.random.shuffle(axes)
        for axis in axes:
            free = [d for d, size in enumerate(shape) if entries[d] is None and size % self.mesh.shape[axis] == 0]
            if free and self.random.random() < 0.6:
                entries[self.random.choice(free)] = axis
        return PartitionSpec(*entries)

    def argument(self, shape, dtype=jnp.float32):
        self.arguments.append(jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(self.mesh, self.spec(shape))))
        return len(self.arguments) - 1

    def placed(self, x):
        return NamedSharding(self.mesh, self.spec(x))


# Each step is made of a maker and the shape of a value, and is a function of (arguments, value) and its result's shape.


def apply_to_each(make, shape):
    function = make.random.choice(
        [jnp.tanh, lambda x: 0.5 * x, lambda x: -x, lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), jnp.square]
    )
    return (lambda a, x: function(x)), shape


def combine(make, shape):
    other, function = make.argument(shape), make.random.choice([jnp.add, jnp.multiply, jnp.subtract])
    return (lambda a, x: function(x, a[other])), shape


def multiply(make, shape):
    width = make.random.choice(SIZES)
    weight = make.argument((shape[-1], width))
    if make.random.random() < 0.4:
        place = make.placed((shape[-1], width))
        return (lambda a, x: x @ jax.lax.with_sharding_constraint(a[weight], place)), (*shape[:-1], width)
    return (lambda a, x: x @ a[weight]), (*shape[:-1], width)


def place(make, shape):
    sharding = make.placed(shape)
    return (lambda a, x: jax.lax.with_sharding_constraint(x, sharding)), shape


def turn(make, shape):
    order = make.random.sample(range(len(shape)), len(shape))
    return (lambda a, x: x.transpose(order)), tuple(shape[d] for d in order)


def reshape(make, shape):
    d = make.random.randrange(len(shape) - 1) if len(shape) > 2 else 0
    joined = (*shape[:d], shape[d] * shape[d + 1], *shape[d + 2 :])
    new = joined if len(shape) > 2 else (shape[0] // 4, 4, *shape[1:])
    return (lambda a, x: x.reshape(new)), new


def add_up(make, shape):
    """A statistic of an axis, with which the array is shifted: it may be asked for twice."""
    d, twice = make.random.randrange(len(shape)), make.random.random() < 0.5
    function = make.random.choice([jnp.mean, jnp.sum, jnp.max])

    def run(a, x):
        found = function(x, axis=d, keepdims=True)
        return x - found * (function(x, axis=d, keepdims=True) if twice else 1.0)

    return run, shape


def look_up(make, shape):
    rows = make.random.choice(SIZES)
    indices, bag = make.argument((rows, 4), jnp.int32), make.random.random() < 0.5
    if bag:
        return (lambda a, x: x[a[indices]].sum(1)), (rows, *shape[1:])
    return (lambda a, x: x[a[indices][:, 0]]), (rows, *shape[1:])


def join(make, shape):
    d, other = make.random.randrange(len(shape)), make.argument(shape)
    size = shape[d]
    return (
        lambda a, x: jax.lax.slice_in_dim(jnp.concatenate([x, a[other]], d), size // 2, size // 2 + size, axis=d)
    ), shape


def roll(make, shape):
    d = make.random.randrange(len(shape))
    return (lambda a, x: x + jnp.roll(x, 1, d)), shape


def order(make, shape):
    function = make.random.choice([jnp.cumsum, jnp.sort])
    return (lambda a, x: function(x, axis=-1)), shape


def branch(make, shape):
    weight, place = make.argument((shape[-1], shape[-1])), make.placed(shape)

    def run(a, x):
        return jax.lax.cond(
            a[weight][0, 0] > 0, lambda x: jax.lax.with_sharding_constraint(x @ a[weight], place), jnp.tanh, x
        )

    return run, shape


def layers(make, shape):
    count, again = make.random.choice([1, 3, 5]), make.random.random() < 0.5
    weights = make.argument((count, shape[-1], shape[-1]))
    place = make.placed(shape) if make.random.random() < 0.5 else None

    def body(x, w):
        y = jnp.tanh(x @ w)
        return (y if place is None else jax.lax.with_sharding_constraint(y, place)), None

    body = jax.checkpoint(body) if again else body
    return (lambda a, x: jax.lax.scan(body, x, a[weights])[0]), shape


def accumulate(make, shape):
    """A loop that adds up products, such as gradients of microbatches."""
    parts = make.argument((3, *shape))

    def run(a, x):
        def body(total, part):
            return total + jnp.tanh(part).reshape(-1, shape[-1]).T @ x.reshape(-1, shape[-1]), None

        total, _ = jax.lax.scan(body, jnp.zeros((shape[-1], shape[-1])), a[parts])
        return x @ total

    return run, shape


def on_each_device(make, shape):
    """A program of one device: sums, gathers and permutes, some of them in a loop."""
    axis = make.random.choice(make.mesh.axis_names)
    size = make.mesh.shape[axis]
    if shape[0] % size:
        return apply_to_each(make, shape)
    weight, kind = (
        make.argument((shape[-1], shape[-1])),
        make.random.choice(["sum", "two", "gather", "turn", "scatter"]),
    )
    times = make.random.choice([0, 0, 4])
    every = frozenset(make.mesh.axis_names)

    def local(w, x):
        def once(x):
            y = x @ w
            if kind == "sum":
                return x + jax.lax.psum(y, axis).mean()
            if kind == "two":
                return x + (jax.lax.psum(x, axis) + jax.lax.psum(jnp.tanh(y), axis)) / size
            if kind == "gather":
                return x + jax.lax.all_gather(y, axis, tiled=True).reshape(size, *x.shape).sum(0)
            if kind == "turn":
                return y + jax.lax.ppermute(x, axis, [(n, (n + 1) % size) for n in range(size)])
            whole = jnp.concatenate([y] * size, 0)
            return x + jax.lax.psum_scatter(whole, axis, tiled=True)

        if times:
            return jax.lax.scan(lambda x, _: (jnp.tanh(once(x)), None), x, None, length=times)[0]
        return once(x)

    into = PartitionSpec(), PartitionSpec(axis)
    mapped = jax.shard_map(local, mesh=make.mesh, in_specs=into, out_specs=PartitionSpec(axis), axis_names=every,
                           check_vma=make.random.random() < 0.5)  # fmt: skip
    return (lambda a, x: mapped(a[weight], x)), shape


STEPS = (
    apply_to_each, apply_to_each, combine, combine, multiply, multiply, place, place, turn, reshape, add_up, look_up,
    join, roll, order, branch, layers, accumulate, on_each_device, on_each_device,
)  # fmt: skip


def program(seed, devices):
    """The traced program of a seed: some steps, and often the gradients of all its float arguments."""
    make = Maker(seed, devices)
    shape = tuple(make.random.choice(SIZES) for _ in range(make.random.choice([2, 2, 3])))
    first, run = make.argument(shape), []
    for _ in range(make.random.randrange(2, 7)):
        step, shape = make.random.choice(STEPS)(make, shape)
        run.append(step)
    twice = make.random.random() < 0.2  # the whole is computed twice, as in both losses of a pair of networks

    def forward(arguments):
        value = functools.reduce(lambda x, step: step(arguments, x), run, arguments[first])
        return (
            jnp.square(value) + functools.reduce(lambda x, step: step(arguments, x), run, arguments[first])
            if twice
            else value
        )

    floats = [number for number, like in enumerate(make.arguments) if like.dtype == jnp.float32]

    def update(arguments):
        def loss(chosen):
            given = [*arguments]
            for number, value in zip(floats, chosen, strict=True):
                given[number] = value
            return (forward(given) ** 2).mean()

        chosen = [arguments[number] for number in floats]
        return [a - 0.1 * g for a, g in zip(chosen, jax.grad(loss)(chosen), strict=True)]

    if make.random.random() < 0.6:
        places = [make.arguments[number].sharding for number in floats]
        return jax.jit(update, out_shardings=places).trace(make.arguments)
    return jax.jit(forward, out_shardings=make.placed(shape)).trace(make.arguments)
