"""Several sources with weights, and files for evaluation of their own."""

import collections
import json

import numpy as np
import pytest

from gspmd_lm import config
from gspmd_lm.data import cache, loader, making, packing, sources, tokenizer
from gspmd_lm.errors import InputError
from tests.data.configs import config_of


@pytest.fixture(autouse=True)
def folder(folder):
    for letter, count in (("a", 40), ("b", 200), ("v", 30)):
        lines = [json.dumps({letter: f"{letter * 9} {i} " * 5}) for i in range(count)]
        (folder / f"{letter}.jsonl").write_text("\n".join(lines))
    return folder


def _entry(letter, weight=None):
    return {"path": f"{letter}.jsonl", "text_field": letter} | ({"weight": weight} if weight else {})


def _config(*entries, **data):
    return config_of({"source": list(entries), "held_out": 0} | data, steps=100)


def _letters(rows):
    """The source of each row, a or b."""
    return ["ab"[int((row == ord("b")).sum() > (row == ord("a")).sum())] for row in rows["tokens"]]


@pytest.mark.long
def test_rows_are_drawn_by_weight(monkeypatch):
    assert loader.BLOCK == 10_000
    monkeypatch.setattr(loader, "BLOCK", 2000)
    mixed, none = loader.open_loaders(_config(_entry("a", 3), _entry("b", 1)))
    assert none is None and mixed.shares == (1500, 500)
    steps = range(0, 3 * loader.BLOCK // 8, 8)
    drawn = collections.Counter(letter for step in steps for letter in _letters(mixed.rows_at(step, slice(None))))
    assert abs(drawn["a"] / drawn.total() - 0.75) < 0.03
    block = np.concatenate([mixed.indices_at(step, range(8)) for step in range(loader.BLOCK // 8)])
    first = len(mixed.rows.parts[0])
    assert (block < first).sum() == 1500  # exactly, in each block
    near = block[:200] < first
    assert 130 < near.sum() < 170 and near[:75].sum() < 75  # and mixed within it


def test_each_source_has_epochs_of_its_own(monkeypatch):
    monkeypatch.setattr(loader, "BLOCK", 512)
    mixed, _ = loader.open_loaders(_config(_entry("a", 3), _entry("b", 1)))
    sizes = [len(part) for part in mixed.rows.parts]
    order = np.concatenate([mixed.indices_at(step, range(8)) for step in range(2 * loader.BLOCK // 8)])
    for own, first, size in ((order[order < sizes[0]], 0, sizes[0]), (order[order >= sizes[0]], *sizes)):
        times = np.bincount(own - first, minlength=size)
        assert times.max() - times.min() <= 1 and len(times) == size


def test_each_block_and_each_epoch_of_a_source_has_an_order_of_its_own(monkeypatch):
    monkeypatch.setattr(loader, "BLOCK", 8)
    mixed, _ = loader.open_loaders(_config(_entry("a", 1), _entry("b", 1)))
    size = len(mixed.rows.parts[0])
    steps = [*range(12), *range(size, size + 12)]
    blocks = [mixed.indices_at(step, range(8)) for step in steps]
    assert mixed.shares == (4, 4) and {(block < size).sum() for block in blocks} == {4}
    assert len({tuple(block < size) for block in blocks}) > 1  # where the rows of a stand in a block
    drawn = [frozenset(block[block < size]) for block in blocks]
    assert drawn[:12] != drawn[12:]  # the rows of the same places, four epochs of a later


def test_the_order_of_a_mixture_is_a_function_of_seed_and_step():
    entries = _entry("a", 1), _entry("b", 1)
    one, again, other = (loader.open_loaders(_config(*entries, seed=seed))[0] for seed in (5, 5, 6))
    for step in (1_000_003, 7, 0):  # in any order of asking
        whole = one.rows_at(step, slice(None))
        assert (one.indices_at(step, range(8)) == again.indices_at(step, range(8))).all()
        for part in (slice(2, 5), [1, 6]):  # what a process reads does not depend on what others read
            for name, array in one.rows_at(step, part).items():
                assert (array == whole[name][part]).all()
    first = len(one.rows.parts[0])
    draws = [[each.indices_at(step, range(8)) < first for step in range(9)] for each in (one, other)]
    assert not np.array_equal(*draws)  # the seed decides which source a row is from
    read = [np.sort(np.concatenate([each.indices_at(step, range(8)) for step in range(9)])) for each in (one, other)]
    assert not np.array_equal(*read)  # and which of its rows


def test_joined_rows_are_the_rows_of_their_parts():
    numbers = [np.arange(start, start + 200, dtype=np.uint16) for start in (0, 1000, 2000)]
    parts = [packing.text(packing.InMemory(tokens), 16) for tokens in numbers]
    joined = packing.Joined(parts)
    assert len(joined) == 3 * len(parts[0])
    size = len(parts[0])
    got = joined.read([2 * size + 3, -1, 0, size])
    for at, (part, index) in enumerate([(2, 3), (0, -1), (0, 0), (1, 0)]):
        for name, values in parts[part].read([index]).items():
            assert (got[name][at] == values[0]).all()


def test_a_change_of_weights_is_another_order_of_the_same_tokens(monkeypatch):
    one, _ = loader.open_loaders(_config(_entry("a", 1), _entry("b", 1)))
    monkeypatch.setattr(making, "make_tokens", lambda *_: pytest.fail("tokenized again"))
    two, _ = loader.open_loaders(_config(_entry("a", 1), _entry("b", 3)))
    assert one.fingerprint != two.fingerprint and len(one.rows) == len(two.rows)


def test_sources_without_weights_are_one():
    loader.open_loaders(_config(_entry("a", 1), _entry("b", 1)))  # has a cache of its own
    joined, _ = loader.open_loaders(_config(_entry("a"), _entry("b")))
    assert joined.shares == () and isinstance(joined.rows, packing.Rows)
    order = np.concatenate([joined.indices_at(step, range(8)) for step in range(-(-len(joined.rows) // 8))])
    assert sorted(order[: len(joined.rows)]) == list(range(len(joined.rows)))
    assert set(_letters(joined.rows.read(order[: len(joined.rows)]))) == {"a", "b"}


def test_what_is_said_of_a_mixture():
    mixed, _ = loader.open_loaders(_config(_entry("a", 3), _entry("b", 1)))
    rows = [len(part) for part in mixed.rows.parts]
    first, *parts = mixed.description.splitlines()
    assert first.startswith(f"training: {sum(rows):,} rows, ") and len(parts) == 2
    times = 100 * 8 / 4 / rows[1]
    assert parts[1] == f"b.jsonl: 25% of what is read; each of its {rows[1]:,} rows {times:.2g} times in 100 steps"


def test_the_share_that_is_held_out_is_of_all_sources_and_equal_documents_stay_together(folder):
    lines = [json.dumps({"b": json.loads(line)["a"]}) for line in (folder / "a.jsonl").read_text().splitlines()]
    with (folder / "b.jsonl").open("a") as file:
        file.write("\n" + "\n".join(lines))  # all of a stands in b too
    data = _config(_entry("a", 1), _entry("b", 1), held_out=0.2).data
    cached = cache.open_cache(sources.open_source(data), tokenizer.load_tokenizer("bytes"), data.held_out_share)
    sides = [_documents(np.asarray(split.stream)) for split in (*cached.train, cached.held_out)]
    held_out = set(sides[2])
    assert len(held_out) == 48 and not held_out & {*sides[0], *sides[1]}
    assert set(sides[0]) <= set(sides[1]) and sum(map(len, sides)) == 280


def _documents(stream):
    return [piece.astype(np.uint8).tobytes() for piece in np.split(stream, np.flatnonzero(stream == 256) + 1)[:-1]]


def test_a_source_of_its_own_for_evaluation(folder):
    train, held_out = loader.open_loaders(_config(_entry("a"), held_out=[_entry("v")]))
    assert held_out and not held_out.repeat
    everything = held_out.rows.read(range(len(held_out.rows)))["tokens"]
    assert (everything == ord("v")).any() and not (everything == ord("a")).any()
    alone, _ = loader.open_loaders(_config(_entry("a")))
    assert (np.asarray(train.rows.stream) == np.asarray(alone.rows.stream)).all()
    assert train.fingerprint != alone.fingerprint
    assert "v.jsonl" in held_out.description


def test_documents_that_are_held_out_are_left_out_of_training(folder, monkeypatch, stop):
    copied = [json.dumps({"a": json.loads(line)["v"]}) for line in (folder / "v.jsonl").read_text().splitlines()[:7]]
    with (folder / "a.jsonl").open("a") as file:
        file.write("\n" + "\n".join(copied))
    config_ = _config(_entry("a"), held_out=[_entry("v")])
    monkeypatch.setattr(making, "UNIT_BYTES", 900)
    train, held_out = loader.open_loaders(config_)
    documents = _documents(np.asarray(train.rows.stream))
    assert len(documents) == 40 and not any(b"v" in document for document in documents)
    assert held_out and len(_documents(np.asarray(held_out.rows.stream))) == 30
    assert "left out of training: 7 documents that are also in data.held_out" in train.description
    # A build that was stopped goes on to the same.
    monkeypatch.setenv("GSPMD_LM_CACHE", str(folder / "other"))
    with pytest.raises(KeyboardInterrupt):
        loader.open_loaders(config_, stop)
    again, _ = loader.open_loaders(config_)
    assert again.description == train.description
    assert (np.asarray(again.rows.stream) == np.asarray(train.rows.stream)).all()


@pytest.mark.parametrize(
    ("entries", "data", "message"),
    [
        ((_entry("a", 1), _entry("b")), {}, "some entries have a weight and others have none"),
        ((_entry("a", 0.00001), _entry("b", 1)), {}, r"a\.jsonl: its weight 1e-05 is less than 1 in 10,000.*\n  fix "),
        ((_entry("a"),), {"held_out": [_entry("v", 2)]}, r"held_out: v\.jsonl has a weight"),
        ((), {}, r"data\.source: must have at least one entry, got \[\]"),
        (("a.jsonl", _entry("b") | {"messages_field": "m"}), {}, "texts and conversations do not mix"),
        ((_entry("a") | {"weight": 0},), {}, r"data\.source\.0\.weight: must be above 0, got 0"),
        ((_entry("a") | {"wieght": 1},), {}, r"data\.source\.0\.wieght: unknown key \(did you mean weight\?\)"),
        (({"weight": 1},), {}, r"data\.source\.0\.path: missing"),
        ((3,), {}, r"data\.source\.0: must be text, got 3"),
        ((), {"source": {"path": "a"}}, r"data\.source: must be a list, got"),
        ((), {"source": "a.jsonl", "held_out": True}, r"data\.held_out: must be a number, got True"),
        ((_entry("a", 1), {"path": "short.txt", "weight": 1}), {}, r"short\.txt: 6 tokens for training are less"),
        (("a.jsonl",), {"text_field": "a", "held_out": "short.txt", "packing": "stream"},
         r"data\.held_out: short\.txt: 6 tokens for evaluation are less than one row"),
    ],
)  # fmt: skip
def test_bad_mixtures(folder, entries, data, message):
    (folder / "short.txt").write_text("short")
    with pytest.raises(InputError, match=message):
        loader.open_loaders(_config(*entries, **data))


def test_what_is_written_is_read_again():
    one = _config(_entry("a", 1), _entry("b", 1), held_out=["v.jsonl"])
    assert config.from_dict(config.to_dict(one), "x") == one
