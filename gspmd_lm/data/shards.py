"""Shards of tokens: files of which any part is read without the rest, such as our own of records with checksums.

Our own shard is a .npy file of records. A record has RECORD_TOKENS tokens, the one after them, and a CRC-32. So a row
whose length is a multiple of RECORD_TOKENS is read with nothing else but the checksums.
"""

import bisect
import dataclasses
import functools
import io
import itertools
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from gspmd_lm.data.folders import Folder
from gspmd_lm.errors import InputError

if TYPE_CHECKING:
    from gspmd_lm.data.token_files import FlatFile

RECORD_TOKENS = 128
Span = tuple[int, int]  # tokens from a position to before another


def record_type(tokens: np.dtype) -> np.dtype:
    """The type of a record with tokens of a type."""
    return np.dtype([("tokens", tokens, (RECORD_TOKENS + 1,)), ("crc32", "<u4")])


def encode_shard(tokens: np.ndarray, seed: int) -> bytes:
    """The file of tokens. The last record is filled up with zeros.

    seed: what the checksums of a shard begin with, so that no shard passes for another one.
    """
    count = -(-len(tokens) // RECORD_TOKENS)
    padded = np.zeros(count * RECORD_TOKENS + 1, tokens.dtype)
    padded[: len(tokens)] = tokens
    records = np.zeros(count, record_type(tokens.dtype))
    records["tokens"][:, :-1] = padded[:-1].reshape(count, RECORD_TOKENS)
    records["tokens"][:, -1] = padded[RECORD_TOKENS::RECORD_TOKENS]
    raw = records.view(np.uint8).data
    records["crc32"] = _checksums(raw, records.dtype.itemsize, seed)
    return b"".join((npy_header(records.dtype, count), raw))


def npy_header(dtype: np.dtype, *shape: int) -> bytes:
    """The beginning of a .npy file."""
    out = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        out, {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    )
    return out.getvalue()


def _checksums(records: bytes | memoryview, record_bytes: int, seed: int) -> list[int]:
    """The CRC-32 of each record, which begins with `seed` and the number of the record."""
    view, crc32 = memoryview(records), zlib.crc32  # a part of a view is no copy
    return [
        crc32(view[start : start + record_bytes - 4], seed + number & 0xFFFFFFFF)
        for number, start in enumerate(range(0, len(records), record_bytes))
    ]


class Stream(Protocol):
    """An array of tokens of which spans are read, and what is known of its records, such as conversations."""

    bounds: np.ndarray  # int64, where its shards begin, and its length
    dtype: np.dtype
    is_far: bool  # whether each read waits for a store
    marks_ends: bool  # whether packing.LAST marks the tokens with which documents end

    def __len__(self) -> int: ...

    def read(self, spans: Sequence[Span]) -> list[np.ndarray]:
        """The tokens of each span, which ends within the stream."""
        ...

    def record_sizes(self) -> np.ndarray:
        """int64 [records, 2]: how many tokens each record has, and how many of them are targets."""
        ...


@dataclasses.dataclass(frozen=True)
class Shard:
    """A file of records with tokens."""

    folder: Folder
    name: str
    tokens: int
    dtype: np.dtype
    seed: int
    sizes_name: str  # the file with the sizes of its documents

    marks_ends = False

    @property
    def size_bytes(self) -> int:
        """The size that the file must have."""
        return self._first_byte + -(-self.tokens // RECORD_TOKENS) * self._records.itemsize

    @functools.cached_property
    def _records(self) -> np.dtype:
        return record_type(self.dtype)

    @functools.cached_property
    def _first_byte(self) -> int:
        """Where the records begin."""
        return len(npy_header(self._records, -(-self.tokens // RECORD_TOKENS)))

    def byte_span(self, start: int, stop: int) -> Span:
        """The bytes to read for the tokens from one to before another: those of their records."""
        first, last = _records_of(start, stop)
        return self._first_byte + first * self._records.itemsize, self._first_byte + last * self._records.itemsize

    def decode(self, start: int, stop: int, raw: bytes) -> np.ndarray:
        """The tokens from one to before another, of these bytes. Raises InputError if the checksums are others."""
        first, last = _records_of(start, stop)
        if len(raw) == (last - first) * self._records.itemsize:
            records = np.frombuffer(raw, self._records)
            if _checksums(raw, self._records.itemsize, self.seed + first) == records["crc32"].tolist():
                tokens = np.empty(len(records) * RECORD_TOKENS + 1, self.dtype)
                tokens[:-1].reshape(len(records), RECORD_TOKENS)[:] = records["tokens"][:, :-1]
                tokens[-1] = records["tokens"][-1, -1]
                return tokens[start - first * RECORD_TOKENS : stop - first * RECORD_TOKENS]
        raise InputError(
            f"{self.folder.path(self.name)}: this shard of tokens is damaged, or belongs to other tokens "
            f"(records {first:,} to {last - 1:,} have other checksums)\n"
            "  fix   put the right file back, or make the tokens anew with tokenize"
        )


class Shards:
    """The Stream of the tokens of files, one after another."""

    def __init__(self, shards: "Sequence[Shard | FlatFile]", dtype: np.dtype):
        self.shards, self.dtype = shards, dtype
        self.bounds = np.cumsum([0, *(shard.tokens for shard in shards)], dtype=np.int64)
        self._starts = self.bounds.tolist()
        self.is_far = any(not shard.folder.is_local for shard in shards)
        self.marks_ends = any(shard.marks_ends for shard in shards)

    def __len__(self) -> int:
        return int(self.bounds[-1])

    def read(self, spans: Sequence[Span]) -> list[np.ndarray]:
        """The tokens of each span. All spans are read from a bucket at the same time.

        Raises InputError if a shard is missing or damaged.
        """
        parts: list[tuple[int, int, int, int]] = []  # span, shard, and the tokens in it from one to before another
        for i_span, (start, stop) in enumerate(spans):
            while start < stop:
                i_shard = bisect.bisect_right(self._starts, start) - 1
                first, end = self._starts[i_shard], min(stop, self._starts[i_shard + 1])
                parts.append((i_span, i_shard, start - first, end - first))
                start = end
        found: list[list[np.ndarray]] = [[] for _ in spans]
        for (i_span, i_shard, start, stop), raw in zip(parts, self._fetch(parts), strict=True):
            found[i_span].append(self.shards[i_shard].decode(start, stop, raw))
        empty = np.empty(0, self.dtype)
        return [one[0] if len(one) == 1 else np.concatenate([empty, *one]) for one in found]

    def _fetch(self, parts: Sequence[tuple[int, int, int, int]]) -> list[bytes]:
        """The bytes to decode for each part."""
        by_folder: dict[Folder, list[int]] = {}
        for number, (_, i_shard, _, _) in enumerate(parts):
            by_folder.setdefault(self.shards[i_shard].folder, []).append(number)
        fetched = [b""] * len(parts)
        for folder, numbers in by_folder.items():
            spans = []
            for number in numbers:
                _, i_shard, start, stop = parts[number]
                spans.append((self.shards[i_shard].name, *self.shards[i_shard].byte_span(start, stop)))
            try:
                raws = folder.read_spans(spans)
            except FileNotFoundError as error:
                raise InputError(
                    f"{error.filename or error}: this shard of tokens is missing\n"
                    "  fix   put it back, or make the tokens anew"
                ) from error
            for number, raw in zip(numbers, raws, strict=True):
                fetched[number] = raw
        return fetched

    def record_sizes(self) -> np.ndarray:
        """The sizes of the records of shards. Other files hold texts."""
        sizes, of_records = [np.empty((0, 2), np.int64)], [one for one in self.shards if isinstance(one, Shard)]
        for folder, group in itertools.groupby(of_records, key=lambda shard: shard.folder):
            shards = [*group]
            contents = folder.read_all([shard.sizes_name for shard in shards])
            sizes += [decode_sizes(*one) for one in zip(contents, shards, strict=True)]
        return np.concatenate(sizes)

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        return self.read([(0, len(self))])[0].astype(dtype or self.dtype, copy=False)


def _records_of(start: int, stop: int) -> Span:
    """The records to read for tokens of a shard: the last one may also have the token after its own."""
    return start // RECORD_TOKENS, max(start, stop - 2) // RECORD_TOKENS + 1


def encode_sizes(sizes: np.ndarray, seed: int) -> bytes:
    """The file with the sizes of the documents of a shard, as `record_sizes` gives them, with a checksum behind it."""
    raw = np.ascontiguousarray(sizes, "<u4")
    content = npy_header(raw.dtype, *raw.shape) + raw.tobytes()
    return content + zlib.crc32(content, seed).to_bytes(4, "little")


def decode_sizes(content: bytes, shard: Shard) -> np.ndarray:
    """The sizes of the documents of a shard. Raises InputError if the file is damaged."""
    if zlib.crc32(content[:-4], shard.seed).to_bytes(4, "little") != content[-4:]:
        raise InputError(
            f"{shard.folder.path(shard.sizes_name)}: damaged, or it belongs to other tokens\n"
            "  fix   put the right file back, or make the tokens anew with tokenize"
        )
    return np.load(io.BytesIO(content)).astype(np.int64)
