"""In which order devices fill a mesh; rules whose dcn does not fit them; meshes of more devices than there can be."""

import types

import jax
import numpy as np
import pytest

from gspmd_lm.hardware.target import MOST_DEVICES
from gspmd_lm.sharding import mesh, rules_file
from gspmd_lm.sharding.problems import ShardingError


def test_the_last_axis_varies_fastest_over_simulated_devices():
    for sizes in ({"data": 2, "tensor": 4}, {"fsdp": 4, "tensor": 2}, {"data": 2, "fsdp": 2, "tensor": 2}):
        built = mesh.build(rules_file.from_dict({"mesh": sizes}, "here.yaml"), jax.devices())
        assert dict(built.shape) == sizes
        ids = np.vectorize(lambda device: device.id)(built.devices)
        np.testing.assert_array_equal(ids, np.arange(8).reshape(*sizes.values()))


def devices(platform, count, per_host, per_slice=0):
    """Stand-ins for devices that are not here: all that is asked before a mesh is made of them."""
    return [
        types.SimpleNamespace(
            platform=platform, process_index=n // per_host, slice_index=n // per_slice if per_slice else None
        )
        for n in range(count)
    ]


@pytest.mark.parametrize(
    ("there", "dcn", "message", "fix"),
    [
        (devices("cuda", 8, 8), {"data": 2}, "the devices are 1 host, the rules say 2", "--set rules.dcn={}"),
        (devices("cuda", 8, 4), {"data": 4}, "the devices are 2 hosts, the rules say 4", "rules.dcn.data=2"),
        (devices("tpu", 8, 4, 3), {}, "no axis of the mesh can cross 3 slices", "a mesh with data=3, say"),
        (devices("tpu", 8, 4, 2), {"data": 2}, "the devices are 4 slices, the rules say 2", "--set rules.dcn=auto"),
    ],
)
def test_dcn_that_the_devices_do_not_have(there, dcn, message, fix):
    rules = rules_file.from_dict({"mesh": {"data": 8}, "rules": {"batch": "data"}, "dcn": dcn}, "here").fill(8)
    with pytest.raises(ShardingError) as found:
        mesh.build(rules, there)
    assert message in str(found.value) and fix in str(found.value)


@pytest.mark.parametrize(
    "sizes", [{"data": 10**10}, {"data": 10**400}, {"data": 2**10, "tensor": 2**9}, {"data": -1, "fsdp": 2**19}]
)
def test_a_mesh_has_no_more_devices_than_a_target(sizes):
    """Nothing is computed with such sizes: there is one problem, with a fix for the largest of them."""
    rules = rules_file.from_dict({"mesh": sizes, "rules": {"batch": "data"}, "dcn": {"data": 2}}, "here").fill(8)
    (problem,) = rules.problems
    assert f"more than {MOST_DEVICES:,} devices" in problem.message
    assert problem.fix == f"a smaller size of {max(sizes, key=lambda name: sizes[name])}"


def test_as_many_devices_as_a_target_has_are_no_problem():
    assert not rules_file.from_dict({"mesh": {"data": MOST_DEVICES}, "rules": {"batch": "data"}}, "here").problems


def test_the_fix_is_the_largest_size_that_divides():
    """The same as counting up to the number of shards, which took minutes for large meshes."""
    for size in (1, 6, 8, 24, 100):
        for count in (2, 3, 16, 64, 96):
            rules = rules_file.from_dict({"mesh": {"tensor": count}, "rules": {"mlp": "tensor"}}, "here")
            problems = rules.resolve("rules", "w_up", ("mlp",), (size,), 4)[1]
            fitting = [n for n in range(1, count) if size % n == 0 and (n & (n - 1) == 0 or n == size)]
            assert bool(problems) == (size % count > 0)
            assert not problems or f"--mesh=tensor={max(fitting)}," in problems[0].instead, (size, count)
