"""The decoder: token ids in, hidden states and the output table out. It reads as if there were one device."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from einops import rearrange
from jax.ad_checkpoint import checkpoint_name

from gspmd_lm import config
from gspmd_lm.model.altup import AltUp, Laurel, LayerInputs, Streams
from gspmd_lm.model.attention import Attention
from gspmd_lm.model.cache import Cache, Kept, in_cache, no_keys
from gspmd_lm.model.delta import GatedDeltaNet
from gspmd_lm.model.latent_attention import LatentAttention
from gspmd_lm.model.layers import BLOCK_INPUT, RESIDUAL, Mlp, Norm, dropout, sinusoids, table_specs
from gspmd_lm.model.moe import Experts, RouterOutput
from gspmd_lm.model.weights import matrix, weight
from gspmd_lm.sharding import pipeline
from gspmd_lm.sharding.annotate import Weight, interleave, like, remat, shard, unroll, use
from gspmd_lm.sharding.matmuls import gathered, look_up, project, sharing_weights
from gspmd_lm.sharding.partial_sums import Unreduced, reduced

# From layer to layer: the residual stream, or several, [M, B, T, D]; the cache, and the keys kept for later layers.
Carried = tuple[jax.Array, Cache[jax.Array] | None, Kept | None]


class Block(nn.Module):
    """One layer: attention and MLP, one after the other or side by side, around a residual stream."""

    cfg: config.ModelConfig

    @nn.compact
    def __call__(
        self,
        carried: Carried,
        layer: jax.Array | int,
        input_BTY: jax.Array | None,
        batch: dict[str, jax.Array],
        keys_BT: jax.Array | None,
    ) -> tuple[Carried, RouterOutput | None]:
        cfg = self.cfg
        x_BTD, cache, kept = carried
        # Without these names, a scan keeps its carry on the device, whatever the remat policy says.
        x_BTD = checkpoint_name(checkpoint_name(x_BTD, "layer_input"), "residual")
        altup, streams_MBTD = None, x_BTD
        if cfg.residual_streams > 1:
            altup = AltUp(cfg, name="altup")
            streams_MBTD = altup.before(x_BTD)
            x_BTD = streams_MBTD[0]
        linear = GatedDeltaNet(cfg, name="linear_attention") if cfg.linear_attention else None
        attention = linear or (LatentAttention if cfg.latent_attention else Attention)(cfg, name="attention")
        mlp = (Experts if cfg.experts else Mlp)(cfg, name="mlp")
        if keys_BT is not None:
            keys_BT = jax.vmap(jax.vmap(jax.random.fold_in, (0, None)), (0, None))(keys_BT, layer + 1)

        def normed(x_BTD: jax.Array, name: str) -> jax.Array:
            return Norm(cfg, name=f"{name}_norm")(x_BTD) if cfg.pre_norms else x_BTD

        def fed(normed_BTD: jax.Array) -> tuple[Unreduced, RouterOutput | None]:
            with gathered(normed_BTD, BLOCK_INPUT, RESIDUAL) as in_BTD:
                return mlp(in_BTD)

        def added(x_BTD: jax.Array, y: Unreduced, site: int, name: str) -> jax.Array:
            y_BTD = reduced(y, BLOCK_INPUT, RESIDUAL)
            if cfg.post_norms:
                y_BTD = Norm(cfg, name=f"{name}_post_norm")(y_BTD)
            if cfg.residual_scale != 1:
                y_BTD *= jnp.asarray(cfg.residual_scale, y_BTD.dtype)
            x_BTD += dropout(y_BTD, cfg.dropout, keys_BT, site)
            return shard(Norm(cfg, name=f"{name}_sum_norm")(x_BTD) if cfg.sum_norms else x_BTD, RESIDUAL)

        place = batch["cache_layer"][layer] if "cache_layer" in batch else layer
        routed, parallel = None, cfg.block == "parallel"
        normed_BTD = normed(x_BTD, "attention")
        with gathered(normed_BTD, BLOCK_INPUT, RESIDUAL) as in_BTD:
            y, cache, kept = attention(in_BTD, batch, cache, place, kept)
            if parallel:
                y_mlp, routed = fed(normed_BTD if cfg.shared_norm else normed(x_BTD, "mlp"))
                y += y_mlp
        x_BTD = added(x_BTD, y, 0, "attention_mlp" if parallel else "attention")
        if not parallel:
            if cfg.laurel_rank:
                x_BTD = (x_BTD + Laurel(cfg, name="laurel")(normed_BTD)) * jnp.asarray(0.5**0.5, x_BTD.dtype)
            y, routed = fed(normed(x_BTD, "mlp"))
            x_BTD = added(x_BTD, y, 1, "mlp")
        return (altup.after(streams_MBTD, x_BTD, input_BTY) if altup else x_BTD, cache, kept), routed


class Interleaved(nn.Module):
    """A layer that computes the rows in parts, side by side: what one part sends hides behind the products of another
    (arXiv 2409.15241). Its parameters are those of a block.
    """

    cfg: config.ModelConfig

    @nn.compact
    def __call__(
        self,
        carried: Carried,
        layer: jax.Array | int,
        input_BTY: jax.Array | None,
        batch: dict[str, jax.Array],
        keys_BT: jax.Array | None,
    ) -> tuple[Carried, RouterOutput | None]:
        block = Block(self.cfg, name="block")
        nn.share_scope(self, block)
        x_BTD, parts = carried[0], interleave()
        # No row moves: each device has rows of every part.
        rows = jax.tree.map(lambda x: rearrange(x, "(b p) ... -> p b ...", p=parts), (x_BTD, batch, keys_BT))
        computed = []
        with sharing_weights():
            for i in range(parts):
                x_bTD, of_part, keys_bT = jax.tree.map(lambda x, i=i: x[i], rows)
                computed.append(block((shard(x_bTD, RESIDUAL), None, None), layer, None, of_part, keys_bT)[0][0])
        return (shard(rearrange(jnp.stack(computed), "p b ... -> (b p) ..."), RESIDUAL), None, None), None


class Pattern(nn.Module):
    """The layers of one turn of a pattern: block_0, block_1, ..."""

    kinds: tuple[config.ModelConfig, ...]

    @nn.compact
    def __call__(self, carried: Carried, first: jax.Array, inputs: jax.Array | None, *rest: Any):
        routed = []
        for i, kind in enumerate(self.kinds):
            input_BTY = None if inputs is None else inputs[i]
            carried, of_block = _block(carried, alone=False)(kind, name=f"block_{i}")(
                carried, first + i, input_BTY, *rest
            )
            routed += [of_block] if of_block else []
        return carried, jax.tree.map(lambda *each: jnp.stack(each), *routed) if routed else None


class Decoder(nn.Module):
    """A stack of blocks under one scan, so that the program does not grow with depth."""

    cfg: config.ModelConfig

    @nn.compact
    def __call__(
        self, batch: dict[str, jax.Array], dropout_key: jax.Array | None = None, cache: Cache[jax.Array] | None = None
    ) -> tuple[jax.Array, Weight, Weight | None, Cache[jax.Array] | None, RouterOutput | None]:
        """Hidden states, [B, T, D], the table that turns them into logits, its bias, the cache, and what the routers
        did, [L, ...] for the layers with experts.

        Hidden states have the width of the table: [B, T, W] if it has one of its own.

        `batch` holds int32 arrays: tokens [B, T], positions [B, T], row [B] (its number in the global batch, for
        dropout), where documents are packed segment_ids [B, T], and places [B, T] if tokens do not stand in their order
        (see kernels/context.py). Without `dropout_key` nothing is dropped.
        With a cache, it also holds slot [], where the T tokens begin, and start [B], where each row's first token is.
        """
        cfg = self.cfg
        dtype = jnp.dtype(cfg.compute_dtype)
        if cache and (cache.linear or cfg.shared_kv_layers):
            batch = batch | {"cache_layer": jnp.array(in_cache(cfg))}
        reduced_spec, gathered_spec = table_specs(cfg)
        width, axis = (cfg.embedding_width, "embedding_width") if cfg.embedding_width else (cfg.embed, "embed")
        embedding = matrix(self, "embedding", f"vocab {axis}", (cfg.vocab_rows, width), cfg)
        x_BTD = look_up(embedding, shard(batch["tokens"], "tokens: batch seq"), gathered_spec, reduced_spec)
        if cfg.embedding_width:
            inward = matrix(self, "embedding_in", "embedding_width embed", (width, cfg.embed), cfg)
            with gathered(x_BTD, gathered_spec, reduced_spec) as in_BTW:
                x_BTD = like(like(project(in_BTW, inward), BLOCK_INPUT), RESIDUAL)
        if cfg.embedding_scale != 1:
            x_BTD *= jnp.asarray(cfg.embedding_scale, dtype)
        if cfg.positions == "learned":
            rows = cfg.position_offset + cfg.context
            table = matrix(self, "position_embedding", "positions embed", (rows, cfg.embed), cfg)
            # The look-up is in float32, so that a position's gradients, one for each row, are added up in float32.
            table_PD = use(table, jnp.float32)
            x_BTD += table_PD[cfg.position_offset + batch["positions"]].astype(dtype)
        elif cfg.positions == "sinusoidal":
            x_BTD += sinusoids(batch["positions"], cfg.embed).astype(dtype)
        if cfg.embedding_norm:
            x_BTD = Norm(cfg, name="embedding_norm")(x_BTD)
        keys_BT = None
        if dropout_key is not None and cfg.dropout:
            # A key for each token, so that its mask is the same wherever the token is computed.
            places_BT = batch.get("places", jnp.broadcast_to(jnp.arange(x_BTD.shape[1]), x_BTD.shape[:2]))
            keys_B = jax.vmap(jax.random.fold_in, (None, 0))(dropout_key, batch["row"])
            keys_BT = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)))(keys_B, places_BT)
            x_BTD = dropout(x_BTD, cfg.dropout, keys_BT, 0)
        inputs, streams, kept = None, None, None
        if cfg.layer_embed:
            inputs = LayerInputs(cfg, name="per_layer_inputs")(x_BTD, batch["tokens"])
        if cfg.residual_streams > 1:
            streams = Streams(cfg, name="streams")
            x_BTD = streams.apart(x_BTD)
        else:
            x_BTD = shard(x_BTD, RESIDUAL)
        if cfg.shared_kv_layers:
            kept = no_keys(cfg, *batch["tokens"].shape)
        routed: list[RouterOutput] = []
        for stack in cfg.stacks:
            if stack.kinds[0].shared_kv_layers and kept:
                shared = {
                    f"shared_{name}_{kind}": x for kind, kv in kept.items() for name, x in zip("kv", kv, strict=True)
                }
                batch, kept = batch | shared, None
            (x_BTD, cache, kept), of_stack = self._stack(stack, (x_BTD, cache, kept), inputs, batch, keys_BT)
            routed += of_stack
        if streams:
            x_BTD = streams.together(x_BTD)
        if cfg.final_norm:
            x_BTD = Norm(cfg, name="final_norm")(x_BTD)
        if cfg.embedding_width:
            outward = matrix(self, "embedding_out", "embed embedding_width", (cfg.embed, width), cfg)
            with gathered(x_BTD, BLOCK_INPUT, RESIDUAL) as in_BTD:
                x_BTD = like(like(project(in_BTD, outward), gathered_spec), reduced_spec)
        unembedding = embedding
        if not cfg.tied_embeddings:
            unembedding = matrix(self, "unembedding", f"vocab {axis}", (cfg.vocab_rows, width), cfg)
        unembedding_bias = None
        if cfg.unembedding_bias:
            zeros = nn.initializers.zeros
            unembedding_bias = weight(self, "unembedding_bias", "vocab", (cfg.vocab_rows,), cfg, zeros)
        every = jax.tree.map(lambda *each: jnp.concatenate(each), *routed) if routed else None
        return x_BTD, unembedding, unembedding_bias, cache, every

    def _stack(
        self,
        stack: config.Stack,
        carried: Carried,
        inputs_LBTY: jax.Array | None,
        batch: dict[str, jax.Array],
        keys_BT: jax.Array | None,
    ) -> tuple[Carried, list[RouterOutput]]:
        """What is carried after the layers of `stack`, and what their routers did, [layers, ...] each."""
        parts = pipeline.parts(stack.name)
        if parts > 1:
            x_BTD, cache, kept = carried
            x_BTD, routed = self._in_stages(stack, parts, x_BTD, batch, keys_BT)
            carried = x_BTD, cache, kept
        else:
            inputs = None if inputs_LBTY is None else inputs_LBTY[stack.first : stack.first + stack.scanned]
            carried, routed = _loop(stack, stack.scanned, stack.first, carried, inputs, batch, keys_BT)
        of_layers = [routed]
        for i, kind in enumerate(stack.kinds[: stack.layers - stack.scanned]):
            layer = stack.first + stack.scanned + i
            input_BTY = None if inputs_LBTY is None else inputs_LBTY[layer]
            block = _block(carried, alone=False)(kind, name=f"layer_{layer}")
            carried, routed = block(carried, layer, input_BTY, batch, keys_BT)
            of_layers.append(jax.tree.map(lambda x: x[None], routed))
        return carried, [each for each in of_layers if each is not None]

    def _in_stages(
        self, stack: config.Stack, parts: int, x_BTD: jax.Array, batch: dict[str, jax.Array], keys_BT: jax.Array | None
    ) -> tuple[jax.Array, RouterOutput | None]:
        """The loop over a stack that is cut in so many parts."""
        layers = stack.scanned // parts
        weights = self.variables["params"][stack.name]
        of_rows = {name: x for name, x in batch.items() if name in ("positions", "segment_ids", "places")}

        def part(weights: Any, number: jax.Array, x_BTD: jax.Array, of_rows: tuple[Any, Any]) -> tuple[Any, ...]:
            first = stack.first + layers * number
            some = Layers(stack, layers, parent=None)
            x_BTD, routed = some.apply({"params": {stack.name: weights}}, first, x_BTD, *of_rows)
            return x_BTD, *(routed or (None, None))

        x_BTD, *routed = pipeline.in_stages(part, weights, x_BTD, (of_rows, keys_BT))
        return x_BTD, RouterOutput(*routed) if routed[0] is not None else None


class Layers(nn.Module):
    """Some layers of a stack: those of a part of a pipeline."""

    stack: config.Stack
    layers: int

    @nn.compact
    def __call__(self, first: jax.Array, x_BTD: jax.Array, batch: dict[str, jax.Array], keys_BT: jax.Array | None):
        carried, routed = _loop(self.stack, self.layers, first, (x_BTD, None, None), None, batch, keys_BT)
        return carried[0], routed


def _loop(
    stack: config.Stack,
    layers: int,
    first: jax.Array | int,
    carried: Carried,
    inputs_LBTY: jax.Array | None,
    batch: dict[str, jax.Array],
    keys_BT: jax.Array | None,
) -> tuple[Carried, RouterOutput | None]:
    """What is carried after so many layers of `stack` from `first` on, and what their routers did, [layers, ...]."""
    kinds, length = stack.kinds, len(stack.kinds)
    turns = layers // length
    unrolled = unroll(turns)
    scanned: Any = {
        "variable_axes": {"params": 0},
        "split_rngs": {"params": True},
        "length": turns,
        "in_axes": (0, 0, nn.broadcast, nn.broadcast),
        "metadata_params": {nn.PARTITION_NAME: "layers"},
        "unroll": unrolled,
    }
    one = nn.scan(_block(carried, alone=unrolled == 1), **scanned)(kinds[0], name=stack.name) if length == 1 else None
    loop: Any = one or nn.scan(Pattern, **scanned)(kinds, name=stack.name)
    if inputs_LBTY is not None and length > 1:
        inputs_LBTY = inputs_LBTY.reshape(turns, length, *inputs_LBTY.shape[1:])
    carried, routed = loop(carried, first + length * jnp.arange(turns), inputs_LBTY, batch, keys_BT)
    return carried, routed if length == 1 else jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), routed)


def _block(carried: Carried, alone: bool = True) -> type[nn.Module]:
    """The module of a layer, recomputed in the backward pass if the rules say so. `carried`: what it is given.

    A block that is alone in a scan needs no barrier against common subexpressions. A block beside others does: without
    the barrier, the compiler reuses the results of the forward pass, or it recomputes all blocks at once and holds the
    gathered weights of all of them.
    """
    policy = remat()
    rows, cache = carried[0].shape[0], carried[1]
    layer = Interleaved if interleave() > 1 and cache is None and rows > 1 else Block
    return nn.remat(layer, prevent_cse=not alone, policy=policy) if policy else layer


def decode(
    cfg: config.ModelConfig, params: Any, batch: dict[str, jax.Array], dropout_key: jax.Array | None = None
) -> tuple[jax.Array, Weight, Weight | None]:
    """Hidden states, output table and its bias (see Decoder) for plain (unboxed) parameters."""
    return decode_routed(cfg, params, batch, dropout_key)[:3]


def decode_routed(
    cfg: config.ModelConfig, params: Any, batch: dict[str, jax.Array], dropout_key: jax.Array | None = None
) -> tuple[jax.Array, Weight, Weight | None, RouterOutput | None]:
    """What `decode` returns, and what the routers did."""
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
    tokens = jnp.zeros((1, 1), jnp.int32)
    batch = {"tokens": tokens, "positions": tokens, "row": tokens[0]}
    return Decoder(cfg).init(key, batch)["params"]
