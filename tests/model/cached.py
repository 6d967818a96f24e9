"""Hidden states of rows that are computed token by token, with a cache, beside those of whole rows."""

import jax
import jax.numpy as jnp

from gspmd_lm.model.cache import empty_cache
from gspmd_lm.model.transformer import decode, extend


def both_ways(cfg, params, tokens, starts, prompt):
    """The hidden states from the last token of the prompts on: token by token with a cache, and of whole rows.

    tokens: [B, T], of which the first `prompt` are the prompts. starts: [B], how many of each row's tokens are padding.
    """
    rows, length = tokens.shape
    ahead = jnp.arange(length)[None] - starts[:, None]
    batch = {"tokens": tokens, "positions": jnp.maximum(ahead, 0), "row": jnp.arange(rows)}
    segments = (ahead >= 0).astype(jnp.int32)

    def piece(first, last):
        found = {name: batch[name][:, first:last] for name in ("tokens", "positions")}
        return found | {"slot": jnp.array(first), "start": starts, "row": batch["row"],
                        "length": jnp.full(rows, length)}  # fmt: skip

    @jax.jit
    def one_piece(batch, cache):
        x, *_, cache = extend(cfg, params, batch, cache)
        return x, cache

    prompts = piece(0, prompt) | {"segment_ids": segments[:, :prompt]}
    first, cache = one_piece(prompts, empty_cache(cfg, rows, length))
    found = [first[:, -1:]]
    for at in range(prompt, length):
        x, cache = one_piece(piece(at, at + 1), cache)
        found.append(x)
    whole = jax.jit(lambda: decode(cfg, params, batch | {"segment_ids": segments})[0])()
    return jnp.concatenate(found, 1), whole[:, prompt - 1 :]
