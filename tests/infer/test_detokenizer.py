"""Text from tokens that come one by one."""

import functools
import random

import pytest

from gspmd_lm.data import tokenizer, trained
from gspmd_lm.errors import InputError
from gspmd_lm.infer import generate
from gspmd_lm.infer.detokenizer import Detokenizer, Stops, special_stops
from tests.infer import spelled

TEXT = "Grüße, 世界! 👩‍🚀 naïve"


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    """A byte-level tokenizer that has seen little, so that characters are cut into several tokens."""
    return trained.train_tokenizer(
        [b"some plain words and words"], 270, tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    )


@pytest.fixture(params=["bytes", "bpe"])
def tokens(request):
    return tokenizer.load_tokenizer("bytes") if request.param == "bytes" else request.getfixturevalue("bpe")


def pieces_of(tokens, ids, prompt=()):
    pieces = Detokenizer(tokens, prompt)
    return [pieces.add(i) for i in ids] + [pieces.rest()]


def test_pieces_never_cut_a_character(tokens):
    ids = tokens.encode(TEXT.encode()).tolist()
    found = pieces_of(tokens, ids, tokens.encode(b"before").tolist())
    assert "".join(found) == TEXT and "\ufffd" not in "".join(found)
    assert len([piece for piece in found if piece]) == len(TEXT) or tokens.vocab_size != 257
    assert found[-1] == ""


def test_what_never_becomes_a_character_is_shown_at_the_end(tokens):
    ids = tokens.encode("a世".encode()).tolist()[:-1]
    assert pieces_of(tokens, ids)[-1] == "\ufffd"
    assert "".join(pieces_of(tokens, ids)) == "a\ufffd"


def test_bytes_that_are_no_characters_do_not_hold_back_what_follows():
    found = pieces_of(tokenizer.load_tokenizer("bytes"), [0xFF] * 10 + [*b"ok"])
    assert "".join(found) == "\ufffd" * 10 + "ok"
    assert "".join(found[:10]) == "\ufffd" * 9  # the last one might have become a character


def test_special_tokens_are_not_text(bpe):
    ids = [*bpe.encode(b"some").tolist(), bpe.end, *bpe.encode(b" words").tolist()]
    assert "".join(pieces_of(bpe, ids)) == "some words"


@pytest.fixture(scope="module")
def of_kind(tmp_path_factory):
    return functools.cache(lambda kind: spelled.tokenizer(kind, tmp_path_factory.mktemp(kind)))


def random_ids(tokens, rng):
    """A text as tokens, some of them with others among them, or only tokens drawn at random: broken bytes."""
    ids = tokens.encode(spelled.text(rng).encode()).tolist()
    kind = rng.random()
    if kind < 0.3:
        pool = [*tokens.joined_bytes, *range(3)] if kind < 0.1 and tokens.joined_bytes else range(tokens.vocab_size + 2)
        return [rng.choice(pool) for _ in range(rng.randint(1, 60))]
    for _ in range(rng.randint(1, 4) if kind < 0.6 else 0):
        ids.insert(rng.randint(0, len(ids)), rng.randrange(tokens.vocab_size))
    return ids


@pytest.mark.parametrize("kind", spelled.KINDS)
@pytest.mark.parametrize("texts", [150, pytest.param(5000, marks=pytest.mark.slow)])
def test_all_pieces_are_the_text_of_all_tokens_less_that_of_the_prompt(of_kind, kind, texts):
    tokens, rng = of_kind(kind), random.Random(texts)
    for _ in range(texts):
        ids, special = random_ids(tokens, rng), rng.random() < 0.3
        first = rng.randint(0, len(ids))
        pieces = Detokenizer(tokens, ids[:first], special)
        found = "".join([pieces.add(i) for i in ids[first:]]) + pieces.rest()
        prompt, whole = (tokens.decode(some, special).decode() for some in (ids[:first], ids))
        alike = next((at for at in range(len(prompt)) if prompt[at : at + 1] != whole[at : at + 1]), len(prompt))
        assert found == whole[alike:], (ids, first, special)


@pytest.mark.parametrize("kind", spelled.KINDS)
@pytest.mark.parametrize("texts", [50, pytest.param(2000, marks=pytest.mark.slow)])
def test_a_stop_string_ends_a_text_with_the_token_that_completes_it(of_kind, kind, texts):
    tokens, rng = of_kind(kind), random.Random(texts)
    for _ in range(texts):
        ids = tokens.encode(spelled.text(rng).encode()).tolist()
        whole = tokens.decode(ids, special=False).decode()
        first = rng.randrange(len(whole) or 1)
        stop = whole[first : first + rng.randint(1, 4)]
        if not stop or "\ufffd" in stop:
            continue
        pieces, stops, shown = Detokenizer(tokens, ()), Stops([stop]), ""
        for count, token in enumerate(ids, 1):
            text, ended = stops.add(pieces.add(token), pieces.pending_text)
            shown += text
            assert whole.startswith(shown) and stop not in shown
            assert ended == (stop in tokens.decode(ids[:count], special=False).decode()) or "\ufffd" in whole
            if ended:
                break
        else:
            shown += stops.add(pieces.rest())[0]
        assert shown == whole[: whole.index(stop)], (ids, stop)


def test_the_characters_of_a_run_of_byte_tokens_come_together(of_kind):
    tokens = of_kind("byte-fallback")
    found = pieces_of(tokens, tokens.encode("ok 👍🏽!".encode()).tolist())
    assert ([piece for piece in found if piece][-1], "".join(found)) == ("👍🏽!", "ok 👍🏽!")


@pytest.mark.parametrize("kind", spelled.KINDS)
def test_a_token_costs_the_same_in_a_long_text(of_kind, kind, monkeypatch):
    tokens, decoded = of_kind(kind), []
    decode = tokens.decode
    monkeypatch.setattr(tokens, "decode", lambda ids, special: decoded.append(len(ids)) or decode(ids, special))
    broken = next((i for i in range(tokens.vocab_size) if b"\xef\xbf\xbd" in decode([i])), tokens.vocab_size - 1)
    ids = [*tokens.encode(spelled.text(random.Random(1)).encode()), *[broken] * 20] * 20 + [broken] * 1000
    pieces = Detokenizer(tokens, ids)
    for i in ids:
        pieces.add(i)
    assert sum(decoded) < 32 * len(ids)


def test_a_special_token_can_end_a_text_and_can_be_shown(of_kind):
    tokens = of_kind("byte-level")
    mark = tokens.special["<|tool|>"]
    ids = [*tokens.encode(b"a "), mark, *tokens.encode(b"b")]
    pieces = Detokenizer(tokens, (), special=True)
    assert "".join([*map(pieces.add, ids), pieces.rest()]) == "a <|tool|>b"
    assert special_stops(["b", "<|tool|>"], tokens) == {mark}
    assert special_stops(["b<|tool|>"], tokens, special=True) == frozenset() == special_stops(["b"], tokenizer.Bytes())
    with pytest.raises(InputError, match=r"stop 'b<\|tool\|>' holds the special token <\|tool\|>, .*\n  fix   stop at"):
        special_stops(["b<|tool|>"], tokens)


def stopped(strings, pieces):
    stops, out = Stops(strings), []
    for piece in pieces:
        text, ended = stops.add(piece)
        out.append(text)
        if ended:
            return out, True
    return [*out, stops.rest()], False


@pytest.mark.parametrize(
    ("strings", "pieces", "wanted", "ended"),
    [
        (["END"], ["one E", "N", "D two"], ["one ", "", ""], True),
        (["END"], ["one E", "N", "d"], ["one ", "", "ENd", ""], False),
        (["END"], ["one EN"], ["one ", "EN"], False),
        (["aab"], ["a", "a", "a", "b"], ["", "", "a", ""], True),
        (["\n\n", "Q:"], ["x\n", "Q", ":y"], ["x", "\n", ""], True),
        (["late", "ear"], ["early late"], [""], True),
        ([], ["all ", "of it"], ["all ", "of it", ""], False),
    ],
)
def test_stop_strings_span_tokens_and_are_not_printed(strings, pieces, wanted, ended):
    assert stopped(strings, pieces) == (wanted, ended)


def test_a_stop_string_may_come_with_the_last_token_that_there_is_room_for():
    """Half a character is shown as U+FFFD when nothing follows."""
    bytes_ = tokenizer.load_tokenizer("bytes")
    text = generate._Completion(0, Detokenizer(bytes_, ()), Stops(["\ufffd"]), {}, new_tokens=2)
    assert text.add(ord("a"), 1.0).result is None
    result = text.add("é".encode()[0], 1.0).result
    assert result and (result.text, result.finish_reason) == ("a", "stop")


def test_a_prompt_may_spell_out_special_tokens_and_a_document_may_not(bpe):
    text = f"some{tokenizer.END_OF_TEXT}"
    assert bpe.encode_prompt(text).tolist() == [*bpe.encode(b"some").tolist(), bpe.end]
    assert bpe.end not in bpe.encode(text.encode()).tolist()
    assert bpe.decode([bpe.end]) == tokenizer.END_OF_TEXT.encode() and bpe.decode([bpe.end], special=False) == b""
    assert tokenizer.load_tokenizer("bytes").encode_prompt("é").tolist() == [0xC3, 0xA9]
