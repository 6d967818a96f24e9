"""The section `model.masks` of a config: the decoder of the mask of the object that a prompt means."""

from typing import Annotated, Any

import pydantic
from pydantic.dataclasses import dataclass

from gspmd_lm.config.types import STRICT, Size
from gspmd_lm.config.values import with_values

PARTS = 4  # pixels of a mask on each side of a patch
POINTS = 2  # of a prompt in a row of training: a point and none, or the corners of a box


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Masks:
    """A neck behind the blocks that see an image, and a decoder of masks (Segment Anything, arXiv 2304.02643).

    The tokens of a prompt, and one for each mask, attend to each other and to the image, and the image to them. A mask
    has 4 x 4 pixels for each patch.
    """

    embed: Annotated[Size, pydantic.Field(multiple_of=8)] = 256  # the width of the image behind the neck, and of tokens
    layers: Size = 2  # how many layers tokens and image go through
    heads: Size = 8  # of attention
    mlp: Size = 2048  # the hidden width of the feed-forward network of tokens
    narrowing: Size = 2  # attention between tokens and image has embed / narrowing numbers for all heads
    # Masks for a prompt that may mean several objects, such as a part and its whole. One more is for a prompt that
    # means one.
    several: Size = 3

    @property
    def count(self) -> int:
        """How many masks are drawn."""
        return 1 + self.several

    def of(self, model: Any) -> Any:
        """The settings of the decoder as those of a stack of blocks, from those of the stack that sees the image."""
        own = {"masks": None, "patches": None, "windows": None, "layer_pattern": (), "positions": "none",
               "attention.mask": "full", "context": 1, "vocab": 1, "feed_forward.activation": "relu",
               "feed_forward.kind": "plain", "norm.eps": 1e-6, "dropout": 0.0, "layers": self.layers,
               "embed": self.embed, "heads": self.heads, "kv_heads": self.heads,
               "head_dim": self.embed // self.narrowing // self.heads, "mlp": self.mlp, "classes.count": self.count,
               "attention.scale": 0.0, "attention.softcap": 0.0}  # fmt: skip
        return with_values(model, own)

    def problems(self, model: Any) -> list[str]:
        """What of a model does not fit masks."""
        narrow = self.embed / self.narrowing / self.heads
        if narrow % 1 or self.embed % self.heads:
            said = f"masks.embed={self.embed} / narrowing={self.narrowing}"
            return [f"{said} does not divide over heads={self.heads}"]
        return []
