"""An encoder-decoder (arXiv 1706.03762) that reverses a text, in plain Flax; the task below it knows this project."""

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import optax

from gspmd_lm import Generation, Input, Task
from gspmd_lm.config import Train

ROWS, LENGTH, VOCAB, WIDTH, HEADS, HIDDEN = 32, 8, 16, 32, 4, 64
START = 0  # the token before the first one of a target


def annotated(init, *axes):
    return nn.with_logical_partitioning(init, axes)


class Layer(nn.Module):
    """Attention to itself, in the decoder also to what the encoder read, and a network of one hidden layer."""

    length: str  # the axis of its positions

    @nn.compact
    def __call__(self, x, mask=None, read=None):
        lecun = nn.initializers.lecun_normal()

        def norm(name):
            return nn.RMSNorm(scale_init=annotated(nn.initializers.ones, "embed"), name=name)

        def attention(name):
            return nn.MultiHeadDotProductAttention(
                HEADS, use_bias=False, name=name, kernel_init=annotated(lecun, "embed", "heads", "head_dim"),
                out_kernel_init=annotated(lecun, "heads", "head_dim", "embed"),
            )  # fmt: skip

        y = norm("attention_norm")(x)
        x += attention("attention")(y, y, mask=mask)
        if read is not None:
            x += attention("cross_attention")(norm("cross_norm")(x), read)
        up, down = annotated(lecun, "embed", "mlp"), annotated(lecun, "mlp", "embed")
        y = nn.relu(nn.Dense(HIDDEN, use_bias=False, kernel_init=up, name="up")(norm("mlp_norm")(x)))
        y = nn.with_logical_constraint(y, ("batch", self.length, "mlp"))
        x += nn.Dense(WIDTH, use_bias=False, kernel_init=down, name="down")(y)
        return nn.with_logical_constraint(x, ("batch", self.length, "embed"))


class EncoderDecoder(nn.Module):
    @nn.compact
    def __call__(self, source, target):
        normal = nn.initializers.normal(0.3)
        table = nn.Embed(VOCAB, WIDTH, embedding_init=annotated(normal, "vocab", "embed"), name="tokens")
        places = self.param("positions", annotated(normal, "position", "embed"), (LENGTH, WIDTH))
        read = Layer("source_length", name="encoder")(table(source) + places)
        y = Layer("target_length", name="decoder")(table(target) + places, nn.make_causal_mask(target), read)
        return table.attend(y)


def init(key):
    return EncoderDecoder().init(key, *jnp.zeros((2, 1, LENGTH), jnp.int32))["params"]


def losses(params, batch, key):
    before = jnp.pad(batch["target"], ((0, 0), (1, 0)), constant_values=START)[:, :-1]
    logits = EncoderDecoder().apply({"params": params}, batch["source"], before)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["target"]).mean(1)


def following(params, source, target, at):
    """The logits of the token at a place of the target, and the state: what was read and written, and that place."""
    before = jnp.pad(target, ((0, 0), (1, 0)), constant_values=START)[:, :-1]
    return EncoderDecoder().apply({"params": params}, source, before)[:, at], (source, target, at)


def begin(params, batch):
    return following(params, batch["source"], jnp.zeros_like(batch["source"]), 0)


def extend(params, state, tokens):
    source, target, at = state
    return following(params, source, target.at[:, at].set(tokens), at + 1)


def optimizer(named):
    return optax.adamw(3e-3)


TASK = Task(
    name="reverser", init=init, sums=losses, optimizer=optimizer, matmul_precision="highest", tokens=ROWS * LENGTH,
    generation=Generation(begin, extend),
    inputs={side: Input((ROWS, LENGTH), "int32", f"{side}: batch {side}_length") for side in ("source", "target")},
    train=Train(steps=100, eval_every=50),
)  # fmt: skip


def batch(step):
    """Random texts, and each from its end to its beginning."""
    source = np.random.default_rng(step).integers(1, VOCAB, (ROWS, LENGTH), dtype=np.int32)
    return {"source": source, "target": source[:, ::-1]}


HELD_OUT = [batch(10**9 + number) for number in range(2)]
