"""A convolution of tokens beside the first layer (DeBERTa v2 xlarge)."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from gspmd_lm import config
from gspmd_lm.model.block import BLOCK_INPUT, RESIDUAL
from gspmd_lm.model.norm import Change, Norm
from gspmd_lm.model.parts.activations import ACTIVATIONS
from gspmd_lm.model.parts.dropout import dropout
from gspmd_lm.model.tokens import Tokens
from gspmd_lm.model.weights import bias, matrix
from gspmd_lm.sharding.annotate import shard
from gspmd_lm.sharding.matmuls import unreduced_matmul
from gspmd_lm.sharding.partial_sums import reduced


def add_convolution(cfg: config.ModelConfig, module: nn.Module, x_BTD: jax.Array, tokens: Tokens) -> Change:
    """The change of the first layer's output: the convolution of its input is added, and the sum is normed."""
    convolved_BTD = convolve(cfg, module, x_BTD, tokens)

    def add(x_BTD: jax.Array) -> jax.Array:
        return shard(Norm(cfg, name="convolution_norm")(x_BTD + convolved_BTD), RESIDUAL)

    return add


def convolve(cfg: config.ModelConfig, module: nn.Module, x_BTD: jax.Array, tokens: Tokens) -> jax.Array:
    """A convolution over neighbouring tokens of the same text, and its activation, [B, T, D].

    `module` holds the parameters.
    """
    assert cfg.convolution
    taps, T = cfg.convolution.taps, x_BTD.shape[1]
    before = after = taps // 2
    segments_BT = jnp.zeros(x_BTD.shape[:2], jnp.int32) if tokens.segments_BT is None else tokens.segments_BT
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
    return ACTIVATIONS[cfg.convolution.activation](dropout(y_BTD, cfg.dropout, tokens.keys_BT, 1))
