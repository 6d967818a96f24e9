"""Steps that some families add to the heads of attention: biases, a gate, sinks, and zeros for padding."""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp

from gspmd_lm import config
from gspmd_lm.model.kernels.attention import OUT, Q
from gspmd_lm.model.tokens import Tokens
from gspmd_lm.model.weights import bias, matrix
from gspmd_lm.sharding.annotate import like, platform, shard, split
from gspmd_lm.sharding.matmuls import project
from gspmd_lm.sharding.partial_sums import Unreduced


def add_bias(x_BTNH: jax.Array, bias_NH: jax.Array | None) -> jax.Array:
    """Queries, keys or values plus their bias, if they have one.

    On GPUs, heads are flattened first: cuBLAS fuses a bias of one dimension with the matmul.
    """
    if bias_NH is None:
        return x_BTNH
    if platform() != "gpu" or split("q", "head_dim").num_shards > 1:
        return x_BTNH + bias_NH
    return (x_BTNH.reshape(*x_BTNH.shape[:2], -1) + bias_NH.reshape(-1)).reshape(x_BTNH.shape)


def make_gate(cfg: config.ModelConfig, module: nn.Module) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """A function that multiplies the result of attention by sigmoid(x w) (Qwen3-Next)."""
    gate = matrix(module, "wg", "embed heads head_dim", (cfg.embed, cfg.head_rows, cfg.head_dim), cfg)

    def multiply(in_BTD: jax.Array, out_BTNH: jax.Array) -> jax.Array:
        return shard(out_BTNH * jax.nn.sigmoid(like(project(in_BTD, gate), Q)), OUT)

    return multiply


def make_sinks(cfg: config.ModelConfig, module: nn.Module) -> Callable[[Tokens], jax.Array]:
    """Attention sinks: a learned logit of each head that takes part in its softmax without a key (gpt-oss)."""
    sinks_N = bias(module, "sinks", "heads", (cfg.head_rows,), cfg)
    return lambda tokens: sinks_N


def make_out_bias(cfg: config.ModelConfig, module: nn.Module) -> Callable[[Unreduced], Unreduced]:
    """A function that adds a bias to the output of attention."""
    bias_D = bias(module, "bo", "embed", (cfg.embed,), cfg)
    return lambda y: y + bias_D


def mask_padded_heads(cfg: config.ModelConfig, out_BTNH: jax.Array) -> jax.Array:
    """The result of attention with zeros in the heads that are padding, so that they add nothing."""
    return jnp.where((jnp.arange(cfg.head_rows) < cfg.heads)[:, None], out_BTNH, 0)
