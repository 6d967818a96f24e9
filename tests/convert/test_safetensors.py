"""Damaged files, missing ones, and folders without weights."""

import json

import numpy as np
import pytest
from safetensors import numpy as reference

from gspmd_lm.convert import safetensors
from gspmd_lm.errors import InputError

NUMBERS = np.arange(24, dtype=np.float32).reshape(4, 6)


def file_of(**tensors):
    head = safetensors.header_bytes({name: ("F32", array.shape) for name, array in tensors.items()})
    return head + b"".join(array.tobytes() for array in tensors.values())


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(file_of(a=NUMBERS, b=NUMBERS[0]))
    return tmp_path


def several(folder, places, **files):
    for name, data in files.items():
        (folder / f"{name}.safetensors").write_bytes(data)
    (folder / safetensors.INDEX).write_text(json.dumps({"weight_map": places}))


def test_slices_and_rows(folder):
    a = safetensors.stored_tensors(folder)["a"]
    np.testing.assert_array_equal(a.read((4, 6), (slice(1, 3), slice(2, 6))), NUMBERS[1:3, 2:6])
    np.testing.assert_array_equal(
        a.read((4, 2, 3), (np.array([3, 0]), slice(1, 2), slice(0, 3))), NUMBERS[[3, 0], None, 3:]
    )
    np.testing.assert_array_equal(a.read((6, 4), (slice(0, 6), np.array([2]))), NUMBERS.reshape(6, 4)[:, [2]])


def test_a_slice_is_not_copied(folder):
    part = safetensors.stored_tensors(folder)["a"].read((4, 6), (slice(1, 3), slice(2, 6)))
    assert isinstance(part, np.memmap) and not part.flags.owndata


def test_the_reference_implementation_reads_the_same(folder):
    found = reference.load_file(folder / "model.safetensors")
    np.testing.assert_array_equal(found["a"], NUMBERS)
    reference.save_file({"b": NUMBERS.T.copy()}, folder / "model.safetensors")
    b = safetensors.stored_tensors(folder)["b"]
    np.testing.assert_array_equal(b.read((6, 4), (slice(None),) * 2), NUMBERS.T)


def test_files_are_filled_in_order():
    sizes = {"a": 5, "b": 5, "c": 1, "d": 12, "e": 3}
    assert safetensors.split_into_files(sizes, 10) == {
        "model-00001-of-00004.safetensors": ["a", "b"],
        "model-00002-of-00004.safetensors": ["c"],
        "model-00003-of-00004.safetensors": ["d"],
        "model-00004-of-00004.safetensors": ["e"],
    }
    assert safetensors.split_into_files(sizes, 100) == {"model.safetensors": list(sizes)}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: b"", "cannot read its 0 bytes: .* header too small"),
        (lambda data: data[:4], "cannot read its 4 bytes: .* header too small"),
        (lambda data: data[:40], "cannot read its 40 bytes: .* invalid header length"),
        (lambda data: b"\xff" * 8 + data[8:], "header too large"),
        (lambda data: data[:-30], "cannot read its 242 bytes: .* file not fully covered"),
        (lambda data: data + bytes(400), "cannot read its 672 bytes: .* file not fully covered"),
        (lambda data: data[:8] + b"}" + data[9:], "invalid JSON in header"),
        (lambda data: data[:8] + b"\xff" + data[9:], "invalid UTF-8 in header"),
        (lambda data: data.replace(b"[4,6]", b"[4,7]"), "invalid shape, data type, or offset for tensor"),
        (lambda data: data.replace(b'"shape":[4,6]', b'"shope":[4,6]'), "missing field `shape`"),
    ],
)
def test_a_damaged_file(folder, damage, message):
    path = folder / "model.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(InputError, match=f"(?s)model.safetensors: .*{message}.*fix .*fetch it again"):
        safetensors.stored_tensors(folder)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"shape":[4,6]', '"shape":[4.0,6]', "floating point `4.0`, expected usize"),
        ('"data_offsets":[0,96]', '"data_offsets":[0,96],"zero_point":3', "the header's entry of a is not valid"),
        ('"shape":[6]', '"shape":[6,9223372036854775808,4]', "overflow computing buffer size"),
        ('"F32","shape":[6]', '"F31","shape":[6]', "unknown variant `F31`"),
        ('"F32","shape":[6]', '"F64","shape":[6]', "invalid shape, data type, or offset for tensor"),
        ("[96,120]", "[0,24]", "invalid offset for tensor `a`"),
        ("[96,120]", "[92,116]", "invalid offset for tensor `b`"),
        ("[96,120]", "[96,72]", "invalid offset for tensor `b`"),
        (
            '"shape":[6],"data_offsets":[96,120]',
            '"shape":[5],"data_offsets":[100,120]',
            "invalid offset for tensor `b`",
        ),
        (
            '"shape":[4,6],"data_offsets":[0,96]',
            '"shape":[4,5],"data_offsets":[16,96]',
            "invalid offset for tensor `a`",
        ),
        (
            '"shape":[6],"data_offsets":[96,120]',
            '"shape":[5],"data_offsets":[96,116]',
            "file not fully covered",
        ),
        ('"F32","shape":[6]', '{"F32":null},"shape":[6]', "the header's entry of b is not valid"),
        ('{"dtype":"F32","shape":[6],"data_offsets":[96,120]}', '["F32",[6],[96,120]]', "entry of b is not valid"),
        ('"b":{', '"b":{"dtype":"F32","shape":[6],"data_offsets":[96,120]},"b":{', "the key 'b' appears twice"),
        ('"pt"', '"pt","format":"tf"', "the key 'format' appears twice"),
        ('"b":', '"a":', "invalid offset for tensor `a`"),
        ('"pt"', "null", "invalid type: null, expected a string"),
        ('{"format":"pt"}', "null", "__metadata__ of the header is not an object"),
        ('{"__metadata__"', ' {"__metadata__"', "its header does not begin with {"),
    ],
)
def test_a_header_that_does_not_fit_its_data(folder, old, new, message):
    path = folder / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    text = data[8 : 8 + length].decode()
    assert text.count(old) == 1
    text = text.replace(old, new).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    with pytest.raises(InputError, match=f"(?s)model.safetensors: .*{message}.*fix .*fetch it again"):
        safetensors.stored_tensors(folder)


def test_an_index_names_a_file_that_is_not_there(tmp_path):
    several(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"}, one=file_of(a=NUMBERS))
    with pytest.raises(InputError, match=r"index.json: two.safetensors is not in the folder\n  fix   fetch"):
        safetensors.stored_tensors(tmp_path)


def test_an_index_leads_out_of_the_folder(tmp_path):
    several(tmp_path, {"a": "../one.safetensors"})
    with pytest.raises(InputError, match=r"\.\./one\.safetensors is not a file name"):
        safetensors.stored_tensors(tmp_path)


def test_an_index_that_does_not_fit_its_files(tmp_path):
    several(tmp_path, {"a": "one.safetensors", "c": "one.safetensors"}, one=file_of(a=NUMBERS, b=NUMBERS))
    with pytest.raises(InputError, match=r"(?s)file that the index names: c\n.*not in the index: b"):
        safetensors.stored_tensors(tmp_path)


def test_an_index_that_names_a_tensor_twice(tmp_path):
    several(tmp_path, {}, one=file_of(a=NUMBERS), two=file_of(a=NUMBERS))
    twice = '{"weight_map": {"a": "one.safetensors", "a": "two.safetensors"}}'
    (tmp_path / safetensors.INDEX).write_text(twice)
    with pytest.raises(InputError, match=r"index\.json: not valid JSON: the key 'a' appears twice"):
        safetensors.stored_tensors(tmp_path)


def test_one_file_comes_before_an_index(folder):
    """As transformers has it."""
    several(folder, {"c": "one.safetensors"}, one=file_of(c=NUMBERS))
    assert safetensors.stored_tensors(folder).keys() == {"a", "b"}


def test_numbers_of_less_than_a_byte(folder):
    """They may stand in a file, but only where they fill bytes."""
    for count, fits in ((4, True), (3, False)):
        entry = {"a": {"dtype": "F4", "shape": [count], "data_offsets": [0, 2]}}
        text = json.dumps(entry).encode()
        (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + b"12")
        if fits:
            assert safetensors.stored_tensors(folder)["a"].shape == (4,)
        else:
            with pytest.raises(InputError, match=r"model\.safetensors: .* does not end up at a byte boundary"):
                safetensors.stored_tensors(folder)


def test_an_index_without_a_map(tmp_path):
    (tmp_path / safetensors.INDEX).write_text('{"weight_map": ["a"]}')
    with pytest.raises(InputError, match="has no weight_map"):
        safetensors.stored_tensors(tmp_path)


def test_a_folder_without_weights(tmp_path):
    with pytest.raises(InputError, match=r"no weights: neither model.safetensors nor"):
        safetensors.stored_tensors(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(InputError, match=r"it has pytorch_model.bin, which are not read\n  fix .*save_pretrained"):
        safetensors.stored_tensors(tmp_path)
    (tmp_path / "model.fp16.safetensors").write_bytes(b"")
    with pytest.raises(InputError, match=r"it has model.fp16.safetensors\n  fix .* rename it to model.safetensors"):
        safetensors.stored_tensors(tmp_path)
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(b"")
    with pytest.raises(InputError, match=r"model-00001-of-00002.safetensors, model.fp16.*\n  fix   fetch .*index.json"):
        safetensors.stored_tensors(tmp_path)
    with pytest.raises(InputError, match="no such folder"):
        safetensors.stored_tensors(tmp_path / "nowhere")
