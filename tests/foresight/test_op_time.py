# ruff: noqa: E501  a program's line is one line
"""Kernels cost what they say, what nobody knows is told, and products of narrow numbers run at the rate of their chip."""

import dataclasses
import json
import math

import jax
import pytest
import sample
from saved_programs import saved

from gspmd_lm import config as configs
from gspmd_lm.config import with_values
from gspmd_lm.foresight import hlo
from gspmd_lm.foresight.timing import op_time, predict
from gspmd_lm.hardware.chips import CHIPS
from gspmd_lm.model.kernels import grouped
from gspmd_lm.model.kernels.attention import attend
from gspmd_lm.units import bits

V5E, V5P, V6E, H100 = (CHIPS[name] for name in ("v5e", "v5p", "v6e", "h100"))
X, W, COUNTS = "bf16[4096,1024]{1,0}", "bf16[8,1024,2048]{2,1,0}", "s32[8]{0}"


def called(
    estimate="",
    target="tpu_custom_call",
    x=X,
    w=W,
    op="jit(f)/jvp(D)/layers/of.layers.mlp/mine",
    fused=False,
    told="",
):
    """A program of one custom call with two factors, which may stand in a fusion. `told` is the call's metadata."""
    told = f", frontend_attributes={{kernel_metadata={told}}}" if told else ""
    config = f', backend_config={{"custom_call_config":{{"body":"","cost_estimate":{estimate}}}}}' if estimate else ""
    given = f"  %g = {COUNTS} parameter(0)\n  %x = {x} parameter(1)\n  %w = {w} parameter(2)\n"
    shape = "bf16[4096,2048]{1,0}"
    call = f'  ROOT %c = {shape} custom-call(%g, %x, %w), custom_call_target="{target}", metadata={{op_name="{op}"}}{told}{config}\n'
    body = f"(g: s32[8]) -> f32[] {{\n{given}{call}}}\n"
    if not fused:
        return hlo.parse(f"HloModule jit__train\n\nENTRY %main {body}")
    outside = (
        f'{given}  ROOT %f = {shape} fusion(%g, %x, %w), kind=kCustom, calls=%inner, metadata={{op_name="{op}"}}\n'
    )
    return hlo.parse(f"HloModule jit__train\n\n%inner {body}\nENTRY %main (g: s32[8]) -> f32[] {{\n{outside}}}\n")


def price(module, chip=V5E):
    return op_time.op_time(module.entry.root, chip)


def estimate(flops, bytes_accessed):
    return f'{{"flops":"{flops}","transcendentals":"7","bytes_accessed":"{bytes_accessed}"}}'


def alone(module, chip, least_flops=0.0):
    """What is predicted for a program of one device."""
    return predict.predict(
        module, chip, sample.network(chip, [(0, 0, 0)], [0], [0], [1], ["data"]), 1.0, 1.0, least_flops=least_flops
    )


@pytest.mark.parametrize("fused", [False, True])
def test_a_kernel_takes_as_long_as_it_says(fused):
    busy = price(called(estimate(10**12, 8), fused=fused))
    assert busy == op_time.OpTime(pytest.approx(1e12 / (op_time.MATMUL_SHARE["tpu"] * 197e12)), "matmul")
    moving = price(called(estimate(8, 10**9), fused=fused))
    assert moving.seconds == pytest.approx(1e9 / (op_time.HBM_SHARE["tpu"] * 819e9))
    copying = price(called(estimate(0, 10**9), fused=fused))
    assert copying == op_time.OpTime(pytest.approx(moving.seconds), "other")


def test_a_kernel_is_as_slow_as_matmuls_of_its_chip_are():
    module = called(estimate(10**12, 8))
    slow = V5P.matmul_slowdown * 1e12 / (op_time.MATMUL_SHARE["tpu"] * 459e12)
    assert price(module, V5P).seconds == pytest.approx(slow) and V5P.matmul_slowdown > 1
    on_gpu = price(called(estimate(10**12, 8), "__gpu$xla.gpu.triton"), H100)
    busy_s = H100.matmul_slowdown * 1e12 / (op_time.GROUPED_SHARE * 989e12)
    assert on_gpu.seconds == pytest.approx(busy_s + op_time.LAUNCH_S["gpu"])


@pytest.mark.parametrize(("x", "w", "faster"), [("s8", "s8", 393 / 197), ("s8", "bf16", 1), ("f32", "f32", 0.5)])
def test_a_kernel_multiplies_at_the_rate_of_its_wider_factor(x, w, faster):
    found = price(called(estimate(10**12, 8), x=X.replace("bf16", x), w=W.replace("bf16", w)))
    assert found.seconds == pytest.approx(price(called(estimate(10**12, 8))).seconds / faster)


@pytest.mark.parametrize("fused", [False, True])
def test_a_kernel_that_says_nothing_takes_its_bytes_at_least_and_is_told(fused):
    module = called(target="Mystery", fused=fused)
    found = price(module)
    moved = 2 * (4096 * 1024 + 8 * 1024 * 2048 + 4096 * 2048) + 4 * 8
    if not fused:
        assert found.seconds == pytest.approx(moved / (op_time.HBM_SHARE["tpu"] * 819e9))
    assert found.unknown == "custom-call Mystery"
    assert list(alone(module, V5E).unpriced) == ["custom-call Mystery at layers.mlp"]


@pytest.mark.parametrize("target", ["ZeroCrop", "X64SplitLow", "X64Combine"])  # the parts of complex numbers
def test_a_call_of_the_compiler_that_only_moves_takes_its_bytes(target):
    moved = 2 * (4096 * 1024 + 8 * 1024 * 2048 + 4096 * 2048) + 4 * 8
    assert price(called(target=target)) == op_time.OpTime(
        pytest.approx(moved / (op_time.HBM_SHARE["tpu"] * 819e9)), "other"
    )


def test_kernels_and_products_in_one_fusion_add_up():
    both = """%inner (x: bf16[1024,1024]) -> bf16[1024,1024] {
  %x = bf16[1024,1024]{1,0} parameter(0)
  %k = bf16[1024,1024]{1,0} custom-call(%x), custom_call_target="KERNEL", backend_config={"custom_call_config":{"cost_estimate":{"flops":"1000000000000"}}}
  ROOT %d = bf16[1024,1024]{1,0} dot(%k, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY %main (x: bf16[1024,1024]) -> bf16[1024,1024] {
  %x = bf16[1024,1024]{1,0} parameter(0)
  ROOT %f = bf16[1024,1024]{1,0} fusion(%x), kind=kCustom, calls=%inner
}
"""
    rate = op_time.MATMUL_SHARE["tpu"] * 197e12
    found = price(hlo.parse(f"HloModule jit__train\n\n{both.replace('KERNEL', 'tpu_custom_call')}"))
    assert found == op_time.OpTime(pytest.approx((1e12 + 2 * 1024**3) / rate), "matmul")
    alone = price(hlo.parse(f"HloModule jit__train\n\n{both.replace('KERNEL', 'ZeroCrop')}"))
    assert alone.kind == "matmul" and alone.seconds == pytest.approx(2 * 1024**3 / rate) and not alone.unknown


def test_an_estimate_of_nothing_is_none():
    assert price(called(estimate(0, 0))).unknown == "custom-call tpu_custom_call"


def test_ragged_dot_costs_its_products():
    """8 experts, 4096 rows of 1024 to 2048, and back: forward and one of two gradients are kernels of XLA."""
    module = saved("tpu_ragged_dot")
    kernels = [i for i in module.entry.instructions.values() if i.custom_call_target == "tpu_custom_call"]
    products = [i for i in kernels if "metadata" not in i.name]
    assert len(kernels) == 3 and len(products) == 2
    operations, moved = 2 * 4096 * 1024 * 2048, 2 * (4096 * 1024 + 8 * 1024 * 2048 + 4096 * 2048) + 4 * 8
    for product in products:
        assert product.cost_estimate == (operations, moved)
        assert op_time.op_time(product, V5E) == op_time.OpTime(
            pytest.approx(operations / (op_time.MATMUL_SHARE["tpu"] * 197e12)), "matmul"
        )
    found = alone(module, V5E, least_flops=3 * operations)
    assert found.unpriced == {} and found.missing_flops_share == 0.0
    assert found.matmul_s > 2 * operations / 197e12


def test_of_a_buffer_for_the_worst_case_only_what_balanced_routing_fills_is_multiplied_and_sent():
    """4 x 4096 rows to 8 experts over expert=4 and back, forward and backward: a device's buffers have 16384 rows."""
    module = saved("tpu_ragged_exchange")
    operations, sent = 2 * 4096 * 1024 * 2048, 3 / 4 * 2 * 4096 * 1024
    kernels = [i for i in module.entry.instructions.values() if i.custom_call_target == "tpu_custom_call"]
    assert len(kernels) == 6 and all(call.cost_estimate[0] == 4 * operations for call in kernels)
    for call in kernels:
        computed = operations * (4096 + 256) / 4096  # a device's second expert begins in a tile of its first one
        seconds = V5P.matmul_slowdown * computed / (op_time.MATMUL_SHARE["tpu"] * 459e12)
        assert op_time.op_time(call, V5P) == op_time.OpTime(pytest.approx(seconds), "matmul")
    moved = [e for instruction in module.operations for e in instruction.collectives]
    there_and_back = [one for one in moved if one.kind == "ragged-all-to-all"]
    assert [one.sent_bytes for one in there_and_back] == [sent] * 4
    links = sample.network(V5P, [(0, 0, 0), (1, 0, 0), (0, 1, 0), (1, 1, 0)], [0] * 4, [0] * 4, [4], ["expert"])
    found = predict.predict(module, V5P, links, 6 * operations, 4096, least_flops=6 * operations)
    assert found.unpriced_share < 1e-4 and found.missing_flops_share == 0.0  # sorts of the order alone
    alike = links.time_s("all-to-all", 2 * 4096 * 1024, there_and_back[0].groups)
    assert found.communication_s == pytest.approx(4 * alike, rel=0.2)  # beside sizes and the loss


def test_rows_that_fill_the_last_tile_of_a_buffer_are_not_routed():
    """A quarter of 4096 rows is filled; 128 more are those of a block of zeros, and twice as many are another buffer."""
    op = "jit(f)/jvp(D)/layers/of.layers.mlp.w_up/grouped/pallas_call"
    for rows, filled in ((4096, 1024), (4224, 1024), (8192, 8192)):
        module = called(target="__gpu$xla.gpu.triton", x=f"bf16[{rows},1024]", op=op)
        vars(module)["buffers"] = {4096: 0.25}
        assert op_time.kernel_work(module.entry.root)[0] == pytest.approx(2 * filled * 1024 * 2048)


@pytest.mark.parametrize("w", ["[8,6144,2048]", "[8,2048,6144]"])  # or as its transpose
def test_on_a_tpu_a_grouped_matmul_costs_what_its_kernel_computes_and_reads(w):
    op = "jit(f)/jvp(D)/layers/of.layers.mlp.w_up/grouped/pallas_call"
    module = called(estimate(operations := 2 * 4096 * 6144 * 2048, 10**12), x="bf16[4096,6144]", w=f"bf16{w}", op=op)
    share, read = grouped.work(4096, 8, 6144, 2048, 2, "TPU v5p")
    assert share == 4096 / (4096 + 7 * 512)
    multiplying = V5P.matmul_slowdown * operations / share / (op_time.MATMUL_SHARE["tpu"] * 459e12)
    assert price(module, V5P).seconds == pytest.approx(multiplying)
    slow = dataclasses.replace(V5P, hbm_bytes_per_s=1e9)
    assert price(module, slow).seconds == pytest.approx(read / (op_time.HBM_SHARE["tpu"] * 1e9))


@pytest.mark.parametrize("told", [r'{"a":"{\"tile_m\": 512, \"tile_k\": 1024, \"tile_n\": 1536}"}',
                                  '{"tiles.tile_m":512,"tiles.tile_k":1024,"tiles.tile_n":1536}'])  # fmt: skip
def test_a_grouped_kernel_of_another_program_has_the_tile_that_it_says(told):
    """8 experts, 4096 rows of 1024 to 2048 columns, in tiles of 512 rows and 1536 columns."""
    operations = 2 * 4096 * 1024 * 2048
    computed = operations * (4096 + 7 * 512) / 4096 * 3072 / 2048
    seconds = V5P.matmul_slowdown * computed / (op_time.MATMUL_SHARE["tpu"] * 459e12)
    assert price(called(estimate(operations, 8), told=told), V5P).seconds == pytest.approx(seconds)


@pytest.mark.parametrize(("shapes", "tile", "filled"), [
    (("[4096,1024]", "[8,1024,2048]", "[4096,2048]"), (128, 256), 1),
    (("[4096,1024]", "[4096,2048]", "[8,1024,2048]"), (128, 256), 1),
    (("[512,1024]", "[8,1024,2048]", "[512,2048]"), (16, 256), 1),
    (("[4096,1024]", "[8,1024,1984]", "[4096,1984]"), (128, 256), 1984 / 2048),
    (("[4096,992]", "[4096,1984]", "[8,992,1984]"), (128, 256), 992 / 1024 * 1984 / 2048),
])  # fmt: skip
def test_a_grouped_matmul_without_an_estimate_is_priced_by_its_shapes(shapes, tile, filled):
    x, w, out = (f"bf16{shape}" for shape in shapes)
    op = "jit(f)/jvp(D)/layers/of.layers.mlp.w_up/grouped/pallas_call"
    text = f"""ENTRY %main (g: s32[8]) -> f32[] {{
  %g = s32[8] parameter(0)
  %x = {x} parameter(1)
  %w = {w} parameter(2)
  ROOT %c = {out} custom-call(%g, %x, %w), custom_call_target="__gpu$xla.gpu.triton", metadata={{op_name="{op}"}}
}}"""
    rows, inner = json.loads(shapes[0])
    columns = json.loads(shapes[2])[-1]
    # Small tiles read what they multiply more often from shared memory, and the last ones may be filled in part.
    speed = filled * (1 / 128 + 1 / 256) / (1 / tile[0] + 1 / tile[1])
    rate = op_time.GROUPED_SHARE * speed / H100.matmul_slowdown * 989e12
    found = price(hlo.parse(f"HloModule jit__train\n\n{text}"), H100)
    assert found == op_time.OpTime(pytest.approx(2 * rows * inner * columns / rate + op_time.LAUNCH_S["gpu"]), "matmul")
    assert price(hlo.parse(f"HloModule jit__train\n\n{text.replace('/grouped', '')}"), H100).unknown


@pytest.mark.parametrize("chip", [H100, V5P])
@pytest.mark.parametrize("operands", ["bf16[8,128,256]", "f32[] bf16[8,128,256]", "bf16[4096,128] bf16[8,128,256]"])
def test_a_kernel_that_only_has_the_name_of_a_grouped_matmul_is_priced_all_the_same(chip, operands):
    shapes = operands.split()
    lines = "\n".join(f"  %x.{n} = {shape} parameter({n})" for n, shape in enumerate(shapes))
    names = ", ".join(f"%x.{n}" for n in range(len(shapes)))
    text = f"""HloModule jit__train

ENTRY %main () -> bf16[8,128,256] {{
{lines}
  ROOT %c = bf16[8,128,256] custom-call({names}), custom_call_target="other", metadata={{op_name="a/grouped/pallas_call"}}
}}"""
    assert price(hlo.parse(text), chip).seconds >= 0


@pytest.mark.parametrize(("chip", "dtype", "slowdown"), [
    ("h100", "f8e4m3fn", op_time.CONVERTING_SLOWDOWN), ("h200", "s8", op_time.CONVERTING_SLOWDOWN),
    ("b200", "f8e4m3fn", 1), ("a100", "s8", 1)])  # fmt: skip
def test_on_hopper_a_grouped_kernel_that_converts_weights_is_slow(chip, dtype, slowdown):
    """The scales of the outputs of experts have more numbers than the rows here, and are not multiplied."""
    op = "jit(f)/jvp(D)/layers/of.layers.mlp.w_up/grouped/pallas_call"

    fast = dataclasses.replace(CHIPS[chip], hbm_bytes_per_s=math.inf)

    def seconds(of_weights):
        text = f"""HloModule jit__train

ENTRY %main (s: f32[8388608]) -> f32[] {{
  %s = f32[8388608] parameter(0)
  %x = bf16[4096,1024] parameter(1)
  %w = {of_weights}[8,1024,2048] parameter(2)
  ROOT %c = bf16[4096,2048] custom-call(%x, %w, %s), custom_call_target="__gpu$xla.gpu.triton", metadata={{op_name="{op}"}}
}}"""
        return price(hlo.parse(text), fast).seconds - op_time.LAUNCH_S["gpu"]

    assert seconds(dtype) == pytest.approx(slowdown * seconds("bf16"))


def test_products_that_no_priced_operation_makes_are_missed():
    module = called(estimate(10**12, 8))
    assert alone(module, V5E, least_flops=1e12).missing_flops_share == 0.0
    assert alone(module, V5E, least_flops=4e12).missing_flops_share == pytest.approx(0.75)
    again = called(estimate(10**12, 8), op="jit(f)/transpose(jvp(D))/rematted_computation/layers/of.layers.mlp/mine")
    assert alone(again, V5E, least_flops=4e12).missing_flops_share == 1.0


def product(left, right, fast=False):
    """A program of one matmul of 1024 x 1024."""
    shapes = [f"{dtype}[1024,1024]{{1,0}}" for dtype in (left, right, "f32")]
    given = f"  %x = {shapes[0]} parameter(0)\n  %w = {shapes[1]} parameter(1)\n"
    dot = f"  ROOT %d = {shapes[2]} dot(%x, %w), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}\n"
    return hlo.parse(f"HloModule jit__train\n\nENTRY %main (x: f32[]) -> f32[] {{\n{given}{dot}}}\n")


@pytest.mark.parametrize(
    ("chip", "dtype", "tera_per_s"),
    [
        ("v4", "s8", 275), ("v4", "f8e4m3fn", 275),
        ("v5e", "s8", 393), ("v5e", "f8e4m3fn", 197), ("v5e", "s4", 393),
        ("v5p", "s8", 918), ("v5p", "f8e5m2", 459),
        ("v6e", "s8", 1836), ("v6e", "f8e4m3fn", 918),
        ("tpu7x", "f8e4m3fn", 2307), ("tpu7x", "s8", 1153.5),
        ("a100", "s8", 624), ("a100", "f8e4m3fn", 312),
        ("h100", "s8", 1979), ("h100", "f8e5m2", 1979), ("h100", "s4", 1979),
        ("h200", "s8", 1979), ("h200", "f8e4m3fn", 1979),
        ("b200", "s8", 4500), ("b200", "f8e4m3fn", 4500), ("b200", "f4e2m1fn", 4500),
        *((name, "bf16", chip.peak_bf16_flops_per_s / 1e12) for name, chip in CHIPS.items()),
        *(
            (name, "f32", (chip.peak_f32_flops_per_s or chip.peak_bf16_flops_per_s / 2) / 1e12)
            for name, chip in CHIPS.items()
        ),
        ("v100", "f16", 125), ("v100", "f32", 15.7), ("t4", "f16", 65), ("l4", "f16", 121),
        ("h200", "f64", 67), ("gb300", "f64", 1.39),
    ],
)  # fmt: skip
def test_narrow_numbers_are_multiplied_at_the_rate_of_the_chip_or_widened(chip, dtype, tera_per_s):
    found = dataclasses.replace(CHIPS[chip], hbm_bytes_per_s=math.inf)
    seconds = price(product(dtype, dtype), found).seconds - op_time.LAUNCH_S[found.platform]
    slow = found.int8_share if dtype in ("s8", "s4") else 0
    share = (slow or op_time.MATMUL_SHARE[found.platform]) / found.matmul_slowdown
    if found.gpu:
        share *= op_time.tile_share(1024**2, 1024 * bits(dtype) / 8, found.gpu.core_count)
    assert seconds == pytest.approx(2 * 1024**3 / (share * tera_per_s * 1e12))


def test_of_two_factors_the_wider_one_decides():
    fast = dataclasses.replace(H100, hbm_bytes_per_s=math.inf)
    narrow, mixed, wide = (
        price(product(one, other), fast).seconds
        for one, other in (("f8e4m3fn", "f8e4m3fn"), ("f8e4m3fn", "bf16"), ("bf16", "bf16"))
    )
    assert narrow < mixed == wide == price(product("bf16", "f8e4m3fn"), fast).seconds
    assert wide == price(product("bf16", "s8"), fast).seconds


def test_matmuls_of_programs_that_offload_are_slower():
    found = {}
    for space in ("", "S(1)", "S(5)"):  # HBM, memory on the chip, the host's
        module = hlo.parse(
            "HloModule jit__train\n\nENTRY %main (x: f32[]) -> f32[] {\n"
            "  %x = bf16[4096,4096]{1,0} parameter(0)\n  %w = bf16[4096,4096]{1,0} parameter(1)\n"
            f"  %h = f32[8]{{0:{space}}} parameter(2)\n"
            "  ROOT %d = bf16[4096,4096]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}\n}\n"
        )
        assert module.offloads == (space == "S(5)")
        found[space] = price(module, V6E).seconds
        assert price(module, V5E).seconds == pytest.approx(2 * 4096**3 / (op_time.MATMUL_SHARE["tpu"] * 197e12))
    assert found["S(1)"] == found[""] < found["S(5)"]
    assert found["S(5)"] == pytest.approx(V6E.offloading_slowdown * found[""])


@pytest.mark.parametrize("changes", [{}, {"attention.softcap": 30.0}])
def test_scores_and_their_softmax_are_attention_forward_and_backward(changes):
    """Whatever the compiler makes of them: an array as large as the scores is no other compute."""
    cfg = with_values(configs.load("tiny").model, changes)
    B, T, N, K, H = 2, 48, cfg.heads, cfg.kv_heads, cfg.head_dim
    q, kv = (jax.ShapeDtypeStruct((B, T, heads, H), "float32") for heads in (N, K))

    def loss(q, k, v):
        return attend(q, k, v, None, cfg).sum()

    module = hlo.parse(jax.jit(jax.grad(loss, (0, 1, 2))).lower(q, kv, kv).compile().as_text())
    priced = [(instruction, op_time.op_time(instruction, V5E)) for instruction in module.operations]
    sizes = {one: max((array.elements for array in one.shape.arrays), default=0) for one, _ in priced}
    large = [(one, found) for one, found in priced if found.seconds and sizes[one] == B * N * T * T]
    assert len(large) >= 3
    assert {one.op_name: found.kind for one, found in large if found.kind != "attention"} == {}


def test_a_product_whose_name_is_lost_is_what_reads_it():
    gemm = 'custom-call(%a, %b), custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["2"],"rhs_contracting_dimensions":["1"],"lhs_batch_dimensions":["0"],"rhs_batch_dimensions":["0"]}}}'
    text = """HloModule jit__train

ENTRY %main (a: bf16[16,64,32]) -> f32[16,64,64] {
  %a = bf16[16,64,32]{2,1,0} parameter(0)
  %b = bf16[16,32,64]{2,1,0} parameter(1)
  %gemm = (f32[16,64,64]{2,1,0}, s8[8]{0}) GEMM
  %get = f32[16,64,64]{2,1,0} get-tuple-element(%gemm), index=0
  ROOT %exp = f32[16,64,64]{2,1,0} exponential(%get), metadata={op_name="jit(f)/jvp(D)/layers/SCOPE/exp"}
}
""".replace("GEMM", gemm)
    for scope, kind in (("attention/kind.attention", "attention"), ("mlp", "matmul")):
        module = hlo.parse(text.replace("SCOPE", scope))
        assert op_time.op_time(module.entry.instructions["gemm"], H100).kind == kind
