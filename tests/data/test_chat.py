import datetime
import json
import logging
import signal

import numpy as np
import pytest
from conversations import CHATML, ENDED, GEMMA, MARKED, REWRITES, TEMPLATES, THINKING, turns, write_tokenizer

from gspmd_lm.data import chat, chat_template, packing
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


def _parts(talk, messages, **fields):
    """The text of each part of a conversation, and what is learnt of it."""
    (tokens,) = talk.encode_all([talk.document({"messages": messages} | fields, "a.jsonl:1", "messages")])
    parts = np.split(tokens, 1 + np.flatnonzero(tokens & packing.LAST))[:-1]
    ids = [(part & ~(packing.TARGET | packing.LAST)).astype(int) for part in parts]
    spell = talk._tokenizer.decode
    return [(spell(one).decode(), spell(one[(part & packing.TARGET) > 0]).decode())
            for one, part in zip(ids, parts, strict=True)]  # fmt: skip


@pytest.mark.parametrize("ends", [[262, 257], None])
def test_what_follows_the_last_turn_alone_leaves_a_dialogue_whole(talks, tmp_path, ends):
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    ((text, learnt),) = _parts(talks(ENDED), turns("Hi", "Yo", "more", "end"))
    assert text.count("</s>") == 1 and text.endswith("end<|end|>\n</s>")
    # The model stops at <|end|> if a file says so; else at </s> alone, to which it then has to come.
    assert learnt == ("Yo<|end|>end<|end|>" if ends else "Yo<|end|>end<|end|>\n</s>")


def test_an_answer_that_is_written_otherwise_when_others_follow_is_learnt_as_it_is_asked_for(talks):
    start, think = "<|im_start|>assistant\n", "<think>\n\n</think>\n\n"
    one, two = "<|im_start|>user\nHi<|im_end|>\n" + start, "Yo<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n" + start
    talk = talks(THINKING)
    dialogue = turns("Hi", "Yo", "more", "end")
    assert _parts(talk, dialogue) == [
        (f"{one}{think}Yo<|im_end|>\n", f"{think}Yo<|im_end|>"),
        (f"{one}{two}{think}end<|im_end|>\n", f"{think}end<|im_end|>"),
    ]
    for text, learnt in _parts(talk, dialogue):  # each is what the model writes after the prompt of generate
        asked = text[: text.index(learnt)]
        assert asked in (talk.render(dialogue[:1], True), talk.render(dialogue[:3], True))
    dialogue[1]["reasoning_content"] = "why"
    assert [learnt for _, learnt in _parts(talk, dialogue)] == [
        "<think>\nwhy\n</think>\n\nYo<|im_end|>", f"{think}end<|im_end|>"]  # fmt: skip
    assert [learnt for _, learnt in _parts(talks(REWRITES), turns("Hi", "Yo", "more", "end"))] == [
        "<think></think>Yo<|im_end|>", "<think></think>end<|im_end|>"]  # fmt: skip
    begins = THINKING.replace("assistant\\n' }}{%- endif %}", "assistant\\n<think>\\n\\n' }}{%- endif %}")
    assert _parts(talks(begins), turns("Hi", "Yo"))[0][1] == "</think>\n\nYo<|im_end|>"
    other = begins.replace("assistant\\n<think>", "model\\n<think>")
    with pytest.raises(InputError, match=r"^a.jsonl:1: .* the beginning of message 2 differently when it is asked for"):
        _parts(talks(other), turns("Hi", "Yo"))


def test_answers_that_are_not_to_be_learnt(talks):
    end = "<|im_end|>"
    for template, think in ((CHATML, ""), (MARKED, "<think></think>")):
        talk = talks(template)
        for flags, learnt in (
            (({"weight": 0}, {}), f"{think}so{end}"),
            (({"weight": 1}, {"weight": 0.0}), f"Yo{end}"),
            (({"train": False}, {"train": True}), f"{think}so{end}"),
            (({"training": False, "weight": None}, {"train": None}), f"{think}so{end}"),
        ):
            dialogue = turns("Hi", "Yo", "and", "so")
            dialogue[1] |= flags[0]
            dialogue[3] |= flags[1]
            dialogue[0]["weight"] = 0  # nothing of the user is learnt anyway
            ((text, found),) = _parts(talk, dialogue)
            assert found == learnt and "Yo" in text and "so" in text, flags
    for flags, message in (
        ({"weight": 0.5}, "message 2 has weight=0.5: a message is learnt or not"),
        ({"train": "no"}, "message 2 has train='no': a message is learnt or not"),
        ({"weight": 1, "train": False}, "message 2 has weight=1, train=False, which say both"),
        ({"weight": 0}, r"writes nothing for the assistant that is learnt \(weight, train, training leave all"),
    ):
        with pytest.raises(InputError, match=rf"^a.jsonl:1: .*{message}.*\n  fix "):
            _parts(talk, [*turns("Hi"), {"role": "assistant", "content": "Yo"} | flags])
    with pytest.raises(InputError, match=r"message 1 of the role user has train=True: only the assistant's"):
        _parts(talk, [{"role": "user", "content": "Hi", "train": True}, *turns("Hi", "Yo")[1:]])
    content = "{{- message.content + '<|im_end|>' }}"
    twice = talks(MARKED.replace(content, "{% endgeneration %}{% generation %}" + content))
    dialogue = turns("Hi", "Yo", "and", "so")
    dialogue[1]["weight"] = 0
    with pytest.raises(InputError, match=r"marks 4 texts of 2 answers, so that those .*cannot be told"):
        _parts(twice, dialogue)


def test_lists_as_json_text_are_lists(talks):
    talk, tools = talks(CHATML), [{"name": "f", "text": "é"}]
    calls = [{"function": {"name": "f"}}]
    messages = [*turns("Hi"), {"role": "assistant", "content": "", "tool_calls": calls}]
    written = [messages[0], messages[1] | {"tool_calls": json.dumps(calls)}]
    record = {"messages": messages, "tools": tools}
    for other in (
        {"messages": messages, "tools": json.dumps(tools)},
        {"messages": json.dumps(messages), "tools": json.dumps(tools)},
        {"messages": written, "tools": tools, "documents": "", "chat_template_kwargs": {}},
        {"messages": messages, "chat_template_kwargs": {"tools": json.dumps(tools)}},
    ):
        assert talk.document(other, "", "messages") == talk.document(record, "", "messages")
        assert talk.prompt_of(other).tolist() == talk.prompt_of(record).tolist()
    for wrong, message in (
        ({"tools": "f"}, "tools is text"),
        ({"tools": "[f]"}, "tools, which begins as a list in JSON: not valid JSON"),
        ({"tools": ["f"]}, "tools is a list with 'f'"),
        ({"tools": {"name": "f"}}, "tools is an object"),
        ({"documents": [{"text": "a"}]}, "documents would be lost: the chat template does not read this field"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "enable_thinking would be lost: the chat template"),
        ({"chat_template_kwargs": "no"}, "chat_template_kwargs is text"),
        ({"messages": "[1"}, "messages, which begins as a list in JSON: not valid JSON"),
    ):
        with pytest.raises(InputError, match=rf"{message}.*\n  fix "):
            talk.document(record | wrong, "", "messages")
        with pytest.raises(InputError, match=rf"{message}.*\n  fix "):
            talk.prompt_of(record | wrong)


def test_fields_that_nothing_reads(talks, caplog):
    talk = talks(CHATML)
    extra = [{"role": "user", "content": "Hi", "weigth": 0}, {"role": "assistant", "content": "Yo", "because": "why"}]
    for use in (lambda: talk.document({"messages": extra}, "a:1", "messages"), lambda: talk.prompt(extra)):
        with pytest.raises(
            InputError,
            match=r"messages: message 1 has weigth \(did you mean weight\?\)\n  message 2 has "
            r"because\n  the chat template reads no such field.*\n  fix   take weigth, because out",
        ):
            use()
    harmless = [{"role": "user", "content": "Hi", "name": "me", "because": "", "extra": None}, *turns("", "Yo")[1:]]
    assert _parts(talk, harmless) == _parts(talk, turns("Hi", "Yo"))
    for template in ("{{ messages }}", "{% for m in messages %}{{ m | tojson }}{% endfor %}",
                     "{% set rest = messages[1:] %}{% for m in rest %}{{ m.items() | list }}{% endfor %}"):  # fmt: skip
        assert "why" in talks(template).render(extra), template
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            talk.document({"messages": turns("Hi", "Yo"), "id": 1, "source": "x"}, "a:1", "messages")
    assert [record.message for record in caplog.records] == ["a:1: nothing reads id, source"]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ 10 ** (10 ** 8) }}", "one text needs more than 0.3 s of a processor's time"),
        ("{{ 10 ** (messages | length * 10 ** 8) }}", "one text needs more than 0.3 s of a processor's time"),
        ("{{ 'x' | center(10 ** 9) }}", "it needs more than 512 MiB of memory"),
        ("{{ 'x' * messages | length * 10 ** 9 }}", "it needs more than 512 MiB of memory"),
        ("{% for i in range(99999) %}{% for i in range(99999) %}{% endfor %}{% endfor %}", "one text needs more than"),
    ],
)
def test_a_template_that_does_not_end_is_stopped(talks, monkeypatch, template, message):
    chat_template._renderer.stop()
    monkeypatch.setattr(chat_template.render_process, "LIMIT_S", 0.3)
    with pytest.raises(InputError, match=rf"the chat template.*{message}.*\n  fix "):
        talks(template).render(turns("Hi"))
    monkeypatch.undo()
    chat_template._renderer.stop()
    assert talks(CHATML).render(turns("Hi")), "the next template is rendered by a new process"


def test_an_interrupt_ends_a_rendering_and_its_process(talks):
    def interrupt(number, frame):
        raise KeyboardInterrupt

    talk = talks("{% for i in range(messages | length * 99999) %}{% for i in range(99999) %}{% endfor %}{% endfor %}")
    process = chat_template._renderer._process
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            talk.render(turns("Hi"))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert process and process.poll() == -signal.SIGKILL and talks(CHATML).render(turns("Hi"))


def test_an_end_is_added_only_where_the_template_writes_none(talks, caplog):
    plain = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    plain += "{% if add_generation_prompt %}assistant: {% endif %}"
    for written in ("so", "<s> so", "so <s>"):  # special tokens that the answer spells are no ends
        ids, answer = _encode(talks(plain), turns("Hi", "Yo", "and", written))
        assert ids[-1] == 257 and 257 not in ids[:-1] and answer == f"Yo\n{written}\n</s>"
    assert _encode(talks(plain), turns("Hi", "so</s>"))[0].count(257) == 1  # but the end is one
    unmarked_end = (
        "{{ messages[0].content }}{% generation %}{{ messages[1].content }}{% endgeneration %}{{ eos_token }}"
    )
    ids, answer = _encode(talks(unmarked_end), turns("Hi", "Yo"))
    assert ids.count(257) == 1 and answer == "Yo"
    assert "the end of a turn stands after {% endgeneration %}, and is not learnt" in caplog.text


def test_the_first_token_is_no_target(talks):
    first = [{"role": "assistant", "content": "Yo"}, *turns("Hi")]
    bare = "{% for m in messages %}{{ m.content + eos_token }}{% endfor %}"
    assert _encode(talks(bare), first)[1] == "o</s>"


def test_training_data_does_not_depend_on_the_day(talks):
    dated = "{{ strftime_now('%Y-%m-%d') }}{% for m in messages %}{{ m.content + eos_token }}{% endfor %}"
    talk = talks(dated)
    assert bytes(talk.document({"messages": turns("Hi", "Yo")}, "", "messages")).startswith(b'[["2025-01-01')
    assert talk.render(turns("Hi"))[:4] == str(datetime.datetime.now().year)


def test_what_is_no_character_is_replaced_and_counted(talks):
    talk = talks(CHATML)
    assert _encode(talk, turns("Hi", "a\udcffb\ud83d"))[1] == "a\ufffdb\ufffd<|im_end|>" and talk.replaced_bytes == 2


def test_where_a_template_may_stand(tmp_path, talks):
    def text(talk, **fields):
        return talk.render(turns("Hi"), **fields)

    named = [{"name": "default", "template": "one"}, {"name": "tool_use", "template": "tools{{ '' if tools }}"}]
    talk = talks(named)
    assert (text(talk), text(talk, tools=[{}]), text(talk, tools=None)) == ("one", "tools", "one")
    (tmp_path / "tokenizer" / "chat_template.jinja").write_text("file")
    again = talks(named)
    assert text(again) == "file" and again.fingerprint != talk.fingerprint
    (tmp_path / "tokenizer" / "additional_chat_templates").mkdir()
    (tmp_path / "tokenizer" / "additional_chat_templates" / "tool_use.jinja").write_text("more{{ '' if tools }}")
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
    words = r"=bytes has no chat template.*\n  fix   set data\.tokenizer(.|\n)*messages_field, or --chat$"
    with pytest.raises(InputError, match=words):
        chat.Chat("bytes")


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (
            {"message": turns("a", "b")},
            r"no field messages \(did you mean message\?\)\n  fix   set data.messages_field to",
        ),
        ({"messages": "Hi"}, r"messages is text\n  fix   give a list of objects"),
        ({"messages": []}, r"messages is empty\n  fix "),
        (
            {"messages": ["Hi", {"from": "human", "value": "Hi"}]},
            r"message 1 is text\n  message 2 has no role \(fields: from",
        ),
        (
            {"messages": [{"role": "user", "text": "Hi"}]},
            r"message 1 has neither content nor tool_calls \(fields: role, text",
        ),
        ({"messages": [{"role": "user", "content": 3}]}, r"message 1 has a number as its content\n  fix "),
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
