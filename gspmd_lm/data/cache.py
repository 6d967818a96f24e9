"""The tokens of a source, computed once: a memory-mapped file for each of its parts and one for evaluation.

A folder `<key>` is always complete. It is built as `<key>.partial` under a lock, sealed with the checksums of its
files, and then renamed. A build that was killed goes on from its last note of progress. A folder that does not agree
with its checksums is built again.
"""

import array
import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import filelock
import numpy as np

from gspmd_lm import files
from gspmd_lm.config.paths import cache_entry, cache_folder, unwritable
from gspmd_lm.data.chat import Chat
from gspmd_lm.data.labelled import Labelled
from gspmd_lm.data.packing import TARGET
from gspmd_lm.data.pairs import Pairs
from gspmd_lm.data.readers import Section
from gspmd_lm.data.sources import DocumentSource, Progress, SourcePart
from gspmd_lm.data.tokenizer import HuggingFace, Tokenizer
from gspmd_lm.errors import InputError

FORMAT = 3  # to be raised when the same source and tokenizer give other files
Encoder = Tokenizer | Chat | Labelled | Pairs  # what makes tokens of documents; the last three of records
_NOTHING = hashlib.sha256().hexdigest()
SEGMENT_BYTES = 16 * 1024 * 1024  # bytes of documents between two notes of progress
HELD_OUT = "held_out"
PROGRESS = "progress.json"


_log = logging.getLogger(__name__)


@dataclasses.dataclass
class Progressed:
    """The progress of a build: facts about the source, and how far the files are. Kept as progress.json."""

    dtype: str
    documents: int  # in the source
    document_bytes: int
    held_out_up_to: int  # documents with a hash up to this are held out; -1: none are, or they have files of their own
    splits: list[str]  # one for each part, and HELD_OUT
    done_documents: int = 0
    done_bytes: int = 0
    replaced_bytes: int = 0
    left_out: int = 0  # documents of the parts that are also in the files for evaluation
    spelled_ends: int = 0  # how often a text file spells the token that ends a text
    unended: list[str] = dataclasses.field(default_factory=list)  # splits with a text whose next sections are to come
    tokens: dict[str, int] = dataclasses.field(default_factory=dict)
    # How many tokens have no target after them: in documents the ends, in conversations all but those before the
    # assistant's tokens, in labelled texts all, in pairs those of sources.
    ends: dict[str, int] = dataclasses.field(default_factory=dict)
    sha256: dict[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class CachedSplit:
    """The tokens of one side of a source: of records, or documents that end with the tokenizer's end token."""

    # [tokens], memory-mapped. Conversations have the bits of data/packing.py, labelled texts those of data/labelled.py.
    stream: np.ndarray
    ends: int  # how many of the tokens have no target after them


@dataclasses.dataclass(frozen=True)
class TokenCache:
    """The splits of a source and the folder they lie in."""

    folder: Path
    train: tuple[CachedSplit, ...]  # of each part
    held_out: CachedSplit
    replaced_bytes: int  # bytes or characters that no token stands for
    left_out: int  # documents that are not used for training because they are in the files for evaluation
    spelled_ends: int  # how often a text file spells the token that ends a text


def open_cache(
    source: DocumentSource, tokenizer: Encoder, held_out: float, progress: Progress | None = None
) -> TokenCache:
    """The tokens of the source, from its cache folder or tokenized now.

    A share `held_out` of the distinct documents of all parts is kept apart: those with the smallest hashes, and at
    least one. If the source has files for evaluation, these are kept apart, and `held_out` is 0. Equal documents are
    always on the same side. One of several processes builds the folder, and the others wait for it.
    Raises InputError if the source cannot be read or split, or the folder cannot be written.
    """
    assert not (held_out and source.held_out)
    settings = json.dumps([FORMAT, source.fingerprint, tokenizer.fingerprint, held_out])
    splits = [f"train{i or ''}" for i in range(len(source.parts))] + [HELD_OUT]
    folder = cache_folder("data") / hashlib.sha256(settings.encode()).hexdigest()[:24]
    try:
        if cache := _read(folder, splits):
            return cache
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder = cache_entry(folder, folder.with_suffix(".lock"), folder.with_suffix(files.PARTIAL))
        lock = filelock.FileLock(f"{folder}.lock")
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            if progress:
                progress("waiting for another process to tokenize", 0, 0)
            lock.acquire()
        try:
            cache = _read(folder, splits, _log.warning)
            if not cache:
                _build(folder, source, splits, tokenizer, held_out, progress)
                cache = _read(folder, splits)
        finally:
            lock.release()
    except OSError as error:
        raise unwritable(folder, str(error), "the tokens ") from error
    assert cache
    return cache


def file_names(splits: Sequence[str]) -> tuple[str, ...]:
    """The files of a folder."""
    return (PROGRESS, *(f"{name}.tokens" for name in splits))


def _read(folder: Path, splits: Sequence[str], say: Callable[[str], None] = lambda _: None) -> TokenCache | None:
    """The cache in a folder; None if there is none, or if it is damaged, which `say` is told."""
    if not folder.is_dir():
        return None
    if damage := files.damage(folder, file_names(splits)):
        say(f"{folder}: damaged ({damage}), the tokens are made anew")
        return None
    noted = Progressed(**files.read_json(folder / PROGRESS))
    streams = []
    for name in splits:
        count, path = noted.tokens[name], folder / f"{name}.tokens"
        stream = np.asarray(np.memmap(path, noted.dtype, "r", shape=(count,))) if count else np.empty(0, noted.dtype)
        streams.append(CachedSplit(stream, noted.ends[name]))
    return TokenCache(
        folder, tuple(streams[:-1]), streams[-1], noted.replaced_bytes, noted.left_out, noted.spelled_ends
    )


@dataclasses.dataclass
class _File:
    """The file of one split while it is written, with its checksum so far."""

    file: BinaryIO
    sha256: Any

    def add(self, tokens: bytes) -> None:
        self.file.write(tokens)
        self.file.flush()
        os.fsync(self.file.fileno())
        self.sha256.update(tokens)


def _read_unfinished(partial: Path) -> tuple[Progressed, dict[str, _File]] | None:
    """The progress and the files of a build that was killed; None if there is none or it is damaged."""
    opened: dict[str, _File] = {}
    try:
        noted = Progressed(**files.read_json(partial / PROGRESS))
        for name in noted.splits:
            file = (partial / f"{name}.tokens").open("ab+")
            opened[name] = _File(file, hashlib.sha256())
            left_bytes = noted.tokens[name] * np.dtype(noted.dtype).itemsize
            file.truncate(left_bytes)  # drops what was written after the note
            file.seek(0)
            while block := file.read(1 << 20):
                opened[name].sha256.update(block)
            if opened[name].sha256.hexdigest() != noted.sha256[name]:
                raise ValueError(f"{name}.tokens has changed")
        return noted, opened
    except FileNotFoundError:
        pass
    except ValueError as error:
        _log.warning("%s: damaged (%s), the tokens are made anew", partial, error)
    for one in opened.values():
        one.file.close()
    return None


def _build(
    folder: Path,
    source: DocumentSource,
    splits: list[str],
    tokenizer: Encoder,
    held_out: float,
    progress: Progress | None,
) -> None:
    partial = folder.with_name(f"{folder.name}{files.PARTIAL}")
    begun = _read_unfinished(partial)
    if not begun:
        shutil.rmtree(partial, ignore_errors=True)
        noted = _survey(source, splits, tokenizer, held_out, progress)
        partial.mkdir()
        for name in splits:
            (partial / f"{name}.tokens").touch()
        files.replace_json(partial / PROGRESS, dataclasses.asdict(noted))
        begun = _read_unfinished(partial)
        assert begun
    noted, written = begun
    apart = _ascending_hashes(source, source.held_out) if source.held_out else None
    replaced_before = noted.replaced_bytes - tokenizer.replaced_bytes
    with contextlib.ExitStack() as stack:
        for one in written.values():
            stack.enter_context(one.file)
        for segment in _segments(source, splits, skip=noted.done_documents):
            parts: dict[str, list[np.ndarray]] = {name: [] for name in splits}
            documents = [document for _, document in segment]
            texts = [_texts(document, tokenizer) for document in documents]
            encoded = iter(tokenizer.encode_all([text for each in texts for text in each]))
            for (name, document), each in zip(segment, texts, strict=True):
                hashed = _hash(document)
                is_left_out = name != HELD_OUT and apart is not None and _contains(apart, hashed)
                noted.left_out += is_left_out
                name = HELD_OUT if hashed <= noted.held_out_up_to else name
                for number, text in enumerate(each, 1):
                    ids = next(encoded)
                    if not is_left_out and (text.strip() or len(each) == 1):
                        _add(noted, parts, name, ids, tokenizer)
                    if number < len(each) or not (isinstance(document, Section) and document.goes_on):
                        _end(noted, parts, tokenizer)
                noted.spelled_ends += len(each) - 1
            for name, arrays in parts.items():
                tokens = np.concatenate(arrays).astype(noted.dtype) if arrays else np.empty(0, noted.dtype)
                written[name].add(tokens.tobytes())
                noted.tokens[name] += len(tokens)
                noted.sha256[name] = written[name].sha256.hexdigest()
            noted.done_documents += len(segment)
            noted.done_bytes += sum(map(len, documents))
            noted.replaced_bytes = replaced_before + tokenizer.replaced_bytes
            files.replace_json(partial / PROGRESS, dataclasses.asdict(noted))
            if progress:
                progress("tokenizing", noted.done_bytes, noted.document_bytes)
    if (noted.done_documents, noted.done_bytes) != (noted.documents, noted.document_bytes):
        shutil.rmtree(partial)
        raise InputError("data.source: its files changed while they were read\n  fix   start again")
    files.seal(partial, file_names(splits))
    if folder.exists():  # it is damaged, or it would have been used
        shutil.rmtree(folder)
    partial.rename(folder)


def _texts(document: bytes, tokenizer: Encoder) -> list[bytes]:
    """The texts of a document: several if it is of a file in which the end of a text is spelled."""
    if isinstance(document, Section) and document.may_spell_end and isinstance(tokenizer, HuggingFace):
        return document.split(tokenizer.spelled_end)
    return [document]


def _add(noted: Progressed, parts: dict[str, list[np.ndarray]], name: str, ids: np.ndarray, tokenizer: Encoder) -> None:
    """Adds the tokens of a record, or of a section of a text, to a split. A text that begins gets its first tokens."""
    parts[name].append(ids)
    if isinstance(tokenizer, Chat | Labelled | Pairs):
        noted.ends[name] += int(np.count_nonzero((ids & TARGET) == 0))
        return
    noted.ends[name] += int(np.count_nonzero(ids == tokenizer.end))
    if name not in noted.unended:
        parts[name].insert(-1, np.asarray(tokenizer.before, np.int32))
        noted.unended.append(name)


def _end(noted: Progressed, parts: dict[str, list[np.ndarray]], tokenizer: Encoder) -> None:
    """Ends a text in each split that has sections of it."""
    for name in noted.unended:
        assert not isinstance(tokenizer, Chat | Labelled | Pairs)
        parts[name].append(np.asarray([*tokenizer.after, tokenizer.end], np.int32))
        noted.ends[name] += 1
    noted.unended.clear()


def _survey(
    source: DocumentSource, splits: list[str], tokenizer: Encoder, held_out: float, progress: Progress | None
) -> Progressed:
    """The sizes of a source and the hashes that are held out, from a first pass over it."""
    hashes, document_bytes = array.array("Q"), 0
    for document in source.walk(source.every, "reading documents", progress):
        hashes.append(_hash(document))
        document_bytes += len(document)
    distinct = np.unique(np.frombuffer(hashes, np.uint64)) if hashes else np.empty(0, np.uint64)
    count = max(1, round(held_out * len(distinct))) if held_out else 0
    if count and count >= len(distinct):
        raise InputError(
            f"data.held_out={held_out}: {source.description} has {len(distinct)} distinct documents: "
            "none would be left to train on\n"
            "  fix   lower data.held_out (0 holds none out), or add documents"
        )
    dtype = "<u2" if tokenizer.vocab_size <= 1 << 16 and not isinstance(tokenizer, Chat | Labelled | Pairs) else "<u4"
    return Progressed(
        dtype,
        len(hashes),
        document_bytes,
        int(distinct[count - 1]) if count else -1,
        splits,
        tokens=dict.fromkeys(splits, 0),
        ends=dict.fromkeys(splits, 0),
        sha256=dict.fromkeys(splits, _NOTHING),
    )


def _segments(source: DocumentSource, splits: Sequence[str], skip: int) -> Iterator[list[tuple[str, bytes]]]:
    """The documents after the first `skip`, each with its split, in lists of at least SEGMENT_BYTES.

    The last list may be smaller.
    """
    segment, size_bytes, number = [], 0, 0
    for split, part in zip(splits, source.every, strict=False):  # the last split may have no files of its own
        for document, _ in source.read(part):
            number += 1
            if number <= skip:
                continue
            segment.append((split, document))
            size_bytes += len(document)
            if size_bytes >= SEGMENT_BYTES:
                yield segment
                segment, size_bytes = [], 0
    if segment:
        yield segment


def _ascending_hashes(source: DocumentSource, part: SourcePart) -> np.ndarray:
    return np.unique(np.fromiter((_hash(document) for document, _ in source.read(part)), np.uint64))


def _contains(ascending: np.ndarray, hashed: int) -> bool:
    at = int(np.searchsorted(ascending, np.uint64(hashed)))
    return at < len(ascending) and int(ascending[at]) == hashed


def _hash(document: bytes) -> int:
    return int.from_bytes(hashlib.sha256(document).digest()[:8], "big")
