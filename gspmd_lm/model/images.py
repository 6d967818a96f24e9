"""Models of images: patches in, scores of classes out. ViT: arXiv 2010.11929; DeiT: 2012.12877; BEiT: 2106.08254."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from einops import rearrange

from gspmd_lm import config
from gspmd_lm.model.block import BLOCK_INPUT, RESIDUAL
from gspmd_lm.model.ends import before_blocks, scored, token_keys
from gspmd_lm.model.norm import Norm
from gspmd_lm.model.stack import Stack
from gspmd_lm.model.weights import bias, matrix
from gspmd_lm.sharding.annotate import like, shard, use
from gspmd_lm.sharding.matmuls import gathered, project
from gspmd_lm.sharding.partial_sums import for_each_row

PATCHES = "patches: batch seq pixels"
MERGED = "merged: batch seq stream_width"
FIRST_ROWS = ("class_row", "distillation_row")


class ImageClassifier(Stack):
    """A stack of blocks from the patches of images to the scores of their classes."""

    @nn.compact
    def __call__(self, batch: dict[str, jax.Array], dropout_key: jax.Array | None = None) -> jax.Array:
        """[B, classes], float32.

        `batch` holds row [B] and patches [B, T, X]: of each image, rows whose places the learned rows take, then its
        patches, and beyond the context rows of padding. No row sees padding.
        """
        cfg, x_BTD = self.cfg, seen(self, batch, dropout_key)
        class_row_B1D, second_B1D = (like(x_BTD[:, place : place + 1], RESIDUAL) for place in (0, 1))
        if cfg.patches and cfg.patches.pool == "mean":
            class_row_B1D = mean_of_patches(cfg, x_BTD)
        scores_BX = scored(self, cfg, class_row_B1D, "classifier", BLOCK_INPUT, RESIDUAL)[:, 0]
        if cfg.patches and cfg.patches.distillation == "head":
            second_B1X = scored(self, cfg, second_B1D, "distillation_classifier", BLOCK_INPUT, RESIDUAL)
            return (scores_BX + second_B1X[:, 0]) / 2
        return scores_BX


def seen(stack: Stack, batch: dict[str, jax.Array], dropout_key: jax.Array | None) -> jax.Array:
    """The output of the last block of a stack that sees images, normed, [B, T, D]. `batch`: see `ImageClassifier`."""
    cfg, patches_BTX = stack.cfg, batch["patches"]
    T = patches_BTX.shape[1]
    places_BT = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), patches_BTX.shape[:2])
    of_rows = {"positions": shard(places_BT, "tokens: batch seq"), "row": batch["row"]}
    if cfg.context < T:
        of_rows["segment_ids"] = shard((places_BT < cfg.context).astype(jnp.int32), "tokens: batch seq")
    x_BTD, keys_BT = before_blocks(cfg, patched(stack, cfg, patches_BTX), batch, dropout_key)
    return stack.blocks(x_BTD, of_rows, keys_BT)[0]


def mean_of_patches(cfg: config.ModelConfig, x_BTD: jax.Array) -> jax.Array:
    """The mean of the patches of each image, [B, 1, D], normed if they are not."""
    assert cfg.patches
    places_T1 = jnp.arange(x_BTD.shape[1])[:, None]
    is_patch_T1 = (places_T1 >= cfg.patches.first) & (places_T1 < cfg.context)
    sum_B1D = jnp.where(is_patch_T1, x_BTD, 0).sum(1, keepdims=True, dtype=jnp.float32)
    mean_B1D = like((sum_B1D / cfg.patches.side**2).astype(x_BTD.dtype), RESIDUAL)
    return mean_B1D if cfg.final_norm else Norm(cfg, name="pooled_norm")(mean_B1D)


def patched(module: nn.Module, cfg: config.ModelConfig, patches_BTX: jax.Array) -> jax.Array:
    """What the first block reads, [B, T, D]: projected patches behind the learned rows, and their positions added."""
    assert cfg.patches
    dtype, T = jnp.dtype(cfg.compute_dtype), patches_BTX.shape[1]
    stem = matrix(module, "stem", "pixels embed", (cfg.patches.pixels, cfg.embed), cfg)
    with gathered(patches_BTX.astype(dtype), PATCHES, PATCHES) as in_BTX:
        x_BTD = like(like(project(in_BTX, stem), BLOCK_INPUT), RESIDUAL)
    if cfg.patches.bias:
        x_BTD += bias(module, "stem_bias", "embed", (cfg.embed,), cfg)
    # Selected and not put before the patches: their sequence may be split over devices.
    for place, name in enumerate(FIRST_ROWS[: cfg.patches.first]):
        row_D = use(matrix(module, name, "embed", (cfg.embed,), cfg))
        x_BTD = jnp.where(jnp.arange(T)[:, None] == place, row_D, x_BTD)
    if cfg.positions == "learned":
        table = matrix(module, "position_embedding", "positions embed", (cfg.context, cfg.embed), cfg)
        padding = (0, T - cfg.context), (0, 0)
        x_BTD += for_each_row(table, len(x_BTD), lambda table_PD: jnp.pad(table_PD, padding))
    x_BTD = like(x_BTD, RESIDUAL)
    return Norm(cfg, name="embedding_norm")(x_BTD) if cfg.embedding_norm else x_BTD


class LevelsClassifier(nn.Module):
    """Levels of blocks from the patches of images to the scores of their classes. From level to level, four patches
    become one (Swin, arXiv 2103.14030).
    """

    cfg: config.ModelConfig

    @nn.compact
    def __call__(self, batch: dict[str, jax.Array], dropout_key: jax.Array | None = None) -> jax.Array:
        """[B, classes], float32. `batch`: see `ImageClassifier`; no learned row stands before the patches."""
        first, *rest = of_levels = config.levels(self.cfg)
        x_BTD, keys_BT = before_blocks(first, patched(self, first, batch["patches"]), batch, dropout_key)
        x_BTD = Level(first, name="level_0")(x_BTD, keys_BT)
        for number, cfg in enumerate(rest, 1):
            if keys_BT is not None and dropout_key is not None:
                places_BT = jnp.tile(jnp.arange(config.padded_rows(cfg.context, cfg.row_multiple)), (len(x_BTD), 1))
                keys_BT = token_keys(jax.random.fold_in(dropout_key, number), batch["row"], places_BT)
            x_BTD = Level(cfg, name=f"level_{number}")(x_BTD, keys_BT, merge=True)
        last = of_levels[-1]
        return scored(self, last, mean_of_patches(last, x_BTD), "classifier", BLOCK_INPUT, RESIDUAL)[:, 0]


class Level(Stack):
    """Blocks of one width."""

    @nn.compact
    def __call__(self, x_BTD: jax.Array, keys_BT: jax.Array | None, merge: bool = False) -> jax.Array:
        """The output of the last block, [B, T, D], after 2 x 2 patches became one each if they are to `merge`.

        keys_BT: a dropout key for each of its tokens.
        """
        return self.blocks(_merged(self, self.cfg, x_BTD) if merge else x_BTD, {}, keys_BT)[0]


def _merged(module: nn.Module, cfg: config.ModelConfig, x_BTD: jax.Array) -> jax.Array:
    """The patches of a level, from those of the level before, of which two on a side make one."""
    assert cfg.patches
    side, rows = cfg.patches.side, config.padded_rows(cfg.context, cfg.row_multiple)
    patches_BTD = like(x_BTD, BLOCK_INPUT)[:, : 4 * side**2]
    merged_BTO = rearrange(patches_BTD, "B (h y w x) D -> B (h w) (x y D)", h=side, y=2, x=2)
    merged_BTO = jnp.pad(merged_BTO, ((0, 0), (0, rows - side**2), (0, 0)))
    merge = matrix(module, "merge", "stream_width embed", (merged_BTO.shape[-1], cfg.embed), cfg)
    with gathered(Norm(cfg, "stream_width", name="merge_norm")(merged_BTO), MERGED, MERGED) as in_BTO:
        return like(like(project(in_BTO, merge), BLOCK_INPUT), RESIDUAL)
