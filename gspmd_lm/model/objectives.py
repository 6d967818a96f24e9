"""The training objectives, `config.objective`: their sums over a batch, their count and their metrics.

The objective of most models, which predict tokens, is in loss.py. One that only one family has is in the family's file.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gspmd_lm.config import Config

TOKEN_SPEC = "tokens: batch seq"
ROW_SPEC = "tokens: batch"

Batch = Mapping[str, jax.Array]


class Input(NamedTuple):
    """One array of a batch, over all devices."""

    shape: tuple[int, ...]
    dtype: str
    spec: str  # its name and logical axes, as in `shard`: "images: batch patch pixel"; the first axis is the rows


class Shape(NamedTuple):
    """The sizes of a batch."""

    batch: int = 1
    seq: int = 1  # tokens, or rows of an image that has no text
    source_seq: int = 1  # tokens or rows that an encoder reads
    image_rows: int = 1  # rows of an image that belongs to a text
    segments: bool = False  # whether a row has several texts, each a segment

    @classmethod
    def for_training(cls, config: Config) -> "Shape":
        """The sizes of a batch of training."""
        data = config.data
        return cls(data.rows, data.seq, config.source_seq, config.image_rows, data.packing == "documents")


@dataclasses.dataclass(frozen=True)
class Objective:
    """The functions of a task that depend on its target. `module` is that of a family, with its `cfg`."""

    inputs: Callable[[Shape], dict[str, Input]]  # the arrays of a batch besides those that the module reads
    sums: Callable[[Any, Any, Batch, jax.Array | None], Any]  # float32 scalars over the batch, of which one is the loss
    count: Callable[[Batch], jax.Array]  # the number that the sums are divided by
    evaluate: Callable[[Any, Any, Batch], dict[str, jax.Array]]  # the sums that evaluation adds up over batches
    means: Callable[[Any, jax.Array], dict[str, jax.Array]]  # the metrics that a step logs, from its sums and its count
    scores: Callable[[Mapping[str, Any]], dict[str, float]]  # the metrics that evaluation logs, from its added sums


def mean_objective(
    inputs: Callable[[Shape], dict[str, Input]],
    sums: Callable[[Any, Any, Batch, jax.Array | None], Any],
    count: Callable[[Batch], jax.Array],
    counted: str,
    metrics: Mapping[str, str],
) -> Objective:
    """An objective whose metrics are the means of its sums. metrics: names of sums -> those of their means.

    `counted` is the name of the number that the sums are divided by.
    """

    def evaluate(module: Any, params: Any, batch: Batch) -> dict[str, jax.Array]:
        return sums(module, params, batch, None)._asdict() | {counted: count(batch)}

    def means(found: Any, number: jax.Array) -> dict[str, jax.Array]:
        return {metric: getattr(found, name) / number for name, metric in metrics.items()} | {counted: number}

    def scores(totals: Mapping[str, float]) -> dict[str, float]:
        number = max(totals[counted], 1.0)
        found = {f"eval_{metric}": totals[name] / number for name, metric in metrics.items()}
        return found | {f"eval_{counted}": totals[counted]}

    return Objective(inputs, sums, count, evaluate, means, scores)


def output(module: Any, params: Any, batch: Batch, key: jax.Array | None) -> Any:
    """The output of a module for plain (unboxed) parameters."""
    return module.apply({"params": params}, dict(batch), key)


def target_inputs(shape: Shape) -> dict[str, Input]:
    """targets [B, T]: the token to predict at a position, or whether its token was replaced; -1 for no target."""
    return {"targets": Input((shape.batch, shape.seq), "int32", TOKEN_SPEC)}


def count_targets(batch: Batch) -> jax.Array:
    """The number of targets of a batch."""
    return (batch["targets"] >= 0).sum(dtype=jnp.float32)


def label_inputs(shape: Shape, dtype: str = "int32") -> dict[str, Input]:
    """labels [B]: the class of the row, or a bit for each of its classes, -1 for no label; in regression, a number."""
    return {"labels": Input((shape.batch,), dtype, ROW_SPEC)}


# Classes of texts or images


class ClassSums(NamedTuple):
    """Sums over the rows whose label is not negative."""

    loss: jax.Array  # the cross-entropy; of several classes, the mean of theirs
    correct: jax.Array  # labels with the highest score; of several classes, the share that is right


def _sum_losses(scores_BX: jax.Array, labels_B: jax.Array) -> ClassSums:
    has_label_B = labels_B >= 0
    of_label_B = jnp.where(jnp.arange(scores_BX.shape[1]) == labels_B[:, None], scores_BX, 0).sum(-1)
    loss_B = jnp.where(has_label_B, jax.nn.logsumexp(scores_BX, axis=-1) - of_label_B, 0)
    correct_B = has_label_B & (scores_BX.argmax(-1) == labels_B)
    return ClassSums(loss_B.sum(), correct_B.sum(dtype=jnp.float32))


def _sums_of_classes(module: Any, params: Any, batch: Batch, key: jax.Array | None) -> ClassSums:
    return _sum_losses(output(module, params, batch, key), batch["labels"])


def _labels(batch: Batch) -> jax.Array:
    return (batch["labels"] >= 0).sum(dtype=jnp.float32)


def _totals_of_classes(module: Any, params: Any, batch: Batch) -> dict[str, jax.Array]:
    scores_BX, labels_B = output(module, params, batch, None), batch["labels"]
    return {"loss": _sum_losses(scores_BX, labels_B).loss} | class_sums(scores_BX, labels_B)


def class_sums(logits_BC: jax.Array, labels_B: jax.Array) -> dict[str, jax.Array]:
    """The right predictions, predictions and labels of each class, counted in float32 [C], without rows labelled -1."""
    classes_C = jnp.arange(logits_BC.shape[1])
    true_BC = labels_B[:, None] == classes_C
    predicted_BC = (logits_BC.argmax(1)[:, None] == classes_C) & (labels_B >= 0)[:, None]
    each = {"right": true_BC & predicted_BC, "predicted": predicted_BC, "true": true_BC}
    return {name: found_BC.sum(0, dtype=jnp.float32) for name, found_BC in each.items()}


def class_scores(totals: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Accuracy, F1 and Matthews' correlation from the added `class_sums`.

    F1 is that of class 1 of two. Of several classes it is the mean over those that were predicted or true, and
    Matthews' correlation is that of Gorodkin (2004). Both are 0 where they are not defined, as in scikit-learn.
    """
    right_C, predicted_C, true_C = (np.asarray(totals[name]) for name in ("right", "predicted", "true"))
    count, right = true_C.sum(), right_C.sum()
    seen_C = predicted_C + true_C
    f1_C = 2 * right_C / np.maximum(seen_C, 1)
    covariance = right * count - predicted_C @ true_C
    spread = np.sqrt((count**2 - predicted_C @ predicted_C) * (count**2 - true_C @ true_C))
    return {
        "eval_accuracy": float(right / max(count, 1)),
        "eval_f1": float(f1_C[1] if len(f1_C) == 2 else f1_C[seen_C > 0].mean() if count else 0.0),
        "eval_matthews": float(covariance / spread if spread else 0.0),
    }


def _means_of_classes(sums: ClassSums, count: jax.Array) -> dict[str, jax.Array]:
    return {"loss": sums.loss / count, "accuracy": sums.correct / count, "labels": count}


def _scores_of_classes(totals: Mapping[str, Any]) -> dict[str, float]:
    count = float(totals["true"].sum())
    return {"eval_loss": totals["loss"] / max(count, 1)} | class_scores(totals) | {"eval_labels": count}


def _sums_of_several(module: Any, params: Any, batch: Batch, key: jax.Array | None) -> ClassSums:
    totals = _totals_of_several(module, params, batch, key)
    return ClassSums(totals["loss"], totals["correct"])


def _totals_of_several(module: Any, params: Any, batch: Batch, key: Any = None) -> dict[str, jax.Array]:
    scores_BX, labels_B1 = output(module, params, batch, key), batch["labels"][:, None]
    true_BX, said_BX = (labels_B1 >> jnp.arange(scores_BX.shape[1])) % 2 == 1, scores_BX > 0
    of_row = {"loss": jax.nn.softplus(scores_BX) - true_BX * scores_BX, "correct": said_BX == true_BX}
    each = {name: x_BX / scores_BX.shape[1] for name, x_BX in of_row.items()} | {"right": true_BX & said_BX}
    each["either"] = true_BX.astype(jnp.float32) + said_BX
    sums = {name: jnp.where(labels_B1 >= 0, x_BX, 0).sum(dtype=jnp.float32) for name, x_BX in each.items()}
    return sums | {"labels": _labels(batch)}


def _scores_of_several(totals: Mapping[str, float]) -> dict[str, float]:
    """Mean loss and accuracy over texts and classes, and the micro-averaged F1."""
    loss, correct, count = totals["loss"], totals["correct"], max(totals["labels"], 1)
    scores = {"eval_loss": loss / count, "eval_accuracy": correct / count}
    return scores | {"eval_f1": 2 * totals["right"] / max(totals["either"], 1), "eval_labels": totals["labels"]}


# Regression: one number for each text


class NumberSums(NamedTuple):
    """The sum over the rows that hold a text."""

    loss: jax.Array  # the squared error: the label, float32 [B], against the only score of a text


def _sums_of_numbers(module: Any, params: Any, batch: Batch, key: jax.Array | None) -> NumberSums:
    scores_B = output(module, params, batch, key)[:, 0]
    return NumberSums(jnp.where(_holds_text(batch), (scores_B - batch["labels"]) ** 2, 0).sum())


def _holds_text(batch: Batch) -> jax.Array:
    return batch["segment_ids"][:, 0] > 0


def _numbers(batch: Batch) -> jax.Array:
    return _holds_text(batch).sum(dtype=jnp.float32)


def _totals_of_numbers(module: Any, params: Any, batch: Batch) -> dict[str, jax.Array]:
    return number_sums(output(module, params, batch, None)[:, 0], batch["labels"], _holds_text(batch))


def number_sums(predicted_B: jax.Array, labels_B: jax.Array, counted_B: jax.Array) -> dict[str, jax.Array]:
    """The sums for Pearson's correlation, float32, over the rows for which `counted_B` is true."""
    x_B, y_B = (jnp.where(counted_B, values_B, 0).astype(jnp.float32) for values_B in (predicted_B, labels_B))
    products = {"x": x_B, "y": y_B, "xx": x_B * x_B, "yy": y_B * y_B, "xy": x_B * y_B}
    return {name: product_B.sum() for name, product_B in products.items()} | {
        "labels": counted_B.sum(dtype=jnp.float32)
    }


def number_scores(totals: Mapping[str, float]) -> dict[str, float]:
    """Pearson's correlation from the added `number_sums`; 0 where all predictions or all labels are equal."""
    count = max(totals["labels"], 1.0)
    x, y, xx, yy, xy = (totals[name] / count for name in ("x", "y", "xx", "yy", "xy"))
    spread = max((xx - x * x) * (yy - y * y), 0.0) ** 0.5
    return {"eval_pearson": float((xy - x * y) / spread if spread else 0.0)}


def _means_of_numbers(sums: NumberSums, count: jax.Array) -> dict[str, jax.Array]:
    return {"loss": sums.loss / count, "labels": count}


def _scores_of_numbers(totals: Mapping[str, float]) -> dict[str, float]:
    count = totals["labels"]
    squares = totals["xx"] - 2 * totals["xy"] + totals["yy"]
    return {"eval_loss": squares / max(count, 1)} | number_scores(totals) | {"eval_labels": count}


CLASSES = Objective(label_inputs, _sums_of_classes, _labels, _totals_of_classes, _means_of_classes, _scores_of_classes)
SEVERAL = Objective(label_inputs, _sums_of_several, _labels, _totals_of_several, _means_of_classes, _scores_of_several)
NUMBERS = Objective(
    functools.partial(label_inputs, dtype="float32"),
    _sums_of_numbers,
    _numbers,
    _totals_of_numbers,
    _means_of_numbers,
    _scores_of_numbers,
)
