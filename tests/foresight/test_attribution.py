# ruff: noqa: E501  a program's line is one line
"""Each collective of a program: what it moves, where it comes from, and which rows cause it, checked by dropping rows."""

import dataclasses
import re
import types

import jax
import pytest
import saved_programs
from sample import network

from gspmd_lm import config as configs
from gspmd_lm.foresight import collectives, hlo, table
from gspmd_lm.foresight.collectives.def_use import def_chain
from gspmd_lm.foresight.compile import programs
from gspmd_lm.foresight.graph import DataflowGraph
from gspmd_lm.hardware.chips import CHIPS
from gspmd_lm.sharding import rules_file
from gspmd_lm.sharding.rules import Row
from gspmd_lm.sharding.shapes import pairs
from gspmd_lm.train import state

SHIPPED = ["dp8", "zero1_8", "fsdp8", "tp8", "dp2_tp4", "fsdp2_tp4"]
L, B, T, D, F, N, H, V = 2, 32, 16, 32, 64, 8, 4, 64  # of `small`
# Heads and key heads share the sum over them: it stays until both are whole.
JOINT = {"rules.heads", "rules.kv_heads"}


def simulated(rules, chip=None):
    ids = range(rules.devices)
    return network(chip, [(k,) for k in ids], [0 for _ in ids], [0 for _ in ids], rules.mesh.values(), rules.mesh)


def collectives_of(step, text, where):
    """The collectives of a program of `step`, a train step or a request."""
    found = step.arrays if hasattr(step, "arrays") else state.arrays(step.config)
    recorded = state.record_arrays(step.config, found, step.rules.microbatches, step.rules)
    axes = {row.path: row.axes for row in table.rows(step.config, step.rules, found, recorded.arrays)}
    return collectives.find(
        hlo.parse(text, where.slices), step.rules, axes, where, DataflowGraph.from_recorder(recorded, found)
    )


@pytest.fixture(scope="module")
def moved(small, built):
    """A function that compiles a train step of `small` on simulated devices and finds its collectives."""
    known = {}

    def find(rules, microbatches=1):
        rules = (rules_file.load(rules) if isinstance(rules, str) else rules).fill(8)
        key = rules.name, rules.rows, microbatches
        if key not in known:
            step = built(small(), rules, microbatches=microbatches)
            # It never runs, so its code need not be good.
            compiled = step.lower_train().compile()
            known[key] = collectives_of(step, compiled.as_text(), simulated(rules))
        return known[key]

    return find


def identity(one):
    """What makes it the same collective in two programs."""
    return one.kind, one.mesh_axes, one.op, one.phase


def tensor(one):
    """And the same tensor: one norm may sum another where its input is split in another way."""
    return *identity(one), one.source, one.elements


@pytest.mark.slow  # by default test_said_once.py drops a row, and the rows of each collective are compared below
@pytest.mark.parametrize("name", SHIPPED)
def test_rows_that_are_named_are_the_causes(moved, name):
    """Without the rows that are named, a collective goes away, or moves over other axes or in another way; without
    one that is not named, it stays. Each row that is named for an array of a layer is enough to change its movement."""
    rules = rules_file.load(name)
    keys = [row.key for row in rules.rows]

    def without(*dropped):
        return moved(dataclasses.replace(rules, rows=tuple(row for row in rules.rows if row.key not in dropped)))

    for one in moved(rules):
        assert one.rules, one
        assert tensor(one) not in map(tensor, without(*one.rules)), one
        for key in keys:
            stays = identity(one) in map(identity, without(key))
            if key not in one.rules:
                assert stays, (key, one)
            elif one.in_loop and one.elements > D and not (key in JOINT and set(one.rules) >= JOINT):
                assert not stays, (key, one)


def of(found, op, kind="", phase=""):
    """The one collective of that description."""
    (one,) = [one for one in found if one.op == op and kind in ("", one.kind) and phase in ("", one.phase)]
    return one


@pytest.mark.long
def test_what_a_layer_moves(moved):
    found = moved("fsdp2_tp4")
    wq = "layers.attention.wq"
    rows, pieces, sequence = B // 2, 4, T // 4
    gathered = of(found, wq, "all-gather", "forward")
    assert (gathered.mesh_axes, gathered.rules, gathered.times_per_step) == (("fsdp",), ("weights.embed",), L)
    assert gathered.elements == D * N * H // pieces and gathered.group_size == 2 and gathered.in_loop
    assert gathered.bytes_per_device_per_step == L * D * N * H // pieces * 4 // 2
    assert gathered.einsum == "BTD,DNH->BTNH" and gathered.source.startswith("gspmd_lm/model/attention.py:")
    gradient = of(found, wq, "reduce-scatter", "backward")
    assert (gradient.mesh_axes, gradient.rules) == (("fsdp",), ("rules.batch", "weights.embed"))
    summed = of(found, "layers.attention.wo", "reduce-scatter", "forward")
    assert (summed.mesh_axes, summed.rules) == (("tensor",), ("rules.heads", "rules.residual.seq"))
    assert summed.bytes_per_device_per_step == L * rows * T * D * 4 * (pieces - 1) // pieces
    read = of(found, "layers.attention.wq+wk+wv", "all-gather", "forward")
    assert (read.rules, read.elements) == (("rules.residual.seq",), rows * sequence * pieces * D)
    into = of(found, "layers.attention.wq+wk+wv", "reduce-scatter", "backward")
    assert into.rules == ("rules.heads", "rules.kv_heads", "rules.residual.seq")
    assert of(found, "layers.mlp.w_down", "reduce-scatter", "forward").rules[0] == "rules.mlp"
    assert {one.phase for one in found} == {"forward", "backward", "recomputation", "optimizer"}
    assert {one.kind for one in found} == {"all-gather", "all-reduce", "reduce-scatter"}


@pytest.mark.long
def test_what_is_outside_the_layers(moved):
    found = moved("fsdp2_tp4")
    assert of(found, "embedding", "reduce-scatter", "forward").rules == ("rules.vocab", "rules.residual.seq")
    assert of(found, "unembedding", "reduce-scatter", "backward").rules == ("rules.batch", "weights.embed")
    highest = [one for one in found if one.op == "loss" and one.elements == B // 2 * T]
    assert {one.rules for one in highest} == {("rules.vocab",)} and len(highest) >= 2
    counts = [one for one in found if one.op == "loss" and one.elements == 1]
    assert {one.rules for one in counts} == {("rules.batch",)}
    norms = {one.mesh_axes: one.rules for one in found if one.op == "gradient_norm"}
    assert norms[("fsdp",)] == ("weights.embed",)
    assert norms[("tensor",)] == ("rules.vocab", "rules.heads", "rules.kv_heads", "rules.mlp")
    scale = [one for one in found if one.op == "final_norm" and one.kind == "all-reduce"]
    assert {rows for one in scale for rows in one.rules} == {"rules.batch", "rules.residual.seq"}


@pytest.mark.long
def test_a_move_that_nobody_asked_for_names_the_rows_around_it_and_loops_in_loops_are_multiplied(moved):
    loaded = rules_file.load("dp2_tp4")
    rows = [Row("here", "rules", "attention_out", axis, names) for axis, names in (("seq", ("tensor",)), ("heads", ()))]
    found = moved(dataclasses.replace(loaded, rows=(*loaded.rows, *rows)), microbatches=4)
    moves = [one for one in found if one.kind == "all-to-all" and one.in_loop]
    assert moves and all(one.phase in ("forward", "backward") for one in moves)
    assert any("rules.attention_out.seq" in one.rules for one in moves)
    summed = of(found, "layers.mlp.w_down", "all-reduce", "forward")
    assert summed.times_per_step == 4 * L and summed.bytes_per_device_per_step == L * B // 2 * T * D * 4 * 2 * 3 // 4


@pytest.mark.parametrize("target", ["v5e:2x4", pytest.param("h100:8", marks=pytest.mark.slow)])
def test_programs_of_accelerators(in_bfloat16, cache, target):
    """Each tensor by itself, though these compilers merge, split and rename: weights by their paths, rows of each."""
    request = in_bfloat16(target)
    (program,) = programs([request], cache=str(cache))
    where = network(request.target.chip, program.coords, program.slices, program.hosts, request.rules.mesh.values(),
                    request.rules.mesh)  # fmt: skip
    found = collectives_of(request, program.text, where)
    assert all(one.rules and one.op != "step" and one.source.startswith("gspmd_lm/") for one in found)
    assert {one.link for one in found} == {"ici" if target == "v5e:2x4" else "nvlink"}
    arrays = state.arrays(request.config)
    weights = {leaf.path for leaf, _ in pairs(arrays.named_params, arrays.params)}
    gathered = [one for one in found if one.op in weights and one.rules == ("weights.embed",)]
    assert {one.op for one in gathered} == weights - {"embedding"} and {one.mesh_axes for one in gathered} == {
        ("fsdp",)
    }
    for path in ("layers.attention.wk", "layers.mlp.w_gate"):
        forward = [one for one in gathered if one.op == path and one.phase == "forward"]
        assert sum(one.times_per_step for one in forward) == 2
        again = [one for one in gathered if one.op == path and one.phase != "forward"]
        assert sum(one.times_per_step for one in again) == 2
        gradients = [one for one in found if one.op == path and one.kind != "all-gather"]
        # libtpu 0.0.50 names neither the matmuls of these gradients nor the one reduction of all three of attention.
        without_name = [one for one in found if one.op == "layers.attention" and one.kind == "all-reduce"]
        of_path = gradients or (without_name if "attention" in path else [])
        assert sum(one.times_per_step for one in of_path) == (2 if gradients else 3 * 2)
        assert {"rules.batch"} <= {row for one in of_path for row in one.rules} <= {"rules.batch", "weights.embed"}
    scales = [one for one in found if one.op == "layers.attention_norm" and one.kind == "all-reduce"]
    assert {one.rules for one in scales} == {("rules.batch", "rules.residual.seq")}
    assert {one.mesh_axes for one in scales} == {("fsdp", "tensor")}
    assert any(one.overlapped for one in found) and not all(one.overlapped for one in found)
    assert [one for one in found if one.kind == "all-to-all"] == []


def test_a_kept_program_of_a_gpu():
    """Of an earlier version, which named fewer operations: each collective has rows, and each weight a gather."""
    step = types.SimpleNamespace(config=configs.load("tiny"), rules=rules_file.load("fsdp8").fill(8))
    found = collectives_of(step, saved_programs.text("gpu_h100"), simulated(step.rules, CHIPS["h100"]))
    assert {one.link for one in found} == {"nvlink"} and {one.mesh_axes for one in found} == {("fsdp",)}
    assert all(one.rules in (("weights.embed",), ("rules.batch",)) for one in found)
    arrays = state.arrays(step.config)
    weights = {leaf.path for leaf, _ in pairs(arrays.named_params, arrays.params)} - {"embedding"}
    gathered = [one for one in found if one.kind == "all-gather" and one.op in weights]
    assert {one.op for one in gathered} == weights and {one.rules for one in gathered} == {("weights.embed",)}
    in_layers = [one for one in gathered if one.op.startswith("layers.mlp.")]
    assert {one.phase for one in in_layers} == {"forward", "recomputation"}
    assert sum(one.times_per_step for one in in_layers) == 3 * 2 * step.config.model.layers
    assert any(one.overlapped for one in found) and not all(one.overlapped for one in found)


# Single programs, written down


W_UP = {"layers.mlp.w_up": ("layers", "embed", "mlp"), "block_input": ("batch", "seq", "embed")}


def found_in(text, mesh=None, slices=(), rules="fsdp8", arrays=()):
    loaded = dataclasses.replace(rules_file.load(rules), mesh=mesh or {"fsdp": 8})
    count = len(slices) or 8
    slices = slices or [0] * count
    chips = [((k % 8) // 4, k % 4, 0) for k in range(count)]
    where = network(CHIPS["v5e"], chips, slices, slices, loaded.mesh.values(), loaded.mesh)
    nothing = DataflowGraph(jax.make_jaxpr(lambda: ())(), [path for path in arrays if "." in path])
    return collectives.find(hlo.parse(text, slices), loaded, dict(arrays), where, nothing)


def program(body, computations="", devices=8):
    return (
        f"HloModule jit__train, is_scheduled=true, num_partitions={devices}\n\n%add (a: f32[], b: f32[]) -> f32[] {{\n"
        "  %a = f32[] parameter(0)\n  %b = f32[] parameter(1)\n  ROOT %c = f32[] add(%a, %b)\n}\n\n"
        f"{computations}\nENTRY %main (p: f32[8]) -> f32[8] {{\n{body}\n}}\n"
    )


def test_a_windowed_einsum_is_one_operation():
    found = found_in(saved_programs.text("tpu_windowed"), mesh={"tensor": 8}, rules="tp8")
    assert [(one.kind, one.mesh_axes, one.times_per_step) for one in found] == [
        ("windowed all-gather", ("tensor",), 1),
        ("windowed reduce-scatter", ("tensor",), 1),
    ]
    for one in found:
        # Eight pieces in the loop, both ways, and one beside it: what XLA needs for seven.
        assert one.elements == 8192 * 4096 and one.bytes_per_device_per_step == 9 * 1024 * 4096 * 2
        assert one.overlapped and one.group_size == 8


WINDOW = """%body{n} (s{n}: (f32[8], s32[])) -> (f32[8], s32[]) {{
  %s{n} = (f32[8]{{0}}, s32[]) parameter(0)
  %x{n} = f32[8]{{0}} get-tuple-element(%s{n}), index=0
  %i{n} = s32[] get-tuple-element(%s{n}), index=1
  %one{n} = s32[] constant(1)
  %j{n} = s32[] add(%i{n}, %one{n})
  {turn}
  ROOT %t{n} = (f32[8]{{0}}, s32[]) tuple(%y{n}, %j{n})
}}

%condition{n} (c{n}: (f32[8], s32[])) -> pred[] {{
  %c{n} = (f32[8]{{0}}, s32[]) parameter(0)
  %k{n} = s32[] get-tuple-element(%c{n}), index=1
  %four{n} = s32[] constant(4)
  ROOT %l{n} = pred[] compare(%k{n}, %four{n}), direction=LT
}}

"""
NAMED = 'source_target_pairs={{0,1},{1,2},{2,3},{3,0}}, metadata={op_name="jit(upd)/dot_general"}'


def test_permutes_of_one_name_beside_several_windows_each_count_once():
    """One loop is given what a permute moves, a permute moves what the other ends with, and a third is neither."""
    loops = "".join(
        WINDOW.format(n=n, turn=f"%y{n} = f32[8]{{0}} collective-permute(%x{n}), {NAMED}") for n in (0, 1)
    ).replace("%body", "%windowed_dot_general_body_ag")
    body = f"""  %p = f32[8]{{0}} parameter(0)
  %zero = s32[] constant(0)
  %before = f32[8]{{0}} collective-permute(%p), {NAMED}
  %other = f32[8]{{0}} collective-permute(%p), {NAMED}
  %given0 = (f32[8]{{0}}, s32[]) tuple(%before, %zero)
  %w0 = (f32[8]{{0}}, s32[]) while(%given0), condition=%condition0, body=%windowed_dot_general_body_ag0
  %given1 = (f32[8]{{0}}, s32[]) tuple(%p, %zero)
  %w1 = (f32[8]{{0}}, s32[]) while(%given1), condition=%condition1, body=%windowed_dot_general_body_ag1
  %r1 = f32[8]{{0}} get-tuple-element(%w1), index=0
  %after = f32[8]{{0}} collective-permute(%r1), {NAMED}
  %r0 = f32[8]{{0}} get-tuple-element(%w0), index=0
  %sum = f32[8]{{0}} add(%after, %r0)
  ROOT %all = f32[8]{{0}} add(%sum, %other)"""
    found = found_in(program(body, loops, devices=4), slices=(0,) * 4, mesh={"fsdp": 4})
    assert sorted((one.kind, one.bytes_per_device_per_step) for one in found) == [
        ("collective-permute", 32), ("windowed all-gather", 2 * 5 * 32),
    ]  # fmt: skip


def test_a_permute_that_a_window_leaves_out_in_its_last_iteration():
    branches = f"""%send (w: f32[8]) -> f32[8] {{
  %w = f32[8]{{0}} parameter(0)
  ROOT %sent = f32[8]{{0}} collective-permute(%w), {NAMED}
}}

%last_iteration_noop (v: f32[8]) -> f32[8] {{
  ROOT %v = f32[8]{{0}} parameter(0)
}}

"""
    turn = (
        "%last0 = pred[] compare(%i0, %one0), direction=LT\n  %y0 = f32[8]{0} conditional(%last0, %x0, %x0), "
        "true_computation=%send, false_computation=%last_iteration_noop"
    )
    loop = WINDOW.format(n=0, turn=turn).replace("%body", "%windowed_dot_general_body_rs")
    body = """  %p = f32[8]{0} parameter(0)
  %zero = s32[] constant(0)
  %given = (f32[8]{0}, s32[]) tuple(%p, %zero)
  %w0 = (f32[8]{0}, s32[]) while(%given), condition=%condition0, body=%windowed_dot_general_body_rs0
  ROOT %r = f32[8]{0} get-tuple-element(%w0), index=0"""
    (found,) = found_in(program(body, branches + loop, devices=4), slices=(0,) * 4, mesh={"fsdp": 4})
    assert (found.kind, found.bytes_per_device_per_step) == ("windowed reduce-scatter", 3 * 32)


def test_reduce_scatters_of_several_arrays_in_one_fusion():
    scatter = """%all-reduce-scatter (a0: f32[8,16], a1: f32[16]) -> (f32[1,16], f32[2]) {
  %a0 = f32[8,16]{1,0} parameter(0)
  %a1 = f32[16]{0} parameter(1)
  %n = s32[] constant(0)
  %sums = (f32[8,16]{1,0}, f32[16]{0}) all-reduce(%a0, %a1), replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add
  %s0 = f32[8,16]{1,0} get-tuple-element(%sums), index=0
  %s1 = f32[16]{0} get-tuple-element(%sums), index=1
  %d0 = f32[1,16]{1,0} dynamic-slice(%s0, %n, %n), dynamic_slice_sizes={1,16}
  %d1 = f32[2]{0} dynamic-slice(%s1, %n), dynamic_slice_sizes={2}
  ROOT %both = (f32[1,16]{1,0}, f32[2]{0}) tuple(%d0, %d1)
}

"""
    body = """  %p = f32[8,16]{1,0} parameter(0)
  %q = f32[16]{0} parameter(1)
  ROOT %f = (f32[1,16]{1,0}, f32[2]{0}) fusion(%p, %q), kind=kCustom, calls=%all-reduce-scatter"""
    found = found_in(program(body, scatter))
    assert {one.kind for one in found} == {"reduce-scatter"}
    assert sum(one.bytes_per_device_per_step for one in found) == 4 * (8 * 16 + 16) * 7 / 8


def test_a_reduce_scatter_hidden_in_a_fusion_of_tpu():
    body = """  %p = f32[4096,64]{1,0} parameter(0), metadata={op_name="jit(_train)/transpose(jvp(Decoder))/while/body/of.layers.mlp.w_up/sum.block_input.batch/zBTD,zBTF->zDF/dot_general"}
  %f = f32[520,64]{1,0} fusion(%p), kind=kCustom, calls=%scatter
  ROOT %n = f32[520,64]{1,0} negate(%f)"""
    scatter = """%scatter (input: f32[4096,64]) -> f32[520,64] {
  %input = f32[4096,64]{1,0} parameter(0)
  %zero = f32[] constant(0)
  %pad = f32[4160,64]{1,0} pad(%input, %zero), padding=0_64x0_0
  %all-reduce = f32[4160,64]{1,0} all-reduce(%pad), replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add
  %at = u32[] constant(0)
  ROOT %slice = f32[520,64]{1,0} dynamic-slice(%all-reduce, %at, %at), dynamic_slice_sizes={520,64}
}
"""
    (one,) = found_in(program(body, scatter), arrays=W_UP)
    assert (one.kind, one.elements) == ("reduce-scatter", 4096 * 64)  # the padding is not sent
    assert one.bytes_per_device_per_step == 4096 * 64 * 4 * 7 // 8
    assert one.rules == ("rules.batch", "weights.embed") and one.einsum == "BTD,BTF->DF" and one.phase == "backward"


def test_each_mesh_axis_of_a_sum_has_a_row_of_what_is_summed():
    """Rows that split the result do not answer for an axis about which the name of the sum says nothing."""
    name = "jit(_train)/transpose(jvp(Decoder))/of.layers.mlp.w_up/optimizer.layers.mlp.w_up/sum.block_input.batch/dot"
    body = f"""  %p = f32[64,8]{{1,0}} parameter(0)
  %g = f32[64,8]{{1,0}} tanh(%p), metadata={{op_name="{name}"}}
  ROOT %r = f32[8,8]{{1,0}} reduce-scatter(%g), replica_groups={{{{0,1,2,3,4,5,6,7}}}}, dimensions={{0}}, to_apply=%add"""
    (one,) = found_in(program(body), mesh={"fsdp": 2, "context": 4}, rules="cp8", arrays=W_UP)
    assert (one.mesh_axes, one.rules) == (("fsdp", "context"), ("rules.batch", "rules.seq", "weights.embed"))


def test_tensors_that_a_compiler_laid_side_by_side():
    body = """  %p = f32[8]{0} parameter(0)
  %q = f32[16]{0} exponential(%p), metadata={op_name="jit(_train)/transpose(jvp(Decoder))/final_norm/reduce_sum"}
  %r = f32[1]{0} cosine(%p), metadata={op_name="jit(_train)/jvp(of.loss)/reduce_sum"}
  %joined = f32[17]{0} fusion(%q, %r), kind=kLoop, calls=%join
  %all-reduce-start = f32[17]{0} all-reduce-start(%joined), replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add
  %work = f32[17]{0} fusion(%joined), kind=kLoop, calls=%work_inside
  ROOT %all-reduce-done = f32[17]{0} all-reduce-done(%all-reduce-start)"""
    join = """%join (a: f32[16], b: f32[1]) -> f32[17] {
  %a.1 = f32[16]{0} parameter(0)
  %b.1 = f32[1]{0} parameter(1)
  ROOT %concatenate = f32[17]{0} concatenate(%a.1, %b.1), dimensions={0}
}

%work_inside (x: f32[17]) -> f32[17] {
  %x = f32[17]{0} parameter(0)
  ROOT %y = f32[17]{0} tanh(%x)
}
"""
    found = found_in(program(body, join), arrays={"residual": ("batch", "seq", "embed")})
    assert [(one.op, one.phase, one.elements, one.overlapped) for one in found] == [
        ("final_norm", "backward", 16, True),
        ("loss", "forward", 1, True),
    ]
    assert {one.rules for one in found} == {("rules.batch",)}


def test_slices_exchange_through_their_hosts():
    attributes = '_xla_host_transfer_handler_name="xla_megascale_runtime",_xla_host_transfer_rendezvous="all-reduce.1_0",_xla_megascale_target="{1,2}x{0:7}",_xla_megascale_transfer_type="ALL_REDUCE"'
    body = f"""  %p = f32[64,8]{{1,0}} parameter(0)
  %g = f32[64,8]{{1,0}} tanh(%p), metadata={{op_name="jit(_train)/transpose(jvp(Decoder))/of.layers.mlp.w_up/optimizer.layers.mlp.w_up/sum.block_input.batch/dot_general"}}
  %t = token[] after-all()
  %send = (f32[64,8]{{1,0}}, u32[], token[]) send(%g, %t), channel_id=1, is_host_transfer=true, frontend_attributes={{{attributes}}}
  %send-done = token[] send-done(%send)
  %recv = (f32[64,8]{{1,0}}, u32[], token[]) recv(%t), channel_id=2, is_host_transfer=true, frontend_attributes={{{attributes}}}
  %recv-done = (f32[64,8]{{1,0}}, token[]) recv-done(%recv)
  ROOT %out = f32[64,8]{{1,0}} get-tuple-element(%recv-done), index=0"""
    (one,) = found_in(program(body), mesh={"fsdp": 16}, slices=[0] * 8 + [1] * 8, arrays=W_UP)
    assert (one.kind, one.mesh_axes, one.link) == ("all-reduce", ("fsdp",), "dcn")
    assert one.bytes_per_device_per_step == 64 * 8 * 4 and one.group_size == 2
    assert one.rules == ("rules.batch",) and not one.overlapped


def test_what_only_one_device_takes_part_in_is_no_collective():
    body = """  %p = f32[8]{0} parameter(0)
  ROOT %r = f32[8]{0} all-reduce(%p), replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}, to_apply=%add"""
    assert found_in(program(body)) == ()


def test_what_a_loop_in_a_loop_carries_is_followed_to_where_it_is_computed():
    """The inner loop's own turns lead back to it: through the outer loop, which begins with zeros."""
    loops = """%ends (c: (f32[8], s32[])) -> pred[] {
  %c = (f32[8], s32[]) parameter(0)
  ROOT %no = pred[] constant(false)
}

%inner (i: (f32[8], s32[])) -> (f32[8], s32[]) {
  %i = (f32[8], s32[]) parameter(0)
  %i0 = f32[8]{0} get-tuple-element(%i), index=0
  %i1 = s32[] get-tuple-element(%i), index=1
  ROOT %same = (f32[8], s32[]) tuple(%i0, %i1)
}

%outer (o: (f32[8], s32[])) -> (f32[8], s32[]) {
  %o = (f32[8], s32[]) parameter(0)
  ROOT %turns = (f32[8], s32[]) while(%o), condition=%ends, body=%inner
}
"""
    body = """  %p = f32[8]{0} parameter(0)
  %zero = f32[8]{0} broadcast(%p), dimensions={0}
  %n = s32[] constant(0)
  %begin = (f32[8], s32[]) tuple(%zero, %n)
  %all = (f32[8], s32[]) while(%begin), condition=%ends, body=%outer
  ROOT %r = f32[8]{0} get-tuple-element(%all), index=0"""
    module = hlo.parse(program(body, loops))
    chain = def_chain((module.entry.root, ()))
    assert chain[-1].opcode == "parameter"


@pytest.mark.parametrize("rows", [1, pytest.param(16, marks=pytest.mark.slow)], ids=["a single row", "several rows"])
def test_a_tpu_gives_each_device_only_its_piece_of_its_rows(in_bfloat16, cache, rows):
    request = in_bfloat16("v5e:2x4")
    data = dataclasses.replace(request.config.data, batch=2 * rows)
    request = dataclasses.replace(request, config=dataclasses.replace(request.config, data=data))
    (program,) = programs([request], cache=str(cache))
    assert re.search(rf"\[{rows},16,64\]\S* (fusion|reduce-scatter)\(", program.text)
    assert not re.search(rf"\[{rows},64,64\]\S* all-reduce\(", program.text)
