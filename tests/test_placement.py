"""Sums over the pieces of a split: the same numbers wherever the result lives."""

import jax
import numpy as np
import pytest

from gspmd_lm import mesh, rules_file
from gspmd_lm.placement import MeshPlacement
from gspmd_lm.placing import Spec, Split

SIZES = {"data": 2, "fsdp": 2, "tensor": 2}
# What is summed over, and the mesh axes of the two dimensions of the result, outermost first.
CASES = [
    (("fsdp",), ["fsdp"], None), (("fsdp",), None, ["tensor", "fsdp"]), (("fsdp",), ["fsdp", "tensor"], None),
    (("fsdp",), ["fsdp", "tensor", "data"], None), (("fsdp",), ["data"], ["tensor"]),
    (("data", "fsdp"), ["fsdp", "data"], None), (("data", "fsdp"), ["data", "fsdp"], ["tensor"]),
    (("data", "fsdp"), ["data", "tensor", "fsdp"], None), (("data", "fsdp"), ["fsdp"], ["tensor", "data"]),
    (("tensor",), ["tensor", "data"], ["fsdp"]), (("data", "fsdp", "tensor"), ["tensor", "fsdp"], None),
    ((), ["data"], None),
]  # fmt: skip


@pytest.mark.parametrize(("over", "embed", "mlp"), CASES)
def test_a_sum_is_the_same_wherever_it_lives(over, embed, mlp):
    """Whole numbers, so that no order of adding changes anything, and all different, so that no block can move."""
    found = rules_file.from_dict({"mesh": SIZES, "optimizer": {"embed": embed, "mlp": mlp}}, "here.yaml")
    assert not found.problems
    placement = MeshPlacement(found, mesh.build(found, jax.devices()))
    pieces = 2 ** len(over)
    partials = np.random.default_rng(0).permutation(pieces * 16 * 8).astype(np.float32).reshape(pieces, 16, 8)
    home = Spec("w_up", ("embed", "mlp"), "optimizer")
    total = jax.jit(lambda x: placement.total(x, Split(over, pieces), home))(partials)
    assert total.sharding.is_equivalent_to(placement.sharding("optimizer", "w_up", ("embed", "mlp"), (16, 8)), 2)
    np.testing.assert_array_equal(total, partials.sum(0))
