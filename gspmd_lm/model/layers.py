"""The parts of a block: weights, norms, MLP, dropout, rotary positions and the token table."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from einops import rearrange

from gspmd_lm import axes, config
from gspmd_lm.axes import ADAPTERS, Weight, scope, shard, use
from gspmd_lm.model.projection import BLOCK_INPUT, RESIDUAL, Adapter, Product

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
}


def cheap(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """`function`, of which only the inputs are kept for the backward pass where nothing else is recomputed.

    Elementwise steps are computed again faster than their results are read back from memory.
    """
    return function if axes.remat() else jax.checkpoint(function, prevent_cse=False)


def weight(
    module: nn.Module,
    name: str,
    axes: str,
    shape: tuple[int, ...],
    cfg: config.Model,
    init: nn.initializers.Initializer,
) -> Weight:
    """A parameter of `module`, annotated with one logical axis per dimension. It is cast when it is used."""
    names = tuple(axes.split())
    array: Any = module.param(name, nn.with_logical_partitioning(init, names), shape, jnp.dtype(cfg.weight_dtype))
    frozen = cfg.lora is not None and name not in ADAPTERS
    return Weight(array, ".".join((*module.path, name)), names, jnp.dtype(cfg.compute_dtype), frozen)


def matrix(module: nn.Module, name: str, axes: str, shape: tuple[int, ...], cfg: config.Model) -> Weight:
    """A matrix drawn from a normal distribution; those that write to the residual stream start smaller with depth."""
    shrink = math.sqrt(2 * cfg.layers) if name in ("wo", "w_down") else 1.0
    return weight(module, name, axes, shape, cfg, nn.initializers.normal(cfg.init_std / shrink))


def adapted(module: nn.Module, product: Product, cfg: config.Model) -> Product:
    """`product` with an adapter, which adds nothing at first, where its weight is to have one.

    Adapters rest in float32: a step changes them by less than bfloat16 can tell.
    """
    name, names, sizes = product.weight.path.rpartition(".")[2], product.weight.axes, product.weight.array.shape
    lora, cfg = cfg.lora, dataclasses.replace(cfg, weight_dtype="float32")
    if lora is None or name not in lora.targets:
        return product
    read, rank = len(product.letters()[0]) - 2, lora.rank  # how many of the weight's axes are read
    start, zeros = nn.initializers.normal(math.prod(sizes[:read]) ** -0.5), nn.initializers.zeros
    a = weight(module, f"{name}_a", " ".join((*names[:read], "rank")), (*sizes[:read], rank), cfg, start)
    b = weight(module, f"{name}_b", " ".join(("rank", *names[read:])), (rank, *sizes[read:]), cfg, zeros)
    return product._replace(adapter=Adapter(a, b, lora.scale))


def bias(module: nn.Module, name: str, axes: str, shape: tuple[int, ...], cfg: config.Model) -> jax.Array:
    """A bias that starts at zero, ready to be added."""
    return use(weight(module, name, axes, shape, cfg, nn.initializers.zeros))


class Norm(nn.Module):
    """RMSNorm or LayerNorm over the last dimension, computed in float32."""

    cfg: config.Model
    axis: str = "embed"

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        cfg, size = dataclasses.replace(self.cfg, compute_dtype="float32"), x.shape[-1:]
        scale, shift = None, None
        if cfg.norm_scale:
            start = nn.initializers.constant(1 - cfg.norm_offset)
            scale = use(weight(self, "scale", self.axis, size, cfg, start)) + cfg.norm_offset
        if cfg.norm_bias:
            shift = use(weight(self, "bias", self.axis, size, cfg, nn.initializers.zeros))

        @cheap
        def normalized(x: jax.Array, scale: jax.Array | None, shift: jax.Array | None) -> jax.Array:
            y = x.astype(jnp.float32)
            if cfg.norm == "layernorm":
                y -= y.mean(-1, keepdims=True)
            y *= jax.lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + cfg.norm_eps)
            y = y if scale is None else y * scale
            y = y if shift is None else y + shift
            return y.astype(x.dtype)

        return normalized(x, scale, shift)


class Mlp(nn.Module):
    """The two halves of a gated or plain feed-forward network, so that a parallel block can add before it reduces."""

    cfg: config.Model

    def setup(self):
        cfg, shape = self.cfg, (self.cfg.embed, self.cfg.mlp)
        self.gated = cfg.mlp_kind == "gated"
        names = ("gate", "up") if self.gated else ("up",)
        inward = [matrix(self, f"w_{name}", "embed mlp", shape, cfg) for name in names]
        down = matrix(self, "w_down", "mlp embed", shape[::-1], cfg)
        if cfg.mlp_bias:
            self.inward_bias = [bias(self, f"b_{name}", "mlp", shape[1:], cfg) for name in names]
            self.b_down = bias(self, "b_down", "embed", shape[:1], cfg)
        self.reads = tuple(adapted(self, Product("BTD,DF->BTF", w, "hidden"), cfg) for w in inward)
        self.writes = adapted(self, Product("BTF,FD->BTD", down, "hidden"), cfg)

    def products(self) -> tuple[Product, ...]:
        """What the MLP reads from the block's input."""
        return self.reads

    def hidden(self, *read: jax.Array) -> jax.Array:
        """hidden_BTF from the values of `products`."""
        if self.cfg.mlp_bias:
            read = tuple(x + b for x, b in zip(read, self.inward_bias, strict=True))

        @cheap
        def activated(first: jax.Array, *rest: jax.Array) -> jax.Array:
            hidden_BTF = ACTIVATIONS[self.cfg.activation](first)
            return hidden_BTF * rest[0] if self.gated else hidden_BTF

        return shard(activated(*(shard(x_BTF, "hidden: batch seq mlp") for x_BTF in read)), "hidden: batch seq mlp")

    def out(self) -> Product:
        """What the MLP writes to the residual stream, its bias aside."""
        return self.writes


def dropout(x_BTD: jax.Array, rate: float, row_keys_B: jax.Array | None, site: int) -> jax.Array:
    """`x_BTD` with entries dropped. Each row has a key of its own, so its mask is the same however rows are split."""
    if row_keys_B is None or rate == 0:
        return x_BTD

    def keep(key: jax.Array) -> jax.Array:
        return jax.random.bernoulli(jax.random.fold_in(key, site), 1 - rate, x_BTD.shape[1:])

    return jnp.where(jax.vmap(keep)(row_keys_B), x_BTD / (1 - rate), 0).astype(x_BTD.dtype)


def rope(x_BTNH: jax.Array, positions_BT: jax.Array, cfg: config.Model) -> jax.Array:
    """Rotary positions (arXiv 2104.09864) on the first `rope_dim` dimensions of a head.

    Their first half is paired with the second, as in Llama's weights on Hugging Face.
    """
    turned = cfg.rope_dim or cfg.head_dim
    half = turned // 2
    inverse_wavelength = cfg.rope_theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    if scaling := cfg.rope_scaling:
        kept = 0.0
        if scaling.kind == "llama3":
            turns = scaling.original_context * inverse_wavelength / (2 * jnp.pi)
            span = scaling.high_freq_factor - scaling.low_freq_factor
            kept = jnp.clip((turns - scaling.low_freq_factor) / span, 0, 1)
        inverse_wavelength *= kept + (1 - kept) / scaling.factor
    angle_BT1H = (positions_BT[..., None] * inverse_wavelength)[:, :, None, :]
    cos, sin = jnp.cos(angle_BT1H), jnp.sin(angle_BT1H)
    first, second, still = jnp.split(x_BTNH.astype(jnp.float32), [half, turned], axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, still], -1).astype(x_BTNH.dtype)


def sinusoids(positions_BT: jax.Array, width: int) -> jax.Array:
    """Fixed positions, [B, T, width] (arXiv 1706.03762): sines in the first half, cosines in the second."""
    half = (width + 1) // 2
    inverse_wavelength = 10000.0 ** (-jnp.arange(half, dtype=jnp.float32) / max(half - 1, 1))
    angle_BTD = positions_BT[..., None] * inverse_wavelength
    return jnp.concatenate([jnp.sin(angle_BTD), jnp.cos(angle_BTD)], -1)[..., :width]


def look_up(table: Weight, ids_BT: jax.Array) -> jax.Array:
    """The rows of `table` for `ids_BT`, [B, T, D].

    A table that is whole along its rows is read where it rests: when it is split along `embed`, two small
    all-to-alls of the result cost less than gathering the table. One split along its rows is gathered along `embed`
    first; each piece then looks up the rows it has, and one reduction adds them up.
    """
    rows, batch = axes.split(table.path, table.axes[0]), axes.split("block_input", "batch")
    if rows.pieces == 1:
        with scope("of", table.path):
            # Cast last, so that the gradients of a repeated id add up in float32: in bfloat16, a sum of equal ones
            # stops growing at 256 of them.
            return table.array.astype(jnp.float32)[ids_BT].astype(table.compute_dtype)
    V, D = table.array.shape
    R = V // rows.pieces
    first_Z = R * jnp.arange(rows.pieces)

    def within(ids: jax.Array, first: jax.Array) -> jax.Array:
        """Row numbers within the piece that begins at `first`; R, out of bounds, for ids of other pieces."""
        return jnp.where((ids >= first) & (ids < first + R), ids - first, R)

    of = scope("of", table.path)

    @jax.custom_vjp
    @of
    def call(array):
        table_ZRD = use(table.holding(array)).reshape(rows.pieces, R, D)
        found_ZBTD = jax.vmap(lambda rows_RD, first: rows_RD.at[within(ids_BT, first)].get(mode="fill", fill_value=0))(
            table_ZRD, first_Z
        )
        return axes.reduce(found_ZBTD, rows, RESIDUAL)

    @of
    def backward(_, dx_BTD):
        dx_BTD = shard(dx_BTD, BLOCK_INPUT).astype(jnp.float32)
        dx_bBTD, ids_bBT = (rearrange(x, "(b B) ... -> b B ...", b=batch.pieces) for x in (dx_BTD, ids_BT))

        def scattered(ids, dx, first):
            return jnp.zeros((R, D), jnp.float32).at[within(ids, first)].add(dx, mode="drop")

        by_rows = jax.vmap(scattered, in_axes=(None, None, 0))
        partials = jax.vmap(by_rows, in_axes=(0, 0, None))(ids_bBT, dx_bBTD, first_Z).reshape(batch.pieces, V, D)
        return (axes.reduce(partials, batch, table.spec, "optimizer").astype(table.array.dtype),)

    call.defvjp(lambda array: (call(array), None), backward)
    return call(table.array)
