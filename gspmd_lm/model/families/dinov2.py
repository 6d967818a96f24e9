"""DINOv2: a ViT that classifies the class token and the mean of the patches together (arXiv 2304.07193)."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp

from gspmd_lm.model.block import RESIDUAL
from gspmd_lm.model.families import vit
from gspmd_lm.model.parts.classes import TRANSFORMED, score_classes
from gspmd_lm.model.stack import Stack
from gspmd_lm.sharding.annotate import like, shard


class TwoRowsClassifier(Stack):
    """A stack of blocks from the patches of images to the scores of their classes."""

    @nn.compact
    def __call__(self, batch: dict[str, jax.Array], dropout_key: jax.Array | None = None) -> jax.Array:
        """[B, classes], float32. `batch`: see `vit.ImageClassifier`."""
        cfg, x_BTD = self.cfg, vit.encode_image(self, batch, dropout_key)
        rows = like(x_BTD[:, :1], RESIDUAL), vit.mean_of_patches(cfg, x_BTD)
        both_B1O = shard(jnp.concatenate(rows, -1), TRANSFORMED)
        wide = dataclasses.replace(cfg, embed=2 * cfg.embed)
        return score_classes(self, wide, both_B1O, "classifier", TRANSFORMED, TRANSFORMED)[:, 0]


FAMILY = dataclasses.replace(
    vit.FAMILY, module=TwoRowsClassifier, fits=lambda cfg: cfg.patches and cfg.patches.pool == "both"
)
