"""Predictions that a run has corrected find the best of eight layouts, although the constants of the chip are wrong."""

import dataclasses
import functools

import jax
import pytest

from benchmarks import calibrated, measure
from gspmd_lm import session
from gspmd_lm.foresight import compile, explain, step_records
from gspmd_lm.foresight.propagation import read_train
from gspmd_lm.hardware import target as targets
from gspmd_lm.plan.space import Space
from gspmd_lm.runtime import startup
from gspmd_lm.sharding import rules_file
from gspmd_lm.train import state, step
from tests.quick import QUICK

HEADS, WIDTH = {"heads": "tensor", "kv_heads": "tensor"}, {"mlp": "tensor"}
LAYOUTS = {  # beside the first one, all compute something on several devices
    "data": {"mesh": {"data": 4}, "rules": {"batch": "data"}},
    "half": {"mesh": {"data": 2, "tensor": 2}, "rules": {"batch": "data"}},
    "half, remat": {"mesh": {"data": 2, "tensor": 2}, "rules": {"batch": "data"}, "remat": "block"},
    "half, microbatches": {"mesh": {"data": 2, "tensor": 2}, "rules": {"batch": "data"}, "microbatches": 4},
    "mlp": {"mesh": {"tensor": 4}, "rules": WIDTH},
    "heads": {"mesh": {"tensor": 4}, "rules": HEADS},
    "heads, remat": {"mesh": {"tensor": 4}, "rules": HEADS, "remat": "block"},
    "alike": {"mesh": {"data": 4}},  # nothing is sent
}
RUN = "mlp"  # the layout that is run with a trace
CHIP = """
name: here
kinds: [cpu]
platform: cpu
peak_bf16_flops_per_s: [50 GFLOP/s, a guess]
peak_f32_flops_per_s: [50 GFLOP/s, a guess]
hbm_bytes: [16 GB, a guess]
hbm_bytes_per_s: [5 GB/s, a guess]
host_link_bytes_per_s: [5 GB/s, a guess]
host_bytes: [16 GB, a guess]
network_bytes_per_s: [1 GB/s, a guess]
kernel_gap_s: [1 us, a guess]
collective_times:
  - - [all-gather, 4, 1, 1024, {seconds}]
    - [all-reduce, 4, 1, 1024, {seconds}]
    - [reduce-scatter, 4, 1, 1024, {seconds}]
    - [all-to-all, 4, 1, 1024, {seconds}]
    - [collective-permute, 4, 1, 1024, {seconds}]
  - wrong on purpose
"""


def test_an_estimate_takes_as_long_as_a_run_has_shown(llama, traces_of):
    place, traces = targets.parse("h100:8"), traces_of(llama)
    layouts = (
        {"mesh": {"fsdp": 8}, "rules": {"batch": "fsdp"}, "weights": {"embed": "fsdp"}, "remat": "block"},
        {"mesh": {"tensor": 8}, "rules": {"heads": "tensor", "kv_heads": "tensor", "mlp": "tensor", "vocab": "tensor"}},
    )

    def estimates(slowdowns):
        chip = dataclasses.replace(place.chip, slowdowns=slowdowns)
        space = Space(llama, dataclasses.replace(place, chip=chip), traces)
        return [space.estimator.estimate(space.rules(raw)) for raw in layouts]

    before, after = estimates({}), estimates({"matmul": 2.0, "attention": 3.0, "other": 0.1, "nvlink": 0.1})
    for one, other in zip(before, after, strict=True):
        assert other.matmul_s == pytest.approx(2 * one.matmul_s) and other.other_s == pytest.approx(one.other_s / 10)
        assert other.attention_s == pytest.approx(3 * one.attention_s)
        assert other.communication_s == pytest.approx(one.communication_s / 10)
    fsdp, tensor = ([each[n].step_time_s for each in (before, after)] for n in (0, 1))
    assert fsdp[0] < tensor[0] and fsdp[1] > tensor[1]  # what takes long decides which is the faster one


@pytest.mark.slow
def test_the_best_of_eight_layouts_is_found_after_one_run(tmp_path, small, monkeypatch):
    (tmp_path / "here.yaml").write_text(CHIP.format(seconds=1.0))  # for a kilobyte
    monkeypatch.chdir(tmp_path)
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
    misled = min(before, key=before.get)
    assert misled == "alike" and measured[misled] > 1.5 * measured[best]
    assert min(after, key=after.get) == best
    assert after[RUN] == pytest.approx(records[0].traced_s, rel=0.1)
