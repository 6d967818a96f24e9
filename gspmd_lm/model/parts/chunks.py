"""Attention within chunks of a document (Llama 4)."""

import jax.numpy as jnp

from gspmd_lm.model.tokens import Tokens


def in_chunks(size: int, tokens: Tokens) -> Tokens:
    """The tokens for attention within chunks of `size` tokens: each chunk of a document becomes a segment."""
    positions_BT, length = tokens.positions_BT, tokens.positions_BT.shape[1]
    if length == 1 and tokens.slot is not None:  # a new token attends to the cached tokens of its chunk
        return tokens._replace(start_B=tokens.slot - positions_BT[:, 0] % size)
    if length <= size:
        return tokens
    segments_BT = jnp.zeros_like(positions_BT) if tokens.segments_BT is None else tokens.segments_BT
    return tokens._replace(segments_BT=segments_BT * -(-length // size) + positions_BT // size)
