import datetime
import json

import numpy as np
import pytest
from conversations import CHATML, GEMMA, MARKED, REWRITES, TEMPLATES, turns, write_tokenizer

from gspmd_lm.data import chat, packing
from gspmd_lm.errors import InputError


def _encode(talk, messages, **fields):
    """The ids, and the text of those that the assistant says."""
    (tokens,) = talk.encode_all([talk.document({"messages": messages} | fields, "a.jsonl:1", "messages")])
    ids = (tokens & ~(packing.TARGET | packing.LAST)).astype(int)
    assert (np.flatnonzero(tokens & packing.LAST) == [len(tokens) - 1]).all()
    return ids.tolist(), talk._tokenizer.decode(ids[(tokens & packing.TARGET) > 0]).decode()


@pytest.fixture
def talks(tmp_path):
    """Makes the Chat of a template."""

    def make(template):
        return chat.Chat(str(write_tokenizer(tmp_path / "tokenizer", template)))

    return make


# What transformers 5.23.0's apply_chat_template gives for said("Hi", "Yo") with this tokenizer.
# fmt: off
RECORDED = {
    "chatml": [258, 82, 88, 82, 83, 68, 76, 198, 56, 78, 84, 220, 71, 68, 75, 79, 13, 259, 198, 258, 84, 82, 68, 81,
               198, 39, 72, 259, 198, 258, 64, 82, 82, 72, 82, 83, 64, 77, 83, 198, 56, 78, 259, 198],
    "llama3": [256, 261, 84, 82, 68, 81, 262, 198, 198, 39, 72, 260, 261, 64, 82, 82, 72, 82, 83, 64, 77, 83, 262, 198,
               198, 56, 78, 260],
    "gemma": [256, 263, 84, 82, 68, 81, 198, 39, 72, 264, 198, 263, 76, 78, 67, 68, 75, 198, 56, 78, 264, 198],
    "marked": [258, 84, 82, 68, 81, 198, 39, 72, 259, 198, 258, 64, 82, 82, 72, 82, 83, 64, 77, 83, 198, 27, 83, 71, 72,
               77, 74, 29, 27, 14, 83, 71, 72, 77, 74, 29, 56, 78, 259, 198],
}
# fmt: on
ENDS = {"chatml": "<|im_end|>", "llama3": "<|eot|>", "gemma": "<end_of_turn>", "marked": "<|im_end|>"}


@pytest.mark.parametrize("name", TEMPLATES)
def test_ids_and_the_assistants_share_are_those_of_transformers(talks, name):
    talk, end = talks(TEMPLATES[name]), ENDS[name]
    think = "<think></think>" if name == "marked" else ""
    ids, answer = _encode(talk, turns("Hi", "Yo"))
    assert ids == RECORDED[name] and answer == f"{think}Yo{end}"
    prompt = RECORDED[name][: -(len(think) + len("Yo") + (1 if name == "llama3" else 2))]
    assert talk.prompt(turns("Hi")).tolist() == prompt and talk.prompt(turns("Hi")).dtype == np.int32
    assert _encode(talk, turns("Hi", "Yo", "é 😀", "one  two"))[1] == f"Yo{end}{think}one  two{end}"


def test_spaces_at_the_start_of_an_answer_are_the_assistants(talks):
    """They have no width in the offsets of a byte-level tokenizer."""
    for template, think in ((CHATML, ""), (MARKED, "<think></think>")):
        _, answer = _encode(talks(template), turns(" a ", "  b \n", "  c", "   "))
        assert answer == f"  b \n<|im_end|>{think}   <|im_end|>"


def test_tools_and_what_else_the_template_reads(talks):
    talk = talks(CHATML)
    calls = [{"function": {"name": "f", "arguments": {"x": "<é>"}}}]
    called = {"role": "assistant", "content": None, "tool_calls": calls}
    messages = [*turns("Hi"), called, {"role": "tool", "content": "7"}, {"role": "assistant", "content": "Seven"}]
    tools = [{"name": "f", "text": "'&<é>"}]
    _, answer = _encode(talk, messages, tools=tools, id=3)
    assert answer == '<tool_call>{"name": "f", "arguments": {"x": "<é>"}}</tool_call><|im_end|>Seven<|im_end|>'
    assert """# Tools\n{"name": "f", "text": "'&<é>"}<|im_end|>""" in talk.render(messages, tools=tools)
    documents = [
        talk.document({"messages": messages} | more, "", "messages") for more in ({}, {"id": 1}, {"tools": tools})
    ]
    assert documents[0] == documents[1] != documents[2], "equal conversations must stay on one side of the split"


def test_a_template_that_rewrites_earlier_turns(talks):
    talk = talks(REWRITES)
    with pytest.raises(
        InputError, match=r"^a.jsonl:1: the chat template .* writes message 2 differently .*\n  fix .*% gen"
    ):
        _encode(talk, turns("Hi", "Yo", "more", "end"))
    assert _encode(talk, turns("Hi", "Yo"))[1] == "<think></think>Yo<|im_end|>"


def test_an_end_is_added_only_where_the_template_writes_none(talks):
    plain = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    plain += "{% if add_generation_prompt %}assistant: {% endif %}"
    ids, answer = _encode(talks(plain), turns("Hi", "Yo", "and", "so"))
    assert ids[-1] == 257 and 257 not in ids[:-1] and answer == "Yo\nso\n</s>"
    unmarked_end = (
        "{{ messages[0].content }}{% generation %}{{ messages[1].content }}{% endgeneration %}{{ eos_token }}"
    )
    ids, answer = _encode(talks(unmarked_end), turns("Hi", "Yo"))
    assert ids.count(257) == 1 and answer == "Yo"


def test_the_first_token_is_no_target(talks):
    first = [{"role": "assistant", "content": "Yo"}, *turns("Hi")]
    bare = "{% for m in messages %}{{ m.content + eos_token }}{% endfor %}"
    assert _encode(talks(bare), first)[1] == "o</s>"


def test_training_data_does_not_depend_on_the_day(talks):
    dated = "{{ strftime_now('%Y-%m-%d') }}{% for m in messages %}{{ m.content + eos_token }}{% endfor %}"
    talk = talks(dated)
    assert bytes(talk.document({"messages": turns("Hi", "Yo")}, "", "messages")).startswith(b'["2025-01-01')
    assert talk.render(turns("Hi"))[:4] == str(datetime.datetime.now().year)


def test_what_is_no_character_is_replaced_and_counted(talks):
    talk = talks(CHATML)
    assert _encode(talk, turns("Hi", "a\udcffb\ud83d"))[1] == "a\ufffdb\ufffd<|im_end|>" and talk.replaced_bytes == 2


def test_where_a_template_may_stand(tmp_path, talks):
    def text(talk, **fields):
        return talk.render(turns("Hi"), **fields)

    named = [{"name": "default", "template": "one"}, {"name": "tool_use", "template": "tools"}]
    talk = talks(named)
    assert (text(talk), text(talk, tools=[{}]), text(talk, tools=None)) == ("one", "tools", "one")
    (tmp_path / "tokenizer" / "chat_template.jinja").write_text("file")
    again = talks(named)
    assert text(again) == "file" and again.fingerprint != talk.fingerprint
    (tmp_path / "tokenizer" / "additional_chat_templates").mkdir()
    (tmp_path / "tokenizer" / "additional_chat_templates" / "tool_use.jinja").write_text("more")
    assert text(talks("one"), tools=[{}]) == "more"


def test_ids_that_end_a_turn(tmp_path):
    folder = write_tokenizer(tmp_path, None)
    assert chat.stop_ids(str(folder)) == (257,) and chat.stop_ids("bytes") == (256,)
    for named, found in ((264, (257, 264)), ([260, 257, 259], (257, 260, 259)), (None, (257,))):
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": named}))
        assert chat.stop_ids(str(folder)) == found
    for wrong, message in (
        ('{"eos_token_id": ["</s>"]}', "are not ids"),
        ("[]", "a list, not"),
        ("{", "not valid JSON"),
    ):
        (folder / "generation_config.json").write_text(wrong)
        with pytest.raises(InputError, match=rf"generation_config.json: .*{message}.*\n  fix "):
            chat.stop_ids(str(folder))


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, r"tokenizer: no chat template: .*\n  fix   write the one .*chat_template\.jinja,\n"),
        ([{"name": "rag", "template": "x"}], r"no chat template named default \(there are rag\)"),
        ([{"name": "default"}], r"tokenizer_config\.json: chat_template is neither text nor a list .*\n  fix "),
        ("one\n{% if %}", r"tokenizer_config\.json: line 2 of the chat template: .*\n  fix "),
        ("{% generation %}", r"line 1 of the chat template: .*endgeneration"),
        (
            "{{ " + "(" * 2000 + "1" + ")" * 2000 + " }}",
            r"tokenizer_config\.json: the chat template is nested too deeply",
        ),
        ("{% for a in b %}" * 50 + "{% endfor %}" * 50, r"the chat template is nested too deeply\n  fix "),
    ],
)
def test_templates_that_cannot_be_used(talks, template, message):
    with pytest.raises(InputError, match=message):
        talks(template)


def test_bytes_have_no_template():
    with pytest.raises(InputError, match=r"data\.tokenizer=bytes has no chat template.*\n  fix   set data\.tokenizer"):
        chat.Chat("bytes")


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (
            {"message": turns("a", "b")},
            r"no field messages \(did you mean message\?\)\n  fix   set data.messages_field to",
        ),
        ({"messages": "Hi"}, r"messages is a str\n  fix   give a list of objects"),
        ({"messages": []}, r"messages is empty\n  fix "),
        (
            {"messages": ["Hi", {"from": "human", "value": "Hi"}]},
            r"message 1 is a str\n  message 2 has no role \(fields: from",
        ),
        (
            {"messages": [{"role": "user", "text": "Hi"}]},
            r"message 1 has neither content nor tool_calls \(fields: role, text",
        ),
        ({"messages": [{"role": "user", "content": 3}]}, r"message 1 has a int as its content\n  fix "),
        ({"messages": turns("Hi")}, r"messages has no message of the role assistant \(roles: user\).*\n  fix "),
        (
            {"messages": turns("a", "b")[::-1]},
            r"the chat template of .*refuses the messages: Roles must alternate.*\n  fix ",
        ),
    ],
)
def test_records_that_cannot_be_used(talks, record, message):
    with pytest.raises(InputError, match=rf"^a\.jsonl:7: (messages: )?{message}"):
        talks(GEMMA).document(record, "a.jsonl:7", "messages")


def test_templates_that_show_no_answer(talks):
    with pytest.raises(InputError, match=r"^a:1: the chat template .* writes nothing for the assistant\n  fix "):
        talks("Hi{% generation %}{% endgeneration %}").document({"messages": turns("a", "b")}, "a:1", "messages")
    nested = "{% generation %}a{% generation %}b{% endgeneration %}{% endgeneration %}"
    with pytest.raises(InputError, match=r"^a:1: .*within another.*\n  fix "):
        talks(nested).document({"messages": turns("a", "b")}, "a:1", "messages")


def test_a_template_cannot_reach_beyond_its_messages(talks):
    talk = talks("{{ messages.append(1) }}{{ ''.__class__.__mro__ }}")
    with pytest.raises(InputError, match="refuses the messages"):
        talk.render(turns("Hi"))
