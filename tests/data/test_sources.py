import hashlib
import sysconfig
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from array_record.python import array_record_module  # pyright: ignore[reportAttributeAccessIssue]

from gspmd_lm.config import Data
from gspmd_lm.data import readers, sources
from gspmd_lm.errors import InputError


def _documents(source, **settings):
    return list(sources.open_source(Data(source=str(source), **settings)).documents())


def _paths(source):
    return [file.path for part in source.parts for file in part.files]


def _array_record(path, records):
    writer = array_record_module.ArrayRecordWriter(str(path), "group_size:1")
    for record in records:
        writer.write(record)
    writer.close()


def test_stdlib_is_the_interpreters_own_without_tests():
    source = sources.open_source(Data())
    root = Path(sysconfig.get_path("stdlib"))
    names = [path.relative_to(root).as_posix() for path in _paths(source)]
    assert "os.py" in names and "json/decoder.py" in names and names == sorted(names)
    assert not {"test", "tests", "idle_test", "site-packages"} & {part for name in names for part in name.split("/")}
    assert source.size_bytes == sum(len(document) for document in source.documents()) > 5e6
    assert (
        source.fingerprint == sources.open_source(Data()).fingerprint and source.fingerprint[:12] in source.description
    )
    os_py = (root / "os.py").read_bytes()
    assert os_py in list(source.documents()) or len(os_py) > readers.SECTION_BYTES


def test_a_link_to_nothing_is_no_part_of_the_library(tmp_path, monkeypatch):
    (tmp_path / "os.py").write_text("pass")
    (tmp_path / "sitecustomize.py").symlink_to("/etc/none/sitecustomize.py")  # as images without /etc/python3 have it
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    assert _documents("stdlib") == [b"pass"]


def test_every_kind_of_file(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"plain \xff")
    (tmp_path / "b.md").write_bytes(b"# mark")
    (tmp_path / "c.py").write_bytes(b"x = 1")
    (tmp_path / "d.jsonl").write_bytes('{"text": "één"}\n\n{"text": ""}\n{"text": "two", "n": 1}'.encode())
    pyarrow.parquet.write_table(pyarrow.table({"n": [1, 2, 3], "text": ["p1", None, "p2"]}), tmp_path / "e.parquet")
    _array_record(tmp_path / "f.array_record", [b"r%d" % i for i in range(3000)])
    _array_record(tmp_path / "g.arrayrecord", [b"last \xfe"])
    records = [b"r%d" % i for i in range(3000)]
    expected = [b"plain \xff", b"# mark", b"x = 1", "één".encode(), b"two", b"p1", b"p2", *records, b"last \xfe"]
    assert _documents(tmp_path / "*.*") == expected


def test_a_large_text_file_is_cut_at_line_ends(tmp_path):
    text = b"".join(b"line %d\n" % i for i in range(20000))
    (tmp_path / "a.txt").write_bytes(text)
    documents = _documents(tmp_path / "a.txt")
    assert b"".join(documents) == text and len(documents) == 1 + len(text) // (readers.SECTION_BYTES + 10)
    assert all(document.endswith(b"\n") for document in documents)


def test_the_fingerprint_follows_content_alone(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one")
    first = sources.open_source(Data(source=str(path))).fingerprint
    path.write_text("two")
    assert sources.open_source(Data(source=str(path))).fingerprint != first
    path.write_text("one")
    path.rename(tmp_path / "b.txt")
    assert sources.open_source(Data(source=str(tmp_path / "b.txt"), text_field="other")).fingerprint == first
    (tmp_path / "c.jsonl").write_text('{"text": "x", "other": "y"}')
    fields = [
        sources.open_source(Data(source=str(tmp_path / "c.jsonl"), text_field=f)).fingerprint for f in ("text", "other")
    ]
    assert fields[0] != fields[1]


def test_parquet_column_kinds(tmp_path):
    for kind in (pyarrow.large_string(), pyarrow.binary(), pyarrow.dictionary(pyarrow.int32(), pyarrow.string())):
        column = pyarrow.array(["a", "b", "a"]).cast(kind)
        pyarrow.parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet")
        assert _documents(tmp_path / "a.parquet") == [b"a", b"b", b"a"]


def test_jsonl_keeps_bytes_that_are_not_utf8(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a\xffb"}\n{"text": "\\ud800"}\n')
    assert _documents(tmp_path / "a.jsonl") == [b"a\xffb", b"\xed\xa0\x80"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"text" "y"}\n', r"a\.jsonl:2: not valid JSON: .*\n  fix "),
        ("a.jsonl", b'{"txt": "x", "id": 1}\n', r"a\.jsonl:1: no field text \(did you mean txt\?\)\n.* one of txt, id"),
        ("a.jsonl", b'{"text": 3}\n', r"a\.jsonl:1: text is a number, not text"),
        ("a.jsonl", b'{"text": "x"}\n[1]\n', r"a\.jsonl:2: a list, not a JSON object\n"),
        ("a.parquet", b"nonsense" * 9, r"a\.parquet: cannot be read as parquet"),
        ("a.array_record", b"nonsense" * 9, r"a\.array_record: cannot be read as ArrayRecord"),
    ],
)
def test_bad_files(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message):
        _documents(tmp_path / name)


def test_bad_parquet_columns_and_pages(tmp_path):
    path = tmp_path / "a.parquet"
    table = pyarrow.table({"texts": ["some text " * 10 + str(i) for i in range(2000)], "n": list(range(2000))})
    pyarrow.parquet.write_table(table, path)
    with pytest.raises(InputError, match=r"no column text \(did you mean texts\?\)\n.*texts, n"):
        _documents(path)
    with pytest.raises(InputError, match="column n is int64, not text"):
        _documents(path, text_field="n")
    damaged = bytearray(path.read_bytes())
    damaged[4:400] = b"\xff" * 396
    path.write_bytes(damaged)
    with pytest.raises(InputError, match="cannot be read as parquet"):
        _documents(path, text_field="texts")


def test_a_damaged_record_does_not_pass_as_a_shorter_file(tmp_path):
    path = tmp_path / "a.array_record"
    _array_record(path, [hashlib.sha256(b"%d" % i).digest() * 40 for i in range(500)])
    whole = bytearray(path.read_bytes())
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match="cannot be read as ArrayRecord"):
        _documents(path)
    whole[len(whole) // 3 : len(whole) // 3 + 100] = bytes(100)
    path.write_bytes(whole)
    with pytest.raises(InputError, match="cannot be read as ArrayRecord"):
        _documents(path)


def test_unreadable(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    path.write_text("x")

    def refuse(self, mode="r", *args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)  # as root, permissions do not stop us
    with pytest.raises(InputError, match=r"a\.txt: cannot be read .*Permission denied"):
        _documents(path)


def test_random_rows():
    assert sources.random_rows("random:64") == 64
    assert sources.random_rows("stdlib") is None
    with pytest.raises(InputError, match="random:64 has no documents"):
        sources.open_source(Data(source="random:64"))
    for wrong in ("random:", "random:0", "random:-3", "random:many"):
        with pytest.raises(InputError, match="write random:ROWS"):
            sources.random_rows(wrong)
