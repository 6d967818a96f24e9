"""Scores of labels from the sums of several batches, against their definitions over all rows at once."""

import functools
import itertools
import json
import types
from typing import Any

import jax
import numpy as np
import pytest
from etils import epath

from gspmd_lm.data.labelled import order_classes
from gspmd_lm.errors import InputError
from gspmd_lm.model.objectives import SEVERAL, class_scores, class_sums, number_scores, number_sums
from gspmd_lm.program.program import add_totals
from gspmd_lm.workdir import history

CUTS = (0, 37, 44, 100)  # three uneven batches
PADDING = 9  # rows at the end of each


def _batches(*arrays, padding):
    """The arrays in batches, each with rows of padding that hold what must not count."""
    for start, stop in itertools.pairwise(CUTS):
        yield [np.concatenate([one[start:stop], np.full((PADDING, *one.shape[1:]), pad, one.dtype)])
               for one, pad in zip(arrays, padding, strict=True)]  # fmt: skip


def _by_definition(predicted, labels, classes):
    """Accuracy, F1 of each class from its precision and recall, and the correlation of both one-hot tables."""
    f1 = {}
    for one in classes:
        right = ((predicted == one) & (labels == one)).sum()
        if (predicted == one).any() or (labels == one).any():
            precision, recall = right / max((predicted == one).sum(), 1), right / max((labels == one).sum(), 1)
            f1[one] = 2 * precision * recall / (precision + recall) if right else 0.0
    x, y = ((values[:, None] == np.asarray(classes)).astype(float) for values in (predicted, labels))
    x, y = x - x.mean(0), y - y.mean(0)
    matthews = (x * y).sum() / np.sqrt((x * x).sum() * (y * y).sum())
    return (predicted == labels).mean(), f1[1] if len(classes) == 2 else np.mean([*f1.values()]), matthews


@pytest.mark.parametrize("classes", [2, 5])
def test_scores_of_classes_are_those_of_all_rows_at_once(classes):
    draw = np.random.default_rng(classes)
    labels = draw.integers(0, min(classes, 4), 100).astype(np.int32)  # of five classes, one is neither true ...
    logits = draw.normal(size=(100, classes)).astype(np.float32)
    logits[np.arange(100), labels] += 0.7
    logits[:, 4:] = -9  # ... nor predicted, and has no F1
    totals = add_totals(jax.jit(class_sums)(x, y) for x, y in _batches(logits, labels, padding=(3, -1)))
    assert totals["true"].dtype == np.float64 and totals["true"].sum() == totals["predicted"].sum() == 100
    want = _by_definition(logits.argmax(1), labels, range(classes))
    assert [*class_scores(totals)] == ["eval_accuracy", "eval_f1", "eval_matthews"]
    assert [*class_scores(totals).values()] == pytest.approx(want, rel=1e-12)


def test_scores_that_are_not_defined_are_0():
    logits, sums = np.array([[1.0, 0.0]] * 3, np.float32), jax.jit(class_sums)
    alike = class_scores(add_totals([sums(logits, np.zeros(3, np.int32))]))
    assert alike == {"eval_accuracy": 1.0, "eval_f1": 0.0, "eval_matthews": 0.0}
    none = class_scores(add_totals([sums(logits, np.full(3, -1, np.int32))]))
    assert none == {"eval_accuracy": 0.0, "eval_f1": 0.0, "eval_matthews": 0.0}
    numbers = jax.jit(number_sums)(np.ones(3), np.arange(3.0), np.ones(3, bool))
    assert number_scores(add_totals([numbers])) == {"eval_pearson": 0.0}


def test_the_correlation_is_that_of_all_rows_at_once():
    draw = np.random.default_rng(0)
    labels = draw.uniform(0, 5, 100).astype(np.float32)
    predicted = (2 + 0.5 * labels + draw.normal(size=100)).astype(np.float32)
    counted = np.ones(100, bool)
    padded = _batches(predicted, labels, counted, padding=(np.nan, 0, False))
    totals = add_totals(jax.jit(number_sums)(*one) for one in padded)
    assert totals["labels"] == 100
    assert number_scores(totals)["eval_pearson"] == pytest.approx(np.corrcoef(predicted, labels)[0, 1], abs=1e-6)


def test_scores_of_several_classes_are_those_of_all_rows_at_once():
    draw = np.random.default_rng(0)
    logits, true = draw.normal(size=(100, 3)).astype(np.float32), draw.integers(0, 2, (100, 3))
    model: Any = types.SimpleNamespace(apply=lambda params, batch, key: batch["logits"])
    labels = (true @ [1, 2, 4]).astype(np.int32)
    batches = _batches(logits, labels, padding=(3, -1))
    evaluate = jax.jit(functools.partial(SEVERAL.evaluate, model, None))
    found = add_totals(evaluate({"logits": x, "labels": y}) for x, y in batches)
    of_true, said = np.where(true, 1 / (1 + np.exp(-logits)), 1 / (1 + np.exp(logits))), logits > 0
    precision, recall = true[said].mean(), said[true == 1].mean()
    wanted = {"eval_loss": -np.log(of_true).mean(), "eval_accuracy": (said == true).mean(),
              "eval_f1": 2 * precision * recall / (precision + recall), "eval_labels": 100}  # fmt: skip
    assert SEVERAL.scores(found) == pytest.approx(wanted, rel=1e-6)


def test_a_run_keeps_its_classes_and_refuses_others(tmp_path):
    workdir = epath.Path(tmp_path / "run")
    history.check_classes(workdir, (), ("a", "b"), print)
    about = {"mesh": {}, "rows": "", "device": "cpu"}
    history.write_description(workdir, {}, "", {}, ("a", "b"), **about)
    assert json.loads((workdir / "classes.json").read_text()) == ["a", "b"]
    known = history.known_classes(workdir)
    history.check_classes(workdir, known, ("a", "b"), print)
    history.check_classes(workdir, known, (), print)
    with pytest.raises(InputError, match=r"classes\.json: .* classes \['a', 'b'\], .* now has \['a', 'c'\]\n  fix "):
        history.check_classes(workdir, known, ("a", "c"), print)
    history.write_description(epath.Path(tmp_path / "other"), {}, "", {}, (), **about)
    assert not (tmp_path / "other" / "classes.json").exists()


def test_classes_of_published_weights_have_their_order(tmp_path):
    workdir, said = epath.Path(tmp_path), []
    (workdir / "hugging_face").mkdir()
    (workdir / "hugging_face/config.json").write_text(json.dumps({"id2label": {"1": "no", "0": "yes"}}))
    known = history.known_classes(workdir)
    assert known == ("yes", "no") == order_classes(["no", "yes"], known) and order_classes(["b", "a"], known) == (
        "a",
        "b",
    )
    for classes in (("yes", "no"), ("0", "1"), ()):
        history.check_classes(workdir, known, classes, said.append)
    assert not said
    history.check_classes(workdir, known, ("neg", "pos"), said.append)
    assert said == ["warning: the classes of the data, neg, pos, are not those of the model, yes, no: they are taken "
                    "to be in the same order"]  # fmt: skip
    new = epath.Path(tmp_path / "new")
    known = history.known_classes(new, str(workdir))  # of a run that begins with these weights
    history.check_classes(new, known, ("neg", "pos"), said.append)
    history.check_classes(new, known, ("neg", "none", "pos"), said.append)  # with another head
    assert len(said) == 2
    (workdir / "classes.json").write_text('["b", "a"]')  # of a run, which are never passed over
    assert history.known_classes(workdir) == ("b", "a") and history.known_classes(workdir / "none") == ()
