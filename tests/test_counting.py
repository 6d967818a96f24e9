"""What benchmarks.collectives finds in small programs, most of them compiled here."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from benchmarks.collectives import count, output_bytes, ring_bytes


def compiled_text(function, *shapes, specs, out=None):
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    mapped = jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=P() if out is None else out, check_vma=False)
    text = jax.jit(mapped).lower(*[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]).compile().as_text()
    assert text
    return text


ADD = """%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}
"""


def program(body, header="HloModule m, replica_count=1, num_partitions=8"):
    return f"{header}\n\n{ADD}\nENTRY %main (p: f32[4]) -> f32[4] {{\n  %p = f32[4]{{0}} parameter(0)\n{body}\n}}\n"


def test_gather_reduce_scatter_and_permute():
    def function(x):
        gathered = jax.lax.all_gather(x, "tensor", tiled=True)
        total = jax.lax.psum(gathered, "data")
        part = jax.lax.psum_scatter(total * gathered, "tensor", tiled=True)
        return jax.lax.ppermute(part, "tensor", [(0, 1), (1, 2), (2, 3), (3, 0)])

    found = {c.kind: c for c in count(compiled_text(function, (32, 6), specs=P("tensor"), out=P("tensor")))}
    assert {kind: (c.shape, c.group_size, c.times, c.in_loop) for kind, c in found.items()} == {
        "all-gather": ((32, 6), 4, 1, 0),
        "all-reduce": ((32, 6), 2, 1, 0),
        "reduce-scatter": ((8, 6), 4, 1, 0),
        "collective-permute": ((8, 6), 2, 1, 0),
    }
    full = 32 * 6 * 4
    assert {kind: c.ring_bytes for kind, c in found.items()} == {
        "all-gather": full * 3 / 4,
        "all-reduce": full,
        "reduce-scatter": full * 3 / 4,
        "collective-permute": full / 4,
    }
    assert output_bytes(found.values()) == full * (1 + 1 + 1 / 4 + 1 / 4)
    assert ring_bytes(found.values()) == full * (3 / 4 + 1 + 3 / 4 + 1 / 4)


def test_loops_within_loops_multiply():
    def function(x):
        def inner(x, _):
            return jnp.tanh(jax.lax.psum(x, "tensor")), None

        def outer(x, _):
            x, _ = jax.lax.scan(inner, x, length=3)
            return jnp.sin(jax.lax.psum(x, "data")), None

        return jax.lax.scan(outer, x, length=5)[0]

    found = count(compiled_text(function, (8, 8), specs=P()))
    assert sorted((c.group_size, c.times, c.in_loop) for c in found) == [(2, 5, 1), (4, 15, 2)]


def test_a_combined_instruction_counts_as_its_tensors():
    def function(x, y):
        return jax.lax.psum(x, "tensor"), jax.lax.psum(y, "tensor")

    text = compiled_text(function, (8, 8), (3,), specs=P(), out=(P(), P()))
    assert text.count(" all-reduce(") == 1
    assert sorted(c.shape for c in count(text)) == [(3,), (8, 8)]


def test_an_all_to_all_of_pieces_is_one_tensor():
    found = count(compiled_text(lambda x: jax.lax.all_to_all(x, "tensor", 0, 1, tiled=True),
                                (32, 4), specs=P("tensor"), out=P("tensor")))  # fmt: skip
    assert [(c.kind, np.prod(c.shape), c.group_size) for c in found] == [("all-to-all", 32, 4)]
    assert ring_bytes(found) == 32 * 4 * 3 / 4


def test_layouts_and_types():
    types = {"w": "bf16[2,3]{1,0:T(8,128)(2,1)}", "x": "pred[5]{0}", "y": "s4[3]{0}", "z": "f8e4m3fn[]"}
    made = "".join(f"  %{name} = {shape} broadcast(%p), dimensions={{}}\n" for name, shape in types.items())
    body = made + (
        "  %a = (bf16[2,3]{1,0:T(8,128)(2,1)}, pred[5]{0}, s4[3]{0}, /*index=3*/f8e4m3fn[]) "
        "all-reduce(%w, %x, %y, %z), "
        'replica_groups={}, to_apply=%add, metadata={op_name="jit(f)/a(b)/psum" stack_frame_id=3}'
    )
    found = count(program(body))
    assert [(c.dtype, c.shape, c.bytes) for c in found] == [
        ("bf16", (2, 3), 12), ("pred", (5,), 5), ("s4", (3,), 2), ("f8e4m3fn", (), 1),
    ]  # fmt: skip
    assert {(c.op_name, c.group_size, c.computation) for c in found} == {("jit(f)/a(b)/psum", 8, "main")}


def test_an_asynchronous_pair_counts_once_with_the_shape_of_its_result():
    body = (
        "  %s = (f32[4]{0}, f32[16]{0}) all-gather-start(%p), replica_groups=[2,4]<=[8], dimensions={0}\n"
        "  ROOT %d = f32[16]{0} all-gather-done(%s)"
    )
    assert [(c.kind, c.shape, c.group_size) for c in count(program(body))] == [("all-gather", (16,), 4)]


LOOP = (
    f"HloModule m, num_partitions=8\n\n{ADD}"
    + """
%body (t: (s32[], f32[4])) -> (s32[], f32[4]) {
  %t = (s32[], f32[4]{0}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %x = f32[4]{0} get-tuple-element(%t), index=1
  %r = f32[4]{0} all-reduce(%x), replica_groups={}, to_apply=%add
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  ROOT %n = (s32[], f32[4]{0}) tuple(%next, %r)
}

%less (t.1: (s32[], f32[4])) -> pred[] {
  %t.1 = (s32[], f32[4]{0}) parameter(0)
  %j = s32[] get-tuple-element(%t.1), index=0
  %limit = s32[] constant(7)
  ROOT %less.1 = pred[] compare(%j, %limit), direction=DIRECTION
}

ENTRY %main (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  %start = s32[] constant(2)
  %init = (s32[], f32[4]{0}) tuple(%start, %p)
  ROOT %w = (s32[], f32[4]{0}) while(%init), condition=%less, body=%body
}
"""
)


def test_turns_are_read_from_the_condition_where_the_compiler_does_not_say():
    assert [c.times for c in count(LOOP.replace("DIRECTION", "LT"))] == [5]


def test_a_loop_whose_turns_cannot_be_told_is_an_error():
    with pytest.raises(ValueError, match="cannot tell how often the loop w turns"):
        count(LOOP.replace("DIRECTION", "LT").replace("s32[] constant(7)", "s32[] infeed()"))


def test_branches_count_each_once():
    def function(x):
        return jax.lax.cond(x[0, 0] > 0, lambda x: jax.lax.psum(x, "tensor"), lambda x: jax.lax.psum(x, "data"), x)

    found = count(compiled_text(function, (8, 8), specs=P()))
    assert sorted((c.group_size, c.times) for c in found) == [(2, 1), (4, 1)]
