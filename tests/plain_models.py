"""Models of people who know flax and not this package, as its guides write them, and the tasks made of them."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx

from gspmd_lm import Input, Task
from gspmd_lm import config as configs
from gspmd_lm.config import nest


def annotated(init, *axes):
    return nn.with_logical_partitioning(init, axes)


class Block(nn.Module):
    """One layer of a decoder, with logical axes for weights and others for activations."""

    heads: int
    hidden: int
    dtype: str

    @nn.compact
    def __call__(self, x, _):
        def norm(name):
            return nn.RMSNorm(name=name, scale_init=annotated(nn.initializers.ones, "embed"))

        def dense(name, shape, axes, axis=-1):
            init = annotated(nn.initializers.lecun_normal(), *axes)
            return nn.DenseGeneral(shape, axis=axis, use_bias=False, name=name, kernel_init=init, dtype=self.dtype)

        width = x.shape[-1]
        of_heads = "activation_batch", "activation_length", "activation_heads", "activation_kv"
        y = norm("attention_norm")(x)
        q, k, v = (
            nn.with_logical_constraint(
                dense(name, (self.heads, width // self.heads), ("embed", "heads", "kv"))(y), of_heads
            )
            for name in ("query", "key", "value")
        )
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x += dense("out", width, ("heads", "kv", "embed"), axis=(-2, -1))(y)
        x = nn.with_logical_constraint(x, ("activation_batch", "activation_length", "activation_embed"))
        y = nn.gelu(dense("wi", self.hidden, ("embed", "mlp"))(norm("mlp_norm")(x)))
        y = nn.with_logical_constraint(y, ("activation_batch", "activation_length", "activation_mlp"))
        x += dense("wo", width, ("mlp", "embed"))(y)
        return nn.with_logical_constraint(x, ("activation_batch", "activation_length", "activation_embed")), None


class Decoder(nn.Module):
    """A decoder whose layers are scanned and computed again in the backward pass."""

    layers: int = 2
    width: int = 64
    heads: int = 8
    hidden: int = 256
    vocab: int = 128
    dtype: str = "float32"

    @nn.compact
    def __call__(self, tokens):
        table = annotated(nn.initializers.normal(0.02), "vocab", "embed")
        x = nn.Embed(self.vocab, self.width, embedding_init=table, name="token_embedder")(tokens)
        x = nn.with_logical_constraint(x, ("activation_batch", "activation_length", "activation_embed"))
        layers = nn.scan(
            nn.remat(Block, prevent_cse=False), variable_axes={"params": 0}, split_rngs={"params": True},
            length=self.layers, metadata_params={nn.PARTITION_NAME: "layers"},
        )  # fmt: skip
        x, _ = layers(self.heads, self.hidden, self.dtype, name="layers")(x, None)
        x = nn.RMSNorm(name="final_norm", scale_init=annotated(nn.initializers.ones, "embed"))(x)
        out = annotated(nn.initializers.lecun_normal(), "embed", "vocab")
        logits = nn.Dense(self.vocab, use_bias=False, name="logits", kernel_init=out)(x)
        return nn.with_logical_constraint(logits, ("activation_batch", "activation_length", "activation_vocab"))


class NnxBlock(nnx.Module):
    """One layer of a decoder, of NNX."""

    def __init__(self, width, heads, hidden, rngs):
        def dense(size, shape, axes, axis=-1):
            init = nnx.with_partitioning(nnx.initializers.lecun_normal(), axes)
            return nnx.LinearGeneral(size, shape, axis=axis, use_bias=False, kernel_init=init, rngs=rngs)

        each, of_heads = (heads, width // heads), ("embed", "heads", "kv")
        ones = nnx.with_partitioning(nnx.initializers.ones, ("embed",))
        self.attention_norm = nnx.RMSNorm(width, scale_init=ones, rngs=rngs)
        self.query, self.key, self.value = (dense(width, each, of_heads) for _ in range(3))
        self.out = dense(each, width, ("heads", "kv", "embed"), axis=(-2, -1))
        self.mlp_norm = nnx.RMSNorm(width, scale_init=ones, rngs=rngs)
        self.wi, self.wo = dense(width, hidden, ("embed", "mlp")), dense(hidden, width, ("mlp", "embed"))

    def __call__(self, x):
        y = self.attention_norm(x)
        x += self.out(jax.nn.dot_product_attention(self.query(y), self.key(y), self.value(y), is_causal=True))
        return x + self.wo(nnx.gelu(self.wi(self.mlp_norm(x))))


class Network(nnx.Module):
    """A decoder of NNX with the sizes of `Decoder`."""

    def __init__(self, rngs, layers=2, width=64, heads=8, hidden=256, vocab=128):
        table = nnx.with_partitioning(nnx.initializers.normal(0.02), ("vocab", "embed"))
        self.embed = nnx.Embed(vocab, width, embedding_init=table, rngs=rngs)
        self.layers = nnx.List(NnxBlock(width, heads, hidden, rngs) for _ in range(layers))
        self.norm = nnx.Param(jnp.ones(width), out_sharding=("embed",))
        head = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", "vocab"))
        self.head = nnx.Linear(width, vocab, use_bias=False, kernel_init=head, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6) * self.norm[...])


# What follows is all that the package needs.


def init(model, length, key):
    return model.init(key, jnp.zeros((1, length), jnp.int32))["params"]


def losses(model, params, batch, key):
    logits = model.apply({"params": params}, batch["tokens"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean(1)


def optimizer(named):
    return optax.adamw(1e-3)


def decoder(rows=32, length=16, **sizes):
    model, of_tokens = Decoder(**sizes), "tokens: activation_batch activation_length"
    return Task(
        name="plain_decoder", init=functools.partial(init, model, length), sums=functools.partial(losses, model),
        optimizer=optimizer, matmul_precision="highest",
        inputs={name: Input((rows, length), "int32", of_tokens) for name in ("tokens", "targets")},
    )  # fmt: skip


def same_decoder(rows=32, length=16, **sizes):
    """The config of the package's own decoder that has the weights and the products of `decoder`."""
    model = Decoder(**sizes)
    sizes = {
        "layers": model.layers, "embed": model.width, "heads": model.heads, "kv_heads": model.heads,
        "head_dim": model.width // model.heads, "mlp": model.hidden, "feed_forward.kind": "plain",
        "feed_forward.activation": "gelu_tanh",
        "vocab": model.vocab, "context": length, "positions": "none", "embedding.tied": False,
        "compute_dtype": "float32", "matmul_precision": "highest",
    }  # fmt: skip
    raw = {"name": "same_decoder", "model": nest(sizes), "data": {"source": "random:64", "batch": rows,
                                                                    "seq": length},
           "train": {"steps": 4}}  # fmt: skip
    return configs.from_dict(raw, "tests")


def nnx_init(key):
    return nnx.state(Network(nnx.Rngs(key)), nnx.Param)


def nnx_losses(params, batch, key):
    model = nnx.merge(nnx.graphdef(nnx.eval_shape(lambda: Network(nnx.Rngs(0)))), params)
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["tokens"]), batch["targets"]).mean(1)


NNX = Task(
    name="nnx_network", init=nnx_init, sums=nnx_losses, optimizer=optimizer, matmul_precision="highest",
    inputs={name: Input((32, 16), "int32", "tokens: batch length") for name in ("tokens", "targets")},
)  # fmt: skip
