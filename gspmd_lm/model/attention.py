"""Grouped-query attention. compose.py chooses the parts by which the attention of a family differs from it."""

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import flax.linen as nn
import jax

from gspmd_lm import config
from gspmd_lm.model.kernels.attention import Q
from gspmd_lm.model.kernels.context import attend, keys_spec
from gspmd_lm.model.norm import same
from gspmd_lm.model.tokens import Tokens
from gspmd_lm.model.weights import bias, matrix
from gspmd_lm.sharding.annotate import Adapted, Weight, shard
from gspmd_lm.sharding.matmuls import project, unreduced_matmul
from gspmd_lm.sharding.partial_sums import Unreduced

Turn = Callable[[jax.Array, Tokens], jax.Array]  # changes queries or keys, [B, T, N, H]


class AttentionParts(NamedTuple):
    """The steps that a family adds to attention. Parts that have weights make them in the module that they get."""

    biased: str = ""  # the names of q, k and v that have a bias
    add_bias: Callable[..., jax.Array] = lambda x_BTNH, bias_NH: x_BTNH
    adapt: Callable[[nn.Module, Weight], Adapted] = lambda module, weight: Adapted(weight)  # gives it an adapter
    norms: tuple[Callable[[], Any], ...] = (lambda: same,) * 3  # of queries, keys and values
    turns: tuple[Turn, ...] = ()  # of queries and keys, by their positions
    query_turns: tuple[Turn, ...] = ()  # of queries alone, before the others
    seen: Callable[[Tokens], Tokens] = lambda tokens: tokens  # the tokens as attention sees them
    numbers: Callable[[nn.Module], Callable[[Tokens], Any]] = lambda module: lambda tokens: None  # see `head_numbers`
    attend: Callable[[nn.Module], Callable[..., jax.Array]] = lambda module: attend  # softmax(scale q k) v
    gate: Callable[[nn.Module], Callable[..., jax.Array]] = lambda module: lambda in_BTD, out_BTNH: out_BTNH
    result: Callable[[jax.Array], jax.Array] = same  # of the result, before its matrix
    out_bias: Callable[[nn.Module], Callable[[Unreduced], Unreduced]] = lambda module: lambda y: y


class Attention(nn.Module):
    """Attention of one layer: each token attends only to tokens of its own segment."""

    cfg: config.ModelConfig
    parts: AttentionParts = AttentionParts()
    made: ClassVar[str] = "kv"  # which of keys and values it makes

    def setup(self):
        cfg, parts = self.cfg, self.parts
        D, N, K, H = cfg.embed, cfg.head_rows, cfg.kv_head_rows, cfg.head_dim
        weights = {"q": matrix(self, "wq", "embed heads head_dim", (D, N, H), cfg)}
        for name in self.made:
            weights[name] = matrix(self, f"w{name}", "embed kv_heads head_dim", (self.keys_width, K, H), cfg)
        weights["o"] = matrix(self, "wo", "heads head_dim embed", (N, H, D), cfg)
        self.gate = parts.gate(self)
        outputs = {"q": ("heads head_dim", (N, H))} | dict.fromkeys("kv", ("kv_heads head_dim", (K, H)))
        self.biases = {name: bias(self, f"b{name}", *outputs[name], cfg) for name in parts.biased}
        self.weights = weights
        self.numbers, self.attend = parts.numbers(self), parts.attend(self)
        self.out_bias = parts.out_bias(self)
        self.q_norm, self.k_norm, self.value_norm = (make() for make in parts.norms)
        self.matrices = {name: parts.adapt(self, weights[name]) for name in ("q", "o", *self.made)}

    @property
    def keys_width(self) -> int:
        """The width of the vectors that keys and values are projected from."""
        return self.cfg.embed

    def __call__(self, in_BTD: jax.Array, tokens: Tokens) -> tuple[Unreduced, Tokens]:
        """The output that the residual stream adds, and the tokens with their updated cache. `in_BTD` is gathered.

        With a cache, keys and values are written to it. A single token per row is a decoding step: it attends to the
        tokens in the cache. Several tokens per row are a prefill: they attend to each other.
        """
        q_BTNH = self.q_norm(shard(self.project_heads("q", in_BTD), Q))
        for turn in (*self.parts.query_turns, *self.parts.turns):
            q_BTNH = shard(turn(q_BTNH, tokens), Q)  # named again: a remat policy then saves the input of attention
        k_BSKH, v_BSKH, tokens = self.keys(in_BTD, tokens)
        out_BTNH = self.attend(q_BTNH, k_BSKH, v_BSKH, self.parts.seen(tokens), self.cfg, self.numbers(tokens))
        out_BTNH = self.parts.result(self.gate(in_BTD, out_BTNH))
        return self.out_bias(unreduced_matmul(out_BTNH, self.matrices["o"])), tokens

    @nn.nowrap
    def keys(self, in_BTD: jax.Array, tokens: Tokens) -> tuple[jax.Array, jax.Array, Tokens]:
        """The keys and values to attend to, and the tokens with the cache that these were written to."""
        k_spec, v_spec = keys_spec("k"), keys_spec("v")
        k_BSKH, v_BSKH = shard(self.project_heads("k", in_BTD), k_spec), shard(self.project_heads("v", in_BTD), v_spec)
        k_BSKH, v_BSKH = self.k_norm(k_BSKH), self.value_norm(v_BSKH)
        for turn in self.parts.turns:
            k_BSKH = shard(turn(k_BSKH, tokens), k_spec)
        return self.finish_keys(k_BSKH, v_BSKH, tokens)

    @nn.nowrap
    def finish_keys(self, k_BSKH: jax.Array, v_BSKH: jax.Array, tokens: Tokens) -> tuple[jax.Array, jax.Array, Tokens]:
        """The keys and values to attend to: in a decoding step, the cache holds those of all tokens so far."""
        if tokens.cache is None:
            return k_BSKH, v_BSKH, tokens
        cache = tokens.cache.write(k_BSKH, v_BSKH, tokens.slot, tokens.place_in_cache)
        if k_BSKH.shape[1] == 1:
            k_BSKH, v_BSKH = cache.read(tokens.place_in_cache)
        return k_BSKH, v_BSKH, tokens._replace(cache=cache)

    @nn.nowrap
    def project_heads(self, name: str, in_BTD: jax.Array) -> jax.Array:
        """Queries, keys or values, with their bias if they have one."""
        return self.parts.add_bias(project(in_BTD, self.matrices[name]), self.biases.get(name))
