"""Sums over the pieces of a split: the same numbers wherever the result lives."""

import jax
import numpy as np
import pytest

from gspmd_lm.sharding import mesh, rules_file
from gspmd_lm.sharding.annotate import Spec, Split
from gspmd_lm.sharding.placement import MeshPlacement, Named, problems
from tests.launched import launch, output

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


@pytest.mark.parametrize(("platform", "more"), [("cpu", ()), ("tpu", ()), ("tpu", (3,))])
def test_a_sum_is_the_same_wherever_it_lives(platform, more, monkeypatch):
    """Whole numbers, so that no order of adding changes anything, and all different, so that no block can move."""
    monkeypatch.setattr(MeshPlacement, "platform", platform)
    shape, placements, partials = (16, 8, *more), [], []
    home = Spec("w_up", ("embed", "mlp", "head_dim")[: len(shape)], "optimizer")
    for over, embed, mlp in CASES:
        found = rules_file.from_dict({"mesh": SIZES, "optimizer": {"embed": embed, "mlp": mlp}}, "here.yaml")
        assert not found.problems
        placements.append(MeshPlacement(found, mesh.build(found, jax.devices())))
        numbers = np.random.default_rng(0).permutation(2 ** len(over) * np.prod(shape)).astype(np.float32)
        partials.append(numbers.reshape(-1, *shape))

    def totals(partials):
        """Of all cases: a program for each would take longer to compile."""
        all_cases = zip(placements, CASES, partials, strict=True)
        return [placement.total(x, Split(over, len(x)), home) for placement, (over, *_), x in all_cases]

    for placement, case, numbers, total in zip(placements, CASES, partials, jax.jit(totals)(partials), strict=True):
        wanted = placement.sharding("optimizer", "w_up", home.axes, shape)
        assert total.sharding.is_equivalent_to(wanted, len(shape)), case
        np.testing.assert_array_equal(total, numbers.sum(0), str(case))


TOTAL = """
import jax
import jax.numpy as jnp

from gspmd_lm.hardware import target
from gspmd_lm.runtime import compiler
from gspmd_lm.sharding import mesh, rules_file
from gspmd_lm.sharding.placement import MeshPlacement
from gspmd_lm.sharding.annotate import Spec, Split

devices = target.devices(target.parse("v5p:2x2x2"))
rules = rules_file.from_dict({"mesh": {"fsdp": 8}, "optimizer": {"embed": "fsdp"}}, "here.yaml")
placement = MeshPlacement(rules, mesh.build(rules, devices))
options = compiler.options("tpu", {}, "here.yaml", devices[0].device_kind)
sums = jax.sharding.NamedSharding(placement.mesh, jax.sharding.PartitionSpec("fsdp"))
for equation, axes, *shapes in CASES:
    home = Spec("w_down", axes, "optimizer")
    total = jax.jit(lambda x, y: placement.total(jnp.einsum(equation, x, y), Split(("fsdp",), 8), home))
    x, y = (jax.ShapeDtypeStruct(shape, "bfloat16", sharding=sums) for shape in shapes)
    text = total.lower(x, y).compile(compiler_options=options).as_text()
    print("reduce-scatter(" in text, "all-reduce(" in text)
"""
COLUMNS, ROWS = ("expert", "mlp", "embed"), ("expert", "embed", "mlp")
PIECES = [(COLUMNS, 512, 8 * size) for size in (64, 384)] + [(ROWS, 8 * size, 512) for size in (8, 24)]
SUMS = [("retm,retd->remd", axes, (8, 4, 256, rows), (8, 4, 256, columns)) for axes, rows, columns in PIECES]
SUMS.append(("rtd,rtnh->rdnh", ("embed", "heads", "head_dim"), (8, 1024, 768), (8, 1024, 12, 64)))


@pytest.mark.long
@pytest.mark.parametrize("cases", [SUMS[::4], pytest.param(SUMS, marks=pytest.mark.slow)], ids=len)
def test_a_tpu_gives_each_device_only_its_piece_of_a_sum(cases):
    """However long the piece is that a device keeps of an expert's columns, of its rows, or of rows of narrow heads."""
    launched = launch(TOTAL.replace("CASES", repr(cases)), TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="1")
    printed, errors = output(launched)
    assert printed.splitlines() == ["True False"] * len(cases), errors


def test_gradients_are_placed_as_the_optimizer_also_where_it_has_no_state():
    raw = {"mesh": {"data": 4}, "rules": {"batch": "data"}, "optimizer": {"embed": "data"}}
    weights = [(Named("w", ("embed",)), jax.ShapeDtypeStruct((6,), "float32"))]
    found = problems(rules_file.from_dict(raw, "here.yaml").fill(4), weights)
    (message,) = [problem.message for problem in found if not problem.warning]
    assert message == "w: embed=6 does not divide over data=4"
