"""Layers that compute their rows in parts: nothing changes but the order of the work."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from benchmarks.collectives import count
from gspmd_lm import config
from gspmd_lm.sharding import rules_file
from gspmd_lm.sharding.interleave import in_turns
from gspmd_lm.train import state, step
from tests.courses import begun, trace_gradients
from tests.quick import QUICK

SIZES = ("model.layers=2", "model.embed=32", "model.heads=4", "model.kv_heads=4", "model.head_dim=8", "model.mlp=64",
         "model.vocab=64", "model.context=16", "data.seq=16", "data.batch=16", "model.matmul_precision=highest",
         "data.packing=documents", "model.dropout=0.1")  # fmt: skip


def trained(layout, parts, *sets):
    """The gradients of a step, the bytes that its program sends, and how many products and barriers its trace has."""
    cfg = config.load("tiny", [*SIZES, *sets])
    changes = {"interleave": parts, "compiler_options": {"cpu": QUICK}, "unroll": 1}
    rules = dataclasses.replace(rules_file.load(layout), **changes)
    rules = rules.fill(1 if layout == "none" else 8)
    built = step.build_step(cfg, rules, state.arrays(cfg), jax.devices()[: rules.devices])
    traced, rng = trace_gradients(built), np.random.default_rng(0)
    program, text = built.compile(traced.lower()), str(traced.jaxpr)
    tokens = rng.integers(0, 64, (16, 17), dtype=np.int32)
    segments = np.cumsum(rng.random((16, 16)) < 0.2, axis=1, dtype=np.int32)
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "segment_ids": segments, "row": np.arange(16),
             "positions": np.broadcast_to(np.arange(16, dtype=np.int32), (16, 16))}  # fmt: skip
    batch = {name: jax.device_put(batch[name].astype(np.int32), where) for name, where in built.batch_shardings.items()}
    _, gradients = program(begun(built), batch)
    sent = sum(one.ring_bytes for one in count(program.as_text()))
    return jax.device_get(gradients), sent, text.count("dot_general"), text.count("optimization_barrier")


@pytest.mark.long
@pytest.mark.parametrize(
    ("layout", "parts", "sets"),
    [
        ("fsdp2_tp4", 2, ()),
        pytest.param("none", 4, (), marks=pytest.mark.slow),
        pytest.param("fsdp2_tp4", 4, ("model.layer_pattern=[sliding, full]", "model.attention.window=4"),
                     marks=pytest.mark.slow),
        pytest.param("fsdp2_tp4", 2, ("model.matmul_dtype=int8",), marks=pytest.mark.slow),
        pytest.param("fsdp8", 2, (), marks=pytest.mark.slow),
        pytest.param("cp8", 2, (), marks=pytest.mark.slow),
        pytest.param("zero1_8", 2, (), marks=pytest.mark.slow),
        pytest.param("fsdp2_tp4", 2, ("model.block=parallel", "model.attention.qkv_bias=true"), marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_parts_change_no_gradient_and_send_nothing_more(layout, parts, sets):
    gradients, sent, products, barriers = trained(layout, parts, *sets)
    whole, sent_whole, products_whole, barriers_whole = trained(layout, 1, *sets)
    if "model.matmul_dtype=int8" in sets:  # each part has scales of its own
        whole = trained("none", parts, *sets)[0]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-6), gradients, whole)
    # The gradients of norms, which are small, are summed in each part.
    assert sent == pytest.approx(sent_whole, rel=0.01 * (parts - 1))
    assert products > 1.5 * products_whole
    assert barriers > barriers_whole  # sums wait for gathers


def test_each_part_makes_its_sum_after_the_gather_of_the_part_before_it():
    order = []

    def part(name) -> Any:
        for site in ("attention", "mlp"):
            order.append(f"gather {site} {name}")
            before = yield f"{site} {name}"
            order.append(f"sum {site} {name} after {before}")
        return name

    assert in_turns([part("a"), part("b")]) == ["a", "b"]
    assert order == [
        "gather attention a",
        "gather attention b",
        "sum attention a after attention b",
        "gather mlp a",
        "sum attention b after mlp a",
        "gather mlp b",
        "sum mlp a after mlp b",
        "sum mlp b after None",
    ]
    order.clear()
    in_turns([part("a")])
    assert order[1::2] == ["sum attention a after None", "sum mlp a after None"]
