"""Files of chips: what is read, a user's own beside the table, and each error with its place and fix."""

import dataclasses

import pytest

from gspmd_lm.errors import InputError
from gspmd_lm.hardware import target
from gspmd_lm.hardware.chips import CHIPS, reading

OWN = """
name: my
kinds: [My GPU]
platform: gpu
peak_bf16_flops_per_s: [100 TFLOP/s, sheet]
clock_hz: [1500 MHz, sheet]
hbm_bytes: [24 GiB, sheet]
hbm_bytes_per_s: [0.6 TB/s, measured]
host_link_bytes_per_s: [16 GB/s, sheet]
host_bytes: [64 GB, free -b]
network_bytes_per_s: [100 Gbit/s, sheet]
gpu:
  description: My GPU
  core_count: [80, sheet]
  fpus_per_core: [128, sheet]
  shared_memory_per_core_bytes: [100 KiB, sheet]
  shared_memory_per_block_optin_bytes: [99 KiB, sheet]
  l2_cache_bytes: [6 MiB, sheet]
  compute_capability: [[8, 6], sheet]
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(text, name="my.yaml"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return path

    return write


def test_figures_are_read_in_their_units(own):
    chip = reading.read_chip(own(OWN))
    assert (chip.peak_bf16_flops_per_s, chip.clock_hz, chip.hbm_bytes) == (100e12, 1.5e9, 24 * 2**30)
    assert (chip.hbm_bytes_per_s, chip.network_bytes_per_s) == (0.6e12, 12.5e9)
    assert chip.usable_hbm_bytes == int(0.92 * 24 * 2**30) and chip.peer_bytes_per_s == 16e9  # the rules of GPUs
    assert chip.gpu.shared_memory_per_core_bytes == 100 * 1024 and chip.gpu.compute_capability == (8, 6)


def test_what_a_file_does_not_state_is_that_of_the_chip_it_is_like(own):
    chip = reading.read_chip(own("name: my\nlike: h100\nhbm_bytes: [94 GB, sheet]\ngpu: {core_count: [114, sheet]}\n"))
    h100 = CHIPS["h100"]
    assert chip == dataclasses.replace(
        h100,
        name="my",
        hbm_bytes=94 * 10**9,
        usable_hbm_bytes=int(0.92 * 94 * 10**9),
        gpu=dataclasses.replace(h100.gpu, core_count=114),
    )


PASS = "{visited: [502, 1144, 5040], step: 277, row: 702}"
SPLASH = f'{{"64": {{forward: {PASS}, backward: {PASS}}}}}'


@pytest.mark.parametrize(
    ("old", "new", "message", "fix"),
    [
        ("hbm_bytes:", "hbm_byte:", "hbm_byte: no such figure (did you mean hbm_bytes?)", "use one of name, kinds"),
        ("hbm_bytes:", "hbm_byte:", "hbm_bytes is missing", "hbm_bytes: [16 GiB, data sheet]"),
        ("[24 GiB, sheet]", "24 GiB", "hbm_bytes: '24 GiB' is not a figure and its source", "[16 GiB, data sheet]"),
        ("[24 GiB, sheet]", "[24 GiB, '']", "hbm_bytes: ['24 GiB', ''] is not a figure and its source", "data sheet"),
        ("24 GiB", "24 GB/s", "hbm_bytes: '24 GB/s' is not a number of B, kB, MB, GB, TB or KiB", "16 GiB"),
        ("0.6 TB/s", "600", "hbm_bytes_per_s: 600 is not a number of B/s", "[819 GB/s, data sheet]"),
        ("24 GiB", "0 GiB", "hbm_bytes: '0 GiB' must be more than 0", "16 GiB"),
        ("24 GiB", "1.2.3 GiB", "hbm_bytes: '1.2.3 GiB' is not a number", "GiB"),
        ("24 GiB", "1e400 GiB", "hbm_bytes: '1e400 GiB' is not a number of B", "GiB"),
        ("0.6 TB/s", f"{10**320} TB/s", f"hbm_bytes_per_s: '{10**320} TB/s' is not a number", "819 GB/s"),
        ("core_count: [80", "core_count: [80.5", "gpu.core_count: 80.5 is not a whole number", "core_count: [2, "),
        ("100 TFLOP/s", "0 TFLOP/s", "peak_bf16_flops_per_s: '0 TFLOP/s' must be more than 0", "197 TFLOP/s"),
        ("host_bytes", "peer_bytes_per_s: [0 GB/s, I]\nhost_bytes", "peer_bytes_per_s: '0 GB/s' must", "819 GB/s"),
        (OWN, "name: my\nlike: v5p\ngpu: {core_count: [0, I]}", "gpu.core_count: 0 must be more than 0", "[2, "),
        (OWN, "name: my\nlike: v5p\ndevices_per_chip: [2, I]", "die_link_bytes_per_s is missing", "[819 GB/s, "),
        ("host_bytes", "matmul_rates: [[[5, 1, 1, 1, 1, 1.0]], I]\nhost_bytes", "matmul_rates: [5, 1, 1", "calibrate"),
        ("host_bytes", "slowdowns: [{matmul: .inf}, I]\nhost_bytes", "slowdowns: not operations", "add: 1.0e9"),
        (
            "host_bytes",
            "slowdowns: [{matmuls: 2}, I]\nhost_bytes",
            "slowdowns: matmuls: no such kind of compute or link (did",
            "matmul, attention",
        ),
        ("host_bytes", "slowdowns: [{matmul: true}, I]\nhost_bytes", "slowdowns: not operations", "add: 1.0e9"),
        ("host_bytes", "element_rates: [{exp: 1}, I]\nhost_bytes", "element_rates: exp: no such", "exponential"),
        ("host_bytes", "element_rates: [{add: 1}, I]\nhost_bytes", "element_rates: reduce is missing", "reduce: 1.0e9"),
        (
            "host_bytes",
            "matmul_rates: [[[float32, 1, 1, 1, 1, 1.0]], I]\nhost_bytes",
            "matmul_rates: float32: no such dtype of programs (did you mean f32?)",
            "bf16",
        ),
        (
            "host_bytes",
            "matmul_rates: [[[f32, true, 1, 1, 1, 1.0]], I]\nhost_bytes",
            "matmul_rates: ['f32', True",
            "ca",
        ),
        ("host_bytes", "bandwidths: [[[1, true]], I]\nhost_bytes", "bandwidths: [1, True] is not a row", "calibrate"),
        (
            "host_bytes",
            "collective_times: [[[all_reduce, 2, 1, 8, 1.0]], I]\nhost_bytes",
            "collective_times: all_reduce: no such kind of collective (did you mean all-reduce?)",
            "all-gather, all-reduce",
        ),
        (OWN, f"like: v5p\nname: my\nsplash: [{SPLASH}, I]".replace("277", "true"), "splash: not cycles", '"128": {'),
        (OWN, f"like: v5p\nname: my\nsplash: [{SPLASH}, I]".replace("277", ".nan"), "splash: not cycles", '"128": {'),
        (OWN, f"like: v5p\nname: my\nsplash: [{SPLASH}, I]".replace("502", "a"), "splash: not cycles", '"128": {'),
        (OWN, f"like: v5p\nname: my\nsplash: [{SPLASH}, I]".replace('"64"', '"-64"'), "splash: not cycles", '"128": {'),
        ("[My GPU]", "My GPU", "kinds: 'My GPU' is not a list of texts", "kinds: [NVIDIA L4]"),
        ("platform: gpu", "platform: npu", "platform: npu: no such platform", "platform: cpu, gpu or tpu"),
        (
            "platform: gpu",
            "platform: tpu",
            "torus_dimensions is missing, which a chip of platform tpu has",
            "torus_dimensions: [2, ",
        ),
        ("[[8, 6], sheet]", "[8, sheet]", "gpu.compute_capability: 8 are not 2 whole numbers", "[[9, 0]"),
        ("core_count: [80, sheet]", "cores: [80, sheet]", "gpu.cores: no such figure", "core_count"),
        ("core_count: [80, sheet]", "cores: [80, sheet]", "gpu.core_count is missing", "core_count: [2, data sheet]"),
        ("clock_hz: [1500 MHz, sheet]", "like: h10", "like: h10: no such chip (did you mean h100?)", "h100"),
        ("clock_hz: [1500 MHz, sheet]\n", "", "clock_hz is missing", "clock_hz: [1.5 GHz, data sheet]"),
        ("host_bytes", "usable_hbm_bytes: [25 GiB, I]\nhost_bytes", "usable_hbm_bytes is more than hbm_bytes", "less"),
        ("name: my", "name: [", "not valid YAML", ""),
        (OWN, "- my", "not a mapping", "like: h100"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(own, old, new, message, fix):
    assert old in OWN
    with pytest.raises(InputError) as raised:
        reading.read_chip(own(OWN.replace(old, new)))
    lines = str(raised.value).splitlines()
    at = next(n for n, line in enumerate(lines) if line.startswith(f"my.yaml: {message}"))
    assert fix in lines[at + 1]


def test_all_that_is_wrong_is_said_at_once(own):
    with pytest.raises(InputError) as raised:
        reading.read_chip(own(OWN.replace("24 GiB", "24").replace("1500 MHz", "x").replace("kinds", "kind")))
    assert str(raised.value).count("  fix   ") == 4


def test_a_target_takes_a_chip_of_ones_own(own):
    own(OWN)
    own(OWN.replace("name: my", "name: other"), "folder/other.yaml")
    found = target.parse("my:2x8/200")
    assert found.chip.peak_bf16_flops_per_s == 100e12 and found.chip.network_bytes_per_s == 200e9 / 8 / 8
    assert (found.text, found.hardware, found.topology) == ("my:2x8/200", "my:2x8", (2, 8))
    path = target.parse("folder/other.yaml:8")
    assert path.chip.name == "other" and path.devices == 8 and path.processor.chip is path.chip
    assert next(target.larger(path)).text == "folder/other.yaml:2x8"
    assert target.with_chips(target.parse("folder/other.yaml:2x4/800"), 32).text == "folder/other.yaml:8x4/800"
    assert target.with_chip("other:2x4/800", "folder/other.yaml") == "folder/other.yaml:2x4/800"
    with pytest.raises(InputError, match="describes other\n  fix   --target=other:8"):
        target.with_chip("my:8", "folder/other.yaml")
    with pytest.raises(InputError, match=r"unknown chip 'mine'.*\n.*or describe it in mine.yaml"):
        target.parse("mine:8")
    own(OWN.replace("name: my", "name: h100"), "fake.yaml")
    with pytest.raises(InputError, match="name: h100: a chip of the table has this name\n  fix   name: my_h100"):
        target.parse("fake.yaml:8")
    for nowhere in ("nowhere.yaml", "no\0where.yaml"):
        with pytest.raises(InputError, match=f"{nowhere}: cannot be read: "):
            target.parse(f"{nowhere}:8")


def test_devices_here_are_those_that_a_file_describes(own):
    class Device:
        device_kind, platform, process_index = "cpu", "cpu", 0

    own(OWN)
    own("name: mine\nlike: h100\nplatform: cpu\n", "cpu.yaml")
    found = target.from_devices([Device()] * 3, "cpu.yaml")
    assert (found.text, found.platform, found.chip.name) == ("cpu.yaml:3", "cpu", "mine")
    assert target.parse(found.text) == found
    assert (found.hosts, target.parse("cpu.yaml:2x4").hosts) == (1, 2)
    with pytest.raises(
        InputError, match=r"--chip=my.yaml: describes a gpu, and the devices here are cpus\n  fix .*calib"
    ):
        target.from_devices([Device()], "my.yaml")
