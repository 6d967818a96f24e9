"""What a kind of model answers about itself: its module, the arrays of a batch, its objective, and its prompts."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from gspmd_lm.config import Config, ModelConfig
from gspmd_lm.model.decoder import Decoder
from gspmd_lm.model.objectives import ROW_SPEC, TOKEN_SPEC, TOKENS, Input, Objective, Shape


class Family:
    """A kind of model. The answers here are those of the plain decoder, which every model of texts has by default."""

    def fits(self, cfg: ModelConfig) -> bool:
        """Whether a config describes a model of this family."""
        return True

    def module(self, cfg: ModelConfig) -> nn.Module:
        """The module, with `cfg` as its attribute."""
        return Decoder(cfg)

    def objective(self, config: Config) -> Objective:
        """What is predicted, and the arrays of a batch that it needs."""
        return TOKENS

    def inputs(self, cfg: ModelConfig, shape: Shape) -> dict[str, Input]:
        """The arrays that the module reads: what it calls `batch` explains them."""
        tokens = Input((shape.batch, shape.seq), "int32", TOKEN_SPEC)
        names = ["tokens", "positions"] + ["segment_ids"] * shape.segments + ["token_types"] * (cfg.token_types > 0)
        return dict.fromkeys(names, tokens) | {"row": Input((shape.batch,), "int32", ROW_SPEC)}

    def smallest(self, cfg: ModelConfig) -> Shape:
        """The sizes of the smallest batch that makes all weights."""
        return Shape()

    def dummy(self, cfg: ModelConfig) -> dict[str, jax.Array]:
        """The smallest batch that makes all weights, of zeros."""
        inputs = self.inputs(cfg, self.smallest(cfg))
        return {name: jnp.zeros(one.shape, one.dtype) for name, one in inputs.items()}

    # Generation

    def prompts(self, cfg: ModelConfig, rows: int, seq: int) -> Input:
        """The array that holds prompts of up to `seq` tokens, or of so many rows of an image or sound."""
        return Input((rows, seq), "int32", TOKEN_SPEC)

    def prompt_batch(self, cfg: ModelConfig, prompts: Any, ahead_BT: jax.Array) -> dict[str, jax.Array]:
        """The batch that fills a cache with `prompts`. ahead_BT: the position of each token, negative for padding."""
        # Padding is a segment of its own.
        given = {"positions": jnp.maximum(ahead_BT, 0), "segment_ids": (ahead_BT >= 0).astype(jnp.int32)}
        return {"tokens": prompts} | given

    def start_token(self, cfg: ModelConfig) -> int | None:
        """The token that a generated text begins with, where the prompt is no part of it; None where the text goes on
        from its prompt.
        """
        return None


FAMILY = Family()
