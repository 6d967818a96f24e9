"""The decoder: it turns token ids into hidden states, and returns them with the table that makes their logits."""

from typing import NamedTuple

import flax.linen as nn
import jax

from gspmd_lm.model.cache import Cache
from gspmd_lm.model.ends import embed_tokens
from gspmd_lm.model.moe import RouterOutput
from gspmd_lm.model.stack import Stack
from gspmd_lm.sharding.annotate import Weight


class Decoded(NamedTuple):
    """What a decoder returns."""

    hidden_BTD: jax.Array  # or [B, T, W], if the table has a width of its own
    table: Weight  # the logits are the hidden states times this
    bias: Weight | None  # of the logits
    cache: Cache | None
    routed: RouterOutput | None  # [L, ...] for the layers with experts


class Decoder(Stack):
    """A stack of blocks from tokens to the hidden states before the logits."""

    @nn.compact
    def __call__(
        self, batch: dict[str, jax.Array], dropout_key: jax.Array | None = None, cache: Cache | None = None
    ) -> Decoded:
        """Embeds the tokens and runs the blocks.

        `batch` holds int32 arrays: tokens [B, T], positions [B, T], row [B] (its number in the global batch, for
        dropout), token_types [B, T] if the model has any, where texts are packed or padded segment_ids [B, T] (0 for
        padding), and places [B, T], the position of each token in its row, if rows are reordered (see
        kernels/context.py). Without `dropout_key` nothing is dropped.
        With a cache, it also holds slot [], where the T tokens begin, start [B], where each row's first token is, and
        length [B], how many tokens each row will have: positions that depend on it are those of a whole text.
        """
        x_BTD, table, keys_BT = embed_tokens(self, batch, dropout_key)
        return self.decode(x_BTD, table, keys_BT, batch, cache)

    def decode(
        self,
        x_BTD: jax.Array,
        table: Weight,
        keys_BT: jax.Array | None,
        batch: dict[str, jax.Array],
        cache: Cache | None,
    ) -> Decoded:
        """Hidden states from embedded tokens and their table. keys_BT: a dropout key for each token."""
        x_BTD, cache, routed = self.blocks(x_BTD, batch, keys_BT, cache, self.layer_inputs(x_BTD, batch))
        ends, x_BTD = self.ends, self.ends.head(self, x_BTD)
        return Decoded(x_BTD, ends.unembedding(self, table), ends.bias(self), cache, routed)

    def layer_inputs(self, x_BTD: jax.Array, batch: dict[str, jax.Array]) -> jax.Array | None:
        """The input that each layer reads beside the residual stream; None if there is none."""
        return None
