"""What stands before an encoder that hears sounds: two convolutions over frames (Whisper, arXiv 2212.04356)."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from gspmd_lm import config
from gspmd_lm.config.media import WINDOW
from gspmd_lm.model.block import BLOCK_INPUT, RESIDUAL
from gspmd_lm.model.ends import before_blocks
from gspmd_lm.model.mlp import ACTIVATIONS
from gspmd_lm.model.rope import sinusoids
from gspmd_lm.model.weights import bias, matrix, weight
from gspmd_lm.sharding.annotate import shard, use
from gspmd_lm.sharding.axes import SINUSOIDS
from gspmd_lm.sharding.matmuls import unreduced_matmul
from gspmd_lm.sharding.partial_sums import reduced

FRAMES = "frames: batch seq taps bands"
HIDDEN = "frames_hidden: batch seq taps mlp"
TAPS = 3  # frames that a convolution sees


def heard(
    module: nn.Module, cfg: config.ModelConfig, source: dict[str, jax.Array], dropout_key: jax.Array | None
) -> tuple[jax.Array, jax.Array | None]:
    """What the first block of an encoder reads, [B, S, D], and a dropout key for each row.

    `source` holds frames [B, S, WINDOW, bands], positions [B, S] and row [B]. A row has all frames that it hears, so
    that a sequence may be split anywhere: those around frame 2 s, of which the second convolution makes row s.
    """
    assert cfg.frames
    D, bands, gelu = cfg.embed, cfg.frames.bands, ACTIVATIONS["gelu"]
    conv_in = matrix(module, "conv_in", "taps bands mlp", (TAPS, bands, D), cfg)
    conv_out = matrix(module, "conv_out", "taps mlp embed", (TAPS, D, D), cfg)
    frames_BSAM = shard(source["frames"].astype(jnp.dtype(cfg.compute_dtype)), FRAMES)
    windows = [frames_BSAM[:, :, at : at + TAPS] for at in range(WINDOW - TAPS + 1)]
    hidden_BSAF = reduced(unreduced_matmul(jnp.stack(windows, axis=2), conv_in), HIDDEN, HIDDEN)
    hidden_BSAF = gelu(shard(hidden_BSAF + bias(module, "conv_in_bias", "mlp", (D,), cfg), HIDDEN))
    # Before the first frame of a sound, the second convolution sees nothing.
    begins_BS, first_A = source["positions"] == 0, jnp.arange(TAPS) == 0
    hidden_BSAF = shard(jnp.where((begins_BS[..., None] & first_A)[..., None], 0, hidden_BSAF), HIDDEN)
    x_BSD = reduced(unreduced_matmul(hidden_BSAF, conv_out), BLOCK_INPUT, RESIDUAL)
    x_BSD = shard(gelu(x_BSD + bias(module, "conv_out_bias", "embed", (D,), cfg)), RESIDUAL)
    table = weight(module, SINUSOIDS, "positions embed", (cfg.context, D), cfg, _sinusoids)
    x_BSD += use(table, jnp.float32)[source["positions"]].astype(x_BSD.dtype)
    return before_blocks(cfg, x_BSD, source, dropout_key)


def _sinusoids(key: jax.Array, shape: tuple[int, int], dtype: jnp.dtype = jnp.float32) -> jax.Array:
    """The values of the table, which training leaves as they are."""
    return sinusoids(jnp.arange(shape[0])[None], shape[1])[0].astype(dtype)
