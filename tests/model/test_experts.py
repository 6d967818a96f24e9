"""Mixtures of experts against a dense reference, in which every expert computes every token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspmd_lm.kernels.grouped import grouped, outer

SIZES = {"experts": 8, "experts_per_token": 2, "expert_mlp": 16}


@pytest.mark.parametrize("rows", [1, 3, 64, 200])
def test_grouped_products_and_their_gradients(rows):
    """Experts without rows, and rows after those of the last expert, are among them."""
    rng = np.random.default_rng(rows)
    x, w = rng.normal(size=(rows, 5)).astype("f4"), rng.normal(size=(4, 5, 3)).astype("f4")
    dy = rng.normal(size=(rows, 3)).astype("f4")
    cuts = sorted(rng.integers(0, rows + 1, 3))
    sizes = np.diff([0, cuts[0], cuts[0], cuts[1], cuts[2]]).astype("i4")  # expert 1 has none
    expert = np.repeat(np.arange(4), sizes)
    used = len(expert)
    want = np.zeros((rows, 3))
    dx, dw = np.zeros((rows, 5)), np.zeros((4, 5, 3))
    for row, e in enumerate(expert):
        want[row], dx[row] = x[row] @ w[e], w[e] @ dy[row]
        dw[e] += np.outer(x[row], dy[row])
    with jax.default_matmul_precision("highest"):
        y = grouped(jnp.asarray(x), jnp.asarray(w), jnp.asarray(sizes))
        got = (
            grouped(jnp.asarray(dy), jnp.asarray(w), jnp.asarray(sizes), transposed=True),
            outer(jnp.asarray(x), jnp.asarray(dy), jnp.asarray(sizes)),
        )
    np.testing.assert_allclose(y, want, atol=1e-5)
    np.testing.assert_allclose(got[0], dx, atol=1e-5)
    np.testing.assert_allclose(got[1], dw, atol=1e-5)
    assert used <= rows and not np.asarray(y)[used:].any()
