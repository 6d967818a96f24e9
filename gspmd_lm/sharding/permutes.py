"""What devices send to each other, each to one."""

from collections.abc import Mapping

import jax
import numpy as np

from gspmd_lm.sharding.annotate import Split


def permuted(x: jax.Array, over: Split, to: Mapping[int, int]) -> jax.Array:
    """Within `per_device`, `x` of the device that sends to this one. Devices are counted along the axes of `over`."""
    if all(source == target for source, target in to.items()):
        return x
    # jax.lax.ppermute counts them along the axes of the mesh, and since jax 0.12 takes the names in no other order.
    in_mesh = tuple(name for name in jax.sharding.get_abstract_mesh().axis_names if name in over.over)
    along = [over.over.index(name) for name in in_mesh]
    sizes = [jax.lax.axis_size(name) for name in over.over]
    counted = np.argsort(np.arange(over.num_shards).reshape(sizes).transpose(along).ravel()).tolist()
    return jax.lax.ppermute(x, in_mesh, [(counted[source], counted[target]) for source, target in to.items()])
