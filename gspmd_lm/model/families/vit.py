"""ViT: it classifies images from their patches (arXiv 2010.11929; DeiT: 2012.12877; BEiT: 2106.08254)."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from gspmd_lm import config
from gspmd_lm.model.block import BLOCK_INPUT, RESIDUAL
from gspmd_lm.model.families.text import Family
from gspmd_lm.model.norm import Norm
from gspmd_lm.model.objectives import CLASSES, ROW_SPEC, Input, Shape
from gspmd_lm.model.parts.classes import score_classes
from gspmd_lm.model.parts.dropout import before_blocks
from gspmd_lm.model.stack import Stack
from gspmd_lm.model.weights import bias, matrix
from gspmd_lm.sharding.annotate import like, shard, use
from gspmd_lm.sharding.matmuls import gathered, project
from gspmd_lm.sharding.partial_sums import for_each_row

PATCHES = "patches: batch seq pixels"
FIRST_ROWS = ("class_row", "distillation_row")


class ImageClassifier(Stack):
    """A stack of blocks from the patches of images to the scores of their classes."""

    @nn.compact
    def __call__(self, batch: dict[str, jax.Array], dropout_key: jax.Array | None = None) -> jax.Array:
        """[B, classes], float32.

        `batch` holds row [B] and patches [B, T, X]: for each image, rows that the learned tokens replace, then its
        patches, then padding beyond the context. No row attends to padding.
        """
        cfg, x_BTD = self.cfg, encode_image(self, batch, dropout_key)
        class_row_B1D, second_B1D = (like(x_BTD[:, place : place + 1], RESIDUAL) for place in (0, 1))
        if cfg.patches and cfg.patches.pool == "mean":
            class_row_B1D = mean_of_patches(cfg, x_BTD)
        scores_BX = score_classes(self, cfg, class_row_B1D, "classifier", BLOCK_INPUT, RESIDUAL)[:, 0]
        if cfg.patches and cfg.patches.distillation == "head":
            second_B1X = score_classes(self, cfg, second_B1D, "distillation_classifier", BLOCK_INPUT, RESIDUAL)
            return (scores_BX + second_B1X[:, 0]) / 2
        return scores_BX


def encode_image(stack: Stack, batch: dict[str, jax.Array], dropout_key: jax.Array | None) -> jax.Array:
    """The normed output of an image encoder's last block, [B, T, D]. `batch`: see `ImageClassifier`."""
    cfg, patches_BTX = stack.cfg, batch["patches"]
    T = patches_BTX.shape[1]
    places_BT = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), patches_BTX.shape[:2])
    rows = {"positions": shard(places_BT, "tokens: batch seq"), "row": batch["row"]}
    if cfg.context < T:
        rows["segment_ids"] = shard((places_BT < cfg.context).astype(jnp.int32), "tokens: batch seq")
    x_BTD, keys_BT = before_blocks(cfg, embed_patches(stack, cfg, patches_BTX), batch, dropout_key)
    return stack.blocks(x_BTD, rows, keys_BT)[0]


def mean_of_patches(cfg: config.ModelConfig, x_BTD: jax.Array) -> jax.Array:
    """The mean of the patches of each image, [B, 1, D], normed if they are not."""
    assert cfg.patches
    places_T1 = jnp.arange(x_BTD.shape[1])[:, None]
    is_patch_T1 = (places_T1 >= cfg.patches.first) & (places_T1 < cfg.context)
    sum_B1D = jnp.where(is_patch_T1, x_BTD, 0).sum(1, keepdims=True, dtype=jnp.float32)
    mean_B1D = like((sum_B1D / cfg.patches.side**2).astype(x_BTD.dtype), RESIDUAL)
    return mean_B1D if cfg.norm.final else Norm(cfg, name="pooled_norm")(mean_B1D)


def embed_patches(module: nn.Module, cfg: config.ModelConfig, patches_BTX: jax.Array) -> jax.Array:
    """The input of the first block, [B, T, D]: learned tokens, then projected patches, plus position embeddings."""
    assert cfg.patches
    dtype, T = jnp.dtype(cfg.compute_dtype), patches_BTX.shape[1]
    stem = matrix(module, "stem", "pixels embed", (cfg.patches.pixels, cfg.embed), cfg)
    with gathered(patches_BTX.astype(dtype), PATCHES, PATCHES) as in_BTX:
        x_BTD = like(like(project(in_BTX, stem), BLOCK_INPUT), RESIDUAL)
    if cfg.patches.bias:
        x_BTD += bias(module, "stem_bias", "embed", (cfg.embed,), cfg)
    # Learned tokens are selected, not concatenated before the patches: the sequence may be split over devices.
    for place, name in enumerate(FIRST_ROWS[: cfg.patches.first]):
        row_D = use(matrix(module, name, "embed", (cfg.embed,), cfg))
        x_BTD = jnp.where(jnp.arange(T)[:, None] == place, row_D, x_BTD)
    if cfg.positions == "learned":
        table = matrix(module, "position_embedding", "positions embed", (cfg.context, cfg.embed), cfg)
        padding = (0, T - cfg.context), (0, 0)
        x_BTD += for_each_row(table, len(x_BTD), lambda table_PD: jnp.pad(table_PD, padding))
    x_BTD = like(x_BTD, RESIDUAL)
    return Norm(cfg, name="embedding_norm")(x_BTD) if cfg.embedding.norm else x_BTD


def image_inputs(cfg: config.ModelConfig, shape: Shape) -> dict[str, Input]:
    """The arrays that `ImageClassifier` reads."""
    assert cfg.patches
    patches = Input((shape.batch, shape.seq, cfg.patches.pixels), "float32", PATCHES)
    return {"patches": patches, "row": Input((shape.batch,), "int32", ROW_SPEC)}


FAMILY = Family(
    module=ImageClassifier,
    fits=lambda cfg: cfg.patches,
    objective=lambda config: CLASSES,
    inputs=image_inputs,
    smallest=lambda cfg: Shape(seq=cfg.context),
)
