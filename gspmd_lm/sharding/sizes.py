"""The size of an element of an array."""

import functools
from typing import Any

import jax.numpy as jnp


@functools.lru_cache(maxsize=256)
def element_bits(dtype: Any) -> int:
    """The bits of an element on a device: 4 of int4, which has a byte in numpy; of a random key, those of its words."""
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).bits
    return jnp.finfo(dtype).bits if jnp.issubdtype(dtype, jnp.floating) else 8 * getattr(dtype, "itemsize", 0)
