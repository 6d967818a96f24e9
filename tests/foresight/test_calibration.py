"""Calibration: what it writes is read again, and steps of this machine are predicted with it."""

import dataclasses
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspmd_lm.errors import InputError
from gspmd_lm.foresight import calibration, hlo
from gspmd_lm.foresight.timing import op_time
from gspmd_lm.hardware import target as targets
from gspmd_lm.hardware.chips import Bandwidth, MatmulRate, reading
from gspmd_lm.launch.local import free_port
from gspmd_lm.runtime import host
from tests.foresight import calibrated_here
from tests.launched import launch, output


@pytest.fixture(scope="module")
def chip(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chips")
    with pytest.MonkeyPatch.context() as patch:
        calibrated_here.shorten(patch)
        fields = calibration.measure_chip(jax.devices()[:4], "here")
    path = folder / "here.yaml"
    path.write_text(calibration.write_chip(fields))
    return fields, path


@pytest.mark.long
def test_what_is_written_is_read_again(chip):
    fields, path = chip
    found = reading.read_chip(path)
    assert (found.name, found.platform, found.kinds) == ("here", "cpu", ("cpu",))
    rates = [pytest.approx(one.flops_per_s, rel=1e-3) for one in fields["matmul_rates"][0]]
    assert [one.flops_per_s for one in found.matmul_rates] == rates
    assert [one.moved_bytes for one in found.bandwidths] == [*calibrated_here.MOVED]
    kinds = {one.kind for one in found.collective_times}
    assert kinds == {"all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute"}
    assert {one.devices for one in found.collective_times} == {2, 4}
    assert found.peak_f32_flops_per_s == pytest.approx(
        max(one.flops_per_s for one in found.matmul_rates if one.dtype == "f32"), rel=1e-3
    )
    assert "calibrated on 20" in found.note and f"jax {jax.__version__}" in found.note
    assert 1e-8 <= found.kernel_gap_s < 1e-2 and {"add", "exponential", "scatter"} <= found.element_rates.keys()


@pytest.mark.parametrize(
    ("kind", "slices", "expected"),
    [
        ("TPU v5 lite", (0, 0), 1),
        ("TPU v5 lite", (0, 1), 2),
        ("NVIDIA H100", (0, 0), 2),
        ("NVIDIA GB200", (0, 0), 1),
        ("My GPU", (0, 0), 2),
    ],
)
def test_a_link_within_a_slice_or_a_rack_is_not_the_network(kind, slices, expected):
    """Eight devices of two processes: those of a slice of TPUs are joined by ICI, those of a rack by NVLink."""
    ids, coords = range(8), [(x, y, 0) for x in range(2) for y in range(4)]
    devices = [
        types.SimpleNamespace(
            id=k, device_kind=kind, process_index=k // 4, slice_index=slices[k // 4], coords=coords[k]
        )
        for k in ids
    ]
    mesh = types.SimpleNamespace(devices=np.array(devices), shape={"others": 1, "group": 8})
    assert calibration.count_outer(mesh, 8) == expected and calibration.count_outer(mesh, 4) == 1


@pytest.mark.long
def test_two_processes_run_each_collective_equally_often(tmp_path):
    """Although one of them would run each of them five times as often, by its own clock."""
    code = """
import jax, pytest
from gspmd_lm.foresight import calibration
from gspmd_lm.runtime import startup
from tests.foresight import calibrated_here
startup.start(platform="cpu", simulated_devices=1, coordinator="127.0.0.1:PORT", num_processes=2, process_id=INDEX)
calibrated_here.shorten(pytest.MonkeyPatch())
calibration.COLLECTIVE_BYTES, calibration._LEAST_S = (2**8, 2**12), (0.01, 0.05)[INDEX]
found = calibration.measure_collectives(jax.devices())
assert all(one.processes == 2 and one.seconds > 0 for one in found)
print(len(found))
"""
    code = code.replace("PORT", str(free_port()))
    both = [launch(code.replace("INDEX", str(index))) for index in range(2)]
    assert [output(process)[0].splitlines()[-1] for process in both] == ["10", "10"]


def compiled(function, *arguments):
    return hlo.parse(jax.jit(function).lower(*arguments).compile().as_text())


def test_a_collective_of_one_cpu_takes_the_time_that_it_waits(monkeypatch):
    monkeypatch.setattr(host, "count_cpus", lambda: 1)
    monkeypatch.setattr(calibration, "_LEAST_S", 1e-6)  # of CPU time, of which the other one has almost none
    waiting = calibration.Program(lambda: time.sleep(0.01), ())
    assert calibration.time_s(waiting) < 0.005 < calibration.time_s(waiting._replace(one_by_one=True))


@pytest.mark.long
def test_a_matmul_takes_its_flops_over_the_rate_that_was_measured(chip):
    found = dataclasses.replace(
        reading.read_chip(chip[1]),
        matmul_rates=(MatmulRate("f32", 1, 512, 256, 128, 1e9),),
        bandwidths=(Bandwidth(1, 1e15),),
        kernel_gap_s=1e-6,
    )
    module = compiled(jnp.dot, jnp.ones((512, 256)), jnp.ones((256, 128)))
    times = [op_time.op_time(one, found) for one in module.operations if one.flops]
    assert [one.kind for one in times] == ["matmul"]
    assert times[0].seconds == pytest.approx(2 * 512 * 256 * 128 / 1e9 + 1e-6)


@pytest.mark.long
def test_other_operations_take_their_arithmetic_or_their_bytes(chip):
    rates = {"add": 1e9, "exponential": 1e8, "transpose": 1e7, "reduce": 5e8, "reduce columns": 1e8, "gather": 1e8}
    found = dataclasses.replace(
        reading.read_chip(chip[1]), element_rates=rates, bandwidths=(Bandwidth(1, 1e15),), kernel_gap_s=1e-12
    )
    x = jnp.ones((256, 128))

    def seconds(function, chip=found):
        return sum(op_time.op_time(one, chip).seconds for one in compiled(function, x).operations)

    assert seconds(lambda x: jnp.exp(x) + 1) == pytest.approx(x.size * (1 / 1e8 + 1 / 1e9), rel=0.01)
    assert seconds(lambda x: x.T + 1) == pytest.approx(x.size * (1 / 1e7 + 1 / 1e9), rel=0.01)
    assert seconds(lambda x: x.sum(1)) == pytest.approx(x.size / 5e8, rel=0.1)
    assert seconds(lambda x: x.sum(0)) == pytest.approx(x.size / 1e8, rel=0.1)
    slow = dataclasses.replace(found, bandwidths=(Bandwidth(1, 1e6),))
    assert seconds(lambda x: x + 1, slow) == pytest.approx(2 * x.nbytes / 1e6)


@pytest.mark.long
def test_explain_and_plan_use_what_was_measured_and_say_so(chip, monkeypatch):
    monkeypatch.chdir(chip[1].parent)
    from gspmd_lm import api

    found = api.explain("tiny", "dp8", target="here:8")
    assert found.prediction and found.prediction.step_time_s > 0
    assert found.prediction.error.startswith("calibrated on 20") and "collectives as measured" in found.prediction.basis
    assert found.prediction.exposed_communication_s > 0 and found.memory.limit_bytes
    rows = api.compare_rows("tiny", "dp8", "fsdp8", "here:2x4")
    assert rows


@pytest.mark.long
def test_the_file_of_another_platform_is_refused(chip):
    with pytest.raises(InputError, match="describes a cpu, and the devices here are gpus"):
        targets.from_devices([calibrated_here.Gpu()], str(chip[1]))
