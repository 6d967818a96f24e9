"""JSON that two readers could understand differently."""

from pathlib import Path

import pytest

from gspmd_lm.convert import strict_json
from gspmd_lm.errors import InputError


def test_what_is_plain_is_read():
    text = '{"a": [1, -2, 0, 2.5, -0.0, 1e3, true, null, "\\ud83d\\ude00", "é"], "b": {"a": {}}}'
    found = strict_json.parse_object(text, Path("x"))
    assert found == {"a": [1, -2, 0, 2.5, 0.0, 1000.0, True, None, "😀", "é"], "b": {"a": {}}}
    deepest = "[" * (strict_json.DEEPEST - 2) + "]" * (strict_json.DEEPEST - 2)
    assert strict_json.parse_object(f'{{"a": {deepest}}}', Path("x"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1, "b": 2, "a": 1}', "not valid JSON: the key 'a' appears twice"),
        ('{"a": {"b": 1, "b": 2}}', "not valid JSON: the key 'b' appears twice"),
        ('{"a": NaN}', "not valid JSON: NaN is not a number of JSON"),
        ('{"a": -Infinity}', "not valid JSON: -Infinity is not a number of JSON"),
        ('{"a": 1e999}', "not valid JSON: 1e999 is too large for a float"),
        ('{"a": -0}', "not valid JSON: -0 is not a whole number"),
        (f'{{"a": {"9" * 5000}}}', "not valid JSON: a number of 5000 digits"),
        ('{"a": "\\ud83d"}', "not valid JSON: half of a character"),
        ('{"\\udc00": 1}', "not valid JSON: half of a character"),
        (f'{{"a": {"[" * 64}{"]" * 64}}}', "lists or objects within each other, over 64 levels deep"),
        ("[" * 100_000, "lists or objects within each other, over 64 levels deep"),
        ('{"a": 1} {}', "not valid JSON: Extra data"),
        ("[]", "not a JSON object but a list"),
        ("", "not valid JSON: Expecting value"),
    ],
)
def test_what_is_not_is_refused(text, message):
    with pytest.raises(InputError) as error:
        strict_json.parse_object(text, Path("a/b.json"))
    assert str(error.value).startswith(f"a/b.json: {message}")
    assert str(error.value).endswith("\n  fix   the file is damaged or incomplete: fetch it again")


def test_a_long_value_is_cut_in_messages():
    assert strict_json.show_value([1, "a"]) == "[1, 'a']"
    assert len(strict_json.show_value(["x" * 1000])) == 60
