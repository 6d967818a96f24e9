"""The facts about a family: its module, arrays, objective and prompts. The defaults are those of the plain decoder."""

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from gspmd_lm.config import Config, ModelConfig
from gspmd_lm.model.decoder import Decoder
from gspmd_lm.model.loss import TOKENS
from gspmd_lm.model.objectives import ROW_SPEC, TOKEN_SPEC, Input, Objective, Shape

Arrays = dict[str, jax.Array]
Inputs = dict[str, Input]


def text_inputs(cfg: ModelConfig, shape: Shape) -> Inputs:
    """The arrays that `Decoder` reads."""
    tokens = Input((shape.batch, shape.seq), "int32", TOKEN_SPEC)
    names = (
        ["tokens", "positions"] + ["segment_ids"] * shape.segments + ["token_types"] * (cfg.embedding.token_types > 0)
    )
    return dict.fromkeys(names, tokens) | {"row": Input((shape.batch,), "int32", ROW_SPEC)}


def text_prompts(cfg: ModelConfig, rows: int, seq: int) -> Input:
    """The array of prompts: tokens."""
    return Input((rows, seq), "int32", TOKEN_SPEC)


def text_prompt_batch(cfg: ModelConfig, prompts: jax.Array, ahead_BT: jax.Array) -> Arrays:
    """The batch of texts that continue their prompts. Padding is a segment of its own."""
    given = {"positions": jnp.maximum(ahead_BT, 0), "segment_ids": (ahead_BT >= 0).astype(jnp.int32)}
    return {"tokens": prompts} | given


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """A kind of model. The defaults are those of the plain decoder."""

    fits: Callable[[ModelConfig], object]  # whether a config describes a model of this family
    module: Callable[[ModelConfig], nn.Module] = Decoder
    objective: Callable[[Config], Objective] = lambda config: TOKENS
    inputs: Callable[[ModelConfig, Shape], Inputs] = text_inputs  # the arrays of a batch that the module reads
    smallest: Callable[[Any], Shape] = lambda cfg: Shape()  # the smallest batch that makes all weights
    untrained_inputs: Callable[[ModelConfig], Inputs] = lambda cfg: {}  # for weights that training leaves out
    # Generation: the array that holds prompts, from the number of rows and the greatest length in tokens, or rows of an
    # image or sound; and the batch of a prefill, from that array and the positions of tokens, negative for padding.
    prompts: Callable[[ModelConfig, int, int], Input] = text_prompts
    prompt_batch: Callable[[ModelConfig, jax.Array, jax.Array], Arrays] = text_prompt_batch
    # The token that a generated text begins with; None if a text continues its prompt.
    start_token: Callable[[Any], int | None] = lambda cfg: None

    def dummy(self, cfg: ModelConfig) -> Arrays:
        """The smallest batch with which the module makes all its weights, filled with zeros."""
        inputs = self.inputs(cfg, self.smallest(cfg)) | self.untrained_inputs(cfg)
        return {name: jnp.zeros(one.shape, one.dtype) for name, one in inputs.items()}


FAMILY = Family(fits=lambda cfg: True)
