"""Small models that are no decoder: one that reads and writes a stream, and one that knows nothing of this package."""

import functools
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from gspmd_lm import Input, Task, Vocabulary, parameter, shard, use
from gspmd_lm.sharding.matmuls import gathered, project, unreduced_matmul
from gspmd_lm.sharding.partial_sums import reduced

ROWS, POSITIONS, WIDTH, WIDE, LABELS = 32, 16, 128, 512, 8
STREAM, READ = "stream: batch position width", "block_input: batch position width"

VOCABULARY = Vocabulary(
    axes={
        "batch": ("B", "rows"),
        "position": ("P", "positions"),
        "width": ("W", "model width"),
        "wide": ("M", "hidden units"),
        "label": ("L", "labels"),
    },
    weights=dict.fromkeys(("up", "gate", "down", "head", "kernel"), "matrix"),
    activations=dict.fromkeys(("rows", "labels", "stream", "block_input", "hidden", "scores"), "activation"),
)


class Sums(NamedTuple):
    loss: jax.Array


def init(model, key):
    return model.init(key, jnp.zeros((1, POSITIONS, WIDTH)))["params"]


def sums(model, params, batch, key):
    scores_BL = model.apply({"params": params}, batch["rows"])
    return Sums(optax.softmax_cross_entropy_with_integer_labels(scores_BL, batch["labels"]).sum())


def optimizer(named):
    return optax.adamw(1e-2)


def task(name, model):
    """The task of a model that scores the labels of `rows`."""
    return Task(
        name=name,
        vocabulary=VOCABULARY,
        inputs={
            "rows": Input((ROWS, POSITIONS, WIDTH), "float32", "rows: batch position width"),
            "labels": Input((ROWS,), "int32", "labels: batch"),
        },
        init=functools.partial(init, model),
        sums=functools.partial(sums, model),
        optimizer=optimizer,
        matmul_precision="highest",
    )


class Block(nn.Module):
    """A gated block, which reads the stream and writes to it."""

    @nn.compact
    def __call__(self, x_BPW):
        normal = nn.initializers.normal(0.1)
        up, gate = (parameter(self, name, "width wide", (WIDTH, WIDE), normal) for name in ("up", "gate"))
        down = parameter(self, "down", "wide width", (WIDE, WIDTH), normal)
        with gathered(x_BPW, READ, STREAM) as y_BPW:
            up_BPM, gate_BPM = (project(y_BPW, weight) for weight in (up, gate))
        hidden_BPM = shard(jax.nn.gelu(gate_BPM) * up_BPM, "hidden: batch position wide")
        return x_BPW + reduced(unreduced_matmul(hidden_BPM, down), READ, STREAM)


class Pooled(nn.Module):
    """Two blocks, and a head over the mean of the positions."""

    @nn.compact
    def __call__(self, rows_BPW):
        x_BPW = shard(rows_BPW, STREAM)
        for n in range(2):
            x_BPW = Block(name=f"block_{n}")(x_BPW)
        head_WL = use(parameter(self, "head", "width label", (WIDTH, LABELS), nn.initializers.normal(0.1)))
        return shard(jnp.einsum("BW,WL->BL", x_BPW.mean(1), head_WL), "scores: batch label")


class Plain(nn.Module):
    """Layers of flax with logical axes and constraints, and no word of this package."""

    hidden_units: int = 0  # 0: WIDE, as it is when this is called

    @nn.compact
    def __call__(self, rows_BPW):
        def dense(units, axes, name):
            kernel = nn.with_logical_partitioning(nn.initializers.lecun_normal(), axes)
            return nn.Dense(units, use_bias=False, name=name, kernel_init=kernel)

        hidden_BPM = nn.gelu(dense(self.hidden_units or WIDE, ("width", "wide"), "up")(rows_BPW))
        hidden_BPM = nn.with_logical_constraint(hidden_BPM, ("batch", "position", "wide"))  # pyright: ignore
        return dense(LABELS, ("wide", "label"), "head")(hidden_BPM.mean(1))


POOLED, PLAIN = task("pooled", Pooled()), task("plain", Plain())
