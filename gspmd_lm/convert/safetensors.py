"""The safetensors format: reads tensors of a folder as memory-mapped slices, and writes files tensor by tensor.

The library checks headers. It does not read values here: it keeps a file mapped as a whole, so that what was read
counts as memory of the process, and has no float8 in numpy. It does not write either: it wants all tensors of a file at
once.

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
from safetensors import SafetensorError, safe_open

from gspmd_lm.convert.strict_json import damage_error, parse_object, read_object, show_value
from gspmd_lm.errors import InputError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
FILE_BYTES = 5 * 10**9  # the limit of one file that is written
# The format's names -> numpy's dtypes. A file may hold other dtypes, but a weight may not have them.
DTYPES: dict[str, Any] = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
WEIGHT_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_ENTRY = {"dtype", "shape", "data_offsets"}
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
        return pick(mapped, index)


def pick(array: np.ndarray, index: Sequence[slice | np.ndarray]) -> np.ndarray:
    """The part of an array that `index` picks, one slice or array of rows for each dimension."""
    part = array[tuple(at if isinstance(at, slice) else slice(None) for at in index)]
    for axis, at in enumerate(index):
        if not isinstance(at, slice):
            part = part.take(at, axis)
    return part


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """The tensors of a folder by name: those of model.safetensors, or of all files that the index names.

    Raises InputError if there are none, if a file is damaged, or if a file contradicts the index.
    """
    index, single = folder / INDEX, folder / SINGLE
    if single.is_file():  # if there is an index too, transformers reads this file
        return read_header(single)
    if not index.is_file():
        raise _no_weights(folder)
    places = read_object(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise _incomplete(f"{index}: has no weight_map of tensor names to file names")
    outside = sorted({name for name in places.values() if Path(name).name != name})
    missing = sorted({name for name in places.values() if not (folder / name).is_file()})
    if outside or missing:
        problem = "is not a file name" if outside else "is not in the folder"
        raise _incomplete(f"{index}: {_few(outside or missing)} {problem}")
    tensors: dict[str, Stored] = {}
    for name in sorted(set(places.values())):
        for tensor, where in read_header(folder / name).items():
            if tensor in tensors:
                raise _incomplete(f"{folder}: {tensor} is both in {tensors[tensor].path.name} and in {name}")
            tensors[tensor] = where
    lacking = sorted(
        tensor for tensor, name in places.items() if tensor not in tensors or tensors[tensor].path.name != name
    )
    unlisted = sorted(set(tensors) - set(places))
    if lacking or unlisted:
        lines = [f"  not in the file that the index names: {_few(lacking)}"] * bool(lacking)
        lines += [f"  in a file, but not in the index: {_few(unlisted)}"] * bool(unlisted)
        raise _incomplete("\n".join([f"{index}: does not fit its files", *lines]))
    return tensors


def read_header(path: Path) -> dict[str, Stored]:
    """The tensors of one file, which the library has checked: their bytes lie side by side and fill the file's data.

    The library takes two tensors of one name, and what else two readers may understand differently. These are refused.

    Raises InputError if the file is not as its format has it.
    """
    with open(path, "rb") as file:  # before the library, whose system errors do not name the file
        try:
            with safe_open(path, "numpy"):
                pass
        except SafetensorError as error:
            size = path.stat().st_size
            raise damage_error(path, f"safetensors cannot read its {size} bytes: {error}") from error
        length = int.from_bytes(file.read(8), "little")
        text = file.read(length)
    if not text.startswith(b"{"):
        raise damage_error(path, "its header does not begin with {")
    entries = parse_object(text.decode("utf-8"), path)
    if not isinstance(entries.pop("__metadata__", {}), dict):
        raise damage_error(path, "__metadata__ of the header is not an object")
    for name, entry in entries.items():
        if not isinstance(entry, dict) or entry.keys() != _ENTRY or not isinstance(entry["dtype"], str):
            raise damage_error(path, f"the header's entry of {name} is not valid: {show_value(entry)}")
    data = 8 + length  # where it begins
    return {
        name: Stored(path, data + entry["data_offsets"][0], entry["dtype"], tuple(entry["shape"]))
        for name, entry in entries.items()
    }


def check_new(folder: Path) -> None:
    """Raises InputError if a folder to write holds something already."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder}: holds something already\n  fix   give the name of a new folder")


def split_into_files(sizes: Mapping[str, int], file_bytes: int = FILE_BYTES) -> dict[str, list[str]]:
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


def index_text(files: Mapping[str, Iterable[str]], total_bytes: int) -> str:
    """The text of the index of several files."""
    places = {tensor: name for name, tensors in files.items() for tensor in tensors}
    return json.dumps({"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(places.items()))}, indent=2)


def header_bytes(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> bytes:
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


def _incomplete(problem: str) -> InputError:
    return InputError(f"{problem}\n  fix   fetch the whole folder again")


def _no_weights(folder: Path) -> InputError:
    if not folder.is_dir():
        fix = f"give a folder with config.json and {SINGLE}; nothing is fetched"
        return InputError(f"{folder}: no such folder\n  fix   {fix}")
    if named := sorted(path.name for path in folder.glob("*.safetensors")):
        alone = f"if it holds all tensors, rename it to {SINGLE}"
        fix = alone if len(named) == 1 else f"fetch {INDEX}, too, which says what each of them holds"
        return InputError(f"{folder}: neither {SINGLE} nor {INDEX}; it has {_few(named)}\n  fix   {fix}")
    others = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".gguf", ".h5"))
    if others:
        fix = "load it with transformers and call save_pretrained, which writes safetensors"
        return InputError(f"{folder}: no {SINGLE}; it has {_few(others)}, which are not read\n  fix   {fix}")
    return _incomplete(f"{folder}: no weights: neither {SINGLE} nor {INDEX}")


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
