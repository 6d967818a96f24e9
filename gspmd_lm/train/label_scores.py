"""What evaluation says of labels: sums that add up over batches, and the scores that they give in the end."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np


def class_sums(logits_BC: jax.Array, labels_B: jax.Array) -> dict[str, jax.Array]:
    """How often each class was right, predicted and true, float32 [C]. Rows with the label -1 are not counted."""
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


def number_sums(predicted_B: jax.Array, labels_B: jax.Array, counted_B: jax.Array) -> dict[str, jax.Array]:
    """The sums that a correlation is made of, float32, over the rows of which `counted_B` is true."""
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
