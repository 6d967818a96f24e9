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
from gspmd_lm.model.attention import Attention, AttentionParts
from gspmd_lm.model.block import Branch, BranchMaker, Part, begin_stream, keep_all, make_branch
from gspmd_lm.model.cache import Kept, in_cache
from gspmd_lm.model.ends import Ends, own_unembedding, table_axis
from gspmd_lm.model.kernels.context import attend_to_memory
from gspmd_lm.model.lora import adapt
from gspmd_lm.model.mlp import Mlp, MlpParts, hidden_layer
from gspmd_lm.model.moe import Experts
from gspmd_lm.model.norm import Change, Norm, apply_changes, make_norm, no_norm, same
from gspmd_lm.model.parts import embeddings, heads, relative, rope_scaling
from gspmd_lm.model.parts.activations import ACTIVATIONS, drop_small
from gspmd_lm.model.parts.altup import around_streams, split_streams, with_laurel
from gspmd_lm.model.parts.chunks import in_chunks
from gspmd_lm.model.parts.convolution import add_convolution
from gspmd_lm.model.parts.dropout import before_blocks, drop_in_branch
from gspmd_lm.model.parts.joint_norm import JointNorm
from gspmd_lm.model.parts.latent import LatentAttention
from gspmd_lm.model.parts.linear import GatedDeltaNet
from gspmd_lm.model.parts.memory import CrossAttention
from gspmd_lm.model.parts.parallel import side_by_side
from gspmd_lm.model.parts.shared_keys import KeepingAttention, SharingAttention, keep_keys
from gspmd_lm.model.parts.temperature import scale_by_position
from gspmd_lm.model.parts.windows import window_attention
from gspmd_lm.model.rope import Rotary, frequencies, rotate
from gspmd_lm.model.tokens import Tokens
from gspmd_lm.model.weights import weight
from gspmd_lm.sharding.annotate import use

# Layers


@functools.cache
def branches(cfg: config.ModelConfig, keeps: bool = False) -> tuple[BranchMaker, ...]:
    """Functions that make the branches of a layer. keeps: later layers reuse its keys and values."""
    attention, mlp, branch = attention_part(cfg, keeps), mlp_part(cfg), functools.partial(branch_maker, cfg)
    crossing = [branch("cross", "cross", part, site=2) for part in cross_attention(cfg)]
    if cfg.block == "parallel":
        first = branch("attention", "attention_mlp", attention, site=0)
        norm = None if cfg.norm.shared else branch_norm(cfg, "mlp_norm", cfg.norm.pre)
        made = [functools.partial(side_by_side, first, mlp, norm), *crossing]
    else:
        first = branch("attention", "attention", attention, site=0)
        if cfg.residual.laurel_rank:
            first = functools.partial(with_laurel, cfg, first)
        made = [first, *crossing, branch("mlp", "mlp", mlp, site=1)]
    return (functools.partial(around_streams, cfg, made),) if cfg.residual.streams > 1 else tuple(made)


def branch_maker(
    cfg: config.ModelConfig, name: str, result: str, part: Callable[[], Part], site: int
) -> functools.partial[Branch]:
    """A function that makes a branch of a layer.

    name, result: the names of what it reads and of what it adds, with which the names of its norms begin. site: the
    number of its dropout within a layer.
    """
    after = [branch_norm(cfg, f"{result}_post_norm", True)] * cfg.norm.post
    if cfg.residual.layer_scale:
        after.append(functools.partial(make_layer_scale, cfg, f"{result}_layer_scale"))
    if cfg.residual.scale != 1:
        after.append(lambda module: lambda y_BTD: y_BTD * jnp.asarray(cfg.residual.scale, y_BTD.dtype))
    before = branch_norm(cfg, f"{name}_norm", cfg.norm.pre)
    after_sum = branch_norm(cfg, f"{result}_sum_norm", cfg.norm.sum)
    drop = functools.partial(drop_in_branch, cfg.dropout, site) if cfg.dropout else keep_all
    return functools.partial(make_branch, part, before, after, after_sum, drop)


def branch_norm(cfg: config.ModelConfig, name: str, is_normed: bool) -> Callable[[nn.Module], Change]:
    """A function that makes a norm of a branch; the identity without a norm."""
    return functools.partial(make_norm, cfg, name) if is_normed else no_norm


def make_layer_scale(cfg: config.ModelConfig, name: str, module: nn.Module) -> Change:
    """LayerScale: a learned vector that multiplies the output of a branch (BEiT)."""
    start = nn.initializers.constant(cfg.residual.layer_scale)
    scale_D = use(weight(module, name, "embed", (cfg.embed,), cfg, start))
    return lambda y_BTD: y_BTD * scale_D


def mlp_part(cfg: config.ModelConfig) -> Callable[[], Part]:
    """A function that makes the feed-forward network of a layer, or its experts."""
    return functools.partial(Experts if cfg.experts else Mlp, cfg, mlp_parts(cfg), name="mlp")


@functools.cache
def mlp_parts(cfg: config.ModelConfig) -> MlpParts:
    """The steps of a feed-forward network, or of each expert, of this config."""
    inward = {"gated": ("gate", "up"), "plain": ("up",)}[cfg.feed_forward.kind]
    parts = adapters(cfg)
    if cfg.feed_forward.bias:
        parts |= {"biased": (*inward, "down"), "add_bias": lambda y, bias: y + bias}
    return MlpParts(inward, activation(cfg), **parts)


@functools.cache
def activation(cfg: config.ModelConfig) -> Callable[..., jax.Array]:
    """The function that computes hidden layers of this config: see `mlp.hidden_layer`."""
    mlp = cfg.feed_forward
    gate_steps: list[Change] = []
    up_steps: list[Change] = []
    if mlp.limit:
        gate_steps.append(lambda x: jnp.minimum(x, mlp.limit))
        up_steps.append(lambda x: jnp.clip(x, -mlp.limit, mlp.limit))
    if mlp.up_offset:
        up_steps.append(lambda x: x + jnp.asarray(mlp.up_offset, x.dtype))
    if mlp.sparsity:
        gate_steps.append(lambda x: drop_small(x, mlp.sparsity))
    gate_steps.append(ACTIVATIONS[mlp.activation] if mlp.slope == 1 else lambda x: x * jax.nn.sigmoid(mlp.slope * x))
    return hidden_layer(*(functools.partial(apply_changes, changes=changes) for changes in (gate_steps, up_steps)))


def adapters(cfg: config.ModelConfig) -> dict[str, Any]:
    """The part of attention, an MLP or experts that gives their matrices adapters, if the config has any."""
    return {"adapt": functools.partial(adapt, cfg)} if cfg.lora else {}


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
    parts = attention_parts(cfg)._replace(attend=lambda module: attend_to_memory)
    return [functools.partial(CrossAttention, cfg, parts, name="cross")]


@functools.cache
def attention_parts(cfg: config.ModelConfig) -> AttentionParts:
    """The steps that this config adds to attention."""
    parts = {"norms": head_norms(cfg)} | adapters(cfg)
    if cfg.attention.qkv_bias:
        parts["add_bias"] = heads.add_bias
        parts["biased"] = "q" if cfg.attention.shared_kv_layers else "q" + "k" * cfg.attention.key_bias + "v"
    if cfg.positions == "rope":
        parts["turns"] = (functools.partial(rotate, rotary(cfg)),)
    if cfg.attention.temperature:
        parts["query_turns"] = (functools.partial(scale_by_position, cfg.attention.temperature),)
    if cfg.attention.chunk:
        parts["seen"] = functools.partial(in_chunks, cfg.attention.chunk)
    if cfg.windows:
        parts["attend"] = functools.partial(window_attention, cfg)
    if cfg.attention.gate:
        parts["gate"] = functools.partial(heads.make_gate, cfg)
    if cfg.head_rows > cfg.heads:
        parts["result"] = functools.partial(heads.mask_padded_heads, cfg)
    if cfg.attention.out_bias:
        parts["out_bias"] = functools.partial(heads.make_out_bias, cfg)
    return AttentionParts(**parts, **numbers_of_heads(cfg))


def rotary(cfg: config.ModelConfig) -> Rotary:
    """The rotation of heads of this config."""
    rope, dim = cfg.attention.rope, cfg.attention.rope.dim or cfg.head_dim
    if not rope.scaling:
        return Rotary(dim, functools.partial(frequencies, dim, rope.theta))
    scaled = functools.partial(rope_scaling.KINDS[rope.scaling.kind], rope.scaling, dim, rope.theta)
    return Rotary(dim, scaled, rope.scaling.attention_factor)


def numbers_of_heads(cfg: config.ModelConfig) -> dict[str, Any]:
    """A function that makes the learned relative positions of heads, or their sinks: see `head_numbers`."""
    if cfg.attention.relative_vectors:
        own = cfg.attention.relative_vectors.own_projections
        return {"numbers": functools.partial(relative.own_projections, cfg) if own else relative.shared_projections}
    if cfg.attention.relative_positions:
        shared = cfg.attention.relative_positions.shared
        return {"numbers": relative.shared_biases if shared else functools.partial(relative.own_biases, cfg)}
    return {"numbers": functools.partial(heads.make_sinks, cfg)} if cfg.attention.sinks else {}


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
    none = [AttentionParts().norms[0]]
    of_queries_and_keys = kinds[cfg.attention.qk_norm_kind] if cfg.attention.qk_norm else none * 2
    return (*of_queries_and_keys, *([functools.partial(Norm, plain)] if cfg.attention.value_norm else none))


# The stack


class Loop(NamedTuple):
    """Layers that run in one loop, and the remaining ones after it: see `config.Stack`."""

    stack: config.Stack
    branches: tuple[tuple[BranchMaker, ...], ...]  # of the layers of one turn
    shared_weights: bool  # whether all layers have the same weights
    shares_keys: bool  # whether its layers read the keys and values that earlier ones kept


class StackParts(NamedTuple):
    """A stack's parts besides its layers. Parts that have weights make them in the module that they are given."""

    loops: tuple[Loop, ...]
    # They add to the tokens what all layers share. A cache is there only while text is generated.
    shared: tuple[Callable[[nn.Module, Tokens], Tokens], ...]
    # From the input of the first layer: the residual stream before it, what is done to the stream after the last one,
    # and the keys and values that layers keep for later ones.
    begin: Callable[[jax.Array], tuple[jax.Array, Change, Kept | None]]
    # The names of loops, and what is done to their output, from the input of the first layer.
    beside: tuple[tuple[str, Callable[[nn.Module, jax.Array, Tokens], Change]], ...]
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
    begin = functools.partial(split_streams, cfg) if cfg.residual.streams > 1 else begin_stream
    return StackParts(
        tuple(loops),
        tuple(shared),
        functools.partial(keep_keys, cfg, begin) if keeps else begin,
        (("convolved_layers", functools.partial(add_convolution, cfg)),) if cfg.convolution else (),
        functools.partial(Norm, cfg, name="final_norm") if cfg.norm.final else lambda: same,
    )


def add_places_in_cache(places: Sequence[int], module: nn.Module, tokens: Tokens) -> Tokens:
    """The tokens with the index of each layer in the cache, if there is one."""
    return tokens._replace(places_in_cache_L=jnp.array(places)) if tokens.cache else tokens


# The ends of models of texts


@functools.cache
def end_parts(cfg: config.ModelConfig) -> Ends:
    """The steps at the ends of a text model of this config."""
    parts: dict[str, Any] = {"from_table": [], "additions": [], "last": []}
    sizes = table_axis(cfg)  # of the embeddings that positions and types are added to
    if cfg.embedding.width and cfg.embedding.input == "tokens":
        parts["from_table"].append(functools.partial(embeddings.widen, cfg, False))
        sizes = cfg.embed, "embed"
    if cfg.embedding.scale != 1:
        parts["from_table"].append(functools.partial(embeddings.scale, cfg))
    positions = {"learned": embeddings.add_positions, "sinusoidal": embeddings.add_sinusoids}
    additions = [positions[cfg.positions]] if cfg.positions in positions else []
    additions += [embeddings.add_types] * (cfg.embedding.token_types > 0) + [embeddings.normalize] * cfg.embedding.norm
    parts["additions"] = [functools.partial(add, cfg, sizes) for add in additions]
    if cfg.embedding.input == "sum":
        parts["last"].append(functools.partial(embeddings.widen, cfg, True))
    if cfg.dropout:
        parts["drop"] = functools.partial(before_blocks, cfg)
    if cfg.logits.transform:
        parts["head"] = functools.partial(embeddings.transform, cfg, activation(cfg))
    elif cfg.embedding.width:
        parts["head"] = functools.partial(embeddings.narrow, cfg)
    if not cfg.embedding.tied:
        parts["unembedding"] = functools.partial(own_unembedding, cfg)
    if cfg.logits.bias:
        parts["bias"] = functools.partial(embeddings.make_logit_bias, cfg)
    return Ends(**parts)
