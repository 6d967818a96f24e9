"""Texts that are made from sources: the records of files, their tokens, and rows of packed pairs."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gspmd_lm.config import Config
from gspmd_lm.data import encodings
from gspmd_lm.data.labelled import CUT, TOGETHER, cutting, text_of, valid
from gspmd_lm.data.packing import LAST, TARGET, InMemory
from gspmd_lm.data.shards import Stream
from gspmd_lm.data.tokenizer import Tokenizer

# A pair in the cache is a uint32 array: the tokens of its source, and those of its text, which carry TARGET. LAST ends
# a pair, with CUT if something was cut off.
_BITS = TARGET | LAST | CUT


class Pairs:
    """Makes the documents of `sources` from records, and tokens from documents: as labelled.Labelled does."""

    def __init__(self, config: Config, tokens: Tokenizer):
        """Raises InputError if a row has no room for a source or a text."""
        data = config.data
        self.fields, self.vocab_size = data.fields, tokens.vocab_size
        sizes = {"source_seq": config.source_seq, "seq": data.seq}
        self.fingerprint = f"{tokens.fingerprint}-pairs-{config.source_seq}-{data.seq}"
        self.replaced_bytes = 0
        self._tokenizers = [cutting(tokens, key, size) for key, size in sizes.items()]

    def document(self, record: Mapping[str, Any], place: str, field: str) -> bytes:
        """The source and the text of a record, as JSON for `encode_all`.

        Raises an InputError that names `place` if one of them is missing.
        """
        return json.dumps([text_of(record, name, place) for name in self.fields]).encode()

    def encode_all(self, documents: Sequence[bytes]) -> list[np.ndarray]:
        """The uint32 tokens of records that `document` returned, with their bits."""
        tokens = []
        for start in range(0, len(documents), TOGETHER):
            sides = zip(*(json.loads(document) for document in documents[start : start + TOGETHER]), strict=True)
            encoded = []
            for made, texts in zip(self._tokenizers, sides, strict=True):
                cleaned = [valid(text) for text in texts]
                self.replaced_bytes += sum(replaced for _, replaced in cleaned)
                texts = [text for text, _ in cleaned]
                encoded.append(encodings.encode_texts(made.encode_batch_fast, texts, "data.tokenizer"))
            tokens += [_mark_target(*pair) for pair in zip(*encoded, strict=True)]
        return tokens


def _mark_target(source: Any, text: Any) -> np.ndarray:
    target_ids = np.asarray(text.ids, np.uint32) | TARGET
    ids = np.concatenate([np.asarray(source.ids, np.uint32), target_ids])
    ids[-1:] |= LAST | CUT if source.overflowing or text.overflowing else LAST
    return ids


@dataclasses.dataclass(frozen=True, eq=False)
class PairRows:
    """Rows of up to `source_seq` tokens of sources and `seq` tokens of texts; each holds some pairs, with padding
    after them.
    """

    stream: Stream  # of uint32 tokens
    seq: int
    source_seq: int
    start_token: int
    starts: np.ndarray  # [pairs + 1], where each begins in the stream; the last one is its length
    firsts: np.ndarray  # [rows + 1], the first pair of each row; the last one is the number of pairs

    def __len__(self) -> int:
        return len(self.firsts) - 1

    def read(self, indices: Sequence[int] | np.ndarray) -> dict[str, np.ndarray]:
        """int32 tokens, targets, segment_ids and positions [len(indices), seq], and source_tokens, source_segment_ids
        and source_positions [len(indices), source_seq].

        tokens: those of each text after the start token, without the last one. targets: all of them, -1 for padding.
        segment_ids: the number of a pair in its row, from 1 on; 0 for padding. An index of -1 gives a row of padding.
        """
        widths = {"": self.seq, "source_": self.source_seq}
        fields = {
            f"{prefix}{name}": np.zeros((len(indices), width), np.int32)
            for prefix, width in widths.items()
            for name in ("tokens", "segment_ids", "positions")
        }
        fields["targets"] = np.full((len(indices), self.seq), -1, np.int32)
        filled_rows = [row for row, index in enumerate(indices) if index >= 0]
        starts_of = [self.starts[self.firsts[indices[i]] : self.firsts[indices[i] + 1] + 1] for i in filled_rows]
        found = self.stream.read([(int(starts[0]), int(starts[-1])) for starts in starts_of])
        for row, starts, tokens in zip(filled_rows, starts_of, found, strict=True):
            filled = dict.fromkeys(widths, 0)
            for segment, marked in enumerate(np.split(tokens, starts[1:-1] - starts[0]), 1):
                ids, is_text = (marked & ~_BITS).astype(np.int32), (marked & TARGET) > 0
                for prefix, own in (("source_", ids[~is_text]), ("", ids[is_text])):
                    at = slice(filled[prefix], filled[prefix] + len(own))
                    fields[f"{prefix}segment_ids"][row, at] = segment
                    fields[f"{prefix}positions"][row, at] = np.arange(len(own))
                    if prefix:
                        fields["source_tokens"][row, at] = own
                    else:
                        fields["targets"][row, at] = own
                        fields["tokens"][row, at] = np.concatenate([[self.start_token], own[:-1]])
                    filled[prefix] = at.stop
        return fields


def rows(stream: Stream, config: Config) -> PairRows:
    """The rows of the tokens of pairs, in their order: each holds as many as it has room for."""
    assert config.model.encoder
    starts, of_text = np.concatenate([np.zeros((1, 2), np.int64), np.cumsum(stream.record_sizes(), axis=0)]).T
    of_source = starts - of_text
    firsts = [0]
    while firsts[-1] < len(starts) - 1:
        first = firsts[-1]
        room = (of_text, config.data.seq), (of_source, config.source_seq)
        held = min(int(np.searchsorted(ends, ends[first] + size, side="right")) - 1 for ends, size in room)
        firsts.append(max(held, first + 1))
    start_token = config.model.encoder.start_token
    return PairRows(stream, config.data.seq, config.source_seq, start_token, starts, np.asarray(firsts))


def random(count: int, config: Config, seed: Sequence[int]) -> PairRows:
    """Rows of one pair each, of independent tokens that are drawn uniformly from the vocabulary."""
    width = config.source_seq + config.data.seq
    tokens = np.random.default_rng(seed).integers(0, config.model.vocab, (count, width), np.uint32)
    tokens[:, config.source_seq :] |= TARGET
    tokens[:, -1] |= LAST
    return rows(InMemory(tokens.ravel()), config)
