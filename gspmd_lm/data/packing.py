"""Rows of a fixed length, cut from one long array of tokens, and masks among their tokens."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gspmd_lm.data.shards import Span, Stream

# Bits in tokens (uint32): a token of the assistant, and the last token of a conversation, or of a document whose end
# is known though no token says it.
TARGET, LAST = np.uint32(1 << 30), np.uint32(1 << 31)


class InMemory:
    """The Stream of tokens in an array."""

    is_far = marks_ends = False

    def __init__(self, tokens: np.ndarray):
        self.tokens, self.dtype = tokens, tokens.dtype
        self.bounds = np.asarray([0, len(tokens)])

    def __len__(self) -> int:
        return len(self.tokens)

    def read(self, spans: Sequence[Span]) -> list[np.ndarray]:
        return [self.tokens[start:stop] for start, stop in spans]

    def record_sizes(self) -> np.ndarray:
        return record_sizes(self.tokens)

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        return self.tokens.astype(dtype or self.dtype, copy=False)


def record_sizes(tokens: np.ndarray) -> np.ndarray:
    """int64 [records, 2]: how many tokens has each of the records that LAST ends, and how many of these are targets."""
    stops = 1 + np.flatnonzero(tokens >= LAST)
    targets = np.concatenate([[0], np.cumsum((tokens & TARGET) > 0)])[stops]
    return np.stack([np.diff(stops, prepend=0), np.diff(targets, prepend=0)], axis=1).astype(np.int64)


@dataclasses.dataclass(frozen=True, eq=False)
class Rows:
    """`len(rows)` rows of `seq` tokens. In each shard of the stream, row r starts at token r * stride.

    With `end`, rows hold packed documents, which end with the token `end`, or where the stream marks the end. Each
    document is a segment of its own. A document that a row cuts goes on in the next row as a new segment. Every token
    but the first of each document is a target exactly once.
    With `starts`, rows hold packed conversations, whose tokens carry TARGET and LAST. Row r starts at starts[r]. A
    conversation is cut only if no row can hold it. Every TARGET is a target exactly once.
    With neither, a row is a piece of one text, and every position has a target.
    """

    stream: Stream  # of unsigned tokens
    seq: int
    stride: int
    end: int | None
    begins_with_end: bool = False  # documents begin with the token `end`, too, which is then no end of a segment
    starts: np.ndarray | None = None  # [rows + 1]; the last one is the length of the stream

    def __len__(self) -> int:
        return int(self._firsts[-1])

    @functools.cached_property
    def _firsts(self) -> np.ndarray:
        """The first row of each shard, and how many rows there are."""
        if self.starts is not None:
            return np.asarray([0, len(self.starts) - 1])
        sizes = np.diff(self.stream.bounds)
        whole, begun = (sizes - self.seq - 1) // self.stride + 1, -(-(sizes - 1) // self.stride)
        counts = whole if self.end is None else begun  # of documents, the last row is padded
        return np.concatenate([[0], np.cumsum(np.maximum(counts, 0))])

    def read(self, indices: Sequence[int] | np.ndarray) -> dict[str, np.ndarray]:
        """int32 tokens, targets, segment_ids and positions [len(indices), seq]; an index of -1 gives a row of padding.

        targets: the next token, or -1 if there is none. segment_ids: 1, 2, ... in each row, and 0 for padding.
        positions: counted from 0 in each segment.
        """
        windows = np.zeros((len(indices), self.seq + 1), self.stream.dtype)
        lengths = np.zeros(len(indices), np.int64)  # how many positions are not padding
        filled = [i for i, index in enumerate(indices) if index >= 0]
        pieces = self.stream.read([self._span(int(indices[i])) for i in filled])
        for i, piece in zip(filled, pieces, strict=True):
            windows[i, : len(piece)] = piece
            lengths[i] = len(piece) - 1
        ends = np.zeros((len(indices), self.seq), bool)
        silent = ends  # positions whose next token is not a target
        if self.starts is not None:
            ends = (windows[:, :-1] & LAST) > 0
            silent = ends | ((windows[:, 1:] & TARGET) == 0)
            windows &= ~(TARGET | LAST)
        elif self.end is not None:
            marks = (windows[:, :-1] & LAST) > 0 if self.stream.marks_ends else ends
            if self.stream.marks_ends:
                windows &= ~LAST
            ends = windows[:, :-1] == self.end
            if self.begins_with_end:  # between two documents there are two of them
                ends &= windows[:, 1:] == self.end
            ends = silent = ends | marks
        windows = windows.astype(np.int32)
        tokens, targets = windows[:, :-1].copy(), windows[:, 1:].copy()
        targets[silent] = -1
        offsets = np.arange(self.seq, dtype=np.int32)
        starts = np.zeros_like(ends)
        starts[:, 1:] = ends[:, :-1]
        segment_ids = 1 + np.cumsum(starts, axis=1, dtype=np.int32)
        positions = offsets - np.maximum.accumulate(np.where(starts, offsets, 0), axis=1)
        for i in np.flatnonzero(lengths < self.seq):
            padding = slice(lengths[i], None)
            tokens[i, padding] = segment_ids[i, padding] = positions[i, padding] = 0
            targets[i, padding] = -1
        return {"tokens": tokens, "targets": targets, "segment_ids": segment_ids, "positions": positions}

    def _span(self, index: int) -> Span:
        """The tokens of a row, and the one after them."""
        if self.starts is not None:
            start, stop = int(self.starts[index]), int(self.starts[index + 1])
            return start, min(stop + 1, start + self.seq + 1, len(self.stream))
        i_shard = int(np.searchsorted(self._firsts, index, "right")) - 1
        start = int(self.stream.bounds[i_shard]) + (index - int(self._firsts[i_shard])) * self.stride
        return start, min(start + self.seq + 1, int(self.stream.bounds[i_shard + 1]))


@dataclasses.dataclass(frozen=True, eq=False)
class Joined:
    """The rows of several parts, one after another."""

    parts: Sequence[Any]  # each has len() and read(), as Rows does

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def read(self, indices: Sequence[int] | np.ndarray) -> dict[str, np.ndarray]:
        """The arrays of rows, as `read` of the parts gives them."""
        indices = np.asarray(indices)
        empty = self.parts[0].read([]).items()
        fields = {name: np.zeros((len(indices), *array.shape[1:]), array.dtype) for name, array in empty}
        first = 0
        for number, part in enumerate(self.parts):
            inside = (indices >= first) & (indices < first + len(part)) | ((indices == -1) & (number == 0))
            if inside.any():
                local = np.where(indices[inside] == -1, -1, indices[inside] - first)
                for name, values in part.read(local).items():
                    fields[name][inside] = values
            first += len(part)
        return fields


def documents(stream: Stream, seq: int, end: int, begins_with_end: bool = False) -> Rows:
    """Rows of packed documents. Only the last row of a shard may be padded."""
    return Rows(stream, seq, seq, end, begins_with_end)


def conversations(stream: Stream, seq: int) -> tuple[Rows, int]:
    """Rows of packed conversations, and how many conversations are too long for a row.

    A row is filled with as many whole conversations as it holds, and the rest of it is padding. A conversation that is
    too long starts a row and goes on in the next one as a new segment.
    """
    sizes = stream.record_sizes()[:, 0]
    stops, starts = np.cumsum(sizes), [0]
    while starts[-1] < len(stream):
        # The last token of a conversation has no successor, so a row needs no input for it.
        held = int(np.searchsorted(stops, starts[-1] + seq + 1, side="right"))
        stop = int(stops[held - 1]) if held else 0
        starts.append(stop if stop > starts[-1] else starts[-1] + seq)
    cut = int(np.count_nonzero(sizes > seq + 1))
    return Rows(stream, seq, seq, None, starts=np.asarray(starts, np.int64)), cut


def text(stream: Stream, seq: int) -> Rows:
    """Rows cut from one text. Tokens at the end of a shard that do not fill a row are not used."""
    return Rows(stream, seq, seq, None)


def random(rows: int, seq: int, vocab: int, seed: Sequence[int]) -> Rows:
    """Rows of independent tokens, drawn uniformly from [0, vocab)."""
    tokens = np.random.default_rng(seed).integers(0, vocab, rows * (seq + 1), np.uint32)
    return Rows(InMemory(tokens), seq, seq + 1, None)


@dataclasses.dataclass(frozen=True)
class Masks:
    """The masks of BERT (arXiv 1810.04805): of the chosen tokens, 80% become the mask, 10% a drawn token, and 10% stay.
    Without a mask token, all chosen tokens become drawn ones.

    They are a function of `seed` and of the row's number in the sequence of all epochs. So they differ in each epoch,
    and are the same after a restart and in each process.
    """

    mask: int | None  # the id of the mask token; None: a model tells which tokens stand in place of others
    vocab: int  # another token is drawn from [0, vocab)
    special: tuple[int, ...]  # ids that are never chosen. Padding is never chosen either
    share: float  # of the other tokens, about so many are chosen
    seed: int

    def put(self, arrays: Mapping[str, np.ndarray], numbers: np.ndarray) -> dict[str, np.ndarray]:
        """The arrays with masks among `tokens`, and as `targets` the true ids of the chosen tokens, and -1 elsewhere.
        Without a mask, `targets` are 1 where another token stands, 0 where the true one does, and -1 for padding.

        All `token_types` are 0. numbers: of the rows, int64 [rows].
        """
        tokens = arrays["tokens"]
        drawn = np.empty((len(numbers), 3, tokens.shape[1]))  # in [0, 1): whether it is chosen, how, another token
        for i, number in enumerate(numbers):
            drawn[i] = np.random.Generator(np.random.Philox(key=[self.seed, number])).random(drawn.shape[1:])
        chosen = (drawn[:, 0] < self.share) & (arrays["segment_ids"] > 0) & ~np.isin(tokens, self.special)
        another = (drawn[:, 2] * self.vocab).astype(np.int32)
        if self.mask is None:
            read = np.where(chosen, another, tokens)
            targets = np.where(arrays["segment_ids"] > 0, read != tokens, np.int32(-1)).astype(np.int32)
            return {**arrays, "tokens": read, "targets": targets, "token_types": np.zeros_like(tokens)}
        shown = np.where(drawn[:, 1] < 0.8, np.int32(self.mask), np.where(drawn[:, 1] < 0.9, another, tokens))
        masked = {"tokens": np.where(chosen, shown, tokens), "targets": np.where(chosen, tokens, np.int32(-1))}
        return {**arrays, **masked, "token_types": np.zeros_like(tokens)}
