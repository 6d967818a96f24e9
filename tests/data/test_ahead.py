"""Texts that are tokenized while a run trains: the same rows for any processes, from any step on."""

import gzip
import json
import os
import signal
import subprocess
from pathlib import Path

import fsspec
import numpy as np
import pytest

from gspmd_lm.data import ahead, ahead_process, loader, making, readers, tokenizer
from gspmd_lm.errors import InputError, RunFailed
from tests.data.answering import Here
from tests.data.configs import config_of
from tests.data.test_tokens import framing

END, FILES, DOCUMENTS = 256, 6, 40


def _config(source="texts", model=None, **data):
    return config_of({"source": source, "batch": 4, "held_out": 0, "tokenize": "ahead"} | data, model)


@pytest.fixture(autouse=True)
def texts(tmp_path, monkeypatch):
    """Six files in two formats, each a unit, which are read in chunks of about a third."""
    monkeypatch.setenv("GSPMD_LM_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(making, "UNIT_BYTES", 300)
    monkeypatch.setattr(ahead, "CHUNK_BYTES", 700)
    draw, every = np.random.default_rng(0), []
    Path("texts").mkdir()
    for number in range(FILES):
        some = [f"{number} {i} " + "x" * int(draw.integers(1, 90)) for i in range(DOCUMENTS)]
        content = "".join(json.dumps({"text": one}) + "\n" for one in some).encode()
        Path(f"texts/{number}.jsonl.gz").write_bytes(gzip.compress(content))
        every += some
    Path("texts/odd.txt").write_bytes(b"\0\1\2" * 90)
    return every


@pytest.fixture
def opened(request, monkeypatch):
    """A function that opens the rows of a config. Their processes end with the test."""
    every = []
    if "process" not in request.node.name:
        monkeypatch.setattr(ahead, "Process", Here)

    def open_rows(*args, **settings):
        rows, held_out = ahead.open_ahead(_config(*args, **settings))
        every.append(rows)
        return rows, held_out

    yield open_rows
    for rows in every:
        rows.rows.close()


def _read(rows, steps, batch_rows=slice(None)):
    return [rows.rows_at(step, batch_rows) for step in steps]


def _equal(some, others):
    return all((a[name] == b[name]).all() for a, b in zip(some, others, strict=True) for name in a)


@pytest.mark.long
def test_rows_are_the_same_for_any_share_and_from_any_step_on(opened, texts, caplog):
    whole, _ = opened()
    assert whole.rows.lanes == 4 and "4 lanes" in whole.description
    want = _read(whole, range(60))
    at = whole.positions(40)
    assert len({row["tokens"].tobytes() for row in want}) == 60 and at["lanes"]["1"][0] > 0
    parts = [opened()[0] for _ in range(2)]
    for rows, half in zip(parts, (slice(0, 2), slice(2, 4)), strict=True):
        assert _equal(_read(rows, range(40), half), [{name: row[name][half] for name in row} for row in want[:40]])
        assert sorted(rows.positions(40)["lanes"]) == [str(lane) for lane in range(4)[half]]
    resumed, _ = opened()
    resumed.resume(json.loads(json.dumps([rows.positions(40) for rows in parts])))
    assert _equal(_read(resumed, range(40, 60)), want[40:]) and "counted from its beginning" not in caplog.text
    assert resumed.positions(40)["lanes"].keys() == at["lanes"].keys()
    lost, _ = opened()
    lost.resume([at | {"of": "other data"}])
    assert _equal(_read(lost, range(40, 41)), want[40:41]) and "lane 3 is counted from its beginning" in caplog.text


@pytest.mark.long
def test_an_epoch_has_each_document_once_in_an_order_of_the_seed(opened, texts):
    """With one lane: the bytes of its rows are those of all documents."""
    orders = []
    for seed in (0, 1):
        rows, _ = opened(batch=1, seed=seed)
        found, step = [], 0
        while not rows.rows.places(step) or not rows.rows.places(step)[0].epoch:
            found.append(_read(rows, [step])[0])
            step += 1
        seen = np.concatenate([row["tokens"][row["segment_ids"] > 0] for row in found[:-1]])
        want = np.frombuffer("".join(texts).encode(), np.uint8)
        assert (np.bincount(seen)[:END] == np.bincount(want, minlength=END)).all()
        orders.append([rows.rows.unit(0, ahead.Place(unit=i)) for i in range(rows.rows.units_of(0))])
    assert orders[0] != orders[1] and sorted(orders[0]) == sorted(orders[1])


def test_the_parts_of_a_large_text_are_one_text(opened, monkeypatch):
    """Each unit has a part of the text. The tokens that stand around a text stand around all of it."""
    named, frame = framing(Path("framing"))
    monkeypatch.setattr(readers, "SECTION_BYTES", 100)
    Path("book.txt").write_text("".join(f"line {i} of a book\n" for i in range(300)))
    rows, _ = opened("book.txt", {"vocab": 300}, **named)
    work, encoder = rows.rows.work, tokenizer.load_tokenizer(rows.rows.work.tokenizer)
    assert len(work.units) > 5
    made = [one.tokens for unit in work.units for one in ahead_process.chunks(work, encoder, unit, 0)]
    assert [(np.concatenate(made) == token).sum() for token in frame] == [1, 1, 1]


def test_masks_are_those_of_the_rows_of_other_sources(opened):
    rows, _ = opened(model={"attention.mask": "full"})
    (row,) = _read(rows, [3])
    chosen = row["targets"] >= 0
    assert rows.token_masks.seed == 0 and 0 < chosen.mean() < 0.4 and (row["tokens"][chosen] == 0).any()


def test_a_bucket_gives_the_rows_of_its_files_and_keeps_no_copy(opened, tmp_path):
    store = fsspec.filesystem("file")
    assert store.exists("texts")
    address = f"file://{tmp_path}/texts/*.gz"
    far, near = opened(address)[0], opened("texts/*.gz")[0]
    assert far.rows.work.units[0].files[0].far, "it is read as a store is"
    assert _equal(_read(far, range(20)), _read(near, range(20)))
    left = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in left) < 2 * 4096, "at most the copies of the files that are being read"


def test_files_for_evaluation_are_tokenized_before_and_left_out(opened, texts):
    Path("apart.jsonl").write_text("".join(json.dumps({"text": one}) + "\n" for one in texts[:100]))
    rows, held_out = opened(held_out="apart.jsonl", batch=1)
    assert held_out and held_out.description.startswith("evaluation: ") and not held_out.repeat
    assert len(rows.rows.work.apart) == 100
    seen = b"".join(row["tokens"].astype(np.uint8).tobytes() for row in _read(rows, range(250))).decode()
    assert "5 17 x" in seen and "0 17 x" not in seen


@pytest.mark.long
def test_a_process_that_dies_is_an_error(opened):
    rows, _ = opened()
    _read(rows, range(3))
    for process in rows.rows.processes:
        os.kill(process._process.pid, signal.SIGKILL)
    with pytest.raises(RunFailed, match=r"a process that tokenizes ended with code -9\n  fix "):
        _read(rows, range(3, 99))


def test_a_process_that_dies_within_an_answer_is_an_error(monkeypatch):
    half = "import pickle, sys; sys.stdout.buffer.write(pickle.dumps([*range(999)])[:500])"
    start = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda command, **how: start([command[0], "-c", half], **how))
    process = ahead.Process(b"", 1)
    with pytest.raises(RunFailed, match=r"a process that tokenizes ended with code 0\n  fix "):
        process.ask(ahead_process.Request(0, 0, 0)).result()
    process.stop()


def test_what_gives_no_rows_is_said(opened):
    Path("texts/0.jsonl.gz").write_bytes(gzip.compress(b'{"text": 5}\n'))
    with pytest.raises(InputError, match=r"0\.jsonl\.gz:1: text is a number, not text\n  fix "):
        _read(opened("texts/0.jsonl.gz")[0], range(1))
    with pytest.raises(InputError, match=r"no unit of it has a row of data\.seq \+ 1 = 4,097 tokens"):
        _read(opened("texts/[12].jsonl.gz", seq=4096, packing="stream", model={"context": 4096})[0], range(1))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"held_out": 0.1}, r"data\.held_out=0\.1, a share"),
        ({"source": [{"path": "texts", "weight": 1}, {"path": "stdlib", "weight": 2}]}, "sources with weights"),
        ({"messages_field": "m", "tokenizer": "x"}, "records"),
        ({"model": {"classes.count": 2, "attention.mask": "full"}}, "records"),
        ({"source": "random:4"}, "random:4, which is no text"),
        ({"source": "a.bin", "token_dtype": "uint16"}, r"a\.bin, which is no text"),
        ({"tokenizer": "bpe:300", "model": {"vocab": 300}}, "data.tokenizer=bpe:300"),
    ],
)
def test_what_is_not_known_before_it_is_read_is_refused(opened, settings, message):
    with pytest.raises(InputError, match=rf"data\.tokenize=ahead does not go with {message}(.|\n)*  fix "):
        opened(**settings)


def test_the_rows_are_not_opened_as_those_that_are_known_before():
    with pytest.raises(InputError, match=r"data\.tokenize=ahead: which rows there are is not known .*\n  fix .*=once"):
        loader.open_loaders(_config())
