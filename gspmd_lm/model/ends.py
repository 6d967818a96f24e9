"""The ends of a stack of blocks: token and position embeddings before it, the way to logits or classes after it."""

import functools
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp

from gspmd_lm import config
from gspmd_lm.model.block import BLOCK_INPUT, RESIDUAL, dropout
from gspmd_lm.model.mlp import ACTIVATIONS, hidden_layer
from gspmd_lm.model.norm import Norm
from gspmd_lm.model.rope import sinusoids
from gspmd_lm.model.weights import bias, matrix
from gspmd_lm.sharding.annotate import Weight, like, shard, use
from gspmd_lm.sharding.matmuls import gathered, look_up, project

EMBEDDED = "embedded: batch seq embedding_width"
TRANSFORMED = "transformed: batch seq stream_width"
TRANSFORMED_FOR_TABLE = "transformed: batch seq embedding_width"
SCORES = "class_scores: batch seq classes"

Batch = dict[str, jax.Array]
# A step on embedded tokens, [B, T, W]. The module holds its weights.
Step = Callable[[nn.Module, jax.Array, Batch], jax.Array]


def table_specs(cfg: config.ModelConfig) -> tuple[str, str]:
    """The specs of embeddings of the token table's width: as they are reduced, and as a matmul gathers them."""
    return {"embed": (RESIDUAL, BLOCK_INPUT), "embedding_width": (EMBEDDED, EMBEDDED)}[table_axis(cfg)[1]]


@functools.cache
def table_axis(cfg: config.ModelConfig) -> tuple[int, str]:
    """The width of the token table, and its logical axis."""
    return (cfg.embedding.width, "embedding_width") if cfg.embedding.width else (cfg.embed, "embed")


def embed_tokens(
    module: nn.Module,
    cfg: config.ModelConfig,
    batch: Batch,
    dropout_key: jax.Array | None,
    embedding: Weight | None = None,
    first: Callable[[jax.Array], jax.Array] = lambda x_BTD: x_BTD,
) -> tuple[jax.Array, Weight, jax.Array | None]:
    """The input of a text model's first block, [B, T, D], the token table, and a dropout key for each token.

    `module` holds the parameters, except a token table that is passed in. `batch` is that of `decoder.Decoder`.
    first: a function that is applied to embedded tokens before positions are added.
    """
    (width, axis), (reduced_spec, gathered_spec) = table_axis(cfg), table_specs(cfg)
    if embedding is None:
        embedding = matrix(module, "embedding", f"vocab {axis}", (cfg.vocab_rows, width), cfg)
    x_BTD = look_up(embedding, shard(batch["tokens"], "tokens: batch seq"), gathered_spec, reduced_spec)
    of_tokens, additions, of_sums = embedding_steps(cfg)
    for step in of_tokens:
        x_BTD = step(module, x_BTD, batch)
    x_BTD = first(x_BTD)
    for step in additions:
        x_BTD = step(module, x_BTD, batch)
    x_BTD, keys_BT = before_blocks(cfg, x_BTD, batch, dropout_key)
    for step in of_sums:
        x_BTD = step(module, x_BTD, batch)
    return x_BTD, embedding, keys_BT


@functools.cache
def embedding_steps(cfg: config.ModelConfig) -> tuple[list[Step], list[Step], list[Step]]:
    """The steps of embedding in their order: on rows of the token table, on tokens, and on the first block's input."""
    dtype = jnp.dtype(cfg.compute_dtype)
    from_table: list[Step] = []
    additions: list[Step] = []
    last: list[Step] = []
    wide, along = table_axis(cfg)  # of the embeddings that positions and types are added to
    if cfg.embedding.width and cfg.embedding.input == "tokens":
        from_table.append(lambda module, x_BTW, batch: _widen(module, cfg, x_BTW))
        wide, along = cfg.embed, "embed"
    if cfg.embedding.scale != 1:
        from_table.append(lambda module, x_BTD, batch: x_BTD * jnp.asarray(cfg.embedding.scale, dtype))
    # These look-ups are in float32, so that the gradients of a row, one for each token, are added up in float32.
    if cfg.positions == "learned":
        rows = cfg.embedding.position_offset + cfg.context

        def add_positions(module: nn.Module, x_BTD: jax.Array, batch: Batch) -> jax.Array:
            table = matrix(module, "position_embedding", f"positions {along}", (rows, wide), cfg)
            return x_BTD + use(table, jnp.float32)[cfg.embedding.position_offset + batch["positions"]].astype(dtype)

        additions.append(add_positions)
    if cfg.positions == "sinusoidal":
        additions.append(lambda module, x_BTD, batch: x_BTD + sinusoids(batch["positions"], wide).astype(dtype))
    if cfg.embedding.token_types:

        def add_types(module: nn.Module, x_BTD: jax.Array, batch: Batch) -> jax.Array:
            types = matrix(module, "type_embedding", f"types {along}", (cfg.embedding.token_types, wide), cfg)
            return x_BTD + use(types, jnp.float32)[batch["token_types"]].astype(dtype)

        additions.append(add_types)
    if cfg.embedding.norm:
        additions.append(lambda module, x_BTD, batch: Norm(cfg, along, name="embedding_norm")(x_BTD))
    if cfg.embedding.input == "sum":

        def widen(module: nn.Module, x_BTW: jax.Array, batch: Batch) -> jax.Array:
            return _widen(module, cfg, x_BTW, bias(module, "embedding_in_bias", "embed", (cfg.embed,), cfg))

        last.append(widen)
    return from_table, additions, last


def _widen(module: nn.Module, cfg: config.ModelConfig, x_BTW: jax.Array, bias_D: jax.Array | None = None) -> jax.Array:
    """Embeddings of the token table's width, projected to the residual stream, [B, T, D]."""
    inward = matrix(module, "embedding_in", "embedding_width embed", (cfg.embedding.width, cfg.embed), cfg)
    with gathered(x_BTW, EMBEDDED, EMBEDDED) as in_BTW:
        x_BTD = project(in_BTW, inward)
        return like(like(x_BTD if bias_D is None else x_BTD + bias_D, BLOCK_INPUT), RESIDUAL)


def before_blocks(
    cfg: config.ModelConfig, x_BTD: jax.Array, batch: dict[str, jax.Array], dropout_key: jax.Array | None
) -> tuple[jax.Array, jax.Array | None]:
    """`x_BTD` after the dropout before the first block, and a dropout key for each token, if any are dropped."""
    if dropout_key is None or not cfg.dropout:
        return x_BTD, None
    places_BT = batch.get("places", jnp.broadcast_to(jnp.arange(x_BTD.shape[1]), x_BTD.shape[:2]))
    keys_BT = token_keys(dropout_key, batch["row"], places_BT)
    return dropout(x_BTD, cfg.dropout, keys_BT, 0), keys_BT


def token_keys(dropout_key: jax.Array, row_B: jax.Array, places_BT: jax.Array) -> jax.Array:
    """A key for each token, so that its mask is the same wherever the token is computed."""
    keys_B = jax.vmap(jax.random.fold_in, (None, 0))(dropout_key, row_B)
    return jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)))(keys_B, places_BT)


def before_logits(module: nn.Module, cfg: config.ModelConfig, x_BTD: jax.Array) -> jax.Array:
    """The output of the last block as the token table multiplies it, [B, T, D], or [B, T, W] if it has that width."""
    return head(cfg)(module, cfg, x_BTD)


@functools.cache
def head(cfg: config.ModelConfig) -> Callable[[nn.Module, config.ModelConfig, jax.Array], jax.Array]:
    """A function from the output of the last block to the hidden states that the token table multiplies."""
    if cfg.logits.transform:
        return _transform_hidden
    return _narrow if cfg.embedding.width else lambda module, cfg, x_BTD: x_BTD


def _transform_hidden(module: nn.Module, cfg: config.ModelConfig, x_BTD: jax.Array) -> jax.Array:
    """The head of a masked language model: a matrix, the activation and a norm (BERT)."""
    (width, axis), (reduced_spec, _) = table_axis(cfg), table_specs(cfg)
    spec = TRANSFORMED_FOR_TABLE if cfg.embedding.width else TRANSFORMED
    y_BTD = hidden_layer(cfg)(_dense(module, cfg, x_BTD, "head_transform", width, spec))
    return Norm(cfg, axis, name="head_norm")(like(y_BTD, reduced_spec))


def _narrow(module: nn.Module, cfg: config.ModelConfig, x_BTD: jax.Array) -> jax.Array:
    """The residual stream, projected to the token table's width (OPT-350m)."""
    (width, axis), (reduced_spec, gathered_spec) = table_axis(cfg), table_specs(cfg)
    outward = matrix(module, "embedding_out", f"embed {axis}", (cfg.embed, width), cfg)
    with gathered(x_BTD, BLOCK_INPUT, RESIDUAL) as in_BTD:
        return like(like(project(in_BTD, outward), gathered_spec), reduced_spec)


def class_scores(module: nn.Module, cfg: config.ModelConfig, x_BTD: jax.Array) -> jax.Array:
    """The scores of each text's classes, [B, classes], float32, from the output of the last block (BERT).

    If tokens have classes, the scores are those of each token, [B, T, classes].
    """
    assert cfg.classes
    of_text = cfg.classes.of == "text"
    read_BTD = like(x_BTD[:, :1], RESIDUAL) if of_text else x_BTD
    pooled_BTO = ACTIVATIONS[cfg.classes.pooler](_dense(module, cfg, read_BTD, "pooler", cfg.embed, TRANSFORMED))
    scores_BTX = score_classes(module, cfg, pooled_BTO, "classifier", TRANSFORMED, TRANSFORMED)
    return scores_BTX[:, 0] if of_text else scores_BTX


def score_classes(
    module: nn.Module, cfg: config.ModelConfig, x_BTD: jax.Array, name: str, gathered_spec: str, reduced_spec: str
) -> jax.Array:
    """The scores of tokens of texts or images by the matrix `name`, [B, T, classes], float32."""
    axis = gathered_spec.rpartition(" ")[2]
    classifier = matrix(module, name, f"{axis} classes", (cfg.embed, cfg.num_classes), cfg)
    with gathered(x_BTD, gathered_spec, reduced_spec) as in_BTD:
        scores_BTX = shard(project(in_BTD, classifier), SCORES)
    return (scores_BTX + bias(module, f"{name}_bias", "classes", (cfg.num_classes,), cfg)).astype(jnp.float32)


def _dense(module: nn.Module, cfg: config.ModelConfig, x_BTD: jax.Array, name: str, width: int, spec: str) -> jax.Array:
    """A dense layer: `x_BTD` times a matrix to `width`, plus a bias, sharded as `spec` says."""
    axis = spec.rpartition(" ")[2]
    w = matrix(module, name, f"embed {axis}", (cfg.embed, width), cfg)
    with gathered(x_BTD, BLOCK_INPUT, RESIDUAL) as in_BTD:
        return shard(project(in_BTD, w) + bias(module, f"{name}_bias", axis, (width,), cfg), spec)
