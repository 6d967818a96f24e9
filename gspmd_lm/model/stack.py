"""A stack of blocks: an array of the model's width in, and the same out. It reads as if there were one device."""

import dataclasses
import functools
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from einops import rearrange
from jax.ad_checkpoint import checkpoint_name

from gspmd_lm import config
from gspmd_lm.model.altup import AltUp, Laurel, Streams
from gspmd_lm.model.attention import Attention
from gspmd_lm.model.cache import Cache, Kept, in_cache, no_keys
from gspmd_lm.model.delta import GatedDeltaNet
from gspmd_lm.model.latent_attention import LatentAttention
from gspmd_lm.model.layers import BLOCK_INPUT, RESIDUAL, Mlp, Norm, convolved, dropout
from gspmd_lm.model.moe import Experts, RouterOutput
from gspmd_lm.model.weights import matrix, weight
from gspmd_lm.sharding import pipeline
from gspmd_lm.sharding.annotate import interleave, remat, shard, unroll, use
from gspmd_lm.sharding.chunks import Part, after, in_turns
from gspmd_lm.sharding.matmuls import gathered, sharing_weights
from gspmd_lm.sharding.partial_sums import Unreduced, for_all_layers, reduced

VECTORS = "vectors: ranges embed"


class Carried(NamedTuple):
    """From layer to layer.

    A loop carries the number of the layer, so that XLA knows it from the loop's own counter. On GPUs, matmuls then read
    a layer's keys and values where they lie in the cache.
    """

    layer: jax.Array | int  # counted from 0
    x_BTD: jax.Array  # the residual stream, or several, [M, B, T, D]
    cache: Cache[jax.Array] | None = None
    kept: Kept | None = None  # for later layers


class Block(nn.Module):
    """One layer: attention and MLP, one after the other or side by side, around a residual stream."""

    cfg: config.ModelConfig

    @nn.compact
    def __call__(
        self,
        carried: Carried,
        input_BTY: jax.Array | None,
        batch: dict[str, jax.Array],
        keys_BT: jax.Array | None,
    ) -> tuple[Carried, RouterOutput | None]:
        cfg = self.cfg
        layer, x_BTD, cache, kept = carried
        # Without these names, a scan keeps its carry on the device, whatever the remat policy says.
        x_BTD = checkpoint_name(checkpoint_name(x_BTD, "layer_input"), "residual")
        altup, streams_MBTD = None, x_BTD
        if cfg.residual_streams > 1:
            altup = AltUp(cfg, name="altup")
            streams_MBTD = altup.before(x_BTD)
            x_BTD = streams_MBTD[0]
        linear = GatedDeltaNet(cfg, name="linear_attention") if cfg.linear_attention else None
        of_tokens = dataclasses.replace(cfg, encoder=None, memory_width=0)
        attention = linear or (LatentAttention if cfg.latent_attention else Attention)(of_tokens, name="attention")
        mlp = (Experts if cfg.experts else Mlp)(cfg, name="mlp")
        cross = Attention(cfg.of_memory, name="cross") if cfg.reads else None
        laurel = Laurel(cfg, name="laurel") if cfg.laurel_rank else None
        if keys_BT is not None:
            keys_BT = jax.vmap(jax.vmap(jax.random.fold_in, (0, None)), (0, None))(keys_BT, layer + 1)

        @functools.cache  # all parts of the rows have the same modules and weights
        def norm(name: str) -> Norm:
            return Norm(cfg, name=f"{name}_norm")

        @functools.cache
        def layer_scale(name: str) -> jax.Array:
            start = nn.initializers.constant(cfg.layer_scale)
            return use(weight(self, f"{name}_layer_scale", "embed", (cfg.embed,), cfg, start))

        def normed(x_BTD: jax.Array, name: str) -> jax.Array:
            return norm(name)(x_BTD) if cfg.pre_norms else x_BTD

        def added(x_BTD: jax.Array, y: Unreduced, keys_BT: jax.Array | None, site: int, name: str) -> jax.Array:
            y_BTD = reduced(y, BLOCK_INPUT, RESIDUAL)
            if cfg.post_norms:
                y_BTD = norm(f"{name}_post")(y_BTD)
            if cfg.layer_scale:
                y_BTD *= layer_scale(name)
            if cfg.residual_scale != 1:
                y_BTD *= jnp.asarray(cfg.residual_scale, y_BTD.dtype)
            x_BTD += dropout(y_BTD, cfg.dropout, keys_BT, site)
            return shard(norm(f"{name}_sum")(x_BTD) if cfg.sum_norms else x_BTD, RESIDUAL)

        def computed(
            x_BTD: jax.Array,
            batch: dict[str, jax.Array],
            keys_BT: jax.Array | None,
            cache: Cache[jax.Array] | None = None,
            kept: Kept | None = None,
        ) -> Part[tuple[tuple[jax.Array, Cache[jax.Array] | None, Kept | None], RouterOutput | None]]:
            """The layer of some rows. At each `yield` it waits until other rows have gathered their inputs, too."""
            place = batch["cache_layer"][layer] if "cache_layer" in batch else layer
            routed, parallel = None, cfg.block == "parallel"
            normed_BTD = normed(x_BTD, "attention")
            with gathered(normed_BTD, BLOCK_INPUT, RESIDUAL) as in_BTD:
                others = yield in_BTD
                y, cache, kept = attention(in_BTD, batch, cache, place, kept)
                if parallel:
                    mlp_normed_BTD = normed_BTD if cfg.shared_norm else normed(x_BTD, "mlp")
                    with gathered(mlp_normed_BTD, BLOCK_INPUT, RESIDUAL) as in_BTD:
                        y_mlp, routed = mlp(in_BTD)
                    y += y_mlp
            x_BTD = added(x_BTD, after(y, others), keys_BT, 0, "attention_mlp" if parallel else "attention")
            if cross:
                with gathered(normed(x_BTD, "cross"), BLOCK_INPUT, RESIDUAL) as in_BTD:
                    others = yield in_BTD
                    y, memory, _ = cross(in_BTD, batch, cache and cache.memory, layer)
                cache = cache and cache._replace(memory=memory)
                x_BTD = added(x_BTD, after(y, others), keys_BT, 2, "cross")
            if not parallel:
                if laurel:
                    x_BTD = (x_BTD + laurel(normed_BTD)) * jnp.asarray(0.5**0.5, x_BTD.dtype)
                with gathered(normed(x_BTD, "mlp"), BLOCK_INPUT, RESIDUAL) as in_BTD:
                    others = yield in_BTD
                    y, routed = mlp(in_BTD)
                x_BTD = added(x_BTD, after(y, others), keys_BT, 1, "mlp")
            return (x_BTD, cache, kept), routed

        parts = interleave() if cache is None and x_BTD.shape[0] > 1 else 1
        if parts == 1:
            (((x_BTD, cache, kept), routed),) = in_turns([computed(x_BTD, batch, keys_BT, cache, kept)])
            x_BTD = altup.after(streams_MBTD, x_BTD, input_BTY) if altup else x_BTD
            return Carried(layer + 1, x_BTD, cache, kept), routed
        # No row moves: each device has rows of every part.
        rows = jax.tree.map(lambda x: rearrange(x, "(b p) ... -> p b ...", p=parts), (x_BTD, batch, keys_BT))
        with sharing_weights():
            each = [jax.tree.map(lambda x, i=i: x[i], rows) for i in range(parts)]
            ends = in_turns([computed(shard(x_bTD, RESIDUAL), *of_part) for x_bTD, *of_part in each])
        x_pbTD = jnp.stack([x_bTD for (x_bTD, *_), _ in ends])
        return Carried(layer + 1, shard(rearrange(x_pbTD, "p b ... -> (b p) ..."), RESIDUAL)), None


class Pattern(nn.Module):
    """The layers of one turn of a pattern: block_0, block_1, ..."""

    kinds: tuple[config.ModelConfig, ...]

    @nn.compact
    def __call__(self, carried: Carried, inputs: jax.Array | None, *rest: Any):
        routed = []
        for i, kind in enumerate(self.kinds):
            input_BTY = None if inputs is None else inputs[i]
            carried, of_block = _block(alone=False)(kind, name=f"block_{i}")(carried, input_BTY, *rest)
            routed += [of_block] if of_block else []
        return carried, jax.tree.map(lambda *each: jnp.stack(each), *routed) if routed else None


class Stack(nn.Module):
    """The blocks of a model under one scan, so that the program does not grow with depth, and the norm after them.

    A module that is a stack has something before and after it: see `decoder.Decoder`.
    """

    cfg: config.ModelConfig

    @nn.nowrap  # operations are named after modules, not after this method
    def blocks(
        self,
        x_BTD: jax.Array,
        batch: dict[str, jax.Array],
        keys_BT: jax.Array | None,
        cache: Cache[jax.Array] | None = None,
        inputs: jax.Array | None = None,
    ) -> tuple[jax.Array, Cache[jax.Array] | None, RouterOutput | None]:
        """The output of the last block, normed, the cache, and what the routers did, [L, ...] for layers with experts.

        `batch`: see `decoder.Decoder`. Blocks that read another stack find in it memory [B, S, M], what that stack
        made, and memory_segment_ids [B, S]. keys_BT: a dropout key for each token. inputs: see `altup.LayerInputs`.
        """
        cfg, streams, kept = self.cfg, None, None
        if cache and (cache.linear or cfg.shared_kv_layers):
            batch = batch | {"cache_layer": jnp.array(in_cache(cfg))}
        relative = cfg.relative_positions
        if relative and relative.shared:
            sizes = relative.ranges, cfg.head_rows
            batch = batch | {"relative_RN": use(matrix(self, "relative_bias", "ranges heads", sizes, cfg))}
        if cfg.relative_vectors:
            sizes = cfg.relative_vectors.ranges, cfg.embed
            vectors_RD = use(matrix(self, "relative_embedding", "ranges embed", sizes, cfg))
            if not cfg.relative_vectors.own_projections:
                vectors_RD = Norm(cfg, name="relative_norm")(vectors_RD)
            batch = batch | {"relative_RD": shard(vectors_RD, VECTORS)}
        if cfg.residual_streams > 1:
            streams = Streams(cfg, name="streams")
            x_BTD = streams.apart(x_BTD)
        else:
            x_BTD = shard(x_BTD, RESIDUAL)
        if cfg.shared_kv_layers:
            kept = no_keys(cfg, *batch["tokens"].shape)
        convolved_BTD = convolved(self, cfg, x_BTD, batch, keys_BT) if cfg.convolution else None
        routed: list[RouterOutput] = []
        for stack in cfg.stacks:
            if stack.kinds[0].shared_kv_layers and kept:
                shared = {
                    f"shared_{name}_{kind}": x for kind, kv in kept.items() for name, x in zip("kv", kv, strict=True)
                }
                batch, kept = batch | shared, None
            carried = Carried(stack.first, x_BTD, cache, kept)
            (_, x_BTD, cache, kept), of_stack = self._stack(stack, carried, inputs, batch, keys_BT)
            routed += of_stack
            if stack.name == "convolved_layers" and convolved_BTD is not None:
                x_BTD = shard(Norm(cfg, name="convolution_norm")(x_BTD + convolved_BTD), RESIDUAL)
        if streams:
            x_BTD = streams.together(x_BTD)
        if cfg.final_norm:
            x_BTD = Norm(cfg, name="final_norm")(x_BTD)
        return x_BTD, cache, jax.tree.map(lambda *each: jnp.concatenate(each), *routed) if routed else None

    @nn.nowrap
    def _stack(
        self,
        stack: config.Stack,
        carried: Carried,
        inputs_LBTY: jax.Array | None,
        batch: dict[str, jax.Array],
        keys_BT: jax.Array | None,
    ) -> tuple[Carried, list[RouterOutput]]:
        """What the layers of `stack` carry on, and the outputs of their routers, [layers, ...] each."""
        parts = pipeline.parts(stack.name)
        if parts > 1:
            x_BTD, routed = self._in_stages(stack, parts, carried.x_BTD, batch, keys_BT)
            carried = carried._replace(x_BTD=x_BTD)
        elif self.cfg.shared_layers and carried.cache is None and not (self.is_initializing() or self.cfg.matmul_dtype):
            weights = for_all_layers(self.variables["params"][stack.name], carried.x_BTD)
            every = Layers(stack, stack.layers, parent=None)
            applied: Any = every.apply({"params": {stack.name: weights}}, jnp.asarray(0), carried.x_BTD, batch, keys_BT)
            carried, routed = carried._replace(x_BTD=applied[0]), None
        else:
            inputs = None if inputs_LBTY is None else inputs_LBTY[stack.first : stack.first + stack.scanned]
            carried, routed = _loop(stack, stack.scanned, carried, inputs, batch, keys_BT)
        of_layers = [routed]
        for i, kind in enumerate(stack.kinds[: stack.layers - stack.scanned]):
            layer = stack.first + stack.scanned + i
            input_BTY = None if inputs_LBTY is None else inputs_LBTY[layer]
            block = _block(alone=False)(kind, name=f"layer_{layer}")
            carried, routed = block(carried._replace(layer=layer), input_BTY, batch, keys_BT)
            of_layers.append(jax.tree.map(lambda x: x[None], routed))
        return carried, [each for each in of_layers if each is not None]

    @nn.nowrap
    def _in_stages(
        self, stack: config.Stack, parts: int, x_BTD: jax.Array, batch: dict[str, jax.Array], keys_BT: jax.Array | None
    ) -> tuple[jax.Array, RouterOutput | None]:
        """The loop over a stack that is cut in `parts` parts, which the stages of a pipeline compute."""
        layers = stack.scanned // parts
        weights = self.variables["params"][stack.name]
        of_rows = {name: x for name, x in batch.items() if name in ("positions", "segment_ids", "places")}

        def part(weights: Any, number: jax.Array, x_BTD: jax.Array, of_rows: tuple[Any, Any]) -> tuple[Any, ...]:
            first = stack.first + layers * number
            some = Layers(stack, layers, parent=None)
            applied: Any = some.apply({"params": {stack.name: weights}}, first, x_BTD, *of_rows)
            x_BTD, routed = applied
            return x_BTD, *((routed.load_C, routed[1:]) if routed else (None, None))

        x_BTD, load_LC, routed = pipeline.in_stages(part, weights, x_BTD, (of_rows, keys_BT))
        return x_BTD, RouterOutput(load_LC, *routed) if routed else None


class Layers(nn.Module):
    """Some layers of a stack: those of a part of a pipeline, or all, if they share their weights."""

    stack: config.Stack
    layers: int

    @nn.compact
    def __call__(self, first: jax.Array, x_BTD: jax.Array, batch: dict[str, jax.Array], keys_BT: jax.Array | None):
        carried, routed = _loop(self.stack, self.layers, Carried(first, x_BTD), None, batch, keys_BT)
        return carried.x_BTD, routed


def _loop(
    stack: config.Stack,
    layers: int,
    carried: Carried,
    inputs_LBTY: jax.Array | None,
    batch: dict[str, jax.Array],
    keys_BT: jax.Array | None,
) -> tuple[Carried, RouterOutput | None]:
    """What `layers` layers of `stack` carry on, and the output of their routers, [layers, ...]."""
    kinds, length = stack.kinds, len(stack.kinds)
    turns = layers // length
    unrolled, shared = unroll(turns), kinds[0].shared_layers
    of_weights = {"variable_broadcast": "params"} if shared else {"variable_axes": {"params": 0}}
    scanned: Any = of_weights | {
        "split_rngs": {"params": not shared},
        "length": turns,
        "in_axes": (0, nn.broadcast, nn.broadcast),
        "metadata_params": {nn.PARTITION_NAME: "layers"},
        "unroll": unrolled,
        # They hold, and the check would trace every layer once more. Only with it can shared weights be drawn.
        "check_constancy_invariants": shared,
    }
    one = nn.scan(_block(alone=unrolled == 1), **scanned)(kinds[0], name=stack.name) if length == 1 else None
    loop: Any = one or nn.scan(Pattern, **scanned)(kinds, name=stack.name)
    if inputs_LBTY is not None and length > 1:
        inputs_LBTY = inputs_LBTY.reshape(turns, length, *inputs_LBTY.shape[1:])
    carried = carried._replace(layer=jnp.asarray(carried.layer, jnp.int32))
    carried, routed = loop(carried, inputs_LBTY, batch, keys_BT)
    return carried, routed if length == 1 else jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), routed)


def _block(alone: bool = True) -> type[nn.Module]:
    """The module of a layer, recomputed in the backward pass if the rules say so.

    A block that is alone in a scan needs no barrier against common subexpressions. A block beside others does: without
    the barrier, the compiler reuses the results of the forward pass, or it recomputes all blocks at once and holds the
    gathered weights of all of them.
    """
    policy = remat()
    return nn.remat(Block, prevent_cse=not alone, policy=policy) if policy else Block
