"""Memory: the compiler's own figures, its words when it refuses, and what a step must not hold."""

import math

import pytest

from benchmarks import foresight, step_times
from gspmd_lm.errors import RunFailed
from gspmd_lm.foresight import hlo, memory, table
from gspmd_lm.foresight.compile import programs
from gspmd_lm.hardware import target
from gspmd_lm.train import state

STATE = {"weights": 4 * 2**30, "optimizer": 8 * 2**30, "batch": 2**20}


def test_every_byte_of_a_compiled_program_is_told(request_of, cache):
    (program,) = programs([request_of("fsdp8")], cache=str(cache))
    module = hlo.parse(program.text)
    found = memory.measure(program.memory, program.state_bytes, 10**12, module, [])
    parts = found.weights_bytes + found.optimizer_bytes + found.batch_bytes + found.temporaries_bytes
    assert parts == found.peak_bytes
    held = program.memory["argument_size_in_bytes"] + program.memory["temp_size_in_bytes"]
    assert held <= found.peak_bytes < 1.1 * held  # donated arguments are not counted twice
    assert found.fits and found.host_bytes == 0
    for spare in (0, -1):  # memory of just the bytes that it needs, and one byte less
        limit_bytes = found.peak_bytes + spare
        assert memory.measure(program.memory, program.state_bytes, limit_bytes, module, []).fits == (spare == 0)


def test_what_libtpu_accepts_fits(request_of, cache):
    (program,) = programs([request_of("fsdp8")], cache=str(cache))
    module, limit_bytes = hlo.parse(program.text), sum(program.state_bytes.values()) + 1000
    found = memory.measure(program.memory, program.state_bytes, limit_bytes, module, [], accepted=True)
    assert found.fits and found.peak_bytes == limit_bytes


def test_what_is_donated_on_the_host_is_counted_once():
    sizes = {f"{place}{what}_size_in_bytes": 0 for place in ("", "host_") for what in ("argument", "output", "alias")}
    sizes |= dict.fromkeys(("temp_size_in_bytes", "generated_code_size_in_bytes", "host_temp_size_in_bytes"), 0)
    sizes |= {f"host_{what}_size_in_bytes": 64 for what in ("argument", "output", "alias")}
    found = memory.measure(sizes, {"arguments": 0}, None, hlo.parse(PROGRAM), [])
    assert (found.host_bytes, found.peak_bytes, found.temporaries_bytes) == (64, 0, 0)


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
    known = [memory.DeviceArray("hidden", ("batch", "seq", "mlp"), (1, 8, 16)),
             memory.DeviceArray("layers.mlp.w_up", ("layers", "embed", "mlp"), (4, 32, 64))]  # fmt: skip
    first, second = memory._largest(hlo.parse(PROGRAM), known)
    assert (first.shape, first.bytes, first.axes) == ("bf16[4,8,16]", 1024, ("layers", "seq", "mlp"))
    assert (second.shape, second.axes) == ("f32[8,16]", ("seq", "mlp"))  # no argument, nothing on the host, each once


@pytest.mark.parametrize(
    ("dimensions", "axes"),
    [
        ((1, 128, 32), ("", "vocab", "embed")),  # a name for each dimension
        ((4, 32), ("layers", "embed")),
        ((16, 8, 1, 4), ("batch", "seq", "kv_heads", "head_dim")),
        ((16, 8, 4), ("batch", "seq", "head_dim")),  # the compiler drops a dimension of size 1
        ((16, 1, 8, 4), ()),  # and adds none: scores, of which the sizes are those of keys by chance
        ((6, 32), ()),  # there are 4 layers
        ((5, 7), ()),
        ((1, 1), ()),
    ],
)
def test_axes_are_as_many_as_dimensions_and_layers_as_many_as_there_are(dimensions, axes):
    """Of `f32[1,128256,4096]` it was said that its axes are layers and embed, as those of a norm's scales are."""
    known = [memory.DeviceArray("final_norm.scale", ("embed",), (32,)),
             memory.DeviceArray("layers.norm.scale", ("layers", "embed"), (4, 32)),
             memory.DeviceArray("k", ("batch", "seq", "kv_heads", "head_dim"), (16, 8, 1, 4)),
             memory.DeviceArray("embedding", ("vocab", "embed"), (128, 32))]  # fmt: skip
    assert memory._axes(dimensions, "", known) == axes


def test_a_refusal_of_libtpu_is_read():
    message = (
        "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (16.75G) exceeds "
        "available HBM (15.75G)."
    )
    found = memory.refused_memory(message, STATE, None)
    assert not found.fits and found.peak_bytes == int(16.75 * 2**30) and found.limit_bytes == int(15.75 * 2**30)
    assert found.temporaries_bytes == found.peak_bytes - sum(STATE.values())
    assert found.refusal == message


def test_a_refusal_with_a_list_of_allocations_is_read():
    message = """RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 21.05G of 15.75G hbm. Exceeded by 5.3G.

  Largest program allocations in hbm:

  1. Size: 4.00G
     Operator: op_name="jit(_train)/jvp(Decoder)/dot" source_file="/x/gspmd_lm/model/attention.py" source_line=57
     Shape: bf16[32,8,8192,1024]{3,2,1,0:T(8,128)(2,1)}
     Unpadded size: 4.00G
     ==========================

  2. Size: 512.0M
     Shape: f32[128,1048576]{1,0:T(8,128)}
"""
    found = memory.refused_memory(message, STATE, 15 * 2**30)
    assert found.peak_bytes == int(21.05 * 2**30) and found.limit_bytes == 15 * 2**30
    assert [(t.bytes, t.source, t.op) for t in found.largest] == [
        (4 * 2**30, "gspmd_lm/model/attention.py:57", "jvp(Decoder)/dot"),
        (512 * 2**20, "", ""),
    ]


def test_a_refusal_in_unknown_words_is_shown():
    with pytest.raises(RunFailed, match="no room at all"):
        memory.refused_memory("RESOURCE_EXHAUSTED: no room at all", STATE, None)


def whole_matrices(request):
    """The sizes, sorted, that each matrix has while it is in use, where less of it rests on a device."""
    arrays = state.arrays(request.config)
    for row in table.rows(request.config, request.rules, arrays, {}):
        pieces = [math.prod(request.rules.mesh[name] for name in names) for names in row.in_use]
        sizes = [n // m for n, m, axis in zip(row.shape, pieces, row.axes, strict=True) if axis != "layers"]
        if row.at_rest != row.in_use and len(sizes) > 1:
            yield row.path, tuple(sorted(sizes))


@pytest.mark.slow  # model/test_loss.py has its cause
def test_no_gradient_is_held_whole_while_layers_are_computed(request_of, cache):
    """When the backward pass of the layers begins, the table's gradient is reduced: nothing of a weight's whole size
    that was made before it is read in it or after it."""
    wanted = request_of("fsdp8", "v5e:2x4")
    (program,) = programs([wanted], cache=str(cache))
    entry = hlo.parse(program.text).entry.instructions
    order = list(entry)
    (loop,) = (i.name for i in entry.values() if i.opcode == "while" and "transpose(jvp(Decoder))" in i.op_name)
    before, after = set(order[: order.index(loop)]), order[order.index(loop) :]
    read = ((made, later) for later in map(entry.get, after) for made in later.operands if made.name in before)
    held = (later if later.opcode == "get-tuple-element" else made for made, later in read)
    sizes = {tuple(sorted(n for n in array.dimensions if n > 1)) for one in held for array in one.shape.arrays}
    whole = dict(whole_matrices(wanted))
    assert len(whole) >= 9 and {path for path, matrix in whole.items() if matrix in sizes} == set()


@pytest.mark.slow
@pytest.mark.parametrize("row", step_times.rows(step_times.TRAINED), ids=lambda row: row.name)
def test_what_was_trained_on_its_hardware_fits(row, tmp_path, monkeypatch):
    """With memory to spare, as the compiler says when it is given too little: that takes seconds."""
    monkeypatch.setenv("GSPMD_LM_CACHE", str(tmp_path))
    chip = target.parse(row.target).chip
    assert foresight.needed_bytes(row) <= foresight.SPARED * chip.usable_hbm_bytes
