"""Targets: what may be written, and devices that are only compiled for."""

import dataclasses
import math

import pytest

from gspmd_lm import versions
from gspmd_lm.errors import InputError
from gspmd_lm.hardware import chips, target


@pytest.mark.parametrize(
    ("text", "platform", "devices", "slices"),
    [
        ("cpu:8", "cpu", 8, 1),
        ("v4:2x2x4", "tpu", 16, 1),
        ("v5e:4x4", "tpu", 16, 1),
        ("v5p:4x4x8", "tpu", 128, 1),
        ("v6e:1x1", "tpu", 1, 1),
        ("2@v6e:16x16", "tpu", 512, 2),
        ("tpu7x:2x2x1", "tpu", 8, 1),
        ("a100:1", "gpu", 1, 1),
        ("h100:8", "gpu", 8, 1),
        ("h100:32", "gpu", 32, 1),
        ("h200:4x8", "gpu", 32, 1),
        ("h100:4x8/800", "gpu", 32, 1),
        ("b200:2", "gpu", 2, 1),
        ("gb200:72", "gpu", 72, 1),
        ("gb200:18x4", "gpu", 72, 1),
        ("v3:32x32", "tpu", 2048, 1),
        ("v2-32", "tpu", 32, 1),
        ("mi300x:8", "gpu", 8, 1),
    ],
)
def test_targets(text, platform, devices, slices):
    found = target.parse(text)
    assert (found.text, found.platform, found.devices, found.slices) == (
        text.replace("v2-32", "v2:4x4"),
        platform,
        devices,
        slices,
    )


# Google Cloud's names and topologies, of its documentation. The number counts TensorCores for v4, v5p and tpu7x.
CLOUD = """
v5litepod-1 1x1, v5litepod-4 2x2, v5litepod-8 2x4, v5litepod-16 4x4, v5litepod-32 4x8, v5litepod-64 8x8,
v5litepod-128 8x16, v5litepod-256 16x16, v5e-16 4x4,
v6e-1 1x1, v6e-4 2x2, v6e-8 2x4, v6e-16 4x4, v6e-32 4x8, v6e-64 8x8, v6e-128 8x16, v6e-256 16x16,
v4-8 2x2x1, v4-16 2x2x2, v4-32 2x2x4, v4-64 2x4x4, v4-128 4x4x4, v4-256 4x4x8, v4-512 4x8x8, v4-1024 8x8x8,
v4-1536 8x8x12, v4-2048 8x8x16, v4-4096 8x16x16,
v5p-8 2x2x1, v5p-16 2x2x2, v5p-32 2x2x4, v5p-64 2x4x4, v5p-128 4x4x4, v5p-256 4x4x8, v5p-384 4x4x12, v5p-512 4x8x8,
v5p-640 4x4x20, v5p-768 4x8x12, v5p-1024 8x8x8, v5p-1152 4x12x12, v5p-1536 8x8x12, v5p-2048 8x8x16, v5p-3072 8x12x16,
v5p-4096 8x16x16, v5p-6144 12x16x16, v5p-7680 12x16x20, v5p-8192 16x16x16, v5p-10368 12x12x36, v5p-12288 16x16x24,
tpu7x-8 2x2x1, tpu7x-16 2x2x2, tpu7x-32 2x2x4, tpu7x-64 2x4x4, tpu7x-128 4x4x4, tpu7x-256 4x4x8, tpu7x-512 4x8x8,
tpu7x-1024 8x8x8, tpu7x-2048 8x8x16, tpu7x-4096 8x16x16, tpu7x-8192 16x16x16, tpu7x-18432 16x24x24
"""


@pytest.mark.parametrize(
    ("name", "topology"), [entry.split() for entry in CLOUD.replace(",", "\n").strip().splitlines() if entry]
)
def test_names_of_google_cloud(name, topology):
    chip, _, number = name.partition("-")
    found = target.parse(name)
    assert found == target.parse(f"{chip.replace('litepod', 'e')}:{topology}") and found.text.endswith(topology)
    per_chip = 2 if chip in ("v4", "v5p", "tpu7x") else 1
    assert math.prod(found.topology) * per_chip == int(number)
    several = target.parse(f"3@{name}")
    assert (several.text, several.devices) == (f"3@{found.text}", 3 * found.devices)


@pytest.mark.parametrize(
    "chip", [chip for chip in chips.CHIPS.values() if chip.platform == "tpu"], ids=lambda chip: chip.name
)
def test_every_name_of_google_cloud_is_a_target(chip):
    names = target.cloud_names(chip)
    for number in names:
        assert target.parse(f"{chip.name}-{number}").text == f"{chip.name}:{names[number]}"
    assert len(names) == {"v2": 5, "v3": 7, "v5e": 8, "v6e": 8, "v4": 68, "v5p": 94, "tpu7x": 130}[chip.name]


def test_a_tpu7x_is_one_chip_of_two_devices():
    slices = target.parse("2@tpu7x:2x2x1")
    assert (slices.chips, slices.devices) == (8, 16)
    assert slices.usd_per_billion(1e9 / 3600, 3.0) == pytest.approx(24.0)  # an hour of eight chips


def test_gpus_beyond_one_host_are_on_several():
    assert target.parse("h100:32").topology == target.parse("h100:4x8").topology == (4, 8)


@pytest.mark.parametrize(
    ("text", "phrase", "fix"),
    [
        ("v5:4x4", "unknown chip 'v5'", "v5p"),
        ("", "unknown chip ''", "v5p"),
        ("v5p", "no such form", "v5p:4x4x4"),
        ("v5p:", "no such form", "v5p:4x4x4"),
        ("v5p:4x0x4", "no such form", "v5p:4x4x4"),
        ("two@v5p:4x4x4", "no such form", "2@v6e:16x16"),
        ("v5e:3x5", "v5e has no topology 3x5", "4x4"),
        ("v6e:32x32", "v6e has no topology 32x32", "16x16"),
        ("v5p:4x4", "v5p has no topology 4x4", "multiples of 4"),
        ("v5p:4x4x3", "v5p has no topology 4x4x3", "multiples of 4"),
        ("v5p:8x4x4", "v5p has no topology 8x4x4", "use 4x4x8"),
        ("v5p:16x16x28", "v5p has no topology 16x16x28", "use at most 6,144 chips; 2@v5p:4x4x4"),
        pytest.param(f"cpu:{'9' * 5000}", "no such form", "cpu:8", id="more digits than Python reads"),
        ("2@h100:8", "only TPUs have slices", "h100:4x8"),
        ("h100:2x16", "at most 8 GPUs", "h100:8"),
        ("h100:12", "at most 8 GPUs", "h100:8"),
        ("gb200:8x8", "at most 4 GPUs", "gb200:4x4"),
        ("cpu:2x4", "devices of a CPU have no topology", "cpu:8"),
        ("h100:2x8/", "a network of '' Gbit/s per host", "from 10 to 12800, such as h100:2x8/800"),
        ("h100:2x8/fast", "a network of 'fast' Gbit/s per host", "h100:2x8/800"),
        ("h100:2x8/80000", "a network of '80000' Gbit/s per host", "h100:2x8/800"),
        ("h100:2x8/800/8", "a network of '800/8' Gbit/s per host", "h100:2x8/800"),
        ("v5p:4x4x4/800", "only hosts of GPUs differ in their networks", "--target=v5p:4x4x4"),
        (
            "v5p-100",
            "Google Cloud has no slice of 100 TensorCores, of which a chip has two",
            "v5p-64 (2x4x4), v5p-128 (4x4x4)",
        ),
        ("v5p-64000", "Google Cloud has no slice of 64000 TensorCores", "v5p-12160 (4x20x76), v5p-12288 (16x16x24)"),
        ("v5litepod-12", "Google Cloud has no slice of 12 chips", "v5litepod-8 (2x4), v5litepod-16 (4x4)"),
        ("2@v6e-0", "Google Cloud has no slice of 0 chips", "v6e-1 (1x1), v6e-4 (2x2)"),
        ("v5lite-8", "Google Cloud has no TPU slices named v5lite-N (did you mean v5litepod?)", "v5p-128"),
        ("h100-8", "Google Cloud has no TPU slices named h100-N", "h100:8"),
        ("0@v5p-128", "no such form", "2@v6e:16x16"),
        ("v5p-128/800", "only hosts of GPUs differ in their networks", "--target=v5p-128"),
        ("cpu:8/800", "only hosts of GPUs differ in their networks", "--target=cpu:8"),
    ],
)
def test_what_does_not_exist(text, phrase, fix):
    with pytest.raises(InputError) as raised:
        target.parse(text)
    message = str(raised.value)
    assert message.startswith(f"--target={text}: {phrase}") or phrase in message.splitlines()[0]
    assert fix in message.split("fix", 1)[1]


def test_a_missing_compiler_is_named(monkeypatch):
    monkeypatch.setattr(target.importlib.util, "find_spec", lambda name: None)
    for text, package in (("v5e:2x4", "libtpu"), ("h100:8", "jax_cuda12_plugin")):
        with pytest.raises(InputError, match=f"needs {package}, which is not installed") as raised:
            target.devices(target.parse(text))
        assert "gspmd_lm[foresight]" in str(raised.value)


@pytest.mark.parametrize(("version", "plugin"), [("0.11.2", "jax-cuda13-plugin"), (None, "jax-cuda12-plugin")])
def test_the_compiler_for_gpus_is_that_of_the_newest_cuda_that_is_installed(version, plugin, monkeypatch):
    monkeypatch.setattr(versions, "installed_versions", lambda names: dict.fromkeys(names, version))
    assert versions.cuda_plugin() == plugin
    monkeypatch.setattr(target.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(InputError, match=plugin.replace("-", "_")):
        target.devices(target.parse("h100:8"))


class Device:
    def __init__(self, kind, platform="tpu", coords=None, process=0, slice_index=0):
        self.device_kind, self.platform, self.coords = kind, platform, coords
        self.process_index, self.slice_index = process, slice_index

    def memory_stats(self):
        return {"bytes_limit": 60 * 10**9} if self.process_index == 0 else None


@pytest.mark.parametrize(
    ("device_kind", "name"),
    [
        ("NVIDIA A100-SXM4-40GB", "a100"),
        ("NVIDIA A100 80GB PCIe", "a100"),
        ("NVIDIA H100 PCIe", "h100"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "h100"),
        ("NVIDIA H200 NVL", "h200"),
        ("Tesla V100-SXM2-16GB", "v100"),
    ],
)
def test_another_board_of_a_chip_is_said(device_kind, name):
    chip = target.from_devices([Device(device_kind, "gpu", process=1)]).chip
    assert chip.name == name and f"and this is {device_kind}: " in chip.note and "calibrate measures it" in chip.note


def test_boards_whose_figures_are_in_the_table_are_not_said():
    for device_kind in ("NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA B200", "NVIDIA L4"):
        chip = target.from_devices([Device(device_kind, "gpu", process=1)]).chip
        assert "and this is" not in chip.note


def test_the_target_that_real_devices_are():
    cube = [Device("TPU v5", coords=(x, y, z)) for x in range(4) for y in range(4) for z in range(4)]
    assert target.from_devices(cube) == target.parse("v5p:4x4x4")
    flat = [Device("TPU v6 lite", coords=(x, y, 0), slice_index=s) for s in (0, 1) for x in range(2) for y in range(4)]
    assert target.from_devices(flat) == target.parse("2@v6e:2x4")
    gpus = [Device("NVIDIA H100 80GB HBM3", "gpu", process=n // 8) for n in range(16)]
    assert target.from_devices(gpus).topology == (2, 8)
    known = target.parse("h100:2x8").chip
    assert target.from_devices(gpus).chip == dataclasses.replace(
        known, usable_hbm_bytes=60 * 10**9
    )  # what jax has taken
    elsewhere = [Device("NVIDIA H100 80GB HBM3", "gpu", process=1) for _ in range(2)]
    assert target.from_devices(elsewhere).chip == known
    assert target.from_devices([Device("cpu", "cpu")] * 8) == target.parse("cpu:8")
    assert target.from_devices([Device("Some New GPU", "gpu")] * 2).chip is None


def test_a_gpu_alone_does_not_slow_down():
    several, one = target.parse("h100:2").chip, target.parse("h100:1").chip
    assert one == dataclasses.replace(several, matmul_slowdown=1.0) and several.matmul_slowdown > 1
    assert target.from_devices([Device("NVIDIA H100 80GB HBM3", "gpu", process=1)]).chip == one
    assert target.parse("v5p:2x2x1").chip.matmul_slowdown > 1


@pytest.mark.parametrize("text", ["cpu:100000000000", "h100:1000000", "1000000@v5e:16x16"])
def test_a_target_has_no_more_devices_than_can_be(text):
    assert target.parse("h100:32768x8").devices == 2**18
    with pytest.raises(InputError, match=r"devices, and a target has at most 262,144\n  fix   fewer"):
        target.parse(text)


def test_larger_targets_end_where_targets_do():
    sizes = [one.devices for one in target.larger(target.parse("h100:8192x8"))]
    assert sizes == [2**17, 2**18]
