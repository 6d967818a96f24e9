# ruff: noqa: E501  a program's line is one line
"""Copies to and from the memory of the host, and within that of a GPU, take as long as their bytes say."""

import dataclasses

import pytest
from schedules import CHIP, matmul, ns, predicted

from gspmd_lm.foresight.timing import op_time
from gspmd_lm.hardware.chips import CHIPS


def test_host_copies_run_beside_compute_each_direction_on_its_own():
    host = "f32[8,8]{1,0:S(5)}"
    both = f"""  %out = ({host}, f32[8,8]{{1,0}}, u32[]) copy-start(%p)
  %held = {host} parameter(9)
  %in = (f32[8,8]{{1,0}}, {host}, u32[]) copy-start(%held)
{matmul("m", 1000)}  %o = {host} copy-done(%out)
  %i = f32[8,8]{{1,0}} copy-done(%in)
"""
    found = predicted(both)
    assert (ns(found.step_time_s), ns(found.exposed_host_copy_s), ns(found.communication_s)) == (1024, 24, 0)
    halves = predicted(both, chip=dataclasses.replace(CHIP, devices_per_chip=2))  # two devices share the link
    assert ns(halves.step_time_s) == 2 * 1024


WRAPPED = """%put (at: s32[], old: f32[32,8,8], new: f32[1,8,8]) -> f32[32,8,8] {
  %old = f32[32,8,8]{2,1,0:S(5)} parameter(0)
  %new = f32[1,8,8]{2,1,0} parameter(1)
  %at = s32[] parameter(2)
  %turned = f32[1,8,8]{2,1,0} copy(%new)
  ROOT %written = f32[32,8,8]{2,1,0:S(5)} dynamic-update-slice(%old, %turned, %at, %at, %at)
}

%get (step: s32[], all: f32[32,8,8]) -> f32[1,8,8] {
  %all = f32[32,8,8]{2,1,0:S(5)} parameter(0)
  %step = s32[] parameter(1)
  %from = s32[] negate(%step)
  %one = f32[1,8,8]{2,1,0:S(5)} dynamic-slice(%all, %from, %from, %from), dynamic_slice_sizes={1,8,8}
  ROOT %brought = f32[1,8,8]{2,1,0} copy(%one)
}
"""


@pytest.mark.parametrize("wrapped", [False, True])
def test_slices_to_and_from_the_host_count_their_part_alone(wrapped):
    """Also where a fusion begins them that copies, and works out from where, as on GPUs."""
    stack = "f32[32,8,8]{2,1,0:S(5)}"
    body = f"""  %zero = s32[] constant(0)
  %stack = {stack} parameter(9)
  %part = f32[1,8,8]{{2,1,0}} bitcast(%p)
  %out = (({stack}, f32[1,8,8], s32[], s32[], s32[]), {stack}, u32[]{{:S(2)}}) dynamic-update-slice-start(%stack, %part, %zero, %zero, %zero)
  %o = {stack} dynamic-update-slice-done(%out)
  %in = (({stack}, s32[], s32[], s32[]), f32[1,8,8]{{2,1,0}}, u32[]{{:S(2)}}) dynamic-slice-start(%o, %zero, %zero, %zero), dynamic_slice_sizes={{1,8,8}}
{matmul("m", 1000)}  %i = f32[1,8,8]{{2,1,0}} dynamic-slice-done(%in)
"""
    if wrapped:
        body = body.replace("dynamic-update-slice-", "fusion-").replace("dynamic-slice-", "fusion-")
        body = body.replace("(%stack, %part, %zero, %zero, %zero)", "(%stack, %part, %zero), kind=kCustom, calls=%put")
        body = body.replace(
            "(%o, %zero, %zero, %zero), dynamic_slice_sizes={1,8,8}", "(%o, %zero), kind=kCustom, calls=%get"
        )
    found = predicted(body, WRAPPED)
    assert (ns(found.step_time_s), ns(found.exposed_host_copy_s)) == (2048, 1048) and found.unpriced == {}


def test_a_copy_within_the_memory_of_a_gpu_stands_in_line_with_its_kernels():
    """The index may come before the part that is written. A copy is read and written, and other chips make it beside."""
    stack = "f32[32,8,8]{2,1,0}"
    body = f"""  %zero = s32[] constant(0)
  %stack = {stack} parameter(9)
  %part = f32[1,8,8]{{2,1,0}} bitcast(%p)
  %out = (({stack}, s32[], f32[1,8,8]), {stack}, u32[]) fusion-start(%stack, %zero, %part), kind=kLoop, calls=%put
  %o = {stack} fusion-done(%out)
"""
    inside = (
        WRAPPED.replace(":S(5)", "").replace("parameter(2)", "parameter(9)").replace("parameter(1)", "parameter(2)")
    )
    gpu = dataclasses.replace(CHIPS["h100"], hbm_bytes_per_s=1e9 / op_time.HBM_SHARE["gpu"])
    found = predicted(body, inside, chip=gpu)
    copied_ns = 2 * 8 * 8 * 4 + op_time.LAUNCH_S["gpu"] * 1e9
    assert ns(found.step_time_s) == ns(found.other_s) == copied_ns
    assert ns(predicted(body.replace("  %o =", matmul("m", 1000) + "  %o ="), inside).step_time_s) == 1000


def test_a_fusion_beside_compute_that_does_more_than_copy_is_listed():
    body = """  %stack = f32[32,8,8]{2,1,0:S(5)} parameter(9)
  %zero = s32[] constant(0)
  %in = ((f32[32,8,8]{2,1,0:S(5)}, s32[]), f32[1,8,8]{2,1,0}, u32[]) fusion-start(%stack, %zero), kind=kCustom, calls=%get
  %i = f32[1,8,8]{2,1,0} fusion-done(%in)
"""
    found = predicted(body, WRAPPED.replace("copy(%one)", "negate(%one)"))
    assert list(found.unpriced) == ["fusion-start"]
