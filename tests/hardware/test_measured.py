"""Rates that were measured, and what is said of sizes between them."""

import dataclasses
import math

import pytest

from gspmd_lm.hardware import measured
from gspmd_lm.hardware.chips import CHIPS, Bandwidth, CollectiveTime, MatmulRate
from gspmd_lm.hardware.network import Network

CHIP = dataclasses.replace(
    CHIPS["h100"],
    platform="cpu",
    gpu=None,
    matmul_rates=(
        MatmulRate("f32", 1, 1024, 1024, 1024, 1e11),
        MatmulRate("f32", 1, 16, 1024, 1024, 1e10),
        MatmulRate("bf16", 1, 1024, 1024, 1024, 4e11),
    ),
    bandwidths=(Bandwidth(2**16, 1e11), Bandwidth(2**20, 1e10)),
    collective_times=(
        CollectiveTime("all-reduce", 2, 1, 1000, 1e-5),
        CollectiveTime("all-reduce", 2, 1, 100_000, 1e-3),
        CollectiveTime("all-reduce", 2, 2, 1000, 1e-4),
        CollectiveTime("all-reduce", 8, 1, 1000, 4e-5),
        CollectiveTime("all-gather", 1, 1, 1000, 1e-6),
    ),
)


def test_a_product_has_the_rate_of_those_that_are_most_like_it():
    def rate(dtype, *sides):
        return measured.matmul_flops_per_s(CHIP, (dtype, dtype), *sides)

    assert rate("f32", 1, 1024, 1024, 1024) == pytest.approx(1e11, rel=0.05)
    assert rate("f32", 1, 16, 1024, 1024) == pytest.approx(1e10, rel=0.05)
    between = [rate("f32", 1, rows, 1024, 1024) for rows in (16, 64, 256, 1024)]
    assert between == sorted(between)
    assert rate("bf16", 1, 1, 1, 1) == pytest.approx(4e11) and rate("s8", 1, 1, 1, 1) == 0
    assert measured.matmul_flops_per_s(CHIPS["h100"], ("bf16",), 1, 1, 1, 1) == 0


def test_bandwidth_lies_between_the_sizes_that_were_measured():
    found = [measured.bytes_per_s(CHIP, moved) for moved in (1, 2**16, 2**18, 2**20, 2**30)]
    assert found == pytest.approx([1e11, 1e11, math.sqrt(1e21), 1e10, 1e10])


def test_the_time_of_a_collective_grows_with_its_bytes_and_its_devices():
    def seconds(size, devices=2, processes=1, kind="all-reduce"):
        return measured.collective_s(CHIP, kind, size, devices, processes)

    found = [seconds(size) for size in (1, 1000, 50_500, 100_000, 300_000)]
    assert found == pytest.approx([1e-5, 1e-5, (1e-5 + 1e-3) / 2, 1e-3, 3e-3])
    assert seconds(1000, processes=2) == 1e-4 and seconds(1000, 8) == 4e-5
    assert seconds(1000, 16) == pytest.approx(4e-5 * (15 / 16) / (7 / 8))
    assert seconds(1000, kind="all-to-all") == 0
    assert seconds(1000, kind="all-gather") == 0  # of a group of one device, which sends nothing


def test_a_network_of_a_measured_chip_has_its_times():
    ids = range(8)
    network = Network(CHIP, tuple((k,) for k in ids), (0,) * 8, tuple(k // 4 for k in ids), {"data": 2, "tensor": 4})
    within, across = ((0, 1, 2, 3), (4, 5, 6, 7)), tuple((k, k + 4) for k in range(4))
    assert (network.link(within), network.link(across)) == ("memory", "network")
    assert network.time_s("all-reduce", 1000, across) == 1e-4
    assert network.time_s("all-reduce", 1000, within) == pytest.approx(1e-5 * (3 / 4) / (1 / 2))
