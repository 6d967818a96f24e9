"""The next token from logits: greedy, or drawn after temperature, top-k, top-p and min-p, in this order.

The filters mean what transformers' logits warpers mean. All settings are traced, so one program serves them all.
"""

import dataclasses
import math
from numbers import Real
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gspmd_lm.config import Encoder
from gspmd_lm.errors import InputError, is_whole_number

NO_TOKEN = 2**31 - 1  # what is chosen where a score is not a number


class SamplingSettings(NamedTuple):
    """The scalars that a compiled program takes: arrays, shapes or shardings."""

    seed: Any  # uint32
    temperature: Any  # float32; 0 is greedy
    top_k: Any  # int32; 0 keeps all
    top_p: Any  # float32; 1 keeps all
    min_p: Any  # float32; 0 keeps all


class Choice(NamedTuple):
    """The token chosen for each row, int32 [B], and its lead over the second best one, float32 [B].

    For a greedy choice, the lead is the gap between the two best logits. For a drawn token, it is the gap between the
    two best of the logits that the filters left, each with its noise. Below about 1e-3, another order of float32 sums
    can change the choice.
    """

    tokens_B: Any
    gap_B: Any


@dataclasses.dataclass(frozen=True)
class Sampling:
    """The options of sampling. Raises InputError that lists every value out of range."""

    temperature: float = 0.0  # 0: always the best token
    top_k: int = 0  # only the k best; 0 means all
    top_p: float = 1.0  # only the fewest best tokens whose probabilities reach p
    min_p: float = 0.0  # only tokens at least min_p times as likely as the best one
    seed: int = 0

    def __post_init__(self):
        wrong = [
            f"{name}={getattr(self, name)!r}: {must}"
            for name, good, must in (
                (
                    "temperature",
                    _is_within(self.temperature, 0, math.inf) and self.temperature != math.inf,
                    "must be a number: 0 (greedy) or above",
                ),
                (
                    "top_k",
                    is_whole_number(self.top_k, 0) and self.top_k < 2**31,
                    "must be a whole number from 1, or 0 to keep all tokens",
                ),
                ("top_p", _is_within(self.top_p, 0, 1) and self.top_p > 0, "must be a number above 0 and up to 1"),
                ("min_p", _is_within(self.min_p, 0, 1), "must be a number from 0 to 1"),
                (
                    "seed",
                    is_whole_number(self.seed, 0) and self.seed < 2**32,
                    "must be a whole number from 0 to 4294967295",
                ),
            )
            if not good
        ]
        if wrong:
            raise InputError(
                "\n".join([*wrong, "  fix   --temperature=0.8 --top_k=50 --top_p=0.95 --min_p=0 --seed=0"])
            )

    @property
    def settings(self) -> SamplingSettings:
        """The settings as a compiled program takes them."""
        return SamplingSettings(
            np.uint32(self.seed),
            np.float32(self.temperature),
            np.int32(self.top_k),
            np.float32(self.top_p),
            np.float32(self.min_p),
        )


def _is_within(value: Any, least: float, most: float) -> bool:
    return isinstance(value, Real) and least <= float(value) <= most


def choose(logits_BV: jax.Array, settings: SamplingSettings, number_B: jax.Array, position_B: jax.Array) -> Choice:
    """The next token of each row. logits_BV: float32, not padded, split by rows or not at all.

    The noise depends on nothing but the seed, the number of the row's prompt and the position that the token will
    have in its text: not on the batch that the row is in, nor on how arrays are split.
    """

    def draw_tokens() -> jax.Array:
        kept_BV = filter_scores(logits_BV / settings.temperature, settings)
        return kept_BV + noise(settings.seed, number_B, position_B, logits_BV.shape[-1])

    choice = best(jax.lax.cond(settings.temperature > 0, draw_tokens, lambda: logits_BV))
    return choice._replace(tokens_B=jnp.where(jnp.isnan(logits_BV).any(-1), NO_TOKEN, choice.tokens_B))


def mask_forbidden(logits_BV: jax.Array, position_B: jax.Array, encoder: Encoder) -> jax.Array:
    """The logits of the tokens that may stand at a position of a text, from 1 on; -inf for the others.

    A text begins with the encoder's first tokens.
    """
    tokens_V, first = jnp.arange(logits_BV.shape[-1], dtype=jnp.int32), jnp.asarray(encoder.first_tokens, jnp.int32)

    def is_in(ids: tuple[int, ...]) -> jax.Array:
        return jnp.zeros_like(tokens_V, bool).at[jnp.asarray(ids, jnp.int32)].set(True)

    position_B1, count = position_B[:, None], len(encoder.first_tokens)
    never_BV = is_in(encoder.suppressed) | (is_in(encoder.suppressed_first) & (position_B1 == count + 1))
    if count:
        others_BV = tokens_V != first[jnp.clip(position_B1 - 1, 0, count - 1)]
        never_BV = jnp.where(position_B1 <= count, others_BV, never_BV)
    return jnp.where(never_BV, -jnp.inf, logits_BV)


def best(scores_BV: jax.Array) -> Choice:
    """The first token with the highest score of each row, or NO_TOKEN, and its lead over the second best one."""
    places_V = jnp.arange(scores_BV.shape[-1], dtype=jnp.int32)
    highest_B = scores_BV.max(-1)
    # Two plain reductions, because argmax reduces pairs, which CPUs do one by one.
    tokens_B = jnp.where(scores_BV == highest_B[:, None], places_V, jnp.int32(NO_TOKEN)).min(-1)
    others_BV = jnp.where(places_V == tokens_B[:, None], -jnp.inf, scores_BV)
    return Choice(tokens_B, highest_B - others_BV.max(-1))


def filter_scores(scores_BV: jax.Array, settings: SamplingSettings) -> jax.Array:
    """The scores that top-k, top-p and min-p leave, -inf elsewhere. Of equal scores at a border, all are kept."""
    V = scores_BV.shape[-1]

    def filter_by_rank(scores_BV: jax.Array) -> jax.Array:
        """The scores that top-k and top-p leave, from one sort."""
        sorted_BV = jnp.sort(scores_BV, axis=-1, descending=True)
        k = jnp.where(settings.top_k > 0, jnp.minimum(settings.top_k, V), V)
        kth_B1 = jax.lax.dynamic_slice_in_dim(sorted_BV, k - 1, 1, axis=1)
        sorted_BV = jnp.where(sorted_BV >= kth_B1, sorted_BV, -jnp.inf)
        share_BV = jax.nn.softmax(sorted_BV, axis=-1)
        better_BV = jnp.cumsum(share_BV, axis=-1) - share_BV  # the probability of all better tokens
        # Sums are rounded: at 1 they may leave out tokens that are all but impossible.
        keep_BV = ((better_BV < settings.top_p) | (settings.top_p >= 1)) & (sorted_BV > -jnp.inf)
        keep_BV |= jnp.arange(V) == 0
        least_B1 = jnp.where(keep_BV, sorted_BV, jnp.inf).min(-1, keepdims=True)
        return jnp.where(scores_BV >= least_B1, scores_BV, -jnp.inf)

    sorts = (settings.top_k > 0) | (settings.top_p < 1)
    scores_BV = jax.lax.cond(sorts, filter_by_rank, lambda x: x, scores_BV)
    # A ratio of probabilities is a difference of scores.
    least_B1 = scores_BV.max(-1, keepdims=True) + jnp.log(settings.min_p)
    return jnp.where(scores_BV < least_B1, -jnp.inf, scores_BV)  # an infinite score has no least one: all are kept


def noise(seed: jax.Array, number_B: jax.Array, position_B: jax.Array, vocab: int) -> jax.Array:
    """Gumbel noise, [B, V]: the argmax of log-probabilities plus this noise is a draw from the probabilities."""

    def row(number: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), number), position)
        return jax.random.gumbel(key, (vocab,), jnp.float32)

    return jax.vmap(row)(number_B, position_B)
