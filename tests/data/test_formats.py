import bz2
import gzip
import json
import lzma
import sys

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest
import zstandard

from gspmd_lm.data import formats, readers
from gspmd_lm.errors import InputError

COMPRESS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstandard.compress}


def _texts(path, content=None, field="text"):
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return list(formats.texts(path, field))


@pytest.mark.parametrize("suffix", COMPRESS)
def test_compressed_files_hold_what_was_compressed(tmp_path, suffix):
    text = b"".join(b"line %d\n" % i for i in range(20000))
    compressed = COMPRESS[suffix](text)
    documents = _texts(tmp_path / f"a.txt{suffix}", compressed + COMPRESS[suffix](b"a second stream\n"))
    assert b"".join(documents) == text + b"a second stream\n" and len(documents) > 2
    assert _texts(tmp_path / f"a.JSONL{suffix}", COMPRESS[suffix](b'{"text": "x"}\n{"text": "y"}')) == [b"x", b"y"]
    for damaged in (compressed[: len(compressed) // 2], b"never compressed"):
        with pytest.raises(InputError, match=rf"b\.txt\{suffix}: cannot be read \(.+\)\n  fix "):
            _texts(tmp_path / f"b.txt{suffix}", damaged)


def test_a_flipped_bit_in_compressed_text_is_told(tmp_path):
    text = b"".join(b"%d squared is %d\n" % (i, i * i) for i in range(500))
    for suffix in (".gz", ".bz2", ".xz"):
        whole = COMPRESS[suffix](text)
        for at in range(12, len(whole), len(whole) // 20):
            damaged = bytearray(whole)
            damaged[at] ^= 0x10
            with pytest.raises(InputError, match=r"a\.txt.* cannot be read"):
                _texts(tmp_path / f"a.txt{suffix}", bytes(damaged))


@pytest.mark.parametrize(
    "text",
    [b"some words " * 60_000, "€uro".encode() * 60_000, bytes(range(128, 192)) * 5000, b"x" * 131_072, b"a b\n" * 9],
)
def test_a_very_long_line_is_cut_between_words(tmp_path, text):
    documents = _texts(tmp_path / "a.txt", text)
    assert b"".join(documents) == text
    assert len(documents) >= len(text) // (2 * readers.SECTION_BYTES)
    assert max(map(len, documents)) <= 3 * readers.SECTION_BYTES
    if b" " in text:
        assert all(document.endswith((b" ", b"\n")) for document in documents)
    elif text[:1] == "€".encode()[:1]:
        assert all(document.decode() for document in documents)  # no character is cut


def test_byte_order_marks(tmp_path):
    assert _texts(tmp_path / "a.txt", "\ufeffgrün".encode()) == ["grün".encode()]
    for codec in ("utf-16", "utf-16-le", "utf-16-be"):
        mark = "" if codec == "utf-16" else "\ufeff"
        assert _texts(tmp_path / "a.txt", f"{mark}grün\n€".encode(codec)) == ["grün\n€".encode()]
        assert formats.oddity(tmp_path / "a.txt") == ""
        assert _texts(tmp_path / "a.csv", f"{mark}text\ngrün".encode(codec)) == ["grün".encode()]
    with pytest.raises(InputError, match=r"a\.txt: begins as UTF-16 but is not"):
        _texts(tmp_path / "a.txt", b"\xff\xfe\x00\xd8\x00\xd8")


def test_html_is_what_a_browser_shows(tmp_path):
    page = """<!DOCTYPE html><html><head><title>The title</title><style>p {color: red}</style>
      <script>if (1 < 2) alert("<p>no</p>")</script></head><body class="x"><h1>One &amp; two</h1>
      <p>A paragraph   with <b>bold</b>
      words&nbsp;here.</p><!-- a comment --><ul><li>first<li>second</ul><pre>  kept
    as  it is</pre></body></html>"""
    (text,) = _texts(tmp_path / "a.html", page)
    lines = [line for line in text.decode().split("\n") if line]
    assert lines == ["The title", "One & two", "A paragraph with bold words here.", "first", "second", "  kept",
                     "    as  it is"]  # fmt: skip
    latin = '<meta http-equiv=x content="text/html; charset=iso-8859-1"><p>grün'.encode("latin-1")
    assert _texts(tmp_path / "a.htm", latin) == ["grün".encode()]
    quoted = b'<meta charset="latin1"><p>\x93gr\xfcn\x94'  # as browsers read it, in windows-1252
    assert _texts(tmp_path / "a.htm", quoted) == ["“grün”".encode()]
    assert _texts(tmp_path / "a.htm", "<meta charset=utf-16><p>grün") == ["grün".encode()]
    assert _texts(tmp_path / "a.htm", "<p>a<![foo[x]]>b<![ [>c<![if !IE]>d<![endif]>e") == [b"abcde"]
    assert _texts(tmp_path / "a.htm", "<meta charset=no-such><p>grün") == ["grün".encode()]
    assert _texts(tmp_path / "a.htm", b"<p>\xff") == [b"\xff"]
    assert _texts(tmp_path / "a.htm", "<script>only</script>") == []


def test_notebooks_are_their_cells_without_outputs(tmp_path):
    cells = [
        {"cell_type": "markdown", "source": "# Title"},
        {"cell_type": "code", "source": ["x = 1\n", "x"], "outputs": [{"text": "no"}]},
        {"cell_type": "code", "source": []},
    ]
    assert _texts(tmp_path / "a.ipynb", json.dumps({"cells": cells})) == [b"# Title\n\nx = 1\nx"]
    for wrong in ('{"worksheets": []}', "[1]", '{"cells": [1]}'):
        with pytest.raises(InputError, match=r"a\.ipynb: not a Jupyter notebook"):
            _texts(tmp_path / "a.ipynb", wrong)
    with pytest.raises(InputError, match=r"a\.ipynb: not valid JSON"):
        _texts(tmp_path / "a.ipynb", "{")


def test_json(tmp_path):
    path = tmp_path / "a.json"
    assert _texts(path, '[{"text": "a"}, {"text": "b", "n": 1}]') == [b"a", b"b"]
    assert _texts(path, '{"text": "a", "n": 1}') == [b"a"]
    assert _texts(path, '["a", "b"]') == [b"a", b"b"]
    assert _texts(path, '{"text": "a"}\n{"text": "b"}\n') == [b"a", b"b"]
    with pytest.raises(InputError, match=r"a\.json: item 2: no field text \(did you mean txt\?\)\n.*one of txt"):
        _texts(path, '[{"text": "a"}, {"txt": "b"}]')
    with pytest.raises(InputError, match=r"a\.json: item 1: a number\n  fix "):
        _texts(path, "[1]")
    with pytest.raises(InputError, match=r"a\.json: not valid JSON"):
        _texts(path, '{"text": ')
    with pytest.raises(InputError, match=r"item 1: text is a list, not text\n  fix   for conversations"):
        _texts(path, '[{"text": [[1], [2, 3]]}]')
    with pytest.raises(InputError, match=r"item 1: text is an object, not text\n  fix   set .* to one of id$"):
        _texts(path, '[{"text": {}, "id": "x"}]')


def test_a_file_of_tokens_is_no_text_as_a_whole(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": [1, 2]}\n')
    with pytest.raises(InputError, match=r"a\.jsonl:2: text is a list of tokens, not text\n  fix "):
        formats.whole(tmp_path / "a.jsonl", "text")
    assert len(_texts(tmp_path / "a.jsonl")) == 2


def test_csv(tmp_path):
    path = tmp_path / "a.csv"
    content = 'id,text\n1,"two\nlines, ""quoted"""\n\n2,\n3,' + "long " * 50_000
    assert _texts(path, content) == [b'two\nlines, "quoted"', b"long " * 50_000]
    assert _texts(path, "id;text\n1;a,b\n") == [b"a,b"]
    assert _texts(path, "id;text\n1;a,b\n", field="id") == [b"1"]
    assert _texts(tmp_path / "a.tsv", "id\ttext\n1\ta,b\n") == [b"a,b"]
    assert _texts(path, b"text\n\xff\n") == [b"\xff"]
    with pytest.raises(InputError, match=r"a\.csv:2: no field text \(did you mean texts\?\)\n.*one of id, texts"):
        _texts(path, "id;texts\n1;a\n")
    with pytest.raises(InputError, match=r"a\.csv:4: 1 fields, but the header has 2\n  fix "):
        _texts(path, 'id,text\n1,"a\nb"\n2\n')
    with pytest.raises(InputError, match=r"a\.csv: two columns are named text\n  fix "):
        _texts(path, "text,text\na,b\n")
    with pytest.raises(InputError, match=r"a\.csv:3: not CSV"):
        _texts(path, 'id,text\n1,a\n2,"a"b\n')


@pytest.mark.parametrize("new", [pyarrow.ipc.new_file, pyarrow.ipc.new_stream])
def test_arrow(tmp_path, new):
    table = pyarrow.table({"text": ["a", None, "b", ""], "n": [1, 2, 3, 4], "talk": [[], [], [], []]})
    with new(str(tmp_path / "a.arrow"), table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    assert _texts(tmp_path / "a.arrow") == [b"a", b"b"]
    assert [record["n"] for _, record in formats.records(tmp_path / "a.arrow")] == [1, 2, 3, 4]
    with pytest.raises(InputError, match=r"no column txt \(did you mean text\?\)\n.*text, n, talk, or for conv"):
        _texts(tmp_path / "a.arrow", field="txt")
    with pytest.raises(InputError, match=r"column talk is list.*, not text\n  fix   for conversations"):
        _texts(tmp_path / "a.arrow", field="talk")
    whole = (tmp_path / "a.arrow").read_bytes()
    with pytest.raises(InputError, match=r"a\.arrow: cannot be read as arrow"):
        _texts(tmp_path / "a.arrow", whole[: len(whole) // 3])


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "array_record.python", None)
    with pytest.raises(InputError, match=r"needs the package array_record\n  fix   pip install array_record"):
        _texts(tmp_path / "a.array_record", b"x")


def test_the_look_of_a_file(tmp_path):
    def look(name, content):
        (tmp_path / name).write_bytes(content)
        return formats.oddity(tmp_path / name)

    assert look("a.txt", "grün".encode() + b"x" * 10) == ""
    assert look("a.txt", "€".encode() * 40_000) == ""  # the beginning ends within a character
    assert look("a.txt", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR") == formats.BINARY
    assert look("a.txt.gz", gzip.compress(b"\0")) == formats.BINARY
    assert look("a.md", b"stra\xdfe") == formats.NOT_UTF8
    assert look("a.parquet", b"\0") == ""


@pytest.mark.parametrize("name", ["a.pdf", "a", "a.gz", "a.docx.gz", "a.parquet.gz", "a.arrow.zst", "a.zip", ".txt"])
def test_unknown_endings(tmp_path, name):
    assert formats.format_of(tmp_path / name) is None


@pytest.mark.parametrize("ending", ["parquet", "arrow"])
def test_tables_that_are_ambiguous_or_hold_no_utf8(ending, tmp_path):
    def written(*arrays):
        table = pyarrow.Table.from_arrays(list(arrays), names=["text", "text"][: len(arrays)])
        path = tmp_path / f"a.{ending}"
        if ending == "parquet":
            pyarrow.parquet.write_table(table, path)
        else:
            with pyarrow.ipc.new_stream(str(path), table.schema) as writer:
                writer.write_table(table)
        return path

    latin = pyarrow.array([b"a", b"\xff"], pyarrow.binary()).view(pyarrow.string())
    path = written(latin)
    assert list(formats.texts(path, "text")) == [b"a", b"\xff"]  # read byte by byte
    with pytest.raises(InputError, match=rf"a\.{ending}: cannot be read as {ending} \(.*UTF8.*\)\n  fix "):
        list(formats.records(path, ["text"]))
    path = written(latin, latin)
    for read in (lambda: formats.texts(path, "text"), lambda: formats.records(path, ["text"])):
        with pytest.raises(InputError, match=rf"a\.{ending}: two columns are named text\n  fix "):
            list(read())


def test_texts_that_are_null_or_empty_are_skipped_and_counted(tmp_path, caplog):
    (tmp_path / "a.jsonl").write_text('{"text": null}\n{"text": "one"}\n{"text": ""}\n')
    table = pyarrow.table({"text": ["one", None, None, "two"]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    ids = [b"\x01\0\0\0"]
    (tmp_path / "ids.jsonl").write_text('{"text": []}\n{"text": [1]}\n{"text": null}\n')
    pyarrow.parquet.write_table(pyarrow.table({"text": [[], [1], None]}), tmp_path / "ids.parquet")
    for name, found, count in (
        ("a.jsonl", [b"one"], "2 texts are"),
        ("a.parquet", [b"one", b"two"], "2 texts are"),
        ("ids.jsonl", ids, "2 texts are"),
        ("ids.parquet", ids, "2 texts are"),
    ):
        caplog.clear()
        for _ in range(2):
            assert [*formats.texts(tmp_path / name, "text")] == found
        assert [record.message for record in caplog.records] == [
            f"{tmp_path / name}: {count} null or empty, and skipped"
        ]
