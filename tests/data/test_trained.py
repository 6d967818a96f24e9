import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from etils import epath

from gspmd_lm import config
from gspmd_lm.data import chat, loader, sources, tokenizer, trained
from gspmd_lm.errors import InputError
from tests.data.configs import config_of


@pytest.fixture(autouse=True)
def folder(folder):
    lines = [json.dumps({"text": f"the cat number {i} sat on mat {i * i} " * (1 + i % 9)}) for i in range(300)]
    (folder / "a.jsonl").write_text("\n".join(lines))
    return folder


def _config(data, train=None, **model):
    return config_of({"source": "a.jsonl", "batch": 4} | data, {"vocab": 0} | model, **train or {})


def test_vocab_0_is_the_size_of_the_tokenizer_padded_to_128(folder):
    trained.train_tokenizer([b"the cat sat on the mat " * 50], 270, folder / "tokenizer.json")
    size = tokenizer.load_tokenizer("tokenizer.json").vocab_size
    for name, vocab, padded in (("bytes", 257, 384), ("tokenizer.json", size, 384), ("bpe:1024", 1024, 1024),
                                ("bpe:1025", 1025, 1152)):  # fmt: skip
        model = trained.with_vocab_size(_config({"tokenizer": name})).model
        assert (model.vocab, model.padded_vocab) == (vocab, padded)
    raised = trained.with_vocab_size(_config({"tokenizer": "bpe:1000"}, padded_vocab=264)).model
    kept = trained.with_vocab_size(_config({"tokenizer": "bpe:1000"}, padded_vocab=4096)).model
    assert (raised.padded_vocab, kept.padded_vocab) == (1024, 4096)
    given = _config({"tokenizer": "bpe:300"}, vocab=301)
    assert trained.with_vocab_size(given) == given


@pytest.mark.parametrize(
    ("data", "more", "message"),
    [
        ({"tokenizer": "bpe:256"}, {}, r"bpe:256: write bpe:TOKENS, with TOKENS a number of at least 257"),
        ({"tokenizer": "bpe:many"}, {}, r"write bpe:TOKENS"),
        ({"tokenizer": "bpe:"}, {}, r"write bpe:TOKENS"),
        ({"tokenizer": "none.json"}, {}, r"none\.json: no such file"),
        ({"tokenizer": "bpe:300", "source": "random:8"}, {}, r"random:8 has no text to train it on\n  fix "),
        ({"tokenizer": "bpe:300", "messages_field": "m"}, {}, r"bpe:300 has no chat template"),
        ({"tokenizer": "bpe:300"}, {"train": {"init_from": "W"}}, r"the weights of train\.init_from know"),
        ({"tokenizer": "bpe:300"}, {"vocab": 299}, r"300 tokens, more than model\.vocab=299\n  fix   --set"),
    ],
)
def test_bad_sizes(data, more, message):
    with pytest.raises(InputError, match=message):
        trained.with_vocab_size(_config(data, **more))


def test_a_run_trains_its_tokenizer_once_and_finds_it_again(folder, monkeypatch):
    asked = trained.with_vocab_size(_config({"tokenizer": "bpe:300"}))
    said = []
    train, held_out = loader.open_loaders(asked, lambda *report: said.append(report))
    assert train.tokenizer and held_out and tokenizer.load_tokenizer(str(train.tokenizer)).vocab_size == 300
    size = (folder / "a.jsonl").stat().st_size
    assert ("training the tokenizer", size, size) in said
    stages = list(dict.fromkeys(what for what, *_ in said))
    assert stages == ["hashing files", "training the tokenizer", "reading documents", "tokenizing"]
    monkeypatch.setattr(trained, "train_tokenizer", lambda *_: pytest.fail("trained again"))
    again, _ = loader.open_loaders(asked)
    assert again.fingerprint == train.fingerprint
    # A damaged one is trained again, with the same result.
    monkeypatch.undo()
    monkeypatch.setenv("GSPMD_LM_CACHE", str(folder / "cache"))
    monkeypatch.chdir(folder)
    train.tokenizer.write_bytes(train.tokenizer.read_bytes().replace(b"a", b"b", 1))
    assert loader.open_loaders(asked)[0].fingerprint == train.fingerprint
    # What a run keeps in its workdir is found there, also when the workdir has moved.
    workdir = epath.Path(folder / "W")
    assert trained.with_workdir_tokenizer(asked, str(workdir)) == asked
    workdir.mkdir()
    (workdir / "tokenizer.json").write_bytes(train.tokenizer.read_bytes())
    kept = trained.with_workdir_tokenizer(asked, str(workdir))
    assert kept.data.tokenizer == str(workdir / "tokenizer.json") and kept.model == asked.model
    assert loader.open_loaders(kept)[0].fingerprint == train.fingerprint
    (folder / "W").rename(folder / "W2")
    assert trained.with_workdir_tokenizer(kept, "W2").data.tokenizer == str(folder / "W2" / "tokenizer.json")
    assert trained.with_workdir_tokenizer(_config({}), "W2").data.tokenizer == "bytes"
    with pytest.raises(InputError, match=r"bpe:300 is trained by the run that uses it\n  fix   name the run"):
        tokenizer.load_tokenizer("bpe:300")


def test_a_config_that_means_the_same_everywhere(folder, monkeypatch):
    (folder / "two words.txt").write_text("x")
    here = str(folder)
    for named, placed in (
        ("texts", f"{here}/texts"),
        ("*/a.txt", f"{here}/*/a.txt"),
        ("two words.txt", f"{here}/two words.txt"),
        ("a.txt b.txt", f"{here}/a.txt {here}/b.txt"),
        (f"{here}/a.txt", f"{here}/a.txt"),
        *((one, one) for one in ("stdlib", "stdlib:pairs", "random:64", "gs://bucket/texts", "hf://datasets/a/b")),
    ):
        config = _config({"source": named, "held_out": named if ":" not in named else 0.5}, {"init_from": "base"})
        run = trained.with_places(config, epath.Path("run"))
        assert run.data.source == placed and run.data.held_out == (placed if ":" not in named else 0.5)
        assert run.train.init_from == f"{here}/base" and run.data.tokenizer == "bytes"
    several = _config({"source": [{"path": "a", "weight": 1}, {"path": "gs://b", "weight": 2}], "tokenizer": "bpe:300"})
    run = trained.with_places(several, epath.Path("run"))
    assert [one.path for one in run.data.sources] == [f"{here}/a", "gs://b"] and not run.train.init_from
    assert run.data.tokenizer == f"{here}/run/tokenizer.json"
    spaced = _config({"tokenizer": "stdlib"}, {"init_from": "not there"})
    run = trained.with_places(spaced, epath.Path("run"))
    assert (run.data.tokenizer, run.train.init_from) == (f"{here}/stdlib", f"{here}/not there")
    bucket = _config({"tokenizer": "bpe:300"}, {"init_from": "gs://bucket/base"})
    run = trained.with_places(bucket, epath.Path("gs://bucket/run"))
    assert (run.data.tokenizer, run.train.init_from) == ("gs://bucket/run/tokenizer.json", "gs://bucket/base")
    inside = _config({"tokenizer": "run/hugging_face/tokenizer.json"})
    (folder / "run" / "hugging_face").mkdir(parents=True)
    (folder / "run" / "hugging_face" / "tokenizer.json").write_text("{}")
    run = trained.with_places(inside, epath.Path("run"))
    assert run.data.tokenizer == f"{here}/run/hugging_face/tokenizer.json", "it is in the workdir already"


def test_a_tokenizer_may_lie_in_a_store(folder, bucket):
    """As that of a run whose workdir is in a bucket does."""
    trained.train_tokenizer([b"the cat sat on the mat " * 50], 270, folder / "tokenizer.json")
    bucket.pipe("/run/tokenizer.json", (folder / "tokenizer.json").read_bytes())
    far, near = tokenizer.load_tokenizer("memory://run/tokenizer.json"), tokenizer.load_tokenizer("tokenizer.json")
    assert far.fingerprint == near.fingerprint
    beside = {"tokenizer_config.json": b'{"eos_token": "t"}', "chat_template.jinja": b"{{ eos_token }}",
              "additional_chat_templates/tool_use.jinja": b"tools{{ tools | length }}"}  # fmt: skip
    for name, content in beside.items():
        bucket.pipe(f"/run/{name}", content)
    far = tokenizer.load_tokenizer("memory://run")
    assert far.decode([far.end]) == b"t" != near.decode([near.end]), "the files beside it count as well"
    talk = chat.Chat("memory://run/tokenizer.json")
    asked = [{"role": "user", "content": "Hi"}]
    assert (talk.render(asked), talk.render(asked, tools=[{}])) == ("t", "tools1")
    bucket.pipe("/run/tokenizer_config.json", b"{}")
    assert tokenizer.load_tokenizer("memory://run").fingerprint == near.fingerprint
    kept = trained.with_kept_tokenizer(_config({"tokenizer": "bpe:300"}), epath.Path("gs://bucket/run")).data.tokenizer
    assert kept == "gs://bucket/run/tokenizer.json"
    with pytest.raises(InputError, match=r"data\.tokenizer: memory://run/none\.json matches no file"):
        tokenizer.load_tokenizer("memory://run/none.json")


TRAIN = """
import sys
from gspmd_lm.config import Data
from gspmd_lm.data import sources, trained
print(trained.tokenizer_of_source(sources.open_source(Data(source="a.jsonl")), 400).read_text())
"""


@pytest.mark.long
def test_every_process_trains_the_same_tokenizer(folder):
    """Each host may train it by itself, with as many threads as it has."""
    found = []
    for threads in ("1", "5"):
        environment = os.environ | {
            "GSPMD_LM_CACHE": str(folder / f"cache{threads}"), "RAYON_NUM_THREADS": threads,
            "PYTHONPATH": str(Path(config.__file__).parents[2]), "PYTHONHASHSEED": threads,
        }  # fmt: skip
        found.append(subprocess.run([sys.executable, "-c", TRAIN], env=environment, check=True, capture_output=True))
    assert found[0].stdout == found[1].stdout and len(json.loads(found[0].stdout)["model"]["vocab"]) == 400


def test_a_large_source_is_sampled(monkeypatch):
    source = sources.open_source(_config({}).data)
    monkeypatch.setattr(trained, "MOST_BYTES", source.size_bytes // 3 + 1)
    documents = list(source.documents())
    assert list(trained._sample(source, None)) == documents[2::3]
