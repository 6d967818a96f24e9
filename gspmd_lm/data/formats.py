"""Documents from one file of any format that is known. An ending says the format."""

import codecs
import contextlib
import functools
import logging
import lzma
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gspmd_lm.data import readers
from gspmd_lm.errors import InputError, name_kind


class Format(NamedTuple):
    """How a file is read: as texts, or as records one of whose fields is the text."""

    name: str  # part of the fingerprint of a source
    texts: Callable[..., Iterator[bytes]] | None = None  # of a path
    records: Callable[..., Iterator[readers.Row]] | None = None  # of a path and the columns that are looked for
    table: bool = False  # a file with a schema, which is not read as a stream
    compressible: bool = True
    parted: bool = False  # its readers take a span of a file that is not compressed


_PLAIN = Format("_text in one", texts=readers.plain_text, parted=True)
_LINES = Format("_jsonl", records=readers.json_lines, parted=True)
_CSV = Format("csv", records=readers.csv_rows)
_HTML = Format("_html", texts=readers.html_text)
_ARRAY_RECORD = Format("_array_record", texts=readers.array_records, compressible=False)
_FORMATS = {
    ".txt": _PLAIN,
    ".md": _PLAIN,
    ".rst": _PLAIN,
    ".tex": _PLAIN,
    ".py": _PLAIN,
    ".html": _HTML,
    ".htm": _HTML,
    ".ipynb": Format("ipynb", texts=readers.notebook),
    ".csv": _CSV,
    ".tsv": _CSV,
    ".json": Format("json", records=readers.json_records),
    ".jsonl": _LINES,
    ".ndjson": _LINES,
    ".parquet": Format("_parquet", records=readers.table_records, table=True, compressible=False),
    ".arrow": Format("arrow", records=readers.table_records, table=True, compressible=False),
    ".array_record": _ARRAY_RECORD,
    ".arrayrecord": _ARRAY_RECORD,
}
_log = logging.getLogger(__name__)
BINARY, NOT_UTF8 = "binary", "not UTF-8"
KNOWN = f"{' '.join(_FORMATS)}, and these compressed as {' '.join(readers.COMPRESSED)}"


def format_of(path: Path) -> Format | None:
    """The format of a file, by its ending; None for an ending that is not known."""
    suffix = path.suffix.lower()
    if suffix not in readers.COMPRESSED:
        return _FORMATS.get(suffix)
    inner = _FORMATS.get(Path(path.stem).suffix.lower())
    return inner if inner and inner.compressible else None


Span = tuple[int, int]


def spans(path: Path, start: bytes, size_bytes: int, most_bytes: int) -> list[Span | None]:
    """The spans in which a file that begins with `start` is read, so that several processes can; [None] for a whole
    one.
    """
    kind, is_compressed = format_of(path), path.suffix.lower() in readers.COMPRESSED
    if size_bytes <= most_bytes or not (kind and kind.parted) or is_compressed or start.startswith(readers.UTF16):
        return [None]
    return [(at, min(at + most_bytes, size_bytes)) for at in range(0, size_bytes, most_bytes)]


def texts(path: Path, field: str, span: Span | None = None, name: str = "") -> Iterator[bytes]:
    """The documents of a file, or of a span of it, that are not empty. In a file of records, `field` holds the text.

    name: of the file, for the user, if it is not its path. Raises an InputError that names the file, and the line if
    there is one, for a document that cannot be read.
    """
    empty = 0
    with _reading(path):
        for text in _every_text(path, field, *filter(None, [span])):
            empty += not text
            if text:
                yield text
    if empty:
        say_once(f"{name or path}: {empty:,} text{'s are' if empty > 1 else ' is'} null or empty, and skipped")


def _every_text(path: Path, field: str, *span: Span) -> Iterator[bytes]:
    kind = format_of(path)
    assert kind
    if kind.texts:
        return kind.texts(path, *span)
    if kind.table:
        return readers.table_texts(path, field)
    assert kind.records
    return (_field(place, record, field) for place, record in kind.records(path, [field], *span))


@functools.cache
def say_once(message: str) -> None:
    """Warns, unless the same was said before."""
    _log.warning("%s", message)


def whole(path: Path, field: str) -> bytes:
    """All documents of a file as one text. Raises InputError as `texts` does, and for a document that is tokens."""
    documents = [*texts(path, field)]
    for document in documents:
        if isinstance(document, readers.TokenIds):
            fix = "set data.text_field to a field with text, or name another file"
            raise InputError(f"{document.place}: {field} is a list of tokens, not text\n  fix   {fix}")
    return (b"" if format_of(path) == _PLAIN else b"\n").join(documents)


def records(path: Path, columns: Sequence[str] = (), span: Span | None = None) -> Iterator[readers.Row]:
    """The records of a file, or of a span of it, each with its place. Raises InputError as `texts` does.

    columns: those that are looked for; records may have others.
    """
    kind = format_of(path)
    assert kind and kind.records
    with _reading(path):
        yield from kind.records(path, columns, *filter(None, [span]))


def oddity(path: Path) -> str:
    """What is odd about a file that should be text, judged by its beginning: BINARY, NOT_UTF8 or "".

    Raises an InputError that names a file that cannot be read.
    """
    kind = format_of(path)
    if kind is None or not kind.compressible:
        return ""
    with _reading(path), readers.open_text(path) as file:
        return oddity_of(file.read(readers.SECTION_BYTES))


def oddity_of(start: bytes) -> str:
    """What is odd about a text that begins with these up to SECTION_BYTES: BINARY, NOT_UTF8 or ""."""
    if b"\0" in start:
        return BINARY
    try:
        codecs.getincrementaldecoder("utf-8")().decode(start, final=len(start) < readers.SECTION_BYTES)
    except UnicodeDecodeError:
        return NOT_UTF8
    return ""


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """A context in which the errors of files and of compressed data become InputErrors that name `path`."""
    try:
        yield
    except Exception as error:
        pyarrow = sys.modules.get("pyarrow")  # it raises OSError, too, for damaged pages
        of_arrow = (pyarrow.ArrowException,) if pyarrow else ()
        if not isinstance(error, (OSError, EOFError, UnicodeDecodeError, zlib.error, lzma.LZMAError, *of_arrow)):
            raise
        raise InputError(_refusal(path, error)) from error


def _refusal(path: Path, error: Exception) -> str:
    what = {".parquet": "as parquet ", ".arrow": "as arrow "}.get(path.suffix.lower(), "")
    return (
        f"{path}: cannot be read {what}({' '.join(str(error).split())})\n"
        "  fix   make it readable and whole, or leave it out"
    )


def _field(place: str, record: dict[str, Any], field: str) -> bytes:
    """The text of a record, or its tokens; empty for null and for a list of none.

    Raises an InputError that lists the fields of the record if it has no such field.
    """
    if field not in record:
        conversations = any(isinstance(value, list) for value in record.values())
        raise readers.no_text(f"{place}: no field", field, record, conversations)
    text = record[field]
    if text is None or text == []:
        return b""
    if isinstance(text, list) and (document := readers.TokenIds.encode(text, place)) is not None:
        return document
    if not isinstance(text, str):
        texts = ", ".join(name for name, value in record.items() if isinstance(value, str))
        fix = (
            f"for conversations set data.messages_field={field}"
            if isinstance(text, list)
            else f"set data.text_field to one of {texts}"
            if texts
            else "set data.text_field, or leave the file out"
        )
        raise InputError(f"{place}: {field} is {name_kind(text)}, not text\n  fix   {fix}")
    return readers.encode_surrogates(text)
