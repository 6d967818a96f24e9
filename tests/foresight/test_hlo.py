# ruff: noqa: E501  a program's line is one line
"""Programs of every target are read whole: order, loops, groups, sources, attributes, and what collectives move."""

import gzip
import math
from pathlib import Path

import pytest

from gspmd_lm.errors import InputError
from gspmd_lm.foresight import hlo
from gspmd_lm.foresight.collectives import exchanges
from gspmd_lm.foresight.cost import flops
from gspmd_lm.foresight.hlo.replica_groups import groups, read

PROGRAMS = Path(__file__).parent / "programs"


def saved(name):
    return hlo.parse(gzip.decompress((PROGRAMS / f"{name}.txt.gz").read_bytes()).decode())


def program(body, computations="", head=", num_partitions=8"):
    return hlo.parse(
        f"HloModule test, is_scheduled=true{head}\n\n{computations}\nENTRY %main (p: f32[8]) -> f32[8] {{\n{body}\n}}\n"
    )


@pytest.mark.parametrize("name", ["tpu_v5e", "tpu7x", "gpu_h100", "cpu", "cpu_jax012"])
def test_a_saved_program_is_read_whole(name):
    module = saved(name)
    text = gzip.decompress((PROGRAMS / f"{name}.txt.gz").read_bytes()).decode()
    assert module.name == "jit__train" and module.devices == 8
    count = sum(len(computation.instructions) for computation in module.computations.values())
    assert count == sum(" = " in line and line.startswith("  ") for line in text.splitlines())
    for computation in module.computations.values():
        for instruction in computation.instructions.values():
            assert set(instruction.operands) <= set(computation.instructions), instruction.name
            assert all(called in module.computations for role in instruction.called.values() for called in role)
        assert computation.root is list(computation.instructions.values())[-1] or computation.root.is_root


@pytest.mark.parametrize("name", ["tpu_v5e", "tpu7x", "gpu_h100", "cpu", "cpu_jax012"])
def test_layer_loops_have_their_turns(name):
    module = saved(name)
    turns = [module.trip_count(step.instruction) for step in module.steps() if step.instruction.opcode == "while"]
    assert sorted(turns) == ([3, 4] if name == "gpu_h100" else [4, 4])  # XLA:GPU takes one turn of backward out


@pytest.mark.parametrize("name", ["tpu_v5e", "tpu7x", "gpu_h100", "cpu", "cpu_jax012"])
def test_sources_are_lines_of_the_package(name):
    module = saved(name)
    matmuls = (step.instruction for step in module.steps() if flops.of(module, step.instruction))
    sources = {instruction.source: instruction for instruction in matmuls}
    assert any(source.startswith("gspmd_lm/model/projection.py:") for source in sources), sources.keys()
    instruction = next(i for source, i in sources.items() if "projection" in source)
    assert any(source.startswith("gspmd_lm/train/step.py:") for source in instruction.sources[1:])


@pytest.mark.parametrize("name", ["cpu", "cpu_jax012"])
def test_flops_of_a_program_are_those_of_its_model(name):
    module = saved(name)
    found = sum(step.times * flops.of(module, step.instruction) for step in module.steps())
    layers, embed, heads, mlp, vocab, tokens, seq = 4, 128, 8 * 16, 384, 264, 16 * 128, 128
    block = 4 * embed * heads + 3 * embed * mlp
    attention = 2 * seq * heads  # scores and values
    # forward, recomputation and backward of a block; the recomputed block needs its last matmul for nothing
    total = 2 * tokens * (layers * (4 * block - embed * mlp + 4 * attention) + 3 * embed * vocab)
    assert found * 8 == pytest.approx(total, rel=0.02)


def test_frontend_attributes_over_several_lines_end_where_they_end():
    module = program(
        """  %p = f32[8]{0} parameter(0)
  %kernel = f32[8]{0} custom-call(%p), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"xprof":"{\\"block\\": 512, \\"other\\": [1, 2]}"
}}, metadata={op_name="jit(f)/k" stack_frame_id=3}, backend_config={"a":{"b":"}{"}}
  ROOT %r = f32[8]{0} negate(%kernel), frontend_attributes={chain_id="12",kernel_metadata={
}}"""
    )
    assert list(module.entry.instructions) == ["p", "kernel", "r"]
    kernel, root = module.entry.instructions["kernel"], module.entry.instructions["r"]
    assert kernel.custom_call_target == "tpu_custom_call" and kernel.op_name == "jit(f)/k"
    assert kernel.config == {"a": {"b": "}{"}} and list(kernel.frontend) == ["kernel_metadata"]
    assert root.frontend["chain_id"] == "12"


def test_shapes():
    shape = hlo.Shape(
        "(bf16[4,8]{1,0:T(8,128)(2,1)S(5)}, /*index=1*/(s4[3]{0:E(4)S(1)}, pred[]), f8e4m3fn[<=16]{0}, token[])"
    )
    assert [(a.dtype, a.dimensions, a.memory_space) for a in shape.arrays] == [
        ("bf16", (4, 8), 5), ("s4", (3,), 1), ("pred", (), 0), ("f8e4m3fn", (16,), 0), ("token", (), 0),
    ]  # fmt: skip
    assert [a.bytes for a in shape.arrays] == [64, 2, 1, 16, 0] and shape.bytes == 83


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{{0,1},{2,3}}", ((0, 1), (2, 3))),
        ("{}", (tuple(range(8)),)),
        ("[4,2]<=[8]", ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("[2,4]<=[4,2]T(1,0)", ((0, 2, 4, 6), (1, 3, 5, 7))),
        ("[2,4]<=[2,2,2]T(1,0,2)", ((0, 1, 4, 5), (2, 3, 6, 7))),
        ("mesh['a'=2,'b'=4] {'b'}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("mesh['a'=2,'b'=4] {'a'}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh[a=2,b=4] {a,b}", (tuple(range(8)),)),
        ("mesh['a'=2,'b'=4] {'b','a'}", ((0, 4, 1, 5, 2, 6, 3, 7),)),
        ("mesh['a'=2,'b'=4] {'b':(1)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh['a'=2,'b'=4] {'b':(2)2}", ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("mesh['a'=2,'b'=4] {'a','b':(1)2}", ((0, 2, 4, 6), (1, 3, 5, 7))),
        ("mesh['a'=1,'b'=8,'c'=1] {'a','b'}", (tuple(range(8)),)),
        ("mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['a'=2,'b'=2], device_ids=(0,2,1,3) {'b'}", ((0, 2), (1, 3))),
    ],
)  # fmt: skip
def test_groups_in_every_syntax(text, expected):
    assert read(text, 8) == expected


def test_groups_of_instructions_with_commas_behind_them():
    module = program(
        """  %p = f32[8]{0} parameter(0)
  %g = f32[16]{0} all-gather(%p), channel_id=1, replica_groups=mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}, dimensions={0}
  ROOT %c = f32[8]{0} collective-permute(%p), channel_id=2, source_target_pairs={{0,1},{1,0}}"""
    )
    gather, permute = module.entry.instructions["g"], module.entry.root
    assert groups(gather, 8) == ((0, 4), (1, 5), (2, 6), (3, 7)) and gather.attributes["dimensions"] == "{0}"
    assert groups(permute, 8) == ((0, 1), (1, 0))
    with pytest.raises(InputError, match=r"replica_groups=<all>"):
        read("<all>", 8)


LOOP = """%body (s: (s32[], f32[8], s32[])) -> (s32[], f32[8], s32[]) {{
  %s = (s32[], f32[8]{{0}}, s32[]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x = f32[8]{{0}} get-tuple-element(%s), index=1
  %n = s32[] get-tuple-element(%s), index=2
  %by = s32[] constant({step})
  %next = s32[] add(%i, %by)
  %kept = s32[] copy(%n)
  ROOT %t = (s32[], f32[8]{{0}}, s32[]) tuple(%next, %x, %kept)
}}

%compared (a: s32[], b: s32[]) -> pred[] {{
  %a = s32[] parameter(0)
  %b = s32[] parameter(1)
  ROOT %lt = pred[] compare(%a, %b), direction={direction}
}}

%condition (s.1: (s32[], f32[8], s32[])) -> pred[] {{
  %s.1 = (s32[], f32[8]{{0}}, s32[]) parameter(0)
  %i.1 = s32[] get-tuple-element(%s.1), index=0
  %n.1 = s32[] get-tuple-element(%s.1), index=2
  %bit = s32[] bitcast(%n.1)
  ROOT %f = pred[] fusion(%i.1, %bit), kind=kLoop, calls=%compared
}}
"""


def looped(start, limit, step, direction, behind="", config=""):
    return program(
        f"""  %p = f32[8]{{0}} parameter(0)
  %start = s32[] constant({start})
  %limit = s32[] constant({limit})
  %copied = s32[] copy(%limit)
  %init = (s32[], f32[8]{{0}}, s32[]) tuple(%start, %p, %copied)
  %loop = (s32[], f32[8]{{0}}, s32[]) while(%init), condition=%condition, body=%body{config}
  ROOT %r = f32[8]{{0}} get-tuple-element(%loop), index=1""",
        LOOP.format(step=step, direction=direction),
    )


@pytest.mark.parametrize(
    ("start", "limit", "step", "direction", "turns"),
    [
        (0, 32, 1, "LT", 32), (0, 7, 2, "LT", 4), (3, 10, 3, "LT", 3), (0, 8, 2, "LE", 5), (5, 5, 1, "LT", 0),
        (9, 0, -2, "GT", 5), (9, 0, -3, "GE", 4), (0, 8, 2, "NE", 4), (0, 7, 2, "NE", None), (0, 8, -1, "LT", None),
        (0, 8, 0, "LT", None),
    ],
)  # fmt: skip
def test_turns_of_a_loop_whose_limit_is_carried_behind_copies_and_fusions(start, limit, step, direction, turns):
    module = looped(start, limit, step, direction)
    assert module.trip_count(module.entry.instructions["loop"]) == turns


def test_turns_that_the_compiler_knows():
    module = looped(0, 8, 0, "LT", config=', backend_config={"known_trip_count":{"n":"31"}}')
    assert module.trip_count(module.entry.instructions["loop"]) == 31


def test_nested_loops_multiply_and_unknown_turns_are_told():
    inner = LOOP.format(step=1, direction="LT")
    outer = """%outer (q: (s32[], f32[8], s32[])) -> (s32[], f32[8], s32[]) {
  %q = (s32[], f32[8]{0}, s32[]) parameter(0)
  %j = s32[] get-tuple-element(%q), index=0
  %y = f32[8]{0} get-tuple-element(%q), index=1
  %m = s32[] get-tuple-element(%q), index=2
  %zero = s32[] constant(0)
  %init = (s32[], f32[8]{0}, s32[]) tuple(%zero, %y, %m)
  %loop = (s32[], f32[8]{0}, s32[]) while(%init), condition=%condition, body=%body
  %z = f32[8]{0} get-tuple-element(%loop), index=1
  %left = s32[] get-tuple-element(%loop), index=2
  %two = s32[] constant(2)
  %after = s32[] add(%two, %j)
  ROOT %u = (s32[], f32[8]{0}, s32[]) tuple(%after, %z, %left)
}

%until (q.1: (s32[], f32[8], s32[])) -> pred[] {
  %q.1 = (s32[], f32[8]{0}, s32[]) parameter(0)
  %j.1 = s32[] get-tuple-element(%q.1), index=0
  %m.1 = s32[] get-tuple-element(%q.1), index=2
  ROOT %gt = pred[] compare(%m.1, %j.1), direction=GT
}
"""
    body = """  %p = f32[8]{0} parameter(0)
  %start = s32[] constant(0)
  %limit = s32[] MANY
  %first = (s32[], f32[8]{0}, s32[]) tuple(%start, %p, %limit)
  %both = (s32[], f32[8]{0}, s32[]) while(%first), condition=%until, body=%outer
  ROOT %r = f32[8]{0} get-tuple-element(%both), index=1"""
    module = program(body.replace("MANY", "constant(5)"), inner + outer)
    steps = {step.instruction.name: step for step in module.steps()}
    assert (steps["loop"].times, steps["next"].times, steps["next"].counted) == (3, 15, True)
    assert [loop.name for loop in steps["next"].loops] == ["both", "loop"]
    unknown = program(body.replace("MANY", "custom-call()"), inner + outer)
    assert unknown.trip_count(unknown.entry.instructions["both"]) is None
    assert not next(step for step in unknown.steps() if step.instruction.name == "next").counted


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
    found = [exchange for step in module.steps() for exchange in exchanges.of(module, step.instruction)]
    assert [(e.kind, e.runs.name, e.group_size, e.asynchronous, e.sent_bytes) for e in found] == [
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
    assert module.carried(instructions["begin"], "AsyncCollectiveStart") == ("3",)
    assert module.carried(instructions["end"], "AsyncCollectiveDone") == ("3",)
    assert instructions["sc-start"].thread == "sparsecore"
    assert (instructions["ag-update"].base, instructions["ag-update"].phase) == ("all-gather", "-update")


@pytest.mark.parametrize(
    ("shapes", "instruction", "expected"),
    [
        # 2 x result elements x contracted sizes, batches included
        (("f32[4,8,16]", "f32[4,16,32]"), "f32[4,8,32] dot(%a, %b), lhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_batch_dims={0}, rhs_contracting_dims={1}", 2 * 4 * 8 * 32 * 16),
        (("f32[8,16]", "f32[16,32]"), "f32[8,32] convolution(%a, %b), dim_labels=bf_io->bf", 2 * 8 * 16 * 32),
        # heads as a window over padding: each output meets one kernel position
        (("f32[4,64,32,1]", "f32[32,8,16,1]"), "f32[4,64,8,16] convolution(%a, %b), window={size=1x8 pad=0_0x7_7 rhs_reversal=0x1}, dim_labels=0bf1_i1o0->0b1f", 2 * 4 * 64 * 8 * 16 * 32),
        # a batch as a window: size, stride and dilation such that output n meets input n and kernel n
        (("f32[6,5,7]", "f32[6,7,9]"), "f32[6,5,9] convolution(%a, %b), window={size=6 stride=5 lhs_dilate=6}, dim_labels=0bf_0io->0bf", 2 * 6 * 5 * 7 * 9),
        # a real window, its padding not counted: outputs at the two ends meet 2 positions each, the others 3
        (("f32[2,10,3]", "f32[3,3,4]"), "f32[2,10,4] convolution(%a, %b), window={size=3 pad=1_1}, dim_labels=b0f_0io->b0f", 2 * 2 * (8 * 3 + 2 * 2) * 3 * 4),
        (("f32[2,10,6]", "f32[1,2,9]"), "f32[2,10,9] convolution(%a, %b), window={size=1}, dim_labels=b0f_0io->b0f, feature_group_count=3", 2 * 2 * 10 * 9 * 2),
    ],
)  # fmt: skip
def test_flops(shapes, instruction, expected):
    left, right = shapes
    module = program(f"  %a = {left} parameter(0)\n  %b = {right} parameter(1)\n  ROOT %r = {instruction}")
    assert flops.of(module, module.entry.root) == expected


def test_flops_of_a_fusion_are_those_inside():
    inner = """%inner (c: f32[8,8]) -> f32[8,8] {
  %c = f32[8,8]{1,0} parameter(0)
  ROOT %d = f32[8,8]{1,0} dot(%c, %c), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%outer (e: f32[8,8]) -> f32[8,8] {
  %e = f32[8,8]{1,0} parameter(0)
  %f = f32[8,8]{1,0} fusion(%e), kind=kLoop, calls=%inner
  ROOT %g = f32[8,8]{1,0} dot(%f, %e), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""
    module = program("  %h = f32[8,8]{1,0} parameter(0)\n  ROOT %r = f32[8,8]{1,0} fusion(%h), calls=%outer", inner)
    assert flops.of(module, module.entry.root) == 2 * 2 * 8**3
    assert [i.name for i in module.inside(module.entry.root)] == ["e", "f", "c", "d", "g"]


def test_stack_frames_with_parents_printed_either_way():
    head = """HloModule old

FileNames
1 "lib/site-packages/flax/scan.py"
2 "src/gspmd_lm/model/layers.py"

FunctionNames
1 "scan"
2 "Norm.__call__"

FileLocations
1 {file_name_id=1 function_name_id=1 line=7 end_line=7 column=1 end_column=2}
2 {file_name_id=2 function_name_id=2 line=33 end_line=33 column=1 end_column=2}

StackFrames
1 {file_location_id=2 parent_frame_id=FIRST}
2 {file_location_id=1 parent_frame_id=SECOND}


ENTRY %main (p: f32[8]) -> f32[8] {
  ROOT %p = f32[8]{0} parameter(0), metadata={op_name="x" stack_frame_id=2}
}
"""
    for first, second in (("0", "1"), ("1", "2")):  # before 2025, and since
        root = hlo.parse(head.replace("FIRST", first).replace("SECOND", second)).entry.root
        assert root.frames == (
            ("lib/site-packages/flax/scan.py", 7),
            ("src/gspmd_lm/model/layers.py", 33),
        )
        assert root.source == "gspmd_lm/model/layers.py:33"


def test_source_file_in_the_metadata_itself():
    module = program(
        '  ROOT %p = f32[8] parameter(0), metadata={op_name="a/b" source_file="x/gspmd_lm/a.py" source_line=4}'
    )
    assert module.entry.root.source == "gspmd_lm/a.py:4" and module.entry.root.op_name == "a/b"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("module @jit_f {}", "not with HloModule"),
        ("HloModule cut, num_partitions=8\n\n%a (p: f32[]) -> f32[] {\n  ROOT %p = f32[] parameter(0)\n}\n", "no ENTRY"),
        ("HloModule bad\n\nENTRY %a (p: f32[]) -> f32[] {\n  nonsense here\n}\n", "cannot be read: 'nonsense here'"),
    ],
)  # fmt: skip
def test_what_is_no_program_is_refused(text, message):
    with pytest.raises(InputError, match=message):
        hlo.parse(text)


def test_estimated_cycles_and_the_kernels_of_a_tpu_program():
    module = saved("tpu_v5e")
    steps = [step.instruction for step in module.steps()]
    assert all(i.estimated_cycles > 0 for i in steps if flops.of(module, i))
    kernels = [i for i in steps if i.custom_call_target == "tpu_custom_call"]
    assert len(kernels) == 3 and all("splash" in i.op_name for i in kernels)
    assert any(array.memory_space == 1 for i in steps for array in i.shape.arrays)


def test_sparse_core_collectives_are_asynchronous():
    module = saved("tpu7x")
    found = [e for step in module.steps() for e in exchanges.of(module, step.instruction)]
    callers = {e: module.callers.get(e.runs.computation, ()) for e in found}
    beside = [e for e in found if any(caller.thread == "sparsecore" for caller, _ in callers[e])]
    assert beside and all(e.asynchronous for e in beside)


def test_bytes_of_the_layouts_collectives():
    """fsdp8 gathers each block's weights twice, 7/8 of them from others, and scatters their gradients once."""
    module = saved("gpu_h100")
    sent = {}
    for step in module.steps():
        for e in exchanges.of(module, step.instruction):
            sent[e.kind] = sent.get(e.kind, 0) + step.times * e.sent_bytes
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
    )
    instructions = module.entry.instructions
    slices = (0, 0, 1, 1, 0, 0, 1, 1)
    (sent,), (gathered,) = (exchanges.of(module, instructions[name], slices) for name in ("out", "r"))
    assert (sent.kind, sent.groups, sent.sent_bytes) == ("all-reduce", ((0, 2), (1, 3), (4, 6), (5, 7)), 32)
    assert gathered.groups == ((0, 1), (4, 5), (2, 3), (6, 7))
    assert exchanges.of(module, instructions["in"], slices) == ()
    assert exchanges.rendezvous(instructions["in"]) == exchanges.rendezvous(instructions["out"]) == "psum.9_0"
