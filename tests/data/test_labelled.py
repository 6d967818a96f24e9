"""Texts and pairs of texts with labels."""

import gzip
import json

import jax
import numpy as np
import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest
import tokenizers
from jax.sharding import NamedSharding, PartitionSpec

from gspmd_lm.data import corpus, labelled, loader
from gspmd_lm.errors import InputError
from tests.data.configs import config_of

RECORDS = [{"a": f"one {i}", "b": f'"two" {i}', "label": ("no", "yes", "maybe")[i % 3], "id": i} for i in range(60)]
PAIR = {"fields": ["a", "b"], "label": "label"}


@pytest.fixture(autouse=True)
def folder(folder):
    _lines("a.jsonl", RECORDS)
    return folder


def _lines(name, records):
    with open(name, "w") as file:
        file.write("\n".join(map(json.dumps, records)))


def _config(classes=3, **data):
    classes = 1 if data.get("label_kind") == "number" else classes
    model = {"vocab": 300, "attention.mask": "full", "classes.count": classes}
    return config_of({"source": "a.jsonl", "held_out": 0} | PAIR | data, model, "classes")


def _open(classes=3, **data):
    return loader.open_loaders(_config(classes, **data))


def _all(opened):
    return opened.rows.read(range(len(opened.rows)))


def _tokenizer(processor=None):
    """A tokenizer of whole words: [UNK], [CLS], [SEP], </s>, and the letters a to z."""
    special = ["[UNK]", "[CLS]", "[SEP]", "</s>"]
    vocab = {name: i for i, name in enumerate([*special, *"abcdefghijklmnopqrstuvwxyz"])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, "[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.add_special_tokens(special)
    if processor:
        made.post_processor = processor
    made.save("words.json")
    return "words.json"


def test_rows_by_hand():
    _tokenizer(tokenizers.processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1)))
    _lines("a.jsonl", [{"a": "a b", "b": "c", "label": 7}, {"a": "a b c d e f", "b": "z [SEP]", "label": -1}])
    train, none = _open(2, tokenizer="words.json", seq=8)
    assert none is None and train.classes == ("-1", "7")
    read = train.rows.read([0, 1, -1])
    assert {name: (array.dtype, array.shape) for name, array in read.items()} == {
        **dict.fromkeys(("tokens", "token_types", "segment_ids", "positions"), (np.int32, (3, 8))),
        "labels": (np.int32, (3,)),
    }
    assert read["tokens"].tolist() == [[1, 4, 5, 2, 6, 2, 0, 0], [1, 4, 5, 6, 2, 29, 0, 2], [0] * 8]
    assert read["token_types"].tolist() == [[0, 0, 0, 0, 1, 1, 0, 0], [0, 0, 0, 0, 0, 1, 1, 1], [0] * 8]
    assert read["segment_ids"].tolist() == [[1] * 6 + [0] * 2, [1] * 8, [0] * 8]
    assert read["positions"].tolist() == [[0, 1, 2, 3, 4, 5, 0, 0], list(range(8)), [0] * 8]
    assert read["labels"].tolist() == [1, 0, -1]
    assert train.description.startswith("training: 2 rows, 14 tokens, 1 rows with texts cut to 8 tokens (a.jsonl: ")
    assert "\nclasses: 0 = -1, 1 = 7" in train.description
    longer, _ = _open(2, tokenizer="words.json", seq=9)
    assert longer.rows.read([1])["segment_ids"].sum() == 9 and longer.fingerprint != train.fingerprint


def test_one_text_and_templates_without_tokens():
    _tokenizer()
    _lines("a.jsonl", [{"a": "a b", "b": "c", "label": "x"}, {"a": "", "b": "", "label": "y"}])
    pair, one = (_all(_open(2, tokenizer="words.json", fields=fields)[0]) for fields in (["a", "b"], ["a"]))
    assert pair["tokens"][:, :5].tolist() == [[4, 5, 3, 6, 3], [3, 3, 0, 0, 0]]  # </s> after each text
    assert pair["token_types"][:, :5].tolist() == [[0, 0, 0, 1, 1], [0, 1, 0, 0, 0]]
    assert one["tokens"][:, :4].tolist() == [[4, 5, 3, 0], [3, 0, 0, 0]] and not one["token_types"].any()


def test_bytes_need_no_tokenizer():
    read = _all(_open(seq=16)[0])
    tokens = read["tokens"][0][read["segment_ids"][0] > 0]
    assert bytes(tokens[tokens < 256].tolist()) == b'one 0"two" 0' and tokens[[5, -1]].tolist() == [256, 256]
    assert read["labels"].tolist() == [(1, 2, 0)[i % 3] for i in range(60)]


def test_every_format_gives_the_same_records():
    table = pyarrow.Table.from_pylist(RECORDS)
    pyarrow.parquet.write_table(table, "a.parquet")
    with pyarrow.ipc.new_stream("a.arrow", table.schema) as writer:
        writer.write_table(table)
    rows = [[str(record[name]) for name in ("id", "a", "b", "label")] for record in RECORDS]
    header = ["id", "a", "b", "label"]
    with open("a.csv", "w") as file:
        file.writelines(";".join('"' + one.replace('"', '""') + '"' for one in row) + "\n" for row in [header, *rows])
    glue = "".join("\t".join(row) + "\r\n" for row in [header, *rows])
    with open("a.tsv", "w", newline="") as file:
        file.write(glue)
    with gzip.open("b.tsv.gz", "wt") as file:
        file.write(glue)
    with open("a.json", "w") as file:
        json.dump(RECORDS, file)
    want = _all(_open()[0])
    for name in ("a.parquet", "a.arrow", "a.csv", "a.tsv", "b.tsv.gz", "a.json"):
        found = _all(_open(source=name)[0])
        assert all((found[key] == want[key]).all() for key in want), name


def test_quotes_in_tsv_swallow_nothing():
    """A field may begin with a quote that is never closed."""
    with open("a.tsv", "w") as file:
        file.write('a\tb\tlabel\n"open\tb\t0\nc\t"d" e\t1\nf\tg"\t0\n')
    read = _all(_open(2, source="a.tsv")[0])
    assert [bytes(row[row < 256].tolist()).rstrip(b"\0") for row in read["tokens"]] == [b'"openb', b'c"d" e', b'fg"']


def test_labels_are_in_order_and_written_in_several_ways():
    labels = [10, "2", 2.0, "b", True, 1.5]
    _lines("a.jsonl", [{"a": "x", "b": "y", "label": label} for label in labels])
    assert _open(5)[0].classes == ("1.5", "10", "2", "b", "true")
    _lines("a.jsonl", [{"a": "x", "b": "y", "label": label} for label in [10, "2", 2.0, -1]])
    train = _open()[0]
    assert train.classes == ("-1", "2", "10") and _all(train)["labels"].tolist() == [2, 1, 1, 0]
    assert labelled.order_classes(["7", "07"]) == labelled.order_classes(["07", "7"])


def test_numbers_to_predict():
    labels = [1, "2.5", -3e-5, 0.0]
    _lines("a.jsonl", [{"a": "x", "b": "y", "label": label} for label in labels])
    train, _ = _open(label_kind="number")
    read = train.rows.read([0, 1, 2, 3, -1])
    assert read["labels"].dtype == np.float32 and train.classes == () and "classes" not in train.description
    assert read["labels"].tolist() == [*map(float, np.float32([float(label) for label in labels])), 0.0]
    assert (read["segment_ids"][:4].sum(1) == 4).all()  # a label takes no part in what ends a record


def test_classes_that_a_model_has_learnt_keep_their_order():
    sorted_, learnt, other = (loader.open_loaders(_config(), None, known)[0] for known in
                              ((), ("yes", "maybe", "no"), ("yes", "no")))  # fmt: skip
    assert (sorted_.classes, learnt.classes) == (("maybe", "no", "yes"), ("yes", "maybe", "no"))
    assert _all(learnt)["labels"].tolist() == [(2, 0, 1)[i % 3] for i in range(60)]
    assert other.classes == sorted_.classes and other.fingerprint == sorted_.fingerprint != learnt.fingerprint


def test_a_text_has_several_classes_or_none():
    labels = [["b", "a"], [], ["c", 7, "b", "b"]]
    _lines("a.jsonl", [{"a": "x", "b": "y", "label": label} for label in labels])
    train, _ = _open(4, label_kind="classes")
    assert train.classes == ("7", "a", "b", "c")
    assert train.rows.read([0, 1, 2, -1])["labels"].tolist() == [0b0110, 0, 0b1101, -1]
    _lines("b.jsonl", [{"a": "x", "b": "z", "label": ["a", "d"]}])
    with pytest.raises(InputError, match=r"b\.jsonl:1: label=d is no label of .* \(7, a, b, c\)"):
        _open(4, label_kind="classes", held_out="b.jsonl")
    _lines("b.jsonl", [{"a": "x", "b": "z", "label": ["a", ["b"]]}])
    with pytest.raises(InputError, match=r"b\.jsonl:1: label=.*: \['b'\] is no name of a class\n  fix   correct it$"):
        _open(4, label_kind="classes", held_out="b.jsonl")
    _lines("a.jsonl", [{"a": "x", "b": "y", "label": [*range(32)]}])
    with pytest.raises(InputError, match=r"label: 32 classes, and .*classes supports up to 31\n  fix "):
        _open(31, label_kind="classes")
    with pytest.raises(InputError, match=r"a model\.classes\.count from 2 to 31, not 32"):
        _config(32, label_kind="classes")


def test_every_record_is_on_one_side_and_the_table_is_the_training_data(monkeypatch):
    train, held_out = _open(held_out=0.25)
    assert held_out and len(held_out.rows) == 15 and len(train.rows) == 45
    assert train.classes == held_out.classes == ("maybe", "no", "yes")
    _lines("b.jsonl", RECORDS[30:])
    apart, evaluated = _open(source="a.jsonl", held_out="b.jsonl")
    assert evaluated and len(evaluated.rows) == 30 and len(apart.rows) == 30
    assert "left out of training: 30 documents" in apart.description
    monkeypatch.setattr(labelled.Labelled, "encode_all", lambda *_: pytest.fail("tokenized again"))
    monkeypatch.setattr(labelled.Labelled, "document", lambda *_: pytest.fail("read again"))
    assert _open(held_out=0.25)[0].fingerprint == train.fingerprint
    monkeypatch.undo()


def test_order_and_padding_of_batches():
    train, held_out = _open(held_out=0.25, batch=8)
    assert held_out
    order = np.concatenate([train.indices_at(step, range(8)) for step in range(12)])
    assert sorted(order[:45]) == sorted(order[45:90]) == list(range(45)) and (order[:45] != order[45:90]).any()
    mesh = jax.make_mesh((4, 2), ("rows", "columns"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    shardings = {
        name: NamedSharding(mesh, PartitionSpec("rows", *["columns"] * (name != "labels")))
        for name in ("tokens", "segment_ids", "labels")
    }
    batches = [batch for _, batch in held_out.batches(0, shardings)]
    assert [batch["labels"].shape for batch in batches] == [(8,)] * 2 and batches[0]["tokens"].shape == (8, 32)
    assert all(batch[name].sharding == sharding for batch in batches for name, sharding in shardings.items())
    labels, segments = (np.concatenate([batch[name] for batch in batches]) for name in ("labels", "segment_ids"))
    assert (labels[:15] >= 0).all() and (labels[15:] == -1).all() and (segments[15:] == 0).all()
    assert np.bincount(labels[:15]).tolist() == np.bincount(_all(held_out)["labels"]).tolist()


def test_classes_that_are_damaged_in_the_cache_are_read_anew(folder, caplog):
    expected = _open()[0].classes
    (path,) = (folder / "cache" / "data").glob("*.classes.json")
    path.write_text(path.read_text().replace("maybe", "never"))
    assert _open()[0].classes == expected and f"{path}: its sha256 has changed, and is made anew" in caplog.text
    caplog.clear()
    assert _open()[0].classes == expected and not caplog.messages


def test_sources_with_weights():
    _lines("b.jsonl", RECORDS[:10])
    mixed, _ = _open(source=[{"path": "a.jsonl", "weight": 3}, {"path": "b.jsonl", "weight": 1}])
    assert mixed.shares == (7500, 2500) and mixed.classes == ("maybe", "no", "yes")
    read, alone = mixed.rows.read([59, 60, -1]), _all(_open()[0])
    assert (read["tokens"][:2] == alone["tokens"][[59, 0]]).all()
    assert read["labels"].tolist() == [*alone["labels"][[59, 0]].tolist(), -1]


@pytest.mark.parametrize(
    ("record", "data", "message"),
    [
        ({"label": None}, {}, r"a\.jsonl:61: label is empty: there is no label\n  fix "),
        ({"label": ""}, {}, r"a\.jsonl:61: label is empty"),
        ({"label": float("nan")}, {"label_kind": "number", "source": "b.jsonl"}, r"b\.jsonl:1: label is empty"),
        ({"label": [1]}, {}, r"a\.jsonl:61: label=\[1\] is not a text or a number(.|\n)*label_kind=classes"),
        ({"label": "x"}, {"label_kind": "classes"}, r"a\.jsonl:1: label='no' is not a list of classes\n  fix "),
        ({"label": "x"}, {"label_kind": "number"}, r"a\.jsonl:1: label='no' is not a finite number\n  fix "),
        ({"label": True}, {"label_kind": "number", "source": "b.jsonl"}, r"b\.jsonl:1: label=True is not a finite"),
        ({"label": 1e39}, {"label_kind": "number", "source": "b.jsonl"}, r"b\.jsonl:1: label=1e\+39 is not a finite"),
        ({"label": 10**400}, {"label_kind": "number", "source": "b.jsonl"}, r"b\.jsonl:1: label=10* is not a finite"),
        ({"a": None}, {}, r"a\.jsonl:61: a is empty"),
        ({"a": 3}, {}, r"a\.jsonl:61: a is a number, not text"),
        ({}, {"fields": ["a", "bb"]}, r"a\.jsonl:1: no field bb \(did you mean b\?\)\n .* data\.fields one of a, b"),
        ({}, {"label": "lable"}, r"a\.jsonl:1: no field lable \(did you mean label\?\)\n .* data\.label one of a, b"),
        ({}, {"source": "b.jsonl"}, r"data\.label=label: the training data has maybe alone\n  fix .*label_kind"),
        ({}, {"source": "c.txt"}, r"c\.txt: no records, which data\.fields=\['a', 'b'\] needs\n  fix   name \.jsonl"),
        ({}, {"source": "random:3"}, r"random:3 has no labels\n  fix   give files of records"),
        ({}, {"seq": 2}, r"data\.seq=2: a text has 2 special tokens.*\n  fix   set data\.seq to 3 or more"),
        ({}, {"classes": 2},
         r"label has 3 labels, and model\.classes\.count is 2 \(classes: 0 = maybe, (.|\n)*classes.count=3"),
        ({}, {"held_out": "new.jsonl"}, r"new\.jsonl:2: label=perhaps is no label of .* \(maybe, no, yes\)"),
    ],
)  # fmt: skip
def test_bad_records(record, data, message):
    last = {"a": "x", "b": "y", "label": "maybe"} | record
    _lines("a.jsonl", [*RECORDS, last])
    _lines("b.jsonl", [last])
    _lines("new.jsonl", [RECORDS[0] | {"a": "new"}, RECORDS[0] | {"label": "perhaps"}])
    with open("c.txt", "w") as file:
        file.write("text")
    with pytest.raises(InputError, match=message):
        _open(**data)


def test_a_row_of_tsv_with_too_many_fields_is_told():
    with open("a.tsv", "w") as file:
        file.write("a\tb\tlabel\nc\td\t1\ne\tf\tg\t0\n")
    with pytest.raises(InputError, match=r"a\.tsv:3: 4 fields, but the header has 3\n  fix   take tabs out"):
        _open(source="a.tsv")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            {"label": ""},
            r"classes needs data.fields=\[text\] or \[text, text\], and data.label: this config has data.f",
        ),
        ({"fields": []}, r"and data.label: this config has data.label="),
        ({"fields": ["a", "b", "c"]}, r"needs data.fields=\[text\] or \[text, text\], and data.label: this config has"),
        ({"messages_field": "m"}, r"data.label: this config has .* and data.messages_field"),
        ({"masked_share": 1.0}, "masked_share: must be below 1"),
    ],
)
def test_settings_that_contradict_each_other(data, message):
    with pytest.raises(InputError, match=message):
        _config(**data)


LIBRARY = '''
def first(x):
    """Adds one.

    More is not read."""
    # kept
    return x + 1

class Some:
    async def second(self):
        """Waits."""
        await self

    def silent(self): return 2

def third(): """Nothing else."""
def fourth(x):
    "Escapes: \\d"
    return x
'''


def test_pairs_of_the_standard_library(folder, monkeypatch):
    (folder / "one.py").write_text(LIBRARY)
    (folder / "two.py").write_text("def broken(:\n")
    found = corpus.pairs([folder / "one.py", folder / "two.py"])
    assert len(found) == 3 and sorted(pair["matched"] for pair in found) == [0, 1, 1]
    assert "def first(x):\n    # kept\n    return x + 1" in [pair["code"] for pair in found]
    assert "async def second(self):\n    await self" in [pair["code"] for pair in found]
    (folder / "three.py").write_text("".join(f"def f{i}():\n    'says f{i}'\n    return {i}\n" for i in range(40)))
    monkeypatch.setattr(corpus, "_standard_library", lambda place: [folder / "three.py"])
    for pair in corpus.pairs([folder / "three.py"]):
        code, docstring, matched = pair.values()
        assert (code.split("(")[0] == "def " + docstring.removeprefix("says ")) == matched
    data = {
        "classes": 2,
        "source": "stdlib:pairs",
        "fields": ["code", "docstring"],
        "label": "matched",
        "held_out": 0.25,
    }
    train, held_out = _open(**data)
    assert held_out and len(train.rows) == 30 and len(held_out.rows) == 10 and train.classes == ("0", "1")
    assert "(stdlib:pairs: 1 file, " in train.description
    monkeypatch.setattr(corpus, "pairs", lambda _: pytest.fail("made again"))
    assert _open(**data)[0].fingerprint == train.fingerprint
