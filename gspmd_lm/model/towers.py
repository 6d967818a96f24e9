"""A stack that sees images beside one of texts. The outputs of both are compared (CLIP, arXiv 2103.00020), or learned
rows read an image, and stand for it before the tokens of its text (BLIP-2, arXiv 2301.12597)."""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from gspmd_lm import config
from gspmd_lm.model.block import BLOCK_INPUT, RESIDUAL
from gspmd_lm.model.ends import TRANSFORMED, before_blocks, embedded
from gspmd_lm.model.images import seen
from gspmd_lm.model.norm import Norm
from gspmd_lm.model.parts.memory import MEMORY
from gspmd_lm.model.stack import Stack
from gspmd_lm.model.weights import bias, matrix, weight
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


# Rows that stand for an image before a text


class Queries(Stack):
    """A stack of blocks from learned rows to those that stand before a text."""

    @nn.compact
    def __call__(
        self, memory_BSM: jax.Array, row_B: jax.Array, image_rows: int, dropout_key: jax.Array | None = None
    ) -> jax.Array:
        """The rows of each image, [B, Q, D].

        memory_BSM: what the blocks attend to, of which the first `image_rows` are no padding. row_B: see
        `transformer.Decoder`.
        """
        cfg, (B, S) = self.cfg, memory_BSM.shape[:2]
        rows_QD = use(matrix(self, "query_rows", "positions embed", (cfg.context, cfg.embed), cfg))
        x_BQD = Norm(cfg, name="embedding_norm")(shard(jnp.broadcast_to(rows_QD, (B, *rows_QD.shape)), RESIDUAL))
        ones_BQ = jnp.ones((B, cfg.context), jnp.int32)
        of_rows = {"row": row_B, "positions": ones_BQ, "segment_ids": ones_BQ, "memory": memory_BSM}
        of_rows["memory_segment_ids"] = jnp.broadcast_to((jnp.arange(S) < image_rows).astype(jnp.int32), (B, S))
        x_BQD, keys_BQ = before_blocks(cfg, x_BQD, of_rows, dropout_key)
        return self.blocks(x_BQD, of_rows, keys_BQ)[0]


def read(
    module: nn.Module, cfg: config.ModelConfig, batch: dict[str, jax.Array], dropout_key: jax.Array | None
) -> jax.Array:
    """The rows [B, Q, D] that stand for the images of `batch`, whose patches are those of `images.ImageClassifier`.

    The weights are those of `module`, whose width is D, in its parts `vision` and `queries` but for a projection.
    """
    assert cfg.of_vision and cfg.of_queries
    keys = [None if dropout_key is None else jax.random.fold_in(dropout_key, i) for i in (2, 3)]
    images = {name: batch[name] for name in ("patches", "row")}
    memory_BSM = shard(VisionTower(cfg.of_vision, name="vision")(images, keys[0]), MEMORY)
    x_BQO = Queries(cfg.of_queries, name="queries")(memory_BSM, batch["row"], cfg.of_vision.context, keys[1])
    sizes = cfg.of_queries.embed, cfg.embed
    projection = matrix(module, "query_projection", "stream_width embed", sizes, cfg)
    with gathered(shard(x_BQO, TRANSFORMED), TRANSFORMED, TRANSFORMED) as in_BQO:
        x_BQD = like(project(in_BQO, projection), BLOCK_INPUT)
    return x_BQD + bias(module, "query_projection_bias", "embed", sizes[1:], cfg)


def before(rows_BQD: jax.Array | None, places_BT: jax.Array | None = None) -> Callable[[jax.Array], jax.Array]:
    """A function that puts rows, if there are any, at the first places of embedded tokens, [B, T, D].

    places_BT: where each token stands, if they are not in their order, or behind padding.
    """

    def put(x_BTD: jax.Array) -> jax.Array:
        if rows_BQD is None:
            return x_BTD
        T, Q = x_BTD.shape[1], rows_BQD.shape[1]
        whole_BTD = like(jnp.pad(rows_BQD, ((0, 0), (0, T - Q), (0, 0))), BLOCK_INPUT)
        if places_BT is None:
            return jnp.where(jnp.arange(T)[:, None] < Q, like(whole_BTD, RESIDUAL), x_BTD)
        whole_BTD = jnp.take_along_axis(whole_BTD, places_BT[..., None], axis=1)
        return jnp.where(places_BT[..., None] < Q, like(whole_BTD, RESIDUAL), x_BTD)

    return put
