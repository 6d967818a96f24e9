"""Images with the mask of an object and a prompt that means it, from tables, and rows with one object in each."""

import dataclasses
import functools
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gspmd_lm.config import Config
from gspmd_lm.config.masks import PARTS, POINTS
from gspmd_lm.config.media import Images, Patches
from gspmd_lm.data import images, media, sounds
from gspmd_lm.data.remote import Progress
from gspmd_lm.errors import InputError

_OF_OBJECT, _NONE, _CORNERS = 1, -1, (2, 3)  # kinds of points, as the model has them


@dataclasses.dataclass(frozen=True, eq=False)
class ObjectRows(media.Rows):
    """Rows with one object in each, whose image and mask are decoded when it is read."""

    patches: Patches
    prepared: Images
    seq: int
    prompt: str  # the kind of prompt that a mask gives where a record has none: point or box

    def empty(self, count: int) -> dict[str, np.ndarray]:
        """Rows without an object. `model/families/sam.py` says what the arrays are."""
        return {
            "patches": np.zeros((count, self.seq, self.patches.pixels), np.float32),
            "object": np.full((count, self.seq, PARTS**2), -1, np.float32),
            "points": np.zeros((count, POINTS, 2), np.float32),
            "point_kinds": np.full((count, POINTS), _NONE, np.int32),
        }

    def fill(self, fields: dict[str, np.ndarray], i: int, item: media.Item) -> None:
        """Also raises an InputError that names a mask without an object."""
        found, count = images.pixels(item.encoded, self.patches, self.prepared), self.patches.rows
        fields["patches"][i, :count] = images.cut(found, self.patches)
        assert item.mask
        mask = decode_mask(item.mask)
        fields["object"][i, :count] = self._cut(mask)
        prompt = item.prompt or draw_prompt(mask, item.mask.sha256, self.prompt)
        is_box = len(prompt) == 2 * POINTS
        fields["point_kinds"][i] = _CORNERS if is_box else (_OF_OBJECT, _NONE)
        points = np.reshape(prompt, (-1, 2))
        of_mask = mask.shape[::-1]
        size = images.fit_image(of_mask, self.patches, self.prepared)[:2]
        seen = points * np.divide(size, of_mask) + 0.5  # the middle of a pixel, as transformers has it
        fields["points"][i, : len(points)] = seen / self.patches.image

    def _cut(self, mask: np.ndarray) -> np.ndarray:
        """[patches, 16]: the pixels of each patch of the image as the model sees it, -1 for those beyond the image.

        A pixel is of the object if at least half of what it covers is.
        """
        from PIL import Image

        fine = dataclasses.replace(self.patches, image=PARTS * self.patches.side, size=PARTS, channels=1)
        size = images.fit_image(mask.shape[::-1], self.patches, self.prepared)[:2]
        width, height = (max(round(one * fine.image / self.patches.image), 1) for one in size)
        sized = Image.fromarray(255 * mask.astype(np.uint8)).resize((width, height), Image.Resampling.BOX)
        beyond = (0, fine.image - height), (0, fine.image - width)
        return images.cut(np.pad((np.asarray(sized) >= 128).astype(np.int32), beyond, constant_values=-1), fine)


def decode_mask(mask: media.Encoded) -> np.ndarray:
    """Which pixels are of the object, bool [height, width]: those that are not black. Raises InputError for none."""
    from PIL import Image, ImageOps

    with images.reading(mask.place):
        pixels = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(mask.read()))).convert("L")) > 0
    if not pixels.any():
        raise InputError(f"{mask.place}: all of the mask is black: there is no object\n  fix   leave the record out")
    return pixels


def draw_prompt(mask: np.ndarray, seed: bytes, kind: str) -> tuple[float, ...]:
    """A prompt that a mask gives: x and y of one of its pixels, always the same one, or the box around it."""
    y, x = np.nonzero(mask)
    if kind == "box":
        return float(x.min()), float(y.min()), float(x.max()), float(y.max())
    chosen = np.random.default_rng(list(seed)).integers(len(x))
    return float(x[chosen]), float(y[chosen])


def open_media(config: Config, progress: Progress | None = None, known: Sequence[str] = ()) -> media.Opened | None:
    """Images with labels, with texts or with masks, or sounds with texts; None for a model of texts alone. `known`: see
    `loader.open_loaders`. Raises InputError where the source does not hold them.
    """
    model = config.model
    if config.objective == "masks":
        return open_objects(config, progress)
    if model.patches:
        return images.open_images(config, progress, known)
    if model.vision:
        return images.open_captions(config, progress)
    return sounds.open_sounds(config, progress) if model.frames else None


def open_objects(config: Config, progress: Progress | None = None) -> media.Opened:
    """The objects of `data.source` and of `data.held_out`, a share of which is chosen by the content of images.

    Raises an InputError that names the place of what is no image, of a mask that does not fit, or of a wrong prompt.
    """
    images.needs_pillow()
    data, patches = config.data, config.model.patches
    assert patches
    if not data.fields:
        raise InputError(
            "data.fields: records have an image, the mask of an object, and maybe a prompt\n"
            "  fix   --set data.fields=[image, mask], or [image, mask, prompt], with the data's own names"
        )
    found = media.read_tables(data, images.ENDINGS, "images", functools.partial(_object, data.fields), progress)
    rows = functools.partial(ObjectRows, patches=patches, prepared=data.images, seq=data.seq, prompt=data.prompt)
    settings = patches, data.images, data.seq, data.prompt
    return media.open_rows(data, "images", "objects in images", rows, found, settings)


def _object(fields: Sequence[str], table: Path, where: str, record: dict[str, Any]) -> media.Item:
    """The image of a record, the mask of an object in it, and its prompt. The headers of both files are read."""
    both, sizes = [], []
    for name, what in zip(fields, ("image", "mask"), strict=False):
        encoded, content = media.content_of(table, where, record, name, what)
        sizes.append(images.check(encoded.place, content))
        both.append(encoded)
    image, mask = both
    if sizes[0] != sizes[1]:
        of_image, of_mask = (" x ".join(map(str, size)) for size in sizes)
        raise InputError(
            f"{mask.place}: the mask has {of_mask} pixels, and its image {of_image}\n"
            "  fix   give a mask of the size of its image"
        )
    prompt = _prompt(record, fields[2], sizes[0], where) if len(fields) > 2 else ()
    return media.Item(image, mask=mask, prompt=prompt)


def _prompt(record: dict[str, Any], name: str, size: tuple[int, int], where: str) -> tuple[float, ...]:
    """The prompt of a record. Raises InputError if there is none, or if it is not within the image."""
    held = record.get(name)
    numbers = list(held) if isinstance(held, list | tuple | np.ndarray) else []
    if len(numbers) not in (2, 4) or any(isinstance(one, bool) or not isinstance(one, int | float) for one in numbers):
        found = f"is {held!r:.60}" if name in record else f"is not one of {', '.join(record)}"
        raise InputError(
            f"{where}: {name} {found}: there is no prompt\n"
            "  fix   give [x, y] of a point of the object, or [left, top, right, bottom] of a box around it, in pixels"
        )
    width, height = size
    if not all(0 <= x < width for x in numbers[::2]) or not all(0 <= y < height for y in numbers[1::2]):
        raise InputError(
            f"{where}: {name} {numbers} is not within the image of {width} x {height} pixels\n"
            "  fix   give pixels of the image as it is shown, counted from 0 at its top left"
        )
    if len(numbers) == 4 and (numbers[0] > numbers[2] or numbers[1] > numbers[3]):
        raise InputError(f"{where}: {name} {numbers} has no width or height\n  fix   give [left, top, right, bottom]")
    return tuple(map(float, numbers))
