# ruff: noqa: E501  a program's line is one line
"""Products of few rows on TPUs: what their bytes, their widening and the compiler's estimate say of their time."""

import pytest

from gspmd_lm.foresight import hlo
from gspmd_lm.foresight.timing import op_time
from gspmd_lm.hardware.chips import CHIPS

DECODE, TRAIN = "jit__decode", "jit__train"


def product(rows, inner, columns, cycles, windows=None, dtype="s8", program=DECODE, on_chip=False):
    """A layer's weights, a slice of those of all layers, times a few rows, as libtpu fuses them."""
    bounds = f',"iteration_bounds":["1","1","{windows}"]' if windows else ""
    x, w, y = (
        f"bf16[{rows},{inner}]{{1,0:T(8,128)(2,1)S(1)}}",
        f"{dtype}[4,{inner},{columns}]{{2,1,0:T(8,128)(2,1){'S(1)' * on_chip}}}",
        f"bf16[{rows},{columns}]{{1,0:T(8,128)(2,1)S(1)}}",
    )
    one = w.replace("[4,", "[1,").replace("S(1)", "")
    matrix = one.replace("[1,", "[").replace("{2,1,0", "{1,0")
    given = f"  %x = {x} parameter(0)\n  %w = {w} parameter(1)\n  %i = s32[] parameter(2)\n"
    return hlo.parse(f"""HloModule {program}

%view (v: {one}) -> {matrix} {{
  %v = {one} parameter(0)
  ROOT %b = {matrix} bitcast(%v)
}}

%inner (x: {x}, w: {w}, i: s32[]) -> {y} {{
{given}  %z = s32[] constant(0)
  %s = {one} dynamic-slice(%w, %i, %z, %z), dynamic_slice_sizes={{1,{inner},{columns}}}
  %f = {matrix} fusion(%s), kind=kLoop, calls=%view
  ROOT %c = {y} convolution(%x, %f), dim_labels=bf_io->bf
}}

ENTRY %main (x: {x}, w: {w}, i: s32[]) -> {y} {{
{given}  ROOT %p = {y} fusion(%x, %w, %i), kind=kOutput, calls=%inner, backend_config={{"window_config":{{"estimated_cycles":"{cycles}"{bounds}}}}}
}}
""").entry.root


def price_us(chip, *sizes, **more):
    return 1e6 * op_time.op_time(product(*sizes, **more), CHIPS[chip]).seconds


# rows, inner size, columns, the compiler's cycles and its windows (libtpu 0.0.42.1), and the schedule's cycles: of its
# copies at 86% of the bandwidth and of one window's product, or of its loop and of one window's copy.
V5E_CYCLES, V4_CYCLES = 53_880 / 0.86, 25_667 / 0.86 * 18432 * 1152 / (8192 * 3584)
CASES = [
    ("v5e", (8, 8192, 3584, 91_758, 16), "s8", V5E_CYCLES + 17_825 / 16),
    ("v5e", (64, 8192, 3584, 94_629, 16), "s8", V5E_CYCLES + 40_129 / 16),
    ("v5e", (8, 8192, 3584, 148_150, 16), "bf16", 2 * V5E_CYCLES + 15_827 / 16),
    ("v4", (64, 18432, 1152, 33_558, 24), "s8", 24 * 3874 / 2 + V4_CYCLES / 12),  # two cores; to widen takes longer
    ("v4", (8, 18432, 1152, 30_675, 24), "s8", 12 * 6271 / 2 + V4_CYCLES / 12),
]


@pytest.mark.parametrize(("chip", "sizes", "dtype", "cycles"), CASES)
def test_a_product_of_few_rows_takes_as_long_as_its_weights_take_to_be_read_or_widened(chip, sizes, dtype, cycles):
    assert price_us(chip, *sizes, dtype=dtype) == pytest.approx(1e6 * cycles / CHIPS[chip].clock_hz, rel=0.04)


def test_a_product_in_one_window_copies_before_it_multiplies():
    """Nothing overlaps, so that the compiler's estimate, the sum of both, is right but for the bandwidth's share."""
    copies_us = 1e6 * 4096 * 128 * 2 / 819e9
    expected_us = 4444 / 1502.99 + copies_us * (1 / 0.86 - 1)
    assert price_us("v5e", 8, 4096, 128, 4444, windows=1, dtype="bf16") == pytest.approx(expected_us, rel=0.01)
    many = price_us("v5e", 8, 4096, 128, 4444, dtype="bf16")  # the compiler does not say how many
    assert many == pytest.approx(max(copies_us / 0.86, 4444 / 1502.99 - copies_us), rel=0.01)


def test_other_products_take_the_cycles_of_the_compiler():
    for more in ({}, {"dtype": "bf16"}):
        assert price_us("v5e", 8, 8192, 3584, 148150, 16, program=TRAIN, **more) == pytest.approx(
            148150 / 1502.99, rel=1e-4
        )
    many = 2048, 8192, 3584, 10**6  # a prompt: the matrix units take longer than the memory
    assert price_us("v5e", *many) == pytest.approx(10**6 / 1502.99, rel=1e-4)


def test_what_lies_on_the_chip_takes_what_is_left_of_the_estimate():
    """Weights that were copied there before: nothing is copied beside the product."""
    on_chip_us = price_us("v5e", 8, 4096, 512, 4764, on_chip=True)
    assert on_chip_us == pytest.approx(4764 / 1502.99, rel=1e-4)


def normalization(program=DECODE, space=1):
    """The sum of squares of rows that lie on the chip: 64 of 8,192 numbers, 431 bundles on v5e."""
    x = f"bf16[64,8192]{{1,0:T(8,128)(2,1)S({space})}}"
    return hlo.parse(f"""HloModule {program}

%add (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}}

%inner (x: {x}) -> f32[64] {{
  %x = {x} parameter(0)
  %w = f32[64,8192]{{1,0:T(8,128)}} convert(%x)
  %s = f32[64,8192]{{1,0:T(8,128)}} multiply(%w, %w)
  %z = f32[] constant(0)
  ROOT %r = f32[64]{{0:T(128)S({space})}} reduce(%s, %z), dimensions={{1}}, to_apply=%add
}}

ENTRY %main (x: {x}) -> f32[64] {{
  %x = {x} parameter(0)
  ROOT %p = f32[64]{{0:T(128)S({space})}} fusion(%x), kind=kLoop, calls=%inner, backend_config={{"window_config":{{"estimated_cycles":"8724"}}}}
}}
""").entry.root


def test_what_lies_on_the_chip_takes_cycles_of_its_cores():
    cycles = {
        name: op_time.op_time(normalization(), CHIPS[name]).seconds * CHIPS[name].clock_hz for name in ("v5e", "v4")
    }
    assert 431 <= cycles["v5e"] <= 2 * 431 and cycles["v4"] < cycles["v5e"] < 8724  # v4 has two cores
    on_v4 = op_time.op_time(normalization(space=3), CHIPS["v4"]).seconds  # as programs for v4 call this memory
    assert on_v4 * CHIPS["v4"].clock_hz == pytest.approx(cycles["v4"])
    train_s = op_time.op_time(normalization(TRAIN), CHIPS["v5e"]).seconds
    assert train_s == pytest.approx((64 * 8192 * 2 + 512) / 22 / (0.86 * 819e9))
