"""A convolutional classifier of images with batch norm, in plain Flax. Only the task below it knows this project."""

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from gspmd_lm import Input, Task
from gspmd_lm.config import Train

ROWS, SIZE, WIDTH, HIDDEN, LABELS = 32, 8, 32, 64, 4


def annotated(init, *axes):
    return nn.with_logical_partitioning(init, axes)


class Block(nn.Module):
    """Each channel is mixed with its neighbourhood, and each pixel's channels among themselves, around a residual."""

    training: bool

    @nn.compact
    def __call__(self, x):
        lecun, zeros, ones = nn.initializers.lecun_normal(), nn.initializers.zeros, nn.initializers.ones
        y = nn.Conv(WIDTH, (3, 3), feature_group_count=WIDTH, use_bias=False, name="near",
                    kernel_init=annotated(lecun, None, None, None, "embed"))(x)  # fmt: skip
        y = nn.BatchNorm(not self.training, momentum=0.9, scale_init=annotated(ones, "embed"),
                         bias_init=annotated(zeros, "embed"), name="norm")(y)  # fmt: skip
        y = nn.Dense(HIDDEN, name="up", kernel_init=annotated(lecun, "embed", "mlp"),
                     bias_init=annotated(zeros, "mlp"))(y)  # fmt: skip
        y = nn.with_logical_constraint(nn.gelu(y), ("batch", None, None, "mlp"))
        y = nn.Dense(WIDTH, use_bias=False, name="down", kernel_init=annotated(lecun, "mlp", "embed"))(y)
        return nn.with_logical_constraint(x + y, ("batch", None, None, "embed"))


class Classifier(nn.Module):
    training: bool = False

    @nn.compact
    def __call__(self, images):
        lecun = nn.initializers.lecun_normal()
        x = nn.Conv(WIDTH, (2, 2), strides=2, use_bias=False, name="stem",
                    kernel_init=annotated(lecun, None, None, "channel", "embed"))(images)  # fmt: skip
        for number in range(2):
            x = Block(self.training, name=f"block_{number}")(x)
        head = annotated(lecun, "embed", "label")
        return nn.Dense(LABELS, use_bias=False, name="head", kernel_init=head)(x.mean((1, 2)))


class Sums(NamedTuple):
    loss: jax.Array
    accuracy: jax.Array


def init(key):
    return Classifier().init(key, jnp.zeros((1, SIZE, SIZE, 3)))  # params and batch_stats


def sums(variables, batch, key):
    model = Classifier(training=True)
    scores, changed = model.apply(variables, batch["images"], mutable=["batch_stats"])
    return compared(scores, batch["labels"]), changed


def evaluate(variables, batch):
    scores = Classifier().apply(variables, batch["images"])
    return compared(scores, batch["labels"])._asdict() | {"count": jnp.float32(len(scores))}


def compared(scores, labels):
    losses = optax.softmax_cross_entropy_with_integer_labels(scores, labels)
    return Sums(losses.sum(), (scores.argmax(-1) == labels).sum(dtype=jnp.float32))


def optimizer(named):
    return optax.adamw(3e-3)


TASK = Task(
    name="classifier",
    inputs={
        "images": Input((ROWS, SIZE, SIZE, 3), "float32", "images: batch height width channel"),
        "labels": Input((ROWS,), "int32", "labels: batch"),
    },
    init=init,
    sums=sums,
    evaluate=evaluate,
    optimizer=optimizer,
    matmul_precision="highest",
    train=Train(steps=40, eval_every=20),
)


def batch(step):
    """Images of noise with one bright quarter, and which quarter it is."""
    rng = np.random.default_rng(step)
    labels = rng.integers(0, LABELS, ROWS, dtype=np.int32)
    images = rng.standard_normal((ROWS, SIZE, SIZE, 3), dtype=np.float32)
    half = np.arange(SIZE) * 2 // SIZE
    images[labels[:, None, None] == 2 * half[:, None] + half] += 1.0
    return {"images": images, "labels": labels}


HELD_OUT = [batch(10**9 + number) for number in range(2)]
