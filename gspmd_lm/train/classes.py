"""The classes of texts as what is predicted: the functions of a config that the step is made of."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gspmd_lm.config import ModelConfig
from gspmd_lm.model.task import Batch
from gspmd_lm.model.transformer import classify


class ClassSums(NamedTuple):
    """Sums over the rows whose label is not negative, float32 scalars."""

    loss: jax.Array
    correct: jax.Array


def sums(model: ModelConfig, params: Any, batch: Batch, key: jax.Array | None) -> ClassSums:
    """The cross-entropy of all labels, and how many of them have the highest score."""
    scores_BX = classify(model, params, dict(batch), key)
    labels_B = batch["labels"]
    has_label_B = labels_B >= 0
    of_label_B = jnp.where(jnp.arange(model.classes) == labels_B[:, None], scores_BX, 0).sum(-1)
    loss_B = jnp.where(has_label_B, jax.nn.logsumexp(scores_BX, axis=-1) - of_label_B, 0)
    correct_B = has_label_B & (scores_BX.argmax(-1) == labels_B)
    return ClassSums(loss_B.sum(), correct_B.sum(dtype=jnp.float32))


def labels(batch: Batch) -> jax.Array:
    """How many rows have a label."""
    return (batch["labels"] >= 0).sum(dtype=jnp.float32)


def evaluate(model: ModelConfig, params: Any, batch: Batch) -> dict[str, jax.Array]:
    """What evaluation adds up over batches."""
    return sums(model, params, batch, None)._asdict() | {"labels": labels(batch)}


def scores(totals: Mapping[str, float]) -> dict[str, float]:
    """What evaluation logs."""
    count = totals["labels"]
    return {
        "eval_loss": totals["loss"] / count,
        "eval_accuracy": totals["correct"] / count,
        "eval_labels": count,
    }


def means(sums: ClassSums, count: jax.Array) -> dict[str, jax.Array]:
    """What a step logs of its sums."""
    return {"loss": sums.loss / count, "accuracy": sums.correct / count, "labels": count}
