"""Tokens on their way to the experts that compute them, and back."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from gspmd_lm.kernels.grouped import grouped
from gspmd_lm.placing import Weight, use


def chosen_experts(
    x_BTD: Any,
    chosen_BTk: jax.Array,
    weights_BTk: jax.Array,
    w_in: Sequence[Weight],
    w_down: Weight,
    b_in: Sequence[Weight],
    b_down: Weight | None,
    activated: Callable[..., jax.Array],
    most: int = 0,
) -> Any:
    E, k = w_down.array.shape[0], chosen_BTk.shape[-1]
    x_nD = x_BTD.reshape(-1, x_BTD.shape[-1])
    flat_N = chosen_BTk.reshape(-1)
    order_N = jnp.argsort(flat_N)
    inverse_N = jnp.argsort(order_N)
    sizes_E = (flat_N[:, None] == jnp.arange(E)).sum(0)
    expert_N = flat_N[order_N]
    rows_ND = x_nD[order_N // k]
    in_NF = [grouped(rows_ND, use(w), sizes_E) for w in w_in]
    if b_in:
        in_NF = [x_NF + use(b)[expert_N] for x_NF, b in zip(in_NF, b_in, strict=True)]
    y_ND = grouped(activated(*in_NF), use(w_down), sizes_E)
    if b_down:
        y_ND += use(b_down)[expert_N]
    y_nkD = y_ND[inverse_N].reshape(-1, k, x_nD.shape[-1])
    weights_nk = jnp.where(chosen_BTk < E, weights_BTk, 0).reshape(-1, k)
    return jnp.einsum("nkD,nk->nD", y_nkD, weights_nk).astype(x_nD.dtype).reshape(x_BTD.shape)
