# ruff: noqa: E501  a program's line is one line
"""Products of few rows on TPUs: what their bytes, their widening and the compiler's estimate say of their time."""

import pytest

from gspmd_lm.foresight import hlo
from gspmd_lm.foresight.timing import op_time
from gspmd_lm.hardware.chips import CHIPS

DECODE, TRAIN = (
    "jit(_decode)/layers/mlp/of.layers.mlp.w_up/dot_general",
    "jit(_train)/jvp(D)/layers/of.layers.mlp.w_up/dot_general",
)


def product(rows, inner, columns, cycles, dtype="s8", op=DECODE, on_chip=False):
    """A layer's weights, a slice of those of all layers, times a few rows, as libtpu fuses them."""
    x, w, y = (
        f"bf16[{rows},{inner}]{{1,0:T(8,128)(2,1)S(1)}}",
        f"{dtype}[4,{inner},{columns}]{{2,1,0:T(8,128)(2,1){'S(1)' * on_chip}}}",
        f"bf16[{rows},{columns}]{{1,0:T(8,128)(2,1)S(1)}}",
    )
    one = w.replace("[4,", "[1,").replace("S(1)", "")
    matrix = one.replace("[1,", "[").replace("{2,1,0", "{1,0")
    given = f"  %x = {x} parameter(0)\n  %w = {w} parameter(1)\n  %i = s32[] parameter(2)\n"
    return hlo.parse(f"""HloModule test

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
{given}  ROOT %p = {y} fusion(%x, %w, %i), kind=kOutput, calls=%inner, metadata={{op_name="{op}"}}, backend_config={{"window_config":{{"estimated_cycles":"{cycles}"}}}}
}}
""").entry.root


def price_us(chip, *sizes, **more):
    return 1e6 * op_time.op_time(product(*sizes, **more), CHIPS[chip]).seconds


# rows, inner size, columns and the compiler's cycles (libtpu 0.0.42.1), and the schedule's: of copies or of the loop.
V5E_BYTES_US = 1e6 / (0.86 * 819e9)
CASES = [
    ("v5e", (8, 8192, 3584, 91758), "s8", 8192 * 3584 * V5E_BYTES_US),  # a loop of 1,038 bundles, 16 times: 11 us
    ("v5e", (64, 8192, 3584, 94629), "s8", 8192 * 3584 * V5E_BYTES_US),  # 2,028 bundles: 22 us
    ("v5e", (8, 8192, 3584, 148150), "bf16", 2 * 8192 * 3584 * V5E_BYTES_US),
    ("v4", (64, 18432, 1152, 33558), "s8", 18 * 4901 / 2 / 1049.04),  # widened: the loop is longer than the copies
    ("v4", (8, 18432, 1152, 30675), "s8", 12 * 6271 / 2 / 1049.04),
    ("v4", (64, 18432, 1152, 54472), "bf16", 2e6 * 18432 * 1152 / (0.86 * 1200e9)),
]


@pytest.mark.parametrize(("chip", "sizes", "dtype", "expected_us"), CASES)
def test_a_product_of_few_rows_takes_as_long_as_its_weights_take_to_be_read_or_widened(chip, sizes, dtype, expected_us):
    assert price_us(chip, *sizes, dtype=dtype) == pytest.approx(expected_us, rel=0.03)


def test_other_products_take_the_cycles_of_the_compiler():
    for more in ({"op": TRAIN}, {"dtype": "bf16", "op": TRAIN}):
        assert price_us("v5e", 8, 8192, 3584, 148150, **more) == pytest.approx(148150 / 1502.99, rel=1e-4)
    many = 2048, 8192, 3584, 10**6  # a prompt: the matrix units take longer than the memory
    assert price_us("v5e", *many) == pytest.approx(10**6 / 1502.99, rel=1e-4)


def test_what_lies_on_the_chip_takes_what_is_left_of_the_estimate():
    """Weights that were copied there before: nothing is copied beside the product."""
    on_chip_us = price_us("v5e", 8, 4096, 512, 4764, on_chip=True)
    assert on_chip_us == pytest.approx(4764 / 1502.99, rel=1e-4)
