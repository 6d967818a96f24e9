"""What a profiler saw is put beside the program that ran: kinds of kernels, and matmuls in the order of the program."""

import dataclasses
import time

import pytest

from benchmarks import op_times
from benchmarks.op_times import STEPS, Kernel
from gspmd_lm.foresight import hlo

LT = 'custom_call_target="__cublas$lt$matmul"'
DIMENSIONS = 'backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}'
PROGRAM = f"""HloModule jit__train

%inside (x: bf16[32,8], y: f32[32,16]) -> f32[32,16] {{
  %x = bf16[32,8] parameter(0)
  %w = bf16[8,16] constant({{...}})
  %y = f32[32,16] parameter(1)
  ROOT %second = f32[32,16] custom-call(%x, %w, %y), {LT}, {DIMENSIONS}
}}

%condition (c: (s32[], bf16[32,8], f32[32,16])) -> pred[] {{
  %c = (s32[], bf16[32,8], f32[32,16]) parameter(0)
  %n = s32[] get-tuple-element(%c), index=0
  %m = s32[] constant(2)
  ROOT %less = pred[] compare(%n, %m), direction=LT
}}

%body (c: (s32[], bf16[32,8], f32[32,16])) -> (s32[], bf16[32,8], f32[32,16]) {{
  %c = (s32[], bf16[32,8], f32[32,16]) parameter(0)
  %n = s32[] get-tuple-element(%c), index=0
  %x = bf16[32,8] get-tuple-element(%c), index=1
  %y = f32[32,16] get-tuple-element(%c), index=2
  %v = bf16[8,8] constant({{...}})
  %first = bf16[32,8] custom-call(%x, %v), {LT}, {DIMENSIONS}
  %z = f32[32,16] fusion(%first, %y), kind=kCustom, calls=%inside
  ROOT %t = (s32[], bf16[32,8], f32[32,16]) tuple(%n, %first, %z)
}}

ENTRY %main (c: (s32[], bf16[32,8], f32[32,16])) -> (s32[], bf16[32,8], f32[32,16]) {{
  %c = (s32[], bf16[32,8], f32[32,16]) parameter(0)
  ROOT %loop = (s32[], bf16[32,8], f32[32,16]) while(%c), condition=%condition, body=%body, backend_config={{"known_trip_count":{{"n":"2"}}}}
}}
"""  # noqa: E501  a program's line is one line


def test_matmuls_have_the_times_of_the_kernels_in_their_order():
    """The profiler saw STEPS steps; a loop of two turns runs each of its matmuls twice in a step."""
    kernels = []
    for _ in range(2 * STEPS):
        for name, taken_s in (("nvjet_sm90_tst", 1e-6), ("loop_add_fusion", 9e-6), ("some_gemm_kernel", 3e-6)):
            kernels.append(Kernel(name, len(kernels), taken_s))
    module = hlo.parse(PROGRAM)
    first, second = op_times.matmuls(module, kernels)
    assert first == {"rows_columns": (32, 8), "contracted": 8, "bits": 16, "result": "bf16", "added": False,
                     "times": 2, "us": 1.0}  # fmt: skip
    assert second == {"rows_columns": (32, 16), "contracted": 8, "bits": 16, "result": "f32", "added": True,
                      "times": 2, "us": 3.0}  # fmt: skip
    with pytest.raises(ValueError, match=f"{4 * STEPS - 1} kernels of cuBLAS in {STEPS} steps of a program of 4"):
        op_times.matmuls(module, kernels[1:])


def test_kernels_are_counted_by_kind_in_milliseconds_of_a_step():
    names = {"nvjet_sm90_tst_1": "matmul", "cudnn_generated_fort": "attention", "grouped_outer__1": "grouped",
             "MemcpyD2H": "host copy", "memcpy128": "other", "input_reduce_fusion": "other"}  # fmt: skip
    kernels = [Kernel(name, at, STEPS * 1e-3) for at, name in enumerate(names)]
    assert [kernel.kind for kernel in kernels] == [*names.values()]
    assert op_times.by_kind(kernels) == {"matmul": 1, "attention": 1, "grouped": 1, "host copy": 1, "other": 2}
    longer = dataclasses.replace(kernels[0], taken_s=STEPS * 2e-3)
    assert op_times.by_kind([longer])["matmul"] == 2


def test_the_card_is_watched_where_there_is_one(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with op_times.watched() as seen:
        pass
    assert seen == {}
    tool = tmp_path / "nvidia-smi"
    samples = ["1980, 120.5", "1500, 690.4", "1600, 699.6", "[N/A]"]
    tool.write_text("\n".join(["#!/bin/sh", *map("echo {}".format, samples), "read forever < /dev/zero"]))
    tool.chmod(0o755)
    with op_times.watched() as seen:
        time.sleep(0.2)
    assert seen == {"mhz": 1600, "watts": 690}
