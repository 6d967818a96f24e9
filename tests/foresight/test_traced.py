"""The parts of a step are read from a trace of the profiler, and a chip that they correct predicts that step."""

import dataclasses

import jax
import pytest
from saved_programs import saved
from schedules import FSDP, done, gather, matmul, module, reduce

from gspmd_lm.foresight.timing import op_time, predict
from gspmd_lm.foresight.timing.traced import scale_slowdowns, traced_step
from gspmd_lm.hardware.chips import CHIPS
from gspmd_lm.hardware.network import Network

V5E = CHIPS["v5e"]
WHERE = {"coords": ((0, 0, 0), (1, 0, 0), (0, 1, 0), (1, 1, 0)), "slices": (0,) * 4, "hosts": (0,) * 4}
MESH = {"fsdp": 2, "tensor": 2}
COPY = "  %w = f32[8,8]{1,0} copy(%p)\n"
TPU = "/device:TPU:0", "XLA Ops"


def network(chip=V5E):
    return Network(chip, **WHERE, mesh=MESH)


def plane(events, name=TPU[0], line=TPU[1], **stats):
    """A plane of a trace with events (name, begin, end) in ns. stats: of each event, of its name in braces."""
    names, known = dict.fromkeys(event for event, _, _ in events), [*stats]
    rows = []
    for event, begin, end in events:
        facts = "".join(f'stats {{ metadata_id: {n} str_value: "{stats[key].format(event)}" }}'
                        for n, key in enumerate(known, 1))  # fmt: skip
        at = [*names].index(event) + 1
        rows.append(f"events {{ metadata_id: {at} offset_ps: {begin}000 duration_ps: {end - begin}000 {facts} }}")
    metadata = "".join(
        f'event_metadata {{ key: {n} value {{ id: {n} name: "{one}" }} }}' for n, one in enumerate(names, 1)
    )
    metadata += "".join(
        f'stat_metadata {{ key: {n} value {{ id: {n} name: "{key}" }} }}' for n, key in enumerate(known, 1)
    )
    return f'planes {{ name: "{name}" lines {{ name: "{line}" {" ".join(rows)} }} {metadata} }}'


def xspace(*planes):
    return jax.profiler.ProfileData.text_proto_to_serialized_xspace(" ".join(planes))


def test_compute_waits_and_gaps_are_told_apart():
    program = module(matmul("m1", 100) + gather("g", 60, FSDP) + done("e", "g", 60) + COPY)
    events = [("%m1 = f32[8,8] fusion(%p)", 0, 100), ("%g = ", 100, 101), ("%e = ", 101, 151), ("%w", 161, 171)]
    found = traced_step(xspace(plane(events), plane([("step", 0, 999)], line="Steps")), 1, program, network())
    assert found.step_time_s == pytest.approx(171e-9)
    shown = {name: round(seconds * 1e9) for name, seconds in found.parts_s.items() if seconds}
    assert shown == {"matmuls": 100, "other compute": 10, "waiting for fsdp": 51, "gaps": 10}
    two = traced_step(xspace(plane(events), plane(events, "/device:TPU:1")), 2, program, network())
    assert two.step_time_s == pytest.approx(171e-9 / 2)  # of two steps, on both devices


def test_waiting_for_the_host_is_a_part():
    steps = "  %c = (f32[8]{0:S(5)}, f32[8]{0}, u32[]) copy-start(%x)\n  %d = f32[8]{0:S(5)} copy-done(%c)\n"
    program = module("  %x = f32[8]{0} parameter(6)\n" + matmul("m1", 100) + steps)
    events = [("m1", 0, 100), ("c", 100, 101), ("d", 101, 131)]
    found = traced_step(xspace(plane(events)), 1, program, network())
    shown = {name: round(seconds * 1e9) for name, seconds in found.parts_s.items() if seconds}
    assert shown == {"matmuls": 100, "waiting for copies to the host": 31}


def test_what_a_collective_hides_behind_is_compute():
    program = module(matmul("m1", 100) + reduce("r", 150, FSDP))
    names = {"hlo_op": "{}", "hlo_module": "jit__train"}
    one = plane([("m1", 0, 100), ("r", 20, 160)], "/device:GPU:0", "Stream #1", **names)
    found = traced_step(xspace(one), 1, program, network(CHIPS["h100"]))
    shown = {name: round(seconds * 1e9) for name, seconds in found.parts_s.items() if seconds}
    assert shown == {"matmuls": 100, "waiting for fsdp": 60}
    unknown = plane([("mine", 160, 400)], "/device:GPU:0", "Stream #3")
    with pytest.raises(ValueError, match="names the instructions of 50% of the time of jit__train"):
        traced_step(xspace(one, unknown), 1, program, network(CHIPS["h100"]))
    with pytest.raises(ValueError, match="0% of the time"):
        traced_step(xspace(plane([("m1", 0, 9)], hlo_module="another")), 1, program, network())


def test_kernels_of_a_gpu_are_told_by_their_names():
    program = module(matmul("m1", 100) + matmul("loop_fusion.2", 9) + reduce("all-reduce.1", 150, FSDP))
    events = [
        *(("nvjet_tst_128x256", 0, 100), ("cudnn_generated_sdpa", 100, 120), ("loop_fusion_2", 120, 130)),
        *(("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 130, 160), ("MemcpyD2D", 160, 165), ("MemcpyD2H", 165, 170)),
    ]
    found = traced_step(xspace(plane(events, "/device:GPU:0", "Stream #1")), 1, program, network(CHIPS["h100"]))
    shown = {name: round(seconds * 1e9) for name, seconds in found.parts_s.items() if seconds}
    assert shown == {
        **{"matmuls": 110, "attention": 20, "other compute": 5},
        **{"waiting for fsdp": 30, "waiting for copies to the host": 5},
    }
    other = plane([("ncclDevKernel_SendRecv", 0, 10), ("nvjet", 10, 20)], "/device:GPU:0", "Stream #1")
    several = traced_step(xspace(other), 1, program, network(CHIPS["h100"]))
    assert several.exposed_s == {"several axes": pytest.approx(10e-9)} and not several.links


def test_the_first_devices_of_a_collective_wait_for_the_last_one():
    """Partitions 0 and 2 exchange. The second one, which is device 1 of its process, comes 50 ns later."""
    program = module(matmul("m1", 100) + reduce("r", 150, FSDP))
    planes = (
        plane([("m1", 0, 100), ("r", 100, 170)], "/device:TPU:0"),
        plane([("m1", 0, 150), ("r", 150, 170)], "/device:TPU:1"),
    )
    found = traced_step(xspace(*planes), 1, program, network(), {0: 0, 1: 2})
    shown = {name: round(seconds * 1e9) for name, seconds in found.parts_s.items() if seconds}
    assert shown == {"matmuls": 125, "waiting for other devices": 25, "waiting for fsdp": 20}
    alone = traced_step(xspace(*planes), 1, program, network(), {0: 0, 1: 1})  # partition 1 exchanges with 3
    assert alone.exposed_s == {"fsdp": pytest.approx(45e-9)}


def test_a_chip_that_a_trace_has_corrected_predicts_the_traced_step():
    program = module(matmul("m1", 100_000) + matmul("m2", 300_000) + reduce("r", 150, FSDP) + COPY)
    events = [("m1", 0, 200_000), ("m2", 210_000, 700_000), ("r", 700_000, 730_000), ("w", 730_000, 731_000)]
    traced = traced_step(xspace(plane(events)), 1, program, network())
    found = traced.slowdowns(program, network())
    assert {*found} == {"matmul", "other", "ici"} and 2 < found["matmul"] < 3 and found["ici"] > 10
    chip = dataclasses.replace(V5E, slowdowns=scale_slowdowns({}, found))
    predicted = predict.predict(program, chip, network(chip), 0.0, 0.0)
    assert predicted.step_time_s == pytest.approx(traced.step_time_s)
    assert predicted.matmul_s == pytest.approx(700e-6) and predicted.exposed_by_axis == {"fsdp": pytest.approx(30e-6)}
    again = traced.slowdowns(program, network(chip))  # nothing is left to correct
    assert again == {name: pytest.approx(1.0) for name in found}


def test_a_link_is_as_slow_as_what_it_cannot_hide_says():
    """Of a collective of 1 us beside 160 us of compute, nothing is exposed. It must take 210 us if 50 are."""
    program = module(gather("g", 60, FSDP) + matmul("m1", 150_000) + done("e", "g", 60))
    hidden_s = predict.predict(program, V5E, network(), 0.0, 0.0)
    assert hidden_s.exposed_by_axis == {} and hidden_s.communication_s < hidden_s.step_time_s
    end = round(hidden_s.matmul_s * 1e9)
    traced = traced_step(xspace(plane([("g", 0, 1), ("m1", 1, end), ("e", end, end + 50_000)])), 1, program, network())
    chip = dataclasses.replace(V5E, slowdowns=traced.slowdowns(program, network()))
    predicted = predict.predict(program, chip, network(chip), 0.0, 0.0)
    assert predicted.exposed_by_axis["fsdp"] == pytest.approx(50e-6, rel=1e-3)


@pytest.mark.parametrize(("name", "chip"), [("tpu_v5e", "v5e"), ("gpu_h100", "h100"), ("tpu_ragged_dot", "v6e")])
def test_the_kind_of_an_operation_is_that_of_its_time(name, chip):
    program = saved(name)
    times = [(one, op_time.op_time(one, CHIPS[chip])) for one in program.operations]
    kinds = {one.name: (op_time.compute_kind(one), time.kind) for one, time in times if time.seconds}
    assert {name: pair for name, pair in kinds.items() if pair[0] != pair[1]} == {}
    assert len({kind for kind, _ in kinds.values()}) > 1
