"""A config as a task: the functions that the step is made of, and the arrays of a batch."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from gspmd_lm.config import Config, ModelConfig
from gspmd_lm.config.masks import PARTS, POINTS
from gspmd_lm.config.media import WINDOW
from gspmd_lm.model import lora
from gspmd_lm.model.loss import Sums
from gspmd_lm.model.moe import balanced
from gspmd_lm.model.sounds import FRAMES
from gspmd_lm.model.transformer import SOURCE, init
from gspmd_lm.program.task import Input, Task
from gspmd_lm.sharding.axes import DECODER
from gspmd_lm.train import objectives, optimizer

# (model, key) -> boxed parameters. A run asks for their shapes and then for their values; jax traces them once.
initial = jax.jit(init, static_argnums=0)


def task(config: Config | Task) -> Task:
    """The task that a config describes, which has it as its `config`. A task is returned as it is.

    What comes after asks `task.config`, which a model of one's own does not have.
    """
    return config if isinstance(config, Task) else _task(config)


@functools.lru_cache(maxsize=8)  # what is worked out of a task is worked out once, however often its config is given
def _task(config: Config) -> Task:
    model, data, objective = config.model, config.data, objectives.of(config)
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
        sums=functools.partial(objective.sums, model),
        count=objective.count,
        evaluate=functools.partial(objective.evaluate, model),
        metrics=functools.partial(_metrics, config, objective.means),
        scores=objective.scores,
    )
    object.__setattr__(decoder, "config", config)
    return decoder


def inputs(config: Config) -> Mapping[str, Input]:
    """The arrays of a batch, int32 but for patches, points, objects, frames, and labels that are numbers: float32.

    patches [B, T, X], if the model sees images: see `images.ImageClassifier`. If it draws masks, points [B, P, 2] and
    point_kinds [B, P], see `masks.Masker`, and object [B, T, 16]: 1 for pixels of the object, 0 for others, and -1 for
    pixels that are not of the image. Otherwise:
    tokens, positions [B, T]: positions count from 0 in each text.
    targets [B, T]: the token to predict at a place, -1 for none; with objective: replaced, whether another token stands
    there. labels [B], in their place if the objective is classes: the class of the row's text, -1 for no text, or its
    number; with data.label_kind: classes, a bit for each class. segment_ids [B, T], if texts are kept apart: alike
    within a text, 0 for padding. token_types [B, T], if the model has any. row [B]: the number of the row in the batch.
    Of a source: see `transformer.Decoder`.
    """
    data, classes = config.data, config.objective == "classes"
    if patches := config.model.patches:
        arrays = {"patches": Input((data.batch, data.seq, patches.pixels), "float32", "patches: batch seq pixels")}
        if config.model.masks:
            prompt = data.batch, POINTS
            arrays["points"] = Input((*prompt, 2), "float32", "prompts: batch prompt channels")
            arrays["point_kinds"] = Input(prompt, "int32", "prompts: batch prompt")
            arrays["object"] = Input((data.batch, data.seq, PARTS**2), "float32", "drawn: batch seq pixels")
            return arrays | {"row": Input((data.batch,), "int32", "tokens: batch")}
        return arrays | {name: Input((data.batch,), "int32", "tokens: batch") for name in ("labels", "row")}
    vision = config.model.vision
    names = ["tokens", "positions"] + ["targets"] * (not classes and config.objective != "contrastive")
    names += ["segment_ids"] * (data.packing == "documents") + ["token_types"] * (config.model.token_types > 0)
    arrays = {name: Input((data.batch, data.seq), "int32", "tokens: batch seq") for name in names}
    if vision:
        shape = data.batch, config.image_rows, vision.patches.pixels
        arrays["patches"] = Input(shape, "float32", "patches: batch seq pixels")
    if config.model.encoder:
        shape, frames = (data.batch, config.source_seq), config.model.frames
        sources = ["tokens"] * (not frames) + ["positions", "segment_ids"]
        arrays |= {f"{SOURCE}{name}": Input(shape, "int32", "tokens: batch seq") for name in sources}
        if frames:
            arrays[f"{SOURCE}frames"] = Input((*shape, WINDOW, frames.bands), "float32", FRAMES)
    if classes:
        kind = "float32" if data.label_kind == "number" else "int32"
        arrays["labels"] = Input((data.batch,), kind, "tokens: batch")
    return arrays | {"row": Input((data.batch,), "int32", "tokens: batch")}


def _optimizer(config: Config, named: Any) -> optax.GradientTransformation:
    return optimizer.build_optimizer(config.optimizer, config.train.steps, named)


def _moved(model: ModelConfig, frozen: Any, sums: Sums) -> Any:
    return balanced(frozen, sums.load_LC, model)


def _metrics(config: Config, means: Any, sums: Any, count: jax.Array, step: jax.Array) -> dict[str, jax.Array]:
    rate = optimizer.schedule(config.optimizer, config.train.steps)
    return means(sums, count) | {"learning_rate": jnp.asarray(rate(step), jnp.float32)}
