"""Images, cut into patches: with labels, in folders named after classes or in tables, or with texts, in tables."""

import contextlib
import dataclasses
import functools
import io
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gspmd_lm import files
from gspmd_lm.config import Config, Data
from gspmd_lm.config import data as config_data
from gspmd_lm.config.media import Images, Patches
from gspmd_lm.data import corpus, encodings, labelled, media, trained
from gspmd_lm.data.remote import Progress
from gspmd_lm.data.tokenizer import Tokenizer, load_tokenizer
from gspmd_lm.errors import InputError

ENDINGS = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
_MODES = {1: "L", 3: "RGB", 4: "RGBA"}  # Pillow's names of pixels with so many channels
_ORIENTATION, _ON_ITS_SIDE = 0x0112, (5, 6, 7, 8)  # EXIF's number of how the camera was held, and values that turn it


@dataclasses.dataclass(frozen=True, eq=False)
class ImageRows(media.Rows):
    """Rows with one image and its class in each."""

    classes: tuple[str, ...]
    patches: Patches
    prepared: Images
    seq: int

    def empty(self, count: int) -> dict[str, np.ndarray]:
        """float32 patches [count, seq, pixels of a patch], and int32 labels [count], -1.

        Patches follow the rows that learned tokens replace; all other rows are zero.
        """
        patches = np.zeros((count, self.seq, self.patches.pixels), np.float32)
        return {"patches": patches, "labels": np.full(count, -1, np.int32)}

    def fill(self, fields: dict[str, np.ndarray], i: int, item: media.Item) -> None:
        found = cut(pixels(item.encoded, self.patches, self.prepared), self.patches)
        fields["patches"][i, self.patches.first : self.patches.rows] = found
        fields["labels"][i] = self.classes.index(item.label)


def open_images(config: Config, progress: Progress | None = None, known: Sequence[str] = ()) -> media.Opened:
    """The images of `data.source` and of `data.held_out`, a share of which is chosen by content. `known`: see
    `loader.open_loaders`.

    Raises InputError if there are none, if a file is no image, or if their labels are not those of the model.
    """
    needs_pillow()
    data, patches = config.data, config.model.patches
    assert patches
    if data.fields:
        found = media.read_tables(data, ENDINGS, "images", functools.partial(_labelled_image, data), progress)
    else:
        found = media.find_both(data, functools.partial(_find_in_folders, progress))
    classes = labelled.order_classes({image.label for image in found.train}, known)
    if len(classes) != config.model.num_classes:
        raise InputError(
            f"data.source: images of {len(classes):,} classes, and model.classes.count is {config.model.num_classes:,} "
            f"({labelled.about_classes(classes)})\n"
            f"  fix   --set model.classes.count={len(classes)}, or correct the labels"
        )
    for image in found.held_out:
        labelled.check_class(image.label, classes, f"{image.encoded.place}: the class")
    rows = functools.partial(ImageRows, classes=classes, patches=patches, prepared=data.images, seq=data.seq)
    settings, lines = (patches, data.images, data.seq, classes), [labelled.about_classes(classes)]
    return media.open_rows(data, "images", "images", rows, found, settings, lines, classes)


def pixels(encoded: media.Encoded, patches: Patches, prepared: Images) -> np.ndarray:
    """The numbers of an image that the model sees, float32 [height, width, channels].

    Pillow resizes it, its middle is cut out, and its channels are normalised, in the order of transformers' processors.
    """
    from PIL import Image, ImageOps

    kind = _MODES.get(patches.channels)
    if kind is None:
        raise InputError(
            f"model.patches.channels={patches.channels}: files have images of {', '.join(map(str, _MODES))} channels\n"
            "  fix   set it to one of these, or train with data=batch"
        )
    with reading(encoded.place):
        turned = ImageOps.exif_transpose(Image.open(io.BytesIO(encoded.read())))  # as the camera was held
        resample = Image.Resampling[prepared.resample.upper()]
        width, height, left, top = fit_image(turned.size, patches, prepared)
        sized = np.asarray(turned.convert(kind).resize((width, height), resample), np.float32)
    sized = sized.reshape(height, width, patches.channels)
    middle = sized[top : top + patches.image, left : left + patches.image]
    mean, std = np.asarray(prepared.mean, np.float32), np.asarray(prepared.std, np.float32)
    normal = (middle / np.float32(255) - mean) / std
    beyond = [(0, patches.image - size) for size in normal.shape[:2]]
    return np.pad(normal, (*beyond, (0, 0)))


def fit_image(size: tuple[int, int], patches: Patches, prepared: Images) -> tuple[int, int, int, int]:
    """The width and height to which an image of this size is resized, and from the left and top how much is cut off."""
    width = height = side = prepared.resize or patches.image
    if prepared.keep_ratio:
        shorter = min(size)
        width, height = (side if one == shorter else int(side * one / shorter) for one in size)
    elif prepared.pad:
        width, height = (max(int(side * one / max(size) + 0.5), 1) for one in size)
        return width, height, 0, 0
    return width, height, (width - patches.image) // 2, (height - patches.image) // 2


def cut(image_HWC: np.ndarray, patches: Patches) -> np.ndarray:
    """The patches of an image, [patches, channels * size * size], row by row from the top left one."""
    count, size = patches.image // patches.size, patches.size
    apart = image_HWC.reshape(count, size, count, size, patches.channels)
    return apart.transpose(0, 2, 4, 1, 3).reshape(count * count, patches.pixels)


def read_image_rows(name: str, patches: Patches, prepared: Images) -> np.ndarray:
    """The rows of the image that a file holds, float32 [rows, numbers of a patch]: zeros for learned tokens."""
    needs_pillow()
    content = media.bytes_of(files.expand_user(name))
    check(name, content)
    found = cut(pixels(media.Encoded.of(name, content), patches, prepared), patches)
    return np.pad(found, ((patches.first, 0), (0, 0)))


@contextlib.contextmanager
def reading(place: str) -> Iterator[None]:
    """A context in which what Pillow says of a file becomes an InputError that names its place."""
    from PIL import Image, UnidentifiedImageError

    try:
        yield
    except (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError) as error:
        if isinstance(error, InputError):
            raise
        reason = "its format is unknown" if isinstance(error, UnidentifiedImageError) else error
        raise InputError(
            f"{place}: cannot be read as an image ({reason})\n  fix   make it whole, or leave it out"
        ) from error


def check(place: str, encoded: bytes) -> tuple[int, int]:
    """The width and height of an image as it is turned, from its header. Raises an InputError that begins with `place`
    if it is none, or not of 8 bits.
    """
    from PIL import Image

    with reading(place):
        image = Image.open(io.BytesIO(encoded))
        turned = "exif" in image.info and image.getexif().get(_ORIENTATION, 1) in _ON_ITS_SIDE
    if image.mode[0] in "IF":
        raise InputError(f"{place}: has pixels of mode {image.mode}\n  fix   save it with 8 bits for each channel")
    width, height = image.size
    return (height, width) if turned else (width, height)


def _labelled_image(data: Data, table: Path, where: str, record: dict[str, Any]) -> media.Item:
    """The image of a record, whose header is read, and its label."""
    encoded, content = media.content_of(table, where, record, data.fields[0], "image")
    label = str(labelled.label_of(data, record, where))
    check(encoded.place, content)
    return media.Item(encoded, label)


def _find_in_folders(
    progress: Progress | None, notes: corpus.FileNotes, sources: Sequence[config_data.Source], place: str
) -> Iterator[media.Item]:
    """The images of folders, in the order of the sources and of the names in them. Their headers are read."""
    for one in sources:
        if one.weight:
            raise InputError(f"{place}: {one.path}: images have no weights\n  fix   drop the weight")
        name = files.expand_user(one.path)
        if not os.path.isdir(name):
            raise InputError(
                f"{place}: {one.path}: no folder\n  fix   name a folder with one folder of images for each class, or "
                "tables, with data.fields=[image] and data.label=label"
            )
        for number, image in enumerate(_find_in_folder(name, place, notes), 1):
            if progress and number % media.NOTED == 0:
                progress(f"reading images of {one.path}", 0, 0)
            yield image


def _find_in_folder(folder: Path, place: str, notes: corpus.FileNotes) -> Iterator[media.Item]:
    """The images below a folder. Their class is the folder right below it that they lie in."""
    count = 0
    for at, below, names in os.walk(folder, followlinks=True):
        below[:] = sorted(name for name in below if not name.startswith("."))
        for path in (Path(at, name) for name in sorted(names) if not name.startswith(".")):
            if path.suffix.lower() not in ENDINGS:
                notes.skip("no ending of an image", path)
                continue
            inside = path.relative_to(folder).parts
            if len(inside) < 2:
                raise InputError(
                    f"{path}: lies in no folder of a class\n  fix   move it to {folder}/CLASS, or name the folder "
                    f"above {folder}"
                )
            count += 1
            content = media.bytes_of(path)
            check(str(path), content)
            yield media.Item(media.Encoded.of(str(path), content, path), inside[0])
    if not count:
        raise InputError(f"{place}: {folder}: no images\n  fix   give files that end in {' '.join(ENDINGS)}")


def needs_pillow() -> None:
    """Raises InputError where Pillow is not installed."""
    try:
        import PIL  # noqa: F401
    except ImportError as error:
        raise InputError(
            "images are decoded by Pillow, which is not installed\n  fix   pip install 'gspmd_lm[vision]'"
        ) from error


# Images with texts


_NAMES = ("tokens", "segment_ids", "positions")


@dataclasses.dataclass(frozen=True, eq=False)
class CaptionRows(media.Rows):
    """Rows with one text and its image in each."""

    config: Config

    def empty(self, count: int) -> dict[str, np.ndarray]:
        """int32 tokens, segment_ids (1, and 0 for padding) and positions [count, seq], and the float32 patches of
        `ImageRows`.

        Where queries read images also targets [count, seq], -1 where there is none, and what an encoder reads, as
        `pairs.PairRows` has it.
        """
        config, vision = self.config, self.config.model.vision
        assert vision
        widths = {"": config.data.seq} | ({"source_": config.source_seq} if config.model.encoder else {})
        fields = {
            f"{prefix}{name}": np.zeros((count, width), np.int32) for prefix, width in widths.items() for name in _NAMES
        }
        fields |= {"targets": np.full((count, config.data.seq), -1, np.int32)} if vision.queries else {}
        return fields | {"patches": np.zeros((count, config.image_rows, vision.patches.pixels), np.float32)}

    def fill(self, fields: dict[str, np.ndarray], i: int, item: media.Item) -> None:
        config, vision = self.config, self.config.model.vision
        assert vision
        queries, encoder, sizes = vision.queries, config.model.encoder, vision.patches
        ahead = (queries.token,) * queries.rows if queries else ()
        found = cut(pixels(item.encoded, sizes, config.data.images), sizes)
        fields["patches"][i, sizes.first : sizes.rows] = found

        def put(prefix: str, ids: Sequence[int] | np.ndarray) -> None:
            for name, values in zip(_NAMES, (ids, 1, np.arange(len(ids))), strict=True):
                fields[f"{prefix}{name}"][i, : len(ids)] = values

        if queries and encoder:
            put("source_", [*ahead, queries.start_token])
        before = () if encoder else ahead
        put("", [*before, *(item.text[:-1] if queries else item.text)])
        if queries:
            fields["targets"][i, len(before) : len(before) + len(item.text) - 1] = item.text[1:]


def open_captions(config: Config, progress: Progress | None = None) -> media.Opened:
    """The images and texts of `data.source` and of `data.held_out`, a share of which is chosen by content.

    Raises an InputError that names the place of what is no image, or has no text.
    """
    needs_pillow()
    data, vision = config.data, config.model.vision
    assert vision
    tokens = load_tokenizer(data.tokenizer)
    trained.check_vocabulary(config, tokens.vocab_size)
    encode = _encoding(config, tokens)

    def caption(table: Path, where: str, record: dict[str, Any]) -> media.Item:
        name, text_name = data.fields
        encoded, content = media.content_of(table, where, record, name, "image")
        check(encoded.place, content)
        text, _ = labelled.valid(labelled.text_of(record, text_name, encoded.place))
        ids, was_cut = encode(text)
        return media.Item(encoded, text=np.asarray(ids, np.int32), cut=was_cut)

    found = media.read_tables(data, ENDINGS, "images", caption, progress)
    settings = vision.patches, data.images, data.seq, config.source_seq, tokens.fingerprint
    settings += (vision.queries, config.model.encoder) * (vision.queries is not None)
    rows = functools.partial(CaptionRows, config=config)
    return media.open_rows(data, "images", "images with texts", rows, found, settings)


def _encoding(config: Config, tokens: Tokenizer) -> Callable[[str], tuple[list[int], bool]]:
    """A function from a text to its tokens, and whether some were left out."""
    queries, encoder = config.model.vision and config.model.vision.queries, config.model.encoder
    if not queries:
        made = labelled.cutting(tokens, "seq", config.data.seq)

        def whole(text: str) -> tuple[list[int], bool]:
            (encoding,) = encodings.encode_texts(made.encode_batch_fast, [text], "data.tokenizer")
            return encoding.ids, bool(encoding.overflowing)

        return whole
    start, before = (encoder.start_token, 0) if encoder else (queries.start_token, queries.rows)
    most = config.data.seq - before + 1

    def predict(text: str) -> tuple[list[int], bool]:
        ids = [start, *tokens.encode(text.encode()).tolist(), tokens.end]
        return ids[:most], len(ids) > most

    return predict
