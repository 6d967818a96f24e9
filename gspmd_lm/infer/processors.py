"""Changes of logits before a token is chosen: penalties, biases, and tokens that may not come.

They mean what transformers' logits processors mean (src/transformers/generation/logits_process.py). They are chosen
before programs are compiled. Without any, the programs are the same as if there were none in this file.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

EMPTY = -1  # in the history of a text: no token


@dataclasses.dataclass(frozen=True)
class Processors:
    """The processors of a model. Those that are left at their defaults change nothing."""

    repetition_penalty: float = 1.0  # divides the positive logits of tokens that the text has, multiplies negative ones
    no_repeat_ngram_size: int = 0  # so many tokens never follow each other as they did before; 0 for no such size
    biases: tuple[tuple[tuple[int, ...], float], ...] = ()  # (tokens, what is added to the logit of the last of them)
    suppressed: tuple[int, ...] = ()  # tokens that never come
    suppressed_first: tuple[int, ...] = ()  # likewise, as the first token that is not given
    min_length: int = 0  # tokens of a text, its prompt included, before one of `ends` may come
    min_new_tokens: int = 0  # likewise, without its prompt
    ends: tuple[int, ...] = ()
    given: int = 0  # new tokens that every text begins with: nothing changes their logits

    def __call__(
        self, logits_BV: jax.Array, history_BT: jax.Array, slot: jax.Array, length_B: jax.Array, new: jax.Array
    ) -> jax.Array:
        """The logits of the tokens that come into `slot`, [B, V]: -inf for a token that may not come.

        history_BT: the tokens of each text so far, up to `slot`, EMPTY before its first one. length_B: how many they
        are. new: how many of them were generated.
        """
        as_given_BV = logits_BV
        if self.biases:
            logits_BV = logits_BV + self._bias(logits_BV, history_BT, slot)
        if self.repetition_penalty != 1:
            penalised_BV = jnp.where(
                logits_BV < 0, logits_BV * self.repetition_penalty, logits_BV / self.repetition_penalty
            )
            logits_BV = jnp.where(_is_in_row(logits_BV, history_BT), penalised_BV, logits_BV)
        never_BV = self._never(logits_BV, length_B, new)
        if 0 < self.no_repeat_ngram_size <= history_BT.shape[1]:
            never_BV |= _is_in_row(logits_BV, self._repeated_tokens(history_BT, slot))
        processed_BV = jnp.where(never_BV, -jnp.inf, logits_BV)
        return jnp.where(new < self.given, as_given_BV, processed_BV) if self.given else processed_BV

    def _bias(self, logits_BV: jax.Array, history_BT: jax.Array, slot: jax.Array) -> jax.Array:
        bias_BV = jnp.zeros_like(logits_BV)
        for length in sorted({len(tokens) for tokens, _ in self.biases}):
            rows = [(tokens, bias) for tokens, bias in self.biases if len(tokens) == length]
            tokens_NL = np.asarray([tokens for tokens, _ in rows], np.int32)
            bias_N = np.asarray([bias for _, bias in rows], np.float32)
            before_BL = _last(history_BT, slot, length - 1)
            follows_BN = (before_BL[:, None] == tokens_NL[:, :-1]).all(-1)
            bias_BV = bias_BV.at[:, tokens_NL[:, -1]].add(jnp.where(follows_BN, bias_N, 0), mode="drop")
        return bias_BV

    def _never(self, logits_BV: jax.Array, length_B: jax.Array, new: jax.Array) -> jax.Array:
        def is_in(ids: tuple[int, ...]) -> jax.Array:
            return jnp.zeros(logits_BV.shape[-1], bool).at[jnp.asarray(ids, jnp.int32)].set(True, mode="drop")

        never_BV = is_in(self.suppressed) | (is_in(self.suppressed_first) & (new == self.given))
        is_short_B = (length_B < self.min_length) | (new < self.min_new_tokens)
        return never_BV | (is_in(self.ends) & is_short_B[:, None])

    def _repeated_tokens(self, history_BT: jax.Array, slot: jax.Array) -> jax.Array:
        """The tokens that came after what the text ends with, EMPTY elsewhere, [B, T - n + 1]."""
        before = self.no_repeat_ngram_size - 1
        last_BL, count = _last(history_BT, slot, before), history_BT.shape[1] - before
        alike = [history_BT[:, at : at + count] == last_BL[:, at, None] for at in range(before)]
        is_same_BT = jnp.all(jnp.stack(alike), 0) if alike else True
        is_whole_B1 = (last_BL != EMPTY).all(-1, keepdims=True)
        return jnp.where(is_same_BT & is_whole_B1, history_BT[:, before:], EMPTY)


def begin_history(tokens_BT: jax.Array, slots: int) -> jax.Array:
    """The history of texts, int32 [B, slots], that so far have `tokens_BT` alone."""
    return jnp.pad(tokens_BT, ((0, 0), (0, slots - tokens_BT.shape[1])), constant_values=EMPTY)


def with_tokens(history_BT: jax.Array, tokens_B: jax.Array, slot: jax.Array) -> jax.Array:
    """The history with the tokens in `slot`. The last new token, which has no slot, is left out."""
    return history_BT.at[:, slot].set(tokens_B, mode="drop")


def _last(history_BT: jax.Array, slot: jax.Array, count: int) -> jax.Array:
    """The `count` tokens before `slot`, [B, count], EMPTY for those that a text does not have."""
    slots = slot - count + jnp.arange(count)
    return jnp.where(slots >= 0, history_BT[:, jnp.maximum(slots, 0)], EMPTY)


def _is_in_row(logits_BV: jax.Array, tokens_BT: jax.Array) -> jax.Array:
    """Whether each token of the vocabulary is among those of a row, [B, V]."""
    V = logits_BV.shape[-1]
    rows_B1 = jnp.arange(len(tokens_BT))[:, None]
    return jnp.zeros(logits_BV.shape, bool).at[rows_B1, jnp.where(tokens_BT < 0, V, tokens_BT)].set(True, mode="drop")
