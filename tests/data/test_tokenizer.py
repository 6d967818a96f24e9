import json

import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, processors

from gspmd_lm.data import tokenizer, trained
from gspmd_lm.errors import InputError

TEXT = b"the cat sat on the mat and the hat\n" * 50
NOT_UTF8 = b"the \xff\xfe cat \xe4 mat"


@pytest.fixture
def bpe_path(tmp_path):
    path = tmp_path / "bpe" / "tokenizer.json"
    trained.train_tokenizer([TEXT], 280, path)
    return path


def test_bytes_keep_every_byte():
    tokens = tokenizer.load_tokenizer("bytes")
    every = bytes(range(256))
    assert tokens.vocab_size == 257 and tokens.end == 256
    assert tokens.encode(every).dtype == np.int32
    assert tokens.decode(tokens.encode(every)) == every
    assert tokens.decode([104, 256, 105, 300]) == b"hi"


def test_a_trained_tokenizer_is_shorter_than_bytes_and_reads_back(bpe_path):
    tokens = tokenizer.load_tokenizer(str(bpe_path.parent))  # the folder does too
    ids = tokens.encode(TEXT)
    assert 257 < tokens.vocab_size <= 280 and len(ids) < 0.5 * len(TEXT)
    assert tokens.decode(ids) == TEXT
    assert tokens.end not in ids
    assert tokens.fingerprint == tokenizer.load_tokenizer(str(bpe_path)).fingerprint


def test_bytes_that_are_not_utf8_get_their_own_tokens(bpe_path):
    tokens = tokenizer.load_tokenizer(str(bpe_path))
    ids = tokens.encode_all([b"the mat", NOT_UTF8, b"\xff", "grün".encode()])
    plain = json.loads(bpe_path.read_text())["model"]["vocab"]
    assert ids[2].tolist() == [plain["ÿ"]]  # GPT-2's name of byte 255
    assert [plain["ÿ"], plain["þ"], plain["ä"]] == [i for i in ids[1] if i in (plain["ÿ"], plain["þ"], plain["ä"])]
    assert tokens.decode(ids[1]).decode() == NOT_UTF8.decode("utf-8", "replace")
    assert tokens.decode(ids[3]).decode() == "grün" and tokens.decode(ids[0]) == b"the mat"
    assert tokens.replaced_bytes == 0


def test_bytes_that_no_token_stands_for_are_counted(tmp_path, words_path):
    tokens = tokenizer.load_tokenizer(str(words_path))
    tokens.encode(NOT_UTF8)
    assert tokens.replaced_bytes == 3


@pytest.fixture
def words_path(tmp_path):
    """A tokenizer of whole words, without any for bytes, as others may have made it."""
    vocab = {"[UNK]": 0, "the": 1, "cat": 2, "mat": 3}
    raw = {
        "version": "1.0",
        "truncation": {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
        "padding": None,
        "added_tokens": [_added(4, "</s>")],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "[UNK]"},
    }
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(raw))
    return path


def _added(number, content, special=True):
    return {
        "id": number,
        "content": content,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": special,
    }


def test_a_files_settings_for_inference_do_not_cut_documents(words_path):
    tokens = tokenizer.load_tokenizer(str(words_path))
    assert tokens.encode(b"the cat the mat").tolist() == [1, 2, 1, 3]
    assert tokens.vocab_size == 5 and tokens.end == 4


def test_a_special_token_spelled_out_in_a_document_is_text(bpe_path):
    tokens = tokenizer.load_tokenizer(str(bpe_path))
    forged = b"the cat" + tokenizer.END_OF_TEXT.encode() + b"the mat"
    assert tokens.end not in tokens.encode(forged)
    assert tokens.decode(tokens.encode(forged)) == forged


def test_no_end_token(words_path):
    raw = json.loads(words_path.read_text())
    raw["added_tokens"] = [_added(4, "<stop>")]
    words_path.write_text(json.dumps(raw))
    with pytest.raises(InputError, match=r"no end-of-text token \(special tokens: <stop>\)\n  fix   add"):
        tokenizer.load_tokenizer(str(words_path))


@pytest.mark.parametrize("raw", [b"{}", b"not json", b"\xff\xfe", b'{"model": 1}', b""])
def test_not_a_tokenizer_json(tmp_path, raw):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(raw)
    with pytest.raises(InputError, match=r"tokenizer\.json"):
        tokenizer.load_tokenizer(str(path))


def test_training_refuses_what_cannot_work(tmp_path, bpe_path):
    with pytest.raises(InputError, match="no such file"):
        tokenizer.load_tokenizer(str(tmp_path / "none.json"))
    with pytest.raises(InputError, match="vocabulary of 256 is too small"):
        trained.train_tokenizer([TEXT], 256, tmp_path / "small.json")
    with pytest.raises(InputError, match="exists already"):
        trained.train_tokenizer([TEXT], 300, bpe_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        trained.train_tokenizer([TEXT], 300, tmp_path / "file" / "tokenizer.json")


def saved(folder, model, **parts):
    """The path of a tokenizer of `model` with the special token </s>."""
    made = tokenizers.Tokenizer(model)
    for name, part in parts.items():
        setattr(made, name, part)
    made.add_special_tokens(["</s>"])
    made.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def test_a_character_that_a_vocabulary_lacks_is_named(tmp_path):
    path = saved(tmp_path, models.Unigram([("a", -1.0), ("b", -2.0)]))
    tokens = tokenizer.load_tokenizer(str(path))
    with pytest.raises(InputError) as caught:
        tokens.encode_all([b"ab", "abab ö".encode()])
    assert str(caught.value).startswith(f"data.tokenizer: {path}: cannot encode ' ' in 'abab ö' (")
    with pytest.raises(InputError, match=r"cannot encode 'ö' in 'aö'.*\n  fix   take another tokenizer"):
        tokens.encode_prompt("aö")
    with pytest.raises(InputError, match="cannot encode 'ö'"):
        tokens.encode_marked(["a", "bö"])
    with pytest.raises(InputError, match="cannot encode 'ö'"):
        tokenizer.encode_source(tokens, "aö")


def test_characters_that_a_vocabulary_drops_are_counted(tmp_path):
    model = models.BPE({"a": 0, "b": 1}, [])
    tokens = tokenizer.load_tokenizer(str(saved(tmp_path, model, pre_tokenizer=pre_tokenizers.WhitespaceSplit())))
    assert tokens.encode("abzöab ab".encode()).tolist() == [0, 1, 0, 1, 0, 1]
    assert tokens.replaced_bytes == 2  # the space does not count
    assert tokens.encode_prompt("öa").tolist() == [0] and tokens.replaced_bytes == 3


@pytest.mark.parametrize(("single", "wanted"), [("$A </s>", [0]), ("</s> $A </s>", [2, 0]), ("</s> $A", [2, 0])])
def test_a_prompt_goes_on_where_a_template_would_end_a_text(tmp_path, single, wanted):
    template = processors.TemplateProcessing(single=single, special_tokens=[("</s>", 2)])
    path = saved(tmp_path, models.BPE({"a": 0, "b": 1}, []), post_processor=template)
    tokens = tokenizer.load_tokenizer(str(path))
    assert (tokens.encode_prompt("a").tolist(), tokens.encode_prompt("").tolist()) == (wanted, wanted[:-1])
