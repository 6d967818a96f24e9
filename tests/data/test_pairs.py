"""Texts that are made from sources: their rows hold whole pairs, with one number for both sides."""

import json

import pytest
import tokenizers

from gspmd_lm.data import loader
from gspmd_lm.errors import InputError
from tests.data.configs import config_of

MODEL = {"vocab": 300, "encoder": {"start_token": 9}}
RECORDS = [{"from": f"{i} " + "a b" * (i % 3), "to": f"{i}" + "c" * (i % 5), "id": i} for i in range(40)]


@pytest.fixture(autouse=True)
def folder(folder):
    (folder / "a.jsonl").write_text("\n".join(map(json.dumps, RECORDS)))
    return folder


def _open(model=MODEL, objective="seq2seq", **data):
    data = {"source": "a.jsonl", "seq": 16, "source_seq": 24, "held_out": 0, "fields": ["from", "to"]} | data
    return loader.open_loaders(config_of(data, model, objective))


def _pairs(rows):
    """The source, the targets and what stands before them, of each pair of some rows."""
    read = rows.read(range(len(rows)))
    assert (read["positions"][read["segment_ids"] == 0] == 0).all() and (read["targets"] >= 0).sum() > 0
    for row in range(len(rows)):
        for pair in range(1, read["segment_ids"][row].max() + 1):
            at, of_source = read["segment_ids"][row] == pair, read["source_segment_ids"][row] == pair
            assert read["positions"][row, at].tolist() == list(range(at.sum()))
            assert read["source_positions"][row, of_source].tolist() == list(range(of_source.sum()))
            yield [read[name][row, where].tolist()
                   for name, where in (("source_tokens", of_source), ("targets", at), ("tokens", at))]  # fmt: skip


def test_rows_hold_whole_pairs_in_their_order():
    train, held_out = _open()
    assert held_out is None and len(train.rows) < len(RECORDS) / 2
    found, end = list(_pairs(train.rows)), 256
    for (source, targets, tokens), record in zip(found, RECORDS, strict=True):
        assert source == [*record["from"].encode(), end] and targets == [*record["to"].encode(), end]
        assert tokens == [9, *targets[:-1]]
    texts = sum(len(record["to"]) + 1 for record in RECORDS)
    assert f"{texts:,} of them of texts" in train.description
    padding = train.rows.read([-1])
    assert (padding["targets"] == -1).all() and not padding["segment_ids"].any()


def test_a_row_may_be_full():
    rows = _open(seq=14, source_seq=200)[0].rows
    assert (rows.read(range(len(rows)))["targets"] >= 0).sum(1).max() == 14


def test_a_side_that_is_too_long_is_cut_and_keeps_its_end():
    train, _ = _open(seq=3, source_seq=4)
    assert "pairs of which something was cut" in train.description
    for source, targets, _ in _pairs(train.rows):
        assert len(source) <= 4 and len(targets) <= 3 and source[-1] == targets[-1] == 256


def test_a_template_ends_both_sides(tmp_path):
    vocab = {"<pad>": 0, "</s>": 1, "[UNK]": 2} | {letter: 3 + i for i, letter in enumerate("abc")}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, "[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.add_special_tokens(["</s>"])
    made.post_processor = tokenizers.processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    made.save("words.json")
    (tmp_path / "a.jsonl").write_text('{"from": "a b a b a b", "to": "c </s> a"}\n')
    ((source, targets, tokens),) = _pairs(_open(tokenizer="words.json", seq=5, source_seq=4)[0].rows)
    assert source == [3, 4, 3, 1] and targets[0] == 5 and targets[-1] == 1 and 1 not in targets[:-1]
    assert tokens == [9, *targets[:-1]]


def test_random_pairs_fill_their_rows():
    train, held_out = _open(source="random:20", held_out=0.5, fields=[])
    read = train.rows.read(range(20))
    assert len(train.rows) == len(held_out.rows) == 20 and (read["targets"] >= 0).all()
    assert read["source_tokens"].shape == (20, 24) and (read["source_segment_ids"] == 1).all()
    assert (read["tokens"][:, 1:] == read["targets"][:, :-1]).all() and (read["tokens"][:, 0] == 9).all()
    assert (read["targets"] != held_out.rows.read(range(20))["targets"]).any()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"fields": []}, "set data.fields to the names of both"),
        ({"fields": ["from"]}, r"objective: seq2seq needs data.fields=\[source, text\]"),
        ({"label": "id"}, "without data.label"),
        ({"fields": ["from", "too"]}, "no field too"),
        ({"source": "random:60000000", "fields": [], "source_seq": 32}, "fix   random:22369621 or less"),
        ({"source_seq": 1}, "data.source_seq=1: a text has 1 special tokens"),
    ],
)
def test_what_does_not_fit_is_refused(data, words):
    with pytest.raises(InputError, match=words):
        _open(**data)
    with pytest.raises(InputError, match=r"objective: causal needs texts or conv.*this config has data\.fields="):
        _open({"vocab": 300}, "causal", source_seq=0)
