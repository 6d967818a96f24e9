# ruff: noqa: E501  a program's line is one line
"""Small schedules take exactly as long as their instructions, links and loops say."""

import dataclasses
import math

import pytest
import sample
from schedules import (
    ALL,
    CHIP,
    FSDP,
    TENSOR,
    Links,
    done,
    gather,
    loop,
    matmul,
    module,
    ns,
    predicted,
    reduce,
    run_loop,
)

from gspmd_lm.foresight.collectives.tensors import moved_tensors
from gspmd_lm.foresight.timing import op_time, predict
from gspmd_lm.hardware.chips import CHIPS
from gspmd_lm.hardware.network import NCCL_CORES


def test_compute_runs_in_order_and_mfu_is_of_the_models_operations():
    found = predicted(matmul("m1", 100) + matmul("m2", 40, "m1"), flops=70e3, tokens=7)
    assert ns(found.step_time_s) == ns(found.matmul_s) == 140
    assert found.mfu == pytest.approx(0.5) and found.tokens_per_s_per_device == pytest.approx(5e7)
    assert found.fusions == (("layers.mlp (matmul)", pytest.approx(140e-9)),)
    assert found.exposed_by_axis == {} and found.unpriced == {} and found.unpriced_share == 0 and found.basis


def test_an_estimate_faster_than_the_chip_is_none_and_a_chip_may_be_slower_than_estimates():
    operations, fast = 2 * 8**3, dataclasses.replace(CHIP, hbm_bytes_per_s=math.inf, peak_bf16_flops_per_s=1e9)
    slow = dataclasses.replace(fast, matmul_slowdown=1.15)

    def seconds(cycles, chip):
        parsed = module(matmul("m", cycles))
        found = op_time.op_time(parsed.entry.instructions["m"], chip)
        assert found and found.kind == "matmul"
        return found.seconds

    assert seconds(operations, fast) == pytest.approx(operations / fast.clock_hz)  # just at the peak
    rate = op_time.MATMUL_SHARE["tpu"] * 1e9 / 2  # of float32
    assert seconds(operations - 1, fast) == pytest.approx(operations / rate)
    for cycles in (operations, operations - 1):
        assert seconds(cycles, slow) == pytest.approx(1.15 * seconds(cycles, fast))


@pytest.mark.parametrize(("platform", "times"), [("tpu", 1), ("cpu", 2)])
def test_cpus_send_the_tensors_of_a_collective_one_after_another(platform, times):
    class Latency(Links):
        def time_s(self, kind, size_bytes, groups):
            return 100e-9

    both = f"  %r = (u8[10], u8[30]) all-reduce(%q10, %q30), replica_groups={TENSOR}, to_apply=%sum\n"
    found = predicted(both, links=Latency(), chip=dataclasses.replace(CHIP, platform=platform))
    assert ns(found.communication_s) == times * 100


@pytest.mark.parametrize(("nbytes", "step", "exposed"), [(60, 100, 0), (150, 150, 50)])
def test_an_asynchronous_collective_hides_behind_compute_as_far_as_it_goes(nbytes, step, exposed):
    found = predicted(gather("g", nbytes, FSDP) + matmul("m", 100) + done("e", "g", nbytes))
    assert (ns(found.step_time_s), ns(found.exposed_communication_s), ns(found.communication_s)) == (
        step,
        exposed,
        nbytes,
    )
    assert found.exposed_by_axis == ({"fsdp": pytest.approx(50e-9)} if exposed else {})


@pytest.mark.parametrize(("nbytes", "beside"), [(30, 30), (60, 60), (150, None)])
def test_on_gpus_a_collective_takes_cores_from_the_compute_beside_it(nbytes, beside):
    """While it runs, compute makes less than one second of progress per second."""

    class Nvlink(Links):
        def link(self, groups):
            return "nvlink"

    chip = dataclasses.replace(CHIP, gpu=CHIPS["h100"].gpu)
    given = module(gather("g", nbytes, FSDP) + matmul("m", 100) + done("e", "g", nbytes))
    found = predict.predict(given, chip, Nvlink(), 0.0, 0.0)
    lost = NCCL_CORES / 132
    took = 100 / (1 - lost) if beside is None else 100 + beside * lost
    assert ns(found.matmul_s) == pytest.approx(took)
    assert ns(found.step_time_s) == pytest.approx(max(took, nbytes))
    small = dataclasses.replace(chip, gpu=dataclasses.replace(chip.gpu, core_count=NCCL_CORES))  # half of them are left
    assert ns(predict.predict(given, small, Nvlink(), 0.0, 0.0).matmul_s) == pytest.approx(100 + nbytes / 2)


@pytest.mark.parametrize(
    ("first", "second", "step"),
    [(FSDP, FSDP, 120), (FSDP, TENSOR, 100), (ALL, TENSOR, 120), (ALL, FSDP, 120)],
)  # fmt: skip
def test_two_collectives_share_a_link_or_run_side_by_side(first, second, step):
    begin = gather("g1", 60, first) + gather("g2", 60, second)
    found = predicted(begin + matmul("m", 100) + done("e1", "g1", 60) + done("e2", "g2", 60))
    assert (ns(found.step_time_s), ns(found.communication_s)) == (step, 120)


def test_the_devices_of_a_chip_and_the_hosts_of_slices_have_links_of_their_own():
    class Apart(Links):
        def link(self, groups):
            return "die" if self.axes(groups) == ("tensor",) else "dcn"

    begin = gather("g1", 60, FSDP) + gather("g2", 60, TENSOR)
    given = module(begin + matmul("m", 100) + done("e1", "g1", 60) + done("e2", "g2", 60))
    assert ns(predict.predict(given, CHIP, Apart(), 0.0, 0.0).step_time_s) == 100


def test_a_synchronous_collective_blocks_and_waits_for_its_link():
    found = predicted(reduce("r", 30, TENSOR) + matmul("m", 100))
    assert (ns(found.step_time_s), ns(found.exposed_communication_s)) == (130, 30)
    behind = predicted(gather("g", 60, FSDP) + reduce("r", 30, FSDP) + matmul("m", 100) + done("e", "g", 60))
    assert ns(behind.step_time_s) == 190 and behind.exposed_by_axis == {"fsdp": pytest.approx(90e-9)}


def test_turns_of_a_loop_multiply():
    inner = (
        matmul("m", 1000, "p_a")
        + "  %w = u8[30] constant({...})\n  %r = u8[30] all-reduce(%w), replica_groups={{0,1},{2,3}}, to_apply=%sum\n"
    )
    found = predicted(run_loop("_a"), loop(inner, 50, "_a"))
    assert (ns(found.matmul_s), ns(found.exposed_communication_s), ns(found.communication_s)) == (50_000, 1500, 1500)


def test_nested_loops_multiply():
    inner = loop(matmul("m", 1000, "p_b"), 3, "_b")
    outer = loop(matmul("k", 100, "p_a") + run_loop("_b", "p_a", "x_a"), 40, "_a")
    found = predicted(run_loop("_a"), inner + outer)
    assert ns(found.matmul_s) == 40 * (3 * 1000 + 100)


@pytest.mark.parametrize("nbytes", [60, 130])
def test_a_collective_under_way_from_one_turn_to_the_next(nbytes):
    """Each turn ends what the one before began, begins another, and computes for 100 ns."""
    state = f"((u8[{nbytes}]), u8[{2 * nbytes}])"
    body = (
        f"  %c{nbytes} = u8[{nbytes}] constant({{...}})\n  %done = u8[{2 * nbytes}] all-gather-done(%x_a)\n"
        + gather("again", nbytes, FSDP, "c")
        + matmul("m", 100, "p_a")
    )
    outside = gather("first", nbytes, FSDP) + run_loop("_a", x="first", state=state)
    after = f"  %last = {state} get-tuple-element(%loop_a), index=2\n  %end = u8[{2 * nbytes}] all-gather-done(%last)\n"
    turns = loop(body, 50, "_a", state, "again")
    found = predicted(outside + after, turns)
    waits = {60: 60, 130: 130 + 49 * 30 + 30}[nbytes]  # the first turn for all of it, others for what compute leaves
    assert (ns(found.matmul_s), ns(found.communication_s)) == (50 * 100, 51 * nbytes)
    assert (ns(found.exposed_communication_s), ns(found.step_time_s)) == (waits, 50 * 100 + waits)
    behind = predicted(outside + reduce("r", 30, FSDP) + after, turns)  # it waits until the link is free
    assert ns(behind.step_time_s) == 50 * 100 + waits + 30


def test_turns_that_cannot_be_told_are_listed_and_counted_once():
    conditional = loop(matmul("m", 1000, "p_a"), 5, "_a").replace(
        "constant(5)", 'custom-call(), custom_call_target="Limit"'
    )
    found = predicted(run_loop("_a"), conditional)
    assert ns(found.matmul_s) == 1000 and "while: turns unknown" in found.unpriced and found.unpriced_share > 0
    named = predicted(run_loop("_a", op="jit(f)/layers/turns.1/while"), conditional)
    assert ns(named.matmul_s) == 1000 and "while: turns unknown" not in named.unpriced


def test_on_gpus_the_host_decides_on_a_loop_whose_turns_the_compiler_does_not_know():
    """Before its first turn, and after each."""
    chip, body = dataclasses.replace(CHIP, gpu=CHIPS["h100"].gpu), loop(matmul("m", 1000, "p_a"), 3, "_a")
    counted = run_loop("_a").replace("body=%body_a", 'body=%body_a, backend_config={"known_trip_count":{"n":"3"}}')
    known, decided = (predicted(call, body, chip=chip) for call in (counted, run_loop("_a")))
    assert ns(known.matmul_s) == ns(decided.matmul_s) == 3000
    assert ns(decided.other_s - known.other_s) == ns(4 * op_time.HOST_DECISION_S)
    assert ns(predicted(run_loop("_a"), body).other_s) == 0  # a TPU decides itself


def test_what_cannot_be_priced_is_listed_with_its_share():
    found = predicted(
        '  %c = f32[8,8]{1,0} custom-call(%p), custom_call_target="Mystery"\n  %k = f32[8,8]{1,0} copy(%p)\n  %o = (f32[8,8]{1,0}, f32[8,8]{1,0}, s32[]) rng(%p, %p), to_apply=%sum\n'
    )
    assert found.unpriced == {"rng": pytest.approx(1028 / 2052), "custom-call Mystery": pytest.approx(512 / 2052)}
    assert found.unpriced_share == pytest.approx(1540 / 2052) and ns(found.step_time_s) == 2052  # its bytes at least


def test_collectives_that_fusions_start_carry_on_and_end():
    def hidden(name, target, config):
        return f"""%{name} (b: u8[60]) -> u8[120] {{
  %b{name} = u8[60] parameter(0)
  %g{name} = u8[120] all-gather(%b{name}), replica_groups={FSDP}, dimensions={{0}}, frontend_attributes={{chain_id="4"}}, backend_config={{"async_collective_fusion_config":{config}}}
  ROOT %c{name} = u8[120] custom-call(%g{name}), custom_call_target="{target}"
}}
"""

    computations = hidden("starts", "AsyncCollectiveStart", "{}") + hidden("ends", "AsyncCollectiveDone", "{}")
    body = "  %b = u8[120] fusion(%q60), kind=kCustom, calls=%starts\n{}  %e = u8[120] fusion(%q60), kind=kCustom, calls=%ends\n"
    behind = predicted(body.format(matmul("m", 100)), computations)
    exposed = predicted(body.format(matmul("m", 40)), computations)
    assert (ns(behind.step_time_s), ns(behind.communication_s)) == (100, 60)
    assert (ns(exposed.step_time_s), exposed.exposed_by_axis) == (60, {"fsdp": pytest.approx(20e-9)})


def test_a_reduce_scatter_in_a_fusion_blocks_and_counts_once():
    computations = f"""%all-reduce-scatter (b: u8[60]) -> u8[30] {{
  %b = u8[60] parameter(0)
  %zero = s32[] constant(0)
  %ar = u8[60] all-reduce(%b), replica_groups={FSDP}, to_apply=%sum
  ROOT %ds = u8[30] dynamic-slice(%ar, %zero), dynamic_slice_sizes={{30}}
}}
"""
    found = predicted(
        "  %f = u8[30] fusion(%q60), kind=kCustom, calls=%all-reduce-scatter\n" + matmul("m", 100), computations
    )
    assert (ns(found.step_time_s), ns(found.communication_s)) == (160, 60)


def test_a_collective_on_the_sparse_core_runs_beside_compute():
    computations = f"""%called (v: u8[60]) -> u8[120] {{
  %v = u8[60] parameter(0)
  ROOT %g = u8[120] all-gather(%v), replica_groups={FSDP}, dimensions={{0}}
}}, execution_thread="sparsecore"
"""
    start = '  %cs = ((u8[60]), u8[120]) call-start(%q60), async_execution_thread="sparsecore", to_apply=%called\n'
    found = predicted(start + matmul("m", 40) + "  %cd = u8[120] call-done(%cs)\n", computations)
    assert (ns(found.step_time_s), ns(found.exposed_communication_s)) == (60, 20)


def test_of_a_conditional_the_longer_branch_counts():
    """Alone: what its other branch would compute is in no figure. A loop in a branch counts with all its iterations."""

    def branch(name, content):
        return f"%{name} (b: f32[8,8]) -> f32[8,8] {{\n  %p{name} = f32[8,8]{{1,0}} parameter(0)\n{content}  ROOT %r{name} = f32[8,8]{{1,0}} bitcast(%p{name})\n}}\n"

    body = "  %which = s32[] constant(0)\n  %c = f32[8,8]{1,0} conditional(%which, %p, %p), branch_computations={%one, %other}\n"
    single = branch("other", matmul("m", 70, "pother"))
    for content, loops, longest in ((matmul("n", 10, "pone"), "", 70), (run_loop("_a", "pone", "pone"), loop(matmul("n", 20, "p_a"), 5, "_a"), 100)):  # fmt: skip
        found = predicted(body, loops + branch("one", content) + single)
        assert ns(found.step_time_s) == longest
        assert found.fusions == (("layers.mlp (matmul)", pytest.approx(longest * 1e-9)),)
        greedy = body.replace("{%one, %other}", '{%one, %other}, metadata={op_name="jit(_decode)/of.sampling/cond"}')
        shortest = {70: 10, 100: 70}[longest]  # as it is by default, where a token is chosen
        assert ns(predicted(greedy, loops + branch("one", content) + single).step_time_s) == shortest


def test_what_crosses_slices_is_sent_and_waited_for():
    attributes = 'channel_id=4, is_host_transfer=true, frontend_attributes={_xla_host_transfer_rendezvous="psum.9_0",_xla_megascale_transfer_type="ALL_REDUCE"}'
    body = f"""  %token = token[] after-all()
  %out = (u8[60], u32[], token[]) send(%q60, %token), {attributes}
  %sent = token[] send-done(%out), {attributes}
{matmul("m", 40)}  %in = (u8[60], u32[], token[]) recv(%token), {attributes}
  %got = (u8[60], token[]) recv-done(%in), {attributes}
"""
    slow = sample.network(
        dataclasses.replace(CHIP, network_bytes_per_s=1e9), [(0, 0, 0)] * 2, [0, 1], [0, 1], [2], ["data"]
    )
    found = predict.predict(module(body, devices=1, slices=(0, 1)), CHIP, slow, 0.0, 0.0)
    assert found.exposed_by_axis == {"data": pytest.approx(found.step_time_s - 40e-9)}
    assert ns(found.communication_s) == 60 and ns(found.step_time_s) == 60


def test_a_permute_that_is_written_as_a_send_counts():
    """XLA:GPU makes them where it has pipelines in view (xla_gpu_experimental_pipeline_parallelism_opt_level)."""
    attributes = "channel_id=1, frontend_attributes={_xla_send_recv_source_target_pairs={{0,1},{2,3}}}"
    body = f"""  %token = token[] after-all()
  %in = (u8[60], u32[], token[]) recv(%token), {attributes}
  %got = (u8[60], token[]) recv-done(%in), channel_id=1
  %out = (u8[60], u32[], token[]) send(%q60, %token), {attributes}, control-predecessors={{%got}}
{matmul("m", 40)}  %sent = token[] send-done(%out), channel_id=1
"""
    given, chip = module(body), dataclasses.replace(CHIP, gpu=CHIPS["h100"].gpu)
    (moved,) = moved_tensors(given)
    assert (moved.kind, moved.op.groups, moved.sent_bytes) == ("collective-permute", ((0, 1), (2, 3)), 60)
    assert moved.overlapped
    found = predict.predict(given, chip, Links(), 0.0, 0.0)
    assert ns(found.communication_s) == ns(found.step_time_s) == 60 > ns(found.exposed_communication_s) > 0


def test_the_timeline_shows_a_turn_of_each_pass_in_one_loop_over_microbatches():
    def layers(name, op, cycles):
        return loop(
            f"  %w{name} = u8[30] constant({{...}})\n  %g{name} = ((u8[30]), u8[60]) all-gather-start(%w{name}), replica_groups={FSDP}, dimensions={{0}}, metadata={{op_name=\"{op}/of.layers.mlp/x\"}}\n"
            + matmul(f"m{name}", cycles, f"p{name}", op + "/layers/of.layers.mlp/dot_general")
            + f"  %e{name} = u8[60] all-gather-done(%g{name})\n",
            8, name,
        )  # fmt: skip

    forward, backward = "jit(_train)/jvp(D)/while/body", "jit(_train)/transpose(jvp(D))/while/body"
    both = run_loop("_f", "p_m", "x_m") + run_loop("_b", "p_m", "x_m")
    found = predicted(run_loop("_m"), layers("_f", forward, 1000) + layers("_b", backward, 2000) + loop(both, 4, "_m"))
    spans = {(span.part, span.lane, span.kind): span for span in found.timeline if span.kind != "other"}
    assert set(spans) == {
        (part, *what)
        for part in ("forward", "backward")
        for what in (("compute", "matmul"), ("ici fsdp", "all-gather"))
    }
    for part, cycles in (("forward", 1000), ("backward", 2000)):
        span = spans[part, "compute", "matmul"]
        assert ns(span.end_s - span.start_s) == cycles and span.name == "layers.mlp"
        assert ns(spans[part, "ici fsdp", "all-gather"].end_s - spans[part, "ici fsdp", "all-gather"].start_s) == 30
    assert all(0 <= span.start_s < span.end_s for span in found.timeline)
