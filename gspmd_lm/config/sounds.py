"""Sounds in place of texts that an encoder reads."""

from pydantic.dataclasses import dataclass

from gspmd_lm.config.types import STRICT, Size

WINDOW = 5  # frames that one row of the encoder hears


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Frames:
    """Frames of sound, 100 of each second (Whisper, arXiv 2212.04356). Each has numbers of bands on the mel scale.

    Two convolutions over 3 frames, the second of which takes every other one, make the rows of the encoder. So there
    are 50 rows of each second, and encoder.context says how long sounds are.
    """

    bands: Size = 80  # numbers of a frame
