"""python main.py explain --program=examples/any_step.py:step --target=h100:8: the cost of a step of flax and optax.

Nothing here knows of this project. `step` is the head of a usual script, with `devices` where it has jax.devices().
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

ROWS, PIXELS, WIDTH, LABELS = 1024, 784, 1024, 16


class Classifier(nn.Module):
    """Two hidden layers, each computed again in the backward pass."""

    @nn.compact
    def __call__(self, images):
        for _ in range(2):
            images = nn.relu(nn.remat(nn.Dense)(WIDTH, dtype=jnp.bfloat16)(images))
        return nn.Dense(LABELS)(images)


def update(state, batch):
    """The state after one step, and the loss."""

    def loss(params):
        scores = state.apply_fn({"params": params}, batch["images"])
        return optax.softmax_cross_entropy_with_integer_labels(scores, batch["labels"]).mean()

    value, gradients = jax.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=gradients), value


def new_state():
    """The state at step 0."""
    model = Classifier()
    params = model.init(jax.random.key(0), jnp.zeros((1, PIXELS)))["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(1e-3))


def step(devices):
    """The step on any number of devices: rows of the batch, and of every matrix, are split over all of them."""
    mesh = Mesh(np.array(devices), ("fsdp",))

    def place(like):
        spec = P("fsdp") if like.ndim and like.shape[0] % mesh.size == 0 else P()
        return jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=NamedSharding(mesh, spec))

    batch = {
        "images": jax.ShapeDtypeStruct((ROWS, PIXELS), jnp.float32),
        "labels": jax.ShapeDtypeStruct((ROWS,), jnp.int32),
    }
    state, batch = jax.tree.map(place, (jax.eval_shape(new_state), batch))
    return jax.jit(update, donate_argnums=0).trace(state, batch)
