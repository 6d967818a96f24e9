"""Documents from one file of any format that is known. An ending says the format."""

import bz2
import codecs
import contextlib
import csv
import gzip
import io
import lzma
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from gspmd_lm.data import markup, tables
from gspmd_lm.errors import InputError, did_you_mean
from gspmd_lm.files import json_object, json_value

# A text file above this size becomes several documents, cut at line ends, or within very long lines at spaces. Then
# parts of one large file can be held out, and no file has to fit in memory.
SECTION_BYTES = 64 * 1024
Row = tuple[str, dict[str, Any]]  # the place of a record, such as file:line, and its fields


def _zstd(path: Path, mode: str) -> BinaryIO:
    import pyarrow

    return io.BufferedReader(cast(Any, pyarrow.input_stream(str(path), compression="zstd")))


_COMPRESSED: dict[str, Callable[[Path, str], Any]] = {
    ".gz": gzip.open,
    ".zst": _zstd,
    ".bz2": bz2.open,
    ".xz": lzma.open,
}


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """The content of a file, decompressed; without a byte order mark, and in UTF-8 if the mark says UTF-16."""
    with _COMPRESSED.get(path.suffix.lower(), Path.open)(path, "rb") as file:
        start = file.peek(4)[:4]
        if start.startswith(codecs.BOM_UTF8):
            file.read(len(codecs.BOM_UTF8))
        elif start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):  # as Windows writes "Unicode" text
            try:
                file = io.BytesIO(file.read().decode("utf-16").encode())
            except UnicodeDecodeError as error:
                raise InputError(
                    f"{path}: begins as UTF-16 but is not ({error.reason} at byte {error.start})\n"
                    "  fix   save it as UTF-8, or leave it out"
                ) from error
        yield file


def _text(path: Path) -> Iterator[bytes]:
    left = b""
    with _opened(path) as file:
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


def _html(path: Path) -> Iterator[bytes]:
    with _opened(path) as file:
        yield markup.visible(file.read())


def _notebook(path: Path) -> Iterator[bytes]:
    """What stands in the cells of a Jupyter notebook, without outputs."""
    notebook = _json(path)
    cells = notebook.get("cells") if isinstance(notebook, dict) else None
    if not isinstance(cells, list) or not all(isinstance(cell, dict) for cell in cells):
        raise InputError(f"{path}: not a Jupyter notebook of version 4\n  fix   open and save it, or leave it out")
    sources = (cell.get("source", "") for cell in cells)
    texts = ("".join(map(str, source)) if isinstance(source, list) else str(source) for source in sources)
    yield _encoded("\n\n".join(filter(None, texts)))


def _json(path: Path) -> Any:
    with _opened(path) as file:
        raw = file.read()
    return json_value(raw.decode("utf-8", "surrogateescape"), path, "correct it, or leave it out")


def _lines(path: Path, columns: Sequence[str]) -> Iterator[Row]:
    """The objects of a file with one JSON object on each line."""
    with _opened(path) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            place = f"{path}:{number}"
            yield place, json_object(line.decode("utf-8", "surrogateescape"), place, "one object per line")


def _json_records(path: Path, columns: Sequence[str]) -> Iterator[Row]:
    """The objects of a list, or one object. A file of several objects, one on each line, is read too."""
    try:
        value = _json(path)
    except InputError as error:
        if "Extra data" not in str(error):
            raise
        yield from _lines(path, columns)
        return
    records = value if isinstance(value, list) else [value]
    for number, record in enumerate(records, 1):
        place = f"{path}: item {number}" if isinstance(value, list) else str(path)
        if isinstance(record, str) and len(columns) == 1:  # a list of texts
            record = {columns[0]: record}
        if not isinstance(record, dict):
            raise InputError(f"{place}: a {type(record).__name__}\n  fix   give a list of objects, or of texts")
        yield place, record


def _csv(path: Path, columns: Sequence[str]) -> Iterator[Row]:
    """The rows below the header. The header's separator is the one that makes a column of what is looked for."""
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # the default refuses texts of 131 kB
    with _opened(path) as raw, io.TextIOWrapper(raw, "utf-8", "surrogateescape", newline="") as file:
        first = file.readline()
        separators = ["\t", ","] if ".tsv" in path.suffixes else [",", ";", "\t", "|"]

        def split(by: str) -> list[str]:
            return next(csv.reader([first], delimiter=by), [])

        by = next((one for one in separators if set(columns) <= set(split(one))), max(separators, key=first.count))
        header = split(by)
        rows = csv.reader(file, delimiter=by, strict=True)
        while True:
            place = f"{path}:{rows.line_num + 2}"
            try:
                row = next(rows, None)
            except csv.Error as error:
                raise InputError(f"{place}: not CSV ({error})\n  fix   correct it, or leave the file out") from error
            if row is None:
                return
            if row and len(row) != len(header):
                raise InputError(
                    f"{place}: {len(row)} fields, but the header has {len(header)}\n"
                    '  fix   put "quotes" around texts that hold separators, or leave the file out'
                )
            if row:
                yield place, dict(zip(header, row, strict=True))


def _array_record(path: Path) -> Iterator[bytes]:
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


class Format(NamedTuple):
    """How a file is read: as texts, or as records one of whose fields is the text."""

    name: str  # part of the fingerprint of a source
    texts: Callable[[Path], Iterator[bytes]] | None = None
    records: Callable[[Path, Sequence[str]], Iterator[Row]] | None = None
    table: bool = False  # a file with columns, which is not read as a stream
    compressible: bool = True


_PLAIN = Format("_text", texts=_text)
_LINES = Format("_jsonl", records=_lines)
_CSV = Format("csv", records=_csv)
_HTML = Format("html", texts=_html)
_ARRAY_RECORD = Format("_array_record", texts=_array_record, compressible=False)
_FORMATS = {
    ".txt": _PLAIN,
    ".md": _PLAIN,
    ".rst": _PLAIN,
    ".tex": _PLAIN,
    ".py": _PLAIN,
    ".html": _HTML,
    ".htm": _HTML,
    ".ipynb": Format("ipynb", texts=_notebook),
    ".csv": _CSV,
    ".tsv": _CSV,
    ".json": Format("json", records=_json_records),
    ".jsonl": _LINES,
    ".ndjson": _LINES,
    ".parquet": Format("_parquet", records=lambda path, columns: tables.records(path), table=True, compressible=False),
    ".arrow": Format("arrow", records=lambda path, columns: tables.records(path), table=True, compressible=False),
    ".array_record": _ARRAY_RECORD,
    ".arrayrecord": _ARRAY_RECORD,
}
BINARY, NOT_UTF8 = "binary", "not UTF-8"
KNOWN = f"{' '.join(_FORMATS)}, and these compressed as {' '.join(_COMPRESSED)}"


def format_of(path: Path) -> Format | None:
    """The format of a file, by its ending; None for an ending that is not known."""
    suffix = path.suffix.lower()
    if suffix not in _COMPRESSED:
        return _FORMATS.get(suffix)
    inner = _FORMATS.get(Path(path.stem).suffix.lower())
    return inner if inner and inner.compressible else None


def texts(path: Path, field: str) -> Iterator[bytes]:
    """The documents of a file that are not empty. In a file of records, `field` holds the text.

    Raises an InputError that names the file, and the line if there is one, for a document that cannot be read.
    """
    kind = format_of(path)
    assert kind
    with _reading(path):
        if kind.texts:
            yield from filter(None, kind.texts(path))
        elif kind.table:
            yield from filter(None, tables.texts(path, field))
        else:
            assert kind.records
            for place, record in kind.records(path, [field]):
                if document := _field(place, record, field):
                    yield document


def whole(path: Path, field: str) -> bytes:
    """All documents of a file as one text. Raises InputError as `texts` does."""
    return (b"" if format_of(path) == _PLAIN else b"\n").join(texts(path, field))


def records(path: Path) -> Iterator[Row]:
    """The records of a file, each with its place. Raises InputError as `texts` does."""
    kind = format_of(path)
    assert kind and kind.records
    with _reading(path):
        yield from kind.records(path, ())


def oddity(path: Path) -> str:
    """What is odd about a file that should be text, judged by its beginning: BINARY, NOT_UTF8 or "".

    Raises an InputError that names a file that cannot be read.
    """
    kind = format_of(path)
    if kind is None or not kind.compressible:
        return ""
    with _reading(path), _opened(path) as file:
        start = file.read(SECTION_BYTES)
    if b"\0" in start:
        return BINARY
    try:
        codecs.getincrementaldecoder("utf-8")().decode(start, final=len(start) < SECTION_BYTES)
    except UnicodeDecodeError:
        return NOT_UTF8
    return ""


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """A context in which the errors of files and of compressed data become InputErrors that name `path`."""
    try:
        yield
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:  # pyarrow too raises OSError for damaged pages
        raise InputError(_refused(path, error)) from error
    except ValueError as error:
        if isinstance(error, InputError) or "pyarrow" not in sys.modules:
            raise
        import pyarrow

        if not isinstance(error, pyarrow.ArrowException):
            raise
        raise InputError(_refused(path, error)) from error


def _refused(path: Path, error: Exception) -> str:
    what = {".parquet": "as parquet ", ".arrow": "as arrow "}.get(path.suffix.lower(), "")
    return (
        f"{path}: cannot be read {what}({' '.join(str(error).split())})\n"
        "  fix   make it readable and whole, or leave it out"
    )


def _field(place: str, record: dict[str, Any], field: str) -> bytes:
    """The text of a record. Raises an InputError that lists its fields if it has none."""
    if field not in record:
        raise InputError(
            f"{place}: no field {field}{did_you_mean(field, record)}\n"
            f"  fix   set data.text_field to one of {', '.join(map(str, record)) or 'its fields'}"
            + (", or for conversations data.messages_field" if any(map(_is_a_list, record.values())) else "")
            + tables.OR_LEAVE_OUT
        )
    text = record[field]
    if not isinstance(text, str):
        texts = ", ".join(name for name, value in record.items() if isinstance(value, str))
        fix = (
            f"for conversations set data.messages_field={field}"
            if _is_a_list(text)
            else f"set data.text_field to one of {texts}"
            if texts
            else "set data.text_field, or leave the file out"
        )
        raise InputError(f"{place}: {field} is a {type(text).__name__}, not text\n  fix   {fix}")
    return _encoded(text)


def _is_a_list(value: Any) -> bool:
    return isinstance(value, list)


def _encoded(text: str) -> bytes:
    """The bytes of a text that was decoded with surrogateescape."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # JSON can spell half a character (a lone surrogate) as an escape
        return text.encode("utf-8", "surrogatepass")
