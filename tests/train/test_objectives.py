"""Encoders from the command line: they guess masked tokens of texts, or learn labels, evaluate and go on."""

import json
from typing import Any

import numpy as np
import pytest
import yaml
from flax.traverse_util import flatten_dict

from gspmd_lm import cli
from gspmd_lm.config import Lora, Patches, load, nest, to_dict
from gspmd_lm.data import loader
from gspmd_lm.errors import InputError
from gspmd_lm.train import decoder, init_from
from gspmd_lm.workdir import checkpoint
from tests.courses import weights
from tests.quick import QUICK_FLAGS

BERT = {
    "layers": 1, "embed": 32, "heads": 8, "kv_heads": 8, "head_dim": 4, "mlp": 64, "vocab": 257, "padded_vocab": 264,
    "context": 64, "attention.mask": "full", "norm.pre": False, "norm.sum": True, "norm.final": False,
    "norm.kind": "layernorm",
    "norm.bias": True, "embedding.norm": True, "feed_forward.kind": "plain", "feed_forward.activation": "gelu",
    "positions": "learned",
    "embedding.token_types": 2, "attention.qkv_bias": True, "attention.out_bias": True, "feed_forward.bias": True,
    "compute_dtype": "float32",
}  # fmt: skip
LABELS = {"fields": ["text"], "label": "mood", "seq": 16}
KINDS = {
    "masked": ({"logits.transform": True, "embedding.tied": True, "logits.bias": True}, {"seq": 32}, "perplexity"),
    "replaced": ({"classes.count": 1, "classes.of": "tokens"}, {"seq": 32}, "recall"),
    "classes": ({"classes.count": 2}, LABELS, "f1"),
    "several": ({"classes.count": 3}, LABELS | {"label": "moods", "label_kind": "classes"}, "f1"),
    "numbers": ({"classes.count": 1}, LABELS | {"label": "size", "label_kind": "number"}, "pearson"),
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("GSPMD_LM_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    moods = [("glad", "nice"), ("sad", "poor")]
    lines = [{"text": f"{moods[i % 2][1]} {i * i}", "mood": moods[i % 2][0], "size": i / 60,
              "moods": [moods[i % 2][0], *["late"] * (i > 29)]} for i in range(60)]  # fmt: skip
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return tmp_path


def flat(tree) -> dict[str, Any]:
    arrays: dict[str, Any] = flatten_dict(tree, sep=".")
    return arrays


def _written(kind):
    model, data, _ = KINDS[kind]
    sections = {
        "objective": kind if kind in ("masked", "replaced") else "classes", "model": nest(BERT | model),
        "data": {"source": "a.jsonl", "batch": 8, "held_out": 0.3} | data,
        "optimizer": {"learning_rate": 1.0e-2}, "train": {"steps": 20, "log_every": 1, "trackers": []},
    }  # fmt: skip
    with open("bert.yaml", "w") as file:
        yaml.safe_dump(sections, file)


SLOW = [pytest.param(kind, True, "fsdp8", marks=pytest.mark.slow) for kind in KINDS]
SLOW.append(pytest.param("masked", False, "none", marks=pytest.mark.slow))


@pytest.mark.long
@pytest.mark.parametrize(("kind", "in_parts", "rules"), [("classes", True, "none"), *SLOW])
def test_it_trains_evaluates_and_goes_on(kind, in_parts, rules, folder, capsys):
    _written(kind)

    def run(*arguments):
        with pytest.raises(SystemExit) as end:
            cli.main(["main.py", *arguments, "--workdir=W", *QUICK_FLAGS])
        said = capsys.readouterr()
        assert end.value.code == 0, said.out + said.err
        return said.out

    run("--config=bert.yaml", f"--rules={rules}", f"--steps={2 if in_parts else 20}")
    assert not in_parts or "restored step 2" in run()
    rows = [json.loads(line) for line in (folder / "W" / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert len(losses) == 20 and np.mean(losses[-4:]) < 0.9 * np.mean(losses[:4])
    last = next(row for row in reversed(rows) if "eval_loss" in row)
    count = "eval_tokens" if kind in ("masked", "replaced") else "eval_labels"
    assert last[f"eval_{KINDS[kind][2]}"] >= 0 and last[count] > 10, last
    if in_parts:
        said = run("eval")
        assert KINDS[kind][2] in said and f"{last[count]:,.0f} {count.removeprefix('eval_')} were scored" in said
    assert (folder / "W" / "classes.json").exists() == (kind in ("classes", "several"))


@pytest.mark.parametrize("kind", KINDS)
def test_the_data_has_what_a_batch_holds(kind, folder):
    _written(kind)
    config = load("bert.yaml")
    train, _ = loader.open_loaders(config)
    rows = train.rows_at(0, slice(None))
    assert {name: (rows[name].dtype.name, rows[name].shape) for name in decoder.inputs(config)} == {
        name: (one.dtype, tuple(one.shape)) for name, one in decoder.inputs(config).items()
    }


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("classes", ("data.fields=[]", "data.label=''"), r"data\.label do not say what a text(.|\n)*fix "),
        ("classes", ("model.classes.count=3",),
         r"has 2 labels, and model\.classes\.count is 3(.|\n)*fix   --set model\.classes\.count=2"),
        ("classes", ("model.embedding.token_types=1", "data.fields=[text, text]"),
         r"and model\.embedding\.token_types is 1\n  fix "),
        ("classes", ("model.classes.count=1",), r"label_kind: class(es)? goes with a model\.classes\.count "),
        ("replaced", ("model.classes.count=2",), r"model\.classes: of: tokens needs count: 1"),
        ("replaced", ("objective=classes",), r"With model\.classes\.of: tokens, it is replaced: leave"),
        ("replaced", ("data.fields=[text]", "data.label=mood"), r"objective: replaced needs texts, without"),
        ("masked", ("data.fields=[text]", "data.label=mood"), r"objective: masked needs texts, without data.fields"),
        ("masked", ("data.fields=[text]", "data.label=mood", "objective=causal", "model.attention.mask=causal",
                    "model.embedding.token_types=0"), r"objective: causal needs texts or conversations"),
    ],
)  # fmt: skip
def test_data_of_another_objective_is_refused(kind, changes, message, folder):
    _written(kind)
    with pytest.raises(InputError, match=message):
        loader.open_loaders(load("bert.yaml", changes))


@pytest.mark.long
def test_a_head_that_weights_lack_is_new(folder, small, built):
    """A model that says a number begins with what guessed tokens, and a classifier with that."""
    shared = {"layers": 1, **BERT | {"vocab": 61, "padded_vocab": 64, "context": 32}}
    before = small(objective="masked", **shared | KINDS["masked"][0])
    for name, classes, kind, new in (("a", 1, "number", ["classifier", "classifier_bias", "pooler", "pooler_bias"]),
                                     ("b", 3, "class", ["classifier", "classifier_bias"])):  # fmt: skip
        params = weights(before.model)
        with checkpoint.run_checkpoints(folder / name, before) as checkpoints:
            checkpoints.save(0, {"params": params}, {"data": "", "rules": ""})
        (folder / name / "config.yaml").write_text(yaml.safe_dump(to_dict(before)))
        after = small(objective="classes", data={"label_kind": kind, "fields": ("text",), "label": "mood"},
                      train={"init_from": str(folder / name)}, **shared | {"classes.count": classes})  # fmt: skip
        found, step = init_from.find(after), built(after, "fsdp2_tp4")
        assert sorted(found.new) == new
        number, given = found.restore(step)
        given, old, wanted = flat(given), flat(params), flat(step.abstract_state.params)
        assert number == 0 and given.keys() == wanted.keys()
        for path, array in given.items():
            assert (array.shape, array.sharding) == (wanted[path].shape, wanted[path].sharding), path
            assert path in new or np.array_equal(array, old[path]), path
        assert np.std(given["classifier"]) > 0
        before = after
    with pytest.raises(InputError, match=r"lacks .*classifier.*model\.lora trains adapters alone\n  fix "):
        begun = small(objective="classes", lora=Lora(rank=2, targets=("wq",)), train={"init_from": str(folder / "a")},
                      **shared | {"classes.count": 2})  # fmt: skip
        init_from.find(begun).restore(built(begun, "fsdp2_tp4"))
    seen = small(objective="classes", data={"source": "photos", "seq": 8}, train={"init_from": str(folder / "a")}, **{
        **shared, "vocab": 0, "padded_vocab": 0, "embedding.token_types": 0, "classes.count": 2, "context": 5,
        "patches": Patches(image=8, size=4),
    })  # fmt: skip
    with pytest.raises(
        InputError,
        match=r"checkpoint of another architecture(.|\n)*  vocab: 61 in the checkpoint, 0 (.|\n)* or another workdir$",
    ):
        init_from.find(seen)
