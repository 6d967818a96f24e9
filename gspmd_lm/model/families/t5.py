"""Encoder-decoders: the layers of a decoder attend to the output of an encoder (T5, arXiv 1910.10683; BART)."""

from collections.abc import Callable
from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from gspmd_lm.config import ModelConfig
from gspmd_lm.model.cache import Cache
from gspmd_lm.model.decoder import Decoded, Decoder
from gspmd_lm.model.ends import embed_tokens
from gspmd_lm.model.families.text import Arrays, Family, Inputs, text_inputs, text_prompt_batch
from gspmd_lm.model.objectives import TOKEN_SPEC, Input, Shape
from gspmd_lm.model.parts.memory import MEMORY
from gspmd_lm.model.stack import Stack
from gspmd_lm.sharding.annotate import Weight, shard

SOURCE = "source_"  # the arrays of the source have names that begin with it


class Encoder(Stack):
    """A stack of blocks from the tokens of a source to the encoder output."""

    @nn.compact
    def __call__(
        self,
        batch: dict[str, jax.Array],
        table: Weight,
        dropout_key: jax.Array | None,
        first: Callable[[jax.Array], jax.Array] = lambda x_BTD: x_BTD,
    ) -> dict[str, jax.Array]:
        """The decoder's batch: the encoder output, memory [B, S, D], and memory_segment_ids [B, S] replace the source.

        table: the token table. first: a function that is applied to embedded tokens before positions are added.
        `batch`: see `EncoderDecoder`.
        """
        source = {name.removeprefix(SOURCE): x for name, x in batch.items() if name.startswith(SOURCE)}
        source |= {"row": batch["row"]}
        key = dropout_key if dropout_key is None else jax.random.fold_in(dropout_key, 1)
        x_BTD, keys_BT = self.before_blocks(source, table, key, first)
        memory_BSD = shard(self.blocks(x_BTD, source, keys_BT)[0], MEMORY)
        memory = {"memory": memory_BSD, "memory_segment_ids": source["segment_ids"]}
        return {name: x for name, x in batch.items() if not name.startswith(SOURCE)} | memory

    def before_blocks(
        self,
        source: dict[str, jax.Array],
        table: Weight,
        dropout_key: jax.Array | None,
        first: Callable[[jax.Array], jax.Array],
    ) -> tuple[jax.Array, jax.Array | None]:
        """The input of the first block, [B, S, D], and a dropout key for each token."""
        x_BSD, _, keys_BS = embed_tokens(self, source, dropout_key, table, first)
        return x_BSD, keys_BS


class EncoderDecoder(Decoder):
    """An encoder of sources and a decoder of texts, which share the token table."""

    encoder: ClassVar[type[Encoder]] = Encoder

    @nn.compact
    def __call__(
        self, batch: dict[str, jax.Array], dropout_key: jax.Array | None = None, cache: Cache | None = None
    ) -> Decoded:
        """`batch` is that of `Decoder`, with source_tokens, source_positions and source_segment_ids [B, S].

        A token attends to the source whose segment has its own's number. Once a cache has the keys of the source,
        `batch` holds memory_segment_ids [B, S] instead of the source.
        """
        cfg = self.cfg
        x_BTD, table, keys_BT = embed_tokens(self, batch, dropout_key)
        if f"{SOURCE}positions" in batch:
            assert cfg.encoder_config
            batch = self.encoder(cfg.encoder_config, name="encoder")(batch, table, dropout_key)
        return self.decode(x_BTD, table, keys_BT, batch, cache)


def source_inputs(cfg: ModelConfig, shape: Shape) -> Inputs:
    """The arrays that `EncoderDecoder` reads."""
    source = Input((shape.batch, shape.source_seq), "int32", TOKEN_SPEC)
    names = (f"{SOURCE}{name}" for name in ("tokens", "positions", "segment_ids"))
    return text_inputs(cfg, shape._replace(segments=True)) | dict.fromkeys(names, source)


def source_prompt_batch(cfg: ModelConfig, prompts: jax.Array, ahead_BT: jax.Array) -> Arrays:
    """The batch of prompts as sources, whose texts begin with the start token."""
    assert cfg.encoder
    start_B1 = jnp.full((len(prompts), 1), cfg.encoder.start_token, jnp.int32)
    text = {"tokens": start_B1, "positions": jnp.zeros_like(start_B1), "segment_ids": jnp.ones_like(start_B1)}
    source = text_prompt_batch(cfg, prompts, ahead_BT)
    return {f"{SOURCE}{name}": x for name, x in source.items()} | text


FAMILY = Family(
    module=EncoderDecoder,
    fits=lambda cfg: cfg.encoder,
    inputs=source_inputs,
    prompt_batch=source_prompt_batch,
    start_token=lambda cfg: cfg.encoder.start_token,
)
