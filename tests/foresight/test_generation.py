"""Reports of prefill and decode: their memory, their collectives against the floor, and what they are compared with."""

import dataclasses
import re

import jax
import pytest
from jax.experimental.layout import Format, Layout

from gspmd_lm import config as configs
from gspmd_lm.config import with_values
from gspmd_lm.foresight import explain
from gspmd_lm.foresight.report import to_json
from gspmd_lm.hardware import target
from gspmd_lm.infer import programs
from gspmd_lm.sharding import rules_file
from gspmd_lm.train import decoder
from tests.quick import QUICK

CONFIG = configs.load(
    "tiny",
    ["model.layers=3", "model.embed=64", "model.mlp=128", "model.heads=8", "model.kv_heads=8", "model.vocab=512",
     "model.padded_vocab=0", "data.seq=64", "data.batch=8", "data.packing=stream"],
)  # fmt: skip


@pytest.fixture(scope="module")
def report_of(cache):
    def make(rules, phase, where="cpu:8", config=CONFIG, **changes):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("GSPMD_LM_CACHE", str(cache.parent))
            loaded = rules_file.load(rules) if isinstance(rules, str) else rules
            layout = dataclasses.replace(loaded, **{"compiler_options": {"cpu": QUICK}} | changes)
            (found,) = explain.reports(decoder.task(config), [layout], target.parse(where), phase=phase)
        return found

    return make


BY_DEFAULT = {"prefill": ("fsdp8",), "decode": ("decode_tp8",)}


@pytest.mark.long
@pytest.mark.parametrize(("rules", "phase"), [
    pytest.param(rules, phase, marks=() if rules in BY_DEFAULT[phase] else pytest.mark.slow)
    for phase in BY_DEFAULT for rules in ("decode_tp8", "fsdp8", "fsdp2_tp4", "dp8")
])  # fmt: skip
def test_what_is_sent_is_the_floor(report_of, rules, phase):
    found = report_of(rules, phase)
    sent = sum(one.bytes_per_device_per_step for one in found.collectives)
    assert found.phase == phase and found.tokens == (8 if phase == "decode" else 8 * 64)
    assert sent == pytest.approx(found.floor.communication_bytes, rel=0.05)


@pytest.mark.long
def test_queries_of_a_decode_step_move_to_a_cache_that_is_split_by_rows(report_of):
    """The cache, of one key head, does not move, nor does what makes queries; nothing else is sent for it."""
    model = dataclasses.replace(CONFIG.model, kv_heads=1)
    config = dataclasses.replace(CONFIG, model=model, data=dataclasses.replace(CONFIG.data, seq=256))
    found = report_of("decode_rows8", "decode", config=config)
    in_layers, codes = [one for one in found.collectives if one.in_loop], [one.code for one in found.warnings]
    owners = ["layers.attention"] * 2 + ["layers.attention.wo", "layers.mlp.w_down"]
    kinds = ["all-to-all"] * 2 + ["all-reduce"] * 2
    assert sorted((one.op, one.kind) for one in in_layers) == [*zip(owners, kinds, strict=True)]
    rows_and_heads = 8 * 8 * model.head_dim * 4 // 8  # of a device, in float32
    exchanged = [one.bytes_per_device_per_step for one in in_layers if one.kind == "all-to-all"]
    assert exchanged == [3 * rows_and_heads * 7 // 8] * 2
    assert found.above_floor == pytest.approx(1.0, abs=0.05)
    assert not {"unasked-reshard", "rule-matched-nothing", "above-floor"} & {*codes}
    assert found.memory.cache_bytes == 2 * 3 * (8 // 8) * 256 * model.head_dim * 4


@pytest.mark.long
def test_a_tensor_parallel_decode_step_reduces_twice_per_layer_and_holds_its_part_of_the_cache(report_of):
    found = report_of("decode_tp8", "decode")
    in_layers = [one for one in found.collectives if one.in_loop]
    assert {one.op for one in in_layers} == {"layers.attention.wo", "layers.mlp.w_down"}
    assert sum(one.times_per_step for one in in_layers) == 2 * 3
    assert {one.kind for one in in_layers} == {"all-reduce"} and {one.phase for one in found.collectives} == {"forward"}
    model, memory = CONFIG.model, found.memory
    assert memory.cache_bytes == 2 * 3 * 8 * 64 * model.kv_heads * model.head_dim * 4 // 8
    assert memory.optimizer_bytes == 0
    assert to_json([found])["memory"]["cache_bytes"] == memory.cache_bytes


@pytest.mark.slow
def test_a_decode_step_on_a_tpu_has_a_time_and_does_not_copy_the_cache(report_of):
    """The compiler chooses the order in which it lies. One order for all layouts had this one copied four times."""
    sizes = {"compute_dtype": "bfloat16", "kv_heads": 1, "head_dim": 128, "context": 8192}
    config = dataclasses.replace(
        CONFIG, model=with_values(CONFIG.model, sizes), data=dataclasses.replace(CONFIG.data, seq=8192)
    )
    found = report_of("decode_rows8", "decode", "v5e:2x4", config)
    assert found.prediction and found.prediction.step_time_s > found.floor.memory_s > found.floor.compute_s > 0
    assert found.prediction.tokens_per_s_per_device == pytest.approx(1 / found.prediction.step_time_s)
    assert "not compared" in found.prediction.error
    assert found.memory_bound_share == found.floor.memory_s / found.prediction.step_time_s
    assert found.memory.temporaries_bytes < found.memory.cache_bytes / 2


@pytest.mark.slow  # by default, the next test asks a decode step of a GPU in which order it wants the cache
@pytest.mark.parametrize(("kv_heads", "most"), [(2, 0.62 if jax.__version_info__ < (0, 11) else 0.47), (8, 0.3)])
def test_a_decode_step_on_a_gpu_does_not_copy_the_cache(report_of, kv_heads, most):
    """It lies in memory as the program reads it. jax 0.10 still copies keys, or values, of grouped heads once."""
    sizes = {"compute_dtype": "bfloat16", "matmul_precision": "default", "context": 8192, "head_dim": 64}
    config = dataclasses.replace(
        CONFIG,
        model=with_values(CONFIG.model, {"kv_heads": kv_heads, **sizes}),
        data=dataclasses.replace(CONFIG.data, seq=8192),
    )
    memory = report_of("single", "decode", "h100:1", config).memory
    assert memory.temporaries_bytes < most * memory.cache_bytes


def test_the_compiler_chooses_the_order_of_the_cache_in_decode_and_prefill_takes_that():
    rules, whole = rules_file.load("single").fill(1), programs.whole_context(CONFIG)
    arrays, _ = programs.arrays_and_warnings(CONFIG, rules, "gpu", whole)
    devices = target.devices(target.parse("h100:1"))
    built = programs.build_programs(CONFIG, rules, arrays, devices, whole)
    keys_and_values = rf"tensor<3x8x64x8x{CONFIG.model.head_dim}xf32> \{{[^{{}}]*mhlo.layout_mode = \"%s\""
    assert len(re.findall(keys_and_values % "auto", built.trace_decode().lower().as_text())) == 2 * 2
    chosen = jax.tree.map(
        lambda like: Format(Layout((0, 1, 3, 4, 2)), like.sharding), built.abstract_decode_state.cache
    )
    text = built.trace_prefill(chosen).lower().as_text()
    assert len(re.findall(keys_and_values % r"\{2,4,3,1,0\}", text)) == 2  # of axes [L, B, S, K, H], S lies innermost
