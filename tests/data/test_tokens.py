"""Folders of tokens: made once by any number of processes, and read by share."""

import json
import os
import shlex
import shutil
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import yaml

from gspmd_lm.data import folders, loader, making, readers, shards, tokens, trained
from gspmd_lm.data.folders import Folder
from gspmd_lm.data.tokenize import tokenize
from gspmd_lm.errors import InputError, StoreFailed
from tests.data import conversations
from tests.data.configs import config_of


@pytest.fixture(autouse=True)
def folder(folder):
    draw = np.random.default_rng(0)
    for name, count in (("a", 300), ("b", 100)):
        texts = ["".join(map(chr, draw.integers(97, 123, draw.integers(1, 900)))) for _ in range(count)]
        Path(f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return folder


def _config(source, model=None, objective=None, **data):
    return config_of({"source": source, "seq": 128} | data, {"vocab": 300} | (model or {}), objective)


def _make(source="a.jsonl", out="made", progress=None, **settings):
    lines = tokenize(_config(source, **settings), out, progress)
    return lines


def _rows(source, steps=range(3), side=0, **settings):
    opened = loader.open_loaders(_config(source, **settings))[side]
    return [opened.rows_at(step, slice(None)) for step in steps]


def _contents(path):
    """What a folder of tokens holds."""
    return {one.name: one.read_bytes() for one in Path(path).iterdir()}


def _equal(some, others):
    return all(a.keys() == b.keys() and all((a[name] == b[name]).all() for name in a)
               for a, b in zip(some, others, strict=True))  # fmt: skip


IMAGES = {"vocab": 0, "context": 5, "positions": "learned", "patches": {"image": 8, "size": 4}, "classes.count": 3,
          "attention.mask": "full"}  # fmt: skip
FULL = {"attention.mask": "full"}
CHAT = {"tokenizer": "chatty", "messages_field": "messages", "seq": 64}
LABELLED = {"fields": ["a", "b"], "label": "label", "seq": 32}
PAIRS = {"fields": ["a", "b"], "seq": 16, "source_seq": 24}
KINDS = {
    "texts": ("a.jsonl", {}),
    "stream": ("a.jsonl", {"packing": "stream"}),
    "masked": ("a.jsonl", {"model": FULL, "objective": "masked"}),
    "conversations": ("chat.jsonl", CHAT),
    "labels": ("records.jsonl", LABELLED | {"model": FULL | {"classes.count": 3}, "objective": "classes"}),
    "pairs": ("records.jsonl", PAIRS | {"model": {"encoder": {"start_token": 9}}, "objective": "seq2seq"}),
}  # fmt: skip


@pytest.fixture
def records(folder):
    conversations.write_tokenizer(folder / "chatty", conversations.CHATML)
    lines = [{"messages": conversations.turns(f"question {i}", f"answer {i}")} for i in range(60)]
    (folder / "chat.jsonl").write_text("\n".join(map(json.dumps, lines)))
    lines = [{"a": f"one {i}", "b": "two " * (i % 9), "label": ("no", "yes", "maybe")[i % 3]} for i in range(60)]
    (folder / "records.jsonl").write_text("\n".join(map(json.dumps, lines)))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_those_that_the_source_gives(records, kind):
    source, settings = KINDS[kind]
    _make(source, held_out=0.1, **settings)
    for side in (0, 1):
        steps = range(2 if side else 3)
        texts = _rows(source, steps, side, held_out=0.1, **settings)
        assert _equal(texts, _rows("made", steps, side, held_out=0.1, **settings)) and len(texts[0]) > 3
    opened = [loader.open_loaders(_config(name, held_out=0.1, **settings))[0] for name in (source, "made")]
    assert opened[0].fingerprint == opened[1].fingerprint, "a run that goes on with tokens reads the same"


@pytest.mark.parametrize("kind", ["conversations", "labels", "pairs"])
def test_rows_of_records_do_not_depend_on_where_shards_end(records, kind, monkeypatch):
    source, settings = KINDS[kind]
    whole = _rows(source, held_out=0, **settings)
    monkeypatch.setattr(making, "UNIT_BYTES", 500)
    _make(source, held_out=0, **settings)
    assert len(list(Path("made").glob("train-*.sizes.npy"))) > 5
    assert _equal(whole, _rows("made", held_out=0, **settings))


def _stream(path):
    """The tokens to train on of a folder, and in how many shards they are."""
    made = Folder(path)
    manifest = tokens.read_manifest(made)
    assert manifest
    return np.asarray(tokens.open_folder(made, manifest).train[0].stream), len(manifest["splits"][0]["shards"])


def framing(folder):
    """A tokenizer whose texts begin with <s>, have <|end|> behind them, and end with </s>; and these three ids."""
    made = tokenizers.Tokenizer.from_file(str(conversations.write_tokenizer(folder, None) / "tokenizer.json"))
    ids = {name: made.token_to_id(name) for name in ("<s>", "<|end|>", "</s>")}
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A <|end|>", special_tokens=[*ids.items()]
    )
    made.save(str(folder / "tokenizer.json"))
    return {"tokenizer": str(folder)}, [*ids.values()]


@pytest.mark.long
def test_a_source_in_parts_has_the_same_documents(monkeypatch, folder, bucket):
    """Of files that are read in parts: a part has the lines that begin in it, and cuts no text in two."""
    book = "".join(f"line {i} of a book\n" for i in range(3000))
    (folder / "b.txt").write_text(book)
    (folder / "c.txt").write_text(f"short\n{'w' * 20_000} words\n{book}")  # a line with several parts
    for name in "bc":
        bucket.put_file(f"{name}.txt", f"/texts/{name}.txt")
    named, frame = framing(folder / "framing")
    monkeypatch.setattr(readers, "SECTION_BYTES", 500)
    streams = {}
    for number, source in enumerate(("a.jsonl", "b.txt", "[bc].txt", "memory://texts")):
        for name, most_bytes in (("whole", 1 << 30), ("parts", 7001)):
            monkeypatch.setattr(making, "UNIT_BYTES", most_bytes)
            _make(source, f"{name} {number}", held_out=0, **(named if number > 1 else {}))
            streams[name, source], count = _stream(f"{name} {number}")
            assert (count > 5) == (name == "parts")
        assert (streams["whole", source] == streams["parts", source]).all() and len(streams["whole", source]) > 50_000
    both = streams["parts", "[bc].txt"]
    assert (both == streams["parts", "memory://texts"]).all() and [(both == i).sum() for i in frame] == [2, 2, 2]
    _make("b.txt", "apart", held_out=0.2, **named)
    assert [(_stream("apart")[0] == i).sum() for i in frame] == [1, 1, 1], "a text with parts held out is still one"


def test_each_process_reads_its_share_and_nothing_else(monkeypatch, read_sizes):
    monkeypatch.setattr(making, "UNIT_BYTES", 30_000)
    _make(held_out=0)
    opened, _ = loader.open_loaders(_config("made", held_out=0))
    whole = [opened.rows_at(step, slice(None)) for step in range(opened.steps_per_epoch)]
    for count in (1, 2, 4):
        for process in range(count):
            read_sizes.clear()
            rows = np.arange(8 // count) + process * (8 // count)
            parts = [opened.rows_at(step, rows) for step in range(opened.steps_per_epoch)]
            wanted_bytes = sum(2 * int((part["segment_ids"] > 0).sum()) for part in parts)
            assert sum(read_sizes) < 1.05 * wanted_bytes, (count, process)
            assert _equal(parts, [{name: array[rows] for name, array in one.items()} for one in whole])


def test_a_start_reads_no_tokens(monkeypatch):
    _make()
    monkeypatch.setattr(shards.Shards, "read", lambda *_: pytest.fail("tokens are read"))
    train, held_out = loader.open_loaders(_config("made"))
    assert held_out and "rows" in train.description and "a.jsonl: 1 file" in train.description


def test_mixtures_of_folders():
    for name in "ab":
        _make(f"{name}.jsonl", name)
    entries = {name: [{"path": f"{name}{end}", "weight": 1 + (name == "a")} for name in "ab"]
               for name, end in (("texts", ".jsonl"), ("tokens", ""))}  # fmt: skip
    assert _equal(_rows(entries["texts"], held_out=0), _rows([dict(one) for one in entries["texts"]], held_out=0))
    mixed, held_out = loader.open_loaders(_config(entries["tokens"]))
    assert mixed.shares == (6667, 3333) and held_out and "a: 66.67% of what is read" in mixed.description
    _make(entries["texts"], "both")
    both, _ = loader.open_loaders(_config("both"))
    assert both.shares == (6667, 3333), "the weights that the tokens were made with"
    joined, _ = loader.open_loaders(_config(["a", "b"]))
    assert len(joined.rows) == sum(len(part) for part in mixed.rows.parts)
    apart, held_out = loader.open_loaders(_config("a", held_out="b"))
    assert held_out and len(held_out.rows) > len(apart.rows) / 4


def test_buckets(bucket, folder, monkeypatch):
    monkeypatch.setattr(making, "UNIT_BYTES", 30_000)
    for name in "ab":
        bucket.put_file(f"{name}.jsonl", f"/texts/{name}.jsonl")
    _make("memory://texts", "memory://made")
    assert not [path for path in (folder / "cache" / "copies").rglob("*") if path.is_file()], "no text stays here"
    assert "/made/tokens.json" in bucket.store and not [name for name in bucket.store if "/making/" in name]
    _make("[ab].jsonl", "made")
    assert _equal(_rows("memory://made"), _rows("made"))
    assert _equal(_rows("memory://made", range(1), 1), _rows("made", range(1), 1))
    del bucket.store["/made/train-00001.npy"]
    with pytest.raises(InputError, match=r"memory://made/train-00001\.npy: this shard of tokens is missing\n  fix "):
        _rows("memory://made")


@pytest.mark.parametrize("source", ["c.jsonl", "memory:///texts/c.jsonl"])
def test_a_place_in_a_part_of_a_file_is_one_in_the_file(bucket, folder, monkeypatch, caplog, source):
    monkeypatch.setattr(making, "UNIT_BYTES", 3000)
    line, at = '{"text": "words"}\n', r"c\.jsonl, after byte 3,003, line 3"
    place = rf"^{source.removesuffix('c.jsonl')}{at}"
    for wrong, message in (
        ('{"text": 5}', f"{place}: text is a number"),
        ('{"text": [999]}', f"{place}: token 0 is 999"),
    ):
        (folder / "c.jsonl").write_text(f'{line * 50}{{"text": null}}\n{line * 118}{wrong}\n')
        bucket.put_file("c.jsonl", "/texts/c.jsonl")
        with pytest.raises(InputError, match=message):
            _make(source, f"of {len(wrong)}", held_out=0)
    assert f"{source}: 1 text is null or empty, and skipped" in caplog.text


def test_two_processes_that_write_one_after_another_leave_no_folder_of_parts(tmp_path, monkeypatch):
    made, replace = Folder(str(tmp_path / "made")), os.replace
    second_writes, first_is_done = threading.Event(), threading.Event()
    second = threading.Thread(target=made.write, args=("second", b""))

    def meet(new, place):
        if place.name == "first":
            second.start()
            second_writes.wait(10)
        else:
            second_writes.set()
            first_is_done.wait(10)
        replace(new, place)

    monkeypatch.setattr(os, "replace", meet)
    made.write("first", b"")
    first_is_done.set()
    second.join()
    assert sorted(os.listdir("made")) == ["first", "second"]


def test_a_store_that_does_not_answer(bucket, monkeypatch, caplog):
    _make(out="memory://made")
    opened, _ = loader.open_loaders(_config("memory://made"))

    def fail(*_, **__):
        raise TimeoutError("the store is silent")

    answer, silent = type(bucket).cat_file, []
    refused = r"memory://made/train-00000\.npy, \.\.\.: the store does not answer.*silent"
    monkeypatch.setattr(folders, "PAUSE_S", 0.01)
    monkeypatch.setattr(type(bucket), "cat_file", fail)
    with pytest.raises(StoreFailed, match=refused):  # at once: it has never answered
        opened.rows_at(0, slice(None))
    monkeypatch.setattr(
        type(bucket), "cat_file", lambda *given, **more: (fail if silent.pop() else answer)(*given, **more)
    )
    for count in (0, 3, 2):  # so many answers are missing, and then it answers
        silent[:] = [False] * 100 + [True] * count
        assert _equal([opened.rows_at(1, slice(None))], _rows("memory://made", [1])) and len(silent) < 100
    assert caplog.text.count("the store does not answer") == 2 == caplog.text.count("asked again for up to 5.0 min")
    monkeypatch.setattr(folders, "PATIENCE_S", 0.05)
    silent[:] = [True] * 10_000
    with pytest.raises(StoreFailed, match=refused):
        opened.rows_at(2, slice(None))
    assert 2 < 10_000 - len(silent) < 10_000


def test_a_file_is_written_while_other_processes_delete_the_folder_of_new_files(monkeypatch):
    sync, deleted = os.fsync, []

    def delete(number):
        if len(deleted) < 7:  # as often as there may be other processes that are done
            deleted.append(number)
            shutil.rmtree("made/making")
        sync(number)

    monkeypatch.setattr(os, "fsync", delete)
    Folder("made").write("a.json", b"content")
    assert _contents("made") == {"a.json": b"content"} and len(deleted) == 7


def test_a_file_system_without_links_to_files(monkeypatch):
    monkeypatch.setattr(os, "link", lambda *_: os.readlink("a.jsonl"))  # raises an OSError, as such a system does
    made = Folder("made")
    assert [made.create("plan", content) for content in (b"one", b"two")] == [True, False]
    assert _contents("made") == {"plan": b"one"}


def test_a_claim_in_a_bucket_is_taken_over_when_it_is_silent(bucket, monkeypatch):
    _make(held_out=0)
    monkeypatch.setattr(making, "STALE_S", 0.2)
    monkeypatch.setattr(making, "BEAT_S", 0.1)
    waits = []
    bucket.pipe("/made/making/00000.claim", b"{}")
    began = time.monotonic()
    _make(out="memory://made", held_out=0, progress=lambda what, *_: waits.append(what.startswith("waiting")))
    assert sum(waits) > 1 and time.monotonic() - began > 0.2
    assert _contents("made")["train-00000.npy"] == bucket.cat("/made/train-00000.npy")


def _flip(path, at=3000):
    content = bytearray(Path(path).read_bytes())
    content[at] ^= 4
    Path(path).write_bytes(content)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda: _flip("made/train-00000.npy"), r"made/train-00000\.npy: this shard of tokens is damaged(.|\n)*  fix "),
        (lambda: shutil.copy("other/train-00000.npy", "made"), r"train-00000\.npy: .*or belongs to other tokens"),
        (lambda: os.truncate("made/train-00000.npy", 999), r"train-00000\.npy: .* has 999 bytes in place of "),
        (lambda: os.remove("made/train-00000.npy"), r"made/train-00000\.npy: this shard of tokens is missing\n  fix "),
        (lambda: os.remove("made/held_out-00000.sizes.npy"), r"held_out-00000\.sizes\.npy: .* is missing"),
        (lambda: _flip("made/tokens.json", 200), r"made/tokens\.json: "),
    ],
)
def test_harm_to_a_shard_names_it(harm, message):
    _make()
    _make("a.jsonl", "other", held_out=0.02)
    Path("a.jsonl").touch()
    _make("a.jsonl", "again")  # the same tokens under another plan
    shutil.rmtree("other")
    Path("again").rename("other")
    harm()
    with pytest.raises(InputError, match=message):
        _rows("made", range(150))


def test_harm_to_the_sizes_of_records(records):
    _make("chat.jsonl", **CHAT)
    _flip("made/train-00000.sizes.npy", 200)
    with pytest.raises(InputError, match=r"train-00000\.sizes\.npy: damaged, or it belongs to other tokens\n  fix "):
        _rows("made", **CHAT)


def _version():
    made = Folder("made")
    manifest = tokens.read_manifest(made)
    assert manifest
    made.write(tokens.MANIFEST, tokens.files.with_sum(manifest | {"format": 99}).encode())


@pytest.mark.parametrize(
    ("source", "settings", "message"),
    [
        ("made", {"tokenizer": "chatty"}, r"made with another tokenizer, bytes\n  fix   --set data\.tokenizer=bytes"),
        ("made", {"held_out": 0.5}, r"data\.held_out=0\.5: made was made with data\.held_out=0\.02\n  fix "),
        ("made", {"messages_field": "m", "tokenizer": "chatty"}, r"data\.messages_field=m: made was made with "),
        (["made", "a.jsonl"], {}, r"made has tokens, and a\.jsonl does not(.|\n)*tokenize --set data\.source=a\.jsonl"),
        ("made", {"held_out": "b.jsonl"}, r"data\.held_out: b\.jsonl has no tokens, as data\.source has\n  fix "),
        ("a.jsonl", {"held_out": "made"}, r"data\.held_out: made has tokens, and data\.source has none\n  fix "),
        (["made", "not made"], {}, r"data\.source: not made matches no file"),
    ],
)  # fmt: skip
def test_other_settings_than_the_tokens_were_made_with(records, source, settings, message):
    _make()
    with pytest.raises(InputError, match=message):
        _rows(source, **settings)


def test_a_tokenizer_that_is_yet_to_be_trained():
    _make()
    with pytest.raises(
        InputError, match=r"bpe:300: made has tokens already, of bytes\n  fix   --set data\.tokenizer=byt"
    ):
        trained.with_vocab_size(_config("made", tokenizer="bpe:300"))


def test_another_version_of_the_manifest():
    _make()
    _version()
    for wrong in (lambda: _rows("made"), _make):
        with pytest.raises(
            InputError, match=r"tokens\.json: tokens of the format 99, and this version reads .*\n  fix "
        ):
            wrong()


def test_two_sources_for_one_folder(monkeypatch, stop):
    """The second is refused while the first is at work, and later."""
    monkeypatch.setattr(making, "UNIT_BYTES", 30_000)
    with pytest.raises(KeyboardInterrupt):
        _make(progress=stop)
    for _ in range(2):
        with pytest.raises(InputError, match=r"made: there are tokens with another source\n  fix "):
            _make("b.jsonl")
        with pytest.raises(InputError, match=r"made: there are tokens with another data\.held_out\n  fix "):
            _make(held_out=0.5)
        made = _make()
        assert (
            "tokens of 300 documents in" in made[0]
            and made[-1] == f"train on them: --set data.source={os.getcwd()}/made"
        )


def test_a_source_that_changed_since_is_said():
    _make()
    assert "changed" not in loader.open_loaders(_config("made"))[0].description
    with open("a.jsonl", "a") as file:
        file.write('{"text": "more"}\n')
    said = loader.open_loaders(_config("made"))[0].description
    assert said.endswith(f"warning: changed since the tokens in made were made: {os.getcwd()}/a.jsonl")
    with pytest.raises(InputError, match="tokens with another source"):
        _make()
    Folder("made").write(tokens.SOURCE, tokens.files.with_sum({"a" * 300: ""}).encode())  # of another system
    assert "changed" not in loader.open_loaders(_config("made"))[0].description


def test_ends_that_are_spelled_where_they_end_nothing_are_said(folder):
    (folder / "c.txt").write_text("one<|endoftext|>two")
    said = loader.open_loaders(_config("c.txt", seq=4, held_out=0))[0].description
    assert "<|endoftext|> is ordinary text in 1 document (--set data.tokenizer=bpe:4096 makes documents end" in said
    _make("c.txt", held_out=0)
    assert (
        "<|endoftext|> is ordinary text in 1 document"
        in loader.open_loaders(_config("made", seq=4, held_out=0))[0].description
    )


def test_binary_and_empty_files_are_skipped_and_said(folder, monkeypatch, bucket):
    (folder / "texts").mkdir()
    (folder / "texts" / "a.txt").write_bytes(b"\0\1\2" * 50)
    (folder / "texts" / "b.txt").write_bytes(b"")
    (folder / "texts" / "c.txt").write_bytes(b"words " * 90)
    shutil.copytree("texts", "texts/more")
    (folder / "texts" / "large.txt").write_bytes(b"\0\1\2\n" * 300)  # is read in parts
    (folder / "texts" / "odd.txt").write_bytes(b"\xe4\n" * 200 + b"\0\n" * 200)
    bucket.put("texts", "/texts", recursive=True)
    monkeypatch.setattr(making, "UNIT_BYTES", 300)
    monkeypatch.setattr(readers, "SECTION_BYTES", 200)
    for source, at in (("texts", "texts/"), ("memory:///texts", "memory:///texts/")):
        made, *said, _ = _make(source, at.replace("/", "_").replace(":", ""), held_out=0)
        assert "1,883 tokens of 9 documents" in made and sorted(said) == [
            f"not UTF-8, read byte by byte: {at}odd.txt",
            f"skipped, binary: {at}a.txt, {at}large.txt, {at}more/a.txt",
            f"skipped, empty: {at}b.txt, {at}more/b.txt",
        ]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"source": "random:3"}, "random:3 has no documents"),
        ({"source": "made"}, r"data\.source=made: has tokens already"),
        ({"source": "a.jsonl", "seq": 8, "objective": "classes", "model": IMAGES}, "of images or sounds reads files"),
    ],
)  # fmt: skip
def test_what_cannot_be_tokenized(settings, message):
    _make()
    with pytest.raises(InputError, match=message):
        _make(**settings | {"out": "other"})


def test_what_a_folder_keeps_for_evaluation_is_evaluated_or_named():
    _make(held_out=0.25, out="quarter")
    _make(out="all", held_out=0)
    opened, _ = loader.open_loaders(_config("quarter", held_out=0))
    count = len(tokens.open_folder(made := Folder("quarter"), tokens.read_manifest(made)).held_out.stream)
    said = f"since data.held_out is 0: {count:,} tokens that quarter keeps for evaluation"
    assert said in opened.description
    _, apart = loader.open_loaders(_config("all", held_out="quarter"))
    assert apart.tokens == opened.tokens + count == loader.open_loaders(_config("all", held_out=0))[0].tokens


@pytest.mark.parametrize("kind", ["texts", "conversations", "labels"])
def test_the_flags_that_tokenize_prints_read_its_tokens(records, kind, monkeypatch):
    source, settings = KINDS[kind]
    lines = _make(source, "a folder", **settings | {"held_out": 0.25})
    words = shlex.split(lines[-1].removeprefix("train on them: "))
    given = dict(word.split("=", 1) for word in words if word != "--set")
    assert given.pop("data.source") == f"{os.getcwd()}/a folder"
    read = {name: yaml.safe_load(given.pop(f"data.{name}", "null")) for name in ("held_out", "messages_field", "label")}
    wanted = {name: (settings | {"held_out": 0.25}).get(name) for name in read}
    assert read == wanted
    fields = yaml.safe_load(given.pop("data.fields", "[]"))
    assert fields == settings.get("fields", [])
    if kind == "conversations":
        assert given == {"data.tokenizer": f"{os.getcwd()}/a folder", "model.vocab": "0"}
    if kind == "labels":
        assert given == {"data.seq": "32"}


def test_tokens_are_not_made_among_their_texts():
    """The next run would read them as texts."""
    Path("texts").mkdir()
    Path("a.jsonl").rename("texts/a.jsonl")
    for out in ("texts", "texts/made"):
        with pytest.raises(InputError, match=r"lies among the texts of texts\n  fix   name a folder elsewhere"):
            _make("texts", out)
    _make("texts/a.jsonl", "texts/made")
    for source in ("texts/a*", "texts/a.jsonl"):
        with pytest.raises(
            InputError, match=r"has the texts of data\.source: .*a\.jsonl\n  fix   name a folder elsewhere"
        ):
            _make(source, "texts")
