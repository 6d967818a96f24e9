"""Steps at the ends of a text model that some families have: see `ends.Ends`."""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp

from gspmd_lm import config
from gspmd_lm.model.block import BLOCK_INPUT, RESIDUAL
from gspmd_lm.model.ends import EMBEDDED, Batch, table_axis, table_specs
from gspmd_lm.model.norm import Norm
from gspmd_lm.model.parts.classes import TRANSFORMED, project_with_bias
from gspmd_lm.model.weights import bias, matrix, weight
from gspmd_lm.sharding.annotate import Weight, like, use
from gspmd_lm.sharding.matmuls import gathered, project

TRANSFORMED_FOR_TABLE = "transformed: batch seq embedding_width"


def scale(cfg: config.ModelConfig, module: nn.Module, x_BTD: jax.Array, batch: Batch) -> jax.Array:
    """Embedded tokens times a constant (Gemma)."""
    return x_BTD * jnp.asarray(cfg.embedding.scale, jnp.dtype(cfg.compute_dtype))


# Look-ups of positions and types are in float32, so that the gradients of a row, one for each token, are added up in
# float32.


def add_positions(
    cfg: config.ModelConfig, sizes: tuple[int, str], module: nn.Module, x_BTW: jax.Array, batch: Batch
) -> jax.Array:
    """Embedded tokens plus learned positions. sizes: the width of both, and its logical axis."""
    (width, axis), offset = sizes, cfg.embedding.position_offset
    table = matrix(module, "position_embedding", f"positions {axis}", (offset + cfg.context, width), cfg)
    return x_BTW + use(table, jnp.float32)[offset + batch["positions"]].astype(jnp.dtype(cfg.compute_dtype))


def add_sinusoids(
    cfg: config.ModelConfig, sizes: tuple[int, str], module: nn.Module, x_BTW: jax.Array, batch: Batch
) -> jax.Array:
    """Embedded tokens plus fixed positions. sizes: see `add_positions`."""
    return x_BTW + sinusoids(batch["positions"], sizes[0]).astype(jnp.dtype(cfg.compute_dtype))


def sinusoids(positions_BT: jax.Array, width: int) -> jax.Array:
    """Fixed positions, [B, T, width] (arXiv 1706.03762): sines in the first half, cosines in the second."""
    half = (width + 1) // 2
    inverse_wavelength = 10000.0 ** (-jnp.arange(half, dtype=jnp.float32) / max(half - 1, 1))
    angle_BTD = positions_BT[..., None] * inverse_wavelength
    return jnp.concatenate([jnp.sin(angle_BTD), jnp.cos(angle_BTD)], -1)[..., :width]


def add_types(
    cfg: config.ModelConfig, sizes: tuple[int, str], module: nn.Module, x_BTW: jax.Array, batch: Batch
) -> jax.Array:
    """Embedded tokens plus the embedding of their types (BERT). sizes: see `add_positions`."""
    width, axis = sizes
    table = matrix(module, "type_embedding", f"types {axis}", (cfg.embedding.token_types, width), cfg)
    return x_BTW + use(table, jnp.float32)[batch["token_types"]].astype(jnp.dtype(cfg.compute_dtype))


def normalize(
    cfg: config.ModelConfig, sizes: tuple[int, str], module: nn.Module, x_BTW: jax.Array, batch: Batch
) -> jax.Array:
    """Embedded tokens after a norm. sizes: see `add_positions`."""
    return Norm(cfg, sizes[1], name="embedding_norm")(x_BTW)


def widen(cfg: config.ModelConfig, biased: bool, module: nn.Module, x_BTW: jax.Array, batch: Batch) -> jax.Array:
    """Embeddings of the token table's width, projected to the residual stream, [B, T, D]."""
    bias_D = bias(module, "embedding_in_bias", "embed", (cfg.embed,), cfg) if biased else None
    inward = matrix(module, "embedding_in", "embedding_width embed", (cfg.embedding.width, cfg.embed), cfg)
    with gathered(x_BTW, EMBEDDED, EMBEDDED) as in_BTW:
        x_BTD = project(in_BTW, inward)
        return like(like(x_BTD if bias_D is None else x_BTD + bias_D, BLOCK_INPUT), RESIDUAL)


def narrow(cfg: config.ModelConfig, module: nn.Module, x_BTD: jax.Array) -> jax.Array:
    """The residual stream, projected to the token table's width (OPT-350m)."""
    (width, axis), (reduced_spec, gathered_spec) = table_axis(cfg), table_specs(cfg)
    outward = matrix(module, "embedding_out", f"embed {axis}", (cfg.embed, width), cfg)
    with gathered(x_BTD, BLOCK_INPUT, RESIDUAL) as in_BTD:
        return like(like(project(in_BTD, outward), gathered_spec), reduced_spec)


def transform(
    cfg: config.ModelConfig, activate: Callable[..., jax.Array], module: nn.Module, x_BTD: jax.Array
) -> jax.Array:
    """The head of a masked language model: a matrix, the activation and a norm (BERT)."""
    (width, axis), (reduced_spec, _) = table_axis(cfg), table_specs(cfg)
    spec = {"embed": TRANSFORMED, "embedding_width": TRANSFORMED_FOR_TABLE}[axis]
    y_BTD = activate(project_with_bias(module, cfg, x_BTD, "head_transform", width, spec))
    return Norm(cfg, axis, name="head_norm")(like(y_BTD, reduced_spec))


def make_logit_bias(cfg: config.ModelConfig, module: nn.Module) -> Weight:
    """A bias for each token of the vocabulary."""
    return weight(module, "unembedding_bias", "vocab", (cfg.vocab_rows,), cfg, nn.initializers.zeros)
