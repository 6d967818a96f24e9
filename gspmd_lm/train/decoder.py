"""A config as a task: the functions that the step is made of. What is predicted, `config.objective`, is asked here."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gspmd_lm.config import Config, ModelConfig
from gspmd_lm.config.masks import PARTS, POINTS
from gspmd_lm.config.sounds import WINDOW
from gspmd_lm.model import lora
from gspmd_lm.model.kernels.context import zigzag_sharded
from gspmd_lm.model.loss import Sums, losses
from gspmd_lm.model.moe import balanced
from gspmd_lm.model.sounds import FRAMES
from gspmd_lm.model.task import Batch, Input, Task
from gspmd_lm.model.transformer import SOURCE, decode_routed, init
from gspmd_lm.sharding.axes import DECODER
from gspmd_lm.train import classes, contrastive, masks, optimizer, replaced

# (model, key) -> boxed parameters. A run asks for their shapes and then for their values; jax traces them once.
initial = jax.jit(init, static_argnums=0)


def task(config: Config | Task) -> Task:
    """The task that a config describes, which has it as its `config`. A task is returned as it is.

    What comes after asks `task.config`, which a model of one's own does not have.
    """
    if isinstance(config, Task):
        return config
    model, data = config.model, config.data
    decoder = Task(
        name=config.name,
        vocabulary=DECODER,
        inputs=inputs(config),
        init=functools.partial(initial, model),
        optimizer=functools.partial(_optimizer, config),
        partition=functools.partial(lora.partition, cfg=model),
        moved=functools.partial(_moved, model) if model.balance_bias and not model.lora else None,
        random=bool(model.dropout),
        seed=config.train.seed,
        matmul_precision=model.matmul_precision,
        compute_dtype=model.compute_dtype,
        float32=("logits",),
        tokens=data.batch * (data.seq + config.source_seq),
        train=config.train,
        **_predicted(config),
    )
    object.__setattr__(decoder, "config", config)
    return decoder


def _predicted(config: Config) -> dict[str, Any]:
    """The fields of a task that depend on what is predicted."""
    model = config.model
    sums, count, evaluate, means, scores = _sums, _targets, _evaluate, _means, _scores
    if config.objective == "classes":
        sums, count, evaluate = classes.sums, classes.labels, classes.evaluate
        means, scores = classes.means, classes.scores
        if config.data.label_kind != "class":
            sums, count, evaluate = classes.squared, classes.numbers, classes.evaluate_numbers
            means, scores = classes.means_of_numbers, classes.scores_of_numbers
    if config.objective == "contrastive":
        sums, count, evaluate = contrastive.sums, contrastive.pairs, contrastive.evaluate
        means, scores = contrastive.means, contrastive.scores
    if config.objective == "masks":
        sums, count, evaluate, means, scores = masks.sums, masks.objects, masks.evaluate, masks.means, masks.scores
    if config.objective == "replaced":
        sums, evaluate, means, scores = replaced.sums, replaced.evaluate, replaced.means, replaced.scores
    return {
        "sums": functools.partial(sums, model),
        "count": count,
        "evaluate": functools.partial(evaluate, model),
        "metrics": functools.partial(_metrics, config, means),
        "scores": scores,
    }


def inputs(config: Config) -> Mapping[str, Input]:
    """The arrays of a batch, int32 but for patches, points, frames, and labels that are numbers, which are float32.

    patches [B, T, X], float32, if the model sees images: see `images.ImageClassifier`. If it draws masks, points
    [B, P, 2] and point_kinds [B, P], see `masks.Masker`, and object [B, T, 16]: 1 for pixels of the object, 0 for
    others, and -1 for pixels that are not of the image. Otherwise:
    tokens, positions [B, T]: positions count from 0 in each text.
    targets [B, T]: the token to predict at a place, -1 for none; with objective: replaced, whether another token stands
    there. labels [B], in their place if the objective is classes: the class of the row's text, -1 for none, or its
    number. segment_ids [B, T], if texts are kept apart: alike within a text, 0 for padding. token_types [B, T], if the
    model has any. row [B]: the number of the row in the batch. Of a source: see `transformer.Decoder`.
    """
    data, classes = config.data, config.objective == "classes"
    if patches := config.model.patches:
        arrays = {"patches": Input((data.batch, data.seq, patches.pixels), "float32", "patches: batch seq pixels")}
        if config.model.masks:
            prompt = data.batch, POINTS
            arrays["points"] = Input((*prompt, 2), "float32", "prompts: batch prompt channels")
            arrays["point_kinds"] = Input(prompt, "int32", "prompts: batch prompt")
            arrays["object"] = Input((data.batch, data.seq, PARTS**2), "int32", "drawn: batch seq pixels")
            return arrays | {"row": Input((data.batch,), "int32", "tokens: batch")}
        return arrays | {name: Input((data.batch,), "int32", "tokens: batch") for name in ("labels", "row")}
    vision = config.model.vision
    names = ["tokens", "positions"] if classes or vision else ["tokens", "targets", "positions"]
    names += ["segment_ids"] * (data.packing == "documents") + ["token_types"] * (config.model.token_types > 0)
    arrays = {name: Input((data.batch, data.seq), "int32", "tokens: batch seq") for name in names}
    if vision:
        shape = data.batch, config.source_seq, vision.patches.pixels
        arrays["patches"] = Input(shape, "float32", "patches: batch seq pixels")
    if config.model.encoder:
        shape, frames = (data.batch, config.source_seq), config.model.frames
        sources = ["tokens"] * (not frames) + ["positions", "segment_ids"]
        arrays |= {f"{SOURCE}{name}": Input(shape, "int32", "tokens: batch seq") for name in sources}
        if frames:
            arrays[f"{SOURCE}frames"] = Input((*shape, WINDOW, frames.bands), "float32", FRAMES)
    if classes:
        kind = "int32" if data.label_kind == "class" else "float32"
        arrays["labels"] = Input((data.batch,), kind, "tokens: batch")
    return arrays | {"row": Input((data.batch,), "int32", "tokens: batch")}


def _optimizer(config: Config, named: Any) -> optax.GradientTransformation:
    return optimizer.build_optimizer(config.optimizer, config.train.steps, named)


def _sums(model: ModelConfig, params: Any, batch: Batch, key: jax.Array | None) -> Sums:
    batch = zigzag_sharded(dict(batch), model.mask)
    x_BTD, table, bias, routed = decode_routed(model, params, batch, key)
    sums = losses(x_BTD, table, bias, batch["targets"], model)
    if routed is None:
        return sums
    targets_B = (batch["targets"] >= 0).sum(1, dtype=jnp.float32)
    penalty = (routed.penalty_B.mean(0) * targets_B).sum()
    return sums._replace(loss=sums.loss + penalty, load_LC=routed.load_C)


def _moved(model: ModelConfig, frozen: Any, sums: Sums) -> Any:
    return balanced(frozen, sums.load_LC, model)


def _targets(batch: Batch) -> jax.Array:
    return (batch["targets"] >= 0).sum(dtype=jnp.float32)


def _evaluate(model: ModelConfig, params: Any, batch: Batch) -> dict[str, jax.Array]:
    sums = _sums(model, params, batch, None)
    return {"cross_entropy": sums.cross_entropy, "correct": sums.correct, "target_tokens": _targets(batch)}


def _scores(totals: Mapping[str, float]) -> dict[str, float]:
    targets = totals["target_tokens"]
    loss = totals["cross_entropy"] / targets
    return {
        "eval_loss": loss,
        "eval_perplexity": float(np.exp(loss)),
        "eval_accuracy": totals["correct"] / targets,
        "eval_tokens": targets,
    }


def _means(sums: Sums, targets: jax.Array) -> dict[str, jax.Array]:
    means = {
        "loss": sums.loss / targets,
        "cross_entropy": sums.cross_entropy / targets,
        "accuracy": sums.correct / targets,
        "target_tokens": targets,
    }
    if not isinstance(sums.load_LC, tuple):
        means["expert_imbalance"] = (sums.load_LC.max(1) / sums.load_LC.mean(1)).max()
    return means


def _metrics(config: Config, means: Any, sums: Any, count: jax.Array, step: jax.Array) -> dict[str, jax.Array]:
    rate = optimizer.schedule(config.optimizer, config.train.steps)
    return means(sums, count) | {"learning_rate": jnp.asarray(rate(step), jnp.float32)}
