"""A model of images and of their texts: two stacks whose outputs are compared (CLIP, arXiv 2103.00020)."""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from gspmd_lm import config
from gspmd_lm.model.ends import embedded
from gspmd_lm.model.images import seen
from gspmd_lm.model.layers import BLOCK_INPUT, RESIDUAL
from gspmd_lm.model.stack import Stack
from gspmd_lm.model.weights import matrix, weight
from gspmd_lm.sharding.annotate import like, shard, use
from gspmd_lm.sharding.matmuls import gathered, project

COMPARED = "compared: batch seq joint"
LEAST_LENGTH = 1e-12  # of a vector that is divided by its length


class Compared(NamedTuple):
    """Vectors of length one in the common space, float32, and what their products are multiplied by."""

    text_BP: jax.Array
    image_BP: jax.Array
    scale: jax.Array


class VisionTower(Stack):
    """A stack of blocks that sees images."""

    projection: int = 0

    @nn.compact
    def __call__(self, batch: dict[str, jax.Array], dropout_key: jax.Array | None = None) -> jax.Array:
        """[B, P], float32, of length one, or all rows [B, T, D] without a projection. `batch`: see
        `images.ImageClassifier`.
        """
        x_BTD = seen(self, batch, dropout_key)
        return _projected(self, self.cfg, x_BTD[:, :1], self.projection) if self.projection else x_BTD


class Towers(Stack):
    """A stack of blocks that reads texts, beside one that sees their images."""

    @nn.compact
    def __call__(self, batch: dict[str, jax.Array], dropout_key: jax.Array | None = None) -> Compared:
        """`batch` holds arrays of texts, of which a row has one, as `transformer.Decoder` reads them, with segment_ids,
        and patches [B, S, X] as `images.ImageClassifier` sees them.
        """
        cfg, vision = self.cfg, self.cfg.of_vision
        assert cfg.vision and vision
        x_BTD, _, keys_BT = embedded(self, cfg, batch, dropout_key)
        x_BTD = self.blocks(x_BTD, batch, keys_BT)[0]
        is_text_BT = batch["segment_ids"] > 0
        is_last_BT = is_text_BT & (batch["positions"] == is_text_BT.sum(1, keepdims=True) - 1)
        last_B1D = jnp.where(is_last_BT[..., None], x_BTD, 0).sum(1, keepdims=True)
        text_BP = _projected(self, cfg, last_B1D, cfg.vision.projection)
        key = dropout_key if dropout_key is None else jax.random.fold_in(dropout_key, 1)
        images = {name: batch[name] for name in ("patches", "row")}
        image_BP = VisionTower(vision, projection=cfg.vision.projection, name="vision")(images, key)
        start = nn.initializers.constant(cfg.vision.temperature)
        return Compared(text_BP, image_BP, jnp.exp(use(weight(self, "temperature", "", (), cfg, start), jnp.float32)))


def _projected(module: nn.Module, cfg: config.ModelConfig, row_B1D: jax.Array, size: int) -> jax.Array:
    """One row of each text or image in the common space, [B, P], float32, of length one."""
    projection = matrix(module, "projection", "embed joint", (cfg.embed, size), cfg)
    with gathered(like(row_B1D, RESIDUAL), BLOCK_INPUT, RESIDUAL) as in_B1D:
        x_BP = shard(project(in_B1D, projection), COMPARED).astype(jnp.float32)[:, 0]
    square_B1 = jnp.square(x_BP).sum(-1, keepdims=True)
    return x_BP * jax.lax.rsqrt(jnp.maximum(square_B1, LEAST_LENGTH**2))


def compare(
    cfg: config.ModelConfig, params: Any, batch: dict[str, jax.Array], dropout_key: jax.Array | None = None
) -> Compared:
    """Texts and images in their common space, for plain (unboxed) parameters."""
    compared: Any = Towers(cfg).apply({"params": params}, batch, dropout_key)
    return compared
