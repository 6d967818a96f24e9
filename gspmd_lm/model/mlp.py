"""The feed-forward network of a layer. compose.py chooses the parts by which that of a family differs from it."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax

from gspmd_lm import config
from gspmd_lm.model.norm import Change, same
from gspmd_lm.model.tokens import Tokens
from gspmd_lm.model.weights import bias, matrix
from gspmd_lm.sharding.annotate import Adapted, Weight, recomputed, shard
from gspmd_lm.sharding.matmuls import project, unreduced_matmul
from gspmd_lm.sharding.partial_sums import Unreduced

HIDDEN = "hidden: batch seq mlp"


class MlpParts(NamedTuple):
    """The steps of a feed-forward network that families choose."""

    inward: tuple[str, ...]  # its matrices from the residual stream: gate and up, or up alone
    activate: Callable[..., jax.Array]  # the hidden layer, from their products: see `hidden_layer`
    biased: tuple[str, ...] = ()  # the matrices that have a bias
    add_bias: Callable[[Any, Any], Any] = lambda y, bias: y
    adapt: Callable[[nn.Module, Weight], Adapted] = lambda module, weight: Adapted(weight)  # gives it an adapter


class Mlp(nn.Module):
    """A gated or plain feed-forward network."""

    cfg: config.ModelConfig
    parts: MlpParts

    def setup(self):
        cfg, D, F = self.cfg, self.cfg.embed, self.cfg.mlp
        weights = {name: matrix(self, f"w_{name}", "embed mlp", (D, F), cfg) for name in self.parts.inward}
        weights["down"] = matrix(self, "w_down", "mlp embed", (F, D), cfg)
        outputs = dict.fromkeys(self.parts.inward, ("mlp", (F,))) | {"down": ("embed", (D,))}
        self.biases = {name: bias(self, f"b_{name}", *outputs[name], cfg) for name in self.parts.biased}
        self.weights = {name: self.parts.adapt(self, w) for name, w in weights.items()}

    def __call__(self, in_BTD: jax.Array, tokens: Tokens) -> tuple[Unreduced, Tokens]:
        """The output that the residual stream adds, and the tokens as they are. `in_BTD` is gathered."""
        add, biases = self.parts.add_bias, self.biases
        inward = [(name, project(in_BTD, self.weights[name])) for name in self.parts.inward]
        in_BTF = [shard(add(y, biases.get(name)), HIDDEN) for name, y in inward]
        hidden_BTF = shard(recomputed(self.parts.activate)(*in_BTF), HIDDEN)
        return add(unreduced_matmul(hidden_BTF, self.weights["down"]), biases.get("down")), tokens


def hidden_layer(change_first: Change, change_second: Change = same) -> Callable[..., jax.Array]:
    """A function that computes the hidden layer of an MLP from x w_gate and x w_up, or from x w_up alone.

    It applies `change_first`, such as SiLU, to the first product. With both, it multiplies the result by the second
    product, to which it applies `change_second`.
    """

    def activate(first: jax.Array, *second: jax.Array) -> jax.Array:
        return math.prod(map(change_second, second), start=change_first(first))

    return activate
