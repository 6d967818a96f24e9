"""Whisper: an encoder-decoder whose encoder reads sounds through two convolutions over frames (arXiv 2212.04356)."""

import dataclasses
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp

from gspmd_lm import config
from gspmd_lm.config.media import WINDOW
from gspmd_lm.model.block import BLOCK_INPUT, RESIDUAL
from gspmd_lm.model.families import t5
from gspmd_lm.model.objectives import Input, Shape
from gspmd_lm.model.parts.activations import ACTIVATIONS
from gspmd_lm.model.parts.dropout import before_blocks
from gspmd_lm.model.parts.embeddings import sinusoids
from gspmd_lm.model.weights import bias, matrix, weight
from gspmd_lm.sharding.annotate import Weight, shard, use
from gspmd_lm.sharding.axes import SINUSOIDS
from gspmd_lm.sharding.matmuls import unreduced_matmul
from gspmd_lm.sharding.partial_sums import reduced

FRAMES = "frames: batch seq taps bands"
HIDDEN = "frames_hidden: batch seq taps mlp"
_READ, _HEARD = f"{t5.SOURCE}tokens", f"{t5.SOURCE}frames"  # the source of an encoder of texts, and of this one
TAPS = 3  # frames that a convolution sees


class SoundEncoder(t5.Encoder):
    """A stack of blocks from the frames of a sound to the encoder output."""

    def before_blocks(
        self,
        source: dict[str, jax.Array],
        table: Weight,
        dropout_key: jax.Array | None,
        first: Callable[[jax.Array], jax.Array],
    ) -> tuple[jax.Array, jax.Array | None]:
        """See `embed_frames`."""
        return embed_frames(self, self.cfg, source, dropout_key)


class SoundDecoder(t5.EncoderDecoder):
    """An encoder of sounds and a decoder of the texts that are spoken in them.

    Instead of source_tokens, its batch holds source_frames, which `embed_frames` reads.
    """

    encoder = SoundEncoder


def embed_frames(
    module: nn.Module, cfg: config.ModelConfig, source: dict[str, jax.Array], dropout_key: jax.Array | None
) -> tuple[jax.Array, jax.Array | None]:
    """The input of an encoder's first block, [B, S, D], and a dropout key for each token.

    `source` holds frames [B, S, WINDOW, bands], positions [B, S] and row [B]. Token s has all frames that the two
    convolutions read for it, those around frame 2 s, so that a sequence may be split anywhere.
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


def _sinusoids(key: jax.Array, shape: tuple[int, int], dtype: jnp.dtype) -> jax.Array:
    """The values of the table, which training does not change."""
    return sinusoids(jnp.arange(shape[0])[None], shape[1])[0].astype(dtype)


def frames_input(cfg: config.ModelConfig, rows: int, seq: int) -> Input:
    """The array of prompts: the frames of sounds."""
    assert cfg.frames
    return Input((rows, seq, WINDOW, cfg.frames.bands), "float32", FRAMES)


def _inputs(cfg: config.ModelConfig, shape: Shape) -> dict[str, Input]:
    inputs = t5.source_inputs(cfg, shape) | {_HEARD: frames_input(cfg, shape.batch, shape.source_seq)}
    return {name: one for name, one in inputs.items() if name != _READ}


def _prompt_batch(cfg: config.ModelConfig, prompts: jax.Array, ahead_BT: jax.Array) -> dict[str, jax.Array]:
    batch = t5.source_prompt_batch(cfg, prompts, ahead_BT)
    return {_HEARD if name == _READ else name: x for name, x in batch.items()}


FAMILY = dataclasses.replace(
    t5.FAMILY,
    module=SoundDecoder,
    fits=lambda cfg: cfg.frames,
    inputs=_inputs,
    prompts=frames_input,
    prompt_batch=_prompt_batch,
)
