"""Masked tokens: which tokens of a row are to be guessed, and what stands in their places."""

import dataclasses
from collections.abc import Mapping

import numpy as np


@dataclasses.dataclass(frozen=True)
class Masks:
    """The masks of BERT (arXiv 1810.04805): of the chosen tokens, 80% are masked, 10% are drawn, 10% stay.

    They are a function of `seed` and of the row's number in the sequence of all epochs. So they differ in each epoch,
    and are the same after a restart and in each process.
    """

    mask: int  # the id of the mask token
    vocab: int  # another token is drawn from [0, vocab)
    special: tuple[int, ...]  # ids that are never chosen; neither is padding
    share: float  # of the other tokens, about so many are chosen
    seed: int

    def put(self, arrays: Mapping[str, np.ndarray], numbers: np.ndarray) -> dict[str, np.ndarray]:
        """The arrays with masks among `tokens`, and as `targets` the true ids of the chosen tokens, and -1 elsewhere.

        All `token_types` are 0. numbers: of the rows, int64 [rows].
        """
        tokens = arrays["tokens"]
        drawn = np.empty((len(numbers), 3, tokens.shape[1]))  # in [0, 1): whether it is chosen, how, another token
        for i, number in enumerate(numbers):
            drawn[i] = np.random.Generator(np.random.Philox(key=[self.seed, number])).random(drawn.shape[1:])
        chosen = (drawn[:, 0] < self.share) & (arrays["segment_ids"] > 0) & ~np.isin(tokens, self.special)
        another = (drawn[:, 2] * self.vocab).astype(np.int32)
        shown = np.where(drawn[:, 1] < 0.8, np.int32(self.mask), np.where(drawn[:, 1] < 0.9, another, tokens))
        masked = {"tokens": np.where(chosen, shown, tokens), "targets": np.where(chosen, tokens, np.int32(-1))}
        return {**arrays, **masked, "token_types": np.zeros_like(tokens)}
