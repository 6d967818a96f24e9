"""The examples in plain Flax get the whole trainer, and other layouts do not change what they learn."""

import copy
import dataclasses
import importlib
import json
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import gspmd_lm
from gspmd_lm import InputError, session
from gspmd_lm.config import Samples, Train
from gspmd_lm.foresight import compile
from gspmd_lm.show import run
from gspmd_lm.train.programs import PreRunReport
from gspmd_lm.units import human_short
from tests.launched import compiled_here
from tests.quick import QUICK

EXAMPLES = Path(__file__).parent.parent / "examples"
sys.path.insert(0, str(EXAMPLES))

import classifier  # noqa: E402
import train  # noqa: E402

MODELS = ("classifier", "vit", "reverser")


def layout(task, name):
    rules = gspmd_lm.load_rules(name if name == "none" else f"examples/rules/plain_{name}.yaml", task)
    return dataclasses.replace(rules, compiler_options={"cpu": QUICK})


def losses(model, name, steps=2):
    step = gspmd_lm.build(model.TASK, layout(model.TASK, name))
    program, state, values = step.compile(step.lower_train()), step.compile(step.lower_init())(), []
    for number in range(steps):
        state, metrics = program(state, jax.device_put(dict(model.batch(number)), step.batch_shardings))
        values.append(float(metrics["loss"]))
    return values


@pytest.mark.slow  # the classifier's run, below, ends where one device does
@pytest.mark.parametrize(("name", "split"), [("vit", "tensor"), ("reverser", "fsdp")])
def test_an_example_has_the_losses_of_one_device(name, split):
    model = importlib.import_module(name)
    np.testing.assert_allclose(losses(model, split), losses(model, "none"), rtol=0, atol=1e-5)


@pytest.mark.slow  # test_other_models.py and test_your_own_model.py have reports on tasks by default
def test_explain_takes_the_vision_transformer(monkeypatch, lines_of_python):
    monkeypatch.setattr(compile, "_run_compiler", compiled_here)
    vit = importlib.import_module("vit")
    report = gspmd_lm.explain(vit.TASK, layout(vit.TASK, "tensor"), "cpu:8")
    assert report.floor.communication_bytes and not report.floor.estimated_because
    assert 1 <= report.above_floor < 1.05
    assert {row for one in report.collectives for row in one.rules} == {"rules.batch", "rules.mlp", "weights.embed"}
    assert {one.source.split(":")[0] for one in report.memory.largest} == {"examples/vit.py"}


@pytest.mark.slow
def test_plan_takes_the_vision_transformer(monkeypatch):
    monkeypatch.setattr(compile, "_run_compiler", compiled_here)
    plan = gspmd_lm.plan(importlib.import_module("vit").TASK, "cpu:8")
    assert plan.searched > 50 and {row.axis for row in plan.rules.rows} >= {"batch"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of the classifier that was stopped and went on under other rules, and the numbers of its batches."""
    workdir, asked, values = tmp_path_factory.mktemp("run"), [], []

    def batch(step):
        asked.append(step)
        return classifier.batch(step)

    for name, steps in (("fsdp", 20), ("none", None)):
        asked.append(name)
        rules = layout(classifier.TASK, name)
        values.append(gspmd_lm.train(classifier.TASK, rules, workdir, steps, data=batch, held_out=classifier.HELD_OUT))
    return workdir, asked, values


def test_a_task_is_trained_evaluated_and_resumed_under_other_rules(trained, capsys):
    workdir, asked, (first, last) = trained
    first_rows, later_rows = asked[1 : asked.index("none")], asked[asked.index("none") + 1 :]
    # The first batch also says which data they are.
    assert sorted(first_rows) == [0, *range(20)] and sorted(later_rows) == [0, *range(20, 40)]
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    scores = {row["step"]: row["eval_accuracy"] for row in rows if "eval_accuracy" in row}
    assert [*scores] == [20, 40] and scores[20] < 0.7 < 0.9 < scores[40]
    assert first["loss"] > 1 > last["loss"] and max(row.get("rows", 0) for row in rows) == 40 * classifier.ROWS
    assert last.losses[-1] == (40, last["loss"]) and last.run.config["task"] == "classifier"
    assert {"rows_per_s"} == {name for row in rows for name in row if name.endswith("_per_s")}
    figures = {fact.name: fact.value for fact in run.figures(last.run)}
    assert figures["rows"] == human_short(40 * classifier.ROWS) and figures["rows/s"] != "-" and "tokens" not in figures


@pytest.mark.long
def test_a_run_ends_where_one_device_does_and_goes_on_from_a_checkpoint_bit_by_bit(trained, tmp_path):
    step = gspmd_lm.build(classifier.TASK, layout(classifier.TASK, "none"))
    program, state = step.compile(step.lower_train()), step.compile(step.lower_init())()

    def course(state, first, last):
        for number in range(first, last):
            state, metrics = program(state, jax.device_put(dict(classifier.batch(number)), step.batch_shardings))
        return state, float(metrics["loss"])

    state, _ = course(state, 0, 20)
    with gspmd_lm.checkpoints(tmp_path, classifier.TASK) as checkpoints:
        checkpoints.save(20, state, {})
        checkpoints.wait()
        restored = checkpoints.restore(step.abstract_state)[1]
    before = {name: np.array(x) for name, x in state.params["batch_stats"]["block_0"]["norm"].items()}
    (straight, loss), (resumed, again) = (course(one, 20, 40) for one in (state, restored))
    np.testing.assert_allclose(trained[2][1]["loss"], loss, rtol=0, atol=1e-4)
    changed = resumed.params["batch_stats"]["block_0"]["norm"]
    assert loss == again and all(np.abs(changed[name] - before[name]).max() > 0.01 for name in ("mean", "var"))
    jax.tree.map(np.testing.assert_array_equal, resumed[1:3], straight[1:3])
    # Running averages are at rest whole, those of the optimizer are none, and rows of a microbatch are not the batch.
    assert {*straight.params} == {"params", "batch_stats"} and "batch_stats" not in str(step.arrays.named_optimizer)


@pytest.mark.parametrize(
    ("changes", "name", "message"),
    [
        ({}, "tensor", "batch_stats.block_0.norm.mean: each step leaves it new from the whole batch, which no "
                       "microbatch has\n  rule  examples/rules/plain_tensor.yaml: microbatches: 2\n  fix   set "),
        ({"init": lambda key: {"params": classifier.init(key)["params"], "batch_stats": {}}}, "none",
         "new state\n  batch_stats.block_0.norm.mean: float32[32], and init gives none that gradients leave"),
    ],
)  # fmt: skip
def test_state_that_no_step_can_leave_is_refused(changes, name, message):
    task = dataclasses.replace(classifier.TASK, **changes)
    with pytest.raises(InputError) as error:
        gspmd_lm.dry_run(task, layout(task, name))
    assert message in str(error.value)


def test_state_that_no_step_changes_is_told():
    def sums(variables, batch, key):
        return classifier.compared(classifier.Classifier().apply(variables, batch["images"]), batch["labels"])

    page = gspmd_lm.dry_run(dataclasses.replace(classifier.TASK, sums=sums), layout(classifier.TASK, "none"))
    assert page.count(": neither gradients nor sums() change it, so it stays as init gave it") == 4


@pytest.mark.long
def test_a_run_says_that_its_data_are_others_now_and_does_nothing_at_its_end(trained, capsys):
    workdir = trained[0]
    again = gspmd_lm.train(classifier.TASK, layout(classifier.TASK, "none"), workdir, data=classifier.batch)
    assert not again and "nothing to do up to step 40" in capsys.readouterr().out
    with pytest.raises(InputError, match="a run of the task classifier, whose model is no decoder of a config"):
        gspmd_lm.load(workdir)
    other = dataclasses.replace(classifier.TASK, name="another")
    with pytest.raises(InputError, match="another"):
        gspmd_lm.train(other, layout(other, "none"), workdir, data=classifier.batch)
    shifted = dataclasses.replace(classifier.TASK, train=Train(steps=41))
    gspmd_lm.train(shifted, layout(shifted, "none"), workdir, data=lambda step: classifier.batch(step + 1))
    assert "warning: the rows are not those that" in capsys.readouterr().out


def test_a_run_is_loaded_and_evaluated_as_training_did(trained):
    workdir, rows = trained[0], [json.loads(line) for line in (trained[0] / "metrics.jsonl").read_text().splitlines()]
    (last,) = [row for row in rows if row["step"] == 40 and "eval_loss" in row]
    loaded = gspmd_lm.load_task(workdir, classifier.TASK, layout(classifier.TASK, "fsdp"), 40)
    scores = loaded.evaluate(classifier.HELD_OUT)
    assert scores == pytest.approx({name: last[name] for name in scores}, abs=1e-5) and "eval_accuracy" in scores
    with pytest.raises(InputError, match="evaluate: there are no batches"):
        loaded.evaluate([])
    with pytest.raises(InputError, match=r"task classifier does not say how it generates\n  fix   Task\("):
        gspmd_lm.load_task(workdir, classifier.TASK, "none").generate(classifier.HELD_OUT[0], 1)
    with pytest.raises(InputError, match="no checkpoint"):
        gspmd_lm.load_task(workdir / "empty", classifier.TASK, "none")


@pytest.fixture(scope="module")
def reverser(tmp_path_factory):
    """The example, and a run of two steps on a device whose peak is known."""
    model, workdir = importlib.import_module("reverser"), tmp_path_factory.mktemp("reverser")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "PreRunReport", lambda *facts: PreRunReport(*facts[:-1], 1e12))
        gspmd_lm.train(model.TASK, layout(model.TASK, "none"), workdir, 2, data=model.batch)
    return model, workdir


@pytest.fixture(scope="module")
def loaded(reverser):
    """The model of that run, on one device."""
    model, workdir = reverser
    return gspmd_lm.load_task(workdir, model.TASK, layout(model.TASK, "none"))


@pytest.mark.long
def test_mfu_of_a_task_is_that_of_the_products_in_its_traced_step(reverser):
    model, workdir = reverser
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    mfu, step_time_s = next((row["mfu"], row["step_time_s"]) for row in rows if "mfu" in row)
    R, T, D, F, V = model.ROWS, model.LENGTH, model.WIDTH, model.HIDDEN, model.VOCAB
    attention = 4 * 2 * R * T * D * D + 2 * 2 * R * T * T * D  # its weights; its scores and their use
    forward = 3 * attention + 2 * (2 * 2 * R * T * D * F) + 2 * R * T * D * V
    assert mfu * step_time_s * 1e12 == pytest.approx(3 * forward, rel=1e-3)


@pytest.mark.slow
def test_a_task_generates_what_its_own_functions_choose_under_every_layout(reverser, loaded):
    model, workdir = reverser
    source, wanted = model.batch(5)["source"][:5], np.zeros((5, model.LENGTH), np.int32)
    following = jax.jit(model.following)
    for at in range(model.LENGTH):
        wanted[:, at] = following(loaded.params, source, wanted, at)[0].argmax(-1)
    assert len({*wanted.ravel().tolist()}) > 2, "the texts must differ, else any program has them"
    assert loaded.generate({"source": source}, model.LENGTH) == wanted.tolist()
    split = gspmd_lm.load_task(workdir, model.TASK, layout(model.TASK, "tensor"))
    assert split.rules.devices == 8 and split.generate({"source": source}, model.LENGTH) == wanted.tolist()
    end = int(wanted[0, 3])
    ends = copy.copy(loaded)  # which has the same program
    ends.task = dataclasses.replace(model.TASK, generation=model.TASK.generation._replace(end=end))
    shorter = ends.generate({"source": source}, model.LENGTH)
    assert shorter == [row[: row.index(end)] if end in row else row for row in wanted.tolist()]
    drawn = [loaded.generate({"source": source}, model.LENGTH, temperature=3.0, seed=seed) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.long
@pytest.mark.parametrize(
    ("functions", "batch", "tokens", "message"),
    [
        ({}, {"source": np.zeros((4, 3), np.int32)}, 2,
         r"generate: batch\n  source: int32\[4, 3\], and the task's inputs say int32\[4, 8\]\n  fix"),
        ({}, {"source": np.zeros((4, 8), np.int32), "target": np.zeros((3, 8), np.int32)}, 2,
         r"target: int32\[3, 8\], and the task's inputs say int32\[4, 8\]"),
        ({}, {"sauce": np.zeros((4, 8), np.int32)}, 2, "sauce: int32.*say nothing"),
        ({}, {}, 2, "the batch has no rows"),
        ({}, {"source": np.zeros((4, 8), np.int32)}, 0, "nothing to generate"),
        ({"begin": lambda params, batch: (batch["source"][0] * 1.0, ())}, None, 2, r"logits of \(8,\) for 32 rows"),
        ({"extend": lambda params, state, tokens: (tokens[:, None] * 1.0, ())}, None, 2,
         r"extend\(\) returned the state"),
    ],
)  # fmt: skip
def test_what_generation_cannot_take_is_told(reverser, loaded, functions, batch, tokens, message):
    model, workdir = reverser
    task = dataclasses.replace(model.TASK, generation=model.TASK.generation._replace(**functions))
    with pytest.raises(InputError, match=message):
        loaded = gspmd_lm.load_task(workdir, task, layout(task, "none")) if functions else loaded
        loaded.generate({"source": np.zeros((4, 8), np.int32)} if batch is None else batch, tokens)


def wide(step):
    return {name: array[:, None] if name == "labels" else array for name, array in classifier.batch(step).items()}


@pytest.mark.parametrize(
    ("settings", "arguments", "message"),
    [
        ({"train": None}, {"data": classifier.batch}, "train: task classifier: the task has no train\n  fix   Task("),
        ({}, {}, "train: task classifier: there is no data"),
        ({"train": Train(steps=1, init_from="runs/a")}, {"data": classifier.batch},
         "train.samples and train.init_from need the decoder of a config"),
        ({"train": Train(steps=1, samples=Samples(prompts=("a",)))}, {"data": classifier.batch},
         "train.samples and train.init_from need the decoder"),
        ({"train": Train(steps=2, eval_every=1, keep_best=True)}, {"data": classifier.batch},
         "train.keep_best and train.patience need held_out"),
        ({"evaluate": None}, {"data": classifier.batch, "held_out": classifier.HELD_OUT},
         "held_out needs evaluate in the task, since sums() changes the model's state"),
        ({}, {"data": wide}, "training: batch 0\n  labels: int32[32, 1], and the task's inputs say int32[32]\n  fix"),
    ],
)  # fmt: skip
def test_what_a_task_cannot_be_trained_with_is_told(settings, arguments, message, tmp_path):
    task = dataclasses.replace(classifier.TASK, **settings)
    with pytest.raises(InputError) as error:
        gspmd_lm.train(task, "none", tmp_path, **arguments)
    assert message in str(error.value)
    with pytest.raises(InputError, match="data and held_out are a task's"):
        gspmd_lm.train("tiny", "none", tmp_path, data=classifier.batch)


@pytest.mark.parametrize("name", MODELS)
def test_the_script_shows_each_example(name, monkeypatch, capsys):
    arguments = [name, "--rules=examples/rules/plain_fsdp.yaml", "--dry_run"]
    monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
    train.main()
    page = capsys.readouterr().out
    assert "warning" not in page and page.count("embed/fsdp  replicated") > 5 and ", 0 of them without an axis" in page
