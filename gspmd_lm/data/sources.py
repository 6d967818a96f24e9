"""Documents from the standard library or from files. Each source is read as a stream, in a fixed order."""

import dataclasses
import glob
import hashlib
import json
import os
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gspmd_lm.config import Data
from gspmd_lm.errors import InputError, did_you_mean

Progress = Callable[[str, int, int], None]  # the current task, bytes done, bytes in all (0: not known)

Conversation = Callable[[dict[str, Any], str], bytes]  # a record and its place, file:line -> a document

# A text file above this size becomes several documents, cut at line ends. Then parts of one large file can be held out,
# and no file has to fit in memory.
SECTION_BYTES = 64 * 1024
_NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


def _text(path: Path, field: str) -> Iterator[bytes]:
    with path.open("rb") as file:
        while section := file.read(SECTION_BYTES):
            yield section + file.readline()


def _records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of a .jsonl file, each with its place, file:line."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            place = f"{path}:{number}"
            try:
                record = json.loads(line.decode("utf-8", "surrogateescape"))
            except ValueError as error:
                raise InputError(f"{place}: not JSON ({error})\n  fix   one object per line") from error
            if not isinstance(record, dict):
                raise InputError(f"{place}: a {type(record).__name__}\n  fix   one object per line")
            yield place, record


def _jsonl(path: Path, field: str) -> Iterator[bytes]:
    for place, record in _records(path):
        if field not in record:
            raise InputError(
                f"{place}: no field {field}{did_you_mean(field, record)}\n"
                f"  fix   set data.text_field to one of {', '.join(record) or 'its fields'}"
                + (", or for conversations data.messages_field" if any(map(_is_list, record.values())) else "")
            )
        text = record[field]
        if not isinstance(text, str):
            fix = f"for conversations set data.messages_field={field}" if _is_list(text) else "set data.text_field"
            raise InputError(f"{place}: {field} is a {type(text).__name__}, not text\n  fix   {fix}")
        try:
            yield text.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:  # JSON can spell half a character (a lone surrogate) as an escape
            yield text.encode("utf-8", "surrogatepass")


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _parquet(path: Path, field: str) -> Iterator[bytes]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            columns = file.schema_arrow.names
            if field not in columns:
                raise InputError(
                    f"{path}: no column {field}{did_you_mean(field, columns)}\n"
                    f"  fix   set data.text_field to one of {', '.join(columns)}"
                )
            kind = file.schema_arrow.field(field).type
            kind = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
            if str(kind) not in ("string", "large_string", "string_view", "binary", "large_binary", "binary_view"):
                raise InputError(f"{path}: column {field} is {kind}, not text\n  fix   set data.text_field")
            for batch in file.iter_batches(batch_size=1024, columns=[field]):
                yield from (text or b"" for text in batch.column(0).cast(pyarrow.large_binary()).to_pylist())
    except (pyarrow.ArrowException, OSError) as error:  # pyarrow raises OSError for damaged pages
        raise InputError(f"{path}: cannot be read as parquet ({' '.join(str(error).split())})") from error


def _array_record(path: Path, field: str) -> Iterator[bytes]:
    from array_record.python import array_record_module  # pyright: ignore[reportAttributeAccessIssue]  (compiled)

    reader = array_record_module.ArrayRecordReader(str(path))
    try:
        count = reader.num_records()
        for start in range(0, count, 1024):
            yield from reader.read(start, min(start + 1024, count))
        reader.close()  # only close() raises for a damaged file, which otherwise seems to have no records
    except Exception as error:  # the library raises nothing more precise
        raise InputError(f"{path}: cannot be read as ArrayRecord ({error or 'damaged'})") from error


_READERS: dict[str, Callable[[Path, str], Iterator[bytes]]] = {
    ".txt": _text,
    ".md": _text,
    ".py": _text,
    ".jsonl": _jsonl,
    ".parquet": _parquet,
    ".array_record": _array_record,
    ".arrayrecord": _array_record,
}


@dataclasses.dataclass(frozen=True)
class Source:
    """The documents of files. `fingerprint` is the sha256 over their contents, `size_bytes` the size of the files."""

    description: str
    files: tuple[Path, ...]
    text_field: str
    fingerprint: str
    size_bytes: int
    conversation: Conversation | None = None  # makes a document of each record; None: text_field holds it

    def documents(self) -> Iterator[bytes]:
        """Every document that is not empty, always in the same order.

        Raises an InputError that names the file, and the line if there is one, for a document that cannot be read.
        """
        for path in self.files:
            try:
                if self.conversation:
                    for place, record in _records(path):
                        yield self.conversation(record, place)
                else:
                    yield from filter(None, _READERS[path.suffix.lower()](path, self.text_field))
            except OSError as error:
                raise InputError(f"{path}: cannot be read ({error})") from error


def open(data: Data, progress: Progress | None = None, conversation: Conversation | None = None) -> Source:
    """The source that `data.source` names, its files checked and hashed.

    With `conversation`, each record of the .jsonl files is turned into a document by it. Raises InputError if a glob
    matches nothing, or a file is empty, unreadable or of an unknown kind.
    """
    if random_rows(data.source) is not None:
        raise InputError(f"data.source: {data.source} has no documents\n  fix   give stdlib or globs of text files")
    if data.source == "stdlib":
        files, name = _standard_library(), "the standard library's"
    else:
        files, name = _matching(data.source), data.source
    others = [path for path in files if path.suffix.lower() != ".jsonl"]
    if conversation and others:
        raise InputError(
            f"data.source: {_listed(others)}: no .jsonl, which data.messages_field={data.messages_field} needs\n"
            "  fix   narrow data.source to .jsonl files, or for text leave data.messages_field out"
        )
    digests, size_bytes = _hash(files, progress)
    fields = {_READERS[path.suffix.lower()] for path in files} & {_jsonl, _parquet}
    field = f"messages {data.messages_field}" if conversation else data.text_field if fields else ""
    total = hashlib.sha256(f"{field}\n".encode())
    for path, digest in zip(files, digests, strict=True):
        total.update(f"{_READERS[path.suffix.lower()].__name__} {digest}\n".encode())
    description = f"{name} {len(files):,} files, {size_bytes / 1e6:,.1f} MB, sha256 {total.hexdigest()[:12]}"
    return Source(description, tuple(files), data.text_field, total.hexdigest(), size_bytes, conversation)


def random_rows(source: str) -> int | None:
    """ROWS of a source `random:ROWS`; None for another source. Raises InputError if ROWS is not a positive number."""
    kind, colon, rows = source.partition(":")
    if kind != "random" or not colon:
        return None
    if not rows.isdecimal() or int(rows) < 1:
        raise InputError(f"data.source: {source}: write random:ROWS, ROWS a number of at least 1")
    return int(rows)


def _standard_library() -> list[Path]:
    """The .py files of the running interpreter's library, without tests and without installed packages."""
    root = Path(sysconfig.get_path("stdlib"))
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _NOT_LIBRARY]  # os.walk does not enter the others
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    files = sorted((path for path in found if path.stat().st_size), key=lambda path: path.relative_to(root).as_posix())
    if not files:
        raise InputError(f"data.source: stdlib: no .py files in {root}\n  fix   give a glob of text files")
    return files


def _matching(patterns: str) -> list[Path]:
    """The files that match any of the globs, sorted, each of them once."""
    found: dict[Path, None] = {}
    for pattern in patterns.split():
        names = sorted(glob.glob(str(Path(pattern).expanduser()), recursive=True))
        files = [path for path in map(Path, names) if not path.is_dir()]
        if not files:
            folder = f"\n  fix   it is a folder: write {pattern.rstrip('/')}/**/*.txt" if names else ""
            raise InputError(
                f"data.source: {pattern} matches no file{did_you_mean(pattern, ['stdlib', 'random:64'])}"
                + (folder or "\n  fix   give stdlib, random:ROWS or globs, separated by spaces, seen from here")
            )
        found.update(dict.fromkeys(files))
    if not found:
        raise InputError("data.source is empty\n  fix   give stdlib, random:ROWS or globs")
    files = list(found)
    unknown = [path for path in files if path.suffix.lower() not in _READERS]
    if unknown:
        raise InputError(
            f"data.source: {_listed(unknown)}: unknown ending\n"
            f"  fix   narrow the glob to files that end in {', '.join(_READERS)}"
        )
    return files


def _hash(files: Sequence[Path], progress: Progress | None) -> tuple[list[str], int]:
    """The sha256 of each file, and the bytes of all. Raises InputError for a file that is empty or unreadable."""

    def digest(path: Path) -> tuple[str, int]:
        try:
            with path.open("rb") as file:
                hashed = hashlib.file_digest(file, "sha256").hexdigest()
                return hashed, file.tell()
        except OSError as error:
            raise InputError(f"{path}: cannot be read ({error})") from error

    digests, empty, total_bytes = [], [], 0
    with ThreadPoolExecutor(max_workers=4) as pool:
        for path, (path_digest, size_bytes) in zip(files, pool.map(digest, files), strict=True):
            digests.append(path_digest)
            total_bytes += size_bytes
            if not size_bytes:
                empty.append(path)
            if progress:
                progress("hashing files", total_bytes, 0)
    if empty:
        raise InputError(f"data.source: {_listed(empty)}: empty\n  fix   remove it, or narrow the glob")
    return digests, total_bytes


def _listed(paths: Sequence[Path]) -> str:
    more = f" and {len(paths) - 3:,} more" if len(paths) > 3 else ""
    return ", ".join(map(str, paths[:3])) + more
