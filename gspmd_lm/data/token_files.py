"""Token files of other programs: arrays in .bin and .npy files, of which each process reads the rows that it needs."""

import dataclasses
import glob
import hashlib
import io
import json
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from gspmd_lm import files
from gspmd_lm.config import Config, Data
from gspmd_lm.config.data import Source
from gspmd_lm.data import formats, remote
from gspmd_lm.data.corpus import STDLIB, STDLIB_PAIRS
from gspmd_lm.data.folders import Folder
from gspmd_lm.data.packing import LAST
from gspmd_lm.data.shards import Shards, Span
from gspmd_lm.data.tokenizer import Bytes, Tokenizer
from gspmd_lm.data.tokens import MANIFEST, Tokens, TokenSplit
from gspmd_lm.errors import InputError
from gspmd_lm.units import plural

BIN, NPY, IDX = ".bin", ".npy", ".idx"
# The .idx file of Megatron-LM (megatron/core/datasets/indexed_dataset.py): the magic, a version, the kind of number,
# and how many sequences and how many ends of documents follow.
_IDX_MAGIC = b"MMIDIDX\x00\x00"
_IDX_HEADER = np.dtype(
    [("magic", "S9"), ("version", "<u8"), ("kind", "u1"), ("sequences", "<u8"), ("documents", "<u8")]
)
_IDX_KINDS = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
# The header of llm.c (dev/data/data_common.py), 256 numbers: a magic, a version, and how many tokens follow.
_LLM_C = {(20240520, 1): "<u2", (20240801, 7): "<u4"}
_LLM_C_BYTES = 1024
_SAMPLE_BYTES = 4096  # what is read of the beginning and of the end of a file, to tell it from others


@dataclasses.dataclass(frozen=True, eq=False)
class FlatFile:
    """An array of tokens in a file, or a part of it."""

    folder: Folder
    name: str
    dtype: np.dtype
    first_byte: int  # of the array in the file
    first: int  # the token of the array with which the part begins
    tokens: int  # in the part
    vocab: int  # of the model
    stops: np.ndarray  # int64, ascending: before which tokens of the array documents end, where an index says so
    fingerprint: str  # equal for files of one size and kind whose beginnings, ends and indices are equal

    @property
    def marks_ends(self) -> bool:
        return len(self.stops) > 0

    def byte_span(self, start: int, stop: int) -> Span:
        """The bytes to read for the tokens from one to before another."""
        begin, size = self.first_byte + self.first * self.dtype.itemsize, self.dtype.itemsize
        return begin + start * size, begin + stop * size

    def decode(self, start: int, stop: int, raw: bytes) -> np.ndarray:
        """The tokens, with LAST at those with which the index says that documents end.

        Raises InputError for a number that is no token of the model.
        """
        if len(raw) != (stop - start) * self.dtype.itemsize:
            raise InputError(
                f"{self.folder.path(self.name)}: shorter than it was when the run began\n  fix   put the file back"
            )
        ids, at = np.frombuffer(raw, self.dtype), self.first + start
        if len(ids) and (ids.max() >= self.vocab or ids.min() < 0):
            i = int(np.flatnonzero((ids >= self.vocab) | (ids < 0))[0])
            raise InputError(
                f"{self.folder.path(self.name)}: token {at + i:,} is {ids[i]:,}, and model.vocab={self.vocab:,}\n"
                "  fix   set data.tokenizer to the one that the file was made with, and model.vocab to 0 or its size,\n"
                "        or data.token_dtype to the numbers that the file has"
            )
        if not self.marks_ends:
            return ids
        tokens = ids.astype(np.uint32)
        first, last = np.searchsorted(self.stops, [at, at + len(ids)], "right")
        tokens[self.stops[first:last] - 1 - at] |= LAST
        return tokens

    def cut(self, share: float) -> tuple["FlatFile", "FlatFile"]:
        """The file without a share at its end, and that share. Where ends of documents are known, one is cut at."""
        at = self.tokens - round(share * self.tokens)
        if share and len(self.stops) > 1:
            at = int(self.stops[min(np.searchsorted(self.stops, at), len(self.stops) - 2)])
        return dataclasses.replace(self, tokens=at), dataclasses.replace(self, first=at, tokens=self.tokens - at)


def name_of_files(data: Data) -> str:
    """The first entry of `data.source` that names token files of other programs; '' if none does.

    Raises InputError if some entries do and others do not, if only `data.held_out` does, or if `data` asks for records.
    """
    found = [(one.path, _are_named(one)) for one in data.sources]
    named, others = ([path for path, are in found if are == side] for side in (True, False))
    if named and others:
        raise InputError(
            f"data.source: {named[0]} is a token file of another program, and {others[0]} is none: they are not read "
            "together\n  fix   name sources of one kind"
        )
    for one in data.held_out_sources:
        if not named and _are_named(one):
            raise InputError(
                f"data.held_out: {one.path} is a token file of another program, and data.source names none\n"
                "  fix   name texts for evaluation, or name files of tokens in data.source, too"
            )
    if named and (data.conversations or data.fields):
        key = "fields" if data.fields else "messages_field"
        raise InputError(f"data.{key}: the tokens of {named[0]} are of texts\n  fix   leave data.{key} out")
    return named[0] if named else ""


def _are_named(source: Source) -> bool:
    """Whether a source is token files: files of their endings, or a folder with some in it and no texts."""
    path = source.path
    if path.endswith((BIN, NPY)):
        return True
    if path in (STDLIB, STDLIB_PAIRS) or path.startswith("random:"):
        return False
    if any(character in path for character in "*?[") or formats.format_of(Path(path)):
        return False
    if not files.is_remote(path):
        path = str(files.expand_user(path))
        if not os.path.isdir(path) or not os.access(path, os.R_OK, effective_ids=True):  # corpus.py says what is wrong
            return False
    there = Folder(path, "data.source").sizes()
    are_texts = MANIFEST in there or any(formats.format_of(Path(name)) for name in there)
    return not are_texts and any(name.endswith((BIN, NPY)) for name in there)


def open_files(config: Config, tokenizer: Tokenizer) -> Tokens:
    """The tokens of the files that `data.source` names, of which the headers and the indices are read.

    A share `data.held_out` is taken from the end of each file. Raises InputError if a file is not what it says, or if
    nothing says what numbers it has.
    """
    data = config.data
    if any(not _are_named(one) for one in data.held_out_sources):
        raise InputError(
            f"data.held_out: {data.held_out_sources[0].path} has no tokens, as data.source has\n"
            "  fix   name files of tokens, or a share such as 0.02"
        )
    groups = [(one,) for one in data.sources] if data.sources[0].weight else [data.sources]
    apart = _open_all(config, data.held_out_sources, "data.held_out")
    kept_out = {one.folder.path(one.name) for one in apart}
    found = [
        [one for one in _open_all(config, group, "data.source") if one.folder.path(one.name) not in kept_out]
        for group in groups
    ]
    every = [one for group in (*found, apart) for one in group]
    if isinstance(tokenizer, Bytes) and config.model.vocab > tokenizer.vocab_size and data.packing == "documents":
        raise InputError(
            f"data.tokenizer=bytes: the tokens of {data.sources[0].path} were made with another tokenizer, whose end "
            "token ends documents\n  fix   set data.tokenizer to it, or read over ends with --set data.packing=stream"
        )
    cuts = [[one.cut(data.held_out_share) for one in group] for group in found]
    held_out = apart or [rest for group in cuts for _, rest in group]
    names = [", ".join(one.path for one in group) for group in (*groups, data.held_out_sources)]
    is_short = all(one.dtype.itemsize <= 2 and not one.marks_ends for one in every)
    dtype = np.dtype(np.uint16 if is_short else np.uint32)
    splits = [
        TokenSplit(name, group[0].weight, Shards([one for one, _ in pairs if one.tokens], dtype))
        for name, group, pairs in zip(names[:-1], groups, cuts, strict=True)
    ]
    fingerprint = hashlib.sha256("".join(one.fingerprint for one in every).encode()).hexdigest()[:24]
    count = sum(one.tokens for one in every)
    by_index = " and where an .idx says so" * any(one.marks_ends for one in every)
    where = f"; documents end at the token {tokenizer.end}{by_index}" if data.packing == "documents" else ""
    return Tokens(
        train=tuple(splits),
        held_out=TokenSplit(
            names[-1] or ", ".join(names[:-1]), None, Shards([one for one in held_out if one.tokens], dtype)
        ),
        description=f"{', '.join(filter(None, names))}: {plural(len(every), 'file')} of {count:,} tokens, "
        f"fingerprint {fingerprint[:12]}{where}",
        notes="",
        fingerprint=fingerprint,
        has_own_held_out=bool(data.held_out_sources),
    )


def _open_all(config: Config, sources: Sequence[Source], place: str) -> list[FlatFile]:
    """The files of sources, each once."""
    by_folder: dict[str, list[str]] = {}
    for path in dict.fromkeys(path for source in sources for path in _list_paths(source.path, place)):
        address, _, name = path.rpartition("/")
        by_folder.setdefault(address or "/", []).append(name)
    found = []
    for address, names in by_folder.items():
        folder = Folder(address, place)
        sizes = folder.sizes()
        heads = [(name, 0, min(sizes[name], _SAMPLE_BYTES)) for name in names]
        tails = [(name, max(sizes[name] - _SAMPLE_BYTES, 0), sizes[name]) for name in names]
        read = folder.read_spans([*heads, *tails])
        for name, head, tail in zip(names, read[: len(names)], read[len(names) :], strict=True):
            found.append(_open_file(config, folder, sizes, name, head, tail))
    return found


def _list_paths(named: str, place: str) -> list[str]:
    """The paths or addresses of token files that a name stands for."""
    if files.is_remote(named):
        kind = named.partition("://")[0]
        paths = [f"{kind}://{name}" for name in remote.list_names(named, place)]
    else:
        path = os.path.abspath(files.expand_user(named))
        is_glob = not os.path.lexists(path)
        pattern = path if is_glob else glob.escape(path)
        found = glob.glob(f"{pattern}/*" if os.path.isdir(path) else pattern, recursive=True)
        paths = sorted(filter(os.path.isfile, found))  # not a folder, nor a link to nothing
    paths = [path for path in paths if path.endswith((BIN, NPY))]
    if not paths:
        raise InputError(f"{place}: {named} matches no file of tokens\n  fix   give .bin or .npy files, or a folder")
    return paths


def _open_file(config: Config, folder: Folder, sizes: dict[str, int], name: str, head: bytes, tail: bytes) -> FlatFile:
    """A file that begins with `head`. Raises InputError if it is not what it or its index says."""
    size_bytes, path, asked = sizes[name], folder.path(name), config.data.token_dtype
    index, stops = name.removesuffix(BIN) + IDX, np.empty(0, np.int64)
    llm_c = np.frombuffer(head[:12].ljust(12, b"\0"), "<i4").tolist()
    first_byte, said = 0, None
    if name.endswith(NPY):
        dtype, first_byte, said = _read_npy(path, head)
    elif index in sizes:
        dtype, stops = _read_index(folder, index)
        said = int(stops[-1]) if len(stops) else 0
    elif tuple(llm_c[:2]) in _LLM_C:
        dtype, first_byte, said = np.dtype(_LLM_C[tuple(llm_c[:2])]), _LLM_C_BYTES, llm_c[2]
    elif asked:
        dtype = np.dtype(asked).newbyteorder("<")
    else:
        raise InputError(
            f"{path}: nothing says what numbers it has\n"
            "  fix   --set data.token_dtype=uint16 (as nanoGPT writes) or uint32, or put its .idx beside it"
        )
    if asked and dtype.newbyteorder("=") != np.dtype(asked):
        raise InputError(
            f"data.token_dtype={asked}: {path} has {dtype.name}, as it says itself\n  fix   leave data.token_dtype out"
        )
    count, rest = divmod(size_bytes - first_byte, dtype.itemsize)
    if rest:
        raise InputError(
            f"{path}: {size_bytes - first_byte:,} bytes are no whole number of {dtype.name}, which have "
            f"{dtype.itemsize} bytes each\n  fix   bring the whole file, or set data.token_dtype to its numbers"
        )
    if said not in (None, count):
        teller = index if index in sizes else "its header"
        raise InputError(
            f"{path}: has {count:,} tokens of {dtype.name}, and {teller} says {said:,}\n"
            "  fix   bring the whole file, and an .idx that was written with it"
        )
    facts = hashlib.sha256(json.dumps([dtype.str, count]).encode() + head + tail + stops.tobytes())
    stops = stops if config.data.packing == "documents" else stops[:0]
    return FlatFile(folder, name, dtype, first_byte, 0, count, config.model.vocab, stops, facts.hexdigest())


def _read_npy(path: str, head: bytes) -> tuple[np.dtype, int, int]:
    """The numbers of a .npy file that begins with `head`, where they begin, and how many there are."""
    stream = io.BytesIO(head)
    try:
        version = np.lib.format.read_magic(stream)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(stream)
    except ValueError as error:
        raise InputError(f"{path}: not a .npy file ({error})\n  fix   write it with numpy.save") from error
    if len(shape) != 1 or dtype.kind not in "ui":
        raise InputError(
            f"{path}: an array of {dtype} {list(shape)}, and not one row of whole numbers\n"
            "  fix   numpy.save(path, tokens.reshape(-1))"
        )
    return dtype, stream.tell(), shape[0]


def _read_index(folder: Folder, name: str) -> tuple[np.dtype, np.ndarray]:
    """The numbers of the .bin file of an index of Megatron-LM, and before which of its tokens documents end.

    The last end is the number of tokens. Raises InputError if it is no such index, or not a whole one.
    """
    path, content = folder.path(name), folder.read(name) or b""
    header = np.frombuffer(content[: _IDX_HEADER.itemsize].ljust(_IDX_HEADER.itemsize, b"\0"), _IDX_HEADER)[0]
    dtype = _IDX_KINDS.get(int(header["kind"]))
    if not content.startswith(_IDX_MAGIC) or header["version"] != 1 or dtype is None:
        raise InputError(f"{path}: not an index of Megatron-LM for tokens\n  fix   bring it again, or delete it")
    sequences, documents = int(header["sequences"]), int(header["documents"])
    if len(content) < _IDX_HEADER.itemsize + 12 * sequences + 8 * documents or not documents:
        raise InputError(f"{path}: ends before its {sequences:,} sequences do\n  fix   bring the whole file")
    at = _IDX_HEADER.itemsize
    sizes = np.frombuffer(content, "<i4", sequences, at).astype(np.int64)
    begins = np.frombuffer(content, "<i8", sequences, at + 4 * sequences)
    ends = np.frombuffer(content, "<i8", documents, at + 12 * sequences)
    bounds = np.concatenate([[0], np.cumsum(sizes)])
    in_order = ends[-1] == sequences and (ends >= 0).all() and (np.diff(ends) >= 0).all()
    if not in_order or not (begins == bounds[:-1] * np.dtype(dtype).itemsize).all():
        raise InputError(
            f"{path}: its sequences do not stand one after another, or its documents are not made of them\n"
            "  fix   write both files again with Megatron-LM's preprocess_data.py"
        )
    return np.dtype(dtype), bounds[ends[ends > 0]]
