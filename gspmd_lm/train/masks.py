"""The object that a prompt means as what is predicted: the functions of a config that the step is made of."""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gspmd_lm.config import ModelConfig
from gspmd_lm.model.masks import Drawn, draw
from gspmd_lm.model.task import Batch

# Focal loss (arXiv 1708.02002) counts 20 times as much as dice loss (arXiv 2304.02643, "Training"), and the pixels of
# the object a quarter of it.
FOCAL, OF_OBJECT = 20.0, 0.25


class MaskSums(NamedTuple):
    """Sums over the rows that hold an object, float32 scalars: the loss, and the intersection of the first mask and the
    object over their union.
    """

    loss: jax.Array
    iou: jax.Array


def sums(model: ModelConfig, params: object, batch: Batch, key: jax.Array | None) -> MaskSums:
    """Of each row, the loss of the first mask, that of the best of the others, and of how their quality is guessed."""
    drawn, holds_B = draw(model, params, dict(batch), key), _holds_object(batch)
    loss_BM, iou_BM = _of_each(drawn, batch["object"])
    # The gradient of the best one reaches it alone: its number is what is chosen.
    best_B = loss_BM[:, 1:].argmin(1)
    of_best_B = jnp.where(jnp.arange(loss_BM.shape[1] - 1) == best_B[:, None], loss_BM[:, 1:], 0).sum(1)
    guess_B = jnp.square(drawn.iou_BM - iou_BM).mean(1)
    loss_B = loss_BM[:, 0] + of_best_B + guess_B
    return MaskSums(jnp.where(holds_B, loss_B, 0).sum(), jnp.where(holds_B, iou_BM[:, 0], 0).sum())


def _of_each(drawn: Drawn, object_BTP: jax.Array) -> tuple[jax.Array, jax.Array]:
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


def objects(batch: Batch) -> jax.Array:
    """How many rows hold an object."""
    return _holds_object(batch).sum(dtype=jnp.float32)


def evaluate(model: ModelConfig, params: object, batch: Batch) -> dict[str, jax.Array]:
    """What evaluation adds up over batches."""
    return sums(model, params, batch, None)._asdict() | {"objects": objects(batch)}


def scores(totals: Mapping[str, float]) -> dict[str, float]:
    """What evaluation logs."""
    count = max(totals["objects"], 1.0)
    return {"eval_loss": totals["loss"] / count, "eval_iou": totals["iou"] / count, "eval_objects": totals["objects"]}


def means(sums: MaskSums, count: jax.Array) -> dict[str, jax.Array]:
    """What a step logs of its sums."""
    return {"loss": sums.loss / count, "iou": sums.iou / count, "objects": count}


def _holds_object(batch: Batch) -> jax.Array:
    return (batch["object"] >= 0).any((1, 2))
