"""Models of NNX as people publish them, written anew and small; below each, the glue that trains it here."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P

from gspmd_lm import Input, Task
from tests.public_linen import (
    HEADS,
    HIDDEN,
    IMAGES,
    LABELS,
    LENGTH,
    LM1B,
    ROWS,
    VOCAB,
    WIDTH,
    cross_entropy,
)  # fmt: skip

NORMAL, LECUN = nnx.initializers.normal(0.02), nnx.initializers.lecun_normal()


class Einsum(nnx.Module):
    """A product of one's own, whose result has a PartitionSpec."""

    def __init__(self, equation, shape, axes, rngs, result=None):
        self.equation, self.result = equation, result
        self.w = nnx.Param(nnx.initializers.normal(0.1)(rngs.params(), shape), out_sharding=axes)

    def __call__(self, x):
        return jnp.einsum(self.equation, x, self.w[...], out_sharding=self.result)


class GemmaNorm(nnx.Module):
    def __init__(self, rngs):
        self.scale = nnx.Param(jnp.zeros(WIDTH))

    def __call__(self, x):
        return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6) * (1 + self.scale)


class GemmaLayer(nnx.Module):
    def __init__(self, rngs):
        size = WIDTH // HEADS
        self.norms = nnx.List(GemmaNorm(rngs) for _ in range(2))
        self.qkv = Einsum("btd,sndh->sbtnh", (3, HEADS, WIDTH, size), (None, "tp", "fsdp", None), rngs)
        self.out = Einsum("btnh,nhd->btd", (HEADS, size, WIDTH), ("tp", None, "fsdp"), rngs, P("fsdp", None, None))
        self.gating = Einsum("btd,sdf->sbtf", (2, WIDTH, HIDDEN), (None, "fsdp", "tp"), rngs)
        self.down = Einsum("btf,fd->btd", (HIDDEN, WIDTH), ("tp", "fsdp"), rngs)

    def __call__(self, x):
        x += self.out(jax.nn.dot_product_attention(*self.qkv(self.norms[0](x)), is_causal=True))
        gate, up = self.gating(self.norms[1](x))
        hidden = jax.lax.with_sharding_constraint(nnx.gelu(gate) * up, P("fsdp", None, "tp"))
        return x + self.down(hidden)


class Gemma(nnx.Module):
    def __init__(self, rngs):
        self.table = nnx.Param(NORMAL(rngs.params(), (VOCAB, WIDTH)), out_sharding=("tp", "fsdp"))
        self.layers = nnx.List(GemmaLayer(rngs) for _ in range(2))
        self.norm = GemmaNorm(rngs)

    def __call__(self, tokens):
        x = self.table[tokens] * WIDTH**0.5
        for layer in self.layers:
            x = layer(x)
        return jnp.dot(self.norm(x), self.table.T)


def losses(model, batch, key):
    return cross_entropy(model(batch["tokens"]), batch["targets"]).mean(1)


GEMMA = Task(
    name="gemma", init=lambda key: Gemma(nnx.Rngs(key)), sums=losses, optimizer=optax.adamw(1e-3),
    inputs={name: Input((ROWS, LENGTH), "int32", "tokens: fsdp length") for name in ("tokens", "targets")},
    matmul_precision="highest",
)  # fmt: skip


class LlamaAttention(nnx.Module):
    def __init__(self, rngs):
        def dense(axes):
            return nnx.Linear(WIDTH, WIDTH, use_bias=False, kernel_init=nnx.with_partitioning(LECUN, axes), rngs=rngs)

        self.q, self.k, self.v = (dense(("embed", "heads")) for _ in range(3))
        self.o = dense(("heads", "embed"))

    def __call__(self, x):
        q, k, v = (layer(x).reshape(*x.shape[:2], HEADS, -1) for layer in (self.q, self.k, self.v))
        angles = jnp.arange(x.shape[1])[:, None] * 10_000.0 ** -jnp.linspace(0, 1, q.shape[-1] // 2)
        sin, cos = jnp.sin(angles)[:, None], jnp.cos(angles)[:, None]

        def rotate(x):
            left, right = jnp.split(x, 2, -1)
            return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], -1)

        return self.o(jax.nn.dot_product_attention(rotate(q), rotate(k), v, is_causal=True).reshape(x.shape))


class LlamaMlp(nnx.Module):
    def __init__(self, rngs):
        shapes = {"gate": (WIDTH, HIDDEN), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
        for name, shape in shapes.items():
            axes = ("mlp", "embed") if name == "down" else ("embed", "mlp")
            setattr(self, name, nnx.Param(LECUN(rngs.params(), shape), out_sharding=axes))

    def __call__(self, x):
        return (nnx.silu(x @ self.gate.get_value()) * (x @ self.up.get_value())) @ self.down


class Llama(nnx.Module):
    """An embedder that indexes its table; norms of flax without names."""

    def __init__(self, rngs):
        self.table = nnx.Param(NORMAL(rngs.params(), (VOCAB, WIDTH)), out_sharding=("vocab", "embed"))
        self.attentions = nnx.List(LlamaAttention(rngs) for _ in range(2))
        self.mlps = nnx.List(LlamaMlp(rngs) for _ in range(2))
        self.norms = nnx.List(nnx.RMSNorm(WIDTH, rngs=rngs) for _ in range(5))

    def __call__(self, tokens):
        x = self.table[tokens,]
        for number, (attention, mlp) in enumerate(zip(self.attentions, self.mlps, strict=True)):
            x += attention(self.norms[2 * number](x))
            x += mlp(self.norms[2 * number + 1](x))
        return jnp.dot(self.norms[4](x), self.table.T)


LLAMA = Task(
    name="llama", init=lambda key: Llama(nnx.Rngs(key)), sums=losses, optimizer=optax.adamw(1e-3), inputs=LM1B.inputs,
    matmul_precision="highest",
)  # fmt: skip


class Mamba(nnx.Module):
    """Gated state spaces: a short convolution, and a scan over positions."""

    def __init__(self, rngs):
        init = nnx.with_partitioning
        self.table = nnx.Embed(VOCAB, WIDTH, embedding_init=init(NORMAL, ("vocab", "embed")), rngs=rngs)
        self.into = nnx.Linear(
            WIDTH, 2 * HIDDEN, use_bias=False, kernel_init=init(LECUN, ("embed", "inner")), rngs=rngs
        )
        self.conv = nnx.Param(NORMAL(rngs.params(), (4, HIDDEN)))
        self.rates = nnx.Linear(HIDDEN, HEADS, kernel_init=init(LECUN, ("inner", "heads")), rngs=rngs)
        self.decay = nnx.Param(jnp.log(jnp.arange(1.0, HEADS + 1)))
        self.out = nnx.Linear(HIDDEN, WIDTH, use_bias=False, kernel_init=init(LECUN, ("inner", "embed")), rngs=rngs)
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)

    def __call__(self, tokens):
        x = self.table(tokens)
        y, gate = jnp.split(self.into(self.norm(x)), 2, -1)
        padded = jnp.pad(y, ((0, 0), (3, 0), (0, 0)))
        y = nnx.silu(sum(padded[:, at : at + y.shape[1]] * self.conv[at] for at in range(4)))
        kept = jnp.exp(-nnx.softplus(self.rates(y)) * jnp.exp(self.decay))[..., None]

        def combine(left, right):
            return left[0] * right[0], right[0] * left[1] + right[1]

        split = y.reshape(*y.shape[:2], HEADS, -1)
        _, states = jax.lax.associative_scan(combine, (jnp.broadcast_to(kept, split.shape), (1 - kept) * split), axis=1)
        return self.table.attend(x + self.out(states.reshape(y.shape) * nnx.silu(gate)))


MAMBA = Task(
    name="mamba", init=lambda key: Mamba(nnx.Rngs(key)), sums=losses, optimizer=optax.adamw(1e-3), inputs=LM1B.inputs,
    matmul_precision="highest",
)  # fmt: skip


class DeitBlock(nnx.Module):
    def __init__(self, rngs):
        init = nnx.with_partitioning
        self.norms = nnx.List(nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(2))
        self.attention = nnx.MultiHeadAttention(
            HEADS, WIDTH, kernel_init=init(LECUN, ("embed", "heads")), out_kernel_init=init(LECUN, ("heads",)),
            dropout_rate=0.1, deterministic=False, decode=False, rngs=rngs,
        )  # fmt: skip
        self.up = nnx.Linear(WIDTH, HIDDEN, kernel_init=init(LECUN, ("embed", "mlp")), rngs=rngs)
        self.down = nnx.Linear(HIDDEN, WIDTH, kernel_init=init(LECUN, ("mlp", "embed")), rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        x += self.attention(self.norms[0](x))
        return x + self.dropout(self.down(nnx.gelu(self.up(self.norms[1](x)))))


class Deit(nnx.Module):
    """Layers of flax with dropout."""

    def __init__(self, rngs):
        self.patches = nnx.Conv(3, WIDTH, (4, 4), strides=(4, 4), rngs=rngs)
        self.positions = nnx.Param(NORMAL(rngs.params(), (1, 16, WIDTH)))
        self.blocks = nnx.List(DeitBlock(rngs) for _ in range(2))
        self.head = nnx.Linear(WIDTH, LABELS, rngs=rngs)

    def __call__(self, images):
        x = self.patches(images).reshape(len(images), -1, WIDTH) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def deit_losses(model, batch, key):
    return cross_entropy(model(batch["images"]), batch["labels"])


DEIT = Task(
    name="deit", init=lambda key: Deit(nnx.Rngs(key)), sums=deit_losses, optimizer=optax.adamw(1e-3), inputs=IMAGES,
    matmul_precision="highest",
)  # fmt: skip


class Unet(nnx.Module):
    """A network that takes noise from images: convolutions down and up, batch norms, and a time."""

    def __init__(self, rngs):
        def conv(into, out, kind=nnx.Conv, **how):
            init = nnx.with_partitioning(LECUN, (None, None, "in", "out"))
            return kind(into, out, (3, 3), kernel_init=init, rngs=rngs, **how)

        self.first, self.down = conv(3, 32), conv(32, 64, strides=(2, 2))
        self.last = nnx.Conv(64, 3, (3, 3), rngs=rngs)
        self.up = conv(64, 32, nnx.ConvTranspose, strides=(2, 2))
        self.norm = nnx.BatchNorm(64, rngs=rngs)
        self.time = nnx.Linear(1, 64, kernel_init=nnx.with_partitioning(LECUN, (None, "out")), rngs=rngs)

    def __call__(self, images, time):
        x = nnx.silu(self.first(images))
        y = nnx.silu(self.norm(self.down(x)) + self.time(time[:, None])[:, None, None])
        return self.last(jnp.concatenate([x, self.up(y)], -1))


def unet_losses(model, batch, key):
    time = batch["time"][:, None, None, None]
    noisy = (1 - time) * batch["images"] + time * batch["noise"]
    return jnp.square(model(noisy, batch["time"]) - batch["noise"]).mean((1, 2, 3))


UNET = Task(
    name="unet", init=lambda key: Unet(nnx.Rngs(key)), sums=unet_losses, optimizer=optax.adamw(1e-3),
    inputs={"images": IMAGES["images"], "noise": IMAGES["images"], "time": Input((ROWS,), "float32", "times: batch")},
    matmul_precision="highest",
)  # fmt: skip


class Experts(nnx.Module):
    """A mixture of experts, each of which computes every token."""

    def __init__(self, rngs):
        self.router = nnx.Linear(WIDTH, 8, use_bias=False, rngs=rngs)
        self.up = nnx.Param(LECUN(rngs.params(), (8, WIDTH, 64)), out_sharding=("expert", "embed", "mlp"))
        self.down = nnx.Param(LECUN(rngs.params(), (8, 64, WIDTH)), out_sharding=("expert", "mlp", "embed"))

    def __call__(self, x):
        scores, chosen = jax.lax.top_k(nnx.softmax(self.router(x)), 2)
        share = (jax.nn.one_hot(chosen, 8) * scores[..., None]).sum(-2)
        hidden = nnx.relu(jnp.einsum("btd,edf->betf", x, self.up.get_value()))
        return jnp.einsum("betf,efd,bte->btd", hidden, self.down.get_value(), share)


class Mixtral(nnx.Module):
    def __init__(self, rngs):
        self.table = nnx.Param(NORMAL(rngs.params(), (VOCAB, WIDTH)), out_sharding=("vocab", "embed"))
        self.attention, self.experts = LlamaAttention(rngs), Experts(rngs)

    def __call__(self, tokens):
        x = jnp.take(self.table[...], tokens, axis=0)
        x += self.attention(x)
        return (x + self.experts(x)) @ self.table.T


MIXTRAL = Task(
    name="mixtral", init=lambda key: Mixtral(nnx.Rngs(key)), sums=losses, optimizer=optax.adamw(1e-3),
    inputs=LM1B.inputs, matmul_precision="highest",
)  # fmt: skip
