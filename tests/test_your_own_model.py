"""A model that is no decoder, with axes and arrays of its own: the example of docs/your_own_model.md is run here."""

import dataclasses
import functools
import re
import subprocess
import sys
import threading
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gspmd_lm
from gspmd_lm import Input, InputError, parameter, shard, use
from gspmd_lm.foresight import compile
from gspmd_lm.sharding import annotate
from tests.courses import begun
from tests.launched import compiled_here
from tests.quick import QUICK

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
sys.path.insert(0, str(EXAMPLES))

import mixer  # noqa: E402
import train_mixer  # noqa: E402

LAYOUTS = ("data", "fsdp", "tensor")
STEPS = 4


def layout(name):
    rules = gspmd_lm.load_rules("none" if name == "none" else f"examples/rules/{name}.yaml", mixer.TASK)
    return dataclasses.replace(rules, compiler_options={"cpu": QUICK})


def written(tmp_path, text):
    (tmp_path / "layout.yaml").write_text(text)
    return gspmd_lm.load_rules(str(tmp_path / "layout.yaml"), mixer.TASK)


@pytest.fixture(scope="module")
def steps():
    """The step under each layout, and on one device."""
    return {name: gspmd_lm.build(mixer.TASK, layout(name)) for name in ("none", *LAYOUTS)}


@pytest.fixture(scope="module")
def runs(steps):
    """Layout -> the compiled step, the state after STEPS steps and the losses."""
    found = {}
    for name, step in steps.items():
        program, state = step.compile(step.lower_train()), begun(step)
        found[name] = program, *train_mixer.train(step, program, state, 0, STEPS)
    return found


@pytest.fixture(scope="module")
def report_of(lines_of_python):
    """A function that explains the step under a layout, each once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compile, "_run_compiler", compiled_here)
        yield functools.cache(lambda name: gspmd_lm.compare(mixer.TASK, [layout(name)], "cpu:8")[0])


@pytest.mark.parametrize("name", LAYOUTS)
def test_losses_are_those_of_one_device(name, runs):
    one, many = runs["none"][2], runs[name][2]
    assert len(one) == STEPS and max(one) > 1.2
    np.testing.assert_allclose(many, one, rtol=0, atol=1e-5)


def test_arrays_live_where_the_rules_say(runs):
    def pieces(name, module, weight):
        array = runs[name][1].params[module][weight]
        return tuple(array.sharding.shard_shape(array.shape))

    assert pieces("data", "width_0", "up") == (32, 128)
    assert pieces("fsdp", "width_0", "up") == (4, 128) and pieces("fsdp", "patches_1", "down") == (8, 16)
    assert pieces("tensor", "width_0", "up") == (32, 32)
    moments = [leaf for leaf in jax.tree.leaves(runs["fsdp"][1].optimizer) if leaf.shape == (32, 128)]
    assert len(moments) == 4 and {leaf.sharding.shard_shape(leaf.shape) for leaf in moments} == {(4, 128)}


@pytest.mark.long
def test_a_checkpoint_goes_on_under_other_rules(steps, runs, tmp_path):
    with gspmd_lm.checkpoints(tmp_path, mixer.TASK) as checkpoints:
        assert checkpoints.restore(steps["fsdp"].abstract_state) is None
        checkpoints.save(STEPS, runs["fsdp"][1], {})
        checkpoints.wait()
        number, state, _ = checkpoints.restore(steps["tensor"].abstract_state)
    assert number == STEPS == int(state.step)
    up = state.params["width_0"]["up"]
    assert up.sharding.shard_shape(up.shape) == (32, 32)
    for saved, restored in zip(jax.tree.leaves(runs["fsdp"][1].params), jax.tree.leaves(state.params), strict=True):
        np.testing.assert_array_equal(saved, restored)
    _, losses = train_mixer.train(steps["tensor"], runs["tensor"][0], state, STEPS, STEPS + 1)
    again = train_mixer.run(layout("none"), STEPS + 1, tmp_path)  # which restores it too
    _, expected = train_mixer.train(steps["data"], *runs["data"][:2], STEPS, STEPS + 1)
    np.testing.assert_allclose([losses, again], [expected, expected], rtol=0, atol=1e-5)
    other = dataclasses.replace(mixer.TASK, name="another")
    with gspmd_lm.checkpoints(tmp_path, other) as checkpoints, pytest.raises(InputError, match="another"):
        checkpoints.restore(steps["tensor"].abstract_state)


def test_a_dry_run_lists_every_array_and_compiles_nothing(monkeypatch):
    monkeypatch.setattr(jax.stages.Lowered, "compile", None)
    page = gspmd_lm.dry_run(mixer.TASK, layout("tensor"))
    assert re.search(r"width_0.up +width mixed +32 x 128 +mixed/tensor +4,096\n", page)
    assert re.search(r"mixed_width +batch patch mixed +16 x 16 x 128 +batch/data mixed/tensor +16,384\n", page)
    assert re.search(r"labels +batch +16 +batch/data +32\n", page)
    assert set(mixer.VOCABULARY.activations) <= set(re.findall(r"^(\w+) ", page, re.M))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{mesh: {data: 8}, rules: {batch: data, widht: data}}",
         "rules.widht: unknown axis widht (did you mean width?)\n  rule  {file}: rules.widht: data\n  fix   use "),
        ("{mesh: {data: 8}, rules: {heads: data}}", "rules.heads: unknown axis heads\n"),
        ("{mesh: {data: 8}, rules: {batch: data, steam.width: data}}",
         "rules.steam.width: no array is named steam (did you mean stream?)\n"),
        ("{mesh: {data: 8}, rules: {batch: data, stem.mixed: data}}",
         "rules.stem.mixed: stem has no axis mixed\n  rule  {file}: rules.stem.mixed: data\n"
         "  fix   use pixel or width"),
        ("{mesh: {data: 8}, rules: {label: data}}",
         "head: label=4 does not divide over data=8\n  rule  {file}: rules.label: data\n"
         "  fix   --set rules.rules.label=null"),
        ("{mesh: {data: 8}, rules: {batch: data}, microbatches: 8}",
         "batch=4 in each of 8 microbatches does not divide over data=8\n  rule  {file}: rules.batch: data\n"
         "  fix   make the rows of a batch a multiple of 64"),
        ("{mesh: {data: 8}, rules: {batch: data}, microbatches: 5}",
         "images: batch=32 does not divide into microbatches=5"),
        ("{mesh: {data: 8}, rules: {batch: data}, remat: {save: [mixed_widht]}}",
         "remat: no activation of a block is named mixed_widht (did you mean mixed_width?)"),
    ],
)  # fmt: skip
def test_a_wrong_rules_file_names_row_and_fix(text, message, tmp_path):
    rules = written(tmp_path, text)
    for use_of in (gspmd_lm.dry_run, gspmd_lm.build):
        with pytest.raises(InputError) as error:
            use_of(mixer.TASK, rules)
        assert message.format(file=tmp_path / "layout.yaml") in str(error.value)


def test_a_key_that_the_model_does_not_ask_for_is_a_warning(tmp_path):
    rules = written(
        tmp_path, "{mesh: {data: 8}, rules: {batch: data}, remat: block, attention: {cpu: xla, tpu: splash}}"
    )
    page = gspmd_lm.dry_run(mixer.TASK, rules)
    assert page.startswith("warning: remat: the model does not use this key, so the key has no effect\n  rule  ")
    assert page.count("warning") == 1  # splash is for another platform than this one

    def sums(params, batch, key):
        assert annotate.remat() is None  # where nothing is placed, or is only recorded
        return mixer.sums(params, batch, key)

    assert "warning" not in gspmd_lm.dry_run(dataclasses.replace(mixer.TASK, sums=sums), rules)


def test_rules_of_another_model_are_refused():
    with pytest.raises(InputError, match=r"tp8\.yaml: was loaded with another vocabulary than that of mixer"):
        gspmd_lm.build(mixer.TASK, gspmd_lm.load_rules("tp8"))


class Wrong(nn.Module):
    """A model whose one weight and one activation are named as the test says."""

    weight: str = "stem"
    axes: str = "pixel width"
    spec: str = "stream: batch patch width"

    @nn.compact
    def __call__(self, images_BPX):
        stem_XW = use(parameter(self, self.weight, self.axes, (16, 32), nn.initializers.ones))
        return shard(images_BPX @ stem_XW, self.spec)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"spec": "straem: batch patch width"},
         'shard(x, "straem: batch patch width"): the model has no activation straem (did you mean stream?)\n'
         "  fix   use one of images, labels, stream, "),
        ({"spec": "stream: batch patch widht"}, "the model has no axis widht (did you mean width?)"),
        ({"spec": "stream: batch width"}, "stream has 2 axes here, and x has 3 dimensions"),
        ({"weight": "stam"}, "  stam: pixel width: no weight is named stam (did you mean stem?)"),
        ({"axes": "pixel widht"}, "  stem: pixel widht: unknown axis widht (did you mean width?)"),
    ],
)  # fmt: skip
def test_wrong_names_in_a_model_are_told(names, message):
    model = Wrong(**names)

    def sums(params, batch, key):
        return mixer.Sums(model.apply({"params": params}, batch["images"]).sum(), jnp.zeros(()))

    def init(key):
        return model.init(key, jnp.zeros((1, 16, 16)))["params"]

    with pytest.raises(InputError) as error:
        gspmd_lm.dry_run(dataclasses.replace(mixer.TASK, sums=sums, init=init), layout("data"))
    assert message in str(error.value)


def test_parameters_without_axes_inputs_without_rows_and_states_without_names_are_told():
    def init(key):
        return nn.Dense(4).init(key, jnp.zeros((1, 16)))["params"]

    with pytest.raises(InputError, match="kernel: _0 _1: no weight is named kernel"):
        gspmd_lm.dry_run(dataclasses.replace(mixer.TASK, init=init), layout("data"))
    with pytest.raises(InputError, match="labels: the first axis of 'labels: label' is not batch"):
        dataclasses.replace(mixer.TASK, inputs={"labels": Input((32,), "int32", "labels: label")})
    with pytest.raises(InputError, match=r"images: \(32, 16\) has another number of dimensions"):
        dataclasses.replace(mixer.TASK, inputs={"images": Input((32, 16), "float32", "images: batch patch pixel")})
    with pytest.raises(InputError, match="a batch has no arrays"):
        dataclasses.replace(mixer.TASK, inputs={})
    for given in (lambda *_: jnp.zeros(()), lambda *_: mixer.Sums(jnp.zeros(3), jnp.zeros(()))):
        with pytest.raises(InputError, match=r"sums\(\) must return a NamedTuple"):
            gspmd_lm.dry_run(dataclasses.replace(mixer.TASK, sums=given), layout("data"))
    flat = optax.GradientTransformation(
        lambda params: jax.tree.map(lambda p: jnp.zeros(p.size), params),
        lambda updates, state, params: (updates, state),
    )
    with pytest.raises(InputError, match=r"the optimizer's state \S*head, \[128\], does not have the shape"):
        gspmd_lm.dry_run(dataclasses.replace(mixer.TASK, optimizer=lambda named: flat), layout("data"))


def test_a_word_says_the_number_of_dimensions_without_any_placement():
    with pytest.raises(InputError, match="hidden has 2 axes here, and x has 3 dimensions"):
        shard(jnp.zeros((2, 3, 4)), "hidden: batch seq")
    assert annotate.placement().is_single
    x = jnp.ones((2, 3))
    np.testing.assert_array_equal(shard(x, "my_hidden: some other"), x)


# What happens in the program: which row causes each collective.
CAUSES = {"data": {"rules.batch"}, "fsdp": {"rules.batch", "weights.width", "weights.patches_0.up.mixed",
          "weights.patches_0.down.mixed", "weights.patches_1.up.mixed", "weights.patches_1.down.mixed"},
          "tensor": {"rules.batch", "rules.mixed"}}  # fmt: skip
# Replicas sum their gradients, which is a part of what the other layouts do.
REPORTED = [pytest.param("data", marks=pytest.mark.slow), "fsdp", "tensor"]


@pytest.mark.long
@pytest.mark.parametrize("name", REPORTED)
def test_every_collective_has_a_row_and_a_line(name, report_of):
    found = report_of(name).collectives
    assert {row for one in found for row in one.rules} <= CAUSES[name]
    for one in found:
        axes = {axis for row in layout(name).rows if row.key in one.rules for axis in row.mesh_axes}
        assert set(one.mesh_axes) <= axes, one
        assert one.op and re.match(r"(examples/mixer|gspmd_lm/\w+/\w+)\.py:\d+$", one.source), one
    assert all(one.source.startswith("examples/mixer.py:") for one in found if one.phase == "forward")
    forward = {row for one in found if one.phase == "forward" for row in one.rules}
    assert forward == {"data": set(), "fsdp": CAUSES["fsdp"] - {"rules.batch"}, "tensor": {"rules.mixed"}}[name]


@pytest.mark.long
@pytest.mark.parametrize("name", REPORTED)
def test_the_floor_counts_products_and_state(name, report_of):
    rows, patches, pixels, width, labels = mixer.ROWS, mixer.PATCHES, mixer.PIXELS, mixer.WIDTH, mixer.LABELS
    block = 2 * rows * patches * width * (mixer.MIXED["patch"] + mixer.MIXED["width"])
    products = 3 * (2 * 2 * block + 2 * rows * width * labels) + 2 * 2 * rows * patches * pixels * width
    report = report_of(name)
    floor = report.floor
    assert floor.flops * 8 == products
    assert floor.compute_s is None and not floor.estimated_because
    # On CPU, gradients that could be scattered are reduced to all, which is twice as much.
    low, high = {"data": (1, 1.001), "fsdp": (1.4, 1.6), "tensor": (1, 1.001)}[name]
    assert low <= report.above_floor < high
    assert report.memory.weights_bytes == {"data": 84992, "fsdp": 10624, "tensor": 23552}[name]
    assert "the least that this layout can send" in gspmd_lm.show(report)


def test_functions_that_cannot_be_sent_to_the_compiler_are_told():
    lock = threading.Lock()
    with pytest.raises(InputError, match="mixer: its functions cannot be sent to the process that compiles"):
        gspmd_lm.explain(dataclasses.replace(mixer.TASK, count=lambda batch: lock), layout("data"), "cpu:8")
    with pytest.raises(InputError, match="only the decoder generates"):
        gspmd_lm.explain(mixer.TASK, layout("data"), "cpu:8", phase="decode")
    with pytest.raises(InputError, match=r"phase=trian: no such phase \(did you mean train\?\)"):
        gspmd_lm.explain(mixer.TASK, layout("data"), "cpu:8", phase="trian")


def test_importing_the_package_is_cheap_and_its_names_are_there():
    program = "import sys, gspmd_lm; print(gspmd_lm.__version__, 'jax' in sys.modules, 'numpy' in sys.modules)"
    program += "; gspmd_lm.load_config('tiny'), gspmd_lm.load_rules('tp8'); print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.split() == [gspmd_lm.__version__, "False", "False", "False"]
    assert dir(gspmd_lm) == gspmd_lm.__all__
    for name in gspmd_lm.__all__:
        assert getattr(gspmd_lm, name).__doc__, name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        gspmd_lm.nothing  # noqa: B018


def test_the_page_shows_the_code_that_runs():
    page = (ROOT / "docs" / "your_own_model.md").read_text()
    shown = (ROOT / "tests" / f"{name}.py" for name in ("own_models", "plain_models", "public_nnx"))
    running = *EXAMPLES.glob("*.py"), *EXAMPLES.glob("rules/*.yaml"), *shown
    files = [path.read_text() for path in running]
    blocks = re.findall(r"```(?:python|yaml)\n(.*?)```", page, re.S)
    assert len(blocks) >= 6
    for block in blocks:
        for part in re.split(r"^ *\.\.\.\n", block, flags=re.M):  # what is left out
            assert any(part.strip("\n") in text for text in files), part
    for name in (*LAYOUTS, "mixer.py", "train_mixer.py"):
        assert name in page
    assert set(re.findall(r"gspmd_lm\.(\w+)\(", page)) <= set(gspmd_lm.__all__)
