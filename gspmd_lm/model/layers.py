"""The parts of a block: norms, MLP, dropout and rotary positions."""

import dataclasses
import functools
import math
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.scipy.special import erf

from gspmd_lm import config
from gspmd_lm.model.weights import adapted, bias, matrix, weight
from gspmd_lm.sharding.annotate import recomputed, shard, use
from gspmd_lm.sharding.matmuls import project, unreduced_matmul
from gspmd_lm.sharding.partial_sums import Unreduced, reduced

RESIDUAL = "residual: batch seq embed"
BLOCK_INPUT = "block_input: batch seq embed"
HIDDEN = "hidden: batch seq mlp"
EMBEDDED = "embedded: batch seq embedding_width"


def gelu(x: jax.Array) -> jax.Array:
    """x times the share of a normal distribution below x, computed in float32 and rounded once.

    Below -3, where that share is small, it is exact to 1e-6 and not to a share of itself. `jax.nn.gelu` is, with twice
    the arithmetic.
    """

    @recomputed
    def computed(x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        return (0.5 * wide * (1 + erf(math.sqrt(0.5) * wide))).astype(x.dtype)

    return computed(x)


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": gelu,
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
    "tanh": jnp.tanh,
}


def table_specs(cfg: config.ModelConfig) -> tuple[str, str]:
    """How the activation of the token table's width is named: where it is reduced to, and gathered for a matmul."""
    return (EMBEDDED, EMBEDDED) if cfg.embedding_width else (RESIDUAL, BLOCK_INPUT)


class Norm(nn.Module):
    """RMSNorm or LayerNorm over the last dimension, or over heads as well, computed in float32."""

    cfg: config.ModelConfig
    axes: str = "embed"  # of scale and bias: the last axes of what is normed
    joint: int = 0  # how many heads are normed together, the first ones, before any padding. 0: each by itself

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        cfg, size = dataclasses.replace(self.cfg, compute_dtype="float32"), x.shape[-len(self.axes.split()) :]
        scale, shift = None, None
        over, share = ((-2, -1), x.shape[-2] / self.joint) if self.joint else (-1, 1.0)
        if cfg.norm_scale:
            start = nn.initializers.constant(1 - cfg.norm_offset)
            scale = use(weight(self, "scale", self.axes, size, cfg, start)) + cfg.norm_offset
        if cfg.norm_bias:
            shift = use(weight(self, "bias", self.axes, size, cfg, nn.initializers.zeros))

        @recomputed
        def normalized(x: jax.Array, scale: jax.Array | None, shift: jax.Array | None) -> jax.Array:
            y = x.astype(jnp.float32)
            if share > 1:
                y = jnp.where((jnp.arange(x.shape[-2]) < self.joint)[:, None], y, 0)
            if cfg.norm == "layernorm":
                y -= y.mean(-1, keepdims=True)
            y *= jax.lax.rsqrt(share * jnp.square(y).mean(over, keepdims=True) + cfg.norm_eps)
            y = y if scale is None else y * scale
            y = y if shift is None else y + shift
            return y.astype(x.dtype)

        return normalized(x, scale, shift)


def activated(cfg: config.ModelConfig, first: jax.Array, *rest: jax.Array) -> jax.Array:
    """The hidden layer of an MLP, from x w_gate and x w_up, or from x w_up alone."""
    if cfg.mlp_limit:
        first, rest = jnp.minimum(first, cfg.mlp_limit), tuple(jnp.clip(x, -cfg.mlp_limit, cfg.mlp_limit) for x in rest)
    if cfg.mlp_up_offset:
        rest = tuple(x + jnp.asarray(cfg.mlp_up_offset, x.dtype) for x in rest)
    if cfg.activation_sparsity:
        first = _sparse(first, cfg.activation_sparsity)
    slope = cfg.activation_slope
    gated = ACTIVATIONS[cfg.activation](first) if slope == 1 else first * jax.nn.sigmoid(slope * first)
    return math.prod(rest, start=gated)


def convolved(
    module: nn.Module, cfg: config.ModelConfig, x_BTD: jax.Array, batch: dict[str, jax.Array], keys_BT: jax.Array | None
) -> jax.Array:
    """[B, T, D]: a convolution of tokens with those around them in their text, after its activation.

    The parameters are those of `module`. `batch`: see `decoder.Decoder`. keys_BT: a dropout key for each token.
    """
    assert cfg.convolution
    taps, T = cfg.convolution.taps, x_BTD.shape[1]
    before = after = taps // 2
    segments_BT = batch.get("segment_ids", jnp.zeros(x_BTD.shape[:2], jnp.int32))
    around_BTD = jnp.pad(x_BTD, ((0, 0), (before, after), (0, 0)))
    around_BT = jnp.pad(segments_BT, ((0, 0), (before, after)), constant_values=-1)
    windows_BTAO = jnp.stack(
        [
            jnp.where((around_BT[:, at : at + T] == segments_BT)[..., None], around_BTD[:, at : at + T], 0)
            for at in range(taps)
        ],
        axis=2,
    )
    matrix_AOD = matrix(module, "convolution", "taps stream_width embed", (taps, cfg.embed, cfg.embed), cfg)
    y_BTD = reduced(unreduced_matmul(windows_BTAO, matrix_AOD), BLOCK_INPUT, RESIDUAL)
    y_BTD += bias(module, "convolution_bias", "embed", (cfg.embed,), cfg)
    return ACTIVATIONS[cfg.convolution.activation](dropout(y_BTD, cfg.dropout, keys_BT, 1))


def root(x: jax.Array, least: float = 0.0) -> jax.Array:
    """The square root of `x`, and at least that of `least`. At zero, its gradient is zero."""
    return jnp.sqrt(jnp.maximum(x, max(least, jnp.finfo(x.dtype).tiny)))


def _sparse(x_BTF: jax.Array, share: float) -> jax.Array:
    """What of `x_BTF` is above the quantile `share` of a normal distribution with a token's mean and deviation."""
    exact_BTF = x_BTF.astype(jnp.float32)
    spread_BT1 = root(jnp.var(exact_BTF, axis=-1, keepdims=True))
    least_BT1 = exact_BTF.mean(-1, keepdims=True) + jax.scipy.special.ndtri(share) * spread_BT1
    return jax.nn.relu(exact_BTF - least_BT1).astype(x_BTF.dtype)


class Mlp(nn.Module):
    """A gated or plain feed-forward network."""

    cfg: config.ModelConfig

    def setup(self):
        cfg, shape = self.cfg, (self.cfg.embed, self.cfg.mlp)
        names = ("gate", "up") if cfg.mlp_kind == "gated" else ("up",)
        inward = [matrix(self, f"w_{name}", "embed mlp", shape, cfg) for name in names]
        down = matrix(self, "w_down", "mlp embed", shape[::-1], cfg)
        if cfg.mlp_bias:
            self.inward_bias = [bias(self, f"b_{name}", "mlp", shape[1:], cfg) for name in names]
            self.b_down = bias(self, "b_down", "embed", shape[:1], cfg)
        self.w_in = [adapted(self, w, cfg) for w in inward]
        self.w_down = adapted(self, down, cfg)

    def __call__(self, x_BTD: jax.Array) -> tuple[Unreduced, None]:
        """What is added to the residual stream. An MLP has no router. `x_BTD` is gathered."""
        cfg = self.cfg
        in_BTF = [project(x_BTD, w) for w in self.w_in]
        if cfg.mlp_bias:
            in_BTF = [x_BTF + b_F for x_BTF, b_F in zip(in_BTF, self.inward_bias, strict=True)]

        hidden = recomputed(functools.partial(activated, cfg))
        hidden_BTF = shard(hidden(*(shard(x_BTF, HIDDEN) for x_BTF in in_BTF)), HIDDEN)
        y = unreduced_matmul(hidden_BTF, self.w_down)
        return y + self.b_down if cfg.mlp_bias else y, None


def dropout(x_BTD: jax.Array, rate: float, keys_BT: jax.Array | None, site: int) -> jax.Array:
    """`x_BTD` with entries dropped. Each token has a key of its own: its mask is the same however tokens are split."""
    if keys_BT is None or rate == 0:
        return x_BTD

    def keep(key: jax.Array) -> jax.Array:
        return jax.random.bernoulli(jax.random.fold_in(key, site), 1 - rate, x_BTD.shape[2:])

    return jnp.where(jax.vmap(jax.vmap(keep))(keys_BT), x_BTD / (1 - rate), 0).astype(x_BTD.dtype)


def lengths(batch: dict[str, jax.Array], tokens: int) -> int | jax.Array:
    """The lengths of rows, on which some rotary positions depend: [B, 1] if the batch has them, else `tokens`."""
    return batch["length"][:, None] if "length" in batch else tokens


def rope(x_BTNH: jax.Array, positions_BT: jax.Array, cfg: config.ModelConfig, length: int | jax.Array) -> jax.Array:
    """Rotary positions (arXiv 2104.09864) on the first `rope_dim` dimensions of a head.

    Their first half is paired with the second, as in Llama's weights on Hugging Face. length: see `lengths`.
    """
    turned = cfg.rope_dim or cfg.head_dim
    frequency = rope_frequencies(cfg, length)
    frequency = frequency[:, None] if frequency.ndim > 1 else frequency  # each row has its own, or all have the same
    angle_BT1H = (positions_BT[..., None] * frequency)[:, :, None, :]
    factor = cfg.rope_scaling.attention_factor if cfg.rope_scaling else 1.0
    cos, sin = factor * jnp.cos(angle_BT1H), factor * jnp.sin(angle_BT1H)
    first, second, still = jnp.split(x_BTNH.astype(jnp.float32), [turned // 2, turned], axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, still], -1).astype(x_BTNH.dtype)


def rope_frequencies(cfg: config.ModelConfig, length: int | jax.Array) -> jax.Array:
    """The angle from one position to the next, in radians, for each pair of dimensions, in rows of a length.

    [H / 2]; or [B, H / 2], where each row has a length, [B, 1], of its own and the frequencies depend on it.
    """
    half, theta, scaling = (cfg.rope_dim or cfg.head_dim) // 2, cfg.rope_theta, cfg.rope_scaling
    if scaling and scaling.kind == "dynamic":
        over = length / scaling.original_context
        over = max(over, 1) if isinstance(over, float) else jnp.maximum(over, 1)
        theta *= (scaling.factor * over - (scaling.factor - 1)) ** (half / (half - 1))
    pair = jnp.arange(half, dtype=jnp.float32)
    frequency = theta ** (-pair / half)
    if scaling is None or scaling.kind == "dynamic":
        return frequency
    if scaling.kind == "longrope":
        factors = (jnp.asarray(each, jnp.float32) for each in (scaling.long_factors, scaling.short_factors))
        return frequency / jnp.where(length > scaling.original_context, *factors)
    kept, low, high = 0.0, scaling.low_freq_factor, scaling.high_freq_factor
    if scaling.kind == "llama3":
        turns = scaling.original_context * frequency / (2 * jnp.pi)
        kept = jnp.clip((turns - low) / max(high - low, 1e-6), 0, 1)
    elif scaling.kind == "yarn":  # the pairs that turn `high` and `low` times within original_context
        at = [half * math.log(scaling.original_context / (2 * math.pi * n), theta) for n in (high, low)]
        first, last = (math.floor(at[0]), math.ceil(at[1])) if scaling.truncate else at
        first, last = max(first, 0), min(last, 2 * half - 1)
        kept = 1 - jnp.clip((pair - first) / (last - first or 1e-3), 0, 1)
    return frequency * (kept + (1 - kept) / scaling.factor)


def sinusoids(positions_BT: jax.Array, width: int) -> jax.Array:
    """Fixed positions, [B, T, width] (arXiv 1706.03762): sines in the first half, cosines in the second."""
    half = (width + 1) // 2
    inverse_wavelength = 10000.0 ** (-jnp.arange(half, dtype=jnp.float32) / max(half - 1, 1))
    angle_BTD = positions_BT[..., None] * inverse_wavelength
    return jnp.concatenate([jnp.sin(angle_BTD), jnp.cos(angle_BTD)], -1)[..., :width]
