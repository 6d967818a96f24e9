"""The safetensors format: reads tensors of a folder as memory-mapped slices, and writes files tensor by tensor.

Source of the format: https://github.com/huggingface/safetensors (8 bytes of header length, a JSON header, the data).
"""

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from gspmd_lm.config.paths import read_text
from gspmd_lm.convert.strict_json import damaged, parse, shown
from gspmd_lm.errors import InputError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
FILE_BYTES = 5 * 10**9  # the limit of one file that is written
# The format's names -> numpy's dtypes. A file may hold other dtypes, but a weight may not have them.
DTYPES: dict[str, Any] = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
WEIGHT_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
# How many bits a number of each of the format's dtypes has.
BITS = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip
_MOST_HEADER_BYTES = 100_000_000  # the limit of the reference implementation
_METADATA, _ENTRY = "__metadata__", {"dtype", "shape", "data_offsets"}
_SHOWN = 8


@dataclasses.dataclass(frozen=True)
class Stored:
    """One tensor of a file: its place, dtype and shape. Only `read` reads its values."""

    path: Path
    offset: int  # bytes from the start of the file
    dtype: str  # the format's name of it: "BF16"
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * np.dtype(DTYPES[self.dtype]).itemsize

    def read(self, view: Sequence[int], index: Sequence[slice | np.ndarray]) -> np.ndarray:
        """The part of the tensor that `index` picks, one slice or array of rows for each dimension of `view`.

        view: the shape as which the tensor is read. Slices are not copied. The result may be a view of the file, which
        stays mapped as long as the view lives.
        """
        size = math.prod(self.shape)
        dtype = np.dtype(DTYPES[self.dtype])
        mapped = np.memmap(self.path, dtype, "r", self.offset, (size,)).reshape(tuple(view))
        return picked(mapped, index)


def picked(array: np.ndarray, index: Sequence[slice | np.ndarray]) -> np.ndarray:
    """The part of an array that `index` picks, one slice or array of rows for each dimension."""
    part = array[tuple(at if isinstance(at, slice) else slice(None) for at in index)]
    for axis, at in enumerate(index):
        if not isinstance(at, slice):
            part = part.take(at, axis)
    return part


def stored(folder: Path) -> dict[str, Stored]:
    """The tensors of a folder by name: those of model.safetensors, or of all files that the index names.

    Raises InputError if there are none, if a file is damaged, or if a file contradicts the index.
    """
    index, single = folder / INDEX, folder / SINGLE
    if single.is_file():  # if there is an index too, transformers reads this file
        return header(single)
    if not index.is_file():
        raise InputError(_no_weights(folder))
    places = parse(read_text(index), index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise InputError(
            f"{index}: has no weight_map of tensor names to file names\n  fix   fetch the whole folder again"
        )
    outside = sorted({name for name in places.values() if Path(name).name != name})
    missing = sorted({name for name in places.values() if not (folder / name).is_file()})
    if outside or missing:
        raise InputError(
            f"{index}: {_few(outside or missing)} {'is not a file name' if outside else 'is not in the folder'}\n"
            "  fix   fetch the whole folder again"
        )
    found: dict[str, Stored] = {}
    for name in sorted(set(places.values())):
        for tensor, where in header(folder / name).items():
            if tensor in found:
                raise InputError(
                    f"{folder}: {tensor} is both in {found[tensor].path.name} and in {name}\n"
                    "  fix   fetch the whole folder again"
                )
            found[tensor] = where
    lacking = sorted(
        tensor for tensor, name in places.items() if tensor not in found or found[tensor].path.name != name
    )
    unlisted = sorted(set(found) - set(places))
    if lacking or unlisted:
        lines = [f"  not in the file that the index names: {_few(lacking)}"] * bool(lacking)
        lines += [f"  in a file, but not in the index: {_few(unlisted)}"] * bool(unlisted)
        raise InputError(
            "\n".join([f"{index}: does not fit its files", *lines, "  fix   fetch the whole folder again"])
        )
    return found


def header(path: Path) -> dict[str, Stored]:
    """The tensors of one file, checked: their bytes lie side by side and fill the data of the file.

    Raises an InputError that names the tensor if they do not, because such a file is not what its writer meant.
    """
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _MOST_HEADER_BYTES):
            raise InputError(damaged(path, f"the file has {size} bytes, but its header should have {length}"))
        text = file.read(length)
    try:
        raw = parse(text.decode("utf-8"), path)
    except UnicodeDecodeError as error:
        raise InputError(damaged(path, "its header is not text")) from error
    if not text.startswith(b"{"):
        raise InputError(damaged(path, "its header does not begin with {"))
    about = raw.pop(_METADATA, {})
    if not isinstance(about, dict) or not all(isinstance(word, str) for word in about.values()):
        raise InputError(damaged(path, f"{_METADATA} of the header is not an object of texts: {shown(about)}"))
    data = 8 + length
    ends = {name: _checked(path, name, entry) for name, entry in raw.items()}
    cut = [name for name, (_, end) in ends.items() if data + end > size]
    if cut:
        most = data + max(end for _, end in ends.values())
        raise InputError(damaged(path, f"it has {size} bytes and should have {most}: {_few(cut)} cut off"))
    at, before = 0, "the header"
    for name in sorted(ends, key=ends.__getitem__):
        start, end = ends[name]
        if start != at:
            side = "before" if start < at else "after"
            raise InputError(damaged(path, f"{name} begins {abs(start - at)} bytes {side} the end of {before}"))
        at, before = end, name
    if data + at != size:
        raise InputError(damaged(path, f"{size - data - at} bytes after the last tensor belong to no tensor"))
    return {
        name: Stored(path, data + ends[name][0], entry["dtype"], tuple(entry["shape"])) for name, entry in raw.items()
    }


def _checked(path: Path, name: str, entry: Any) -> tuple[int, int]:
    """The begin and the end of a tensor's bytes in the data, from its entry in the header. Raises InputError."""
    is_entry = isinstance(entry, dict) and entry.keys() == _ENTRY and isinstance(entry["dtype"], str)
    if not is_entry or not _are_sizes(entry["shape"]) or not _are_sizes(entry["data_offsets"], 2):
        raise InputError(damaged(path, f"the header's entry of {name} is not valid: {shown(entry)}"))
    dtype, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    if dtype not in BITS:
        raise InputError(damaged(path, f"{name} has a dtype that the format does not know, {shown(dtype)}"))
    count = 1
    for dim in shape:
        count *= dim
        if count >= 2**64:
            raise InputError(damaged(path, f"{name}, {dtype} {shown(shape)}, is larger than any file"))
    if end < start or count * BITS[dtype] != 8 * (end - start):
        raise InputError(damaged(path, f"{name}, {dtype} {shown(shape)}, has {end - start} bytes"))
    return start, end


def _are_sizes(value: Any, count: int | None = None) -> bool:
    """Whether a value is a list of whole numbers from 0 on that fit in 64 bits, `count` of them."""
    if not isinstance(value, list) or (count is not None and len(value) != count):
        return False
    return all(type(size) is int and 0 <= size < 2**64 for size in value)


def check_new(folder: Path) -> None:
    """Raises InputError if a folder to write holds something already."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder}: holds something already\n  fix   give the name of a new folder")


def plan(sizes: Mapping[str, int], file_bytes: int = FILE_BYTES) -> dict[str, list[str]]:
    """The files to write: name -> tensors, in their order, with at most `file_bytes` in each file.

    sizes: the bytes of each tensor.
    """
    files: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if files[-1] and filled + size > file_bytes:
            files.append([])
            filled = 0
        files[-1].append(name)
        filled += size
    if len(files) == 1:
        return {SINGLE: files[0]}
    return {f"model-{i + 1:05}-of-{len(files):05}.safetensors": names for i, names in enumerate(files)}


def index(files: Mapping[str, Iterable[str]], total_bytes: int) -> str:
    """The text of the index of several files."""
    places = {tensor: name for name, tensors in files.items() for tensor in tensors}
    return json.dumps({"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(places.items()))}, indent=2)


def start(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> bytes:
    """The header of a file, with its length. `tensors`: name -> dtype and shape, in the order of the data."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers requires it
    at = 0
    for name, (dtype, shape) in tensors.items():
        end = at + math.prod(shape) * np.dtype(DTYPES[dtype]).itemsize
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # this aligns the data
    return len(text).to_bytes(8, "little") + text


def _no_weights(folder: Path) -> str:
    if not folder.is_dir():
        return f"{folder}: no such folder\n  fix   give a folder with config.json and {SINGLE}; nothing is fetched"
    others = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".gguf", ".h5"))
    if others:
        fix = "load it with transformers and call save_pretrained, which writes safetensors"
        return f"{folder}: no {SINGLE}; it has {_few(others)}, which are not read\n  fix   {fix}"
    return f"{folder}: no weights: neither {SINGLE} nor {INDEX}\n  fix   fetch the whole folder"


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
