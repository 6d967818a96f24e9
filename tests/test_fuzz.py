"""Random configs, --set values and rules files: each is read as YAML 1.2 has it, or refused with a message, and soon.

A hundred of each by default, but 25 rules files. Two thousand of each with `pytest -m slow tests/test_fuzz.py`.
"""

import datetime
import functools
import math
import operator
import re
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML

from gspmd_lm import config as configs
from gspmd_lm.config import core_yaml
from gspmd_lm.errors import InputError
from gspmd_lm.sharding import rules_file
from gspmd_lm.sharding.axes import ARRAYS, AXES
from gspmd_lm.train import state

ROOT = Path(__file__).parent.parent
LONGEST_S = 5.0  # of processor time, for one example
LONGEST_MESSAGE = 20_000

FEW = settings(max_examples=100, derandomize=True, deadline=None, database=None)
FEWER = settings(FEW, max_examples=25)  # the model is traced under each layout that is read
MANY = settings(
    max_examples=500, deadline=None, database=None, suppress_health_check=list(HealthCheck), print_blob=True
)

NASTY = [
    *"[]{},:#'\"|>%@`~=*&!", "- ", "? ", "&a", "*a", "!!int", "!!set", "!x", "\\ud800", "<<", "null", "yes", "no", "on",
    "true", "0", "-1", "010", "1_0", "1:30", "1e-4", "1e999", ".nan", ".inf", "0x" + "f" * 40, "9" * 30, "2024-01-01",
    "\n", "\n  ", "\t", "---\n", "...\n", "a", "batch", "data", "tensor", "8", "null, ", "[" * 40, "{a: " * 40,
    "\u00e9", "\u2028", "\x85", "\x00",
]  # fmt: skip
WORDS = st.one_of(
    st.sampled_from(
        [*AXES, *ARRAYS, "data", "fsdp", "tensor", "mesh", "rules", "weights", "remat", "save", "cpu", "x", ""]
    ),
    st.text(max_size=8),
)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**62), 2**62) | st.floats() | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=4),
    max_leaves=12,
)


@st.composite
def mutated(draw, folder):
    """A shipped file of `folder` with some places cut out, doubled, or with something nasty put in."""
    text = draw(st.sampled_from(sorted((ROOT / folder).glob("*.yaml")))).read_text()
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(text)))
        length = draw(st.integers(0, 12))
        new = draw(st.sampled_from(NASTY) | st.just(text[at : at + length] * 2))
        text = text[:at] + new + text[at + length :]
    return text


def bounded(function, *arguments):
    """What the function returns, or the InputError that it raises, within LONGEST_S."""
    began = time.process_time()
    try:
        found = function(*arguments)
    except InputError as error:
        found = error
        assert str(error) and len(str(error)) < LONGEST_MESSAGE
    assert time.process_time() - began < LONGEST_S
    return found


def means_the_same(text, read, *more):
    """Reads a text, and compares what it means with what ruamel.yaml reads by YAML 1.2, where both read it."""
    found = bounded(read, text, *more)
    if isinstance(found, InputError):
        return None
    if re.search(r":[\]},]", text):  # by YAML 1.2 a key without a value, {a:}; ruamel.yaml reads it as the key 'a:'
        return found
    try:
        reference = list(YAML(typ="safe", pure=True).load_all(text))
    except Exception:  # it has its own limits, and raises whatever comes
        return found
    assert same(found, reference[0] if reference else None), (found, reference)
    return found


def same(a, b):
    if isinstance(b, datetime.date):  # a date is text here
        return isinstance(a, str)
    if isinstance(a, float) and isinstance(b, float) and math.isnan(a):
        return math.isnan(b)
    if isinstance(a, dict) and isinstance(b, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz") / "file.yaml"


@pytest.fixture(scope="module")
def config(small):
    return small(layers=1)


def check_rules(file, config, text):
    means_the_same(text, core_yaml.parse, "here")
    file.write_text(text, encoding="utf-8", errors="surrogatepass")
    layout = bounded(rules_file.load, str(file))
    if not isinstance(layout, InputError):
        bounded(lambda: state.arrays_and_warnings(config, layout.fill(8), "cpu"))


def check_config(file, text):
    means_the_same(text, core_yaml.parse, "here")
    file.write_text(text, encoding="utf-8", errors="surrogatepass")
    found = bounded(configs.load, str(file))
    if not isinstance(found, InputError):
        written = core_yaml.dump(configs.to_dict(found))
        assert configs.from_dict(core_yaml.load(written), "again") == found


def check_override(override):
    key, _, value = override.partition("=")
    raw = core_yaml.load((ROOT / "configs/tiny.yaml").read_text())

    def laid(value):
        configs.override(raw, [f"{key}={value}"], "tiny")
        return functools.reduce(operator.getitem, key.strip().split("."), raw)

    means_the_same(value, laid)
    bounded(configs.from_dict, raw, "tiny")


RULES = mutated("rules") | PLAIN.map(lambda value: core_yaml.dump(value)) | st.text(max_size=60)
CONFIGS = mutated("configs") | PLAIN.map(lambda value: core_yaml.dump(value)) | st.text(max_size=60)
KEYS = st.sampled_from([f"{section}.{field}" for section, fields in configs.to_dict(configs.load("tiny")).items()
                        if isinstance(fields, dict) for field in fields])  # fmt: skip
VALUES = st.sampled_from(NASTY) | st.text(max_size=12) | PLAIN.map(lambda value: core_yaml.dump(value, flow=True))
OVERRIDES = st.builds("{}={}".format, KEYS | WORDS, VALUES)


@FEWER
@given(text=RULES)
def test_rules_files(file, config, text):
    check_rules(file, config, text)


@pytest.mark.long
@FEW
@given(text=CONFIGS)
def test_configs(file, text):
    check_config(file, text)


@FEW
@given(override=OVERRIDES)
def test_overrides(override):
    check_override(override)


@pytest.mark.slow
@MANY
@given(text=RULES)
def test_many_rules_files(file, config, text):
    check_rules(file, config, text)


@pytest.mark.slow
@MANY
@given(text=CONFIGS)
def test_many_configs(file, text):
    check_config(file, text)


@pytest.mark.slow
@MANY
@given(override=OVERRIDES)
def test_many_overrides(override):
    check_override(override)
