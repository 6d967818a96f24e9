"""From Python: the functions of `import gspmd_lm`, and that what they give back shows itself."""

import dataclasses
import html
import json
import re
from pathlib import Path

import pytest
import rich.console
import rich.jupyter

import gspmd_lm as g
from gspmd_lm import cli
from gspmd_lm.foresight import compile
from gspmd_lm.show import comparison, notebook, run, terminal
from gspmd_lm.workdir import history
from tests.convert import references
from tests.launched import compiled_here
from tests.quick import QUICK_FLAGS

SMALL = [
    "model.layers=1", "model.embed=32", "model.heads=8", "model.kv_heads=8", "model.head_dim=4", "model.mlp=64",
    "data.source=random:64", "data.batch=8", "data.seq=16", "data.held_out=0.0", "train.steps=4", "train.log_every=1",
    "train.eval_every=0", "train.checkpoint_every=0", "train.trackers=[]",
]  # fmt: skip
QUICKLY = [flag.removeprefix("--set=") for flag in QUICK_FLAGS]


def config(*more):
    return g.load_config("tiny", [*SMALL, *more])


def rules(name):
    return g.load_rules(name, overrides=QUICKLY)


@pytest.fixture(scope="module")
def compared():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compile, "_run_compiler", compiled_here)
        return g.compare(config(), [rules("dp8"), rules("tp8")], "cpu:8")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return g.train(config(), rules("none"), workdir=tmp_path_factory.mktemp("runs") / "a")


@pytest.fixture(scope="module")
def model(trained):
    return g.load(trained.workdir)


def shown(result):
    """The page within what a notebook shows."""
    (source,) = re.findall(r'^<iframe srcdoc="([^"]*)" sandbox="allow-scripts" ', result._repr_html_())
    return html.unescape(source)


@pytest.mark.slow
def test_text_is_plain_also_where_colours_are_asked_for(compared, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as a notebook's kernel does
    assert "\x1b" not in repr(compared) + g.dry_run("tiny", "tp8")


@pytest.mark.long
def test_text_is_text_also_within_a_kernel(compared, plan, monkeypatch, capsys):
    """There rich displays what it is given, and writes nothing into the file of its console."""
    texts = [repr(compared), repr(compared[0]), repr(plan), g.show(*compared), g.dry_run("tiny", "tp8")]
    displayed = []
    monkeypatch.setattr(rich.console, "_is_jupyter", lambda: True)
    monkeypatch.setattr(rich.jupyter, "display", lambda *given: displayed.append(given))
    within = [repr(compared), repr(compared[0]), repr(plan), g.show(*compared), g.dry_run("tiny", "tp8")]
    terminal.console(80).print("a line")
    assert within == texts and all(texts) and displayed == [] and capsys.readouterr().out == "a line\n"


def test_a_comparison_and_its_explanations_show_themselves(compared):
    dp8, tp8 = compared
    assert [one.rules for one in compared] == ["rules/dp8.yaml", "rules/tp8.yaml"]
    assert shown(compared) == comparison.page(compared) and shown(dp8) == comparison.page([dp8])
    assert repr(dp8).startswith("tiny under dp8 on cpu:8") and repr(dp8) == g.show(dp8)
    assert repr(compared) == g.show(*compared) and "dp8" in repr(compared) and "tp8" in repr(compared)
    assert dp8.to_json()["memory"]["peak_bytes"] == dp8.memory.peak_bytes > 0
    assert tp8.collectives and not re.search(r"(src|href)=\"?http", shown(compared))


def test_names_stand_for_configs_and_rules():
    with pytest.raises(g.InputError, match=r"tinny: no such file, here or in configs/ \(did you mean tiny\?\)"):
        g.explain("tinny", "tp8", "cpu:8")
    with pytest.raises(g.InputError, match=r"tp9: no such file, here or in rules/ \(did you mean tp8\?\)"):
        g.compare("tiny", ["tp8", "tp9"], "cpu:8")
    with pytest.raises(g.InputError, match=r"--target=v5q-8: Google Cloud has no TPU slices named v5q-N"):
        g.plan("tiny", "v5q-8")
    with pytest.raises(g.InputError, match=r"compare needs layouts\n  fix   compare\(config"):
        g.compare("tiny", [], "cpu:8")
    with pytest.raises(g.InputError, match=r"steps=0: not a step to stop at"):
        g.train("tiny", steps=0)
    assert g.load_config("tiny", "data.batch=3") == g.load_config("tiny", ["data.batch=3"]) != g.load_config("tiny")
    assert g.load_rules("tp8", overrides="rules.remat=dots").remat.policy == "dots"
    assert g.dry_run("tiny", "tp8") == g.dry_run(g.load_config("tiny"), g.load_rules("tp8"))
    with pytest.raises(g.InputError, match=r"rule  --set rules.rules.batch=tensor"):
        g.build("tiny", g.load_rules("tp8", overrides=["rules.rules.batch=tensor"]))


@pytest.fixture(scope="module")
def plan():
    return g.plan(config(), "cpu:8", minutes=0.01)


def test_a_published_config_is_a_config(tmp_path):
    published = {
        "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 8, "vocab_size": 64,
        "intermediate_size": 64, "max_position_embeddings": 128, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
        "hidden_act": "silu", "tie_word_embeddings": False,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(published))
    loaded = g.load_config(str(tmp_path), ["data.seq=64"])
    assert (loaded.model.embed, loaded.model.layers, loaded.data.seq) == (32, 1, 64)
    assert "layers.attention.wq" in g.dry_run(str(tmp_path / "config.json"), "tp8")


@pytest.mark.parametrize(
    "call",
    [
        lambda step: g.plan(step, "cpu:8"),
        lambda step: g.compare(step, ["tp8"], "cpu:8"),
        lambda step: g.compare_rows(step, "tp8", "fsdp8", "cpu:8"),
        lambda step: g.dry_run(step, "tp8"),
        lambda step: g.build(step, "tp8"),
        g.train,
    ],
)
def test_what_is_neither_a_config_nor_a_task_is_refused(call):
    with pytest.raises(g.InputError, match=r"'len': this is no config, .*\n  fix   .* explain\(step, target=\.\.\.\)"):
        call(len)


def test_a_plan_shows_itself_and_gives_rules_that_run(plan):
    assert "tiny, 8 rows a step, on 8 simulated devices (cpu:8)" in repr(plan)
    assert plan.best.name in shown(plan) and "<!doctype html>" in shown(plan)
    assert plan.rules.facts() == plan.best.rules.facts()
    assert plan.yaml == plan.rules.text and "gspmd_lm.plan('tiny', 'cpu:8')" in plan.yaml.partition("\n")[0]
    assert g.build(config(), plan.rules).rules.devices == 8


def test_a_plan_in_which_nothing_fits_says_so(plan):
    none = notebook.FoundPlan(**{**vars(plan), "best": None, "nearest": plan.best})
    with pytest.raises(g.InputError, match=r"tiny on cpu:8: nothing was found that fits\n  fix   plan\("):
        none.rules  # noqa: B018
    assert "Nothing was found" in shown(none) and repr(none).startswith("Nothing was found")
    full = dataclasses.replace(none, candidates=(), late=False, left_out=0)
    assert repr(full).startswith("Nothing fits")
    with pytest.raises(g.InputError, match=r"tiny on cpu:8: nothing fits\n  fix   the plan, shown, says what"):
        full.rules  # noqa: B018


def test_a_run_shows_itself(trained):
    steps, losses = zip(*trained.losses, strict=True)
    assert steps == (1, 2, 3, 4) and trained["loss"] == pytest.approx(losses[-1])
    written = shown(trained)
    assert written == run.page(
        history.read_runs([str(trained.workdir)]), f"gspmd_lm.train(..., workdir='{trained.workdir}')"
    )
    assert f"<h1>Run {trained.workdir.name}" in written and "Learning rate" in written


def test_a_run_goes_on_under_another_layout_and_then_has_nothing_to_do(trained):
    kept = {path: path.read_bytes() for path in Path(trained.workdir).rglob("*") if path.is_file()}
    again = g.train(config(), rules("tp8"), workdir=trained.workdir, steps=4)
    assert again == {} and again.losses == trained.losses
    assert all(path.read_bytes() == content for path, content in kept.items() if path.suffix != ".lock")


@pytest.mark.long
def test_a_model_generates_what_the_command_line_does(model, trained, capsys):
    text = model.generate("def f(", max_new_tokens=5)
    assert isinstance(text, str) and text.prompt == "def f("
    with pytest.raises(SystemExit) as end:
        cli.main(["main.py", "generate", f"--workdir={trained.workdir}", "--prompt=def f(", "--max-new-tokens=5"])
    assert end.value.code == 0 and capsys.readouterr().out == f"{text}\n"
    many = model.generate(["def f(", "<b>"], max_new_tokens=5)
    assert many[0] == text and len(many) == 2
    assert "<i>&lt;b&gt;</i>" in many._repr_html_() and "<i>def f(</i>" in text._repr_html_()
    sampled = [model.generate("def f(", max_new_tokens=5, temperature=1.5, seed=seed) for seed in (1, 1, 2)]
    assert sampled[0] == sampled[1] != sampled[2]
    assert model.generate([]) == []


@pytest.mark.long
def test_programs_and_weights_are_used_again_where_they_suffice(model, monkeypatch):
    model.generate(["abc", "abcd"], max_new_tokens=5)
    monkeypatch.setattr(type(model._generator), "__init__", lambda *_: pytest.fail("made anew"))
    assert model.generate("ab", max_new_tokens=5) == model.generate(["ab"], max_new_tokens=5)[0]


@pytest.mark.long
def test_a_model_under_other_rules(trained, model):
    split = g.load(trained.workdir, rules("tp8"))
    assert g.load(trained.workdir, "none", overrides=["data.seq=8"]).config.data.seq == 8
    assert g.load(trained.workdir, "dp8").rules.name == "dp8" and model.rules.devices == 1
    assert split.rules.devices == 8 and repr(split).endswith("under tp8")
    assert split.generate("def f(", max_new_tokens=5) == model.generate("def f(", max_new_tokens=5)


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A folder as transformers writes it, with a tokenizer of the words 0 to 95, and its golden file."""
    golden = references.load("llama")
    folder = golden.folder(tmp_path_factory.mktemp("published") / "llama")
    end = {"id": 2, "content": "</s>", "special": True, "single_word": False, "lstrip": False, "rstrip": False,
           "normalized": False}  # fmt: skip
    words = {"</s>" if i == end["id"] else str(i): i for i in range(96)}
    tokens = {"version": "1.0", "pre_tokenizer": {"type": "Whitespace"}, "added_tokens": [end],
              "model": {"type": "WordLevel", "vocab": words, "unk_token": "0"}}  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(tokens))
    return folder, golden


@pytest.mark.long
def test_a_published_folder_is_loaded_as_it_is(published):
    """It writes what transformers does, and nothing is left beside it. cli/test_verbs.py has the command line."""
    folder, golden = published
    kept = {path.name: path.read_bytes() for path in folder.iterdir()}
    prompt = " ".join(map(str, golden.about["prompts"][1]))
    model = g.load(folder, rules("tp8"))
    text = model.generate(prompt, max_new_tokens=8)
    assert text.split() == [str(token) for token in golden.about["tokens"][1][:8]]
    assert model.rules.devices == 8 and g.load(folder).rules.devices == 1
    assert g.load(folder, overrides="model.padded_vocab=104").config.model.vocab_rows == 104
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == kept


def test_what_a_published_folder_cannot_be_asked_for(published, tmp_path, capsys):
    folder, golden = published
    with pytest.raises(g.InputError, match=r"step 3: .* is a published model, which has no steps\n  fix   drop it"):
        g.load(folder, step=3)
    for verb, said in (
        (["generate", "--prompt=1", "--config=tiny"], r"--config=tiny: .* has a config.json of its own"),
        (["eval"], rf"no checkpoint; it is the folder of a published model\n  fix   convert --from={folder} --w"),
    ):
        with pytest.raises(SystemExit):
            cli.main(["main.py", *verb, f"--workdir={folder}"])
        assert re.search(said, capsys.readouterr().err)
    wordless = golden.folder(tmp_path / "wordless")
    with pytest.raises(g.InputError, match=r"no tokenizer\.json, so the model cannot read text\n  fix .*AutoTokenizer"):
        g.load(wordless)
    about = json.loads((wordless / "config.json").read_text())
    (wordless / "config.json").write_text(json.dumps(about | {"some_feature": 1}))
    with pytest.raises(g.InputError, match=r"fix   convert --from=.*wordless --workdir=W --ignore=some_feature, then"):
        g.load(wordless)
    (wordless / "model.safetensors").unlink()
    (wordless / "config.json").write_text(json.dumps(about))
    with pytest.raises(g.InputError, match=r"no weights: neither model\.safetensors nor"):
        g.load(wordless)


def test_what_cannot_be_loaded(tmp_path, model):
    with pytest.raises(g.InputError, match=r"nothing: no such folder here\n  fix   give the folder of a run, .*"):
        g.load(tmp_path / "nothing")
    with pytest.raises(g.InputError, match=r"neither a config\.yaml nor a config\.json in it\n  fix   give the folder"):
        g.load(tmp_path)
    (tmp_path / "config.yaml").write_text((Path(model._name) / "config.yaml").read_text())
    with pytest.raises(g.InputError, match=r"no checkpoint\n  fix   train there first, or bring one: convert --from"):
        g.load(tmp_path)
    with pytest.raises(g.InputError, match="prompt 2"):
        model.generate(["a", "b" * 1000], max_new_tokens=5)
    for wrong in ({"stop": [1]}, {"prompts": ["a", None]}):
        with pytest.raises(g.InputError, match=r"generate: (1|None) is not text"):
            model.generate(**{"prompts": "a"} | wrong)
    with pytest.raises(g.InputError, match="temperature=None: must be a number"):
        model.generate("a", temperature=None)
