"""A stack of blocks from the residual stream to the residual stream. The code reads as if there were one device."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from gspmd_lm import config
from gspmd_lm.model.addresses import block_name, layer_name
from gspmd_lm.model.block import Block, BranchMaker, Carried
from gspmd_lm.model.cache import Cache
from gspmd_lm.model.compose import Loop, end_parts, stack_parts
from gspmd_lm.model.ends import Ends
from gspmd_lm.model.moe import RouterOutput
from gspmd_lm.model.norm import same
from gspmd_lm.model.tokens import Tokens
from gspmd_lm.sharding import pipeline
from gspmd_lm.sharding.annotate import remat, unroll
from gspmd_lm.sharding.partial_sums import for_all_layers


class Pattern(nn.Module):
    """The layers of one turn of a pattern: block_0, block_1, ..."""

    branches: tuple[tuple[BranchMaker, ...], ...]

    @nn.compact
    def __call__(self, carried: Carried, inputs: jax.Array | None, tokens: Tokens):
        routed = []
        for i, branches in enumerate(self.branches):
            input_BTY = None if inputs is None else inputs[i]
            carried, of_block = _block(alone=False)(branches, name=block_name(i))(carried, input_BTY, tokens)
            routed += [of_block] if of_block else []
        return carried, jax.tree.map(lambda *each: jnp.stack(each), *routed) if routed else None


class Stack(nn.Module):
    """The blocks of a model under one scan, so that the program does not grow with depth, and the norm after them.

    A model derives from it and adds the embedding before it and the head after it: see `decoder.Decoder`.
    """

    cfg: config.ModelConfig

    @property
    def ends(self) -> Ends:
        """The steps before the blocks and after them, of a model of texts."""
        return end_parts(self.cfg)

    @nn.nowrap  # operations are named after modules, not after this method
    def blocks(
        self,
        x_BTD: jax.Array,
        batch: dict[str, jax.Array],
        keys_BT: jax.Array | None,
        cache: Cache | None = None,
        inputs: jax.Array | None = None,
    ) -> tuple[jax.Array, Cache | None, RouterOutput | None]:
        """The normed output of the last block, the cache, and the routers' outputs, [L, ...] for layers with experts.

        `batch`: see `decoder.Decoder`. For cross-attention it also holds the encoder output, memory [B, S, M], and
        memory_segment_ids [B, S]. keys_BT: a dropout key for each token. inputs: see `altup.LayerInputs`.
        """
        parts, tokens = stack_parts(self.cfg), Tokens.from_batch(batch, keys_BT)._replace(cache=cache)
        for add in parts.shared:
            tokens = add(self, tokens)
        tokens = tokens._replace(cache=None)
        x_BTD, join, kept = parts.begin(x_BTD)
        beside = {name: make(self, x_BTD, tokens) for name, make in parts.beside}
        routed: list[RouterOutput] = []
        for loop in parts.loops:
            if loop.shares_keys:
                tokens, kept = tokens._replace(shared=kept), None
            carried = Carried(loop.stack.first, x_BTD, cache, kept)
            (_, x_BTD, cache, kept), of_loop = self._layers(loop, carried, inputs, tokens)
            x_BTD = beside.get(loop.stack.name, same)(x_BTD)
            routed += of_loop
        x_BTD = parts.norm()(join(x_BTD))
        return x_BTD, cache, jax.tree.map(lambda *each: jnp.concatenate(each), *routed) if routed else None

    @nn.nowrap
    def _layers(
        self, loop: Loop, carried: Carried, inputs_LBTY: jax.Array | None, tokens: Tokens
    ) -> tuple[Carried, list[RouterOutput]]:
        """The carry after a loop and the layers behind it, and the outputs of their routers, [layers, ...] each."""
        stack, inputs = loop.stack, [None] * self.cfg.layers if inputs_LBTY is None else inputs_LBTY
        parts = pipeline.parts(stack.name)
        if parts > 1:
            x_BTD, routed = self._in_stages(loop, parts, carried.x_BTD, tokens)
            carried = carried._replace(x_BTD=x_BTD)
        elif loop.shared_weights and carried.cache is None and not self.is_initializing() and not self.cfg.matmul_dtype:
            weights = for_all_layers(self.variables["params"][stack.name], carried.x_BTD)
            every = Layers(loop, stack.layers, parent=None)
            applied: Any = every.apply({"params": {stack.name: weights}}, jnp.asarray(0), carried.x_BTD, tokens)
            carried, routed = carried._replace(x_BTD=applied[0]), None
        else:
            of_loop = None if inputs_LBTY is None else inputs_LBTY[stack.first : stack.first + stack.scanned_layers]
            carried, routed = _scan_layers(loop, stack.scanned_layers, carried, of_loop, tokens)
        of_layers = [routed]
        for i, branches in enumerate(loop.branches[: stack.layers - stack.scanned_layers]):
            layer = stack.first + stack.scanned_layers + i
            block = _block(alone=False)(branches, name=layer_name(layer))
            carried, routed = block(carried._replace(layer=layer), inputs[layer], tokens)
            of_layers.append(jax.tree.map(lambda x: x[None], routed))
        return carried, [each for each in of_layers if each is not None]

    @nn.nowrap
    def _in_stages(
        self, loop: Loop, parts: int, x_BTD: jax.Array, tokens: Tokens
    ) -> tuple[jax.Array, RouterOutput | None]:
        """The loop over a stack that is cut into `parts` parts, which the stages of a pipeline compute."""
        stack, layers = loop.stack, loop.stack.scanned_layers // parts
        weights = self.variables["params"][stack.name]

        def part(weights: Any, number: jax.Array, x_BTD: jax.Array, tokens: Tokens) -> tuple[Any, ...]:
            first = stack.first + layers * number
            some = Layers(loop, layers, parent=None)
            applied: Any = some.apply({"params": {stack.name: weights}}, first, x_BTD, tokens)
            x_BTD, routed = applied
            return x_BTD, *((routed.load_C, routed[1:]) if routed else (None, None))

        x_BTD, load_LC, routed = pipeline.in_stages(part, weights, x_BTD, tokens.rows)
        return x_BTD, RouterOutput(load_LC, *routed) if routed else None


class Layers(nn.Module):
    """Some layers of a loop: those of a part of a pipeline, or all, if they share their weights."""

    loop: Loop
    layers: int

    @nn.compact
    def __call__(self, first: jax.Array, x_BTD: jax.Array, tokens: Tokens):
        carried, routed = _scan_layers(self.loop, self.layers, Carried(first, x_BTD), None, tokens)
        return carried.x_BTD, routed


def _scan_layers(
    loop: Loop, layers: int, carried: Carried, inputs_LBTY: jax.Array | None, tokens: Tokens
) -> tuple[Carried, RouterOutput | None]:
    """The carry after `layers` layers of a loop, and the outputs of their routers, [layers, ...]."""
    name, branches, length, shared = loop.stack.name, loop.branches, len(loop.branches), loop.shared_weights
    turns = layers // length
    unrolled = unroll(turns)
    of_weights = {"variable_broadcast": "params"} if shared else {"variable_axes": {"params": 0}}
    scanned: Any = of_weights | {
        "split_rngs": {"params": not shared},
        "length": turns,
        "in_axes": (0, nn.broadcast),
        "metadata_params": {nn.PARTITION_NAME: "layers"},
        "unroll": unrolled,
        # They hold, and the check would trace every layer once more. Shared weights cannot be drawn without the check.
        "check_constancy_invariants": shared,
    }
    carried = carried._replace(layer=jnp.asarray(carried.layer, jnp.int32))
    if length == 1:
        return nn.scan(_block(alone=unrolled == 1), **scanned)(branches[0], name=name)(carried, inputs_LBTY, tokens)
    inputs = jax.tree.map(lambda x: x.reshape(turns, length, *x.shape[1:]), inputs_LBTY)
    carried, routed = nn.scan(Pattern, **scanned)(branches, name=name)(carried, inputs, tokens)
    return carried, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), routed)


def _block(alone: bool = True) -> Any:
    """The module of a layer, recomputed in the backward pass if the rules say so.

    A block that is alone in a scan needs no barrier against common subexpressions. A block beside others does: without
    the barrier, the compiler reuses the results of the forward pass, or it recomputes all blocks at once and holds the
    gathered weights of all of them.
    """
    policy = remat()
    return nn.remat(Block, prevent_cse=not alone, policy=policy) if policy else Block
