"""What the processes of a run say about where they stand."""

import types

import jax

from gspmd_lm.runtime.topology import describe_order, describe_process


def chips(process, slice_index, *coordinates):
    return [
        types.SimpleNamespace(process_index=process, slice_index=slice_index, coords=place, device_kind="TPU v5 lite")
        for place in coordinates
    ]


HOSTS = [chips(0, 0, (0, 0, 0), (1, 0, 0)), chips(1, 0, (2, 0, 0), (3, 0, 0)), chips(2, 0, (0, 1, 0), (1, 1, 0))]


def test_a_process_says_its_host_its_chips_and_its_slice():
    said = describe_process(1, "b", HOSTS[1])
    assert said == "process 1 on b: 2 TPU v5 lite devices, slice 0, at (2,0,0) to (3,0,0)"
    assert describe_process(0, "a", jax.local_devices()[:1]) == "process 0 on a: 1 cpu device"
    assert describe_process(5, "a", chips(5, 2, (0, 0, 0))).endswith("1 TPU v5 lite device, slice 2, at (0,0,0)")


def test_an_order_of_hosts_that_is_not_that_of_the_topology_is_said():
    assert describe_order([chip for host in HOSTS for chip in host]) == ""
    assert describe_order(jax.devices()) == ""
    first, second, third = (
        [types.SimpleNamespace(**vars(chip) | {"process_index": number}) for chip in host]
        for number, host in zip((0, 2, 1), HOSTS, strict=True)
    )
    assert "process 2 stands where process 1 was expected" in describe_order([*first, *second, *third])
    behind = chips(0, 1, (0, 0, 0)) + chips(1, 0, (0, 0, 0))
    assert "process 1 stands where process 0 was expected" in describe_order(behind)
