"""Files of prompts and of results."""

import io
import json

import pytest

from gspmd_lm.data.tokenizer import Bytes
from gspmd_lm.errors import InputError
from gspmd_lm.infer import lines
from gspmd_lm.infer.generate import Result, TextChunk


@pytest.fixture
def file(tmp_path):
    def write(*rows):
        path = tmp_path / "prompts.jsonl"
        path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
        return path

    return write


def test_prompts_and_messages_become_tokens(file):
    path = file({"prompt": "hé", "id": 7}, "", {"messages": [{"role": "user", "content": "Hi"}]})
    found = lines.read_prompts(path, Bytes(), lambda line: [ord(c) for c in line["messages"][0]["content"]])
    assert [line.tokens for line in found] == [[*"hé".encode()], [72, 105]]
    assert [line.place for line in found] == [f"{path}:1", f"{path}:3"]
    assert found[0].fields == {"prompt": "hé", "id": 7}


def test_the_mark_that_windows_writes_is_no_part_of_a_file(file):
    path = file({"prompt": "hi"})
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert [line.tokens for line in lines.read_prompts(path, Bytes())] == [[*b"hi"]]


def test_a_prompt_can_be_a_message_too(file):
    path = file({"prompt": "hi", "tools": [1]})
    (found,) = lines.read_prompts(path, Bytes(), lambda line: [len(line["messages"]), *line["tools"]], chat=True)
    assert found.tokens == [1, 1] and found.fields == {"prompt": "hi", "tools": [1]}


def test_wrong_lines_are_all_named(file):
    def render(line):
        raise InputError("messages is empty")

    path = file(
        {"prompt": "fine"}, "{no json", "[1]", {"text": "x"}, {"prompt": 3}, {"prompt": ""},
        {"prompt": "x", "messages": []}, {"messages": []}, '{"prompt": "x", "id": "\\ud800"}', "[" * 100_000,
        '{"prompt": "x", "id": ' + "[" * 600 + "]" * 600 + "}", "9" * 5000,
    )  # fmt: skip
    with pytest.raises(InputError) as caught:
        lines.read_prompts(path, Bytes(), render)
    found = [line.removeprefix(f"{path}:") for line in str(caught.value).split("\n")]
    assert found[0].startswith("2: not valid JSON: ")
    assert found[-2].startswith("12: not valid JSON: ")
    assert found[1:-2] == [
        "3: a list, not a JSON object", "4: prompt is missing", "5: prompt is not text", "6: prompt is empty",
        "7: both prompt and messages", "8: messages is empty",
        "9: half a character (\\ud800 to \\udfff without its other half)",
        "10: lists or objects within each other, over 500 levels deep",
        "11: lists or objects within each other, over 500 levels deep",
    ]  # fmt: skip
    assert found[-1].startswith("  fix   write one object such as")
    with pytest.raises(InputError, match=r"1: messages, but data\.tokenizer has no chat template"):
        lines.read_prompts(file({"messages": []}), Bytes())
    with pytest.raises(InputError, match="no lines"):
        lines.read_prompts(file(""), Bytes())
    with pytest.raises(InputError, match="and 5 more"):
        lines.read_prompts(file(*["x"] * 25), Bytes())


def test_results_are_written_in_order_as_soon_as_they_are_there(file):
    found = lines.read_prompts(file({"prompt": "a", "id": 1}, {"prompt": "b", "text": "old"}), Bytes())
    out, seen = io.StringIO(), []

    def pieces():
        yield TextChunk(1, "B", Result("B", [66], "end", 1.0))
        seen.append(out.getvalue())
        yield TextChunk(0, "A")
        yield TextChunk(0, "é", Result("Aé", [65, 195, 169], "length", 1.0))
        seen.append(out.getvalue())

    lines.write_results(found, pieces(), out)
    assert seen[0] == "" and seen[1] == out.getvalue()
    assert [json.loads(line) for line in out.getvalue().splitlines()] == [
        {"prompt": "a", "id": 1, "text": "Aé", "finish_reason": "length", "tokens": 3},
        {"prompt": "b", "text": "B", "finish_reason": "end", "tokens": 1},
    ]
