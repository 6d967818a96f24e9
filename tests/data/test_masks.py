"""Rows whose masked tokens are to be guessed."""

import dataclasses
import json

import numpy as np
import pytest
import tokenizers

from gspmd_lm.data import loader, packing, tokenizer, trained
from gspmd_lm.errors import InputError
from tests.data.configs import config_of

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


@pytest.fixture(autouse=True)
def folder(folder):
    words = [f"word{i}" for i in range(300)]
    draw = np.random.default_rng(0)
    lines = [json.dumps({"text": " ".join(draw.choice(words, 50))}) for _ in range(200)]
    (folder / "a.jsonl").write_text("\n".join(lines))
    vocab = {name: i for i, name in enumerate([*SPECIAL, *words])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, "[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.add_special_tokens(list(SPECIAL))
    made.post_processor = tokenizers.processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    made.save("bert.json")
    return folder


def _open(objective="masked", model=None, **data):
    data = {"source": "a.jsonl", "tokenizer": "bert.json", "batch": 16, "seq": 64, "held_out": 0.1} | data
    model = {"vocab": 400, "attention.mask": "full"} | (model or {})
    train, held_out = loader.open_loaders(config_of(data, model, objective))
    assert held_out
    return train, held_out


def _rows(opened, steps):
    read = [opened.rows_at(step, slice(None)) for step in steps]
    return {name: np.concatenate([one[name] for one in read]) for name in read[0]}


def test_the_shares_of_what_is_chosen_and_what_stands_there():
    train, _ = _open()
    read, plain = _rows(train, range(40)), _rows(_unmasked(train), range(40))
    assert {array.dtype for array in read.values()} == {np.dtype(np.int32)}
    chosen, able = read["targets"] >= 0, ~np.isin(plain["tokens"], range(5))
    assert (read["targets"][chosen] == plain["tokens"][chosen]).all() and able[chosen].all()
    assert (read["tokens"][~chosen] == plain["tokens"][~chosen]).all()
    assert chosen.sum() / able.sum() == pytest.approx(0.15, abs=0.005)
    masked, left = read["tokens"] == 4, read["tokens"] == plain["tokens"]
    assert masked[chosen].mean() == pytest.approx(0.8, abs=0.02)
    assert left[chosen].mean() == pytest.approx(0.1 + 0.1 / 305, abs=0.015)
    others = read["tokens"][chosen & ~masked & ~left]
    assert others.min() < 20 and others.max() > 290 and (others < 305).all()
    assert "0.15 of them masked" in train.description and not read["token_types"].any()
    third, _ = _open(masked_share=0.3)
    assert (_rows(third, range(40))["targets"] >= 0).sum() / able.sum() == pytest.approx(0.3, abs=0.01)
    assert third.fingerprint != train.fingerprint


def test_tokens_in_place_of_others_are_told_apart_from_all_true_ones():
    model = {"classes.count": 1, "classes.of": "tokens"}
    train, _ = _open(objective="replaced", model=model)
    read, plain = _rows(train, range(20)), _rows(_unmasked(train), range(20))
    others = read["tokens"] != plain["tokens"]
    assert (read["targets"] == np.where(plain["segment_ids"] > 0, others, -1)).all()
    assert not others[plain["tokens"] < 5].any() and read["targets"].dtype == np.int32
    assert others.sum() / (plain["tokens"] >= 5).sum() == pytest.approx(0.15, abs=0.01)
    assert read["tokens"][others].max() > 290 and "0.15 of them replaced" in train.description
    assert train.fingerprint != _open()[0].fingerprint


def _unmasked(opened):
    return dataclasses.replace(opened, token_masks=None)


def test_each_epoch_has_other_masks_and_a_restart_or_other_hosts_the_same():
    train, held_out = _open()
    again, other = _open()[0], _open(seed=1)[0]
    count = len(train.rows)
    assert count % 16, "a batch must have rows of two epochs for this test"
    visits = {}
    for number in range(2 * count):
        step, row = divmod(number, 16)
        (index,) = train.indices_at(step, [row])
        visits.setdefault(int(index), []).append(train.rows_at(step, [row])["targets"])
    assert all(len(each) == 2 and (each[0] != each[1]).any() for each in visits.values())
    whole = again.rows_at(7, slice(None))
    for host in range(4):
        for name, part in train.rows_at(7, range(4 * host, 4 * host + 4)).items():
            assert (part == whole[name][4 * host : 4 * host + 4]).all()
    numbers, arrays = np.arange(16), train.rows.read(range(16))
    targets = [one.token_masks.put(arrays, numbers)["targets"] for one in (train, again, other)]
    assert (targets[0] == targets[1]).all() and (targets[0] != targets[2]).any()
    evaluations = [_rows(one, range(one.steps_per_epoch)) for one in (held_out, _open(seed=1, batch=8)[1])]
    rows = len(held_out.rows)
    for name in ("tokens", "targets"):
        assert (evaluations[0][name][:rows] == evaluations[1][name][:rows]).all()
    assert (evaluations[0]["targets"][rows:] == -1).all() and (evaluations[0]["targets"][:rows] >= 0).any()


def test_documents_have_the_special_tokens_of_the_template():
    stream = np.asarray(_open(held_out=0.1)[0].rows.stream)
    assert stream[0] == 2 and (np.flatnonzero(stream == 2)[1:] == np.flatnonzero(stream == 3)[:-1] + 1).all()
    tokens = tokenizer.load_tokenizer("bert.json")
    assert (tokens.before, tokens.after, tokens.end) == ((2,), (), 3)
    assert tokens.encode_all([b"word0 word1", b""])[0].tolist() == [5, 6]


def test_bytes_are_masked_by_the_byte_0_and_trained_tokenizers_have_a_mask():
    train, _ = _open(tokenizer="bytes")
    read = train.rows_at(0, slice(None))
    assert ((read["tokens"] == 0) & (read["targets"] >= 0)).sum() > 50 and not np.isin(read["targets"], (0, 256)).any()
    made, _ = _open(tokenizer="bpe:300")
    assert made.tokenizer and made.token_masks
    assert tokenizer.load_tokenizer(str(made.tokenizer)).special[tokenizer.MASK] == made.token_masks.mask
    assert (made.rows_at(0, slice(None))["tokens"] == made.token_masks.mask).any()


def test_random_rows_are_masked_too():
    train, held_out = _open(source="random:20")
    for one in (train, held_out):
        read = one.rows_at(0, slice(None))
        assert 0.05 < (read["targets"] >= 0).mean() < 0.25 and (read["tokens"][read["targets"] >= 0] == 0).mean() > 0.6


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            {"tokenizer": "plain.json"},
            r'has no mask token \(special tokens: .*\n  fix .*named <mask>(.|\n)*"mask_token"',
        ),
        ({"fields": ["text"], "label": "text"}, r"objective: masked needs texts, (.|\n)* has data\.fields="),
        ({"messages_field": "text"}, r"objective: masked needs texts, (.|\n)* has data\.messages_field"),
    ],
)
def test_what_cannot_be_masked(data, message):
    trained.train_tokenizer([b"the cat sat on the mat " * 50], 270, "plain.json")
    with pytest.raises(InputError, match=message):
        _open(**data)


def test_the_config_beside_names_the_mask(folder):
    (folder / "tokenizer_config.json").write_text(json.dumps({"mask_token": "[UNK]"}))
    assert tokenizer.load_tokenizer("bert.json").mask == 1


def test_padding_is_never_chosen():
    rows = packing.documents(packing.InMemory(np.arange(5, 16, dtype=np.uint16)), 32, 99)
    put = packing.Masks(4, 300, (99,), 0.9, 0).put(rows.read([0, -1]), np.arange(2))
    assert (put["targets"][0, :10] >= 0).sum() > 5 and (put["targets"][0, 10:] == -1).all()
    assert (put["targets"][1] == -1).all() and (put["tokens"][1] == 0).all()
