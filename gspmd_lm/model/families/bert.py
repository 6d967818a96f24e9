"""Encoders that classify: BERT (arXiv 1810.04805) and its variants classify texts, ELECTRA each token."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from gspmd_lm.config import Config
from gspmd_lm.model.ends import embed_tokens
from gspmd_lm.model.families.text import Family
from gspmd_lm.model.objectives import (
    CLASSES,
    NUMBERS,
    SEVERAL,
    Batch,
    Objective,
    count_targets,
    output,
    target_inputs,
)
from gspmd_lm.model.parts.classes import class_scores
from gspmd_lm.model.stack import Stack


class TextClassifier(Stack):
    """A stack of blocks from tokens to the scores of the classes of each text, or of each token."""

    @nn.compact
    def __call__(self, batch: dict[str, jax.Array], dropout_key: jax.Array | None = None) -> jax.Array:
        """[B, classes], or [B, T, classes], float32. `batch`: see `decoder.Decoder`."""
        x_BTD, _, keys_BT = embed_tokens(self, batch, dropout_key)
        return class_scores(self, self.cfg, self.blocks(x_BTD, batch, keys_BT)[0])


def text_objective(config: Config) -> Objective:
    """Detection of replaced tokens, or the prediction of labels of the kind `data.label_kind`."""
    if config.objective == "replaced":
        return REPLACED
    return {"class": CLASSES, "classes": SEVERAL, "number": NUMBERS}[config.data.label_kind]


# Detection of replaced tokens (ELECTRA, arXiv 2003.10555)


class ReplacedSums(NamedTuple):
    """Sums over the tokens of texts."""

    loss: jax.Array  # the binary cross-entropy of whether a token was replaced
    correct: jax.Array
    replaced: jax.Array  # tokens that were replaced
    said: jax.Array  # tokens that the model predicts were replaced
    found: jax.Array  # tokens that were replaced and are predicted so


def _sums_of_replaced(module: Any, params: Any, batch: Batch, key: jax.Array | None) -> ReplacedSums:
    scores_BT, targets_BT = output(module, params, batch, key)[..., 0], batch["targets"]
    is_replaced_BT, is_said_BT, is_token_BT = targets_BT == 1, scores_BT > 0, targets_BT >= 0
    losses_BT = jax.nn.softplus(jnp.where(is_replaced_BT, -scores_BT, scores_BT))
    counted = is_replaced_BT == is_said_BT, is_replaced_BT, is_said_BT, is_replaced_BT & is_said_BT
    return ReplacedSums(
        jnp.where(is_token_BT, losses_BT, 0).sum(),
        *((is_token_BT & one_BT).sum(dtype=jnp.float32) for one_BT in counted),
    )


def _totals_of_replaced(module: Any, params: Any, batch: Batch) -> dict[str, jax.Array]:
    return _sums_of_replaced(module, params, batch, None)._asdict() | {"tokens": count_targets(batch)}


def _means_of_replaced(sums: ReplacedSums, count: jax.Array) -> dict[str, jax.Array]:
    return {
        "loss": sums.loss / count,
        "accuracy": sums.correct / count,
        "recall": sums.found / jnp.maximum(sums.replaced, 1),
        "target_tokens": count,
    }


def _scores_of_replaced(totals: Mapping[str, float]) -> dict[str, float]:
    """The scores of evaluation. Precision and recall are those of replaced tokens."""
    tokens = max(totals["tokens"], 1.0)
    return {
        "eval_loss": totals["loss"] / tokens,
        "eval_accuracy": totals["correct"] / tokens,
        "eval_precision": totals["found"] / max(totals["said"], 1.0),
        "eval_recall": totals["found"] / max(totals["replaced"], 1.0),
        "eval_tokens": totals["tokens"],
    }


REPLACED = Objective(
    target_inputs, _sums_of_replaced, count_targets, _totals_of_replaced, _means_of_replaced, _scores_of_replaced
)
FAMILY = Family(module=TextClassifier, fits=lambda cfg: cfg.num_classes, objective=text_objective)
