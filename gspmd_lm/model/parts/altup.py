"""Additions to the residual stream: more streams, a low-rank product, and embeddings of tokens for each layer.

AltUp (arXiv 2301.13310) has several residual streams, of which a block computes the first. LAuReL (arXiv 2411.07501)
adds a low-rank product. Gemma 3n has both, and an embedding of each token for each layer, which enters the other
streams.
"""

from collections.abc import Callable, Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp

from gspmd_lm import config
from gspmd_lm.model.block import BLOCK_INPUT, RESIDUAL, Branch, BranchMaker, Stream
from gspmd_lm.model.norm import Change, Norm
from gspmd_lm.model.parts.activations import ACTIVATIONS, root
from gspmd_lm.model.tokens import Tokens
from gspmd_lm.model.weights import matrix, weight
from gspmd_lm.sharding.annotate import like, recomputed, shard, use
from gspmd_lm.sharding.matmuls import look_up

STREAMS = "residual: streams batch seq embed"
INPUTS = "residual: layers batch seq layer_embed"


class AltUp(nn.Module):
    """Several residual streams around one block (AltUp). It works on each token by itself."""

    cfg: config.ModelConfig

    def setup(self):
        cfg, D, M = self.cfg, self.cfg.embed, self.cfg.residual.streams
        self.altup_router = matrix(self, "altup_router", "embed streams", (D, M), cfg)
        self.altup_predict = matrix(self, "altup_predict", "coefficients streams", (M * M, M), cfg)
        self.altup_correct = matrix(self, "altup_correct", "coefficients streams", (M, M), cfg)
        self.router_norm = Norm(cfg)
        if cfg.residual.layer_embed:
            ones = nn.initializers.ones
            self.altup_scale = weight(self, "altup_scale", "embed", (D,), cfg, ones)
            self.layer_gate = matrix(self, "layer_gate", "embed layer_embed", (D, cfg.residual.layer_embed), cfg)
            self.layer_out = matrix(self, "layer_out", "layer_embed embed", (cfg.residual.layer_embed, D), cfg)
            self.layer_norm = Norm(cfg)

    def before(self, x_MBTD: jax.Array) -> jax.Array:
        """All streams, predicted from each other. The block reads the first."""
        M = len(x_MBTD)
        parts_UBT = jnp.einsum("BTM,UM->UBT", self._features(x_MBTD[0]), use(self.altup_predict))

        @recomputed
        def predict(x_MBTD: jax.Array, parts_UBT: jax.Array) -> jax.Array:
            exact_MBTD, parts_MMBT1 = x_MBTD.astype(jnp.float32), parts_UBT.reshape(M, M, *parts_UBT.shape[1:], 1)
            return (exact_MBTD + (parts_MMBT1 * exact_MBTD).sum(1)).astype(x_MBTD.dtype)

        return like(predict(x_MBTD, parts_UBT), STREAMS)

    def after(self, predicted_MBTD: jax.Array, x_BTD: jax.Array, input_BTY: jax.Array | None) -> jax.Array:
        """All streams after the block, whose output is `x_BTD`. `input_BTY`: the tokens' embeddings for this layer."""
        cfg = self.cfg
        parts_MBT = jnp.einsum("BTM,UM->UBT", self._features(x_BTD), use(self.altup_correct))

        @recomputed
        def correct(predicted_MBTD: jax.Array, x_BTD: jax.Array, parts_MBT: jax.Array) -> jax.Array:
            change_BTD = (x_BTD - predicted_MBTD[0]).astype(jnp.float32)
            return predicted_MBTD + ((1 + parts_MBT)[..., None] * change_BTD).astype(x_BTD.dtype)

        streams_MBTD = correct(predicted_MBTD, x_BTD, parts_MBT)
        if input_BTY is not None:
            first_BTD = streams_MBTD[0] * use(self.altup_scale)
            gate_BTY = jnp.einsum("BTD,DY->BTY", first_BTD, use(self.layer_gate))
            gated_BTY = ACTIVATIONS[cfg.feed_forward.activation](gate_BTY) * input_BTY
            own_BTD = self.layer_norm(like(jnp.einsum("BTY,YD->BTD", gated_BTY, use(self.layer_out)), RESIDUAL))
            others = jnp.arange(len(streams_MBTD))[:, None, None, None] > 0
            streams_MBTD += jnp.where(others, own_BTD, 0)
        return shard(streams_MBTD, STREAMS)

    def _features(self, x_BTD: jax.Array) -> jax.Array:
        """[B, T, M], float32, from -1 to 1."""
        normed_BTD = self.router_norm(x_BTD) / x_BTD.shape[-1]
        return jnp.tanh(jnp.einsum("BTD,DM->BTM", normed_BTD, use(self.altup_router)).astype(jnp.float32))


class Laurel(nn.Module):
    """A low-rank product beside attention."""

    cfg: config.ModelConfig

    @nn.compact
    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """`x_BTD` plus its normed low-rank product. The rank is never sharded."""
        cfg, D, R = self.cfg, self.cfg.embed, self.cfg.residual.laurel_rank
        inward = matrix(self, "laurel_in", "embed rank", (D, R), cfg)
        outward = matrix(self, "laurel_out", "rank embed", (R, D), cfg)
        low_BTR = jnp.einsum("BTD,DR->BTR", x_BTD, use(inward))
        return x_BTD + Norm(cfg, name="norm")(like(jnp.einsum("BTR,RD->BTD", low_BTR, use(outward)), RESIDUAL))


def around_streams(
    cfg: config.ModelConfig, makers: Sequence[BranchMaker], module: nn.Module
) -> Callable[[jax.Array, Tokens], Stream]:
    """One branch around several residual streams, which runs the branches of a layer on the first of them."""
    branches = [make(module) for make in makers]
    altup = AltUp(cfg, name="altup")

    def compute(x_MBTD: jax.Array, tokens: Tokens) -> Stream:
        streams_MBTD = altup.before(x_MBTD)
        x_BTD = streams_MBTD[0]
        for branch in branches:
            x_BTD, tokens = yield from branch(x_BTD, tokens)
        return altup.after(streams_MBTD, x_BTD, tokens.input_BTY), tokens

    return compute


def with_laurel(
    cfg: config.ModelConfig, make: Callable[[nn.Module], Branch], module: nn.Module
) -> Callable[[jax.Array, Tokens], Stream]:
    """A branch with a low-rank product beside it, which reads the same input."""
    branch, laurel = make(module), Laurel(cfg, name="laurel")

    def compute(x_BTD: jax.Array, tokens: Tokens) -> Stream:
        normed_BTD = branch.before(x_BTD)
        x_BTD, tokens = yield from branch._replace(before=lambda _: normed_BTD)(x_BTD, tokens)
        return (x_BTD + laurel(normed_BTD)) * jnp.asarray(0.5**0.5, x_BTD.dtype), tokens

    return compute


class LayerInputs(nn.Module):
    """Embeddings of tokens for each layer."""

    cfg: config.ModelConfig

    @nn.compact
    def __call__(self, x_BTD: jax.Array, tokens_BT: jax.Array) -> jax.Array:
        """[L, B, T, Y]: the mean of a look-up in a table and of a projection of embedded tokens, times sqrt(2)."""
        cfg, L, Y = self.cfg, self.cfg.layers, self.cfg.residual.layer_embed
        table = matrix(self, "layer_table", "vocab embed", (cfg.vocab_rows, L * Y), cfg)
        tokens_BT = jnp.where(tokens_BT < (cfg.residual.layer_vocab or cfg.vocab), tokens_BT, 0)
        found_BTD = look_up(table, shard(tokens_BT, "tokens: batch seq"), BLOCK_INPUT, RESIDUAL)
        found_LBTY = jnp.moveaxis(found_BTD.reshape(*tokens_BT.shape, L, Y), 2, 0)
        inward = matrix(self, "layer_in", "layers embed layer_embed", (L, cfg.embed, Y), cfg)
        made_LBTY = jnp.einsum("BTD,LDY->LBTY", x_BTD, use(inward)) * jnp.asarray(cfg.embed**-0.5, x_BTD.dtype)
        made_LBTY = Norm(cfg, "layer_embed", name="norm")(like(made_LBTY, INPUTS))
        sum_LBTY = made_LBTY + found_LBTY * jnp.asarray(Y**0.5, x_BTD.dtype)
        return like(sum_LBTY * jnp.asarray(0.5**0.5, x_BTD.dtype), INPUTS)


class Streams(nn.Module):
    """Projections that split one residual stream into several before the first layer, and merge them after the last."""

    cfg: config.ModelConfig

    def setup(self):
        cfg, D, others = self.cfg, self.cfg.embed, self.cfg.residual.streams - 1
        self.streams_in = matrix(self, "streams_in", "streams embed stream_width", (others, D, D), cfg)
        self.streams_out = matrix(self, "streams_out", "streams embed stream_width", (others, D, D), cfg)

    def apart(self, x_BTD: jax.Array) -> jax.Array:
        """The streams before the first layer, [M, B, T, D]. A token has the same root mean square in all of them."""
        others_MBTD = jnp.einsum("BTD,MDO->MBTO", x_BTD, use(self.streams_in))
        return shard(_alike(x_BTD, like(others_MBTD, STREAMS)), STREAMS)

    def together(self, x_MBTD: jax.Array) -> jax.Array:
        """The mean of the streams after the last layer, [B, T, D], scaled to the same root mean square first."""
        others_MBTD = jnp.einsum("MBTD,MDO->MBTO", x_MBTD[1:], use(self.streams_out))
        return shard(_alike(x_MBTD[0], like(others_MBTD, STREAMS)).mean(0), RESIDUAL)


def split_streams(cfg: config.ModelConfig, x_BTD: jax.Array) -> tuple[jax.Array, Change, None]:
    """Several residual streams, [M, B, T, D], and the function that merges them after the last layer."""
    streams = Streams(cfg, name="streams")
    return streams.apart(x_BTD), streams.together, None


def _alike(x_BTD: jax.Array, others_MBTD: jax.Array) -> jax.Array:
    """Both in one array, the others scaled so that each token's root mean square is that of `x_BTD`."""

    def size(x: jax.Array, least: float) -> jax.Array:
        return root(jnp.square(x.astype(jnp.float32)).mean(-1, keepdims=True), least)

    ratio_MBT1 = size(x_BTD, 0.0) / size(others_MBTD, 1e-5)
    return jnp.concatenate([x_BTD[None], (others_MBTD * ratio_MBT1).astype(x_BTD.dtype)])
