"""CLIP: a text encoder and an image encoder whose outputs are compared (arXiv 2103.00020)."""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from gspmd_lm import config
from gspmd_lm.model.block import BLOCK_INPUT, RESIDUAL
from gspmd_lm.model.ends import embed_tokens
from gspmd_lm.model.families.text import Family, text_inputs
from gspmd_lm.model.families.vit import PATCHES, encode_image
from gspmd_lm.model.kernels.context import zigzag_sharded
from gspmd_lm.model.objectives import Batch, Input, Shape, mean_objective, output
from gspmd_lm.model.parts.classes import SCORES
from gspmd_lm.model.stack import Stack
from gspmd_lm.model.weights import matrix, weight
from gspmd_lm.sharding.annotate import like, shard, use
from gspmd_lm.sharding.matmuls import gathered, project

COMPARED = "compared: batch seq joint"
LEAST_LENGTH = 1e-12  # of a vector that is divided by its length
NEVER = -1e30  # the score of a row that is padding


class Compared(NamedTuple):
    """Unit vectors in the common space, float32, and the factor that multiplies their products (the temperature)."""

    text_BP: jax.Array
    image_BP: jax.Array
    scale: jax.Array


class VisionTower(Stack):
    """A stack of blocks that encodes images."""

    projection: int = 0

    @nn.compact
    def __call__(self, batch: dict[str, jax.Array], dropout_key: jax.Array | None = None) -> jax.Array:
        """[B, P], float32, of length one, or all rows [B, T, D] without a projection. `batch`: see
        `vit.ImageClassifier`.
        """
        x_BTD = encode_image(self, batch, dropout_key)
        return _project(self, self.cfg, x_BTD[:, :1], self.projection) if self.projection else x_BTD


class Towers(Stack):
    """A stack of blocks that encodes texts, and another one that encodes their images."""

    @nn.compact
    def __call__(self, batch: dict[str, jax.Array], dropout_key: jax.Array | None = None) -> Compared:
        """`batch` holds arrays of texts, of which a row has one, as `decoder.Decoder` reads them, with segment_ids,
        and patches [B, S, X] as `vit.ImageClassifier` sees them.
        """
        cfg, vision = self.cfg, self.cfg.vision_config
        assert cfg.vision and vision
        x_BTD, _, keys_BT = embed_tokens(self, batch, dropout_key)
        x_BTD = self.blocks(x_BTD, batch, keys_BT)[0]
        is_text_BT = batch["segment_ids"] > 0
        is_last_BT = is_text_BT & (batch["positions"] == is_text_BT.sum(1, keepdims=True) - 1)
        last_B1D = jnp.where(is_last_BT[..., None], x_BTD, 0).sum(1, keepdims=True)
        text_BP = _project(self, cfg, last_B1D, cfg.vision.projection)
        key = dropout_key if dropout_key is None else jax.random.fold_in(dropout_key, 1)
        images = {name: batch[name] for name in ("patches", "row")}
        image_BP = VisionTower(vision, projection=cfg.vision.projection, name="vision")(images, key)
        start = nn.initializers.constant(cfg.vision.temperature)
        return Compared(text_BP, image_BP, jnp.exp(use(weight(self, "temperature", "", (), cfg, start), jnp.float32)))


def _project(module: nn.Module, cfg: config.ModelConfig, row_B1D: jax.Array, size: int) -> jax.Array:
    """A unit vector in the common space for each text or image, [B, P], float32."""
    projection = matrix(module, "projection", "embed joint", (cfg.embed, size), cfg)
    with gathered(like(row_B1D, RESIDUAL), BLOCK_INPUT, RESIDUAL) as in_B1D:
        x_BP = shard(project(in_B1D, projection), COMPARED).astype(jnp.float32)[:, 0]
    square_B1 = jnp.square(x_BP).sum(-1, keepdims=True)
    return x_BP * jax.lax.rsqrt(jnp.maximum(square_B1, LEAST_LENGTH**2))


def image_input(cfg: config.ModelConfig, batch: int, rows: int) -> Input:
    """The patches of the images that belong to texts."""
    assert cfg.vision
    return Input((batch, rows, cfg.vision.patches.pixels), "float32", PATCHES)


def _inputs(cfg: config.ModelConfig, shape: Shape) -> dict[str, Input]:
    patches = {"patches": image_input(cfg, shape.batch, shape.image_rows)}
    return text_inputs(cfg, shape._replace(segments=True)) | patches


# The contrastive objective: texts and images that belong together


class PairSums(NamedTuple):
    """Sums over the rows that hold a text."""

    loss: jax.Array  # the mean of the cross-entropies of a text's image among all of the batch, and of an image's text
    correct_texts: jax.Array  # texts whose own image has the highest score
    correct_images: jax.Array


def _sums_of_pairs(module: Any, params: Any, batch: Batch, key: jax.Array | None) -> PairSums:
    holds_B = _holds_pair(batch)
    text_BP, image_BP, scale = output(module, params, zigzag_sharded(dict(batch), module.cfg.attention.mask), key)
    own_B = scale * (text_BP * image_BP).sum(-1)
    # The classes of a row are all rows that it is compared with: each device has all scores of its own rows.
    holds_C = like(holds_B, "class_scores: classes")

    def sought(x_BP: jax.Array, among_BP: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The cross-entropies of rows, and whether the row that belongs to each has the highest score."""
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


# Scores of evaluation depend on the batch size: each text or image is sought among the whole batch.
METRICS = {"loss": "loss", "correct_texts": "image_of_text", "correct_images": "text_of_image"}
PAIRS = mean_objective(lambda shape: {}, _sums_of_pairs, _pairs, "pairs", METRICS)
FAMILY = Family(
    module=Towers,
    fits=lambda cfg: cfg.vision and not cfg.vision.queries,
    objective=lambda config: PAIRS,
    inputs=_inputs,
    smallest=lambda cfg: Shape(image_rows=cfg.vision.patches.rows),
)
