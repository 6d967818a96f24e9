"""A process that tokenizes parts of a source while a run trains, chunk by chunk, as it is asked to.

Requests come on stdin and chunks go to stdout, both pickled. It ends when stdin does.
"""

import dataclasses
import os
import pickle
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from gspmd_lm.data import making
from gspmd_lm.data.making import Unit
from gspmd_lm.data.readers import Section
from gspmd_lm.data.sources import DocumentSource, SourcePart
from gspmd_lm.data.tokenizer import Tokenizer, load_tokenizer
from gspmd_lm.errors import InputError, RunFailed

NICE = 5  # training goes first


@dataclasses.dataclass(frozen=True)
class Work:
    """What a process is told once: the source in units, and what makes tokens of it."""

    source: DocumentSource
    units: tuple[Unit, ...]
    tokenizer: str
    apart: np.ndarray  # ascending hashes of the documents that are not for training
    chunk_bytes: int  # of documents in a chunk, at least


class Request(NamedTuple):
    """The chunk of a unit that is wanted. Each lane reads its units from the beginning on."""

    lane: int
    unit: int
    chunk: int


class Chunk(NamedTuple):
    """The tokens of some documents after one another, of which the first may have begun in the chunk before."""

    tokens: np.ndarray  # uint16 where the vocabulary allows it, or uint32
    is_last: bool  # of its unit
    taken_s: float
    replaced_bytes: int  # for which the tokenizer has no token
    notes: str  # lines about files of the unit that were skipped or are odd, once all of it is read


def chunks(work: Work, encoder: Tokenizer, unit: Unit, skipped: int) -> Iterator[Chunk]:
    """The chunks of a unit, without the first `skipped` ones, which are read and not tokenized."""
    notes = work.source.notes_of_read
    if notes:
        notes.files.clear()
    began, is_open = time.perf_counter(), False  # whether a text is begun, whose next sections are to come
    documents_of_unit = work.source.read(SourcePart("", unit.files))
    batches = making.read_ahead(making.batches(documents_of_unit, unit.size_bytes, work.chunk_bytes))
    for number, (documents, _, is_last) in enumerate(batches):
        if number < skipped:
            is_open = bool(documents) and isinstance(last := documents[-1][0], Section) and last.goes_on
            continue
        if number == 0:
            is_open = bool(documents) and isinstance(first := documents[0][0], Section) and first.resumes
        before = encoder.replaced_bytes
        texts = [making.split_texts(document, encoder) for document, _ in documents]
        encoded = iter(making.encode_documents(encoder, [text for each in texts for text in each]))
        made: list[Any] = [[]]
        for (document, hashed), each in zip(documents, texts, strict=True):
            is_left_out = making.contains(work.apart, hashed)
            for at, text in enumerate(each, 1):
                ids = next(encoded)
                if not is_left_out and (text.strip() or len(each) == 1):
                    made += [[] if is_open else encoder.before, ids]
                    is_open = True
                if is_open and (at < len(each) or not (isinstance(document, Section) and document.goes_on)):
                    made.append([*encoder.after, encoder.end])
                    is_open = False
        dtype = np.uint16 if encoder.vocab_size <= 1 << 16 else np.uint32
        tokens = np.concatenate([np.asarray(one, dtype) for one in made])
        replaced = encoder.replaced_bytes - before
        said = str(notes) if notes and is_last else ""
        yield Chunk(tokens, is_last, time.perf_counter() - began, replaced, said)
        began = time.perf_counter()


class Answers:
    """The chunks that are asked for. Each lane is read on from where it is, as long as its requests are in order."""

    def __init__(self, work: Work):
        self.work, self.encoder = work, load_tokenizer(work.tokenizer)
        self._reading: dict[int, tuple[int, int, Iterator[Chunk]]] = {}  # of each lane the unit and the next chunk

    def find(self, request: Request) -> Chunk:
        """The chunk. Raises InputError if its texts cannot be read."""
        unit, number, found = self._reading.get(request.lane, (-1, -1, iter(())))
        if (unit, number) != (request.unit, request.chunk):
            found = chunks(self.work, self.encoder, self.work.units[request.unit], request.chunk)
        chunk = next(found)
        self._reading[request.lane] = request.unit, request.chunk + 1, found
        return chunk


def main() -> None:
    """Answers requests until there are no more."""
    requests, out = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    os.nice(NICE)
    answers = Answers(pickle.load(requests))
    while True:
        try:
            request = pickle.load(requests)
        except EOFError:
            return
        answer: Chunk | Exception
        try:
            answer = answers.find(request)
        except (InputError, RunFailed) as error:
            answer = error
        try:
            pickle.dump(answer, out, protocol=pickle.HIGHEST_PROTOCOL)
            out.flush()
        except BrokenPipeError:  # nobody waits for it any longer
            os._exit(0)
