"""Texts and images that belong together as what is predicted: the functions of a config that the step is made of."""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gspmd_lm.config import ModelConfig
from gspmd_lm.model.ends import SCORES
from gspmd_lm.model.kernels.context import zigzag_sharded
from gspmd_lm.model.task import Batch
from gspmd_lm.model.towers import compare
from gspmd_lm.sharding.annotate import like, shard

NEVER = -1e30  # the score of a row of padding


class PairSums(NamedTuple):
    """Sums over the rows that hold a text, float32 scalars: the mean of both cross-entropies, and how many texts and
    images have their own with the highest score.
    """

    loss: jax.Array
    correct_texts: jax.Array
    correct_images: jax.Array


def sums(model: ModelConfig, params: object, batch: Batch, key: jax.Array | None) -> PairSums:
    """Of each text, the cross-entropy of its image among all images of the batch, and of each image likewise."""
    holds_B = _holds_text(batch)
    text_BP, image_BP, scale = compare(model, params, zigzag_sharded(dict(batch), model.mask), key)
    own_B = scale * (text_BP * image_BP).sum(-1)
    # All that a row is compared with are its classes: each device has all scores of its own rows.
    holds_C = like(holds_B, "class_scores: classes")

    def sought(x_BP: jax.Array, among_BP: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The cross-entropies of rows, and whether their own has the highest score."""
        among_CP = like(among_BP, "compared: classes joint")
        scores_BC = shard(scale * jnp.einsum("BP,CP->BC", x_BP, among_CP)[:, None], SCORES)[:, 0]
        scores_BC = jnp.where(holds_C, scores_BC, NEVER)
        return jax.nn.logsumexp(scores_BC, axis=-1) - own_B, scores_BC.argmax(-1) == jnp.arange(len(holds_B))

    (of_text_B, found_image_B), (of_image_B, found_text_B) = sought(text_BP, image_BP), sought(image_BP, text_BP)
    correct = ((holds_B & found_B).sum(dtype=jnp.float32) for found_B in (found_image_B, found_text_B))
    return PairSums(jnp.where(holds_B, (of_text_B + of_image_B) / 2, 0).sum(), *correct)


def pairs(batch: Batch) -> jax.Array:
    """How many rows hold a text."""
    return _holds_text(batch).sum(dtype=jnp.float32)


def evaluate(model: ModelConfig, params: object, batch: Batch) -> dict[str, jax.Array]:
    """What evaluation adds up over batches."""
    return sums(model, params, batch, None)._asdict() | {"pairs": pairs(batch)}


def scores(totals: Mapping[str, float]) -> dict[str, float]:
    """What evaluation logs. It depends on how many rows a batch has, among which each is sought."""
    count = max(totals["pairs"], 1.0)
    names = {"loss": "eval_loss", "correct_texts": "eval_image_of_text", "correct_images": "eval_text_of_image"}
    return {ours: totals[name] / count for name, ours in names.items()} | {"eval_pairs": totals["pairs"]}


def means(sums: PairSums, count: jax.Array) -> dict[str, jax.Array]:
    """What a step logs of its sums."""
    return {"loss": sums.loss / count, "image_of_text": sums.correct_texts / count,
            "text_of_image": sums.correct_images / count, "pairs": count}  # fmt: skip


def _holds_text(batch: Batch) -> jax.Array:
    return (batch["segment_ids"] > 0).any(1)
