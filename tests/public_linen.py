"""Models of linen as people publish them, written anew and small; below each, the glue that trains it here.

Each has a style of its own: few names, none, those of a mesh, flat kernels, state, einsums of its own.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from gspmd_lm import Input, Task

ROWS, LENGTH, WIDTH, HEADS, HIDDEN, VOCAB, LABELS, SIZE = 16, 16, 64, 8, 256, 128, 16, 16
LECUN, NORMAL, ONES, ZEROS = (
    nn.initializers.lecun_normal(), nn.initializers.normal(0.02), nn.initializers.ones, nn.initializers.zeros
)  # fmt: skip
logical = nn.with_logical_partitioning
cross_entropy = optax.softmax_cross_entropy_with_integer_labels


class LmBlock(nn.Module):
    """Attention of flax, whose kernels are initialised flat, with two names for three dimensions."""

    @nn.compact
    def __call__(self, x, mask):
        flat = logical(nn.initializers.xavier_uniform(), ("embed", "kv"))
        y = nn.LayerNorm(bias_init=logical(ZEROS, ("embed",)), scale_init=logical(ONES, ("embed",)))(x)
        x += nn.MultiHeadDotProductAttention(HEADS, kernel_init=flat, use_bias=False)(y, y, mask=mask)
        y = nn.LayerNorm(bias_init=logical(ZEROS, ("embed",)), scale_init=logical(ONES, ("embed",)))(x)
        y = nn.relu(nn.Dense(HIDDEN, kernel_init=logical(LECUN, ("embed", "mlp")))(y))
        return x + nn.Dense(WIDTH, kernel_init=logical(LECUN, ("mlp", "embed")))(y)


class Lm1b(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        table = nn.Embed(VOCAB, WIDTH, embedding_init=logical(NORMAL, ("vocab", "embed")))
        angles = jnp.arange(LENGTH)[:, None] / 10_000 ** (jnp.arange(0, WIDTH, 2) / WIDTH)
        x = table(tokens) + jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)
        for _ in range(2):
            x = LmBlock()(x, nn.make_causal_mask(tokens))
        return nn.Dense(VOCAB, kernel_init=logical(LECUN, ("embed", "vocab")))(nn.LayerNorm()(x))


def lm1b_init(key):
    return Lm1b().init(key, jnp.zeros((1, LENGTH), jnp.int32))


def lm1b_losses(variables, batch, key):
    return cross_entropy(Lm1b().apply(variables, batch["tokens"]), batch["targets"]).mean(1)


LM1B = Task(
    name="lm1b", init=lm1b_init, sums=lm1b_losses, optimizer=optax.adamw(1e-3), matmul_precision="highest",
    inputs={name: Input((ROWS, LENGTH), "int32", "tokens: batch length") for name in ("tokens", "targets")},
)  # fmt: skip


class VitBlock(nn.Module):
    """Names of a mesh, and norms without any."""

    @nn.compact
    def __call__(self, x):
        column, row = (nn.with_partitioning(LECUN, names) for names in ((None, "model"), ("model", None)))
        y = nn.LayerNorm()(x)
        x += nn.MultiHeadDotProductAttention(HEADS, kernel_init=column, out_kernel_init=row)(y)
        y = nn.gelu(nn.Dense(HIDDEN, kernel_init=column)(nn.LayerNorm()(x)))
        return x + nn.Dense(WIDTH, kernel_init=row)(y)


class Vit(nn.Module):
    @nn.compact
    def __call__(self, images):
        x = nn.Conv(WIDTH, (4, 4), strides=(4, 4), padding="VALID")(images).reshape(len(images), -1, WIDTH)
        x += self.param("positions", NORMAL, (1, x.shape[1], WIDTH))
        for number in range(2):
            x = VitBlock(name=f"encoder_{number}")(x)
        return nn.Dense(LABELS, kernel_init=nn.with_partitioning(LECUN, ("model", None)))(nn.LayerNorm()(x).mean(1))


def vit_init(key):
    return Vit().init(key, jnp.zeros((1, SIZE, SIZE, 3)))


def vit_losses(variables, batch, key):
    return cross_entropy(Vit().apply(variables, batch["images"]), batch["labels"])


IMAGES = {
    "images": Input((ROWS, SIZE, SIZE, 3), "float32", "images: batch height width channel"),
    "labels": Input((ROWS,), "int32", "labels: batch"),
}
VIT = Task(
    name="vit", init=vit_init, sums=vit_losses, optimizer=optax.adamw(1e-3), inputs=IMAGES, matmul_precision="highest"
)


class Mixer(nn.Module):
    """A network of which nothing has a name."""

    @nn.compact
    def __call__(self, images):
        x = nn.Conv(WIDTH, (4, 4), strides=(4, 4))(images).reshape(len(images), -1, WIDTH)
        for _ in range(2):
            y = jnp.swapaxes(nn.LayerNorm()(x), 1, 2)
            x += jnp.swapaxes(nn.Dense(x.shape[1])(nn.gelu(nn.Dense(HIDDEN)(y))), 1, 2)
            x += nn.Dense(WIDTH)(nn.gelu(nn.Dense(HIDDEN)(nn.LayerNorm()(x))))
        return nn.Dense(LABELS)(nn.LayerNorm()(x).mean(1))


def mixer_init(key):
    return Mixer().init(key, jnp.zeros((1, SIZE, SIZE, 3)))


def mixer_losses(variables, batch, key):
    return cross_entropy(Mixer().apply(variables, batch["images"]), batch["labels"])


MIXER = Task(
    name="mixer", init=mixer_init, sums=mixer_losses, optimizer=optax.adamw(1e-3), inputs=IMAGES,
    matmul_precision="highest",
)  # fmt: skip


class T5Attention(nn.Module):
    """Attention with flat kernels, which are cut into heads after the product."""

    @nn.compact
    def __call__(self, x, memory, mask=None):
        def project(x, name, axes):
            return x @ self.param(name, logical(LECUN, axes), (x.shape[-1], WIDTH))

        q, k, v = (
            project(y, name, ("embed", "joined_kv")).reshape(*y.shape[:2], HEADS, -1)
            for name, y in (("query", x), ("key", memory), ("value", memory))
        )
        y = nn.dot_product_attention(q, k, v, mask=mask).reshape(*x.shape[:2], -1)
        return project(y, "out", ("joined_kv", "embed"))


class T5Block(nn.Module):
    @nn.compact
    def __call__(self, x, memory=None):
        def norm(x):
            return nn.RMSNorm(scale_init=logical(ONES, ("embed",)))(x)

        def dense(size, axes):
            return nn.Dense(size, use_bias=False, kernel_init=logical(LECUN, axes))

        y = norm(x)
        x += T5Attention(name="attention")(y, y, None if memory is None else nn.make_causal_mask(x[..., 0]))
        if memory is not None:
            x += T5Attention(name="cross")(norm(x), memory)
        y = norm(x)
        y = nn.gelu(dense(HIDDEN, ("embed", "mlp"))(y)) * dense(HIDDEN, ("embed", "mlp"))(y)
        return x + dense(WIDTH, ("mlp", "embed"))(nn.with_logical_constraint(y, ("batch", "length", "mlp")))


class T5(nn.Module):
    @nn.compact
    def __call__(self, source, target):
        table = nn.Embed(VOCAB, WIDTH, embedding_init=logical(NORMAL, ("vocab", "embed")))
        memory = T5Block(name="encoder")(table(source))
        return table.attend(T5Block(name="decoder")(table(jnp.pad(target, ((0, 0), (1, 0)))[:, :-1]), memory))


def t5_init(key):
    return T5().init(key, *jnp.zeros((2, 1, LENGTH), jnp.int32))


def t5_losses(variables, batch, key):
    return cross_entropy(T5().apply(variables, batch["source"], batch["target"]), batch["target"]).mean(1)


T5_TASK = Task(
    name="t5", init=t5_init, sums=t5_losses, optimizer=optax.adamw(1e-3), matmul_precision="highest",
    inputs={name: Input((ROWS, LENGTH), "int32", "tokens: batch length") for name in ("source", "target")},
)  # fmt: skip


class Resnet(nn.Module):
    """Convolutions with some names, and batch norms with none, which keep averages."""

    @nn.compact
    def __call__(self, x, train):
        def conv(size, stride=1):
            return nn.Conv(size, (3, 3), stride, use_bias=False, kernel_init=logical(LECUN, (None, None, "in", "out")))

        def norm():
            return nn.BatchNorm(use_running_average=not train, momentum=0.9)

        x = nn.relu(norm()(conv(32)(x)))
        for size, stride in ((32, 1), (64, 2)):
            y = conv(size)(nn.relu(norm()(conv(size, stride)(x))))
            x = nn.relu((x if x.shape == y.shape else conv(size, stride)(x)) + norm()(y))
        return nn.Dense(LABELS, kernel_init=logical(LECUN, ("out", "label")))(x.mean((1, 2)))


def resnet_init(key):
    return Resnet().init(key, jnp.zeros((1, SIZE, SIZE, 3)), True)


def resnet_losses(variables, batch, key):
    scores, changed = Resnet().apply(variables, batch["images"], True, mutable=["batch_stats"])
    return cross_entropy(scores, batch["labels"]), changed


RESNET = Task(
    name="resnet", init=resnet_init, sums=resnet_losses, optimizer=optax.adamw(1e-3), inputs=IMAGES,
    matmul_precision="highest",
)  # fmt: skip


class QwenLayer(nn.Module):
    """Einsums of its own, in a scan with recomputation; norms without names."""

    @nn.compact
    def __call__(self, x, _):
        def weight(name, shape, *axes):
            return self.param(name, logical(nn.initializers.lecun_normal(range(len(shape) - 1), -1), axes), shape)

        y, size = nn.RMSNorm(name="input_norm")(x), WIDTH // HEADS
        q, k, v = (
            jnp.einsum("btd,dnh->btnh", y, weight(name, (WIDTH, heads, size), "embed", axis, "head_dim"))
            for name, heads, axis in (("q", HEADS, "heads"), ("k", 4, "kv_heads"), ("v", 4, "kv_heads"))
        )
        y = jax.nn.dot_product_attention(nn.RMSNorm(name="q_norm")(q), nn.RMSNorm(name="k_norm")(k), v, is_causal=True)
        x += jnp.einsum("btnh,nhd->btd", y, weight("o", (HEADS, size, WIDTH), "heads", "head_dim", "embed"))
        y = nn.RMSNorm(name="mlp_norm")(x)
        gate, up = (y @ weight(name, (WIDTH, HIDDEN), "embed", "mlp") for name in ("gate", "up"))
        return x + (nn.silu(gate) * up) @ weight("down", (HIDDEN, WIDTH), "mlp", "embed"), None


class Qwen(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        table = self.param("embedding", logical(NORMAL, ("vocab", "embed")), (VOCAB, WIDTH))
        layer = nn.scan(
            nn.remat(QwenLayer), variable_axes={"params": 0}, split_rngs={"params": True}, length=2,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )  # fmt: skip
        x, _ = layer(name="layers")(table[tokens], None)
        return nn.RMSNorm(name="norm")(x) @ self.param("head", logical(LECUN, ("embed", "vocab")), (WIDTH, VOCAB))


def qwen_init(key):
    return Qwen().init(key, jnp.zeros((1, LENGTH), jnp.int32))


def qwen_losses(variables, batch, key):
    return cross_entropy(Qwen().apply(variables, batch["tokens"]), batch["targets"]).mean(1)


QWEN = Task(
    name="qwen", init=qwen_init, sums=qwen_losses, optimizer=optax.adamw(1e-3), inputs=LM1B.inputs,
    matmul_precision="highest",
)  # fmt: skip
