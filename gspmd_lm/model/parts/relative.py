"""Learned relative positions: a bias for each range of them (T5, BEiT), or a vector (DeBERTa, arXiv 2006.03654)."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from einops import rearrange

from gspmd_lm import config
from gspmd_lm.model.attention import Attention
from gspmd_lm.model.norm import Norm
from gspmd_lm.model.tokens import Tokens
from gspmd_lm.model.weights import bias, matrix
from gspmd_lm.sharding.annotate import Weight, shard, use

VECTORS = "vectors: ranges embed"
Numbers = Callable[[Tokens], Any]  # numbers of each head, see `head_numbers`, for some tokens


def table_of_biases(module: nn.Module, cfg: config.ModelConfig) -> jax.Array:
    """The relative position bias of each head for each range of relative positions, [R, N]."""
    assert cfg.attention.relative_positions
    sizes = cfg.attention.relative_positions.ranges, cfg.head_rows
    return use(matrix(module, "relative_bias", "ranges heads", sizes, cfg))


def add_shared_biases(cfg: config.ModelConfig, module: nn.Module, tokens: Tokens) -> Tokens:
    """The tokens with the relative position biases that all layers of a stack share."""
    return tokens._replace(biases_RN=table_of_biases(module, cfg))


def shared_biases(module: nn.Module) -> Numbers:
    """A function that reads the relative position biases that all layers share."""
    return lambda tokens: tokens.biases_RN


def own_biases(cfg: config.ModelConfig, module: nn.Module) -> Numbers:
    """A function that reads the relative position biases of one layer."""
    biases_RN = table_of_biases(module, cfg)
    return lambda tokens: biases_RN


def add_vectors(cfg: config.ModelConfig, module: nn.Module, tokens: Tokens) -> Tokens:
    """The tokens with a vector for each range of relative positions, which all layers of a stack share."""
    assert cfg.attention.relative_vectors
    sizes = cfg.attention.relative_vectors.ranges, cfg.embed
    vectors_RD = use(matrix(module, "relative_embedding", "ranges embed", sizes, cfg))
    if not cfg.attention.relative_vectors.own_projections:
        vectors_RD = Norm(cfg, name="relative_norm")(vectors_RD)
    return tokens._replace(vectors_RD=shard(vectors_RD, VECTORS))


def own_projections(cfg: config.ModelConfig, module: nn.Module) -> Numbers:
    """Queries and keys of the relative positions, by matrices of their own (DeBERTa v1)."""
    sizes = cfg.embed, cfg.head_rows, cfg.head_dim
    to_q, to_k = (matrix(module, f"w{name}_relative", "embed heads head_dim", sizes, cfg) for name in "qk")
    bias_NH = bias(module, "bq_relative", "heads head_dim", sizes[1:], cfg)
    return lambda tokens: range_projections(tokens.vectors_RD, (to_q, bias_NH), (to_k, 0.0))


def shared_projections(module: nn.Module) -> Numbers:
    """Queries and keys of the relative positions, by the matrices of the tokens (DeBERTa v2)."""
    assert isinstance(module, Attention)
    both = [(module.weights[name], module.biases[name]) for name in "qk"]
    return lambda tokens: range_projections(tokens.vectors_RD, *both)


def range_projections(vectors_RD: jax.Array, *projections: tuple[Weight, jax.Array | float]) -> jax.Array:
    """The query and the key of each range of relative positions, flattened to [2 R H, N] (arXiv 2006.03654).

    projections: weight and bias of queries, and of keys.
    """
    both = [jnp.einsum("RD,DNH->RNH", vectors_RD, use(w)) + b for w, b in projections]
    return rearrange(jnp.stack(both), "z R N H -> (z R H) N")
