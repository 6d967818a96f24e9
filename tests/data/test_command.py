"""A folder of texts, from the command line: one command trains a tokenizer and a model of its size."""

import json
import types

import pytest
import tokenizers
import yaml

from gspmd_lm import api, cli, session
from gspmd_lm.data import chat, loader, tokenizer
from gspmd_lm.errors import InputError
from tests.quick import QUICK_FLAGS

SMALL = ("model.layers=1", "model.embed=32", "model.heads=8", "model.kv_heads=8", "model.head_dim=4", "model.mlp=64",
         "data.batch=8", "data.seq=16", "train.steps=4", "train.trackers=[]", "data.held_out=0.0")  # fmt: skip
FLAGS = ("--config=tiny", "--compile_cache=none", *(f"--set={one}" for one in SMALL), *QUICK_FLAGS)
OWN = ("--set=data.source=my texts", "--set=data.tokenizer=bpe:300", "--set=model.vocab=0")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("GSPMD_LM_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my texts").mkdir()
    for i in range(40):
        (tmp_path / "my texts" / f"{i}.txt").write_text(f"the cat number {i} sat on the mat {i * i} times\n" * 9)
    (tmp_path / "my texts" / "photo.jpg").write_bytes(b"\xff\xd8")
    return tmp_path


@pytest.fixture
def run(capsys):
    """Runs a command: its exit code, and what it said on both streams."""

    def call(*arguments):
        with pytest.raises(SystemExit) as end:
            cli.main(["main.py", *arguments])
        captured = capsys.readouterr()
        return end.value.code, captured.out + captured.err

    return call


@pytest.mark.long
def test_a_folder_of_texts_in_one_command(run, folder):
    code, said = run("--dry_run", "--rules=none", *FLAGS, *OWN)
    assert code == 0 and "384" in said and not (folder / "cache").exists()  # the size is known before the tokenizer is
    code, said = run("--rules=none", "--workdir=W", "--steps=2", *FLAGS, *OWN)
    assert code == 0, said
    assert "skipped, unknown ending: my texts/photo.jpg" in said and "step 2/2" in said
    written = yaml.safe_load((folder / "W" / "config.yaml").read_text())
    assert (written["model"]["vocab"], written["model"]["padded_vocab"]) == (300, 384)
    assert written["data"]["tokenizer"] == str(folder / "W" / "tokenizer.json")
    assert len(json.loads((folder / "W" / "tokenizer.json").read_text())["model"]["vocab"]) == 300
    # The same command goes on with it, also when the text has changed and the workdir has moved.
    (folder / "my texts" / "0.txt").write_text("zebras " * 99)
    kept = (folder / "W" / "tokenizer.json").read_bytes()
    (folder / "W").rename(folder / "W2")
    code, said = run("--workdir=W2", "--steps=3", *FLAGS, *OWN)
    assert code == 0 and "restored step 2" in said and (folder / "W2" / "tokenizer.json").read_bytes() == kept, said
    assert len(list((folder / "cache" / "tokenizers").glob("*/tokenizer.json"))) == 1
    model = api.load(folder / "W2")
    assert (model.tokenizer.vocab_size, model.config.model.vocab) == (300, 300)
    assert model.config.data.tokenizer == str(folder / "W2" / "tokenizer.json")


def test_samples_are_written_with_a_tokenizer_that_is_yet_to_be_trained(run, folder, monkeypatch):
    seen = []

    def writer(config, *_):
        seen.append(tokenizer.load_tokenizer(config.data.tokenizer).vocab_size)
        raise InputError("that is enough")

    monkeypatch.setattr(session, "SampleGenerator", writer)
    samples = "--set=train.samples={prompts: [the cat], tokens: 3}", "--set=data.held_out=0.1"
    code, said = run("--rules=fsdp8", "--workdir=W", *FLAGS, *OWN, *samples)
    assert code == 2 and "that is enough" in said and seen == [300]


def test_a_tokenizer_alone(run, folder, monkeypatch):
    code, said = run("--rules=fsdp8", "--train_tokenizer=mine.json", *FLAGS, *OWN)
    assert code == 0 and "use it with --set data.tokenizer=mine.json --set model.vocab=0" in said
    (folder / "mine.json").rename("yours.json")
    parsed, parse = [], tokenizers.Tokenizer.from_file
    counting = types.SimpleNamespace(from_file=lambda path: parsed.append(path) or parse(path))
    monkeypatch.setattr(tokenizers, "Tokenizer", counting)
    code, said = run("--rules=fsdp8", "--dry_run", *FLAGS, "--set=data.tokenizer=yours.json", "--set=model.vocab=0")
    assert code == 0 and "384" in said
    sets = [*SMALL, "data.source=my texts", "data.tokenizer=yours.json", "model.vocab=0"]
    config = api.load_config("tiny", sets)
    assert len(loader.open_loaders(config)[0].rows) and config.model.vocab == 300
    assert chat.stop_ids("yours.json") == (tokenizer.load_tokenizer("yours.json").end,)
    assert parsed == [str(folder / "yours.json")]  # once for the size, the data and the end of a text
    (folder / "yours.json").write_text((folder / "yours.json").read_text().replace("<|endoftext|>", "</s>"))
    changed = tokenizer.load_tokenizer("yours.json")
    assert changed.decode([changed.end]) == b"</s>"


def test_what_is_wrong_is_told_before_anything_starts(run, folder, monkeypatch):
    monkeypatch.setattr(session, "begin", lambda *_: pytest.fail("started"))
    code, said = run("--workdir=W", *FLAGS, "--set=data.tokenizer=bpe:4096")
    assert code == 2 and "fix   --set model.vocab=0" in said
    code, said = run("--workdir=W", *FLAGS, "--set=data.tokenizer=none.json", "--set=model.vocab=0")
    assert code == 2 and "none.json: no such file" in said
