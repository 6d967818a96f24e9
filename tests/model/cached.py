"""Hidden states of rows that are computed token by token, with a cache, beside those of whole rows."""

import jax
import numpy as np

from gspmd_lm.model.cache import empty_cache
from gspmd_lm.model.families import decode, extend


def both_ways(cfg, params, tokens, starts, prompt):
    """The hidden states from the last token of the prompts on: token by token with a cache, and of whole rows.

    tokens: [B, T], of which the first `prompt` are the prompts. starts: [B], how many of each row's tokens are padding.
    """
    rows, length = tokens.shape
    ahead = np.arange(length, dtype=np.int32)[None] - starts[:, None]
    batch = {"tokens": tokens, "positions": np.maximum(ahead, 0), "row": np.arange(rows)}
    segments = (ahead >= 0).astype(np.int32)

    def piece(first, last):
        found = {name: batch[name][:, first:last] for name in ("tokens", "positions")}
        return found | {"slot": np.array(first), "start": starts, "row": batch["row"],
                        "length": np.full(rows, length)}  # fmt: skip

    @jax.jit
    def one_piece(params, batch, cache=None):
        x, *_, cache = extend(cfg, params, batch, cache or empty_cache(cfg, rows, length))
        return x, cache

    x, cache = one_piece(params, piece(0, prompt) | {"segment_ids": segments[:, :prompt]})
    found = [np.asarray(x)[:, -1:]]
    for at in range(prompt, length):
        x, cache = one_piece(params, piece(at, at + 1), cache)
        found.append(np.asarray(x))
    whole = jax.jit(lambda params: decode(cfg, params, batch | {"segment_ids": segments})[0])(params)
    return np.concatenate(found, 1), np.asarray(whole)[:, prompt - 1 :]
