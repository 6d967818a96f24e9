"""Masked tokens: which tokens of a row are to be guessed, and what stands in their places."""

import dataclasses
from collections.abc import Mapping

import numpy as np


@dataclasses.dataclass(frozen=True)
class Masks:
    """The masks of BERT (arXiv 1810.04805): of the chosen tokens, 80% are masked, 10% are drawn, 10% stay. Or tokens in
    place of others, without a mask: all chosen ones are drawn.

    They are a function of `seed` and of the row's number in the sequence of all epochs. So they differ in each epoch,
    and are the same after a restart and in each process.
    """

    mask: int | None  # the id of the mask token; None: a model tells which tokens stand in place of others
    vocab: int  # another token is drawn from [0, vocab)
    special: tuple[int, ...]  # ids that are never chosen; neither is padding
    share: float  # of the other tokens, about so many are chosen
    seed: int

    def put(self, arrays: Mapping[str, np.ndarray], numbers: np.ndarray) -> dict[str, np.ndarray]:
        """The arrays with masks among `tokens`, and as `targets` the true ids of the chosen tokens, and -1 elsewhere.
        Without a mask, `targets` are 1 where another token stands, 0 where the true one does, and -1 for padding.

        All `token_types` are 0. numbers: of the rows, int64 [rows].
        """
        tokens = arrays["tokens"]
        drawn = np.empty((len(numbers), 3, tokens.shape[1]))  # in [0, 1): whether it is chosen, how, another token
        for i, number in enumerate(numbers):
            drawn[i] = np.random.Generator(np.random.Philox(key=[self.seed, number])).random(drawn.shape[1:])
        chosen = (drawn[:, 0] < self.share) & (arrays["segment_ids"] > 0) & ~np.isin(tokens, self.special)
        another = (drawn[:, 2] * self.vocab).astype(np.int32)
        if self.mask is None:
            read = np.where(chosen, another, tokens)
            targets = np.where(arrays["segment_ids"] > 0, read != tokens, np.int32(-1)).astype(np.int32)
            return {**arrays, "tokens": read, "targets": targets, "token_types": np.zeros_like(tokens)}
        shown = np.where(drawn[:, 1] < 0.8, np.int32(self.mask), np.where(drawn[:, 1] < 0.9, another, tokens))
        masked = {"tokens": np.where(chosen, shown, tokens), "targets": np.where(chosen, tokens, np.int32(-1))}
        return {**arrays, **masked, "token_types": np.zeros_like(tokens)}
