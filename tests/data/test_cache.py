import json
import os
import random
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from gspmd_lm.config import Data
from gspmd_lm.config.paths import cache_folder
from gspmd_lm.data import cache, making, sources, tokenizer
from gspmd_lm.errors import InputError


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("GSPMD_LM_CACHE", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture
def texts(folder):
    """A source of 60 documents, 20 of which are copies of others."""
    lines = [json.dumps({"text": f"document {i % 40} " * (1 + i % 40)}) for i in range(60)]
    (folder / "a.jsonl").write_text("\n".join(lines))
    return sources.open_source(Data(source=str(folder / "a.jsonl")))


ENTRY = [
    "tokens.json", "train-00000.npy", "train-00000.sizes.npy", "held_out-00000.npy", "held_out-00000.sizes.npy",
]  # fmt: skip


class Counting(tokenizer.Bytes):
    """Bytes, remembering how many documents it was asked for."""

    documents = 0

    def encode_all(self, documents):
        self.documents += len(documents)
        return super().encode_all(documents)


def _split(stream):
    stream = np.asarray(stream)
    return [piece.astype(np.uint8).tobytes() for piece in np.split(stream, np.flatnonzero(stream == 256) + 1)[:-1]]


def _entry():
    """The one folder of the cache."""
    (entry,) = [path for path in cache_folder("data").iterdir() if path.is_dir()]
    return entry


def _equal(a, b):
    return np.array_equal(np.asarray(a.stream), np.asarray(b.stream)) and a.ends == b.ends


def test_every_document_is_on_one_side_and_copies_are_together(texts):
    cached = cache.open_cache(texts, Counting(), 0.25)
    train, held_out = (_split(part.stream) for part in (cached.train[0], cached.held_out))
    ends = b"\0"  # 256 as one byte
    assert sorted(train + held_out) == sorted(document + ends for document in texts.documents())
    assert not set(train) & set(held_out) and len(set(held_out)) == 10 and len(set(train)) == 30
    assert (cached.train[0].ends, cached.held_out.ends) == (len(train), len(held_out))
    assert cached.train[0].stream.dtype == np.uint16


def test_growing_the_source_keeps_most_documents_on_their_side(texts, folder):
    held = set(_split(cache.open_cache(texts, Counting(), 0.25).held_out.stream))
    with (folder / "a.jsonl").open("a") as file:
        file.writelines('\n{"text": "new %d"}' % i for i in range(4))  # noqa: UP031
    grown = set(
        _split(
            cache.open_cache(
                sources.open_source(Data(source=str(folder / "a.jsonl"))), Counting(), 0.25
            ).held_out.stream
        )
    )
    assert len(held - grown) <= 1 + 4


def test_a_small_share_holds_one_document_and_none_holds_none(texts):
    assert cache.open_cache(texts, Counting(), 0.001).held_out.ends >= 1
    assert cache.open_cache(texts, Counting(), 0.0).held_out.ends == 0


def test_the_second_time_nothing_is_tokenized(texts):
    first, second = Counting(), Counting()
    one, two = cache.open_cache(texts, first, 0.1), cache.open_cache(texts, second, 0.1)
    assert (first.documents, second.documents) == (60, 0) and one.fingerprint == two.fingerprint
    assert _equal(one.train[0], two.train[0])
    assert cache.open_cache(texts, second, 0.2).fingerprint != one.fingerprint and second.documents == 60


def test_the_folder_is_chosen_when_it_is_needed(texts, folder, monkeypatch):
    monkeypatch.setenv("GSPMD_LM_CACHE", str(folder / "elsewhere"))
    cache.open_cache(texts, Counting(), 0.1)
    assert _entry().is_relative_to(folder / "elsewhere" / "data")
    monkeypatch.delenv("GSPMD_LM_CACHE")
    assert cache_folder("data").parts[-2:] == ("gspmd_lm", "data")


@pytest.mark.parametrize("stop_after", [1, 3])
def test_a_stopped_build_goes_on_where_it_was(texts, monkeypatch, stop_after):
    monkeypatch.setattr(making, "UNIT_BYTES", 2000)
    whole = cache.open_cache(texts, Counting(), 0.25)
    monkeypatch.setenv("GSPMD_LM_CACHE", os.environ["GSPMD_LM_CACHE"] + "2")
    reports = []

    def stop(what, done_bytes, total_bytes, rate=""):
        if what == "tokenizing":
            reports.append((done_bytes, total_bytes))
            if len(reports) == stop_after:
                raise KeyboardInterrupt

    first, second = Counting(), Counting()
    with pytest.raises(KeyboardInterrupt):
        cache.open_cache(texts, first, 0.25, stop)
    assert not (_entry() / "tokens.json").exists()
    (_entry() / "making" / "half.new").write_bytes(b"\x07" * 33)  # as a kill in the middle of a write would leave it
    resumed = cache.open_cache(texts, second, 0.25, stop)
    assert 0 < first.documents < 60 and 60 <= first.documents + second.documents < 80, "what is redone is one unit"
    assert _equal(whole.train[0], resumed.train[0]) and _equal(whole.held_out, resumed.held_out)
    assert [done for done, _ in reports] == sorted(done for done, _ in reports)
    assert reports[-1] == (texts.size_bytes, texts.size_bytes) and not (_entry() / "making").exists()


BUILD = textwrap.dedent("""
    import os, signal, sys, time
    from gspmd_lm.config import Data
    from gspmd_lm.data import cache, making, sources, tokenizer
    making.UNIT_BYTES, making._POLL_S = 1000, 0.01
    mode, path = sys.argv[1:]
    source = sources.open_source(Data(source=path))
    input("ready\\n")
    built = 0
    def progress(what, done_bytes, total_bytes, rate=""):
        global built
        built += what == "tokenizing"
        if mode == "die" and built == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.05)
    opened = cache.open_cache(source, tokenizer.load_tokenizer("bytes"), 0.25, progress)
    print(built, len(opened.train[0].stream), len(opened.held_out.stream))
""")


def _start(mode, texts):
    command = [sys.executable, "-c", BUILD, mode, str(texts.parts[0].files[0].path)]
    environment = os.environ | {"PYTHONPATH": str(Path(cache.__file__).parents[2])}
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True)


def test_a_killed_build_leaves_no_lock_and_nothing_that_looks_complete(texts, monkeypatch):
    dying = _start("die", texts)
    dying.communicate("\n", timeout=300)
    assert dying.returncode == -signal.SIGKILL
    assert not (_entry() / "tokens.json").exists()
    monkeypatch.setattr(making, "UNIT_BYTES", 1000)
    tokens = Counting()
    opened = cache.open_cache(texts, tokens, 0.25)
    assert 0 < tokens.documents < 60
    assert len(opened.train[0].stream) + len(opened.held_out.stream) == 60 + sum(map(len, texts.documents()))


@pytest.mark.long
def test_two_processes_share_the_work_and_do_no_part_twice(texts, monkeypatch):
    both = [_start("live", texts) for _ in range(2)]
    for process in both:
        assert process.stdout and process.stdout.readline() == "ready\n"
    for process in both:
        assert process.stdin
        print(file=process.stdin, flush=True)
    results = [[int(one) for one in process.communicate(timeout=300)[0].split()] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert min(built for built, *_ in results) > 0 and results[0][1:] == results[1][1:]
    monkeypatch.setattr(making, "UNIT_BYTES", 1000)
    units = making.plan_units(texts, ["train", "held_out"], 1000)
    assert sum(built for built, *_ in results) == len(units) > 5
    shared = {path.name: path.read_bytes() for path in _entry().iterdir()}
    monkeypatch.setenv("GSPMD_LM_CACHE", os.environ["GSPMD_LM_CACHE"] + "2")
    cache.open_cache(texts, tokenizer.Bytes(), 0.25)
    assert shared == {path.name: path.read_bytes() for path in _entry().iterdir()}


def test_a_damaged_cache_is_built_again(texts):
    expected = cache.open_cache(texts, Counting(), 0.25)
    expected = np.asarray(expected.train[0].stream)
    for damage in ("cut", "gone", "garbled"):
        if damage == "cut":
            os.truncate(_entry() / "train-00000.npy", 100)
        elif damage == "gone":
            (_entry() / "held_out-00000.npy").unlink()
        else:
            (_entry() / "tokens.json").write_text("{")
        tokens = Counting()
        again = np.asarray(cache.open_cache(texts, tokens, 0.25).train[0].stream)
        assert (again == expected).all() and tokens.documents == 60


def flip(path, bit):
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def test_a_flipped_bit_is_said_and_the_tokens_are_made_anew(texts, caplog):
    draw = random.Random(0)
    expected = cache.open_cache(texts, Counting(), 0.25)
    expected = [np.asarray(one.stream) for one in (expected.train[0], expected.held_out)]
    for _ in range(30):
        path = _entry() / draw.choice(ENTRY)
        flip(path, draw.randrange(8 * path.stat().st_size))
        tokens = Counting()
        caplog.clear()
        again = cache.open_cache(texts, tokens, 0.25)  # said though nobody asked for progress, and once
        (said,) = caplog.messages
        assert tokens.documents == 60 and f"{_entry()}: damaged ({path.name}" in said
        pairs = zip(expected, (again.train[0].stream, again.held_out.stream), strict=True)
        assert all((a == np.asarray(b)).all() for a, b in pairs)


@pytest.mark.parametrize("name", ["train-00000.npy", "making/00000.json"])
def test_damage_to_a_build_that_was_stopped_is_found(texts, monkeypatch, caplog, name, stop):
    monkeypatch.setattr(making, "UNIT_BYTES", 2000)
    whole = cache.open_cache(texts, Counting(), 0.25)
    monkeypatch.setenv("GSPMD_LM_CACHE", os.environ["GSPMD_LM_CACHE"] + "2")
    with pytest.raises(KeyboardInterrupt):
        cache.open_cache(texts, Counting(), 0.25, stop)
    flip(_entry() / name, 2000)
    again = cache.open_cache(texts, Counting(), 0.25)
    assert f"{_entry()}: damaged" in caplog.text and _equal(again.train[0], whole.train[0])


def test_one_document_cannot_be_split(folder):
    (folder / "a.txt").write_text("all in one")
    source = sources.open_source(Data(source=str(folder / "a.txt")))
    with pytest.raises(InputError, match=r"has 1 distinct documents: none would be left .*\n  fix   lower"):
        cache.open_cache(source, Counting(), 0.02)
    assert cache.open_cache(source, Counting(), 0.0).train[0].ends == 1


def test_a_source_that_changes_meanwhile(folder, monkeypatch):
    for name in "abc":
        (folder / f"{name}.txt").write_text(name)
    source = sources.open_source(Data(source=f"{folder}/*.txt"))
    monkeypatch.setattr(making, "BATCH_BYTES", 1)
    with pytest.raises(InputError, match="changed while they were read"):
        cache.open_cache(source, Counting(), 0.0, lambda *_: (folder / "c.txt").write_text("other"))
    assert not (_entry() / "tokens.json").exists()


def test_a_folder_that_cannot_be_written(texts, folder, monkeypatch):
    (folder / "file").write_text("")
    monkeypatch.setenv("GSPMD_LM_CACHE", str(folder / "file"))
    with pytest.raises(InputError, match=r"cannot be written .*\n  fix   set GSPMD_LM_CACHE"):
        cache.open_cache(texts, Counting(), 0.1)


def test_large_vocabularies_take_four_bytes(texts):
    class Large(Counting):
        vocab_size = 70_000
        end = 69_999
        fingerprint = "large"

    cached = cache.open_cache(texts, Large(), 0.1)
    assert cached.train[0].stream.dtype == np.uint32 and np.asarray(cached.train[0].stream)[-1] == 69_999
