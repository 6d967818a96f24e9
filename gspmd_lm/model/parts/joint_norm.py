"""A norm over all heads together (OLMo 2)."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from gspmd_lm.model.norm import Norm


class JointNorm(Norm):
    """A norm over all heads together, [..., N, H]. The last heads may be padding, which does not count."""

    heads: int = 0  # the number of heads that are not padding

    @nn.nowrap
    def mask_padding(self, x: jax.Array) -> jax.Array:
        """`x` with zeros in the heads that are padding."""
        if x.shape[-2] == self.heads:
            return x
        return jnp.where((jnp.arange(x.shape[-2]) < self.heads)[:, None], x, 0)

    @nn.nowrap
    def mean(self, squares: jax.Array) -> jax.Array:
        """The mean over the heads that are not padding."""
        return squares.shape[-2] / self.heads * squares.mean((-2, -1), keepdims=True)
