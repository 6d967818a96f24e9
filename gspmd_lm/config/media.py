"""Images and sounds in place of texts: how images are cut into patches and prepared, and how sounds become frames."""

from typing import Literal

from pydantic.dataclasses import dataclass

from gspmd_lm.config.types import STRICT, Count, Positive, Size

WINDOW = 5  # frames of sound that one row of the encoder hears


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Patches:
    """The patches of square images (ViT, arXiv 2010.11929)."""

    image: Size  # pixels on a side of an image
    size: Size  # pixels on a side of a patch
    channels: Size = 3  # 3: red, green and blue; 1: grey
    class_row: bool = True  # whether a learned row stands before the patches (Swin: not)
    # row: a second learned row follows the first one (DeiT, arXiv 2012.12877). head: it is scored by a classifier of
    # its own, and an image's scores are the mean of both.
    distillation: Literal["none", "row", "head"] = "none"
    # Where the class is read: at the first row, or at the mean of all patches, which goes through a norm (BEiT) unless
    # there is a final_norm, or at both, side by side (DINOv2).
    pool: Literal["first", "mean", "both"] = "first"
    bias: bool = True  # whether the projection of patches has a bias (CLIP: not)

    def __post_init__(self):
        if self.image % self.size:
            raise ValueError(f"image={self.image} is not a multiple of size={self.size}")
        if self.pool != "first" and self.distillation == "head":
            raise ValueError(f"pool: {self.pool} does not go with distillation: head, which is read at a row")
        if not self.class_row and (self.pool != "mean" or self.distillation != "none"):
            raise ValueError("class_row: false needs pool: mean and distillation: none, which read no row")

    @property
    def first(self) -> int:
        """The learned rows, which stand before the patches."""
        return self.class_row + (self.distillation != "none")

    @property
    def rows(self) -> int:
        """All rows of an image."""
        return self.first + self.side**2

    @property
    def side(self) -> int:
        """Patches on a side of an image."""
        return self.image // self.size

    @property
    def pixels(self) -> int:
        """The numbers of a patch."""
        return self.channels * self.size**2


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Images:
    """How the pixels of files become the numbers of patches, as the preprocessor_config.json of a model says it."""

    resize: Count = 0  # both sides get so many pixels, of which the middle is cut out; 0 means model.patches.image
    # Whether the shorter side gets so many pixels, and the longer one as many as keep the ratio (CLIP).
    keep_ratio: bool = False
    # Whether the longer side gets as many pixels as the model sees, and zeros stand to the right or below (SAM).
    pad: bool = False
    resample: Literal["bilinear", "bicubic"] = "bilinear"  # how Pillow resizes
    # What is subtracted from pixels, which are from 0 to 1: a number for each channel, or one for all.
    mean: tuple[float, ...] = (0.5,)
    std: tuple[Positive, ...] = (0.5,)  # what the rest is divided by, likewise

    def __post_init__(self):
        if self.pad and (self.resize or self.keep_ratio):
            raise ValueError("pad: true does not go with resize and keep_ratio, which cut out the middle of an image")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Frames:
    """Frames of sound, 100 of each second (Whisper, arXiv 2212.04356). Each has numbers of bands on the mel scale.

    Two convolutions over 3 frames, the second of which takes every other one, make the rows of the encoder. So there
    are 50 rows of each second, and encoder.context says how long sounds are.
    """

    bands: Size = 80  # numbers of a frame
