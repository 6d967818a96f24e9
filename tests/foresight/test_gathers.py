# ruff: noqa: E501  a program's line is one line
"""Gathers, sorts and sums over few rows take on a TPU what libtpu's schedules say, also on SparseCores."""

import pytest
import sample

from gspmd_lm.foresight import hlo
from gspmd_lm.foresight.timing import gathers, op_time
from gspmd_lm.foresight.timing.simulate import Simulation
from gspmd_lm.hardware.chips import CHIPS

V5P, V6E, TPU7X, H100 = (CHIPS[name] for name in ("v5p", "v6e", "tpu7x", "h100"))
TILED = "{1,0:T(8,128)(2,1)}"


def program(text, computations=""):
    return hlo.parse(f"HloModule jit__train\n\n{computations}\nENTRY %main (x: bf16[1]) -> bf16[1] {{\n{text}\n}}\n")


def gather(rows, width, dtype="bf16", of=1000, config=""):
    """A gather of rows, as libtpu writes it: the only operation of a fusion of its own."""
    table, found = f"{dtype}[{of},{width}]{TILED}", f"{dtype}[{rows},{width}]{TILED}"
    inside = f"""%inside (t: {dtype}[{of},{width}], at: s32[{rows}]) -> {dtype}[{rows},{width}] {{
  %t = {table} parameter(0)
  %at = s32[{rows}]{{0:T(1024)}} parameter(1)
  ROOT %g = {found} gather(%t, %at), offset_dims={{1}}, collapsed_slice_dims={{0}}, start_index_map={{0}}, index_vector_dim=1, slice_sizes={{1,{width}}}
}}
"""
    given = f"  %x = {table} parameter(0)\n  %n = s32[{rows}]{{0:T(1024)}} parameter(1)\n"
    return given, f"{found} fusion(%x, %n), kind=kCustom, calls=%inside{config}", inside


def seconds(module, chip):
    return op_time.op_time(module.entry.root, chip).seconds


def gathered_s(chip, *sizes):
    given, call, inside = gather(*sizes)
    return seconds(program(f"{given}  ROOT %f = {call}", inside), chip)


@pytest.mark.parametrize(
    ("chip", "width", "bundles"), [(V6E, 4096, 3836), (V6E, 2048, 2374), (V6E, 2880, 3012), (V5P, 2048, 3052)]
)
def test_a_gather_takes_the_schedule_of_128_rows_and_then_their_store(chip, width, bundles):
    """`bundles` are those of libtpu's schedules. Both cores of v5p take half of the rows."""
    rows = 128 * 512
    stored_s = rows * -(-width // 128) * 128 * 2 / op_time.hbm_bytes_per_s(chip)
    found = gathered_s(chip, rows, width)
    assert found == pytest.approx(512 * bundles / chip.tensor_cores / chip.clock_hz + stored_s, rel=0.02)
    assert found > 1.5 * 2 * stored_s  # as its bytes alone would say


def test_a_gather_of_a_gpu_takes_its_bytes():
    given, call, inside = gather(65536, 4096)
    module = program(f"{given}  ROOT %f = {call}", inside)
    assert seconds(module, H100) == pytest.approx(
        module.entry.root.moved_bytes["hbm"] / op_time.hbm_bytes_per_s(H100) + op_time.LAUNCH_S["gpu"]
    )


OFFLOADED = """
%tiles (a: bf16[1], b: s32[1]) -> bf16[1] {{
  %a = bf16[1000,4096]{tiled} parameter(0)
  %b = s32[65536]{{0:T(1024)}} parameter(1)
  ROOT %k = {call}
}}, execution_thread="sparsecore"

%cores (c: bf16[1], d: s32[1]) -> bf16[1] {{
  %c = bf16[1000,4096]{tiled} parameter(0)
  %d = s32[65536]{{0:T(1024)}} parameter(1)
  %s = ((bf16[1000,4096]{tiled}, s32[65536]), bf16[65536,4096]{tiled}, u32[]) call-start(%c, %d), async_execution_thread="sparsecore", to_apply=%tiles
  ROOT %e = bf16[65536,4096]{tiled} call-done(%s)
}}, execution_thread="sparsecore"
"""


def test_what_a_sparse_core_hands_on_to_its_tiles_takes_time():
    """A row has 32 pieces."""
    given, call, inside = gather(65536, 4096, config=', backend_config={"compute_type":"COMPUTE_TYPE_TILE"}')
    nested = OFFLOADED.format(tiled=TILED, call=call.replace("(%x, %n)", "(%a, %b)"))
    start = f'  %s0 = ((bf16[1000,4096]{TILED}, s32[65536]), bf16[65536,4096]{TILED}, u32[]) call-start(%x, %n), async_execution_thread="sparsecore", to_apply=%cores\n'
    module = program(f"{given}{start}  ROOT %o = bf16[65536,4096]{TILED} call-done(%s0)", inside + nested)
    network = sample.network(TPU7X, [(0, 0, 0)], [0], [0], [1], ["data"])
    found = Simulation(module, TPU7X, network).clock_s
    assert found == pytest.approx(65536 * 32 / gathers.SPARSECORE_PIECES_PER_S)
    assert found > 3 * 65536 * 4096 * 2 / op_time.hbm_bytes_per_s(TPU7X)  # both interleaved rows, and the store


def test_gathers_that_were_measured():
    """Source: "SparseCore Kernel Writing" in the documentation of jax, on tpu7x; milliseconds."""
    rows = 4_194_304
    assert 18.1 * 0.8 < gathered_s(TPU7X, rows, 128, "s32", 4096) * 1e3 < 18.1
    given, call, inside = gather(rows, 128, "s32", 4096, ', backend_config={"compute_type":"COMPUTE_TYPE_TILE"}')
    found = seconds(program(f"{given}  ROOT %f = {call}", inside), TPU7X)
    assert found * 1e3 == pytest.approx(4.05 / 2)  # each SparseCore fetched all rows, where half would do


@pytest.mark.parametrize(
    ("chip", "shape", "along", "bundles"),
    [(V6E, "[65536]", 0, 44786), (V5P, "[8192]", 0, 5974), (V6E, "[2,4096,128]", 2, 16 * 9116)],
)
def test_a_sort_takes_its_rounds_of_comparisons(chip, shape, along, bundles):
    sort = f"  %x = s32{shape} parameter(0)\n  ROOT %s = (s32{shape}, s32{shape}) sort(%x, %x), dimensions={{{along}}}"
    time = op_time.op_time(program(sort).entry.root, chip)
    assert time.seconds == pytest.approx(bundles / chip.clock_hz, rel=0.02) and time.unknown == ""
    assert op_time.op_time(program(sort).entry.root, H100).unknown == "sort"


@pytest.mark.parametrize(("few", "width", "bundles"), [(2, 4096, 256 * 2700), (4, 2880, 256 * 1910)])
def test_a_sum_over_few_rows_takes_its_tiles(few, width, bundles):
    """The tiles have as many rows as are added up, and fill registers of 8 in part."""
    given, result = f"f32[8192,{few},{width}]{{2,1,0:T({few},128)}}", f"bf16[8192,{width}]{TILED}"
    inside = f"""%inside (y: f32[1]) -> bf16[1] {{
  %y = {given} parameter(0)
  %z = f32[] constant(0)
  %r = f32[8192,{width}]{{1,0:T(8,128)}} reduce(%y, %z), dimensions={{1}}
  ROOT %c = {result} convert(%r)
}}
"""
    module = program(f"  %x = {given} parameter(0)\n  ROOT %f = {result} fusion(%x), kind=kLoop, calls=%inside", inside)
    assert gathers.least_s(module.entry.root, V6E, 1.0) == pytest.approx(bundles / V6E.clock_hz, rel=0.03)
    assert seconds(module, V6E) >= gathers.least_s(module.entry.root, V6E, 1.0)
    plain = given.replace(f"T({few},128)", "T(8,128)")
    module = program(
        f"  %x = {plain} parameter(0)\n  ROOT %f = {result} fusion(%x), kind=kLoop, calls=%inside",
        inside.replace(given, plain),
    )
    assert gathers.least_s(module.entry.root, V6E, 1.0) == 0
