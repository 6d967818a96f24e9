"""Small models written with flax alone, and a train step of them as anybody would write it, with jax.jit and optax."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

VOCAB, WIDTH, HEADS, HEAD, HIDDEN, ROWS, TOKENS, SOURCE = 64, 32, 8, 4, 64, 16, 16, 24
STREAM, MATRIX = ("batch", "position", "stream"), nn.initializers.normal(0.1)

# A mesh, and the mesh axis of each logical axis.
LAYOUTS = {
    "dp": ({"data": 8}, {"batch": "data"}),
    "fsdp": ({"fsdp": 8}, {"batch": "fsdp", "embed": "fsdp"}),
    "tp": ({"tensor": 8}, {"heads": "tensor", "mlp": "tensor", "vocab": "tensor"}),
    "fsdp2tp4": (
        {"fsdp": 2, "tensor": 4},
        {"batch": "fsdp", "embed": "fsdp", "heads": "tensor", "mlp": "tensor", "vocab": "tensor"},
    ),
}


def weight(module: nn.Module, name: str, axes: str, shape: tuple[int, ...], init: Any = MATRIX) -> jax.Array:
    return module.param(name, nn.with_logical_partitioning(init, tuple(axes.split())), shape)


class Norm(nn.Module):
    @nn.compact
    def __call__(self, x):
        scale = weight(self, "scale", "embed", (WIDTH,), nn.initializers.ones)
        return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6) * scale


class Attention(nn.Module):
    causal: bool = True

    @nn.compact
    def __call__(self, x, memory):
        heads = ("batch", "position", "heads", "head")
        q, k, v = (
            nn.with_logical_constraint(
                jnp.einsum("btd,dnh->btnh", read, weight(self, name, "embed heads head", (WIDTH, HEADS, HEAD))), heads
            )
            for name, read in (("q", x), ("k", memory), ("v", memory))
        )
        scores = jnp.einsum("btnh,bsnh->bnts", q, k)
        if self.causal:
            scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e9)
        seen = nn.with_logical_constraint(jnp.einsum("bnts,bsnh->btnh", nn.softmax(scores), v), heads)
        return jnp.einsum("btnh,nhd->btd", seen, weight(self, "out", "heads head embed", (HEADS, HEAD, WIDTH)))


class Block(nn.Module):
    cross: bool = False
    causal: bool = True

    @nn.compact
    def __call__(self, x, memory=None):
        y = Norm(name="norm")(x)
        x = nn.with_logical_constraint(x + Attention(self.causal, name="attention")(y, y), STREAM)
        if self.cross:
            x = x + Attention(False, name="cross")(Norm(name="cross_norm")(x), memory)
        up = jnp.einsum(
            "btd,df->btf", Norm(name="mlp_norm")(x), weight(self, "up", "embed mlp", (WIDTH, HIDDEN))
        ) + weight(self, "up_bias", "mlp", (HIDDEN,), nn.initializers.zeros)
        hidden = nn.with_logical_constraint(nn.gelu(up), ("batch", "position", "mlp"))
        down = jnp.einsum("btf,fd->btd", hidden, weight(self, "down", "mlp embed", (HIDDEN, WIDTH)))
        return nn.with_logical_constraint(x + down, STREAM)


class LanguageModel(nn.Module):
    """A decoder with tied embeddings. `loop`: its layers are scanned. `remat`: they are computed again."""

    loop: bool = False
    remat: bool = False

    @nn.compact
    def __call__(self, tokens):
        table = weight(self, "table", "vocab embed", (VOCAB, WIDTH))
        x = nn.with_logical_constraint(jnp.take(table, tokens, axis=0), STREAM)
        block = nn.remat(Block, prevent_cse=not self.loop) if self.remat else Block
        if self.loop:
            layers = {"variable_axes": {"params": 0}, "metadata_params": {nn.PARTITION_NAME: "layers"}}
            scanned = nn.scan(lambda block, x, _: (block(x), None), length=2, split_rngs={"params": True}, **layers)
            x, _ = scanned(block(name="layers"), x, None)
        else:
            for layer in range(2):
                x = block(name=f"layer_{layer}")(x)
        logits = jnp.einsum("btd,vd->btv", Norm(name="last_norm")(x), table)
        return nn.with_logical_constraint(logits, ("batch", "position", "vocab"))


class Translator(nn.Module):
    """An encoder and a decoder that reads what the encoder gives."""

    @nn.compact
    def __call__(self, source, tokens):
        table = weight(self, "table", "vocab embed", (VOCAB, WIDTH))
        memory = Block(causal=False, name="encoder")(jnp.take(table, source, axis=0))
        x = Block(cross=True, name="decoder")(jnp.take(table, tokens, axis=0), memory)
        return nn.with_logical_constraint(jnp.einsum("btd,vd->btv", x, table), ("batch", "position", "vocab"))


class Classifier(nn.Module):
    """A residual convolutional network for images."""

    @nn.compact
    def __call__(self, images):
        for layer in range(3):
            kernel = nn.with_logical_partitioning(MATRIX, (None, None, "embed", "mlp"))
            bias = nn.with_logical_partitioning(nn.initializers.zeros, ("mlp",))
            y = nn.relu(nn.Conv(16, (3, 3), name=f"layer_{layer}", kernel_init=kernel, bias_init=bias)(images))
            images = images + y if layer else y
        pooled = nn.avg_pool(images, (2, 2), (2, 2)).mean((1, 2))
        return jnp.einsum("bc,cl->bl", pooled, weight(self, "head", "mlp label", (16, 10)))


MODELS = {
    "decoder": LanguageModel(),
    "looped": LanguageModel(loop=True),
    "recomputed": LanguageModel(remat=True),
    "looped_recomputed": LanguageModel(loop=True, remat=True),
    "translator": Translator(),
    "classifier": Classifier(),
}


def batch_of(name: str) -> tuple[jax.ShapeDtypeStruct, ...]:
    """The shapes of what a model reads, and of what it is to say, last."""
    tokens = jax.ShapeDtypeStruct((ROWS, TOKENS), jnp.int32)
    if name == "classifier":
        return jax.ShapeDtypeStruct((ROWS, 8, 8, 8), jnp.float32), jax.ShapeDtypeStruct((ROWS,), jnp.int32)
    return (jax.ShapeDtypeStruct((ROWS, SOURCE), jnp.int32), tokens, tokens) if name == "translator" else (tokens,) * 2


def train_step(name: str, rules: dict[str, str], mesh: Any) -> tuple[Any, tuple[Any, ...]]:
    """A jitted step (params, optimizer, batch) -> (params, optimizer, loss) on a mesh, and its abstract arguments."""
    model, optimizer, flax_rules = MODELS[name], optax.adamw(1e-3), tuple(rules.items())
    *given, _ = batch_of(name)
    with nn.logical_axis_rules(flax_rules):
        zeros = [jnp.zeros(like.shape, like.dtype) for like in given]
        boxed = jax.eval_shape(lambda: model.init(jax.random.key(0), *zeros))["params"]
        places = nn.logical_to_mesh_sharding(nn.get_partition_spec(boxed), mesh, flax_rules)
    placed = functools.partial(jax.tree.map, lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at))
    params, whole = placed(nn.unbox(boxed), places), NamedSharding(mesh, PartitionSpec())
    moments = optax.tree_map_params(
        optimizer, lambda x, like: placed(x, like.sharding), jax.eval_shape(optimizer.init, params), params,
        transform_non_params=lambda x: placed(x, whole),
    )  # fmt: skip
    rows = NamedSharding(mesh, PartitionSpec(rules.get("batch")))
    batch = jax.tree.map(lambda x: placed(x, rows), batch_of(name))

    def loss_of(params, batch):
        *given, targets = batch
        logits = model.apply({"params": params}, *given)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    def step(params, moments, batch):
        with nn.logical_axis_rules(flax_rules):
            loss, gradients = jax.value_and_grad(loss_of)(params, batch)
        updates, moments = optimizer.update(gradients, moments, params)
        return optax.apply_updates(params, updates), moments, loss

    outputs = (*jax.tree.map(lambda x: x.sharding, (params, moments)), None)
    return jax.jit(step, out_shardings=outputs), (params, moments, batch)
