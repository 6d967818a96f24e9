import json
import os
import sys
from pathlib import Path

import pyarrow
import pyarrow.ipc
import pytest

from gspmd_lm.config import Data
from gspmd_lm.config.data import Source
from gspmd_lm.data import corpus, formats, remote, sources, tokenizer
from gspmd_lm.errors import InputError
from gspmd_lm.workdir import lock


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("GSPMD_LM_CACHE", str(tmp_path / "cache"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def _write(**texts):
    """Writes files that hold their own names; a__b.txt stands in the folder a."""
    for name in texts["names"].split():
        path = Path(name.replace("+", " "))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(path.name)


def _open(source, **settings):
    return sources.open_source(Data(source=_tuple(source), **{name: _tuple(value) for name, value in settings.items()}))


def _tuple(value):
    return tuple(value) if isinstance(value, list) else value


def _read(source, **settings):
    return [document.decode() for document in _open(source, **settings).documents()]


def test_a_folder_is_all_that_is_known_in_it_and_the_rest_is_said():
    _write(names="t/b.txt t/a.md t/sub/c.rst t/.git/d.txt t/.hidden.txt t/x.pdf t/y.pdf t/z.pdf t/zz.pdf t/sub/no")
    Path("t/empty.txt").touch()
    Path("t/photo.txt").write_bytes(b"\x89PNG\0\0")
    Path("t/latin.txt").write_bytes(b"\xe4")
    Path("t/gone.txt").symlink_to("nothing")
    os.mkfifo("t/pipe.txt")  # reading it would wait for ever
    found = _open("t")
    assert [document for document in found.documents()] == [b"a.md", b"b.txt", b"\xe4", b"c.rst"]
    assert found.notes.splitlines() == [
        "skipped, hidden: t/.git, t/.hidden.txt",
        "skipped, no file, or a link to nothing: t/gone.txt, t/pipe.txt",
        "skipped, unknown ending: 5 files (t/x.pdf, t/y.pdf, t/z.pdf, ...)",
        "skipped, empty: t/empty.txt",
        "not UTF-8, read byte by byte: t/latin.txt",
        "skipped, binary: t/photo.txt",
    ]
    assert found.description.startswith("t: 4 files, 0.0 MB, sha256 ")


def test_names_with_spaces_and_the_characters_of_globs():
    _write(names="my+texts/a.txt my+texts/[1].txt my.txt texts/a.txt")
    assert _read("my texts") == ["[1].txt", "a.txt"]
    assert _read("my texts/a.txt") == _read("my te*/a.txt") == ["a.txt"]
    assert _read("my texts/[1].txt") == ["[1].txt"]
    assert _read("my.txt texts") == ["my.txt", "a.txt"]
    assert _read(["my texts/a.txt", "my.txt"]) == ["a.txt", "my.txt"]
    assert _read(["my texts", "my texts/a.txt"]) == ["[1].txt", "a.txt"]


def test_a_glob_takes_what_is_known_and_the_folders_it_matches():
    _write(names="t/a.txt t/b.xyz t/s/c.txt t/s/d.pdf")
    assert _read("t/*") == _read("t/**/*") == ["a.txt", "c.txt"]
    assert "unknown ending: t/b.xyz, t/s/d.pdf" in _open("t/*").notes
    assert _read("t/**/*.txt") == ["a.txt", "c.txt"] and _open("t/**/*.txt").notes == ""


def test_links_to_folders_are_followed_and_a_circle_ends():
    _write(names="elsewhere/a.txt t/b.txt")
    Path("t/books").symlink_to("../elsewhere")
    Path("t/round").symlink_to(".")
    assert _read("t") == ["b.txt", "a.txt"]


def test_the_folders_of_runs_are_no_texts():
    _write(names="t/a.txt t/run/config.yaml t/run/metrics.jsonl t/run/checkpoints/x.txt")
    _write(names="t/stopped/config.yaml t/stopped/rules.yaml t/stopped/metrics.jsonl")
    _write(names=f"t/z/{lock.LOCK} t/z/{lock.HOLDER}")
    assert _read("t") == ["a.txt"] and "skipped, the folder of a run: t/run, t/stopped, t/z" in _open("t").notes


def test_a_folder_that_cannot_be_listed_is_an_error(monkeypatch):
    _write(names="t/a.txt t/b/c.txt")
    scan = os.scandir

    def refuse(path):
        if str(path) == "t/b":
            raise PermissionError(13, "Permission denied", "t/b")
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)  # as root, permissions do not stop us
    with pytest.raises(InputError, match=r"data\.source: t/b: cannot be listed \(Permission denied\)\n  fix "):
        _open("t")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("none", r"data\.source: none matches no file \(there is no such file or folder in .*here\)\n  fix "),
        ("t/a.txt my b.txt", r"t/a\.txt my b\.txt matches no file, and neither does my in it \(there is no such"),
        ("stdlb", r"stdlb matches no file \(did you mean stdlib\?\)"),
        (["t", "no/*.txt"], r"data\.source: no/\*\.txt matches no file\n  fix "),
        ("t/x.pdf", r"data\.source: t/x\.pdf: unknown ending\n  fix   give files that end in \.txt .*\.zst"),
        ("t/*.pdf", r"nothing to read\n  skipped, unknown ending: t/x\.pdf\n  fix   give files"),
        ("t/e.txt", r"nothing to read\n  skipped, empty: t/e\.txt\n  fix "),
        ("", r"data\.source is empty\n"),
        (["t", "random:3"], "random:3 has no documents"),
    ],
)
def test_bad_names(source, message):
    _write(names="t/x.pdf t/a.txt")
    Path("t/e.txt").touch()
    with pytest.raises(InputError, match=message):
        _open(source)


def _save(folder, shards, extra=()):
    """A dataset as `save_to_disk` of datasets 5.2 writes it."""
    folder.mkdir(parents=True)
    names = [f"data-{i:05}-of-{len(shards):05}.arrow" for i in range(len(shards))]
    for name, texts in [*zip(names, shards, strict=True), *extra]:
        table = pyarrow.table({"text": texts})
        with pyarrow.ipc.new_stream(str(folder / name), table.schema) as writer:
            writer.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (folder / "dataset_info.json").write_text("{}")


def test_folders_that_datasets_saved(folder):
    _save(folder / "one", [["a", "b"], ["c"]], extra=[("cache-1f.arrow", ["no"])])
    assert _read("one") == ["a", "b", "c"] and _open("one").notes == ""
    for split in ("train", "test"):
        _save(folder / "both" / split, [[split]])
    (folder / "both" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert _read("both") == ["train"] and _open("both").notes == "skipped, another split than train: both/test"
    found = _open("both", held_out="both/test")
    assert found.held_out and [text for text, _ in found.read(found.held_out)] == [b"test"]
    assert _read(".") == ["train", "a", "b", "c"]  # within another folder too


def test_damaged_folders_of_datasets(folder):
    _save(folder / "one", [["a"], ["b"]])
    (folder / "one" / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(InputError, match=r"state\.json: names data-00001-of-00002\.arrow, which is not there"):
        _open("one")
    for wrong, said in (
        ("{", "not valid JSON: .*"), ("[]", "a list, not a JSON object"), ("{}", "has no list _data_files"),
        ('{"_data_files": 3}', "has no list _data_files"),
    ):  # fmt: skip
        (folder / "one" / "state.json").write_text(wrong)
        with pytest.raises(InputError, match=rf"state\.json: {said}\n  fix "):
            _open("one")
    _write(names="parts/dataset_dict.json")
    Path("parts/dataset_dict.json").write_text('{"splits": ["test", "validation"]}')
    with pytest.raises(InputError, match=r"without a split named train\n.*: test, validation"):
        _open("parts")


def test_held_out_files_are_taken_out_of_the_source():
    _write(names="t/a.txt t/b.txt t/v.txt")
    found = _open("t", held_out=["t/v.txt"])
    assert [text for text, _ in found.read(found.parts[0])] == [b"a.txt", b"b.txt"]
    assert found.held_out and [text for text, _ in found.read(found.held_out)] == [b"v.txt"]
    assert "skipped, held out: t/v.txt" in found.notes
    assert found.fingerprint != _open(["t/a.txt", "t/b.txt"]).fingerprint
    with pytest.raises(InputError, match=r"t/v\.txt: nothing to read\n  skipped, held out: t/v\.txt"):
        _open("t/v.txt", held_out="t")
    Path("t/b.pdf").touch()
    skipped = r"skipped, unknown ending: t/b\.pdf\n  skipped, held out: t/a\.txt, t/b\.txt, t/v\.txt\n"
    message = rf"data\.source: t: nothing to read\n  {skipped}"
    with pytest.raises(InputError, match=message):
        _open("t", held_out="t")


def test_a_file_that_two_entries_name_is_read_once_which_is_said():
    _write(names="t/a.txt t/b.txt")
    found = _open(["t", "t/a.txt"])
    assert [*found.documents()] == [b"a.txt", b"b.txt"]
    assert found.notes == "read once, though two entries of data.source name it: t/a.txt"
    assert not _open("t").notes


def test_sources_have_fields_of_their_own(folder):
    Path("a.jsonl").write_text('{"text": "a", "body": "A"}')
    Path("b.jsonl").write_text('{"text": "b", "body": "B"}')
    both = (Source(path="a.jsonl", text_field="body"), "b.jsonl")
    assert _read(both) == ["A", "b"]
    assert _read((*both, Source(path="a.jsonl"))) == ["A", "b"]  # the first to name a file says how it is read
    weighted = (Source(path="a.jsonl", weight=1.0), Source(path="b.jsonl", weight=2.0, text_field="body"))
    assert [part.weight for part in _open(weighted).parts] == [1.0, 2.0] and _read(weighted) == ["a", "B"]
    assert len({_open(one).fingerprint for one in (both, weighted, ("a.jsonl", "b.jsonl"))}) == 3


def test_hashing_tells_how_much_there_is():
    _write(names="t/a.txt t/bb.txt")
    said = []
    sources.open_source(Data(source="t"), lambda *report: said.append(report))
    assert said == [("hashing files", 5, 11), ("hashing files", 11, 11)]


@pytest.fixture
def store(bucket):
    for name in ("b.txt", "a.jsonl", "sub/c.txt", "x.pdf"):
        bucket.pipe(f"/corpus/{name}", b'{"text": "a"}' if name == "a.jsonl" else name.encode())
    return bucket


def test_addresses_are_copied_once(store, monkeypatch):
    assert _read("memory://corpus") == ["a", "b.txt", "sub/c.txt"]
    assert "unknown ending: memory:///corpus/x.pdf" in _open("memory://corpus").notes
    monkeypatch.setattr(remote, "_blocks", lambda *_: pytest.fail("copied again"))
    assert _read("memory://corpus/*.txt") == ["b.txt"] and _read("memory://corpus/b.txt") == ["b.txt"]


def test_a_changed_object_is_copied_again(store):
    said = []
    sources.open_source(Data(source="memory://corpus/b.txt"), lambda *report: said.append(report))
    assert said[0] == ("copying files", 5, 5)
    store.pipe("/corpus/b.txt", b"changed")
    assert _read("memory://corpus/b.txt") == ["changed"]


def test_a_damaged_copy_is_copied_again(store):
    (path,) = remote.copies("memory://corpus/b.txt", "here")
    path.write_bytes(b"b,txt")
    assert _read("memory://corpus/b.txt") == ["b.txt"]


def test_bad_addresses(store, monkeypatch):
    with pytest.raises(InputError, match=r"memory://corpus/\*\.rst matches no file\n  fix "):
        _open("memory://corpus/*.rst")
    with pytest.raises(InputError, match=r"memory://none matches no file\n  fix "):
        _open("memory://none")
    with pytest.raises(InputError, match=r"memory://corpus/x\.pdf: nothing to read\n  skipped, unknown ending"):
        _open("memory://corpus/x.pdf")
    with pytest.raises(InputError, match=r"data\.source: nope://x: Protocol not known: nope\n  fix "):
        _open("nope://x")

    def fail(*_, **__):
        raise TimeoutError("the store is silent")

    monkeypatch.setattr(type(store), "open", fail)
    with pytest.raises(InputError, match=r"b\.txt: cannot be read \(TimeoutError: the store is silent\)\n  fix "):
        _open("memory://corpus/b.txt")
    assert not list(remote.cache_folder("copies").rglob("b.txt"))


@pytest.mark.parametrize(("address", "package"), [("gs://b/x", "gcsfs"), ("s3://b/x", "s3fs")])
def test_a_missing_package_is_named(monkeypatch, address, package):
    monkeypatch.setitem(sys.modules, package, None)
    missing = rf": a package is missing\n  fix   pip install {package}"
    with pytest.raises(InputError, match=address + missing):
        _open(address)
    with pytest.raises(InputError, match=rf"data\.tokenizer: {address}/gpt2\.tiktoken{missing}"):
        tokenizer.load_tokenizer(f"{address}/gpt2.tiktoken")


def test_the_page_names_every_ending():
    page = (Path(formats.__file__).parents[2] / "docs" / "data.md").read_text()
    endings = [word.strip(",") for word in formats.KNOWN.split() if word[0] == "."]
    assert len(endings) > 20 and [ending for ending in endings if f"`{ending}`" not in page] == []


def test_listed():
    paths = [Path(name) for name in "abcd"]
    assert corpus.list_names(paths[:3]) == "a, b, c" and corpus.list_names(paths) == "4 files (a, b, c, ...)"
