"""A step that knows nothing of this package is explained as it runs, and what cannot be is refused in words."""

import dataclasses
import functools
import re
import subprocess
import sys
import threading
from pathlib import Path

import jax
import numpy as np
import pytest

import gspmd_lm
from gspmd_lm import InputError, cli
from gspmd_lm.foresight import advice, any_step
from gspmd_lm.foresight.report import to_json
from gspmd_lm.hardware import target as targets
from gspmd_lm.sharding.op_names import parse
from gspmd_lm.show import comparison
from tests import own_steps
from tests.own_steps import ROWS, WIDE, WIDTH
from tests.recorded import same_as_recorded

ROOT = Path(__file__).parents[2]
FORWARD, MATMULS = 2, 5  # the loss and its gradients multiply so often; one product more is computed again


@pytest.fixture(scope="module")
def descent():
    return gspmd_lm.explain(own_steps.descent, target="cpu:8")


def test_the_report_says_what_the_program_holds_sends_and_computes(descent):
    matrix_bytes = 4 * WIDTH * WIDE
    assert (descent.mesh, descent.config, descent.rules) == ({"data": 4, "tensor": 2}, "tests.own_steps:descent", "")
    assert descent.memory.arguments_bytes == 2 * matrix_bytes // 2 + 4 * ROWS // 4 * WIDTH
    assert descent.floor.flops == MATMULS * 2 * ROWS * WIDTH * WIDE / 8
    assert descent.floor.communication_bytes == pytest.approx(descent.sent_bytes, rel=1e-4) and descent.above_floor
    gradients = [one for one in descent.collectives if one.mesh_axes == ("data",) and one.phase == "backward"]
    assert sum(one.bytes_per_device_per_step for one in gradients) == 2 * matrix_bytes // 2 * 2 * 3 // 4
    assert {one.phase for one in descent.collectives} <= {"forward", "backward", "recomputation", "other"}
    assert all(one.source.startswith("tests/own_steps.py:") for one in descent.collectives)
    assert [(one.path, one.at_rest) for one in descent.arrays] == [
        ("weights['down']", (("tensor",), ())), ("weights['up']", ((), ("tensor",))), ("x", (("data",), ())),
    ]  # fmt: skip
    assert {one.dtype for one in descent.arrays} == {"float32"}


@pytest.mark.usefixtures("forked_process")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_process_that_compiles_has_the_options_of_jax_that_are_set_here(dtype):
    with jax.enable_x64(dtype == "float64"):
        found = gspmd_lm.explain(own_steps.of_floats, target="cpu:8")
    assert [one.dtype for one in found.arrays] == [dtype]
    assert found.memory.arguments_bytes == np.dtype(dtype).itemsize * ROWS // 4 * WIDTH


def test_names_of_operations_of_others():
    names = ("jvp(Mlp)/Dense_0/dot_general", "add", "transpose(jvp(Mlp))/add;a:b/Dense_1/mul")
    found = [parse(f"jit(update)/{name}") for name in names]
    assert [one.phase for one in found] == ["forward", "other", "backward"]
    assert [one.modules for one in found] == [("Dense_0",), (), ("Dense_1",)]
    assert parse("jit(_train)/add").phase == "optimizer"


def test_what_is_outside_of_a_derivative_has_the_same_phase_in_the_floor_as_in_the_program():
    """Else nothing of the floor would be taken off what is sent, and a warning would name what is necessary."""

    def product(devices):
        mesh = jax.sharding.Mesh(np.reshape(devices, (4, 2)), ("data", "tensor"))

        def array(shape, *spec):
            return jax.ShapeDtypeStruct(shape, "float32", sharding=jax.NamedSharding(mesh, jax.P(*spec)))

        def _train(x, w):  # as the step of this package is called
            return x @ w

        step = jax.jit(_train, out_shardings=jax.NamedSharding(mesh, jax.P("data")))
        return step.trace(array((64, 32), "data", "tensor"), array((32, 16), "tensor"))

    found = gspmd_lm.explain(product, target="cpu:8")
    assert {one.phase for one in found.collectives} == {one.phase for one in found.floor.by_array} == {"other"}
    assert all(sent >= 0 for sent in advice._excess_bytes(found).values())


def test_no_word_of_its_page_speaks_of_rules(descent):
    memory = dataclasses.replace(descent.memory, largest=())  # which differ between versions of XLA
    shown = dataclasses.replace(descent, compile_s=1.0, memory=memory)
    same_as_recorded("explain.txt", "tests.own_steps:descent on cpu:8", repr(shown).rstrip())
    apart = r"<script.*?</script>|<style.*?</style>|<details><summary>What the words mean.*"
    page = re.sub(apart, "", comparison.page([shown]), flags=re.S)
    for word in ("rule", "row", "config", "parameters", "tokens", "split in use", "weights"):
        assert not re.search(rf"\b{word}\b", re.sub(r"weights\[", "", re.sub("<[^>]*>", " ", page))), word
    value = to_json([descent])
    assert (value["parameters"], value["tokens"], value["phase"]) == (None, None, "step")


def test_a_step_of_arrays_without_elements_has_a_page(descent):
    empty = dict.fromkeys(("arguments_bytes", "results_bytes", "temporaries_bytes", "peak_bytes"), 0)
    memory = dataclasses.replace(descent.memory, **empty, largest=())
    assert "peak 0 B" in comparison.page([dataclasses.replace(descent, memory=memory)])


@pytest.mark.long
def test_a_gpu_has_times_and_results_beside_the_arguments_are_told():
    report = gspmd_lm.explain(own_steps.not_donated, target="h100:8")
    assert report.prediction.step_time_s > report.floor.compute_s > 0
    assert report.prediction.error == "not compared with any measurement"
    assert report.prediction.tokens_per_s_per_device is None
    estimated = dataclasses.replace(report, floor=dataclasses.replace(report.floor, estimated_because="it is open"))
    assert "floor, counted" in repr(report) and "no floor: it is open" in repr(estimated)
    idle = dataclasses.replace(report, floor=dataclasses.replace(report.floor, compute_s=0.0, memory_s=0.0))
    assert "the larger" in repr(report) and "the larger" not in repr(idle)
    assert report.memory.results_bytes >= 2 * 4 * WIDTH * WIDE // 2
    assert "xla_gpu_autotune_level" in report.versions and "xla_gpu_enable_triton_gemm" not in report.versions


def test_results_that_could_take_the_place_of_arguments_are_a_warning(descent):
    held = dataclasses.replace(descent.memory, results_bytes=2**30)
    large = dataclasses.replace(descent, memory=held)
    weights = [dataclasses.replace(array, bytes_per_device=2**28) for array in descent.arrays[:2]]
    found = advice.advise_on_step(large, ["a note"], (), weights, None, True)
    assert [one.code for one in found] == ["involuntary-remat", "not-donated"]
    assert "536.9 MB per device" in found[1].message and found[1].message.endswith("weights['down'] and 1 more")
    assert advice.advise_on_step(large, (), (), (), None, True) == ()


@pytest.mark.parametrize(
    ("step", "could_give_place"),
    [
        (own_steps.not_donated, ["weights['down']", "weights['up']"]),
        (own_steps.descent, []),
        (functools.partial(own_steps.elementwise, function=lambda x: (x, x)), ["x"]),
        (functools.partial(own_steps.elementwise, function=lambda x: x.T), []),  # of another shape
    ],
)
def test_the_arguments_whose_place_a_result_could_take(step, could_give_place):
    assert any_step.build(any_step.Program(step), jax.devices()[:8]).replaceable == could_give_place


def test_a_step_that_nnx_has_jitted():
    report = gspmd_lm.explain(own_steps.of_nnx, target="cpu:8")
    assert report.floor.flops == (FORWARD + 3) * 2 * ROWS * WIDTH * WIDE / 8
    assert report.memory.arguments_bytes > 3 * 2 * 4 * WIDTH * WIDE / 8


def test_the_example_is_explained_from_the_command_line(monkeypatch, capsys):
    command = ["main.py", "explain", "--target=cpu:8", "--program=examples/any_step.py:step"]
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as end:
        cli.main(command)
    shown = capsys.readouterr().out
    assert not end.value.code and "any_step.py:step on cpu:8" in shown and "CheckpointDense_1" in shown
    with pytest.raises(SystemExit) as refused:
        cli.main([*command, "--rules=tp8", "--phase=decode"])
    assert refused.value.code == 2
    assert "--rules --phase: this step has no config and no rules" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.parametrize(
    ("guard", "command", "code"),
    [
        ('if __name__ == "__main__":', ["train.py"], 0),
        pytest.param("if True:", ["train.py"], 0, marks=pytest.mark.slow),
        pytest.param(
            "if True:", ["-m", "gspmd_lm", "explain", "--program=train.py:step", "--target=cpu:8"], 2,
            marks=pytest.mark.slow,
        ),
    ],
    ids=["as it is", "without a guard", "imported without a guard"],
)  # fmt: skip
def test_the_script_on_the_page_runs_and_one_that_explains_while_it_is_imported_is_told(guard, command, code, tmp_path):
    page = (ROOT / "docs/foresight.md").read_text()
    (script,) = re.findall(r"```python\n(import gspmd_lm\nimport jax.*?)```", page, re.S)
    script = script.replace("h100:8", "cpu:8")
    (tmp_path / "train.py").write_text(script.replace('if __name__ == "__main__":', guard))
    environment = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, *command], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    shown = "train.py:step on cpu:8" in done.stdout
    assert shown if code == 0 else 'put the call below if __name__ == "__main__":' in done.stderr


OF_A_SCRIPT = """
from typing import NamedTuple
import flax.linen as nn, jax, jax.numpy as jnp, optax
import constants  # a jnp constant: jax begins with one device
import gspmd_lm

class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(8)(x) * constants.SCALE

class Sums(NamedTuple):
    loss: jax.Array

init = lambda key: Model().init(key, jnp.zeros((1, 16)))["params"]
sums = lambda params, batch, key: Sums(Model().apply({"params": params}, batch["x"]).sum())
x = gspmd_lm.Input((8, 16), "float32", "x: batch width")
task = gspmd_lm.Task(name="mine", inputs={"x": x}, init=init, sums=sums, optimizer=lambda named: optax.sgd(0.1))
rules = gspmd_lm.load_rules("rules.yaml", task)
found = gspmd_lm.explain(task, rules, "cpu:4")
print("found:", found.parameters, found.sent_bytes, gspmd_lm.start(rules).device_count)
"""


@pytest.mark.slow
def test_a_task_of_the_script_that_runs_is_explained_and_a_constant_at_import_does_not_matter(tmp_path):
    (tmp_path / "train.py").write_text(OF_A_SCRIPT)
    (tmp_path / "constants.py").write_text("import jax.numpy as jnp\nSCALE = jnp.arange(8.0)\n")
    (tmp_path / "rules.yaml").write_text("mesh: {data: 4}\nrules: {batch: data}\n")
    environment = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    sums_bytes = 4 * (16 * 8 + 1)  # the kernel's gradient, and the loss; the bias has the same gradient for all rows
    assert f"found: 136 {2 * sums_bytes * 3 // 4} 8" in done.stdout, done.stdout


REFUSED = {
    "branches": r"own_steps.py:\d+, in \S+: TracerBoolConversionError: .*\n  fix   a step is traced from shapes",
    "few_devices": r"its mesh \(data=4, tensor=1\) has 4 devices, and the function is given 8",
    "other_sizes": r"its meshes \(data=4, tensor=2\) and \(data=2, tensor=4\) cannot be read as one",
    "swapped": r"its meshes \(data=4, tensor=2\) and \(tensor=2, data=4\) cannot be read as one",
    "reads_nothing": r"reads_nothing: it reads none of its arguments\n  fix   return what the step computes",
    "unplaced": "no argument that it reads has a NamedSharding, which says where it lives",
    "pair": r"gives a tuple, and one traced step is explained\n  fix   return jax.jit\(update\).trace\(state, batch\)",
    "lowered": "gives a Lowered, and one traced step is explained",
    "fails": r"own_steps.py:\d+, in \S+: TypeError: dot_general requires .*\n  fix   the same function runs here",
    "missing": "tests.own_steps has no missing",
}


def test_a_program_without_its_function_is_refused_as_one(capsys):
    with pytest.raises(SystemExit):
        cli.main(["main.py", "explain", "--program=train.py", "--target=cpu:8"])
    assert capsys.readouterr().err.startswith("--program=train.py: no such form\n  fix   module:function, or file.py")


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name):
    with pytest.raises(InputError, match=REFUSED[name]) as error:
        any_step.build(any_step.Program(f"tests.own_steps:{name}"), jax.devices()[:8])
    assert "\n  fix   " in str(error.value)


def test_a_mesh_whose_axes_join_those_of_another_one_is_read_in_them():
    built = any_step.build(any_step.Program(own_steps.on_two_meshes), jax.devices()[:8])
    assert built.facts["mesh"] == {"data": 4, "tensor": 2}
    assert [split for _, _, split, _, _ in built.facts["arguments"]] == [[["data"], []], [["data", "tensor"], []]]
    sent = built.read().transfers
    held = 4 * ROWS * WIDTH // 8
    exchanged, added_up = ("all-to-all", held * 7 / 8), ("all-reduce", 2 * held * 7 / 8)
    assert [(one.kind, one.bytes) for one in sent] == [exchanged, exchanged, added_up]
    assert {one.mesh_axes for one in sent} == {"data+tensor"}


@pytest.mark.parametrize(
    "target", ["cpu:8", pytest.param("h100:8", marks=pytest.mark.slow), pytest.param("v5e:2x4", marks=pytest.mark.long)]
)
@pytest.mark.parametrize(("name", "called"), [("prints", "debug_print"), ("calls_python", "pure_callback")])
def test_a_step_that_calls_python_is_explained_without_it(name, called, target):
    report = gspmd_lm.explain(getattr(own_steps, name), target=target)
    (found,) = [one for one in report.warnings if one.code == "python-on-the-host"]
    assert re.search(rf"counted: {called} at \S*own_steps.py:\d+, in tests.own_steps:{name}$", found.message)


def test_arguments_in_the_memory_of_the_host_take_no_memory_of_devices():
    built = any_step.build(any_step.Program(own_steps.held_on_the_host), targets.devices(targets.parse("v5e:2x4")))
    assert [*built.arguments] == ["w", "x"]
    assert [*built.arrays_between_steps["arguments"]] == ["x"]


def test_calls_of_python_that_keep_their_order_are_left_out_for_devices_that_are_not_here():
    built = any_step.build(any_step.Program(own_steps.calls_in_order), targets.devices(targets.parse("h100:8")))
    assert built.callbacks[0].startswith("io_callback at") and "custom_call @xla" not in built.lowered.as_text()


def test_products_that_are_computed_for_nothing_are_a_warning(descent):
    """`repeats` has rows that no mesh axis splits, so all devices multiply all of them."""
    report = gspmd_lm.explain(own_steps.repeats, target="cpu:8")
    (found,) = [one for one in report.warnings if one.code == "needless-products"]
    assert re.match(r"a device computes 8.0 times .* tests/own_steps.py:\d+ has 100% of them", found.message)
    assert all(one.code != "needless-products" for one in descent.warnings)


def test_a_loop_whose_trip_count_the_compiler_alone_knows_computes_nothing_in_vain():
    report = gspmd_lm.explain(own_steps.turns, target="cpu:8")
    assert "trip count" in report.floor.estimated_because
    assert all(one.code != "needless-products" for one in report.warnings)


@pytest.mark.long
def test_a_step_is_traced_as_on_its_target():
    here, there = (gspmd_lm.explain(own_steps.asks_where_it_runs, target=target) for target in ("cpu:8", "v5e:2x4"))
    assert here.sent_bytes == 0 and there.sent_bytes == 4 * ROWS * WIDTH * 3 // 4
    assert jax.default_backend() == jax.devices()[0].platform == "cpu"


@pytest.mark.long
def test_a_function_that_says_in_python_how_it_is_split_is_not_compiled_for_tpus():
    with pytest.raises(InputError, match=r"own_steps.py:\d+, in \S+.*: custom_partitioning: .*\n  fix   .*shard_map"):
        gspmd_lm.explain(own_steps.partitioned, target="v5e:2x2")


@pytest.mark.parametrize("name", ["holds", "runs", "other_devices"])
def test_devices_that_are_not_here_hold_nothing(name):
    with pytest.raises(InputError, match=r"need not be here|is not made of the devices"):
        any_step.build(any_step.Program(f"tests.own_steps:{name}"), targets.devices(targets.parse("h100:8")))


@pytest.mark.parametrize(
    "place, message",
    [
        ("step", "step: no such form"),
        ("nowhere.py:step", "there is no file nowhere.py"),
        ("nowhere.at.all:step", "there is no module nowhere.at.all"),
        ("tests.own_steps:elementwize", r"has no elementwize \(did you mean elementwise\?\)"),
    ],
)
def test_where_a_function_is_looked_up(place, message):
    with pytest.raises(InputError, match=message):
        any_step.build(any_step.Program(place), [])


def test_what_a_step_of_ones_own_is_not_given():
    with pytest.raises(InputError, match="explain: tp8: one's own step is given a target alone"):
        gspmd_lm.explain(own_steps.descent, "tp8", "cpu:8")
    for step in (own_steps.descent, "tests.own_steps:descent"):
        with pytest.raises(InputError, match=r"explain: cpu:8: one's own .*\n  fix   explain\(step, target='cpu:8'\)"):
            gspmd_lm.explain(step, "cpu:8")
    lock = threading.Lock()
    with pytest.raises(
        InputError, match=r"<lambda>: its functions cannot be sent to the process that .*'_thread.lock'"
    ):
        gspmd_lm.explain(lambda devices: (lock, own_steps.descent(devices))[1], target="cpu:8")
