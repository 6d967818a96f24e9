"""What is predicted, `config.objective`: what a step adds up and divides by, and what is logged of it."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gspmd_lm.config import Config, ModelConfig
from gspmd_lm.model.ends import SCORES
from gspmd_lm.model.kernels.context import zigzag_sharded
from gspmd_lm.model.loss import Sums, losses
from gspmd_lm.model.masks import Drawn, draw
from gspmd_lm.model.towers import compare
from gspmd_lm.model.transformer import classify, decode_routed
from gspmd_lm.program.task import Batch
from gspmd_lm.sharding.annotate import like, shard

NEVER = -1e30  # the score of a row of padding
# Focal loss (arXiv 1708.02002) counts 20 times as much as dice loss (arXiv 2304.02643, "Training"), and the pixels of
# the object a quarter of it.
FOCAL, OF_OBJECT = 20.0, 0.25


@dataclasses.dataclass(frozen=True)
class Objective:
    """The functions of a task that depend on what is predicted."""

    sums: Callable[[ModelConfig, Any, Batch, jax.Array | None], Any]  # float32 scalars over the batch, one is the loss
    count: Callable[[Batch], jax.Array]  # what the sums are divided by
    evaluate: Callable[[ModelConfig, Any, Batch], dict[str, jax.Array]]  # what evaluation adds up over batches
    means: Callable[[Any, jax.Array], dict[str, jax.Array]]  # what a step logs of its sums and its count
    scores: Callable[[Mapping[str, Any]], dict[str, float]]  # what evaluation logs of what it has added up


def of(config: Config) -> Objective:
    """The objective of a config."""
    if config.objective == "classes":
        return {"class": CLASSES, "classes": SEVERAL, "number": NUMBERS}[config.data.label_kind]
    return {"contrastive": PAIRS, "replaced": REPLACED, "masks": MASKS}.get(config.objective, TOKENS)


# Tokens: the next ones, or those that were hidden


def _sums_of_tokens(model: ModelConfig, params: Any, batch: Batch, key: jax.Array | None) -> Sums:
    batch = zigzag_sharded(dict(batch), model.mask)
    x_BTD, table, bias, routed = decode_routed(model, params, batch, key)
    sums = losses(x_BTD, table, bias, batch["targets"], model)
    if routed is None:
        return sums
    targets_B = (batch["targets"] >= 0).sum(1, dtype=jnp.float32)
    penalty, rounds = ((of_LB.mean(0) * targets_B).sum() for of_LB in (routed.penalty_B, routed.rounds_B))
    return sums._replace(loss=sums.loss + penalty, load_LC=routed.load_C, expert_rounds=rounds)


def _targets(batch: Batch) -> jax.Array:
    return (batch["targets"] >= 0).sum(dtype=jnp.float32)


def _totals_of_tokens(model: ModelConfig, params: Any, batch: Batch) -> dict[str, jax.Array]:
    sums = _sums_of_tokens(model, params, batch, None)
    return {"cross_entropy": sums.cross_entropy, "correct": sums.correct, "target_tokens": _targets(batch)}


def _means_of_tokens(sums: Sums, targets: jax.Array) -> dict[str, jax.Array]:
    means = {
        "loss": sums.loss / targets,
        "cross_entropy": sums.cross_entropy / targets,
        "accuracy": sums.correct / targets,
        "target_tokens": targets,
    }
    if not isinstance(sums.load_LC, tuple):
        means["expert_imbalance"] = (sums.load_LC.max(1) / sums.load_LC.mean(1)).max()
        means["expert_rounds"] = sums.expert_rounds / targets
    return means


def _scores_of_tokens(totals: Mapping[str, float]) -> dict[str, float]:
    targets = totals["target_tokens"]
    loss = totals["cross_entropy"] / targets
    return {
        "eval_loss": loss,
        "eval_perplexity": float(np.exp(loss)),
        "eval_accuracy": totals["correct"] / targets,
        "eval_tokens": targets,
    }


# Classes of texts or images


class ClassSums(NamedTuple):
    """Sums over the rows whose label is not negative."""

    loss: jax.Array  # the cross-entropy; of several classes, the mean of theirs
    correct: jax.Array  # labels with the highest score; of several classes, the share that is right


def _summed(scores_BX: jax.Array, labels_B: jax.Array) -> ClassSums:
    has_label_B = labels_B >= 0
    of_label_B = jnp.where(jnp.arange(scores_BX.shape[1]) == labels_B[:, None], scores_BX, 0).sum(-1)
    loss_B = jnp.where(has_label_B, jax.nn.logsumexp(scores_BX, axis=-1) - of_label_B, 0)
    correct_B = has_label_B & (scores_BX.argmax(-1) == labels_B)
    return ClassSums(loss_B.sum(), correct_B.sum(dtype=jnp.float32))


def _sums_of_classes(model: ModelConfig, params: Any, batch: Batch, key: jax.Array | None) -> ClassSums:
    return _summed(classify(model, params, dict(batch), key), batch["labels"])


def _labels(batch: Batch) -> jax.Array:
    return (batch["labels"] >= 0).sum(dtype=jnp.float32)


def _totals_of_classes(model: ModelConfig, params: Any, batch: Batch) -> dict[str, jax.Array]:
    scores_BX, labels_B = classify(model, params, dict(batch), None), batch["labels"]
    return {"loss": _summed(scores_BX, labels_B).loss} | class_sums(scores_BX, labels_B)


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


def _means_of_classes(sums: ClassSums, count: jax.Array) -> dict[str, jax.Array]:
    return {"loss": sums.loss / count, "accuracy": sums.correct / count, "labels": count}


def _scores_of_classes(totals: Mapping[str, Any]) -> dict[str, float]:
    count = float(totals["true"].sum())
    return {"eval_loss": totals["loss"] / max(count, 1)} | class_scores(totals) | {"eval_labels": count}


def _sums_of_several(model: ModelConfig, params: Any, batch: Batch, key: jax.Array | None) -> ClassSums:
    totals = _totals_of_several(model, params, batch, key)
    return ClassSums(totals["loss"], totals["correct"])


def _totals_of_several(model: ModelConfig, params: Any, batch: Batch, key: Any = None) -> dict[str, jax.Array]:
    scores_BX, labels_B1 = classify(model, params, dict(batch), key), batch["labels"][:, None]
    true_BX, said_BX = (labels_B1 >> jnp.arange(model.classes)) % 2 == 1, scores_BX > 0
    of_row = {"loss": jax.nn.softplus(scores_BX) - true_BX * scores_BX, "correct": said_BX == true_BX}
    each = {name: x_BX / model.classes for name, x_BX in of_row.items()} | {"right": true_BX & said_BX}
    each["either"] = true_BX.astype(jnp.float32) + said_BX
    sums = {name: jnp.where(labels_B1 >= 0, x_BX, 0).sum(dtype=jnp.float32) for name, x_BX in each.items()}
    return sums | {"labels": _labels(batch)}


def _scores_of_several(totals: Mapping[str, float]) -> dict[str, float]:
    """The means of loss and accuracy over texts and classes, and the F1 of all classes of all texts together."""
    loss, correct, count = totals["loss"], totals["correct"], max(totals["labels"], 1)
    scores = {"eval_loss": loss / count, "eval_accuracy": correct / count}
    return scores | {"eval_f1": 2 * totals["right"] / max(totals["either"], 1), "eval_labels": totals["labels"]}


# Numbers that are said of texts


class NumberSums(NamedTuple):
    """The sum over the rows that hold a text."""

    loss: jax.Array  # the squared difference of the label, float32 [B], from the only score of a text


def _sums_of_numbers(model: ModelConfig, params: Any, batch: Batch, key: jax.Array | None) -> NumberSums:
    scores_B = classify(model, params, dict(batch), key)[:, 0]
    return NumberSums(jnp.where(_holds_text(batch), (scores_B - batch["labels"]) ** 2, 0).sum())


def _holds_text(batch: Batch) -> jax.Array:
    return batch["segment_ids"][:, 0] > 0


def _numbers(batch: Batch) -> jax.Array:
    return _holds_text(batch).sum(dtype=jnp.float32)


def _totals_of_numbers(model: ModelConfig, params: Any, batch: Batch) -> dict[str, jax.Array]:
    return number_sums(classify(model, params, dict(batch), None)[:, 0], batch["labels"], _holds_text(batch))


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


def _means_of_numbers(sums: NumberSums, count: jax.Array) -> dict[str, jax.Array]:
    return {"loss": sums.loss / count, "labels": count}


def _scores_of_numbers(totals: Mapping[str, float]) -> dict[str, float]:
    count = totals["labels"]
    squares = totals["xx"] - 2 * totals["xy"] + totals["yy"]
    return {"eval_loss": squares / max(count, 1)} | number_scores(totals) | {"eval_labels": count}


# Texts and images that belong together


class PairSums(NamedTuple):
    """Sums over the rows that hold a text."""

    loss: jax.Array  # the mean of the cross-entropies of a text's image among all of the batch, and of an image's text
    correct_texts: jax.Array  # texts whose own image has the highest score
    correct_images: jax.Array


def _sums_of_pairs(model: ModelConfig, params: Any, batch: Batch, key: jax.Array | None) -> PairSums:
    holds_B = _holds_pair(batch)
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


def _holds_pair(batch: Batch) -> jax.Array:
    return (batch["segment_ids"] > 0).any(1)


def _pairs(batch: Batch) -> jax.Array:
    return _holds_pair(batch).sum(dtype=jnp.float32)


def _totals_of_pairs(model: ModelConfig, params: Any, batch: Batch) -> dict[str, jax.Array]:
    return _sums_of_pairs(model, params, batch, None)._asdict() | {"pairs": _pairs(batch)}


def _means_of_pairs(sums: PairSums, count: jax.Array) -> dict[str, jax.Array]:
    return {"loss": sums.loss / count, "image_of_text": sums.correct_texts / count,
            "text_of_image": sums.correct_images / count, "pairs": count}  # fmt: skip


def _scores_of_pairs(totals: Mapping[str, float]) -> dict[str, float]:
    """The scores depend on the number of rows of a batch, because each text or image is sought among all of them."""
    count = max(totals["pairs"], 1.0)
    names = {"loss": "eval_loss", "correct_texts": "eval_image_of_text", "correct_images": "eval_text_of_image"}
    return {ours: totals[name] / count for name, ours in names.items()} | {"eval_pairs": totals["pairs"]}


# Which tokens stand in place of others (ELECTRA, arXiv 2003.10555)


class ReplacedSums(NamedTuple):
    """Sums over the tokens of texts."""

    loss: jax.Array  # the cross-entropy of whether a token stands in place of another one
    correct: jax.Array
    replaced: jax.Array  # tokens in place of others
    said: jax.Array  # tokens that the model takes for such
    found: jax.Array  # tokens that are both


def _sums_of_replaced(model: ModelConfig, params: Any, batch: Batch, key: jax.Array | None) -> ReplacedSums:
    scores_BT, targets_BT = classify(model, params, dict(batch), key)[..., 0], batch["targets"]
    is_replaced_BT, is_said_BT, is_token_BT = targets_BT == 1, scores_BT > 0, targets_BT >= 0
    losses_BT = jax.nn.softplus(jnp.where(is_replaced_BT, -scores_BT, scores_BT))
    counted = is_replaced_BT == is_said_BT, is_replaced_BT, is_said_BT, is_replaced_BT & is_said_BT
    return ReplacedSums(
        jnp.where(is_token_BT, losses_BT, 0).sum(),
        *((is_token_BT & one_BT).sum(dtype=jnp.float32) for one_BT in counted),
    )


def _totals_of_replaced(model: ModelConfig, params: Any, batch: Batch) -> dict[str, jax.Array]:
    return _sums_of_replaced(model, params, batch, None)._asdict() | {"tokens": _targets(batch)}


def _means_of_replaced(sums: ReplacedSums, count: jax.Array) -> dict[str, jax.Array]:
    return {"loss": sums.loss / count, "accuracy": sums.correct / count,
            "recall": sums.found / jnp.maximum(sums.replaced, 1), "target_tokens": count}  # fmt: skip


def _scores_of_replaced(totals: Mapping[str, float]) -> dict[str, float]:
    """Precision and recall are those of replaced tokens."""
    tokens = max(totals["tokens"], 1.0)
    return {
        "eval_loss": totals["loss"] / tokens,
        "eval_accuracy": totals["correct"] / tokens,
        "eval_precision": totals["found"] / max(totals["said"], 1.0),
        "eval_recall": totals["found"] / max(totals["replaced"], 1.0),
        "eval_tokens": totals["tokens"],
    }


# Masks of objects that prompts mean


class MaskSums(NamedTuple):
    """Sums over the rows that hold an object."""

    loss: jax.Array  # of the first mask, of the best of the others, and of how the quality of each is guessed
    iou: jax.Array  # the intersection of the first mask and the object over their union


def _sums_of_masks(model: ModelConfig, params: Any, batch: Batch, key: jax.Array | None) -> MaskSums:
    drawn, holds_B = draw(model, params, dict(batch), key), _holds_object(batch)
    loss_BM, iou_BM = _of_each_mask(drawn, batch["object"])
    # The gradient of the best one reaches it alone: its number is what is chosen.
    best_B = loss_BM[:, 1:].argmin(1)
    of_best_B = jnp.where(jnp.arange(loss_BM.shape[1] - 1) == best_B[:, None], loss_BM[:, 1:], 0).sum(1)
    guess_B = jnp.square(drawn.iou_BM - iou_BM).mean(1)
    loss_B = loss_BM[:, 0] + of_best_B + guess_B
    return MaskSums(jnp.where(holds_B, loss_B, 0).sum(), jnp.where(holds_B, iou_BM[:, 0], 0).sum())


def _of_each_mask(drawn: Drawn, object_BTP: jax.Array) -> tuple[jax.Array, jax.Array]:
    """[B, M]: focal and dice loss of each mask, and its intersection with the object over their union."""
    x, pixels = drawn.masks_BMTP, (-2, -1)
    is_real, is_object = (object_BTP >= 0)[:, None], (object_BTP > 0)[:, None]
    sign = jnp.where(is_object, 1.0, -1.0)
    weight = jnp.where(is_object, OF_OBJECT, 1 - OF_OBJECT)
    focal = -weight * jnp.square(jax.nn.sigmoid(-sign * x)) * jax.nn.log_sigmoid(sign * x)
    counted = jnp.maximum(is_real.sum(pixels, dtype=jnp.float32), 1)
    focal_BM = jnp.where(is_real, focal, 0).sum(pixels) / counted
    share = jnp.where(is_real, jax.nn.sigmoid(x), 0)
    both = jnp.where(is_object, share, 0).sum(pixels)
    dice_BM = 1 - (2 * both + 1) / (share.sum(pixels) + is_object.sum(pixels, dtype=jnp.float32) + 1)
    found = (x > 0) & is_real
    shared, either = (each.sum(pixels, dtype=jnp.float32) for each in (found & is_object, found | is_object))
    return FOCAL * focal_BM + dice_BM, shared / jnp.maximum(either, 1)


def _holds_object(batch: Batch) -> jax.Array:
    return (batch["object"] >= 0).any((1, 2))


def _objects(batch: Batch) -> jax.Array:
    return _holds_object(batch).sum(dtype=jnp.float32)


def _totals_of_masks(model: ModelConfig, params: Any, batch: Batch) -> dict[str, jax.Array]:
    return _sums_of_masks(model, params, batch, None)._asdict() | {"objects": _objects(batch)}


def _means_of_masks(sums: MaskSums, count: jax.Array) -> dict[str, jax.Array]:
    return {"loss": sums.loss / count, "iou": sums.iou / count, "objects": count}


def _scores_of_masks(totals: Mapping[str, float]) -> dict[str, float]:
    count = max(totals["objects"], 1.0)
    return {"eval_loss": totals["loss"] / count, "eval_iou": totals["iou"] / count, "eval_objects": totals["objects"]}


TOKENS = Objective(_sums_of_tokens, _targets, _totals_of_tokens, _means_of_tokens, _scores_of_tokens)
CLASSES = Objective(_sums_of_classes, _labels, _totals_of_classes, _means_of_classes, _scores_of_classes)
SEVERAL = Objective(_sums_of_several, _labels, _totals_of_several, _means_of_classes, _scores_of_several)
NUMBERS = Objective(_sums_of_numbers, _numbers, _totals_of_numbers, _means_of_numbers, _scores_of_numbers)
PAIRS = Objective(_sums_of_pairs, _pairs, _totals_of_pairs, _means_of_pairs, _scores_of_pairs)
REPLACED = Objective(_sums_of_replaced, _targets, _totals_of_replaced, _means_of_replaced, _scores_of_replaced)
MASKS = Objective(_sums_of_masks, _objects, _totals_of_masks, _means_of_masks, _scores_of_masks)
