"""DINOv2: a ViT whose classes are read at the first row and at the mean of patches together (arXiv 2304.07193)."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp

from gspmd_lm import config
from gspmd_lm.model.block import RESIDUAL
from gspmd_lm.model.ends import TRANSFORMED, scored
from gspmd_lm.model.families.vit import ImageClassifiers, encode_image, mean_of_patches
from gspmd_lm.model.stack import Stack
from gspmd_lm.sharding.annotate import like, shard


class TwoRowsClassifier(Stack):
    """A stack of blocks from the patches of images to the scores of their classes."""

    @nn.compact
    def __call__(self, batch: dict[str, jax.Array], dropout_key: jax.Array | None = None) -> jax.Array:
        """[B, classes], float32. `batch`: see `vit.ImageClassifier`."""
        cfg, x_BTD = self.cfg, encode_image(self, batch, dropout_key)
        rows = like(x_BTD[:, :1], RESIDUAL), mean_of_patches(cfg, x_BTD)
        both_B1O = shard(jnp.concatenate(rows, -1), TRANSFORMED)
        wide = dataclasses.replace(cfg, embed=2 * cfg.embed)
        return scored(self, wide, both_B1O, "classifier", TRANSFORMED, TRANSFORMED)[:, 0]


class Dinov2(ImageClassifiers):
    """Image classifiers with `patches.pool: both`."""

    def fits(self, cfg: config.ModelConfig) -> bool:
        """Whether classes are read at the first row and at the mean of patches."""
        return cfg.patches is not None and cfg.patches.pool == "both"

    def module(self, cfg: config.ModelConfig) -> nn.Module:
        """See `Family.module`."""
        return TwoRowsClassifier(cfg)


FAMILY = Dinov2()
