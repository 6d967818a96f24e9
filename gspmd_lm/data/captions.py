"""Images with texts, from tables that name the files of images or hold them, and rows with one of both in each."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from gspmd_lm.config import Config
from gspmd_lm.config import data as config_data
from gspmd_lm.data import corpus, images, labelled, media, trained
from gspmd_lm.data.remote import Progress
from gspmd_lm.data.tokenizer import Tokenizer, load_tokenizer

_NAMES = ("tokens", "segment_ids", "positions")


class Caption(NamedTuple):
    """An image that is not decoded yet, and the tokens of its text."""

    encoded: media.Encoded
    text: np.ndarray  # int32, with the special tokens of the tokenizer's template, or of a text that is predicted
    cut: bool  # whether tokens of the text were left out


@dataclasses.dataclass(frozen=True, eq=False)
class CaptionRows:
    """Rows with one text and its image in each. The image is decoded when it is read."""

    captions: Sequence[Caption]
    config: Config

    def __len__(self) -> int:
        return len(self.captions)

    @property
    def seq(self) -> int:
        return self.config.data.seq

    @property
    def targets(self) -> int:
        queries = self.config.model.of_queries
        return sum(len(one.text) - 1 for one in self.captions) if queries else len(self.captions)

    def read(self, indices: Sequence[int] | np.ndarray) -> dict[str, np.ndarray]:
        """int32 tokens, segment_ids and positions [len(indices), seq], and the float32 patches of `images.ImageRows`.

        segment_ids: 1, and 0 for padding. Where queries read images also targets [len(indices), seq], -1 where there is
        none, and what an encoder reads, as `pairs.PairRows` has it. An index of -1 gives a row of padding. Raises an
        InputError that names an image that cannot be decoded.
        """
        config, vision, rows = self.config, self.config.model.vision, len(indices)
        assert vision
        queries, encoder, cut = vision.queries, config.model.encoder, vision.patches
        ahead = (queries.token,) * queries.rows if queries else ()
        patches = np.zeros((rows, config.image_rows, cut.pixels), np.float32)
        fields = {name: np.zeros((rows, self.seq), np.int32) for name in _NAMES}
        fields |= {f"source_{name}": np.zeros((rows, config.source_seq), np.int32) for name in _NAMES if encoder}
        fields |= {"targets": np.full((rows, self.seq), -1, np.int32)} if queries else {}

        def fill(i: int, prefix: str, ids: Sequence[int] | np.ndarray) -> None:
            for name, values in zip(_NAMES, (ids, 1, np.arange(len(ids))), strict=True):
                fields[f"{prefix}{name}"][i, : len(ids)] = values

        def put(i: int, caption: Caption) -> None:
            found = images.cut(images.pixels(caption.encoded, cut, config.data.images), cut)
            patches[i, cut.first : cut.rows] = found
            if queries and encoder:
                fill(i, "source_", [*ahead, queries.start_token])
            before = () if encoder else ahead
            fill(i, "", [*before, *(caption.text[:-1] if queries else caption.text)])
            if queries:
                fields["targets"][i, len(before) : len(before) + len(caption.text) - 1] = caption.text[1:]

        media.at_once(put, [(i, self.captions[index]) for i, index in enumerate(indices) if index >= 0])
        return fields | {"patches": patches}


def open_captions(config: Config, progress: Progress | None = None) -> media.Opened:
    """The images and texts of `data.source` and of `data.held_out`, a share of which is chosen by content.

    Raises an InputError that names the place of what is no image, or has no text.
    """
    images.needs_pillow()
    data, vision, notes = config.data, config.model.vision, corpus.FileNotes()
    assert vision
    tokens = load_tokenizer(data.tokenizer)
    trained.check_vocabulary(config, tokens.vocab_size)
    encode = _encoding(config, tokens)
    every = list(_found(config, encode, data.sources, "data.source", notes, progress))
    named = list(_found(config, encode, data.held_out_sources, "data.held_out", notes, progress))
    split = train, held_out = media.apart(data, every, named, "images")
    settings = vision.patches, data.images, data.seq, config.source_seq, tokens.fingerprint
    settings += (vision.queries, config.model.encoder) * (vision.queries is not None)
    rows = functools.partial(CaptionRows, config=config)
    cut = sum(caption.cut for caption in (*train, *held_out))
    lines = [
        f"texts cut to data.seq={data.seq:,} tokens: {cut:,}" * (cut > 0),
        media.left_out(data, every, train, "images"), str(notes),
    ]  # fmt: skip
    return media.opened(data, "images with texts", rows, split, settings, lambda caption: caption.text.tobytes(), lines)


def _encoding(config: Config, tokens: Tokenizer) -> Callable[[str], tuple[list[int], bool]]:
    """What gives the tokens of a text, and whether some were left out."""
    queries, encoder = config.model.vision and config.model.vision.queries, config.model.encoder
    if not queries:
        made = labelled.cutting(tokens, "seq", config.data.seq)

        def whole(text: str) -> tuple[list[int], bool]:
            encoding = made.encode(text)
            return encoding.ids, bool(encoding.overflowing)

        return whole
    start, before = (encoder.start_token, 0) if encoder else (queries.start_token, queries.rows)
    most = config.data.seq - before + 1

    def predicted(text: str) -> tuple[list[int], bool]:
        ids = [start, *tokens.encode(text.encode()).tolist(), tokens.end]
        return ids[:most], len(ids) > most

    return predicted


def _found(
    config: Config, encode: Callable[[str], tuple[list[int], bool]], sources: Sequence[config_data.Source], place: str,
    notes: corpus.FileNotes, progress: Progress | None,
) -> Iterator[Caption]:  # fmt: skip
    """The records of tables, in their order. The headers of their images are read."""
    found = media.records(config.data, sources, place, images.ENDINGS, "images", notes, progress)
    for table, where, record in found:
        name, text_name = config.data.fields
        where, held, path = media.content_of(table, where, record, name, "image")
        images.check(where, held)
        text, _ = labelled.valid(labelled.text_of(record, text_name, where))
        ids, was_cut = encode(text)
        yield Caption(media.Encoded.of(where, held, path), np.asarray(ids, np.int32), was_cut)
