"""Fine-tuning: adapters under every layout, what is left alone, and the weights that a run begins with."""

import dataclasses
import functools
import io

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import yaml
from etils import epath
from flax.traverse_util import flatten_dict
from rich.console import Console

from benchmarks.collectives import count
from gspmd_lm import config as configs
from gspmd_lm.config import Lora
from gspmd_lm.data import loader
from gspmd_lm.errors import InputError
from gspmd_lm.foresight import hlo
from gspmd_lm.model import lora
from gspmd_lm.runtime import startup
from gspmd_lm.sharding import rules_file
from gspmd_lm.sharding.axes import ADAPTERS
from gspmd_lm.sharding.shapes import pairs
from gspmd_lm.train import decoder
from gspmd_lm.train import init_from as sources
from gspmd_lm.train import state as states
from gspmd_lm.train.loop import Run
from gspmd_lm.train.programs import TrainPrograms
from gspmd_lm.workdir import checkpoint
from tests.courses import agree, drawn, trace_gradients

B, T, D, L, R = 32, 16, 32, 2, 2
LORA = Lora(rank=R, alpha=8.0, targets=("wq", "wk", "wv", "wo", "w_gate", "w_up", "w_down"))
FEW = dataclasses.replace(LORA, targets=("wq", "w_down"))  # for runs: model/test_adapters.py merges each target
UNCLIPPED = {"clip_norm": 0.0, "learning_rate": 3.0e-3, "warmup_steps": 0}
SHARED = {"shared_layers": True}
SEQUENTIAL, PARALLEL = {}, {"block": "parallel", "kv_heads": 4, "embedding.tied": True}


def flat(tree):
    return {".".join(path): leaf for path, leaf in flatten_dict(jax.device_get(tree)).items()}


def is_adapter(path):
    return path.rpartition(".")[2] in ADAPTERS


def without_kv_heads(layout):
    """The layout with key heads replicated."""
    loaded = rules_file.load(layout)
    return dataclasses.replace(loaded, rows=tuple(row for row in loaded.rows if row.axis != "kv_heads"))


@pytest.fixture(scope="module")
def trained(small, course):
    """A function that trains a model with adapters, three steps under some rules."""

    def run(rules, microbatches=1, **model):
        config = small(optimizer=UNCLIPPED, layers=L, lora=LORA, **model)
        # A loop over layers: written out, the first layer has no gradient of its input, which nothing trained reads.
        return course(config, rules, 3, microbatches=microbatches, unroll=1)

    return run


@pytest.mark.long
@pytest.mark.parametrize(
    ("rules", "microbatches", "model"),
    [
        ("tp8", 1, SEQUENTIAL),
        pytest.param("fsdp2_tp4", 2, SEQUENTIAL, marks=pytest.mark.slow),
        pytest.param("fsdp2_tp4", 2, SHARED, marks=pytest.mark.slow),
        pytest.param(without_kv_heads("tp8"), 1, PARALLEL, marks=pytest.mark.slow),
    ],
    ids=["tp8", "fsdp2_tp4", "shared", "parallel"],
)
def test_a_layout_changes_nothing(trained, rules, microbatches, model):
    want = trained("single", **model)
    agree(trained(rules, microbatches, **model), want)
    assert want.losses[-1] < want.losses[0] - 1e-3
    assert len(flat(want.gradients)) == 14 and all(is_adapter(path) for path in flat(want.gradients))


@pytest.mark.long
@pytest.mark.parametrize("rules", ["single", "tp8"])
def test_only_adapters_change(trained, rules):
    found = trained(rules)
    after = flat(found.after)
    for path, before in flat(found.before).items():
        assert np.array_equal(after[path], before) != is_adapter(path), path


@pytest.mark.long
def test_tensor_parallelism_reduces_only_small_arrays_for_adapters(trained):
    loop = [c for c in count(trained("tp8").program.as_text()) if c.in_loop]
    assert {c.kind for c in loop} == {"all-reduce"}
    large = [c for c in loop if c.elements >= B * T * D]
    assert [c.elements for c in large] == [B * T * D] * 4  # two forward, two backward, as without adapters
    # For each adapter of what reads a block's input one, between its matrices. For the two that write to the residual
    # stream that sum is not made: its addends join those of the weight, and only the second matrix's gradient is a sum.
    assert sorted(c.elements for c in loop if c not in large) == [R * D] * 2 + [B * T * R] * 5
    assert all("transpose" in c.op_name for c in loop if c not in large)


@pytest.mark.long
def test_frozen_weights_have_no_matmuls_of_their_own(trained, small, built):
    """Of the three products of a weight (output, gradients of input and of weight) the last is not there."""

    def matmul_flops(text):
        module = hlo.parse(text)
        return sum(instruction.flops * instruction.executions for instruction in module.operations)

    full = small(optimizer=UNCLIPPED, layers=L)
    whole = matmul_flops(trace_gradients(built(full, "single", unroll=1)).lower().compile().as_text())
    per_layer = [(D, D)] * 4 + [(D, 64)] * 2 + [(64, D)]
    multiplied = L * sum(a * b for a, b in per_layer) + full.model.vocab_rows * D
    # Of an adapter: x @ a and @ b; then d(x @ a), dx, da, db.
    adapters = sum(L * R * (6 * a + 6 * b) for a, b in per_layer)
    want = whole - 2 * multiplied * B * T + adapters * B * T
    assert matmul_flops(trained("single").program.as_text()) == pytest.approx(want, rel=1e-3)


def test_the_optimizer_holds_adapters_only(small):
    for name in ("adamw", "adafactor", "lion", "muon"):
        arrays = states.arrays(small(optimizer={"name": name}, lora=LORA))
        paths = {leaf.path for leaf, like in pairs(arrays.named_optimizer, arrays.optimizer) if like.size > 16}
        assert paths and all(is_adapter(path) for path in paths), name
        assert arrays.trained_count == sum(like.size for like in jax.tree.leaves(arrays.trained))
        assert arrays.trained_count == L * R * 2 * 4 * (D + D) // 2 + L * R * 3 * (D + 64)


# Runs: what they begin with.

TRAIN = {"steps": 4, "log_every": 1, "trackers": ()}
CPU = startup.Runtime("cpu", "cpu", 8, 0, 1)
LAYOUT = "fsdp2_tp4"


@pytest.fixture(scope="module")
def run(small, built):
    """A function that makes a Run; programs are compiled once per model."""
    programs = {}

    def make(workdir, init_from="", **model):
        config = small(
            layers=1, data={"batch": 8, "held_out": 0.0}, train=TRAIN | {"init_from": str(init_from)}, **model
        )
        step, compiled = programs.setdefault(repr(config.model), (built(config, LAYOUT), {}))
        step = dataclasses.replace(step, task=decoder.task(config))
        console = Console(file=io.StringIO())
        return Run(
            TrainPrograms(step, CPU, functools.partial(console.print, soft_wrap=True), compiled=compiled),
            open_rows=lambda: loader.open_loaders(config),
            workdir=epath.Path(workdir),
            console=console,
        )

    return make


@pytest.fixture(scope="module")
def source(small, tmp_path_factory):
    """A workdir of weights alone, as `convert` writes it, and the weights."""
    workdir = tmp_path_factory.mktemp("source")
    config = small(layers=1)
    params = drawn(states.arrays(config).params)
    with checkpoint.run_checkpoints(workdir, config) as checkpoints:
        checkpoints.save(0, {"params": jax.tree.map(jnp.asarray, params)}, {"data": "", "rules": ""})
    (workdir / "config.yaml").write_text(yaml.safe_dump(configs.to_dict(config)))
    return workdir, flat(params)


def params_of(run):
    with run.checkpoints() as checkpoints:
        at, state, _ = checkpoints.restore(run.step.abstract_state)
    return at, flat(state.params), state


@pytest.mark.slow
def test_adapters_train_on_the_weights_of_another_workdir(run, source, tmp_path):
    workdir, weights = source
    for stop in (2, 4):  # the second goes on from its own checkpoint
        begun = run(tmp_path / "resumed", workdir, lora=FEW)
        begun.train(stop)
        assert (f"weights of checkpoint 0 of {workdir}" in begun.console.file.getvalue()) == (stop == 2)
    straight = run(tmp_path / "straight", workdir, lora=FEW)
    straight.train(4)
    (at, params, state), (_, again, _) = params_of(straight), params_of(begun)
    assert at == 4 and params.keys() == again.keys()
    for path, found in params.items():
        np.testing.assert_array_equal(again[path], found)
        if not is_adapter(path):
            np.testing.assert_array_equal(found, weights[path])
    assert any(np.any(params[path]) for path in params if path.endswith("_b"))

    # Another run may begin with these: the adapters are merged into its weights.
    full = run(tmp_path / "full", tmp_path / "straight")
    number, given = sources.find(full.config).restore(full.step)
    merged = jax.jit(lambda params: lora.merge_adapters(params, straight.config.model)[0])(state.params)
    assert number == 4 and full.config.model == dataclasses.replace(straight.config.model, lora=None)
    for path, want in flat(merged).items():
        found = np.asarray(flat(given)[path])
        np.testing.assert_allclose(found, want, rtol=0, atol=1e-7)
        assert np.array_equal(found, weights[path]) != (f"{path}_a" in params), path


def test_all_weights_train_from_another_workdir(run, source, tmp_path):
    workdir, weights = source
    found = run(tmp_path, workdir)
    state = found.step.lower_init_from().compile()
    number, given = sources.find(found.config).restore(found.step)
    begun = state(given)
    assert number == 0 and all(x.is_deleted() for x in jax.tree.leaves(given))  # no second copy
    assert int(begun.step) == 0 and not any(np.any(x) for x in jax.tree.leaves(optax.tree.get(begun.optimizer, "mu")))
    for path, x in flat(begun.params).items():
        np.testing.assert_array_equal(x, weights[path])
    jax.tree.map(lambda x, wanted: x.sharding == wanted or pytest.fail(str(x.sharding)), begun.params,
                 found.step.state_shardings.params)  # fmt: skip


def test_what_init_from_refuses(run, source, tmp_path):
    workdir, _ = source

    def message(path):
        with pytest.raises(InputError) as error:
            run(tmp_path / "run", path).train(1)
        return str(error.value)

    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "config.json").write_text("{}")
    assert f"convert --from={tmp_path / 'hub'} --workdir=W" in message(tmp_path / "hub")
    (tmp_path / "empty").mkdir()
    assert "has no checkpoint" in message(tmp_path / "empty")
    assert "there is no such directory" in message(tmp_path / "nowhere")
    other = run(tmp_path / "run", workdir, mlp=32, **{"attention.qk_norm": True}, lora=LORA)
    with pytest.raises(InputError) as error:
        sources.find(other.config).restore(other.step)
    differs = str(error.value)
    assert "mlp: 64 in the checkpoint, 32 in the config" in differs
    assert "attention.qk_norm: False in the checkpoint, True in the config" in differs
    assert "lora" not in differs
