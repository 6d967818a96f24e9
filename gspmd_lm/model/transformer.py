"""The models that a config describes, of texts: token ids in, and hidden states with the output table or scores of
classes out. Those of images are in images.py."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from gspmd_lm import config
from gspmd_lm.config.media import WINDOW
from gspmd_lm.model.cache import Cache
from gspmd_lm.model.ends import before_logits, class_scores, embedded, table_axis
from gspmd_lm.model.images import ImageClassifier, LevelsClassifier
from gspmd_lm.model.masks import Masker
from gspmd_lm.model.moe import RouterOutput
from gspmd_lm.model.parts.altup import LayerInputs
from gspmd_lm.model.parts.memory import MEMORY
from gspmd_lm.model.sounds import heard
from gspmd_lm.model.stack import Stack
from gspmd_lm.model.towers import Towers, before, read
from gspmd_lm.model.weights import matrix, weight
from gspmd_lm.sharding.annotate import Weight, shard

SOURCE = "source_"  # how the arrays of a source are called, beside those of the text that is made from it


class Encoder(Stack):
    """A stack of blocks from the tokens of a source, or from the frames of a sound, to what a decoder reads."""

    @nn.compact
    def __call__(
        self, batch: dict[str, jax.Array], embedding: Weight, rows_BQD: jax.Array | None, dropout_key: jax.Array | None
    ) -> dict[str, jax.Array]:
        """The batch of a decoder without the arrays of its source, with memory [B, S, D] and memory_segment_ids [B, S].

        embedding: the token table. rows_BQD: what stands in place of the first tokens. `batch`: see `Decoder`.
        """
        source = {name.removeprefix(SOURCE): x for name, x in batch.items() if name.startswith(SOURCE)}
        source |= {"row": batch["row"]}
        key = dropout_key if dropout_key is None else jax.random.fold_in(dropout_key, 1)
        places_BT = source["positions"] if "slot" in batch else None
        if self.cfg.frames:
            x_BTD, keys_BT = heard(self, self.cfg, source, key)
        else:
            x_BTD, _, keys_BT = embedded(self, self.cfg, source, key, embedding, before(rows_BQD, places_BT))
        memory_BSD = shard(self.blocks(x_BTD, source, keys_BT)[0], MEMORY)
        memory = {"memory": memory_BSD, "memory_segment_ids": source["segment_ids"]}
        return {name: x for name, x in batch.items() if not name.startswith(SOURCE)} | memory


class Decoder(Stack):
    """A stack of blocks from tokens to the hidden states that their logits are made of."""

    @nn.compact
    def __call__(
        self, batch: dict[str, jax.Array], dropout_key: jax.Array | None = None, cache: Cache[jax.Array] | None = None
    ) -> tuple[jax.Array, Weight, Weight | None, Cache[jax.Array] | None, RouterOutput | None]:
        """Hidden states, [B, T, D], the table that turns them into logits, its bias, the cache, and what the routers
        did, [L, ...] for the layers with experts.

        Hidden states have the width of the table: [B, T, W] if it has one of its own.

        `batch` holds int32 arrays: tokens [B, T], positions [B, T], row [B] (its number in the global batch, for
        dropout), token_types [B, T] if the model has any, where texts are packed or padded segment_ids [B, T] (0 for
        padding), and places [B, T] if tokens do not stand in their order (see kernels/context.py). Without
        `dropout_key` nothing is dropped.
        With a cache, it also holds slot [], where the T tokens begin, start [B], where each row's first token is, and
        length [B], how many tokens each row will have: positions that depend on it are those of a whole text.
        For an encoder it holds source_tokens, source_positions and source_segment_ids [B, S]; of sounds source_frames,
        see `sounds.heard`, in place of tokens. A token attends to the source whose segment has the number of its own.
        Once a cache has the keys of the source, it holds memory_segment_ids [B, S] in their place.
        With cfg.vision it holds patches [B, S, X] as `images.ImageClassifier` sees them. The rows that stand for an
        image then take the places of the first tokens of a row, or of its source.
        """
        cfg, prefix_BQD = self.cfg, None
        if cfg.of_queries and "patches" in batch:
            prefix_BQD = read(self, cfg, batch, dropout_key)
        batch = {name: x for name, x in batch.items() if name != "patches"}
        # Prompts stand behind padding.
        places_BT = batch["positions"] if "slot" in batch else batch.get("places")
        first = before(None if cfg.encoder else prefix_BQD, places_BT)
        x_BTD, embedding, keys_BT = embedded(self, cfg, batch, dropout_key, first=first)
        if cfg.of_encoder and f"{SOURCE}positions" in batch:
            batch = Encoder(cfg.of_encoder, name="encoder")(batch, embedding, prefix_BQD, dropout_key)
        inputs = LayerInputs(cfg, name="per_layer_inputs")(x_BTD, batch["tokens"]) if cfg.layer_embed else None
        x_BTD, cache, routed = self.blocks(x_BTD, batch, keys_BT, cache, inputs)
        x_BTD = before_logits(self, cfg, x_BTD)
        unembedding, unembedding_bias = embedding, None
        if not cfg.tied_embeddings:
            width, axis = table_axis(cfg)
            unembedding = matrix(self, "unembedding", f"vocab {axis}", (cfg.vocab_rows, width), cfg)
        if cfg.unembedding_bias:
            zeros = nn.initializers.zeros
            unembedding_bias = weight(self, "unembedding_bias", "vocab", (cfg.vocab_rows,), cfg, zeros)
        return x_BTD, unembedding, unembedding_bias, cache, routed


class TextClassifier(Stack):
    """A stack of blocks from tokens to the scores of the classes of each text, or of each token."""

    @nn.compact
    def __call__(self, batch: dict[str, jax.Array], dropout_key: jax.Array | None = None) -> jax.Array:
        """[B, classes], or [B, T, classes], float32. `batch`: see `Decoder`."""
        x_BTD, _, keys_BT = embedded(self, self.cfg, batch, dropout_key)
        return class_scores(self, self.cfg, self.blocks(x_BTD, batch, keys_BT)[0])


def classify(
    cfg: config.ModelConfig, params: Any, batch: dict[str, jax.Array], dropout_key: jax.Array | None = None
) -> jax.Array:
    """The scores of classes, [B, classes], or [B, T, classes] of tokens, float32, for plain (unboxed) parameters."""
    scored: Any = _module(cfg).apply({"params": params}, batch, dropout_key)
    return scored


def decode(
    cfg: config.ModelConfig, params: Any, batch: dict[str, jax.Array], dropout_key: jax.Array | None = None
) -> tuple[jax.Array, Weight, Weight | None]:
    """Hidden states, output table and its bias (see Decoder) for plain (unboxed) parameters."""
    return decode_routed(cfg, params, batch, dropout_key)[:3]


def decode_routed(
    cfg: config.ModelConfig, params: Any, batch: dict[str, jax.Array], dropout_key: jax.Array | None = None
) -> tuple[jax.Array, Weight, Weight | None, RouterOutput | None]:
    """What `decode` returns, and the outputs of the routers."""
    decoded: Any = Decoder(cfg).apply({"params": params}, batch, dropout_key)
    hidden, table, bias, _, routed = decoded
    return hidden, table, bias, routed


def extend(
    cfg: config.ModelConfig, params: Any, batch: dict[str, jax.Array], cache: Cache[jax.Array]
) -> tuple[jax.Array, Weight, Weight | None, Cache[jax.Array]]:
    """`decode` for the first tokens of each row, or for one more, with the cache to which they were added."""
    extended: Any = Decoder(cfg).apply({"params": params}, batch, None, cache)
    return extended[:4]


def init(cfg: config.ModelConfig, key: jax.Array) -> Any:
    """The parameters, a nested dict of LogicallyPartitioned arrays, with the same values under every placement."""
    tokens = jnp.zeros((1, 1 + (cfg.of_queries.context if cfg.of_queries else 0)), jnp.int32)
    batch = {"tokens": tokens, "positions": tokens, "token_types": tokens, "row": tokens[0, :1]}
    if cfg.encoder:
        batch |= {f"{SOURCE}{name}": tokens for name in ("tokens", "positions", "segment_ids")}
        batch["segment_ids"] = tokens
    if cfg.frames:
        batch[f"{SOURCE}frames"] = jnp.zeros((1, 1, WINDOW, cfg.frames.bands))
    if cfg.vision:
        patches = cfg.vision.patches
        batch |= {"segment_ids": tokens, "patches": jnp.zeros((1, patches.rows, patches.pixels))}
    if cfg.patches:
        batch = {"patches": jnp.zeros((1, cfg.context, cfg.patches.pixels)), "row": tokens[0, :1]}
    if cfg.masks:
        batch |= {"points": jnp.zeros((1, 1, 2)), "point_kinds": tokens, "prompt_mask": jnp.zeros((1, cfg.context, 16))}
    return _module(cfg).init(key, batch)["params"]


def _module(cfg: config.ModelConfig) -> Stack | LevelsClassifier:
    if cfg.vision and not cfg.vision.queries:
        return Towers(cfg)
    if cfg.masks:
        return Masker(cfg)
    if cfg.patches:
        return LevelsClassifier(cfg) if cfg.windows else ImageClassifier(cfg)
    return TextClassifier(cfg) if cfg.classes else Decoder(cfg)
