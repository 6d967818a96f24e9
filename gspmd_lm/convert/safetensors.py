"""The safetensors format: the tensors of a folder as memory-mapped slices, and files written tensor by tensor.

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

from gspmd_lm.config import InputError, read_text

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
FILE_BYTES = 5 * 10**9  # of one file of a folder that is written
# The names of the format -> dtypes of numpy. Others may stand in a file, but no weight may have them.
DTYPES: dict[str, Any] = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
WEIGHT_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_MOST_HEADER_BYTES = 100_000_000  # as the reference implementation has it
_SHOWN = 8


@dataclasses.dataclass(frozen=True)
class Stored:
    """One tensor of a file: where it lies, and of what it is made. Nothing is read before `read`."""

    path: Path
    offset: int  # bytes from the start of the file
    dtype: str  # in the format's words: "BF16"
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * np.dtype(DTYPES[self.dtype]).itemsize

    def read(self, view: Sequence[int], index: Sequence[slice | np.ndarray]) -> np.ndarray:
        """The part of the tensor that `index` picks, one slice or array of rows for each dimension of `view`.

        view: the shape the tensor is read as. Slices are not copied: the result may be a view of the file, which is
        mapped as long as the view lives.
        """
        size = math.prod(self.shape)
        dtype = np.dtype(DTYPES[self.dtype])
        mapped = np.memmap(self.path, dtype, "r", self.offset, (size,)).reshape(tuple(view))
        part = mapped[tuple(at if isinstance(at, slice) else slice(None) for at in index)]
        for axis, at in enumerate(index):
            if not isinstance(at, slice):
                part = part.take(at, axis)
        return part


def stored(folder: Path) -> dict[str, Stored]:
    """The tensors of a folder by name: those of model.safetensors, or of all files that its index names.

    Raises InputError where there are none, or where a file is damaged or is not what the index says.
    """
    index = folder / INDEX
    if not index.is_file():
        single = folder / SINGLE
        if single.is_file():
            return header(single)
        raise InputError(_no_weights(folder))
    places = _object(read_text(index), index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise InputError(f"{index}: has no weight_map of tensor names to file names")
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
                raise InputError(f"{folder}: {tensor} stands both in {found[tensor].path.name} and in {name}")
            found[tensor] = where
    lacking = sorted(
        tensor for tensor, name in places.items() if tensor not in found or found[tensor].path.name != name
    )
    unlisted = sorted(set(found) - set(places))
    if lacking or unlisted:
        lines = [f"  not in the file that the index names: {_few(lacking)}"] * bool(lacking)
        lines += [f"  in a file, but not in the index: {_few(unlisted)}"] * bool(unlisted)
        raise InputError(f"{index}: does not fit its files\n" + "\n".join(lines))
    return found


def header(path: Path) -> dict[str, Stored]:
    """The tensors of one file. Raises InputError where the header is wrong or the file is shorter than it says."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _MOST_HEADER_BYTES):
            raise InputError(_damaged(path, f"the file has {size} bytes, its header should have {length}"))
        text = file.read(length)
    try:
        raw = _object(text.decode("utf-8"), path)
    except UnicodeDecodeError as error:
        raise InputError(_damaged(path, "its header is not text")) from error
    raw.pop("__metadata__", None)
    found, ends = {}, {}
    for name, entry in raw.items():
        try:
            shape = tuple(int(size) for size in entry["shape"])
            start, end = (int(at) for at in entry["data_offsets"])
            found[name] = Stored(path, 8 + length + start, str(entry["dtype"]), shape)
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(_damaged(path, f"the header's entry of {name} is not one: {entry!r}")) from error
        ends[name] = 8 + length + end
        dtype = DTYPES.get(found[name].dtype)
        if start < 0 or (dtype and end - start != math.prod(shape) * np.dtype(dtype).itemsize):
            raise InputError(_damaged(path, f"{name}, {entry['dtype']} {list(shape)}, has {end - start} bytes"))
    cut = [name for name, end in ends.items() if end > size]
    if cut:
        raise InputError(
            _damaged(path, f"it has {size} bytes and should have {max(ends.values())}: {_few(cut)} cut off")
        )
    return found


def check_new(folder: Path) -> None:
    """Raises InputError where a folder to be written holds something already."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder}: holds something already\n  fix   give the name of a new folder")


def partial(folder: Path) -> Path:
    """Where a folder is while it is being written."""
    folder = folder.absolute()
    return folder.with_name(f"{folder.name}.partial")


def plan(sizes: Mapping[str, int], file_bytes: int = FILE_BYTES) -> dict[str, list[str]]:
    """File name -> the tensors in it, in their order, at most `file_bytes` in each file; one file where all fit.

    sizes: bytes of each tensor.
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
    """What stands before the data of a file with `tensors`: name -> dtype and shape, in the order of the data."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers asks for it
    at = 0
    for name, (dtype, shape) in tensors.items():
        end = at + math.prod(shape) * np.dtype(DTYPES[dtype]).itemsize
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the data is aligned
    return len(text).to_bytes(8, "little") + text


def _object(text: str, path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(text)
    except ValueError as error:
        raise InputError(_damaged(path, f"not valid JSON: {error}")) from error
    if not isinstance(raw, dict):
        raise InputError(_damaged(path, f"not a JSON object but a {type(raw).__name__}"))
    return raw


def _no_weights(folder: Path) -> str:
    if not folder.is_dir():
        return f"{folder}: no such folder\n  fix   give a folder with config.json and {SINGLE}; nothing is fetched"
    others = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".gguf", ".h5"))
    if others:
        fix = "load it with transformers and call save_pretrained, which writes safetensors"
        return f"{folder}: no {SINGLE}; it has {_few(others)}, which are not read\n  fix   {fix}"
    return f"{folder}: no weights: neither {SINGLE} nor {INDEX}\n  fix   fetch the whole folder"


def _damaged(path: Path, what: str) -> str:
    return f"{path}: {what}\n  fix   the file is damaged or incomplete: fetch it again"


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
