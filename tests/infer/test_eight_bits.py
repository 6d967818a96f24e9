"""Weights that rest in 8 bits: what they are made of, that layouts change no token, and what refuses them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from gspmd_lm import config as configs
from gspmd_lm.config import LatentAttention
from gspmd_lm.errors import InputError
from gspmd_lm.foresight import explain, hlo
from gspmd_lm.foresight.compile import CompileRequest, programs
from gspmd_lm.foresight.graph import DataflowGraph
from gspmd_lm.hardware import target as targets
from gspmd_lm.infer import eight_bits
from gspmd_lm.infer import programs as generation
from gspmd_lm.model.weights import first_output
from gspmd_lm.program.supported import Pass, settle_rules
from gspmd_lm.sharding import axes, rules_file
from gspmd_lm.sharding.quantised import at_rest
from gspmd_lm.train import state
from tests.convert import ours, references

LATENT = {
    "attention.latent": LatentAttention(kv_rank=16, q_rank=24, v_head_dim=4),
    "head_dim": 6,
    "attention.rope.dim": 2,
}
EXPERTS = {"experts.count": 8, "experts.per_token": 2, "experts.mlp": 16}
LAYOUTS = [
    ("fsdp2_tp4", "int8", LATENT | EXPERTS),
    *(pytest.param(*one, marks=pytest.mark.slow)
      for one in (("tp8", "int8", {}), ("fsdp8", "int8", {}), ("tp8", "fp8", LATENT), ("fsdp2_tp4", "fp8", {}),
                  ("expert4", "fp8", EXPERTS),
                  ("fsdp8", "fp8", LATENT))),
]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(("layout", "dtype", "model"), LAYOUTS)
def test_a_layout_never_changes_a_token(layout, dtype, model, speaking, generator, prompts):
    cfg = speaking(weight_dtype=dtype, **model)
    one, split = generator(cfg, "single"), generator(cfg, layout)
    wanted, found = (made.results(prompts, new_tokens=6, ends=()) for made in (one, split))
    assert [result.tokens for result in found] == [result.tokens for result in wanted]
    gaps, others = ([result.smallest_gap for result in results] for results in (wanted, found))
    assert min(gaps) > 1e-4 and others == pytest.approx(gaps, abs=1e-4)
    held = flatten_dict(split.params)
    small = {path[-1] for path, array in held.items() if array.dtype.itemsize == 1}
    scales = {path[-1] for path in held if path[-1] in axes.SCALES}
    assert {axes.SCALES[name] for name in scales} == small >= {"wo", "w_gate", "w_up", "w_down"}


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_a_weight_is_rounded_by_less_than_a_step_of_its_scale(dtype):
    w_DF = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)
    w_DF[:, 3] = 0.0
    kind = {"int8": jnp.int8, "fp8": jnp.float8_e4m3fn}[dtype]
    small = jax.device_get(jax.jit(lambda w_DF: at_rest(w_DF, (0,), kind))(w_DF))
    top = {"int8": 127.0, "fp8": 448.0}[dtype]
    np.testing.assert_allclose(small.scale, np.abs(w_DF).max(0) / top, rtol=1e-6)
    error = np.abs(small.values.astype(np.float32) * small.scale - w_DF)
    step = {"int8": 0.501 * small.scale, "fp8": np.maximum(np.abs(w_DF) / 16, small.scale * 2.0**-9)}[dtype]
    assert (error <= step + 1e-12).all() and error.max() > 0


def test_outputs_begin_after_what_is_summed_over():
    spelled = {
        "embed heads head_dim": 1, "heads head_dim embed": 2, "layers mlp embed": 2, "layers embed mlp": 2,
        "kv_rank heads head_dim": 1, "embed rope_dim": 1, "expert embed mlp": 2, "expert mlp embed": 2,
    }  # fmt: skip
    assert {names: first_output(names.split()) for names in spelled} == spelled


def test_a_published_folder_is_read_one_matrix_at_a_time(tmp_path):
    """What is held is what the whole weights give, and no matrix of another dtype is held beside the next one."""
    golden = references.load("llama")
    whole = ours.read(golden, tmp_path / "a")
    small = ours.read(golden, tmp_path / "a", "model.weight_dtype=int8")
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    wanted = jax.tree.map(
        lambda like: jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=one),
        generation.parameters(small.config.model).params,
    )
    matrices = []

    def read(part):
        assert all(matrix.is_deleted() for matrix in matrices)
        made = small.load(jax.tree.map(lambda like: like.sharding, part), jax.tree.map(lambda like: like.dtype, part))
        names = {path[-1] for path in flatten_dict(made)}
        if names & {*axes.QUANTISED}:
            assert len(names) == 1
            matrices.extend(jax.tree.leaves(made))
        return made

    found = flatten_dict(eight_bits.reading(small.config.model, read)(wanted))
    assert len(matrices) == 7
    for path, exact in flatten_dict(ours.on_one_device(whole)).items():
        if path[-1] in axes.QUANTISED:
            scale, first = found[*path[:-1], f"{path[-1]}_scale"], 1 if path[0] == "layers" else 0
            summed = tuple(range(first, exact.ndim - scale.ndim + first))
            exact, scale = np.asarray(exact), np.expand_dims(scale, summed)
            assert found[path].dtype == jnp.int8
            assert np.abs(np.asarray(found[path]) * scale - exact).max() <= 0.501 * scale.max()
        else:
            np.testing.assert_array_equal(found[path], exact)


def test_what_is_not_supported_is_refused(small):
    config = small(weight_dtype="int8")
    with pytest.raises(InputError, match=r"weight_dtype: int8: weights of 8 bits are not trained(.|\n)*fix   --set"):
        state.arrays(config)
    with pytest.raises(ValueError, match="matmul_dtype: fp8 does not go with weight_dtype: int8"):
        small(weight_dtype="int8", matmul_dtype="fp8")


@pytest.mark.slow
def test_no_copy_of_a_weight_is_made_on_a_tpu():
    """A device holds and reads half, and no instruction of its program gives a weight in another dtype."""
    sizes = ["layers=2", "embed=1024", "mlp=4096", "head_dim=128", "heads=8", "kv_heads=8", "context=128",
             "compute_dtype=bfloat16", "matmul_precision=default"]  # fmt: skip
    found, dtypes, where = {}, {}, targets.parse("v6e:2x4")
    for dtype in ("bfloat16", "int8"):
        sets = [*(f"model.{one}" for one in sizes), f"model.weight_dtype={dtype}", "data.batch=8", "data.seq=128"]
        config, rules = configs.load("tiny", sets), rules_file.load("decode_tp8")
        (found[dtype],) = explain.reports(config, [rules], where, phase="decode")
        chosen = settle_rules(rules.fill(8), config, where.processor, Pass(128, padded=True))
        (program,) = programs([CompileRequest(config, chosen, where, phase="decode")])
        arrays = [array for one in hlo.parse(program.text).instructions for array in one.shape.arrays]
        dtypes[dtype] = {array.dtype for array in arrays if array.elements >= 2**17 and 1024 in array.dimensions}
    wide, small = found["bfloat16"], found["int8"]
    assert dtypes == {"bfloat16": {"bf16"}, "int8": {"s8"}}
    matrices_bytes = 2 * 2 * (4 * 1024 * 1024 + 3 * 1024 * 4096) // 8
    assert wide.memory.weights_bytes - small.memory.weights_bytes == pytest.approx(matrices_bytes / 2, rel=0.01)
    saved_s = matrices_bytes / 2 / where.chip.hbm_bytes_per_s
    assert wide.floor.memory_s - small.floor.memory_s == pytest.approx(saved_s, rel=0.02)
    assert wide.floor.compute_s == pytest.approx(small.floor.compute_s, rel=0.01)
    assert "block weights are int8, and bfloat16 where they are multiplied" in small.matmuls


# Weights of blocks that are multiplied in the compute dtype: they decide something, or are small.
EXCEPTIONS = {"router", "shared_gate", "linear_a", "linear_b", "laurel_in", "laurel_out", "layer_gate", "layer_out",
              "altup_router", "altup_predict", "altup_correct"}  # fmt: skip
SOME = ("llama", "deepseek-v3")
FAMILIES = [*SOME, *references.marked([name for name in references.CASES if name not in SOME], references.CASES)]


@pytest.mark.parametrize("name", FAMILIES)
def test_all_matmuls_of_blocks_are_listed(name, tmp_path):
    """As the program that is recorded says, of routed experts too."""
    config = ours.read(references.load(name), tmp_path / name).config
    arrays, rules = generation.parameters(config.model), rules_file.load("single")
    sizes = generation.Sizes(2, 16, 16)
    recorded = generation.record_arrays(config, arrays, sizes, rules)["prefill"]
    stacks = {stack.name for stack in config.model.stacks}
    inside = [path.split(".") for path in DataflowGraph.from_recorder(recorded, arrays).matrix_paths]
    names = {path[-1] for path in inside if path[0] in stacks or path[0].startswith("layer_")}
    assert names and names - {*axes.QUANTISED} <= EXCEPTIONS
