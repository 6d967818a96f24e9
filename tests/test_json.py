"""JSON that others wrote: whatever it is, the only error names its place. One file of the package reads all of it."""

import ast
from pathlib import Path

import pytest

from gspmd_lm import files
from gspmd_lm.errors import InputError
from gspmd_lm.files import DEEPEST_JSON, has_half_characters, json_object, json_value

PACKAGE = Path(files.__file__).parent
# Where JSON is read that no other program wrote: messages between processes, copies in memory, what the compiler said
# in a folder that is sealed, and cells of text that are documents of this run.
OF_OURS = {
    "files.py", "runtime/processes.py", "workdir/compatible.py", "data/chat.py", "data/labelled.py",
    "data/pairs.py", "foresight/compile.py", "foresight/report.py", "foresight/hlo/instruction.py",
    "explore/jobs.py", "explore/worker.py", "plan/row_changes.py", "runtime/watchdog.py",
}  # fmt: skip


def test_values():
    assert json_value('[1, {"a": NaN}]', "x")[0] == 1
    assert json_object('{"a": "é"}'.encode(), "x") == {"a": "é"}
    deep = "[" * DEEPEST_JSON + "]" * DEEPEST_JSON
    assert json_value(deep, "x") and json_value(f'["{"[" * 9999}"]', "x")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not valid JSON: Expecting value: line 1 column 1"),
        ('{"a":\n 1;}', "not valid JSON: Expecting ',' delimiter: line 2"),
        ("9" * 5000, "not valid JSON: Exceeds the limit"),
        (b"\xff", "not UTF-8 text (invalid start byte at byte 0)"),
        ("[" * 501 + "]" * 501, "lists or objects within each other, over 500 levels deep"),
        ("[" * 100_000, "lists or objects within each other, over 500 levels deep"),
        ('{"a": ' * 100_000, "lists or objects within each other, over 500 levels deep"),
        ("[]", "a list, not a JSON object"),
        ("null", "null, not a JSON object"),
    ],
)
def test_what_is_wrong_is_one_kind_of_error(text, message):
    with pytest.raises(InputError) as error:
        json_object(text, "a/b.json", "remove it")
    assert str(error.value).startswith(f"a/b.json: {message}") and str(error.value).endswith("\n  fix   remove it")
    with pytest.raises(InputError) as error:
        json_object(text, "a/b.json")
    assert "\n" not in str(error.value)


def test_halves_of_characters():
    for text, halves in (('"\\ud83d\\ude00"', False), ('"\\ud83d"', True), ('{"\\udc00": 1}', True), ('"é"', False)):
        assert has_half_characters(text, json_value(text, "x")) is halves


def test_nothing_else_reads_the_json_of_others():
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and node.attr in ("load", "loads") and ast.unparse(node.value) == "json":
                found.add(path.relative_to(PACKAGE).as_posix())
    assert found == OF_OURS
