"""Labels of texts as what is predicted, classes or numbers: the functions of a config that the step is made of."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gspmd_lm.config import ModelConfig
from gspmd_lm.model.task import Batch
from gspmd_lm.model.transformer import classify
from gspmd_lm.train import label_scores


class ClassSums(NamedTuple):
    """Sums over the rows whose label is not negative, float32 scalars."""

    loss: jax.Array
    correct: jax.Array


def sums(model: ModelConfig, params: Any, batch: Batch, key: jax.Array | None) -> ClassSums:
    """The cross-entropy of all labels, and how many of them have the highest score."""
    return _summed(classify(model, params, dict(batch), key), batch["labels"])


def _summed(scores_BX: jax.Array, labels_B: jax.Array) -> ClassSums:
    has_label_B = labels_B >= 0
    of_label_B = jnp.where(jnp.arange(scores_BX.shape[1]) == labels_B[:, None], scores_BX, 0).sum(-1)
    loss_B = jnp.where(has_label_B, jax.nn.logsumexp(scores_BX, axis=-1) - of_label_B, 0)
    correct_B = has_label_B & (scores_BX.argmax(-1) == labels_B)
    return ClassSums(loss_B.sum(), correct_B.sum(dtype=jnp.float32))


def labels(batch: Batch) -> jax.Array:
    """How many rows have a label."""
    return (batch["labels"] >= 0).sum(dtype=jnp.float32)


def evaluate(model: ModelConfig, params: Any, batch: Batch) -> dict[str, jax.Array]:
    """What evaluation adds up over batches: the loss, float32, and `label_scores.class_sums`."""
    scores_BX, labels_B = classify(model, params, dict(batch), None), batch["labels"]
    return {"loss": _summed(scores_BX, labels_B).loss} | label_scores.class_sums(scores_BX, labels_B)


def scores(totals: Mapping[str, Any]) -> dict[str, float]:
    """What evaluation logs."""
    count = float(totals["true"].sum())
    return {"eval_loss": totals["loss"] / max(count, 1)} | label_scores.class_scores(totals) | {"eval_labels": count}


def means(sums: ClassSums, count: jax.Array) -> dict[str, jax.Array]:
    """What a step logs of its sums."""
    return {"loss": sums.loss / count, "accuracy": sums.correct / count, "labels": count}


class NumberSums(NamedTuple):
    """The sum over the rows that hold a text, a float32 scalar."""

    loss: jax.Array


def squared(model: ModelConfig, params: Any, batch: Batch, key: jax.Array | None) -> NumberSums:
    """The squared differences of the labels, float32 [B], from the only score of each text."""
    scores_B = classify(model, params, dict(batch), key)[:, 0]
    return NumberSums(jnp.where(_holds_text(batch), (scores_B - batch["labels"]) ** 2, 0).sum())


def numbers(batch: Batch) -> jax.Array:
    """How many rows hold a text."""
    return _holds_text(batch).sum(dtype=jnp.float32)


def evaluate_numbers(model: ModelConfig, params: Any, batch: Batch) -> dict[str, jax.Array]:
    """What evaluation adds up over batches: `label_scores.number_sums`."""
    scores_B = classify(model, params, dict(batch), None)[:, 0]
    return label_scores.number_sums(scores_B, batch["labels"], _holds_text(batch))


def scores_of_numbers(totals: Mapping[str, float]) -> dict[str, float]:
    """What evaluation logs."""
    count = totals["labels"]
    squares = totals["xx"] - 2 * totals["xy"] + totals["yy"]
    return {"eval_loss": squares / max(count, 1)} | label_scores.number_scores(totals) | {"eval_labels": count}


def means_of_numbers(sums: NumberSums, count: jax.Array) -> dict[str, jax.Array]:
    """What a step logs of its sums."""
    return {"loss": sums.loss / count, "labels": count}


def _holds_text(batch: Batch) -> jax.Array:
    return batch["segment_ids"][:, 0] > 0
