"""Training with operands of 8 bits: what is multiplied in which dtype, what is gathered, and that layouts are alike."""

import dataclasses
import re
from collections import Counter

import numpy as np
import pytest

from benchmarks.collectives import count
from gspmd_lm import config as configs
from gspmd_lm.config import LatentAttention, Lora
from gspmd_lm.foresight import hlo
from gspmd_lm.foresight.compile import CompileRequest, programs
from gspmd_lm.foresight.equations import inner_jaxprs, read_loop
from gspmd_lm.hardware import target as targets
from gspmd_lm.hardware.chips import CHIPS
from gspmd_lm.program.operands import matmul_operands
from gspmd_lm.sharding import rules_file
from gspmd_lm.train import choices, state
from tests.courses import agree, trace_gradients

UNCLIPPED = {"clip_norm": 0.0, "learning_rate": 3.0e-3}
LAYOUTS = ("fsdp8", "tp8", "fsdp2_tp4", "zero1_8", "cp8")
INT8, E4M3, E5M2 = "int8", "float8_e4m3fn", "float8_e5m2"
# What the operands of a product are, forward and in both gradients.
PRODUCTS = {"int8": ((INT8, INT8),) * 3, "fp8": ((E4M3, E4M3), (E4M3, E5M2), (E4M3, E5M2))}
WEIGHTS = 7  # of a block
STEPS = 8
# Where rounding has one operand of 8 bits differ by one, gradients differ by 7e-4. Scales of a shard alone would show.
ONE_ROUNDED = 1e-3


def eight(small, dtype, **more):
    return small(optimizer=UNCLIPPED, matmul_dtype=dtype, **more)


def products(jaxpr):
    """How many products a program has of operands of these dtypes. The body of a loop counts once."""
    dots = (equation for equation in jaxpr.eqns if equation.primitive.name == "dot_general")
    total = Counter(tuple(sorted(operand.aval.dtype.name for operand in dot.invars[:2])) for dot in dots)
    return sum((products(inner) for equation in jaxpr.eqns for inner in inner_jaxprs(equation.params)), total)


LATENT = {
    "attention.latent": LatentAttention(kv_rank=16, q_rank=24, v_head_dim=4), "head_dim": 6, "attention.rope.dim": 2,
}  # fmt: skip
EXPERTS = {"experts.count": 4, "experts.per_token": 2, "experts.mlp": 16, "experts.shared_mlp": 16}


@pytest.mark.parametrize(
    ("dtype", "more"),
    [
        pytest.param("int8", EXPERTS | LATENT, marks=pytest.mark.long),
        ("fp8", {}),
        pytest.param("fp8", EXPERTS, marks=pytest.mark.slow),
    ],
)
def test_operands_have_8_bits_forward_and_in_both_gradients(dtype, more, small, built):
    """Those of attention, of MLPs and of routed experts; the loss, attention itself and routers stay as they are.

    The gradient of an expert's matrix does too. A row finds the scales of its expert in products with zeros and ones.
    """
    made = products(trace_gradients(built(eight(small, dtype, **more), "single")).jaxpr.jaxpr)
    usual = products(trace_gradients(built(small(optimizer=UNCLIPPED, **more), "single")).jaxpr.jaxpr)
    weights = WEIGHTS + 3 if "attention.latent" in more else WEIGHTS
    wanted = Counter(kind for kind in PRODUCTS[dtype] for _ in range(weights))
    wanted[("float32", "float32")] = usual[("float32", "float32")] - 3 * weights
    if "experts.count" in more:
        wanted += Counter({PRODUCTS[dtype][0]: 2 * 3})  # no E5M2
        wanted[("float32", "float32")] += 6 - 2 * 3
        wanted[("bfloat16", "bfloat16")] = 3
    assert made == wanted


def test_adapters_stay_in_the_compute_dtype_and_frozen_weights_have_no_gradient(small, built):
    lora = Lora(rank=2, targets=("wq", "w_down"))
    made = products(trace_gradients(built(eight(small, "int8", lora=lora), "single")).jaxpr.jaxpr)
    assert made[INT8, INT8] == 2 * WEIGHTS


PAIRS = [*((layout, "int8") for layout in LAYOUTS), ("fsdp2_tp4", "fp8"), ("cp8", "fp8")]


@pytest.mark.slow  # by default, below with experts, and in sharding/test_quantised.py
@pytest.mark.parametrize(("layout", "dtype"), PAIRS)
def test_a_layout_changes_nothing(layout, dtype, small, course):
    config = eight(small, dtype)
    alone = course(config, "single", STEPS, unroll=1)
    exact = 1e-5 if (layout, dtype) == ("fsdp8", "int8") else ONE_ROUNDED
    agree(course(config, layout, 2), dataclasses.replace(alone, metrics=alone.metrics[:2]), gradients=exact)


OF_EXPERTS = {"experts.count": 8, "experts.per_token": 2, "experts.mlp": 16}


@pytest.mark.parametrize("layout", ["dp2_tp4", "expert4"])
def test_rules_are_checked_without_devices(layout, small):
    """Where nothing runs, no device has a part of a row: the step of tests is built without this check."""
    rules = rules_file.load(layout)
    arrays, warnings = state.arrays_and_warnings(eight(small, "int8", **OF_EXPERTS), rules.fill(rules.devices), "cpu")
    assert arrays.parameter_count > 0 and not warnings


PARTS_OF_MATRICES = {
    "mesh": {"data": 2, "expert": 2, "tensor": 2},
    "rules": {"batch": ["data", "expert"], "expert": "expert", "mlp": "tensor"},
}
OTHERS = [pytest.param(*one, marks=pytest.mark.slow) for one in (
    ("fsdp_expert8", "int8", OF_EXPERTS), ("fsdp_expert8", "fp8", OF_EXPERTS), ("fsdp8", "int8", OF_EXPERTS),
    (PARTS_OF_MATRICES, "fp8", OF_EXPERTS), ("cp8", "int8", LATENT))]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(("layout", "dtype", "model"), [(PARTS_OF_MATRICES, "int8", OF_EXPERTS), *OTHERS])
def test_a_layout_changes_nothing_of_experts_and_of_latent_attention(layout, dtype, model, small, course):
    config = eight(small, dtype, **model)
    rules = layout if isinstance(layout, str) else rules_file.from_dict(layout, "here.yaml")
    alone = course(config, "single", unroll=1)
    agree(course(config, rules), alone, atol=1e-5 if model is OF_EXPERTS else 1e-4, gradients=ONE_ROUNDED)


@pytest.mark.parametrize("layout", [pytest.param("single", marks=pytest.mark.long), "dp8"])
def test_microbatches_have_operands_of_8_bits(layout, small, built):
    """Of one device, and of replicas of the weights."""
    made = products(trace_gradients(built(eight(small, "int8"), layout, microbatches=4)).jaxpr.jaxpr)
    assert made[INT8, INT8] == 3 * WEIGHTS


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "dtype"), [("dp8", "int8"), ("fsdp2_tp4", "fp8")])
def test_microbatches_change_nothing_between_layouts(layout, dtype, small, course):
    """Replicas of the weights, which add up their gradients before they are reduced, share scales."""
    config = eight(small, dtype)
    alone = course(config, "single", microbatches=4, unroll=1)
    agree(course(config, layout, microbatches=4), alone, gradients=ONE_ROUNDED)


@pytest.mark.long
def test_what_is_gathered_of_the_weights_of_blocks_has_8_bits(small, course):
    """Twice each: forward and backward. The other weights are gathered as before."""
    config = eight(small, "int8")
    model, found = config.model, count(course(config, "fsdp8").program.as_text())
    gathered = Counter()
    for one in found:
        if one.kind == "all-gather":
            gathered[one.dtype] += one.elements * one.times
    attention = 4 * model.embed * model.heads * model.head_dim
    assert gathered["s8"] == 2 * model.layers * (attention + 3 * model.embed * model.mlp)
    unembedding, scales = model.vocab_rows * model.embed, 2 * model.layers * 2 * model.embed
    columns = 2 * model.layers * model.embed * 2  # of wo and w_down, which rest split along them
    assert gathered["f32"] <= unembedding + scales + model.embed + columns


@pytest.mark.slow  # sharding/test_quantised.py compares products and their gradients with those of rounded operands
@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_the_loss_falls_as_in_float32(dtype, small, course):
    plain, found = (course(eight(small, name), "single", STEPS, unroll=1).losses for name in (None, dtype))
    assert plain[-1] < plain[0] - 0.5
    np.testing.assert_allclose(found, plain, rtol=0, atol={"int8": 0.01, "fp8": 0.03}[dtype])
    assert found != plain


def test_evaluation_has_operands_of_8_bits_too(small, built):
    step = built(eight(small, "int8"), "single")
    text = step.lower_evaluate().as_text()
    assert text.count("xi8>, tensor<") >= WEIGHTS


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "dtype", "types"),
    [
        ("v5p:2x2x2", "int8", {("s8", "s8")}),
        ("h100:8", "int8", {("s8", "s8")}),
        ("h100:8", "fp8", {("f8e4m3fn", "f8e4m3fn"), ("f8e4m3fn", "f8e5m2"), ("f8e5m2", "f8e4m3fn")}),
    ],
)
def test_compiled_products_are_of_8_bits(target, dtype, types):
    """For hardware that is not here, where sizes are multiples of a tile. Logits are in bfloat16."""
    sizes = ["layers=2", "embed=256", "mlp=512", "head_dim=64", "heads=8", "kv_heads=8", "compute_dtype=bfloat16"]
    config = configs.load("tiny", [f"model.{one}" for one in (*sizes, f"matmul_dtype={dtype}")])
    where = targets.parse(target)
    rules = choices.settle_rules(config, rules_file.load("fsdp2_tp4").fill(where.devices), where.processor)
    (program,) = programs([CompileRequest(config, rules, where)])
    ran = Counter()
    for one in hlo.parse(program.text).instructions:
        if one.flops and one.opcode != "fusion":
            ran[tuple(operand.shape.arrays[0].dtype for operand in one.operands[:2])] += one.flops * one.executions
    model, tokens = config.model, config.data.batch * config.data.seq
    elements = model.layers * model.embed * (4 * model.heads * model.head_dim + 3 * model.mlp)
    assert set(ran) == {*types, ("bf16", "bf16")}
    assert sum(ran[kind] for kind in types) >= 6 * elements * tokens / where.devices
    logits = 6 * model.vocab_rows * model.embed * tokens / where.devices
    assert logits <= ran["bf16", "bf16"] < 1.2 * logits  # columns are padded for GPUs


def test_all_hardware_is_asked_before_anything_is_compiled():
    from gspmd_lm.errors import InputError

    for dtype, able in (("int8", "v5e v5p v6e a100 h100 h200 b200"), ("fp8", "tpu7x h100 h200 b200")):
        config = configs.load("tiny", [f"model.matmul_dtype={dtype}"])
        for name in ("v4", "v5e", "v5p", "v6e", "tpu7x", "a100", "h100", "h200", "b200"):
            on = dataclasses.replace(targets.parse("cpu:1"), text=name).processor
            on = on._replace(platform="gpu" if name[0] in "ahb" else "tpu", name=name, chip=CHIPS[name])
            if name in able.split():
                choices.settle_rules(config, rules_file.load("single"), on)
            else:
                with pytest.raises(InputError, match=rf"model.matmul_dtype: {dtype}: .* {name} (.|\n)*fix   --set"):
                    choices.settle_rules(config, rules_file.load("single"), on)


def test_int8_on_hopper_is_said_to_be_slower_than_bfloat16():
    def said(target, *sets):
        config = configs.load("tiny", [f"model.{one}" for one in sets])
        return matmul_operands(config, rules_file.load("single"), targets.parse(target).processor)

    slower = "measured to be slower than with bfloat16"
    for target, slow in (
        ("h100:8", True),
        ("h200:1", True),
        ("b200:1", False),
        ("a100:1", False),
        ("v5p:2x2x1", False),
    ):
        text = said(target, "matmul_dtype=int8")
        assert (slower in text) == slow == text.endswith("fix --set model.matmul_dtype=fp8")
    assert said("h100:8", "matmul_dtype=fp8").endswith("MFU is of the bf16 peak")
    assert slower not in said("h100:8", "matmul_dtype=int8", "weight_dtype=int8")  # fp8 does not go with it
    for dtype in ("int8", "fp8"):  # of experts, neither is faster
        told = said("h100:8", f"matmul_dtype={dtype}", "experts.count=4", "experts.per_token=2")
        assert re.search(r"a train step of experts took \d% longer than with bfloat16$", told)


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["int8", pytest.param("fp8", marks=pytest.mark.slow)])
def test_what_dots_keeps_is_as_wide_as_activations(dtype, small, built):
    """Not the sums of int32, nor float32 where activations are bfloat16; and no product is computed again."""
    kept = {}
    for name in (None, dtype):
        config = eight(small, name, compute_dtype="bfloat16", matmul_precision="default", dropout=0.1)
        step = built(config, rules_file.from_dict({"mesh": {"data": 1}, "remat": "dots"}, "here.yaml"))
        program = trace_gradients(step).jaxpr.jaxpr
        kept[name] = sum(products(program).values()), stacked_bytes(program, config.model.layers)
    assert kept[dtype][0] == kept[None][0]
    assert kept[dtype][1] < 1.1 * kept[None][1]


def stacked_bytes(jaxpr, layers):
    """The bytes of what loops over the layers stack up, gradients aside."""
    loops = [equation for equation in jaxpr.eqns if equation.primitive.name == "scan"]
    own = 0
    for loop in loops:
        stacked = loop.outvars[read_loop(loop).carried :]
        own += sum(var.aval.size * var.aval.dtype.itemsize for var in stacked if not loop.params["reverse"])
    return own + sum(stacked_bytes(inner, layers) for equation in jaxpr.eqns for inner in inner_jaxprs(equation.params))
