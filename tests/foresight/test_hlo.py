# ruff: noqa: E501  a program's line is one line
"""Programs of every target are read whole: order, loops, groups, sources and attributes."""

import pytest
import saved_programs
from saved_programs import program, saved

from gspmd_lm.errors import InputError
from gspmd_lm.foresight import hlo, source_lines
from gspmd_lm.foresight.hlo.work import groups, parse_groups


@pytest.mark.parametrize("name", ["tpu_v5e", "tpu7x", "gpu_h100", "cpu", "cpu_jax012"])
def test_a_saved_program_is_read_whole(name):
    module = saved(name)
    text = saved_programs.text(name)
    assert module.name == "jit__train" and module.devices == 8
    count = sum(len(computation.instructions) for computation in module.computations.values())
    assert count == sum(" = " in line and line.startswith("  ") for line in text.splitlines())
    for computation in module.computations.values():
        for instruction in computation.instructions.values():
            assert set(instruction.operands) <= set(computation.instructions.values()), instruction.name
            called = [one for role in instruction.called_computations.values() for one in role]
            assert set(called) <= set(module.computations.values())
        assert computation.root is list(computation.instructions.values())[-1] or computation.root.is_root


@pytest.mark.parametrize("name", ["tpu_v5e", "tpu7x", "gpu_h100", "cpu", "cpu_jax012"])
def test_layer_loops_have_their_turns(name):
    module = saved(name)
    turns = [i.trip_count for i in module.operations if i.opcode == "while"]
    assert sorted(turns) == ([3, 4] if name == "gpu_h100" else [4, 4])  # XLA:GPU takes one turn of backward out


@pytest.mark.parametrize("name", ["tpu_v5e", "tpu7x", "gpu_h100", "cpu", "cpu_jax012"])
def test_sources_are_lines_of_the_package(name):
    module = saved(name)
    sources = {instruction.source: instruction for instruction in module.operations if instruction.flops}
    assert any(source.startswith("gspmd_lm/model/projection.py:") for source in sources), sources.keys()
    instruction = next(i for source, i in sources.items() if "projection" in source)
    assert any(source.startswith("gspmd_lm/train/step.py:") for source in instruction.sources[1:])


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
    assert parse_groups(text, 8) == expected


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
        parse_groups("<all>", 8)


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
    assert module.entry.instructions["loop"].trip_count == turns


def test_turns_that_the_compiler_knows():
    module = looped(0, 8, 0, "LT", config=', backend_config={"known_trip_count":{"n":"31"}}')
    assert module.entry.instructions["loop"].trip_count == 31


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
    operations = {instruction.name: instruction for instruction in module.operations}
    assert (operations["loop"].executions, operations["next"].executions) == (3, 15)
    assert [(loop.name, loop.trip_count) for loop in operations["next"].loops] == [("both", 3), ("loop", 5)]
    unknown = program(body.replace("MANY", "custom-call()"), inner + outer)
    inner = next(instruction for instruction in unknown.operations if instruction.name == "next")
    assert [loop.trip_count for loop in inner.loops] == [None, None] and inner.executions == 1


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


def test_the_folder_of_a_clone_may_have_the_name_of_the_package():
    lines = {
        "src/gspmd_lm/gspmd_lm/model/layers.py": "gspmd_lm/model/layers.py:7",
        "src/gspmd_lm/examples/mixer.py": "examples/mixer.py:7",
    }
    assert {file: source_lines.source_line(file, 7) for file in lines} == lines


def test_lines_of_libraries_tell_little_and_those_of_installed_models_do():
    lines = {
        "lib/python3.12/site-packages/maxtext/layers/linears.py": "layers/linears.py:7",
        "lib/python3.12/site-packages/flax/linen/linear.py": "",
        "/usr/lib/python3.12/functools.py": "",
        "src/gspmd_lm/gspmd_lm/foresight/any_step.py": "",
    }
    assert {file: source_lines.source_line(file, 7) for file in lines} == lines


def test_source_file_in_the_metadata_itself():
    module = program(
        '  ROOT %p = f32[8] parameter(0), metadata={op_name="a/b" source_file="x/gspmd_lm/api.py" source_line=4}'
    )
    assert module.entry.root.source == "gspmd_lm/api.py:4" and module.entry.root.op_name == "a/b"


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
    assert all(i.estimated_cycles > 0 for i in module.operations if i.flops)
    kernels = [i for i in module.operations if i.custom_call_target == "tpu_custom_call"]
    assert len(kernels) == 3 and all("splash" in i.op_name for i in kernels)
    assert any(array.memory_space == 1 for i in module.operations for array in i.shape.arrays)
