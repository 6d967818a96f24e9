"""Files that nobody meant: config.json, safetensors headers and index files at random, beside their reference readers.

The default run draws the same examples every time. `pytest -m slow` draws 500 new ones of each kind and prints the
seed of what fails; GSPMD_LM_FUZZ_SEED=... draws those again.
"""

import faulthandler
import functools
import json
import os
import random
import signal
import tempfile
from pathlib import Path

import hypothesis
import numpy as np
import pytest
import safetensors as reference
from hypothesis import strategies as st

from gspmd_lm.config import value_at
from gspmd_lm.convert import pretrained, safetensors
from gspmd_lm.convert.config_reader import ConfigReader
from gspmd_lm.convert.families import EVERY_FAMILY, FAMILIES, IRRELEVANT, REFUSED
from gspmd_lm.convert.fields import Renamed
from gspmd_lm.errors import InputError
from tests.convert import references

CPU_S = 5.0  # for one example; what takes longer hangs
MANY = pytest.param(500, marks=pytest.mark.slow, id="many")
# How many bits a number of each of the format's dtypes has.
BITS = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip
# What we refuse though the format's own reader (0.8.0) takes it: the format does not allow it, or it has two meanings.
STRICTER = (
    "appears twice", "does not begin with {", "entry of", "not an object", "a number of", "-0 is", "levels deep",
)  # fmt: skip
CASES = list({kind: case for case, (kind, _) in references.CASES.items()}.values())  # one of each family


def encoded(value):
    return written(value).encode("utf-8", "surrogatepass")


class Raw(str):
    """Text that stands in a file of JSON as it is."""


class Pairs(list):
    """The fields of an object, of which two may have one name."""


def written(value):
    """The JSON text of a value."""
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, dict | Pairs):
        pairs = value.items() if isinstance(value, dict) else value
        return "{" + ", ".join(f"{json.dumps(name)}: {written(held)}" for name, held in pairs) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(written, value)) + "]"
    return json.dumps(value)


SMALL = st.integers(-1, 9)
NUMBERS = st.one_of(
    SMALL,
    st.integers(),
    st.floats(),
    st.sampled_from([2**31, 2**53, 2**63, 2**64 - 8, 2**64, 2**70, 10**9, 10**300, 1e308, 5e-324]),
    st.sampled_from([Raw(text) for text in ("1e999", "-0", "01", "1e400000", "NaN", "-Infinity", "9" * 5000)]),
)
WORDS = st.one_of(
    st.sampled_from(["silu", "gelu", "default", "linear", "llama3", "yarn", "full_attention", "sliding_attention"]),
    st.text(max_size=8),
    st.characters(min_codepoint=0xD800, max_codepoint=0xDFFF),
    st.sampled_from(["", "\0", "..", "a" * 300, "../x", Raw('"\\ud83d\\ude00"'), Raw('"\\x"'), Raw("'a'")]),
)
DEEP = st.sampled_from([20, 70, 200, 5000, 100_000]).map(lambda deep: Raw("[" * deep + "]" * deep))
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | WORDS | DEEP,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS.map(str), inner, max_size=4),
    max_leaves=5,
)


@st.composite
def changed_pairs(draw, pairs, names):
    """Some fields set, taken away, renamed or given twice."""
    pairs = Pairs(pairs)
    for _ in range(draw(st.integers(1, 3))):
        how = draw(
            st.sampled_from([*["set"] * 4, "scaled", "scaled", "nested", "nested", "removed", "renamed", "twice"])
        )
        name, at = draw(st.sampled_from(names)), draw(st.integers(0, len(pairs) - 1)) if pairs else 0
        if how == "set" or not pairs:
            pairs = Pairs([*(pair for pair in pairs if pair[0] != name), (name, draw(VALUES))])
        elif how == "removed":
            pairs = Pairs(pairs[:at] + pairs[at + 1 :])
        elif how == "renamed":
            pairs[at] = name, pairs[at][1]
        elif how == "twice":
            pairs.insert(draw(st.integers(0, len(pairs))), (pairs[at][0], draw(st.just(pairs[at][1]) | VALUES)))
        elif how == "scaled" and isinstance(pairs[at][1], int | float):
            factor = draw(st.sampled_from([-1, 0, 0.5, 2, 3, 10**6, 2**70]))
            pairs[at] = pairs[at][0], pairs[at][1] * factor
        elif isinstance(pairs[at][1], dict):
            inside = list(pairs[at][1].items())
            pairs[at] = pairs[at][0], draw(changed_pairs(inside, [key for key, _ in inside] + names))
    return pairs


@st.composite
def changed_bytes(draw, data):
    """Some bytes cut off, added or others, or the beginning once more."""
    how = draw(st.sampled_from(["cut", "more", "other", "doubled"]))
    at = draw(st.integers(0, len(data)))
    if how == "cut":
        return data[:at]
    if how == "more":
        return data[:at] + draw(st.binary(min_size=1, max_size=9)) + data[at:]
    if how == "other":
        return data[:at] + draw(st.binary(min_size=1, max_size=3)) + data[at + 1 :]
    return data[:at] + data


def draws(check, strategy, examples):
    """Runs `check` on so many examples, none of which may take long: the same ones by default, else random ones."""
    many = examples == MANY.values[0]
    seed = int(os.environ.get("GSPMD_LM_FUZZ_SEED") or random.SystemRandom().getrandbits(32))

    def too_long(*_):
        raise TimeoutError(f"over {CPU_S} s of one processor")

    def timed(example):
        signal.setitimer(signal.ITIMER_VIRTUAL, CPU_S)
        try:
            check(example)
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)

    run = hypothesis.settings(
        max_examples=examples, deadline=None, derandomize=not many, database=None, report_multiple_bugs=False,
        suppress_health_check=list(hypothesis.HealthCheck),
    )(hypothesis.given(strategy)(timed))  # fmt: skip
    before = signal.signal(signal.SIGVTALRM, too_long)
    faulthandler.dump_traceback_later(120 if not many else 3600, exit=True)  # where the signal cannot interrupt
    try:
        (hypothesis.seed(seed)(run) if many else run)()
    except BaseException:
        print(f"GSPMD_LM_FUZZ_SEED={seed}")
        raise
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGVTALRM, before)


def plain(text):
    """What json reads, where no other reader could read something else."""

    def once(pairs):
        assert len(dict(pairs)) == len(pairs), "a key that stands twice"
        return dict(pairs)

    def number(digits):
        found = float(digits)
        assert np.isfinite(found), digits
        return found

    found = json.loads(text, object_pairs_hook=once, parse_float=number, parse_constant=number)
    json.dumps(found, ensure_ascii=False).encode()
    return found


@functools.cache
def folder_of(case):
    """A folder of a family with its weights, whose config.json is changed, and the original fields."""
    golden = references.load(case)
    folder = golden.folder(Path(tempfile.mkdtemp(prefix="gspmd_lm_fuzz_")))
    return folder, golden.about["config"]


def fields_of(case):
    """The names of fields that a family's config.json may have."""
    row = next(row for row in FAMILIES if row.model_type == references.CASES[case][0])
    reader, values = ConfigReader({}), {}
    for codec in (*row.codecs, *EVERY_FAMILY):
        codec.read(reader, values)
    return sorted(reader.names_read | REFUSED.keys() | set(row.irrelevant) | {"x", *sorted(IRRELEVANT)[::8]})


@st.composite
def configs(draw):
    case = draw(st.sampled_from(CASES))
    _, raw = folder_of(case)
    if draw(st.integers(0, 5)) == 0:
        return case, draw(changed_bytes(encoded(raw)))
    return case, encoded(draw(changed_pairs(raw.items(), fields_of(case))))


def check_config(example):
    """What is accepted is what json reads, and our settings are its values."""
    case, text = example
    folder, original = folder_of(case)
    (folder / "config.json").write_bytes(text)
    try:
        found = pretrained.open_folder(folder)
    except InputError as error:
        assert written(original).encode() != text, error
        return
    raw = plain(text)
    kept = {name: value for name, value in raw.items() if name not in ("dtype", "torch_dtype")}
    assert dict(found.like) == kept | {"torch_dtype": "float32"}
    # Of fields for one setting, as of the layers of an encoder and of its decoder, the later ones count.
    values = {codec.setting: [raw[name] for name in codec.names.split() if raw.get(name) is not None]
              for codec in found.family.codecs if isinstance(codec, Renamed)
              and any(raw.get(name) is not None for name in codec.names.split())}  # fmt: skip
    for setting, given in values.items():
        assert all(value_at(found.config.model, setting) == value for value in given), setting


@st.composite
def files(draw):
    """The bytes of a safetensors file: a header whose entries were changed, and data of about the right length."""
    tensors, at = Pairs(), 0
    names = draw(st.lists(st.text(max_size=5), min_size=1, max_size=4, unique=True))
    for name in names:
        dtype = draw(st.sampled_from(list(BITS)))
        shape = draw(st.lists(st.sampled_from([0, 1, 2, 4, 8]), max_size=3))
        end = at + int(np.prod(shape)) * BITS[dtype] // 8
        entry = Pairs([("dtype", dtype), ("shape", shape), ("data_offsets", [at, end])])
        tensors.append((name, entry))
        at = end
    whole = all(int(np.prod(shape)) * BITS[dtype] % 8 == 0 for _, ((_, dtype), (_, shape), _) in tensors)
    data = draw(st.binary(min_size=at, max_size=at))
    if draw(st.booleans()):
        tensors.append(("__metadata__", draw(st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2))))
    tensors = Pairs(draw(st.permutations(tensors)))  # the order of the header is not that of the data
    how = draw(
        st.sampled_from(["right", *["entries"] * 8, "hole", "hole", "padding", "text", "length", "data", "file"])
    )
    if how == "entries":
        for _ in range(draw(st.integers(1, 2))):
            changed_entry(draw, tensors)
    elif how == "hole":
        data = hollow(draw, tensors, data)
    text = encoded(tensors)
    if how == "padding":
        text = draw(st.sampled_from([b"", b" ", b"\n"])) + text + b" " * draw(st.integers(0, 9))
    elif how == "text":
        text = draw(changed_bytes(text))
    elif how == "data":
        data = draw(changed_bytes(data))
    length = len(text) + (draw(st.sampled_from([-1, 1, 10**9, 2**63])) if how == "length" else 0)
    content = length.to_bytes(8, "little") + text + data
    is_right = how == "right" and whole and "__metadata__" not in names
    return draw(changed_bytes(content)) if how == "file" else content, is_right


def hollow(draw, tensors, data):
    """Data with some bytes more before, between or behind the tensors, which their entries leave out."""
    entries = [entry for _, entry in tensors if isinstance(entry, Pairs)]
    spot = draw(st.sampled_from([0, len(data), *(entry[2][1][0] for entry in entries)]))
    for entry in entries:
        start, end = entry[2][1]
        if start >= spot:
            entry[2] = "data_offsets", [start + 8, end + 8]
    return data[:spot] + bytes(8) + data[spot:]


def changed_entry(draw, tensors):
    """Changes one entry of a header in place: its name, a number of it, or something else of it."""
    at = draw(st.integers(0, len(tensors) - 1))
    name, entry = tensors[at]
    how = draw(st.sampled_from(["shifted", "shifted", "number", "number", "dtype", "entry", "name", "twice", "pairs"]))
    if how == "twice":
        tensors.append(
            (draw(st.just(name) | st.text(max_size=5)), draw(st.sampled_from([held for _, held in tensors])))
        )
    elif how == "name":
        tensors[at] = draw(WORDS.map(str) | st.just("__metadata__")), entry
    elif how == "entry" or not isinstance(entry, Pairs):
        tensors[at] = name, draw(VALUES)
    elif how == "pairs":
        tensors[at] = name, draw(changed_pairs(entry, ["dtype", "shape", "data_offsets", "x"]))
    else:
        held = dict(entry)
        if how == "shifted":
            by = draw(st.sampled_from([-8, -4, -1, 1, 4, 8]))
            offsets = held.get("data_offsets")
            offsets = offsets if isinstance(offsets, list) else [0, 0]
            held["data_offsets"] = [max(at + by, 0) if type(at) is int else 0 for at in offsets]
        elif how == "number":
            part = draw(st.sampled_from(["shape", "data_offsets"]))
            numbers = list(held[part]) if isinstance(held.get(part), list) else []
            spot = draw(st.integers(0, len(numbers)))
            numbers[spot : spot + 1] = [draw(NUMBERS | st.sampled_from([4, 8, 16]))]
            held[part] = numbers
        else:
            held["dtype"] = draw(st.sampled_from(list(BITS)) | st.sampled_from(["F31", "f32"]) | VALUES)
        tensors[at] = name, Pairs(held.items())


def check_file(example):
    """We and the format's own reader accept the same files, and then find the same in them."""
    content, is_right = example
    path = scratch() / "model.safetensors"
    path.write_bytes(content)
    try:
        theirs = {
            name: (held["dtype"], held["shape"], bytes(held["data"])) for name, held in reference.deserialize(content)
        }
    except reference.SafetensorError:
        theirs = None
    try:
        found = safetensors.read_header(path)
    except InputError as error:
        assert str(error).startswith(f"{path}: ") and "\n  fix   " in str(error)
        assert not is_right, error
        assert theirs is None or any(reason in str(error) for reason in STRICTER), error
        return
    sizes = {name: int(np.prod(at.shape, dtype=object)) * BITS[at.dtype] // 8 for name, at in found.items()}
    mine = {name: (at.dtype, list(at.shape), content[at.offset :][: sizes[name]]) for name, at in found.items()}
    assert mine == theirs


@functools.cache
def scratch():
    return Path(tempfile.mkdtemp(prefix="gspmd_lm_fuzz_"))


@functools.cache
def several():
    """A folder with the weights of a model in several files, and the names of the tensors by file."""
    golden = references.load("llama")
    folder = golden.folder(Path(tempfile.mkdtemp(prefix="gspmd_lm_fuzz_")))
    whole = reference.deserialize((folder / safetensors.SINGLE).read_bytes())
    (folder / safetensors.SINGLE).unlink()
    names = sorted(name for name, _ in whole)
    places = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    tensors = dict(whole)
    for file, held in places.items():
        head = safetensors.header_bytes(
            {name: (tensors[name]["dtype"], tuple(tensors[name]["shape"])) for name in held}
        )
        (folder / file).write_bytes(head + b"".join(bytes(tensors[name]["data"]) for name in held))
    return folder, places


@st.composite
def indexes(draw):
    _, places = several()
    names = [name for held in places.values() for name in held]
    words = [*places, "c.safetensors", "../a.safetensors", "config.json", ".", "/", ""]
    pairs = Pairs((name, file) for file, held in places.items() for name in held)
    how = draw(st.sampled_from(["right", "file", "pairs", "outer", "bytes"]))
    if how == "file":
        at = draw(st.integers(0, len(pairs) - 1))
        pairs[at] = pairs[at][0], draw(st.sampled_from(words) | VALUES)
    elif how == "pairs":
        pairs = draw(changed_pairs(pairs, [*names, "x"]))
    index = Pairs([("metadata", draw(VALUES)), ("weight_map", pairs)])
    if how == "outer":
        index = draw(changed_pairs(index, ["weight_map", "metadata", "x"]))
    return draw(changed_bytes(encoded(index))) if how == "bytes" else encoded(index)


def check_index(text):
    """What is accepted is what json reads, and every tensor lies in the file that it names."""
    folder, places = several()
    (folder / safetensors.INDEX).write_bytes(text)
    try:
        found = pretrained.open_folder(folder).files
    except InputError:
        return
    assert {name: where.path.name for name, where in found.items()} == plain(text)["weight_map"]
    assert {where.path.name: where for where in found.values()}.keys() == places.keys()
    for name, where in found.items():
        assert name in places[where.path.name]


@pytest.mark.long
@pytest.mark.parametrize("examples", [pytest.param(8, id="some"), MANY])
def test_a_config(examples):
    draws(check_config, configs(), examples)


@pytest.mark.long
@pytest.mark.parametrize("examples", [pytest.param(200, id="some"), MANY])
def test_a_file(examples):
    draws(check_file, files(), examples)


@pytest.mark.parametrize("examples", [pytest.param(60, id="some"), MANY])
def test_an_index(examples):
    draws(check_index, indexes(), examples)
