"""Text from tokens that come one by one."""

import pytest

from gspmd_lm.data import tokenizer, trained
from gspmd_lm.infer.detokenizer import Detokenizer, Stops

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
    assert "".join(found[:10]) == "\ufffd" * 7  # the last three might have become a character


def test_special_tokens_are_not_text(bpe):
    ids = [*bpe.encode(b"some").tolist(), bpe.end, *bpe.encode(b" words").tolist()]
    assert "".join(pieces_of(bpe, ids)) == "some words"


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


def test_a_prompt_may_spell_out_special_tokens_and_a_document_may_not(bpe):
    text = f"some{tokenizer.END_OF_TEXT}"
    assert bpe.encode_prompt(text).tolist() == [*bpe.encode(b"some").tolist(), bpe.end]
    assert bpe.end not in bpe.encode(text.encode()).tolist()
    assert bpe.decode([bpe.end]) == tokenizer.END_OF_TEXT.encode() and bpe.decode([bpe.end], special=False) == b""
    assert tokenizer.load_tokenizer("bytes").encode_prompt("é").tolist() == [0xC3, 0xA9]
