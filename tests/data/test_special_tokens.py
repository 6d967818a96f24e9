import json
import logging

import pytest
import tokenizers
from conversations import CHATML, turns

from gspmd_lm.data import chat, tokenizer
from gspmd_lm.errors import InputError

PLAIN, NEW = 259, 260  # <|im_end|> is an added token that is not special; the next free id


@pytest.fixture
def folder(tmp_path):
    """Writes a tokenizer of bytes, one more token <v>, the special <s> and </s>, and <|im_end|>, with files beside."""

    def make(**files):
        alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
        made = tokenizers.Tokenizer(tokenizers.models.BPE({name: i for i, name in enumerate([*alphabet, "<v>"])}, []))
        made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = tokenizers.decoders.ByteLevel()
        made.add_special_tokens(["<s>", "</s>"])
        made.add_tokens([tokenizers.AddedToken("<|im_end|>", normalized=False)])
        made.save(str(tmp_path / "tokenizer.json"))
        for name in ("tokenizer_config", "special_tokens_map", "generation_config", "config"):
            (tmp_path / f"{name}.json").unlink(missing_ok=True)
        for name, value in files.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(value))
        return str(tmp_path)

    return make


def _declared(number, content, special=True):
    return {"added_tokens_decoder": {str(number): {"content": content, "special": special, "normalized": False}}}


# What AutoTokenizer of transformers 5.23.0 says of eos_token_id, and of the text "a<|im_end|></s><v>b".
@pytest.mark.parametrize(
    ("files", "end", "ids"),
    [
        ({"tokenizer_config": {"eos_token": "<|im_end|>"}}, 259, [64, 259, 258, 27, 85, 29, 65]),
        ({"tokenizer_config": {"eos_token": {"content": "<v>"}}}, 256, [64, 259, 258, 256, 65]),
        ({"special_tokens_map": {"eos_token": "<|im_end|>"}}, 259, [64, 259, 258, 27, 85, 29, 65]),
        (
            {"tokenizer_config": {"eos_token": "</s>"}, "special_tokens_map": {"eos_token": "<|im_end|>"}},
            259,
            [64, 259, 258, 27, 85, 29, 65],
        ),
        (
            {
                "tokenizer_config": {"eos_token": "</s>"} | _declared(259, "<|im_end|>"),
                "special_tokens_map": {"eos_token": "<|im_end|>"},
            },
            258,
            [64, 259, 258, 27, 85, 29, 65],
        ),
        ({"tokenizer_config": {"eos_token": "<new>"} | _declared(NEW, "<new>")}, 260, [64, 259, 258, 27, 85, 29, 65]),
    ],
)
def test_the_end_that_a_file_names_is_found_among_all_tokens(folder, files, end, ids):
    tokens = tokenizer.load_tokenizer(folder(**files))
    assert tokens.end == end and end in tokens.special_ids and tokens.vocab_size == max(end, PLAIN) + 1
    assert tokens.encode_prompt("a<|im_end|></s><v>b").tolist() == ids
    assert tokens.decode([64, end, 65], special=False) == b"ab"
    spelled = tokens.decode([end])
    assert end not in tokens.encode(spelled), "a special token that is spelled in a document is text"


def test_the_ends_of_the_model_beside_the_tokenizer(folder, caplog):
    named = {"eos_token": "</s>"}
    for config, ends in (
        ({"eos_token_id": [257, 258]}, (258, 257)),
        ({"eos_token_id": 259}, (258, 259)),
        ({"text_config": {"eos_token_id": 259}}, (258, 259)),
        ({"eos_token_id": None}, (258,)),
    ):
        assert chat.stop_ids(folder(tokenizer_config=named, config=config)) == ends
    both = folder(tokenizer_config=named, config={"eos_token_id": 259}, generation_config={"eos_token_id": 257})
    assert chat.stop_ids(both) == (258, 257), "transformers makes a generation config of config.json if there is none"
    for name in ("config", "generation_config"):
        unnamed = folder(**{name: {"eos_token_id": [259, 257]}})
        assert tokenizer.load_tokenizer(unnamed).end == 259 and chat.stop_ids(unnamed) == (259, 257)
    assert not caplog.records


def test_a_guess_is_said_once(folder, caplog):
    with caplog.at_level(logging.WARNING):
        assert [tokenizer.load_tokenizer(folder()).end for _ in range(2)] == [258, 258]
    (record,) = caplog.records
    assert "no file beside it names the eos_token; </s> is taken for it" in record.message


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer_config": {"eos_token": "<none>"}}, "name <none> as the eos_token, and it has no such token"),
        ({"special_tokens_map": {"eos_token": {"content": "<none>"}}}, "name <none> as the eos_token"),
        (
            {"config": {"eos_token_id": 2_000}},
            "config.json: eos_token_id=2000, and .*tokenizer.json has no such",
        ),
        ({"config": {"eos_token_id": "</s>"}}, "config.json: eos_token_id=</s> are not ids"),
        ({"tokenizer_config": _declared(300, "<new>")}, "<new> is token 300, and tokenizer.json has it as 260"),
        ({"tokenizer_config": _declared("x", "<new>")}, "added_tokens_decoder: x is no token"),
        ({"tokenizer_config": {"added_tokens_decoder": {"260": "<new>"}}}, "added_tokens_decoder: 260 is no token"),
    ],
)
def test_a_name_that_is_not_found_is_refused(folder, files, message):
    with pytest.raises(InputError, match=rf"{message}.*\n  fix "):
        tokenizer.load_tokenizer(folder(**files))


def test_other_names_are_found_or_refused_where_they_are_used(folder):
    named = {"eos_token": "</s>", "mask_token": "<none>", "bos_token": "<none>", "pad_token": "<none>"}
    tokens = tokenizer.load_tokenizer(folder(tokenizer_config=named))
    with pytest.raises(InputError, match=r"name <none> as the mask_token"):
        _ = tokens.mask
    assert tokenizer.load_tokenizer(folder(tokenizer_config=named | {"mask_token": "<v>"})).mask == 256
    chat.Chat(folder(tokenizer_config=named | {"chat_template": CHATML}))  # it writes none of these
    with pytest.raises(InputError, match=r"name <none> as the bos_token"):
        chat.Chat(folder(tokenizer_config=named | {"chat_template": "{{ bos_token }}"}))
    of_map = folder(tokenizer_config={"chat_template": "{{ bos_token }}"}, special_tokens_map={"bos_token": "<v>"})
    assert chat.Chat(of_map).render(turns("Hi")) == "<v>"


def test_what_the_files_say_is_part_of_the_fingerprint(folder):
    named = [{}, {"eos_token": "</s>"}, {"eos_token": "<|im_end|>"}, {"eos_token": "</s>", "pad_token": "<v>"}]
    prints = [tokenizer.load_tokenizer(folder(tokenizer_config=one)).fingerprint for one in named]
    assert prints[0] == prints[1] and len({*prints}) == 3
