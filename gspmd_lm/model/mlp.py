"""The feed-forward network of a layer, and activations."""

import functools
import math
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.scipy.special import erf

from gspmd_lm import config
from gspmd_lm.model.norm import Change, root
from gspmd_lm.model.weights import bias, matrix, with_adapter
from gspmd_lm.sharding.annotate import recomputed, shard
from gspmd_lm.sharding.matmuls import project, unreduced_matmul
from gspmd_lm.sharding.partial_sums import Unreduced

HIDDEN = "hidden: batch seq mlp"


class Mlp(nn.Module):
    """A gated or plain feed-forward network."""

    cfg: config.ModelConfig

    def setup(self):
        cfg, shape = self.cfg, (self.cfg.embed, self.cfg.mlp)
        names = INWARD[cfg.feed_forward.kind]
        weights = {name: matrix(self, f"w_{name}", "embed mlp", shape, cfg) for name in names}
        weights["down"] = matrix(self, "w_down", "mlp embed", shape[::-1], cfg)
        axes = {"gate": "mlp", "up": "mlp", "down": "embed"}
        sizes = {"mlp": shape[1:], "embed": shape[:1]}
        biased = [*names, "down"] * cfg.feed_forward.bias
        self.biases = {name: bias(self, f"b_{name}", axes[name], sizes[axes[name]], cfg) for name in biased}
        self.weights = {name: with_adapter(self, w, cfg) for name, w in weights.items()}

    def __call__(self, in_BTD: jax.Array) -> tuple[Unreduced, None]:
        """The output that the residual stream adds, and None, as an MLP has no router. `in_BTD` is gathered."""
        inward = [(name, project(in_BTD, self.weights[name])) for name in INWARD[self.cfg.feed_forward.kind]]
        in_BTF = [shard(y + self.biases[name] if name in self.biases else y, HIDDEN) for name, y in inward]
        hidden_BTF = shard(recomputed(hidden_layer(self.cfg))(*in_BTF), HIDDEN)
        y = unreduced_matmul(hidden_BTF, self.weights["down"])
        return (y + self.biases["down"] if self.biases else y), None


INWARD = {"gated": ("gate", "up"), "plain": ("up",)}  # the matrices from the residual stream


@functools.cache
def hidden_layer(cfg: config.ModelConfig) -> Callable[..., jax.Array]:
    """A function that computes the hidden layer of an MLP from x w_gate and x w_up, or from x w_up alone."""
    limit, offset, share, slope = (
        cfg.feed_forward.limit,
        cfg.feed_forward.up_offset,
        cfg.feed_forward.sparsity,
        cfg.feed_forward.slope,
    )
    of_gate: list[Change] = []
    of_up: list[Change] = []
    if limit:
        of_gate.append(lambda x: jnp.minimum(x, limit))
        of_up.append(lambda x: jnp.clip(x, -limit, limit))
    if offset:
        of_up.append(lambda x: x + jnp.asarray(offset, x.dtype))
    if share:
        of_gate.append(lambda x: _sparse(x, share))
    of_gate.append(ACTIVATIONS[cfg.feed_forward.activation] if slope == 1 else lambda x: x * jax.nn.sigmoid(slope * x))

    def activate(first: jax.Array, *rest: jax.Array) -> jax.Array:
        return math.prod((apply_changes(x, of_up) for x in rest), start=apply_changes(first, of_gate))

    return activate


def apply_changes(x: jax.Array, changes: list[Change]) -> jax.Array:
    """`x` after all changes, the first one first."""
    return functools.reduce(lambda x, change: change(x), changes, x)


def gelu(x: jax.Array) -> jax.Array:
    """x times the normal distribution's cumulative probability at x, computed in float32 and rounded once.

    Below -3, where that probability is small, its absolute error is below 1e-6, while its relative error is not
    bounded. `jax.nn.gelu` bounds that as well, with twice the arithmetic.
    """

    @recomputed
    def computed(x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        return (0.5 * wide * (1 + erf(math.sqrt(0.5) * wide))).astype(x.dtype)

    return computed(x)


ACTIVATIONS: dict[str, Change] = {
    "silu": jax.nn.silu,
    "gelu": gelu,
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
    "tanh": jnp.tanh,
}


def _sparse(x_BTF: jax.Array, share: float) -> jax.Array:
    """relu(x - c), where c is the quantile `share` of a normal distribution with the token's mean and deviation."""
    exact_BTF = x_BTF.astype(jnp.float32)
    spread_BT1 = root(jnp.var(exact_BTF, axis=-1, keepdims=True))
    least_BT1 = exact_BTF.mean(-1, keepdims=True) + jax.scipy.special.ndtri(share) * spread_BT1
    return jax.nn.relu(exact_BTF - least_BT1).astype(x_BTF.dtype)
