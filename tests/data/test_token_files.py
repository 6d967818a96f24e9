"""Token files of other programs, which are read by share as our own shards are."""

import json
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from gspmd_lm.data import loader, packing, sources, trained
from gspmd_lm.data.tokenize import tokenize
from gspmd_lm.errors import InputError
from tests.data.configs import config_of

pytestmark = pytest.mark.usefixtures("folder")
END = 256
FEW = [[1, 2, 3], [4, 5], [6], [7, 8, 9, 10, 11, 12]]


@pytest.fixture(scope="module")
def documents():
    draw = np.random.default_rng(0)
    return [draw.integers(0, 256, draw.integers(1, 90)).tolist() for _ in range(200)]


def _config(source, model=None, **data):
    return config_of({"source": source, "held_out": 0} | data, model)


def _open(source, **settings):
    return loader.open_loaders(_config(source, **settings))


def _epoch(opened):
    steps = [opened.rows_at(step, slice(None)) for step in range(opened.steps_per_epoch)]
    return {name: np.concatenate([step[name] for step in steps]) for name in steps[0]}


def _flat(documents):
    return np.asarray([token for document in documents for token in (*document, END)])


def _write_bin(name, tokens, dtype="<u2", header=b""):
    Path(name).write_bytes(header + np.asarray(tokens, dtype).tobytes())


def _index(sizes, ends, kind=4, size=4, version=1, magic=b"MMIDIDX\0\0"):
    """The .idx file of sequences of so many tokens. ends: after how many sequences a document ends, and 0 before."""
    begins = np.cumsum([0, *sizes])[:-1] * size
    head = magic + np.asarray(version, "<u8").tobytes() + bytes([kind])
    head += np.asarray([len(sizes), len(ends)], "<u8").tobytes()
    return (
        head + np.asarray(sizes, "<i4").tobytes() + begins.astype("<i8").tobytes() + np.asarray(ends, "<i8").tobytes()
    )


def _write_megatron(name, documents):
    _write_bin(f"{name}.bin", [token for document in documents for token in document], "<i4")
    Path(f"{name}.idx").write_bytes(_index([*map(len, documents)], range(len(documents) + 1)))


def _header(magic, version, count):
    return np.asarray([magic, version, count] + [0] * 253, "<i4").tobytes()


@pytest.mark.parametrize("packing", ["documents", "stream"])
def test_rows_of_each_kind_of_file_are_those_of_the_documents(documents, packing):
    """The oracle is the text of the same bytes, which the project tokenizes itself."""
    Path("texts").mkdir()
    texts = [bytes(range(97, 97 + len(one) % 26 + 1)) for one in documents]
    Path("texts/a.jsonl").write_text("".join(json.dumps({"text": text.decode()}) + "\n" for text in texts))
    stream = _flat(texts)
    _write_bin("a.bin", stream)
    np.save("b.npy", stream.astype(np.int64))
    _write_bin("c.bin", stream, header=_header(20240520, 1, len(stream)))
    _write_bin("d.bin", stream, "<u4", header=_header(20240801, 7, len(stream)))
    _write_megatron("e", [[*text, END] for text in texts])
    ids = [[*text] if len(text) % 2 else [*text, END] for text in texts]
    lists = pyarrow.array(ids, pyarrow.list_(pyarrow.uint16()))
    pyarrow.parquet.write_table(pyarrow.table({"ids": lists}), "f.parquet")
    Path("g.jsonl").write_text("".join(json.dumps({"ids": [*text]}) + "\n" for text in texts))
    want = _epoch(_open("texts", packing=packing)[0])
    for source in ("a.bin", "b.npy", "c.bin", "d.bin", "e.bin", "f.parquet", "g.jsonl"):
        settings = {"token_dtype": "uint16"} if source == "a.bin" else {"text_field": "ids"}
        found = _epoch(_open(source, packing=packing, **settings)[0])
        assert all((found[name] == want[name]).all() for name in want), source
    assert len(want["tokens"]) > 50


def test_an_index_says_where_documents_end_though_no_token_does():
    _write_megatron("few", FEW)
    opened, held_out = _open("few.bin", seq=5, batch=1, held_out=0.3)
    assert held_out
    row, apart = opened.rows_at(0, slice(None)), held_out.rows_at(0, slice(None))
    assert row["tokens"].tolist() == [[1, 2, 3, 4, 5]] and row["segment_ids"].tolist() == [[1, 1, 1, 2, 2]]
    assert row["targets"].tolist() == [[2, 3, -1, 5, -1]], "the last token of a document has no target"
    assert apart["tokens"].tolist() == [[7, 8, 9, 10, 11]], "the cut is at the end of a document"
    assert "documents end at the token 256 and where an .idx says so" in opened.description


def test_each_process_reads_its_share_of_a_bucket(documents, read_sizes, bucket):
    """Of files of 2,000 tokens each: rows are those of local files, however many processes read them."""
    stream = _flat(documents)
    Path("local").mkdir()
    for number, at in enumerate(range(0, len(stream), 2000)):
        _write_bin(f"local/{number}.bin", stream[at : at + 2000])
    Path("local/README").write_text("not read")
    bucket.put("local", "/tokens", recursive=True)
    settings = {"token_dtype": "uint16", "held_out": 0.1}
    local, far = (_open(source, **settings) for source in ("local", "memory://tokens"))
    assert local[0].fingerprint == far[0].fingerprint == _open("memory://tokens/*.bin", **settings)[0].fingerprint
    assert local[1] and far[1] and (_epoch(local[1])["tokens"] == _epoch(far[1])["tokens"]).all()
    whole = _epoch(local[0])["tokens"].reshape(-1, 8, 32)
    for count in (1, 2, 4):
        for process in range(count):
            rows = slice(process * 8 // count, (process + 1) * 8 // count)
            read_sizes.clear()
            parts = [far[0].rows_at(step, rows)["tokens"] for step in range(len(whole))]
            assert (np.stack(parts) == whole[:, rows]).all()
            assert sum(read_sizes) < 1.05 * 2 * 33 / 32 * whole[:, rows].size


def test_files_of_several_sources_and_files_for_evaluation(documents):
    """Weights, and a file that a folder has and data.held_out names."""
    Path("more").mkdir()
    for name, some in (("train", documents[:150]), ("val", documents[150:])):
        _write_bin(f"more/{name}.bin", _flat(some))
    np.save("other.npy", np.full(4000, 7, np.uint16))
    entries = [{"path": "more", "weight": 3}, {"path": "other.npy", "weight": 1}]
    with pytest.raises(InputError, match=r"data.token_dtype=uint32: \S+other.npy has uint16, as it says\b.*\n  fix"):
        _open("other.npy", token_dtype="uint32")
    opened, held_out = _open(entries, token_dtype="uint16", held_out="more/val.bin")
    found = opened.rows_at(0, slice(None))["tokens"]
    assert 0 < (found == 7).all(axis=1).sum() < 8 and held_out
    assert len(held_out.rows) == -(-(len(_flat(documents[150:])) - 1) // 32)
    alone, _ = _open("more/train.bin", token_dtype="uint16")
    assert isinstance(opened.rows, packing.Joined) and len(opened.rows.parts[0]) == len(alone.rows)


BAD = {
    "numbers": (lambda: _write_bin("x.bin", [1, 2]), {}, r"x\.bin: nothing says what numbers it has\n  fix .*uint16"),
    "odd": (lambda: Path("x.bin").write_bytes(b"abc"), {"token_dtype": "uint16"}, r"3 bytes are no whole number of u"),
    "a token that is none": (
        lambda: _write_bin("x.bin", [*range(200), 50256, 1]),
        {"token_dtype": "uint16"},
        r"x\.bin: token 200 is 50,256, and model\.vocab=257\n  fix ",
    ),
    "a negative token": (lambda: np.save("x.npy", np.arange(-1, 99)), {}, r"x\.npy: token 0 is -1, and model"),
    "a table": (lambda: np.save("x.npy", np.ones((9, 9), int)), {}, r"x\.npy: an array of int64 \[9, 9\].*\n  fix "),
    "no .npy": (lambda: Path("x.npy").write_bytes(b"x" * 99), {}, r"x\.npy: not a \.npy file .*\n  fix "),
    "half a .npy": (lambda: _cut_half("x.npy"), {}, r"x\.npy: has .* tokens of int64, and its header says 99\n  fix "),
    "half a .bin": (lambda: _write(b"\0" * 40), {}, r"x\.bin: has 10 tokens of int32, and x\.idx says 12\n  fix "),
    "no index": (lambda: _write(b"\0" * 48, index=b"hello"), {}, r"x\.idx: not an index of Megatron-LM for tokens\n"),
    "half an index": (lambda: _write(b"\0" * 48, cut=9), {}, r"x\.idx: ends before its 4 sequences do\n  fix "),
    "an index of floats": (lambda: _write(b"\0" * 48, kind=6), {}, r"x\.idx: not an index of Megatron-LM for tokens\n"),
    "an index out of order": (lambda: _write(b"\0" * 48, size=2), {}, r"x\.idx: its sequences do not stand one after"),
    "too few tokens": (lambda: _write_bin("x.bin", [1]), {"token_dtype": "uint16"}, r"1 tokens for training are less"),
    "links to nothing": (
        lambda: [Path("y.bin").symlink_to("none"), Path("z.bin").mkdir()],
        {"source": "?.bin"},
        r"data\.source: \?\.bin matches no file of tokens\n  fix ",
    ),
    "records": (lambda: _write_megatron("x", FEW), {"messages_field": "m"}, r"data\.messages_field: the tokens of x"),
    "texts beside": (
        lambda: _write_megatron("x", FEW),
        {"source": ["x.bin", "stdlib"]},
        r"data\.source: x\.bin is a token file of another program, and stdlib is none: .*\n  fix ",
    ),
    "texts apart": (lambda: _write_megatron("x", FEW), {"held_out": "stdlib"}, r"data\.held_out: stdlib has no tokens"),
    "tokens apart": (
        lambda: [_write_megatron("x", FEW), Path("t.txt").write_text("text")],
        {"source": "t.txt", "held_out": "x.bin"},
        r"data\.held_out: x\.bin is a token file of another program, and data\.source names none\n  fix ",
    ),
    "another tokenizer": (
        lambda: _write_megatron("x", FEW),
        {"model": {"vocab": 50257}},
        r"data\.tokenizer=bytes: the tokens of x\.\S+ were made with another .*\n  fix .*data\.packing=stream",
    ),
    "nothing": (lambda: None, {"source": "y*.bin"}, r"data\.source: y\*\.bin matches no file of tokens\n  fix "),
    "a token of no tokenizer": (
        lambda: Path("x.jsonl").write_text('{"text": [1, 2]}\n{"text": [1, 300]}\n'),
        {"source": "x.jsonl"},
        r"x\.jsonl:2: token 1 is 300, and data\.tokenizer has 257\n  fix ",
    ),
    "a list of no tokens": (
        lambda: pyarrow.parquet.write_table(pyarrow.table({"text": pyarrow.array([[1], [2, None]])}), "x.parquet"),
        {"source": "x.parquet"},
        r"x\.parquet: row 2: text has null or a number below 0, which is no token",
    ),
}  # fmt: skip


def _write(content, kind=4, size=4, cut=0, index=None):
    Path("x.bin").write_bytes(content)
    index = index or _index([3, 2, 1, 6], [0, 1, 2, 3, 4], kind, size)
    Path("x.idx").write_bytes(index[: len(index) - cut])


def _cut_half(name):
    np.save(name, np.arange(99))
    Path(name).write_bytes(Path(name).read_bytes()[:-400])


@pytest.mark.parametrize("what", BAD)
def test_what_cannot_be_read_is_said(what, folder):
    write, settings, message = BAD[what]
    write()
    source = settings.get("source") or next(one.name for one in folder.iterdir() if one.name in ("x.bin", "x.npy"))
    with pytest.raises(InputError, match=message):
        _epoch(_open(source, **{name: value for name, value in settings.items() if name != "source"})[0])


def test_tokens_are_not_made_of_tokens():
    _write_megatron("x", FEW)
    with pytest.raises(InputError, match=r"data\.source=x\.bin: has tokens already\n  fix "):
        tokenize(_config("x.bin"), "out")
    with pytest.raises(InputError, match=r"data\.tokenizer=bpe:300: x\.bin has tokens already\n  fix "):
        trained.with_vocab_size(_config("x.bin", {"vocab": 0}, tokenizer="bpe:300"))
    Path("x.jsonl").write_text('{"text": [1, 2]}\n')
    with pytest.raises(InputError, match=r"x\.jsonl:1: tokens, on which no tokenizer is trained\n  fix "):
        _open("x.jsonl", tokenizer="bpe:300", model={"vocab": 300})
    with pytest.raises(InputError, match=r"x\.jsonl:1: tokens, on which no tokenizer is trained\n  fix "):
        trained.train_tokenizer(sources.open_source(_config("x.jsonl").data).documents(), 300, "new.json")
