"""An MLP-mixer (arXiv 2105.01601) that finds the brightest quarter of an image: a model that is not a decoder.

It reads as if there were one device. Its axes and arrays have names of their own, which the rules files use.
"""

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from gspmd_lm import Input, Task, Vocabulary, parameter, shard, use

ROWS, PATCHES, PIXELS, WIDTH, LABELS = 32, 16, 16, 32, 4
MIXED = {"patch": 64, "width": 128}  # hidden units of the two mixing networks of a block

VOCABULARY = Vocabulary(
    axes={
        "batch": ("B", "images"),
        "patch": ("P", "patches of an image"),
        "pixel": ("X", "pixels of a patch"),
        "width": ("W", "model width"),
        "mixed": ("M", "hidden units"),
        "label": ("L", "labels"),
    },
    weights={
        "stem": "projection of a patch's pixels",
        "scale": "scale of a norm",
        "up": "first matrix of a mixing network",
        "down": "its second matrix",
        "head": "projection to the labels",
    },
    activations={
        "images": "the batch of images",
        "labels": "the batch of labels",
        "stream": "what blocks read and add to",
        "mixed_patches": "hidden units of the network that mixes patches",
        "mixed_width": "hidden units of the network that mixes the width",
        "scores": "one score for each label",
    },
)


class Mix(nn.Module):
    """A two-layer network along the patches or along the width."""

    along: str

    @nn.compact
    def __call__(self, x_BPW: jax.Array) -> jax.Array:
        size, mixed, normal = {"patch": PATCHES, "width": WIDTH}[self.along], MIXED[self.along], nn.initializers.normal
        scale_W = use(parameter(self, "scale", "width", (WIDTH,), nn.initializers.ones))
        up = use(parameter(self, "up", f"{self.along} mixed", (size, mixed), normal(size**-0.5)))
        down = use(parameter(self, "down", f"mixed {self.along}", (mixed, size), normal(mixed**-0.5)))
        y_BPW = scale_W * x_BPW * jax.lax.rsqrt(jnp.square(x_BPW).mean(-1, keepdims=True) + 1e-6)
        if self.along == "patch":
            hidden_BMW = shard(jax.nn.gelu(jnp.einsum("BPW,PM->BMW", y_BPW, up)), "mixed_patches: batch mixed width")
            y_BPW = jnp.einsum("BMW,MP->BPW", hidden_BMW, down)
        else:
            hidden_BPM = shard(jax.nn.gelu(jnp.einsum("BPW,WM->BPM", y_BPW, up)), "mixed_width: batch patch mixed")
            y_BPW = jnp.einsum("BPM,MW->BPW", hidden_BPM, down)
        return shard(x_BPW + y_BPW, "stream: batch patch width")


class Mixer(nn.Module):
    blocks: int = 2

    @nn.compact
    def __call__(self, images_BPX: jax.Array) -> jax.Array:
        normal = nn.initializers.normal
        stem_XW = use(parameter(self, "stem", "pixel width", (PIXELS, WIDTH), normal(PIXELS**-0.5)))
        x_BPW = shard(jnp.einsum("BPX,XW->BPW", images_BPX, stem_XW), "stream: batch patch width")
        for block in range(self.blocks):
            x_BPW = Mix("patch", name=f"patches_{block}")(x_BPW)
            x_BPW = Mix("width", name=f"width_{block}")(x_BPW)
        head_WL = use(parameter(self, "head", "width label", (WIDTH, LABELS), normal(WIDTH**-0.5)))
        return shard(jnp.einsum("BW,WL->BL", x_BPW.mean(1), head_WL), "scores: batch label")


class Sums(NamedTuple):
    loss: jax.Array
    correct: jax.Array


def init(key: jax.Array):
    return Mixer().init(key, jnp.zeros((1, PATCHES, PIXELS)))["params"]


def sums(params, batch, key) -> Sums:
    scores_BL = Mixer().apply({"params": params}, batch["images"])
    losses_B = optax.softmax_cross_entropy_with_integer_labels(scores_BL, batch["labels"])
    return Sums(losses_B.sum(), (scores_BL.argmax(-1) == batch["labels"]).sum(dtype=jnp.float32))


def optimizer(named) -> optax.GradientTransformation:
    return optax.adamw(1e-2)


def batch(step: int) -> dict[str, np.ndarray]:
    """Images of noise with one bright quarter, and which quarter it is."""
    rng = np.random.default_rng(step)
    labels = rng.integers(0, LABELS, ROWS, dtype=np.int32)
    images = rng.standard_normal((ROWS, PATCHES, PIXELS), dtype=np.float32)
    quarter = np.arange(PATCHES) * LABELS // PATCHES
    images[labels[:, None] == quarter] += 1.0
    return {"images": images, "labels": labels}


TASK = Task(
    name="mixer",
    vocabulary=VOCABULARY,
    inputs={
        "images": Input((ROWS, PATCHES, PIXELS), "float32", "images: batch patch pixel"),
        "labels": Input((ROWS,), "int32", "labels: batch"),
    },
    init=init,
    sums=sums,
    optimizer=optimizer,
    matmul_precision="highest",
)
