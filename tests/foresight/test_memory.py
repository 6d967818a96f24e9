"""Memory: the compiler's own figures, and its words when it refuses."""

import pytest

from gspmd_lm.config import RunFailed
from gspmd_lm.foresight import hlo, memory
from gspmd_lm.foresight.compile import programs

STATE = {"weights": 4 * 2**30, "optimizer": 8 * 2**30, "batch": 2**20}


def test_every_byte_of_a_compiled_program_is_told(request_of, cache):
    (program,) = programs([request_of("fsdp8")], cache=str(cache))
    found = memory.measure(program.memory, program.state_bytes, 10**12, hlo.parse(program.text), [])
    parts = found.weights_bytes + found.optimizer_bytes + found.batch_bytes + found.temporaries_bytes
    assert parts == found.peak_bytes
    held = program.memory["argument_size_in_bytes"] + program.memory["temp_size_in_bytes"]
    assert held <= found.peak_bytes < 1.1 * held  # donated arguments are not counted twice
    assert found.fits and found.host_bytes == 0
    assert not memory.measure(program.memory, program.state_bytes, 1000, hlo.parse(program.text), []).fits


def test_what_libtpu_accepts_fits(request_of, cache):
    (program,) = programs([request_of("fsdp8")], cache=str(cache))
    module, limit_bytes = hlo.parse(program.text), sum(program.state_bytes.values()) + 1000
    found = memory.measure(program.memory, program.state_bytes, limit_bytes, module, [], accepted=True)
    assert found.fits and found.peak_bytes == limit_bytes


PROGRAM = """HloModule m, num_partitions=2

%body (p: (bf16[4,8,16], f32[8,16])) -> (bf16[4,8,16], f32[8,16]) {
  %p = (bf16[4,8,16]{2,1,0}, f32[8,16]{1,0}) parameter(0)
  %saved = bf16[4,8,16]{2,1,0} get-tuple-element(%p), index=0
  %x = f32[8,16]{1,0} get-tuple-element(%p), index=1
  %y = f32[8,16]{1,0} tanh(%x), metadata={op_name="jit(_train)/jvp(Decoder)/while/body/layers/mlp.hidden/tanh"}
  ROOT %out = (bf16[4,8,16]{2,1,0}, f32[8,16]{1,0}) tuple(%saved, %y)
}

%condition (p.1: (bf16[4,8,16], f32[8,16])) -> pred[] {
  %p.1 = (bf16[4,8,16]{2,1,0}, f32[8,16]{1,0}) parameter(0)
  ROOT %no = pred[] constant(false)
}

ENTRY %main (a: f32[64,64]) -> f32[8,16] {
  %a = f32[64,64]{1,0} parameter(0)
  %stack = bf16[4,8,16]{2,1,0} custom-call(), custom_call_target="AllocateBuffer"
  %host = f32[1024,1024]{1,0:S(5)} custom-call(), custom_call_target="AllocateBuffer"
  %first = f32[8,16]{1,0} slice(%a), slice={[0:8], [0:16]}
  %start = (bf16[4,8,16]{2,1,0}, f32[8,16]{1,0}) tuple(%stack, %first)
  %end = (bf16[4,8,16]{2,1,0}, f32[8,16]{1,0}) while(%start), condition=%condition, body=%body
  ROOT %result = f32[8,16]{1,0} get-tuple-element(%end), index=1
}
"""


def test_the_largest_temporaries_have_their_axes():
    known = [memory.Named("hidden", ("batch", "seq", "mlp"), (1, 8, 16))]
    first, second = memory._largest(hlo.parse(PROGRAM), known)
    assert (first.shape, first.bytes, first.axes) == ("bf16[4,8,16]", 1024, ("layers", "seq", "mlp"))
    assert (second.shape, second.axes) == ("f32[8,16]", ("seq", "mlp"))  # no argument, nothing on the host, each once


def test_a_refusal_of_libtpu_is_read():
    message = (
        "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (16.75G) exceeds "
        "available HBM (15.75G)."
    )
    found = memory.refused(message, STATE, None)
    assert not found.fits and found.peak_bytes == int(16.75 * 2**30) and found.limit_bytes == int(15.75 * 2**30)
    assert found.temporaries_bytes == found.peak_bytes - sum(STATE.values())
    assert found.refusal == message


def test_a_refusal_with_a_list_of_allocations_is_read():
    message = """RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 21.05G of 15.75G hbm. Exceeded by 5.3G.

  Largest program allocations in hbm:

  1. Size: 4.00G
     Operator: op_name="jit(_train)/jvp(Decoder)/dot" source_file="/x/gspmd_lm/model/projection.py" source_line=57
     Shape: bf16[32,8,8192,1024]{3,2,1,0:T(8,128)(2,1)}
     Unpadded size: 4.00G
     ==========================

  2. Size: 512.0M
     Shape: f32[128,1048576]{1,0:T(8,128)}
"""
    found = memory.refused(message, STATE, 15 * 2**30)
    assert found.peak_bytes == int(21.05 * 2**30) and found.limit_bytes == 15 * 2**30
    assert [(t.bytes, t.source, t.op) for t in found.largest] == [
        (4 * 2**30, "gspmd_lm/model/projection.py:57", "jvp(Decoder)/dot"),
        (512 * 2**20, "", ""),
    ]


def test_a_refusal_in_unknown_words_is_shown():
    with pytest.raises(RunFailed, match="no room at all"):
        memory.refused("RESOURCE_EXHAUSTED: no room at all", STATE, None)
