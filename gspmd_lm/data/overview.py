"""What a run would read, for people to look at: counts, the tokenizer, and its first rows as text."""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from gspmd_lm.config import Config
from gspmd_lm.data import encoders, formats, labelled, making, media, readers, sources, speed, token_files, tokens
from gspmd_lm.data import loader as loaders
from gspmd_lm.data.loader import Loader
from gspmd_lm.data.remote import Progress
from gspmd_lm.data.speed import Speed
from gspmd_lm.data.tokenizer import HuggingFace, Tokenizer, load_tokenizer, trained_size
from gspmd_lm.errors import InputError, RunFailed
from gspmd_lm.units import human_bytes, human_count, plural

ROWS = 3  # that are shown
BYTES_END = b"<end>"  # how the end token of `bytes` is shown, which has no text
_SAMPLE_BYTES = 256_000  # of documents that a check reads
_BEFORE = 8  # tokens before a piece that are decoded with it, since some decoders change the first token of a text


@dataclasses.dataclass(frozen=True)
class Piece:
    """A part of a row's text, all of whose tokens are predicted, or none."""

    text: str
    is_learnt: bool


@dataclasses.dataclass(frozen=True)
class ShownRow:
    """A row as text. Each segment is a document, a conversation, or one side of a pair; attention stays within it."""

    number: int  # in the source
    segments: Sequence[tuple[str, Sequence[Piece]]]  # the name of each ("" where it needs none) and its text
    tokens: int
    learnt: int  # of the tokens
    padding: int  # positions without a token


@dataclasses.dataclass(frozen=True)
class Side:
    """The rows for training, or those for evaluation."""

    rows: int
    tokens: int  # 0 for images and sounds
    description: str


@dataclasses.dataclass(frozen=True)
class Overview:
    """What a run would read."""

    batch: int
    training: Side
    evaluation: Side | None
    notes: Sequence[str]  # lines about the classes, the weights, and files that are skipped or odd
    tokenizer: str  # what it is, and where it lies; "" if there is no text
    speed: Speed
    rows: Sequence[ShownRow]
    warnings: Sequence[str]


def look(config: Config, progress: Progress | None = None) -> Overview:
    """Opens the rows of a config as a run does, and reads the first ones.

    Raises InputError or RunFailed as a run would.
    """
    train, held_out = loaders.open_loaders(config, progress)
    count = min(ROWS, len(train.rows))
    numbers = train.indices_at(0, range(min(count, train.batch)))
    tokenizer = _open_tokenizer(config, train)
    shown = train.rows_at(0, range(len(numbers)))
    rows = [
        _show_item(train.rows.items[int(number)], int(number), tokenizer)
        if isinstance(train.rows, media.Rows)
        else _show_row(train, {name: array[i] for name, array in shown.items()}, int(number), tokenizer, config)
        for i, number in enumerate(numbers)
    ]
    sides = [_describe_side(one) for one in (train, held_out) if one]
    return Overview(
        batch=train.batch,
        training=sides[0],
        evaluation=sides[1] if held_out else None,
        notes=train.description.splitlines()[1:],
        tokenizer=_describe_tokenizer(config, train, tokenizer),
        speed=speed.measure_speed(train, np.arange(train.batch)),
        rows=rows,
        warnings=_warn_of_few_rows(len(train.rows), train.batch),
    )


def _describe_side(rows: Loader) -> Side:
    return Side(len(rows.rows), rows.tokens, rows.description.partition("\n")[0].partition(": ")[2])


def _warn_of_few_rows(rows: int, batch: int, about: str = "") -> list[str]:
    """A warning if there are fewer rows than a batch has."""
    if rows >= batch:
        return []
    return [
        f"{about}{plural(rows, 'row')} {'is' if rows == 1 else 'are'} less than one batch: each step reads rows "
        f"{batch / max(rows, 1):.2g} times (data.batch={batch:,})"
    ]


def _open_tokenizer(config: Config, rows: Loader) -> Tokenizer | None:
    """The tokenizer of the rows; None if there is no text in them."""
    if isinstance(rows.rows, media.Rows) and not len(rows.rows.items[0].text):
        return None
    return load_tokenizer(str(rows.tokenizer or config.data.tokenizer))


def _describe_tokenizer(config: Config, rows: Loader, tokenizer: Tokenizer | None) -> str:
    if tokenizer is None:
        return ""
    size = f"{tokenizer.vocab_size:,} tokens"
    if not isinstance(tokenizer, HuggingFace):
        return f"bytes: {size}, the bytes of the texts and an end; there is no file"
    made = f"{config.data.tokenizer}, trained on the source: " if rows.tokenizer else ""
    ends = tokenizer.text_of(tokenizer.end)
    return f"{made}{size}, texts end with {ends}; {tokenizer.path.absolute()}"


# Rows as text


def _show_row(
    rows: Loader, arrays: Mapping[str, np.ndarray], number: int, tokenizer: Tokenizer | None, config: Config
) -> ShownRow:
    """A row of texts, conversations, labelled texts or pairs."""
    is_random = sources.random_rows(config.data.source) is not None
    tokenizer = None if is_random else tokenizer
    segments: list[tuple[str, Sequence[Piece]]] = []
    ids, segment_ids = arrays["tokens"], arrays["segment_ids"]
    width, count = len(ids), int(np.count_nonzero(segment_ids))
    if "labels" in arrays:
        learnt, segment_ids = np.zeros(width, bool), np.where(segment_ids > 0, arrays["token_types"] + 1, 0)
        names = list(config.data.fields) if segment_ids.max() > 1 else [" and ".join(config.data.fields)]
    else:
        learnt, names = arrays["targets"] >= 0, []
        if "source_tokens" not in arrays and not rows.token_masks:  # the token at the next position is predicted
            ids, learnt, segment_ids = _with_next(arrays, count)
    for segment in range(1, int(segment_ids.max(initial=0)) + 1):
        if "source_tokens" in arrays:
            source = arrays["source_tokens"][arrays["source_segment_ids"] == segment]
            segments.append(("source", _part_text(tokenizer, source, np.zeros(len(source), bool))))
            text = arrays["targets"][segment_ids == segment]
            segments.append(("text", _part_text(tokenizer, text, text >= 0)))
        else:
            inside = segment_ids == segment
            name = names[segment - 1] if names else ""
            segments.append((name, _part_text(tokenizer, ids[inside], learnt[inside])))
    if "labels" in arrays:
        label = _name_label(arrays["labels"], rows.classes, config.data.label_kind)
        segments.append((config.data.label, [Piece(label, True)]))
    return ShownRow(number, segments, count, int(np.count_nonzero(learnt)), width - count)


def _with_next(arrays: Mapping[str, np.ndarray], count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The tokens of a row and the one behind them, which of them are predicted, and their segments."""
    targets, segment_ids = arrays["targets"][:count], arrays["segment_ids"][:count]
    last = targets[-1:] if count and targets[-1] >= 0 else targets[:0]
    ids = np.concatenate([arrays["tokens"][:count], last])
    learnt = np.concatenate([[False], targets[: len(ids) - 1] >= 0])[: len(ids)]
    return ids, learnt, np.concatenate([segment_ids, segment_ids[-1:]])[: len(ids)]


def _part_text(tokenizer: Tokenizer | None, ids: np.ndarray, learnt: np.ndarray) -> list[Piece]:
    """The text of tokens, parted where it begins or ends to be predicted. Without a tokenizer it has their numbers."""
    bounds = [0, *(1 + np.flatnonzero(np.diff(learnt))), len(ids)] if len(ids) else []
    pieces = []
    for start, stop in itertools.pairwise(map(int, bounds)):
        first = max(0, start - _BEFORE)
        before, whole = _decode(tokenizer, ids[first:start]), _decode(tokenizer, ids[first:stop])
        text = whole.removeprefix(before) if whole.startswith(before) else _decode(tokenizer, ids[start:stop])
        pieces.append(Piece(text, bool(learnt[start])))
    return pieces


def _decode(tokenizer: Tokenizer | None, ids: np.ndarray) -> str:
    if tokenizer is None:
        return "".join(f"{i} " for i in ids)
    if isinstance(tokenizer, HuggingFace):
        return tokenizer.decode(ids).decode()
    parts = np.split(ids, np.flatnonzero(ids == tokenizer.end))  # all but the first begin with the end
    return BYTES_END.join(map(tokenizer.decode, parts)).decode("utf-8", "replace")


def _name_label(value: Any, classes: Sequence[str], kind: str) -> str:
    if kind == "number":
        return f"{float(value):g}"
    if kind == "classes":
        return ", ".join(name for number, name in enumerate(classes) if int(value) >> number & 1) or "none"
    return classes[int(value)] if classes else str(int(value))


def _show_item(item: media.Item, number: int, tokenizer: Tokenizer | None) -> ShownRow:
    """A row with an image or a sound, of which the name, the label and the text are shown."""
    segments: list[tuple[str, Sequence[Piece]]] = [("file", [Piece(item.encoded.place, False)])]
    if item.label:
        segments.append(("label", [Piece(item.label, True)]))
    if len(item.text) and tokenizer:
        segments.append(("text", _part_text(tokenizer, item.text, np.ones(len(item.text), bool))))
    if item.mask:
        segments.append(("mask", [Piece(item.mask.place, True)]))
    return ShownRow(number, segments, len(item.text), len(item.text), 0)


# A check without tokenizing


def check(config: Config) -> list[str]:
    """What a run would read, in a line or two, from names, sizes and the first documents of the source.

    Nothing is tokenized but these documents. What is wrong is a line that begins with `warning: data: `.
    """
    try:
        return [f"data: {line}" if not line.startswith("warning: ") else line for line in _check(config)]
    except (InputError, RunFailed) as error:
        return [f"warning: data: {error}"]


def _check(config: Config) -> Iterator[str]:
    data, model, about = config.data, config.model, ""
    if model.patches or model.frames or model.vision:
        yield "images and sounds are read when a run starts; the verb data looks at them"
        return
    loaders.check_objective(config)
    count = sources.random_rows(data.source)
    if count is not None:
        yield f"{count:,} random rows"
    elif tokens.find_folders(data) or token_files.name_of_files(data):
        for rows in filter(None, loaders.open_loaders(config)):
            yield rows.description
            count = count or len(rows.rows)
    else:
        lines, count, about = *_look_at_texts(config), "about "
        yield from lines
    if count is not None:
        yield from (f"warning: data: {line}" for line in _warn_of_few_rows(count, data.batch, about))


def _look_at_texts(config: Config) -> tuple[list[str], int | None]:
    """Lines about the files of a source, and how many rows they give; None if that is not known."""
    data, is_trained = config.data, trained_size(config.data.tokenizer) is not None
    encoder = None if is_trained else encoders.open_encoder(config)
    of_record = encoder.document if encoder and not isinstance(encoder, Tokenizer) else None
    source = sources.open_source(data, None, of_record, hashed=False)
    sample, sample_bytes = [], 0
    for document in source.documents():
        sample.append(document)
        sample_bytes += len(document)
        if sample_bytes >= _SAMPLE_BYTES:
            break
    lines = [source.description, *source.notes.splitlines()]
    if encoder is None or isinstance(encoder, labelled.Labelled) or not sample_bytes:
        return lines, None
    per_byte = sum(map(len, making.encode_documents(encoder, sample))) / sample_bytes
    if not all(_is_plain(file) for part in source.parts for file in part.files):
        return [f"{lines[0]}; {1 / per_byte:.3g} bytes a token in the first documents", *lines[1:]], None
    whole = per_byte * sum(part.size_bytes for part in source.parts) * (1 - data.held_out_share)
    rows = int(whole // data.seq)
    about = (
        f"about {human_count(whole)} tokens and {rows:,} rows for training, by the first {human_bytes(sample_bytes)}"
    )
    return [f"{lines[0]}; {about}", *lines[1:]], rows


def _is_plain(file: sources.SourceFile) -> bool:
    """Whether the size of a file is about that of its texts."""
    kind = formats.format_of(file.path)
    return bool(kind) and not kind.table and file.path.suffix.lower() not in readers.COMPRESSED
