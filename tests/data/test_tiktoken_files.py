"""Vocabularies of tiktoken give the tokens that tiktoken gives."""

import base64
import itertools
import random
import re
from pathlib import Path

import fsspec
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from gspmd_lm.data import tiktoken_files, tokenizer
from gspmd_lm.data.encodings import byte_names
from gspmd_lm.errors import InputError

pytestmark = pytest.mark.usefixtures("folder")
CODE = Path(__file__).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def ranks():
    """Those of a small vocabulary that is trained on this file: token -> rank."""
    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator([CODE], trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False))
    byte = {name: byte for byte, name in enumerate(byte_names())}
    return {bytes(byte[one] for one in name): rank for name, rank in bpe.get_vocab().items()}


@pytest.fixture(scope="module")
def texts():
    draw = random.Random(0)
    return [
        CODE,
        *("".join(draw.choices(" \n\t\r'sSLlé中文٣12345ÀǅaA_-/.<|>🎉\u00a0\u2028\u0301", k=300)) for _ in range(200)),
    ]


def _write(name, ranks):
    lines = [base64.b64encode(token) + b" %d" % rank for token, rank in ranks.items()]
    Path(name).write_bytes(b"\n".join(lines) + b"\n")


def _merge(word, ranks):
    """The tokens of a word: the two neighbours that make the token of the lowest rank are merged, until none do."""
    parts = [bytes([byte]) for byte in word]
    while True:
        found = [ranks.get(a + b, len(ranks)) for a, b in itertools.pairwise(parts)]
        if min(found, default=len(ranks)) == len(ranks):
            return [ranks[part] for part in parts]
        at = found.index(min(found))
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def test_tokens_are_merged_by_rank(ranks):
    _write("gpt2.tiktoken", ranks)
    made = tokenizer.load_tokenizer("gpt2.tiktoken")
    words = re.findall(r"[a-z]+", CODE)
    for word in {*words, *map("".join, itertools.pairwise(words))}:
        assert made.encode(word.encode()).tolist() == _merge(word.encode(), ranks)
    assert made.end == 50256 and made.vocab_size == 50257 and made.special == {"<|endoftext|>": 50256}
    text = f"{CODE}<|endoftext|> é\x00\x80\ud7ff".encode() + b"\xff"
    assert made.decode(made.encode(text[:-1])) == text[:-1] and made.encode(text)[-1] == ranks[b"\xff"]
    assert 50256 not in made.encode(text), "spelled in a text, it is text"


def test_a_bucket_has_one_too(ranks):
    _write("cl100k_base.tiktoken", ranks)
    store = fsspec.filesystem("memory")
    store.put("cl100k_base.tiktoken", "/vocabularies/cl100k_base.tiktoken")
    far, near = map(tokenizer.load_tokenizer, ("memory://vocabularies/cl100k_base.tiktoken", "cl100k_base.tiktoken"))
    store.rm("/vocabularies", recursive=True)
    assert far.fingerprint == near.fingerprint and near.end == 100257 and near.vocab_size == 100277


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("other.tiktoken", b"", r"data\.tokenizer=other\.tiktoken: how other splits texts .*\n  fix .*cl100k_base"),
        ("gpt2.tiktoken", None, r"data\.tokenizer: gpt2\.tiktoken: no such file\n  fix "),
        ("gpt2.tiktoken", b"YQ== 1\nnothing\n", r"gpt2\.tiktoken:2: not a token in base64 and its rank .*\n  fix "),
        ("gpt2.tiktoken", b"YQ== 1\n", r"gpt2\.tiktoken: has no token for the byte 0, so it is not whole\n  fix "),
    ],
)
def test_what_is_no_vocabulary_is_said(name, content, message):
    if content is not None:
        Path(name).write_bytes(content)
    with pytest.raises(InputError, match=message):
        tokenizer.load_tokenizer(name)


@pytest.mark.parity
@pytest.mark.parametrize("name", ["r50k_base", "p50k_base", "cl100k_base", "o200k_base"])
def test_tokens_are_those_of_tiktoken(name, ranks, texts, monkeypatch):
    """The same ranks with the words and special tokens that tiktoken itself has for an encoding."""
    tiktoken = pytest.importorskip("tiktoken")
    public = pytest.importorskip("tiktoken_ext.openai_public")
    monkeypatch.setattr(public, "load_tiktoken_bpe", lambda *_, **__: ranks)
    known = getattr(public, name)() | {"explicit_n_vocab": None}
    theirs = tiktoken.Encoding(**known)
    _write(f"{name}.tiktoken", ranks)
    ours = tokenizer.load_tokenizer(f"{name}.tiktoken")
    assert ours.special == known["special_tokens"] == tiktoken_files.ENCODINGS[name].special
    for text in texts:
        assert ours.encode(text.encode()).tolist() == theirs.encode_ordinary(text)
