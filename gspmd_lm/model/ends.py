"""The ends of a text model: the embedding of tokens before its blocks, and the way from its last block to logits.

compose.py chooses the steps that a family adds to them. A step that has weights makes them in the module that it gets.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax

from gspmd_lm import config
from gspmd_lm.model.block import BLOCK_INPUT, RESIDUAL
from gspmd_lm.model.norm import Change, same
from gspmd_lm.model.weights import matrix
from gspmd_lm.sharding.annotate import Weight, shard
from gspmd_lm.sharding.matmuls import look_up

EMBEDDED = "embedded: batch seq embedding_width"

Batch = dict[str, jax.Array]
Step = Callable[[nn.Module, jax.Array, Batch], jax.Array]  # on embedded tokens, [B, T, W]


class Ends(NamedTuple):
    """The steps at the ends of a text model."""

    from_table: Sequence[Step] = ()  # on rows of the token table
    additions: Sequence[Step] = ()  # on embedded tokens, such as positions
    # The dropout before the first block, and a dropout key for each token, from the key of the batch.
    drop: Callable[..., tuple[jax.Array, jax.Array | None]] = lambda x_BTD, batch, key: (x_BTD, None)
    last: Sequence[Step] = ()  # on the input of the first block
    # From the output of the last block to the hidden states that the table of the logits multiplies, [B, T, W].
    head: Callable[[nn.Module, jax.Array], jax.Array] = lambda module, x_BTD: x_BTD
    unembedding: Callable[[nn.Module, Weight], Weight] = lambda module, table: table  # that of the logits
    bias: Callable[[nn.Module], Weight | None] = lambda module: None  # of the logits


@functools.cache
def table_axis(cfg: config.ModelConfig) -> tuple[int, str]:
    """The width of the token table, and its logical axis."""
    return (cfg.embedding.width, "embedding_width") if cfg.embedding.width else (cfg.embed, "embed")


@functools.cache
def table_specs(cfg: config.ModelConfig) -> tuple[str, str]:
    """The specs of embeddings of the token table's width: as they are reduced, and as a matmul gathers them."""
    return {"embed": (RESIDUAL, BLOCK_INPUT), "embedding_width": (EMBEDDED, EMBEDDED)}[table_axis(cfg)[1]]


def make_table(cfg: config.ModelConfig, name: str, module: nn.Module) -> Weight:
    """A table with a row for each token of the vocabulary."""
    width, axis = table_axis(cfg)
    return matrix(module, name, f"vocab {axis}", (cfg.vocab_rows, width), cfg)


def own_unembedding(cfg: config.ModelConfig, module: nn.Module, table: Weight) -> Weight:
    """A table of the logits besides the token table."""
    return make_table(cfg, "unembedding", module)


def embed_tokens(
    module: Any,
    batch: Batch,
    dropout_key: jax.Array | None,
    table: Weight | None = None,
    first: Change = same,
) -> tuple[jax.Array, Weight, jax.Array | None]:
    """The input of a text model's first block, [B, T, D], the token table, and a dropout key for each token.

    `module`, a `stack.Stack`, holds the parameters, except a token table that is passed in. `batch` is that of
    `decoder.Decoder`. first: a function that is applied to embedded tokens before positions are added.
    """
    ends, (reduced_spec, gathered_spec) = module.ends, table_specs(module.cfg)
    table = table or make_table(module.cfg, "embedding", module)
    x_BTD = look_up(table, shard(batch["tokens"], "tokens: batch seq"), gathered_spec, reduced_spec)
    x_BTD = first(apply_steps(ends.from_table, module, x_BTD, batch))
    x_BTD, keys_BT = ends.drop(apply_steps(ends.additions, module, x_BTD, batch), batch, dropout_key)
    return apply_steps(ends.last, module, x_BTD, batch), table, keys_BT


def apply_steps(steps: Sequence[Step], module: nn.Module, x_BTD: jax.Array, batch: Batch) -> jax.Array:
    """Embedded tokens after all steps, the first one first."""
    return functools.reduce(lambda x_BTD, step: step(module, x_BTD, batch), steps, x_BTD)
