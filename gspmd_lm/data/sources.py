"""The documents of the sources that a config names. They are read as a stream, in a fixed order."""

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gspmd_lm.config import Data
from gspmd_lm.config import data as config_data
from gspmd_lm.data import corpus, formats, readers
from gspmd_lm.data.remote import Progress, RemoteFile
from gspmd_lm.errors import InputError
from gspmd_lm.files import sum_of
from gspmd_lm.units import plural, whole_number

# (a record, its place such as file:line, the field of the conversation) -> a document
OfRecord = Callable[[dict[str, Any], str, str], bytes]


@dataclasses.dataclass(frozen=True)
class SourceFile:
    """A file of a source, or the lines of a file that begin in a span of it.

    field: that of its texts or conversations, or the fields of labelled texts as JSON.
    """

    path: Path  # of a copy that is not made yet if `far` is given
    field: str
    size_bytes: int
    version: str  # another one for other contents: their sha256, or what the system or the store says of changes
    span: formats.Span | None = None
    far: RemoteFile | None = None  # a file in a store, which is copied when it is read

    @property
    def name(self) -> str:
        """The path or the address, for the user."""
        return self.far.address if self.far else str(self.path)

    @property
    def whole_bytes(self) -> int:
        """The size of the whole file."""
        return self.far.size_bytes if self.far else self.path.stat().st_size

    def spans(self, most_bytes: int) -> list["SourceFile"]:
        """The file in parts of so many bytes, where it can be read in parts."""
        if self.size_bytes <= most_bytes:
            return [self]
        return [
            dataclasses.replace(self, span=span, size_bytes=span[1] - span[0]) if span else self
            for span in formats.spans(self.path, self.read_start(4), self.size_bytes, most_bytes)
        ]

    def read_start(self, size: int) -> bytes:
        """The first bytes of the whole file."""
        if self.far:
            return self.far.read_start(size)
        with self.path.open("rb") as file:
            return file.read(size)

    def current_version(self) -> str:
        """Another one if a file on this machine is changed."""
        return self.version if self.far else file_version(self.path)

    def whole_lines(self) -> formats.Span | None:
        """From the first of the lines that begin in the span to behind the last of them; None for the whole file."""
        if not self.span:
            return None
        if self.far:
            return self.far.whole_lines(self.span)
        with self.path.open("rb") as file:
            return readers.lines_between(file, *self.span)

    @contextlib.contextmanager
    def local(self, lines: formats.Span | None) -> Iterator[tuple[Path, formats.Span | None]]:
        """A context with a path at which the file can be read, and the span to read of what is there, for some lines.

        Errors about a copy of a file in a store name its address.
        """
        if not self.far:
            yield self.path, lines
            return
        with self.far.part(lines) as path:
            try:
                yield path, None
            except InputError as error:
                raise InputError(self.rename_copy(str(error), path, lines)) from error

    def rename_copy(self, text: str, path: Path, lines: formats.Span | None) -> str:
        """An error's text with the name of this file in place of `path`, which is a copy of some of its lines.

        lines: the span of these lines. A place in the copy is then given as a line after so many bytes of the file.
        """
        if self.far and lines and lines[0]:
            text = text.replace(f"{path}:", f"{self.name}, after byte {lines[0]:,}, line ")
        return text.replace(str(path), self.name)

    def facts(self, of_records: bool) -> str:
        """What the documents of the file follow from; a field only if the file has fields."""
        kind = formats.format_of(self.path)
        assert kind
        of = f"messages {self.field} " if of_records else f"{self.field} " if kind.records else ""
        return f"{of}{kind.name} {self.version}\n"


def file_version(path: Path) -> str:
    """The size and the modification time of a local file, as a text that differs after the file was changed."""
    about = path.stat()
    return f"{about.st_size} {about.st_mtime_ns}"


@dataclasses.dataclass(frozen=True)
class SourcePart:
    """Files from which rows are drawn alike."""

    name: str
    files: tuple[SourceFile, ...]
    weight: float | None = None  # rows are drawn from parts in proportion to it; None: there is one part

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


@dataclasses.dataclass(frozen=True)
class DocumentSource:
    """The documents of files. `fingerprint` is a sha256 over the versions of the files."""

    description: str
    notes: str  # lines about files that were skipped or are odd; "" if there are none
    parts: tuple[SourcePart, ...]  # to train on
    held_out: SourcePart | None  # for evaluation, if it has files of its own
    fingerprint: str
    of_record: OfRecord | None = None  # makes a document of each record; None: files hold texts
    columns: tuple[str, ...] = ()  # of labelled texts
    # What is told of files that turn out to be binary or odd when they are read; None: all were looked at before.
    notes_of_read: corpus.FileNotes | None = None

    @property
    def every(self) -> tuple[SourcePart, ...]:
        """The parts to train on, and then the one for evaluation, if there is one."""
        return (*self.parts, self.held_out) if self.held_out else self.parts

    @property
    def size_bytes(self) -> int:
        return sum(part.size_bytes for part in self.every)

    def documents(self) -> Iterator[bytes]:
        """Every document to train on that is not empty, always in the same order.

        Raises an InputError that names the file, and the line if there is one, for a document that cannot be read.
        """
        return (document for part in self.parts for document, _ in self.read(part))

    def walk(self, parts: Sequence[SourcePart], what: str, progress: Progress | None) -> Iterator[bytes]:
        """The documents of parts. `progress` is told now and then, and at the end, how far `what` has come."""
        before_bytes, total_bytes, number = 0, sum(part.size_bytes for part in parts), 0
        for part in parts:
            for document, done_bytes in self.read(part):
                number += 1
                if progress and number % 256 == 0:
                    progress(what, before_bytes + done_bytes, total_bytes)
                yield document
            before_bytes += part.size_bytes
        if progress:
            progress(what, total_bytes, total_bytes)

    def read(self, part: SourcePart) -> Iterator[tuple[bytes, int]]:
        """The documents of a part, each with the bytes of the part's files up to its end, as far as that is known."""
        before_bytes = 0
        for file in part.files:
            read_bytes = 0
            for document in self._of(file):
                read_bytes += len(document)
                yield document, before_bytes + min(read_bytes, file.size_bytes)  # compressed files hold more
            before_bytes += file.size_bytes

    def _of(self, file: SourceFile) -> Iterator[bytes]:
        lines = file.whole_lines()
        with file.local(lines) as (path, span):
            if self.notes_of_read:
                odd = formats.oddity_of(file.read_start(readers.SECTION_BYTES)) if lines else formats.oddity(path)
                is_said = lines is not None and lines[0] > 0  # of an earlier part
                if not _note_oddity(odd, file.name, corpus.FileNotes() if is_said else self.notes_of_read):
                    return
            if self.of_record is None:
                texts = formats.texts(path, file.field, span, file.name)
                for text in _mark_cuts(texts, lines, file.whole_bytes) if lines else texts:
                    if isinstance(text, readers.TokenIds):
                        text.place = file.rename_copy(text.place, path, lines)
                    yield text
            else:
                for place, record in formats.records(path, self.columns, span):
                    yield self.of_record(record, place, file.field)


def open_source(
    data: Data, progress: Progress | None = None, of_record: OfRecord | None = None, hashed: bool = True
) -> DocumentSource:
    """The source that `data.source` and `data.held_out` name, its files found, checked and hashed.

    With `of_record`, each record of the files is turned into a document by it. With `hashed=False`, no file is read
    now: files are known by their sizes and by what the system or the store says of changes. Raises InputError if a name
    matches nothing, nothing is left to read, or a file cannot be read.
    """
    columns = tuple(filter(None, (*data.fields, data.label)))
    for one in (*data.sources, *data.held_out_sources):
        if random_rows(one.path) is not None:
            records = "labels" if data.label else "records", "files of records"
            what, fix = records if columns else ("documents", "stdlib or a folder of texts")
            raise InputError(f"data.source: {one.path} has no {what}\n  fix   give {fix}")
    notes = corpus.FileNotes()
    uncopied = None if hashed else {}
    held_out = _files_of(data.held_out_sources, "data.held_out", columns, notes, progress, uncopied)
    kept_out = {path.resolve() for path, _ in held_out}
    listed = []
    for group in [(one,) for one in data.sources] if data.sources[0].weight else [data.sources]:
        found = _files_of(group, "data.source", columns, notes, progress, uncopied)
        for path in [path for path, _ in found if path.resolve() in kept_out]:
            notes.skip("held out", uncopied[path].address if uncopied and path in uncopied else path)
        listed.append(("data.source", group, [one for one in found if one[0].resolve() not in kept_out]))
    listed.append(("data.held_out", data.held_out_sources, held_out))
    every = [one for *_, paths in listed for one in paths]
    if of_record:
        _check_records(data, [path for path, _ in every])
    read = iter(_hash(every, notes, progress) if uncopied is None else _list_files(every, notes, uncopied))
    parts = []
    for place, group, paths in listed:
        files = tuple(file for _ in paths if (file := next(read)))
        name = ", ".join(one.path for one in group)
        if not files and group:
            skipped = str(notes).replace("\n", "\n  ")
            raise InputError(f"{place}: {name}: nothing to read\n  {skipped}\n  fix   name other files")
        parts.append(SourcePart(name, files, group[0].weight if group else None))
    total = hashlib.sha256()
    for part in parts:
        total.update(f"part of {len(part.files)}\n".encode())
        for file in part.files:
            total.update(file.facts(of_record is not None).encode())
    count = plural(sum(len(part.files) for part in parts), "file")
    size_bytes, sums = sum(part.size_bytes for part in parts), "sha256" if hashed else "version"
    name = " and ".join(filter(None, (part.name for part in parts)))
    description = f"{name}: {count}, {size_bytes / 1e6:,.1f} MB, {sums} {total.hexdigest()[:12]}"
    *train, apart = parts
    return DocumentSource(
        description.replace("stdlib: ", "the standard library's "),
        str(notes),
        tuple(train),
        apart if apart.files else None,
        total.hexdigest(),
        of_record,
        columns,
        None if hashed else corpus.FileNotes(),
    )


def _mark_cuts(texts: Iterator[bytes], lines: formats.Span, whole_bytes: int) -> Iterator[bytes]:
    """The documents in some lines of a file. The first and the last one are marked if the text goes on beyond them."""
    before = next(texts, None)
    if isinstance(before, readers.Section):
        before.resumes = lines[0] > 0
    for text in texts:
        assert before is not None
        yield before
        before = text
    if isinstance(before, readers.Section):
        before.goes_on = lines[1] < whole_bytes
    if before is not None:
        yield before


def random_rows(source: object) -> int | None:
    """ROWS of a source `random:ROWS`; None for another source. Raises InputError if ROWS is not a positive number."""
    kind, colon, rows = str(source).partition(":")
    if not isinstance(source, str) or kind != "random" or not colon:
        return None
    if not (count := whole_number(rows)):
        raise InputError(f"data.source: {source}: write random:ROWS, ROWS a number of at least 1")
    return count


def _files_of(
    sources: Sequence[config_data.Source],
    place: str,
    columns: tuple[str, ...],
    notes: corpus.FileNotes,
    progress: Progress | None,
    uncopied: dict[Path, RemoteFile] | None,
) -> list[tuple[Path, str]]:
    """The files of sources and the field of each. A file that two sources name is read as the first of them says."""
    fields: dict[Path, str] = {}
    for one in sources:
        field = json.dumps(columns) if columns else one.messages_field or one.text_field
        for path in corpus.files([one.path], place, notes, progress, uncopied):
            if path in fields:
                notes.add(f"read once, though two entries of {place} name it", path)
            fields.setdefault(path, field)
    return list(fields.items())


def _check_records(data: Data, paths: Sequence[Path]) -> None:
    others = [path for path in paths if not ((kind := formats.format_of(path)) and kind.records)]
    if others:
        key, value = (
            ("fields", list(data.fields)) if data.fields else ("messages_field", data.sources[0].messages_field)
        )
        raise InputError(
            f"data.source: {corpus.list_names(others)}: no records, which data.{key}={value} needs\n"
            f"  fix   name .jsonl, .json, .csv, .tsv, .parquet or .arrow files, or for text leave data.{key} out"
        )


def _hash(
    files: Sequence[tuple[Path, str]], notes: corpus.FileNotes, progress: Progress | None
) -> Iterator[SourceFile | None]:
    """Each file with its sha256; None for one that is empty or binary. Raises InputError for an unreadable one."""

    def digest(one: tuple[Path, str]) -> tuple[SourceFile, str]:
        path, field = one
        try:
            size_bytes, sha256 = sum_of(path)
        except OSError as error:
            raise InputError(
                f"{path}: cannot be read ({error.strerror})\n  fix   make it readable, or leave it out"
            ) from error
        odd = formats.oddity(path) if size_bytes else "empty"
        return SourceFile(path, field, size_bytes, sha256), odd

    total_bytes, done_bytes = sum(path.stat().st_size for path, _ in files), 0
    with ThreadPoolExecutor(max_workers=4) as pool:
        for file, odd in pool.map(digest, files):
            done_bytes += file.size_bytes
            if progress:
                progress("hashing files", done_bytes, max(total_bytes, done_bytes))
            yield file if _note_oddity(odd, str(file.path), notes) else None


def _note_oddity(odd: str, name: str, notes: corpus.FileNotes) -> bool:
    """Whether a file with an oddity ('': none) is read nevertheless. The oddity is added to the notes."""
    if odd == formats.NOT_UTF8:
        notes.add("not UTF-8, read byte by byte", name)
    elif odd:
        notes.skip(odd, name)
    return odd in ("", formats.NOT_UTF8)


def _list_files(
    files: Sequence[tuple[Path, str]], notes: corpus.FileNotes, far: Mapping[Path, RemoteFile]
) -> Iterator[SourceFile | None]:
    """Each file as it is without being read; None for one that is empty."""
    for path, field in files:
        if path in far:
            file = SourceFile(path, field, far[path].size_bytes, far[path].version, far=far[path])
        else:
            file = SourceFile(path, field, path.stat().st_size, "")
            file = dataclasses.replace(file, version=f"{path.name} {file.current_version()}")
        if not file.size_bytes:
            notes.skip("empty", file.name)
        yield file if file.size_bytes else None
