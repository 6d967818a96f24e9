import gzip
import json
import threading
import time

import jax
import numpy as np
import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest
from conversations import CHATML, turns, write_tokenizer
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from gspmd_lm.data import chat, loader, packing
from gspmd_lm.errors import InputError
from tests.data.configs import config_of

NAMES = ("tokens", "targets", "segment_ids", "positions", "row")


@pytest.fixture(autouse=True)
def folder(folder):
    lines = [json.dumps({"text": f"document {i} " * (1 + i % 40)}) for i in range(200)]
    (folder / "a.jsonl").write_text("\n".join(lines))
    return folder


def _config(vocab=257, **data):
    return config_of({"source": "a.jsonl", "held_out": 0.1} | data, {"vocab": vocab})


def _open(**data):
    train, held_out = loader.open_loaders(_config(**data))
    assert held_out
    return train, held_out


ROWS, GRID = P("rows"), P("rows", "columns")


def _shardings(rows, columns, batch=GRID, row=ROWS):
    mesh = jax.make_mesh((rows, columns), ("rows", "columns"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    return {name: NamedSharding(mesh, row if name == "row" else batch) for name in NAMES}


def test_each_epoch_reads_every_row_once_in_its_own_order():
    train, _ = _open()
    count = len(train.rows)
    order = np.concatenate([train.indices_at(step, range(8)) for step in range(2 * count // 8 + 1)])
    first, second = order[:count], order[count : 2 * count]
    assert sorted(first) == sorted(second) == list(range(count))
    assert (first != second).any() and (first != np.arange(count)).any()
    assert train.steps_per_epoch == -(-count // 8)


def test_the_order_is_a_function_of_seed_and_step():
    train, again, other = (_open(seed=seed)[0] for seed in (5, 5, 6))
    for step in (1_000_003, 7, 0):  # in any order of asking
        assert (train.indices_at(step, range(8)) == again.indices_at(step, range(8))).all()
    one, two = (np.concatenate([each.indices_at(step, range(8)) for step in range(9)]) for each in (train, other))
    assert (one != two).any()


def test_the_second_epoch_of_a_seed_is_not_the_first_of_the_next():
    one, two = (loader.open_loaders(_config(source="random:16", seed=seed))[0] for seed in (5, 6))
    second = [one.indices_at(step, range(8)).tolist() for step in (2, 3)]
    assert second != [two.indices_at(step, range(8)).tolist() for step in (0, 1)]


def test_a_part_of_a_batch_is_that_part_of_the_whole():
    train, _ = _open()
    whole = train.rows_at(3, slice(None))
    for part in (slice(2, 5), slice(0, 1), [1, 6]):
        for name, array in train.rows_at(3, part).items():
            assert (array == whole[name][part]).all() and array.dtype == np.int32
    assert whole["row"].tolist() == list(range(8))


def test_fewer_rows_than_a_batch_repeat_within_it():
    train, _ = loader.open_loaders(_config(source="random:3", held_out=0))
    assert sorted(train.indices_at(0, range(8))[:6]) == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("batch", [P("rows", "columns"), P("rows"), P(None, "columns"), P(("rows", "columns")), P()])
@pytest.mark.parametrize("row", [P("rows"), P()])
def test_arrays_are_the_same_under_every_sharding(batch, row):
    train, _ = _open()
    shardings = _shardings(4, 2, batch, row)
    batches = train.batches(5, shardings)
    for step in (5, 6):
        got_step, arrays = next(batches)
        assert got_step == step and set(arrays) == set(NAMES)
        for name, array in train.rows_at(step, slice(None)).items():
            assert (np.asarray(arrays[name]) == array).all() and arrays[name].sharding == shardings[name]
    batches.close()


def test_a_process_reads_only_the_rows_of_its_devices(monkeypatch):
    train, _ = _open()
    shardings = _shardings(4, 2)
    original = NamedSharding.addressable_devices_indices_map

    def of_one_process(self, shape):
        """The devices of rows 2 and 3 of the mesh, as the second of two processes would have them."""
        return {device: index for device, index in original(self, shape).items() if device.id >= 4}

    monkeypatch.setattr(NamedSharding, "addressable_devices_indices_map", of_one_process)
    rows = train.local_rows(shardings)
    assert rows.tolist() == [4, 5, 6, 7]
    local, whole = train.rows_at(0, rows), train.rows_at(0, slice(None))
    index = (slice(6, 8), slice(16, 32))
    assert (loader._part(local["tokens"], rows, index) == whole["tokens"][index]).all()


def _targets_of_documents(opened):
    """Every token but the first of each document, which ends with the token 256 of bytes."""
    return np.count_nonzero(np.asarray(opened.rows.stream) != 256)


def test_evaluation_reads_each_row_once_and_fills_up_with_padding():
    _, held_out = _open(batch=16, seed=1)
    _, other = _open(batch=16, seed=2)
    batches = list(held_out.batches(0, _shardings(1, 1), stop_step=10**6))
    assert [step for step, _ in batches] == list(range(held_out.steps_per_epoch))
    assert len(held_out.rows) % 16, "the last batch must be a short one for this test"
    targets = np.concatenate([arrays["targets"] for _, arrays in batches])
    assert (targets >= 0).sum() == _targets_of_documents(held_out)
    assert (targets[len(held_out.rows) :] == -1).all() and (batches[-1][1]["segment_ids"][-1] == 0).all()
    assert len(list(held_out.batches(0, _shardings(1, 1), stop_step=1))) == 1
    for step, arrays in other.batches(0, _shardings(1, 1)):
        assert (arrays["tokens"] == batches[step][1]["tokens"]).all()


@pytest.mark.parametrize("packing_name", ["documents", "stream"])
def test_counts(packing_name):
    train, _ = _open(packing=packing_name)
    targets = train.rows.read(range(len(train.rows)))["targets"]
    assert (targets >= 0).sum() == (_targets_of_documents(train) if packing_name == "documents" else targets.size)
    assert (targets == -1).any() == (packing_name == "documents")
    assert f"{len(train.rows):,} rows" in train.description and "sha256" in train.description


def test_random_rows():
    train, held_out = _open(source="random:20", vocab=11)
    every, other = (feed.rows.read(range(20))["tokens"] for feed in (train, held_out))
    assert set(every.reshape(-1).tolist()) == set(range(11)) and (every != other).any()
    assert len(train.rows) == len(held_out.rows) == 20 and every.shape == (20, 32)
    assert train.fingerprint != held_out.fingerprint
    assert loader.open_loaders(_config(source="random:20", held_out=0))[1] is None


def test_the_thread_ends_and_its_errors_are_raised_here(monkeypatch):
    train, _ = _open()
    before = set(threading.enumerate())
    batches = train.batches(0, _shardings(8, 1))
    next(batches)
    assert set(threading.enumerate()) - before
    batches.close()
    _wait_until(lambda: not set(threading.enumerate()) - before)

    read = packing.Rows.read

    def fail(self, indices):
        if len(indices):  # none are read for the shapes of rows
            raise OSError("the disk is gone")
        return read(self, indices)

    monkeypatch.setattr(packing.Rows, "read", fail)
    with pytest.raises(OSError, match="the disk is gone"):
        next(train.batches(0, _shardings(8, 1)))
    _wait_until(lambda: not set(threading.enumerate()) - before)


def _wait_until(condition, within_s=180.0):
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < within_s
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("data", "vocab", "message"),
    [
        (
            {},
            100,
            r"data\.tokenizer=bytes has 257 tokens, more than model\.vocab=100\n  fix   --set model\.vocab=0",
        ),
        (
            {"source": "small.txt", "held_out": 0},
            257,
            r"6 tokens for training are less than one row, data\.seq \+ 1 = 33",
        ),
        (
            {"source": "small.txt b.txt", "held_out": 0.5, "packing": "stream"},
            257,
            r"for (training|evaluation) are less",
        ),
        (
            {"source": "b.txt", "held_out": "same.txt"},
            257,
            r"b\.txt: 0 tokens for training(.|\n)*1 documents are left out, since data\.held_out has them, too\n  fix ",
        ),
        ({"source": "none/*.txt"}, 257, "matches no file"),
        ({"source": "~none"}, 257, "~none matches no file"),
        ({"source": "a.jsonl " * 40 + "none"}, 257, "matches no file, and neither does none in it"),
        ({"tokenizer": "~none"}, 257, "~none: no such file"),
        ({"tokenizer": "none" * 99}, 257, "no such file"),
        ({"tokenizer": "~none/gpt2.tiktoken"}, 257, "no such file"),
        ({"source": "random:x"}, 257, "write random:ROWS"),
        ({"source": f"random:{10**30}"}, 257, r"more than 1,073,741,824 tokens, .*\n  fix   random:32537631 or less"),
        ({"tokenizer": "none.json"}, 257, "no such file"),
    ],
)
def test_bad_input(folder, data, vocab, message):
    (folder / "small.txt").write_text("small")
    for name in ("b.txt", "same.txt"):
        (folder / name).write_text("b" * 1000)
    with pytest.raises(InputError, match=message):
        loader.open_loaders(_config(vocab=vocab, **data))


@pytest.fixture
def conversations(folder):
    """Two hundred conversations, some of them equal but for an id, and a tokenizer with a chat template."""
    write_tokenizer(folder / "chatty", CHATML)
    lines = [{"id": i, "messages": turns(f"question {i % 150}", f"answer {i % 150}")} for i in range(200)]
    (folder / "chat.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return {"source": "chat.jsonl", "tokenizer": "chatty", "messages_field": "messages", "seq": 256}


def _answers(opened, talk):
    targets = opened.rows.read(range(len(opened.rows)))["targets"]
    assert f"{(targets >= 0).sum():,} of them the assistant's (" in opened.description
    return talk._tokenizer.decode(targets[targets >= 0]).decode().split("<|im_end|>")[:-1]


def test_conversations_teach_what_the_assistant_says(conversations):
    train, held_out = loader.open_loaders(_config(vocab=300, **conversations))
    talk = chat.Chat("chatty")
    assert held_out
    sides = [_answers(opened, talk) for opened in (train, held_out)]
    assert sorted(sides[0] + sides[1]) == sorted(f"answer {i % 150}" for i in range(200))
    assert not set(sides[0]) & set(sides[1]) and len(set(sides[1])) == 15
    segments = train.rows_at(0, slice(None))["segment_ids"]
    assert segments.max() > 2 and "cut into rows" not in train.description
    assert (
        "conversations cut into rows"
        in loader.open_loaders(_config(vocab=300, **conversations | {"seq": 48}))[0].description
    )


def test_conversations_may_stand_in_any_file_of_records(conversations, folder):
    whole, _ = loader.open_loaders(_config(vocab=300, **conversations))
    lines = [json.loads(line) for line in (folder / "chat.jsonl").read_text().splitlines()]
    tables = [
        pyarrow.Table.from_pylist([{"id": line["id"], "talk": line["messages"]} for line in some])
        for some in (lines[50:100], lines[100:150])
    ]
    (folder / "a.json").write_text(json.dumps(lines[:50]))
    pyarrow.parquet.write_table(tables[0], folder / "b.parquet")
    with pyarrow.ipc.new_stream(str(folder / "c.arrow"), tables[1].schema) as writer:
        writer.write_table(tables[1])
    (folder / "d.jsonl.gz").write_bytes(gzip.compress("\n".join(map(json.dumps, lines[150:])).encode()))
    source = ["a.json", *({"path": path, "messages_field": "talk"} for path in ("b.parquet", "c.arrow")), "d.jsonl.gz"]
    parts, _ = loader.open_loaders(_config(vocab=300, **conversations | {"source": source}))
    assert (np.asarray(parts.rows.stream) == np.asarray(whole.rows.stream)).all()
    weighted = [{"path": "a.json", "weight": 1}, {"path": "b.parquet", "weight": 2, "messages_field": "talk"}]
    apart = [{"path": "c.arrow", "messages_field": "talk"}]
    mixed, held_out = loader.open_loaders(_config(vocab=300, **conversations | {"source": weighted, "held_out": apart}))
    assert mixed.shares == (3333, 6667) and held_out
    targets = mixed.rows.read(range(len(mixed.rows)))["targets"]
    assert f"{(targets >= 0).sum():,} of them the assistant's" in mixed.description


def test_conversations_are_encoded_once_per_template(conversations, folder, monkeypatch):
    encoded = []
    encode_all = chat.Chat.encode_all
    monkeypatch.setattr(chat.Chat, "encode_all", lambda self, some: encoded.extend(some) or encode_all(self, some))
    first, again = (loader.open_loaders(_config(vocab=300, **conversations))[0] for _ in range(2))
    assert len(encoded) == 200 and first.fingerprint == again.fingerprint
    (folder / "chatty" / "chat_template.jinja").write_text(CHATML.replace("You help.", "Help."))
    assert loader.open_loaders(_config(vocab=300, **conversations))[0].fingerprint != first.fingerprint
    assert len(encoded) == 400


@pytest.mark.parametrize(
    ("name", "text", "settings", "message"),
    [
        ("b.jsonl", '\n{"messages": []}', {}, r"b\.jsonl:2: messages is empty\n  fix "),
        ("b.jsonl", '{"messages": [', {}, r"b\.jsonl:1: not valid JSON"),
        ("b.txt", "text", {}, r"b\.txt: no records, which data\.messages_field=messages needs\n  fix   name \.jsonl"),
        ("b.jsonl", "{}", {"tokenizer": "bytes"}, r"bytes has no chat template"),
        ("b.jsonl", "{}", {"packing": "stream"}, r"data\.messages_field needs data\.packing: documents"),
    ],
)
def test_bad_conversations(conversations, folder, name, text, settings, message):
    (folder / name).write_text(text)
    with pytest.raises(InputError, match=message):
        loader.open_loaders(_config(vocab=300, **conversations | {"source": name, "held_out": 0} | settings))


def test_a_padded_vocabulary_does_not_make_room_for_tokens():
    padded = config_of({}, {"vocab": 200, "padded_vocab": 512})
    with pytest.raises(InputError, match=r"model\.vocab=200\n  fix   --set model\.vocab=0"):
        loader.open_loaders(padded)
