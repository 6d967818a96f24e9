"""Chooses the parts of a family's layers and stack from the config. No other file asks which parts a model has.

A part that has weights is a function of the module that holds them.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from gspmd_lm import config
from gspmd_lm.config import with_values
from gspmd_lm.model.attention import Attention, AttentionParts, mask_padded_heads
from gspmd_lm.model.block import RESIDUAL, Branch, Part
from gspmd_lm.model.cache import Kept, in_cache
from gspmd_lm.model.kernels.attention import OUT, Q
from gspmd_lm.model.kernels.context import attend_to_memory
from gspmd_lm.model.mlp import Mlp, apply_changes
from gspmd_lm.model.moe import Experts
from gspmd_lm.model.norm import Change, JointNorm, Norm, same
from gspmd_lm.model.parts import relative
from gspmd_lm.model.parts.altup import Streams, around_streams, with_laurel
from gspmd_lm.model.parts.chunks import in_chunks
from gspmd_lm.model.parts.convolution import beside_first_layer
from gspmd_lm.model.parts.latent import LatentAttention
from gspmd_lm.model.parts.linear import GatedDeltaNet
from gspmd_lm.model.parts.memory import CrossAttention
from gspmd_lm.model.parts.parallel import side_by_side
from gspmd_lm.model.parts.shared_keys import KeepingAttention, SharingAttention, no_keys
from gspmd_lm.model.parts.windows import window_attention
from gspmd_lm.model.rope import rotate, scale_by_position
from gspmd_lm.model.tokens import Tokens
from gspmd_lm.model.weights import bias, matrix, weight
from gspmd_lm.sharding.annotate import like, shard, use
from gspmd_lm.sharding.matmuls import project
from gspmd_lm.sharding.partial_sums import Unreduced

Named = Callable[[nn.Module, str], Change]  # makes, in the module of a layer, a step of the branch of that name


# Layers


@functools.cache
def branches(cfg: config.ModelConfig, keeps: bool = False) -> Callable[[nn.Module], Sequence[Any]]:
    """A function that makes the branches of a layer in its module. keeps: later layers reuse its keys and values."""
    attention, mlp, cross = attention_part(cfg, keeps), mlp_part(cfg), cross_attention(cfg)
    norm, branch = branch_norm(cfg, "norm", cfg.norm.pre), branch_of(cfg)
    laurel = functools.partial(with_laurel, cfg) if cfg.residual.laurel_rank else lambda branch: branch

    def crossing(module: nn.Module) -> list[Any]:
        return [branch(module, "cross", "cross", part(), site=2) for part in cross]

    def sequential(module: nn.Module) -> list[Any]:
        first = laurel(branch(module, "attention", "attention", attention(), site=0))
        return [first, *crossing(module), branch(module, "mlp", "mlp", mlp(), site=1)]

    def parallel(module: nn.Module) -> list[Any]:
        first = branch(module, "attention", "attention_mlp", attention(), site=0)
        return [side_by_side(first, mlp(), None if cfg.norm.shared else norm(module, "mlp")), *crossing(module)]

    make = {"sequential": sequential, "parallel": parallel}[cfg.block]
    return (lambda module: [around_streams(cfg, make(module))]) if cfg.residual.streams > 1 else make


def branch_of(cfg: config.ModelConfig) -> Callable[..., Branch]:
    """A function that gives a branch of a layer: of a module, the name of what it reads, the name of what it adds, its
    part and the number of its dropout."""
    before, after_sum = branch_norm(cfg, "norm", cfg.norm.pre), branch_norm(cfg, "sum_norm", cfg.norm.sum)
    after: list[Named] = [branch_norm(cfg, "post_norm", True)] * cfg.norm.post
    if cfg.residual.layer_scale:
        after.append(functools.partial(make_layer_scale, cfg))
    if cfg.residual.scale != 1:
        after.append(lambda module, name: lambda y_BTD: y_BTD * jnp.asarray(cfg.residual.scale, y_BTD.dtype))

    def branch(module: nn.Module, name: str, result: str, part: Part, site: int) -> Branch:
        changes = [make(module, result) for make in after]
        of_result = functools.partial(apply_changes, changes=changes)
        return Branch(part, before(module, name), of_result, after_sum(module, result), cfg.dropout, site)

    return branch


def branch_norm(cfg: config.ModelConfig, end: str, is_normed: bool) -> Named:
    """A function that makes a norm of a branch; `end` is the end of the norm's name. Without a norm, the identity."""
    return (lambda module, name: Norm(cfg, name=f"{name}_{end}")) if is_normed else lambda module, name: same


def make_layer_scale(cfg: config.ModelConfig, module: nn.Module, name: str) -> Change:
    """LayerScale: a learned vector that multiplies the output of a branch (BEiT)."""
    start = nn.initializers.constant(cfg.residual.layer_scale)
    scale_D = use(weight(module, f"{name}_layer_scale", "embed", (cfg.embed,), cfg, start))
    return lambda y_BTD: y_BTD * scale_D


def mlp_part(cfg: config.ModelConfig) -> Callable[[], Part]:
    """A function that makes the feed-forward network of a layer, or its experts."""
    kind = Experts if cfg.experts else Mlp

    def make() -> Part:
        module = kind(cfg, name="mlp")

        def part(in_BTD: jax.Array, tokens: Tokens) -> tuple[Unreduced, Tokens]:
            y, routed = module(in_BTD)
            return y, tokens._replace(routed=routed)

        return part

    return make


# Attention


def attention_part(cfg: config.ModelConfig, keeps: bool) -> Callable[[], Part]:
    """A function that makes the self-attention of a layer."""
    if cfg.attention.linear:
        return functools.partial(GatedDeltaNet, cfg, name="linear_attention")
    cfg = dataclasses.replace(cfg, encoder=None, memory_width=0)
    kind = LatentAttention if cfg.attention.latent else Attention
    if keeps or cfg.attention.shared_kv_layers:
        kind = SharingAttention if cfg.attention.shared_kv_layers else KeepingAttention
    return functools.partial(kind, cfg, attention_parts(cfg), name="attention")


def cross_attention(cfg: config.ModelConfig) -> list[Callable[[], Part]]:
    """Functions that make the cross-attention of a layer to encoder output; [] if the layer has none."""
    if not cfg.reads:
        return []
    cfg = cfg.memory_config
    parts = attention_parts(cfg)._replace(attend=lambda module: _attend_to_memory)
    return [functools.partial(CrossAttention, cfg, parts, name="cross")]


def _attend_to_memory(q_BTNH, k_BSKH, v_BSKH, tokens, cfg, numbers):
    return attend_to_memory(q_BTNH, k_BSKH, v_BSKH, tokens, cfg)


@functools.cache
def attention_parts(cfg: config.ModelConfig) -> AttentionParts:
    """The steps that this config adds to attention."""
    parts: dict[str, Any] = {"norms": head_norms(cfg)}
    if cfg.attention.qkv_bias:
        parts["biased"] = "q" if cfg.attention.shared_kv_layers else "q" + "k" * cfg.attention.key_bias + "v"
    if cfg.positions == "rope":
        parts["turns"] = (functools.partial(rotate, cfg),)
    if cfg.attention.temperature:
        parts["query_turns"] = (functools.partial(scale_by_position, cfg.attention.temperature),)
    if cfg.attention.chunk:
        parts["seen"] = functools.partial(in_chunks, cfg.attention.chunk)
    if cfg.windows:
        parts["attend"] = functools.partial(window_attention, cfg)
    if cfg.attention.gate:
        parts["gate"] = functools.partial(make_gate, cfg)
    if cfg.head_rows > cfg.heads:
        parts["result"] = functools.partial(mask_padded_heads, cfg)
    if cfg.attention.out_bias:
        parts["out_bias"] = functools.partial(make_out_bias, cfg)
    return AttentionParts(**parts, **numbers_of_heads(cfg))


def numbers_of_heads(cfg: config.ModelConfig) -> dict[str, Any]:
    """A function that makes the learned relative positions of heads, or their sinks: see `head_numbers`."""
    if cfg.attention.relative_vectors:
        own = cfg.attention.relative_vectors.own_projections
        return {"numbers": functools.partial(relative.own_projections, cfg) if own else relative.shared_projections}
    if cfg.attention.relative_positions:
        shared = cfg.attention.relative_positions.shared
        return {"numbers": relative.shared_biases if shared else functools.partial(relative.own_biases, cfg)}
    return {"numbers": functools.partial(make_sinks, cfg)} if cfg.attention.sinks else {}


def head_norms(cfg: config.ModelConfig) -> tuple[Callable[[], Any], ...]:
    """Functions that make the norms of queries, keys and values."""
    plain = with_values(cfg, {"norm.kind": "rmsnorm", "norm.scale": False, "norm.bias": False})
    unbiased, axes = with_values(cfg, {"norm.bias": False}), ("heads head_dim", "kv_heads head_dim")
    kinds: dict[str, list[Callable[[], Any]]] = {
        "shared": [functools.partial(Norm, cfg, "head_dim")] * 2,
        "unscaled": [functools.partial(Norm, plain)] * 2,
        "per_head": [functools.partial(Norm, unbiased, each) for each in axes],
        "joint": [
            functools.partial(JointNorm, unbiased, each, heads)
            for each, heads in zip(axes, (cfg.heads, cfg.kv_heads), strict=True)
        ],
    }
    none = [lambda: same]
    of_queries_and_keys = kinds[cfg.attention.qk_norm_kind] if cfg.attention.qk_norm else none * 2
    return (*of_queries_and_keys, *([functools.partial(Norm, plain)] if cfg.attention.value_norm else none))


def make_gate(cfg: config.ModelConfig, module: nn.Module) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """A function that multiplies the result of attention by sigmoid(x w) (Qwen3-Next)."""
    gate = matrix(module, "wg", "embed heads head_dim", (cfg.embed, cfg.head_rows, cfg.head_dim), cfg)

    def multiply(in_BTD: jax.Array, out_BTNH: jax.Array) -> jax.Array:
        return shard(out_BTNH * jax.nn.sigmoid(like(project(in_BTD, gate), Q)), OUT)

    return multiply


def make_sinks(cfg: config.ModelConfig, module: nn.Module) -> Callable[[Tokens], jax.Array]:
    """Attention sinks: a learned logit of each head that takes part in its softmax without a key (gpt-oss)."""
    sinks_N = bias(module, "sinks", "heads", (cfg.head_rows,), cfg)
    return lambda tokens: sinks_N


def make_out_bias(cfg: config.ModelConfig, module: nn.Module) -> Callable[[Unreduced], Unreduced]:
    """A function that adds a bias to the output of attention."""
    bias_D = bias(module, "bo", "embed", (cfg.embed,), cfg)
    return lambda y: y + bias_D


# The stack


class Loop(NamedTuple):
    """Layers that run in one loop, and the remaining ones after it: see `config.Stack`."""

    stack: config.Stack
    branches: tuple[Callable[[nn.Module], Sequence[Any]], ...]  # of the layers of one turn
    shared_weights: bool  # whether all layers have the same weights
    shares_keys: bool  # whether its layers read the keys and values that earlier ones kept


class StackParts(NamedTuple):
    """A stack's parts besides its layers. Parts that have weights make them in the module that they are given."""

    loops: tuple[Loop, ...]
    # What is added to the tokens of all layers, of which caches are only there if text is generated.
    shared: tuple[Callable[[nn.Module, Tokens], Tokens], ...]
    # The residual stream before the first layer, and what is done to it after the last one.
    ends: Callable[[jax.Array], tuple[jax.Array, Change]]
    # The keys and values, before the first layer, that layers keep for later ones.
    kept: Callable[[int, int], Kept | None]
    # By the name of a loop, what is done to its output, from the input of all.
    beside: Callable[[nn.Module, jax.Array, Tokens], dict[str, Change]]
    norm: Callable[[], Change]  # after the last layer


@functools.cache
def stack_parts(cfg: config.ModelConfig) -> StackParts:
    """The parts of a stack of this config."""
    shared: list[Callable[[nn.Module, Tokens], Tokens]] = []
    keeps = cfg.attention.shared_kv_layers > 0
    if keeps or any(layer.attention.linear for layer in cfg.each_layer):
        shared.append(functools.partial(add_places_in_cache, in_cache(cfg)))
    if cfg.attention.relative_positions and cfg.attention.relative_positions.shared:
        shared.append(functools.partial(relative.add_shared_biases, cfg))
    if cfg.attention.relative_vectors:
        shared.append(functools.partial(relative.add_vectors, cfg))
    loops = []
    for stack in cfg.stacks:
        shares = stack.kinds[0].attention.shared_kv_layers > 0
        each = tuple(branches(kind, keeps and not shares) for kind in stack.kinds)
        loops.append(Loop(stack, each, stack.kinds[0].shared_layers, shares))
    return StackParts(
        tuple(loops),
        tuple(shared),
        functools.partial(stream_ends, cfg) if cfg.residual.streams > 1 else one_stream,
        functools.partial(no_keys, cfg) if keeps else lambda rows, length: None,
        functools.partial(beside_first_layer, cfg) if cfg.convolution else lambda module, x_BTD, tokens: {},
        functools.partial(Norm, cfg, name="final_norm") if cfg.norm.final else lambda: same,
    )


def one_stream(x_BTD: jax.Array) -> tuple[jax.Array, Change]:
    """A single residual stream."""
    return shard(x_BTD, RESIDUAL), same


def stream_ends(cfg: config.ModelConfig, x_BTD: jax.Array) -> tuple[jax.Array, Change]:
    """Several residual streams, [M, B, T, D], and the function that merges them after the last layer (AltUp)."""
    streams = Streams(cfg, name="streams")
    return streams.apart(x_BTD), streams.together


def add_places_in_cache(places: Sequence[int], module: nn.Module, tokens: Tokens) -> Tokens:
    """The tokens with the index of each layer in the cache, if there is one."""
    return tokens._replace(places_in_cache_L=jnp.array(places)) if tokens.cache else tokens
