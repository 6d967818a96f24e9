"""Rows of a fixed length, cut from one long run of tokens."""

import dataclasses
from collections.abc import Sequence

import numpy as np

FIELDS = ("tokens", "targets", "segment_ids", "positions")


@dataclasses.dataclass(frozen=True, eq=False)
class Rows:
    """`len(rows)` rows of `seq` tokens; row r starts at token r * stride.

    With `end`, rows hold packed documents, which `end` closes: each is a segment of its own, and one that a row cuts
    goes on in the next row as a new segment. Every token but the first of each document is a target exactly once.
    Without, a row is a piece of one text, and every position has a target.
    """

    stream: np.ndarray  # [tokens], unsigned, usually memory-mapped
    seq: int
    stride: int
    end: int | None

    def __len__(self) -> int:
        if self.end is None:
            return max(0, (len(self.stream) - self.seq - 1) // self.stride + 1)
        return max(0, -(-(len(self.stream) - 1) // self.stride))  # the last row is padded

    def read(self, indices: Sequence[int] | np.ndarray) -> dict[str, np.ndarray]:
        """FIELDS of the rows as int32 [len(indices), seq]; an index of -1 gives a row of padding.

        targets: the next token, or -1 where there is none. segment_ids: 1, 2, ... in each row, 0 for padding.
        positions: from 0 in each segment.
        """
        windows = np.zeros((len(indices), self.seq + 1), np.int32)
        lengths = np.zeros(len(indices), np.int64)  # positions that are not padding
        for i, index in enumerate(indices):
            if index >= 0:
                piece = self.stream[index * self.stride : index * self.stride + self.seq + 1]
                windows[i, : len(piece)] = piece
                lengths[i] = len(piece) - 1
        tokens, targets = windows[:, :-1].copy(), windows[:, 1:].copy()
        offsets = np.arange(self.seq, dtype=np.int32)
        if self.end is None:
            segment_ids = np.ones_like(tokens)
            positions = np.broadcast_to(offsets, tokens.shape).copy()
        else:
            ends = tokens == self.end
            targets[ends] = -1
            starts = np.zeros_like(ends)
            starts[:, 1:] = ends[:, :-1]
            segment_ids = 1 + np.cumsum(starts, axis=1, dtype=np.int32)
            positions = offsets - np.maximum.accumulate(np.where(starts, offsets, 0), axis=1)
        for i in np.flatnonzero(lengths < self.seq):
            padding = slice(lengths[i], None)
            tokens[i, padding] = segment_ids[i, padding] = positions[i, padding] = 0
            targets[i, padding] = -1
        return {"tokens": tokens, "targets": targets, "segment_ids": segment_ids, "positions": positions}


def documents(stream: np.ndarray, seq: int, end: int) -> Rows:
    """Rows of packed documents; only the last one may be padded."""
    return Rows(stream, seq, seq, end)


def text(stream: np.ndarray, seq: int) -> Rows:
    """Rows cut from one text; what is left at its end and fills no row is not used."""
    return Rows(stream, seq, seq, None)


def random(rows: int, seq: int, vocab: int, seed: Sequence[int]) -> Rows:
    """Rows of tokens drawn uniformly from [0, vocab), each independent of the others."""
    tokens = np.random.default_rng(seed).integers(0, vocab, rows * (seq + 1), np.uint32)
    return Rows(tokens, seq, seq + 1, None)
