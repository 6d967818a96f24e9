"""A published model's way through the command line: converted, generated from, scored, trained on, converted back."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import yaml

from gspmd_lm import cli, config, errors, session
from gspmd_lm.cli import conversion
from gspmd_lm.convert import export, sidecars
from gspmd_lm.data.tokenizer import Bytes
from gspmd_lm.runtime import compiler, host, processes
from tests.courses import weights
from tests.quick import QUICK_FLAGS

MODEL = config.ModelConfig(
    layers=2, embed=32, heads=8, kv_heads=8, head_dim=8, mlp=64, vocab=257, context=64, compute_dtype="float32"
)  # fmt: skip
QUICKLY = QUICK_FLAGS
ROOT = Path(__file__).parent.parent.parent
PLACE, ALONE = (("--rules=" + name, *QUICKLY) for name in ("decode_tp8", "single"))


@pytest.fixture
def verb(capsys):
    """Runs a verb: code, stdout, stderr."""

    def call(*arguments):
        with pytest.raises(SystemExit) as end:
            cli.main(["main.py", *map(str, arguments)])
        captured = capsys.readouterr()
        return end.value.code, captured.out, captured.err

    return call


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder as transformers writes it."""
    path = tmp_path_factory.mktemp("hub") / "little"
    small = jax.tree.map(lambda x: 0.2 * np.asarray(x), weights(MODEL))  # all tokens are about as likely
    export.write_folder(path, MODEL, small)
    return path


@pytest.fixture(scope="module")
def workdir(folder, tmp_path_factory):
    """The workdir that it is converted into, for eight devices that its vocabulary does not divide over."""
    path = tmp_path_factory.mktemp("runs") / "little"
    with pytest.raises(SystemExit) as end:
        cli.main(
            ["main.py", "convert", f"--from={folder}", f"--workdir={path}", "--set=model.padded_vocab=264", *PLACE]
        )
    assert end.value.code == 0
    return path


def test_there_and_back_gives_the_same_bytes(verb, folder, workdir, tmp_path):
    code, _, err = verb("convert", f"--workdir={workdir}", f"--to={tmp_path / 'out'}", *PLACE)
    assert (code, err) == (0, ""), err
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    before, after = (json.loads((path / "config.json").read_text()) for path in (folder, tmp_path / "out"))
    assert before == after
    code, _, err = verb("convert", f"--workdir={workdir}", f"--to={tmp_path / 'out'}", *PLACE)
    assert code == 2 and "holds something already" in err


@pytest.mark.long
def test_generation_by_flag_and_by_file(verb, workdir, tmp_path):
    flags = f"--workdir={workdir}", "--max_new_tokens=6", *QUICKLY
    code, out, err = verb("generate", *flags, "--rules=dp2_tp4", "--prompt=abc")
    assert code == 0 and "first token after" in err and "a batch of 1 is padded to 2 rows" in err
    prompts, results = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    prompts.write_text('{"prompt": "abc", "id": 7}\n{"prompt": "something longer"}\n')
    code, nothing, err = verb("generate", *flags, "--rules=decode_tp8", f"--prompts={prompts}", f"--output={results}")
    assert (code, nothing) == (0, ""), err
    assert f"{results}.partial: holds the lines so far, and becomes {results} when all are there" in err
    assert [*tmp_path.glob("*.partial*")] == []
    first, second = map(json.loads, results.read_text().splitlines())
    assert first["text"] + "\n" == out and first["id"] == 7  # the same under another layout, in another batch
    assert first["tokens"] == 6 and second["finish_reason"] == "length"


def test_what_cannot_be_written_is_refused_before_anything_is_computed(verb, folder, workdir, tmp_path):
    prompts = tmp_path / "in.jsonl"
    prompts.write_text('{"prompt": "abc"}\n')
    flags = f"--workdir={workdir}", f"--prompts={prompts}", *PLACE
    for output, said in (
        (tmp_path / "no" / "out.jsonl", f"there is no folder {tmp_path / 'no'}"),
        (prompts, "overwrite a file that is read"),
    ):
        code, out, err = verb("generate", *flags, f"--output={output}")
        assert (code, out) == (2, "") and said in err and "compiled" not in err
    code, _, err = verb("convert", f"--from={folder}", f"--workdir={prompts}/w", *PLACE)
    assert code == 2 and "cannot be written in" in err
    code, _, err = verb("convert", f"--from={folder}", f"--workdir={tmp_path / 'w'}", "--dtype=bfloat16", *PLACE)
    assert code == 2 and "model.weight_dtype" in err
    code, _, err = verb("generate", f"--workdir={tmp_path / 'typo'}", "--chat", "--prompt=a", *PLACE)
    assert code == 2 and "typo: no checkpoint" in err


@pytest.mark.parametrize("way", ["generate", "eval"])
def test_another_architecture_is_told_before_anything_is_compiled(verb, workdir, tmp_path, way):
    text = tmp_path / "some.txt"
    text.write_text("some text")
    asked = ["--prompt=abc"] if way == "generate" else [f"--text={text}"]
    code, out, err = verb(way, f"--workdir={workdir}", "--set=model.mlp=128", *asked, *PLACE)
    assert code == 2 and "another architecture\n  mlp: 64 in the checkpoint, 128 in the config" in out + err
    assert "compiled" not in out + err


def test_processes_compare_the_texts_and_the_tokenizer_that_they_have_read(monkeypatch):
    told = []
    monkeypatch.setattr(processes, "compare", lambda facts, say: told.append(facts))
    here = SimpleNamespace(say=print)
    texts = [[1, 2], [3]], [np.asarray([1, 2]), np.asarray([3])], [[1], [2, 3]], [[1, 2]]
    session.compare_texts(here, Bytes(), texts[0])
    assert not told  # there is nobody to compare with
    monkeypatch.setattr(processes, "several", lambda: True)
    for ids in texts:
        session.compare_texts(here, Bytes(), ids)
    assert told[0] == told[1] and told[0]["tokenizer"] == "bytes"
    assert all(a != b for i, a in enumerate(told[1:]) for b in told[1:][:i])


def test_a_prompt_that_does_not_fit_is_refused(verb, workdir):
    code, out, err = verb("generate", f"--workdir={workdir}", "--prompt=" + "x" * 60, "--max_new_tokens=6", *PLACE)
    assert (code, out) == (2, "") and "60 tokens and 6 new ones are more than model.context=64" in err


def test_sampling_flags_need_a_temperature(verb, workdir):
    code, out, err = verb("generate", f"--workdir={workdir}", "--prompt=a", "--top_k=5", *PLACE)
    assert (code, out) == (2, "") and "temperature 0 takes the best token\n  fix   --temperature=0.8" in err


@pytest.mark.long
def test_scores_of_a_text_and_of_continuations(verb, workdir, tmp_path):
    text, lines = tmp_path / "text.txt", tmp_path / "in.jsonl"
    text.write_text("0123456789" * 10)
    code, out, _ = verb("eval", f"--workdir={workdir}", f"--text={text}", *PLACE)
    loss = float(out.split("loss ")[1].split(",")[0])
    assert code == 0 and "over 100 tokens, 100 bytes" in out and loss == pytest.approx(np.log(257), abs=0.1)
    (tmp_path / "my texts").mkdir()
    (tmp_path / "my texts" / "a.jsonl").write_text('{"text": "01234"}\n{"text": "56789"}')
    (tmp_path / "my texts" / "b.md").write_text("x" * 70_000)
    (tmp_path / "my texts" / "c.bin").write_text("x")
    code, out, _ = verb("eval", f"--workdir={workdir}", f"--text={tmp_path / 'my texts'}", "--batch=32", *ALONE)
    assert code == 0 and "over 70,012 tokens, 70,012 bytes" in out and "skipped, unknown ending: " in out, out
    (tmp_path / "README").write_text("01234")
    code, out, _ = verb("eval", f"--workdir={workdir}", f"--text={tmp_path / 'README'}", *ALONE)
    assert code == 0 and "over 5 tokens" in out
    code, _, err = verb("eval", f"--workdir={workdir}", f"--text={tmp_path / 'none'}", *ALONE)
    assert code == 2 and "none matches no file" in err
    for flag, *scored in (("--batch=3",), ("--output=x", f"--text={tmp_path / 'README'}")):
        code, _, err = verb("eval", f"--workdir={workdir}", flag, *scored, *ALONE)
        assert code == 2 and f"{flag}: has no effect on " in err
    lines.write_text('{"prompt": "01", "continuation": "23"}\n')
    code, out, _ = verb("eval", f"--workdir={workdir}", f"--continuations={lines}", *ALONE)
    assert code == 0 and json.loads(out)["log_likelihood"] == pytest.approx(-2 * np.log(257), abs=0.3)


@pytest.mark.slow
def test_weights_of_8_bits_are_made_while_they_are_read(verb, workdir, folder, tmp_path):
    """Of a run and of a published folder. A text is scored beside the weights as they came."""
    text, small = tmp_path / "text.txt", "--set=model.weight_dtype=int8"
    text.write_text("0123456789" * 10)
    code, out, err = verb("eval", f"--workdir={workdir}", f"--text={text}", small, *ALONE)
    assert code == 0 and "matmuls: block weights are int8, and float32 where they are multiplied" in out, err
    loss, change = float(out.split("loss ")[1].split(",")[0]), float(out.split("loss ")[2].split(",")[0])
    assert "; weights of int8 against float32 on this text: loss " in out
    code, out, _ = verb("eval", f"--workdir={workdir}", f"--text={text}", *ALONE)
    assert abs(loss - float(out.split("loss ")[1].split(",")[0]) - change) < 2e-4 and abs(change) < 0.01
    said, padded = [], "--set=model.padded_vocab=264"  # as in the run, so that both have one program
    for place in (workdir, folder):
        flags = f"--workdir={place}", "--prompt=01", "--max_new_tokens=6", small, padded, *ALONE
        code, out, err = verb("generate", *flags)
        assert code == 0, err
        said.append(out)
    assert said[0] == said[1]


@pytest.mark.long
def test_rows_of_a_text_are_as_long_as_it_needs_and_memory_is_checked_first(verb, workdir, tmp_path, monkeypatch):
    text = tmp_path / "text.txt"
    text.write_text("0123456789" * 10)
    long = "--set=model.context=131072", "--set=data.seq=131072"  # of the model; the text has 100 tokens
    code, out, err = verb("eval", f"--workdir={workdir}", f"--text={text}", *long, *ALONE)
    assert code == 0 and "over 100 tokens, 100 bytes, in rows of up to 100 tokens" in out, err
    whole = float(out.split("loss ")[1].split(",")[0])
    code, out, _ = verb("eval", f"--workdir={workdir}", f"--text={text}", "--seq=30", *ALONE)
    assert code == 0 and "rows of up to 30 tokens" in out
    assert float(out.split("loss ")[1].split(",")[0]) == pytest.approx(whole, abs=0.1)
    code, _, err = verb("eval", f"--workdir={workdir}", f"--text={text}", "--seq=65", *ALONE)
    assert code == 2 and "--seq=65: longer than model.context=64" in err
    text.write_text("")
    code, _, err = verb("eval", f"--workdir={workdir}", f"--text={text}", *ALONE)
    assert code == 2 and "the text is empty" in err
    text.write_text("0" * 40)
    monkeypatch.setattr(host, "free_bytes", lambda: 190_000)  # the weights have 183 kB
    monkeypatch.setattr(session, "_restore", lambda *_: pytest.fail("the weights were read"))
    code, _, err = verb("eval", f"--workdir={workdir}", f"--text={text}", *ALONE)
    assert code == 2 and "scoring 1 rows of 40 tokens at a time needs " in err
    assert "GB, and this machine has 0.00019 GB free\n  fix   --batch=1" in err
    code, _, err = verb("generate", f"--workdir={workdir}", "--prompt=a", "--max_new_tokens=5", *ALONE)
    assert code == 2 and "generating 1 texts of up to 6 tokens needs" in err and "fix   --batch=1" in err


@pytest.mark.parametrize(
    "command",
    [
        "train --config={workdir}/config.yaml --workdir={new}", "eval --workdir={workdir}",
        "eval --workdir={workdir} --text={text}", "generate --workdir={workdir} --prompt=a --max_new_tokens=5",
        "generate --workdir={folder} --prompt=a --max_new_tokens=5", "convert --from={folder} --workdir={new}",
        "convert --workdir={workdir} --to={new}",
    ],
)  # fmt: skip
def test_weights_that_do_not_fit_are_refused_by_counting(verb, folder, workdir, tmp_path, monkeypatch, command):
    """Before anything is compiled, read or written."""
    (tmp_path / "text.txt").write_text("some text")
    paths = {"folder": folder, "workdir": workdir, "new": tmp_path / "new", "text": tmp_path / "text.txt"}
    monkeypatch.setattr(host, "free_bytes", lambda: 100_000)
    monkeypatch.setattr(compiler, "compile", lambda *_: pytest.fail("compiled"))
    code, out, err = verb(*command.format_map(paths).split(), *ALONE)
    assert code == 2 and "1 simulated device has the memory of this machine, which has 0.0001 GB free: " in err, out
    assert "needed before anything is computed (weights 0.0001" in err and not (tmp_path / "new").exists()


@pytest.mark.long
def test_training_goes_on_from_it_elsewhere(verb, workdir, tmp_path):
    plain = yaml.safe_load((workdir / "config.yaml").read_text())
    assert plain["model"]["padded_vocab"] == 264 and plain["data"]["tokenizer"] == "bytes"
    assert "learning_rate" not in plain["optimizer"]
    settings = ["data.seq=16", "data.batch=8", "data.source=random:64", "train.steps=2", f"train.init_from={workdir}",
                "train.trackers=[]", "train.checkpoint_every=1", "train.samples={prompts: [a b], tokens: 5}",
                "optimizer.learning_rate=3e-3",
                ]  # fmt: skip
    code, out, err = verb("train", f"--config={workdir / 'config.yaml'}", f"--workdir={tmp_path / 'run'}", *PLACE,
                          *(f"--set={setting}" for setting in settings))  # fmt: skip
    assert code == 0, err
    assert "step 1/2  loss 5.5" in out and "\nsample: a b" in out
    assert f"\nfine-tuning of {workdir}: learning rate up to 0.003; usual is 2e-05: --set " in out

    # Not only its last step can be evaluated.
    last = re.search(r"^step 2: held-out loss (\S+),", out, re.M)
    code, out, err = verb("eval", f"--workdir={tmp_path / 'run'}", "--step=1", "--compile_cache=none")
    assert code == 0, err
    first = re.search(r"^step 1: held-out loss (\S+),", out, re.M)
    assert first and last and first[1] != last[1]
    code, _, err = verb("eval", f"--workdir={tmp_path / 'run'}", "--step=3", "--compile_cache=none")
    assert code == 2 and "there is no checkpoint 3\n  fix   use one of 1, 2" in err

    code, _, err = verb("train", f"--workdir={workdir}", *PLACE)
    assert code == 2 and "weights without the state" in err and "train.init_from" in err


def test_the_original_is_found_by_way_of_other_runs_and_the_tokenizer_is_the_one_in_use(workdir, tmp_path):
    plain = yaml.safe_load((workdir / "config.yaml").read_text())
    begun = workdir
    for name in ("first", "second"):
        plain["train"]["init_from"] = str(begun)
        begun = tmp_path / name
        begun.mkdir()
        (begun / "config.yaml").write_text(yaml.safe_dump(plain))
    with conversion._open_original(str(begun), config.load(str(begun / "config.yaml"))) as original:
        assert original == workdir / "hugging_face"
    with conversion._open_original(str(tmp_path), config.load("tiny")) as original:
        assert original is None
    for name in ("generation_config.json", "vocab.json"):
        (tmp_path / "first" / name).touch()
    (tmp_path / "second" / "mine.json").touch()
    (tmp_path / "second" / "chat_template.jinja").touch()
    assert sidecars.choose_sidecars(tmp_path / "first", str(tmp_path / "second" / "mine.json")) == {
        "generation_config.json": tmp_path / "first" / "generation_config.json",
        "chat_template.jinja": tmp_path / "second" / "chat_template.jinja",
        "tokenizer.json": tmp_path / "second" / "mine.json",
    }
    with pytest.raises(errors.InputError, match="no such file"):
        sidecars.choose_sidecars(None, str(tmp_path / "gone.json"))


@pytest.mark.parametrize(
    ("arguments", "unbuffered"),
    [(("keys",), "1"), (("--help",), ""), pytest.param(("--rules=tp8", "--dry_run"), "", marks=pytest.mark.slow)],
)
def test_output_that_nobody_reads_ends_a_verb_quietly(arguments, unbuffered):
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as out:
        ended = subprocess.run(
            [sys.executable, "main.py", *arguments], cwd=ROOT, stdout=out, stderr=subprocess.PIPE, text=True,
            env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
        )  # fmt: skip
    assert ended.returncode in (1, 141) and ended.stderr == ""  # 1: of rich


@pytest.mark.parametrize(("verb", "unbuffered"), [("keys", ""), ("--help", "1")])
def test_output_that_cannot_be_written_is_told_in_a_sentence(verb, unbuffered):
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [sys.executable, "main.py", verb], cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True,
            env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
        )  # fmt: skip
    assert ended.returncode == 1
    assert re.fullmatch(r"standard output: No space left on device\n  fix   make room .*\n", ended.stderr)


def test_a_store_that_fails_is_told_in_a_sentence(run, monkeypatch):
    scope = {"__name__": "gcsfs.core"}
    exec("def fail(argv): raise LookupError('no such bucket')", scope)
    monkeypatch.setattr(cli, "_run", scope["fail"])
    code, _, said = run("train")
    assert code == 1 and said.startswith("the object store failed (LookupError: no such bucket)\n  fix   log in")


def test_characters_that_an_output_does_not_know_are_escaped():
    code = "from gspmd_lm import cli; cli._run = lambda argv: print('a « 日') or 0; cli.main(['main.py'])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=ROOT, check=True,
                         env=os.environ | {"PYTHONIOENCODING": "ascii"})  # fmt: skip
    assert out.stdout == rb"a \xab \u65e5" + os.linesep.encode() and out.stderr == b""
