"""Configs: strict, and wrong ones told what is wrong."""

import dataclasses
import json
import sys

import pytest
from etils import epath

from gspmd_lm import config, errors
from gspmd_lm.config import core_yaml, paths
from gspmd_lm.errors import InputError, printable

MODEL = "{layers: 4, embed: 128, heads: 8, kv_heads: 8, head_dim: 16, mlp: 384, vocab: 257, context: 256}"
RIGHT = f"model: {MODEL}\ntrain: {{steps: 10}}\n"


@pytest.fixture
def load(tmp_path, monkeypatch):
    """The config of a text, as if it stood in mine.yaml."""
    monkeypatch.chdir(tmp_path)

    def load(text=RIGHT, *overrides):
        (tmp_path / "mine.yaml").write_text(text)
        return config.load("mine.yaml", overrides)

    return load


def test_defaults_and_name(load):
    found = load()
    assert found.name == "mine"
    assert found.model.layers == 4
    assert found.data == config.Data()
    assert found.optimizer.name == "adamw"


def test_a_config_is_frozen(load):
    with pytest.raises(dataclasses.FrozenInstanceError):
        load().model.layers = 5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            RIGHT.replace("heads: 8, kv", "headz: 8, kv"),
            "mine.yaml: 2 problems\n  model.heads: missing\n  model.headz: unknown key (did you mean heads?)",
        ),
        (RIGHT + "dta: {batch: 3}\n", "mine.yaml: 1 problem\n  dta: unknown key (did you mean data?)"),
        (
            RIGHT + "data: {batch: 1e3}\n",
            "mine.yaml: 1 problem\n  data.batch: must be a whole number, got 1000.0",
        ),
        (
            RIGHT + "optimizer: {name: adam, schedule: 3}\n",
            "mine.yaml: 2 problems\n"
            "  optimizer.name: must be 'adamw', 'adafactor', 'lion' or 'muon', got 'adam' (did you mean adamw?)\n"
            "  optimizer.schedule: must be 'warmup_cosine', 'warmup_exponential', 'warmup_stable_decay' or 'constant',"
            " got 3",
        ),
        (
            RIGHT + "data: {batch: 3.5, seq: x, source: 7, held_out: .nan}\noptimizer: [1]\n",
            "mine.yaml: 5 problems\n"
            '  data.source: must be text, got 7; with quotes it is text: "7"\n'
            "  data.batch: must be a whole number, got 3.5\n"
            "  data.seq: must be a whole number, got 'x'\n"
            "  data.held_out: must be a finite number, got nan\n"
            "  optimizer: must be a mapping, got [1]",
        ),
        (
            f"model: {MODEL[:-1]}, attention: {{qk_norm: 1, rope: {{scaling: {{fator: 2.0}}}}}}}}\n"
            "train: {steps: 1, trackers: wandb}\n",
            "mine.yaml: 3 problems\n"
            "  model.attention.rope.scaling.fator: unknown key (did you mean factor?)\n"
            "  model.attention.qk_norm: must be true or false, got 1\n"
            "  train.trackers: must be a list, got 'wandb'",
        ),
        (
            f"model: {MODEL[:-1]}, layers: 0}}\ntrain: {{}}\n".replace("layers: 4, ", ""),
            "mine.yaml: 2 problems\n  model.layers: must be at least 1, got 0\n  train.steps: missing",
        ),
        (
            f"model: {MODEL[:-1]}, padded_vocab: 3}}\ntrain: {{steps: 0, keep_every: -1}}\n"
            "data: {batch: 0, held_out: 1.0}\noptimizer: {warmup_steps: -1}\n".replace("kv_heads: 8", "kv_heads: 3"),
            "mine.yaml: 7 problems\n"
            "  model: heads=8 is not a multiple of kv_heads=3\n"
            "  model: padded_vocab=3 is smaller than vocab=257: set padded_vocab to 0, or vocab to 0, which means the "
            "tokenizer's size with room to divide\n"
            "  data.batch: must be at least 1, got 0\n"
            "  data.held_out: must be below 1, got 1.0\n"
            "  optimizer.warmup_steps: must be at least 0, got -1\n"
            "  train.steps: must be at least 1, got 0\n"
            "  train.keep_every: must be at least 0, got -1",
        ),
        (
            RIGHT + "data: {seq: 512}\n",
            "mine.yaml: 1 problem\n  data.seq=512 is longer than model.context=256",
        ),
        (
            RIGHT.replace("head_dim: 16", "head_dim: 15"),
            "mine.yaml: 1 problem\n  model: positions: rope needs even sizes, and attention.rope.dim of at most "
            "head_dim: head_dim=15, attention.rope.dim=0",
        ),
        (RIGHT + "train: {steps: 3}\n", "mine.yaml: not valid YAML\n  line 3: the key 'train' appears twice"),
        ("? [model]\n: 3\n", "mine.yaml: not valid YAML\n  line 1: a key must be a word, not ['model']"),
        ("", "mine.yaml: a config is a mapping of sections; this one is empty"),
        ("- 3\n", "mine.yaml: a config is a mapping of sections; this one is a list"),
    ],
)
def test_wrong_file(load, text, message):
    with pytest.raises(InputError) as error:
        load(text)
    assert str(error.value) == message


def test_not_yaml_names_the_line(load):
    with pytest.raises(InputError, match=r"^mine.yaml: not valid YAML\n  while parsing a flow sequence at line 2, "):
        load("train:\n  steps: [1\n")


def test_not_utf8(load, tmp_path):
    (tmp_path / "latin.yaml").write_bytes(b"# caf\xe9\n")
    with pytest.raises(InputError, match=r"^latin.yaml: not UTF-8 text \(invalid continuation byte at byte 5\)$"):
        config.load("latin.yaml")


def test_file_that_cannot_be_read(tmp_path):
    with pytest.raises(InputError, match=r"gone.yaml: cannot be read \(No such file or directory\)$"):
        paths.read_text(tmp_path / "gone.yaml")


def test_missing_file_names_the_nearest():
    with pytest.raises(InputError) as error:
        config.load("lama3_8b")
    first, fix = str(error.value).split("\n")
    assert first == "lama3_8b: no such file, here or in configs/ (did you mean llama3_8b?)"
    assert fix.startswith("  fix   give a path, or one of bench_4m, ")


@pytest.mark.parametrize("name", ["tiny", "tiny.yaml", "configs/tiny", "configs/tiny.yaml"])
def test_names_are_looked_up_in_configs(name):
    assert config.load(name).name == "tiny"


def test_a_config_in_a_bucket_is_read_there(load, monkeypatch):
    """As convert names it, which may have a bucket for its workdir."""
    place = "gs://bucket/run/config.yaml"
    monkeypatch.setattr(type(epath.Path(place)), "read_text", lambda path, encoding: {place: RIGHT}[str(path)])
    assert config.load(place).model == load().model
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(InputError, match=r"config\.yaml: cannot be read \(.*install gcsfs"):
        config.load(place)


def test_names_are_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert config.load("tiny").name == "tiny"


@pytest.mark.parametrize(
    "value",
    [
        "optimizer.b1=7", "optimizer.b2=-3.0", "optimizer.eps=-1", "optimizer.final_fraction=-9",
        "optimizer.decay_rate=0", "model.norm.eps=-1", "model.init_std=-5", "model.attention.rope.theta=0",
        "model.logits.softcap=-1", "model.logits.z_loss=-1", "model.attention.scale=-1", "model.embedding.scale=0",
        "model.attention.rope.scaling.factor=0", "train.steps=1180591620717411303424", "data.seed=-1",
        "train.seed=4294967296",
        "model.layers=9999999999", "optimizer.learning_rate=.inf",
    ],
)  # fmt: skip
def test_values_outside_of_their_domain(load, value):
    with pytest.raises(InputError, match=rf"{value.partition('=')[0]}: must be |does not fit 64 bits"):
        load(RIGHT, value)


def test_overrides(load):
    found = load(
        RIGHT,
        "train.checkpoint_every=4",
        "optimizer.learning_rate=1e-3",
        "model.attention.rope.scaling.factor=4.0",
        "train.trackers=[]",
        "data.source=text/*.md more/*.md",
        "name=other",
    )
    assert found.train.checkpoint_every == 4
    assert found.train.steps == 10
    assert found.optimizer.learning_rate == 1e-3
    assert found.model.attention.rope.scaling == config.RopeScaling(factor=4.0)
    assert found.train.trackers == ()
    assert found.data.source == "text/*.md more/*.md"
    assert found.name == "other"
    assert load(RIGHT, "train.steps=3", "train.steps=5").train.steps == 5  # the last one wins
    assert load(RIGHT, "data.source=**/*.md").data.source == "**/*.md"
    assert load(RIGHT, "data.source=[a b, c]").data.source == ("a b", "c")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.checkpoint_every", "--set train.checkpoint_every: write --set section.key=value"),
        ("=4", "--set =4: write --set section.key=value"),
        ("train.=4", "--set train.=4: write --set section.key=value"),
        ("name.first=a", "--set name.first=a: in mine.yaml, name is not a mapping"),
        (
            "train.checkpoint_evry=4",
            "mine.yaml --set train.checkpoint_evry=4: 1 problem\n"
            "  train.checkpoint_evry: unknown key (did you mean checkpoint_every?)",
        ),
        ("trian.steps=4", "mine.yaml --set trian.steps=4: 1 problem\n  trian: unknown key (did you mean train?)"),
        (
            "optimizer.learning_rate=small",
            "mine.yaml --set optimizer.learning_rate=small: 1 problem\n"
            "  optimizer.learning_rate: must be a number, got 'small'",
        ),
        (
            "train.steps=010",
            "--set train.steps=010: not valid YAML\n"
            "  line 1: 010 means one thing in YAML 1.1 and another in 1.2: write the number without a 0 before it, "
            "or '010'",
        ),
    ],
)
def test_wrong_override(load, override, message):
    with pytest.raises(InputError) as error:
        load("name: a\n" + RIGHT, override)
    assert str(error.value) == message


def test_shipped_configs_survive_yaml(shipped_config):
    found = config.load(shipped_config)
    again = config.from_dict(core_yaml.load(core_yaml.dump(config.to_dict(found))), "again")
    assert again == found


def test_shipped_configs_begin_with_the_command_that_runs_them(shipped_config):
    first = paths.find_file(shipped_config, "configs").read_text().split("\n")[0]
    assert first.startswith("# python main.py ")
    assert f"--config={shipped_config}" in first or shipped_config == "tiny"


@pytest.fixture(params=["bench_4m", "gpt2_124m", "llama3_405b", "llama3_70b", "llama3_8b", "tiny", "uva", "uva_large"])
def shipped_config(request):
    return request.param


@pytest.mark.parametrize(("word", "hint"), [("heds", " (did you mean heads?)"), ("zzz", ""), ("", "")])
def test_did_you_mean(word, hint):
    assert errors.did_you_mean(word, ["heads", "mlp"]) == hint


@pytest.mark.parametrize(
    ("sets", "rate", "message"),
    [
        ((), 3e-4, ""),
        (("train.init_from=base",), 2e-5, "fine-tuning of base: learning rate up to 2e-05"),
        (("train.init_from=base", "model.lora={rank: 4, targets: [wq]}"), 2e-4, "adapters: learning rate up to 0.0002"),
        (
            ("train.init_from=base", "optimizer.learning_rate=1e-3"),
            1e-3,
            "fine-tuning of base: learning rate up to 0.001; usual is 2e-05: --set optimizer.learning_rate=null",
        ),
        (("train.init_from=base", "optimizer.learning_rate=1e-3", "optimizer.learning_rate=null"), 2e-5,
         "fine-tuning of base: learning rate up to 2e-05"),
    ],
)  # fmt: skip
def test_fine_tuning_has_a_learning_rate_of_its_own_and_says_it(sets, rate, message):
    from gspmd_lm import session

    found = config.load("bench_4m", sets)
    assert found.optimizer.learning_rate == rate
    assert session._learning_rate(found) == message


@pytest.mark.parametrize("name", ["../../evil", "a/b", "..", "x\x1b]0;T\x07", "a\nb", "a\\b"])
def test_a_name_leads_out_of_no_folder_and_changes_no_terminal(load, name):
    with pytest.raises(InputError, match="names a folder, so it has no slash and no control character") as error:
        load(f"name: {json.dumps(name)}\n{RIGHT}")
    assert "\x1b" not in printable(str(error.value))


def test_control_characters_of_messages_are_spelled_out():
    assert printable("a\tb\nc \x1b]0;T\x07\x9b é") == "a\tb\nc \\x1b]0;T\\x07\\x9b é"
