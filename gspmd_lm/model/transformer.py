"""The decoder: token ids in, hidden states and the output table out. It reads as if there were one device."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from gspmd_lm import axes, config
from gspmd_lm.axes import Weight, shard
from gspmd_lm.model.attention import Attention
from gspmd_lm.model.layers import Mlp, Norm, dropout, look_up, matrix, sinusoids, weight
from gspmd_lm.model.projection import RESIDUAL, fan_in, fan_out


class Block(nn.Module):
    """One layer: attention and MLP, one after the other or side by side, around a residual stream."""

    cfg: config.Model

    @nn.compact
    def __call__(self, x_BTD: jax.Array, layer: jax.Array, batch: dict[str, jax.Array], row_keys_B: jax.Array | None):
        cfg = self.cfg
        # Without a name of its own here, a scan keeps what it carries on the device whatever the remat policy says.
        x_BTD = checkpoint_name(checkpoint_name(x_BTD, "layer_input"), "residual")
        attention, mlp = Attention(cfg, name="attention"), Mlp(cfg, name="mlp")
        if row_keys_B is not None:
            row_keys_B = jax.vmap(jax.random.fold_in, in_axes=(0, None))(row_keys_B, layer)

        def write(x_BTD: jax.Array, y_BTD: jax.Array, site: int, *biases: jax.Array) -> jax.Array:
            y_BTD = dropout(sum(biases, y_BTD), cfg.dropout, row_keys_B, site)
            return shard(x_BTD + y_BTD, RESIDUAL)

        attention_biases = (attention.bo,) if cfg.attention_out_bias else ()
        mlp_biases = (mlp.b_down,) if cfg.mlp_bias else ()
        normed_BTD = Norm(cfg, name="attention_norm")(x_BTD)
        if cfg.block == "parallel":
            q, k, v, *read = fan_out(normed_BTD, *attention.products(), *mlp.products())
            inputs = attention.attended(q, k, v, batch), mlp.hidden(*read)
            y_BTD = fan_in(inputs, attention.out(), mlp.out())
            return write(x_BTD, y_BTD, 0, *attention_biases, *mlp_biases), None
        q, k, v = fan_out(normed_BTD, *attention.products())
        x_BTD = write(x_BTD, fan_in((attention.attended(q, k, v, batch),), attention.out()), 0, *attention_biases)
        read = fan_out(Norm(cfg, name="mlp_norm")(x_BTD), *mlp.products())
        return write(x_BTD, fan_in((mlp.hidden(*read),), mlp.out()), 1, *mlp_biases), None


class Decoder(nn.Module):
    """A stack of blocks under one scan, so that the program does not grow with depth."""

    cfg: config.Model

    @nn.compact
    def __call__(
        self, batch: dict[str, jax.Array], dropout_key: jax.Array | None = None
    ) -> tuple[jax.Array, Weight, Weight | None]:
        """Hidden states after the last norm, [B, T, D], the table that turns them into logits, and its bias.

        `batch` holds int32 arrays: tokens [B, T], positions [B, T], row [B] (its number in the global batch, for
        dropout) and, where documents are packed, segment_ids [B, T]. Without `dropout_key` nothing is dropped.
        """
        cfg = self.cfg
        dtype = jnp.dtype(cfg.compute_dtype)
        embedding = matrix(self, "embedding", "vocab embed", (cfg.vocab_rows, cfg.embed), cfg)
        x_BTD = look_up(embedding, shard(batch["tokens"], "tokens: batch seq"))
        if cfg.positions == "learned":
            table = matrix(self, "position_embedding", "positions embed", (cfg.context, cfg.embed), cfg)
            x_BTD += axes.use(table)[batch["positions"]]
        elif cfg.positions == "sinusoidal":
            x_BTD += sinusoids(batch["positions"], cfg.embed).astype(dtype)
        row_keys_B = None
        if dropout_key is not None and cfg.dropout:
            row_keys_B = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(dropout_key, batch["row"])
            x_BTD = dropout(x_BTD, cfg.dropout, row_keys_B, 0)
        x_BTD = shard(x_BTD, RESIDUAL)
        remat = axes.remat()
        layers = nn.scan(
            nn.remat(Block, prevent_cse=False, policy=remat.policy) if remat else Block,  # a scan is CSE barrier enough
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=cfg.layers,
            in_axes=(0, nn.broadcast, nn.broadcast),  # type: ignore[arg-type]
            metadata_params={nn.PARTITION_NAME: "layers"},
        )(cfg, name="layers")
        x_BTD, _ = layers(x_BTD, jnp.arange(1, cfg.layers + 1), batch, row_keys_B)
        x_BTD = Norm(cfg, name="final_norm")(x_BTD)
        unembedding = embedding
        if not cfg.tied_embeddings:
            unembedding = matrix(self, "unembedding", "vocab embed", (cfg.vocab_rows, cfg.embed), cfg)
        unembedding_bias = None
        if cfg.unembedding_bias:
            zeros = nn.initializers.zeros
            unembedding_bias = weight(self, "unembedding_bias", "vocab", (cfg.vocab_rows,), cfg, zeros)
        return x_BTD, unembedding, unembedding_bias


def decode(
    cfg: config.Model, params: Any, batch: dict[str, jax.Array], dropout_key: jax.Array | None = None
) -> tuple[jax.Array, Weight, Weight | None]:
    """What Decoder returns for plain (unboxed) parameters."""
    return Decoder(cfg).apply({"params": params}, batch, dropout_key)  # type: ignore[return-value]


def init(cfg: config.Model, key: jax.Array) -> Any:
    """The parameters, a nested dict of LogicallyPartitioned arrays; the same values wherever they are placed."""
    tokens = jnp.zeros((1, 1), jnp.int32)
    batch = {"tokens": tokens, "positions": tokens, "row": tokens[0]}
    return Decoder(cfg).init(key, batch)["params"]
