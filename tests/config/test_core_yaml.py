"""YAML by its core schema: what is read means what YAML 1.2 says, and nothing else is read."""

import math

import pytest
from ruamel.yaml import YAML

from gspmd_lm.config import core_yaml

REFUSED = [
    ("a: 010", "line 1: 010 means one thing in YAML 1.1 and another in 1.2: write the number without a 0"),
    (
        "a:\n- 1:30",
        "line 2: 1:30 means one thing in YAML 1.1 and another in 1.2: write the number in decimal, or '1:30'",
    ),
    ("a: 1_0", "1_0 means one thing"),
    ("a: 1_0.5e3", "1_0.5e3 means one thing"),
    ("a: 0b11", "0b11 means one thing"),
    ("a: yes", "line 1: yes means one thing in YAML 1.1 and another in 1.2: write true, or 'yes'"),
    ("a: Off", "write false, or 'Off'"),
    ("<<: {a: 1}", "line 1: << means"),
    ("a: &x 1", "line 1: anchors and aliases are not supported"),
    ("a: *x", "anchors and aliases"),
    ("a: [b,\n *.txt]", "line 2: put quotes around a word that begins with *"),
    ("a: &a [*a]", "anchors and aliases"),
    ("a: !!int ''", "line 1: tags are not supported: drop tag:yaml.org,2002:int"),
    ("a: !!set {b}", "tags are not supported"),
    ("a: !mine 3", "drop !mine"),
    ("a: ! b", "drop !"),
    ("%YAML 1.1\n---\na: 1", "directives"),
    ("%TAG ! tag:x,2000:\n---\na: 1", "directives"),
    ("a: 1\n---\nb: 2", "a second document"),
    ("a: " + "[" * 33 + "]" * 33, "line 1: more than 32 levels"),
    ("a: " + "[" * 100_000, "line 1: more than 32 levels"),
    ("1: a", "line 1: a key must be a word, not 1"),
    ("? [a]\n: 1", "line 1: a key must be a word, not ['a']"),
    ("a: {b:4, c: 5}", "line 1: b:4 is one word: write b: 4 for a key and its value"),
    ("a: 1\nb: 2\na: 3", "line 3: the key 'a' appears twice"),
    ("a: 0x" + "f" * 4000, "does not fit 64 bits"),
    ("a: " + "9" * 5000, "does not fit 64 bits"),
    ("a: 1e999", "1e999 is beyond"),
    ('a: "\\ud800"', "half of a character"),
    ('a: "\\UFFFFFFFF"', "an escape that stands for no character"),
    ("a: [1", "while parsing a flow sequence"),
    ("a: \x00", "special characters are not allowed"),
]


@pytest.mark.parametrize(("text", "message"), REFUSED, ids=range(len(REFUSED)))
def test_refused(text, message):
    with pytest.raises(core_yaml.YamlError) as error:
        core_yaml.load(text)
    assert message in str(error.value) and len(str(error.value)) < 300


WORDS = {
    "1e-4": 1e-4, "3E5": 3e5, "1.5e3": 1500.0, ".5": 0.5, "5.": 5.0, "-0.0": -0.0, "+12": 12, "0": 0, "0x1F": 31,
    "0o17": 15, "-.inf": -math.inf, "~": None, "": None, "Null": None, "TRUE": True, "false": False, "y": "y", "n": "n",
    "2024-01-01": "2024-01-01", "a_b": "a_b", "1a": "1a", "e4": "e4", "0x": "0x", "1:75": "1:75", "tRue": "tRue",
}  # fmt: skip


@pytest.mark.parametrize("word", WORDS)
def test_words_mean_what_version_1_2_says(word):
    found = core_yaml.load(f"a: {word}")["a"]
    assert found == WORDS[word] and type(found) is type(WORDS[word])
    reference = YAML(typ="safe", pure=True).load(f"a: {word}")["a"]
    assert word == "2024-01-01" or (found == reference and type(found) is type(reference))  # a date is text here


@pytest.mark.parametrize(
    "value",
    [
        *WORDS, "010", "1:30", "yes", "1_0", "<<", "=", "null", " a", "a: b", "- a", "a\nb", "#", "\u00e9", "'", '"',
        "\t", 1e-5, 1e22, -0.0, math.inf, 2**62, True, None, [], {}, [[], {"a": [1, {"b": None}]}],
    ],
)  # fmt: skip
def test_what_is_written_is_read_again(value):
    for flow in (False, True):
        found = core_yaml.load(core_yaml.dump({"a": value, "b": [value]}, flow=flow))
        assert found == {"a": value, "b": [value]} and type(found["a"]) is type(value)


def test_an_empty_document_is_nothing():
    assert core_yaml.load("") is None
    assert core_yaml.load("# only a comment\n") is None
