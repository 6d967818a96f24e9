"""BLIP-2: query tokens attend to an image, and their outputs precede the tokens of its text (arXiv 2301.12597)."""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp

from gspmd_lm import config
from gspmd_lm.model.block import BLOCK_INPUT, RESIDUAL
from gspmd_lm.model.cache import Cache
from gspmd_lm.model.decoder import Decoded, Decoder
from gspmd_lm.model.ends import embed_tokens
from gspmd_lm.model.families import t5, text
from gspmd_lm.model.families.clip import VisionTower, image_input
from gspmd_lm.model.families.text import Family
from gspmd_lm.model.norm import Norm, same
from gspmd_lm.model.objectives import Input, Shape
from gspmd_lm.model.parts.classes import TRANSFORMED
from gspmd_lm.model.parts.dropout import before_blocks
from gspmd_lm.model.parts.memory import MEMORY
from gspmd_lm.model.stack import Stack
from gspmd_lm.model.weights import bias, matrix
from gspmd_lm.sharding.annotate import like, shard, use
from gspmd_lm.sharding.matmuls import gathered, project


class ImageDecoder(Decoder):
    """A decoder, or an encoder-decoder, of texts that follow image tokens."""

    @nn.compact
    def __call__(
        self, batch: dict[str, jax.Array], dropout_key: jax.Array | None = None, cache: Cache | None = None
    ) -> Decoded:
        """`batch` is that of `Decoder` or of `t5.EncoderDecoder`, with patches [B, S, X] as `vit.ImageClassifier` sees
        them. The image tokens take the first positions of a row, or of its source.
        """
        cfg, rows_BQD = self.cfg, None
        if "patches" in batch:
            rows_BQD = embed_images(self, cfg, batch, dropout_key)
        batch = {name: x for name, x in batch.items() if name != "patches"}
        prefix = t5.SOURCE if cfg.encoder else ""
        # Prompts stand behind padding.
        places_BT = batch.get(f"{prefix}positions") if "slot" in batch else batch.get(f"{prefix}places")
        first = put_first(rows_BQD, places_BT)
        in_text = same if cfg.encoder else first
        x_BTD, table, keys_BT = embed_tokens(self, batch, dropout_key, first=in_text)
        if cfg.encoder_config and f"{t5.SOURCE}positions" in batch:
            batch = t5.Encoder(cfg.encoder_config, name="encoder")(batch, table, dropout_key, first)
        return self.decode(x_BTD, table, keys_BT, batch, cache)


class Queries(Stack):
    """A stack of blocks from learned query tokens to the image tokens that precede a text (the Q-Former)."""

    @nn.compact
    def __call__(
        self, memory_BSM: jax.Array, row_B: jax.Array, image_rows: int, dropout_key: jax.Array | None = None
    ) -> jax.Array:
        """The query tokens of each image after the last block, [B, Q, D].

        memory_BSM: the image encoder's output, of which all but the first `image_rows` rows are padding. row_B: see
        `decoder.Decoder`.
        """
        cfg, (B, S) = self.cfg, memory_BSM.shape[:2]
        rows_QD = use(matrix(self, "query_rows", "positions embed", (cfg.context, cfg.embed), cfg))
        x_BQD = Norm(cfg, name="embedding_norm")(shard(jnp.broadcast_to(rows_QD, (B, *rows_QD.shape)), RESIDUAL))
        ones_BQ = jnp.ones((B, cfg.context), jnp.int32)
        rows = {"row": row_B, "positions": ones_BQ, "segment_ids": ones_BQ, "memory": memory_BSM}
        rows["memory_segment_ids"] = jnp.broadcast_to((jnp.arange(S) < image_rows).astype(jnp.int32), (B, S))
        x_BQD, keys_BQ = before_blocks(cfg, x_BQD, rows, dropout_key)
        return self.blocks(x_BQD, rows, keys_BQ)[0]


def embed_images(
    module: nn.Module, cfg: config.ModelConfig, batch: dict[str, jax.Array], dropout_key: jax.Array | None
) -> jax.Array:
    """The image tokens of `batch`, [B, Q, D]. Its patches are those of `vit.ImageClassifier`.

    `module`, whose width is D, holds the weights: in its parts `vision` and `queries`, and a projection of its own.
    """
    assert cfg.vision_config and cfg.queries_config
    keys = [None if dropout_key is None else jax.random.fold_in(dropout_key, i) for i in (2, 3)]
    images = {name: batch[name] for name in ("patches", "row")}
    memory_BSM = shard(VisionTower(cfg.vision_config, name="vision")(images, keys[0]), MEMORY)
    x_BQO = Queries(cfg.queries_config, name="queries")(memory_BSM, batch["row"], cfg.vision_config.context, keys[1])
    sizes = cfg.queries_config.embed, cfg.embed
    projection = matrix(module, "query_projection", "stream_width embed", sizes, cfg)
    with gathered(shard(x_BQO, TRANSFORMED), TRANSFORMED, TRANSFORMED) as in_BQO:
        x_BQD = like(project(in_BQO, projection), BLOCK_INPUT)
    return x_BQD + bias(module, "query_projection_bias", "embed", sizes[1:], cfg)


def put_first(rows_BQD: jax.Array | None, places_BT: jax.Array | None = None) -> Callable[[jax.Array], jax.Array]:
    """A function that puts image tokens, if there are any, at the first positions of embedded tokens, [B, T, D].

    places_BT: the position of each token in its row, if rows are reordered or begin with padding.
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


def _text(cfg: config.ModelConfig) -> Family:
    """The family of the text model that reads the image tokens."""
    return t5.FAMILY if cfg.encoder else text.FAMILY


def _inputs(cfg: config.ModelConfig, shape: Shape) -> dict[str, Input]:
    patches = {"patches": image_input(cfg, shape.batch, shape.image_rows)}
    return _text(cfg).inputs(cfg, shape._replace(segments=True)) | patches


def _smallest(cfg: config.ModelConfig) -> Shape:
    """The shape of an image and one token behind it."""
    assert cfg.vision and cfg.vision.queries
    rows = 1 + cfg.vision.queries.rows
    return Shape(seq=rows, source_seq=rows, image_rows=cfg.vision.patches.rows)


def _prompt_batch(cfg: config.ModelConfig, prompts: jax.Array, ahead_BT: jax.Array) -> dict[str, jax.Array]:
    """The batch of images as prompts. A text continues their image tokens and one token, or has them as its source."""
    assert cfg.vision and cfg.vision.queries
    queries = cfg.vision.queries
    tokens_BT = jnp.where(ahead_BT < queries.rows, queries.token, queries.start_token)
    return _text(cfg).prompt_batch(cfg, tokens_BT, ahead_BT) | {"patches": prompts}


FAMILY = Family(
    module=ImageDecoder,
    fits=lambda cfg: cfg.vision and cfg.vision.queries,
    inputs=_inputs,
    smallest=_smallest,
    prompts=image_input,
    prompt_batch=_prompt_batch,
    start_token=lambda cfg: (cfg.encoder or cfg.vision.queries).start_token,
)
