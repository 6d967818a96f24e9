"""Models as people publish them: they train under every kind of layout, with ten lines of glue each."""

import ast
from pathlib import Path

import jax
import numpy as np
import pytest

import gspmd_lm
from gspmd_lm.foresight import compile
from gspmd_lm.sharding import rules_file
from tests import public_linen, public_nnx
from tests.courses import begun
from tests.launched import compiled_here
from tests.quick import QUICK

LINEN = (public_linen.LM1B, public_linen.VIT, public_linen.MIXER, public_linen.T5_TASK, public_linen.RESNET,
         public_linen.QWEN)  # fmt: skip
NNX = (public_nnx.GEMMA, public_nnx.LLAMA, public_nnx.MAMBA, public_nnx.DEIT, public_nnx.UNET, public_nnx.MIXTRAL)
TASKS = {task.name: task for task in (*LINEN, *NNX)}
# Model -> the axis that weights rest split over under fsdp, and those that are split under tensor.
AXES = {
    "lm1b": ("embed", ("mlp", "vocab")),
    "vit": ("model", ("model",)),
    "mixer": ("", ()),
    "t5": ("embed", ("joined_kv", "mlp", "vocab")),
    "resnet": ("out", ("out",)),
    "qwen": ("embed", ("heads", "kv_heads", "mlp", "vocab")),
    "gemma": ("fsdp", ("tp",)),
    "llama": ("embed", ("heads", "mlp", "vocab")),
    "mamba": ("embed", ("inner", "vocab")),
    "deit": ("embed", ("mlp",)),
    "unet": ("out", ("out",)),
    "mixtral": ("embed", ("expert", "heads", "vocab")),
}
MESHES = {"fsdp": {"fsdp": 8}, "tensor": {"tensor": 4}, "fsdp and tensor": {"fsdp": 2, "tensor": 4}}
GLUE = 10  # lines for each model; the call of `train` is one of them
NEAR_FLOOR = 1.05


def layout(task, mesh):
    """Rules for a model on a mesh of fsdp, tensor or both."""
    rest, in_use = AXES[task.name]
    rows = next(iter(task.specs().values())).axes[0]
    rules, weights = {}, {}
    if "tensor" in mesh:
        rules |= dict.fromkeys(in_use, "tensor")
    if "fsdp" in mesh:
        rules |= {rows: "fsdp"}
        if rest and rules.get(rest) != "tensor":
            weights = {rest: "fsdp"}
        if rest == rows:  # the name of a mesh axis, for activations and weights alike: weights are gathered for use
            rules |= {"w.fsdp": None, "table.fsdp": None}
    raw = {"mesh": mesh, "rules": rules, "weights": weights, "compiler_options": {"cpu": QUICK}}
    return rules_file.from_dict(raw, "layout.yaml", vocabulary=task.names)


def losses(task, rules, steps=3):
    step = gspmd_lm.build(task, rules)
    program, state, found, rng = step.compile(step.lower_train()), begun(step), [], np.random.default_rng(0)

    def array(one):
        draw = rng.normal(size=one.shape) if one.dtype == "float32" else rng.integers(0, 16, one.shape)
        return draw.astype(one.dtype)

    batch = jax.device_put({name: array(one) for name, one in task.inputs.items()}, step.batch_shardings)
    for _ in range(steps):
        state, metrics = program(state, batch)
        found.append(float(metrics["loss"]))
    return found


def every(names, meshes):
    slow = [
        pytest.param(name, mesh, marks=() if name in names and mesh in meshes else pytest.mark.slow)
        for name in TASKS
        for mesh in MESHES
        if AXES[name][1] or mesh == "fsdp"
    ]
    return pytest.mark.parametrize(("name", "mesh"), slow)


@pytest.fixture(scope="module")
def of_one_device():
    known = {}

    def found(task):
        if task.name not in known:
            one = {"mesh": {"data": 1}, "compiler_options": {"cpu": QUICK}}
            known[task.name] = losses(task, rules_file.from_dict(one, "one.yaml", vocabulary=task.names))
        return known[task.name]

    return found


@pytest.mark.long
@every(("mixtral",), ("fsdp and tensor",))
def test_losses_are_those_of_one_device(name, mesh, of_one_device):
    task = TASKS[name]
    wanted = of_one_device(task)
    assert wanted[0] > wanted[-1]
    np.testing.assert_allclose(losses(task, layout(task, MESHES[mesh])), wanted, rtol=0, atol=1e-5)


@pytest.mark.long
@every(("mixtral", "unet"), ("fsdp",))
def test_what_is_sent_is_near_the_floor(name, mesh, monkeypatch):
    monkeypatch.setattr(compile, "_run_compiler", compiled_here if mesh == "fsdp" else compile._run_compiler)
    task, devices = TASKS[name], np.prod(list(MESHES[mesh].values()))
    report = gspmd_lm.explain(task, layout(task, MESHES[mesh]), f"cpu:{devices}")
    codes = {one.code for one in report.warnings}
    if report.floor.estimated_because:
        assert mesh != "fsdp"
        return
    assert (report.above_floor <= NEAR_FLOOR) == ("above-floor" not in codes)
    if mesh == "fsdp":
        assert report.above_floor <= NEAR_FLOOR


def test_a_partition_spec_of_a_model_places_an_activation():
    task = public_nnx.GEMMA
    page = gspmd_lm.dry_run(task, layout(task, MESHES["fsdp and tensor"]))
    assert "kinds of constraints on activations: 2, 0 of them without an axis that a row maps" in page
    (row,) = [line for line in page.splitlines() if line.startswith("constraint ") and "tp" in line]
    assert "16 x 16 x 256" in row and "fsdp/fsdp" in row and "tp/tensor" in row


def glue(module):
    """Task -> how many lines of a file are its glue: the task, and the functions that it is made of."""
    body = ast.parse(Path(module.__file__).read_text()).body
    functions = {node.name: node for node in body if isinstance(node, ast.FunctionDef)}
    lines = {}
    for node in body:
        if isinstance(node, ast.Assign) and getattr(getattr(node.value, "func", None), "id", "") == "Task":
            names = {one.id for one in ast.walk(node.value) if isinstance(one, ast.Name)}
            parts = [node, *(functions[name] for name in names if name in functions)]
            name = next(ast.literal_eval(one.value) for one in node.value.keywords if one.arg == "name")
            lines[name] = sum(part.end_lineno - part.lineno + 1 for part in parts)
    return lines


def test_each_has_ten_lines_of_glue():
    lines = glue(public_linen) | glue(public_nnx)
    assert set(lines) == set(TASKS)
    assert max(lines.values()) + 1 <= GLUE, lines
