"""The decoder's train step with its collectives written by hand, in one shard_map: what the annotated model is held to.

ZeRO-3 (arXiv 1910.02054) over `fsdp`: each layer's weights are gathered where they are used, again in the backward pass
where blocks are recomputed, and their gradients reduce-scattered. Megatron tensor parallelism (arXiv 1909.08053) over
`tensor`: heads, MLP and vocabulary are split; with `sequence` also the residual stream, along T (arXiv 2205.05198).

It covers what the benchmarks run: sequential blocks, RMSNorm, gated SiLU, RoPE, as many key heads as heads, untied
embeddings, float32, one text per row.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from gspmd_lm import config
from gspmd_lm.train import optimizer

Collective = Callable[[jax.Array], jax.Array]

# Where each weight rests. A layer's weights are stacked along a first axis.
SPECS = {
    "embedding": P("tensor", "fsdp"),
    "unembedding": P("tensor", "fsdp"),
    "final_norm": {"scale": P()},
    "layers": {
        "attention": {
            "wq": P(None, "fsdp", "tensor"),
            "wk": P(None, "fsdp", "tensor"),
            "wv": P(None, "fsdp", "tensor"),
            "wo": P(None, "tensor", None, "fsdp"),
        },
        "attention_norm": {"scale": P()},
        "mlp": {
            "w_gate": P(None, "fsdp", "tensor"),
            "w_up": P(None, "fsdp", "tensor"),
            "w_down": P(None, "tensor", "fsdp"),
        },
        "mlp_norm": {"scale": P()},
    },
}


@dataclasses.dataclass(frozen=True)
class Layout:
    """How many devices ZeRO-3 and tensor parallelism take, and whether the residual stream is split along T."""

    fsdp: int = 1
    tensor: int = 1
    sequence: bool = False
    remat: bool = True

    def mesh(self) -> Mesh:
        devices = np.array(jax.devices()[: self.fsdp * self.tensor]).reshape(self.fsdp, self.tensor)
        return Mesh(devices, ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)

    def split_over(self, spec: P) -> tuple[str, ...]:
        """The mesh axes of more than one device that split an array."""
        return tuple(name for name in spec if name is not None and getattr(self, name) > 1)


class State(NamedTuple):
    """What a step takes and gives back."""

    params: Any
    optimizer: Any


class Region(NamedTuple):
    """How activations enter and leave the region that is computed in pieces over `tensor`."""

    enter: Collective
    leave: Collective


def region(layout: Layout) -> Region:
    """Megatron's pair of conjugate collectives: each one's derivative is the other."""
    if layout.tensor == 1:
        return Region(lambda x: x, lambda x: x)
    if layout.sequence:
        return Region(
            lambda x: jax.lax.all_gather(x, "tensor", axis=1, tiled=True),
            lambda x: jax.lax.psum_scatter(x, "tensor", scatter_dimension=1, tiled=True),
        )
    return Region(_copy, _sum)


@jax.custom_vjp
def _copy(x: jax.Array) -> jax.Array:
    return x


_copy.defvjp(lambda x: (x, None), lambda _, dx: (jax.lax.psum(dx, "tensor"),))


@jax.custom_vjp
def _sum(x: jax.Array) -> jax.Array:
    return jax.lax.psum(x, "tensor")


_sum.defvjp(lambda x: (_sum(x), None), lambda _, dx: (dx,))


def build(cfg: config.Config, layout: Layout) -> tuple[Mesh, Callable[[Any], State], jax.stages.Wrapped]:
    """The mesh, a function that takes parameters to a State on it, and the jitted step.

    The step is (State, tokens_BT, targets_BT) -> (State, metrics), and uses up the state.
    """
    model, mesh = cfg.model, layout.mesh()
    supported = (
        model.block == "sequential" and model.norm.kind == "rmsnorm" and model.feed_forward.kind == "gated"
        and model.feed_forward.activation == "silu" and model.positions == "rope" and model.heads == model.kv_heads
        and model.compute_dtype == "float32" and not model.embedding.tied and cfg.optimizer.name == "adamw"
    )  # fmt: skip
    assert supported, "the reference does not cover this config"
    rule = _rule(cfg)
    scalars = jax.tree.map(lambda _: jnp.zeros(()), SPECS, is_leaf=_is_spec)
    optimizer_specs = optax.tree.map_params(
        rule, lambda _, spec: spec, rule.init(scalars), SPECS, transform_non_params=lambda _: P()
    )
    state_specs, tokens = State(SPECS, optimizer_specs), P("fsdp")

    def place(params: Any) -> State:
        shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), state_specs, is_leaf=_is_spec)
        start = jax.jit(lambda p: State(p, rule.init(p)), out_shardings=shardings)
        return start(jax.device_get(params))

    local = functools.partial(_step, cfg=cfg, layout=layout, rule=rule)
    step = jax.shard_map(
        local, mesh=mesh, in_specs=(state_specs, tokens, tokens), out_specs=(state_specs, P()), check_vma=False
    )
    return mesh, place, jax.jit(step, donate_argnums=0)


def _is_spec(leaf: Any) -> bool:
    return isinstance(leaf, P)


def _rule(cfg: config.Config) -> optax.GradientTransformation:
    """AdamW without the clipping, which has to look across devices."""
    opt = cfg.optimizer
    matrices = jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key != "scale", SPECS, is_leaf=_is_spec)
    return optax.chain(
        optax.scale_by_adam(opt.b1, opt.b2, opt.eps),
        optax.add_decayed_weights(opt.weight_decay, matrices),
        optax.scale_by_learning_rate(optimizer.schedule(opt, cfg.train.steps)),
    )


def _step(state: State, tokens_BT, targets_BT, *, cfg: config.Config, layout: Layout, rule):
    """One device's part of a train step. Sizes are the device's own."""
    target_count = cfg.data.batch * cfg.data.seq

    def loss(params):
        sum_, correct = _losses(params, tokens_BT, targets_BT, cfg.model, layout)
        return sum_ / target_count, correct

    (loss_, correct), gradients = jax.value_and_grad(loss, has_aux=True)(state.params)
    gradients = _reduce_replicated(gradients, layout)
    norm = _global_norm(gradients, layout)
    clip = jnp.minimum(1.0, cfg.optimizer.clip_norm / norm)
    gradients = jax.tree.map(lambda g: g * clip, gradients)
    updates, new_optimizer = rule.update(gradients, state.optimizer, state.params)
    if layout.fsdp > 1:
        loss_, correct = jax.lax.psum((loss_, correct), "fsdp")
    metrics = {"loss": loss_, "accuracy": correct / target_count, "gradient_norm": norm}
    return State(optax.apply_updates(state.params, updates), new_optimizer), metrics


def _reduce_replicated(gradients, layout: Layout):
    """Gradients of norm scales, which every device holds whole: each saw only its own rows, and its part of T."""
    axes = ("fsdp",) * (layout.fsdp > 1) + ("tensor",) * (layout.tensor > 1 and layout.sequence)
    if not axes:
        return gradients
    return jax.tree.map(
        lambda spec, g: jax.lax.psum(g, axes) if not any(spec) else g, SPECS, gradients, is_leaf=_is_spec
    )


def _global_norm(gradients, layout: Layout) -> jax.Array:
    """The norm of whole gradients: one scalar reduction for all that are split over the same axes."""
    squares: dict[tuple[str, ...], jax.Array] = {}
    specs = jax.tree.leaves(SPECS, is_leaf=_is_spec)
    for spec, gradient in zip(specs, jax.tree.leaves(gradients), strict=True):
        over = layout.split_over(spec)
        squares[over] = squares.get(over, jnp.zeros(())) + jnp.square(gradient).sum()
    return jnp.sqrt(sum(jax.lax.psum(square, over) if over else square for over, square in squares.items()))


def _gathered(weight: jax.Array, axis: int, layout: Layout) -> jax.Array:
    """A weight whole along `embed`; its derivative is a reduce-scatter."""
    return jax.lax.all_gather(weight, "fsdp", axis=axis, tiled=True) if layout.fsdp > 1 else weight


def _losses(params, tokens_BT, targets_BT, cfg: config.ModelConfig, layout: Layout) -> tuple[jax.Array, jax.Array]:
    """The sum of the losses of this device's rows, and how many were predicted right."""
    tensor = region(layout)
    angles = _angles(tokens_BT.shape[1], cfg)
    x_BTD = tensor.leave(_looked_up(_gathered(params["embedding"], 1, layout), tokens_BT, layout))

    def block(x_BTD, layer):
        return _block(x_BTD, layer, angles, cfg, layout, tensor), None

    block = jax.checkpoint(block, prevent_cse=False) if layout.remat else block
    x_BTD, _ = jax.lax.scan(block, x_BTD, params["layers"])
    x_BTD = tensor.enter(_norm(x_BTD, params["final_norm"], cfg))
    return _cross_entropy(x_BTD, _gathered(params["unembedding"], 1, layout), targets_BT, layout)


def _block(x_BTD, layer, angles, cfg: config.ModelConfig, layout: Layout, tensor: Region):
    attention, mlp = layer["attention"], layer["mlp"]
    y_BTD = tensor.enter(_norm(x_BTD, layer["attention_norm"], cfg))
    q, k, v = (jnp.einsum("BTD,DNH->BTNH", y_BTD, _gathered(attention[w], 0, layout)) for w in ("wq", "wk", "wv"))
    o_BTNH = jax.nn.dot_product_attention(_rotated(q, angles), _rotated(k, angles), v, is_causal=True)
    x_BTD += tensor.leave(jnp.einsum("BTNH,NHD->BTD", o_BTNH, _gathered(attention["wo"], 2, layout)))
    y_BTD = tensor.enter(_norm(x_BTD, layer["mlp_norm"], cfg))
    gate, up = (y_BTD @ _gathered(mlp[w], 0, layout) for w in ("w_gate", "w_up"))
    return x_BTD + tensor.leave((jax.nn.silu(gate) * up) @ _gathered(mlp["w_down"], 1, layout))


def _norm(x_BTD, norm, cfg: config.ModelConfig):
    return x_BTD * jax.lax.rsqrt(jnp.square(x_BTD).mean(-1, keepdims=True) + cfg.norm.eps) * norm["scale"]


def _angles(length: int, cfg: config.ModelConfig) -> tuple[jax.Array, jax.Array]:
    half = cfg.head_dim // 2
    turns = cfg.attention.rope.theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle_T1H = (jnp.arange(length)[:, None] * turns)[:, None]
    return jnp.cos(angle_T1H), jnp.sin(angle_T1H)


def _rotated(x_BTNH, angles):
    cos, sin = angles
    first, second = jnp.split(x_BTNH, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def _first_row(rows: int, layout: Layout):
    return jax.lax.axis_index("tensor") * rows if layout.tensor > 1 else 0


def _looked_up(table_VD, tokens_BT, layout: Layout):
    """The rows of `table_VD`, this device's part of the vocabulary; zeros for tokens of other parts."""
    ids_BT = tokens_BT - _first_row(len(table_VD), layout)
    ids_BT = jnp.where((ids_BT >= 0) & (ids_BT < len(table_VD)), ids_BT, len(table_VD))
    return table_VD.at[ids_BT].get(mode="fill", fill_value=0)


def _cross_entropy(x_BTD, table_VD, targets_BT, layout: Layout) -> tuple[jax.Array, jax.Array]:
    """Sums over targets, with three reductions of [B, T] where the vocabulary is split."""
    logits_BTV = jnp.einsum("BTD,VD->BTV", x_BTD, table_VD)
    over = "tensor" if layout.tensor > 1 else None
    highest_BT = jax.lax.stop_gradient(logits_BTV).max(-1)
    highest_BT = jax.lax.pmax(highest_BT, over) if over else highest_BT
    total_BT = jnp.exp(logits_BTV - highest_BT[..., None]).sum(-1)
    row_V = _first_row(len(table_VD), layout) + jnp.arange(len(table_VD))
    target_BT = jnp.where(row_V == targets_BT[..., None], logits_BTV, 0).sum(-1)
    total_BT, target_BT = (_sum(x) if over else x for x in (total_BT, target_BT))
    losses_BT = highest_BT + jnp.log(total_BT) - target_BT
    return losses_BT.sum(), (target_BT >= highest_BT).sum(dtype=jnp.float32)
