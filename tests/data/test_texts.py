"""What stands around the texts of documents, and where a text ends that was read in sections."""

import json

import numpy as np
import pytest
from conversations import write_tokenizer

from gspmd_lm.config import Data
from gspmd_lm.data import cache, making, packing, readers, sources, tokenizer

pytestmark = pytest.mark.usefixtures("folder")
BOS, END = 256, 257


def _tokenizer(folder, single=()):
    """A tokenizer of bytes whose template puts special tokens around a text."""
    path = write_tokenizer(folder / "tokenizer", None) / "tokenizer.json"
    raw = json.loads(path.read_text())
    ids = {"<s>": BOS, "</s>": END}
    pieces = [{"Sequence": {"id": "A", "type_id": 0}} if one == "$A" else {"SpecialToken": {"id": one, "type_id": 0}}
              for one in single]  # fmt: skip
    named = {name: {"id": name, "ids": [number], "tokens": [name]} for name, number in ids.items()}
    if pieces:
        raw["post_processor"] = {
            "type": "TemplateProcessing",
            "single": pieces,
            "pair": pieces,
            "special_tokens": named,
        }
    path.write_text(json.dumps(raw))
    return tokenizer.load_tokenizer(str(path))


def _streams(source, tokens, held_out=0.0):
    cached = cache.open_cache(sources.open_source(Data(source=source)), tokens, held_out)
    return (
        cached,
        np.asarray(cached.train[0].stream).astype(int).tolist(),
        np.asarray(cached.held_out.stream).astype(int).tolist(),
    )


@pytest.mark.parametrize(
    ("single", "before", "after"),
    [
        ((), [], [END]),
        (("<s>", "$A"), [BOS], [END]),
        (("<s>", "$A", "</s>"), [BOS], [END]),
        (("$A", "</s>"), [], [END]),
        (("$A", "<s>"), [], [BOS, END]),
        (("</s>", "$A"), [END], [END]),
    ],
)
def test_documents_are_framed_as_prompts_are(folder, single, before, after):
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in ("ab", "c", "de")))
    tokens = _tokenizer(folder, single)
    text = {one: tokens.encode(one.encode()).tolist() for one in ("ab", "c", "de")}
    cached, stream, _ = _streams("a.jsonl", tokens)
    assert stream == [token for one in text.values() for token in [*before, *one, *after]]
    assert stream[: len(before) + 2] == tokens.encode_prompt("ab").tolist()[: len(before) + 2]
    assert cached.train[0].ends == 3, "the end is there once"
    rows = packing.documents(cached.train[0].stream, 4, tokens.end, tokens.before[-1:] == (tokens.end,))
    read = rows.read(range(len(rows)))
    learnt = [token for one in text.values() for token in [*before, *one, *after][1:]]
    assert read["targets"][read["targets"] >= 0].tolist() == learnt
    _, _, held_out = _streams("a.jsonl", tokens, 0.5)
    assert held_out[: len(before)] == before and held_out[-len(after) :] == after
    bare = _tokenizer(folder)
    assert (bare.fingerprint == tokens.fingerprint) == (not single)


@pytest.mark.parametrize("ending", ["txt", "md"])
def test_a_text_that_is_read_in_sections_ends_once(folder, monkeypatch, ending):
    monkeypatch.setattr(readers, "SECTION_BYTES", 64)
    lines = "".join(f"line {number} of the book\n" for number in range(60))
    for name in ("a", "b"):
        (folder / f"{name}.{ending}").write_text(f"{name}: {lines}")
    tokens = _tokenizer(folder, ("<s>", "$A"))
    assert len([*sources.open_source(Data(source=f"*.{ending}")).documents()]) > 20
    cached, stream, _ = _streams(f"*.{ending}", tokens)
    text = {name: tokens.encode(f"{name}: {lines}".encode()).tolist() for name in ("a", "b")}
    assert stream == [BOS, *text["a"], END, BOS, *text["b"], END] and cached.train[0].ends == 2
    bytes_ = cache.open_cache(sources.open_source(Data(source=f"*.{ending}")), tokenizer.Bytes(), 0.0)
    assert np.flatnonzero(np.asarray(bytes_.train[0].stream) == 256).tolist() == [len(lines) + 3, 2 * len(lines) + 7]
    cached, stream, held_out = _streams(f"*.{ending}", tokens, 0.3)
    assert stream.count(END) == stream.count(BOS) == 2 and len(stream) > len(held_out) > 0
    assert held_out.count(END) == held_out.count(BOS) <= 2, "sections that are held out are one text as well"
    assert sorted([*stream, *held_out]) == sorted([*text["a"], *text["b"], *[BOS, END] * (2 + held_out.count(END))])
    assert (cached.train[0].ends, cached.held_out.ends) == (2, held_out.count(END))


def test_a_build_that_stops_within_a_text_goes_on_with_it(folder, monkeypatch, stop):
    monkeypatch.setattr(readers, "SECTION_BYTES", 64)
    (folder / "a.txt").write_text("".join(f"line {number} of the book\n" for number in range(60)))
    tokens = _tokenizer(folder, ("<s>", "$A"))
    _, *whole = _streams("a.txt", tokens, 0.3)
    monkeypatch.setenv("GSPMD_LM_CACHE", str(folder / "other"))
    monkeypatch.setattr(making, "BATCH_BYTES", 1)
    with pytest.raises(KeyboardInterrupt):
        cache.open_cache(sources.open_source(Data(source="a.txt")), tokens, 0.3, stop)
    assert [*_streams("a.txt", tokens, 0.3)[1:]] == whole


def test_the_end_that_a_text_file_spells_is_one(folder):
    stories = [f"Once there was {number}.\n" for number in range(30)]
    (folder / "a.txt").write_text("</s>".join(stories))
    (folder / "b.txt").write_text("one</s>\n\n</s>two</s>\n")
    (folder / "c.md").write_text("one</s>two")
    (folder / "d.jsonl").write_text(json.dumps({"text": "one</s>two"}))
    tokens = _tokenizer(folder)
    spell = tokens.encode
    cached, stream, _ = _streams("a.txt", tokens)
    assert stream == [token for story in stories for token in [*spell(story.encode()), END]]
    assert (cached.spelled_ends, cached.train[0].ends) == (29, 30)
    cached, stream, _ = _streams("b.txt", tokens)
    assert stream == [*spell(b"one"), END, *spell(b"two"), END] and cached.spelled_ends == 3, "no text is blank"
    for other in ("c.md", "d.jsonl"):
        cached, stream, _ = _streams(other, tokens)
        assert stream == [*spell(b"one</s>two"), END] and cached.spelled_ends == 0
    cached = cache.open_cache(sources.open_source(Data(source="a.txt")), tokenizer.Bytes(), 0.0)
    assert cached.train[0].ends == 1, "bytes have no such token"


def test_ends_that_are_spelled_are_said(folder):
    from gspmd_lm import config
    from gspmd_lm.data import loader

    (folder / "a.txt").write_text("</s>".join(f"Once there was {number}.\n" for number in range(30)))
    _tokenizer(folder)
    sets = ["source=a.txt", "tokenizer=tokenizer", "seq=16", "held_out=0"]
    sizes = ["model.vocab=512", "model.padded_vocab=0"]
    tiny = config.load("tiny", [*(f"data.{one}" for one in sets), *sizes])
    train, _ = loader.open_loaders(tiny)
    assert "29 ends of texts spelled </s>" in train.description
    assert (train.rows_at(0, slice(None))["targets"] == END).any()
