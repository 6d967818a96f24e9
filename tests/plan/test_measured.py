"""Predictions that a run has corrected find the best of eight layouts, although the constants of the chip are wrong."""

import dataclasses
import functools

import jax
import pytest

from benchmarks import calibrated, measure
from gspmd_lm import session
from gspmd_lm.foresight import calibration, compile, explain, step_records
from gspmd_lm.foresight.propagation import read_train
from gspmd_lm.hardware import target as targets
from gspmd_lm.runtime import startup
from gspmd_lm.sharding import rules_file
from gspmd_lm.train import state, step
from tests.foresight import calibrated_here
from tests.quick import QUICK

DATA = {"mesh": {"data": 4}, "rules": {"batch": "data"}}
FSDP = {"mesh": {"fsdp": 4}, "rules": {"batch": "fsdp"}, "weights": {"embed": "fsdp"}}
TENSOR = {"mesh": {"tensor": 4}, "rules": {"heads": "tensor", "kv_heads": "tensor", "mlp": "tensor"}}
LAYOUTS = {
    "data": DATA,
    "data, 4 microbatches": DATA | {"microbatches": 4},
    "data, remat": DATA | {"remat": "block"},
    "fsdp, remat": FSDP | {"remat": "block"},
    "tensor": TENSOR,
    "tensor, remat": TENSOR | {"remat": "block"},
    "half of the devices": {"mesh": {"data": 2, "tensor": 2}, "rules": {"batch": "data"}},
    "all devices alike": {"mesh": {"data": 4}},  # which sends nothing
}
RUN = "tensor"  # the layout that is run with a trace


def mislead(chip):
    """The chip with collectives that take ages, so that layouts without any look best, and with other slow parts."""
    times = tuple(one._replace(seconds=300 * one.seconds) for one in chip.collective_times)
    rates = tuple(one._replace(flops_per_s=3 * one.flops_per_s) for one in chip.matmul_rates)
    return dataclasses.replace(chip, collective_times=times, matmul_rates=rates, kernel_gap_s=chip.kernel_gap_s / 10)


@pytest.mark.slow
def test_the_best_of_eight_layouts_is_found_after_one_run(tmp_path, small, monkeypatch):
    with pytest.MonkeyPatch.context() as patch:
        calibrated_here.shorten(patch)
        text = calibration.write_chip(calibration.measure_chip(jax.devices()[:4], "here"))
    (tmp_path / "here.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    read = targets.read_own_chip
    monkeypatch.setattr(targets, "read_own_chip", lambda file: mislead(read(file)))
    train = {"steps": 12, "log_every": 2, "eval_every": 0, "checkpoint_every": 0, "trackers": ()}
    data = {"seq": 64, "batch": 16, "held_out": 0.0, "source": "random:64"}
    config = small(embed=128, mlp=512, head_dim=16, context=64, data=data, train=train)
    runs, reports = {}, {}
    for name, raw in LAYOUTS.items():
        rules = rules_file.from_dict(raw | {"compiler_options": {"cpu": QUICK}}, name)
        begun = session.begin(config, rules, startup.start(platform="cpu"), str(tmp_path / name), chip_file="here.yaml")
        arrays, problems = state.arrays_and_warnings(config, begun.rules, "cpu")
        built = step.build_step(config, begun.rules, arrays, begun.devices)
        traced = built.trace_train()
        compiled = built.compile(traced.lower(), also=built.program_kinds)
        place = targets.from_devices(begun.devices, "here.yaml")
        program = compile.describe_compiled(built, compiled, read_train(built, traced), {}, place, 0.0)
        reports[name] = functools.partial(explain.report, config, begun.rules, arrays=arrays, problems=problems,
                                          program=program)  # fmt: skip
        now, batch = [calibrated.begin(built)], measure.random_batch(built, jax.random.key(0))
        batch = {key: jax.device_put(value, built.abstract_batch[key].sharding) for key, value in batch.items()}

        def run(now=now, batch=batch, compiled=compiled):
            now[0], values = compiled(now[0], batch)
            return values

        runs[name] = run
        if name == RUN:
            with session.open_run(begun, built, problems, profile=(4, 8), executable=compiled) as train_run:
                session.train_to(train_run, None)
    measured = {name: times.step_s for name, times in measure.interleaved(runs, 7, 1).items()}
    records = step_records.read_records([str(tmp_path / RUN)])
    corrected = step_records.correct(place, records, f"--measured={RUN}")
    before, after = (
        {name: report(target=target).prediction.step_time_s for name, report in reports.items()}
        for target in (place, corrected)
    )
    print(records[0].describe(), corrected.chip.note, sep="\n")
    for name in LAYOUTS:
        print(f"{name:24} {1e3 * measured[name]:8.1f} {1e3 * before[name]:8.1f} {1e3 * after[name]:8.1f} ms")
    best = min(measured, key=measured.get)
    assert min(before, key=before.get) == "all devices alike" and measured["all devices alike"] > 1.5 * measured[best]
    assert min(after, key=after.get) == best
    assert after[RUN] == pytest.approx(records[0].traced_s, rel=0.1)
