"""What images and sounds share: tables, files that are decoded when a row is read, and which are held out."""

import abc
import concurrent.futures
import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gspmd_lm.config import Data
from gspmd_lm.config import data as config_data
from gspmd_lm.data import corpus, formats
from gspmd_lm.data.remote import Progress
from gspmd_lm.errors import InputError, name_kind
from gspmd_lm.runtime import host

_THREADS = 8
NOTED = 256  # records, or files, between two calls of `progress`


class Opened(NamedTuple):
    """The rows of images or sounds that a config names, and what the user is told of them."""

    train: "Rows"
    held_out: "Rows | None"
    what: str  # images or sounds, with their texts or objects
    names: str  # of the sources
    notes: str  # lines
    fingerprint: str
    classes: tuple[str, ...] = ()


class Encoded(NamedTuple):
    """A file that is not decoded yet."""

    place: str  # its file, or file and row
    sha256: bytes
    content: Path | bytes

    @classmethod
    def of(cls, place: str, content: bytes, path: Path | None = None) -> "Encoded":
        """With a path, the content is read again when it is needed."""
        return cls(place, hashlib.sha256(content).digest(), path or content)

    def read(self) -> bytes:
        return self.content if isinstance(self.content, bytes) else bytes_of(self.content)


class Item(NamedTuple):
    """An image or a sound that is not decoded yet, with its label, its text, or the mask of an object in it."""

    encoded: Encoded
    label: str = ""
    text: np.ndarray = np.empty(0, np.int32)  # its tokens, special ones included
    cut: bool = False  # whether tokens of the text were left out
    mask: Encoded | None = None
    prompt: tuple[float, ...] = ()  # x and y of a point, or of both corners of a box, in pixels; (): the mask says it


class Found(NamedTuple):
    """The items of `data.source` and those of `data.held_out`, and what the user is told of their files."""

    train: list[Item]
    held_out: list[Item]
    notes: corpus.FileNotes


OfRecord = Callable[[Path, str, dict[str, Any]], Item]  # (a table, the place of a record in it, its fields) -> item


@dataclasses.dataclass(frozen=True, eq=False)
class Rows(abc.ABC):
    """Rows with one image or sound in each, which is decoded when it is read."""

    items: Sequence[Item]

    def __len__(self) -> int:
        return len(self.items)

    @abc.abstractmethod
    def empty(self, count: int) -> dict[str, np.ndarray]:
        """The arrays of `count` rows of padding, which no score counts."""

    @abc.abstractmethod
    def fill(self, fields: dict[str, np.ndarray], i: int, item: Item) -> None:
        """Writes an item into row i of what `empty` gave. Raises an InputError that names its place."""

    def read(self, indices: Sequence[int] | np.ndarray) -> dict[str, np.ndarray]:
        """The arrays of rows, decoded in threads. An index of -1 gives an empty row. Raises InputError as `fill`."""
        fields = self.empty(len(indices))
        wanted = [(i, self.items[index]) for i, index in enumerate(indices) if index >= 0]
        with concurrent.futures.ThreadPoolExecutor(min(_THREADS, host.count_cpus())) as pool:
            list(pool.map(lambda one: self.fill(fields, *one), wanted))
        return fields


def bytes_of(path: Path) -> bytes:
    """The content of a file. Raises InputError if it cannot be read."""
    try:
        return path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: the name has the character of code 0
        reason = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"{path}: cannot be read ({reason})\n  fix   make it readable, or leave it out") from error


def find_both(
    data: Data, find: Callable[[corpus.FileNotes, Sequence[config_data.Source], str], Iterable[Item]]
) -> Found:
    """The training items and the held-out ones, with notes about files.

    find: gives the items of one setting, from the notes that it adds to, the sources and the name of the setting.
    """
    notes = corpus.FileNotes()
    train, held_out = find(notes, data.sources, "data.source"), find(notes, data.held_out_sources, "data.held_out")
    return Found([*train], [*held_out], notes)


def read_tables(data: Data, endings: Sequence[str], what: str, of_record: OfRecord, progress: Progress | None) -> Found:
    """The items that `of_record` makes of the records of tables, in their order.

    The user is told of skipped files, but not of those with `endings`, which tables name. Raises InputError as
    `of_record` does, and if `data.fields` does not name the fields.
    """

    def find(notes: corpus.FileNotes, sources: Sequence[config_data.Source], place: str) -> Iterator[Item]:
        count = 0
        if not data.fields:
            raise InputError(f"data.fields: records have {what} and texts\n  fix   set it to the names of both fields")
        for source in sources:
            if source.weight:
                raise InputError(f"{place}: {source.path}: {what} have no weights\n  fix   drop the weight")
            skipped = corpus.FileNotes()
            for path in corpus.files([source.path], place, skipped, progress):
                kind = formats.format_of(path)
                if not kind or not kind.records:
                    skipped.skip("no table", path)
                    continue
                for where, record in formats.records(path, [*filter(None, (*data.fields, data.label))]):
                    count += 1
                    if progress and count % NOTED == 0:
                        progress(f"reading {what} of {path}", 0, 0)
                    yield of_record(path, where, record)
            for reason, names in skipped.files.items():
                for name in names:
                    if not name.lower().endswith(tuple(endings)):
                        notes.add(reason, name)

    return find_both(data, find)


def content_of(table: Path, where: str, record: dict[str, Any], name: str, what: str) -> tuple[Encoded, bytes]:
    """The file that the field `name` of a record holds, and its content.

    The field holds the file's bytes, {bytes}, or its name, as seen from the folder of the table. Raises an InputError
    that names the place if there is no file.
    """
    held, path = record.get(name), None
    if isinstance(held, dict):  # as the package datasets writes it
        held = held.get("bytes") or held.get("path")
    if isinstance(held, str) and held:
        path = table.parent / held
        where, held = f"{where}: {path}", bytes_of(path)
    if not isinstance(held, bytes):
        found = f"is {name_kind(held)}" if name in record else f"is not one of {', '.join(record)}"
        raise InputError(
            f"{where}: {name} {found}: there is no {what}\n"
            f"  fix   name in data.fields the column with the files of {what}s, their bytes, or {{bytes}}"
        )
    return Encoded.of(where, held, path), held


def open_rows(
    data: Data,
    kind: str,
    what: str,
    rows: Callable[[list[Item]], Rows],
    found: Found,
    settings: Sequence[Any],
    lines: Sequence[str] = (),
    classes: tuple[str, ...] = (),
) -> Opened:
    """The rows of items.

    kind: images or sounds. what: the same with their texts or objects, for the user. settings: what the arrays of a row
    depend on, besides its item. lines: more for the user. Raises InputError if no item is left to train on.
    """
    train, held_out = _apart(data, found.train, found.held_out, kind)
    facts = hashlib.sha256(repr(settings).encode())
    for one in (*train, *held_out):
        facts.update(one.encoded.sha256 + one.label.encode() + one.text.tobytes())
        if one.mask:
            facts.update(one.mask.sha256 + repr(one.prompt).encode())
    cut = sum(one.cut for one in (*train, *held_out))
    left_out = len(found.train) - len(train) if data.held_out_sources else 0
    about = [
        f"texts cut to data.seq={data.seq:,} tokens: {cut:,}" * (cut > 0),
        f"left out of training: {left_out:,} {kind} that are also in data.held_out" * (left_out > 0),
        *lines,
        str(found.notes),
    ]
    return Opened(
        train=rows(train),
        held_out=rows(held_out) if held_out else None,
        what=what,
        names=", ".join(one.path for one in (*data.sources, *data.held_out_sources)),
        notes="\n".join(filter(None, about)),
        fingerprint=facts.hexdigest(),
        classes=classes,
    )


def _apart(data: Data, every: Sequence[Item], held_out: Sequence[Item], what: str) -> tuple[list[Item], list[Item]]:
    """The items to train on, and those to evaluate on: `held_out`, or the share of distinct contents that `data` says.

    Items with equal contents are on the same side. Raises InputError if none are left to train on.
    """
    distinct = sorted({one.encoded.sha256 for one in every})
    count = max(1, round(data.held_out_share * len(distinct))) if data.held_out_share else 0
    if count >= len(distinct):
        raise InputError(
            f"data.held_out={data.held_out_share}: {len(distinct)} distinct {what} leave none to train on\n"
            f"  fix   lower data.held_out (0 holds none out), or add {what}"
        )
    kept_out = {*distinct[:count]} | {one.encoded.sha256 for one in held_out}
    train = [one for one in every if one.encoded.sha256 not in kept_out]
    if not train:
        raise InputError(f"data.held_out has all {what} of data.source\n  fix   name others in one of them")
    return train, [*held_out] or [one for one in every if one.encoded.sha256 in kept_out]
