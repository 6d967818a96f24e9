"""Texts and pairs of texts with labels: the records of files, their tokens, and rows with one record in each."""

import dataclasses
import hashlib
import json
import logging
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import tokenizers

from gspmd_lm import files
from gspmd_lm.config import Data
from gspmd_lm.config.data import MOST_OF_SEVERAL
from gspmd_lm.config.paths import cache_folder, readable_entry, unwritable
from gspmd_lm.data.encodings import encode_texts
from gspmd_lm.data.packing import LAST
from gspmd_lm.data.shards import Stream
from gspmd_lm.data.sources import DocumentSource, Progress
from gspmd_lm.data.tokenizer import NO_CHARACTER, Tokenizer
from gspmd_lm.errors import InputError, did_you_mean, name_kind

# A record in the cache is a uint32 array: two words of 16 bits that hold the label, and its tokens. Bits in these: a
# token of the second text, and the last token of a record of which something was cut. LAST ends a record.
SECOND, CUT = np.uint32(1 << 28), np.uint32(1 << 29)
LABEL_WORDS = 2
TOGETHER = 1024  # records encoded at once
_SHOWN = 12  # classes in a description
_INT_FIELDS = ("tokens", "token_types", "segment_ids", "positions")
_log = logging.getLogger(__name__)


class Labelled:
    """Makes the documents of `sources` from records, and tokens from documents: as chat.Chat does for conversations."""

    def __init__(self, data: Data, tokens: Tokenizer):
        """Raises InputError if a row has no room for a text."""
        self.data = data
        self.vocab_size = tokens.vocab_size
        self.fingerprint = f"{tokens.fingerprint}-{data.label_kind}-{data.seq}"
        self.replaced_bytes = 0
        self.classes: tuple[str, ...] = ()  # the number of a class is its place here; () until `learn_classes`
        is_pair = len(data.fields) > 1
        self._tokenizer = cutting(tokens, "seq", data.seq, is_pair)
        self.has_types = is_pair and 1 in self._tokenizer.encode("a", "b").type_ids

    def document(self, record: Mapping[str, Any], place: str, field: str) -> bytes:
        """The texts and the label of a record, as JSON for `encode_all`.

        Raises an InputError that names `place` if a text or the label is missing, or if no class has this label.
        """
        texts = [text_of(record, name, place) for name in self.data.fields]
        label = label_of(self.data, record, place)
        for one in label if isinstance(label, list) else [label]:
            check_class(one, self.classes, f"{place}: {self.data.label}")
        return json.dumps([texts, label]).encode()

    def encode_all(self, documents: Sequence[bytes]) -> list[np.ndarray]:
        """The uint32 tokens of records that `document` returned, with their labels and bits."""
        tokens = []
        for start in range(0, len(documents), TOGETHER):
            records = [json.loads(document) for document in documents[start : start + TOGETHER]]
            texts = [self._input(texts) for texts, _ in records]
            encodings = encode_texts(self._tokenizer.encode_batch_fast, texts, "data.tokenizer")
            tokens += [
                self._mark_label(encoding, label) for encoding, (_, label) in zip(encodings, records, strict=True)
            ]
        return tokens

    def learn_classes(
        self, source: DocumentSource, known: Sequence[str] = (), progress: Progress | None = None
    ) -> None:
        """Finds the classes: the labels of the training data, in the order of `order_classes`.

        They are read once for each source, and kept in the cache. Raises InputError for a record that cannot be read,
        or if there are fewer than two classes.
        """
        if self.data.label_kind == "number":
            return
        found = self._found_classes(source, progress)
        self.classes = order_classes(found, known)
        if self.classes != order_classes(found):
            self.fingerprint += f"-{hashlib.sha256(json.dumps(self.classes).encode()).hexdigest()[:12]}"

    def _found_classes(self, source: DocumentSource, progress: Progress | None) -> tuple[str, ...]:
        key = hashlib.sha256(f"classes {source.fingerprint}".encode()).hexdigest()[:24]
        path = readable_entry(cache_folder("data") / f"{key}.classes.json")
        try:
            if path.is_file():
                return tuple(files.read_json(path))
        except InputError as error:
            _log.warning("%s, and is made anew", error)
        labels = [json.loads(document)[1] for document in source.walk(source.parts, "reading labels", progress)]
        several = self.data.label_kind == "classes"
        found = {one for label in labels for one in label} if several else {*labels}
        if several and len(found) > MOST_OF_SEVERAL:
            raise InputError(
                f"data.label={self.data.label}: {len(found):,} classes, and data.label_kind: classes supports up to "
                f"{MOST_OF_SEVERAL}\n  fix   leave out those that are rare"
            )
        if len(found) < 2:
            raise InputError(
                f"data.label={self.data.label}: the training data has "
                f"{_list_names(sorted(found)) or 'no label'} alone\n"
                "  fix   name the column of the labels, or set data.label_kind to number for numbers to predict"
            )
        classes = order_classes(found)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            files.replace_json(path, classes)
        except OSError as error:
            raise unwritable(path, error.strerror, "the classes ") from error
        return classes

    def _input(self, texts: Sequence[str]) -> Any:
        """One text or a pair, as the tokenizer takes it."""
        cleaned = [valid(text) for text in texts]
        self.replaced_bytes += sum(replaced for _, replaced in cleaned)
        return cleaned[0][0] if len(cleaned) == 1 else tuple(text for text, _ in cleaned)

    def _mark_label(self, encoding: tokenizers.Encoding, label: str | float | list[str]) -> np.ndarray:
        ids = np.asarray(encoding.ids, np.uint32)
        ids[np.asarray(encoding.type_ids) > 0] |= SECOND
        ids[-1] |= LAST | CUT if encoding.overflowing else LAST
        if isinstance(label, list):
            value = np.int32(sum(1 << self.classes.index(one) for one in label))
        else:
            value = np.float32(label) if self.data.label_kind == "number" else np.int32(self.classes.index(str(label)))
        word = int(value.view(np.uint32))
        return np.concatenate([np.asarray([word >> 16, word & 0xFFFF], np.uint32), ids])


def cutting(tokens: Tokenizer, key: str, size: int, is_pair: bool = False) -> tokenizers.Tokenizer:
    """The tokenizer of texts, or of pairs of them, that cuts what is longer than `size` tokens, which `data.key` says.

    Raises InputError if special tokens leave no room for others.
    """
    made = tokens.template()
    special = made.num_special_tokens_to_add(is_pair=is_pair)
    if size <= special:
        raise InputError(
            f"data.{key}={size}: a text has {special} special tokens, which leaves no room for others\n"
            f"  fix   set data.{key} to {special + 1} or more"
        )
    made.no_padding()
    made.enable_truncation(size)
    return made


def label_of(data: Data, record: Mapping[str, Any], place: str) -> str | float | list[str]:
    """The label of a record: the name of a class, those of several, or a number. Raises an InputError that names
    `place`.
    """
    name = data.label
    label = _find_field(record, name, place, "label")
    if data.label_kind == "classes":
        if not isinstance(label, list):
            raise InputError(
                f"{place}: {name}={label!r} is not a list of classes\n"
                "  fix   correct it, or set data.label_kind to class for one class of each text"
            )
        if nested := [each for each in label if isinstance(each, list | dict)]:
            raise InputError(f"{place}: {name}={label!r}: {nested[0]!r} is no name of a class\n  fix   correct it")
        one = dataclasses.replace(data, label_kind="class")
        return sorted({str(label_of(one, {name: each}, place)) for each in label})
    if label is None or label == "" or (isinstance(label, float) and math.isnan(label)):
        raise InputError(f"{place}: {name} is empty: there is no label\n  fix   add it, or leave the record out")
    try:
        if data.label_kind == "number":
            number = float("" if isinstance(label, bool) else label)
            if abs(number) <= float(np.finfo(np.float32).max):
                return number
        elif isinstance(label, bool):
            return str(label).lower()
        elif isinstance(label, str | int | float):  # tables write whole numbers as 1.0 where a value is missing
            return str(int(label) if isinstance(label, float) and label.is_integer() else label)
    except (TypeError, ValueError, OverflowError):
        pass
    wanted = "a finite number" if data.label_kind == "number" else "a text or a number"
    several = ", or --set data.label_kind=classes, where a text has several" if isinstance(label, list) else ""
    raise InputError(f"{place}: {name}={label!r} is not {wanted}\n  fix   correct it, or leave the record out{several}")


def order_classes(found: Collection[str], known: Sequence[str] = ()) -> tuple[str, ...]:
    """The classes in the order of `known`, if these are the same classes.

    Otherwise whole numbers are sorted as numbers, if all classes are whole numbers, and as texts if not.
    """
    if sorted(found) == sorted(known):
        return tuple(known)
    whole = all(label.removeprefix("-").isdecimal() for label in found)
    return tuple(sorted(found, key=lambda label: (int(label) if whole else 0, label)))  # 7 and 07 are two classes


def about_classes(classes: Sequence[str]) -> str:
    """For the user: the classes and their numbers."""
    return f"classes: {_list_names([f'{number} = {label}' for number, label in enumerate(classes)])}"


def check_class(label: str | float, classes: Sequence[str], place: str) -> None:
    """Raises an InputError that begins with `place` if there are classes, and none has this label."""
    if classes and label not in classes:
        raise InputError(
            f"{place}={label} is no label of the training data ({_list_names(classes)})\n"
            "  fix   correct it, or train on records with this label too"
        )


@dataclasses.dataclass(frozen=True, eq=False)
class LabelledRows:
    """Rows of `seq` tokens; each holds one record, with padding after it."""

    stream: Stream  # of uint32 words
    seq: int
    numbers: bool  # whether labels are numbers, not classes
    starts: np.ndarray  # [rows + 1]; the last one is the length of the stream

    def __len__(self) -> int:
        return len(self.starts) - 1

    def read(self, indices: Sequence[int] | np.ndarray) -> dict[str, np.ndarray]:
        """int32 tokens, token_types, segment_ids and positions [len(indices), seq], and labels [len(indices)].

        token_types: 1 for a second text. segment_ids: 1, and 0 for padding. labels: int32 classes, or float32 numbers.
        Of several classes, a label has the bit of each. An index of -1 gives a row of padding, with the class -1 or the
        number 0.
        """
        fields = {name: np.zeros((len(indices), self.seq), np.int32) for name in _INT_FIELDS}
        words = np.full(len(indices), 0 if self.numbers else 0xFFFFFFFF, np.uint32)
        filled = [i for i, index in enumerate(indices) if index >= 0]
        spans = [(int(self.starts[indices[i]]), int(self.starts[indices[i] + 1])) for i in filled]
        for i, record in zip(filled, self.stream.read(spans), strict=True):
            words[i] = record[0] << 16 | record[1]
            marked, count = record[LABEL_WORDS:], len(record) - LABEL_WORDS
            fields["tokens"][i, :count] = marked & (SECOND - 1)
            fields["token_types"][i, :count] = (marked & SECOND) > 0
            fields["segment_ids"][i, :count] = 1
            fields["positions"][i, :count] = np.arange(count)
        return {**fields, "labels": words.view(np.float32 if self.numbers else np.int32)}


def rows(stream: Stream, seq: int, numbers: bool) -> LabelledRows:
    """The rows of the tokens of records."""
    return LabelledRows(stream, seq, numbers, np.concatenate([[0], np.cumsum(stream.record_sizes()[:, 0])]))


def text_of(record: Mapping[str, Any], name: str, place: str) -> str:
    """A text of a record. Raises an InputError that names `place` if it is missing."""
    text = _find_field(record, name, place, "fields")
    if not isinstance(text, str):
        what = "empty" if text is None else f"{name_kind(text)}, not text"
        raise InputError(f"{place}: {name} is {what}\n  fix   correct it, or leave the record out")
    return text


def valid(text: str) -> tuple[str, int]:
    """A text with U+FFFD in the place of each code point that is no character, and how many of them there were."""
    return NO_CHARACTER.subn("\ufffd", text)


def _find_field(record: Mapping[str, Any], name: str, place: str, key: str) -> Any:
    if name not in record:
        raise InputError(
            f"{place}: no field {name}{did_you_mean(name, list(record))}\n"
            f"  fix   name in data.{key} one of {', '.join(map(str, record)) or 'its fields'}"
        )
    return record[name]


def _list_names(names: Sequence[Any]) -> str:
    return ", ".join(map(str, names[:_SHOWN])) + (f", ... ({len(names):,})" if len(names) > _SHOWN else "")
