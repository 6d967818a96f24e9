"""Swin: stages of blocks over windows of an image; between stages, 2 x 2 patches are merged (arXiv 2103.14030)."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
from einops import rearrange

from gspmd_lm import config
from gspmd_lm.model.addresses import level_name
from gspmd_lm.model.block import BLOCK_INPUT, RESIDUAL
from gspmd_lm.model.families import vit
from gspmd_lm.model.norm import Norm
from gspmd_lm.model.parts.classes import score_classes
from gspmd_lm.model.parts.dropout import before_blocks, token_keys
from gspmd_lm.model.stack import Stack
from gspmd_lm.model.weights import matrix
from gspmd_lm.sharding.annotate import like
from gspmd_lm.sharding.matmuls import gathered, project

MERGED = "merged: batch seq stream_width"


class LevelsClassifier(nn.Module):
    """Levels of blocks from the patches of images to the scores of their classes."""

    cfg: config.ModelConfig

    @nn.compact
    def __call__(self, batch: dict[str, jax.Array], dropout_key: jax.Array | None = None) -> jax.Array:
        """[B, classes], float32. `batch`: see `vit.ImageClassifier`; no learned row stands before the patches."""
        first, *rest = levels = config.levels(self.cfg)
        x_BTD, keys_BT = before_blocks(first, vit.embed_patches(self, first, batch["patches"]), batch, dropout_key)
        x_BTD = Level(first, name=level_name(0))(x_BTD, keys_BT)
        for number, cfg in enumerate(rest, 1):
            if keys_BT is not None and dropout_key is not None:
                places_BT = jnp.tile(jnp.arange(config.padded_rows(cfg.context, cfg.row_multiple)), (len(x_BTD), 1))
                keys_BT = token_keys(jax.random.fold_in(dropout_key, number), batch["row"], places_BT)
            x_BTD = Level(cfg, name=level_name(number))(x_BTD, keys_BT, merge=True)
        last = levels[-1]
        return score_classes(self, last, vit.mean_of_patches(last, x_BTD), "classifier", BLOCK_INPUT, RESIDUAL)[:, 0]


class Level(Stack):
    """Blocks of one width."""

    @nn.compact
    def __call__(self, x_BTD: jax.Array, keys_BT: jax.Array | None, merge: bool = False) -> jax.Array:
        """The output of the last block, [B, T, D]. With `merge`, 2 x 2 patches are merged before the first block.

        keys_BT: a dropout key for each of its tokens.
        """
        return self.blocks(_merge(self, self.cfg, x_BTD) if merge else x_BTD, {}, keys_BT)[0]


def _merge(module: nn.Module, cfg: config.ModelConfig, x_BTD: jax.Array) -> jax.Array:
    """The patches of a level: each merges 2 x 2 patches of the level before."""
    assert cfg.patches
    side, rows = cfg.patches.side, config.padded_rows(cfg.context, cfg.row_multiple)
    patches_BTD = like(x_BTD, BLOCK_INPUT)[:, : 4 * side**2]
    merged_BTO = rearrange(patches_BTD, "B (h y w x) D -> B (h w) (x y D)", h=side, y=2, x=2)
    merged_BTO = jnp.pad(merged_BTO, ((0, 0), (0, rows - side**2), (0, 0)))
    merge = matrix(module, "merge", "stream_width embed", (merged_BTO.shape[-1], cfg.embed), cfg)
    with gathered(Norm(cfg, "stream_width", name="merge_norm")(merged_BTO), MERGED, MERGED) as in_BTO:
        return like(like(project(in_BTO, merge), BLOCK_INPUT), RESIDUAL)


FAMILY = dataclasses.replace(vit.FAMILY, module=LevelsClassifier, fits=lambda cfg: cfg.patches and cfg.windows)
