"""Which tokens stand in place of others as what is predicted (ELECTRA, arXiv 2003.10555): the functions of a config."""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gspmd_lm.config import ModelConfig
from gspmd_lm.model.task import Batch
from gspmd_lm.model.transformer import classify


class ReplacedSums(NamedTuple):
    """Sums over the tokens of texts, float32 scalars."""

    loss: jax.Array
    correct: jax.Array
    replaced: jax.Array  # tokens in place of others
    said: jax.Array  # tokens that the model takes for such
    found: jax.Array  # tokens that are both


def sums(model: ModelConfig, params: object, batch: Batch, key: jax.Array | None) -> ReplacedSums:
    """The cross-entropy of whether a token stands in place of another one."""
    scores_BT, targets_BT = classify(model, params, dict(batch), key)[..., 0], batch["targets"]
    is_replaced_BT, is_said_BT, is_token_BT = targets_BT == 1, scores_BT > 0, targets_BT >= 0
    losses_BT = jax.nn.softplus(jnp.where(is_replaced_BT, -scores_BT, scores_BT))
    counted = is_replaced_BT == is_said_BT, is_replaced_BT, is_said_BT, is_replaced_BT & is_said_BT
    return ReplacedSums(
        jnp.where(is_token_BT, losses_BT, 0).sum(),
        *((is_token_BT & one_BT).sum(dtype=jnp.float32) for one_BT in counted),
    )


def evaluate(model: ModelConfig, params: object, batch: Batch) -> dict[str, jax.Array]:
    """What evaluation adds up over batches."""
    tokens = (batch["targets"] >= 0).sum(dtype=jnp.float32)
    return sums(model, params, batch, None)._asdict() | {"tokens": tokens}


def scores(totals: Mapping[str, float]) -> dict[str, float]:
    """What evaluation logs: precision and recall are those of replaced tokens."""
    tokens = max(totals["tokens"], 1.0)
    return {
        "eval_loss": totals["loss"] / tokens,
        "eval_accuracy": totals["correct"] / tokens,
        "eval_precision": totals["found"] / max(totals["said"], 1.0),
        "eval_recall": totals["found"] / max(totals["replaced"], 1.0),
        "eval_tokens": totals["tokens"],
    }


def means(sums: ReplacedSums, count: jax.Array) -> dict[str, jax.Array]:
    """What a step logs of its sums."""
    return {"loss": sums.loss / count, "accuracy": sums.correct / count,
            "recall": sums.found / jnp.maximum(sums.replaced, 1), "target_tokens": count}  # fmt: skip
