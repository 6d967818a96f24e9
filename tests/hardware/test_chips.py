"""The table of chips: look-ups, published totals that its figures must add up to, and what XLA is told of a GPU."""

import re

import pytest

from gspmd_lm.hardware.chips import CHIPS, chip_of, gpu_target_config
from gspmd_lm.runtime import compiler

GPUS = [chip for chip in CHIPS.values() if chip.platform == "gpu"]
TPUS = [chip for chip in CHIPS.values() if chip.platform == "tpu"]


@pytest.mark.parametrize(
    ("device_kind", "name", "peak_flops_per_s_of_device"),
    [
        ("TPU v4", "v4", 275e12),  # one device per chip where it runs
        ("TPU v5 lite", "v5e", 197e12),
        ("TPU v5", "v5p", 459e12),
        ("TPU v5p", "v5p", 459e12),
        ("TPU v6 lite", "v6e", 918e12),
        ("TPU7x", "tpu7x", 1153.5e12),  # two devices per chip
        ("NVIDIA A100-SXM4-80GB", "a100", 312e12),
        ("NVIDIA H100 80GB HBM3", "h100", 989e12),
        ("NVIDIA H200", "h200", 989e12),
        ("NVIDIA B200", "b200", 2250e12),
        ("NVIDIA GB200", "gb200", 2500e12),
        ("NVIDIA L4", "l4", 121e12),
        ("NVIDIA L40S", "l40s", 362.05e12),
        ("NVIDIA A10", "a10", 125e12),
        ("NVIDIA RTX A6000", "a6000", 154.8e12),
        ("NVIDIA GeForce RTX 4090", "rtx4090", 165.2e12),
        ("Tesla V100-SXM2-16GB", "v100", 15.7e12),
        ("TPU v3", "v3", 61.5e12),
    ],
)
def test_a_chip_is_found_by_the_kind_of_its_devices(device_kind, name, peak_flops_per_s_of_device):
    assert chip_of(device_kind) is CHIPS[name]
    assert chip_of(device_kind).peak_bf16_flops_per_s == peak_flops_per_s_of_device


def test_three_dimensional_tori_get_the_compiler_options_for_them():
    name = next(iter(compiler.DEFAULT_OPTIONS["tpu 3d"]))
    told = [kind for chip in TPUS for kind in chip.kinds if name in compiler.options("tpu", {}, "a.yaml", kind)]
    assert told == ["TPU7x", "TPU v7x", "TPU v4", "TPU v5p", "TPU v5"]


@pytest.mark.parametrize("device_kind", ["cpu", "NVIDIA A10G", "NVIDIA L40", "Quadro RTX 6000"])
def test_an_unknown_device_has_no_chip(device_kind):
    assert chip_of(device_kind) is None


# Of one chip, in the units of the vendors' pages, read in 2026: TFLOP/s of bf16, int8 and fp8 without sparsity (0: no
# faster than bf16), GiB and GB/s of memory (of GPUs GB, as XLA counts it), Gbit/s of network, GB/s of all its links and
# of PCIe, both ways.
# TPU: docs.cloud.google.com/tpu/docs/v4, v5e, v5p, v6e and tpu7x. The network of v5e and v6e is 6.4 and 25.6 Tbit/s of
# a pod of 256. That of v4, PCIe and int8 of v5p stand in the scaling book, links of v4 in arXiv 2304.01433. PCIe of v6e
# is no published figure: it was fitted (the book has 64), and that of tpu7x is taken to be the same.
# GPU: NVIDIA's data sheets of A100, H100, H200 and HGX B200, and of the DGX with eight of them and eight ports.
PUBLISHED = {
    "v4": (275, 0, 0, 32, 1200, 50, 600, 32),
    "v5e": (197, 393, 0, 16, 819, 6400 / 256, 400, 30),
    "v5p": (459, 918, 0, 96, 2765, 50, 1200, 30),
    "v6e": (918, 1836, 0, 32, 1638, 25600 / 256, 800, 128),
    "tpu7x": (2307, 0, 4614, 192, 7380, 100, 1200, 128),
    "a100": (312, 624, 0, 85, 2039, 200, 600, 64),
    "h100": (989, 1979, 1979, 85, 3352, 400, 900, 128),
    "h200": (989, 1979, 1979, 151, 4800, 400, 900, 128),
    "b200": (2250, 4500, 4500, 192, 7672, 400, 1800, 128),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_figures_are_the_published_ones(name):
    chip, devices = CHIPS[name], CHIPS[name].devices_per_chip
    rates = (chip.peak_bf16_flops_per_s, chip.peak_int8_ops_per_s, chip.peak_fp8_flops_per_s)
    memory_unit = 2**30 if chip.platform == "tpu" else 1e9
    host_link = 64e9 if chip.name in ("h100", "h200") else chip.host_link_bytes_per_s  # theirs was measured
    links = 2 * chip.torus_dimensions * chip.ici_link_bytes_per_s + chip.nvlink_bytes_per_s
    assert PUBLISHED[name] == pytest.approx(
        (
            *(devices * rate / 1e12 for rate in rates),
            devices * chip.hbm_bytes / memory_unit,
            devices * chip.hbm_bytes_per_s / 1e9,
            chip.network_bytes_per_s * 8 / 1e9,
            2 * links / 1e9,
            2 * host_link / 1e9,
        ),
        rel=0.003,
    )
    assert (
        set(PUBLISHED) == {name for name, chip in CHIPS.items() if not chip.note}
        and chip.host_link_bytes_per_s <= host_link
    )


@pytest.mark.parametrize(("name", "cores"), [("v4", 2), ("v5e", 1), ("v5p", 2), ("v6e", 1), ("tpu7x", 1)])
def test_cores_of_a_device_are_those_of_the_chip_or_of_its_half(name, cores):
    assert CHIPS[name].tensor_cores == cores


@pytest.mark.parametrize(
    ("name", "topology", "rings"),
    [
        ("v5e", (4, 4), (False, False)),
        ("v6e", (8, 16), (False, True)),
        ("v6e", (16, 16), (True, True)),
        ("v5p", (2, 2, 4), (False,) * 3),  # not made of whole cubes
        ("v4", (4, 4, 8), (True,) * 3),
        ("tpu7x", (4, 8, 12), (True,) * 3),
    ],
)
def test_what_wraps_around(name, topology, rings):
    assert CHIPS[name].wraps(topology) == rings


@pytest.mark.parametrize("chip", CHIPS.values(), ids=CHIPS)
def test_figures_are_in_the_units_of_their_names(chip):
    assert 2e13 < max(chip.peak_bf16_flops_per_s, chip.peak_f16_flops_per_s) < 1e16 and 5e8 < chip.clock_hz < 3e9
    assert 5e9 < 0.7 * chip.hbm_bytes < chip.usable_hbm_bytes < chip.hbm_bytes < 300e9
    bytes_per_s = chip.hbm_bytes_per_s
    assert 50 < max(chip.peak_bf16_flops_per_s, chip.peak_f16_flops_per_s) / bytes_per_s < 600  # FLOPs per byte
    # Every link is slower than the one inside it.
    inner = chip.ici_link_bytes_per_s or chip.nvlink_bytes_per_s or chip.peer_bytes_per_s
    assert 1e9 < chip.network_bytes_per_s < inner < chip.hbm_bytes_per_s
    assert (chip.devices_per_chip > 1) == (chip.die_link_bytes_per_s > 0)


def test_the_two_platforms_have_their_own_links():
    assert all(chip.torus_dimensions and not chip.nvlink_bytes_per_s and not chip.gpu for chip in TPUS)
    assert all(not chip.torus_dimensions and not chip.die_link_bytes_per_s and chip.gpu for chip in GPUS)
    without = {chip.name for chip in GPUS if not chip.nvlink_bytes_per_s}
    assert without == {"a10", "l4", "l40s", "rtx4090", "rtx5090", "t4"}


@pytest.mark.parametrize("chip", GPUS, ids=[chip.name for chip in GPUS])
def test_what_xla_is_told_of_a_gpu(chip):
    text = gpu_target_config(chip)
    assert text.count("{") == text.count("}")
    said = dict(re.findall(r"(\w+): (\S+)", text))
    assert int(said["device_memory_size"]) == chip.hbm_bytes
    assert float(said["memory_bandwidth"]) == chip.hbm_bytes_per_s
    assert float(said["clock_rate_ghz"]) * 1e9 == pytest.approx(chip.clock_hz)
    assert int(said["core_count"]) == chip.gpu.core_count
    assert f"{{ major: {chip.gpu.compute_capability[0]} minor: " in text
    assert chip_of(chip.gpu.description) is chip


def test_every_compared_chip_has_a_price_but_two_whose_price_is_not_public():
    prices = {chip.name: chip.usd_per_hour for chip in CHIPS.values() if chip.usd_per_hour}
    assert prices.keys() == {name for name, chip in CHIPS.items() if not chip.note} - {"v4", "tpu7x"}
    assert all(1 < usd < 12 for usd in prices.values())
