"""Readers of files: the texts or the records in them, one reader for each kind of format."""

import bz2
import codecs
import contextlib
import csv
import gzip
import html.parser
import io
import itertools
import lzma
import re
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np

from gspmd_lm.errors import InputError, did_you_mean, name_kind
from gspmd_lm.files import json_object, json_value

_CHARSET = re.compile(rb"""<meta[^>]*charset\s*=\s*["']?([\w.:-]+)""", re.IGNORECASE)
# What browsers read where a page names these (https://encoding.spec.whatwg.org). A page whose charset is found byte by
# byte has no code units of 16 bits.
_BROWSERS_CHARSETS = {"ascii": "cp1252", "iso8859-1": "cp1252"} | dict.fromkeys(
    ("utf-16", "utf-16-le", "utf-16-be"), "utf-8"
)
# Elements that begin a new line.
_BLOCKS = set(
    re.findall(
        r"\w+",
        """address article aside blockquote br caption dd details div dl dt fieldset figcaption figure footer form
        h1 h2 h3 h4 h5 h6 header hr li main nav ol option p pre section summary table td th title tr ul""",
    )
)
# A text file above this size is read in sections, cut at line ends, or within very long lines at spaces. Then parts of
# one large file can be held out, and no file has to fit in memory.
SECTION_BYTES = 64 * 1024
UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


class Section(bytes):
    """A section of a text file."""

    goes_on = False  # whether the next one is of the same text, in this span of the file or in a later one
    resumes = False  # whether it is the first of a span, and its text begins in an earlier one
    may_spell_end = False  # whether the end of a text may be spelled in it: in .txt files, as <|endoftext|>


class TokenIds(bytes):
    """A document that is given as token ids in place of text: little-endian 32-bit integers."""

    place = ""  # file and line or row, for errors

    @classmethod
    def encode(cls, ids: Any, place: str) -> "TokenIds | None":
        """The document of a list of whole numbers; None for what is no such list."""
        try:
            array = np.asarray(ids)
        except ValueError:  # lists of several lengths
            return None
        if array.ndim != 1 or array.dtype.kind not in "iu" or not ((array >= 0) & (array < 1 << 31)).all():
            return None
        made = cls(array.astype("<u4").tobytes())
        made.place = place
        return made

    def decode_ids(self, vocab_size: int) -> np.ndarray:
        """The tokens, int32. Raises InputError if the tokenizer does not have them all."""
        ids = np.frombuffer(self, "<u4").astype(np.int32)
        if len(ids) and ids.max() >= vocab_size:
            i = int(ids.argmax())
            raise InputError(
                f"{self.place}: token {i:,} is {ids[i]:,}, and data.tokenizer has {vocab_size:,}\n"
                "  fix   set data.tokenizer to the one that the tokens were made with"
            )
        return ids


Row = tuple[str, dict[str, Any]]  # the place of a record, such as file:line, and its fields


def _zstd(path: Path, mode: str) -> BinaryIO:
    import pyarrow

    return io.BufferedReader(cast(Any, pyarrow.input_stream(str(path), compression="zstd")))


COMPRESSED: dict[str, Callable[[Path, str], Any]] = {
    ".gz": gzip.open,
    ".zst": _zstd,
    ".bz2": bz2.open,
    ".xz": lzma.open,
}


def lines_between(file: BinaryIO, start: int, stop: int) -> tuple[int, int]:
    """The first byte of the lines that begin at one position of a file or behind it, and before another, and the byte
    behind them.
    """
    found = []
    for at in (start, stop):
        if at:
            file.seek(at - 1)
            file.readline()
        found.append(file.tell() if at else 0)
    return found[0], found[1]


@contextlib.contextmanager
def open_text(path: Path, span: tuple[int, int] | None = None) -> Iterator[BinaryIO]:
    """The content of a file, decompressed; without a byte order mark, and in UTF-8 if the mark says UTF-16.

    span: of a file that is not compressed, the lines that begin between these two positions.
    """
    with COMPRESSED.get(path.suffix.lower(), Path.open)(path, "rb") as file:
        if span:
            begin, end = lines_between(file, *span)
            file.seek(begin)
            file = io.BufferedReader(io.BytesIO(file.read(end - begin)))  # pyright: ignore[reportArgumentType]
        start = file.peek(4)[:4]
        if start.startswith(codecs.BOM_UTF8):
            file.read(len(codecs.BOM_UTF8))
        elif start.startswith(UTF16):  # as Windows writes "Unicode" text
            try:
                file = io.BytesIO(file.read().decode("utf-16").encode())
            except UnicodeDecodeError as error:
                raise InputError(
                    f"{path}: begins as UTF-16 but is not ({error.reason} at byte {error.start})\n"
                    "  fix   save it as UTF-8, or leave it out"
                ) from error
        yield file


def plain_text(path: Path, span: tuple[int, int] | None = None) -> Iterator[bytes]:
    """The sections of a text file, or of a span of it, each of SECTION_BYTES or a little more."""
    before, is_txt = None, ".txt" in map(str.lower, path.suffixes[-2:])
    for part in _sections(path, span):
        if before:
            before.goes_on = True
            yield before
        before = Section(part)
        before.may_spell_end = is_txt
    if before:
        yield before


def _sections(path: Path, span: tuple[int, int] | None) -> Iterator[bytes]:
    left = b""
    with open_text(path, span) as file:
        while section := left + file.read(SECTION_BYTES):
            section, left = section + file.readline(SECTION_BYTES), b""
            if len(section) >= 2 * SECTION_BYTES and not section.endswith(b"\n"):  # in the middle of a very long line
                section, left = _cut(section)
            yield section


def _cut(text: bytes) -> tuple[bytes, bytes]:
    """The text up to its last space, and the rest. Without a space it is cut between two characters of UTF-8."""
    at = text.rfind(b" ", len(text) // 2) + 1
    if not at:
        at = next(i for i in range(len(text) - 1, 0, -1) if text[i] & 0xC0 != 0x80 or i < len(text) - 4)
    return text[:at], text[at:]


def html_text(path: Path) -> Iterator[bytes]:
    """The text that a browser shows of an HTML page."""
    with open_text(path) as file:
        yield _visible(file.read())


def notebook(path: Path) -> Iterator[bytes]:
    """The text of the cells of a Jupyter notebook, without outputs."""
    notebook = _json(path)
    cells = notebook.get("cells") if isinstance(notebook, dict) else None
    if not isinstance(cells, list) or not all(isinstance(cell, dict) for cell in cells):
        raise InputError(f"{path}: not a Jupyter notebook of version 4\n  fix   open and save it, or leave it out")
    sources = (cell.get("source", "") for cell in cells)
    texts = ("".join(map(str, source)) if isinstance(source, list) else str(source) for source in sources)
    yield encode_surrogates("\n\n".join(filter(None, texts)))


def _json(path: Path) -> Any:
    with open_text(path) as file:
        raw = file.read()
    return json_value(raw.decode("utf-8", "surrogateescape"), path, "correct it, or leave it out")


def json_lines(path: Path, columns: Sequence[str], span: tuple[int, int] | None = None) -> Iterator[Row]:
    """The objects of a file, or of a span of it, with one JSON object on each line."""
    before = f"{path}, after byte {span[0]:,}, line " if span and span[0] else f"{path}:"
    with open_text(path, span) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            place = f"{before}{number}"
            yield place, json_object(line.decode("utf-8", "surrogateescape"), place, "one object per line")


def json_records(path: Path, columns: Sequence[str]) -> Iterator[Row]:
    """The objects of a list, or one object. A file of several objects, one on each line, is read too."""
    try:
        value = _json(path)
    except InputError as error:
        if "Extra data" not in str(error):
            raise
        yield from json_lines(path, columns)
        return
    records = value if isinstance(value, list) else [value]
    for number, record in enumerate(records, 1):
        place = f"{path}: item {number}" if isinstance(value, list) else str(path)
        if isinstance(record, str) and len(columns) == 1:  # a list of texts
            record = {columns[0]: record}
        if not isinstance(record, dict):
            raise InputError(f"{place}: {name_kind(record)}\n  fix   give a list of objects, or of texts")
        yield place, record


def csv_rows(path: Path, columns: Sequence[str]) -> Iterator[Row]:
    """The rows below the header. The header's separator is the one that makes a column of what is looked for.

    In a .tsv file, quotes are text like any other: a field holds neither tabs nor line ends.
    """
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # the default refuses texts of 131 kB
    with open_text(path) as raw, io.TextIOWrapper(raw, "utf-8", "surrogateescape", newline="") as file:
        first, tabs = file.readline(), ".tsv" in map(str.lower, path.suffixes)
        separators = ["\t"] if tabs else [",", ";", "\t", "|"]
        quoting = csv.QUOTE_NONE if tabs else csv.QUOTE_MINIMAL

        def split(by: str) -> list[str]:
            return next(csv.reader([first], delimiter=by, quoting=quoting), [])

        by = next((one for one in separators if set(columns) <= set(split(one))), max(separators, key=first.count))
        header = split(by)
        _check_columns(path, header, columns)
        rows = csv.reader(file, delimiter=by, quoting=quoting, strict=True)
        while True:
            place = f"{path}:{rows.line_num + 2}"
            try:
                row = next(rows, None)
            except csv.Error as error:
                raise InputError(f"{place}: not CSV ({error})\n  fix   correct it, or leave the file out") from error
            if row is None:
                return
            if row and len(row) != len(header):
                quotes = "take tabs out of texts" if tabs else 'put "quotes" around texts that hold separators'
                raise InputError(
                    f"{place}: {len(row)} fields, but the header has {len(header)}\n"
                    f"  fix   {quotes}, or leave the file out"
                )
            if row:
                yield place, dict(zip(header, row, strict=True))


def _check_columns(path: Path, names: Sequence[str], wanted: Sequence[str]) -> None:
    """Raises InputError if two columns have a name that is wanted."""
    if twice := [name for name in wanted if names.count(name) > 1]:
        raise InputError(f"{path}: two columns are named {twice[0]}\n  fix   rename one of them")


def array_records(path: Path) -> Iterator[bytes]:
    """The records of an ArrayRecord file, each of which is a text."""
    try:
        from array_record.python import array_record_module  # pyright: ignore[reportAttributeAccessIssue]  (compiled)
    except ImportError as error:
        raise InputError(f"{path}: needs the package array_record\n  fix   pip install array_record") from error

    reader = array_record_module.ArrayRecordReader(str(path))
    try:
        count = reader.num_records()
        for start in range(0, count, 1024):
            yield from reader.read(start, min(start + 1024, count))
        reader.close()  # only close() raises for a damaged file, which otherwise seems to have no records
    except Exception as error:  # the library raises nothing more precise
        raise InputError(f"{path}: cannot be read as ArrayRecord ({error or 'damaged'})") from error


class _Visible(html.parser.HTMLParser):
    """Collects the text that a browser shows."""

    def __init__(self):
        super().__init__()
        self.parts: list[str] = []
        self._hidden = self._kept = False

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self._hidden = self._hidden or tag in ("script", "style")
        self._kept = self._kept or tag == "pre"
        if tag in _BLOCKS:
            self.parts.append("\n")

    def handle_endtag(self, tag: str) -> None:
        if tag in ("script", "style"):
            self._hidden = False
        self._kept = self._kept and tag != "pre"
        if tag in _BLOCKS:
            self.parts.append("\n")

    def parse_marked_section(self, i: int, report: bool = True) -> int:
        """The end of <![ ... ]>. One that Python does not know, for which it fails, is a comment, as in a browser."""
        try:
            return super().parse_marked_section(i, report)
        except AssertionError:
            return self.parse_bogus_comment(i)

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self.parts.append(data if self._kept else re.sub(r"\s+", " ", data))


def _visible(raw: bytes) -> bytes:
    """The text that a browser shows of a page, as UTF-8. Bytes that are not UTF-8 stay if the page names no charset."""
    named = _CHARSET.search(raw[:1024])
    try:
        charset = codecs.lookup(named[1].decode("ascii", "replace")).name if named else "utf-8"
        charset = _BROWSERS_CHARSETS.get(charset, charset)
        text = raw.decode(charset, "surrogateescape" if charset == "utf-8" else "replace")
    except (LookupError, ValueError):  # Python does not know the charset, or it is a codec of something else
        text = raw.decode("utf-8", "surrogateescape")
    visible = _Visible()
    visible.feed(text)
    visible.close()
    lines = (line.rstrip() for line in "".join(visible.parts).replace("\u00a0", " ").split("\n"))
    text = re.sub(r"\n{3,}", "\n\n", "\n".join(line[1:] if line[:1] == " " != line[1:2] else line for line in lines))
    return text.strip("\n").encode("utf-8", "surrogateescape")


@contextlib.contextmanager
def _table(path: Path) -> Iterator[tuple[Any, Callable[[list[str] | None], Iterator[Any]]]]:
    """The schema of a table in a file, and a function that reads some of its columns (None: all) batch by batch."""
    import pyarrow
    import pyarrow.ipc
    import pyarrow.parquet

    if path.suffix.lower() == ".parquet":
        with pyarrow.parquet.ParquetFile(path) as file:
            yield file.schema_arrow, lambda columns: file.iter_batches(batch_size=1024, columns=columns)
        return
    with pyarrow.memory_map(str(path)) as mapped:
        if mapped.read(6) == b"ARROW1":
            mapped.seek(0)
            file = pyarrow.ipc.open_file(mapped)
            batches = (file.get_batch(i) for i in range(file.num_record_batches))
            schema = file.schema
        else:  # the stream format, which `datasets` writes
            mapped.seek(0)
            batches = pyarrow.ipc.open_stream(mapped)
            schema = batches.schema
        yield schema, lambda columns: (batch.select(columns) if columns else batch for batch in batches)


def table_texts(path: Path, field: str) -> Iterator[bytes]:
    """The texts in the column `field` of a Parquet or Arrow file, or the lists of tokens in it.

    Raises InputError if it is another column.
    """
    import pyarrow

    with _table(path) as (schema, batches):
        if field not in schema.names:
            raise no_text(f"{path}: no column", field, schema.names, any(map(_is_list, schema.types)))
        _check_columns(path, schema.names, [field])
        kind = schema.field(field).type
        if _is_list(kind) and pyarrow.types.is_integer(kind.value_type):
            yield from _token_ids(path, field, batches([field]))
            return
        kind = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
        if str(kind) not in ("string", "large_string", "string_view", "binary", "large_binary", "binary_view"):
            fix = f"for conversations set data.messages_field={field}" if _is_list(kind) else "set data.text_field"
            raise InputError(f"{path}: column {field} is {kind}, not text\n  fix   {fix}")
        for batch in batches([field]):
            column = batch.column(0)  # full validation finds damage, which would end this process
            if str(column.type).endswith("_view"):
                column = column.view(pyarrow.binary_view())
                column.validate(full=True)
            column = column.cast(pyarrow.large_binary())
            column.validate(full=True)
            yield from (text or b"" for text in column.to_pylist())


def _token_ids(path: Path, field: str, batches: Iterator[Any]) -> Iterator[TokenIds]:
    """The documents of a column of lists of tokens. Raises InputError for a number that can be no token."""
    import pyarrow

    number = 0
    for batch in batches:
        column = batch.column(0)
        column.validate(full=True)
        bounds, values = column.offsets.to_numpy(), column.values.cast(pyarrow.int64()).fill_null(-1).to_numpy()
        for start, stop in itertools.pairwise(bounds.tolist()):
            number += 1
            document = TokenIds.encode(values[start:stop], f"{path}: row {number}")
            if document is None:
                raise InputError(f"{path}: row {number}: {field} has null or a number below 0, which is no token")
            yield document


def table_records(path: Path, columns: Sequence[str]) -> Iterator[Row]:
    """The rows of a Parquet or Arrow file, each with its place."""
    number = 0
    with _table(path) as (schema, batches):
        _check_columns(path, schema.names, columns)
        for batch in batches(list(columns) if columns and set(columns) <= set(schema.names) else None):
            batch.validate(full=True)  # damage would end this process, and texts are UTF-8
            for record in batch.to_pylist():
                number += 1
                yield f"{path}: row {number}", record


def no_text(place: str, field: str, names: Collection[str], conversations: bool) -> InputError:
    """The error for a file with fields or columns of these `names`, of which none is `field`.

    conversations: whether any of them holds lists.
    """
    other = ", or for conversations data.messages_field" if conversations else ""
    return InputError(
        f"{place} {field}{did_you_mean(field, names)}\n"
        f"  fix   set data.text_field to one of {', '.join(map(str, names)) or 'its fields'}{other}\n"
        "        or leave the file out: data.source may be a list of files and globs"
    )


def _is_list(kind: Any) -> bool:
    import pyarrow

    return pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind)


def encode_surrogates(text: str) -> bytes:
    """The bytes of a text that was decoded with surrogateescape."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # JSON can spell half a character (a lone surrogate) as an escape
        return text.encode("utf-8", "surrogatepass")
