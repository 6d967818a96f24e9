"""A mixture of experts: each token is computed by the few experts that its router chooses."""

import dataclasses
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from gspmd_lm import config
from gspmd_lm.model.addresses import held_layers
from gspmd_lm.model.mlp import Mlp, MlpParts
from gspmd_lm.model.moe_dispatch import map_local_tokens, mixture_of_experts
from gspmd_lm.model.moe_routing import capacity
from gspmd_lm.model.tokens import Tokens
from gspmd_lm.model.weights import bias, matrix, weight
from gspmd_lm.sharding.annotate import like, shard
from gspmd_lm.sharding.axes import BALANCE_BIAS
from gspmd_lm.sharding.matmuls import project
from gspmd_lm.sharding.partial_sums import Unreduced

ROUTING = "routing: batch seq scores"


class RouterOutput(NamedTuple):
    """The output of a layer's router; with another first dimension, that of several layers."""

    load_C: jax.Array  # float32: how many tokens of the batch each expert was chosen for
    penalty_B: jax.Array  # float32: what the router adds to the mean loss of a token of each row
    rounds_B: jax.Array  # float32: how many rounds the tokens of each row travelled in; 1 where they stay


class Experts(nn.Module):
    """Routed experts, and experts that compute every token."""

    cfg: config.ModelConfig
    parts: MlpParts

    def setup(self):
        cfg = self.cfg
        E, D, F = cfg.num_experts, cfg.embed, cfg.expert_width
        exact = dataclasses.replace(cfg, compute_dtype="float32")
        self.router = matrix(self, "router", "embed scores", (D, E), exact)
        if cfg.moe.router_bias:
            self.router_bias = bias(self, "router_bias", "scores", (E,), exact)
        if cfg.balance_bias:
            at_rest = dataclasses.replace(exact, weight_dtype="float32")
            self.balance_bias = bias(self, BALANCE_BIAS, "scores", (E,), at_rest)
        names = self.parts.inward
        inward = [matrix(self, f"w_{name}", "expert embed mlp", (E, D, F), cfg) for name in names]
        down = matrix(self, "w_down", "expert mlp embed", (E, F, D), cfg)
        b_in, b_down = [None] * len(names), None
        if self.parts.biased:
            zeros = nn.initializers.zeros
            b_in = [weight(self, f"b_{name}", "expert mlp", (E, F), cfg, zeros) for name in names]
            b_down = weight(self, "b_down", "expert embed", (E, D), cfg, zeros)
        matrices = [self.parts.adapt(self, w) for w in (*inward, down)]
        self.matrices = list(zip(matrices, [*b_in, b_down], strict=True))
        if cfg.moe.shared_mlp:
            self.shared = Mlp(dataclasses.replace(cfg, mlp=cfg.moe.shared_mlp), self.parts)
        if cfg.moe.shared_gate:
            self.shared_gate = weight(self, "shared_gate", "embed", (D,), cfg, nn.initializers.normal(cfg.init_std))

    def __call__(self, x_BTD: jax.Array, tokens: Tokens) -> tuple[Unreduced, Tokens]:
        """The output that the residual stream adds, and the tokens with that of the router. `x_BTD` is gathered."""
        cfg = self.cfg
        with jax.default_matmul_precision("highest"):
            logits_BTC = shard(project(x_BTD, self.router), ROUTING)
        if cfg.moe.router_bias:
            logits_BTC += self.router_bias
        scores_BTC = jax.nn.sigmoid(logits_BTC) if cfg.moe.routing == "sigmoid" else jax.nn.softmax(logits_BTC)
        if cfg.moe.routing == "sparsemixer":
            chosen_BTk, shares_BTkC = sparsemixer(logits_BTC, cfg.moe.per_token, cfg.moe.jitter)
        else:
            chosen_BTk, shares_BTkC = self._choose_experts(scores_BTC), scores_BTC[:, :, None]
        at_BTkC = chosen_BTk[..., None] == jnp.arange(cfg.num_experts)
        weights_BTk = jnp.where(at_BTkC, shares_BTkC, 0).sum(-1)
        if cfg.moe.normalized_weights:
            weights_BTk /= weights_BTk.sum(-1, keepdims=True) + 1e-20
        load_C, penalty_B = self._loads_and_penalties(logits_BTC, scores_BTC, at_BTkC)
        most = capacity(cfg, chosen_BTk.shape[1])
        if most:
            chosen_BTk = jnp.where(_within(at_BTkC, most), chosen_BTk, cfg.num_experts)

        weights_BTk *= cfg.moe.scale
        y, rounds_B = mixture_of_experts(
            x_BTD, chosen_BTk, weights_BTk, self.matrices, self.parts.activate, most, cfg.moe.weighted_input
        )
        if cfg.moe.shared_mlp:
            shared, _ = self.shared(x_BTD, tokens)
            if cfg.moe.shared_gate:
                gate_BT = like(project(x_BTD, self.shared_gate), "tokens: batch seq")
                shared = jax.nn.sigmoid(gate_BT)[..., None] * shared
            y += shared
        return y, tokens._replace(routed=RouterOutput(load_C, penalty_B, jax.lax.stop_gradient(rounds_B)))

    def _choose_experts(self, scores_BTC: jax.Array) -> jax.Array:
        """The experts of each token, [B, T, k], the highest scores first."""
        scores_BTC = jax.lax.stop_gradient(scores_BTC)
        if self.cfg.balance_bias:
            scores_BTC += jax.lax.stop_gradient(self.balance_bias)
        return map_local_tokens(self._highest, scores_BTC)

    def _highest(self, scores_BTC: jax.Array) -> jax.Array:
        """The highest scores of each token, in the groups that it may use."""
        cfg = self.cfg
        if cfg.moe.groups_per_token < cfg.moe.groups:
            in_groups = scores_BTC.reshape(*scores_BTC.shape[:2], cfg.moe.groups, -1)
            of_group, _ = jax.lax.top_k(in_groups, 2 if cfg.moe.routing == "sigmoid" else 1)
            _, groups = jax.lax.top_k(of_group.sum(-1), cfg.moe.groups_per_token)
            used = (groups[..., None] == jnp.arange(cfg.moe.groups)).any(-2)
            scores_BTC = jnp.where(used[..., None], in_groups, -jnp.inf).reshape(scores_BTC.shape)
        return jax.lax.top_k(scores_BTC, cfg.moe.per_token)[1]

    def _loads_and_penalties(
        self, logits_BTC: jax.Array, scores_BTC: jax.Array, at_BTkC: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """load_C and penalty_B, as in `RouterOutput`. Tokens without a target count too."""
        cfg = self.cfg
        load_BC = jax.lax.stop_gradient(at_BTkC.sum((1, 2), dtype=jnp.float32))
        rows, length = scores_BTC.shape[:2]
        penalty_B = jnp.zeros(rows)
        if cfg.moe.balance in ("batch", "row", "bias_row"):
            share_BC = (scores_BTC / scores_BTC.sum(-1, keepdims=True)).mean(1)
            chosen_BC = load_BC / (length * cfg.moe.per_token)
            if cfg.moe.balance == "batch":
                share_BC, chosen_BC = share_BC.mean(0), chosen_BC.mean(0)
            penalty_B += cfg.moe.balance_weight * cfg.num_experts * (share_BC * chosen_BC).sum(-1)
        if cfg.moe.z_loss:
            log_z_BT = jax.nn.logsumexp(logits_BTC, axis=-1)
            penalty_B += cfg.moe.z_loss * jnp.square(log_z_BT).mean(1)
        return load_BC.sum(0), penalty_B


def sparsemixer(logits_BTC: jax.Array, k: int, jitter: float) -> tuple[jax.Array, jax.Array]:
    """The experts of each token, [B, T, k], and for each of them the shares of all experts, [B, T, k, C].

    Each time, the expert with the highest logit is chosen among those that are left. Experts with a share are those
    that are left and whose logits are lower by at most 2 * jitter, relatively. Source: arXiv 2409.12136, whose training
    also chooses at random among them; here the highest is always chosen.
    """
    left_BTC, sizes_BTC, chosen, shares = logits_BTC, jax.lax.stop_gradient(logits_BTC), [], []
    for _ in range(k):
        best_BT1 = jax.lax.stop_gradient(left_BTC).max(-1, keepdims=True)
        far_BTC = (best_BT1 - sizes_BTC) / jnp.maximum(jnp.abs(sizes_BTC), best_BT1) > 2 * jitter
        shares.append(jax.nn.softmax(jnp.where(far_BTC, -jnp.inf, left_BTC)))
        chosen.append(left_BTC.argmax(-1))
        left_BTC = jnp.where(chosen[-1][..., None] == jnp.arange(left_BTC.shape[-1]), -jnp.inf, left_BTC)
    return jnp.stack(chosen, -1), jnp.stack(shares, 2)


def balance_experts(params: dict[str, Any], load_LC: jax.Array, cfg: config.ModelConfig) -> dict[str, Any]:
    """Parameters whose `balance_bias` has moved against the loads of a step, [layers with experts, C].

    Source: auxiliary-loss-free balancing, arXiv 2408.15664.
    """
    moves_LC = cfg.moe.balance_rate * jnp.sign(load_LC.mean(1, keepdims=True) - load_LC)
    flat: dict[Any, Any] = dict(flatten_dict(params))
    sparse = [number for number, layer in enumerate(cfg.each_layer) if layer.experts]
    for module, (layers, stacked, stack) in held_layers(cfg).items():
        rows = [sparse.index(layer) for layer in layers if layer in sparse]
        if rows and not stack and module[0] not in cfg.frozen:
            flat[(*module, "mlp", BALANCE_BIAS)] += moves_LC[jnp.array(rows)] if stacked else moves_LC[rows[0]]
    return unflatten_dict(flat)


def _within(at_BTkC: jax.Array, capacity: int) -> jax.Array:
    """[B, T, k]: whether a token is one of the first `capacity` tokens of its row that an expert was chosen for."""
    place_BTC = jnp.cumsum(at_BTkC.any(2), axis=1, dtype=jnp.int32)
    return jnp.where(at_BTkC, place_BTC[:, :, None], 0).sum(-1) <= capacity
