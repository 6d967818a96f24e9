"""Makes the tokens of a source, once, by any number of processes that may be killed at any time.

The source is parted into units, each with shards of its own. Which unit has which documents follows from the source
alone, so the result is the same however many processes there are. A process claims a unit, makes its shards, and writes
a note. When there is a note of each unit, the notes become the manifest.
"""

import array
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import logging
import socket
import time
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import filelock
import numpy as np

from gspmd_lm import files
from gspmd_lm.data import shards, tokens
from gspmd_lm.data.chat import Chat
from gspmd_lm.data.corpus import FileNotes
from gspmd_lm.data.folders import MAKING, Folder
from gspmd_lm.data.labelled import CUT, Labelled
from gspmd_lm.data.packing import LAST, record_sizes
from gspmd_lm.data.readers import Section, TokenIds
from gspmd_lm.data.remote import Progress
from gspmd_lm.data.sources import DocumentSource, SourceFile, SourcePart
from gspmd_lm.data.tokenizer import END_OF_TEXT, HuggingFace, Tokenizer
from gspmd_lm.data.tokens import COUNTS, HELD_OUT, MANIFEST, Encoder
from gspmd_lm.errors import InputError

UNIT_BYTES = 64 * 1024 * 1024  # of files; a larger file is read in parts where its format allows it
MOST_UNITS = 4096  # of a source; a larger source has larger units
BATCH_BYTES = 4 * 1024 * 1024  # of documents that are tokenized at once
SURVEYED_BYTES = UNIT_BYTES  # of a source whose documents are counted before any is held out
PLAN = f"{MAKING}/plan.json"
BEAT_S, STALE_S = 10.0, 60.0  # how often a claim in a bucket is renewed, and after what silence it is taken over
_POLL_S = 0.2
_log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Unit:
    """A part of the work: files of one split, or parts of a file."""

    number: int
    split: str
    files: tuple[SourceFile, ...]

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    @property
    def note(self) -> str:
        return f"{self.number:05d}.json"


@dataclasses.dataclass
class _Made:
    """The tokens of one split of a unit while they are made."""

    blocks: list[np.ndarray] = dataclasses.field(default_factory=list)
    arrays: list[np.ndarray] = dataclasses.field(default_factory=list)  # what is not in a block yet
    length: int = 0
    ends: int = 0  # how many end tokens there are, also of texts within a document
    stops: array.array = dataclasses.field(default_factory=lambda: array.array("Q"))  # where documents end
    is_open: bool = False  # whether a text is begun, whose next sections are to come
    resumes: bool = False  # whether the unit begins within a text, of which it has had no section yet

    def add(self, ids: Sequence[int] | np.ndarray, dtype: np.dtype) -> None:
        self.arrays.append(np.asarray(ids).astype(dtype))
        self.length += len(ids)

    def pack(self) -> None:
        """Makes one block of many small arrays."""
        if self.arrays:
            self.blocks.append(np.concatenate(self.arrays))
            self.arrays.clear()


def make_tokens(
    folder: Folder,
    source: DocumentSource,
    encoder: Encoder,
    held_out: float,
    progress: Progress | None = None,
    about: Mapping[str, Any] = types.MappingProxyType({}),
) -> None:
    """Makes the tokens of a source in a folder, together with any other processes that do.

    A share `held_out` of the distinct documents of all parts is kept apart: those with the smallest hashes. A small
    source is counted before, and has at least one. If the source has files for evaluation, these are kept apart, and
    `held_out` is 0. Equal documents are always on the same side. about: more facts for the manifest.

    Raises InputError if the source cannot be read or split, or if the folder has the tokens of another one.
    """
    assert not (held_out and source.held_out)
    splits = [f"train{i or ''}" for i in range(len(source.parts))] + [HELD_OUT]
    units = plan_units(source, splits, UNIT_BYTES)
    plan = {
        "format": tokens.FORMAT,
        "source": source.fingerprint,
        "encoder": encoder.fingerprint,
        "held_out": None if source.held_out else held_out,
        "units": len(units),
    }
    if (manifest := tokens.read_manifest(folder)) is not None:
        _compare(folder, {key: manifest[key] for key in plan}, plan)
        folder.remove(MAKING)
        return
    if not folder.create(PLAN, files.with_sum(plan).encode()) and (there := folder.read(PLAN)) is not None:
        _compare(folder, files.checked_value(there, folder.path(PLAN)), plan)
    key = hashlib.sha256(json.dumps(plan).encode()).hexdigest()
    work = _Work(folder, source, splits, units, encoder, held_out, key, progress)
    while not work.is_complete():
        with work.claims.take(work.left) as unit:
            if unit:
                folder.write(f"{MAKING}/{unit.note}", files.with_sum(work.make(unit)).encode())
            else:
                if progress:
                    progress("waiting for other processes to tokenize", 0, 0)
                time.sleep(_POLL_S if folder.is_local else BEAT_S / 2)
    if work.notes:
        facts = {"plan": key, **plan, **about, **tokens_of_notes(source, splits, work.notes)}
        classes = encoder.classes if isinstance(encoder, Labelled) else ()
        facts |= {"dtype": work.dtype.str, "description": source.description, "classes": classes}
        folder.write(MANIFEST, files.with_sum(facts).encode())
        folder.remove(MAKING)


def plan_units(source: DocumentSource, splits: Sequence[str], unit_bytes: int) -> list[Unit]:
    """The units of a source: of each part, as many files after one another as have so many bytes, or parts of files."""
    wanted_bytes = max(unit_bytes, source.size_bytes // MOST_UNITS)
    units: list[Unit] = []
    # The last split may have no files of its own.
    for split, part in zip([*splits[: len(source.parts)], HELD_OUT], source.every, strict=False):
        taken: list[SourceFile] = []
        taken_bytes = 0
        for span in itertools.chain.from_iterable(file.spans(unit_bytes) for file in part.files):
            taken.append(span)
            taken_bytes += span.size_bytes
            if taken_bytes >= wanted_bytes:
                units.append(Unit(len(units), split, tuple(taken)))
                taken, taken_bytes = [], 0
        if taken:
            units.append(Unit(len(units), split, tuple(taken)))
    return units


def _compare(folder: Folder, there: Mapping[str, Any], plan: Mapping[str, Any]) -> None:
    """Raises InputError if a folder has other tokens than those that are to be made, and says in what they differ."""
    words = {"encoder": "tokenizer or settings", "held_out": "data.held_out", "format": "format"}
    if differing := [words.get(key, "source") for key in plan if there.get(key) != plan[key]]:
        raise InputError(
            f"{folder.address}: there are tokens with another {differing[0]}\n"
            "  fix   give another folder, or delete this one if its tokens are not needed"
        )


@dataclasses.dataclass(eq=False)
class _Work:
    """What one process knows of the making of a folder's tokens."""

    folder: Folder
    source: DocumentSource
    splits: Sequence[str]
    units: Sequence[Unit]
    encoder: Encoder
    held_out: float
    key: str  # of the plan
    progress: Progress | None

    def __post_init__(self) -> None:
        self.claims = _Claims(self.folder)
        self.left: list[Unit] = []
        self.notes: list[dict[str, Any]] = []  # when all units are made
        is_short = self.encoder.vocab_size <= 1 << 16 and isinstance(self.encoder, Tokenizer)
        self.dtype = np.dtype("<u2" if is_short else "<u4")
        self._began, self._tokens = time.monotonic(), 0

    def is_complete(self) -> bool:
        """Whether all tokens are made. If they are, `notes` has those of all units, unless there is a manifest."""
        if self.folder.read(MANIFEST) is not None:
            self.folder.remove(MAKING)
            return True
        there = self.folder.sizes(MAKING)
        left = [unit for unit in self.units if unit.note not in there]
        self.left = sorted(left, key=lambda unit: f"{unit.number:05d}.claim" in there)
        if not self.left:
            try:
                contents = self.folder.read_all([f"{MAKING}/{unit.note}" for unit in self.units])
            except FileNotFoundError:  # another process has just put the manifest in their place
                return self.folder.read(MANIFEST) is not None
            self.notes = [self._read_note(*one) for one in zip(self.units, contents, strict=True)]
        return not self.left

    def _read_note(self, unit: Unit, content: bytes) -> dict[str, Any]:
        """The note of a unit. If it is damaged, the unit is left to be made again."""
        name = f"{MAKING}/{unit.note}"
        try:
            return files.checked_value(content, self.folder.path(name))
        except InputError as error:
            _log.warning("%s: damaged (%s), this part is made anew", self.folder.address, error)
            self.folder.remove(name)
            self.left.append(unit)
            return {}

    def make(self, unit: Unit) -> dict[str, Any]:
        """Makes the shards of a unit, and returns its note."""
        made = {name: _Made() for name in self.splits}
        counts = dict.fromkeys((*COUNTS, "documents", "document_bytes"), 0)
        spelled = b""  # the end of a text, whose spellings within texts are counted
        if isinstance(self.encoder, Tokenizer):
            spelled = self.encoder.spelled_end or END_OF_TEXT.encode()
        replaced_before = self.encoder.replaced_bytes
        up_to, apart = self._held_out_limits
        notes = self.source.notes_of_read or FileNotes()
        notes.files.clear()
        versions = [file.current_version() for file in unit.files]
        part = SourcePart(unit.split, unit.files)
        for batch, done_bytes, _ in read_ahead(batches(self.source.read(part), unit.size_bytes, BATCH_BYTES)):
            if not counts["documents"] and batch and isinstance(first := batch[0][0], Section):
                for one in made.values():
                    one.resumes = first.resumes
            texts = [split_texts(document, self.encoder) for document, _ in batch]
            encoded = iter(encode_documents(self.encoder, [text for each in texts for text in each]))
            for (document, hashed), each in zip(batch, texts, strict=True):
                is_left_out = unit.split != HELD_OUT and contains(apart, hashed)
                name = HELD_OUT if hashed <= up_to else unit.split
                for number, text in enumerate(each, 1):
                    ids = next(encoded)
                    if not is_left_out and (text.strip() or len(each) == 1):
                        self._add(made[name], ids)
                    if number < len(each) or not (isinstance(document, Section) and document.goes_on):
                        self._end(made)
                counts["left_out"] += is_left_out
                counts["spelled_ends"] += len(each) - 1
                is_text = spelled != b"" and not isinstance(document, TokenIds)
                counts["spelled_texts"] += len(each) == 1 and is_text and spelled in document
                counts["documents"] += 1
                counts["document_bytes"] += len(document)
            for one in made.values():
                one.pack()
            self._report(unit, done_bytes, sum(one.length for one in made.values()))
            self.claims.renew()
        if versions != [file.current_version() for file in unit.files]:
            raise InputError("data.source: its files changed while they were read\n  fix   start again")
        self._tokens += sum(one.length for one in made.values())
        facts = {name: self._write(f"{name}-{unit.number:05d}.npy", one) for name, one in made.items() if one.length}
        counts["replaced_bytes"] = self.encoder.replaced_bytes - replaced_before
        return {**counts, "shards": facts, "notes": dict(notes.files)}

    def _add(self, made: _Made, ids: np.ndarray) -> None:
        """Adds the tokens of a record, or of a section of a text. A text that begins gets its first tokens."""
        if isinstance(self.encoder, Tokenizer):
            made.ends += int(np.count_nonzero(ids == self.encoder.end))
            if not made.is_open and not made.resumes:
                made.add(self.encoder.before, self.dtype)
            made.is_open, made.resumes = True, False
        made.add(ids, self.dtype)

    def _end(self, made: Mapping[str, _Made]) -> None:
        """Ends a text in each split that has sections of it."""
        for one in made.values():
            one.resumes = False
            if one.is_open:
                assert isinstance(self.encoder, Tokenizer)
                one.add([*self.encoder.after, self.encoder.end], self.dtype)
                one.stops.append(one.length)
                one.ends += 1
                one.is_open = False

    def _write(self, name: str, made: _Made) -> dict[str, Any]:
        """Writes a shard and the sizes of its documents. Returns what the manifest says of it."""
        stream, ends, cut = np.concatenate(made.blocks), made.ends, 0
        made.blocks.clear()
        if isinstance(self.encoder, Tokenizer):
            if made.is_open:  # a text that goes on in the next unit
                made.stops.append(made.length)
            stops = np.frombuffer(made.stops, np.uint64).astype(np.int64)
            sizes = np.stack([np.diff(stops, prepend=0), np.zeros_like(stops)], axis=1)
        else:
            sizes = record_sizes(stream)
            ends = len(stream) - int(sizes[:, 1].sum())
            if not isinstance(self.encoder, Chat):
                cut = int(np.count_nonzero(stream[stream >= LAST] & CUT))
        seed = tokens.shard_seed(self.key, name)
        contents = {
            name: shards.encode_shard(stream, seed),
            tokens.sizes_name(name): shards.encode_sizes(sizes, seed),
        }
        for each, content in contents.items():
            self.folder.write(each, content)
        sha256, sizes_sha256 = (hashlib.sha256(content).hexdigest() for content in contents.values())
        sizes_bytes = len(contents[tokens.sizes_name(name)])
        return {
            "name": name,
            "tokens": len(stream),
            "documents": len(sizes),
            "ends": ends,
            "cut": cut,
            "tokens_sha256": hashlib.sha256(stream.data).hexdigest(),
            "sha256": sha256,
            "sizes_bytes": sizes_bytes,
            "sizes_sha256": sizes_sha256,
        }

    @functools.cached_property
    def _held_out_limits(self) -> tuple[int, np.ndarray]:
        """The largest hash of a document that is held out (-1: none is), and the hashes of the files for evaluation."""
        up_to, apart = -1, np.empty(0, np.uint64)
        if self.source.held_out:
            apart = ascending_hashes(self.source.walk([self.source.held_out], "reading documents", self.progress))
        elif self.held_out and self.source.size_bytes <= SURVEYED_BYTES:
            up_to = _survey(self.source, self.held_out, self.progress)
        elif self.held_out:
            up_to = round(self.held_out * (1 << 64)) - 1
        return up_to, apart

    def _report(self, unit: Unit, done_bytes: int, made_tokens: int) -> None:
        if self.progress:
            left = {one.number for one in self.left}
            before_bytes = sum(one.size_bytes for one in self.units if one.number not in left)
            rate = (self._tokens + made_tokens) / (time.monotonic() - self._began)
            done_bytes += before_bytes
            self.progress("tokenizing", done_bytes, self.source.size_bytes, f"{rate:,.0f} tokens/s")


def tokens_of_notes(
    source: DocumentSource, splits: Sequence[str], notes: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """The facts for the manifest that follow from the notes of all units."""
    counts = (*COUNTS, "documents", "document_bytes")
    of = {HELD_OUT: source.held_out or source.parts[0]} | dict(zip(splits, source.parts, strict=False))
    found = FileNotes()
    for what, name in ((what, name) for note in notes for what, names in note["notes"].items() for name in names):
        found.add(what, name)
    splits_of_notes = []
    for name in splits:
        made = [note["shards"][name] for note in notes if name in note["shards"]]
        splits_of_notes.append({"name": name, "of": of[name].name, "weight": of[name].weight, "shards": made})
    said = "\n".join(filter(None, (source.notes, str(found))))
    return {**{key: sum(note[key] for note in notes) for key in counts}, "notes": said, "splits": splits_of_notes}


class _Claims:
    """Units that this process or another one is at work on, so that each is made once.

    In a folder of this machine a claim is a lock of the system, which ends with its process. In a bucket it is an
    object that its process renews every BEAT_S. A claim that was not renewed for STALE_S is taken over. If its process
    lives after all, both processes make the same shards.
    """

    def __init__(self, folder: Folder):
        self.folder = folder
        self._seen: dict[str, tuple[bytes | None, float]] = {}  # other processes' claims, and when each last changed
        self._mine, self._renewed = "", 0.0

    @contextlib.contextmanager
    def take(self, left: Sequence[Unit]) -> Iterator[Unit | None]:
        """A context with a unit that is left and that nobody else makes; None if there is none."""
        with contextlib.ExitStack() as stack:
            yield next((unit for unit in left if self._claim(unit, stack) and not self._is_made(unit)), None)

    def renew(self) -> None:
        """Tells the others that this process is at work on the unit that it has taken last."""
        if self._mine and time.monotonic() - self._renewed > BEAT_S:
            self.folder.write(self._mine, self._content())

    def _is_made(self, unit: Unit) -> bool:
        """Whether another process made it between a look and the claim."""
        return self.folder.read(f"{MAKING}/{unit.note}") is not None or self.folder.read(MANIFEST) is not None

    def _claim(self, unit: Unit, stack: contextlib.ExitStack) -> bool:
        name = f"{MAKING}/{unit.number:05d}"
        if self.folder.is_local:
            try:
                stack.enter_context(files.lock(Path(self.folder.address, f"{name}.lock"), timeout_s=0))
            except (filelock.Timeout, FileNotFoundError):  # MAKING is deleted when all is made
                return False
            return True
        self._mine = f"{name}.claim"
        if self.folder.create(self._mine, self._content()):
            return True
        now, content = time.monotonic(), self.folder.read(self._mine)
        before, since = self._seen.setdefault(name, (content, now))
        if content != before:
            self._seen[name] = content, now
        elif now - since > STALE_S:
            self.folder.write(self._mine, self._content())
            return True
        self._mine = ""
        return False

    def _content(self) -> bytes:
        self._renewed = time.monotonic()
        return json.dumps({"host": socket.gethostname(), "renewed": time.time()}).encode()


def batches(
    documents: Iterable[tuple[bytes, int]], total_bytes: int, least_bytes: int
) -> Iterator[tuple[list[tuple[bytes, int]], int, bool]]:
    """Yields lists of documents, each with its hash; the bytes of files read so far; and whether a list is the last.

    A list has at least so many bytes of documents, but for the last one.
    """
    batch, size_bytes = [], 0
    for document, done_bytes in documents:
        batch.append((document, _hash(document)))
        size_bytes += len(document)
        if size_bytes >= least_bytes:
            yield batch, done_bytes, False
            batch, size_bytes = [], 0
    yield batch, total_bytes, True


def read_ahead(items: Iterator[T]) -> Iterator[T]:
    """The items. A thread makes the next one while the caller uses one."""
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(next, items, None)
        while (item := coming.result()) is not None:
            coming = pool.submit(next, items, None)
            yield item


def split_texts(document: bytes, encoder: Encoder) -> list[bytes]:
    """The texts of a document: several if it is of a file in which the end of a text is spelled."""
    if isinstance(document, Section) and document.may_spell_end and isinstance(encoder, HuggingFace):
        return document.split(encoder.spelled_end)
    return [document]


def encode_documents(encoder: Encoder, texts: Sequence[bytes]) -> list[np.ndarray]:
    """The tokens of each text, without those around it, and of each document that is tokens already."""
    made = iter(encoder.encode_all([text for text in texts if not isinstance(text, TokenIds)]))
    return [_bare_tokens(text, encoder) if isinstance(text, TokenIds) else next(made) for text in texts]


def _bare_tokens(document: TokenIds, encoder: Encoder) -> np.ndarray:
    """The tokens of a document, without those that a tokenizer puts around a text. Raises InputError for others."""
    assert isinstance(encoder, Tokenizer), "records are not read as tokens"
    ids, before, after = document.decode_ids(encoder.vocab_size).tolist(), [*encoder.before], [*encoder.after]
    ids = ids[len(before) :] if ids[: len(before)] == before else ids
    ids = ids[:-1] if ids[-1:] == [encoder.end] else ids
    ids = ids[: len(ids) - len(after)] if after and ids[-len(after) :] == after else ids
    return np.asarray(ids, np.int32)


def _survey(source: DocumentSource, held_out: float, progress: Progress | None) -> int:
    """The largest hash of a document that is held out, of the share `held_out` of a source and at least one."""
    distinct = ascending_hashes(source.walk(source.parts, "reading documents", progress))
    count = max(1, round(held_out * len(distinct)))
    if count >= len(distinct):
        raise InputError(
            f"data.held_out={held_out}: {source.description} has {len(distinct)} distinct documents: "
            "none would be left to train on\n"
            "  fix   lower data.held_out (0 holds none out), or add documents"
        )
    return int(distinct[count - 1])


def ascending_hashes(documents: Iterable[bytes]) -> np.ndarray:
    return np.unique(np.fromiter(map(_hash, documents), np.uint64))


def contains(ascending: np.ndarray, hashed: int) -> bool:
    at = int(np.searchsorted(ascending, np.uint64(hashed)))
    return at < len(ascending) and int(ascending[at]) == hashed


def _hash(document: bytes) -> int:
    return int.from_bytes(hashlib.sha256(document).digest()[:8], "big")
