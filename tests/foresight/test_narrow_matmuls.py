"""Steps whose operands have 8 bits: their floor, their price, and which estimates of a compiler are believed."""

import dataclasses
import math

import jax
import pytest

from gspmd_lm import config as configs
from gspmd_lm.foresight import hlo
from gspmd_lm.foresight.bounds import training_bounds
from gspmd_lm.foresight.graph import DataflowGraph
from gspmd_lm.foresight.propagation import read_step
from gspmd_lm.foresight.timing import op_time
from gspmd_lm.hardware import target as targets
from gspmd_lm.hardware.chips import CHIPS
from gspmd_lm.model.kernels import grouped_gpu
from gspmd_lm.plan import estimate, timed_ops
from gspmd_lm.sharding import rules_file
from gspmd_lm.sharding.rules import Remat
from gspmd_lm.train import choices, state, step

V5P = CHIPS["v5p"]
ROWS, SEQ, D, LAYERS = 8, 512, 1024, 4
MATRICES = 4 * D * D + 3 * D * 4 * D  # elements of a layer


def config_of(dtype, *more):
    sizes = {"layers": LAYERS, "embed": D, "heads": 8, "kv_heads": 8, "head_dim": 128, "mlp": 4 * D, "context": SEQ,
             "compute_dtype": "bfloat16"}  # fmt: skip
    rows = [f"data.batch={ROWS}", f"data.seq={SEQ}"]
    kind = [f"model.matmul_dtype={dtype}"] if dtype else []
    return configs.load("tiny", [*(f"model.{name}={size}" for name, size in sizes.items()), *rows, *kind, *more])


def floor_of(dtype, chip, *more):
    config, rules = config_of(dtype, *more), rules_file.load("fsdp8").fill(8)
    arrays = state.arrays(config)
    built = step.build_step(config, rules, arrays, jax.devices()[:8])
    recorded = DataflowGraph.from_recorder(state.record_arrays(config, arrays, 1, rules), arrays)
    traced = built.trace_train()
    reading = read_step(traced.jaxpr, (built.abstract_state, built.abstract_batch), traced.out_info)
    return training_bounds(built.task, built.rules, arrays, CHIPS[chip], recorded, reading)


@pytest.mark.long
def test_the_floor_of_a_step():
    """Products of block weights at the rate of their operands, and half the bytes where weights are gathered."""
    usual, found = floor_of(None, "v5p"), floor_of("int8", "v5p")
    assert found.flops == usual.flops  # which MFU compares with the peak of bfloat16
    saved = 6 * MATRICES * LAYERS * ROWS * SEQ / 8 * (1 / 459e12 - 1 / 918e12)
    assert usual.compute_s - found.compute_s == pytest.approx(saved)
    gathered = 2 * MATRICES * LAYERS * 7 / 8  # forward and backward; a byte less for each element
    scales_bytes = usual.communication_bytes - found.communication_bytes - gathered
    assert -0.02 * gathered < scales_bytes < 0


@pytest.mark.long
def test_the_gradients_of_experts_matrices_are_no_products_of_8_bits():
    """Of three products, two are twice as fast."""
    experts = [f"model.{one}" for one in ("experts.count=8", "experts.per_token=2", f"experts.mlp={4 * D}")]
    usual, found = floor_of(None, "v5p", *experts), floor_of("int8", "v5p", *experts)
    products = 6 * 4 * D * D + 4 * 2 * 3 * D * 4 * D  # of a token and layer: in attention all three
    assert usual.compute_s - found.compute_s == pytest.approx(products * LAYERS * ROWS * SEQ / 8 / 918e12)


def test_a_plan_prices_products_by_their_operands(monkeypatch):
    """Those of blocks are twice as fast on v5p."""
    monkeypatch.setitem(timed_ops.FUSED_PASSES, "tpu", 0.0)  # products alone
    where = dataclasses.replace(targets.parse("v5p:2x2x2"), chip=dataclasses.replace(V5P, hbm_bytes_per_s=math.inf))
    rules = dataclasses.replace(rules_file.load("fsdp8").fill(8), remat=Remat("dots"))
    usual_s, found_s = (
        estimate.Estimator(config, where).estimate(choices.settle_rules(config, rules, where.processor)).matmul_s
        for config in (config_of(None), config_of("int8"))
    )
    in_blocks_s = 6 * MATRICES * LAYERS * ROWS * SEQ / 8 / (459e12 * op_time.MATMUL_SHARE["tpu"] / V5P.matmul_slowdown)
    assert usual_s - found_s == pytest.approx(in_blocks_s / 2, rel=0.01)


def matmul_s(config, chip):
    """The estimated seconds of matmuls of a step on one device that keeps all activations."""
    where = dataclasses.replace(targets.parse("h100:1"), chip=chip)
    rules = dataclasses.replace(rules_file.load("single").fill(1), remat=Remat("none"))
    return estimate.Estimator(config, where).estimate(choices.settle_rules(config, rules, where.processor)).matmul_s


def test_a_plan_knows_how_weights_of_8_bits_meet_wider_rows_on_hopper(monkeypatch):
    """A kernel that converts them has half the speed, forward and for the rows. A pass before it reads a byte of each
    number and writes two."""
    monkeypatch.setattr(op_time, "tile_share", lambda *_: 1.0)
    experts = 4
    config = config_of("fp8", f"model.experts.count={experts}", "model.experts.per_token=2", f"model.experts.mlp={D}")
    rows = ROWS * SEQ * 2 / experts
    for bandwidth in (10**15, 2 * 10**12):  # in neither case do bytes take longer than products
        chip = dataclasses.replace(CHIPS["h100"], hbm_bytes_per_s=bandwidth, matmul_slowdown=1.0)
        found_s = []
        for many in (rows, rows + 1):
            monkeypatch.setattr(grouped_gpu, "MANY_ROWS", many)
            found_s.append(matmul_s(config, chip))
        lost_s = 2 * 6 * D * D * rows * experts * LAYERS / (989e12 * op_time.GROUPED_SHARE)
        passes_s = 2 * 3 * 3 * D * D * experts * LAYERS / op_time.hbm_bytes_per_s(chip)
        assert found_s[1] - found_s[0] == pytest.approx(lost_s - passes_s)


@pytest.mark.long
def test_a_plan_knows_that_int8_is_slow_on_hopper():
    for name, slow in (("h100", True), ("h200", True), ("b200", False)):
        usual_s, int8_s, fp8_s = (matmul_s(config_of(dtype), CHIPS[name]) for dtype in (None, "int8", "fp8"))
        assert fp8_s < usual_s and (int8_s > usual_s) == slow


FUSION = """HloModule jit__train

%inner (x: f8e4m3fn[8192,4096], w: f8e4m3fn[4096,16384]) -> bf16[8192,16384] {{
  %x = {dtype}[8192,4096]{{1,0}} parameter(0)
  %w = {dtype}[4096,16384]{{1,0}} parameter(1)
  ROOT %d = bf16[8192,16384]{{1,0}} dot(%x, %w), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
}}

ENTRY %main (x: f8e4m3fn[8192,4096], w: f8e4m3fn[4096,16384]) -> bf16[8192,16384] {{
  %x = {dtype}[8192,4096]{{1,0}} parameter(0)
  %w = {dtype}[4096,16384]{{1,0}} parameter(1)
  ROOT %f = bf16[8192,16384]{{1,0}} fusion(%x, %w), kind=kOutput, calls=%inner, backend_config={{"window_config":{{"estimated_cycles":"{cycles}"}}}}
}}
"""  # noqa: E501


def test_the_largest_number_is_no_estimate():
    text = FUSION.format(dtype="bf16", cycles=2**63 - 1)
    assert hlo.parse(text).entry.root.estimated_cycles is None
    found = op_time.op_time(hlo.parse(text).entry.root, CHIPS["v6e"])
    assert found.seconds == pytest.approx(2 * 8192 * 4096 * 16384 / CHIPS["v6e"].peak_bf16_flops_per_s, rel=0.3)


@pytest.mark.parametrize(
    ("chip", "dtype", "cycles", "believed"),
    [
        ("tpu7x", "bf16", 2_460_000, True),
        ("tpu7x", "f8e4m3fn", 2_530_000, True),
        ("tpu7x", "f8e4m3fn", 64_600_000, False),  # libtpu 0.0.42.1: 26 times as long as in bfloat16
        ("v6e", "s8", 1_760_000, True),
        ("v5p", "s8", 2_140_000, True),
    ],
)
def test_an_estimate_of_a_compiler_that_cannot_be_is_not_believed(chip, dtype, cycles, believed):
    found = op_time.op_time(hlo.parse(FUSION.format(dtype=dtype, cycles=cycles)).entry.root, CHIPS[chip])
    estimated_s = CHIPS[chip].matmul_slowdown * cycles / CHIPS[chip].clock_hz
    assert (found.seconds == pytest.approx(estimated_s)) == believed
    if not believed:
        bf16_s = op_time.op_time(hlo.parse(FUSION.format(dtype="bf16", cycles=2_460_000)).entry.root, CHIPS[chip])
        assert 0.4 * bf16_s.seconds < found.seconds < bf16_s.seconds
