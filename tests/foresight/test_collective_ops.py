# ruff: noqa: E501  a program's line is one line
"""What the collectives of a program are, on which devices, and what they move."""

import math

import pytest
from saved_programs import program, saved

from gspmd_lm.foresight.hlo.work import ENDED, STARTED, rendezvous


def test_exchanges_of_every_form_are_told_once():
    module = program(
        """  %p = f32[8]{0} parameter(0)
  %scattered = f32[2]{0} fusion(%p), kind=kCustom, calls=%all-reduce-scatter
  %begin = (f32[8]{0}, f32[16]{0}, u32[]{:S(2)}) fusion(%p), kind=kCustom, calls=%starting
  %b0 = f32[8]{0} get-tuple-element(%begin), index=0
  %b1 = f32[16]{0} get-tuple-element(%begin), index=1
  %end = f32[16]{0} fusion(%b0, %b1), kind=kCustom, calls=%ending
  %ag-start = ((f32[8]{0}), f32[32]{0}) all-gather-start(%p), replica_groups=[2,4]<=[8], dimensions={0}
  %ag-update = ((f32[8]{0}), f32[32]{0}) all-gather-update(%ag-start)
  %ag-done = f32[32]{0} all-gather-done(%ag-update)
  %sc-start = ((f32[8]{0}), f32[32]{0}) call-start(%p), async_execution_thread="sparsecore", to_apply=%called
  %sc-done = f32[32]{0} call-done(%sc-start)
  %as-start = ((f32[8]{0}), f32[8]{0}) async-start(%p), calls=%wrapped
  %as-done = f32[8]{0} async-done(%as-start)
  %ar = (f32[8]{0}, f32[]) all-reduce(%p, %p), replica_groups={}, to_apply=%sum
  ROOT %r = f32[8]{0} collective-permute(%p), source_target_pairs={{0,1},{1,0}}""",
        """%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}

%all-reduce-scatter (input: f32[8]) -> f32[2] {
  %input = f32[8]{0} parameter(0)
  %zero = u32[] constant(0)
  %whole = f32[8]{0} all-reduce(%input), replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%sum
  ROOT %slice = f32[2]{0} dynamic-slice(%whole, %zero), dynamic_slice_sizes={2}
}

%starting (x: f32[8]) -> (f32[8], f32[16], u32[]) {
  %x = f32[8]{0} parameter(0)
  %g = f32[16]{0} all-gather(%x), replica_groups=[4,2]<=[8], dimensions={0}, frontend_attributes={chain_id="3"}, backend_config={"async_collective_fusion_config":{"flag_start":"-1"}}
  ROOT %cs = (f32[8]{0}, f32[16]{0}, u32[]{:S(2)}) custom-call(%g), custom_call_target="AsyncCollectiveStart"
}

%ending (x.1: f32[8], y.1: f32[16]) -> f32[16] {
  %x.1 = f32[8]{0} parameter(0)
  %y.1 = f32[16]{0} parameter(1)
  %g.1 = f32[16]{0} all-gather(%x.1), replica_groups=[4,2]<=[8], dimensions={0}, frontend_attributes={chain_id="3"}, backend_config={"async_collective_fusion_config":{"flag_start":"9"}}
  ROOT %cd = f32[16]{0} custom-call(%x.1, %y.1, %g.1), custom_call_target="AsyncCollectiveDone"
}

%called (v: f32[8]) -> f32[32] {
  %v = f32[8]{0} parameter(0)
  ROOT %sc = f32[32]{0} all-gather(%v), replica_groups=[2,4]<=[8], dimensions={0}
}, execution_thread="sparsecore"

%wrapped (w: f32[8]) -> f32[8] {
  %w = f32[8]{0} parameter(0)
  ROOT %aa = f32[8]{0} all-to-all(%w), replica_groups=[1,8]<=[8], dimensions={0}
}
""",
    )
    found = [op for instruction in module.operations for op in instruction.collectives]
    assert [(e.kind, e.scheduled.name, e.group_size, e.asynchronous, e.sent_bytes) for e in found] == [
        ("reduce-scatter", "scattered", 4, False, 24),
        ("all-gather", "begin", 2, True, 32),
        ("all-gather", "ag-start", 4, True, 96),
        ("all-gather", "sc", 4, True, 96),
        ("all-to-all", "aa", 8, True, 28),
        ("all-reduce", "ar", 8, False, 112),
        ("collective-permute", "r", 2, False, 32),
    ]
    assert [e.elements for e in found][:3] == [8, 16, 32]
    instructions = module.entry.instructions
    assert [one.chain_id for one in instructions["begin"].carried_collectives[STARTED]] == ["3"]
    assert [one.chain_id for one in instructions["end"].carried_collectives[ENDED]] == ["3"]
    assert instructions["sc-start"].thread == "sparsecore"
    assert (instructions["ag-update"].base, instructions["ag-update"].phase) == ("all-gather", "-update")


def test_a_permute_without_pairs_is_between_nobody():
    """XLA keeps it: it gives zeros, as where an axis of one device hands on to the next."""
    module = program(
        "  %p = f32[8]{0} parameter(0)\n  ROOT %r = f32[8]{0} collective-permute(%p), source_target_pairs={}"
    )
    (permute,) = module.entry.root.collectives
    assert (permute.groups, permute.sent_bytes) == ((), 0)


def test_sparse_core_collectives_are_asynchronous():
    module = saved("tpu7x")
    found = [e for instruction in module.operations for e in instruction.collectives]
    beside = [e for e in found if any(caller.thread == "sparsecore" for caller, _ in e.scheduled.computation.callers)]
    assert beside and all(e.asynchronous for e in beside)


def test_bytes_of_the_layouts_collectives():
    """fsdp8 gathers each block's weights twice, 7/8 of them from others, and scatters their gradients once."""
    module = saved("gpu_h100")
    sent = {}
    for instruction in module.operations:
        for e in instruction.collectives:
            sent[e.kind] = sent.get(e.kind, 0) + instruction.executions * e.sent_bytes
    layer_bytes = 4 * (4 * 128 * 128 + 3 * 128 * 384)
    assert sent["all-gather"] == pytest.approx(4 * 2 * layer_bytes * 7 / 8, rel=0.15)  # and the table, norms, ...
    assert sent["reduce-scatter"] == pytest.approx(math.ceil(4 * layer_bytes * 7 / 8), rel=0.15)


def test_exchanges_between_slices():
    module = program(
        """  %p = f32[8]{0} parameter(0)
  %token = token[] after-all()
  %out = (f32[8]{0}, u32[], token[]) send(%p, %token), channel_id=4, is_host_transfer=true, frontend_attributes={_xla_host_transfer_rendezvous="psum.9_0",_xla_megascale_target="{1,2}x{0:3}",_xla_megascale_transfer_type="ALL_REDUCE"}
  %in = (f32[8]{0}, u32[], token[]) recv(%token), channel_id=3, is_host_transfer=true, frontend_attributes={_xla_host_transfer_rendezvous="psum.9_0",_xla_megascale_target="{1,2}x{0:3}",_xla_megascale_transfer_type="ALL_REDUCE"}
  ROOT %r = f32[16]{0} all-gather(%p), replica_groups={{0,1},{2,3}}, dimensions={0}""",
        head=", num_partitions=4",
        slices=(0, 0, 1, 1, 0, 0, 1, 1),
    )
    instructions = module.entry.instructions
    (sent,), (gathered,) = (instructions[name].collectives for name in ("out", "r"))
    assert (sent.kind, sent.groups, sent.sent_bytes) == ("all-reduce", ((0, 2), (1, 3), (4, 6), (5, 7)), 32)
    assert gathered.groups == ((0, 1), (4, 5), (2, 3), (6, 7))
    assert instructions["in"].collectives == ()
    assert rendezvous(instructions["in"]) == rendezvous(instructions["out"]) == "psum.9_0"
