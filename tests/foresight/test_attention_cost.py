# ruff: noqa: E501  a program's line is one line
"""Attention kernels cost what the blocks that they visit cost."""

import dataclasses
import math

import pytest

from gspmd_lm.foresight import hlo
from gspmd_lm.foresight.timing import attention, op_time
from gspmd_lm.hardware.chips import CHIPS


def module(call, operands, fused=False):
    """A program of one call, which may stand in a fusion."""
    given = "".join(f"  %p{n} = {shape} parameter({n})\n" for n, shape in enumerate(operands))
    names = ", ".join(f"%p{n}" for n in range(len(operands)))
    body = f"(p: f32[]) -> f32[] {{\n{given}  ROOT %r = {call.replace('ARGS', names)}\n}}\n"
    if not fused:
        return hlo.parse(f"HloModule jit__train\n\nENTRY %main {body}")
    outside = f"{given}  ROOT %f = {call.partition(' custom-call')[0]} fusion({names}), kind=kCustom, calls=%inner\n"
    return hlo.parse(f"HloModule jit__train\n\n%inner {body}\nENTRY %main (p: f32[]) -> f32[] {{\n{outside}}}\n")


def splash(part, blocks, seq=8192, batch=3, heads=32, key_heads=8, size=128, fused=False, split=1, sees="", grid=0):
    """`split`: the devices that share the queries. `grid`: how many blocks of keys each block of queries has."""
    q, k = f"bf16[{batch},{heads},{seq // split},{size}]", f"bf16[{batch},{key_heads},{seq},{size}]"
    block, length = f"s8[1,{blocks // split},{grid or blocks}]", seq // blocks
    sizes = f'\\"block_q_dkv\\": {length}, \\"block_kv_dkv\\": {length}, \\"block_kv_dkv_compute\\": 64'
    if part.startswith("fwd"):
        sizes = f'\\"block_q\\": {length}, \\"block_kv\\": {length}, \\"block_q_dq\\": null, {sizes.replace(str(length), "2048")}'
    told = f'frontend_attributes={{kernel_metadata={{\n"xprof_metadata":"{{{sizes}}}"\n}}}}'
    scope = f"sees.{sees}/" * bool(sees)
    scratch = f"f32[{batch},{seq // blocks},128]"
    results = {
        "fwd_residuals": (scratch, scratch, scratch, q, scratch),
        "dkv_no_residuals": (scratch, scratch, q, k, k),
    }[part]
    return module(
        f'({", ".join(results)}) custom-call(ARGS), custom_call_target="tpu_custom_call", {told}, metadata={{op_name="jit(f)/{scope}splash_mha_{part}/pallas_call"}}',
        (block, block, q, k, k, f"s32[{seq},128]"),
        fused,
    )


def test_splash_counts_visited_blocks_steps_and_rows():
    forward = splash("fwd_residuals", 8)
    operations = attention.flops(forward.entry.root)
    assert operations == 3 * 32 * 2 * 2 * (36 / 64) * 8192**2 * 128
    seconds = attention.kernel_s(forward.entry.root, CHIPS["v6e"])
    cycles = CHIPS["v6e"].splash[128][0]
    assert seconds == pytest.approx(
        96 * (36 * cycles.visited[2] + 64 * cycles.step + 16 * cycles.row) / CHIPS["v6e"].clock_hz
    )


def tokamax(part, block, seq=8192, batch=2, heads=64, key_heads=8, size=128):
    """As MaxText calls it with sa_q_layout=SEQ_MINOR (tokamax 0.0.15): steps are listed, and queries are transposed."""
    q, k, out = (
        f"bf16[{batch},{shape}]"
        for shape in (f"{heads},{size},{seq}", f"{key_heads},{seq},{size}", f"{heads},{seq},{size}")
    )
    n, sums = seq // block, f"f32[{batch},{heads},{seq},128]"
    if part.startswith("fwd"):
        results, sizes, listed = (out, sums, sums), f'\\"block_q\\": {block}, \\"block_kv\\": {block}', n * (n + 1) // 2
        integers = ("s32[]", f"s8[{listed}]", f"s8[{listed}]", f"s32[{listed}]")
    else:
        results, sizes = (
            (f"bf16[{batch},{n},{heads},{seq},{size}]", k, k),
            f'\\"block_q_dkv\\": {block}, \\"block_kv_dkv\\": {block}',
        )
        integers = (f"s8[{n * n}]",)
    told = f'frontend_attributes={{kernel_metadata={{\n"xprof_metadata":"{{{sizes}, \\"q_layout\\": 2, \\"k_layout\\": 1, \\"v_layout\\": 1}}"\n}}}}'
    return module(
        f'({", ".join(results)}) custom-call(ARGS), custom_call_target="tpu_custom_call", {told}, metadata={{op_name="jit(f)/splash_mha_{part}/pallas_call"}}',
        (*integers, q, k, k, f"s32[{batch},{seq},128]"),
    )


@pytest.mark.parametrize(("part", "steps"), [("fwd_segmented_residuals", 36), ("dkv_segmented_no_residuals", 64)])
def test_tokamax_visits_what_jax_does_and_takes_the_steps_that_it_lists(part, steps):
    found = attention._splash(tokamax(part, 1024).entry.root)
    name = "fwd_residuals" if steps == 36 else "dkv_no_residuals"
    usual = attention._splash(splash(name, 8, batch=2, heads=64, grid=8).entry.root)
    # The forward kernel of `splash` says other sizes of blocks.
    assert found == dataclasses.replace(usual, blocks=(8, 8), rows=1024, columns=1024, steps=steps)
    assert found.size == 128 and (found.matmuls == 5 or steps == 36)


@pytest.mark.parametrize(("chip", "cores"), [("v4", 2), ("v5e", 1), ("v5p", 2), ("v6e", 1), ("tpu7x", 1)])
def test_the_cores_of_a_device_share_the_heads(chip, cores):
    forward = splash("fwd_residuals", 16)
    cycles = CHIPS[chip].splash[128][0]
    of_one_core = 96 * (136 * cycles.visited[1] + 256 * cycles.step + 16 * cycles.row) / CHIPS[chip].clock_hz
    assert attention.kernel_s(forward.entry.root, CHIPS[chip]) == pytest.approx(of_one_core / cores)


@pytest.mark.parametrize("part", ["fwd_residuals", "dkv_no_residuals"])
def test_of_a_split_sequence_a_device_computes_its_share_of_the_causal_half(part):
    whole, share = splash(part, 16), splash(part, 16, split=4)
    assert attention.flops(share.entry.root) == attention.flops(whole.entry.root) / 4
    seconds, own = (attention.kernel_s(m.entry.root, CHIPS["v5p"]) for m in (whole, share))
    assert own == pytest.approx(seconds / 4)


def test_a_backward_pass_in_pieces_visits_as_much_as_in_one():
    """Keys of 8192 tokens, of which the backward pass takes a quarter at a time."""
    whole = splash("dkv_no_residuals", 16)
    call = attention._splash(whole.entry.root)
    assert call.visited_blocks == 136 and call.length == 8192
    piece = dataclasses.replace(call, blocks=(16, 4))
    assert 4 * piece.visited_blocks == call.visited_blocks


def test_where_nothing_is_masked_all_blocks_are_visited():
    causal, whole = splash("fwd_residuals", 16), splash("fwd_residuals", 16, sees="all")
    assert attention.flops(whole.entry.root) == 256 / 136 * attention.flops(causal.entry.root)


@pytest.mark.parametrize(("part", "grid"), [("fwd_residuals", 3), ("dkv_no_residuals", 0)])
def test_a_window_leaves_few_blocks(part, grid):
    """1024 keys in blocks of 512: a block of queries visits its own block, the one before it, and the rest of a third."""
    windowed = splash(part, 16, sees="1024", grid=grid)
    visited = (1 + 2 + 14 * 3) / 136
    causal = splash(part, 16)
    operations = attention.flops(causal.entry.root)
    assert attention.flops(windowed.entry.root) == pytest.approx(visited * operations)
    cycles = CHIPS["v6e"].splash[128][part.startswith("dkv")]
    steps = 16 * (grid or 16)
    assert attention.kernel_s(windowed.entry.root, CHIPS["v6e"]) == pytest.approx(
        96 * (45 * cycles.visited[1] + steps * cycles.step + 16 * cycles.row) / CHIPS["v6e"].clock_hz
    )


def test_a_kernel_in_a_fusion_is_priced_as_itself():
    alone, fused = splash("fwd_residuals", 8), splash("fwd_residuals", 8, fused=True)
    assert fused.entry.root.opcode == "fusion"
    prices_s = [op_time.op_time(program.entry.root, CHIPS["v6e"]) for program in (alone, fused)]
    assert prices_s[0] == prices_s[1] and prices_s[0].kind == "attention"


@pytest.mark.parametrize("chip", [name for name, chip in CHIPS.items() if chip.splash])
@pytest.mark.parametrize("size", [64, 128, 256])
def test_shares_of_peak_are_possible_ones(chip, size):
    shares = {}
    for part in ("fwd_residuals", "dkv_no_residuals"):
        program = splash(part, 16, size=size)
        call = program.entry.root
        seconds = attention.kernel_s(call, CHIPS[chip])
        shares[part] = attention.flops(call) / seconds / CHIPS[chip].peak_bf16_flops_per_s
    assert 0.05 < shares["fwd_residuals"] < shares["dkv_no_residuals"] < 1.0, shares


def test_smaller_blocks_leave_more_and_cost_more():
    seconds = [
        attention.kernel_s(p.entry.root, CHIPS["v5p"]) for p in (splash("fwd_residuals", n) for n in (8, 16, 32))
    ]
    assert seconds[0] < seconds[2] and seconds[1] < seconds[2]


def cudnn(length, size=128, mask="CAUSAL", backward=False, window=0, documents=1):
    """A program of one call of cuDNN's attention: 2 rows of 8 heads."""
    q = f"bf16[2,{length},8,{size}]"
    config = f'{{"cudnn_fmha_backend_config":{{"intermediate_tensor_shape":{{"dimensions":["2","8","{length}","{length}"]}},"mask_type":"{mask}","sliding_window_length":{window},"max_seg_per_batch":{documents}}}}}'
    target = "__cudnn$fmhaSoftmax" + "Backward" * backward
    return module(f'({q}, u8[0]) custom-call(ARGS), custom_call_target="{target}", backend_config={config}', (q, q, q))


def test_cudnn_works_in_as_much_memory_as_it_was_seen_to_take():
    """2 rows of 8 heads, as the backward pass of GPT-2 124M asked for 51,118,336 bytes for 16 rows of 12 heads."""
    (call,) = cudnn(1024, 64, backward=True).kernels
    assert attention.workspace_bytes(call) == pytest.approx(51_118_336 * 2 * 8 / 16 / 12, rel=1e-3)
    (call,) = cudnn(264, mask="NO_MASK", backward=True, documents=32).kernels
    assert attention.workspace_bytes(call) == pytest.approx(13_392_151_552 * 2 * 8 / 64 / 48, rel=1e-3)
    (call,) = cudnn(264).kernels
    assert attention.workspace_bytes(call) == 0


def reached(program, chip="h100"):
    """TFLOP/s of the only call of a program, were the chip not slowed down in long runs."""
    call, found = program.entry.root, CHIPS[chip]
    seconds = attention.kernel_s(call, found)
    return found.matmul_slowdown * attention.flops(call) / seconds / 1e12


@pytest.mark.parametrize(("mask", "half"), [("CAUSAL", 0.5), ("NO_MASK", 1.0)])
def test_cudnn_reaches_what_was_published_for_its_length(mask, half):
    program = cudnn(4096, mask=mask)
    assert attention.flops(program.entry.root) == half * 4 * 2 * 8 * 4096**2 * 128
    assert reached(program) == pytest.approx(518 if mask == "CAUSAL" else 609)
    back = cudnn(4096, mask=mask, backward=True)
    assert reached(back) == pytest.approx(499 * (518 / 609 if mask == "CAUSAL" else 1.0))


def test_between_the_published_lengths_cudnn_is_in_between_and_beyond_them_as_at_their_ends():
    rates = [reached(cudnn(length)) for length in (256, 512, 1024, 1408, 2048, 16384, 65536)]
    assert rates[0] == rates[1] == pytest.approx(315) and rates[-1] == rates[-2] == pytest.approx(539)
    share = math.log2(1408 / 1024)
    assert rates[3] == pytest.approx(rates[2] * (1 - share) + rates[4] * share, rel=1e-3)


def test_cudnn_computes_whole_tiles():
    assert reached(cudnn(264)) == pytest.approx(reached(cudnn(384)) * (264 / 384) ** 2)


@pytest.mark.parametrize("backward", [False, True])
def test_a_window_takes_its_scores_as_fast_as_rows_of_its_length(backward):
    program, short = cudnn(4096, window=1024, backward=backward), cudnn(1024, backward=backward)
    scores = 1024 * 4096 - 1024**2 / 2
    half = attention.flops(short.entry.root) / (1024**2 / 2)
    assert attention.flops(program.entry.root) == pytest.approx(half * scores)
    assert reached(program) == pytest.approx(reached(short))
    assert reached(cudnn(4096, window=8192)) == reached(cudnn(4096))


def test_packed_documents_cost_what_whole_rows_do():
    packed, whole = cudnn(4096, mask="PADDING_CAUSAL", documents=32), cudnn(4096)
    assert attention.kernel_s(packed.entry.root, CHIPS["h100"]) == attention.kernel_s(whole.entry.root, CHIPS["h100"])
    assert attention.has_documents(packed.entry.root) and not attention.has_documents(whole.entry.root)


def test_small_heads_and_other_chips_reach_their_shares():
    assert reached(cudnn(4096, size=64)) == pytest.approx(0.67 * 518)
    assert reached(cudnn(4096), "a100") == pytest.approx(518 * 312 / 989)
    slow, fast = CHIPS["h100"], dataclasses.replace(CHIPS["h100"], matmul_slowdown=1.0)
    program = cudnn(4096)
    one, other = (attention.kernel_s(program.entry.root, chip) for chip in (slow, fast))
    assert one == pytest.approx(slow.matmul_slowdown * other)


def test_other_calls_have_no_price_here():
    program = module(
        'f32[4] custom-call(ARGS), custom_call_target="tpu_custom_call", metadata={op_name="jit(f)/mine/pallas_call"}',
        ("f32[4]",),
    )
    assert attention.kernel_s(program.entry.root, CHIPS["v6e"]) is None and attention.flops(program.entry.root) == 0
