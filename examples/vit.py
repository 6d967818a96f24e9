"""The Vision Transformer (arXiv 2010.11929) in plain Flax. Only the task below the model knows of this project."""

import flax.linen as nn
import jax.numpy as jnp
import optax
from classifier import HELD_OUT as HELD_OUT
from classifier import LABELS, ROWS, SIZE, annotated
from classifier import batch as batch

from gspmd_lm import Input, Task
from gspmd_lm.config import Train

PATCH, WIDTH, HEADS, HIDDEN, LAYERS = 2, 32, 4, 64, 2
LECUN, ZEROS, ONES = nn.initializers.lecun_normal(), nn.initializers.zeros, nn.initializers.ones


def norm(name):
    return nn.LayerNorm(scale_init=annotated(ONES, "embed"), bias_init=annotated(ZEROS, "embed"), name=name)


class Block(nn.Module):
    """Equations 2 and 3 of the paper: attention and a network of one hidden layer, each after a norm."""

    @nn.compact
    def __call__(self, x):
        attention = nn.MultiHeadDotProductAttention(
            HEADS, name="attention",
            kernel_init=annotated(LECUN, "embed", "heads", "head_dim"), bias_init=annotated(ZEROS, "heads", "head_dim"),
            out_kernel_init=annotated(LECUN, "heads", "head_dim", "embed"), out_bias_init=annotated(ZEROS, "embed"),
        )  # fmt: skip
        x += attention(norm("attention_norm")(x))
        x = nn.with_logical_constraint(x, ("batch", "patch", "embed"))
        y = norm("mlp_norm")(x)
        y = nn.Dense(HIDDEN, kernel_init=annotated(LECUN, "embed", "mlp"), bias_init=annotated(ZEROS, "mlp"))(y)
        y = nn.with_logical_constraint(nn.gelu(y), ("batch", "patch", "mlp"))
        y = nn.Dense(WIDTH, kernel_init=annotated(LECUN, "mlp", "embed"), bias_init=annotated(ZEROS, "embed"))(y)
        return nn.with_logical_constraint(x + y, ("batch", "patch", "embed"))


class ViT(nn.Module):
    @nn.compact
    def __call__(self, images):
        patches = nn.Conv(WIDTH, (PATCH, PATCH), strides=PATCH, name="patches", bias_init=annotated(ZEROS, "embed"),
                          kernel_init=annotated(LECUN, None, None, "channel", "embed"))(images)  # fmt: skip
        x = patches.reshape(images.shape[0], -1, WIDTH)
        first = self.param("class_token", annotated(ZEROS, None, None, "embed"), (1, 1, WIDTH))
        x = jnp.concatenate([jnp.broadcast_to(first, (x.shape[0], 1, WIDTH)), x], 1)
        places = annotated(nn.initializers.normal(0.02), None, "patch", "embed")
        x += self.param("positions", places, (1, x.shape[1], WIDTH))
        x = nn.with_logical_constraint(x, ("batch", "patch", "embed"))
        for number in range(LAYERS):
            x = Block(name=f"block_{number}")(x)
        head = annotated(ZEROS, "embed", "label")
        return nn.Dense(LABELS, kernel_init=head, bias_init=annotated(ZEROS, "label"), name="head")(
            norm("norm")(x)[:, 0]
        )


def init(key):
    return ViT().init(key, jnp.zeros((1, SIZE, SIZE, 3)))["params"]


def losses(params, batch, key):
    scores = ViT().apply({"params": params}, batch["images"])
    return optax.softmax_cross_entropy_with_integer_labels(scores, batch["labels"])


TASK = Task(
    name="vit",
    inputs={
        "images": Input((ROWS, SIZE, SIZE, 3), "float32", "images: batch height width channel"),
        "labels": Input((ROWS,), "int32", "labels: batch"),
    },
    init=init,
    sums=losses,
    optimizer=optax.adamw(1e-2),
    matmul_precision="highest",
    train=Train(steps=120, eval_every=60),
)
