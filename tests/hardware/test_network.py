"""Times of collectives worked out by hand, and the mesh axes and links that their groups use."""

import itertools
import math

import numpy as np
import pytest

from gspmd_lm.hardware.chips import CHIPS
from gspmd_lm.hardware.network import ICI_HOP_S, NETWORK_SHARE, NVLINK_SHARE, PEER_SHARE, sent_bytes
from tests.foresight.sample import network

GB = 1e9
AXES = ("data", "fsdp", "tensor")


def tpu(name, topology, mesh, axes=AXES, slices=1, order=None):
    """Chips in row-major order of their coordinates, or in `order`, in a mesh of that shape."""
    chip = CHIPS[name]
    chips = [tuple(place) + (0,) * (3 - len(topology)) for place in itertools.product(*map(range, topology))]
    everywhere = [(place, at) for at in range(slices) for place in chips for _ in range(chip.devices_per_chip)]
    everywhere = [everywhere[k] for k in order] if order is not None else everywhere
    hosts = [at * len(chips) + chips.index(place) // 4 for place, at in everywhere]
    return network(
        chip, [place for place, _ in everywhere], [at for _, at in everywhere], hosts, mesh, axes[: len(mesh)]
    )


def gpus(name, hosts, per_host, mesh, axes=AXES):
    ids = range(hosts * per_host)
    return network(
        CHIPS[name], [(k,) for k in ids], [0] * len(ids), [k // per_host for k in ids], mesh, axes[: len(mesh)]
    )


def along(mesh, *axes):
    """The groups that exchange along some axes of a mesh, as a program's replica groups."""
    ids = np.arange(math.prod(mesh)).reshape(mesh)
    rest = [n for n in range(len(mesh)) if n not in axes]
    rows = ids.transpose(*rest, *axes).reshape(-1, math.prod(mesh[n] for n in axes))
    return tuple(tuple(int(k) for k in row) for row in rows)


CUBE = (4, 4, 4)


@pytest.mark.parametrize(
    ("name", "topology", "mesh", "axes", "expected_s"),
    [
        # One ring of 4: both directions.
        ("v5p", CUBE, CUBE, [2], 3 / 4 * GB / (2 * 100e9)),
        # Two rings, and three.
        ("v5p", CUBE, CUBE, [1, 2], 15 / 16 * GB / (4 * 100e9)),
        ("v5p", CUBE, (64,), [0], 63 / 64 * GB / (6 * 100e9)),
        # A cube of 2 has no rings, and v5p has none at all in a slice that is not made of whole cubes.
        ("v5p", (2, 2, 2), (2, 2, 2), [0], 1 / 2 * GB / 100e9),
        ("v5p", (2, 2, 2), (8,), [0], 7 / 8 * GB / (3 * 100e9)),
        ("v5p", (2, 2, 4), (2, 2, 4), [2], 3 / 4 * GB / 100e9),
        # v6e: only a dimension of 16 is a ring.
        ("v6e", (4, 4), (4, 4), [0], 3 / 4 * GB / 100e9),
        ("v6e", (16, 16), (16, 16), [1], 15 / 16 * GB / (2 * 100e9)),
        ("v6e", (8, 16), (128,), [0], 127 / 128 * GB / (3 * 100e9)),
        # The book's example: v5e {X: 8, Y: 4}, bf16[2048, 8192] over Y: 560 us at its 45 GB/s, so 503 at 50.
        ("v5e", (8, 4), (8, 4), [1], 2 * 2048 * 8192 * 3 / 4 / 50e9 * GB / (2 * 2048 * 8192)),
        # Half of a ring of 4 is a line; the two other halves, two hops apart, share the links around it.
        ("v5p", CUBE, (4, 4, 2, 2), [3], 1 / 2 * GB / 100e9),
        ("v5p", CUBE, (4, 4, 2, 2), [2], 1 / 2 * GB / 100e9),
        # Of a line of 4, chips two hops apart share what is between them.
        ("v6e", (4, 4), (4, 2, 2), [1], 1 / 2 * GB / 50e9),
    ],
)
def test_all_gather(name, topology, mesh, axes, expected_s):
    found = tpu(name, topology, mesh, ("a", "b", "c", "d"))
    groups = along(mesh, *axes)
    assert found.time_s("all-gather", GB, groups) == pytest.approx(expected_s)
    assert found.time_s("reduce-scatter", GB, groups) == pytest.approx(expected_s)
    assert found.time_s("all-reduce", GB, groups) == pytest.approx(2 * expected_s)


def test_a_small_message_waits_for_its_hops():
    ring, line = tpu("v6e", (16, 16), (16, 16)), tpu("v6e", (4, 4), (4, 4))
    assert ring.time_s("all-gather", 16, along((16, 16), 0)) == pytest.approx(8 * ICI_HOP_S)
    assert line.time_s("all-gather", 16, along((4, 4), 0)) == pytest.approx(3 * ICI_HOP_S)
    assert line.time_s("all-gather", 16, along((4, 4), 0, 1)) == pytest.approx(6 * ICI_HOP_S)


def test_nobody_to_talk_to_takes_no_time():
    for found in (tpu("v6e", (4, 4), (16,)), gpus("h100", 1, 8, (8,))):
        assert found.time_s("all-reduce", GB, tuple((k,) for k in range(8))) == 0
        assert found.time_s("collective-permute", GB, tuple((k, k) for k in range(8))) == 0


def test_all_to_all_is_limited_by_the_middle():
    # A ring of n chips with V in all: V / (4 x both directions), as the book has it.
    ring = tpu("v6e", (16, 16), (16, 16))
    assert ring.time_s("all-to-all", GB, along((16, 16), 0)) == pytest.approx(16 * GB / (4 * 200e9))
    # 4 x 4 lines: each half sends half of what its 8 chips hold over 4 links.
    plane = tpu("v6e", (4, 4), (16,))
    assert plane.time_s("all-to-all", GB, along((16,), 0)) == pytest.approx(8 * GB / 2 / (4 * 100e9))


def shift(n, by):
    return tuple((k, (k + by) % n) for k in range(n))


def test_a_permute_goes_the_shortest_way_and_shares_links():
    ring = tpu("v6e", (1, 16), (16,))
    assert ring.time_s("collective-permute", GB, shift(16, 1)) == pytest.approx(GB / 100e9)
    assert ring.time_s("collective-permute", GB, shift(16, -3)) == pytest.approx(3 * GB / 100e9)
    assert ring.time_s("collective-permute", GB, ((0, 15),)) == pytest.approx(GB / 100e9)
    assert ring.time_s("collective-permute", 1, ((0, 8),)) == pytest.approx(8 * ICI_HOP_S)
    # On a line the last one's way back is free of the others' traffic, but three hops long.
    line = tpu("v6e", (1, 4), (4,))
    assert line.time_s("collective-permute", GB, shift(4, 1)) == pytest.approx(GB / 100e9)
    assert line.time_s("collective-permute", 1, shift(4, 1)) == pytest.approx(3 * ICI_HOP_S)


def test_across_slices_each_chip_has_its_share_of_the_network():
    mesh = (2, 4, 4)
    two = tpu("v6e", (4, 4), mesh, slices=2)
    data, fsdp, both = along(mesh, 0), along(mesh, 1), along(mesh, 0, 1)
    assert two.time_s("all-gather", GB, data) == pytest.approx(GB / 2 / 12.5e9)
    assert two.time_s("all-gather", GB, fsdp) == pytest.approx(3 / 4 * GB / 100e9)
    assert two.time_s("all-gather", GB, both) == pytest.approx(GB / 4 / 2 / 12.5e9 + 3 / 4 * GB / 100e9)
    assert two.time_s("all-to-all", GB, data) == pytest.approx(GB / 2 / 12.5e9)
    # All chips of a host of 4 send at once: each has its share, and one alone has all of it.
    assert two.time_s("collective-permute", GB, data) == pytest.approx(GB / 12.5e9)
    assert two.time_s("collective-permute", GB, data[:1]) == pytest.approx(GB / 50e9)
    assert [two.track(groups) for groups in (data, fsdp, both)] == ["dcn data", "ici fsdp", "dcn data+fsdp"]


def test_two_devices_on_a_chip_share_its_links():
    mesh = (4, 4, 4, 2)
    found = tpu("tpu7x", CUBE, mesh, ("a", "b", "c", "die"))
    assert found.time_s("all-gather", GB, along(mesh, 3)) == pytest.approx(GB / 2 / 600e9)
    assert found.time_s("collective-permute", GB, along(mesh, 3)) == pytest.approx(GB / 600e9)
    # Both devices of a chip gather along the ring at the same time, in groups of their own: half of it each.
    assert found.time_s("all-gather", GB, along(mesh, 2)) == pytest.approx(3 / 4 * GB / (2 * 50e9))
    # In one group they need the data of other chips only once.
    assert found.time_s("all-gather", GB, along(mesh, 2, 3)) == pytest.approx(3 / 4 * GB / (2 * 100e9))
    assert found.track(along(mesh, 3)) == "die die" and found.track(along(mesh, 2, 3)) == "ici c+die"


def test_gpus_within_a_host_and_between_hosts():
    mesh = (2, 8)
    found = gpus("h100", 2, 8, mesh)
    data, fsdp, both = along(mesh, 0), along(mesh, 1), along(mesh, 0, 1)
    nvlink = NVLINK_SHARE * 450e9
    assert found.time_s("all-gather", GB, fsdp) == pytest.approx(7 / 8 * GB / nvlink + 8.4e-6 + 7 * 3.4e-6)
    port = NETWORK_SHARE * 50e9
    # One port of 50 GB/s each; where all 8 GPUs of a host are in the group, the host's ports share the work.
    assert found.time_s("all-gather", GB, data) == pytest.approx(GB / 2 / port + 8.4e-6 + 9.6e-6)
    assert found.time_s("all-gather", GB, both) == pytest.approx(
        15 / 16 * GB / 8 / port + 8.4e-6 + 14 * 3.4e-6 + 9.6e-6
    )
    assert found.time_s("all-reduce", GB, data) == pytest.approx(GB / port + 8.4e-6 + 2 * 9.6e-6)
    assert found.time_s("all-to-all", GB, data) == pytest.approx(GB / 2 / port + 8.4e-6 + 9.6e-6)
    assert found.time_s("collective-permute", GB, ((0, 1), (1, 0))) == pytest.approx(GB / nvlink + 8.4e-6 + 3.4e-6)
    assert found.time_s("collective-permute", GB, data) == pytest.approx(GB / port + 8.4e-6 + 9.6e-6)
    small = found.time_s("all-gather", 1, fsdp)
    assert small == pytest.approx(3.6e-6 + 7 * 0.47e-6, rel=1e-3)
    tracks = [found.track(groups) for groups in (data, fsdp, both)]
    assert tracks == ["network data", "nvlink fsdp", "network data+fsdp"]


@pytest.mark.parametrize(
    ("size", "begin_s", "step_s", "network_step_s", "share"),
    [(1e5, 3.6e-6, 0.47e-6, 2.7e-6, 0.25), (1e8, 10e-6, 1.9e-6, 4e-6, 0.92), (1e11, 8.4e-6, 3.4e-6, 9.6e-6, 1.0)],
)
def test_nccl_takes_the_protocol_that_is_fastest_for_the_size(size, begin_s, step_s, network_step_s, share):
    """256 GPUs: 255 steps, 31 of them between hosts."""
    sent_s = 255 / 256 * size / 8 / (NETWORK_SHARE * 50e9)
    expected_s = begin_s + 224 * step_s + 31 * network_step_s + sent_s / share
    assert gpus("h100", 32, 8, (256,)).time_s("all-gather", size, along((256,), 0)) == pytest.approx(expected_s)


def test_a_ring_over_hosts_of_gpus_sends_as_much_between_them_as_within():
    """Two hosts of 8 with 8 cards: 8 rings of 16, each with an eighth of the tensor.

    A device passes 15 of 16 pieces on, also the one whose neighbour is in the other host.
    """
    mesh = (2, 8)
    found, both = gpus("a100", 2, 8, mesh), along(mesh, 0, 1)
    card_s = 15 / 16 * GB / 8 / (NETWORK_SHARE * 25e9)  # slower than NVLink here
    assert card_s > 15 / 16 * GB / (NVLINK_SHARE * 300e9)
    latency_s = 8.4e-6 + 14 * 3.4e-6 + 9.6e-6
    for kind in ("all-gather", "reduce-scatter"):
        assert found.time_s(kind, GB, both) == pytest.approx(card_s + latency_s)
    assert found.time_s("all-reduce", GB, both) == pytest.approx(2 * card_s + 8.4e-6 + 2 * (14 * 3.4e-6 + 9.6e-6))
    part = gpus("a100", 2, 8, (2, 2, 4))  # groups of 2 x 4: four cards each, two groups side by side
    assert part.time_s("all-gather", GB, along((2, 2, 4), 0, 2)) == pytest.approx(
        7 / 8 * GB / 4 / (NETWORK_SHARE * 25e9) + 8.4e-6 + 6 * 3.4e-6 + 9.6e-6
    )


@pytest.mark.parametrize("axes", [c for n in (1, 2, 3) for c in itertools.combinations(range(3), n)])
@pytest.mark.parametrize("seed", [None, 0, 1])
def test_axes_are_recognised_whatever_the_order_of_devices(axes, seed):
    mesh = (2, 4, 2)
    shuffled = np.random.default_rng(seed)
    order = None if seed is None else [int(k) for k in shuffled.permutation(16)]
    found = tpu("v6e", (4, 4), mesh, order=order)
    groups = along(mesh, *axes)
    if seed is not None:
        groups = tuple(
            tuple(int(k) for k in shuffled.permutation(groups[n])) for n in shuffled.permutation(len(groups))
        )
    assert found.axes(groups) == tuple(AXES[n] for n in axes)
    assert found.track(groups) == "ici " + "+".join(AXES[n] for n in axes)
    assert found.time_s("all-gather", GB, groups) >= (1 - 1 / len(groups[0])) * GB / 200e9


def test_a_part_of_an_axis_varies_along_it():
    found = tpu("v6e", (4, 4), (2, 4, 2))
    halves = ((0, 2), (4, 6), (1, 3), (5, 7), (8, 10), (12, 14), (9, 11), (13, 15))
    assert found.axes(halves) == ("fsdp",)


def test_the_mesh_need_not_follow_the_chips():
    """A mesh axis laid along the other physical dimension takes that one's ring, or has none."""
    rows = tpu("v6e", (8, 16), (8, 16))
    columns = tpu("v6e", (8, 16), (16, 8), order=[int(k) for k in np.arange(128).reshape(8, 16).T.reshape(-1)])
    assert rows.time_s("all-gather", GB, along((8, 16), 1)) == columns.time_s("all-gather", GB, along((16, 8), 0))
    assert rows.time_s("all-gather", GB, along((8, 16), 0)) == columns.time_s("all-gather", GB, along((16, 8), 1))
    scattered = tpu("v6e", (4, 4), (16,), order=[0, 5, 10, 15, 1, 6, 11, 12, 2, 7, 8, 13, 3, 4, 9, 14])
    assert scattered.time_s("all-gather", GB, ((0, 1, 2, 3),)) == pytest.approx(3 / 4 * GB / 50e9)


def test_simulated_devices_have_axes_but_no_times():
    found = network(None, [(k,) for k in range(8)], [0] * 8, [0] * 8, (2, 4), ("data", "tensor"))
    assert found.axes(along((2, 4), 1)) == ("tensor",) and found.track(along((2, 4), 1)) == "tensor"
    with pytest.raises(ValueError, match="no times"):
        found.time_s("all-gather", GB, along((2, 4), 1))
    with pytest.raises(ValueError, match="fusion is not a collective"):
        tpu("v6e", (4, 4), (16,)).time_s("fusion", GB, along((16,), 0))


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_bytes_that_a_device_sends(devices):
    """Of 32 bytes among 4 devices, pieces of 8: passed on one by one round a ring, or sent directly to each other."""
    others, piece = devices - 1, 32 // devices
    sent = {kind: sent_bytes(kind, 32, devices) for kind in ("all-gather", "reduce-scatter", "all-to-all")}
    assert set(sent.values()) == {others * piece}
    assert sent_bytes("all-reduce", 32, devices) == 2 * others * piece
    assert sent_bytes("collective-permute", 32, devices) == 32
    with pytest.raises(ValueError, match="fusion is not a collective"):
        sent_bytes("fusion", 32, devices)


def test_nvlink_may_join_pairs_or_a_rack():
    """Where NVLink ends inside of a host, PCIe decides; where it joins hosts, their network is not used."""
    a6000, size = CHIPS["a6000"], 1e9
    mesh = gpus("a6000", 1, 8, (2, 2, 2))
    pair, quad, everyone = along((2, 2, 2), 2), along((2, 2, 2), 1, 2), along((2, 2, 2), 0, 1, 2)
    across = along((2, 2, 2), 1)
    assert [mesh.link(one) for one in (pair, quad, everyone, across)] == ["nvlink", "pcie", "pcie", "pcie"]
    nvlink, peer = NVLINK_SHARE * a6000.nvlink_bytes_per_s, PEER_SHARE * a6000.peer_bytes_per_s
    # Each ring carries half, over the PCIe of one GPU of each pair.
    rows = ((pair, 1 / 2 / nvlink), (quad, 3 / 4 / 2 / peer), (everyone, 7 / 8 / 2 / peer), (across, 1 / 2 / peer))
    for groups, seconds_of_a_byte in rows:
        assert mesh.time_s("all-gather", size, groups) == pytest.approx(size * seconds_of_a_byte, rel=0.01)
    assert mesh.time_s("all-to-all", size, quad) == pytest.approx(size * 2 / 4 / peer, rel=0.01)
    assert mesh.time_s("collective-permute", size, ((0, 1),)) == pytest.approx(size / nvlink, rel=0.01)
    assert mesh.time_s("collective-permute", size, ((0, 2),)) == pytest.approx(size / peer, rel=0.01)
    rack, racks = gpus("gb200", 18, 4, (18, 4)), gpus("gb200", 36, 4, (36, 4))
    assert rack.link(along((18, 4), 0, 1)) == "nvlink" and racks.link(along((36, 4), 0)) == "network"
    assert rack.time_s("all-gather", size, along((18, 4), 0, 1)) < racks.time_s("all-gather", size, along((36, 4), 0))
    assert gpus("l4", 1, 8, (8,)).link(along((8,), 0)) == "pcie"
