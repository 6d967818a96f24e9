# ruff: noqa: E501  a program's line is one line
"""The FLOPs of products and the bytes that instructions move, read from programs."""

import pytest
from saved_programs import program, saved


@pytest.mark.parametrize("name", ["cpu", "cpu_jax012"])
def test_flops_of_a_program_are_those_of_its_model(name):
    module = saved(name)
    found = sum(instruction.executions * instruction.flops for instruction in module.operations)
    layers, embed, heads, mlp, vocab, tokens, seq = 4, 128, 8 * 16, 384, 264, 16 * 128, 128
    block = 4 * embed * heads + 3 * embed * mlp
    attention = 2 * seq * heads  # scores and values
    # forward, recomputation and backward of a block; the recomputed block needs its last matmul for nothing
    total = 2 * tokens * (layers * (4 * block - embed * mlp + 4 * attention) + 3 * embed * vocab)
    assert found * 8 == pytest.approx(total, rel=0.02)


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
        # cuDNN's calls: a convolution, and the gradients of its picture and of its kernel
        (("f32[2,10,3]", "f32[3,3,4]"), '(f32[2,10,4], u8[0]) custom-call(%a, %b), window={size=3 pad=1_1}, dim_labels=b0f_0io->b0f, custom_call_target="__cudnn$convForward"', 2 * 2 * 28 * 3 * 4),
        (("f32[2,10,4]", "f32[3,3,4]"), '(f32[2,10,3], u8[0]) custom-call(%a, %b), window={size=3 pad=1_1}, dim_labels=b0f_0io->b0f, custom_call_target="__cudnn$convBackwardInput"', 2 * 2 * 28 * 3 * 4),
        (("f32[2,10,3]", "f32[2,10,4]"), '(f32[3,3,4], u8[0]) custom-call(%a, %b), window={size=3 pad=1_1}, dim_labels=b0f_0io->b0f, custom_call_target="__cudnn$convBackwardFilter"', 2 * 2 * 28 * 3 * 4),
    ],
)  # fmt: skip
def test_flops(shapes, instruction, expected):
    left, right = shapes
    module = program(f"  %a = {left} parameter(0)\n  %b = {right} parameter(1)\n  ROOT %r = {instruction}")
    assert module.entry.root.flops == expected


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
    assert module.entry.root.flops == 2 * 2 * 8**3
    assert [i.name for i in module.entry.root.inside] == ["e", "f", "c", "d", "g"]


TOUCH = """%touch (big: f32[32,8,8], part: f32[1,8,8], n: s32[]) -> f32[32,8,8] {
  %big = f32[32,8,8]{2,1,0} parameter(0)
  %part = f32[1,8,8]{2,1,0} parameter(1)
  %n = s32[] parameter(2)
  %old = f32[1,8,8]{2,1,0} dynamic-slice(%big, %n, %n, %n), dynamic_slice_sizes={1,8,8}
  %new = f32[1,8,8]{2,1,0} add(%old, %part)
  ROOT %u = f32[32,8,8]{2,1,0} dynamic-update-slice(%big, %new, %n, %n, %n)
}

%look_up (table: bf16[32,1], rows: s32[4]) -> bf16[4,1] {
  %table = bf16[32,1]{1,0} parameter(0)
  %rows = s32[4]{0} parameter(1)
  ROOT %found = bf16[4,1]{1,0} gather(%table, %rows), offset_dims={1}, collapsed_slice_dims={0}, start_index_map={0}, index_vector_dim=1, slice_sizes={1,1}
}
"""


def test_traffic_is_what_slices_and_updates_touch():
    body = """  %big = f32[32,8,8]{2,1,0} parameter(7)
  %part = f32[1,8,8]{2,1,0:S(1)} parameter(8)
  %n = s32[] constant(0)
  %f = f32[32,8,8]{2,1,0} fusion(%big, %part, %n), kind=kLoop, calls=%touch
  %s = f32[2,8,8]{2,1,0} slice(%big), slice={[0:2], [0:8], [0:8]}
  %t = f32[3,5]{1,0:T(8,128)} parameter(9)
  %c = f32[3,5]{1,0:T(8,128)} copy(%t)
  %table = bf16[32,1]{1,0} parameter(10)
  %rows = s32[4]{0} parameter(11)
  %l = bf16[4,1]{1,0} fusion(%table, %rows), kind=kLoop, calls=%look_up
  ROOT %u = f32[32,8,8]{2,1,0} dynamic-update-slice(%big, %part, %n, %n, %n)"""
    instructions = program(body, TOUCH).entry.instructions
    touched = instructions["f"].moved_bytes
    assert (touched["hbm"], touched["chip"]) == (256 + 256 + 4, 256)
    assert instructions["s"].moved_bytes["hbm"] == 2 * 512
    assert instructions["c"].moved_bytes["hbm"] == 2 * 4 * 8 * 128  # whole tiles
    assert instructions["l"].moved_bytes["hbm"] == 8 + 16 + 8  # of the table some rows, of their numbers all
    updated = instructions["u"].moved_bytes
    assert (updated["hbm"], updated["chip"]) == (256, 256)


RETILED = """%tiles (whole: bf16[32,16,128]) -> bf16[32,16,128] {
  %whole = bf16[32,16,128]{2,1,0:T(16,128)(2,1)} parameter(0)
  ROOT %c = bf16[32,16,128]{2,1,0:T(8,128)(2,1)} copy(%whole)
}

%reads (stack: bf16[32,16,128], n: s32[]) -> bf16[1,16,128] {
  %stack = bf16[32,16,128]{2,1,0:T(16,128)(2,1)} parameter(0)
  %n = s32[] parameter(1)
  %again = bf16[32,16,128]{2,1,0:T(8,128)(2,1)} fusion(%stack), kind=kLoop, ALIASED calls=%tiles
  ROOT %layer = bf16[1,16,128]{2,1,0:T(8,128)(2,1)} dynamic-slice(%again, %n, %n, %n), dynamic_slice_sizes={1,16,128}
}

%writes (stack: bf16[32,16,128], layer: bf16[1,16,128], n: s32[]) -> bf16[32,16,128] {
  %stack = bf16[32,16,128]{2,1,0:T(16,128)(2,1)} parameter(0)
  %layer = bf16[1,16,128]{2,1,0:T(16,128)(2,1)} parameter(1)
  %n = s32[] parameter(2)
  %again = bf16[32,16,128]{2,1,0:T(8,128)(2,1)} fusion(%stack), kind=kLoop, ALIASED calls=%tiles
  ROOT %new = bf16[32,16,128]{2,1,0:T(16,128)(2,1)} dynamic-update-slice(%again, %layer, %n, %n, %n)
}
"""


@pytest.mark.parametrize(("aliased", "stack"), [("output_to_operand_aliasing={{}: (0, {})}, ", 0), ("", 32)])
def test_a_stack_that_gets_other_tiles_in_place_is_not_moved_for_them(aliased, stack):
    """As libtpu writes it for tpu7x, where arrays of bfloat16 have tiles of 16 rows."""
    body = """  %stack = bf16[32,16,128]{2,1,0:T(16,128)(2,1)} parameter(0)
  %n = s32[] constant(0)
  %layer = bf16[1,16,128]{2,1,0:T(8,128)(2,1)} fusion(%stack, %n), kind=kLoop, calls=%reads
  ROOT %w = bf16[32,16,128]{2,1,0:T(16,128)(2,1)} fusion(%stack, %layer, %n), kind=kLoop, calls=%writes"""
    instructions = program(body, RETILED.replace("ALIASED ", aliased)).entry.instructions
    number, layer = 4, 2 * 16 * 128
    assert instructions["layer"].moved_bytes["hbm"] == number + (max(1, stack) + 1) * layer
    assert instructions["w"].moved_bytes["hbm"] == number + (stack + 2) * layer
